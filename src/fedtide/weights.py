"""Arithmetic on weights and on whatever else travels: nested dicts, tuples and dataclasses of tensors.

>>> import fedtide as ft, torch
>>> one = ft.base.Weights({"w": torch.ones(2)})
>>> ft.weights.add(one, ft.weights.sub(one, one)).params
{'w': tensor([1., 1.])}
"""

from fedtide.core.trees import map_leaves
from fedtide.core.weights import add, div, flat, mul, shaped, sub, zeros_like

__all__ = ["add", "div", "flat", "map_leaves", "mul", "shaped", "sub", "zeros_like"]
