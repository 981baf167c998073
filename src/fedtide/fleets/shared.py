"""Large trees between processes through files in shared memory that are written again and again.

A fresh file costs a page fault for every 4 kB, five times as much as the copy itself; so a sender keeps its files.
"""

from __future__ import annotations

import json
import mmap
from pathlib import Path

import torch

from fedtide.core import codec
from fedtide.core.atomic import naming
from fedtide.core.trees import Tree, raw


def write(path: Path, tree: Tree) -> None:
    """Write a tree into a file, over its former content."""
    arrays, skeleton = codec.encode(tree)
    flat = {name: raw(array) for name, array in arrays.items()}
    layout, starts, end = {}, {}, 0
    for name, array in arrays.items():
        starts[name] = end
        layout[name] = [end, flat[name].numel(), str(array.dtype).removeprefix("torch."), list(array.shape)]
        end += (flat[name].numel() + 63) // 64 * 64
    header = json.dumps({"tree": skeleton, "arrays": layout}).encode()
    with naming(path), open(path, "r+b" if path.exists() else "wb") as file:
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        for name, start in starts.items():
            file.seek(_first(len(header)) + start)
            file.write(flat[name].numpy().data)


def read(path: Path) -> Tree:
    """Read the tree in a file, as a copy."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        length = int.from_bytes(memory[:8], "little")
        header = json.loads(memory[8 : 8 + length])
        arrays = {}
        for name, (start, size, dtype, shape) in header["arrays"].items():
            at = _first(length) + start
            flat = torch.empty(size, dtype=torch.uint8)
            flat.numpy()[:] = memoryview(memory)[at : at + size]
            arrays[name] = flat.view(getattr(torch, dtype)).reshape(shape)
    return codec.decode(arrays, header["tree"])


def _first(header: int) -> int:
    """Return the aligned position behind the header, where arrays begin."""
    return (8 + header + 63) // 64 * 64
