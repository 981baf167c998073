"""Output of commands, on a terminal, in a log or in a notebook."""

import json
import os
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from fedtide.core.errors import printable
from fedtide.draw.tables import Table as Content
from fedtide.runs.job import Output

if TYPE_CHECKING:
    from fedtide.report.summary import Judged, Study


NARROWEST = 10
"""Columns below which a width is none: some environments have `COLUMNS=0`, and nothing can be laid out in it."""


class Screen(Console):
    """A console that prints names unchanged, and nothing after its reader has ended (`| head`)."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if self.width < NARROWEST:
            self.width = 80

    def on_broken_pipe(self) -> None:
        """Print nothing any more, and leave the exit status to the command."""
        self.quiet = True
        flush(self.file)


def flush(stream: IO[str]) -> str:
    """Write what a stream still holds; return why that is impossible, and "" if it is possible or nobody reads it.

    A stream that cannot be written is led to nowhere, because the interpreter would try again at its end.
    """
    try:
        stream.write("")  # a stream that keeps nothing back is asked to write
        stream.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return "" if isinstance(error, BrokenPipeError) else f"standard output: {error.strerror}"
    return ""


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


def print_results(study: "Study", screen: Console) -> None:
    """Print the tables of a run folder, its alarms, and its claims."""
    # Reports draw: a command that prints none does not wait for it.
    from fedtide.report.accuracy import brief_table, explain_unknown
    from fedtide.report.claims import format_claim
    from fedtide.report.narrative import SAME_RUN, alarms
    from fedtide.report.run_records import NANO

    def write(line: str, style: str = "") -> None:
        screen.print(line, style=style, soft_wrap=True)

    def write_claim(claim: "Judged") -> None:
        write(f"{claim.verdict or 'not judged at nano'}: {claim.claim} ({format_claim(claim)})")

    if study.nano:
        write(f"nano: {NANO}", "yellow")
    for summary in study.summaries:
        print_table(brief_table(summary), screen, summary.point)
        if line := explain_unknown(summary):
            write(line)
        for line in alarms(summary):
            write(line, "red")
        for pair in (pair for pair in summary.paired if pair.same_run):
            write(f"{pair.name} is {SAME_RUN.format(pair.baseline)}")
        for claim in summary.claims:
            write_claim(claim)
    for claim in study.claims:
        write_claim(claim)
    if study.unchosen:
        write(study.unchosen)


def print_table(content: Content, screen: Console, title: str = "") -> None:
    """Print a table of a report."""
    table = Table(box=None, pad_edge=False, title=title or None, title_justify="left")
    for name in content.header:
        table.add_column(name, overflow="fold")
    for row in content.rows:
        table.add_row(*row)
    screen.print(table)
