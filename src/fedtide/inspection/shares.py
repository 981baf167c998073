"""Distances of shares, of labels or cells of features, between clients, hours or periods."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from fedtide.core.rng import Rng

SHUFFLES = 40
"""Number of shuffles that a difference is compared with."""
NEARLY = 0.9
"""Share of the variance of periods that steps explain, if the course goes in steps."""
APART = 0.05
"""Share that steps explain more than a line, if the course goes in steps: three make nearly a line."""
CLEAR = 4.0
"""Standard deviations above the mean of the shuffles from which a difference is no accident.

If shuffles are normal one in five thousand lies there, as told by 40 of them; told by 16, one in a thousand."""


@dataclass(frozen=True)
class Against:
    """A statistic of the data, and its mean and standard deviation over shuffles of the same data."""

    seen: float
    chance: float
    spread: float

    @classmethod
    def of(cls, seen: float, shuffled: Iterable[float]) -> "Against":
        """Compare a statistic with its values of shuffled data.

        >>> Against.of(3.0, [1.0, 2.0, 1.0, 2.0])
        Against(seen=3.0, chance=1.5, spread=0.5)
        """
        values = np.array(list(shuffled))
        return cls(float(seen), float(values.mean()), float(values.std()))

    @property
    def clear(self) -> bool:
        """True if hardly any shuffle would be as large."""
        return self.seen - self.chance > CLEAR * max(self.spread, 1e-9)

    @property
    def distance(self) -> float:
        """Size of a distance without what chance adds to its square; 0 unless it is clear.

        >>> round(Against(0.5, 0.3, 0.01).distance, 6), Against(0.31, 0.3, 0.01).distance
        (0.4, 0.0)
        """
        return float(np.sqrt(self.seen**2 - self.chance**2)) if self.clear else 0.0

    @property
    def gain(self) -> float:
        """Size of a gain less what chance gains, at most what was seen; 0 unless it is clear.

        >>> Against(0.25, 0.05, 0.01).gain, Against(0.25, -0.05, 0.01).gain
        (0.2, 0.25)
        """
        return max(float(self.seen - max(self.chance, 0.0)), 0.0) if self.clear else 0.0


def against(statistic: Callable[[np.ndarray], float], column: np.ndarray, shuffled: Iterable[np.ndarray]) -> Against:
    """Compare a statistic of a column with the same statistic of the column shuffled."""
    return Against.of(statistic(column), map(statistic, shuffled))


# -- shuffles ----------------------------------------------------------------------------------------------------------


Shuffle = Callable[[np.random.Generator], np.ndarray]
"""One shuffle of a column, drawn from a generator."""


def draw_shuffles(shuffle: Shuffle, rng: Rng, count: int = SHUFFLES) -> Iterable[np.ndarray]:
    """Yield shuffles of a column, one from each key."""
    return (shuffle(rng.at(number).numpy()) for number in range(count))


def anywhere(values: np.ndarray) -> Shuffle:
    """Shuffle a column over all rows."""
    return lambda draw: draw.permutation(values)


def within(values: np.ndarray, label: np.ndarray) -> Shuffle:
    """Shuffle a column among rows of the same label: effects of labels alone stay.

    >>> within(np.array([5, 6, 7]), np.array([0, 1, 0]))(np.random.default_rng(0))[1]
    np.int64(6)
    """
    order = np.argsort(label, kind="stable")

    def shuffle(draw: np.random.Generator) -> np.ndarray:
        shuffled = np.empty_like(values)
        shuffled[order] = values[np.lexsort((draw.random(len(values)), label))]
        return shuffled

    return shuffle


def rotated(slot: np.ndarray, cycle: np.ndarray, slots: int) -> Shuffle:
    """Turn every cycle (a day) by its own phase: clumps within a cycle stay, the hour means nothing.

    >>> turned = rotated(np.array([0, 1, 0]), np.array([0, 0, 1]), 24)(np.random.default_rng(0))
    >>> (turned[1] - turned[0]) % 24
    np.int64(1)
    """
    number = np.unique(cycle, return_inverse=True)[1]
    return lambda draw: (slot + draw.integers(0, slots, number.max() + 1)[number]) % slots


def between_blocks(client: np.ndarray, cycle: np.ndarray) -> Shuffle:
    """Give every client's day (client, cycle) to a random client: hours of one day stay, habits do not.

    >>> owner = between_blocks(np.array([0, 0, 1]), np.array([0, 0, 0]))(np.random.default_rng(0))
    >>> bool(owner[0] == owner[1])
    True
    """
    number = np.unique(cycle, return_inverse=True)[1]
    blocks, block = np.unique(client.astype(np.int64) * (number.max() + 1) + number, return_inverse=True)
    owner = blocks // (number.max() + 1)
    return lambda draw: draw.permutation(owner)[block]


# -- statistics --------------------------------------------------------------------------------------------------------


def count_by(who: np.ndarray, what: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Count rows by two columns, such as client and label.

    >>> count_by(np.array([0, 0, 1]), np.array([1, 1, 0]), (2, 2)).tolist()
    [[0.0, 2.0], [1.0, 0.0]]
    """
    return np.bincount(who * size[1] + what, minlength=size[0] * size[1]).reshape(size).astype(np.float64)


def normalize(counts: np.ndarray) -> np.ndarray:
    """Divide each row by its sum; a row of zeros stays.

    >>> normalize(np.array([[1.0, 3.0], [0.0, 0.0]])).tolist()
    [[0.25, 0.75], [0.0, 0.0]]
    """
    return counts / np.maximum(counts.sum(1, keepdims=True), 1e-12)


def variation(mix: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the total variation distances (...) between shares (..., kinds)."""
    return np.asarray(0.5 * np.abs(mix - other).sum(-1))


def total_variation(counts: np.ndarray) -> float:
    """Mean total variation distance of the rows' shares to the pooled shares, weighted by counts.

    >>> total_variation(np.array([[2.0, 0.0], [0.0, 2.0]]))
    0.5
    """
    distances = variation(normalize(counts), counts.sum(0) / counts.sum())
    return float(distances @ counts.sum(1) / counts.sum())


def mean_distance(who: np.ndarray, what: np.ndarray, size: tuple[int, int]) -> float:
    """Mean total variation distance of the shares of each (client, slot, block) to the pooled shares, from rows."""
    return total_variation(count_by(who, what, size))


def dirichlet_alpha(counts: np.ndarray) -> float:
    """Alpha of the Dirichlet partition whose clients' label shares spread as much; infinite if chance explains them.

    Let p be shares of n rows drawn from a Dirichlet with mean q and sum of parameters A. The moment
    E sum (p - q)^2 = (1 - sum q^2) (r + (1 - r) / n) gives r = 1 / (1 + A). Alpha is A divided by the classes, as in
    `dirichlet` of a partition.

    Args:
        counts: (clients, classes) rows. Clients with fewer than five are left out; NaN if fewer than three are left.
    """
    counts = counts[counts.sum(1) >= 5]
    if len(counts) < 3 or (counts.sum(0) > 0).sum() < 2:
        return float("nan")
    rows, pooled = counts.sum(1), counts.sum(0) / counts.sum()
    distances = ((normalize(counts) - pooled) ** 2).sum(1) / (1 - (pooled**2).sum())
    ratio = (distances - 1 / rows) / (1 - 1 / rows)
    # Beyond some rows a client's mean is no better known, because clients differ.
    r = float(np.average(ratio, weights=rows / (1 + 0.2 * rows)))
    return max(1 - r, 0.0) / r / int((pooled > 0).sum()) if r > 0 else float("inf")


def change(slot: np.ndarray, client: np.ndarray, what: np.ndarray, size: tuple[int, int, int]) -> np.ndarray:
    """Split the change of a mix over slots into the part of other clients, and the part of other rows of the same.

    Kitagawa's decomposition: a third mix lies between the pooled mix and the mix of a slot: that of its clients if they
    held their mixes of all times.

    Args:
        slot: (rows,) hour, or period.
        client: (rows,) number of the client.
        what: (rows,) label, or cell of features.
        size: numbers of slots, clients and labels.

    Returns:
        Mean total variation of the part by other clients, and of the part by the same clients.
    """
    return changes(slot, client, what, size) @ (np.bincount(slot, minlength=size[0]) / len(slot))


def changes(slot: np.ndarray, client: np.ndarray, what: np.ndarray, size: tuple[int, int, int]) -> np.ndarray:
    """Return the distances (2, slots) of which `change` has the means; the distances of an empty slot mean nothing."""
    slots, clients, kinds = size
    mixes = normalize(count_by(client, what, (clients, kinds)))
    composed = normalize(count_by(slot, client, (slots, clients))) @ mixes
    return changes_of(count_by(slot, what, (slots, kinds)), composed)


def changes_of(counts: np.ndarray, composed: np.ndarray) -> np.ndarray:
    """Return the distances of `changes` from the rows of each slot (slots, kinds), and the mix of its clients."""
    return np.stack([variation(composed, counts.sum(0) / counts.sum()), variation(normalize(counts), composed)])


def course(means: np.ndarray) -> tuple[float, float, int]:
    """Explain the variance of block means (blocks, dims) by a straight line, and by the best single step.

    Returns:
        Share of the line, share of the step, and the first block after the step.

    >>> line, step, at = course(np.array([[0.0], [0.0], [0.0], [0.0], [1.0], [1.0], [1.0], [1.0]]))
    >>> round(line, 3), round(step, 3), at
    (0.762, 1.0, 4)
    """
    centered = means - means.mean(0)
    whole = float((centered**2).sum())
    if len(means) < 4 or whole <= 0:
        return 0.0, 0.0, 0
    slope = np.linspace(-1, 1, len(means))
    line = float((((slope / np.linalg.norm(slope)) @ centered) ** 2).sum())
    before = np.cumsum(centered, 0)[1:-2]  # two blocks or more on either side
    size = np.arange(2, len(means) - 1)[:, None]
    step = (before**2 / size + before**2 / (len(means) - size)).sum(1)
    return line / whole, float(step.max()) / whole, int(step.argmax()) + 2


def steps(means: np.ndarray, most: int = 4) -> tuple[tuple[int, ...], float]:
    """Find the fewest steps that explain nearly all of the variance of block means (blocks, dims).

    Segments between steps are of two blocks or more; dynamic programming finds the best ones of each number.

    Returns:
        The first block after each step, and the share of the variance that they explain; none if no number explains
        nearly all.

    >>> steps(np.array([[0.0], [0.0], [1.0], [1.0], [0.0], [0.0]]))
    ((2, 4), 1.0)
    """
    blocks = len(means)
    centered = means - means.mean(0)
    whole = float((centered**2).sum())
    if blocks < 4 or whole <= 0:
        return (), 0.0
    sums = np.concatenate([np.zeros((1, means.shape[1])), np.cumsum(centered, 0)])

    def between(begin: int, end: int) -> float:
        return float(((sums[end] - sums[begin]) ** 2).sum()) / (end - begin)

    # best[end]: the variance that the best segments up to `end` explain, and their beginnings.
    best: dict[int, tuple[float, tuple[int, ...]]] = {end: (between(0, end), (0,)) for end in range(2, blocks + 1)}
    for _ in range(most):
        best = {
            end: max((best[at][0] + between(at, end), (*best[at][1], at)) for at in range(2, end - 1) if at in best)
            for end in range(4, blocks + 1)
            if any(at in best for at in range(2, end - 1))
        }
        if blocks not in best:
            break
        explained, begins = best[blocks]
        if explained / whole >= NEARLY:
            return begins[1:], explained / whole
    return (), 0.0


def two_heaps(points: np.ndarray, weight: np.ndarray) -> tuple[float, np.ndarray]:
    """Divide points on a line into the two heaps with the largest share of the variance between them.

    Of a normal distribution it is 0.64, of a uniform one 0.75.

    Args:
        points: (points,) places.
        weight: (points,) weights.

    Returns:
        The share, and for each point whether it is in the upper heap.

    >>> share, upper = two_heaps(np.array([0.0, 4.0, 0.0, 4.0]), np.ones(4))
    >>> share, upper.tolist()
    (1.0, [False, True, False, True])
    """
    order = np.argsort(points, kind="stable")
    x, w = points[order] - np.average(points, weights=weight), weight[order]
    below, mass = np.cumsum(w * x)[:-1], np.cumsum(w)[:-1]
    between = below**2 / mass + below**2 / (w.sum() - mass)
    whole = float((w * x**2).sum())
    upper = np.zeros(len(points), dtype=bool)
    if whole <= 0:
        return 0.0, upper
    upper[order[int(between.argmax()) + 1 :]] = True
    return float(between.max()) / whole, upper
