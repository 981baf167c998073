"""Facts of a node's machine that its owner lets the server know: load, memory, the last lines of its log."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedtide.core.errors import FedtideError, printable
from fedtide.fields.types import HIDDEN
from fedtide.remote import messages
from fedtide.remote.messages import LINE, LINES, MachineHeader
from fedtide.remote.policy import Policy, Unreadable


@dataclass(frozen=True)
class RecentLog:
    """A log of a node that remembers its last lines.

    Errors of work on rows have several lines, and may quote values of these: no such text is remembered.

    Args:
        write: takes each text.
        lines: the last texts of one line, as the server may be told them.
    """

    write: Callable[[str], None]
    lines: list[str] = field(default_factory=list)

    def __call__(self, text: str) -> None:
        """Take a text."""
        self.write(text)
        if len(text.splitlines()) == 1:
            self.lines[:] = [*self.lines, visible_line(text)][-LINES:]


def tell(policy: Callable[[], Policy], log: RecentLog) -> dict[str, Any]:
    """Return facts of this machine for the server, as plain JSON: those that the owner's rules let out.

    Args:
        policy: returns the rules as they are now; while they cannot be read nothing is told.
        log: has the last lines.
    """
    try:
        allowed = policy().tells
    except Unreadable:
        return {}
    facts = {"load": _load, "memory": _memory, "log": lambda: list(log.lines)}
    return {name: fact for name in allowed if (fact := facts[name]()) not in (None, [])}


def read_facts(header: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts in the header of an answer, for `LastAnswer`; none if they are not as they must be.

    >>> read_facts({"machine": {"load": 0.5, "log": ["a\\x1b[2J\\ufffd"]}})
    {'load': 0.5, 'memory': None, 'log': ('a\\\\x1b[2J?',)}
    >>> read_facts({"machine": {"load": "much"}}), read_facts({}), read_facts([])
    ({}, {}, {})
    """
    machine = header.get("machine") if isinstance(header, Mapping) else None  # a node may say anything
    if machine is None:
        return {}
    try:
        facts = messages.read(MachineHeader, machine, "machine")
    except FedtideError:
        return {}
    return {"load": facts.load, "memory": facts.memory, "log": tuple(map(visible_line, facts.log))}


def visible_line(text: str) -> str:
    """Return a text as a short line in which a terminal obeys nothing."""
    return HIDDEN.sub("?", printable(" ".join(text.split())))[:LINE]


def _load() -> float | None:
    """Return the processes that ran or waited in the last minute, by processor; None if the system does not say."""
    try:
        return round(os.getloadavg()[0] / (os.cpu_count() or 1), 2)
    except (AttributeError, OSError):
        return None


def _memory() -> float | None:
    """Return the share of memory that is in use; None if the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        sizes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
        return round(min(max(1 - sizes["MemAvailable"] / sizes["MemTotal"], 0.0), 1.0), 2)
    except (OSError, LookupError, ValueError, ZeroDivisionError):
        return None
