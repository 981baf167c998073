"""Answers in words: eight lines, from the sizes of effects and never from significance alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from fedtide.core.errors import refused
from fedtide.data.sources.when import YEAR_1973
from fedtide.draw.prose import listed
from fedtide.inspection.questions import (
    CYCLES,
    DISTANCE,
    GAIN,
    Changes,
    Clients,
    Cycle,
    Drift,
    Sample,
    classes,
    clients_of,
    cycles_of,
    drift_of,
    sample,
)
from fedtide.inspection.shares import Against
from fedtide.inspection.table import Table

Level = Literal["not asked", "no", "mild", "strong"]
LEVELS: tuple[Level, ...] = get_args(Level)
Question = Literal["labels", "features", "meaning", "groups", "presence", "mix", "drift", "matter"]

QUESTIONS: dict[Question, str] = {
    "labels": "Do labels differ between clients?",
    "features": "Do features differ between clients?",
    "meaning": "Does what features mean differ?",
    "groups": "Are there groups of clients?",
    "presence": "Is who is there a matter of the hour?",
    "mix": "Does the mix change with the hour?",
    "drift": "Does it drift?",
    "matter": "Does the drift matter?",
}
SHORT: dict[Question, str] = {
    "labels": "labels differ {} between clients",
    "features": "features differ {} between clients",
    "meaning": "what features mean differs {} between clients",
    "groups": "there are groups of clients that differ {}",
    "presence": "who is there depends {} on the hour",
    "mix": "the mix changes {} with the hour",
    "drift": "it drifts {}",
    "matter": "later rows differ {} from what earlier ones would tell",
}
"""What is said in short of a question whose answer is mild or strong."""
TOLD = 0.05, 0.25
"""From which rows tell their client mildly, and strongly: from chance (0) to always (1)."""
UNEVEN = 0.15, 0.4
"""Distances of the activity from an even one from which it is mildly, and strongly uneven."""
SIMULATED = 20
"""Clients that a study makes up for rows that name none."""
LEAK = 0.98
"""Share of the labels that models explain from which a feature may be the label in another form."""
LEAST_ALPHA = 0.01
"""Alpha below which clients hold one label each."""
MINUTE = 60.0
"""Seconds that rows span at least, or numbers were no seconds."""
NIGHT = 5
"""Hour before which it is a surprise that most rows come."""


@dataclass(frozen=True)
class Finding:
    """Answer to a question.

    question: its name. level: by the size of the effect; "not asked" where a column is missing. said: one line, without
    the level. what: what differs or changes: "labels", "features", "meaning" or "groups". why: of the mix of the hour
    and of drift, "others" where other clients are there, "same" where the same clients hold other things. cycle: of the
    mix of the hour, over which the mix changes most: "day", "week" or "year".
    """

    question: Question
    level: Level
    said: str
    what: tuple[str, ...] = ()
    why: tuple[str, ...] = ()
    cycle: str = ""

    @property
    def found(self) -> bool:
        """True where there is something."""
        return self.level in ("mild", "strong")

    @property
    def line(self) -> str:
        """The line on a terminal."""
        return f"{QUESTIONS[self.question]:40}{self.level:10}{self.said}"


@dataclass(frozen=True, repr=False)
class Findings:
    """What a table says of itself: the answers, and what they were read from.

    answers: by question, in order. rows: the rows that were looked at. clients, cycles, drift: None, or empty, where
    columns are missing.
    """

    table: Table
    answers: Mapping[Question, Finding]
    rows: Sample
    clients: Clients | None
    cycles: Mapping[str, Cycle]
    drift: Drift | None

    def __repr__(self) -> str:
        return "\n".join([*self.table.said, *(answer.line for answer in self), *self.notes, self.short])

    def _repr_html_(self) -> str:
        from fedtide.inspection.page import shown

        return shown(self)

    @property
    def short(self) -> str:
        """Which shift it is, in a sentence or two: what is strong, then what is mild."""
        return _short(self)

    @property
    def notes(self) -> tuple[str, ...]:
        """What else a person should know: that some rows were looked at, a feature that is the label, times that
        may be none, another zone."""
        return tuple(_notes(self))

    def write(self, folder: str | Path) -> Path:
        """Write a folder with a page of six pictures and a study, all of it or nothing, and return the page.

        Args:
            folder: it must not exist.
        """
        from fedtide.inspection.page import write  # draws, which asking alone does not wait for

        return write(self, Path(folder))

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.answers.values())

    def __getitem__(self, question: Question) -> Finding:
        return self.answers[question]


def _short(found: Findings) -> str:
    levels: tuple[Level, ...] = ("strong", "mild")
    told = [_told(found, answer) for level in levels for answer in found if answer.level == level]
    if not told and all(answer.level == "not asked" for answer in found):
        return "In short: without columns of clients and times nothing can be asked."
    return f"In short: {'; '.join(filter(None, told)) or 'nothing that was asked about differs or changes'}."


def _told(found: Findings, answer: Finding) -> str:
    if answer.question == "matter" and found["drift"].found:
        return ""
    said = SHORT[answer.question].format({"strong": "strongly", "mild": "mildly"}[answer.level])
    if answer.question == "mix" and found.rows.clients > 1 and answer.why:
        said += f", as {listed([WHY[each] for each in answer.why])}"
    if answer.question == "drift" and found["matter"].level != "not asked":
        said += ", and models of the past suffer" if found["matter"].found else ", but models of the past hardly suffer"
    return said


def _notes(found: Findings) -> Iterator[str]:
    looked, held = len(found.rows.label), len(found.table.label)
    if looked < held:
        yield f"note: {looked:,} of {held:,} rows, drawn at random, were looked at; pictures show these"
    if found.rows.clients <= 1 and found.table.features is not None and not found.table.simulated:
        yield f"note: rows name no clients, or one; the study deals them at random to {SIMULATED} that are made up"
    known = [found.clients.models.one] if found.clients is not None and found.clients.models is not None else []
    known += [found.drift.ahead.past] if found.drift is not None and found.drift.ahead is not None else []
    names = found.table.columns.get("features", ())
    features = found.table.features
    if features is not None and max(known, default=0.0) > LEAK and len(names) == features.shape[1]:
        label = classes(found.table.label)[2][:, 0]
        x = features - features.mean(0)
        alike = np.abs(x.T @ label) / np.maximum(np.sqrt((x**2).sum(0) * (label**2).sum()), 1e-12)
        most = names[int(alike.argmax())]
        yield (
            f"note: features tell the label almost wholly; {most} is most like it. If it is the label in another form, "
            f"leave it out (--without {most})"
        )
    times = found.table.time
    if times is not None and not found.table.simulated and np.ptp(times) < MINUTE and np.abs(times).max() < YEAR_1973:
        name = ", ".join(found.table.columns.get("time", ()))
        yield f"note: the numbers of {name} are read as seconds since 1970, and span less than a minute"
    day = found.cycles.get("day")
    if day is not None and level_of(day.activity.distance, UNEVEN) != "no":
        busiest = int(np.bincount(day.slot, minlength=day.slots).argmax()) * 24 // day.slots
        if busiest < NIGHT:
            yield f"note: most rows come at {busiest} h; if clients have another clock, name its zone (--zone)"


def found_in(table: Table, seed: int = 0) -> Findings:
    """Answer the eight questions about a table.

    Raises:
        FedtideError: all labels are the same, so that nothing can be told of them.
    """
    if (table.label == table.label[0]).all():
        raise refused(
            f"{table.name}: label",
            table.label[:1].tolist()[0],
            "two different labels or more",
            "all rows have the same",
        )
    rows = sample(table, seed)
    clients = clients_of(rows) if rows.clients > 1 else None
    cycles = cycles_of(rows, clients) if rows.seconds is not None else {}
    spread = rows.seconds is not None and np.ptp(rows.seconds) > 0
    drift = drift_of(rows, clients) if spread else None
    answers = [*_of_clients(rows, clients), *_of_hours(rows, cycles), *_of_drift(rows, drift)]
    return Findings(table, {answer.question: answer for answer in answers}, rows, clients, cycles, drift)


def level_of(effect: float, bounds: tuple[float, float]) -> Level:
    """Return the word for the size of an effect.

    >>> [level_of(effect, DISTANCE) for effect in (0.05, 0.1, 0.3)]
    ['no', 'mild', 'strong']
    """
    return "strong" if effect >= bounds[1] else "mild" if effect >= bounds[0] else "no"


def strongest(*levels: Level) -> Level:
    """Return the strongest of some levels.

    >>> strongest("mild", "no")
    'mild'
    """
    return max(levels, key=LEVELS.index)


def percent(share: float) -> str:
    """Return a share in percent, with a digit where it is small.

    >>> percent(0.514), percent(0.0312)
    ('51 %', '3.1 %')
    """
    return f"{100 * share:.0f} %" if abs(share) >= 0.095 else f"{100 * share:.1f} %"


# -- clients -----------------------------------------------------------------------------------------------------------


def _of_clients(rows: Sample, clients: Clients | None) -> Iterator[Finding]:
    if clients is None:
        why = "no column of clients" if rows.client is None else "one client"
        for question in ("labels", "features", "meaning", "groups"):
            yield Finding(question, "not asked", why)
        return
    yield Finding(
        "labels",
        level_of(clients.labels.distance, DISTANCE),
        f"{percent(clients.labels.seen)} of a client's rows would need another label for the common mix, "
        f"{percent(clients.labels.chance)} with labels shuffled{_alpha(clients)}",
    )
    if clients.looks is None:
        yield Finding("features", "not asked", "no columns of features")
        yield Finding("meaning", "not asked", "no columns of features")
    else:
        yield _features(clients)
        yield _meaning(clients)
    yield _groups(clients)


def _alpha(clients: Clients) -> str:
    said = f"{clients.alpha:.2g}" if clients.alpha >= LEAST_ALPHA else f"below {LEAST_ALPHA}"
    return f"; as if dealt with dirichlet alpha {said}" if clients.labels.distance and clients.alpha < 100 else ""


def lift(told: Against) -> float:
    """Return how far rows tell their client, from chance (0) to always (1).

    >>> round(lift(Against(0.6, 0.2, 0.01)), 6)
    0.5
    """
    return told.gain / max(1 - told.chance, 1e-9)


def _features(clients: Clients) -> Finding:
    assert clients.looks is not None
    looks, told = clients.looks, clients.told
    said = (
        f"{percent(looks.seen)} of a client's rows would need to look otherwise, "
        f"{percent(looks.chance)} with rows of a label shuffled"
    )
    level = level_of(looks.distance, DISTANCE)
    if told is not None:
        also = f"a row tells its client in {percent(told.seen)} of cases, by chance {percent(told.chance)}"
        # What made the level comes first; what is below chance says nothing beside it.
        parts = [(level, said, looks), (level_of(lift(told), TOLD), also, told)]
        parts.sort(key=lambda part: -LEVELS.index(part[0]))
        level = parts[0][0]
        said = "; ".join(text for own, text, each in parts if own == level or each.seen > each.chance)
    return Finding("features", level, said)


def _meaning(clients: Clients) -> Finding:
    if clients.models is None:
        return Finding("meaning", "not asked", "too few clients with ten rows")
    models = clients.models
    by_groups = models.grouped - models.looked >= models.own - models.looked_own
    said = (
        f"one model explains {percent(models.one)} of the labels; knowing the {'group' if by_groups else 'client'} "
        f"{percent(models.grouped if by_groups else models.own)}, guessing it from features "
        f"{percent(models.looked if by_groups else models.looked_own)}"
    )
    return Finding("meaning", level_of(clients.means_otherwise, GAIN), said)


def _groups(clients: Clients) -> Finding:
    models, (what, group) = clients.models, clients.groups
    if models is None and not what:
        if clients.looks is None:
            return Finding("groups", "no", "clients do not fall into two heaps by their labels")
        return Finding("groups", "not asked", "too few clients with ten rows")
    if what and not clients.crowds:
        return Finding("groups", "no", f"{len(group)} clients differ by their {what}, but not in groups of several")
    sizes = sorted(np.bincount(group)[np.unique(group)].tolist(), reverse=True) if what else []
    several = [str(size) for size in sizes if size > 1]
    alone = f", {len(sizes) - len(several)} alone" * (len(several) < len(sizes))
    halves = f"{len(several)} groups of {listed(several)} clients{alone}"
    if what == "models":
        assert models is not None
        assert clients.gain is not None
        said = (
            f"{halves}: their models explain {percent(models.grouped)} of the labels, one model {percent(models.one)}"
        )
        return Finding("groups", level_of(clients.gain.gain, GAIN), said, ("models",))
    if what:
        return Finding("groups", "strong", f"{halves}, apart by their {what}", (what,))
    assert models is not None
    said = (
        f"models of {models.count} groups explain {percent(models.grouped)} of the labels, one model "
        f"{percent(models.one)}"
    )
    return Finding("groups", "no", said)


# -- hours -------------------------------------------------------------------------------------------------------------


def _of_hours(rows: Sample, cycles: Mapping[str, Cycle]) -> Iterator[Finding]:
    if not cycles:
        why = "no column of time"
        if rows.seconds is not None:
            span = np.ptp(rows.seconds)
            days = f"{span / 86400:.3g} days"
            told = len(np.unique(rows.seconds % CYCLES["day"][0])) > 1
            why = f"rows span {days}: two whole cycles are the least" if told else f"times are dates, and span {days}"
        yield Finding("presence", "not asked", why)
        yield Finding("mix", "not asked", why)
        return
    yield max((_presence(cycle) for cycle in cycles.values()), key=lambda each: LEVELS.index(each.level))
    mixes = (_mix(cycle, several=rows.clients > 1) for cycle in cycles.values())
    yield max(mixes, key=lambda each: LEVELS.index(each.level))


def slot_name(cycle: Cycle, slot: int) -> str:
    """Return the name of a slot: an hour, a weekday, a month."""
    if cycle.name == "day":
        wide = 24 // cycle.slots
        return f"{slot * wide} h" if wide == 1 else f"{slot * wide} to {(slot + 1) * wide} h"
    if cycle.name == "week":
        return ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")[slot]
    return f"{slot + 1}. twelfth of the year"


def _presence(cycle: Cycle) -> Finding:
    held = np.bincount(cycle.slot, minlength=cycle.slots)
    uneven = level_of(cycle.activity.distance, UNEVEN)
    quietest = (
        f"with {held.max() / held.min():.3g} times the rows of the quietest"
        if held.min()
        else f"and no rows come at {slot_name(cycle, int(held.argmin()))}"
    )
    often = (
        f"the busiest slot of the {cycle.name} is {slot_name(cycle, int(held.argmax()))}, {quietest}"
        if uneven != "no"
        else f"as many rows at all times of the {cycle.name}"
    )
    if cycle.habits is None:
        return Finding("presence", uneven, often)
    kept = level_of(cycle.habits.distance, DISTANCE)
    own = (
        f"clients keep times of their own: {percent(cycle.habits.seen)} of a client's rows would have to move, "
        f"{percent(cycle.habits.chance)} with its {cycle.name}s shuffled among clients"
        if kept != "no"
        else "clients keep the same times"
    )
    what = tuple(name for name, level in (("activity", uneven), ("habits", kept)) if level != "no")
    return Finding("presence", strongest(uneven, kept), f"{often}; {own}", what)


WHY = {"others": "other clients are there", "same": "the same clients hold other things"}
WHAT = {"labels": "labels", "features": "features", "groups": "groups of clients", "meaning": "what features mean"}


def effects(changes: Changes) -> dict[tuple[str, str], Level]:
    """Return what changes over slots or blocks, and why: those that are not "no"; features where labels do not tell."""
    measured: dict[tuple[str, str], Against | None] = {
        ("labels", "others"): changes.others,
        ("labels", "same"): changes.same,
    }
    if changes.look > max(changes.label, DISTANCE[0]):
        measured |= {("features", "others"): changes.look_others, ("features", "same"): changes.look_same}
    measured["groups", "others"] = changes.crowd
    levels = {key: level_of(each.distance, DISTANCE) for key, each in measured.items() if each is not None}
    levels["meaning", "same"] = level_of(changes.meaning, GAIN)
    return {key: level for key, level in levels.items() if level != "no"}


def _mix(cycle: Cycle, *, several: bool) -> Finding:
    found, changes = effects(cycle.changes), cycle.changes
    what, why = (tuple(dict.fromkeys(key[place] for key in found)) for place in (0, 1))
    if not found:
        seen, chance = changes.same.seen, changes.same.chance
        return Finding(
            "mix", "no", f"labels change by {percent(seen)} over the {cycle.name}, by chance {percent(chance)}"
        )
    said = f"over the {cycle.name} {_sizes(changes, what)}" + f": {listed([WHY[each] for each in why])}" * several
    return Finding("mix", strongest(*found.values()), said, what, why, cycle.name)


def _sizes(changes: Changes, what: Sequence[str]) -> str:
    """Say by how much each thing that changes does, beside what chance does; of models there is no distance."""
    distance = attrgetter("distance")
    looks = [each for each in (changes.look_others, changes.look_same) if each]
    sizes = {
        "labels": max(changes.others, changes.same, key=distance),
        "features": max(looks, key=distance, default=None),
        "groups": changes.crowd,
    }
    return listed(
        [
            f"{WHAT[name]} by {percent(size.seen)} (chance {percent(size.chance)})"
            if (size := sizes.get(name))
            else WHAT[name]
            for name in what
        ]
    )


# -- drift -------------------------------------------------------------------------------------------------------------


def day_of(seconds: float) -> str:
    """Return the date of a time.

    >>> day_of(86400.0)
    '1970-01-02'
    """
    return datetime.fromtimestamp(seconds, UTC).date().isoformat() if abs(seconds) < 2e11 else f"{seconds:.6g} s"


def how(drift: Drift, seconds: np.ndarray) -> str:
    """Return the course of what drifts, in words."""
    line, step, at = drift.course
    if drift.steps:
        days = [day_of(float(seconds[drift.block == each].min())) for each in drift.steps]
        return f"in {len(days)} steps, around {listed(days)}"
    if max(line, step) < 0.5:
        return "back and forth"
    if line >= step:
        return "gradually"
    return f"at once, around {day_of(float(seconds[drift.block == at].min()))}"


def _of_drift(rows: Sample, drift: Drift | None) -> Iterator[Finding]:
    if drift is None or rows.seconds is None:
        lacks = "no column of time" if rows.seconds is None else "all rows have the same time"
        yield Finding("drift", "not asked", lacks)
        yield Finding("matter", "not asked", lacks)
        return
    found = effects(drift.changes)
    what, why = (tuple(dict.fromkeys(key[place] for key in found)) for place in (0, 1))
    blocks = f"between {drift.blocks} stretches of time"
    if found:
        reasons = f"; {listed([WHY[each] for each in why])}" if rows.clients > 1 else ""
        said = f"{blocks} {_sizes(drift.changes, what)}, {how(drift, rows.seconds)}{reasons}"
    else:
        said = f"labels differ by {percent(drift.labels.seen)} {blocks}, by chance {percent(drift.labels.chance)}"
    yield Finding("drift", strongest("no", *found.values()), said, what, why)
    if drift.ahead is None or drift.recency is None or drift.cost is None:
        yield Finding("matter", "not asked", "no columns of features")
        return
    recency, cost = drift.recency.gain, drift.cost.gain
    seen = drift.ahead
    said = (
        f"of the next stretch a model of all the past explains {percent(seen.past)}, of the last three "
        f"{percent(seen.recent)}, with half of it known {percent(seen.itself)}"
    )
    better = tuple(name for name, gain in (("recent", recency), ("itself", cost)) if gain >= GAIN[0])
    yield Finding("matter", level_of(max(recency, cost), GAIN), said, better)
