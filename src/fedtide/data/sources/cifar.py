"""CIFAR-10 and CIFAR-100 in their published binary version."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import torch

from fedtide.core.config_types import ingredient
from fedtide.core.errors import FedtideError, refused
from fedtide.data.rows import Rows
from fedtide.data.sources.files import Loading, folder_of

PIXELS = 3 * 32 * 32


@ingredient
class CIFAR(Loading):
    """A folder with `data_batch_*.bin` and `test_batch*.bin` (CIFAR-10), or `train.bin` and `test.bin` (CIFAR-100).

    A record is one label byte (CIFAR-10) or two, coarse and fine (CIFAR-100), and 3,072 bytes: the red, green and blue
    planes. Files may hold fewer records than published.

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
        patterns = ("data_batch_*.bin", "test_batch*.bin") if self.classes == 10 else ("train.bin", "test.bin")
        train, test = (sorted(folder.glob(pattern)) for pattern in patterns)
        if not train:
            raise FedtideError(f"{folder}: no file called {patterns[0]}")
        parts = [(path, path in test) for path in [*train, *test]]
        records = [self._records(path) for path, _ in parts]
        labels = np.concatenate([r[:, self.classes // 100] for r in records]).astype(np.int64)
        pixels = np.concatenate([r[:, -PIXELS:] for r in records]).reshape(-1, 3, 32, 32)
        held_out = np.repeat([is_test for _, is_test in parts], [len(r) for r in records])
        return Rows(
            folder.name,
            torch.from_numpy(pixels),
            torch.from_numpy(labels),
            self.classes,
            held_out=torch.from_numpy(held_out) if test else None,
        )

    def _records(self, path: Path) -> np.ndarray:
        size = PIXELS + (1 if self.classes == 10 else 2)
        data = np.fromfile(path, dtype=np.uint8)
        if not len(data) or len(data) % size:
            raise refused(f"{path}: bytes", len(data), f"a multiple of {size}, the size of a record")
        return data.reshape(-1, size)
