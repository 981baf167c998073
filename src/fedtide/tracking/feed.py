"""Trackers are fed from records: while a run is played, and of a run folder at any time.

Each library is imported by its class. In the end each value is there once: files are written anew, and a server gets
only the steps that it lacks. A run that is played again after a kill has the same numbers.
"""

from __future__ import annotations

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
from typing import Any, Protocol

from fedtide.config import Experiment, resolved
from fedtide.config.overrides import flatten
from fedtide.config.settings import MLflow, TensorBoard, Track, WandB, check_installed
from fedtide.core.atomic import write_text
from fedtide.core.errors import UNREADABLE, FedtideError
from fedtide.core.record import run_lock
from fedtide.evaluate.rounds import rows_of_rounds, rows_of_scores
from fedtide.runs.experiment import RunsDisplay
from fedtide.runs.folder import Planned, check_entries, load, plan
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


class Tracker(Protocol):
    """Takes the numbers of one run, from its first round on."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Take the numbers of a round; `step` rounds are done."""

    def close(self, *, finished: bool) -> None:
        """End, of a run that is `finished` or that will go on."""


def tracker(track: Track, about: TrackedRun) -> Tracker:
    """Begin to track a run, from its first round on."""
    if isinstance(track, TensorBoard):
        return _TensorBoard(track, about)
    return _MLflow(track, about) if isinstance(track, MLflow) else _WandB(track, about)


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
        from mlflow.entities import Metric, Param, RunTag
        from mlflow.tracking import MlflowClient

        track_folder = about.root.resolve() / "track"
        path = track.path or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{track_folder / 'mlflow.db'}"
        self._client: Any = MlflowClient(tracking_uri=path)
        self._metric = Metric
        name = track.experiment or about.name
        experiment = self._client.get_experiment_by_name(name)
        number = (
            experiment.experiment_id
            if experiment
            else self._client.create_experiment(name, (track_folder / "artifacts").as_uri())
        )
        runs = self._client.search_runs([number], f"tags.fedtide = '{about.key}'", max_results=1)
        tags = {"fedtide": about.key}
        run = runs[0] if runs else self._client.create_run(number, run_name=about.title, tags=tags)
        self._run = run.info.run_id
        settings = ((self._named(key), str(value)[:500]) for key, value in about.settings.items())
        params = [Param(key, value) for key, value in settings if key not in run.data.params]
        for begin in range(0, len(params), 100):
            self._client.log_batch(self._run, params=params[begin : begin + 100])
        self._client.log_batch(self._run, tags=[RunTag("fedtide.folder", str(about.root))])
        self._known = {
            name: {point.step for point in self._client.get_metric_history(self._run, name)}
            for name in run.data.metrics
        }
        self._left: list[Any] = []
        self._sent = time.monotonic()

    @staticmethod
    def _named(name: str) -> str:
        """Return a name without what MLflow does not take."""
        return re.sub(r"[^\w\-. /:]", "_", name)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        now = time.time_ns() // 1_000_000
        named = ((self._named(name), value) for name, value in values.items())
        self._left += [
            self._metric(name, value, now, step) for name, value in named if step not in self._known.get(name, ())
        ]
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


class Feed:
    """One run on its way from its record to a tracker."""

    def __init__(self, run: Planned, tracker: Tracker) -> None:
        self.run, self.tracker = run, tracker
        self._file, self._read = run.folder / "rounds.jsonl", 0

    def feed(self) -> None:
        """Pass on the rounds that were recorded since the last time."""
        with open(self._file, "rb") as file:
            file.seek(self._read)
            whole = file.read().rpartition(b"\n")[0]
        if not whole:
            return
        self._read += len(whole) + 1
        try:
            lines = [json.loads(line) for line in whole.split(b"\n")]
        except UNREADABLE:
            raise FedtideError(f"{self._file}: a line is damaged") from None
        for line in lines:
            self.tracker.write(int(line["round"]) + 1, values_of(line))


class Tracked:
    """The tracked runs of a run folder, noted in `track/track.json`; one process at a time has it."""

    def __init__(self, root: Path, track: Track) -> None:
        self.root, self.track = root, track
        self._file = root / "track" / "track.json"
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

    def begin(self, run: Planned) -> Feed:
        """Begin to track a run, from its first round on."""
        self._note()
        values = resolved(run.experiment.model_copy(update={"method": (run.method,), "seeds": (run.seed,)}))
        (method,) = values.pop("method")
        settings = {".".join(path): value for path, value in flatten({**values, "method": method})}
        about = TrackedRun(self.root, self.study, self._place(run), run.title, settings)
        return Feed(run, tracker(self.track, about))

    def end(self, feed: Feed) -> None:
        """End with a run, and note whether all of it was tracked."""
        finished = feed.run.finished
        feed.tracker.close(finished=finished)
        if finished and not self.is_whole(feed.run):
            self.whole.setdefault(self.track.kind, []).append(self._place(feed.run))
            self._note()

    def track_all(self, run: Planned) -> None:
        """Track a run from its record."""
        feed = self.begin(run)
        try:
            feed.feed()
        finally:
            self.end(feed)

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
        self._feeds: dict[int, Feed] = {}

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
            feed = self._feeds.get(run) or self._feeds.setdefault(run, tracked.begin(self._runs[run]))
            feed.feed()
            if progress.round == progress.rounds:
                tracked.end(self._feeds.pop(run))

        self._guarded(follow)

    def end(self) -> None:
        """End the open runs, and track the runs that were finished before a kill and not tracked to their end."""
        self._display.end()

        def finish(tracked: Tracked) -> None:
            for number in list(self._feeds):
                tracked.end(self._feeds.pop(number))
            for run in plan(self._experiment, self._root):
                if run.finished and not tracked.is_whole(run):
                    tracked.track_all(run)

        with self._stack:
            self._guarded(finish)

    def _guarded(self, act: Callable[[Tracked], None]) -> None:
        if self._tracked is None:
            return
        try:
            act(self._tracked)
        except Exception as error:  # whatever a library or a server raises: the run is worth more
            self._tracked = None
            reason = " ".join(str(error).split())[:200]
            self._say(f"tracking ended ({type(error).__name__}: {reason}); later: fedtide track {self._root}")


def track(root: Path, chosen: Track | None = None) -> list[Planned]:
    """Track all runs of a run folder from their records, and return them.

    Args:
        root: the run folder.
        chosen: the tracker; None means that of its configuration.

    Raises:
        FedtideError: it is no run folder, or no tracker is known or installed.
    """
    check_entries(root)
    experiment = load(root, imports=False)
    settings = chosen or experiment.track
    if settings is None:
        raise FedtideError(f"{root}: its config.toml has no [track]; allowed: fedtide track {root} tensorboard")
    check_installed(settings)
    runs = [run for run in plan(experiment, root) if (run.folder / "rounds.jsonl").is_file()]
    with run_lock(root / "track", "lock"):
        tracked = Tracked(root, settings)
        for run in runs:
            tracked.track_all(run)
    return runs
