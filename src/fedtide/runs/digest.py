"""Digest of all that a run's numbers depend on, and the check that a run folder is unchanged."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedtide.config import Experiment, Local, Method, Stacked, is_own
from fedtide.core import checkpoint
from fedtide.core.atomic import sha256
from fedtide.core.checkpoint import file_of
from fedtide.core.errors import FedtideError
from fedtide.core.files import check_file
from fedtide.core.memory import MemoryStore
from fedtide.core.record import check_marks
from fedtide.fields.shapes import fields_of
from fedtide.learn.device import CPU, find_device, name_of
from fedtide.models.adapters import adapter_files
from fedtide.models.model_files import has_model, locate_model, model_files
from fedtide.models.transformer import Transformer
from fedtide.runs.build import located, place_of_weights, spec_of
from fedtide.runs.folder import Planned
from fedtide.wire.ledger import check_released


def digest_of(experiment: Experiment, method: Method, seed: int, device: str | None = None) -> str:
    """Return a short digest of all that a run's numbers depend on; checkpoints with another digest are refused.

    `device` is the name of the one that computed; None is that of `fleet.device` on this machine.
    """
    kind = Stacked if experiment.fleet.kind == "stacked" else Local  # others give the same bits
    fleet = kind(threads=experiment.fleet.threads, channels_last=experiment.fleet.channels_last)
    silent: dict[str, Any] = dict.fromkeys(("checkpoint_every", "average_last", "deploy", "track"))
    silent |= {"claim": (), "title": "", "description": "", "seeds": (seed,)}
    source = experiment.data.source.uncached()
    data = experiment.data.model_copy(update={"directory": None, "source": source})
    if isinstance(model := experiment.model, Transformer):
        silent["model"] = model.uncached()
    telling = experiment.model_copy(update={"fleet": fleet, "data": data, "devices": experiment.timing, **silent})
    files = [[*place.values()] for place in digests_of_files(experiment, method)]
    spec = spec_of(telling, method, seed, None) | {"files": files}
    if (name := device or device_of(experiment)) != CPU:
        spec |= {"device": name}
    return hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:16]


def device_of(experiment: Experiment) -> str:
    """Return the name of the device that computes an experiment on this machine."""
    return name_of(find_device(experiment.fleet.device))


def digest_to_read(run: Planned) -> str | None:
    """Return the digest of a run that is read and not played; None if it is not known, or nothing is saved yet.

    The code of a person's own algorithm is not imported. Only that knows its other options at a point of a sweep, and
    whether they name files.

    Raises:
        FedtideError: a file that the configuration names has changed since; the line names it.
    """
    about = checkpoint.check(run.folder / "checkpoints", config=None)
    if about is None:
        return None
    # It was played on another machine, perhaps, which had another device.
    device = CPU if run.experiment.fleet.device == CPU else about.device
    files = {"path", "weights"}  # options that may name files, whose content is part of the digest
    method, imported = run.method, run.experiment.imports
    unknown = not imported and is_own(method.algorithm) and (run.point or _has_key(method.options, files))
    if unknown or not device:
        return None
    digest = digest_of(run.experiment, method, run.seed, device)
    if digest != about.config:
        _check_named(run, about.files)
    return digest


def digests_of_files(experiment: Experiment, method: Method) -> list[dict[str, str]]:
    """Return the digests of the files that a run reads in addition to its source's: by name, for each place."""
    return [{file.name: sha256(file) for file in _files_at(place)} for place in _places(experiment, method)]


def _check_named(run: Planned, files: Sequence[Mapping[str, str]]) -> None:
    """Raise if a file that a configuration names is not what it was when a run had these."""
    for place, before in zip(_places(run.experiment, run.method), files, strict=False):
        now = _files_at(place)
        digests = {file.name: sha256(file) for file in now}
        if before.keys().isdisjoint(digests):  # the configuration names another place now
            continue
        for name in sorted({*before, *digests}):
            if before.get(name) != digests.get(name):
                what = "is missing" if name not in digests else "has changed" if name in before else "is new"
                allowed = "restore what was there, or start a new run folder"
                raise FedtideError(f"{now[0].parent / name}: {what} since {run.folder} was played; {allowed}")


def _has_key(value: Any, keys: set[str]) -> bool:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return (isinstance(value, dict) and not keys.isdisjoint(value)) or any(_has_key(item, keys) for item in inside)


def _places(experiment: Experiment, method: Method) -> list[Path]:
    """Return places of files that a run reads in addition to its source's: they decide its numbers.

    The source's own rows are compared with those that the run began with (`fedtide.data.saved.check`).
    """
    shift, data, paths = experiment.shift_of(method), experiment.data, list[str]()
    may_import = experiment.imports or not is_own(method.algorithm)
    settings = method.settings() if may_import else {}
    for key, value in settings.items():
        located(value, data.folder, f"method '{method.name}'.{key}", paths)
    if method.init_from is not None:
        paths.append(place_of_weights(method, data))
    parts: dict[str, Any] = {"shift.who": shift.who, "shift.what": shift.what, "data.partition": data.partition}
    parts |= {"devices": experiment.devices, "embedding": experiment.embedding, "model": experiment.model}
    for name, part in parts.items():
        located(part, data.folder, name, paths)
    packages = packages_of((experiment.model, *settings.values()))
    return [*map(Path, paths), *(locate_model(None, package) for package in packages)]


def _files_at(place: Path) -> list[Path]:
    """Return the files at a place that decide numbers."""
    if files := adapter_files(place):
        return files
    where = locate_model(str(place), None) if has_model(place) else file_of(place)
    if where.is_dir():
        return model_files(where)
    check_file(where)
    return [where]


def packages_of(part: Any) -> Iterator[str]:
    """Yield the packages whose models are in a part of a configuration."""
    if isinstance(part, tuple):
        for item in part:
            yield from packages_of(item)
    if isinstance(part, Transformer) and part.package is not None:
        yield part.package
    for name in fields_of(type(part)):
        yield from packages_of(getattr(part, name))


@dataclass(frozen=True)
class Verdict:
    """Findings about one run.

    rounds: number of rounds, from the first on, whose records are unchanged by its checkpoints. wrong: the first file
    that was changed; None if there is none.
    """

    run: Planned
    rounds: int
    wrong: str | None = None


def _check_saved(run: Planned, number: int, config: str) -> None:
    """Raise a FedtideError if a file that the checkpoint of a round counts on is not what was written."""
    folder = run.folder / "checkpoints"
    about = checkpoint.check(folder, config=config, number=number)
    assert about is not None
    memory = MemoryStore(run.folder / "memory")
    memory.read_index(checkpoint.check_files(folder, about) / "memory.safetensors")
    memory.check_files()


def verify_runs(runs: Iterable[Planned]) -> Iterator[Verdict]:
    """Check every file that the checkpoints of runs need, and yield a verdict for each run."""
    for run in runs:
        folder = run.folder / "checkpoints"
        try:
            about = checkpoint.check(folder, config=digest_to_read(run))
        except FedtideError as error:
            yield Verdict(run, 0, str(error))
            continue
        if about is None:
            yield Verdict(run, 0)
            continue
        try:
            for number in {about.round, *about.kept}:
                _check_saved(run, number, about.config)
            check_marks(run.folder, about.records, finished=run.finished)
            check_released(run.folder, about.round)
        except FedtideError as error:
            yield Verdict(run, checkpoint.whole_until(folder, about), str(error))
        else:
            yield Verdict(run, about.round)
