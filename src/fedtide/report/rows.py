"""What a run folder found as the rows of tables, for data frames."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from fedtide.core.record import TRUTH
from fedtide.draw.frames import is_cell
from fedtide.evaluate.rows import Row, rows_of_rounds, rows_of_scores
from fedtide.report.reading import RunRecord
from fedtide.report.summary import Study

WHOLE = ("round", "client", "rows", "slot", TRUTH)
"""Columns of clients.csv with whole numbers."""


def points_of(study: Study) -> list[Row]:
    """Return for each point of a sweep its name and what is swept; an empty row without a sweep."""
    if not study.swept:
        return [{}]
    values = ((value if is_cell(value) else str(value) for value in choices) for choices in study.axes.values())
    swept = (dict(zip(study.axes, chosen, strict=True)) for chosen in product(*values))
    return [{"point": record.point, **row} for record, row in zip(study.records, swept, strict=True)]


def measures(study: Study) -> Iterator[Row]:
    """Yield a row for each method and seed: every measure of `summary.json`."""
    for point, summary in zip(points_of(study), study.summaries, strict=True):
        for method in summary.methods:
            for number, seed in enumerate(method.seeds):
                values = {name: measure.values[number] for name, measure in method.measures.items()}
                yield {**point, "method": method.name, "algorithm": method.algorithm, "seed": seed, **values}


def curves(study: Study) -> Iterator[Row]:
    """Yield a row for each evaluation of each run and view, with its scores."""
    return (about | row for about, run in _runs(study) for row in rows_of_scores(run.judged))


def rounds(study: Study) -> Iterator[Row]:
    """Yield a row for each round of each run."""
    return (about | row for about, run in _runs(study) for row in rows_of_rounds(run.lines))


def clients(study: Study) -> Iterator[Row]:
    """Yield a row for each client, evaluation and view of each run: the cells of `clients.csv`."""
    for about, run in _runs(study):
        for view in dict.fromkeys(view for line in run.judged for view in line["scores"]):
            for row in run.client_rows(view):
                yield {**about, **{name: _cell(name, text) for name, text in row.items()}, "view": view}


def clusters(study: Study) -> Iterator[Row]:
    """Yield a row for each cluster or model that clients were judged with: how many, and means over their rows."""
    names = ("point", "method", "seed", "round", "view", "slot")
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in clients(study):
        if row.get("slot") is not None and row["rows"]:
            found.setdefault(tuple((name, row[name]) for name in names if name in row), []).append(row)
    for about, own in found.items():
        rows = sum(row["rows"] for row in own)
        known = [name for name in ("accuracy", "loss") if all(row.get(name) is not None for row in own)]
        means = {name: sum(row["rows"] * row[name] for row in own) / rows for name in known}
        yield {**dict(about), "clients": len(own), "rows": rows, **means}


def _runs(study: Study) -> Iterator[tuple[Row, RunRecord]]:
    for point, record in zip(points_of(study), study.records, strict=True):
        for method in record.methods:
            for run in method.runs:
                yield {**point, "method": method.name, "seed": run.seed}, run


def _cell(name: str, text: str) -> Any:
    """Return a cell of clients.csv as a number where it is one; None for an empty one."""
    if not text:
        return None
    if name in WHOLE:
        return int(text)
    return float(text) if name in ("accuracy", "loss") else text
