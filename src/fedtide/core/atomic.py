"""Files that are whole or not there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name to write to, which takes the place of `path` at the end, or disappears after an error.

    >>> import tempfile
    >>> target = Path(tempfile.mkdtemp()) / "x.txt"
    >>> with replacing(target) as temporary:
    ...     _ = temporary.write_text("all of it")
    >>> [entry.name for entry in target.parent.iterdir()]
    ['x.txt']
    """
    if path.is_dir():
        raise IsADirectoryError(21, "is a folder", str(path))
    temporary = path.with_name(f"{path.name}.{os.getpid()}.writing")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
