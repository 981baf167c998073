"""Pictures of the report as figures of matplotlib, which can be changed.

Each takes a run folder, or the result of `ft.run` or `ft.results`, and for a sweep the name of a `point` as in its
report. A run without such a picture is one clear error.
"""

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from fedtide.core.errors import FedtideError, refused
from fedtide.draw.figures import STYLE, Drawn
from fedtide.report.accuracy import accuracy_of_all as draw_all
from fedtide.report.accuracy import accuracy_of_simulation
from fedtide.report.components import own_weight_over_sweep
from fedtide.report.run_records import ExperimentRecord
from fedtide.report.study import names_of, read_study
from fedtide.report.summary import Study
from fedtide.report.topics import PICTURES

__all__ = sorted([*PICTURES, "accuracy_of_all", "gate_weights_over_sweep"])


Run = Any
"""A run folder, or its result."""


def accuracy(run: Run, point: str | None = None) -> Figure:
    """Draw accuracy over rounds; below it the participants, their domains and drifted clients. Also of a simulation."""
    if hasattr(run, "accuracy"):
        return _shown(accuracy_of_simulation(run.rounds, run.accuracy))
    return _plot(run, point, "accuracy")


def accuracy_of_all(*runs: Run) -> Figure:
    """Draw accuracy over rounds of the methods of several run folders."""
    studies = [_study(run) for run in runs]
    names = names_of([study.root for study in studies])
    records = [(name, record) for name, study in zip(names, studies, strict=True) for record in study.records]
    return _shown(draw_all([(" · ".join(filter(None, (name, r.point))), r) for name, r in records]))


def gate_weights_over_sweep(run: Run) -> Figure:
    """Draw the weight of clients' own experts along a sweep."""
    return _shown(own_weight_over_sweep(_study(run)), "a sweep of a method that mixes experts")


def __getattr__(name: str) -> Callable[..., Figure]:
    """Return the function of any other picture in `PICTURES`."""
    if name not in PICTURES:
        raise AttributeError(f"module 'fedtide.report.plot' has no attribute '{name}'")

    def draw(run: Run, point: str | None = None) -> Figure:
        return _plot(run, point, name)

    draw.__name__ = draw.__qualname__ = name
    draw.__doc__ = (PICTURES[name].make.__doc__ or "").partition("\n")[0]
    return draw


def __dir__() -> list[str]:
    return __all__


def _study(run: Run) -> Study:
    if isinstance(run, str | Path):
        return read_study(Path(run))
    study = getattr(run, "study", None)
    if not isinstance(study, Study):
        raise refused("run", run, "a run folder, or the result of ft.run or ft.results")
    return study


def _record(run: Run, point: str | None) -> ExperimentRecord:
    """Return the record of a point of a sweep; without a sweep of the only one."""
    study = _study(run)
    points = [record.point for record in study.records]
    if point not in (points if len(points) > 1 else [None, *filter(None, points)]):
        raise refused("point", point, ", ".join(filter(None, points)) or "none, as this is no sweep")
    record = study.records[0 if point is None else points.index(point)]
    if not record.numbered:
        raise FedtideError(f"{study.root}: no run is finished yet")
    return record


def _plot(run: Run, point: str | None, name: str) -> Figure:
    """Return the picture of this name in `PICTURES`."""
    return _shown(PICTURES[name](_record(run, point)), PICTURES[name].needs)


def _shown(drawn: Drawn | None, needs: str = "") -> Figure:
    """Return the figure on white paper, which a notebook shows, also without pyplot.

    Raises:
        FedtideError: there is nothing to draw.
    """
    if drawn is None:
        raise FedtideError(f"plot: this run has no such picture; needed: {needs}")
    figure: Any = drawn.figure
    figure.set_facecolor("white")
    figure.set_layout_engine("constrained")  # later additions find a place
    figure._repr_svg_ = partial(_svg, figure)
    return figure


def _svg(figure: Figure) -> str:
    with io.StringIO() as buffer, matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format="svg")
        return buffer.getvalue()
