"""Any total as one vector of a form that is known beforehand, and in fixed point, whose sums do not depend on order.

A vector has `weight * value` and the weight of every leaf, of all slots. It has zeros for everything that a client does
not send, so the client's slot cannot be seen. Numbers are whole ones modulo 2^64, with `BITS` bits after the point.
They are added exactly in any order, so masked and plain sums have the same bits.

A form that is *counted* has units: numbers in which only some clients may have something, such as a slot. Behind its
leaves a vector says of each unit whether its client has something in it. So the server can count the clients of a unit
before it opens the sum of their numbers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedtide.core.base import Slotted, Sum, Weighted
from fedtide.core.errors import FedtideError
from fedtide.core.trees import Tree, children, is_node, leaves, map_leaves, rebuild

BITS = 34
"""Bits after the point: a number is rounded by 2^-35 at most. Sums have room up to 2^29."""

ROOM = 2.0 ** (63 - BITS)


class TooLarge(FedtideError):
    """A number that does not fit: its client sends nothing, as a sum that wraps around would be wrong for everybody."""


@dataclass(frozen=True)
class Leaf:
    """One weighted value of a total.

    Args:
        name: where it stands, as "delta" or "models.loss".
        size: how many numbers it has, without its weight.
        slots: how many separate sums it has.
        bound: how long what a client sends of it may be, if that changes from round to round.
        groups: sizes of consecutive groups of its numbers, such as tensors, some of which a client may not train.
        optional: whether clients may leave it out.
    """

    name: str
    size: int
    slots: int = 1
    bound: float | None = None
    groups: tuple[int, ...] = ()
    optional: bool = False


@dataclass(frozen=True)
class Form:
    """The form of a vector: for each leaf a table of its slots, each a row of numbers with the weight behind them.

    Args:
        leaves: in the order of the vector.
        people: how many clients may be in a sum; it bounds what each may send.
        counted: whether a vector also says in which units its client has something.
    """

    leaves: tuple[Leaf, ...]
    people: int
    counted: bool = False

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first number of each leaf, and the end of the last one."""
        starts = [0]
        for leaf in self.leaves:
            starts.append(starts[-1] + leaf.slots * (leaf.size + 1))
        return tuple(starts)

    @cached_property
    def units(self) -> tuple[slice, ...]:
        """The numbers in which only some clients may have something: slots, optional leaves and groups.

        >>> Form((Leaf("delta", 3, groups=(1, 2)), Leaf("models", 1, slots=2)), 5, counted=True).units
        (slice(0, 1, None), slice(1, 3, None), slice(4, 6, None), slice(6, 8, None))
        """
        units = list[slice]()
        for leaf, start in zip(self.leaves, self.starts, strict=False):
            has_rows = leaf.slots > 1 or leaf.optional
            for size in [leaf.size + 1] * leaf.slots if has_rows else leaf.groups:
                units.append(slice(start, start + size))
                start += size
        return tuple(units) if self.counted else ()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the units: the number of a slot, else the value.

        >>> Form((Leaf("delta", 3, groups=(1, 2)), Leaf("models", 1, slots=2)), 5, counted=True).names
        ('delta', 'delta', '0', '1')
        """
        names = list[str]()
        for leaf in self.leaves:
            names += (
                map(str, range(leaf.slots)) if leaf.slots > 1 else [leaf.name] * (len(leaf.groups) or leaf.optional)
            )
        return tuple(names)

    @cached_property
    def parts(self) -> tuple[slice | Tensor, ...]:
        """The parts of a vector that are opened by themselves: all that is in no unit, then each unit."""
        if not self.units:
            return (slice(None),)
        first = torch.ones(self.size, dtype=torch.bool)
        for unit in self.units:
            first[unit] = False
        return (first.nonzero()[:, 0], *self.units)

    @property
    def end(self) -> int:
        """How many numbers of a vector are those of its leaves."""
        return self.starts[-1]

    @property
    def size(self) -> int:
        """How many numbers a vector has."""
        return self.end + len(self.units)

    def tables(self, vector: Tensor) -> dict[str, Tensor]:
        """Return by leaf the part of a vector that is its own, (slots, size + 1); the last column has the weights.

        They are views: what is written into them is written into the vector.

        >>> form = Form((Leaf("delta", 2), Leaf("models", 1, slots=2)), people=3)
        >>> form.tables(torch.arange(7.0))["models"]
        tensor([[3., 4.],
                [5., 6.]])
        """
        ends = zip(self.leaves, self.starts, self.starts[1:], strict=False)
        return {leaf.name: vector[start:end].view(leaf.slots, leaf.size + 1) for leaf, start, end in ends}


def form_of(
    total: Tree, people: int, *, counted: bool = False, grouped: bool = False, optional: frozenset[str] = frozenset()
) -> Form:
    """Return the form of totals like this one, of whose slots one is enough.

    Args:
        total: one client's.
        people: how many clients may be in a sum.
        counted: whether units are counted.
        grouped: whether a client may train only some tensors of a value.
        optional: names of what clients may leave out.

    >>> form_of({"delta": Weighted(torch.zeros(2, 3), 1.0), "models": Slotted({0: Weighted(1.0)}, 4)}, 10).leaves
    (Leaf(name='delta', size=6, slots=1, ...), Leaf(name='models', size=1, slots=4, ...))
    """
    leaves_by_name: dict[str, Leaf] = {}
    for name, _, slots, weighted in _weighted(total):
        sizes = tuple(_count(value) for value in leaves(weighted.value))
        is_optional = any(f"{name}.".startswith(f"{place}.") for place in optional)
        groups = sizes if grouped and slots == 1 and len(sizes) > 1 else ()
        leaves_by_name.setdefault(name, Leaf(name, sum(sizes), slots, groups=groups, optional=is_optional))
    return Form(tuple(leaves_by_name.values()), people, counted)


def check_units(asked: Form, answered: Form) -> None:
    """Raise if the form of a sum has other units than a client's answer, which would be opened without a count."""
    leaves_by_name = {leaf.name: leaf for leaf in asked.leaves}
    for leaf in answered.leaves:
        same = leaves_by_name.get(leaf.name)
        if same is None or (same.slots, same.groups) != (leaf.slots, leaf.groups):
            raise FedtideError(f"{leaf.name or 'the total'}: the question has other slots or groups than the answer")


def as_vector(form: Form, total: Tree) -> Tensor:
    """Return a client's total as a vector (size,) of float64; what it leaves out is zero.

    Raises:
        FedtideError: the total is of another form.
    """
    vector = torch.zeros(form.size, dtype=torch.float64)
    tables = form.tables(vector)
    for name, slot, slots, weighted in _weighted(total):
        if name not in tables or slots != len(tables[name]) or not 0 <= slot < slots:
            raise FedtideError(f"{name or 'the total'}: slot {slot} of {slots} is not in the form of the sum")
        row, weight = tables[name][slot], float(weighted.weight)
        values = [_numbers(value) for value in leaves(weighted.value)]
        if sum(map(len, values)) != len(row) - 1:
            raise FedtideError(f"{name or 'the total'}: found {sum(map(len, values))} numbers, allowed: {len(row) - 1}")
        torch.mul(torch.cat(values), weight, out=row[:-1]) if values else None
        row[-1] = weight
    return vector


def quantized(vector: Tensor, people: int) -> Tensor:
    """Return a vector in fixed point, int64.

    Raises:
        TooLarge: a sum of so many clients like this one would not fit, or a number is none.

    >>> quantized(torch.tensor([1.0, -0.5]), 3).tolist() == [2**34, -(2**33)]
    True
    """
    scaled = vector * 2.0**BITS
    largest = float(scaled.abs().max()) + 0.5 if len(scaled) else 0.0  # rounded
    if not largest * people < ROOM * 2.0**BITS:
        raise TooLarge(f"a number is beyond {ROOM / people:.3g}, which is the room of each in a sum of {people}")
    return scaled.round_().to(torch.int64)


def added(one: Tensor | None, other: Tensor) -> Tensor:
    """Add a vector in fixed point modulo 2^64, in place; None is the sum of nothing.

    >>> added(torch.tensor([2**63 - 1]), torch.tensor([1])).tolist() == [-(2**63)]
    True
    """
    if one is None:
        return other.clone()
    total = one.numpy().view("uint64")
    total += other.numpy().view("uint64")
    return one


def opened(total: Tensor) -> Tensor:
    """Return a sum in fixed point as float64.

    >>> opened(quantized(torch.tensor([0.25, -3.0], dtype=torch.float64), 1)).tolist()
    [0.25, -3.0]
    """
    return total.to(torch.float64).mul_(2.0**-BITS)


def as_total(form: Form, vector: Tensor, like: Tree, optional: frozenset[str] = frozenset()) -> Tree:
    """Return a vector of sums as the finished total that an algorithm reads: `Sum` leaves, of slots a list.

    A slot without any weight is None, and a key that may be left out is left out then.

    Args:
        form: of the vector.
        vector: the sums.
        like: a client's total of this form.
        optional: names of what clients may leave out.

    >>> like = {"n": Weighted(0.0), "models": Slotted({0: Weighted(0.0)}, 2)}
    >>> as_total(form_of(like, 1), torch.tensor([6.0, 3.0, 0.0, 0.0, 5.0, 1.0]), like)
    {'n': Sum(value=6.0, weight=3.0), 'models': [None, Sum(value=5.0, weight=1.0)]}
    """
    tables = form.tables(vector)

    def weigh(tree: Tree, at: str, slot: int | None) -> float:
        return sum(float(tables[name][slot or 0, -1].abs()) for name, *_ in _weighted(tree, at))

    def build(tree: Tree, at: str, slot: int | None) -> Tree:
        if isinstance(tree, Weighted):
            row = tables[at][slot or 0]
            return Sum(_shaped(tree.value, row[:-1]), float(row[-1]))
        if isinstance(tree, Slotted):
            part = next(iter(tree.parts.values()))
            return [build(part, at, k) if weigh(part, at, k) else None for k in range(tree.slots)]
        pairs = [(key, child, _below(at, key)) for key, child in children(tree)]
        if isinstance(tree, dict):
            left = [pair for pair in pairs if pair[2] not in optional or weigh(pair[1], pair[2], slot)]
            return {key: build(child, name, slot) for key, child, name in left}
        return rebuild(tree, [build(child, name, slot) for _, child, name in pairs])

    return build(like, "", None)


def _weighted(tree: Tree, at: str = "", slot: int = 0, slots: int = 1) -> Iterator[tuple[str, int, int, Weighted]]:
    """Yield name, slot, number of slots and value of all that is weighted in a total."""
    if isinstance(tree, Weighted):
        yield at, slot, slots, tree
    elif isinstance(tree, Slotted):
        for k, part in tree.parts.items():
            yield from _weighted(part, at, int(k), tree.slots)
    elif is_node(tree):
        for key, child in children(tree):
            yield from _weighted(child, _below(at, key), slot, slots)
    else:
        raise FedtideError(f"{at or 'the total'}: found {type(tree).__name__}, allowed: Weighted and Slotted")


def _below(at: str, key: str | int) -> str:
    return f"{at}.{key}" if at else str(key)


def _count(value: Tensor | float) -> int:
    return value.numel() if isinstance(value, Tensor) else 1


def _numbers(value: Tensor | float) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().reshape(-1).to(torch.float64)
    return torch.tensor([float(value)], dtype=torch.float64)


def _shaped(like: Tree, row: Tensor) -> Tree:
    """Return the numbers of a row in the shape of a value; they are its own."""
    sizes = [_count(value) for value in leaves(like)]
    pieces = iter(row.split(sizes)) if sizes else iter(())

    def take(value: Tensor | float) -> Tensor | float:
        piece = next(pieces)
        return piece.clone().reshape(value.shape) if isinstance(value, Tensor) else float(piece)

    return map_leaves(take, like)
