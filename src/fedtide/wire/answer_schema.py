"""The schema of an answer: learned on made-up rows, and compared before any sum.

A client that is not trusted may send anything. The server cannot know the numbers, but it knows their form. It does the
work itself on made-up rows, and allows answers of the same form.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor

from fedtide.core.base import LARGEST, Answer, Memory, Moment, Payload, Shard, Slotted, Weighted, Work
from fedtide.core.codec import pieces
from fedtide.core.errors import FedtideError, printable, shown
from fedtide.core.rng import Rng
from fedtide.core.trees import Tree, all_finite, children, detached, is_node, leaves, rebuild
from fedtide.fields.vocabulary import SHOWN

ROWS = 20
"""How many rows are made up."""

LEAF = 150
"""Bytes that a leaf takes in a header at most: a long number, or a type with a shape."""

KNOWN = 100
"""How many schemas are kept."""


@dataclass(frozen=True)
class Schema:
    """The schema of one client's answer to a question.

    Args:
        answer: an answer, `{"total": ..., "rows": ...}`, with all keys and, of every `Slotted`, one part.
        bytes: what such an answer takes as a message at most, with all its slots.
        optional: where in it stands what a client may leave out, as "total.likelihoods".
    """

    answer: Tree
    bytes: int
    optional: frozenset[str] = frozenset()


def made_up(like: Shard, classes: int, rows: int = ROWS) -> Shard:
    """Return made-up rows: features drawn from a normal distribution, labels in turn.

    Integers, such as tokens, are repeated from `like`, because others might have no meaning to the model. So are the
    labels of sequences, and values that are no classes. Floats that are all whole numbers may be tokens, too: they are
    drawn within those of `like`.

    Args:
        like: some rows as the model sees them, one at least.
        classes: number of classes, or of bins.
        rows: how many to make up.

    >>> shard = made_up(Shard(torch.zeros(1, 4), torch.zeros(1, dtype=torch.int64), torch.zeros(1)), 3)
    >>> shard.x.shape, shard.y[:4].tolist()
    (torch.Size([20, 4]), [0, 1, 2, 0])
    """
    again = torch.arange(rows) % len(like)
    x = like.x[again]
    if x.is_floating_point():
        draw = torch.Generator().manual_seed(0)
        low, high = like.x.amin(0), like.x.amax(0)
        whole = bool((like.x == like.x.round()).all())
        x = (
            torch.rand(x.shape, generator=draw).to(x) * (high - low).clamp(min=1) + low
            if whole
            else (torch.randn(x.shape, generator=draw).to(x.dtype))
        )
    labels = torch.arange(rows) % classes
    y = like.y[again] if like.y.dim() > 1 or like.bins is not None else labels.to(like.y.dtype)
    time = None if like.time is None else like.time[again]
    mask = None if like.mask is None else like.mask[again]
    shard = Shard(x, y, torch.arange(rows), time, mask, bins=None if like.bins is None else labels)
    return replace(shard, fetch_val=lambda: shard)


class Schemas:
    """The schemas of all questions, as a client with made-up rows learns them, which keeps what clients keep.

    Args:
        works: the works of the algorithm.
        rows: as of `made_up`.
        memory: what it kept when the run was stopped.
    """

    def __init__(self, works: Mapping[str, Work], rows: Shard, memory: Memory = None) -> None:
        self.works, self.rows, self.memory = works, rows, memory
        self._learned: dict[Any, Schema] = {}

    def of(self, question: str, received: Payload, moment: Moment, reveal: Sequence[str] = ()) -> Schema:
        """Return the schema of an answer; the work is done once for all payloads that look alike.

        Args:
            question: a name in the works.
            received: what a client receives; with slots the entry of one of them.
            moment: when it is asked.
            reveal: names of the rows that the server asks for.

        Raises:
            FedtideError: the work does not answer on made-up rows.
        """
        key = (question, tuple(reveal), look(received))
        if key not in self._learned:
            if len(self._learned) >= KNOWN:
                self._learned.clear()
            self._learned[key] = self._learn(question, received, moment, reveal)
        return self._learned[key]

    def _learn(self, question: str, received: Payload, moment: Moment, reveal: Sequence[str]) -> Schema:
        """Do the work without memory and with it; if nothing is new to say, on fewer rows."""
        expected: Tree = None
        places: list[frozenset[str]] = []
        for fresh, rows in ((True, self.rows), (False, self.rows), (False, self.rows.pick(slice(1)))):
            if rows is not self.rows and expected is not None:
                break
            answer = self._answer(question, received, rows, moment, fresh=fresh)
            if answer is not None:
                total = {"total": answer.total, "rows": {name: answer.rows[name] for name in reveal}}
                expected = _both(expected, _with_parts(detached(total), 1))
                places.append(frozenset(_places(answer.total, "total")))
        if expected is None:
            raise FedtideError(f"'{question}': made-up rows bring no answer, which would tell what one must look like")
        places += self._without_val(question, received, moment)
        return Schema(expected, _most_bytes(expected), frozenset().union(*places) - frozenset.intersection(*places))

    def _without_val(self, question: str, received: Payload, moment: Moment) -> list[frozenset[str]]:
        """Return where a client without validation rows has something, if such a one can do the work."""
        memory = self.memory
        try:
            answer = self._answer(question, received, replace(self.rows, fetch_val=None), moment, fresh=True)
        except Exception:  # its work needs them, whatever it says if there are none
            return []
        finally:
            self.memory = memory
        return [] if answer is None else [frozenset(_places(answer.total, "total"))]

    def _answer(self, question: str, received: Payload, rows: Shard, moment: Moment, *, fresh: bool) -> Answer | None:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            memory = None if fresh else self.memory
            answer = self.works[question](received, memory, rows, moment, Rng(0).at(question))
        if answer is not None and answer.memory is not None:
            self.memory = detached(answer.memory)
        return answer


def look(tree: Tree) -> Any:
    """Return a key that is equal for trees that look alike: all but the numbers in tensors and fractions."""
    if isinstance(tree, Tensor):
        return tree.dtype, tuple(tree.shape)
    if is_node(tree):
        return type(tree), tuple((key, look(child)) for key, child in children(tree))
    return float if isinstance(tree, float) else (type(tree), tree)


def _with_parts(tree: Tree, most: int) -> Tree:
    """Give every `Slotted` so many copies of its first part, at most all: they are all alike."""
    if isinstance(tree, Slotted):
        return Slotted(dict.fromkeys(range(min(most, tree.slots)), next(iter(tree.parts.values()))), tree.slots)
    return rebuild(tree, [_with_parts(child, most) for _, child in children(tree)]) if is_node(tree) else tree


def _both(one: Tree, other: Tree) -> Tree:
    """Return a tree with the keys of two answers; clients may leave out keys of a dict."""
    if one is None or not isinstance(one, dict):
        return other if one is None else one
    return other | {key: _both(child, other.get(key)) if key in other else child for key, child in one.items()}


def _places(tree: Tree, at: str) -> Iterator[str]:
    """Yield where a total has keys, down to what is summed."""
    if isinstance(tree, dict):
        for key, child in tree.items():
            yield _below(at, key)
            yield from _places(child, _below(at, key))


def _most_bytes(expected: Tree) -> int:
    """Count the bytes of an answer as a message, with all slots and the longest numbers."""
    whole = _with_parts(expected, LARGEST)
    return sum(memoryview(piece).nbytes for piece in pieces(whole)) + LEAF * (len(leaves(whole)) + 10)


def misfit(schema: Schema, answer: Tree, heaviest: float) -> str | None:
    """Say in one line why an answer must not be summed, or None: what was found where, and what is allowed.

    Keys of a total may be left out if some clients leave them out. None may be added. A value that is summed has all of
    its own keys. A row that is a weight, a size or a square has the `range` of `SHOWN`.

    Args:
        schema: what the answer must look like.
        answer: of one client, `{"total": ..., "rows": ...}`.
        heaviest: the largest weight that a client may give to a value.

    >>> schema = Schema({"total": {"loss": Weighted(torch.zeros(2), 5.0)}, "rows": {}}, 100)
    >>> misfit(schema, {"total": {"loss": Weighted(torch.ones(2), 7.0)}, "rows": {}}, 10)
    >>> misfit(schema, {"total": {"loss": Weighted(torch.ones(2), 1e30)}, "rows": {}}, 10)
    'total.loss: found weight 1e+30, allowed: 0 to 10'
    >>> misfit(schema, {"total": {"loss": Weighted(torch.ones(1), 7.0)}, "rows": {}}, 10)
    'total.loss: found float32 (1,), allowed: float32 (2,)'
    """
    try:
        _compare(schema.answer, answer, heaviest, schema.optional)
        _check_rows(answer["rows"], heaviest)
    except _Misfit as error:
        return str(error)
    return None


class _Misfit(Exception):
    """The one line, with the keys of the place in the answer."""

    def __init__(self, at: tuple[Any, ...], value: str, allowed: str) -> None:
        super().__init__(printable(f"{_below('', *at) or 'the answer'}: found {value}, allowed: {allowed}"))


def _compare(wanted: Tree, got: Tree, heaviest: float, optional: frozenset[str], *at: Any) -> None:
    """Compare a part of an answer at a place: totals down to their numbers, and rows."""
    if is_node(wanted) and type(got) is not type(wanted):
        raise _Misfit(at, _named(got), _named(wanted))
    if isinstance(wanted, Weighted):
        if not _is_number(got.weight) or not 0 <= got.weight <= heaviest:
            raise _Misfit(at, f"weight {_spelled(got.weight)}", f"0 to {heaviest:g}")
        _compare(wanted.value, got.value, heaviest, optional, *at)
    elif isinstance(wanted, Slotted):
        if type(got.slots) is not int or got.slots != wanted.slots:
            raise _Misfit(at, f"{shown(got.slots)} slots", f"{wanted.slots}")
        if not isinstance(got.parts, dict):
            raise _Misfit(at, _named(got.parts), "parts by slot")
        for k, part in got.parts.items():
            if type(k) is not int or not 0 <= k < wanted.slots:
                raise _Misfit(at, f"slot {shown(k)}", f"0 to {wanted.slots - 1}")
            _compare(wanted.parts[0], part, heaviest, optional, *at, k)
    elif is_node(wanted):
        ours, theirs = dict(children(wanted)), dict(children(got))
        for key in theirs:
            if key not in ours:
                allowed = shorten(", ".join(map(str, ours)) or "no keys", 200, placeholder=" and more")
                raise _Misfit((*at, key), "a key", f"none but {allowed}")
        for key, child in theirs.items():
            _compare(ours[key], child, heaviest, optional, *at, key)
        for key, child in ours.items():
            if key not in theirs and _below("", *at, key) not in optional:
                raise _Misfit((*at, key), "nothing", _named(child))
    elif isinstance(wanted, Tensor):
        if not isinstance(got, Tensor) or got.dtype != wanted.dtype or got.shape != wanted.shape:
            raise _Misfit(at, _named(got), _named(wanted))
        if got.numel() and not -LARGEST <= (ends := got.aminmax()).min.item() <= ends.max.item() <= LARGEST:
            if not all_finite(got):
                raise _Misfit(at, "a number that is not finite", "finite numbers")
            raise _Misfit(at, f"a number beyond {LARGEST}", "smaller ones")
    elif not _is_number(got) or not abs(got) < math.inf:
        raise _Misfit(at, _named(got), "a finite number")
    elif abs(got) > LARGEST:
        raise _Misfit(at, _named(got), f"at most {LARGEST}")


def _check_rows(rows: Mapping[str, Any], heaviest: float) -> None:
    """Hold rows that look right to the numbers that they may have."""
    for name in rows.keys() & SHOWN.keys():
        numbers, span = torch.as_tensor(rows[name]).flatten(), SHOWN[name].range
        weights = {"weight": numbers, "size": numbers[:1]}.get(span, numbers[:0])
        if span != "any" and (numbers < 0).any():
            raise _Misfit(("rows", name), f"{numbers.min():g}", "0 or more")
        if (weights > heaviest).any():
            raise _Misfit(("rows", name), f"{weights.max():g}", f"0 to {heaviest:g}")


def _is_number(value: Any) -> bool:
    """Tell whether a value is a plain number that a sum can hold."""
    return type(value) is float or (type(value) is int and abs(value) < LARGEST)


def _spelled(weight: Any) -> str:
    return f"{weight:g}" if _is_number(weight) else _named(weight)


def _named(value: Any) -> str:
    """Name a value for an error line."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return type(value).__name__ if is_node(value) else shown(value)


def _below(at: str, *keys: Any) -> str:
    words = (str(key) if isinstance(key, int) else shown(key).strip("'") for key in keys)
    return ".".join((at, *words) if at else words)
