"""What learned priors found, in reports: measures, and the courses that pictures show."""

from __future__ import annotations

import numpy as np

from fedtide.mixtures.rhythm import order_like
from fedtide.report.reading import RunRecord


def listed_fact(run: RunRecord, name: str) -> np.ndarray:
    """Return a fact that is a list, of every round (rounds, longest); NaN where a round has none."""
    return run.every_row(lambda line: line.get("facts", {}).get(name))


def has_learned(run: RunRecord) -> bool:
    """Tell whether the run's prior is learned: it says how often it looked for a period."""
    return bool(np.isfinite(run.fact("chance")).any())


def periods_of(run: RunRecord) -> tuple[np.ndarray, np.ndarray]:
    """Return the periods of every round (rounds, longest), NaN where there is none, and whether one is believed."""
    periods = listed_fact(run, "periods")
    return periods, np.isfinite(periods[:, 0]) if periods.size else np.zeros(len(run.lines), dtype=bool)


def learning(run: RunRecord) -> dict[str, float]:
    """Return the measures of a learned prior; empty where there is none.

    A period that is never believed counts as one that is found when the run ends.
    """
    if not has_learned(run):
        return {}
    (periods, believed), read = periods_of(run), listed_fact(run, "prior")
    out = {
        "period_known": float(believed.mean()),
        "period_found": float(believed.any()),
        "rounds_to_period": float(believed.argmax() + 1 if believed.any() else len(believed)),
        "shares_known": float(np.isfinite(read[:, 0]).mean()) if read.size else 0.0,
    }
    if believed.any():
        out["learned_period"] = float(periods[believed][-1, 0])
    came = came_to(run)
    if read.size and came.shape == read.shape:
        told = np.isfinite(read[:, 0]) & np.isfinite(came[:, 0])
        if told.sum() > 1:
            out["shares_error"] = float(np.sqrt(((read[told][:, order_of(read, came)] - came[told]) ** 2).mean()))
    return out


def came_to(run: RunRecord) -> np.ndarray:
    """Return the shares of groups among the participants of each round (rounds, groups); NaN where it is not known."""
    counts = run.every_row(lambda line: line.get("groups"))
    total = counts.sum(1, keepdims=True) if counts.size else counts
    return counts / np.where(total > 0, total, np.nan)


def order_of(read: np.ndarray, came: np.ndarray) -> np.ndarray:
    """Return which share that was read (rounds, K) is which group's: a server has no names for them."""
    both = np.isfinite(read[:, 0]) & np.isfinite(came[:, 0])
    return order_like(read[both], came[both]) if both.sum() > 1 else np.arange(read.shape[1])
