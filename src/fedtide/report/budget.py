"""The privacy budget in reports: epsilon over rounds, and the accuracy that it bought."""

from __future__ import annotations

from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from fedtide.report.clock import accuracy_against
from fedtide.report.figures import (
    STYLE,
    Drawn,
    band,
    from_below,
    label,
    legend_above,
    look,
    over_rounds,
    svg,
)
from fedtide.report.reading import ExperimentRecord, RunRecord


def epsilon_and_accuracy(record: ExperimentRecord) -> Drawn | None:
    """Draw epsilon over rounds, and accuracy over epsilon, means over seeds; None where no method spends any."""
    drawn = [(n, m) for n, m in enumerate(record.methods) if m.runs and all(len(spent(run)) for run in m.runs)]
    if not drawn:
        return None
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 3.6))
        axes: Any = figure.subplots(1, 2)
        bought = {number: accuracy_against(record, method, spent) for number, method in drawn}
        for number, method in drawn:
            curves = [(np.arange(1, len(spent(run)) + 1), spent(run)) for run in method.runs]
            band(axes[0], curves, label(method.name), look(number), scale=1.0)
            band(axes[1], bought[number], label(method.name), look(number))
        axes[0].set_ylabel("epsilon spent")
        axes[0].set_ylim(bottom=0)
        over_rounds(axes[0], 0, record.experiment.rounds)
        axes[1].set_xlabel("epsilon spent")
        axes[1].set_ylabel(f"{record.experiment.score} of {record.whose}, %")
        from_below(axes[1], [values for curves in bought.values() for _, values in curves])
        legend_above(axes[0])
        return svg(figure, "privacy budget")


def spent(run: RunRecord) -> np.ndarray:
    """Return epsilon after each round (rounds,); none where sums are not private."""
    found = run.every_round(lambda line: line.get("epsilon"))
    return found if np.isfinite(found).all() else found[:0]
