"""IDX files, gzipped or not: MNIST, EMNIST, Fashion-MNIST and similar data sets."""

from __future__ import annotations

import gzip
import hashlib
import math
import os
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from fedtide.core.errors import FedtideError, refused
from fedtide.data.rows import Rows
from fedtide.data.sources.arrays import classes_of, whole_numbers
from fedtide.data.sources.files import Loading, folder_of, reading
from fedtide.fields.types import Flag, Whole, ingredient

TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}

DEFLATE = 1032
"""Bytes that one byte of a gzip file unpacks to, at most."""

PUBLISHED = {
    "mnist/train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "mnist/train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "mnist/t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "mnist/t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
    "fashion-mnist/train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "fashion-mnist/train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "fashion-mnist/t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "fashion-mnist/t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}
"""Published md5 sums, by folder and file name."""


@ingredient
class IDX(Loading):
    """A folder with IDX files `*train*images*`, `*train*labels*` and, for its own test set, `*t10k*` or `*test*`.

    Args:
        path: the folder, below the data directory or absolute.
        transpose: swap rows and columns of the images, which EMNIST needs to stand upright; None decides by the
            folder's name.
        first_label: the smallest label number in the files; None means 1 for EMNIST letters and 0 otherwise.
        verify: compare with the published checksum if the folder has the name of a published data set.
    """

    path: str
    transpose: Flag | None = None
    first_label: Whole | None = None
    verify: Flag = True
    kind: Literal["idx"] = "idx"

    def load(self, directory: Path | None, seed: int) -> Rows:
        """Read the files."""
        folder = folder_of(self.path, directory)
        train = self._part(folder, ("train",))
        if train is None:
            raise FedtideError(f"{folder}: no IDX files called *train*images* and *train*labels*")
        test = self._part(folder, ("t10k", "test"))
        if test is not None and train[0].shape[1:] != test[0].shape[1:]:
            raise FedtideError(f"{folder}: pictures of {train[0].shape[1:]} to train and {test[0].shape[1:]} to test")
        x, y = train if test is None else (np.concatenate([a, b]) for a, b in zip(train, test, strict=True))
        if not len(y):
            raise FedtideError(f"{folder}: no rows")
        if self.transpose if self.transpose is not None else "emnist" in folder.name.lower():
            x = np.ascontiguousarray(x.transpose(0, 2, 1))
        labels = torch.from_numpy(y - self._first_label(folder, y))
        held_out = None if test is None else torch.arange(len(y)) >= len(train[1])
        with np.errstate(over="ignore"):  # numbers that are too large become infinite, and are refused
            pictures = torch.from_numpy(x if x.dtype == np.uint8 else x.astype(np.float32)).unsqueeze(1)
        return Rows(folder.name, pictures, labels, classes_of(str(folder), labels), held_out=held_out)

    def _first_label(self, folder: Path, y: np.ndarray) -> int:
        if self.first_label is not None:
            return self.first_label
        return int("letters" in folder.name.lower() and y.min() == 1)

    def _part(self, folder: Path, names: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray] | None:
        found = []
        for what in ("images", "labels"):
            paths = sorted(p for p in folder.iterdir() if what in p.name and any(n in p.name for n in names))
            if not paths:
                return None
            found.append(paths[0])
        if self.verify:
            for path in found:
                check_published(path)
        x, y = read_idx(found[0]), read_idx(found[1])
        for path, array, dimensions in ((found[0], x, 3), (found[1], y, 1)):
            if array.ndim != dimensions:
                allowed = "3, pictures (rows, height, width)" if dimensions == 3 else "1, a label for each picture"
                raise refused(f"{path}: number of dimensions", array.ndim, allowed)
        if len(x) != len(y):
            raise FedtideError(f"{found[1]}: {len(y)} labels for {len(x)} pictures in {found[0].name}")
        return x, whole_numbers(str(found[1]), y)


def check_published(path: Path) -> None:
    """Compare a file with its published md5 sum, if there is one for its folder and name."""
    wanted = PUBLISHED.get(f"{path.parent.name.lower()}/{path.name}")
    if wanted is None:
        return
    found = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
    if found != wanted:
        raise FedtideError(
            f"{path}: md5 {found}, published {wanted}: damaged or not the published file; "
            "download it again, or set data.source.verify = false"
        )


def read_idx(path: Path) -> np.ndarray:
    """Read one IDX file as an array, and never unpack more of it than its header announces.

    Raises:
        FedtideError: its magic number, size or gzip checksum is wrong.
    """
    with reading(path, "a whole IDX file"), open(path, "rb") as opened:
        packed = opened.read(2) == b"\x1f\x8b"
        size = os.fstat(opened.fileno()).st_size
        opened.seek(0)
        file = gzip.GzipFile(fileobj=opened) if packed else opened
        magic = file.read(4)
        if len(magic) < 4 or magic[:2] != b"\x00\x00" or magic[2] not in TYPES:
            raise refused(f"{path}: magic number", magic.hex(), "0000tt0n, as in an IDX file")
        sizes = file.read(4 * magic[3])
        shape = tuple(int.from_bytes(sizes[i : i + 4], "big") for i in range(0, len(sizes), 4))
        kind = np.dtype(TYPES[magic[2]])
        header, announced = 4 + 4 * magic[3], math.prod(shape) * kind.itemsize
        whole = len(sizes) == 4 * magic[3] and announced <= size * (DEFLATE if packed else 1)
        data = file.read(announced + 1) if whole else b""
    if not whole or len(data) != announced:
        unpacked = "others" if len(data) in (0, announced + 1) else header + len(data)
        raise refused(f"{path}: bytes", unpacked if packed else size, f"{header + announced}, as its header announces")
    values = np.frombuffer(data, kind)
    with reading(path, "an IDX file"):  # of more dimensions than an array has
        values = values.reshape(shape)
    return values.astype(values.dtype.newbyteorder("="), copy=True)
