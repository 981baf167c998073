"""Reading what strangers send: bytes of the codec and plain JSON, within bounds, with one kind of error.

`codec.from_bytes` is for what this program wrote itself. Here nothing is taken on trust: classes are built from a short
list and none is looked up, and a message takes at most a small multiple of its bytes.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fedtide.core.codec import DTYPES
from fedtide.core.errors import UNREADABLE, FedtideError, refused
from fedtide.core.trees import Tree
from fedtide.core.types import Slotted, Weighted, Weights

CLASSES: tuple[type, ...] = (Weighted, Slotted, Weights)
"""What an answer is made of, beside tensors, containers and plain values."""

DEEPEST = 32
"""How deep a tree may be nested."""

HEADER = 8 * 2**20
"""Bytes that the header of a message may have: names, shapes and structure. Parsed it takes up to 40 times as many."""

KNOWN = 2**14
"""Bytes of a header that is read once for all messages that have it."""

LONGEST = 2**40
"""Largest dimension of a shape, which matters only where another one is zero."""

FLOATS = {repr(value): value for value in (math.inf, -math.inf, math.nan)}
"""Plain numbers that JSON has no spelling for."""


def decode(data: bytes, classes: Sequence[type] = CLASSES) -> Tree:
    """Return the tree that `codec.to_bytes` was given, of bytes that anyone may have written.

    Args:
        data: the bytes.
        classes: dataclasses that may be in the tree.

    Raises:
        FedtideError: they are not such bytes. Nothing else is raised.

    >>> from fedtide.core.codec import to_bytes
    >>> decode(to_bytes({"w": torch.ones(2), "n": (3, None, float("inf"))}))
    {'w': tensor([1., 1.]), 'n': (3, None, inf)}
    >>> decode(b"nonsense")
    Traceback (most recent call last):
        ...
    fedtide.core.errors.FedtideError: message: found a header of 7310308002159816558 bytes, allowed: at most 0
    """
    length = int.from_bytes(data[:8], "little")
    most = min(max(len(data) - 8, 0), HEADER)
    if len(data) < 8 or length > most:
        raise FedtideError(f"message: found a header of {length} bytes, allowed: at most {most}")
    try:
        header = bytes(data[8 : 8 + length])
        layout, skeleton = (_layout_again if length <= KNOWN else _layout)(header)
        arrays = _arrays(layout, memoryview(data)[8 + length :])
        tree = _decoded(skeleton, arrays, {f"{c.__module__}:{c.__qualname__}": c for c in classes}, DEEPEST)
    except (RuntimeError, *UNREADABLE) as error:
        raise FedtideError(f"message: not one of this program ({type(error).__name__}: {error})") from None
    if arrays:
        raise refused("message", f"{next(iter(arrays))} in no tree", "arrays of the tree")
    return tree


@dataclass(frozen=True)
class Place:
    """Where an array lies in the data of a message."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


def _layout(header: bytes) -> tuple[tuple[Place, ...], Any]:
    """Return where the arrays of a message lie, one after the other without gaps, and the skeleton of its tree."""
    table = _loaded(header, HEADER, "message header", int)  # bounds of its numbers are below
    _only(table["__metadata__"], {"tree"})
    skeleton = _loaded(table.pop("__metadata__")["tree"], HEADER, "message tree")
    places, at = [], 0
    for name, entry in sorted(table.items(), key=lambda item: list(item[1]["data_offsets"])):
        _only(entry, {"dtype", "shape", "data_offsets"})
        dtype, shape, (start, end) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        if not all(type(n) is int and 0 <= n <= LONGEST for n in [*shape, start, end]) or len(shape) > DEEPEST:
            raise refused(f"message: {name}", shape, "a shape")
        if start != at or end - start != math.prod(shape) * dtype.itemsize:
            raise refused(f"message: {name}", f"{end - start} bytes from {start}", f"those of {shape} from {at}")
        places.append(Place(name, dtype, tuple(shape), start, end))
        at = end
    return tuple(places), skeleton


_layout_again = lru_cache(maxsize=128)(_layout)
"""Messages of one kind have the same header from round to round."""


def _arrays(layout: Sequence[Place], data: memoryview) -> dict[str, Tensor]:
    """Cut the arrays out of a copy of the data, which they fill."""
    at = layout[-1].end if layout else 0
    if at != len(data):
        raise FedtideError(f"message: found {len(data)} bytes of arrays, allowed: the {at} that its header names")
    copy = bytearray(data)
    return {place.name: _array(place, copy) for place in layout}


def _array(place: Place, data: bytearray) -> Tensor:
    """Return an array in the storage of the data, unless it would not be aligned there."""
    width = place.dtype.itemsize
    if place.dtype == torch.bool and max(data[place.start : place.end], default=0) > 1:
        raise refused(f"message: {place.name}", max(data[place.start : place.end]), "0 and 1")
    if place.start == place.end:
        return torch.empty(place.shape, dtype=place.dtype)
    if place.start % width:
        return torch.frombuffer(data[place.start : place.end], dtype=place.dtype).view(place.shape)
    count = (place.end - place.start) // width
    return torch.frombuffer(data, dtype=place.dtype, count=count, offset=place.start).view(place.shape)


def _only(table: Mapping[str, Any], keys: set[str]) -> None:
    if set(table) != keys:
        raise refused("message header", sorted(table), ", ".join(sorted(keys)))


def _decoded(skeleton: Any, arrays: dict[str, Tensor], classes: Mapping[str, type], deeper: int) -> Tree:
    """Build the tree of a skeleton; its arrays are taken out of `arrays`, so that each stands in one place."""
    if not isinstance(skeleton, dict):
        if isinstance(skeleton, list):
            raise refused("message tree", skeleton, "a value, or an object that says what it is")
        return skeleton
    if not deeper:
        raise FedtideError(f"message tree: nested deeper than allowed: {DEEPEST}")
    found: list[tuple[str, Any]] = list(skeleton.items())
    if len(found) != (2 if "class" in skeleton else 1):
        raise refused("message tree", sorted(skeleton), "one word that says what it is")
    tag, value = found[0]
    if tag == "array":
        return arrays.pop(value)
    if tag == "float":
        return FLOATS[value]
    if tag == "dict":
        keys = [key for key, _ in value]
        if len({(type(key), key) for key in keys}) != len(keys) or not all(type(key) in (str, int) for key in keys):
            raise refused("message tree", keys, "different keys, words or whole numbers")
        return {key: _decoded(part, arrays, classes, deeper - 1) for key, part in value}
    if tag in ("list", "tuple"):
        if not isinstance(value, list):
            raise refused("message tree", value, "a list")
        parts = [_decoded(part, arrays, classes, deeper - 1) for part in value]
        return parts if tag == "list" else tuple(parts)
    if tag != "class" or value not in classes:
        raise refused(
            "message tree", value if tag == "class" else tag, ", ".join(kind.__name__ for kind in classes.values())
        )
    kind, fields = classes[value], skeleton["fields"]
    names = [field.name for field in dataclasses.fields(kind) if field.init]
    if list(fields) != names:
        raise refused(f"message tree: {kind.__name__}", list(fields), ", ".join(names))
    return kind(**{name: _decoded(fields[name], arrays, classes, deeper - 1) for name in names})


def parse(text: str | bytes, most: int, name: str) -> Any:
    """Return a JSON value that anyone may have written, nested within bounds.

    Numbers are finite and whole ones have 64 bits; no key stands twice.

    Args:
        text: the JSON.
        most: bytes that it may have.
        name: of the text, for messages.

    Raises:
        FedtideError: it is not such JSON. Nothing else is raised.

    >>> parse('{"round": 3}', 100, "header")
    {'round': 3}
    >>> parse('{"round": NaN}', 100, "header")
    Traceback (most recent call last):
        ...
    fedtide.core.errors.FedtideError: header: not JSON that is allowed (NaN is no number)
    """
    value = _loaded(text, most, name)
    level = [value]
    for _ in range(DEEPEST):
        level = [below for each in level for below in _below(each)]
        if not level:
            return value
    raise FedtideError(f"{name}: nested deeper than allowed: {DEEPEST}")


def _loaded(text: str | bytes, most: int, name: str, whole: Callable[[str], int] | None = None) -> Any:
    """Return a JSON value, nested as deep as Python reads it; whole numbers have 64 bits, or are read by `whole`."""
    if not isinstance(text, str | bytes) or len(text) > most:
        found = f"{len(text)} bytes" if isinstance(text, str | bytes) else type(text).__name__
        raise FedtideError(f"{name}: found {found}, allowed: JSON of at most {most} bytes")
    try:
        return json.loads(
            text, object_pairs_hook=_object, parse_constant=_no_number, parse_int=whole or _whole, parse_float=_finite
        )
    except (ValueError, RecursionError) as error:
        raise FedtideError(f"{name}: not JSON that is allowed ({error})") from None


def _below(value: Any) -> list[Any]:
    """List the values in a value that have values in them."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [each for each in inside if isinstance(each, dict | list)]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key stands twice")
    return made


def _whole(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= int(digits) < 2**63:
        raise ValueError("a whole number has more than 64 bits")
    return int(digits)


def _finite(digits: str) -> float:
    if not math.isfinite(value := float(digits)):
        raise ValueError("a number is too large")
    return value


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is no number")
