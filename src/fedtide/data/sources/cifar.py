"""CIFAR-10 and CIFAR-100 in their published versions, the binary one and the one for Python."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from fedtide.core.errors import FedtideError, refused
from fedtide.data.rows import Rows
from fedtide.data.sources.files import Loading, folder_of, reading
from fedtide.fields.types import ingredient

PIXELS = 3 * 32 * 32
FILES = {
    10: (("data_batch_*.bin", "test_batch*.bin"), ("data_batch_?", "test_batch")),
    100: (("train.bin", "test.bin"), ("train", "test")),
}
"""Names of the files to train on and to test on, by classes: of the binary version, and of that for Python."""


@ingredient
class CIFAR(Loading):
    """A folder with `data_batch_*.bin` and `test_batch*.bin` (CIFAR-10), or `train.bin` and `test.bin` (CIFAR-100).

    A record is one label byte (CIFAR-10) or two, coarse and fine (CIFAR-100), and 3,072 bytes: the red, green and blue
    planes. Files may hold fewer records than published. Or the version for Python, which torchvision unpacks
    (`cifar-10-batches-py`, `cifar-100-python`): the same files without `.bin`, of which arrays and lists are read and
    no code is run.

    Args:
        path: the folder, below the data directory or absolute.
        classes: 10 for CIFAR-10, 100 for CIFAR-100.
    """

    path: str
    classes: Literal[10, 100] = 10
    kind: Literal["cifar"] = "cifar"

    def load(self, directory: Path | None, seed: int) -> Rows:
        """Read the files."""
        folder = folder_of(self.path, directory)
        versions = [[sorted(folder.glob(name)) for name in names] for names in FILES[self.classes]]
        readers: list[Callable[[Path], tuple[np.ndarray, np.ndarray]]] = [self._binary, self._pickled]
        found = [(files, read) for files, read in zip(versions, readers, strict=True) if files[0]]
        if not found:
            names = " or ".join(train for train, _ in FILES[self.classes])
            raise FedtideError(f"{folder}: no file called {names}")
        (train, test), read = found[0]
        labels, pixels = zip(*map(read, [*train, *test]), strict=True)
        held_out = np.repeat([False] * len(train) + [True] * len(test), [*map(len, labels)])
        return Rows(
            folder.name,
            torch.from_numpy(np.concatenate(pixels).reshape(-1, 3, 32, 32)),
            torch.from_numpy(np.concatenate(labels).astype(np.int64)),
            self.classes,
            held_out=torch.from_numpy(held_out) if test else None,
        )

    def _binary(self, path: Path) -> tuple[np.ndarray, np.ndarray]:
        size = PIXELS + (1 if self.classes == 10 else 2)
        data = np.fromfile(path, dtype=np.uint8)
        if not len(data) or len(data) % size:
            raise refused(f"{path}: bytes", len(data), f"a multiple of {size}, the size of a record")
        records = data.reshape(-1, size)
        return records[:, self.classes // 100], records[:, -PIXELS:]

    def _pickled(self, path: Path) -> tuple[np.ndarray, np.ndarray]:
        key = b"labels" if self.classes == 10 else b"fine_labels"
        with reading(path, "CIFAR for Python", pickle.UnpicklingError, AttributeError), open(path, "rb") as file:
            made = _Arrays(file, encoding="bytes").load()
            labels, pixels = np.array(made[key], dtype=np.int64), made[b"data"]
            if pixels.dtype != np.uint8 or pixels.shape != (len(labels), PIXELS) or not len(labels):
                raise ValueError(f"{key.decode()} {labels.shape} and data {pixels.shape}")
        if wrong := [label for label in labels.tolist() if not 0 <= label < self.classes]:
            raise refused(f"{path}: label", wrong[0], f"0 to {self.classes - 1}")
        return labels, pixels


def _empty(*_: object) -> np.ndarray:
    return np.empty(0, np.uint8)


def _bytes(name: object, *_: object) -> np.dtype:
    if name not in (b"u1", "u1"):
        raise pickle.UnpicklingError(f"it has an array of {name!r}")
    return np.dtype("u1", False, True)


class _Arrays(pickle.Unpickler):
    """Reads what dicts, lists, texts, numbers and arrays of bytes are pickled to, and calls nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] != "numpy" or name not in KNOWN:
            raise pickle.UnpicklingError(f"it calls {module}.{name}")
        return KNOWN[name]


KNOWN = {"_reconstruct": _empty, "ndarray": "ndarray", "dtype": _bytes}
"""What an array is unpickled with, in place of the functions of these names."""
