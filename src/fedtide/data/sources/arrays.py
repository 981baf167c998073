"""Arrays from a file or from the user's own Python: NPZ and `module:function`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from fedtide.core import user_code
from fedtide.core.config_types import ingredient
from fedtide.core.errors import FedtideError, nearest, refused, unknown
from fedtide.data.rows import Rows
from fedtide.data.sources.files import Loading, find, reading

Column = Literal["x", "y", "client", "domain", "time", "held_out"]
MOST_CLASSES = 1_000_000
COLUMNS: tuple[Column, ...] = get_args(Column)


@ingredient
class NPZ(Loading):
    """An `.npz` file with `x` and `y`, optionally `client`, `domain`, `time`, `held_out` (one entry per row each).

    Images are (rows, height, width) or (rows, channels, height, width) uint8; float64 stays, and other numbers become
    float32.

    Args:
        path: the file, below the data directory or absolute.
        names: names of the arrays in the file where they differ from these, e.g. `{x = "arr_0"}`.
    """

    path: str
    names: dict[Column, str] = field(default_factory=dict)
    kind: Literal["npz"] = "npz"

    def load(self, directory: Path | None, seed: int) -> Rows:
        """Read the file; raise for pickled objects in it."""
        path = find(self.path, directory)
        called = {column: self.names.get(column, column) for column in COLUMNS}
        what = "an npz file without pickled objects"
        with reading(path, what), open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            found = {column: arrays[name] for column, name in called.items() if name in arrays}
            listed = list(arrays)
        needed: tuple[Column, ...] = ("x", "y", *self.names)
        for column in needed:
            if column not in found:
                raise FedtideError(f"{path}: no array '{called[column]}'; {nearest(called[column], listed)}")
        return from_arrays(path.name, **found)


@ingredient
class Python(user_code.Python, Loading):
    """The user's own function, `module:function`, called with `options`.

    It returns Rows, or a mapping with `x`, `y` and optionally `client`, `domain`, `time`, `held_out`, or a pair (x, y).
    """

    def load(self, directory: Path | None, seed: int) -> Rows:
        """Call the function."""
        made = user_code.call(self.find("data.source"), "data.source.options", **self.options)
        if isinstance(made, Rows):
            return made
        if isinstance(made, Mapping):
            for key in made:
                if key not in COLUMNS:
                    raise unknown(self.name, str(key), COLUMNS)
            if not {"x", "y"} <= made.keys():
                raise refused(self.name, ", ".join(made), "x, y, and others of " + ", ".join(COLUMNS))
            return from_arrays(self.name, **made)
        if isinstance(made, tuple) and len(made) == 2:
            return from_arrays(self.name, *made)
        raise refused(self.name, made, "a function that returns Rows, a mapping, or a pair (x, y)")


def from_arrays(
    name: str,
    x: Any,
    y: Any,
    client: Any = None,
    domain: Any = None,
    time: Any = None,
    held_out: Any = None,
) -> Rows:
    """Build rows from arrays or tensors.

    Args:
        name: name for messages.
        x: (rows, ...) features; uint8 images (rows, height, width) get a channel.
        y: (rows,) whole numbers from 0, or names.
        client: (rows,) numbers or names of natural clients.
        domain: (rows,) numbers or names of domains.
        time: (rows,) seconds.
        held_out: (rows,) true for rows of the test set.

    >>> from_arrays("toy", np.zeros((3, 2)), ["cat", "dog", "cat"]).y.tolist()
    [0, 1, 0]
    """
    features = _tensor(name, "x", x)
    if features.dtype == torch.uint8 and features.dim() == 3:
        features = features.unsqueeze(1)
    elif features.dtype != torch.uint8 or features.dim() != 4:
        features = features.to(features.dtype if features.dtype == torch.float64 else torch.float32)
    labels, label_names = _labels(name, y)
    clients = None if client is None else coded(client)
    domains = None if domain is None else coded(domain)
    return Rows(
        name,
        features,
        labels,
        _classes(name, labels, label_names),
        domain=None if domains is None else domains[0],
        domain_names=("all",) if domains is None else domains[1],
        client=None if clients is None else clients[0],
        client_names=() if clients is None else clients[1],
        time=None if time is None else _tensor(name, "time", time).double(),
        held_out=None if held_out is None else _tensor(name, "held_out", held_out).bool(),
    )


def _labels(name: str, y: Any) -> tuple[Tensor, tuple[str, ...]]:
    values = y.numpy() if isinstance(y, Tensor) else np.asarray(y)
    if values.ndim != 1:
        raise refused(f"{name}: shape of y", values.shape, "(rows,)")
    if values.dtype.kind in "USO":
        if values.dtype.kind == "O" and any(not isinstance(value, str) for value in values):
            row = next(i for i, value in enumerate(values) if not isinstance(value, str))
            raise refused(f"{name}: row {row}: label", values[row], "names, or whole numbers from 0")
        return coded(values.astype(str))
    if values.dtype.kind == "f":
        wrong = np.flatnonzero(~np.isfinite(values) | (values != np.floor(values)))
        if len(wrong):
            raise refused(f"{name}: row {int(wrong[0])}: label", float(values[wrong[0]]), "whole numbers")
    return torch.from_numpy(values.astype(np.int64)), ()


def _classes(name: str, labels: Tensor, names: tuple[str, ...]) -> int:
    """Count the classes: the names, or the numbers up to the largest label."""
    if names or not len(labels):
        return len(names)
    classes = int(labels.max()) + 1
    if classes > MOST_CLASSES:
        raise refused(f"{name}: label", classes - 1, f"0 to {MOST_CLASSES - 1}, or names")
    return classes


def coded(values: Any) -> tuple[Tensor, tuple[str, ...]]:
    """Return a number 0..n-1 for each value by the sorted order of distinct values, and the name of each number.

    >>> coded(["b", "a", "b"])
    (tensor([1, 0, 1]), ('a', 'b'))
    """
    found = values.numpy() if isinstance(values, Tensor) else np.asarray(values)
    names, numbers = np.unique(found.astype(str) if found.dtype.kind == "O" else found, return_inverse=True)
    return torch.from_numpy(numbers.reshape(-1).astype(np.int64)), tuple(str(name) for name in names)


def _tensor(name: str, column: str, values: Any) -> Tensor:
    try:
        return values if isinstance(values, Tensor) else torch.as_tensor(np.ascontiguousarray(values))
    except (TypeError, ValueError) as error:
        raise FedtideError(f"{name}: {column}: not an array of numbers ({error})") from None
