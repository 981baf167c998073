"""Arrays as files in the IDX format have them."""

from __future__ import annotations

import numpy as np

from fedtide.data.sources.published import TYPES

CODES = {np.dtype(name): code for code, name in TYPES.items()}


def idx_bytes(array: np.ndarray) -> bytes:
    """An array in the IDX format: 0, 0, type, dimensions, sizes and values, all big-endian."""
    stored = array.astype(array.dtype.newbyteorder(">"))
    sizes = b"".join(n.to_bytes(4, "big") for n in array.shape)
    return bytes([0, 0, CODES[stored.dtype], array.ndim]) + sizes + stored.tobytes()
