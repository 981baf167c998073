"""Gradients of small networks, of one client or of many at once, without autograd or torch.func.

Other packages use the names of this file alone.
"""

from __future__ import annotations

from typing import Any

from fedtide.learn.fast.func_stack import FuncStack
from fedtide.learn.fast.layer_stack import LayerStack
from fedtide.learn.fast.layers import branch_count, has_wide, known_layers
from fedtide.learn.fast.passes import ModulePasses
from fedtide.learn.losses import known_part
from fedtide.learn.scratch import Scratch

__all__ = ["Copies", "LayerStack", "ModulePasses", "stack_copies", "stack_models"]

Copies = FuncStack | LayerStack
"""Several copies of a model that are trained at once."""


def stack_copies(scratch: Scratch, loss: Any, shape: tuple[int, ...]) -> Copies:
    """Return several copies of a model for training on rows of a shape by a loss."""
    graded = known_part(loss, "graded") is not None  # layers need the gradient of the loss
    network = known_layers(scratch, shape) if graded else None
    return FuncStack(scratch, loss) if network is None else LayerStack(scratch, *network, loss)


def stack_models(scratch: Scratch, shape: tuple[int, ...]) -> LayerStack | None:
    """Return several models for forward passes on rows of a shape; None if a loop over the models is as fast."""
    network = known_layers(scratch, shape)
    if network is None or has_wide(network[0]) or branch_count(network[0]) is not None:
        return None
    return LayerStack(scratch, *network, None)
