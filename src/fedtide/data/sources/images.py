"""Image files (JPEG, PNG and all other formats of Pillow): in a folder for each class, or listed by a table."""

import hashlib
import io
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np

from fedtide.core.atomic import replacing
from fedtide.core.errors import FedtideError, refused, uninstalled, unknown, within
from fedtide.data.rows import Rows, make_rows
from fedtide.data.sources.arrays import from_arrays, open_arrays
from fedtide.data.sources.cells import Cells, read_cells
from fedtide.data.sources.files import Loading, check_unpacked, find, opened, reading
from fedtide.data.sources.published import read_idx
from fedtide.data.sources.table_files import read_names
from fedtide.data.sources.tabular import labels_of, names_of
from fedtide.fields.types import Count, ingredient

Arrays = Mapping[str, np.ndarray]

ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
NEEDED = ("path", "label")
COLUMNS = (*NEEDED, "client", "time", "domain", "split")


def decode(
    kind: str, files: Iterable[tuple[str, bytes]], channels: int, size: int | None = None
) -> Iterator[np.ndarray]:
    """Yield the pixels (channels, height, width) of image files of equal size.

    Args:
        kind: kind of the source, for messages.
        files: the place of each file, for messages, and its bytes.
        channels: 3 for color, 1 for gray.
        size: height and width to resize to; None keeps the size of the images.
    """
    try:
        from PIL import Image
    except ImportError:
        raise uninstalled(f'data.source.kind: "{kind}" needs Pillow', "data") from None
    first, total, packed = None, 0, 0
    for where, data in files:
        with reading(where, "a picture", Image.DecompressionBombError), Image.open(io.BytesIO(data)) as file:
            check_unpacked(where, 4 * file.width * file.height, len(data))
            image = file.convert("L" if channels == 1 else "RGB")
            if size is not None and image.size != (size, size):
                image = image.resize((size, size), Image.Resampling.BILINEAR)
            pixels = np.asarray(image)
        pixels = pixels[None] if channels == 1 else np.ascontiguousarray(pixels.transpose(2, 0, 1))
        total, packed = total + pixels.nbytes, packed + len(data)
        if size is None:  # else the person chose it
            check_unpacked(where, total, packed)
        first = pixels if first is None else first
        if pixels.shape != first.shape:
            shown, wanted = (f"{picture.shape[2]} x {picture.shape[1]}" for picture in (pixels, first))
            raise refused(f"{where}: pixels", shown, f"{wanted}, as the first picture")
        yield pixels


class Cached(Loading):
    """A source that may keep its pixels in an `.npz` file, which changes no result."""

    cache: str | None

    def uncached(self) -> Any:
        """Return the source without its cache."""
        return replace(self, cache=None)  # type: ignore[type-var]

    def read_cached(self, key: Callable[[], str], names: tuple[str, ...], read: Callable[[], Arrays]) -> Arrays:
        """Return the arrays cached under a key; otherwise read them and cache them.

        Args:
            key: function to an identifier of the arrays; the file is replaced if it has another one.
            names: names of the arrays.
            read: the function that reads them.
        """
        if self.cache is None:
            return read()
        cache, wanted = Path(self.cache).expanduser(), key()
        if cache.exists():
            with within("data.source.cache"), open_arrays(cache, "a cache: delete it") as stored:
                if str(stored.read("key")) == wanted:
                    return {name: stored.read(name) for name in names}
        arrays = read()
        try:
            cache.parent.mkdir(parents=True, exist_ok=True)
            with replacing(cache) as temporary, open(temporary, "wb") as written:
                np.savez(written, key=np.array(wanted), **arrays)  # type: ignore[arg-type]
        except OSError as error:
            raise FedtideError(f"data.source.cache: cannot write {cache} ({error})") from None
        return arrays


@ingredient
class Images(Cached):
    """Image files: `train/<class>/<image>` and `test/<class>/<image>`, or `<class>/<image>` alone.

    They are in a folder or in a tar archive. Classes are numbered in the order of their names, and images are sorted by
    name within a class; all have the same size. Reading them needs Pillow: `pip install "fedtide[data]"`.

    Args:
        path: the folder or archive, below the data directory or absolute.
        channels: 3 for color, 1 for gray; images are converted.
        order: two IDX files with the labels of `train` and of `test` in another order, below the data directory or
            absolute. The k-th image of a class takes the place of the k-th such label. So CIFAR-10 in folders regains
            its original order, and a seed deals the same images as from the binary files.
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
        arrays = self.read_cached(lambda: f"{_hash_images(path)} {self.channels}", names, lambda: self._read(path))
        x, y, held_out = (arrays[name] for name in names)
        if self.order is not None:
            place = self._places(self.order, directory, y, held_out)
            x, y, held_out = x[place], y[place], held_out[place]
        # An archive would have to be unpacked for its names alone.
        names_of = sorted({PurePosixPath(name).parts[-2] for name, _ in _images_in(path)}) if path.is_dir() else ()
        return make_rows(path.name, int(y.max()) + 1, x=x, y=y, held_out=held_out, label_names=tuple(names_of))

    def _read(self, path: Path) -> Arrays:
        """Return pixels (rows, channels, height, width), labels and the mask of test rows; training rows come first."""
        images: list[tuple[bool, str, str]] = []

        def files() -> Iterator[tuple[str, bytes]]:
            for name, data in _files(path):
                parts = PurePosixPath(name).parts
                if len(parts) < 2:
                    raise refused(f"{path}: picture", name, "<class>/<picture>")
                images.append((len(parts) > 2 and parts[-3] == "test", parts[-2], parts[-1]))
                yield f"{path}: {name}", data

        pixels = list(decode(self.kind, files(), self.channels))
        if all(held_out for held_out, *_ in images):
            allowed = f"one or more ({', '.join(ENDINGS)}), in a folder for each class"
            raise refused(f"{path}: pictures to train on", 0, allowed)
        order = sorted(range(len(images)), key=images.__getitem__)
        held_out, labels, _ = zip(*(images[k] for k in order), strict=True)
        y = np.unique(labels, return_inverse=True)[1]
        return {"x": np.stack([pixels[k] for k in order]), "y": y.astype(np.int64), "held_out": np.array(held_out)}

    def _places(
        self, order: tuple[str, str], directory: Path | None, y: np.ndarray, held_out: np.ndarray
    ) -> np.ndarray:
        """Return for each row of the wanted order its current position, by test rows and classes."""
        parts = [read_idx(find(name, directory)).astype(np.int64).ravel() for name in order]
        wanted, tested = np.concatenate(parts), np.repeat([False, True], [*map(len, parts)])
        rows = np.lexsort((wanted, tested))  # stable, which matches the k-th rows of each class
        if not (np.array_equal(wanted[rows], y) and np.array_equal(tested[rows], held_out)):
            allowed = "as many labels of each class as there are pictures to train and to test"
            raise FedtideError(f"data.source.order: {', '.join(order)}: found other labels, allowed: {allowed}")
        place = np.empty_like(rows)
        place[rows] = np.arange(len(rows))
        return place


def _images_in(folder: Path) -> list[tuple[str, Path]]:
    """Return the image files below a folder, sorted, each with the name below it."""
    files = [file for file in sorted(folder.rglob("*")) if file.suffix.lower() in ENDINGS]
    return [(file.relative_to(folder).as_posix(), file) for file in files if file.is_file()]


def _files(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the name below `path` and the bytes of each image."""
    if path.is_dir():
        yield from ((name, file.read_bytes()) for name, file in _images_in(path))
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


def _hash_images(path: Path) -> str:
    """Return a hash that detects other images: of the bytes of an archive, or of names and sizes in a folder."""
    if path.is_dir():
        sizes = "".join(f"{name} {file.stat().st_size}\n" for name, file in _images_in(path))
        return hashlib.blake2b(sizes.encode(), digest_size=16).hexdigest()
    with open(path, "rb") as archive:
        return hashlib.file_digest(archive, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


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
        for name in header:
            if name not in COLUMNS:
                raise unknown(f"{path}: row 1", name, COLUMNS)
        cells = read_cells(path, [*dict.fromkeys([*NEEDED, *header])])
        labels = labels_of(cells, "label")
        client, domain = (names_of(name, cells, name) if name in header else None for name in ("client", "domain"))
        time = cells.times(["time"])[0] if "time" in header else None
        held_out = _held_out(path, cells) if "split" in header else None
        files = _listed_files(path, cells)

        def key() -> str:
            """Return a text that tells other images: of the bytes of the table and the sizes of its files."""
            sizes = "".join(f"{file.stat().st_size}\n" for _, file in files)
            digest = hashlib.blake2b(path.read_bytes() + sizes.encode(), digest_size=16)
            return f"{digest.hexdigest()} {self.channels} {self.size}"

        x = self.read_cached(key, ("x",), lambda: {"x": self._read(files)})["x"]
        return from_arrays(path.name, x, labels, client=client, domain=domain, time=time, held_out=held_out)

    def _read(self, files: list[tuple[str, Path]]) -> np.ndarray:
        """Read the pixels (rows, channels, height, width) of all images."""
        contents = ((where, file.read_bytes()) for where, file in files)
        pictures = decode(self.kind, contents, self.channels, self.size)
        first = next(pictures)
        x = np.empty((len(files), *first.shape), np.uint8)
        for row, picture in enumerate(chain([first], pictures)):
            x[row] = picture
        return x


def _held_out(path: Path, cells: Cells) -> np.ndarray | None:
    """Return the mask of the test rows; None if there are none."""
    column = cells.texts("split")
    for row, cell in enumerate(column):
        if cell not in ("train", "test"):
            raise refused(f"{cells.where(row)}: split", cell, "train, test")
    held_out = np.array([cell == "test" for cell in column])
    if held_out.all():
        raise FedtideError(f"{path}: no pictures to train on: every split is 'test'")
    return held_out if held_out.any() else None


def _listed_files(path: Path, cells: Cells) -> list[tuple[str, Path]]:
    """Return the image files, each with the beginning of its error message."""
    column = names_of("path", cells, "path")
    files = [(f"{cells.where(row)}: {cell}", path.parent / cell) for row, cell in enumerate(column)]
    for place, file in files:
        if not os.access(file, os.R_OK) or not os.path.isfile(file):
            raise FedtideError(f"{place}: no such picture file; paths are relative to the folder of the table")
    return files
