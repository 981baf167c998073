"""Messages of strangers: bytes of the codec and plain JSON, read within bounds, with one kind of error.

`codec.from_bytes` is for bytes that this program wrote. Here nothing is trusted: only classes of a short list are
built, and a message takes at most a small multiple of its bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from fedtide.core import codec
from fedtide.core.base import Slotted, Weighted, Weights
from fedtide.core.codec import DEEPEST
from fedtide.core.errors import UNREADABLE, FedtideError
from fedtide.core.trees import Tree

CLASSES: tuple[type, ...] = (Weighted, Slotted, Weights)
"""What an answer is made of, beside tensors, containers and plain values."""

HEADER = 8 * 2**20
"""Bytes that the header of a message may have: shapes and structure. Parsed it takes up to 40 times as many."""


def decode(data: bytes, classes: Sequence[type] = CLASSES) -> Tree:
    """Return the tree that `codec.to_bytes` was given, of bytes that anyone may have written.

    Args:
        data: the bytes.
        classes: dataclasses that may be in the tree.

    Raises:
        FedtideError: they are not such bytes. Nothing else is raised.

    >>> from fedtide.core.codec import to_bytes
    >>> decode(to_bytes({"w": [1.5, None], "n": (3, float("inf"))}))
    {'w': [1.5, None], 'n': (3, inf)}
    >>> decode(b"nonsense")
    Traceback (most recent call last):
        ...
    fedtide.core.errors.FedtideError: message: found a header of 7310308002159816558 bytes, allowed: at most 0
    """
    length, most = int.from_bytes(data[:8], "little"), min(max(len(data) - 8, 0), HEADER)
    if len(data) < 8 or length > most:
        raise FedtideError(f"message: found a header of {length} bytes, allowed: at most {most}")
    try:
        return codec.from_bytes(data, {f"{kind.__module__}:{kind.__qualname__}": kind for kind in classes})
    except (RuntimeError, *UNREADABLE) as error:
        raise FedtideError(f"message: not one of this program ({type(error).__name__}: {error})") from None


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
        level = [below for value_below in level for below in _below(value_below)]
        if not level:
            return value
    raise FedtideError(f"{name}: nested deeper than allowed: {DEEPEST}")


def _loaded(text: str | bytes, most: int, name: str) -> Any:
    """Return a JSON value, nested as deep as Python reads it."""
    if not isinstance(text, str | bytes) or len(text) > most:
        size = f"{len(text)} bytes" if isinstance(text, str | bytes) else type(text).__name__
        raise FedtideError(f"{name}: found {size}, allowed: JSON of at most {most} bytes")
    try:
        return json.loads(
            text, object_pairs_hook=_object, parse_constant=_no_number, parse_int=_whole, parse_float=_finite
        )
    except (ValueError, RecursionError) as error:
        raise FedtideError(f"{name}: not JSON that is allowed ({error})") from None


def _below(value: Any) -> list[Any]:
    """List the values in a value that have values in them."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [child for child in inside if isinstance(child, dict | list)]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key stands twice")
    return table


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
