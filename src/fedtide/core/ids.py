"""Fields of a state with an entry for each client: they grow where clients join."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any, TypeVar

import torch

T = TypeVar("T")

NEW = "new"


def per_client(new: Any) -> Mapping[str, Any]:
    """Return the `metadata` of a field (clients, ...) of a state or of a cohort's memo.

    Args:
        new: entry of a client that joins, or a function of the state that tells it.

    >>> from dataclasses import dataclass, field
    >>> @dataclass(frozen=True)
    ... class State:
    ...     cluster: torch.Tensor = field(metadata=per_client(new=-1))
    >>> grown(State(torch.tensor([0, 1])), 3)
    State(cluster=tensor([ 0,  1, -1]))
    """
    return {NEW: new}


def grown(state: T, clients: int) -> T:
    """Return a state, and the cohort's memo in it, with entries for so many clients; the last ones have joined."""
    kind: Any = type(state)
    changed: dict[str, Any] = {}
    for name, declared, new in _fields(kind):
        held = getattr(state, name)
        if not declared:
            made = grown(held, clients)
            if made is not held:
                changed[name] = made
        elif len(held) < clients:
            entry = new(state) if callable(new) else new
            more = torch.full((clients - len(held), *held.shape[1:]), entry, dtype=held.dtype)
            changed[name] = torch.cat([held, more])
    return replace(state, **changed) if changed else state  # type: ignore[type-var]


@cache
def _fields(kind: type) -> tuple[tuple[str, bool, Any], ...]:
    """Return name, whether it is per client, and the new entry, of each field of a dataclass."""
    found = fields(kind) if is_dataclass(kind) else ()
    return tuple((each.name, NEW in each.metadata, each.metadata.get(NEW)) for each in found)
