"""Output of commands, on a terminal, in a log or in a notebook."""

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
    from fedtide.draw.tables import Table as Content
    from fedtide.report.summary import Judged, Study


class Screen(Console):
    """A console that prints names unchanged, and nothing after its reader has ended (`| head`)."""

    def on_broken_pipe(self) -> None:
        """Print nothing any more, and leave the exit status to the command."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def console(output: Output = Output()) -> Console:
    """Return a console on the standard output, on the standard error if JSON goes there, or silent if `quiet`."""
    screen = Screen(markup=False, emoji=False, highlight=False, quiet=output.quiet, stderr=output.json)
    if not screen.is_terminal:
        screen.width = 200  # a table must not be squeezed into 80 columns
    return screen


def say(line: str, screen: Console | None = None) -> None:
    """Print a line unchanged, without control characters in names, on the standard output by default."""
    (screen or console()).print(printable(line), soft_wrap=True)


def tell(result: Any, output: Output) -> None:
    """Print the result of a command on the standard output, if it is to be JSON."""
    if output.json:
        from fedtide.core.record import plain

        print(json.dumps(plain(result), indent=1, default=str))


def print_results(study: Study, screen: Console) -> None:
    """Print the tables of a run folder, its alarms, and its claims."""
    # Reports draw: a command that prints none does not wait for it.
    from fedtide.report.accuracy import brief_table
    from fedtide.report.narrative import SAME_RUN, alarms
    from fedtide.report.run_records import NANO

    if study.nano:
        screen.print(f"nano: {NANO}", style="yellow", soft_wrap=True)
    for summary in study.summaries:
        print_table(brief_table(summary), screen, summary.point)
        for line in alarms(summary):
            screen.print(line, style="red", soft_wrap=True)
        for pair in (pair for pair in summary.paired if pair.same_run):
            screen.print(f"{pair.name} is {SAME_RUN.format(pair.baseline)}", soft_wrap=True)
        _print_claims(summary.claims, screen, verdicts=not study.nano)
    _print_claims(study.claims, screen, verdicts=not study.nano)
    if len(study.summaries) > 1 and not study.chosen:
        text = "no point was chosen: no validation rows were judged (data.split.val, eval_splits)"
        screen.print(text, soft_wrap=True)


def print_table(content: Content, screen: Console, title: str = "") -> None:
    """Print a table of a report."""
    table = Table(*content.header, box=None, pad_edge=False, title=title or None, title_justify="left")
    for row in content.rows:
        table.add_row(*row)
    screen.print(table)


def _print_claims(claims: list[Judged], screen: Console, *, verdicts: bool) -> None:
    from fedtide.report.claims import format_claim

    for claim in claims:
        verdict = claim.verdict if verdicts else "not judged at nano"
        screen.print(f"{verdict}: {claim.claim} ({format_claim(claim)})", soft_wrap=True)
