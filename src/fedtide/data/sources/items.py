"""Rows of data sets that give an item at a time, as those of torch and Hugging Face do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedtide.core.errors import FedtideError, refused
from fedtide.data.rows import Rows
from fedtide.data.sources.arrays import from_arrays
from fedtide.data.sources.guesses import CLIENTS, LABELS, called

ALLOWED = "pairs (features, label), or mappings with a label"


def stack(data: Any, *, features: str | None = None, label: str | None = None, client: str | None = None) -> Rows:
    """Return the rows of a data set with a length and an item for each number, such as a map-style data set of torch.

    Items are pairs of features and a label, or mappings, as those of Hugging Face. Pictures of Pillow are taken as
    bytes (channels, height, width). Every item is read once and kept.

    Args:
        data: the data set.
        features: key of the features in mappings; by default the only one that is neither label nor client.
        label: key of the label; by default one that is called so.
        client: key of the natural client; by default one with a name like user or writer, "" for none.

    >>> stack([([0.5, 1.0], 0), ([1.5, 2.0], 1)]).x.tolist()
    [[0.5, 1.0], [1.5, 2.0]]
    """
    name = type(data).__name__
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise refused("data set", name, "one with a length, and an item for each number")
    if not len(data):
        raise FedtideError(f"{name}: no items")
    keys: tuple[Any, ...] = (0, 1)
    first = data[0]
    if isinstance(first, Mapping):
        keys = _keys(name, [str(key) for key in first], features, label, client)
    elif not (isinstance(first, tuple | list) and len(first) == 2):
        raise refused(f"{name}: item 0", type(first).__name__, ALLOWED)
    x: np.ndarray | None = None
    others = list[list[Any]](list[Any]() for _ in keys[1:])
    for row in range(len(data)):
        item = first if not row else data[row]
        made = _features(item[keys[0]])
        if x is None:
            x = np.empty((len(data), *made.shape), made.dtype)
        if made.shape != x.shape[1:]:
            raise refused(f"{name}: item {row}: shape", made.shape, f"{x.shape[1:]}, as of the first")
        x[row] = made
        for held, key in zip(others, keys[1:], strict=True):
            value = np.asarray(item[key])
            if value.ndim:
                raise refused(f"{name}: item {row}: shape of {key!r}", value.shape, "one value")
            held.append(value.item())
    return from_arrays(name, x, *others)


def _keys(name: str, keys: list[str], features: str | None, label: str | None, client: str | None) -> tuple[str, ...]:
    """Return the keys of features and label, and of the client where there is one."""
    for key in (features, label, client):
        if key and key not in keys:
            raise refused(f"{name}: item 0", key, f"one of {', '.join(keys)}")
    free = [key for key in keys if key not in (features, label, client)]
    label = label or next(iter(called(free, LABELS)), None)
    free = [key for key in free if key != label]
    client = next(iter(called(free, CLIENTS)), None) if client is None else client
    free = [features] if features else [key for key in free if key != client]
    if label is None or len(free) != 1:
        found = f"items with {', '.join(keys)}"
        raise refused(
            f"{name}", found, "one key for the features and one for the label; features= and label= name them"
        )
    return (free[0], label, *([client] if client else []))


def _features(value: Any) -> np.ndarray:
    made = np.atleast_1d(np.asarray(value))
    # Pictures of Pillow have their channels last.
    return made.transpose(2, 0, 1) if made.ndim == 3 and hasattr(value, "getbands") else made
