"""Sums: values of clients are added and nothing else; means are taken once, at the end.

Values are accumulated in float64. Totals of blocks of clients are added in the order of the blocks, whatever process
computed them. A partial sum is a tree of Sum leaves, and of Slotted nodes whose parts are Sums; `finish` turns Slotted
nodes into lists.
"""

from typing import Any

import torch
from torch import Tensor

from fedtide.core.base import Slotted, Sum, Weighted, Weights
from fedtide.core.trees import Tree, children, is_node, map_leaves, rebuild
from fedtide.core.weights import mul


def add(partial: Tree, total: Tree) -> Tree:
    """Add an answer's total to `partial`, in place for tensors; None starts a new sum.

    >>> first = add(None, {"n": Weighted(2.0, 3.0)})
    >>> add(first, {"n": Weighted(5.0, 1.0)})
    {'n': Sum(value=11.0, weight=4.0)}
    """
    if isinstance(total, Weighted):
        weight = float(total.weight)
        if partial is None:
            return Sum(map_leaves(lambda value: _times(value, weight), total.value), weight)
        return Sum(_add_value(partial.value, total.value, weight), partial.weight + weight)
    if isinstance(total, Slotted):
        parts = {} if partial is None else partial.parts
        return Slotted(parts | {int(k): add(parts.get(int(k)), part) for k, part in total.parts.items()}, total.slots)
    if not is_node(total):
        raise TypeError(f"a total holds Weighted and Slotted leaves only, found {type(total).__name__}")
    return _node_by_node(add, partial, total)


def merge(left: Tree, right: Tree) -> Tree:
    """Add two partial sums, in place in `left`; None is the sum of nothing.

    >>> merge({"n": Sum(1.0, 1.0)}, {"n": Sum(2.0, 3.0)})
    {'n': Sum(value=3.0, weight=4.0)}
    """
    if left is None or right is None:
        return right if left is None else left
    if isinstance(left, Sum):
        value = map_leaves(lambda a, b: a.add_(b) if isinstance(a, Tensor) else a + b, left.value, right.value)
        return Sum(value, left.weight + right.weight)
    if isinstance(left, Slotted):
        parts = dict(left.parts)
        for k, part in right.parts.items():
            parts[k] = merge(parts.get(k), part)
        return Slotted(parts, left.slots)
    return _node_by_node(merge, left, right)


def _node_by_node(function: Any, left: Tree, right: Tree) -> Tree:
    """Apply `function` to the children with the same key; clients may leave out keys of a dict."""
    nodes = dict(children(left))
    for key, child in children(right):
        nodes[key] = function(nodes.get(key), child)
    return nodes if isinstance(right, dict) else rebuild(right, list(nodes.values()))


def _add_value(total: Tree, value: Tree, weight: float) -> Tree:
    """Compute `held + weight * value`, in place for tensors; the two must have the same keys."""
    if not is_node(total):
        return _plus(total, value, weight)
    ours, theirs = children(total), dict(children(value))
    if len(ours) != len(theirs) or any(key not in theirs for key, _ in ours):
        raise ValueError(f"two answers to one question differ: {[key for key, _ in ours]} and {list(theirs)}")
    if ours and all(type(child) is Tensor for _, child in ours):
        # One call for all: a model's parameters are many small tensors.
        torch._foreach_add_([child for _, child in ours], [theirs[key].detach() for key, _ in ours], alpha=weight)
        return total
    return rebuild(total, [_add_value(child, theirs[key], weight) for key, child in ours])


def _times(leaf: Any, weight: float) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach().to(torch.float64, copy=True).mul_(weight)
    if isinstance(leaf, int | float):
        return float(leaf) * weight
    raise TypeError(f"only tensors and numbers can be summed, found {type(leaf).__name__}")


def _plus(total: Any, leaf: Any, weight: float) -> Any:
    if isinstance(total, Tensor):
        return total.add_(leaf.detach(), alpha=weight)
    return total + float(leaf) * weight


def finish(partial: Tree) -> Tree:
    """The finished total: slots become lists of K, with None for a slot without an answer.

    Tensors are contiguous, as those of another process are. A server that adds their numbers up, which goes by their
    place in memory, then gets the same bits.

    >>> finish({"delta": Slotted({1: Sum(2.0, 1.0)}, slots=2)})
    {'delta': [None, Sum(value=2.0, weight=1.0)]}
    """
    if isinstance(partial, Slotted):
        return [finish(partial.parts.get(k)) for k in range(partial.slots)]
    if partial is None:
        return None
    if isinstance(partial, Sum):
        value = map_leaves(lambda leaf: leaf.contiguous() if isinstance(leaf, Tensor) else leaf, partial.value)
        return Sum(value, partial.weight)
    return rebuild(partial, [finish(child) for _, child in children(partial)])


def replace_divisor(total: Sum, weight: float) -> Sum:
    """Divide the mean of updates by another weight, but running statistics by that of the clients, as before.

    Statistics are no step: a part of their change would lead only a part of the way to the clients' means. A sum of no
    weight stays one, so it has no mean.

    >>> from fedtide.core.base import mean
    >>> update = mean(replace_divisor(Sum(Weights({"w": torch.tensor(6.0)}, {"mean": torch.tensor(6.0)}), 2.0), 3.0))
    >>> update.params["w"].item(), update.buffers["mean"].item()
    (2.0, 3.0)
    >>> mean(replace_divisor(Sum(Weights({}), 0.0), 3.0)) is None
    True
    """
    update: Weights = total.value
    if not total.weight:
        return total
    return Sum(Weights(update.params, mul(update.buffers, weight / total.weight)), weight)
