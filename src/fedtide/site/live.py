"""Live status of a site, as its server writes it every second: a table for a terminal and a page, lines elsewhere."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table as Grid
from rich.text import Text

from fedtide.core.errors import printable
from fedtide.draw.tables import Table
from fedtide.remote.asks import state_of
from fedtide.report import terminal
from fedtide.runs.display import spoken
from fedtide.site.site import Site
from fedtide.site.status import OVER, Status, describe_server

SECONDS = 1.0
"""Seconds between two looks at the status; its server writes it as often."""
HEADER = ("node", "connected", "last answer", "took", "ago", "load", "memory")


@dataclass(frozen=True)
class View:
    """Status of a site at one time.

    Args:
        lines: what the server does.
        status: as the server wrote it; None if none ever ran.
        is_gone: whether that server runs no longer.
        names: names of the nodes of the roster.
    """

    lines: tuple[str, ...]
    status: Status | None
    is_gone: bool
    names: tuple[str, ...]

    @staticmethod
    def of(site: Site, status: Status | None, is_gone: bool) -> "View":
        """Return the view of a site."""
        names = tuple(node.name for node in site.roster.node)
        return View(tuple(describe_server(site, status, is_gone)), status, is_gone, names)

    @property
    def log(self) -> list[str]:
        """Lines of nodes' logs that their owners let out, each with the name of its node."""
        answers = () if self.status is None else self.status.heard
        return [f"{last.node}: log: {line}" for last in answers for line in last.log]

    @property
    def present(self) -> Sequence[str]:
        """Names of the nodes that are connected."""
        return () if self.status is None or self.is_gone else self.status.present

    def table(self, now: datetime) -> Table:
        """Return a row for each node: whether it is connected, and its last answer."""
        answers = {} if self.status is None else {last.node: last for last in self.status.heard}
        rows = []
        for name in dict.fromkeys([*self.names, *self.present, *answers]):
            last, connected = answers.get(name), "-" if self.is_gone else "yes" if name in self.present else "no"
            cells = ["-"] * 5
            if last is not None:
                ago = max((now - last.at).total_seconds(), 0.0)
                memory = "-" if last.memory is None else f"{100 * last.memory:.0f} %"
                load = "-" if last.load is None else f"{last.load:.3g}"
                cells = [state_of(last.word), f"{last.seconds:.3g} s", spoken(ago), load, memory]
            rows.append([name, connected, *cells])
        return Table(list(HEADER), rows)


def describe_changes(before: View | None, after: View) -> Iterator[str]:
    """Say in lines what is new since a view; without one, all that is known."""
    yield from (line for line in after.lines if before is None or line not in before.lines)
    was, now = set(() if before is None else before.present), set(after.present)
    for name in sorted(was ^ now):
        yield f"{name} is {'connected' if name in now else 'gone'}"
    answers = () if before is None or before.status is None else before.status.heard
    for last in () if after.status is None else after.status.heard:
        if last not in answers:
            yield f"{last.node}: {last.word}, after {last.seconds:.3g} s"
    yield from (line for line in after.log if before is None or line not in before.log)


def follow(site: Site, screen: Console) -> None:
    """Show the status of a site until its study is over: a table in a terminal, elsewhere a line for each change.

    Raises:
        FedtideError: the status is damaged.
    """
    before = None
    with ExitStack() as stack:
        live = None
        if screen.is_terminal:
            live = stack.enter_context(Live(console=screen, auto_refresh=False))
        while not screen.quiet:  # nobody reads it any more
            now, status = datetime.now(UTC), Status.read(site.status)
            view = View.of(site, status, status is not None and status.is_gone(site, now))
            if live is not None:
                live.update(_shown(view, now), refresh=True)
            else:
                for line in describe_changes(before, view):
                    terminal.say(f"{now.astimezone():%H:%M:%S} {line}", screen)
            if status is not None and status.phase == OVER:
                return
            before = view
            time.sleep(SECONDS)


def _shown(view: View, now: datetime) -> Group:
    """Return a view for a terminal, in which nothing is obeyed."""
    content = view.table(now)
    grid = Grid(*content.header, box=None, pad_edge=False)
    for row in content.rows:
        grid.add_row(*(Text(printable(cell)) for cell in row))
    return Group(*(Text(printable(line)) for line in view.lines), grid, *(Text(printable(line)) for line in view.log))
