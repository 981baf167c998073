"""Image files: in a folder for each class, or listed by a table."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np
import torch

from fedtide.core.atomic import replacing
from fedtide.core.errors import FedtideError, refused, unknown
from fedtide.data.rows import Rows
from fedtide.data.sources.arrays import from_arrays
from fedtide.data.sources.cells import read_cells, read_names
from fedtide.data.sources.files import Loading, check_unpacked, find, opened, reading
from fedtide.data.sources.published import read_idx
from fedtide.data.sources.table import Where, labels_of, names_of
from fedtide.data.sources.when import all_seconds
from fedtide.fields.types import Count, ingredient

Arrays = Mapping[str, np.ndarray]


def pillow(kind: str) -> Any:
    """Return Pillow's Image module, which a source of this kind needs."""
    try:
        from PIL import Image
    except ImportError:
        raise FedtideError(f"data.source.kind: '{kind}' needs Pillow; pip install \"fedtide[data]\"") from None
    return Image


def pixels(where: str, image: Any, data: bytes, channels: int, size: int | None = None) -> np.ndarray:
    """Read the pixels (channels, height, width) of one image file.

    Args:
        where: the file, for the error message.
        image: the result of `pillow`.
        data: bytes of the file.
        channels: 3 for color, 1 for gray.
        size: height and width to resize to; None keeps the size of the image.
    """
    with reading(where, "a picture", image.DecompressionBombError), image.open(io.BytesIO(data)) as opened:
        picture = opened.convert("L" if channels == 1 else "RGB")
        if size is not None and picture.size != (size, size):
            picture = picture.resize((size, size), image.Resampling.BILINEAR)
        found = np.asarray(picture)
    return found[None] if channels == 1 else np.ascontiguousarray(found.transpose(2, 0, 1))


def same_size(where: str, found: np.ndarray, first: np.ndarray) -> None:
    """Raise if the size of an image differs from that of the first."""
    if found.shape != first.shape:
        size, wanted = (f"{p.shape[2]} x {p.shape[1]}" for p in (found, first))
        raise refused(f"{where}: pixels", size, f"{wanted}, as the first picture")


class Cached(Loading):
    """A source that may keep its pixels in an `.npz` file, which changes no result."""

    cache: str | None

    def uncached(self) -> Any:
        """Return the source without its cache."""
        return replace(self, cache=None)  # type: ignore[type-var]

    def kept(self, key: Callable[[], str], names: tuple[str, ...], read: Callable[[], Arrays]) -> Arrays:
        """Return the arrays cached under a key; otherwise those that `read` makes, which are then cached.

        Args:
            key: function to an identifier of the arrays; the file is replaced if it has another one.
            names: names of the arrays.
            read: the function that makes them.
        """
        if self.cache is None:
            return read()
        cache, wanted = Path(self.cache).expanduser(), key()
        if cache.exists():
            what = "a cache: delete it"
            with reading(f"data.source.cache: {cache}", what), open(cache, "rb") as file, np.load(file) as found:
                if str(found["key"]) == wanted:
                    return {name: found[name] for name in names}
        arrays = read()
        try:
            cache.parent.mkdir(parents=True, exist_ok=True)
            with replacing(cache) as temporary, open(temporary, "wb") as written:
                np.savez(written, key=np.array(wanted), **arrays)  # type: ignore[arg-type]
        except OSError as error:
            raise FedtideError(f"data.source.cache: cannot write {cache} ({error})") from None
        return arrays


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
        header = read_names(path)
        for column in header:
            if column not in COLUMNS:
                raise unknown(f"{path}: row 1", column, COLUMNS)
        cells = read_cells(path, [], [*dict.fromkeys([*NEEDED, *header])])
        columns, where = cells.texts, cells.where
        labels = labels_of(columns["label"], where)
        client, domain = (
            names_of(name, columns[name], where) if name in columns else None for name in ("client", "domain")
        )
        time = all_seconds(columns["time"], where)[0] if "time" in columns else None
        held_out = _held_out(path, columns["split"], where) if "split" in columns else None
        files = _listed_files(path, columns["path"], where)
        key = lambda: f"{_table_fingerprint(path, files)} {self.channels} {self.size}"  # noqa: E731
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


def _held_out(path: Path, column: list[str], where: Where) -> np.ndarray | None:
    """Return the mask of the test rows; None where there are none."""
    for place, cell in enumerate(column):
        if cell not in ("train", "test"):
            raise refused(f"{where(place)}: split", cell, "train, test")
    held_out = np.array([cell == "test" for cell in column])
    if held_out.all():
        raise FedtideError(f"{path}: no pictures to train on: every split is 'test'")
    return held_out if held_out.any() else None


def _listed_files(path: Path, column: list[str], where: Where) -> list[tuple[str, Path]]:
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


def _table_fingerprint(path: Path, files: list[tuple[str, Path]]) -> str:
    """Return a hash that detects other images: of the bytes of the table and the sizes of its files."""
    found = hashlib.blake2b(path.read_bytes(), digest_size=16)
    for _, file in files:
        found.update(f"{file.stat().st_size}\n".encode())
    return found.hexdigest()
