"""JSON files of LEAF with rows by user (Caldas et al.: *LEAF: A Benchmark for Federated Settings*, 2018)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from fedtide.core.errors import FedtideError, refused
from fedtide.data.rows import Rows
from fedtide.data.sources.arrays import check_filled
from fedtide.data.sources.files import Loading, find, reading
from fedtide.fields.types import ClassCount, Count, ingredient


@ingredient
class LEAF(Loading):
    """JSON files as written by LEAF's scripts: `users`, `num_samples`, and `user_data` with `x` and `y` of each user.

    The path is a folder with the folders `train` and `test`, a folder with files of which those named `*test*` are the
    test set, or one file. Users are the natural clients; a user in several files has the rows of all. Features are
    numbers, equally many in every row, such as the 784 of a FEMNIST image.

    Args:
        path: the file or folder, below the data directory or absolute.
        shape: shape of a row, such as `[1, 28, 28]` for FEMNIST; by default a row is a list.
        classes: number of classes, such as 62 for FEMNIST; by default the largest label plus 1.
    """

    path: str
    shape: tuple[Count, ...] | None = None
    classes: ClassCount | None = None
    kind: Literal["leaf"] = "leaf"

    def load(self, directory: Path | None, seed: int) -> Rows:
        """Read the files one by one."""
        path = find(self.path, directory)
        train, test = _files(path)
        x: list[np.ndarray] = []
        y: list[np.ndarray] = []
        owner: list[tuple[int, bool]] = []
        users: dict[str, int] = {}
        for file in [*train, *test]:
            for user, features, labels in _users(file):
                if features.shape[1:] != (x[0] if x else features).shape[1:]:
                    where = f"{file}: user '{user}': number of features"
                    raise refused(where, features.shape[1], f"{x[0].shape[1]}, as in the first row")
                self._check_labels(file, user, labels)
                x.append(features)
                y.append(labels)
                owner += [(users.setdefault(user, len(users)), file in test)] * len(labels)
        if not owner:
            raise FedtideError(f"{path}: no rows")
        labels = np.concatenate(y)
        if self.classes is None:
            most = int(labels.argmax())
            where = f"{path}: user '{list(users)[owner[most][0]]}', row {most - owner.index(owner[most])}"
            check_filled(where, int(labels[most]), len(labels), "data.source.classes")
        return Rows(
            path.name,
            torch.from_numpy(self._shaped(path, np.concatenate(x))),
            torch.from_numpy(labels),
            self.classes or int(labels.max()) + 1,
            client=torch.tensor([client for client, _ in owner]),
            client_names=tuple(users),
            held_out=torch.tensor([held_out for _, held_out in owner]) if test else None,
        )

    def _check_labels(self, file: Path, user: str, labels: np.ndarray) -> None:
        for row in np.flatnonzero(labels >= (self.classes or math.inf))[:1]:
            allowed = f"0 to {(self.classes or 0) - 1} (data.source.classes)"
            raise refused(f"{file}: user '{user}', row {row}: label", int(labels[row]), allowed)

    def _shaped(self, path: Path, x: np.ndarray) -> np.ndarray:
        if self.shape is None:
            return x
        if math.prod(self.shape) != x.shape[1]:
            raise refused("data.source.shape", list(self.shape), f"{x.shape[1]} numbers, as rows of {path} have")
        return x.reshape(len(x), *self.shape)


def _files(path: Path) -> tuple[list[Path], list[Path]]:
    """Return the training files and the test files."""
    if path.is_file():
        return [path], []
    if (path / "train").is_dir():
        train, test = (sorted((path / part).glob("*.json")) for part in ("train", "test"))
    else:
        files = sorted(path.glob("*.json"))
        test = [file for file in files if "test" in file.name]
        train = [file for file in files if file not in test]
    if not train:
        raise FedtideError(f"{path}: no file called *.json to train on, here or in a folder called train")
    return train, test


def _users(file: Path) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield the name, features (rows, features) and labels (rows,) of each user of a file."""
    with reading(file, "a JSON file"), open(file, encoding="utf-8") as opened:
        content = json.load(opened)
    for key, kind in (("users", list), ("num_samples", list), ("user_data", dict)):
        if not isinstance(content, dict) or not isinstance(content.get(key), kind):
            raise FedtideError(f"{file}: no '{key}'; allowed: a file of LEAF, with users, num_samples and user_data")
    users, sizes, data = content["users"], content["num_samples"], content["user_data"]
    if len(users) != len(sizes):
        raise refused(f"{file}: number of num_samples", len(sizes), f"{len(users)}, as there are users")
    for user, size in zip(users, sizes, strict=True):
        if not isinstance(user, str):
            raise refused(f"{file}: users", user, "names")
        # Popped, so that Python numbers, which take much memory, are freed while they are read.
        features, labels = _arrays(f"{file}: user '{user}'", data.pop(user, None))
        if len(labels) != size or len(features) != size:
            found = len(features), len(labels)
            raise refused(f"{file}: user '{user}': rows in x and y", found, f"{size}, as num_samples says")
        if size:
            yield user, features, labels


def _arrays(where: str, rows: Any) -> tuple[np.ndarray, np.ndarray]:
    if not isinstance(rows, Mapping) or not isinstance(rows.get("x"), list) or not isinstance(rows.get("y"), list):
        raise FedtideError(f"{where}: no lists x and y in user_data")
    try:
        with np.errstate(over="ignore"):  # numbers that are too large become infinite, and are refused below
            x, y = np.array(rows["x"], dtype=np.float32), np.array(rows["y"], dtype=np.float64)
    except (ValueError, TypeError, OverflowError):
        raise FedtideError(f"{where}: allowed: in x lists of equally many numbers, in y numbers") from None
    if not rows["x"]:
        return x.reshape(0, 1), y.astype(np.int64)
    if x.ndim != 2 or y.ndim != 1:
        raise refused(f"{where}: shapes of x and y", (x.shape, y.shape), "(rows, features), (rows,)")
    for row in np.flatnonzero(~np.isfinite(x).all(1))[:1]:
        raise FedtideError(f"{where}, row {row}: a feature is NaN or infinite")
    for row in np.flatnonzero(~np.isfinite(y) | (y != np.floor(y)) | (y < 0) | (y > 2**53))[:1]:
        raise refused(f"{where}, row {row}: label", float(y[row]), "whole numbers from 0")
    return x, y.astype(np.int64)
