"""Image files listed by a table, with their labels, natural clients and times."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

import numpy as np

from fedtide.core.errors import FedtideError, refused, unknown
from fedtide.data.rows import Rows
from fedtide.data.sources.arrays import from_arrays
from fedtide.data.sources.cells import places, read_table
from fedtide.data.sources.files import find
from fedtide.data.sources.pictures import Cached, pillow, pixels, same_size
from fedtide.data.sources.table import Where, labels_of, names_of
from fedtide.data.sources.when import all_seconds
from fedtide.fields.types import Count, ingredient

NEEDED = ("path", "label")
COLUMNS = (*NEEDED, "client", "time", "domain", "split")


@ingredient
class Manifest(Cached):
    """A comma-separated file with a header, packed or not, and a row for each image file.

    Its columns are `path` and `label`, and optionally `client`, `time`, `domain` and `split`. Paths are relative to the
    folder of the table, or absolute. Labels are numbers from 0, or names. Times are seconds or ISO 8601. A split is
    "train" or "test". Reading the images needs Pillow: `pip install "fedtide[data]"`.

    Args:
        path: the table, below the data directory or absolute.
        size: height and width to which all images are resized, whatever their shape; None keeps their size, which must
            then be the same for all.
        channels: 3 for color, 1 for gray; images are converted.
        cache: an `.npz` file that stores the pixels, created if missing and replaced if the images changed; by default
            nothing is stored.
    """

    path: str
    size: Count | None = None
    channels: Literal[1, 3] = 3
    cache: str | None = None
    kind: Literal["manifest"] = "manifest"

    def load(self, directory: Path | None, seed: int) -> Rows:
        """Read the table, and the images or their pixels from the cache."""
        path = find(self.path, directory)
        rows, columns = _columns(path)
        where = lambda place: f"{path}: row {rows[place]}"  # noqa: E731
        labels = labels_of(columns["label"], where)
        client, domain = (
            names_of(name, columns[name], where) if name in columns else None for name in ("client", "domain")
        )
        time = all_seconds(columns["time"], where)[0] if "time" in columns else None
        held_out = _held_out(path, columns["split"], where) if "split" in columns else None
        files = _files(path, columns["path"], where)
        key = lambda: f"{_fingerprint(path, files)} {self.channels} {self.size}"  # noqa: E731
        x = self.kept(key, ("x",), lambda: {"x": self._read(files)})["x"]
        return from_arrays(path.name, x, labels, client=client, domain=domain, time=time, held_out=held_out)

    def _read(self, files: list[tuple[str, Path]]) -> np.ndarray:
        """Read the pixels (rows, channels, height, width) of all images."""
        image = pillow(self.kind)
        x: np.ndarray | None = None
        for k, (where, file) in enumerate(files):
            try:
                data = file.read_bytes()
            except OSError as error:
                raise FedtideError(f"{where}: cannot be read ({error.strerror})") from None
            picture = pixels(where, image, data, self.channels, self.size)
            if x is None:
                x = _room(len(files), picture.shape)
            same_size(where, picture, x[0] if k else picture)
            x[k] = picture
        assert x is not None, "a table has rows"
        return x


def _columns(path: Path) -> tuple[list[int], dict[str, list[str]]]:
    """Read the numbers of the rows, and the columns by name."""
    header, lines = read_table(path)
    for column in header:
        if column not in COLUMNS:
            raise unknown(f"{path}: row 1", column, COLUMNS)
    places(path, header, NEEDED)
    return [row for row, _ in lines], {name: [line[at].strip() for _, line in lines] for at, name in enumerate(header)}


def _held_out(path: Path, column: list[str], where: Where) -> np.ndarray | None:
    """Return the mask of the test rows; None where there are none."""
    for place, cell in enumerate(column):
        if cell not in ("train", "test"):
            raise refused(f"{where(place)}: split", cell, "train, test")
    held_out = np.array([cell == "test" for cell in column])
    if held_out.all():
        raise FedtideError(f"{path}: no pictures to train on: every split is 'test'")
    return held_out if held_out.any() else None


def _files(path: Path, column: list[str], where: Where) -> list[tuple[str, Path]]:
    """Return the image files, each with the beginning of its error message."""
    names_of("path", column, where)
    files = [(f"{where(place)}: {cell}", path.parent / cell) for place, cell in enumerate(column)]
    for named, file in files:
        if not _there(file):
            raise FedtideError(f"{named}: no such picture file; paths are relative to the folder of the table")
    return files


def _there(file: Path) -> bool:
    try:
        return file.is_file()
    except OSError:  # a name that is too long, or a folder without permission
        return False


def _room(rows: int, shape: tuple[int, ...]) -> np.ndarray:
    try:
        return np.empty((rows, *shape), np.uint8)
    except (MemoryError, ValueError):
        size = rows * int(np.prod(shape)) / 2**30
        made = f"{rows} pictures of {shape[2]} x {shape[1]} take {size:.0f} GiB, more than there is"
        raise FedtideError(f"data.source.size: {made}; allowed: a smaller size") from None


def _fingerprint(path: Path, files: list[tuple[str, Path]]) -> str:
    """Return a hash that detects other images: of the bytes of the table and the sizes of its files."""
    found = hashlib.blake2b(path.read_bytes(), digest_size=16)
    for _, file in files:
        found.update(f"{file.stat().st_size}\n".encode())
    return found.hexdigest()
