"""A network with a second head beside its last layer, on the same features."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from fedtide.models.branched import refused_last_layer


class Noting(nn.Module):
    """A layer that keeps its inputs until they are taken."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.features: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        """Return the outputs of the layer."""
        self.features = x
        return self.layer(x)


class TwoHeaded(nn.Module):
    """A model, and beside its last layer G a head P of its own form on the same features."""

    def __init__(self, model: nn.Module, layer: str) -> None:
        super().__init__()
        generic = model.get_submodule(layer)
        noting = Noting(generic)
        if layer:
            parent, _, name = layer.rpartition(".")
            setattr(model.get_submodule(parent), name, noting)
        self.model, self.own = (model if layer else noting), copy.deepcopy(generic)
        self._layer = layer
        self._noting = [noting]  # in a list, so that it is not registered a second time

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of G and P side by side in training, and else their sum."""
        generic, (noting,) = self.model(x), self._noting
        features, noting.features = noting.features, None
        personal = None if features is None else self.own(features.detach())  # the loss of P does not reach the trunk
        if personal is None or personal.shape != generic.shape:
            raise refused_last_layer(self._layer)
        return torch.cat([generic, personal], -1) if self.training else generic + personal
