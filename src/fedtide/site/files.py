"""Files of sites and nodes: read as those of strangers, and written whole or not at all."""

from __future__ import annotations

import os
import secrets
import stat
import tomllib
from pathlib import Path
from typing import Any

from fedtide.core.errors import FedtideError, refused

SECRET, PUBLIC = 0o600, 0o644


def read_bytes(path: Path, most: int) -> bytes:
    """Return the content of a file of at most so many bytes.

    Raises:
        FedtideError: there is none, it is larger, or it is a folder, a pipe or a device.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would wait for a writer
            raise FedtideError(f"{path}: is a folder, a pipe or a device, allowed: a file")
        with open(path, "rb") as file:
            content = file.read(most + 1)
    except FileNotFoundError:
        raise FedtideError(f"{path}: no such file") from None
    except OSError as error:
        raise FedtideError(f"{path}: {error.strerror}") from None
    if len(content) > most:
        raise refused(f"{path}: bytes", f"more than {most:,}", f"at most {most:,}")
    return content


def read_toml(path: Path, most: int) -> dict[str, Any]:
    """Return the content of a TOML file of at most so many bytes."""
    try:
        return tomllib.loads(read_bytes(path, most).decode("utf-8"))
    except RecursionError:
        raise FedtideError(f"{path}: nested too deeply") from None
    except ValueError as error:  # no text, no TOML, or a number with thousands of digits
        raise FedtideError(f"{path}: damaged or not TOML ({error})") from None


def write_new(path: Path, content: bytes, mode: int = PUBLIC) -> None:
    """Write a file that is not there yet, all of it at once.

    Raises:
        FedtideError: something is there; it is left as it is.
    """
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.writing")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(handle)
        try:
            os.link(temporary, path)  # unlike a rename it replaces no file
        except FileExistsError:
            raise FedtideError(f"{path}: is there already, and is left as it is") from None
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def check_own(path: Path) -> None:
    """Raise for a folder that another user owns, may look into, or may replace.

    One that is not there is fine.
    """
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise FedtideError(f"{path}: {error.strerror}") from None
    if stat.S_ISLNK(found.st_mode):
        raise FedtideError(f"{path}: is a link, allowed: a folder")
    if os.name != "posix":
        return
    if found.st_uid != os.getuid():
        raise refused(f"{path}: owner", f"user {found.st_uid}", f"user {os.getuid()}, who runs this command")
    if (mode := found.st_mode & 0o777) & 0o077:
        raise refused(f"{path}: mode", f"{mode:04o}", f"0700; mend it with: chmod 700 {path}")


def check_secret(path: Path) -> None:
    """Raise for a secret file that others than its owner may read."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise FedtideError(f"{path}: {error.strerror}") from None
    if os.name == "posix" and mode & 0o077:
        raise refused(f"{path}: mode", f"{mode & 0o777:04o}", f"0600; mend it with: chmod 600 {path}")
