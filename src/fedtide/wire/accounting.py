"""Privacy of a run: epsilon and delta of noise, the noise for an epsilon, and noise that is correlated over rounds.

Sources:
    Balle, Wang: *Improving the Gaussian Mechanism for Differential Privacy*, ICML 2018, Theorem 8. Without sampling all
    releases of a run are one Gaussian mechanism. Its sensitivity is that of the rounds of one client.

    Balle, Barthe, Gaboardi: *Privacy Amplification by Subsampling*, NeurIPS 2018, Theorem 11, for draws without
    replacement. Zhu, Dong, Wang: *Optimal Accounting of Differential Privacy via Characteristic Function*, AISTATS
    2022, for their composition, and for draws of each client by itself (Poisson). Both by the library dp-accounting.
    They hold if only the server knows who was drawn.

    Kalinin, Lampert: *Banded Square Root Matrix Factorization*, NeurIPS 2024.

    Choquette-Choo, Ganesh, McKenna, McMahan, Rush, Thakurta, Xu: *(Amplified) Banded Matrix Factorization*, NeurIPS
    2023.

| symbol | meaning |
| --- | --- |
| `z` | noise multiplier |
| `mu` | distance by which one client moves all that is released, in deviations of its noise |
| `T` | rounds |
| `A` | (T, T) lower triangle of ones: a model is the sum of the updates so far |
| `c_j` | coefficients of (1-x)^(-1/2); all of them make the square root of `A` |
| `C` | (T, T) lower triangular, `c_j` on the first `b` diagonals |
| `k`, `d` | a client takes part in at most `k` rounds, which are at least `d >= b` apart |
| `z_t`, `n_t` | fresh standard normal noise, and the noise of round t: n = C^-1 z |

A release is `A (x + C^-1 z) = A C^-1 (C x + z)`. So it follows from `C x + z`, the Gaussian mechanism on `C x`. One
client moves `C x` by the columns of its rounds. They do not overlap, because `d >= b`.

Choices:
    - Neighbors are two runs, of which in one the client's answers are zeros. That the client was asked is not hidden.
    - If clients come by the clock their sample is not uniform, and sampling gains nothing.
    - Without replacement a client that is not drawn has another in its place. So sampling is accounted for with twice
      the length. If each client is drawn by itself, the length is one. Then the number of those drawn must not be told.
    - The plan says the smaller of the bounds with and without sampling.
    - Numbers are rounded up: epsilon is never below the truth.
    - The columns at the end of a run are shorter, and count with their own length.
    - A round that releases nothing keeps its place: `t` is the number of the round.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtide.core.errors import FedtideError, refused, uninstalled

PRECISE = 1e-10
"""Relative width at which a search ends."""

POINTS = 4000
"""Points, on either side of 0, at which the privacy loss of a sum is looked at."""

FAR = 9.0
"""Deviations of noise beyond which a loss counts as infinite."""

Vector = NDArray[np.float64]

LARGEST = 1e9
"""Largest epsilon, and noise multiplier, that is looked for."""


@dataclass(frozen=True)
class Sampling:
    """Uniform draws.

    Args:
        drawn: participants of a round.
        clients: of how many.
        poisson: whether each client is drawn by itself, so that `drawn` is what is expected; False draws exactly so
            many, without replacement.
    """

    drawn: int
    clients: int
    poisson: bool = False

    @property
    def rate(self) -> float:
        """The chance of a client to be drawn."""
        return self.drawn / self.clients


@dataclass(frozen=True)
class Plan:
    """The releases of a run.

    Args:
        rounds: T.
        times: most rounds that a client is in.
        distance: least rounds from one of these to the next.
        bands: of the noise; 1 is fresh noise in each round.
        releases: sums that a client is in, in each of its rounds.
        sampling: draws that make it less likely that a client is in a round at all. Then every round may have it, and
            `times` is `rounds`.
    """

    rounds: int
    times: int
    distance: int = 1
    bands: int = 1
    releases: int = 1
    sampling: Sampling | None = None

    def epsilon(self, z: float, delta: float) -> float:
        """Return epsilon of the whole run."""
        always = epsilon_of(self.moved / z, delta)
        return always if self.sampling is None else min(always, self._drawn(self.sampling, z, delta))

    def noise(self, epsilon: float, delta: float) -> float:
        """Return the least noise multiplier at which the whole run has at most this epsilon."""
        always, draws = self.moved / mu_of(epsilon, delta), self.sampling
        if draws is None or self._drawn(draws, always, delta) > epsilon:
            return always
        return _least(lambda z: self._drawn(draws, z, delta) <= epsilon, width=1e-3)

    def _drawn(self, draws: Sampling, z: float, delta: float) -> float:
        # All sums of a round are over one draw: together one sum, of so many times the length.
        return sampled_epsilon(z / math.sqrt(self.releases), draws, self.rounds, delta)

    def spent(self, squared: float, z: float, delta: float) -> float:
        """Return epsilon for a client that moved C x by this squared length, at most the whole run's."""
        return epsilon_of(min(math.sqrt(squared), self.moved) / z, delta) if squared else 0.0

    @property
    def moved(self) -> float:
        """How far one client of length 1 moves all that is released, in deviations of noise of multiplier 1."""
        return math.sqrt(self.releases) * sensitivity(self.bands, self.rounds, self.times, self.distance)


def delta_of(mu: float, epsilon: float) -> float:
    """Return delta = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu).

    >>> round(delta_of(1.0, 0.0), 6), round(delta_of(1.0, 1.0), 6)
    (0.382925, 0.126937)
    """
    from scipy.special import log_ndtr, ndtr  # here, as every process that plays runs would wait for it

    if mu == 0:
        return 0.0
    return float(ndtr(mu / 2 - epsilon / mu) - math.exp(min(epsilon + float(log_ndtr(-mu / 2 - epsilon / mu)), 700)))


@lru_cache(maxsize=1024)
def epsilon_of(mu: float, delta: float) -> float:
    """Return the least epsilon for which `mu` has at most this delta.

    >>> round(epsilon_of(1.0, 1e-5), 3)
    4.377
    """
    if delta_of(mu, 0.0) <= delta:
        return 0.0
    return _least(lambda epsilon: delta_of(mu, epsilon) <= delta)


def mu_of(epsilon: float, delta: float) -> float:
    """Return the largest mu that has at most this epsilon and delta.

    >>> round(mu_of(epsilon_of(1.0, 1e-5), 1e-5), 6)
    1.0
    """
    return 1 / _least(lambda inverse: delta_of(1 / inverse, epsilon) <= delta)


@lru_cache(maxsize=1024)
def sampled_epsilon(z: float, sampling: Sampling, times: int, delta: float) -> float:
    """Return epsilon of so many sums over participants that are drawn anew for each.

    Raises:
        FedtideError: dp-accounting is not installed.
    """
    return total_epsilon([Spent(math.inf, z, sampling, times)], delta) if times else 0.0


@dataclass(frozen=True)
class Spent:
    """The releases of one run.

    Args:
        epsilon: of them by themselves.
        z: noise multiplier of all sums of a round together, if participants are drawn.
        sampling: how; None if it is known who takes part. Then the releases are one Gaussian mechanism.
        times: how many rounds were drawn.
    """

    epsilon: float
    z: float = 1.0
    sampling: Sampling | None = None
    times: int = 0

    def mu(self, delta: float) -> float | None:
        """Return mu of the releases as one Gaussian mechanism; None if less is spent because participants are drawn."""
        if self.sampling is None:
            return mu_of(self.epsilon, delta) * (1 + 2 * PRECISE) if self.epsilon else 0.0
        always = math.sqrt(self.times) / self.z
        return always if epsilon_of(always, delta) <= self.epsilon < math.inf else None


def total_epsilon(runs: Iterable[Spent], delta: float) -> float:
    """Return epsilon of several runs together, of which each has the same clients.

    Raises:
        FedtideError: participants are drawn, and dp-accounting is not installed.

    >>> round(total_epsilon([Spent(epsilon_of(3.0, 1e-5)), Spent(epsilon_of(4.0, 1e-5))], 1e-5), 6)
    33.103732
    >>> round(epsilon_of(5.0, 1e-5), 6)
    33.103732
    """
    parts = [(run, run.mu(delta)) for run in runs]
    mu = math.sqrt(sum(length**2 for _, length in parts if length is not None))
    draws = [(run.z, run.sampling, run.times) for run, length in parts if length is None and run.sampling is not None]
    if not draws:
        return epsilon_of(mu, delta) if mu else 0.0
    try:
        from dp_accounting import pld
    except ImportError:
        raise uninstalled("wire.privacy: an epsilon of drawn participants needs dp-accounting", "privacy") from None
    step = max(_farthest(z, sampling) for z, sampling, _ in draws) / POINTS
    losses = pld.privacy_loss_distribution
    whole = losses.identity(step)
    if mu:
        whole = losses.from_gaussian_mechanism(1 / mu, value_discretization_interval=step)
    for z, sampling, times in draws:
        whole = whole.compose(_losses(z, sampling, step).self_compose(times))
    return float(whole.get_epsilon_for_delta(delta))


def _farthest(z: float, sampling: Sampling) -> float:
    """Return the largest privacy loss of a sum that is looked at."""
    mu = (1 if sampling.poisson else 2) / z
    return math.log1p(sampling.rate * math.expm1(min(mu * (mu / 2 + FAR), 600)))


@lru_cache(maxsize=16)
def _losses(z: float, sampling: Sampling, step: float) -> Any:
    """Return the distribution of the privacy loss of one sum, at multiples of a step, rounded up.

    Without replacement one client moves a sum by twice its length, in a share of the draws (Balle et al.). The bound
    holds in both directions.
    """
    from dp_accounting import pld

    distribution = pld.privacy_loss_distribution
    if sampling.poisson:
        return distribution.from_gaussian_mechanism(z, sampling_prob=sampling.rate, value_discretization_interval=step)
    last = math.ceil(_farthest(z, sampling) / step)
    epsilons = np.arange(last + 1, dtype=np.float64) * step
    above = sampled_delta(epsilons, 2 / z, sampling.rate)
    below = 1 - np.exp(-epsilons) * (1 - above)  # of epsilon < 0: 1 - e^epsilon (1 - delta(-epsilon))
    deltas = np.concatenate([below[:0:-1], above]).clip(0.0, 1.0)
    pmf = pld.pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(step, -last, last, deltas)
    return distribution.PrivacyLossDistribution(pmf)


def sampled_delta(epsilons: Vector, mu: float, rate: float) -> Vector:
    """Return delta (n,) at each epsilon >= 0 (n,) between a share `rate` of N(mu, 1) in N(0, 1), and N(0, 1).

    >>> sampled_delta(np.array([0.0, 1.0]), 1.0, 1.0).round(6).tolist()  # as of `delta_of`
    [0.382925, 0.126937]
    """
    from scipy.special import ndtr

    ratio = np.exp(epsilons)
    x = np.log1p((ratio - 1) / rate) / mu + mu / 2  # beyond it the first density is more than `ratio` times the other
    return rate * ndtr(mu - x) - (ratio - 1 + rate) * ndtr(-x)


def _least(holds: Callable[[float], bool], width: float = PRECISE) -> float:
    """Return the least positive number for which something holds that holds for all larger ones, rounded up."""
    high = 1.0
    while not holds(high):
        high *= 2
        if high > LARGEST:
            raise FedtideError(f"wire.privacy: found no number up to {LARGEST:g} that would do, allowed: more noise")
    low = high / 2
    while holds(low) and low > 1 / LARGEST:
        high, low = low, low / 2
    while high - low > width * high:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


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
    c, result = coefficients(bands), np.zeros(rounds)
    for t in range(rounds):
        reach = min(t, bands - 1)
        result[t] = (t == 0) - c[1 : reach + 1] @ result[t - reach : t][::-1]
    return result


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
    norms, places = np.cumsum(coefficients(bands) ** 2), range(0, rounds, distance)[:times]
    return math.sqrt(sum(norms[min(bands, rounds - place) - 1] for place in places))
