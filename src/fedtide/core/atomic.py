"""Files that are whole or not there, and known by their digest."""

import errno
import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TextIO

from fedtide.core.errors import Damaged, FedtideError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


OLD = 3600.0
"""Seconds within which a file or folder gets its name."""


def check_free(out: Path, mark: bytes = b"", marked: Path | None = None, hint: str = "") -> None:
    """Raise if a file that is to be written would take the place of another one, or if its folder is missing.

    Args:
        mark: bytes at the beginning of files that may be replaced, because we made them; b"" for none.
        marked: the file that has the mark in place of `out`, beside which it is written; None for `out` itself.
        hint: end of the error: the option that names another file.
    """
    file = marked or out
    if out.is_dir():
        raise FedtideError(f"{out}: is a folder, allowed: a new file")
    if os.path.lexists(out) and not (mark and file.is_file() and mark in _beginning(file)):
        ours = ", or an earlier page or picture of ours" if mark else ""
        raise FedtideError(f"{out}: is there already, allowed: a new file{ours}{hint}")
    if not out.parent.is_dir():
        raise FedtideError(f"{out}: no such folder: {out.parent}; allowed: a file in a folder that is there")


def _beginning(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(1000)


def check_new(root: Path, hint: str = "") -> None:
    """Raise if a new folder already exists, unless it is empty, or cannot be made; nothing is changed."""
    if os.path.lexists(root) and (not root.is_dir() or any(root.iterdir())):
        raise FedtideError(f"{root}: already exists, allowed: a new or empty folder{hint}")
    parent = next(folder for folder in (root, *root.absolute().parents) if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        why = "cannot be written to" if parent.is_dir() else "is no folder"
        raise FedtideError(f"{root}: {parent} {why}; allowed: a new folder where you may write")


@contextmanager
def naming(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """Name a file or folder in system errors that name none, such as that of a full disk.

    Args:
        path: the file or folder.
        temporary: the name under which it is made; errors of it, or of what is in it, name `path`.
    """
    try:
        yield
    except OSError as error:
        name = str(error.filename or path)
        if temporary is not None and name.startswith(str(temporary)):
            within = name.removeprefix(str(temporary))
            name = f"{path}{within}" if within.startswith(os.sep) else str(path)
        error.filename = name
        raise


@contextmanager
def replacing(path: Path, *, new: bool = False) -> Iterator[Path]:
    """A temporary name to write to, which takes the place of `path` at the end, or disappears after an error.

    The name cannot be known before: a link that waits there would be followed.

    Args:
        new: whether nothing is replaced, also not what another program has written meanwhile.

    Raises:
        FedtideError: something is at `path` by the end, and it is to be new.

    >>> import tempfile
    >>> target = Path(tempfile.mkdtemp()) / "x.txt"
    >>> with replacing(target) as temporary:
    ...     _ = temporary.write_text("all of it")
    >>> [entry.name for entry in target.parent.iterdir()]
    ['x.txt']
    """
    if path.is_dir():
        raise IsADirectoryError(21, "is a folder", str(path))
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.writing")
    try:
        with naming(path, temporary):
            yield temporary
            if new:
                _name_new(temporary, path)
            else:
                temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
        _remove_unfinished(path)


def _name_new(temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path)  # unlike a rename, a link replaces no file
    except FileExistsError:
        check_free(path)
        raise
    except OSError:  # a file system without links
        check_free(path)
        temporary.replace(path)


def write_bytes(path: Path, content: bytes, mode: int = 0o644, *, new: bool = False) -> None:
    """Write a file, all of it or nothing, also if the power fails; it is on the disk afterwards.

    Args:
        mode: who may read it, from its first byte on.
        new: whether nothing is replaced; see `replacing`.

    Raises:
        FedtideError: something is there already, and nothing is replaced; it is left as it is.
    """
    with replacing(path, new=new) as temporary, open(temporary, "xb", opener=partial(os.open, mode=mode)) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    flush(path.parent)


def _remove_unfinished(path: Path) -> None:
    """Remove what processes that were killed long ago have left under temporary names of a file or folder."""
    mine = re.compile(rf"{re.escape(path.name)}\.([0-9a-f]{{16}}\.writing(\.\w+)?|making-[0-9a-f]{{16}})")
    with suppress(OSError):
        for entry in os.scandir(path.parent):
            if mine.fullmatch(entry.name) and time.time() - entry.stat(follow_symlinks=False).st_mtime > OLD:
                shutil.rmtree(entry, ignore_errors=True) if entry.is_dir(follow_symlinks=False) else os.unlink(entry)


@contextmanager
def making(path: Path, mode: int = 0o777) -> Iterator[Path]:
    """A new folder under a temporary name, which becomes `path` at the end, or disappears after an error.

    >>> import tempfile
    >>> target = Path(tempfile.mkdtemp()) / "made"
    >>> with making(target) as temporary:
    ...     _ = (temporary / "x.txt").write_text("all of it")
    >>> [entry.name for entry in target.iterdir()]
    ['x.txt']
    """
    temporary = path.with_name(f"{path.name}.making-{secrets.token_hex(8)}")
    try:
        with naming(path, temporary):
            temporary.parent.mkdir(parents=True, exist_ok=True)
            temporary.mkdir(mode)
            yield temporary
        try:
            temporary.replace(path)
        except OSError:
            check_new(path)  # another process may have made it meanwhile
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # if it was not renamed
        _remove_unfinished(path)


def write_text(path: Path, text: str, *, new: bool = False) -> None:
    """Write a text file as `write_bytes` does; the umask alone says who may read it."""
    write_bytes(path, text.encode(), 0o666, new=new)


def flush(path: Path) -> None:
    """Return when a file, or what a folder lists, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def lock(file: int, *, wait: bool = True) -> None:
    """Lock an open file for this process alone, if the system has such locks.

    Raises:
        BlockingIOError: another process holds it, and this one does not wait.
    """
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)


def open_lock(path: Path) -> TextIO:
    """Open a file for its lock alone.

    Raises:
        FedtideError: it is something else, for example a pipe, which would never open.
    """
    _check_lock(path)
    return open(path, "w", encoding="utf-8")


def _check_lock(path: Path) -> None:
    if path.exists() and not path.is_file():
        raise FedtideError(f"{path}: is a folder, a pipe or a device, allowed: a file")


def is_locked(path: Path) -> bool | None:
    """Tell whether a process holds the lock of a file; None if the system does not say."""
    if fcntl is None:
        return None
    _check_lock(path)
    try:
        with open(path, "rb") as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (BlockingIOError, FileNotFoundError) as error:
        return isinstance(error, BlockingIOError)
    except OSError:
        return None
    return False


def append(path: Path, line: str, mode: int = 0o666) -> None:
    """Write a line behind the last whole line of a file, safely on the disk; after an error the file is as before.

    Args:
        path: the file, which is made if there is none.
        line: without its end.
        mode: who may read a file that is made.
    """
    is_new, content = not path.exists(), f"{line}\n".encode()
    with naming(path), open(path, "ab+", buffering=0, opener=partial(os.open, mode=mode)) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 1, 0))
        if file.read() not in (b"", b"\n"):  # a kill has left half a line
            file.seek(0)
            size = file.truncate(file.read().rfind(b"\n") + 1)
        try:
            if file.write(content) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file.fileno())
        except OSError:
            with suppress(OSError):
                file.truncate(size)
            raise
    if is_new:
        flush(path.parent)


def sha256(path: Path, length: int | None = None) -> str:
    """Return the digest of a file, or of its first `length` bytes.

    Raises:
        FedtideError: it is missing, or shorter.
    """
    try:
        with open(path, "rb") as file:
            if length is None:
                return hashlib.file_digest(file, "sha256").hexdigest()
            digest = hashlib.sha256()
            while length and (part := file.read(min(length, 1 << 20))):
                digest.update(part)
                length -= len(part)
    except FileNotFoundError:
        raise Damaged(f"{path}: missing") from None
    if length:
        raise Damaged(f"{path}: damaged (it is {length} bytes shorter than what was written)")
    return digest.hexdigest()


def check_sha256(path: Path, digest: str, length: int | None = None) -> None:
    """Raise Damaged if a file, or what its first `length` bytes are, is not what was written."""
    if sha256(path, length) != digest:
        raise Damaged(f"{path}: damaged (its sha256 is not the one that was written)")
