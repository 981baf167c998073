"""Rhythm of a population, found in sums: who takes part follows the slowest direction of the participants' mean.

Cohorts are drawn anew in every round, so chance leaves no memory in their mean. The turns of day and night do. The
direction is that of slow feature analysis (Wiskott, Sejnowski: *Slow Feature Analysis: Unsupervised
Learning of Invariances*, Neural Computation 14, 2002). A period is believed if it explains far more than the best
period of shuffled rounds, and if every cycle follows from the others. Ours.

| symbol | meaning |
| --- | --- |
| `n` | rounds that were heard |
| `d` | numbers of a sketch |
| `K` | groups that take turns |
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

HARMONICS = 3
"""Harmonics of a curve; with fewer rounds than twice as many in a period there is nothing to tell them by."""

LEAST = 4 * HARMONICS
"""Rounds before a look for a period: two of the shortest."""

LAGS = 1, 2
"""Rounds between two readings that should be alike."""

SHUFFLES = 19
"""Orders of the rounds without any memory, among which chance has its best try."""

WIDTH = 0.04
"""Width of the kernel of a curve, in periods: narrow enough to keep corners."""


@dataclass(frozen=True)
class Found:
    """Result of a look for a rhythm.

    Args:
        moves: whether there is a slow direction at all: more alike from round to round than any shuffle.
        periods: periods that are believed, the plainest first; none, one or two.
        gain: how much better than a constant the best period is, in BIC.
        chance: the largest gain among the shuffles.
    """

    moves: bool
    periods: tuple[float, ...]
    gain: float
    chance: float


def weights_of(counts: Array) -> Array:
    """Return weights of rounds (n,), 1 in the mean: participants, up to ten times the median.

    The more clients take part, the less noise is in a mean. In a large cohort the population's own noise remains.

    Args:
        counts: (n,) participants.

    >>> weights_of(np.array([10.0, 10.0, 20.0, 40.0]))
    array([0.5, 0.5, 1. , 2. ])
    """
    capped = np.minimum(counts, 10 * np.median(counts))
    return capped / capped.mean()


def slowest(series: Array, directions: int = 1, weights: Array | float = 1.0) -> tuple[Array, Array]:
    """Find the directions of a series whose readings change least from round to round.

    They have the largest autocorrelation at `LAGS`, in coordinates of equal noise, with a covariance shrunk the more
    the fewer rounds there are. The sign of a direction is arbitrary.

    Args:
        series: (n, d).
        directions: number of directions, the slowest first.
        weights: (n,) of the rounds, 1 in the mean: chance is the less, the more take part.

    Returns:
        Readings (n, directions) around 0, and the autocorrelation of each direction (directions,).
    """
    from scipy.linalg import eigh  # takes long to import

    n, d = series.shape
    root = np.sqrt(np.broadcast_to(weights, n))[:, None]
    noise = (np.diff(series, axis=0) / np.sqrt((root[1:] ** -2 + root[:-1] ** -2) / 2)).std(0) / np.sqrt(2)
    centered = (series - _mean(series, root)) / np.where(noise > 0, noise, 1.0)
    weighed = root * centered
    spread = weighed.T @ weighed / n
    spread += np.eye(d) * (np.trace(spread) / d * (0.05 + 0.5 * d / n) + 1e-12)
    alike = np.zeros((d, d))
    for lag in LAGS:
        product = weighed[lag:].T @ weighed[:-lag]
        alike += (product + product.T) / (2 * (n - lag) * len(LAGS))
    values, vectors = eigh(alike, spread, subset_by_index=[d - min(directions, d), d - 1])
    return (centered @ vectors)[:, ::-1], values[::-1]


def gains(times: Array, values: Array, frequencies: Array, weights: Array | float = 1.0) -> Array:
    """Return the gain in BIC of a periodic curve over a constant, for each frequency and series (frequencies, series).

    `n log(total / rest) - (2 H + 1) log n` with H harmonics, where the frequency counts as one more number.

    Args:
        times: (n,).
        values: (n, series).
        frequencies: cycles per unit of time.
        weights: (n,) of the rounds, 1 in the mean.
    """
    n, root = len(times), np.sqrt(np.broadcast_to(weights, len(times)))[:, None]
    values, waves = root * (values - _mean(values, root)), root * _waves(times, frequencies)
    # The ridge is for periods whose harmonics are alike at whole rounds.
    inner = waves.transpose(0, 2, 1) @ waves + 1e-6 * n * np.eye(waves.shape[2])
    product = waves.transpose(0, 2, 1) @ values
    explained = (product * np.linalg.solve(inner, product)).sum(1)
    total = (values**2).sum(0) + 1e-300
    return -n * np.log(np.maximum(1 - explained / total, 1e-3)) - waves.shape[2] * np.log(n)


def best_period(times: Array, values: Array, weights: Array | float = 1.0) -> tuple[float, float]:
    """Return the period with the largest gain, and that gain; multiples give way to a period that is nearly as good.

    Periods of 6 steps to two thirds of the heard rounds are tried, so that a period too long to be believed lends no
    gain. Where the best has not come twice, a part of it that has is taken, as it may be a multiple.

    Args:
        times: (n,) in order.
        values: (n,).
        weights: (n,) of the rounds, 1 in the mean.
    """
    grid = _grid(len(times)) / _step(times)
    frequency, gain = _near(
        times, values, weights, float(grid[gains(times, values[:, None], grid, weights)[:, 0].argmax()])
    )
    parts = [_near(times, values, weights, k * frequency) for k in (4, 3, 2) if k * frequency <= grid[-1]]
    for part in parts:
        if part[1] > gain - max(10.0, 0.1 * gain):
            return 1 / part[0], part[1]
    if parts and not _came_twice(times, 1 / frequency):
        part = max(parts, key=lambda candidate: candidate[1])
        return 1 / part[0], part[1]
    return 1 / frequency, gain


def _near(times: Array, values: Array, weights: Array | float, frequency: float) -> tuple[float, float]:
    """Return the best frequency near a point of the grid, and its gain."""
    grid = _grid(len(times)) / _step(times)
    width = 1 / (6 * len(times) * _step(times))
    near = np.clip(frequency + np.linspace(-width, width, 21), grid[0], 1 / (2 * HARMONICS * _step(times)))
    gain = gains(times, values[:, None], near, weights)[:, 0]
    return float(near[gain.argmax()]), float(gain.max())


def _came_twice(times: Array, period: float) -> bool:
    """Tell whether two cycles were heard; by noise, a period of half of what was heard may seem a little longer."""
    return period <= 1.05 * len(times) * _step(times) / 2


def told_by_others(times: Array, values: Array, period: float, weights: Array | float = 1.0) -> float:
    """Return the share of the variance of each cycle that a curve fitted to the other cycles explains; at most 1.

    A step or a slow drift is well described by some curve, but no cycle of it tells another: then it is not positive.

    Args:
        times: (n,) in order, two cycles at least.
        values: (n,).
        period: length of a cycle.
        weights: (n,) of the rounds, 1 in the mean.
    """
    cycles = max(round((times[-1] - times[0] + _step(times)) / period), 2)
    parts = _fits(times, values, period, np.minimum((times - times[0]) // period, cycles - 1), weights)
    return 1 - sum(left for left, _ in parts) / (sum(whole for _, whole in parts) + 1e-300)


def told_within(times: Array, values: Array, period: float, longer: float, weights: Array | float = 1.0) -> bool:
    """Tell whether the curve of a period is in most parts of a longer one: each of which then follows from the others.

    More than two thirds of the parts are asked for, as there may be no rhythm on two days of a week. A smooth week
    rounds off corners, which come again in every week. They are waves of a day's length, too, but lie in a few days,
    and no other day tells of them.

    Args:
        times: (n,) in order.
        values: (n,), what the longer period leaves.
        period: length of a part.
        longer: length of the longer period, three parts at least.
        weights: (n,) of the rounds, 1 in the mean.
    """
    part = np.floor(times % longer / longer * round(longer / period))
    parts = _fits(times, values, period, part, weights)
    return sum(left < whole for left, whole in parts) > 2 / 3 * len(parts)


def _fits(times: Array, values: Array, period: float, part: Array, weights: Array | float) -> list[tuple[float, float]]:
    """Return the sum of squares of each part (n,) that a curve fitted to the others leaves, and the sum before."""
    root = np.sqrt(np.broadcast_to(weights, len(times)))
    values, waves = root * (values - _mean(values, root)), root[:, None] * _waves(times, np.array([1 / period]))[0]
    parts = []
    for fold in np.unique(part):
        others, cycle = part != fold, part == fold
        inner = waves[others].T @ waves[others] + 1e-3 * others.sum() * np.eye(waves.shape[1])
        curve = np.linalg.solve(inner, waves[others].T @ values[others])
        parts.append((float(((values[cycle] - waves[cycle] @ curve) ** 2).sum()), float((values[cycle] ** 2).sum())))
    return parts


def read_shares(series: Array, groups: int, counted: Array, weights: Array | float = 1.0) -> Array:
    """Return the share of each group in each round (n, K), from the readings of the slowest directions.

    A group's own reading is the most extreme one, in means of three rounds. It is five rounds if the three had fewer
    participants than a mean round: shares are between the extremes seen.

    Args:
        series: (n, d) sketches of the rounds, three at least.
        groups: K.
        counted: (n, K) shares as they were told before, or counted; they say which group is which.
        weights: (n,) of the rounds, 1 in the mean.
    """
    readings, w = slowest(series, groups - 1, weights)[0], np.broadcast_to(weights, len(series))[:, None]
    both = np.concatenate([w, w * readings], 1)
    summed = both[:-2] + both[1:-1] + both[2:]
    few = summed[:, 0] < 1
    summed[1:][few[1:]] += both[:-3][few[1:]]
    summed[:-1][few[:-1]] += both[3:][few[:-1]]
    shares = shares_between(readings, extremes(summed[:, 1:] / summed[:, :1], groups))
    return shares[:, order_like(shares, counted)]


def look(times: Array, series: Array, draw: np.random.Generator, weights: Array | float = 1.0) -> Found:
    """Look for a slow direction of a series, and for one or two periods in it.

    A period is believed on three conditions. Its gain is above 1.5 times the largest of shuffled rounds, each with its
    own direction, and 10 more. Two whole cycles were heard. The cycles tell at least half as much of one another as the
    curve explains. A second period is sought in what the first leaves, and shuffled are rounds of the
    same phase there: corners that the first curve rounds off come again in every cycle, and are no period of their own.
    A day in a stronger week comes again, too: a part of the first period is believed beside shuffles of all rounds, if
    most such parts follow from the others.

    Args:
        times: (n,) in order.
        series: (n, d) sketches of the rounds.
        draw: for the shuffles.
        weights: (n,) of the rounds, 1 in the mean. A round that a shuffle puts elsewhere takes the noise of that place.
    """
    readings, (alike, *_) = slowest(series, weights=weights)
    orders = [draw.permutation(len(times)) for _ in range(SHUFFLES)]
    root = np.sqrt(np.broadcast_to(weights, len(times)))
    middle = _mean(series, root[:, None])
    shuffled = [
        slowest(series[order] + (series[order] - middle) * (root[order] / root - 1)[:, None], weights=weights)
        for order in orders
    ]
    moves = bool(alike > 1.2 * max(values[0] for _, values in shuffled))
    values = readings[:, 0]
    first, gain, chance = _believed(times, values, np.concatenate([readings for readings, _ in shuffled], 1), weights)
    if first is None:
        return Found(moves, (), gain, chance)
    left = values - folded(times, values[:, None], first, times, weights)[:, 0]
    phase = np.floor(times % first / _step(times))
    shuffled_left = np.empty((len(times), SHUFFLES))
    swaps = np.stack([np.lexsort((draw.random(len(times)), phase)) for _ in orders], 1)
    place = np.argsort(phase)
    shuffled_left[place] = left[swaps] * (root[swaps] / root[place, None])
    second, *_ = _believed(times, left, shuffled_left, weights)
    if second is None:
        places = np.stack(orders, 1)
        part, *_ = _believed(times, left, left[places] * (root[places] / root[:, None]), weights)
        if part is not None and round(first / part) >= 3 and told_within(times, left, part, first, weights):
            second = part
    return Found(True, (first,) if second is None else (first, second), gain, chance)


def _believed(
    times: Array, values: Array, shuffled: Array, weights: Array | float
) -> tuple[float | None, float, float]:
    """Return the period, or None if it is not believed; its gain; and the largest of the shuffled series (n, s)."""
    n = len(times)
    if n < LEAST:
        return None, 0.0, 0.0
    period, gain = best_period(times, values, weights)
    chance = float(gains(times, shuffled, _grid(n) / _step(times), weights).max())
    if gain <= 1.5 * max(chance, 0.0) + 10 or not _came_twice(times, period):
        return None, gain, chance
    explained = 1 - np.exp(-(gain + (2 * HARMONICS + 1) * np.log(n)) / n)
    return (period if told_by_others(times, values, period, weights) > explained / 2 else None), gain, chance


def curve(times: Array, values: Array, periods: Sequence[float], at: Array, weights: Array | float = 1.0) -> Array:
    """Return the sum of the curves of one or two periods at other times (at, series).

    Args:
        times: (n,).
        values: (n, series).
        periods: their lengths; the curve of each is of what the earlier ones leave.
        at: times, also of the future.
        weights: (n,) of the rounds.
    """
    total, left = np.zeros((len(at), values.shape[1])), values
    for period in periods:
        total = total + folded(times, left, period, at, weights)
        left = left - folded(times, left, period, times, weights)
    return total


def folded(times: Array, values: Array, period: float, at: Array, weights: Array | float = 1.0) -> Array:
    """Return means of the values at nearly the same phase of a period (at, series).

    Args:
        times: (n,).
        values: (n, series).
        period: its length.
        at: times, also of the future.
        weights: (n,) of the rounds.
    """
    phases = np.abs((at[:, None] - times[None]) / period)
    phases = np.minimum(phases % 1, -phases % 1)
    kernel = weights * (np.exp(-0.5 * (phases / WIDTH) ** 2) + 1e-300)
    return kernel @ values / kernel.sum(1, keepdims=True)


def extremes(points: Array, groups: int) -> Array:
    """Return K points that lie farthest apart (K, K - 1): the readings of rounds with one group alone.

    The first is farthest from the mean, and each further one from the plane through those before.

    Args:
        points: (n, K - 1).
        groups: K.
    """
    chosen = [int(((points - points.mean(0)) ** 2).sum(1).argmax())]
    left = points - points[chosen[0]]
    for _ in range(groups - 1):
        length = (left**2).sum(1)
        chosen.append(int(length.argmax()))
        unit = left[chosen[-1]] / max(float(np.sqrt(length.max())), 1e-150)
        left = left - np.outer(left @ unit, unit)
    return points[chosen]


def shares_between(points: Array, corners: Array) -> Array:
    """Return the shares (n, K) of groups whose own readings are the corners; beyond them, those of the nearest edge.

    Args:
        points: (n, K - 1).
        corners: (K, K - 1).

    >>> shares_between(np.array([[0.25], [3.0]]), np.array([[0.0], [1.0]]))
    array([[0.75, 0.25],
           [0.  , 1.  ]])
    """
    edges = (corners[1:] - corners[0]).T
    others = (points - corners[0]) @ np.linalg.pinv(edges).T
    shares = np.concatenate([1 - others.sum(1, keepdims=True), others], 1).clip(0, 1)
    return shares / shares.sum(1, keepdims=True)


def order_like(shares: Array, past: Array) -> NDArray[np.int64]:
    """Return which group is which (K,): the order in which the shares go along best with known ones.

    Args:
        shares: (n, K), in any order of the groups.
        past: (n, K), as they were told in the past.

    >>> shares = np.array([[1.0, 0.0], [0.3, 0.7]])
    >>> order_like(shares, 1 - shares)
    array([1, 0])
    """
    from scipy.optimize import linear_sum_assignment

    covariance = (past - past.mean(0)).T @ (shares - shares.mean(0))
    return linear_sum_assignment(-covariance)[1]


def _waves(times: Array, frequencies: Array) -> Array:
    """Return 1 and the cosines and sines of the harmonics (frequencies, n, 2 H + 1)."""
    angle = 2 * np.pi * frequencies[:, None, None] * times[None, :, None] * np.arange(1, HARMONICS + 1)
    ones = np.ones((len(frequencies), len(times), 1))
    return np.concatenate([ones, np.cos(angle), np.sin(angle)], 2)


def _grid(n: int) -> Array:
    """Return frequencies in cycles per step, six times as dense as `n` steps can tell apart."""
    return np.arange(1.5 / n, 1 / (2 * HARMONICS) + 1e-12, 1 / (6 * n))


def _mean(values: Array, root: Array) -> Array:
    """Return the mean over rounds, by the roots of their weights."""
    return (root**2 * values).mean(0)


def _step(times: Array) -> float:
    """Return the mean time between rounds."""
    return float(times[-1] - times[0]) / (len(times) - 1)
