"""Step sizes: how far the components of a mixture, and the scales of distances, move in a round.

Zhu, Xu, Chen, Konečný, Hard, Goldstein: *Diurnal or Nocturnal? Federated Learning of Multi-Branch Networks from
Periodically Shifting Distributions*, ICLR 2022, Eq. 27 for `zero_mid`, Eq. 13 for "integral", and Eq. 10 and 12 for
"overwrite", as Eq. 12 and 13 of pFedEM; "certainty", `carry_along`, "per-period", "leaky" and more than two groups are
our own extension.

An update is a function `(expected, mass) -> (K,)`. `expected` (K,) is the expected share of each component in this
round, None without an expectation; `mass` (K,) is counted. A step of 1 replaces the old value with the new estimate, a
step of 0 keeps the old value.

A rule for FedTKM's factors alpha is a function `(log_alpha, expected, counted, period) -> log_alpha`. Its arguments are
(K,) logarithms of the factors, expected and counted shares of the modes, and the period of the prior in rounds.
"""

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedtide.fields.types import Fraction, NonNegative, OpenFraction, ingredient

LARGEST = 5.0
"""Bound on |log alpha|."""


@ingredient
class Certainty:
    """Move a component only while its group is in excess, as in `certainty`; without an expectation, by its share.

    Args:
        a0: step size of a group that is alone.
        min_share: share from which a group counts; None means 1/K.

    >>> Certainty()(torch.tensor([0.75, 0.25]), torch.tensor([30.0, 10.0]))
    tensor([0.5000, 0.0000], dtype=torch.float64)
    >>> Certainty()(None, torch.tensor([30.0, 10.0]))
    tensor([0.7500, 0.2500], dtype=torch.float64)
    """

    a0: Fraction = 1.0
    min_share: OpenFraction | None = None
    kind: Literal["certainty"] = "certainty"

    def __call__(self, expected: Tensor | None, mass: Tensor) -> Tensor:
        """Return the step sizes (K,), float64."""
        if expected is None:
            return self.a0 * mass.double() / mass.sum()
        return certainty(expected, self.a0, self.min_share)


@ingredient
class Overwrite:
    """Replace a component with this round's estimate.

    >>> Overwrite()(None, torch.tensor([30.0, 10.0]))
    tensor([1., 1.], dtype=torch.float64)
    """

    kind: Literal["overwrite"] = "overwrite"

    def __call__(self, expected: Tensor | None, mass: Tensor) -> Tensor:
        """Return the step sizes (K,), float64."""
        return torch.ones_like(mass, dtype=torch.float64)


Update = Annotated[Certainty | Overwrite, Field(discriminator="kind")]
"""Rule for how far the components of a mixture move towards a round's estimate."""


def carry_along(moves: Tensor, mass: Tensor) -> Tensor:
    """Replace the move of each center without members by the mean move of all members (K, d).

    Training moves all features, so a center that stays behind is soon nearest to nobody, whatever it stood for.

    Args:
        moves: (K, d) by the estimates; 0 without one.
        mass: (K,) members of each center, such as their samples.

    >>> carry_along(torch.tensor([[2.0], [4.0], [0.0]]), torch.tensor([30.0, 10.0, 0.0]))
    tensor([[2.0000],
            [4.0000],
            [2.5000]])
    """
    weights = mass.clamp_min(0)
    return torch.where(weights[:, None] > 0, moves, weights @ moves / weights.sum().clamp_min(1e-12))


ZERO_MID = '"zero-mid" takes no step where the prior holds all modes for equally likely (Eq. 27), "constant" does.'
Schedule = Annotated[Literal["zero-mid", "constant"], Field(description=ZERO_MID)]


@ingredient
class Integral:
    """Add up what the prior misses in each round (Eq. 13): if the prior is wrong, alpha goes on and on.

    Args:
        eta: largest step of a round.

    >>> shares = torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.5])
    >>> round(float(Integral()(torch.zeros(2), *shares)[1]), 6)
    0.01
    """

    eta: NonNegative = 0.02
    schedule: Schedule = "zero-mid"
    kind: Literal["integral"] = "integral"

    def __call__(self, log_alpha: Tensor, expected: Tensor, counted: Tensor, period: float | None = None) -> Tensor:
        """Return the next log alpha (K,)."""
        return _follow(log_alpha, expected, counted, self.eta, self.schedule)


@ingredient
class PerPeriod:
    """Add up what the prior misses, in steps of eta / T: a longer period moves alpha as far as a short one.

    Args:
        eta: largest step of a round times the rounds of a period.

    >>> shares = torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.5])
    >>> round(float(PerPeriod()(torch.zeros(2), *shares, period=64)[1]), 6)
    0.005
    """

    eta: NonNegative = 0.64
    schedule: Schedule = "zero-mid"
    kind: Literal["per-period"] = "per-period"

    def __call__(self, log_alpha: Tensor, expected: Tensor, counted: Tensor, period: float | None = None) -> Tensor:
        """Return the next log alpha (K,)."""
        assert period is not None
        return _follow(log_alpha, expected, counted, self.eta / period, self.schedule)


@ingredient
class Leaky:
    """Add up what the prior misses, and forget a part of the sum in each round: |log alpha| stays within eta / rho.

    This holds for two modes and any prior, period and assignment. If the prior is right, alpha is 1 on average.

    Args:
        eta: largest step of a round.
        rho: the part of log alpha that a round forgets.

    >>> log_alpha, shares = torch.tensor([0.0, 0.4]), (torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.5]))
    >>> round(float(Leaky()(log_alpha, *shares)[1]), 6)
    0.39
    """

    eta: NonNegative = 0.02
    rho: Fraction = 0.05
    schedule: Schedule = "zero-mid"
    kind: Literal["leaky"] = "leaky"

    def __call__(self, log_alpha: Tensor, expected: Tensor, counted: Tensor, period: float | None = None) -> Tensor:
        """Return the next log alpha (K,)."""
        return _follow((1 - self.rho) * log_alpha, expected, counted, self.eta, self.schedule)


Alpha = Annotated[Integral | PerPeriod | Leaky, Field(discriminator="kind")]
"""Rule for how the factors of distances follow the prior."""


def _follow(log_alpha: Tensor, expected: Tensor, counted: Tensor, eta: float, schedule: Schedule) -> Tensor:
    """Move log alpha (K,) against the excess of each mode; relative to the first, and within `LARGEST`."""
    step = zero_mid(expected, eta) if schedule == "zero-mid" else eta
    moved = log_alpha - step / 2 * (expected - counted)
    return (moved - moved[0]).clamp(-LARGEST, LARGEST)


def first_whole(steps: Tensor, estimated: Tensor, started: Tensor) -> Tensor:
    """Set the first positive step of each component to 1, and steps without an estimate to 0 (K,).

    A component that was never updated is a random one, and nothing of it is worth keeping.

    Args:
        steps: (K,) by an `Update`.
        estimated: (K,) bool, whether this round has an estimate for the component.
        started: (K,) bool, whether the component was ever updated.

    >>> first_whole(torch.tensor([0.5, 0.5, 0.0]), torch.tensor([True, False, True]), torch.zeros(3).bool())
    tensor([1., 0., 0.])
    """
    return torch.where(started, steps, 1.0) * (estimated & (steps > 0))


def certainty(shares: Tensor, a0: float, min_share: float | None = None) -> Tensor:
    """Return step sizes a_k = a0 * max(0, (q_k - h)/(1 - h)): a component moves only while its group is in excess.

    With h = 1/K that is a0 * max(0, (K q_k - 1)/(K - 1)), for two groups a0 * max(0, 2 q_k - 1), the idea of Eq. 27 for
    the components of a mixture; for one group a0.

    Args:
        shares: (K,) on the simplex.
        a0: step size of a group that is alone.
        min_share: h, the share from which a group counts; None means 1/K.

    Returns:
        (K,) float64.

    >>> certainty(torch.tensor([0.75, 0.25]), 0.2)
    tensor([0.1000, 0.0000], dtype=torch.float64)
    """
    q, groups = shares.double(), len(shares)
    if groups == 1:
        return a0 * torch.ones_like(q)
    if min_share is None:
        return a0 * ((groups * q - 1) / (groups - 1)).clamp_min(0)
    return a0 * ((q - min_share) / (1 - min_share)).clamp_min(0)


def zero_mid(shares: Tensor, eta_max: float) -> float:
    """Return the step of FedTKM's scale (Eq. 27): eta_max at the peaks of a group, 0 if all groups are equally likely.

    eta_max * max_k max(0, (K q_k - 1)/(K - 1)); for two groups 2 |1/2 - q| eta_max; for one group eta_max.

    Args:
        shares: (K,) on the simplex.
        eta_max: the largest step.

    >>> zero_mid(torch.tensor([0.25, 0.75]), 0.02)
    0.01
    """
    return float(certainty(shares, eta_max).max())
