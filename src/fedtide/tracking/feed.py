"""Trackers are fed from records: while a run is played, and of a run folder at any time."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fedtide.config import Experiment, resolved
from fedtide.config.overrides import flat
from fedtide.config.settings import Track, check_installed
from fedtide.core.atomic import write_text
from fedtide.core.errors import UNREADABLE, FedtideError
from fedtide.core.record import run_lock
from fedtide.evaluate.rounds import rows_of_rounds, rows_of_scores
from fedtide.runs.experiment import RunsDisplay
from fedtide.runs.folder import Planned, check_entries, load, plan
from fedtide.runs.runner import Progress
from fedtide.tracking.trackers import TrackedRun, Tracker, tracker

Say = Callable[[str], None]


def values_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a line of `rounds.jsonl` by name, of an evaluation below the name of its view.

    >>> values_of({"round": 7, "up": 8, "facts": {"k": 2}, "scores": {"val": {"loss": 0.5, "groups": {"day": 0.25}}}})
    {'up': 8.0, 'k': 2.0, 'val/loss': 0.5, 'val/accuracy_day': 0.25}
    """
    (told,) = rows_of_rounds([line])
    named = {name: value for name, value in told.items() if name != "round"}
    for row in rows_of_scores([line]):
        named |= {f"{row['view']}/{name}": value for name, value in row.items() if name not in ("round", "view")}
    return {name: float(value) for name, value in named.items() if _is_number(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


class Feed:
    """One run on its way from its record to a tracker."""

    def __init__(self, run: Planned, made: Tracker) -> None:
        self._file, self._tracker, self._read = run.folder / "rounds.jsonl", made, 0

    def feed(self) -> None:
        """Pass on the rounds that were recorded since the last time."""
        for line in self._lines():
            self._tracker.write(int(line["round"]) + 1, values_of(line))

    def _lines(self) -> Iterator[dict[str, Any]]:
        with open(self._file, "rb") as file:
            file.seek(self._read)
            whole = file.read().rpartition(b"\n")[0]
        if not whole:
            return
        self._read += len(whole) + 1
        try:
            yield from map(json.loads, whole.split(b"\n"))
        except UNREADABLE:
            raise FedtideError(f"{self._file}: a line is damaged") from None

    def close(self, *, finished: bool) -> None:
        """End, and note it."""
        self._tracker.close(finished=finished)


class Tracked:
    """What is tracked of a run folder; held by one process at a time."""

    def __init__(self, root: Path, track: Track) -> None:
        self.root, self.track = root, track
        self._file = root / "track" / "track.json"
        self._about = self._load()

    def _load(self) -> dict[str, Any]:
        try:
            told = json.loads(self._file.read_text(encoding="utf-8"))
            return {"study": str(told["study"]), "whole": {key: list(runs) for key, runs in told["whole"].items()}}
        except FileNotFoundError:
            return {"study": secrets.token_hex(4), "whole": {}}
        except (*UNREADABLE, AttributeError):
            raise FedtideError(f"{self._file}: damaged; without it runs are tracked as new ones") from None

    def _place(self, run: Planned) -> str:
        return run.folder.relative_to(self.root).as_posix()

    def is_whole(self, run: Planned) -> bool:
        """Tell whether all of a run was tracked."""
        return self._place(run) in self._about["whole"].get(self.track.kind, ())

    def begin(self, run: Planned) -> Feed:
        """Begin to track a run, from its first round on."""
        self._note()
        values = resolved(run.experiment.model_copy(update={"method": (run.method,), "seeds": (run.seed,)}))
        (method,) = values.pop("method")
        settings = {".".join(path): value for path, value in flat({**values, "method": method})}
        return Feed(
            run, tracker(self.track, TrackedRun(self.root, self._about["study"], self._place(run), run.title, settings))
        )

    def end(self, run: Planned, feed: Feed) -> None:
        """End with a run, and note whether all of it was tracked."""
        finished = run.finished
        feed.close(finished=finished)
        if finished and not self.is_whole(run):
            self._about["whole"].setdefault(self.track.kind, []).append(self._place(run))
            self._note()

    def all_of(self, run: Planned) -> None:
        """Track a run from its record."""
        feed = self.begin(run)
        try:
            feed.feed()
        finally:
            self.end(run, feed)

    def _note(self) -> None:
        self._file.parent.mkdir(exist_ok=True)
        write_text(self._file, json.dumps(self._about) + "\n")


class Tracking(RunsDisplay):
    """Feeds a tracker while runs are played, beside another display. Where it fails runs go on, untracked.

    Args:
        experiment: what is played.
        root: its run folder.
        display: the other one.
        say: takes a line for a person.
    """

    def __init__(self, experiment: Experiment, root: Path, display: RunsDisplay, say: Say) -> None:
        assert experiment.track is not None
        self._experiment, self._root, self._track = experiment, root, experiment.track
        self._display, self._say = display, say
        self._stack = ExitStack()
        self._tracked: Tracked | None = None
        self._runs: list[Planned] = []
        self._feeds: dict[int, Feed] = {}

    def begin(self, runs: list[Planned], finished: int) -> None:
        """Begin with the runs that are left."""
        self._display.begin(runs, finished)
        self._runs = runs
        self._stack.enter_context(run_lock(self._root / "track", "lock"))
        self._tracked = Tracked(self._root, self._track)

    def progress(self, run: int, progress: Progress) -> None:
        """Pass on what is new of a run."""
        self._display.progress(run, progress)
        self._guarded(lambda tracked: self._follow(tracked, run, last=progress.round == progress.rounds))

    def _follow(self, tracked: Tracked, number: int, *, last: bool) -> None:
        run = self._runs[number]
        # Not before it plays: what a kill left behind its checkpoint is cut off then.
        feed = self._feeds.get(number) or self._feeds.setdefault(number, tracked.begin(run))
        feed.feed()
        if last:
            tracked.end(run, self._feeds.pop(number))

    def end(self) -> None:
        """End what is tracked, and track the runs that were finished before a kill and not told to their end."""
        self._display.end()
        with self._stack:
            self._guarded(self._end)

    def _end(self, tracked: Tracked) -> None:
        for number in list(self._feeds):
            tracked.end(self._runs[number], self._feeds.pop(number))
        for run in plan(self._experiment, self._root):
            if run.finished and not tracked.is_whole(run):
                tracked.all_of(run)

    def _guarded(self, act: Callable[[Tracked], None]) -> None:
        if self._tracked is None:
            return
        try:
            act(self._tracked)
        except Exception as error:  # whatever a library or a server makes of it: the run is worth more
            self._tracked = None
            said = " ".join(str(error).split())[:200]
            self._say(f"tracking ended ({type(error).__name__}: {said}); later: fedtide track {self._root}")


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
            tracked.all_of(run)
    return runs
