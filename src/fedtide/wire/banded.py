"""Noise that is correlated over rounds, so that more of it cancels in the model: banded square roots.

Kalinin, Lampert: *Banded Square Root Matrix Factorization for Differentially Private Model Training*, NeurIPS 2024;
Choquette-Choo, Ganesh, McKenna, McMahan, Rush, Thakurta, Xu: *(Amplified) Banded Matrix Factorization*, NeurIPS 2023.

| symbol | meaning |
| --- | --- |
| `T` | rounds |
| `A` | (T, T) lower triangle of ones: a model is the sum of the updates so far |
| `c_j` | coefficients of (1-x)^(-1/2); all of them make the square root of `A` |
| `C` | (T, T) lower triangular, `c_j` on the first `b` diagonals |
| `k`, `d` | a client takes part in at most `k` rounds, which are at least `d >= b` apart |
| `z_t`, `n_t` | fresh standard normal noise, and what round t is noised with: n = C^-1 z |

What is released is `A (x + C^-1 z) = A C^-1 (C x + z)`: it follows from `C x + z`, the Gaussian mechanism on `C x`. One
client moves `C x` by the columns of its rounds, which do not overlap, as `d >= b`.

Choices:
    The columns at the end of a run are shorter, and count as what they are. A round that releases nothing keeps its
    place: `t` is the number of the round, so that distances between rounds are those between columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from fedtide.core.errors import refused

Vector = NDArray[np.float64]


def coefficients(bands: int) -> Vector:
    """Return the first coefficients c_j = binom(2j, j) / 4^j of (1-x)^(-1/2).

    >>> coefficients(4).tolist()
    [1.0, 0.5, 0.375, 0.3125]
    """
    j = np.arange(1, bands)
    return np.concatenate([[1.0], np.cumprod((2 * j - 1) / (2 * j))])


def correlated(fresh: Vector, before: Iterable[Vector], c: Vector) -> Vector:
    """Return the noise of a round: n_t = z_t - sum_j c_j n_(t-j), which is row t of C n = z.

    Args:
        fresh: z_t.
        before: n_(t-1), n_(t-2), ... as far as there are any.
        c: coefficients.

    >>> correlated(np.array([1.0]), [np.array([2.0])], coefficients(2)).tolist()
    [0.0]
    """
    noise = fresh.copy()
    for weight, past in zip(c[1:], before, strict=False):
        noise -= weight * past
    return noise


def inverse(bands: int, rounds: int) -> Vector:
    """Return the first coefficients of 1 / c(x): the noise of a round is the fresh noise of earlier ones by these.

    >>> inverse(2, 4).tolist()
    [1.0, -0.5, 0.25, -0.125]
    """
    c, made = coefficients(bands), np.zeros(rounds)
    for t in range(rounds):
        reach = min(t, bands - 1)
        made[t] = (t == 0) - c[1 : reach + 1] @ made[t - reach : t][::-1]
    return made


def sensitivity(bands: int, rounds: int, times: int, distance: int) -> float:
    """Return how far one client of norm 1 moves C x at most.

    Columns do not overlap, so it is the root of the sum of their squares; the earliest ones are the longest.

    Args:
        bands: b.
        rounds: T.
        times: k.
        distance: d.

    >>> sensitivity(1, 100, 4, 10), sensitivity(2, 100, 4, 10)  # sqrt(4), sqrt(4 * 1.25)
    (2.0, 2.23606797749979)
    """
    if not 1 <= bands <= distance:
        raise refused("bands", bands, f"1 to {distance}, the rounds between two answers of a client")
    return math.sqrt(moved(range(0, rounds, distance)[:times], bands, rounds))


def moved(places: Sequence[int], bands: int, rounds: int) -> float:
    """Return the squared norm by which a client that took part in these rounds moves C x, of `rounds` rounds so far."""
    norms = np.cumsum(coefficients(bands) ** 2)
    return float(sum(norms[min(bands, rounds - place) - 1] for place in places))


def error(bands: int, rounds: int, times: int, distance: int) -> float:
    """Return the root mean square error of the model over rounds, for noise of deviation 1 in place of `sensitivity`.

    It is `sensitivity * |A C^-1| / sqrt(T)` (Frobenius), at equal privacy for all numbers of bands.

    >>> round(error(1, 256, 8, 32), 1), round(error(32, 256, 8, 32), 1)
    (32.1, 9.0)
    """
    # The first column of A C^-1; those that follow are the same, further down.
    column = np.cumsum(inverse(bands, rounds))
    norm = math.sqrt(float((np.arange(rounds, 0, -1) * column**2).sum()))
    return sensitivity(bands, rounds, times, distance) * norm / math.sqrt(rounds)
