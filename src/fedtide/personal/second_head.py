"""A second head, which each client keeps, beside that of all on the same features: its task and the two losses."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedtide.core.base import Prediction, Shard, Weights
from fedtide.core.weights import renamed, zeros_like
from fedtide.learn import Task
from fedtide.learn.layers import last_layer, pick_layers, put_layers
from fedtide.learn.losses import WSM, Columns, known_part, mask_of, mean_of_each
from fedtide.models.branched import in_layer
from fedtide.models.two_headed import TwoHeaded
from fedtide.personal.own_models import by_own_weights


class TwoHeads:
    """A task, and the task on its model with a second head P of a client beside its last layer G.

    Args:
        plain: the task without P; its loss is that of G + P.
    """

    def __init__(self, plain: Task) -> None:
        layer = last_layer(plain)
        task = replace(plain, build=lambda: TwoHeaded(plain.build(), layer), begin=None, init_layers=None)
        self.task = replace(task, loss=TwoLosses(plain.loss))
        self._names = {name: place(name, layer) for name in (*plain.scratch.names, *plain.scratch.weights.buffers)}
        self._plain_names = {new: old for old, new in self._names.items()}
        self._zero = zeros_like(pick_layers(task.scratch.weights, is_own))

    def join(self, weights: Weights, own: Weights | None) -> Weights:
        """Return the weights of the model with G and P; None is a P of zeros."""
        return put_layers(renamed(weights, self._names), self._zero if own is None else own)

    def split(self, weights: Weights) -> tuple[Weights, Weights]:
        """Return the part of weights, or of an update, without P, and that of P."""
        return renamed(weights, self._plain_names), pick_layers(weights, is_own)

    def predict(self, payload: Weights, memories: Sequence[Any], x: Tensor, owner: Tensor) -> Prediction:
        """Predict samples by the sum of G and the P that their clients keep as their "own"."""
        by_sum = by_own_weights(self.task, lambda _, memory: self.join(payload, memory["own"]))
        return by_sum(self.join(payload, None), memories, x, owner)


def is_own(name: str) -> bool:
    """Tell whether a parameter is one of P."""
    return name.startswith("own.")


def place(name: str, layer: str) -> str:
    """Return the name that a parameter has in the model with two heads; layer "" is the whole model.

    >>> place("conv.weight", "head"), place("head.weight", "head"), place("weight", "")
    ('model.conv.weight', 'model.head.layer.weight', 'model.layer.weight')
    """
    if layer and not in_layer(name, layer):
        return f"model.{name}"
    return f"model.{layer}.layer{name[len(layer) :]}" if layer else f"model.layer.{name}"


@dataclass(frozen=True)
class TwoLosses:
    """The balanced softmax of G, and the loss of G + P, whose gradient reaches P alone.

    Args:
        base: loss of G + P.
        balanced: loss of G.
    """

    base: Any
    balanced: WSM = WSM()

    def prepare(self, shard: Shard) -> tuple[Any, Columns]:
        """Prepare both losses; the only column is the mask of sequences."""
        return tuple(loss.prepare(shard)[0] for loss in (self.balanced, self.base)), mask_of(shard)

    def value(self, outputs: Tensor, y: Tensor, shared: Any, columns: Columns) -> Tensor:
        """Return the mean sum of both over the labels that count."""
        return mean_of_each(self, outputs, y, columns, shared, 0.0)

    def each(self, outputs: Tensor, y: Tensor, shared: Any, eps: float = 0.0) -> Tensor:
        """Return the sum of both for every label, given the logits of G and P side by side."""
        generic, personal = outputs.chunk(2, -1)
        both = generic.detach() + personal
        return self.balanced.each(generic, y, shared[0], eps) + self.base.each(both, y, shared[1], eps)

    @property
    def graded(self) -> Callable[[Tensor, Tensor, Any], tuple[Tensor, Tensor]] | None:
        """Return the function of losses and gradients by the logits of G and P; None without that of the base."""
        base = known_part(self.base, "graded")

        def both(outputs: Tensor, y: Tensor, shared: Any) -> tuple[Tensor, Tensor]:
            generic, personal = outputs.chunk(2, -1)
            balanced, by_generic = self.balanced.graded(generic, y, shared[0])
            losses, by_sum = base(generic + personal, y, shared[1])
            return balanced + losses, torch.cat([by_generic, by_sum], -1)

        return None if base is None else both

    def stacked(self, shared: Sequence[Any]) -> tuple[Any, ...]:
        """Stack the prepared values of several clients."""
        balanced, base = zip(*shared, strict=True)
        return self.balanced.stacked(balanced), self.base.stacked(base)
