"""Gradients of small networks, of one client or of many at once, without autograd or torch.func.

Other packages use the names of this file alone.
"""

from __future__ import annotations

from typing import Any

import torch

from fedtide.learn.fast.func_stack import FuncStack
from fedtide.learn.fast.layer_stack import LayerStack
from fedtide.learn.fast.layers import branch_count, has_wide, known_layers
from fedtide.learn.fast.passes import ModulePasses
from fedtide.learn.fast.plan import Room
from fedtide.learn.losses import known_part
from fedtide.learn.scratch import Scratch

__all__ = ["Copies", "LayerStack", "ModulePasses", "stack_copies", "stack_models"]

Copies = FuncStack | LayerStack
"""Several copies of a model that are trained at once."""


def stack_copies(scratch: Scratch, loss: Any, shape: tuple[int, ...]) -> Copies:
    """Return several copies of a model for training on rows of a shape by a loss."""
    room = Room(scratch.dtype, torch.device(scratch.device))
    graded = known_part(loss, "graded") is not None  # layers need the gradient of the loss
    layers = known_layers(scratch, shape, room) if graded else None
    return FuncStack(scratch, loss) if layers is None else LayerStack(scratch, layers, room, loss)


def stack_models(scratch: Scratch, shape: tuple[int, ...]) -> LayerStack | None:
    """Return several models for forward passes on rows of a shape; None if a loop over the models is as fast."""
    room = Room(scratch.dtype, torch.device(scratch.device))
    layers = known_layers(scratch, shape, room)
    if layers is None or has_wide(layers) or branch_count(layers) is not None:
        return None
    return LayerStack(scratch, layers, room, None)
