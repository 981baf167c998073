"""Pictures of the report as figures of matplotlib, which can be changed.

Each takes a run folder, or what `ft.run` and `ft.results` return, and of a sweep the name of a `point`, as its report
writes it. A run that has nothing of the kind is one clear line.
"""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import matplotlib
from matplotlib.figure import Figure

from fedtide.core.errors import FedtideError, refused, unknown
from fedtide.report import figures, gating
from fedtide.report.figures import STYLE, Drawn
from fedtide.report.pictures import PICTURES
from fedtide.report.reading import ExperimentRecord
from fedtide.report.summary import Study, Summary, names_of, read_study

__all__ = [
    "accuracy", "accuracy_of_all", "accuracy_over_time", "blend", "branches", "budget_spent", "by_hour",
    "client_losses", "clients", "clusters", "drift", "forgetting", "forgetting_over_rounds", "gate_weights",
    "gate_weights_over_sweep", "groups", "labels", "local_models", "metrics", "nodes_over_rounds", "participants",
    "period", "rhythm", "split_purity",
]  # fmt: skip


@runtime_checkable
class Found(Protocol):
    """What was found in a run folder."""

    @property
    def study(self) -> Study:
        """Its content."""
        ...


@runtime_checkable
class Simulated(Protocol):
    """What was found without one."""

    @property
    def rounds(self) -> list[int]:
        """Rounds done at each evaluation."""
        ...

    @property
    def accuracy(self) -> list[float]:
        """The accuracy then."""
        ...


Run = Found | str | Path
"""A run folder, or what was found in it."""


def accuracy(run: Run | Simulated, point: str | None = None) -> Figure:
    """Draw accuracy over rounds; below it who took part, what they held and who drifted. Also of a simulation."""
    if isinstance(run, Simulated):
        return _shown(figures.accuracy_of_simulation(run.rounds, run.accuracy))
    return _plot(run, point, "accuracy")


def accuracy_of_all(*runs: Run) -> Figure:
    """Draw accuracy over rounds of the methods of several run folders."""
    studies = [_study(run) for run in runs]
    named = zip(names_of([study.root for study in studies]), studies, strict=True)
    each = [(name, record) for name, study in named for record in study.records]
    shown = [(" · ".join(filter(None, (name, record.point))), record) for name, record in each]
    return _shown(figures.accuracy_of_all(shown))


def accuracy_over_time(run: Run, point: str | None = None) -> Figure:
    """Draw accuracy over the simulated clock."""
    return _plot(run, point, "accuracy_over_time")


def blend(run: Run, point: str | None = None) -> Figure:
    """Draw how large a method takes each component to be, and how large its domain is."""
    return _plot(run, point, "blend")


def branches(run: Run, point: str | None = None) -> Figure:
    """Draw how many rows the branch or model of their true group answers, and who trains the first group's."""
    return _plot(run, point, "branches")


def budget_spent(run: Run, point: str | None = None) -> Figure:
    """Draw what everybody may see of the run says of any one client, and the accuracy at which it was spent."""
    return _plot(run, point, "budget_spent")


def by_hour(run: Run, point: str | None = None) -> Figure:
    """Draw accuracy by hour, weekday and month, where rounds are windows of wall-clock time."""
    return _plot(run, point, "by_hour")


def client_losses(run: Run, point: str | None = None) -> Figure:
    """Draw the training loss over the participants of each round."""
    return _plot(run, point, "client_losses")


def clients(run: Run, point: str | None = None) -> Figure:
    """Draw the share of clients with at most a given accuracy."""
    return _plot(run, point, "clients")


def clusters(run: Run, point: str | None = None) -> Figure:
    """Draw which model or branch answers for each client over time."""
    return _plot(run, point, "clusters")


def drift(run: Run, point: str | None = None) -> Figure:
    """Draw how unlike clients of a cluster are, how many clusters there are, and how many clients moved."""
    return _plot(run, point, "drift")


def forgetting(run: Run, point: str | None = None) -> Figure:
    """Draw what each participant's training cost on the rows of others, in each probed round."""
    return _plot(run, point, "forgetting")


def forgetting_over_rounds(run: Run, point: str | None = None) -> Figure:
    """Draw the mean of what local training cost, over the probed rounds."""
    return _plot(run, point, "forgetting_over_rounds")


def gate_weights(run: Run, point: str | None = None) -> Figure:
    """Draw how much of a prediction comes from which expert."""
    return _plot(run, point, "gate_weights")


def gate_weights_over_sweep(run: Run) -> Figure:
    """Draw the weight of clients' own experts along a sweep."""
    return _shown(gating.own_weight_over_sweep(_study(run)), "a sweep of a method that mixes experts")


def groups(run: Run, point: str | None = None) -> Figure:
    """Draw the accuracy of each group from the first round to the last, and whose turn it was."""
    return _plot(run, point, "groups")


def labels(run: Run, point: str | None = None) -> Figure:
    """Draw who holds which labels."""
    return _plot(run, point, "labels")


def local_models(run: Run, point: str | None = None) -> Figure:
    """Draw how good each participant's own model is on everyone's rows, in the last probed round."""
    return _plot(run, point, "local_models")


def metrics(run: Run, point: str | None = None) -> Figure:
    """Draw the metrics that the experiment asks for beside accuracy, over rounds."""
    return _plot(run, point, "metrics")


def nodes_over_rounds(run: Run, point: str | None = None) -> Figure:
    """Draw what became of each node of real clients."""
    return _plot(run, point, "nodes_over_rounds")


def participants(run: Run, point: str | None = None) -> Figure:
    """Draw the accuracy of the model as it was sent out, on the participants' own training rows."""
    return _plot(run, point, "participants")


def period(run: Run, point: str | None = None) -> Figure:
    """Draw the last rounds folded into one period, by group of clients."""
    return _plot(run, point, "period")


def rhythm(run: Run, point: str | None = None) -> Figure:
    """Draw the rhythm that a learned prior found, and the true one."""
    return _plot(run, point, "rhythm")


def split_purity(run: Run, point: str | None = None) -> Figure:
    """Draw how many rows were given to the component of their domain, and how sure methods were."""
    return _plot(run, point, "split_purity")


def _study(run: Run) -> Study:
    if isinstance(run, str | Path):
        return read_study(Path(run))
    if not isinstance(run, Found):
        raise refused("run", run, "a run folder, or what ft.run or ft.results returned")
    return run.study


def _at(run: Run, point: str | None) -> tuple[ExperimentRecord, Summary]:
    """Return record and summary of a point of a sweep; without a sweep of the only one."""
    study = _study(run)
    points = [record.point for record in study.records]
    if point is None and len(points) > 1:
        raise refused("point", point, ", ".join(points))
    if point is not None and points == [""]:
        raise refused("point", point, "none, as this is no sweep")
    if point is not None and point not in points:
        raise unknown("point", point, points)
    number = 0 if point is None else points.index(point)
    if not study.summaries[number].methods:
        raise FedtideError(f"{study.root}: no run is finished yet")
    return study.records[number], study.summaries[number]


def _plot(run: Run, point: str | None, name: str) -> Figure:
    """Return the picture of this name in `PICTURES`."""
    return _shown(PICTURES[name].draw(*_at(run, point)), PICTURES[name].needs)


def _shown(drawn: Drawn | None, needs: str = "") -> Figure:
    """Return the figure on white paper, which a notebook shows, also without pyplot.

    Raises:
        FedtideError: there is nothing to draw.
    """
    if drawn is None:
        raise FedtideError(f"plot: this run has nothing of the kind; needed: {needs}")
    figure: Any = drawn.figure
    figure.set_facecolor("white")
    figure.set_layout_engine("constrained")  # what is added finds its place
    figure._repr_svg_ = partial(_svg, figure)
    return figure


def _svg(figure: Figure) -> str:
    with io.StringIO() as buffer, matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format="svg")
        return buffer.getvalue()
