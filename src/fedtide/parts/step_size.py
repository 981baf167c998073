"""Step sizes: how far the components of a mixture, and the factors of distances, move in a round.

Zhu, Xu, Chen, Konečný, Hard, Goldstein: *Diurnal or Nocturnal? Federated Learning of Multi-Branch Networks from
Periodically Shifting Distributions*, ICLR 2022, Eq. 27 for `zero_mid`; `certainty` and more than two groups are our own
extension.
"""

from __future__ import annotations

import torch
from torch import Tensor


def certainty(shares: Tensor, a0: float, above: float | None = None) -> Tensor:
    """How far each component may move: a_k = a0 * max(0, (q_k - h)/(1 - h)), so only while its group is in excess.

    With h = 1/K that is a0 * max(0, (K q_k - 1)/(K - 1)), for two groups a0 * max(0, 2 q_k - 1), the idea of Eq. 27 for
    the components of a mixture; for one group a0.

    Args:
        shares: (K,) on the simplex.
        a0: the step of a group that is alone.
        above: h, the share from which a group counts; None means 1/K.

    Returns:
        (K,) float64.

    >>> certainty(torch.tensor([0.75, 0.25]), 0.2)
    tensor([0.1000, 0.0000], dtype=torch.float64)
    """
    q, groups = shares.double(), len(shares)
    if groups == 1:
        return a0 * torch.ones_like(q)
    if above is None:
        return a0 * ((groups * q - 1) / (groups - 1)).clamp_min(0)
    return a0 * ((q - above) / (1 - above)).clamp_min(0)


def step_sizes(shares: Tensor | None, mass: Tensor, a0: float, above: float | None = None) -> Tensor:
    """How far each component may move: by `certainty` where the hour is known, else by its share of the rows.

    Args:
        shares: (K,) what a prior that knows the hour expects of the round; None where there is none.
        mass: (K,) the rows of each mode's participants.
        a0: the step of a group that is alone.
        above: as in `certainty`.

    Returns:
        (K,) float64.

    >>> step_sizes(None, torch.tensor([30.0, 10.0]), 1.0)
    tensor([0.7500, 0.2500], dtype=torch.float64)
    """
    return a0 * mass.double() / mass.sum() if shares is None else certainty(shares, a0, above)


def zero_mid(shares: Tensor, eta_max: float) -> float:
    """The step of FedTKM's scale (Eq. 27): eta_max at the peaks of a group, 0 when all groups are expected equally.

    eta_max * max_k max(0, (K q_k - 1)/(K - 1)); for two groups 2 |1/2 - q| eta_max; for one group eta_max.

    Args:
        shares: (K,) on the simplex.
        eta_max: the largest step.

    >>> zero_mid(torch.tensor([0.25, 0.75]), 0.02)
    0.01
    """
    return float(certainty(shares, eta_max).max())
