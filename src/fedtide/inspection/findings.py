"""An inspection of a table: its findings, a page of five pictures, and a study with methods that may help."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import tomli_w

from fedtide.algorithms import REGISTRY
from fedtide.algorithms.entry import Trait
from fedtide.core.atomic import check_new, making
from fedtide.core.errors import FedtideError, refused
from fedtide.data.shift import Calendar
from fedtide.data.sources.cells import KEPT_APART
from fedtide.fields.types import LONGEST, seconds_of
from fedtide.inspection.answers import QUESTIONS, SIMULATED, Answers, answer
from fedtide.inspection.table import Table

PAGE, STUDY = "inspection.html", "study.toml"
LONGEST_NAME = 1000
"""Most letters of a label or client that are saved: in an array the longest name decides the size of all."""
ROWS = "rows.npz"
"""Name of the file beside the study, of rows that were in memory."""
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

LOSSES: Mapping[str, tuple[Trait, ...]] = {
    "wsm": ("labels", "holdings"), "fedlc": ("labels",), "masked": ("labels",),
}  # fmt: skip
"""Traits that losses help with, for any algorithm: the re-weighted softmax also if a client lacks labels for a time."""


def _others(answers: Answers) -> int:
    """Return how strongly other clients are there at other hours."""
    mix = answers["mix"].strength if "others" in answers["mix"].why else 0
    return max(mix, answers["presence"].strength)


def _same(answers: Answers) -> int:
    """Return how strongly the rows of the same clients change."""
    changing = (answers["mix"], answers["drift"])
    return max((answer.strength for answer in changing if "same" in answer.why), default=0)


def _nothing(answers: Answers) -> int:
    """Return 1 if clients are alike and stay so."""
    return int(not any(answer.found for answer in answers))


TRAITS: Mapping[Trait, Mapping[str, Callable[[Answers], int]]] = {
    "labels": {"labels differ between clients": lambda answers: answers["labels"].strength},
    "groups": {
        "there are groups of clients": lambda answers: answers["groups"].strength,
        "features differ between clients": lambda answers: answers["features"].strength,
    },
    "meaning": {"same inputs, different labels across clients": lambda answers: answers["meaning"].strength},
    "hours": {"other clients are there at other hours": _others},
    "drift": {"it drifts": lambda answers: max(answers["drift"].strength, answers["matter"].strength)},
    "holdings": {"the same clients hold other things at other times": _same},
    "nothing": {"clients look alike; averaging several models may help a little": _nothing},
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
    Candidate("FedRoD", "fedrod"),
    Candidate("WSM", "fedavg", {"loss": "wsm"}),
    Candidate("FlexCFL", "flexcfl", {"clusters": "silhouette"}),
    Candidate("FedPer", "fedper"),
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
        proposal = Proposal(full, algorithm, {**options, **of_groups, **safe}, "; ".join(why))
        proposals.append((-max(why.values()), proposal))
    proposals.sort(key=lambda pair: pair[0])
    return [
        Proposal("FedAvg", "fedavg", {}, "one model for all"),
        Proposal("Each alone", "local", LONG_ALONE if _large(answers) else {}, "local training, the baseline to beat"),
        *(proposal for _, proposal in proposals),
    ]


# -- windows -----------------------------------------------------------------------------------------------------------


class _Windows(NamedTuple):
    """Windows of time, which are rounds: their number, how many are held (None for all), and the shift of a study."""

    rounds: int
    hold: int | None
    shift: dict[str, Any]


def _windows(answers: Answers) -> _Windows | None:
    """Return the windows of a study; None if nothing comes and goes, or the time is too short for any."""
    mix, drift, matter = answers["mix"], answers["drift"], answers["matter"]
    seconds, series = answers.table.time, answers.table.series is not None
    others = mix.found and "others" in mix.why and not series
    if seconds is None or not (others or drift.found or matter.found or series):
        return None
    begin = _begin(answers.table)
    if others:
        # A cycle has several windows, and clients with rows in them take part.
        window, least = {"day": "6h", "week": "1d", "year": "28d"}[mix.cycle], 1
    else:
        fitting = [length for length in WINDOWS if _count(length, seconds, begin) >= ROUNDS]
        window = fitting[-1] if fitting else WINDOWS[0]
        # The past helps, unless a model of recent rows is better than one of all the past.
        least = 5 if "recent" in matter.what else 0
    rounds = min(_count(window, seconds, begin), MOST_ROUNDS)
    if rounds < 2:
        return None
    hold = max(least, _enough(window, seconds)) if least else None
    what = {"kind": "calendar", "window": window, "hold": "all", "begin": begin, "zone": answers.table.zone}
    if hold is not None and hold * seconds_of(window) <= LONGEST:
        what["hold"] = f"{hold * float(window[:-1]):g}{window[-1]}"
    shift = {"who": "data" if others else "always", "what": {key: value for key, value in what.items() if value}}
    return _Windows(rounds, hold, shift)


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
    except (FedtideError, OverflowError):  # too many windows or none, or the last one ends after the year 9999
        return 0


def _enough(window: str, seconds: np.ndarray) -> int:
    """Return the number of windows in a row that always have some rows."""
    rows = np.histogram(seconds, Calendar(window).edges(seconds))[0]
    before = np.append(0, rows.cumsum())
    # The first windows that together have enough, from each window on; from the last ones too few are left.
    end = np.searchsorted(before, before + LEAST_ROWS)
    return min(int((end - np.arange(len(before))).max()), len(rows))


def _large(answers: Answers) -> bool:
    """Tell whether two epochs of a client's rows at a time, on average, are more steps than `STEPS`."""
    windows = _windows(answers)
    share = 1.0 if windows is None or windows.hold is None else min(windows.hold / windows.rounds, 1.0)
    return share * len(answers.table.label) / _client_count(answers) > STEPS * BATCH / 2


def _client_count(answers: Answers) -> int:
    return answers.rows.clients if answers.rows.clients > 1 else SIMULATED


# -- the file ----------------------------------------------------------------------------------------------------------


def study(answers: Answers, folder: Path) -> dict[str, Any] | None:
    """Return an experiment that `fedtide run` accepts; None if rows have no features, or are of a study.

    Args:
        answers: about the table.
        folder: of the experiment's file; the rows of data that were in memory are beside it.
    """
    table, windows, clients = answers.table, _windows(answers), _client_count(answers)
    if table.features is None or table.simulated:
        return None
    training = {"local_steps": STEPS} if _large(answers) else {"epochs": 2}
    rate = 0.01 if table.measured else 0.1  # gradients of squared errors are as large as the errors
    partition = {"kind": "natural"} if answers.rows.clients > 1 else {"kind": "iid", "clients": clients}
    target = {"target": "number"} if table.measured else {}
    return {
        "title": table.name,
        "rounds": 100 if windows is None else windows.rounds,
        "seeds": [0, 1, 2],
        "baseline": "FedAvg",
        "references": ["tree"] if table.time is None else ["last_label", "tree"],
        **({} if windows is None else {"eval_every": 1, "shift": windows.shift}),
        "data": {**target, "source": _source(table, folder), "partition": partition},
        "model": {"kind": "mlp"},
        "defaults": {
            "cohort": min(10, clients if table.series is not None else clients // 2),
            "local": {"lr": rate, **training},
        },
        "method": [{"name": m.name, "algorithm": m.algorithm, **m.options} for m in methods(answers)],
    }


def text_of(answers: Answers, values: dict[str, Any]) -> str:
    """Return the file of a study, which begins with the answers."""
    lines = [f"# {QUESTIONS[answer.question]} {answer.level}: {answer.said}" for answer in answers]
    lines += [f"# {line}" for line in answers.table.said if line.endswith(KEPT_APART)]
    return "\n".join(["# Written by fedtide inspect. What it found:", *lines, tomli_w.dumps(values)])


def _source(table: Table, folder: Path) -> dict[str, Any]:
    """Return the source of a study's rows."""
    if table.series is not None:
        return {key: value for key, value in asdict(table.series).items() if value is not None}
    if not table.source or table.source[0].suffix == ".npz":
        path = table.source[0] if table.source else folder.resolve() / ROWS
        pictures = table.features is not None and float(table.features.max()) == 255.0  # which are read as 0 to 1
        return {"kind": "npz", "path": str(path), "scaled": not pictures}
    columns, paths = table.columns, [str(path) for path in table.source]
    values = {
        "path": paths[0] if len(paths) == 1 else paths,
        "label": columns.label,
        "client": columns.client,
        "time": columns.time[0] if len(columns.time) == 1 else columns.time,
        "categories": columns.categories,
        "missing": "drop" if columns.gaps else None,
        **dict(columns.spelling),
    }
    features = [*columns.features, *columns.categories]
    written = {key: value for key, value in values.items() if value}
    return {"kind": "csv", **written, "features": features, "scaled": True}


# -- findings ----------------------------------------------------------------------------------------------------------


class Findings(Answers):
    """The answers to the eight questions about a table: printed they are lines, in a notebook a table.

    Its property `short` has the shift in a sentence or two. `notes` are on rows that were drawn, on a feature that is
    the label.

    Args:
        table: the table.
        answers: by question, in order; `findings["drift"]` is one of them.
        rows: the rows that were looked at.
        clients: differences between clients; None without a column of clients.
        cycles: changes over days, weeks and years; empty without a column of times.
        drift: differences between periods; None without a column of times.
    """

    def write(self, folder: str | Path) -> Path:
        """Write a folder with a page of five pictures and a study, all of it or nothing, and return the page.

        Args:
            folder: a new or empty one.
        """
        folder = Path(folder)
        check_new(folder)
        with making(folder) as temporary:
            write_files(self, temporary, folder)
        return folder / PAGE

    def _repr_html_(self) -> str:
        from fedtide.draw.html import render

        lines = (self.short, *self.table.said, *self.notes)
        return render("findings.html", said=lines, answers=_titled(self))


def inspect_table(table: Table, seed: int = 0) -> Findings:
    """Answer the eight questions about a table.

    Raises:
        FedtideError: all labels are the same.
    """
    return Findings(**vars(answer(table, seed)))


def write_files(answers: Answers, temporary: Path, folder: Path) -> None:
    """Write the page and the study into a folder that is being made, and that will be `folder`."""
    values = study(answers, folder)
    text = None if values is None else text_of(answers, values)
    (temporary / PAGE).write_text(_page(answers, text), encoding="utf-8")
    if text is not None:
        (temporary / STUDY).write_text(text, encoding="utf-8")
        if not answers.table.source:
            _save_rows(answers.table, temporary / ROWS)


def _titled(answers: Answers) -> list[tuple[str, Any]]:
    return [(QUESTIONS[answer.question], answer) for answer in answers]


def _page(answers: Answers, text: str | None) -> str:
    from fedtide.draw.html import render, to_pictures  # they draw: answers alone do not wait for it
    from fedtide.inspection.finding_pictures import pictures

    return render(
        "inspection.html",
        title=f"{answers.table.name}: which shift is it?",
        about="",
        short=answers.short,
        said=(*answers.table.said, *answers.notes),
        answers=_titled(answers),
        pictures=to_pictures(pictures(answers)),
        methods=methods(answers) if text else [],
        ready=text,
        environments=[],
    )


def _save_rows(table: Table, path: Path) -> None:
    """Save the rows of data that were in memory in the format of a study's source."""
    columns: dict[str, Any] = {"x": np.asarray(table.features, np.float32), "y": table.label}
    columns |= {} if table.client is None else {"client": table.client}
    columns |= {} if table.time is None else {"time": table.time}
    for name, column in columns.items():
        if column.dtype == object:
            if (longest := max(map(len, column))) > LONGEST_NAME:
                raise refused(f"{table.name}: {name}", f"a name of {longest:,} letters", f"{LONGEST_NAME:,} at most")
            columns[name] = column.astype(str)
    np.savez(path, **columns)
