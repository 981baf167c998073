"""Checkpoints: safetensors and JSON, written under a temporary name and renamed; and weights in files. Never pickle.

A checkpoint is a folder `checkpoints/<round>` with the server's state and the clients' memory. It has digests of its
own files, of the memory and of the records. A resumed run continues the same bytes, or names the file that changed.

The newest checkpoint says which earlier ones are kept; all others are removed. It is written before they are, so that a
process may be killed at any moment.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor

from fedtide.core import codec
from fedtide.core.atomic import check_sha256, flush, sha256
from fedtide.core.base import Weights
from fedtide.core.errors import UNREADABLE, Damaged, FedtideError, refused, within
from fedtide.core.files import open_file
from fedtide.core.loop import Start
from fedtide.core.memory import MemoryStore
from fedtide.core.record import Mark, check_marks, read_marks

FILES = ("state.safetensors", "memory.safetensors")
ABOUT = "checkpoint.json"
OWN = re.compile("|".join([*map(re.escape, (*FILES, ABOUT)), codec.UNFINISHED]))
"""Names of the files in a checkpoint: the only ones that are removed with it."""

FORMAT = 3
"""The version of what is written and read."""

EARLIER = 50
"""Number of earlier checkpoints whose marks a checkpoint keeps, to tell how far damaged records are whole."""


@dataclass(frozen=True)
class About:
    """Description of a checkpoint, from its `checkpoint.json`.

    Args:
        config: digest of the configuration.
        round: as in `Start`.
        seconds: as in `Start`.
        before: as in `Start`.
        marks: length of each record at the last checkpoints, by round, this one last.
        sha256: digests of its own files.
        device: name of the device that computed; "" if unknown.
        kept: rounds of the best checkpoints, the best first. The newest may be one of them.
        files: digests of the files that the configuration names, by their names, for each place that it names.
    """

    config: str
    round: int
    seconds: float
    before: float
    marks: tuple[tuple[int, Mapping[str, Mark]], ...]
    sha256: Mapping[str, str]
    device: str
    kept: Sequence[int] = ()
    files: Sequence[Mapping[str, str]] = ()

    @property
    def records(self) -> Mapping[str, Mark]:
        """Length and digest of each record when this checkpoint was written."""
        return self.marks[-1][1]

    @property
    def there(self) -> set[int]:
        """Rounds of the checkpoints that there are: those that are kept, and this one."""
        return {*self.kept, self.round}


def save(
    folder: Path,
    start: Start[Any],
    memory: MemoryStore,
    *,
    config: str,
    marks: Mapping[str, Mark],
    device: str = "",
    keep: Sequence[int] = (),
    files: Sequence[Mapping[str, str]] = (),
) -> None:
    """Write the checkpoint for the round that `start` plays next, then remove the older ones that are not kept.

    Args:
        folder: the run's `checkpoints` folder.
        start: state, next round and clock.
        memory: the clients' memory; it is told that its older versions are not needed any more.
        config: digest of the configuration, compared when the checkpoint is read.
        marks: how far each file beside `folder` was written in the rounds before, by its name.
        device: name of the device that computed.
        keep: rounds of checkpoints that stay, the best first; this one may be among them.
        files: digests of the files that the configuration names, which name the one that changes later.
    """
    folder.mkdir(exist_ok=True)  # not the folders above, if a person has moved them
    now = (start.round, 0)
    written = _numbered(folder)
    earlier = _about(written[-1]).marks[-EARLIER:] if written else ()
    temporary = folder / f"writing-{start.round:08d}"
    _remove(temporary)
    temporary.mkdir(exist_ok=True)
    codec.to_file(temporary / "state.safetensors", start.state)
    memory.save(temporary / "memory.safetensors", now)
    digests = {name: sha256(temporary / name) for name in FILES}
    reached = (*(mark for mark in earlier if mark[0] < start.round), (start.round, dict(marks)))
    description = About(
        config, start.round, start.seconds, start.before, reached, digests, device, tuple(keep), tuple(files)
    )
    about = {"format": FORMAT} | asdict(description)
    (temporary / ABOUT).write_text(json.dumps(about | {"sum": _sum(about)}, indent=1) + "\n")
    for path in temporary.iterdir():
        flush(path)
    final = _place(folder, start.round)
    _remove(final)
    temporary.rename(final)
    flush(folder)
    memory.settle(now, _indexes(folder, keep))
    _remove_old(folder, keep)


def _indexes(folder: Path, keep: Iterable[int]) -> list[Path]:
    return [_place(folder, number) / FILES[1] for number in keep]


def _place(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}"


def _remove_old(folder: Path, keep: Collection[int]) -> None:
    *earlier, _ = _numbered(folder)
    for old in [*(path for path in earlier if int(path.name) not in keep), *_numbered(folder, "writing-")]:
        _remove(old)


def _remove(checkpoint: Path) -> None:
    for path in sorted(checkpoint.iterdir()) if checkpoint.is_dir() else ():
        if OWN.fullmatch(path.name):
            path.unlink()
    with contextlib.suppress(OSError):  # there is none, or a person has put more into it
        checkpoint.rmdir()


def _numbered(folder: Path, prefix: str = "") -> list[Path]:
    """Return the checkpoints in a folder, or with a prefix what a killed process left of them, in their order."""
    folders = folder.glob(f"{prefix}[0-9]*") if folder.is_dir() else ()
    return sorted(path for path in folders if re.fullmatch(prefix + "[0-9]{8,}", path.name) and path.is_dir())


def check(folder: Path, *, config: str | None, number: int | None = None) -> About | None:
    """Return the description of the newest checkpoint, or of that of a round; None if there is none yet.

    Args:
        folder: of the checkpoints.
        config: digest of the configuration that it has to belong to; None if that is not known.
        number: round of a checkpoint that is kept; None for the newest.

    Raises:
        FedtideError: it is damaged, or was written by another configuration or an unreadable version.
    """
    written = _numbered(folder) if number is None else [_place(folder, number)]
    if not written:
        return None
    about = _about(written[-1])
    if config not in (None, about.config):
        raise FedtideError(
            f"{written[-1]}: this checkpoint belongs to another configuration (digest {about.config}, "
            f"now it is {config}); restore config.toml and the files that it names, take the version of fedtide that "
            "began it (environment.json), or start a new run folder"
        )
    return about


def load(folder: Path, memory: MemoryStore, *, config: str) -> tuple[Start[Any], Mapping[str, Mark]] | None:
    """Read the newest checkpoint and restore the clients' memory; None if there is none yet.

    The result is the starting point, and the length of each record file at that moment.

    Leftovers of a killed process, of older checkpoints and memory, are removed.

    Raises:
        FedtideError: the checkpoint is damaged, or was written by another configuration or an unreadable version.
    """
    about = check(folder, config=config)
    if about is None:
        return None
    newest = check_files(folder, about)
    state = codec.from_file(newest / "state.safetensors")
    memory.restore(newest / "memory.safetensors", (about.round, 0), _indexes(folder, about.kept))
    _remove_old(folder, about.kept)
    return Start(state, about.round, about.seconds, about.before), about.records


def kept_state(folder: Path, number: int, *, config: str) -> Any:
    """Return the server's state after so many rounds, from a checkpoint that is kept.

    Raises:
        FedtideError: it is missing or damaged, or was written by another configuration or an unreadable version.
    """
    about = check(folder, config=config, number=number)
    assert about is not None
    return codec.from_file(check_files(folder, about) / FILES[0])


def kept_memory(folder: Path, number: int, memory: MemoryStore) -> None:
    """Restore the clients' memory after so many rounds, from a checkpoint that is kept.

    The files of the newest checkpoint and of others that are kept stay: the run may be resumed from these.
    """
    about = check(folder, config=None)
    assert about is not None
    memory.restore(_place(folder, number) / FILES[1], (about.round, 0), _indexes(folder, about.there))


def check_files(folder: Path, about: About) -> Path:
    """Return the checkpoint of a description; raise a FedtideError if a file in it is not what was written."""
    place = _place(folder, about.round)
    for name in FILES:
        check_sha256(place / name, about.sha256[name])
    return place


def whole_until(folder: Path, about: About) -> int:
    """Return the last checkpointed round up to which the records beside `folder` are whole; 0 if there is none."""
    for number, marks in reversed(about.marks):
        with contextlib.suppress(FedtideError):
            check_marks(folder.parent, marks)
            return number
    return 0


def _about(folder: Path) -> About:
    path = folder / ABOUT
    try:
        read: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        version, claimed = read["format"], read.pop("sum", None)
    except (OSError, *UNREADABLE) as error:
        missing = isinstance(error, FileNotFoundError)
        raise Damaged(f"{path}: {'missing' if missing else f'damaged ({type(error).__name__}: {error})'}") from None
    if version != FORMAT:
        raise refused(f"{path}: format", version, str(FORMAT), "it was written by another version")
    try:
        if claimed != _sum(read):
            raise ValueError("its content is not what was written")
        if not read["marks"]:
            raise ValueError("it counts on no record")
        return About(
            str(read["config"]),
            int(read["round"]),
            float(read["seconds"]),
            float(read["before"]),
            tuple((int(number), read_marks(marks)) for number, marks in read["marks"]),
            {name: str(read["sha256"][name]) for name in FILES},
            str(read["device"]),
            tuple(map(int, read["kept"])),
            tuple(map(dict, read["files"])),
        )
    except UNREADABLE as error:
        raise FedtideError(f"{path}: damaged ({error})") from None


def _sum(about: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


# -- weights in a checkpoint or another file ---------------------------------------------------------------------------


def file_of(path: Path) -> Path:
    """Return the file that a path refers to: for a run folder (`RUN/METHOD/SEED`) the state of its newest checkpoint.

    Raises:
        FedtideError: the folder has no checkpoint.
    """
    if not path.is_dir():
        return path
    if written := _numbered(path / "checkpoints"):
        return written[-1] / FILES[0]
    raise FedtideError(f"{path}: found no checkpoint, allowed: the folder of a run that has one")


def load_weights(path: Path, like: Weights, key: str) -> Weights:
    """Load weights from a file and check them against those of the network.

    Args:
        path: a safetensors file with weights by name, the state of a run, or the folder of a run.
        like: weights of the network.
        key: configuration key that names the file, for error messages.

    Raises:
        FedtideError: the file is missing or damaged, belongs to another network, or holds several models.
    """
    with within(key):
        weights = _read_tensors(path)
    return fitted(weights, like, f"{key}: {path}")


def fitted(weights: Mapping[str, Tensor], like: Weights, where: str) -> Weights:
    """Return tensors by name as weights of a network; raise if names or shapes are of another.

    Args:
        weights: by name; more tensors of integers are left out.
        like: weights of the network.
        where: the file with its key, for error messages.
    """
    wanted = {**like.params, **like.buffers}
    for name, value in wanted.items():
        tensor = weights.get(name)
        if tensor is None or tensor.shape != value.shape:
            shape = None if tensor is None else tuple(tensor.shape)
            raise refused(f"{where}: shape of '{name}'", shape, str(tuple(value.shape)))
    more = [name for name, value in weights.items() if name not in wanted and value.is_floating_point()]
    if more:
        raise refused(where, more[0], f"{', '.join(wanted)}, as the model has")
    parts = (like.params, like.buffers)
    return Weights(*({name: weights[name].to(value.dtype) for name, value in part.items()} for part in parts))


def _read_tensors(path: Path) -> dict[str, Tensor]:
    file = file_of(path)
    try:
        if file.name != FILES[0]:
            with open_file(file) as opened:
                return load_tensors(opened.read())
    except OSError as error:
        reason = error.strerror or "cannot be read"
        raise FedtideError(f"{path}: {reason}; allowed: a file of safetensors, or RUN/METHOD/SEED") from None
    except SafetensorError as error:
        raise FedtideError(f"{path}: not a file of safetensors ({error}); allowed: one, or RUN/METHOD/SEED") from None
    saved: Any = getattr(codec.from_file(file), "weights", None)
    models = [model for model in (saved if isinstance(saved, tuple) else (saved,)) if isinstance(model, Weights)]
    if len(models) != 1:
        raise refused(f"{path}: number of models", len(models), "1, as in the state of a run with one model")
    for part in (models[0].params, models[0].buffers):
        if not isinstance(part, dict) or not all(isinstance(value, Tensor) for value in part.values()):
            raise FedtideError(f"{path}: damaged: its weights are no tensors")
    return models[0].params | models[0].buffers
