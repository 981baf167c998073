"""The terminal, a log or a notebook: where commands, and the same from Python, say what they do and found."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from fedtide.core.errors import printable
from fedtide.runs.job import Output

if TYPE_CHECKING:
    from fedtide.report.summary import Judged, Study
    from fedtide.report.tables import Table as Content


class Screen(Console):
    """A console that takes names as they are and goes on in silence once its reader has ended (`| head`)."""

    def on_broken_pipe(self) -> None:
        """Print nothing any more; the exit status is that of the command."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def console(output: Output = Output()) -> Console:
    """Return where words go: the standard output, the standard error beside JSON, or with `quiet` nowhere."""
    made = Screen(markup=False, emoji=False, highlight=False, quiet=output.quiet, stderr=output.json)
    if not made.is_terminal:
        made.width = 200  # a table must not be squeezed into 80 columns
    return made


def say(line: str, screen: Console | None = None) -> None:
    """Print a line as it is, on the standard output by default; folders may have names that a terminal would obey."""
    (screen or console()).print(printable(line), soft_wrap=True)


def tell(found: Any, output: Output) -> None:
    """Print what a command found on the standard output, where it is to be JSON."""
    if output.json:
        from fedtide.core.record import plain

        print(json.dumps(plain(found), indent=1, default=str))


def print_results(made: Study, screen: Console) -> None:
    """Print what a run folder says: its table, what went wrong, and its claims."""
    # Reports draw: a command that prints none does not wait for it.
    from fedtide.report.alarms import alarms
    from fedtide.report.environment import NANO
    from fedtide.report.narrative import SAME_RUN
    from fedtide.report.tables import brief_table

    if made.nano:
        screen.print(f"nano: {NANO}", style="yellow", soft_wrap=True)
    for summary in made.summaries:
        print_table(brief_table(summary), screen, summary.point)
        for line in alarms(summary):
            screen.print(line, style="red", soft_wrap=True)
        for pair in (pair for pair in summary.paired if pair.same_run):
            screen.print(f"{pair.name} is {SAME_RUN.format(pair.baseline)}", soft_wrap=True)
        _print_claims(summary.claims, screen, verdicts=not made.nano)
    _print_claims(made.claims, screen, verdicts=not made.nano)
    if len(made.summaries) > 1 and not made.chosen:
        said = "no point was chosen: no validation rows were judged (data.split.val, eval_splits)"
        screen.print(said, soft_wrap=True)


def print_table(content: Content, screen: Console, title: str = "") -> None:
    """Print a table of a report."""
    table = Table(*content.header, box=None, pad_edge=False, title=title or None, title_justify="left")
    for row in content.rows:
        table.add_row(*row)
    screen.print(table)


def _print_claims(claims: list[Judged], screen: Console, *, verdicts: bool) -> None:
    from fedtide.report.tables import found

    for claim in claims:
        said = f"{claim.verdict if verdicts else 'not judged at nano'}: {claim.claim} ({found(claim)})"
        screen.print(said, soft_wrap=True)
