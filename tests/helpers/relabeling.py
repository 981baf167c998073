"""States with models in other places: what gets another order of them gives the same in that order."""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

from fedtide.models.branched import branch_of


def branches_relabeled(tree: Any, order: Sequence[int]) -> Any:
    """A state with branch k in the place of branch order[k], wherever parameters are held by name."""
    if isinstance(tree, dict):
        out = {}
        for name, child in tree.items():
            k = branch_of(name) if isinstance(name, str) else None
            to = name if k is None else name.replace(f"copies.{k}.", f"copies.{order[k]}.")
            out[to] = branches_relabeled(child, order)
        return {name: out[name] for name in tree}
    if is_dataclass(tree) and not isinstance(tree, type):
        return replace(tree, **{f.name: branches_relabeled(getattr(tree, f.name), order) for f in fields(tree)})
    return tree


def models_relabeled(state: Any, order: Sequence[int], *others: str) -> Any:
    """A state with model k in the place of model order[k], and with it the rows of these fields, and who is in group k.

    Args:
        state: with `weights` and `server`, one of each for every model.
        order: a permutation of the models.
        others: fields with one row for each model.
    """
    whole = torch.tensor(order)
    place = whole.argsort()
    moved: dict[str, Any] = {name: tuple(getattr(state, name)[k] for k in place) for name in ("weights", "server")}
    moved |= {name: getattr(state, name)[place] for name in others}
    if hasattr(state, "group"):
        moved["group"] = torch.where(state.group < 0, state.group, whole[state.group.clamp(min=0)])
    return replace(state, **moved)
