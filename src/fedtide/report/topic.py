"""Plans of the tables and pictures of the report."""

import inspect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from fedtide.draw.figures import styled
from fedtide.draw.tables import Table
from fedtide.report.formats import Number
from fedtide.report.run_records import ExperimentRecord
from fedtide.report.summary import Summary

Make = Callable[..., Any]
"""Draws a picture of a record, or builds a table of a record and its summary; None if there is nothing to show."""


@dataclass(frozen=True)
class Plan:
    """A picture of the page and of `ft.plot`, or a table of the page.

    The docstring of `make` has a description in the first paragraph, and the caption in the second one. Names in braces
    in caption and title are those of `words_of`.

    Args:
        title: title above it.
        make: makes it.
        name: name of a picture in `ft.plot`.
        needs: condition on a run, for the error of a run without this picture.
        single: true if it shows numbers of single clients, which are left out if the study is private.
        without_rounds: true if it shows something of models that are judged without a round.
    """

    title: str
    make: Make
    name: str = ""
    needs: str = ""
    single: bool = False
    without_rounds: bool = False

    def __call__(self, record: Any, *summary: Any) -> Any:
        """Make it."""
        if (self.single and record.private) or not (self.without_rounds or record.experiment.rounds):
            return None
        return self.make(record, *summary)

    def caption(self, record: ExperimentRecord) -> str:
        """Return the caption."""
        paragraphs = (inspect.getdoc(self.make) or "").split("\n\n")
        return " ".join("".join(paragraphs[1:2]).split()).format(**words_of(record))


def plan_picture(name: str, title: str, needs: str = "", *, single: bool = False) -> Callable[[Make], Plan]:
    """Return a decorator that makes a picture of a function that draws it."""
    return lambda draw: Plan(title, styled(draw), name, needs + ", and no privacy" * single, single)


def plan_table(title: str, *, single: bool = False, without_rounds: bool = False) -> Callable[[Make], Plan]:
    """Return a decorator that makes a table of a function that builds it."""
    return lambda build: Plan(title, build, single=single, without_rounds=without_rounds)


def words_of(record: ExperimentRecord) -> dict[str, str]:
    """Return the words in braces of titles and captions."""
    counts, every = [len(method.runs) for _, method in record.numbered], record.experiment.eval_every
    fewest, most = min(counts, default=0), max(counts, default=0)
    seeds = f"{fewest} to {most}" if fewest < most else f"{most}"
    return {
        "score": record.experiment.score,
        "Score": record.experiment.score.capitalize(),
        "whose": record.whose,
        "rows": "the rows of the next window" if record.dated else "held-out rows",
        "span": record.span,
        "averaged": record.averaged,
        "every": f"every {every} rounds" if every > 1 else "every round",
        "budget": describe_budget(record),
        "noise": " Error bars: one standard deviation of the noise on scores." * bool(record.noises),
        "band": f" Lines are means over {seeds} seeds, bands one standard error." if most > 1 else "",
    }


def describe_budget(record: ExperimentRecord) -> str:
    """Describe the scope of a private study's budget, and the spending of all its runs; "" for another study."""
    if (privacy := record.privacy) is None:
        return ""
    text = f"Models and noised sums of one run say at most so much of a client (delta {privacy.delta:g}). "
    text += "Scores are in it." if privacy.scores is not None else "Scores are not in it."
    text += " A simulation's noise is known from its seed." * (not record.real)
    if len(record.private_runs) > 1:
        spent = f"{record.spent:.3g}" if record.spent else 'more, which pip install "fedtide[privacy]" can tell'
        text += f" All {len(record.private_runs)} runs, of all methods and seeds, together come to epsilon {spent}."
    return text + " Other points of the sweep add to that." * bool(record.point)


def table_of(summary: Summary, numbers: Iterable[Number]) -> Table | None:
    """Build a table with a row per method and a column per number with a title that is finite anywhere."""
    measures = [item for method in summary.methods for item in method.measures.items()]
    finite = {name for name, measure in measures if any(map(math.isfinite, measure.values))}
    shown = [number for number in numbers if number.title and number.name in finite]
    rows = [[m.name, *(number.written(m.measure(number.name)) for number in shown)] for m in summary.methods]
    return Table(["method", *(number.title for number in shown)], rows) if shown else None
