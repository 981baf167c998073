"""The report in tables: accuracy, forgetting, claims, cost, sweeps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fedtide.report.summary import Judged, Measure, Summary
from fedtide.report.words import percent, points

Column = tuple[str, str, Callable[[Measure | None], str]]
"""Of a table: its title, the measure, and how that is written."""


@dataclass(frozen=True)
class Table:
    """Rows of text under a header; the first column is a name."""

    header: list[str]
    rows: list[list[str]]


def accuracy_table(summary: Summary) -> Table:
    """Accuracy in all its forms, a row per method."""
    columns: list[Column] = [
        (f"mean of last {summary.window} rounds", "accuracy", percent),
        ("last round", "last", percent),
        ("best", "best", percent),
        *((f"{group} clients", f"accuracy_{group}", percent) for group in summary.groups),
        ("worst point", "worst_point", percent),
        ("swing", "swing", points),
        *((f"swing, {group}", f"swing_{group}", points) for group in summary.groups),
        ("branch of the true group", "branch_accuracy", percent),
        ("worst tenth of clients", "worst_decile", percent),
        ("variance of client accuracy (share²)", "client_variance", number),
        *([] if summary.view == "valid" else [("validation rows", "valid_accuracy", percent)]),
    ]
    return _against_baseline(_known(summary, columns), summary, 2, "against {}, paired")


def _known(summary: Summary, columns: Sequence[Column]) -> Table:
    """The columns that were measured, a row per method."""
    known = [c for c in columns if any(c[1] in m.measures for m in summary.methods)]
    rows = [[m.name, *(show(m.measures.get(name)) for _, name, show in known)] for m in summary.methods]
    return Table(["method", *(title for title, _, _ in known)], rows)


def _against_baseline(table: Table, summary: Summary, at: int, title: str) -> Table:
    """The table with the differences to the baseline, seed by seed, as the column `at`."""
    if not summary.paired:
        return table
    found = {p.name: points(p.difference, signed=True) for p in summary.paired}
    rows = [[*row[:at], found.get(row[0], "-"), *row[at:]] for row in table.rows]
    return Table([*table.header[:at], title.format(summary.paired[0].baseline), *table.header[at:]], rows)


def local_forgetting_table(summary: Summary) -> Table | None:
    """What local training cost on rows of other clients, a row per method; None where it was not measured."""
    columns: list[Column] = [
        ("on rows of other clients", "local_forgetting", points),
        ("of those without a common class", "local_forgetting_apart", points),
        ("on own rows", "local_forgetting_own", points),
        ("increase of the loss, other clients", "local_loss_increase", number),
    ]
    return _finite(summary, columns)


def transfer_table(summary: Summary) -> Table | None:
    """What was forgotten of groups that were away, a row per method; None where nobody was away."""
    columns: list[Column] = [
        ("backward transfer", "backward_transfer", lambda measure: points(measure, signed=True)),
        ("forgetting", "forgetting", points),
        *((f"forgetting, {group} clients", f"forgetting_{group}", points) for group in summary.groups),
        ("forward transfer", "forward_transfer", lambda measure: points(measure, signed=True)),
        ("turns that recover", "recovered", percent),
        ("rounds to recover", "recovery_rounds", count),
    ]
    return _finite(summary, columns)


def _finite(summary: Summary, columns: Sequence[Column]) -> Table | None:
    """The columns of which anything is finite; None where that is none."""
    seen = {name for m in summary.methods for name, each in m.measures.items() if any(map(math.isfinite, each.values))}
    return _known(summary, kept) if (kept := [c for c in columns if c[1] in seen]) else None


def brief_table(summary: Summary) -> Table:
    """The few columns that a terminal has room for."""
    columns: list[Column] = [
        (f"last {summary.window} rounds", "accuracy", percent),
        ("worst point", "worst_point", percent),
        ("swing", "swing", points),
        ("right branch", "branch_accuracy", percent),
        ("local forgetting", "local_forgetting", points),
    ]
    table = _known(summary, columns)
    return _against_baseline(table, summary, len(table.header), "against {}")


def claims_table(claims: Sequence[Judged]) -> Table:
    """What the study set out to see, with numbers and verdicts."""
    rows = [[j.claim, signed(j), j.verdict] for j in claims]
    return Table(["claim", "found", "verdict"], rows)


def signed(judged: Judged) -> str:
    """The number of a claim: points for accuracies, as it is for the rest."""
    if judged.number.mean is None:
        return "-"
    shares = ("accuracy", "point", "swing", "last", "best", "decile", "q10", "forgetting", "transfer", "recovered")
    if any(word in judged.measure for word in shares):
        return points(judged.number, signed=True) if judged.paired else percent(judged.number)
    return number(judged.number)


def cost_table(summary: Summary) -> Table:
    """What it cost: bytes on the wire, wall clock, refused answers, time to the baseline's accuracy."""
    header = ["method", "to clients", "from clients", "training", "evaluation", "refused answers"]
    names: list[tuple[str, Callable[[Measure | None], str]]] = [
        ("down", size), ("up", size), ("seconds", seconds), ("evaluation_seconds", seconds), ("refused", count),
    ]  # fmt: skip
    if summary.paired:
        header.append(f"simulated time to the accuracy of {summary.paired[0].baseline}")
        names.append(("time_to_accuracy", seconds))
    rows = [[m.name, *(show(m.measures.get(name)) for name, show in names)] for m in summary.methods]
    return Table(header, rows)


def sweep_table(summaries: Sequence[Summary], chosen: Mapping[str, Summary]) -> Table:
    """Late accuracy at every point of a sweep; the point that each method chose by validation rows is marked."""
    names = list(dict.fromkeys(method.name for summary in summaries for method in summary.methods))
    rows = []
    for summary in summaries:
        done = {m.name: m for m in summary.methods}
        cells = []
        for name in names:
            mark = " ← chosen" if chosen.get(name) is summary else ""
            cells.append((percent(done[name].measures.get("accuracy")) if name in done else "-") + mark)
        rows.append([summary.point, *cells])
    return Table(["point", *names], rows)


def number(measure: Measure | None) -> str:
    """A plain number with its standard error."""
    if measure is None or measure.mean is None:
        return "-"
    return f"{measure.mean:.4f}" + ("" if measure.error is None else f" ± {measure.error:.4f}")


def size(measure: Measure | None) -> str:
    """A number of bytes, in the unit that suits it."""
    if measure is None or measure.mean is None:
        return "-"
    left, unit = measure.mean, "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if left < 1000:
            break
        left, unit = left / 1000, larger
    return f"{left:.3g} {unit}" if left < 1000 else f"{left:.0f} {unit}"


def seconds(measure: Measure | None) -> str:
    """A time, in seconds or minutes; how many seeds never got there where one did not."""
    if measure is None or measure.mean is None:
        never = sum(value == math.inf for value in measure.values) if measure else 0
        return f"not reached ({never} of {len(measure.values)} seeds)" if measure and never else "-"
    return f"{measure.mean:.1f} s" if measure.mean < 600 else f"{measure.mean / 60:.1f} min"


def count(measure: Measure | None) -> str:
    """How many, on average."""
    return "-" if measure is None or measure.mean is None else f"{measure.mean:.4g}"
