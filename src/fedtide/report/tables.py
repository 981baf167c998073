"""Tables of the report: accuracy, forgetting, claims, cost, sweeps."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedtide.draw.prose import listed
from fedtide.evaluate.measure import UNKNOWN, Clarity, Measure
from fedtide.evaluate.metrics import LOWER_IS_BETTER, METRICS, Unit, mean_of_last
from fedtide.evaluate.rounds import rows_in
from fedtide.report.blends import extremes
from fedtide.report.measures import (
    ARRIVALS,
    BY_WAY,
    FORMATS,
    NAMES,
    Written,
    arrival,
    difference,
    nats,
    number,
    percent,
    points,
    signed_points,
    unit_of,
)
from fedtide.report.reading import ExperimentRecord
from fedtide.report.summary import Judged, MethodSummary, Paired, Summary

Columns = Mapping[str, str]
"""Columns of a table, a row per method: their titles, and the measures in them."""


VIEWS = {"train_clients": "training clients", "held_out_clients": "held-out clients", "val": "validation rows"}
"""Names of views in column titles."""


@dataclass(frozen=True)
class Table:
    """Rows of text under a header; the first column is a name."""

    header: list[str]
    rows: list[list[str]]

    @property
    def words(self) -> list[bool]:
        """Tell of each column whether it is aligned to the left: the first one, and those with words and no number."""
        found = [[row[k] for row in self.rows if row[k] not in ("", "-")] for k in range(len(self.header))]
        return [not k or (bool(cells) and not any(map(CELL.match, cells))) for k, cells in enumerate(found)]

    def csv(self) -> str:
        """Return the table as CSV: plain numbers, with units in the header and errors in columns of their own."""
        columns = [
            column
            for k, name in enumerate(self.header)
            for column in (_apart if k else _as_it_is)(name, [row[k] for row in self.rows])
        ]
        out = io.StringIO()
        rows = ([_no_formula(cell) for cell in row] for row in zip(*columns, strict=True))
        csv.writer(out, lineterminator="\n").writerows(rows)
        return out.getvalue()

    def latex(self) -> str:
        """Return the table as a LaTeX `tabular` with the lines of the package booktabs."""
        lines = [" & ".join(map(_escaped, row)) + r" \\" for row in (self.header, *self.rows)]
        columns = "".join("l" if words else "r" for words in self.words)
        return "\n".join([rf"\begin{{tabular}}{{{columns}}}", r"\toprule", lines[0], r"\midrule", *lines[1:],
                          r"\bottomrule", r"\end{tabular}", ""])  # fmt: skip


CELL = re.compile(r"(?:([▲▼≈?=≥]) )?([+-]?[\d.]+)(?: ± ([\d.]+))?(?: (%|points|rounds|s))?")
"""Number with its mark, error and unit."""

LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$",
    "▲": r"$\blacktriangle$", "▼": r"$\blacktriangledown$", "≈": r"$\approx$", "≥": r"$\geq$", "←": r"$\leftarrow$",
}  # fmt: skip
"""Characters that LaTeX does not print as they are."""


def _escaped(cell: str) -> str:
    return "".join(LATEX.get(character, character) for character in cell) if cell != "-" else "--"


def _no_formula(cell: str) -> str:
    """Put an apostrophe in front of what a spreadsheet would compute.

    >>> _no_formula("=SUM(A1)"), _no_formula("-0.5 %"), _no_formula("-")
    ("'=SUM(A1)", '-0.5 %', '-')
    """
    return f"'{cell}" if cell.startswith(("=", "+", "-", "@")) and cell != "-" and not CELL.fullmatch(cell) else cell


def _as_it_is(name: str, cells: Sequence[str]) -> list[list[str]]:
    return [[name, *cells]]


def _apart(name: str, cells: Sequence[str]) -> list[list[str]]:
    """Return a column as columns of plain numbers, where all of its cells are numbers of one unit; else as it is."""
    found = [CELL.fullmatch(cell) for cell in cells]
    numbers = [cell for cell in found if cell]
    units = {cell[4] or "" for cell in numbers}
    if len(units) != 1 or any(not match and cell != "-" for match, cell in zip(found, cells, strict=True)):
        return _as_it_is(name, cells)
    (unit,) = units
    out = [[f"{name}, {unit}" if unit else name, *(cell[2] if cell else "" for cell in found)]]
    if any(cell[3] for cell in numbers):
        out.append([f"{name}, standard error", *((cell[3] or "") if cell else "" for cell in found)])
    return out


def accuracy_table(summary: Summary) -> Table:
    """Build the table of all forms of accuracy, a row per method."""
    columns = {
        f"mean over {summary.span}": summary.score,
        "last round": "last",
        "best": "best",
        "worst point": "worst_point",
        "swing": "swing",
        **({} if summary.view == "val" else {"validation rows": f"val_{summary.score}"}),
    }
    return _with_floor(_against_baseline(_known(summary, columns), summary, 2, "against {}, paired"), summary)


HIGHER, LOWER = "▲", "▼"
"""Signs of clearly higher and clearly lower accuracy than the baseline's."""

MARKS: dict[Clarity, str] = {"unclear": "≈", "too few seeds": "?"}
"""Signs of no clear difference to the baseline."""

SAME = "="
"""Sign of a method that is the same run as the baseline."""


def methods_table(summary: Summary) -> Table:
    """Build the first table of a page, a row per method, with a mark at the difference to the baseline."""
    columns = {f"mean over {summary.span}": summary.score, "worst point": "worst_point", "swing": "swing"}
    if any(any(m.measure("refused").values) for m in summary.methods):
        columns["refused answers"] = "refused"
    table = _against_baseline(_known(summary, columns), summary, 2, "against {}")
    marks = {pair.name: sign(pair) for pair in summary.paired if pair.difference.mean is not None}
    rows = [[*row[:2], f"{marks[row[0]]} {row[2]}", *row[3:]] if row[0] in marks else row for row in table.rows]
    return _with_floor(Table(table.header, rows), summary)


def _with_floor(table: Table, summary: Summary) -> Table:
    """Add a row for baselines of time series, and for the floor, where a method is no better; the first column."""
    first = summary.methods[0] if summary.methods else None
    known = {words: first.measure(name) for name, words in first.known.items()} if first else {}
    if summary.floor is not None:
        known[f"{summary.target.floor}, without training"] = summary.floor
    lines = [[name, percent(measure), *["-"] * (len(table.header) - 2)] for name, measure in known.items()]
    return Table(table.header, [*table.rows, *lines])


def sign(pair: Paired) -> str:
    """Return the sign of a difference to the baseline."""
    if pair.same_run:
        return SAME
    side = pair.difference.side()
    return (HIGHER if side > 0 else LOWER) if side else MARKS[pair.difference.clarity(pair.difference.mean or 0.0)]


def methods_of_all(summaries: Sequence[tuple[str, Summary]]) -> Table:
    """Build the table of the methods of several experiments, which may be averaged over other rounds."""
    columns = {"accuracy": "accuracy", "skill": "skill", "worst point": "worst_point", "swing": "swing",
               "worst tenth of clients": "worst_decile", "refused answers": "refused"}  # fmt: skip
    known = [c for c in columns.items() if any(c[1] in m.measures for _, summary in summaries for m in summary.methods)]
    rows = [
        [f"{name}: {m.name}", summary.span, *(_cell(summary, m, measure) for _, measure in known)]
        for name, summary in summaries
        for m in summary.methods
    ]
    return Table(["method", "averaged over", *(title for title, _ in known)], rows)


def groups_table(summary: Summary) -> Table | None:
    """Build the table of the accuracy of each group of clients, a row per method; None without groups."""
    columns = {f"{group} clients": f"{summary.score}_{group}" for group in summary.groups}
    table = _known(summary, columns | {"branch or model of the true group": "branch_accuracy"})
    return table if len(table.header) > 1 else None


def swings_table(summary: Summary) -> Table | None:
    """Build the table of the swing of each group's accuracy, a row per method; None without groups or a period."""
    table = _known(summary, {f"{group} clients": f"swing_{group}" for group in summary.groups})
    return table if len(table.header) > 1 else None


def clients_table(summary: Summary) -> Table | None:
    """Build the table of the spread of accuracy over clients, a row per method; None without evaluations."""
    mean, *others = [(metric.title, metric.name) for metric in METRICS if metric.title]
    return measured(summary, dict([mean, ("standard deviation", "client_std"), *others]))


def metrics_table(summary: Summary) -> Table | None:
    """Build the table of the person's own metrics, a row per method; None without any."""
    return measured(summary, {_of_metric(name): name for name in summary.metrics})


def _of_metric(name: str) -> str:
    return f"{name}, lower is better" if name in LOWER_IS_BETTER else name


def measured(summary: Summary, columns: Columns) -> Table | None:
    """Build a table of the columns with any finite value; None without such columns."""
    seen = {name for m in summary.methods for name, each in m.measures.items() if any(map(math.isfinite, each.values))}
    kept = {title: name for title, name in columns.items() if name in seen}
    return _known(summary, kept) if kept else None


def _known(summary: Summary, columns: Columns) -> Table:
    """Build a table of the columns that were measured."""
    known = {title: name for title, name in columns.items() if any(name in m.measures for m in summary.methods)}
    rows = [[m.name, *(_cell(summary, m, name) for name in known.values())] for m in summary.methods]
    return Table(["method", *known], rows)


def _cell(summary: Summary, method: MethodSummary, name: str) -> str:
    return format_of(name, summary.units.get(name))(method.measure(name))


def format_of(name: str, unit: Unit | None = None) -> Written:
    """Return the format of a measure; `unit` is that of one whose name does not say it."""
    return FORMATS[unit] if unit else unit_of(name) or number


def _against_baseline(table: Table, summary: Summary, at: int, title: str) -> Table:
    """Add a column `at` with the differences to the baseline, seed by seed."""
    if not summary.paired:
        return table
    found = {p.name: points(p.difference, signed=True) for p in summary.paired}
    rows = [[*row[:at], found.get(row[0], "-"), *row[at:]] for row in table.rows]
    return Table([*table.header[:at], title.format(summary.paired[0].baseline), *table.header[at:]], rows)


LOCAL_FORGETTING = {
    "on rows of other clients": "local_forgetting",
    "of those without a common class": "local_forgetting_apart",
    "on own rows": "local_forgetting_own",
    "increase of the loss, other clients": "local_loss_increase",
}
"""Columns on local forgetting."""

CLUSTERS = {
    "adjusted Rand index": "ari",
    "mutual information": "nmi",
    "purity": "purity",
    "evenness of sizes": "evenness",
    "change of cluster, per evaluation": "churn",
    "weight of clients' own experts": "own_weight",
}
"""Columns on the agreement of clusters with groups."""

DRIFT = {
    "distance within clusters": "heterogeneity",
    "of all clients": "heterogeneity_all",
    "of embeddings within clusters": "embedding_heterogeneity",
    "of embeddings of all clients": "embedding_heterogeneity_all",
    "by its own measure": "spread",
    "silhouette": "silhouette",
    "re-clusterings": "reclusterings",
    "moves": "moves",
    "clusters at the end": "clusters_last",
    "Rand index, whole run": "ari_over_rounds",
}
"""Columns on drift and methods' reactions."""

EVENTS = {
    "fall": "event_fall",
    "events recovered from": "events_recovered",
    "rounds to recover": "event_recovery",
    "events noticed": "events_detected",
    "rounds to notice": "detection_delay",
    "false alarms": "false_alarms",
}
"""Columns on effects and detection of known events."""

BLEND = {
    "rows at the component of their domain": "split_purity",
    "error of learned shares": "share_error",
    "correlation with the true share": "share_correlation",
    "rows at the fullest component": "fullest_component",
    "entropy of posteriors": "posterior_entropy",
    "log-likelihood (each of its own)": "log_likelihood",
}
"""Columns on learned blends of domains."""

RHYTHM = {
    "rounds until a period was believed": "rounds_to_period",
    "period at the end": "learned_period",
    "rounds with a period": "period_known",
    "rounds with shares": "shares_known",
    "error of the shares": "shares_error",
}
"""Columns on what a learned prior found."""

STEADINESS = {
    "mean over all evaluations": "mean_over_rounds",
    "standard deviation over all evaluations": "std_over_rounds",
    "spread of clients' training loss": "loss_spread",
}
"""Columns on the variation of accuracy over the run and of client losses."""

COSTS = {
    "to clients": "down",
    "from clients": "up",
    "training": "seconds",
    "evaluation": "evaluation_seconds",
    "refused answers": "refused",
}
"""Columns on bytes sent, wall clock and refused answers."""


def drift_table(summary: Summary) -> Table | None:
    """Build the table of drift and methods' reactions, a row per method; None without either."""
    about_drift = any({"heterogeneity", "moves", "reclusterings"} & m.measures.keys() for m in summary.methods)
    return measured(summary, DRIFT) if about_drift else None


def transfer_table(summary: Summary) -> Table | None:
    """Build the table of forgetting of groups that were away, a row per method; None without absences."""
    columns = {
        "backward transfer": "backward_transfer",
        "forgetting": "forgetting",
        **{f"forgetting, {group} clients": f"forgetting_{group}" for group in summary.groups},
        "forward transfer": "forward_transfer",
        "turns that recover": "recovered",
        "rounds to recover": "recovery_rounds",
    }
    return measured(summary, columns)


def peaks_table(record: ExperimentRecord, summary: Summary) -> Table | None:
    """Build the table of peaks and troughs in each cycle of a blend, two rows per method; None without cycles."""
    found = {
        method.name: np.array([extremes(run, record.view, method.cycles) for run in method.runs])
        for method in record.methods
        if method.runs and method.cycles is not None
    }
    cycles = max((table.shape[1] for table in found.values()), default=0)
    if not cycles:
        return None
    rows = []
    for name, table in found.items():
        for kind, column in (("peak", 1), ("trough", 0)):
            cells = [percent(Measure.of(table[:, cycle, column].tolist())) for cycle in range(table.shape[1])]
            gain = signed_points(summary.method(name).measure(f"{kind}_gain"))
            rows.append([f"{name}, {kind}", *[gain] * (cycles > 2), *cells, *["-"] * (cycles - len(cells))])
    header = ["method", *["last minus second"] * (cycles > 2), *(f"cycle {cycle}" for cycle in range(1, cycles + 1))]
    return Table(header, rows)


def ways_table(summary: Summary) -> Table | None:
    """Build the table of other ways to combine models, a row per method that has any; None without such methods."""
    by_way = {m.name: [name for name in m.measures if name.startswith(BY_WAY)] for m in summary.methods}
    names = list(dict.fromkeys(name for own in by_way.values() for name in own))
    if not names:
        return None
    rows = [
        [m.name, *(percent(m.measure(name)) for name in (m.score, *names))] for m in summary.methods if by_way[m.name]
    ]
    return Table(["method", "as it predicts", *(name.removeprefix(BY_WAY) for name in names)], rows)


def density_table(record: ExperimentRecord) -> Table | None:
    """Build the table of late log-densities of inputs, by view and by group; None where no method reports them."""
    groups = [None, *record.groups]
    found: dict[str, dict[str, Measure]] = {}
    for method in record.methods:
        for view, group in ((view, group) for view in ("train_clients", "held_out_clients", "val") for group in groups):
            curves = [run.density(view, group) for run in method.runs]
            if any(len(at) for at, _ in curves):
                title = VIEWS[view] if group is None else f"{VIEWS[view]}, {group}"
                late = Measure.of(
                    [
                        mean_of_last(*curve, record.window, run.counts_for(view, curve[0], rows_in))
                        for run, curve in zip(method.runs, curves, strict=True)
                    ]
                )
                found.setdefault(method.name, {})[title] = late
    titles = list(dict.fromkeys(title for own in found.values() for title in own))
    rows = [[name, *(nats(own.get(title, UNKNOWN)) for title in titles)] for name, own in found.items()]
    return Table(["method", *titles], rows) if titles else None


def brief_table(summary: Summary) -> Table:
    """Build the short table for terminals."""
    columns = {
        f"mean over {summary.span}": summary.score,
        "worst point": "worst_point",
        "swing": "swing",
        "right branch": "branch_accuracy",
        "local forgetting": "local_forgetting",
        **{_of_metric(name): name for name in summary.metrics},
    }
    table = _known(summary, columns)
    return _with_floor(_against_baseline(table, summary, len(table.header), "against {}"), summary)


def claims_table(claims: Sequence[Judged], *, verdicts: bool = True) -> Table:
    """Build the table of claims with numbers and, if wanted, verdicts."""
    rows = [[j.claim, found(j), *([j.verdict] if verdicts else [])] for j in claims]
    return Table(["claim", "found", *(["verdict"] if verdicts else [])], rows)


def claims_by_point(summaries: Sequence[Summary], *, verdicts: bool = True) -> Table:
    """Build the table of claims at several points of a sweep."""
    made = [(summary.point, claims_table(summary.claims, verdicts=verdicts)) for summary in summaries]
    header = claims_table([], verdicts=verdicts).header
    return Table(["point", *header], [[point, *row] for point, table in made for row in table.rows])


def found(judged: Judged) -> str:
    """Format the number of a claim, and how many seeds arrive where it is about a time that some never reach."""
    seeds = len(judged.number.values)
    arrive = f"{listed([str(count) for count in judged.reached])} of {seeds} seeds arrive" if judged.reached else ""
    if judged.number.mean is None:
        return arrive or "-"
    written = format_of(judged.measure, judged.unit)
    said = difference(judged.measure, judged.number, written) if judged.paired else written(judged.number)
    said = f"{said} {NAMES.get(judged.measure, '')}".rstrip()
    return f"{said}; {arrive}" if arrive else said


def cost_table(summary: Summary) -> Table:
    """Build the table of costs: bytes sent, wall clock, refused answers, time to the baseline's final accuracy."""
    times = {}
    word = "rounds" if summary.clock == "rounds" else "simulated time"
    if summary.paired:
        times[f"{word} to the final {summary.score} of {summary.paired[0].baseline}"] = "time_to_accuracy"
    if any("time_to_target" in m.measures for m in summary.methods):
        times["rounds to the target"] = "rounds_to_target"
        if summary.clock == "seconds":
            times["simulated time to the target"] = "time_to_target"

    def arrived(method: MethodSummary, name: str) -> str:
        written = format_of(name, summary.units.get(name))
        return arrival(method.measure(name), method.measure(ARRIVALS[name]), written)

    rows = [
        [m.name, *(_cell(summary, m, name) for name in COSTS.values()), *(arrived(m, name) for name in times.values())]
        for m in summary.methods
    ]
    return Table(["method", *COSTS, *times], rows)


def sweep_table(summaries: Sequence[Summary], chosen: Mapping[str, Summary]) -> Table:
    """Build the table of late accuracy at every point of a sweep, with a mark at each method's chosen point."""
    names = list(dict.fromkeys(method.name for summary in summaries for method in summary.methods))
    rows = []
    for summary in summaries:
        done = {m.name: m for m in summary.methods}
        cells = []
        for name in names:
            mark = " ← chosen" if chosen.get(name) is summary else ""
            cells.append((percent(done[name].measure(done[name].score)) if name in done else "-") + mark)
        rows.append([summary.point, *cells])
    return Table(["point", *names], rows)


def format_value(value: Any) -> str:
    """Format a value for a table; a dict as its keys and values."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return ", ".join(f"{key} {format_value(inner)}" for key, inner in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)
