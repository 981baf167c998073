"""Steps of the local optimizers on parameters, in place: of one client, or of several that are stacked.

They are those of `torch.optim` with its default settings, bit for bit. Its classes import the compiler of torch when
the first is made, which takes a process two seconds, and each of their steps takes longer than that of a small model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fedtide.learn.local import LocalTrainer

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8
"""Of Adam."""


class LocalOptimizer:
    """SGD, Adam or AdamW, with fresh state.

    Args:
        local: optimizer, momentum, weight decay.
        rate: current learning rate.
        params: parameters, or of several clients (clients, ...) each; clients with fewer steps come last.

    >>> from fedtide.learn.local import LocalTrainer
    >>> w = [torch.ones(2)]
    >>> step = LocalOptimizer(LocalTrainer(momentum=0.5), 0.1, w)
    >>> for number in range(2):
    ...     step(w, [torch.ones(2)], number)
    >>> w
    [tensor([0.7500, 0.7500])]
    """

    def __init__(self, local: LocalTrainer, rate: float, params: list[Tensor]) -> None:
        self.local, self.lr = local, rate
        moments = {"sgd": int(local.momentum > 0)}.get(local.optimizer, 2)
        self.moments = [[torch.zeros_like(value) for value in params] for _ in range(moments)]

    def __call__(self, params: list[Tensor], gradient: list[Tensor], number: int) -> None:
        """Take step `number`, from 0 on, along a gradient, which is changed by weight decay.

        Of stacked clients, `params` are those of the clients that still take steps, which come first.
        """
        local = self.local
        if local.weight_decay and local.optimizer != "adamw":
            torch._foreach_add_(gradient, params, alpha=local.weight_decay)
        moments = [
            [each if each.shape == now.shape else each[: len(now)] for each, now in zip(moment, params, strict=True)]
            for moment in self.moments
        ]
        if local.optimizer != "sgd":
            self._adam(params, gradient, moments, number)
            return
        if moments:
            torch._foreach_mul_(moments[0], local.momentum)
            torch._foreach_add_(moments[0], gradient)
            gradient = moments[0]
        torch._foreach_add_(params, gradient, alpha=-self.lr)

    def _adam(self, params: list[Tensor], gradient: list[Tensor], moments: list[list[Tensor]], number: int) -> None:
        if self.local.optimizer == "adamw":
            torch._foreach_mul_(params, 1 - self.lr * self.local.weight_decay)
        first, second = moments
        torch._foreach_lerp_(first, gradient, 1 - BETA1)
        torch._foreach_mul_(second, BETA2)
        torch._foreach_addcmul_(second, gradient, gradient, 1 - BETA2)
        root = list(torch._foreach_sqrt(second))
        torch._foreach_div_(root, (1 - BETA2 ** (number + 1)) ** 0.5)
        torch._foreach_add_(root, EPS)
        torch._foreach_addcdiv_(params, first, root, -(self.lr / (1 - BETA1 ** (number + 1))))
