"""A ready experiment file from what was found: the source, the shift, and methods that may help with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedtide.config.overrides import as_toml
from fedtide.inspection.findings import LEAST_ALPHA, QUESTIONS, Findings
from fedtide.inspection.questions import CYCLES

ROWS = "rows.npz"
"""Name of the file beside the study, of rows that were in memory."""
CUTS = (0.25, 0.5, 0.75)
"""Quantiles that cut a measured label into classes."""
INTERVALS, MOST_INTERVALS = 20, 200
"""Stretches of time of a study of drift, and the greatest number of a study of the hour."""
LEAST_ROWS = 20
"""Rows that there are at any time of a study: some of them are for validation and tests."""
SIMULATED = 20
"""Clients of rows that name none."""


def study(found: Findings, folder: Path) -> str | None:
    """Return an experiment file that `fedtide run` accepts; None where rows have no features, as there is no model.

    Args:
        found: what was found.
        folder: where the file will lie; the rows of data that were in memory are beside it.
    """
    if found.table.features is None:
        return None
    lines = [*_head(found), "", *_source(found, folder), "", *_shift(found), *_methods(found)]
    return "\n".join(lines) + "\n"


def _head(found: Findings) -> Iterator[str]:
    yield "# Written by fedtide inspect. What it found:"
    for answer in found:
        yield f"# {QUESTIONS[answer.question]} {answer.level}: {answer.said}"
    yield f"title = {as_toml(found.table.name)}"
    yield f"rounds = {rounds(found)}"
    yield "seeds = [0, 1, 2]"
    yield 'baseline = "FedAvg"'


def _source(found: Findings, folder: Path) -> Iterator[str]:
    table, columns = found.table, found.table.columns
    yield "[data.source]"
    if not table.source or table.source[0].suffix == ".npz":
        yield 'kind = "npz"'
        yield f"path = {as_toml(str(table.source[0] if table.source else folder.resolve() / ROWS))}"
        if table.features is not None and float(table.features.max()) != 255.0:  # pictures are read as 0 to 1
            yield "scaled = true"
    else:
        yield 'kind = "csv"'
        paths = [str(path) for path in table.source]
        yield f"path = {as_toml(paths[0] if len(paths) == 1 else paths)}"
        yield f"label = {as_toml(columns['label'])}"
        if table.measured:
            cuts = sorted({float(f"{cut:.6g}") for cut in np.quantile(table.label, CUTS)})
            yield f"cuts = {as_toml(cuts)}  # methods predict classes: four of about equal size"
            yield '# To predict the number itself write target = "number" in [data], and no cuts.'
        if columns["client"]:
            yield f"client = {as_toml(columns['client'])}"
        if columns["time"]:
            yield f"time = {as_toml(columns['time'][0] if len(columns['time']) < 2 else columns['time'])}"
        yield f"features = {as_toml([*columns['features'], *columns['categories']])}"
        if columns["categories"]:
            yield f"categories = {as_toml(columns['categories'])}  # texts that come again; inspection left them out"
        if columns["missing"]:
            yield 'missing = "drop"'
        yield "scaled = true"
    yield ""
    yield "[data.partition]"
    if found.rows.clients > 1:
        yield 'kind = "natural"'
        if found.clients is not None and found["labels"].found:
            alpha = max(found.clients.alpha, LEAST_ALPHA)
            yield f'# To deal rows to clients of equal kind: kind = "dirichlet", alpha = {alpha:.2g}'
    else:
        yield 'kind = "iid"  # rows name no clients'
        yield f"clients = {SIMULATED}"


def _stream(found: Findings) -> tuple[int, int, str] | None:
    """Return the number of intervals, how many of them rows are kept, and why; None where nothing comes and goes."""
    mix, drift, matter = found["mix"], found["drift"], found["matter"]
    seconds = found.rows.seconds
    if seconds is None:
        return None
    if mix.found and "others" in mix.why:
        name = next(name for name, cycle in found.cycles.items() if name in mix.said)
        length, parts = CYCLES[name][0], {"day": 4, "week": 7, "year": 12}[name]
        intervals = int(np.clip(np.ptp(seconds) / length * parts, 2, MOST_INTERVALS))
        kept = _enough(seconds, intervals)
        return intervals, kept, f"{parts} stretches of time a {name}: clients with rows of that time take part"
    if drift.found or matter.found:
        recent = "recent" in matter.what
        kept = max(3 if recent else INTERVALS // 2, _enough(seconds, INTERVALS))
        why = "a model of recent rows is better than one of all the past" if recent else "the past helps, so they stay"
        return INTERVALS, kept, f"rows arrive in the order of time; {why}"
    return None


def _enough(seconds: np.ndarray, intervals: int) -> int:
    """Return of how many intervals in a row there are always some rows."""
    rows = np.histogram(seconds, intervals)[0]
    sums = (np.convolve(rows, np.ones(kept), "valid").min() for kept in range(1, intervals))
    return next((kept for kept, least in enumerate(sums, 1) if least >= LEAST_ROWS), intervals)


def rounds(found: Findings) -> int:
    """Return the number of rounds."""
    stream = _stream(found)
    if stream is None:
        return 100
    intervals, kept, _ = stream
    return (intervals - kept + 1) * _gap(intervals)  # till the last interval has arrived


def _gap(intervals: int) -> int:
    return 1 if intervals > INTERVALS else 5


def _shift(found: Findings) -> Iterator[str]:
    stream = _stream(found)
    if stream is not None:
        intervals, kept, why = stream
        gap = _gap(intervals)
        yield f"[shift.what]  # {why}"
        yield 'kind = "stream"'
        yield 'by = "time"'
        yield f"intervals = {intervals}"
        yield f"gap = {gap}  # rounds from one to the next"
        yield f"retention = {kept * gap}  # rounds that rows are kept"
        yield 'empty = "wait"'
        yield ""
    yield "[model]"
    yield 'kind = "mlp"'
    yield ""
    yield "[defaults]"
    yield f"cohort = {min(10, max(found.rows.clients if found.rows.clients > 1 else SIMULATED, 2) // 2)}"
    yield "local = { lr = 0.1, epochs = 2 }"


def methods(found: Findings) -> list[tuple[str, str, dict[str, Any], str]]:
    """Return the methods that may help: name, algorithm, options, and why."""
    chosen: list[tuple[str, str, dict[str, Any], str]] = [
        ("FedAvg", "fedavg", {}, "one model for all"),
        ("Each alone", "local", {}, "no federation: what it has to beat"),
    ]
    count = 2
    if found.clients is not None and found["groups"].found:
        count = int(found.clients.groups[1].max()) + 1
    if found["labels"].found:
        chosen.append(("FedProx", "fedprox", {"mu": 0.1}, "labels differ between clients"))
        chosen.append(("SCAFFOLD", "scaffold", {}, "the same"))
    if found["groups"].found:
        chosen.append((f"IFCA, K = {count}", "ifca", {"clusters": count}, f"{count} groups of clients"))
        chosen.append(
            (f"FedEM, K = {count}", "fedem", {"components": count}, "the same, with a mixture in each client")
        )
    elif found["meaning"].found:
        chosen.append(("Adaptive experts", "aem", {}, "models of their own help clients that form no groups"))
    if found["mix"].found and "others" in found["mix"].why:
        chosen.append((f"Min Loss, K = {count}", "min-loss", {"branches": count}, "other clients at other hours"))
    if "recent" in found["matter"].what:
        chosen.append(("Fielding", "fielding", {}, "clients are clustered anew as they drift"))
        chosen.append(("FedDrift", "feddrift", {}, "the same"))
    return chosen


def _methods(found: Findings) -> Iterator[str]:
    for name, algorithm, options, why in methods(found):
        yield ""
        yield f"[[method]]  # {why}"
        yield f"name = {as_toml(name)}"
        yield f"algorithm = {as_toml(algorithm)}"
        for key, value in options.items():
            yield f"{key} = {as_toml(value)}"
