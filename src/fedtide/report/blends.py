"""Measures of one run whose clients hold a blend of domains.

A method's components have no names. A single matching of components and domains, the best over all rounds together,
gives the component of each domain; a new matching every round would flatter a split that changes over time.
"""

from __future__ import annotations

import math

import numpy as np

from fedtide.evaluate.metrics import matched
from fedtide.report.reading import RunRecord

COLLAPSED = 0.95
"""Share of training rows above which a single component counts as having taken them all."""

FINE = 1_000_000
"""Steps into which a share is cut, as the matching counts in whole numbers."""


def true_shares(run: RunRecord) -> np.ndarray:
    """Return the share of each domain among the participants' rows (rounds, domains); (rounds, 0) without domains."""
    return run.every_row(lambda line: line.get("domains"))


def learned_shares(run: RunRecord) -> np.ndarray:
    """Return the share of each component that the method reports as fact `pi` (rounds, K); (rounds, 0) without one."""
    return run.every_row(lambda line: line.get("facts", {}).get("pi"))


def split_counts(run: RunRecord) -> np.ndarray:
    """Count the rows of each domain at each component (rounds, domains, K); 0 in rounds without a split."""
    tables = [np.array(line.get("split") or np.zeros((0, 0)), dtype=np.float64) for line in run.lines]
    domains, wide = (max((table.shape[axis] for table in tables), default=0) for axis in (0, 1))
    out = np.zeros((len(tables), domains, wide))
    for row, table in zip(out, tables, strict=True):
        row[: table.shape[0], : table.shape[1]] = table
    return out


def components(run: RunRecord) -> tuple[int, ...]:
    """Return the component of each domain; K or more for a domain without one, () if unknown.

    Matched by the split of rows, over all rounds together, or else by the distance of `pi` to the true shares.
    """
    went = split_counts(run).sum(axis=0)
    if went.any():
        return matched(went.astype(np.int64))
    pi, true = learned_shares(run), true_shares(run)
    told = np.isfinite(pi).all(axis=1) & np.isfinite(true).all(axis=1)
    if not pi.shape[1] or not true.shape[1] or not told.any():
        return ()
    near = 1 - np.abs(true[told, :, None] - pi[told, None, :])
    return matched(np.round(FINE * near.sum(axis=0)).clip(0).astype(np.int64))


def shares_by_domain(run: RunRecord) -> np.ndarray:
    """Return `pi` of the component of each domain (rounds, domains); NaN where there is no component or no `pi`."""
    pi, own = learned_shares(run), components(run)
    out = np.full((len(pi), len(own)), np.nan)
    for domain, component in enumerate(own):
        if component < pi.shape[1]:
            out[:, domain] = pi[:, component]
    return out


def purities(run: RunRecord) -> np.ndarray:
    """Return the share of training rows at the component of their domain (rounds,); NaN in rounds without a split."""
    right, total = _at_home(run)
    return np.divide(right, total, out=np.full(len(total), np.nan), where=total > 0)


def trivial_purities(run: RunRecord) -> np.ndarray:
    """Return the purity of a split with a single component (rounds,): the share of the largest domain."""
    held = split_counts(run).sum(axis=2)
    total = held.sum(axis=1)
    largest = held.max(axis=1, initial=0.0)
    return np.divide(largest, total, out=np.full(len(total), np.nan), where=total > 0)


def _at_home(run: RunRecord) -> tuple[np.ndarray, np.ndarray]:
    """Count in each round the rows at the component of their domain, and all rows."""
    table = split_counts(run)
    own = components(run) if table.any() else ()
    right = np.zeros(len(table))
    for domain, component in enumerate(own):
        if component < table.shape[2]:
            right += table[:, domain, component]
    return right, table.sum(axis=(1, 2))


def blending(run: RunRecord, window: int) -> dict[str, float]:
    """Return the measures of a blend that the run has data for: see docs/reports.md.

    Args:
        run: record of the run.
        window: rounds over which late means are taken; purity and the error of shares cover the second half of the run,
            their correlation covers all of it.
    """
    out = {}
    half = len(run.lines) // 2
    right, total = (column[half:].sum() for column in _at_home(run))
    if total:
        out["split_purity"] = float(right / total)
    pi, true = shares_by_domain(run), true_shares(run)
    if pi.shape[1] and pi.shape == true.shape:
        out["share_error"] = _mean(np.abs(pi - true)[half:])
        out["share_correlation"] = correlation(pi[:, 0], true[:, 0])
    out |= _fullest(run, half)
    for name, fact in (("posterior_entropy", "entropy"), ("log_likelihood", "log_likelihood")):
        values = run.fact(fact)
        if np.isfinite(values).any():
            out[name] = _mean(values[-window:])
    trained = run.fact("loss")
    if np.isfinite(trained).any():
        out["training_loss"] = _mean(trained[-window:])
    spread = loss(run, "q75") - loss(run, "q25")
    if np.isfinite(spread).any():
        out["loss_spread"] = _mean(spread[-window:])
    return out


def loss(run: RunRecord, quantile: str) -> np.ndarray:
    """Return a quantile of the participants' training losses (rounds,): "min", "q25", "q50", "q75" or "max"."""
    return run.every_round(lambda line: line.get("client_loss", {}).get(quantile))


def _fullest(run: RunRecord, half: int) -> dict[str, float]:
    """Return the mean share of the fullest component from round `half` on; empty where one domain has all rows."""
    table = split_counts(run)[half:]
    rows, domains = table.sum(axis=1), true_shares(run)[half:]
    if not domains.shape[1]:
        domains = _shares(table.sum(axis=2))
    shares = _shares(rows) if rows.any() else learned_shares(run)[half:]
    if shares.shape[1] < 2 or not _columns(domains).size or _columns(domains).max() > COLLAPSED:
        return {}
    means = _columns(shares)
    return {"fullest_component": float(means.max())} if means.size else {}


def _shares(counts: np.ndarray) -> np.ndarray:
    """Return counts (rounds, K) as shares; NaN in rounds without any."""
    total = counts.sum(axis=1, keepdims=True)
    return np.divide(counts, total, out=np.full(counts.shape, np.nan), where=total > 0)


def _columns(table: np.ndarray) -> np.ndarray:
    """Return the mean of each column over the rounds that have all of them; () without such rounds."""
    known = table[np.isfinite(table).all(axis=1)]
    return known.mean(axis=0) if known.size else np.zeros(0)


def _mean(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if known.size else math.nan


def correlation(left: np.ndarray, right: np.ndarray) -> float:
    """Return Pearson's correlation over the rounds where both are known; NaN where one of them is constant.

    >>> correlation(np.array([0.0, 0.5, 1.0]), np.array([1.0, 2.0, 3.0])), correlation(np.ones(3), np.arange(3.0))
    (1.0, nan)
    """
    both = np.isfinite(left) & np.isfinite(right)
    left, right = left[both], right[both]
    if not both.any() or np.ptp(left) < 1e-12 or np.ptp(right) < 1e-12:
        return math.nan
    return float(np.corrcoef(left, right)[0, 1])


# -- cycles ------------------------------------------------------------------------------------------------------------


def extremes(run: RunRecord, view: str, cycles: float | None) -> np.ndarray:
    """Return lowest and highest accuracy in each whole cycle (cycles, 2); NaN without an evaluation.

    A cycle that the end of the run cuts off is left out, as its peak may be yet to come.

    Args:
        run: record of the run.
        view: evaluated view.
        cycles: number of cycles over the run; None gives none.
    """
    after, values = run.accuracy(view)
    whole = 0 if cycles is None else int(cycles)
    out = np.full((whole, 2), np.nan)
    if cycles is None or not len(after):
        return out
    # An evaluation belongs to the round before it: of 200 rounds in two cycles the first has 1 to 100.
    place = np.floor((after - 1) * cycles / run.rounds)
    for cycle in range(whole):
        inside = values[place == cycle]
        if len(inside):
            out[cycle] = inside.min(), inside.max()
    return out


def gains(run: RunRecord, view: str, cycles: float | None) -> dict[str, float]:
    """Return the gain of the last cycle's peak and trough over the second cycle's; empty with fewer than three cycles.

    The first cycle is no reference, as every method learns most in it and this would hide later gains.
    """
    found = extremes(run, view, cycles)
    if len(found) < 3:
        return {}
    trough, peak = (found[-1] - found[1]).tolist()
    return {"peak_gain": peak, "trough_gain": trough}
