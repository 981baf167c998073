"""Gradient terms that are added to a client's gradient at every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Layout = Callable[[list[Tensor]], list[Tensor]]
"""Puts tensors of the shapes of the parameters into the layout in which several clients' are held."""


@dataclass(frozen=True)
class Proximal:
    """The gradient of (mu/2) * ||v - w||^2, a pull towards the received parameters w (Li et al. 2020, FedProx).

    Only trainable parameters are affected, not running statistics.

    >>> Proximal(0.5)([torch.tensor([3.0])], [torch.tensor([1.0])])
    [tensor([1.])]
    """

    mu: float

    @property
    def alike(self) -> float:
        """Terms of several clients are of one kind if this is equal."""
        return self.mu

    def __call__(self, now: list[Tensor], received: list[Tensor]) -> list[Tensor]:
        """Return mu * (v - w)."""
        pull = list(torch._foreach_sub(now, received))
        torch._foreach_mul_(pull, self.mu)
        return pull

    def stacked(self, terms: Sequence[Proximal], layout: Layout) -> Proximal:
        """Return the term of several clients that are trained at once, which have the same `mu`."""
        return self


@dataclass(frozen=True)
class Correction:
    """A constant correction at every step, such as the difference of two control variates (Karimireddy et al. 2020).

    >>> Correction([torch.tensor([-1.0])])([torch.tensor([3.0])], [torch.tensor([1.0])])
    [tensor([-1.])]
    """

    by: list[Tensor]

    @property
    def alike(self) -> bool:
        """Return True, as any corrections can be stacked."""
        return True

    def __call__(self, now: list[Tensor], received: list[Tensor]) -> list[Tensor]:
        """Return the correction, which does not depend on the parameters."""
        return [leaf.to(value.device) for leaf, value in zip(self.by, now, strict=True)]

    def stacked(self, terms: Sequence[Correction], layout: Layout) -> StackedCorrection:
        """Return the term of several clients that are trained at once."""
        corrections = [layout(term.by) for term in terms]
        return StackedCorrection([torch.stack(parts) for parts in zip(*corrections, strict=True)])


@dataclass(frozen=True)
class StackedCorrection:
    """The corrections of several clients (clients, ...).

    >>> StackedCorrection([torch.tensor([[1.0], [2.0]])])([torch.zeros(1, 1)], [])
    [tensor([[1.]])]
    """

    by: list[Tensor]

    def __call__(self, now: list[Tensor], received: list[Tensor]) -> list[Tensor]:
        """Return the corrections of the clients that take the step, which come first."""
        return [leaf[: len(value)] for leaf, value in zip(self.by, now, strict=True)]
