"""Parts that processes of one machine share: temporary folders, the search path, and cores.

Nothing here imports torch, so that a process that must start fast can use it.
"""

import ctypes
import os
import re
import shutil
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

from fedtide.fields.user_code import current_folder

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

PREFIX = "fedtide-"
NAME = re.compile(f"{PREFIX}[a-z0-9_]{{8}}")
"""Names that the system gives to folders with our prefix."""
LOCK, MAKING = "lock", "lock.making"
"""The file that the owner of a folder holds locked while it lives, and its name before it is locked."""
YOUNG = 60.0
"""Seconds in which a folder gets its lock."""
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of the GNU C library's malloc.h."""
KEPT, LARGEST, LARGEST_BEFORE = 512 << 20, 64 << 20, 32 << 20
"""Bytes of free memory that is kept, and of the largest tensor that is made in it, now and in older libraries."""


class Scratch:
    """A new folder that only this user can read, locked by this process.

    Args:
        directory: where it is made; None is the system's place for temporary files.

    >>> with Scratch() as folder:
    ...     made = folder.is_dir()
    >>> made, folder.exists()
    (True, False)
    """

    def __init__(self, directory: Path | None = None) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=directory))
        # Locked before it has its name, so that no other process can take it for one that was left behind.
        self._lock = os.open(self.path / MAKING, os.O_CREAT | os.O_RDWR, 0o600)
        if fcntl is not None:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            os.rename(self.path / MAKING, self.path / LOCK)
            remove_left_behind(self.path.parent)

    def close(self) -> None:
        """Remove the folder."""
        _remove(self.path)
        os.close(self._lock)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()


def remove_left_behind(*directories: Path) -> None:
    """Remove the folders of this user whose processes are gone: those with a lock that no process holds.

    A process that was killed before it had its lock leaves a folder with nothing else in it.

    Args:
        directories: where to look; by default wherever this machine has temporary files.
    """
    if fcntl is None:
        return
    places = directories or {Path(tempfile.gettempdir()), Path("/tmp"), Path("/dev/shm")}
    for path in (path for place in places for path in place.glob(f"{PREFIX}*")):
        try:
            if not _ours(path, stat.S_ISDIR):
                continue
            is_begun = NAME.fullmatch(path.name) and {entry.name for entry in path.iterdir()} <= {MAKING}
            if is_begun and time.time() - path.stat().st_mtime > YOUNG:
                shutil.rmtree(path, ignore_errors=True)
            if not _ours(path / LOCK, stat.S_ISREG):
                continue
            lock = os.open(path / LOCK, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:  # gone in the meantime
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(path)
        except OSError:  # its owner lives
            continue
        finally:
            os.close(lock)


def _remove(path: Path) -> None:
    """Remove a folder, its lock last, because another process finds by it what a kill or a late file leaves."""
    with suppress(OSError):
        for entry in [entry for entry in path.iterdir() if entry.name != LOCK]:
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)
        if {entry.name for entry in path.iterdir()} <= {LOCK}:
            shutil.rmtree(path, ignore_errors=True)


def _ours(path: Path, kind: Callable[[int], bool]) -> bool:
    status = path.lstat()
    return kind(status.st_mode) and status.st_uid == os.getuid()


def search_path() -> str:
    """Return where another process finds modules: as this one does, but never in the current folder.

    Modules that a configuration names are looked for there last (`fedtide.fields.user_code`).
    """
    here = current_folder()
    package = str(Path(__file__).resolve().parents[2])
    paths = [path for path in sys.path if path and path != here]
    return os.pathsep.join(paths if package in paths else [*paths, package])


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def keep_freed_memory() -> None:
    """Let this process keep up to 512 MB of memory that it has freed, if its C library is GNU's.

    Otherwise the activations of a step go back to the system, which clears their pages anew for the next step.
    If the environment sets thresholds (`MALLOC_TRIM_THRESHOLD_`, `GLIBC_TUNABLES`), they hold.
    """
    named = {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"}
    if os.name != "posix" or named & os.environ.keys():
        return
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(TRIM_THRESHOLD, KEPT)
        if not set_option(MMAP_THRESHOLD, LARGEST):
            set_option(MMAP_THRESHOLD, LARGEST_BEFORE)


def end_with_parent(every: float = 1.0) -> threading.Thread:
    """End this process soon after the one that started it is gone; return the thread that waits for that."""
    parent = os.getppid()

    def wait() -> None:
        while os.getppid() == parent:
            time.sleep(every)
        os._exit(0)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    return waiting
