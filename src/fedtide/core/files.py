"""Files that a person names, which are read in one place: files, of a bounded size, and nothing that may never end."""

import re
import stat
import tomllib
from pathlib import Path
from typing import Any

from fedtide.core.errors import FedtideError, refused

LARGEST = 20_000_000
"""Maximum number of bytes of a configuration, a ticket, a key, or another small file."""
PARTS = 30
"""Maximum number of parts of a dotted key, because the time of tomllib grows with their square."""
PART = r"""(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+"""
LONG_KEY = re.compile(rf"""(?<![\w"'\\-])(?:{PART}){{{PARTS}}}""")


def check_file(path: Path, allowed: str = "a file") -> None:
    """Raise unless a path names a file.

    Args:
        allowed: the wanted file, in words.

    Raises:
        FedtideError: there is nothing, or a folder, a pipe, a socket or a device, of which some never end.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise FedtideError(f"{path}: no such file") from None
    except OSError as error:
        raise FedtideError(f"{path}: {error.strerror}") from None
    if not stat.S_ISREG(mode):
        raise FedtideError(
            f"{path}: is {'a folder' if stat.S_ISDIR(mode) else 'a pipe or a device'}, allowed: {allowed}"
        )


def open_file(path: Path, encoding: str | None = None, newline: str | None = None) -> Any:
    """Open a file to read its bytes, or its text if an encoding is given; see `check_file`."""
    check_file(path)
    return open(path, "rb" if encoding is None else "r", encoding=encoding, newline=newline)


def read_bytes(path: Path, most: int = LARGEST, allowed: str = "a file") -> bytes:
    """Return the content of a file of at most `most` bytes.

    Raises:
        FedtideError: the file is larger, cannot be read, or is none (see `check_file`).
    """
    check_file(path, allowed)
    try:
        with open(path, "rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        raise FedtideError(f"{path}: {error.strerror}") from None
    if len(content) > most:
        raise refused(f"{path}: bytes", f"more than {most:,}", f"at most {most:,}")
    return content


def read_toml(path: Path, most: int = LARGEST) -> dict[str, Any]:
    """Return the content of a TOML file of at most `most` bytes."""
    content = read_bytes(path, most, "a TOML file")
    try:
        text = content.decode("utf-8-sig")
        if long := LONG_KEY.search(text):
            line = text.count("\n", 0, long.start()) + 1
            raise ValueError(f"a key of more than {PARTS} parts (at line {line})")
        return tomllib.loads(text)
    except RecursionError:
        raise FedtideError(f"{path}: nested too deeply") from None
    except ValueError as error:  # no text, no TOML, or a number with thousands of digits
        hint = "; methods are [[method]] tables, with two brackets" if "('method',)" in str(error) else ""
        raise FedtideError(f"{path}: not valid TOML: {error}{hint}") from None
