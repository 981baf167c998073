"""Gradient terms: what is added to a client's gradient at every step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Proximal:
    """The gradient of (mu/2) * ||v - w||^2, a pull towards the received parameters w (Li et al. 2020, FedProx).

    Trainable parameters only; running statistics take no part.

    >>> Proximal(0.5)([torch.tensor([3.0])], [torch.tensor([1.0])])
    [tensor([1.])]
    """

    mu: float

    def __call__(self, now: list[Tensor], received: list[Tensor]) -> list[Tensor]:
        """mu * (v - w)."""
        pull = list(torch._foreach_sub(now, received))
        torch._foreach_mul_(pull, self.mu)
        return pull


@dataclass(frozen=True)
class Correction:
    """The same correction at every step, such as the difference of two control variates (Karimireddy et al. 2020).

    >>> Correction([torch.tensor([-1.0])])([torch.tensor([3.0])], [torch.tensor([1.0])])
    [tensor([-1.])]
    """

    by: list[Tensor]

    def __call__(self, now: list[Tensor], received: list[Tensor]) -> list[Tensor]:
        """Whatever the parameters are."""
        return self.by
