"""Image files in one folder per class: JPEG, PNG and all other formats of Pillow."""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Literal

import numpy as np
import torch

from fedtide.core.errors import FedtideError, refused
from fedtide.data.rows import Rows
from fedtide.data.sources.files import check_unpacked, find, opened, reading
from fedtide.data.sources.idx import read_idx
from fedtide.data.sources.pictures import Arrays, Cached, pillow, pixels, same_size
from fedtide.fields.types import ingredient

ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp")


@ingredient
class Images(Cached):
    """Image files: `train/<class>/<image>` and `test/<class>/<image>`, or `<class>/<image>` alone.

    They are in a folder or in a tar archive. Classes are numbered in the order of their names, and images are sorted by
    name within a class; all have the same size. Reading them needs Pillow: `pip install "fedtide[data]"`.

    Args:
        path: the folder or archive, below the data directory or absolute.
        channels: 3 for color, 1 for gray; images are converted.
        order: two IDX files with the labels of `train` and of `test` in another order, below the data directory or
            absolute. The k-th image of a class takes the place of the k-th such label: CIFAR-10 in folders regains its
            original order, so that a seed deals the same images as from the binary files.
        cache: an `.npz` file that stores the pixels, created if missing and replaced if the images changed; by default
            nothing is stored.
    """

    path: str
    channels: Literal[1, 3] = 3
    order: tuple[str, str] | None = None
    cache: str | None = None
    kind: Literal["images"] = "images"

    def load(self, directory: Path | None, seed: int) -> Rows:
        """Read the images, or their pixels from the cache."""
        path = find(self.path, directory)
        names = ("x", "y", "held_out")
        kept = self.kept(lambda: f"{_fingerprint(path)} {self.channels}", names, lambda: self._read(path))
        x, y, held_out = (kept[name] for name in names)
        if self.order is not None:
            place = self._places(path, y, held_out, directory)
            x, y, held_out = x[place], y[place], held_out[place]
        return Rows(
            path.name,
            torch.from_numpy(x),
            torch.from_numpy(y),
            int(y.max()) + 1,
            held_out=torch.from_numpy(held_out) if held_out.any() else None,
        )

    # -- reading ------------------------------------------------------------------------------------------------------

    def _read(self, path: Path) -> Arrays:
        """Return pixels (rows, channels, height, width), labels and the mask of test rows; training rows come first."""
        image = pillow(self.kind)
        found: list[tuple[bool, str, str, np.ndarray]] = []
        for name, data in _files(path):
            parts = PurePosixPath(name).parts
            if len(parts) < 2:
                raise refused(f"{path}: picture", name, "<class>/<picture>")
            picture = pixels(f"{path}: {name}", image, data, self.channels)
            if found:
                same_size(f"{path}: {name}", picture, found[0][3])
            found.append((len(parts) > 2 and parts[-3] == "test", parts[-2], parts[-1], picture))
        if not any(not for_testing for for_testing, *_ in found):
            allowed = f"one or more ({', '.join(ENDINGS)}), in a folder for each class"
            raise refused(f"{path}: pictures to train on", 0, allowed)
        found.sort(key=lambda picture: picture[:3])
        classes = {name: k for k, name in enumerate(sorted({label for _, label, *_ in found}))}
        return {
            "x": np.stack([picture for *_, picture in found]),
            "y": np.array([classes[label] for _, label, *_ in found], dtype=np.int64),
            "held_out": np.array([for_testing for for_testing, *_ in found]),
        }

    # -- another order ------------------------------------------------------------------------------------------------

    def _places(self, path: Path, y: np.ndarray, held_out: np.ndarray, directory: Path | None) -> np.ndarray:
        """Return for each row of the wanted order its current position."""
        assert self.order is not None
        places = []
        for name, part in zip(self.order, (False, True), strict=True):
            own = np.flatnonzero(held_out == part)
            file = find(name, directory)
            wanted = read_idx(file).astype(np.int64)
            if wanted.ndim != 1 or not np.array_equal(np.sort(wanted), np.sort(y[own])):
                allowed = f"as many labels of each class as {path} has pictures to {'test' if part else 'train'}"
                raise FedtideError(f"data.source.order: {file}: found other labels, allowed: {allowed}")
            # Both are sorted by class with a stable sort, which matches the k-th rows of each class.
            place = np.empty_like(own)
            place[np.argsort(wanted, kind="stable")] = own[np.argsort(y[own], kind="stable")]
            places.append(place)
        return np.concatenate(places)


def _files(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the name below `path` and the bytes of each image."""
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            if file.suffix.lower() in ENDINGS and file.is_file():
                yield file.relative_to(path).as_posix(), file.read_bytes()
        return
    with reading(path, "a tar archive"), opened(path) as packed, tarfile.open(fileobj=packed, mode="r|") as archive:
        for member in archive:
            if member.isfile() and PurePosixPath(member.name).suffix.lower() in ENDINGS:
                check_unpacked(path, member.size)  # a sparse file may be of any size
                content = archive.extractfile(member)
                assert content is not None
                yield member.name, content.read()
        # tarfile takes a truncated or damaged header for the end. At the true end it has read a block of zeros, and
        # another block of zeros follows.
        if archive.fileobj is None or archive.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError("it has no end")


def _fingerprint(path: Path) -> str:
    """Return a hash that detects other images: of the bytes of an archive, or of names and sizes in a folder."""
    found = hashlib.blake2b(digest_size=16)
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            if file.suffix.lower() in ENDINGS:
                found.update(f"{file.relative_to(path).as_posix()} {file.stat().st_size}\n".encode())
    else:
        with open(path, "rb") as archive:
            hashlib.file_digest(archive, lambda: found)
    return found.hexdigest()
