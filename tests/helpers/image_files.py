"""Arrays as files in the IDX format have them."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from fedtide.data.sources import images
from fedtide.data.sources.published import TYPES

CODES = {np.dtype(name): code for code, name in TYPES.items()}


def idx_bytes(array: np.ndarray) -> bytes:
    """An array in the IDX format: 0, 0, type, dimensions, sizes and values, all big-endian."""
    stored = array.astype(array.dtype.newbyteorder(">"))
    sizes = b"".join(n.to_bytes(4, "big") for n in array.shape)
    return bytes([0, 0, CODES[stored.dtype], array.ndim]) + sizes + stored.tobytes()


def write_idx(folder: Path, prefix: str, images: np.ndarray, labels: np.ndarray) -> None:
    """Write pictures and labels as the published archives have them."""
    folder.mkdir(exist_ok=True)
    for what, array in (("images-idx3", images), ("labels-idx1", labels)):
        (folder / f"{prefix}-{what}-ubyte.gz").write_bytes(gzip.compress(idx_bytes(array), 1))


# -- counts of the pictures that are decoded ---------------------------------------------------------------------------


def count_decoded(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A list to which each picture that is decoded from now on adds an entry."""
    count: list[bool] = []
    decode = images.decode

    def counted(*args):
        for pixels in decode(*args):
            count.append(True)
            yield pixels

    monkeypatch.setattr(images, "decode", counted)
    return count
