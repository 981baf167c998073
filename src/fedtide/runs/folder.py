"""The run folder: its files, and those that are written before the first round.

    config.toml                    the whole configuration, every default written out
    environment.json               versions, machine, command
    shift/<seed>.safetensors       rows of clients and arrivals, for replay
    <method>/<seed>/               one run: rounds.jsonl, timings.jsonl, clients.csv, checkpoints/, memory/, and a
                                   forgetting.jsonl if forgetting is measured
    track/                         files of a tracker, if [track] names one
    summary.json, report.html      written at the end, and by `fedtide report`

With a `[sweep]` the folder holds one such folder per point instead of methods.
"""

import json
import os
import platform
import re
import stat
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from fedtide._version import version_of
from fedtide.config import Experiment, Method, points, read, slug, to_toml
from fedtide.config.overrides import seed_list
from fedtide.core.atomic import check_new, making, naming, sha256, write_text
from fedtide.core.errors import UNREADABLE, FedtideError, in_shell, refused
from fedtide.core.record import stopped_after
from fedtide.data.population import Population
from fedtide.data.saved import check

PACKAGES = ("fedtide", "torch", "numpy", "pydantic", "safetensors", "matplotlib", "optuna", "ray")


@dataclass(frozen=True)
class Planned:
    """One run that an experiment asks for."""

    point: str
    experiment: Experiment
    method: Method
    seed: int
    folder: Path

    @property
    def title(self) -> str:
        """Name for people."""
        return " · ".join(part for part in (self.point, self.method.name, f"seed {self.seed}") if part)

    @property
    def finished(self) -> bool:
        """Tell whether its last round has a checkpoint: the last of all, or the one at which it was good enough."""
        ended = None if self.experiment.stop_at is None else stopped_after(self.folder)
        rounds = (self.experiment.rounds, *(() if ended is None else (ended,)))
        return any((self.folder / "checkpoints" / f"{number:08d}").is_dir() for number in rounds)


def plan(experiment: Experiment, root: Path) -> list[Planned]:
    """List every run of an experiment: points x seeds x methods."""
    return [
        Planned(point.name, point.experiment, method, seed, root / point.folder / slug(method.name) / str(seed))
        for point in points(experiment)
        for seed in point.experiment.seeds
        for method in point.experiment.method
    ]


def check_entries(root: Path, *, played: bool = False) -> None:
    """Raise unless all that is in a run folder are folders and files.

    A link may lead to a file of somebody else, and a pipe or a device may never end.

    Args:
        root: the run folder.
        played: whether it is to be played, which writes to its files: none may have another name elsewhere.

    Raises:
        FedtideError: there is something else; the line names it.
    """
    for folder, folders, files in os.walk(root):
        for path in (Path(folder, name) for name in (*folders, *files)):
            try:
                entry = path.lstat()
            except FileNotFoundError:  # a run that is being played removed it
                continue
            if stat.S_ISLNK(entry.st_mode):
                raise FedtideError(f"{path}: is a link, allowed: a file or folder of the run folder itself")
            if not stat.S_ISDIR(entry.st_mode) and not stat.S_ISREG(entry.st_mode):
                raise FedtideError(f"{path}: is a pipe or a device, allowed: a file or folder")
            if played and stat.S_ISREG(entry.st_mode) and entry.st_nlink > 1:
                raise FedtideError(
                    f"{path}: is the same file under another name, too (a hard link), and would change there; allowed: "
                    "a file of the run folder alone"
                )


def shift_file(root: Path, method: Method, seed: int) -> Path:
    """Return the file of the population that a method meets: one for all methods without a shift of their own."""
    suffix = "" if method.shift is None else f"-{slug(method.name)}"
    return root / "shift" / f"{seed}{suffix}.safetensors"


def check_rows(run: Path, experiment: Experiment, method: Method, seed: int, population: Population) -> None:
    """Raise if the data are not those with which the folder of a run began, as far as it has begun.

    Raises:
        FedtideError: the data differ, or the file of a saved population is damaged.
    """
    path = shift_file(run.parent.parent, method, seed)
    drawn = getattr(experiment.data.source, "drawn", False)
    others = [] if drawn else sorted(path.parent.glob("*.safetensors"))
    for file in [path] if path.is_file() else others[:1]:  # rows that are not drawn are the same for every seed
        check(population, file)


def go_on(root: Path) -> str:
    """Return the command that goes on with a run folder, or with a tuning: that of real clients is its site's."""
    site = root.resolve().parent
    served = (site / "roster.toml").is_file() and root.resolve().name == "run"
    return f"fedtide serve {in_shell(site)}" if served else f"fedtide resume {in_shell(root)}"


def free(root: Path) -> None:
    """Raise if there is already something at `root`, and say how to go on with a run; it is left as it is."""
    check_new(root, f"; the run in it goes on with: {go_on(root)}" if (root / "config.toml").is_file() else "")


def create(experiment: Experiment, root: Path, where: str = "experiment", scale: str | None = None) -> None:
    """Make a new run folder with its configuration and environment, and the scale of the file that is played, if any.

    Raises:
        FedtideError: there is already something at `root`; it is left as it is.
    """
    for method in experiment.method:
        os.fsencode(slug(method.name))  # raises in a locale that has no such name of a folder
    at_points = {"": experiment, **{p.folder: p.experiment for p in points(experiment, where)}}
    make_folder(
        root, {str(Path(folder, "config.toml")): to_toml(at_point) for folder, at_point in at_points.items()}, scale
    )


def make_folder(root: Path, files: Mapping[str, str], scale: str | None = None) -> None:
    """Make a new folder with these files and its environment, all at once.

    Raises:
        FedtideError: there is already something at `root`; it is left as it is.
    """
    with new_folder(root) as temporary:
        fill_folder(temporary, files, scale)


def fill_folder(temporary: Path, files: Mapping[str, str], scale: str | None = None) -> None:
    """Write these files and the environment into a folder that is being made."""
    code = code_of(files.values())
    about = environment() | ({"code": code} if code else {}) | ({"scale": scale} if scale else {})
    for name, text in {**files, "environment.json": json.dumps(about, indent=1) + "\n"}.items():
        with naming(temporary / name):
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            (temporary / name).write_text(text, encoding="utf-8")


@contextmanager
def new_folder(root: Path) -> Iterator[Path]:
    """Make a new folder, all at once: what is written to the given one is there at the end, or nothing is.

    Raises:
        FedtideError: there is already something at `root`; it is left as it is.
    """
    free(root)
    try:
        with making(root) as temporary:
            yield temporary
    except OSError:
        free(root)  # if another command was faster
        raise


def load(root: Path, sets: Sequence[str] = (), *, imports: bool = True) -> Experiment:
    """Return the experiment of a run folder, with overrides `key=value`; see `fedtide.config.read` for `imports`.

    Raises:
        FedtideError: it is no run folder, or there is something else in it than folders and files.
    """
    config = root / "config.toml"
    if config.is_symlink() or config.exists():
        check_entries(root)
    if not config.is_file():
        if (root / "site.toml").is_file():
            raise FedtideError(f"{root}: is a site; its run folder is {root / 'run'}")
        above = [*root.absolute().parents][:3]  # of RUN/POINT/METHOD/SEED
        if root.exists() and (whole := next((one for one in above if (one / "config.toml").is_file()), None)):
            raise FedtideError(f"{root}: is a part of a run; its run folder is {whole}")
        why = "it is a file" if root.is_file() else "no config.toml in it" if root.exists() else "there is none"
        raise FedtideError(f"{root}: not a run folder ({why})")
    return read(config, sets=sets, imports=imports)


def extended(root: Path, seeds: str) -> Experiment:
    """Return the experiment of a run folder with more seeds; see `extend`.

    Args:
        root: the run folder.
        seeds: all that are wanted, those that are there among them, e.g. "0,1,2,3".

    Raises:
        FedtideError: a seed that is there is not among them, or one is no seed.
    """
    before = load(root)
    after = read(root / "config.toml", sets=[f"seeds={seed_list(seeds)}"])
    missing = [str(seed) for seed in before.seeds if seed not in after.seeds]
    if missing:
        raise refused("--seeds", seeds, "its seeds and new ones", f"{root} also has {', '.join(missing)}")
    return after


def extend(root: Path, after: Experiment) -> None:
    """Write an experiment with more seeds into its run folder; finished runs stay."""
    at_points = {p.folder: p.experiment for p in points(after, str(root))}
    for folder, experiment in {**at_points, "": after}.items():  # the whole last: until then nothing has changed
        write_text(root / folder / "config.toml", to_toml(experiment))


def unused(folder: Path, name: str) -> Path:
    """Return `folder/name`, or `folder/name-2`, `folder/name-3`, ... if that is taken."""
    candidates: Iterator[Path] = (folder / (name if n == 1 else f"{name}-{n}") for n in range(1, 100_000))
    return next(path for path in candidates if not path.exists())


def environment() -> dict[str, object]:
    """Return versions, machine and command, for `environment.json`."""
    return {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": list(sys.argv),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "packages": {name: version_of(name) for name in PACKAGES},
    }


@cache
def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


NAMED = re.compile(r'\b(?:algorithm|function) = "([A-Za-z_][\w.]*):')
"""Names of code in a configuration, as it is written out."""


def code_of(configurations: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return for each module that configurations name its file, the file's digest, and its commit in git.

    >>> sorted(code_of(['function = "json:loads"'])["json"])[-1]
    'sha256'
    """
    names = {name: None for text in configurations for name in NAMED.findall(text)}
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in names}
    return {
        name: {"file": file, "sha256": sha256(Path(file)), **_commit(Path(file))}
        for name, file in files.items()
        if file is not None and Path(file).is_file()
    }


def _commit(file: Path) -> dict[str, Any]:
    """Return the commit of the folder that a file is in, and whether the file has changed since; {} without git."""
    try:
        commit = _git(file, "rev-parse", "HEAD").strip()
        return {"commit": commit, "changed": bool(_git(file, "status", "--porcelain", "--", file.name))}
    except (OSError, subprocess.SubprocessError):
        return {}


def _git(file: Path, *arguments: str) -> str:
    command = ["git", "-C", str(file.parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout


def changed_code(root: Path) -> Iterator[str]:
    """Yield the files of code that were changed since a run folder was made."""
    try:
        modules = json.loads((root / "environment.json").read_text(encoding="utf-8")).get("code", {})
        for module in modules.values():
            file = Path(module["file"])
            if not file.is_file() or sha256(file) != module["sha256"]:
                yield str(file)
    except (OSError, *UNREADABLE):
        return  # no run needs the file
