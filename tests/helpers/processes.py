"""Processes that others started: their numbers, and how much memory they have used."""

from collections.abc import Iterator
from pathlib import Path


def commands() -> Iterator[tuple[int, str]]:
    """Yield number and command line of all processes."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            yield int(folder.name), (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # it has ended
            continue


def running(*words: str) -> list[int]:
    """Return the processes whose command line has all of some words."""
    return [number for number, line in commands() if all(word in line for word in words)]


def children(*parents: int) -> dict[int, str]:
    """Return number and command line of the processes that some started."""
    found = {}
    for number, line in commands():
        try:
            parent = int(Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent in parents:
            found[number] = line
    return found


def gone(number: int) -> bool:
    """Tell whether a process has ended, reaped by its parent or not."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def offspring(*first: int) -> dict[int, str]:
    """Return number and command line of the processes that some started, and those started, and so on."""
    found = children(*first)
    return found | offspring(*found) if found else {}


def used(number: int, what: str = "VmRSS") -> float:
    """Return the megabytes of memory that a process uses, or at most has used (VmHWM)."""
    lines = Path(f"/proc/{number}/status").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{what}:")), 0) / 1000  # 0 of a zombie
