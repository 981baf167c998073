"""Content of a run folder: the summary of each point, and rows for data frames."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

from fedtide.config import axes, has_choice
from fedtide.core.atomic import write_text
from fedtide.core.errors import FedtideError
from fedtide.core.record import plain
from fedtide.draw.tables import is_cell
from fedtide.evaluate.metrics import Measure
from fedtide.evaluate.references import REFERENCES, reference_words
from fedtide.evaluate.rounds import Row, rows_of_rounds, rows_of_scores
from fedtide.remote.asks import read_asks, refusals_of
from fedtide.report.claims import chosen_points, judge, judge_sweep
from fedtide.report.run_records import ExperimentRecord, MethodRecord, RunRecord, is_nano, read_experiment
from fedtide.report.summary import MethodSummary, Paired, Study, Summary
from fedtide.report.topics import MODULES, NUMBERS
from fedtide.runs.folder import go_on, load

LOCAL = "local"
"""Algorithm whose clients have no model but their own."""


def names_of(roots: Sequence[Path]) -> list[str]:
    """Return the names of folders, with the name of the folder above if several have the same name.

    >>> names_of([Path("/a/study"), Path("/b/study"), Path("/b/other")])
    ['a/study', 'b/study', 'other']
    """
    whole = [root.resolve() for root in roots]
    names = [root.name for root in whole]
    return [f"{root.parent.name}/{root.name}" if names.count(root.name) > 1 else root.name for root in whole]


def read_study(root: Path) -> Study:
    """Read a run folder and summarize all of it."""
    records = read_experiment(root)
    experiment = load(root, imports=False)
    title = experiment.title or root.resolve().name
    summaries = [replace(summarize(record), title=title) for record in records]
    swept, nano = bool(experiment.sweep), is_nano(root)
    claims = [judge_sweep(summaries, claim) for claim in experiment.claim if swept and claim.at is not None]
    if nano:
        claims = [replace(claim, verdict="") for claim in claims]
        summaries = [replace(s, claims=[replace(claim, verdict="") for claim in s.claims]) for s in summaries]
    choice = has_choice(experiment.sweep)
    chosen = chosen_points(summaries) if choice else {}
    return Study(records, summaries, chosen, claims, swept, axes(experiment), nano, root, choice)


def read_finished(root: Path) -> Study:
    """Read a run folder with a finished run.

    Raises:
        FedtideError: no run is finished.
    """
    study = read_study(root)
    if not any(summary.methods for summary in study.summaries):
        raise FedtideError(f"{root}: no run is finished yet; go on with: {go_on(root)}")
    return study


def _rows_judged(record: ExperimentRecord, method: MethodRecord) -> tuple[int, ...]:
    """Return the rows of each evaluation, as far as they are known."""
    entries = [scores for run in method.runs for _, scores in run.entries(record.view)]
    return tuple(scores["rows"] for scores in entries if scores.get("rows"))


def summarize(record: ExperimentRecord) -> Summary:
    """Compute the summary of one experiment from its record files."""
    experiment, new = record.experiment, record.view == "held_out_clients"
    methods = [
        MethodSummary(
            method.name,
            method.method.algorithm,
            [run.seed for run in method.runs],
            method.unfinished,
            _measures(record, method),
            method.federation,
            method.method.algorithm == LOCAL and new and not experiment.data.held_out_clients.labeled,
            dict(refusals_of([line for run in method.runs for line in read_asks(run.folder)])),
            _rows_judged(record, method) if record.real and not (record.dated or record.private) else (),
        )
        for _, method in record.numbered
    ]
    summary = Summary(
        experiment.title,
        record.point,
        experiment.rounds,
        record.view,
        record.window,
        record.experiment.period,
        record.groups,
        methods,
        _paired(experiment.baseline, methods),
        metrics=experiment.metric_units,
        clock=record.clock,
        target=record.target,
        references=_references(record, methods),
    )
    return replace(summary, claims=[judge(methods, claim, summary.units) for claim in experiment.claim])


def _measures(record: ExperimentRecord, method: MethodRecord) -> dict[str, Measure]:
    """Return every number of a method over seeds."""
    left_out = {name for name, number in NUMBERS.items() if number.single and record.private}
    per_run = [
        {name: value for topic in MODULES for name, value in topic.measure(record, method, run).items()
         if name not in left_out}
        for run in method.runs
    ]  # fmt: skip
    names = dict.fromkeys(name for values in per_run for name in values)
    return {name: Measure.of([values.get(name, math.nan) for values in per_run]) for name in names}


def _references(record: ExperimentRecord, methods: Sequence[MethodSummary]) -> list[MethodSummary]:
    """Return the references that any run recorded, and without a score those that the experiment names in vain."""
    target, out = record.target, []
    for name in REFERENCES:
        holder = max((m for m in methods if name in m.measures), key=lambda m: len(m.seeds), default=None)
        seeds, measures = ([], {}) if holder is None else (holder.seeds, {target.score: holder.measures[name]})
        if seeds or (name in record.experiment.references and record.runs and not record.real):
            out.append(MethodSummary(reference_words(name, target), name, seeds, 0, measures))
    return out


def _paired(baseline: str | None, methods: list[MethodSummary]) -> list[Paired]:
    base = next((m for m in methods if m.name == baseline), None)
    others = [method for method in methods if base is not None and method is not base]
    return [Paired(m.name, base.name, m.against(base, m.score), m.same_run(base)) for m in others if base is not None]


def write_summary(path: Path, study: Study) -> None:
    """Write `summary.json`: the experiment, or every point of the sweep and the point chosen by each method."""
    if not study.swept:
        content: Any = asdict(study.summaries[0])
    else:
        content = {
            "title": study.summaries[0].title,
            "points": [asdict(summary) for summary in study.summaries],
            "chosen": {name: summary.point for name, summary in study.chosen.items()},
            "claims": [asdict(claim) for claim in study.claims],
        }
    write_text(path, json.dumps(plain(content), indent=1) + "\n")


# -- rows for data frames ----------------------------------------------------------------------------------------------


def points_of(study: Study) -> list[Row]:
    """Return the name and the swept values of each point of a sweep; an empty row without a sweep."""
    if not study.swept:
        return [{}]
    values = ((value if is_cell(value) else str(value) for value in choices) for choices in study.axes.values())
    swept = (dict(zip(study.axes, chosen, strict=True)) for chosen in product(*values))
    return [{"point": record.point, **row} for record, row in zip(study.records, swept, strict=True)]


def measures(study: Study) -> Iterator[Row]:
    """Yield a row for each method and seed, and for each named reference: every measure of `summary.json`."""
    for point, record, summary in zip(points_of(study), study.records, study.summaries, strict=True):
        named = [m for m in summary.references if m.algorithm in record.experiment.references]
        for method in (*summary.methods, *named):
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
            for row in run.clients(view).to_pylist():
                yield {**about, **row, "view": view}


def clusters(study: Study) -> Iterator[Row]:
    """Yield a row for each cluster or model at each evaluation: number of clients, and means over their rows."""
    names = ("point", "method", "seed", "round", "view", "slot")
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in clients(study):
        if row.get("slot") is not None and row["rows"]:
            groups.setdefault(tuple((name, row[name]) for name in names if name in row), []).append(row)
    for about, members in groups.items():
        rows = sum(row["rows"] for row in members)
        names_of_means = [name for name in ("accuracy", "loss") if all(row.get(name) is not None for row in members)]
        means = {name: sum(row["rows"] * row[name] for row in members) / rows for name in names_of_means}
        yield {**dict(about), "clients": len(members), "rows": rows, **means}


def _runs(study: Study) -> Iterator[tuple[Row, RunRecord]]:
    for point, record in zip(points_of(study), study.records, strict=True):
        for method in record.methods:
            for run in method.runs:
                yield {**point, "method": method.name, "seed": run.seed}, run
