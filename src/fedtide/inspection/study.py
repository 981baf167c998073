"""A ready experiment file from what was found: the source, the shift, and methods that may help with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from fedtide.algorithms import REGISTRY
from fedtide.config.writing import as_toml
from fedtide.core.errors import FedtideError
from fedtide.data.shift.what import Calendar
from fedtide.data.sources.series import Series
from fedtide.fields.types import LONGEST, seconds_of
from fedtide.inspection.advice import reasons
from fedtide.inspection.findings import LEAST_ALPHA, QUESTIONS, SIMULATED, Findings
from fedtide.inspection.table import Table

ROWS = "rows.npz"
"""Name of the file beside the study, of rows that were in memory."""
CUTS = (0.25, 0.5, 0.75)
"""Quantiles that would cut a measure into classes."""
WINDOWS = ("1s", "1m", "15m", "1h", "3h", "6h", "12h", "1d", "2d", "7d", "14d", "28d", "84d", "364d")
"""Windows of a study, of which a study of drift has the longest with rounds enough."""
ROUNDS, MOST_ROUNDS = 40, 200
"""Rounds that a study of drift has, and the greatest number of a study of the hour."""
LEAST_ROWS = 20
"""Rows that there are at any time of a study: some of them are for validation and tests."""

STEPS, BATCH = 200, 20
"""Local steps of clients whose two epochs would be more, so that a round takes no longer, and the rows of a step."""

LONG_ALONE = {"solver": {"lr": 0.001, "optimizer": "adamw", "local_steps": 5 * STEPS}}
"""Training of such clients alone, which begins anew whenever their rows change: it ends by itself only where few."""


class Proposal(NamedTuple):
    """A method of a study, with the reason why it is in it."""

    name: str
    algorithm: str
    options: Mapping[str, Any]
    why: str


class Candidate(NamedTuple):
    """A method that a study can have, with options for any data; `groups` is the option that is their number."""

    name: str
    algorithm: str
    options: Mapping[str, Any] = MappingProxyType({})
    groups: str = ""


ALWAYS = (
    Proposal("FedAvg", "fedavg", {}, "one model for all"),
    Proposal("Each alone", "local", {}, "no federation: what it has to beat"),
)
"""What is in every study."""
CANDIDATES = (
    Candidate("FedTKM", "fedtkm", {"prior": "learned"}, groups="branches"),
    Candidate("FedTEM", "fedtem", {"prior": "learned"}, groups="branches"),
    Candidate("Min Loss", "min-loss", groups="branches"),
    Candidate("IFCA", "ifca", groups="clusters"),
    Candidate("FedEM", "fedem", groups="components"),
    Candidate("SCAFFOLD", "scaffold"),
    Candidate("WSM", "fedavg", {"loss": "wsm"}),
    Candidate("FlexCFL", "flexcfl", {"clusters": "silhouette"}),
    Candidate("Fielding", "fielding"),
    Candidate("FedDrift", "feddrift"),
    Candidate("Adaptive experts", "aem"),
    Candidate("FedAdam", "fedadam"),
)
"""Methods that a study can have, of which a finding speaks for some."""
MOST = 3
"""Methods in a study that one finding speaks for."""


def study(found: Findings, folder: Path) -> str | None:
    """Return an experiment file that `fedtide run` accepts; None where rows have no features, or are of a study.

    Args:
        found: what was found.
        folder: where the file will lie; the rows of data that were in memory are beside it.
    """
    if found.table.features is None or found.table.simulated:
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
    if _windows(found) is not None:
        yield "eval_every = 1"
    yield 'baseline = "FedAvg"'


def _source(found: Findings, folder: Path) -> Iterator[str]:
    table = found.table
    if table.series is not None:
        yield from _series(table.series)
    else:
        yield from _table(found, folder)
    yield ""
    yield "[data.partition]"
    if found.rows.clients > 1:
        yield 'kind = "natural"'
        if found.clients is not None and found["labels"].found and table.series is None:
            alpha = max(found.clients.alpha, LEAST_ALPHA)
            yield f'# To deal rows to clients of equal kind: kind = "dirichlet", alpha = {alpha:.2g}'
    else:
        yield 'kind = "iid"  # rows name no clients'
        yield f"clients = {SIMULATED}"


def _series(source: Series) -> Iterator[str]:
    yield "[data]"
    yield 'target = "number"  # or "quantiles"'
    yield ""
    yield "[data.source]"
    yield 'kind = "series"'
    yield f"path = {as_toml(list(source.path))}"
    yield f"time = {as_toml(source.time)}"
    yield f"lags = {as_toml(list(source.lags))}  # values before, which tell of the next; the shortest is how far ahead"
    yield f"clock = {as_toml(list(source.clock))}"
    yield "own_scale = true  # each series by its own mean and deviation"


def _table(found: Findings, folder: Path) -> Iterator[str]:
    table, columns = found.table, found.table.columns
    if table.measured:
        cuts = sorted({float(f"{cut:.6g}") for cut in np.quantile(table.label, CUTS)})
        yield "[data]"
        yield f'target = "number"  # for classes no target, and in [data.source] cuts = {as_toml(cuts)}'
        yield ""
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
        if columns["client"]:
            yield f"client = {as_toml(columns['client'])}"
        if columns["time"]:
            yield f"time = {as_toml(columns['time'][0] if len(columns['time']) < 2 else columns['time'])}"
        yield f"features = {as_toml([*columns['features'], *columns['categories']])}"
        if columns["categories"]:
            yield f"categories = {as_toml(columns['categories'])}  # texts that come again; inspection left them out"
        if columns["gaps"]:
            yield 'missing = "drop"  # or "mean": that of the column, and of no category'
        yield "scaled = true"


@dataclass(frozen=True)
class _Windows:
    """What changes with time: windows, how many of them rows are held, None for all; who comes, rounds, why, and
    when the first begins, None for after the earliest tenth of the rows."""

    window: str
    hold: int | None
    who: str
    rounds: int
    why: str
    begin: str | None = None


def _windows(found: Findings) -> _Windows | None:
    """Return the windows of a study; None where nothing comes and goes, or the time is too short for any."""
    mix, drift, matter = found["mix"], found["drift"], found["matter"]
    seconds, series = found.table.time, found.table.series is not None
    others = mix.found and "others" in mix.why and not series
    if seconds is None or not (others or drift.found or matter.found or series):
        return None
    begin = _begin(found.table)
    if others:
        window = {"day": "6h", "week": "1d", "year": "28d"}[mix.cycle]
        why = f"windows of {window}, so that a {mix.cycle} has several: clients with rows in them take part"
        held = 1
    else:
        fitting = [each for each in WINDOWS if _count(each, seconds, begin) >= ROUNDS]
        window = fitting[-1] if fitting else WINDOWS[0]
        recent = "recent" in matter.what
        why = "a model of recent rows is better than one of all the past" if recent else "the past helps, so rows stay"
        held = 5 if recent else 0
    rounds = min(_count(window, seconds, begin), MOST_ROUNDS)
    if rounds < 2:
        return None
    return _Windows(window, max(held, _enough(window, seconds)) if held else None, "data" if others else "always",
                    rounds, why, begin)  # fmt: skip


def _begin(table: Table) -> str | None:
    """Return the day after the earliest tenth of each of several series, by which they are scaled; else None."""
    if table.series is None or table.time is None or table.client is None:
        return None
    ends = [np.quantile(table.time[table.client == client], 0.1) for client in np.unique(table.client)]
    return str(np.datetime64(int(max(ends)), "s").astype("datetime64[D]") + 1) if len(ends) > 1 else None


def _count(window: str, seconds: np.ndarray, begin: str | None = None) -> int:
    """Return the number of rounds that there can be: windows that have a next one, but for one, as clocks are set."""
    try:
        return len(Calendar(window, begin=begin).edges(seconds)) - 3
    except FedtideError:  # too many windows, or none
        return 0


def _enough(window: str, seconds: np.ndarray) -> int:
    """Return of how many windows in a row there are always some rows."""
    rows = np.histogram(seconds, Calendar(window).edges(seconds))[0]
    sums = (np.convolve(rows, np.ones(kept), "valid").min() for kept in range(1, len(rows)))
    return next((kept for kept, least in enumerate(sums, 1) if least >= LEAST_ROWS), len(rows))


def rounds(found: Findings) -> int:
    """Return the number of rounds."""
    windows = _windows(found)
    return 100 if windows is None else windows.rounds


def _shift(found: Findings) -> Iterator[str]:
    windows = _windows(found)
    if windows is not None:
        hold = "all" if windows.hold is None else _times(windows.hold, windows.window)
        yield f"[shift]  # {windows.why}"
        yield f"who = {as_toml(windows.who)}"
        yield ""
        yield "[shift.what]  # every window is a test before it is trained on"
        yield 'kind = "calendar"'
        yield f"window = {as_toml(windows.window)}  # a round"
        yield f"hold = {as_toml(hold)}"
        if windows.begin is not None:
            yield f"begin = {as_toml(windows.begin)}  # after the rows by which series are scaled"
        if found.table.zone is not None:
            yield f"zone = {as_toml(found.table.zone)}"
        yield ""
    yield "[model]"
    yield 'kind = "mlp"'
    yield ""
    yield "[defaults]"
    several = found.rows.clients if found.rows.clients > 1 else SIMULATED
    yield f"cohort = {as_toml(min(10, several if found.table.series is not None else max(several, 2) // 2))}"
    rate = 0.01 if found.table.measured else 0.1  # gradients of squared errors are as large as the errors
    yield f"local = {{ lr = {rate}, {f'local_steps = {STEPS}' if _large(found) else 'epochs = 2'} }}"


def _large(found: Findings) -> bool:
    """Tell whether two epochs of the most that a client holds at a time, in the mean, are more steps than `STEPS`."""
    windows = _windows(found)
    share = 1.0 if windows is None or windows.hold is None else min(windows.hold / windows.rounds, 1.0)
    held = share * len(found.table.label) / (found.rows.clients if found.rows.clients > 1 else SIMULATED)
    return held > STEPS * BATCH / 2


def _times(count: int, window: str) -> str:
    """Return some windows as a duration."""
    held = count * float(window[:-1])
    return f"{held:g}{window[-1]}" if count * seconds_of(window) <= LONGEST else "all"


def methods(found: Findings) -> list[Proposal]:
    """Return the methods that may help, those that most speaks for first.

    Of those that a finding speaks for the first of `CANDIDATES` are taken; of those that need classes none for a
    measure.
    """
    group = found.clients.groups[1] if found.clients is not None and found["groups"].found else ()
    count = max(group, default=1) + 1
    taken: dict[str, int] = {}
    chosen = []
    for name, algorithm, given, groups in CANDIDATES:
        said = reasons(found, algorithm, given.get("loss", ""))
        classes = found.table.measured and _of_classes(algorithm, given)
        if classes or not any(taken.get(each, 0) < MOST for each in said):
            continue
        for each in said:
            taken[each] = taken.get(each, 0) + 1
        safe = {"safe": True} if REGISTRY[algorithm].safe is not None or "loss" in given else {}
        options = {**given, **({groups: int(count)} if groups else {}), **safe}
        named = f"{name}, K = {count}" if groups else name
        chosen.append((max(said.values()), Proposal(named, algorithm, options, "; ".join(said))))
    chosen.sort(key=lambda pair: -pair[0])
    one, alone = ALWAYS
    return [one, alone._replace(options=LONG_ALONE) if _large(found) else alone, *(method for _, method in chosen)]


def _of_classes(algorithm: str, given: Mapping[str, Any]) -> bool:
    """Tell whether a method needs classes, or the likelihood that squared errors are not."""
    entry = REGISTRY[algorithm]
    return "loss" in given or entry.family == "mixture" or "numbers" in entry.exempt


def _methods(found: Findings) -> Iterator[str]:
    proposed = methods(found)
    if any("safe" in method.options for method in proposed):
        yield ""
        yield "# safe = true is the recommended form of a method; without it a name plays its paper."
    for name, algorithm, options, why in proposed:
        yield ""
        yield f"[[method]]  # {why}"
        yield f"name = {as_toml(name)}"
        yield f"algorithm = {as_toml(algorithm)}"
        for key, value in options.items():
            yield f"{key} = {as_toml(value)}"
