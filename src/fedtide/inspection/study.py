"""A ready experiment file from answers: the source, the shift, and methods that may help with the shift."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from fedtide.algorithms import REGISTRY
from fedtide.algorithms.entry import Trait
from fedtide.config.writing import as_toml
from fedtide.core.errors import FedtideError
from fedtide.data.shift.what import Calendar
from fedtide.data.sources.series import Series
from fedtide.fields.types import LONGEST, seconds_of
from fedtide.inspection.answers import LEAST_ALPHA, QUESTIONS, SIMULATED, Answers, Question
from fedtide.inspection.table import Table

ROWS = "rows.npz"
"""Name of the file beside the study, of rows that were in memory."""
CUTS = (0.25, 0.5, 0.75)
"""Quantiles that would cut a measure into classes."""
WINDOWS = ("1s", "1m", "15m", "1h", "3h", "6h", "12h", "1d", "2d", "7d", "14d", "28d", "84d", "364d")
"""Windows of a study; a study of drift has the longest one with rounds enough."""
ROUNDS, MOST_ROUNDS = 40, 200
"""Rounds that a study of drift has, and the greatest number of a study of the hour."""
LEAST_ROWS = 20
"""Rows that there are at any time of a study: some of them are for validation and tests."""

STEPS, BATCH = 200, 20
"""Most local steps of a client in a round, and the rows of a step; two epochs if they are fewer steps."""

LONG_ALONE = {"solver": {"lr": 0.001, "optimizer": "adamw", "local_steps": 5 * STEPS}}
"""Training of large clients alone, which begins anew whenever their rows change, and ends by itself only on few."""


# -- methods -----------------------------------------------------------------------------------------------------------

LOSSES: Mapping[str, tuple[Trait, ...]] = {"wsm": ("labels", "holdings")}
"""Traits that losses help with, for any algorithm: the re-weighted softmax if a client lacks labels, if for a time."""


def _level(*questions: Question) -> Callable[[Answers], int]:
    """Return the strongest answer to some questions: 2, 1 or 0."""
    strength = {"strong": 2, "mild": 1}
    return lambda answers: max(strength.get(answers[question].level, 0) for question in questions)


def _others(answers: Answers) -> int:
    """Return how strongly other clients are there at other hours."""
    mix = _level("mix")(answers) if "others" in answers["mix"].why else 0
    return max(mix, _level("presence")(answers))


def _same(answers: Answers) -> int:
    """Return how strongly the rows of the same clients change."""
    questions: tuple[Question, ...] = ("mix", "drift")
    return max((_level(name)(answers) for name in questions if "same" in answers[name].why), default=0)


def _nothing(answers: Answers) -> int:
    """Return 1 if clients are alike and stay so."""
    return int(not any(answer.found for answer in answers))


TRAITS: Mapping[Trait, Mapping[str, Callable[[Answers], int]]] = {
    "labels": {"labels differ between clients": _level("labels")},
    "groups": {"there are groups of clients": _level("groups"), "features differ between clients": _level("features")},
    "meaning": {"the same input has other labels at other clients": _level("meaning")},
    "hours": {"other clients are there at other hours": _others},
    "drift": {"it drifts": _level("drift", "matter")},
    "holdings": {"the same clients hold other things at other times": _same},
    "nothing": {"nothing differs, and an average of several models helps a little": _nothing},
}
"""Findings that speak for each trait, in words, and their strength."""


def helps(algorithm: str, loss: str) -> tuple[Trait, ...]:
    """Return the traits that an algorithm with a loss, both by name, helps with.

    >>> helps("scaffold", "cross-entropy"), helps("fedavg", "wsm")
    (('labels',), ('labels', 'holdings'))
    """
    entry = REGISTRY.get(algorithm)
    both = (*(entry.helps if entry else ()), *LOSSES.get(loss, ()))
    return tuple(trait for trait in TRAITS if trait in both)


def reasons(answers: Answers, algorithm: str, loss: str) -> dict[str, int]:
    """Return the findings that speak for an algorithm with a loss, in words, with their strength: 2 or 1."""
    pairs = [pair for trait in helps(algorithm, loss) for pair in TRAITS[trait].items()]
    return {words: level for words, strength in pairs if (level := strength(answers))}


class Proposal(NamedTuple):
    """A method of a study, with the reason for it."""

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
"""Methods that a study can have if a finding speaks for them."""
MOST = 3
"""Methods in a study that one finding speaks for."""


def methods(answers: Answers) -> list[Proposal]:
    """Return the methods that may help, by the strength of the findings that speak for them.

    One finding brings the first few of `CANDIDATES` for which it speaks. A measure has no methods that need classes.
    """
    group = answers.clients.groups[1] if answers.clients is not None and answers["groups"].found else ()
    count = int(max(group, default=1)) + 1
    taken: dict[str, int] = {}
    proposals = []
    for name, algorithm, options, groups in CANDIDATES:
        why, entry = reasons(answers, algorithm, options.get("loss", "")), REGISTRY[algorithm]
        for_classes = "loss" in options or entry.family == "mixture" or "numbers" in entry.exempt
        if (answers.table.measured and for_classes) or not any(taken.get(words, 0) < MOST for words in why):
            continue
        for words in why:
            taken[words] = taken.get(words, 0) + 1
        safe = {"safe": True} if entry.safe is not None or "loss" in options else {}
        of_groups = {groups: count} if groups else {}
        full = f"{name}, K = {count}" if groups else name
        proposals.append(
            (max(why.values()), Proposal(full, algorithm, {**options, **of_groups, **safe}, "; ".join(why)))
        )
    proposals.sort(key=lambda pair: -pair[0])
    return [
        Proposal("FedAvg", "fedavg", {}, "one model for all"),
        Proposal("Each alone", "local", LONG_ALONE if _large(answers) else {}, "no federation: what it has to beat"),
        *(proposal for _, proposal in proposals),
    ]


# -- windows -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Windows:
    """Windows of time, which are rounds.

    Args:
        window: length.
        hold: number of windows for which rows are held; None for all.
        who: kind of participation.
        rounds: number of rounds.
        why: reason for the length.
        begin: of the first window; None for after the earliest tenth of the rows.
    """

    window: str
    hold: int | None
    who: str
    rounds: int
    why: str
    begin: str | None = None


def _windows(answers: Answers) -> _Windows | None:
    """Return the windows of a study; None if nothing comes and goes, or the time is too short for any."""
    mix, drift, matter = answers["mix"], answers["drift"], answers["matter"]
    seconds, series = answers.table.time, answers.table.series is not None
    others = mix.found and "others" in mix.why and not series
    if seconds is None or not (others or drift.found or matter.found or series):
        return None
    begin = _begin(answers.table)
    hold: int | None = None
    if others:
        window = {"day": "6h", "week": "1d", "year": "28d"}[mix.cycle]
        why = f"windows of {window}, so that a {mix.cycle} has several: clients with rows in them take part"
        hold = 1
    else:
        fitting = [length for length in WINDOWS if _count(length, seconds, begin) >= ROUNDS]
        window = fitting[-1] if fitting else WINDOWS[0]
        why = "the past helps, so rows stay"
        if "recent" in matter.what:
            why, hold = "a model of recent rows is better than one of all the past", 5
    rounds = min(_count(window, seconds, begin), MOST_ROUNDS)
    if rounds < 2:
        return None
    hold = None if hold is None else max(hold, _enough(window, seconds))
    return _Windows(window, hold, "data" if others else "always", rounds, why, begin)


def _begin(table: Table) -> str | None:
    """Return the day after the earliest tenth of each of several series, by which they are scaled; else None."""
    if table.series is None or table.time is None or table.client is None:
        return None
    ends = [np.quantile(table.time[table.client == client], 0.1) for client in np.unique(table.client)]
    return str(np.datetime64(int(max(ends)), "s").astype("datetime64[D]") + 1) if len(ends) > 1 else None


def _count(window: str, seconds: np.ndarray, begin: str | None = None) -> int:
    """Return the number of possible rounds: windows that have a next one, less one, because clocks are set."""
    try:
        return len(Calendar(window, begin=begin).edges(seconds)) - 3
    except FedtideError:  # too many windows, or none
        return 0


def _enough(window: str, seconds: np.ndarray) -> int:
    """Return the number of windows in a row that always have some rows."""
    rows = np.histogram(seconds, Calendar(window).edges(seconds))[0]
    sums = (np.convolve(rows, np.ones(count), "valid").min() for count in range(1, len(rows)))
    return next((count for count, least in enumerate(sums, 1) if least >= LEAST_ROWS), len(rows))


def _large(answers: Answers) -> bool:
    """Tell whether two epochs of a client's rows at a time, on average, are more steps than `STEPS`."""
    windows = _windows(answers)
    share = 1.0 if windows is None or windows.hold is None else min(windows.hold / windows.rounds, 1.0)
    return share * len(answers.table.label) / _client_count(answers) > STEPS * BATCH / 2


def _client_count(answers: Answers) -> int:
    return answers.rows.clients if answers.rows.clients > 1 else SIMULATED


# -- the file ----------------------------------------------------------------------------------------------------------


def study(answers: Answers, folder: Path) -> str | None:
    """Return an experiment file that `fedtide run` accepts; None if rows have no features, or are of a study.

    Args:
        answers: about the table.
        folder: of the file; the rows of data that were in memory are beside it.
    """
    table = answers.table
    if table.features is None or table.simulated:
        return None
    windows = _windows(answers)
    source = _table(table, folder) if table.series is None else _series(table.series)
    parts = [_head(answers, windows), source, _partition(answers), _calendar(table, windows), _training(answers)]
    return "\n\n".join("\n".join(lines) for part in parts if (lines := list(part))) + "\n" + _methods(answers)


def _head(answers: Answers, windows: _Windows | None) -> Iterator[str]:
    yield "# Written by fedtide inspect. What it found:"
    for answer in answers:
        yield f"# {QUESTIONS[answer.question]} {answer.level}: {answer.said}"
    yield f"title = {as_toml(answers.table.name)}"
    yield f"rounds = {100 if windows is None else windows.rounds}"
    yield "seeds = [0, 1, 2]"
    if windows is not None:
        yield "eval_every = 1"
    yield 'baseline = "FedAvg"'


def _series(source: Series) -> Iterator[str]:
    yield "[data]"
    yield 'target = "number"  # or "quantiles"'
    yield ""
    yield "[data.source]"
    yield 'kind = "series"'
    yield f"path = {as_toml(list(source.path))}"
    yield f"time = {as_toml(source.time)}"
    yield f"lags = {as_toml(list(source.lags))}  # earlier values, the features; the shortest is how far ahead"
    yield f"clock = {as_toml(list(source.clock))}"
    yield "own_scale = true  # each series by its own mean and deviation"


def _table(table: Table, folder: Path) -> Iterator[str]:
    columns = table.columns
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
        return
    values = {
        "kind": "csv",
        "path": _one_or_list([str(path) for path in table.source]),
        "label": columns["label"],
        "client": columns["client"],
        "time": _one_or_list(columns["time"]),
        "features": [*columns["features"], *columns["categories"]],
    }
    yield from (f"{key} = {as_toml(value)}" for key, value in values.items() if value or key == "features")
    if columns["categories"]:
        yield f"categories = {as_toml(columns['categories'])}  # texts that come again; inspection left them out"
    if columns["gaps"]:
        yield 'missing = "drop"  # or "mean": that of the column, and of no category'
    yield "scaled = true"


def _one_or_list(values: Any) -> Any:
    return values[0] if len(values) == 1 else values


def _partition(answers: Answers) -> Iterator[str]:
    yield "[data.partition]"
    if answers.rows.clients <= 1:
        yield 'kind = "iid"  # rows name no clients'
        yield f"clients = {SIMULATED}"
        return
    yield 'kind = "natural"'
    if answers.clients is not None and answers["labels"].found and answers.table.series is None:
        alpha = max(answers.clients.alpha, LEAST_ALPHA)
        yield f'# To deal rows to clients of equal kind: kind = "dirichlet", alpha = {alpha:.2g}'


def _calendar(table: Table, windows: _Windows | None) -> Iterator[str]:
    if windows is None:
        return
    yield f"[shift]  # {windows.why}"
    yield f"who = {as_toml(windows.who)}"
    yield ""
    yield "[shift.what]  # every window is a test before it is trained on"
    yield 'kind = "calendar"'
    yield f"window = {as_toml(windows.window)}  # a round"
    hold = "all"
    if windows.hold is not None and windows.hold * seconds_of(windows.window) <= LONGEST:
        hold = f"{windows.hold * float(windows.window[:-1]):g}{windows.window[-1]}"
    yield f"hold = {as_toml(hold)}"
    if windows.begin is not None:
        yield f"begin = {as_toml(windows.begin)}  # after the rows by which series are scaled"
    if table.zone is not None:
        yield f"zone = {as_toml(table.zone)}"


def _training(answers: Answers) -> Iterator[str]:
    table, clients = answers.table, _client_count(answers)
    yield "[model]"
    yield 'kind = "mlp"'
    yield ""
    yield "[defaults]"
    yield f"cohort = {as_toml(min(10, clients if table.series is not None else clients // 2))}"
    rate = 0.01 if table.measured else 0.1  # gradients of squared errors are as large as the errors
    steps = f"local_steps = {STEPS}" if _large(answers) else "epochs = 2"
    yield f"local = {{ lr = {rate}, {steps} }}"


def _methods(answers: Answers) -> str:
    proposals, lines = methods(answers), []
    if any("safe" in proposal.options for proposal in proposals):
        lines += ["", "# safe = true is the recommended form of a method; without it a name plays its paper."]
    for name, algorithm, options, why in proposals:
        values = {"name": name, "algorithm": algorithm, **options}
        lines += ["", f"[[method]]  # {why}", *(f"{key} = {as_toml(value)}" for key, value in values.items())]
    return "\n".join(lines) + "\n"
