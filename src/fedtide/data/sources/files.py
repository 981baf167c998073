"""Search for data files, unpacking, and the error of a damaged one."""

import bz2
import csv
import difflib
import gzip
import io
import lzma
import os
import re
import tarfile
import tokenize
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import IO, Any, ClassVar
from xml.parsers import expat

from fedtide.core.errors import FedtideError, refused
from fedtide.core.files import open_file

DAMAGED = (
    OSError, EOFError, ValueError, TypeError, LookupError, SyntaxError, RecursionError, NotImplementedError, csv.Error,
    MemoryError, OverflowError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError, expat.ExpatError,
    tokenize.TokenError,
)  # fmt: skip
"""Exceptions of the readers of files whose bytes are not what they should be."""

PACKED: dict[bytes, Any] = {rb"\x1f\x8b": gzip.open, rb"BZh[1-9]1AY&SY": bz2.open, rb"\xfd7zXZ\x00": lzma.open}
"""First bytes of packed files, and what unpacks them."""

UNPACKED, TIMES = 2**28, 200
"""A file may unpack to so many bytes, or to so many times its size: text and tables hardly shrink to a fiftieth."""


ENDINGS = ".gz", ".bz2", ".xz", ".csv", ".arff", ".parquet", ".npz", ".txt", ".toml"
"""Endings of files that are packed, and of tables and studies."""


def strip_endings(name: str) -> str:
    """Return the name of a file without the endings that say what it is.

    >>> strip_endings("WISDM_v1.1_transformed.arff"), strip_endings("air.csv.gz"), strip_endings("day.1")
    ('WISDM_v1.1_transformed', 'air', 'day.1')
    """
    stem, dot, ending = name.rpartition(".")
    return strip_endings(stem) if stem and f"{dot}{ending}".lower() in ENDINGS else name


class Loading:
    """A source of rows: `load(directory, seed)` reads or draws them; files are searched first in the data directory.

    If a source `measures`, `load(directory, seed, measured=True)` returns rows whose labels are values and no classes.
    """

    measures: ClassVar[bool] = False

    @property
    def drawn(self) -> bool:
        """Tell whether the rows depend on the seed."""
        return False

    def uncached(self) -> Any:
        """Return the source without what changes no result."""
        return self


@contextmanager
def reading(where: object, what: str, *besides: type[Exception]) -> Iterator[None]:
    """Turn the exceptions of a damaged file into one line.

    Args:
        where: the file, and the place in it.
        what: the wanted contents, in words.
        besides: further exceptions of its reader.

    >>> with reading("a.json", "JSON"):
    ...     int("x")
    Traceback (most recent call last):
    fedtide.core.errors.FedtideError: a.json: damaged or not JSON (invalid literal for int() with base 10: 'x')
    """
    try:
        yield
    except IsADirectoryError:
        raise FedtideError(f"{where}: is a folder, allowed: {what}") from None
    except DAMAGED + besides as error:
        # Of what is no npz file NumPy says how to load it all the same, which would run what is in it.
        words = re.sub(r" ?<\S+ object at 0x\w+>", "", str(error))
        why = "" if "allow_pickle" in words else f" ({words})"
        raise FedtideError(f"{where}: damaged or not {what}{why}") from None


def check_no_folder(path: Path) -> None:
    """Raise if a folder, or that of a run, stands in the place of a file."""
    if (path / "config.toml").is_file():
        allowed = f"files of data, or the study {path / 'config.toml'}"
        raise FedtideError(f"{path}: is a run folder, allowed: {allowed}")
    if path.is_dir():
        tables = Counter(file.suffix for file in path.iterdir() if file.suffix in ENDINGS)
        example = f", such as {path}/*{max(tables, key=tables.__getitem__)}" if tables else "; the folder has none"
        raise FedtideError(f"{path}: is a folder, allowed: files{example}")


def opened(path: Path) -> IO[bytes]:
    """Open a file, packed (gzip, bzip2, xz) or not; reading raises when a small file unpacks to gigabytes."""
    check_no_folder(path)
    with open_file(path) as file:
        head = file.read(16)
    unpack = next((unpack for start, unpack in PACKED.items() if re.match(start, head)), None)
    return open(path, "rb") if unpack is None else io.BufferedReader(_Unpacked(path, unpack(path)), 2**16)


def check_unpacked(where: object, size: int, packed: int | None = None) -> None:
    """Raise if a file unpacks to more bytes than honest data do.

    Args:
        where: the file; or another name for messages, with `packed`.
        size: its bytes in memory.
        packed: its own bytes; None looks at the file.
    """
    if size > max(UNPACKED, TIMES * (Path(str(where)).stat().st_size if packed is None else packed)):
        allowed = f"at most {UNPACKED:,} or {TIMES} times the size of the file; honest data need less"
        raise refused(f"{where}: unpacked bytes", size, allowed)


class _Unpacked(io.RawIOBase):
    """The bytes of a packed file, as far as its size allows."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self.path, self.file, self.size = path, file, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.file.read(len(buffer))
        self.size += len(data)
        check_unpacked(self.path, self.size)
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self.file.close()
        super().close()


DIRECTORIES = "set data.directory or FEDTIDE_DATA"
"""Advice on a relative path that names nothing."""


def find(path: str, directory: Path | None, key: str = "data.source", *, hint: str = DIRECTORIES) -> Path:
    """Return the path of a file or folder, which is absolute, below the data directory or relative.

    The data directory is the configured one or FEDTIDE_DATA. `key` is the configuration key and `hint` the advice for
    error messages; that on directories is left out if the path is absolute.

    Raises:
        FedtideError: the path does not exist in any place; the message names all places.
    """
    wanted = Path(path).expanduser()
    places = [Path()] if wanted.is_absolute() else _places(directory)
    for place in places:
        candidate = place / wanted
        if candidate.exists():
            if not candidate.is_file() and not candidate.is_dir():
                raise FedtideError(f"{key}: {candidate}: is a pipe or a device, allowed: a file or folder")
            return candidate
    tried = ", ".join(str(place / wanted) for place in places)
    if close := next(filter(None, (_nearest_file(place / wanted) for place in places)), ""):
        hint = f"did you mean '{close}'?"
        raise FedtideError(f"{key}: no such file or folder: {tried}; {hint}")
    advice = "" if wanted.is_absolute() and hint == DIRECTORIES else f"; {hint}"
    raise FedtideError(f"{key}: no such file or folder: {tried}{advice}")


def _nearest_file(path: Path) -> str:
    """Return the file or folder beside a path whose name is most like its own, of the first thousand; "" if none is."""
    names: list[str] = []
    with suppress(OSError):  # there is no such folder, or nobody may look into it
        names = [other.name for other in islice(path.parent.iterdir(), 1000)]
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.7)
    return str(path.parent / close[0]) if close else ""


def folder_of(path: str, directory: Path | None) -> Path:
    """Return the path of a folder, found like a file by `find`."""
    folder = find(path, directory)
    if not folder.is_dir():
        raise FedtideError(f"data.source.path: {folder}: found a file, allowed: a folder, such as {folder.parent}")
    return folder


def _places(directory: Path | None) -> list[Path]:
    named = os.environ.get("FEDTIDE_DATA")
    return [*([directory] if directory else []), *([Path(named)] if named else []), Path()]
