"""Trackers are fed from records: while a run is played, and of a run folder at any time.

Each library is imported by its class. In the end each value is there once: files are written anew, and a server gets
only the steps that it lacks. A run that is played again after a kill has the same numbers.
"""

import json
import math
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

from fedtide.config import Experiment, resolved
from fedtide.config.overrides import flatten
from fedtide.config.settings import MLflow, TensorBoard, Track, WandB, check_installed
from fedtide.core.atomic import write_text
from fedtide.core.errors import UNREADABLE, FedtideError, in_shell
from fedtide.core.record import run_lock
from fedtide.evaluate.rounds import rows_of_rounds, rows_of_scores
from fedtide.runs.experiment import RunsDisplay
from fedtide.runs.folder import Planned, load, plan
from fedtide.runs.runner import Progress

PACE = 2.0
"""Seconds from one message to a server to the next."""

MOST = 1000
"""Values in a message to MLflow."""


@dataclass(frozen=True)
class TrackedRun:
    """The run that is tracked.

    Args:
        root: its run folder.
        study: identity of the run folder, wherever it is moved.
        place: of the run in it, such as `fedavg/0`.
        title: for people.
        settings: its configuration, by dotted key.
    """

    root: Path
    study: str
    place: str
    title: str
    settings: Mapping[str, Any]

    @property
    def key(self) -> str:
        """Identity of the run."""
        return f"{self.study}-{self.place.replace('/', '-')}"

    @property
    def name(self) -> str:
        """Name of the run folder."""
        return self.root.resolve().name


# Each tracker takes the numbers of a round, of which `step` are done, by `write`, and ends by `close`: of a run that is
# finished or that will go on.


class _TensorBoard:
    """A folder of event files, written anew."""

    def __init__(self, track: TensorBoard, about: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        shared = None if track.path is None else Path(track.path) / f"{about.name}-{about.study}"
        folder = (shared or about.root / "track" / "tensorboard") / about.place
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        self._writer: Any = SummaryWriter(str(folder), flush_secs=10)
        lines = (f"{name} = {value}" for name, value in about.settings.items())
        self._writer.add_text("settings", "".join(f"    {line}\n" for line in lines))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self, *, finished: bool) -> None:
        self._writer.close()


class _MLflow:
    """A run of an experiment, found again by a tag; steps that it has are not sent again."""

    def __init__(self, track: MLflow, about: TrackedRun) -> None:
        # Without these a server that is down would keep the study waiting for minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        from mlflow.entities import Metric, Param, RunTag
        from mlflow.tracking import MlflowClient

        folder = about.root.resolve() / "track"
        path = track.path or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder / 'mlflow.db'}"
        self._client: Any = MlflowClient(tracking_uri=path)
        self._metric = Metric
        name, tags = track.experiment or about.name, {"fedtide": about.key}
        experiment = self._client.get_experiment_by_name(name)
        number = experiment and experiment.experiment_id
        number = number or self._client.create_experiment(name, (folder / "artifacts").as_uri())
        runs = self._client.search_runs([number], f"tags.fedtide = '{about.key}'", max_results=1)
        run = runs[0] if runs else self._client.create_run(number, run_name=about.title, tags=tags)
        self._run = run.info.run_id
        settings = {mlflow_name(key): str(value)[:500] for key, value in about.settings.items()}
        params = [Param(key, value) for key, value in settings.items() if key not in run.data.params]
        for begin in range(0, len(params), 100):
            self._client.log_batch(self._run, params=params[begin : begin + 100])
        self._client.log_batch(self._run, tags=[RunTag("fedtide.folder", str(about.root))])
        self._known = {
            name: {point.step for point in self._client.get_metric_history(self._run, name)}
            for name in run.data.metrics
        }
        self._left: list[Any] = []
        self._sent = time.monotonic()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        now = time.time_ns() // 1_000_000
        for name, value in values.items():
            if step not in self._known.get(mlflow_name(name), ()):
                self._left.append(self._metric(mlflow_name(name), value, now, step))
        if time.monotonic() - self._sent > PACE or len(self._left) >= MOST:
            self._send()

    def _send(self) -> None:
        while self._left:
            self._client.log_batch(self._run, metrics=self._left[:MOST])
            del self._left[:MOST]
        self._sent = time.monotonic()

    def close(self, *, finished: bool) -> None:
        self._send()
        if finished:
            self._client.set_terminated(self._run, "FINISHED")


def mlflow_name(name: str) -> str:
    """Return a name without characters that MLflow does not take."""
    return re.sub(r"[^\w\-. /:]", "_", name)


class _WandB:
    """A run of a project: files of it are written anew, and to a server goes what comes after the step that it has."""

    def __init__(self, track: WandB, about: TrackedRun) -> None:
        import wandb

        # Among its files are links, which no run folder may have.
        folder = about.root.resolve().with_name(f"{about.name}-wandb")
        folder.mkdir(exist_ok=True)
        if track.mode == "offline":
            for old in (folder / "wandb").glob(f"offline-run-*-{about.key}"):
                shutil.rmtree(old)
        settings = wandb.Settings(
            symlink=False, silent=True, console="off", disable_git=True, save_code=False, x_disable_stats=True
        )
        self._run: Any = wandb.init(
            project=track.project, mode=track.mode, dir=folder, id=about.key, name=about.title, group=about.name,
            config=dict(about.settings), resume="allow" if track.mode == "online" else None, reinit="create_new",
            settings=settings,
        )  # fmt: skip
        self._next = self._run.step if track.mode == "online" else 0

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if step >= self._next:
            self._run.log(dict(values), step=step)

    def close(self, *, finished: bool) -> None:
        self._run.finish(exit_code=0)


TRACKERS: dict[str, Callable[[Any, TrackedRun], Any]] = {
    "tensorboard": _TensorBoard, "mlflow": _MLflow, "wandb": _WandB,
}  # fmt: skip
"""Tracker of each kind; one is made at the beginning of a run."""


def values_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a line of `rounds.jsonl` by name, of an evaluation below the name of its view.

    >>> values_of({"round": 7, "up": 8, "facts": {"k": 2}, "scores": {"val": {"loss": 0.5, "groups": {"day": 0.25}}}})
    {'up': 8.0, 'k': 2.0, 'val/loss': 0.5, 'val/accuracy_day': 0.25}
    """
    (numbers,) = rows_of_rounds([line])
    named = {name: value for name, value in numbers.items() if name != "round"}
    for row in rows_of_scores([line]):
        named |= {f"{row['view']}/{name}": value for name, value in row.items() if name not in ("round", "view")}
    return {name: float(value) for name, value in named.items() if _is_number(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


class Tracked:
    """The tracked runs of a run folder, noted in `track/track.json`; one process at a time has it."""

    def __init__(self, root: Path, track: Track) -> None:
        self.root, self.track = root, track
        self._file = root / "track" / "track.json"
        self._open: dict[Path, tuple[Any, int]] = {}
        try:
            notes = json.loads(self._file.read_text(encoding="utf-8"))
            self.study = str(notes["study"])
            self.whole: dict[str, list[str]] = {kind: list(runs) for kind, runs in notes["whole"].items()}
        except FileNotFoundError:
            self.study, self.whole = secrets.token_hex(4), {}
        except (*UNREADABLE, AttributeError):
            raise FedtideError(f"{self._file}: damaged; without it runs are tracked as new ones") from None

    def is_whole(self, run: Planned) -> bool:
        """Tell whether all of a run was tracked."""
        return self._place(run) in self.whole.get(self.track.kind, ())

    def feed(self, run: Planned) -> None:
        """Pass on the rounds of a run that were recorded since the last time, from the first round on."""
        file = run.folder / "rounds.jsonl"
        tracker, read = self._open.get(run.folder) or (self._begin(run), 0)
        with open(file, "rb") as record:
            record.seek(read)
            lines = record.read().splitlines(keepends=True)
        for line in lines:
            if line.endswith(b"\n"):
                read += len(line)
                try:
                    values = json.loads(line)
                except UNREADABLE:
                    raise FedtideError(f"{file}: a line is damaged") from None
                tracker.write(int(values["round"]) + 1, values_of(values))
        self._open[run.folder] = tracker, read

    def end(self, run: Planned) -> None:
        """End with a run, and note whether all of it was tracked."""
        tracker, _ = self._open.pop(run.folder)
        tracker.close(finished=run.finished)
        if run.finished and not self.is_whole(run):
            self.whole.setdefault(self.track.kind, []).append(self._place(run))
            self._note()

    def end_all(self, runs: list[Planned]) -> None:
        """End with the open ones of these runs, and track the finished ones that were not tracked to their end."""
        for run in runs:
            if run.folder in self._open:
                self.end(run)
            if run.finished and not self.is_whole(run):
                self.feed(run)
                self.end(run)

    def _begin(self, run: Planned) -> Any:
        self._note()
        values = resolved(run.experiment.model_copy(update={"method": (run.method,), "seeds": (run.seed,)}))
        (method,) = values.pop("method")
        settings = {".".join(path): value for path, value in flatten({**values, "method": method})}
        about = TrackedRun(self.root, self.study, self._place(run), run.title, settings)
        return TRACKERS[self.track.kind](self.track, about)

    def _place(self, run: Planned) -> str:
        return run.folder.relative_to(self.root).as_posix()

    def _note(self) -> None:
        self._file.parent.mkdir(exist_ok=True)
        write_text(self._file, json.dumps({"study": self.study, "whole": self.whole}) + "\n")


class Tracking(RunsDisplay):
    """Display that also feeds a tracker while runs are played. If it fails, runs go on untracked.

    Args:
        experiment: the experiment that is played.
        root: its run folder.
        display: shows the progress.
        say: takes a line for a person.
    """

    def __init__(self, experiment: Experiment, root: Path, display: RunsDisplay, say: Callable[[str], None]) -> None:
        self._experiment, self._root, self._display, self._say = experiment, root, display, say
        self._stack = ExitStack()
        self._tracked: Tracked | None = None
        self._runs: list[Planned] = []

    def begin(self, runs: list[Planned], finished: int) -> None:
        """Begin with the runs that are left."""
        assert self._experiment.track is not None
        self._display.begin(runs, finished)
        self._runs = runs
        self._stack.enter_context(run_lock(self._root / "track", "lock"))
        self._tracked = Tracked(self._root, self._experiment.track)

    def progress(self, run: int, progress: Progress) -> None:
        """Pass on the new rounds of a run."""
        self._display.progress(run, progress)

        def follow(tracked: Tracked) -> None:
            # Not before it plays, because rounds behind the checkpoint of a killed run are cut off then.
            tracked.feed(self._runs[run])
            if progress.round == progress.rounds:
                tracked.end(self._runs[run])

        self._guard(follow)

    def end(self) -> None:
        """End the open runs, and track the runs that were finished before a kill and not tracked to their end."""
        self._display.end()
        with self._stack:
            self._guard(lambda tracked: tracked.end_all(plan(self._experiment, self._root)))

    def _guard(self, act: Callable[[Tracked], None]) -> None:
        if self._tracked is None:
            return
        try:
            act(self._tracked)
        except Exception as error:  # whatever a library or a server raises: the run is worth more
            self._tracked = None
            reason = shorten(str(error), 200, placeholder=" ...")
            self._say(f"tracking ended ({type(error).__name__}: {reason}); later: fedtide track {in_shell(self._root)}")


def track(root: Path, chosen: Track | None = None) -> list[Planned]:
    """Track all runs of a run folder from their records, and return them.

    Args:
        root: the run folder.
        chosen: the tracker; None means that of its configuration.

    Raises:
        FedtideError: it is no run folder, or no tracker is known or installed.
    """
    experiment = load(root, imports=False)
    settings = chosen or experiment.track
    if settings is None:
        raise FedtideError(
            f"{root}: its config.toml has no [track]; allowed: fedtide track {in_shell(root)} tensorboard"
        )
    check_installed(settings)
    runs = [run for run in plan(experiment, root) if (run.folder / "rounds.jsonl").is_file()]
    with run_lock(root / "track", "lock"):
        tracked = Tracked(root, settings)
        for run in runs:
            tracked.feed(run)
            tracked.end(run)
    return runs
