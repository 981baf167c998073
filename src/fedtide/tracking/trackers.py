"""What writes the numbers of one run to TensorBoard, MLflow or Weights & Biases, imported where it is used.

Whatever was written of the run before, each value is there once in the end: files are written anew, and a server is
sent only the steps that it lacks. A run that is played again after a kill has the same numbers.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fedtide.config.settings import MLflow, TensorBoard, Track, WandB

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
        settings: what it was configured with, by dotted key.
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

        own = about.root.resolve() / "track"
        path = track.path or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{own / 'mlflow.db'}"
        self._client: Any = MlflowClient(tracking_uri=path)
        self._metric = Metric
        name = track.experiment or about.name
        there = self._client.get_experiment_by_name(name)
        number = there.experiment_id if there else self._client.create_experiment(name, (own / "artifacts").as_uri())
        found = self._client.search_runs([number], f"tags.fedtide = '{about.key}'", max_results=1)
        tags = {"fedtide": about.key}
        run = found[0] if found else self._client.create_run(number, run_name=about.title, tags=tags)
        self._run = run.info.run_id
        told = ((self._named(key), str(value)[:500]) for key, value in about.settings.items())
        params = [Param(key, value) for key, value in told if key not in run.data.params]
        for begin in range(0, len(params), 100):
            self._client.log_batch(self._run, params=params[begin : begin + 100])
        self._client.log_batch(self._run, tags=[RunTag("fedtide.folder", str(about.root))])
        self._known = {
            name: {each.step for each in self._client.get_metric_history(self._run, name)} for name in run.data.metrics
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
