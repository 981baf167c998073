"""Answers to the eight questions in words, by the sizes of effects and never by significance alone."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from operator import attrgetter
from typing import Any, Literal, get_args

import numpy as np

from fedtide.core.errors import refused
from fedtide.draw.prose import listed
from fedtide.inspection import questions
from fedtide.inspection.questions import DISTANCE, GAIN, Changes, Clients, Compared, Cycle, Drift, Sample, count_gain
from fedtide.inspection.shares import Against
from fedtide.inspection.table import Table

Level = Literal["not asked", "no", "mild", "strong"]
LEVELS: tuple[Level, ...] = get_args(Level)
Question = Literal["labels", "features", "meaning", "groups", "presence", "mix", "drift", "matter"]

QUESTIONS: dict[Question, str] = {
    "labels": "Do labels differ between clients?",
    "features": "Do features differ between clients?",
    "meaning": "Does the same input get different labels at different clients?",
    "groups": "Are there groups of clients?",
    "presence": "Does participation depend on the hour?",
    "mix": "Does the mix change with the hour?",
    "drift": "Does it drift?",
    "matter": "Does the drift matter?",
}
SHORT: dict[Question, str] = {
    "labels": "labels differ {} between clients",
    "features": "features differ {} between clients",
    "meaning": "same inputs, {} different labels across clients",
    "groups": "there are groups of clients that differ {}",
    "presence": "participation depends {} on the hour",
    "mix": "the mix changes {} with the hour",
    "drift": "it drifts {}",
    "matter": "later rows differ {} from predictions by earlier rows",
}
"""Short words for a question whose answer is mild or strong."""
RECOGNIZED = 0.05, 0.25
"""Rates of recognition, from chance (0) to always (1), from which rows reveal their client mildly, and strongly."""
UNEVEN = 0.15, 0.4
"""Distances of the activity from an even one from which it is mildly, and strongly uneven."""
SIMULATED = 20
"""Clients that a study makes up for rows that name none."""
LEAK = 0.98
"""Share of the labels that models explain from which a feature may be the label in another form."""
SKEWED = 2.0
"""Skewness of a measure from which a logarithm is hinted at; that of an exponential distribution."""
LEAST_ALPHA = 0.01
"""Alpha below which clients hold one label each."""
WHY = {"others": "other clients are there", "same": "the same clients hold other things"}
WHAT = {"groups": "groups of clients", "meaning": "labels of the same input"}


@dataclass(frozen=True)
class Finding:
    """Answer to a question.

    Args:
        question: its name.
        level: by the size of the effect; "not asked" if a column is missing.
        said: one line, without the level.
        what: the things that differ or change: "labels", "features", "meaning" or "groups".
        why: of the mix of the hour and of drift, "others" if other clients are there, "same" if the same clients hold
            other things.
        cycle: of the mix of the hour, the cycle over which it changes most: "day", "week" or "year".
    """

    question: Question
    level: Level
    said: str
    what: tuple[str, ...] = ()
    why: tuple[str, ...] = ()
    cycle: str = ""

    @property
    def found(self) -> bool:
        """True if the answer is mild or strong."""
        return self.strength > 0

    @property
    def strength(self) -> int:
        """Strength of a positive answer, 2 or 1; else 0."""
        return max(LEVELS.index(self.level) - 1, 0)

    @property
    def line(self) -> str:
        """The line on a terminal."""
        return f"{QUESTIONS[self.question]:64}{self.level:10}{self.said}"


@dataclass(frozen=True, repr=False)
class Answers:
    """The answers to the eight questions about a table, and their numbers.

    Args:
        table: the table.
        answers: by question, in order.
        rows: the rows that were looked at.
        clients: differences between clients; None without a column of clients.
        cycles: changes over days, weeks and years; empty without a column of times.
        drift: differences between periods; None without a column of times.
    """

    table: Table
    answers: Mapping[Question, Finding]
    rows: Sample
    clients: Clients | None
    cycles: Mapping[str, Cycle]
    drift: Drift | None

    def __repr__(self) -> str:
        return "\n".join([*self.table.said, *(answer.line for answer in self), *self.notes, self.short])

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.answers.values())

    def __getitem__(self, question: Question) -> Finding:
        return self.answers[question]

    @property
    def short(self) -> str:
        """The shift in a sentence or two: strong answers, then mild ones."""
        levels: tuple[Level, ...] = ("strong", "mild")
        parts = [_short_words(self, answer) for level in levels for answer in self if answer.level == level]
        if not parts and all(answer.level == "not asked" for answer in self):
            return "In short: without columns of clients and times nothing can be asked."
        return f"In short: {'; '.join(filter(None, parts)) or 'nothing that was asked about differs or changes'}."

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on rows that were drawn, on rows without clients, and on a feature that is the label."""
        return tuple(_notes(self))


def _short_words(answers: Answers, answer: Finding) -> str:
    if answer.question == "matter" and answers["drift"].found:
        return ""
    words = SHORT[answer.question].format({"strong": "strongly", "mild": "mildly"}[answer.level])
    if answer.question == "mix" and answers.rows.clients > 1 and answer.why:
        words += f", because {listed([WHY[reason] for reason in answer.why])}"
    if answer.question == "drift" and answers["matter"].level != "not asked":
        hardly = "and models of the past" if answers["matter"].found else "but models of the past hardly"
        words += f", {hardly} suffer"
    return words


def _notes(answers: Answers) -> Iterator[str]:
    table, rows = answers.table, answers.rows
    if len(rows.label) < len(table.label):
        yield f"note: {len(rows.label):,} of {len(table.label):,} rows, drawn at random, are looked at and shown"
    if rows.clients <= 1 and table.features is not None and not table.simulated:
        column = "no client column" if rows.client is None else "one client"
        yield f"note: {column}: the study splits the rows at random over {SIMULATED} clients"
    if (skew := _skew(answers)) is not None:
        yield skew
    if (leak := _leak(answers)) is not None:
        yield (
            f"note: features tell the label almost wholly; {leak} is most like it. If it is the label in another form, "
            f"leave it out (--without {leak})"
        )


def _skew(answers: Answers) -> str | None:
    """Return the hint at a logarithm if a measure above 0 is skewed, and its logarithm is not."""
    label, name = answers.table.label, answers.table.columns.label
    if not answers.table.measured or label.min() <= 0:
        return None
    skewed, log = (abs(float(_skewness(values))) for values in (label, np.log(label)))
    if skewed < SKEWED or log > skewed / 2:
        return None
    ratio = float(label.mean() / np.median(label))
    return (
        f"note: {name} is above 0 and skewed, with a mean of {ratio:.2g} times the median: a few large values decide "
        f"squared errors. A column with log({name}) may be a better label"
    )


def _skewness(values: np.ndarray) -> np.floating[Any]:
    off = values - values.mean()
    return (off**3).mean() / max((off**2).mean(), 1e-300) ** 1.5


def _leak(answers: Answers) -> str | None:
    """Return the feature most like the label if features explain the label almost wholly."""
    features, names = answers.table.features, answers.table.columns.features
    compared, drift = None if answers.clients is None else answers.clients.compared, answers.drift
    shares = [] if compared is None else [compared.models.one]
    shares += [] if drift is None or drift.ahead is None else [drift.ahead.past]
    if features is None or max(shares, default=0.0) <= LEAK or len(names) != features.shape[1]:
        return None
    label = questions.classes(answers.table.label)[2][:, 0]
    x = features - features.mean(0)
    likeness = np.abs(x.T @ label) / np.maximum(np.sqrt((x**2).sum(0) * (label**2).sum()), 1e-12)
    return str(names[int(likeness.argmax())])


def answer(table: Table, seed: int = 0) -> Answers:
    """Answer the eight questions about a table.

    Raises:
        FedtideError: there are few rows, or all labels are the same.
    """
    if len(table.label) < SIMULATED:
        raise refused(f"{table.name}: rows", len(table.label), f"{SIMULATED} or more")
    if (table.label == table.label[0]).all():
        value = table.label[:1].tolist()[0]
        raise refused(f"{table.name}: label", value, "two different labels or more", "all rows have the same")
    rows = questions.sample(table, seed)
    clients = questions.clients_of(rows) if rows.clients > 1 else None
    cycles = questions.cycles_of(rows, clients) if rows.seconds is not None else {}
    spread = rows.seconds is not None and np.ptp(rows.seconds) > 0
    drift = questions.drift_of(rows, clients) if spread else None
    return answers_from(table, rows, clients, cycles, drift)


def answers_from(
    table: Table, rows: Sample, clients: Clients | None, cycles: Mapping[str, Cycle], drift: Drift | None
) -> Answers:
    """Return the answers that numbers give."""
    answers = [
        *_of_clients(rows, clients),
        *_of_hours(rows, cycles, simulated=table.simulated),
        *_of_drift(rows, drift),
    ]
    return Answers(table, {answer.question: answer for answer in answers}, rows, clients, cycles, drift)


def level_of(effect: float, bounds: tuple[float, float]) -> Level:
    """Return the word for the size of an effect.

    >>> [level_of(effect, DISTANCE) for effect in (0.05, 0.1, 0.3)]
    ['no', 'mild', 'strong']
    """
    return "strong" if effect >= bounds[1] else "mild" if effect >= bounds[0] else "no"


def percent(share: float) -> str:
    """Return a share in percent, with a digit if it is small.

    >>> percent(0.514), percent(0.0312)
    ('51 %', '3.1 %')
    """
    return f"{100 * share:.0f} %" if abs(share) >= 0.095 else f"{100 * share:.1f} %"


def explained(share: float) -> str:
    """Return the share of the labels that a model explains; one that is worse than the mean explains nothing.

    >>> explained(0.514), explained(-0.3)
    ('51 %', 'nothing')
    """
    return percent(share) if share >= 0.0005 else "nothing"


def _strongest(*levels: Level) -> Level:
    return max(levels, key=LEVELS.index)


def _not_asked(names: Sequence[Question], why: str) -> list[Finding]:
    return [Finding(question, "not asked", why) for question in names]


# -- clients -----------------------------------------------------------------------------------------------------------


def _of_clients(rows: Sample, clients: Clients | None) -> list[Finding]:
    if clients is None:
        why = "no column of clients" if rows.client is None else "one client"
        return _not_asked(("labels", "features", "meaning", "groups"), why)
    seen, chance = percent(clients.labels.seen), percent(clients.labels.chance)
    labels = f"difference of labels between clients: {seen} (chance: {chance})"
    if clients.labels.distance and clients.alpha < 100:
        alpha = f"{clients.alpha:.2g}" if clients.alpha >= LEAST_ALPHA else f"below {LEAST_ALPHA}"
        labels += f"; as if dealt with dirichlet alpha {alpha}"
    why = "no columns of features" + (", except parts of dates" if rows.z is not None else "")
    by_features = _not_asked(("features", "meaning"), why)
    if clients.looks is not None:
        by_features = [_features(clients.looks, clients.compared), _meaning(clients)]
    return [Finding("labels", level_of(clients.labels.distance, DISTANCE), labels), *by_features, _groups(clients)]


def _features(looks: Against, compared: Compared | None) -> Finding:
    level = level_of(looks.distance, DISTANCE)
    words = f"difference of features between clients: {percent(looks.seen)} (chance: {percent(looks.chance)})"
    recognized = None if compared is None else compared.recognized
    if recognized is None:
        return Finding("features", level, words)
    # Share of the way from chance (0) to always (1).
    by_row = level_of(recognized.gain / max(1 - recognized.chance, 1e-9), RECOGNIZED)
    row = f"a row tells its client: {percent(recognized.seen)} (chance: {percent(recognized.chance)})"
    # The part with the higher level comes first, and a part below chance with a lower level is left out.
    parts = sorted([(level, words, looks), (by_row, row, recognized)], key=lambda part: -LEVELS.index(part[0]))
    highest = parts[0][0]
    shown = [text for level, text, effect in parts if level == highest or effect.seen > effect.chance]
    return Finding("features", highest, "; ".join(shown))


def _meaning(clients: Clients) -> Finding:
    if clients.compared is None:
        return Finding("meaning", "not asked", "too few clients with ten rows")
    models = clients.compared.models
    whose, share, guessed = "client", models.single, models.guessed_single
    if models.grouped - models.guessed >= models.single - models.guessed_single:
        whose, share, guessed = "group", models.grouped, models.guessed
    words = (
        f"one model explains {explained(models.one)} of the labels; knowing the {whose} explains {explained(share)}, "
        f"guessing it from features {explained(guessed)}"
    )
    return Finding("meaning", level_of(clients.compared.beyond_features, GAIN), words)


def _groups(clients: Clients) -> Finding:
    compared, (what, group) = clients.compared, clients.groups
    shares = ""
    if compared is not None:
        models = compared.models
        shares = f"explain {explained(models.grouped)} of the labels, one model {explained(models.one)}"
    if what and not clients.crowds:
        return Finding("groups", "no", f"{len(group)} clients differ by their {what}, but not in groups of several")
    if not what and compared is not None:
        return Finding("groups", "no", f"models of {compared.models.count} groups {shares}")
    if not what and clients.looks is None:
        return Finding("groups", "no", "clients do not fall into two heaps by their labels")
    if not what:
        return Finding("groups", "not asked", "too few clients with ten rows")
    sizes = sorted(np.bincount(group)[np.unique(group)].tolist(), reverse=True)
    several = [str(size) for size in sizes if size > 1]
    single = f", {len(sizes) - len(several)} alone" if len(several) < len(sizes) else ""
    words = f"{len(several)} groups of {listed(several)} clients{single}"
    if what == "models" and compared is not None:
        level = level_of(compared.between_groups, GAIN)
        return Finding("groups", level, f"{words}: their models {shares}", ("models",))
    return Finding("groups", "strong", f"{words}, apart by their {what}", (what,))


# -- hours -------------------------------------------------------------------------------------------------------------


def _of_hours(rows: Sample, cycles: Mapping[str, Cycle], *, simulated: bool) -> list[Finding]:
    if not cycles:
        why = "no column of time"
        if rows.seconds is not None:
            days = f"{np.ptp(rows.seconds) / 86400:.3g} days"
            clock = len(np.unique(rows.seconds % questions.CYCLES["day"][0])) > 1
            why = f"rows span {days}: two whole cycles are the least" if clock else f"times are dates, and span {days}"
            why = "a study has hours if its shift has a period, and rounds for two" if simulated else why
        return _not_asked(("presence", "mix"), why)
    by_cycle = [(_presence(cycle), _mix(cycle, several=rows.clients > 1)) for cycle in cycles.values()]
    return [max(answers, key=lambda answer: LEVELS.index(answer.level)) for answers in zip(*by_cycle, strict=True)]


def slot_name(cycle: Cycle, slot: int) -> str:
    """Return the name of a slot: an hour, a weekday, a month."""
    if cycle.name == "day":
        wide = 24 // cycle.slots
        return f"{slot * wide} h" if wide == 1 else f"{slot * wide} to {(slot + 1) * wide} h"
    if cycle.name == "week":
        return ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")[slot]
    return f"{slot + 1}. twelfth of the year"


def _presence(cycle: Cycle) -> Finding:
    counts = np.bincount(cycle.slot, minlength=cycle.slots)
    uneven = level_of(cycle.activity.distance, UNEVEN)
    words = f"as many rows at all times of the {cycle.name}"
    if uneven != "no":
        quietest = f"and no rows come at {slot_name(cycle, int(counts.argmin()))}"
        if counts.min():
            quietest = f"with {counts.max() / counts.min():.3g} times the rows of the quietest"
        words = f"the busiest slot of the {cycle.name} is {slot_name(cycle, int(counts.argmax()))}, {quietest}"
    if cycle.habits is None:
        return Finding("presence", uneven, words)
    level = level_of(cycle.habits.distance, DISTANCE)
    habits = "clients keep the same times"
    if level != "no":
        habits = (
            f"clients keep times of their own: {percent(cycle.habits.seen)} (chance: {percent(cycle.habits.chance)})"
        )
    what = tuple(name for name, size in (("activity", uneven), ("habits", level)) if size != "no")
    joint = ", but" if what == ("habits",) else ";"
    return Finding("presence", _strongest(uneven, level), f"{words}{joint} {habits}", what)


def effects(changes: Changes) -> dict[tuple[str, str], Level]:
    """Return the effects over slots or blocks that are not "no", by thing and reason; features if labels say less."""
    measured: dict[tuple[str, str], Against | None] = {
        ("labels", "others"): changes.others,
        ("labels", "same"): changes.same,
    }
    if changes.look > max(changes.label, DISTANCE[0]):
        measured |= {("features", "others"): changes.look_others, ("features", "same"): changes.look_same}
    measured["groups", "others"] = changes.crowd
    levels = {key: level_of(effect.distance, DISTANCE) for key, effect in measured.items() if effect is not None}
    levels["meaning", "same"] = level_of(changes.meaning, GAIN)
    return {key: level for key, level in levels.items() if level != "no"}


def _things_and_reasons(levels: Mapping[tuple[str, str], Level]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return tuple(dict.fromkeys(what for what, _ in levels)), tuple(dict.fromkeys(why for _, why in levels))


def _mix(cycle: Cycle, *, several: bool) -> Finding:
    levels, changes = effects(cycle.changes), cycle.changes
    if not levels:
        seen, chance = percent(changes.same.seen), percent(changes.same.chance)
        return Finding("mix", "no", f"change of labels over the {cycle.name}: {seen} (chance: {chance})")
    what, why = _things_and_reasons(levels)
    reasons = f": {listed([WHY[reason] for reason in why])}" if several else ""
    words = f"over the {cycle.name} {_sizes(changes, what)}{reasons}"
    return Finding("mix", _strongest(*levels.values()), words, what, why, cycle.name)


def _sizes(changes: Changes, what: Sequence[str]) -> str:
    """Describe the size of each change, with that of chance; a change of models has no distance."""
    distance = attrgetter("distance")
    looks = [effect for effect in (changes.look_others, changes.look_same) if effect]
    sizes = {
        "labels": max(changes.others, changes.same, key=distance),
        "features": max(looks, key=distance, default=None),
        "groups": changes.crowd,
    }
    words = []
    for name in what:
        size = sizes.get(name)
        by = f" by {percent(size.seen)} (chance: {percent(size.chance)})" if size else ""
        words.append(f"{WHAT.get(name, name)}{by}")
    return listed(words)


# -- drift -------------------------------------------------------------------------------------------------------------


def day_of(seconds: float) -> str:
    """Return the date of a time.

    >>> day_of(86400.0)
    '1970-01-02'
    """
    return datetime.fromtimestamp(seconds, UTC).date().isoformat() if abs(seconds) < 2e11 else f"{seconds:.6g} s"


def course_of(drift: Drift, seconds: np.ndarray) -> str:
    """Describe the course of drift."""
    line, step, at = drift.course
    days = {block: day_of(float(seconds[drift.block == block].min())) for block in (*drift.steps, at)}
    if drift.steps:
        return f"in {len(drift.steps)} steps, around {listed([days[block] for block in drift.steps])}"
    if max(line, step) < 0.5:
        return "back and forth"
    return "gradually" if line >= step else f"at once, around {days[at]}"


def _of_drift(rows: Sample, drift: Drift | None) -> list[Finding]:
    if drift is None or rows.seconds is None:
        lack = "no column of time" if rows.seconds is None else "all rows have the same time"
        return _not_asked(("drift", "matter"), lack)
    every = effects(drift.changes)
    levels = {key: level for key, level in every.items() if key[1] == "same"}  # taking part is no drift
    what, why = _things_and_reasons(levels)
    blocks = f"between {drift.blocks} periods"
    words = f"difference of labels {blocks}: {percent(drift.labels.seen)} (chance: {percent(drift.labels.chance)})"
    if levels:
        words = f"{blocks} {_sizes(drift.changes, what)}, {course_of(drift, rows.seconds)}"
    elif every:
        words += "; only who takes part changes"
    matter = replace(_matter(drift), level="no") if every and not levels else _matter(drift)
    return [Finding("drift", _strongest("no", *levels.values()), words, what, why), matter]


def _matter(drift: Drift) -> Finding:
    ahead = drift.ahead
    if ahead is None:
        return Finding("matter", "not asked", "no columns of features")
    gains = {name: count_gain(effect, getattr(ahead, name)) for name, effect in drift.gains.items()}
    words = (
        f"predicting the next period: trained on all past data {explained(ahead.past)}, on the last three periods "
        f"{explained(ahead.recent)}, with half of the period {explained(ahead.itself)}"
    )
    better = tuple(name for name, gain in gains.items() if gain >= GAIN[0])
    return Finding("matter", level_of(max(gains.values()), GAIN), words, better)
