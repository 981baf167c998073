"""Pictures of the report as figures of matplotlib, which can be changed.

Each takes a run folder, or what `ft.run` and `ft.results` return, and of a sweep the name of a `point`, as its report
writes it. A run that has nothing of the kind is one clear line.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import matplotlib
from matplotlib.figure import Figure

from fedtide.core.errors import FedtideError, refused, unknown
from fedtide.report import (
    budget,
    clock,
    cluster_maps,
    drift_pictures,
    figures,
    gating,
    heatmaps,
    mixtures,
    nodes,
    server_clock,
)
from fedtide.report.figures import STYLE, Drawn
from fedtide.report.reading import ExperimentRecord
from fedtide.report.summary import Study, Summary, names_of, read_study


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
    record, summary = _at(run, point)
    return _shown(figures.accuracy_over_rounds(record, summary.at_floor))


def accuracy_of_all(*runs: Run) -> Figure:
    """Draw accuracy over rounds of the methods of several run folders."""
    studies = [_study(run) for run in runs]
    named = zip(names_of([study.root for study in studies]), studies, strict=True)
    each = [(name, record) for name, study in named for record in study.records]
    shown = [(" · ".join(filter(None, (name, record.point))), record) for name, record in each]
    return _shown(figures.accuracy_of_all(shown))


def accuracy_over_time(run: Run, point: str | None = None) -> Figure:
    """Draw accuracy over the simulated clock."""
    return _plot(run, point, clock.accuracy_over_seconds, "rounds of different lengths")


def blend(run: Run, point: str | None = None) -> Figure:
    """Draw how large a method takes each component to be, and how large its domain is."""
    return _plot(run, point, mixtures.blend_learned, "a method with components, and clients with a blend of domains")


def branches(run: Run, point: str | None = None) -> Figure:
    """Draw how many rows the branch or model of their true group answers, and who trains the first group's."""
    return _plot(run, point, figures.branches, "groups of clients, and a method with branches or models")


def budget_spent(run: Run, point: str | None = None) -> Figure:
    """Draw what everybody may see of the run says of any one client, and the accuracy at which it was spent."""
    return _plot(run, point, budget.epsilon_and_accuracy, "[wire] privacy")


def client_losses(run: Run, point: str | None = None) -> Figure:
    """Draw the training loss over the participants of each round."""
    return _plot(run, point, mixtures.client_losses, "clients with a blend of domains")


def clients(run: Run, point: str | None = None) -> Figure:
    """Draw the share of clients with at most a given accuracy."""
    return _plot(run, point, figures.client_distribution, "evaluations of clients")


def clusters(run: Run, point: str | None = None) -> Figure:
    """Draw which model or branch answers for each client over time."""
    record, summary = _at(run, point)
    return _shown(cluster_maps.clusters_over_time(record, summary.clustered), "clusters of clients")


def drift(run: Run, point: str | None = None) -> Figure:
    """Draw how unlike clients of a cluster are, how many clusters there are, and how many clients moved."""
    return _plot(run, point, drift_pictures.following_over_rounds, "clients that drift")


def forgetting(run: Run, point: str | None = None) -> Figure:
    """Draw what each participant's training cost on the rows of others, in each probed round."""
    return _plot(run, point, heatmaps.local_forgetting, "[forgetting]")


def forgetting_over_rounds(run: Run, point: str | None = None) -> Figure:
    """Draw the mean of what local training cost, over the probed rounds."""
    return _plot(run, point, heatmaps.forgetting_over_rounds, "[forgetting] of several rounds")


def gate_weights(run: Run, point: str | None = None) -> Figure:
    """Draw how much of a prediction comes from which expert."""
    return _plot(run, point, gating.gate_weights, "a method that mixes experts")


def gate_weights_over_sweep(run: Run) -> Figure:
    """Draw the weight of clients' own experts along a sweep."""
    return _shown(gating.own_weight_over_sweep(_study(run)), "a sweep of a method that mixes experts")


def groups(run: Run, point: str | None = None) -> Figure:
    """Draw the accuracy of each group from the first round to the last, and whose turn it was."""
    return _plot(run, point, heatmaps.groups_over_rounds, "three groups of clients, or no whole period to fold")


def labels(run: Run, point: str | None = None) -> Figure:
    """Draw who holds which labels."""
    return _plot(run, point, heatmaps.label_shares, "labels that differ between clients")


def local_models(run: Run, point: str | None = None) -> Figure:
    """Draw how good each participant's own model is on everyone's rows, in the last probed round."""
    return _plot(run, point, heatmaps.after_local_training, "[forgetting]")


def nodes_over_rounds(run: Run, point: str | None = None) -> Figure:
    """Draw what became of each node of real clients."""
    return _plot(run, point, nodes.nodes_over_rounds, "real clients")


def participants(run: Run, point: str | None = None) -> Figure:
    """Draw the accuracy of the model as it was sent out, on the participants' own training rows."""
    return _plot(run, point, figures.participants, "a method whose clients take the model as it is")


def period(run: Run, point: str | None = None) -> Figure:
    """Draw the last rounds folded into one period, by group of clients."""
    return _plot(run, point, figures.one_period, "a whole period in which groups take turns")


def rhythm(run: Run, point: str | None = None) -> Figure:
    """Draw the rhythm that a learned prior found, and the true one."""
    return _plot(run, point, server_clock.server_clock, 'a method with prior = "learned"')


def split_purity(run: Run, point: str | None = None) -> Figure:
    """Draw how many rows were given to the component of their domain, and how sure methods were."""
    return _plot(run, point, mixtures.split_purity, "a method that splits rows, and clients with a blend of domains")


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


def _plot(run: Run, point: str | None, draw: Callable[[ExperimentRecord], Drawn | None], needs: str) -> Figure:
    return _shown(draw(_at(run, point)[0]), needs)


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
