"""Three of the eight questions between clients by sums with noise: answers are bounded, and words sure. Our own.

Two rounds ask two questions. Each value of an answer has the length 1 at most, whatever rows a client has:

| question | values |
| --- | --- |
| shares | the client's mix of labels, and of hours; how far its labels move over four parts of its own time |
| far | distance of its labels, and of its hours, from those of all; and how far chance moves them |

Each client counts once, however many rows it has. The values are those of `fedtide.inspection.by_sums` otherwise.

| symbol | meaning |
| --- | --- |
| `n` | clients |
| `s` | deviation of the noise on a sum, known to all (`fedtide.wire.noise`) |
| `S`, `C` | mean distance of clients from all, and of chance; the distance of an answer is sqrt(S^2 - C^2) |
| `d` | how far the noise on the shares of all moves a distance, at most |

A word is said if the whole interval of its size has this word. An end of an interval is passed once in 16,000 times
(`RARE`). The noise on K shares has a length of s/n times a chi of K. The nearest shares are no farther from the true
ones, so d = sqrt(K) / 2 times this length. S moves by d, and C by 2 d, because draws of two laws differ in a share d.
Both move by the noise on their own sums, too.

Choices:
    - ours: drift is said by labels alone, and only if it is strong: features and meanings need models, which are too
      many numbers. Rows of a client lie in four parts of its own time, so no client has to say when its rows begin.
    - ours: chance moves labels over the four parts by sqrt(4 K / n) / 2 at most, on average, because clients shuffle
      for themselves. Drift is clear if it is above twice as much.
    - ours: a distance is clear if it is above chance by four times 1 / (2 sqrt(n)), the largest deviation of the mean.
    - ours: rows without times say zeros, by which nothing about hours or drift is sure.
    - ours: hours are eight parts of the day. Activity says "no" at most: its shuffles are common to all clients.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from scipy.special import chdtri
from torch import Tensor

from fedtide.core.base import Algorithm, Answer, Facts, Fleet, Memory, Moment, Prediction, Shard, Sum, Traits, Weighted
from fedtide.core.rng import Rng
from fedtide.fields.types import Count
from fedtide.inspection.answers import DISTANCE, QUESTIONS, UNEVEN, Answers, Finding, Level, Question, level_of, percent
from fedtide.inspection.questions import CYCLES, LABELS, Sample, local_slots
from fedtide.inspection.row_sums import along_law, drawn_rows, shares_apart
from fedtide.inspection.shares import CLEAR, count_by
from fedtide.inspection.table import Table
from fedtide.learn.task import Task, classes_of
from fedtide.wire.noise import Group, deviations

STAGES = "shares", "far"
"""The questions, one a round."""
VALUES = "labels", "hours", "parts", "labels_far", "labels_chance", "hours_far", "hours_chance"
"""Values that clients send, each of the length 1 at most."""
ASKED = "asked"
"""The name of both: a client is in one sum a round, and the budget plans as many."""
HOURS, PARTS = 8, 4
"""Parts of the day, and of a client's own time."""
DRAWS = 8
"""Draws of chance of each client: the mean over many clients is known well with few."""
RARE = 1 / 16_000
"""How rarely noise passes the end of an interval."""
SURELY = 4.0
"""Deviations that a single number passes so rarely."""
NOT_ASKED: Mapping[Question, str] = {
    "features": "cells of features by label are",
    "meaning": "models are",
    "groups": "models are",
    "mix": "labels by hour, and all cycles turned, are",
    "matter": "models are",
}
"""What questions need that are not asked with noise."""


@dataclass(frozen=True)
class State:
    """The opened sums, by question and name.

    Args:
        classes: number of labels that are told apart.
        seed: of what clients draw.
        stage: number of questions that were asked.
        means: the sums, each divided by the clients (float64), by name.
        clients: in the sums of each question.
    """

    classes: int
    seed: int
    stage: int = 0
    means: Mapping[str, Tensor] = field(default_factory=dict)
    clients: tuple[float, ...] = ()


def bounded_inspection(task: Task, seed: Count = 1) -> Algorithm[State]:
    """Inspect the rows of clients by bounded sums, which noise can hide a client in; no model is trained.

    Args:
        task: whose number of classes counts; nothing is trained.
        seed: of what clients draw.
    """
    classes = classes_of(task)

    def init(fleet: Fleet, rng: Rng) -> State:
        return State(min(classes, LABELS), seed)

    def round(state: State, fleet: Fleet, rng: Rng) -> tuple[State, Facts]:
        if state.stage >= len(STAGES):
            return state, {}
        reply = fleet.ask(ASKED, fleet.reachable, asked_by(state))
        means, clients = dict(state.means), 0.0
        for name, one in {} if reply.total is None else reply.total.items():
            assert isinstance(one, Sum)
            means[name], clients = one.value / max(one.weight, 1.0), one.weight
        after = replace(state, stage=state.stage + 1, means=means, clients=(*state.clients, clients))
        return after, {"question": state.stage}

    def work(payload: Any, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        if not len(shard):
            return None
        terms = share_terms(shard, payload) if payload["stage"] == "shares" else far_terms(shard, payload, rng)
        values = {name: torch.as_tensor(np.asarray(value, np.float64)) for name, value in terms.items()}
        return Answer({name: Weighted(value) for name, value in values.items()})

    def predict(payload: Any, memories: Any, x: Tensor, owner: Tensor) -> Prediction:
        return Prediction(torch.full((len(x), classes), -float(np.log(classes))))

    traits = Traits(models="none", whole=dict.fromkeys(VALUES, 1.0))
    return Algorithm(
        "bounded-inspection", init, {ASKED: work}, round, lambda state, clients: ({}, None), predict, traits=traits
    )


def asked_by(state: State) -> dict[str, Any]:
    """Return the payload of the next question."""
    asked: dict[str, Any] = {"stage": STAGES[state.stage], "seed": state.seed, "classes": state.classes}
    if state.stage:
        for name, size in (("labels", state.classes), ("hours", HOURS)):
            shares = state.means.get(name, torch.zeros(size, dtype=torch.float64))
            asked[name] = torch.from_numpy(nearest_shares(shares.numpy()))
    return asked


def nearest_shares(values: np.ndarray) -> np.ndarray:
    """Return the shares that are nearest to some numbers (the projection to the simplex).

    >>> nearest_shares(np.array([0.5, 0.7, -0.4])).round(6).tolist()
    [0.4, 0.6, 0.0]
    """
    ordered = np.sort(values)[::-1]
    excess = (np.cumsum(ordered) - 1) / np.arange(1, len(values) + 1)
    return np.maximum(values - excess[np.flatnonzero(ordered > excess)[-1]], 0.0)


# -- a client ----------------------------------------------------------------------------------------------------------


def _columns(shard: Shard, asked: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray | None]:
    """Return label and time of the rows that are looked at; classes beyond the last are one."""
    picked = drawn_rows(len(shard), int(asked["seed"]))
    label = np.minimum(shard.labels.numpy()[picked].astype(np.int64), asked["classes"] - 1)
    return label, None if shard.time is None else shard.time.double().numpy()[picked]


def _hours(seconds: np.ndarray) -> np.ndarray:
    return local_slots(seconds, CYCLES["day"][0], HOURS)[0]


def share_terms(shard: Shard, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the client's mixes, and how far labels in the parts of its own time are from its mix."""
    (label, seconds), classes = _columns(shard, asked), int(asked["classes"])
    mix = np.bincount(label, minlength=classes) / len(label)
    if seconds is None:
        return {"labels": mix, "hours": np.zeros(HOURS), "parts": np.zeros((PARTS, classes))}
    hours = np.bincount(_hours(seconds), minlength=HOURS) / len(label)
    return {"labels": mix, "hours": hours, "parts": moved_labels(label, seconds, mix)}


def moved_labels(label: np.ndarray, seconds: np.ndarray, mix: np.ndarray) -> np.ndarray:
    """Return shares of part and label (4, labels), less those with the mix of all times; times that tie are one part.

    >>> moved_labels(np.array([0, 0, 1, 1]), np.arange(4.0), np.array([0.5, 0.5])).tolist()
    [[0.125, -0.125], [0.125, -0.125], [-0.125, 0.125], [-0.125, 0.125]]
    """
    before = np.searchsorted(np.sort(seconds), seconds, side="left")
    counts = count_by(before * PARTS // len(label), label, (PARTS, len(mix)))
    return (counts - counts.sum(1, keepdims=True) * mix) / len(label)


def far_terms(shard: Shard, asked: Mapping[str, Any], rng: Rng) -> dict[str, Any]:
    """Return how far labels and hours are from those of all, beyond chance, and by chance."""
    (label, seconds), classes = _columns(shard, asked), int(asked["classes"])
    pooled = asked["labels"].numpy()
    draws = rng.at("labels").numpy().multinomial(len(label), pooled / pooled.sum(), DRAWS)
    terms = _far("labels", np.bincount(label, minlength=classes), draws, pooled)
    terms |= {"hours_far": [0.0], "hours_chance": [0.0]}
    if seconds is not None:
        law, slot = asked["hours"].numpy(), _hours(seconds)
        cycle = local_slots(seconds, CYCLES["day"][0], HOURS)[1]
        moved = [along_law(slot, cycle, law, rng.at("hours", number)) for number in range(DRAWS)]
        counts = [np.bincount(one, minlength=HOURS) for one in (slot, *moved)]
        terms |= _far("hours", counts[0], np.stack(counts[1:]), law)
    return terms


def _far(name: str, counts: np.ndarray, draws: np.ndarray, pooled: np.ndarray) -> dict[str, Any]:
    seen, chance = shares_apart(counts, pooled), float(np.mean([shares_apart(one, pooled) for one in draws]))
    return {f"{name}_far": [seen - chance], f"{name}_chance": [chance]}


# -- words that are sure -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Interval:
    """The sizes that noise leaves possible."""

    low: float
    high: float

    def level(self, bounds: tuple[float, float]) -> Level | None:
        """Return the word of the whole interval; None if its ends have two.

        >>> Interval(0.21, 0.4).level(DISTANCE), Interval(0.0, 0.05).level(DISTANCE), Interval(0.0, 0.3).level(DISTANCE)
        ('strong', 'no', None)
        """
        word = level_of(self.low, bounds)
        return word if word == level_of(self.high, bounds) else None


def length_of(deviation: float, size: int) -> float:
    """Return half of the largest sum of sizes of so many numbers of noise: sqrt(size) / 2 times their length.

    >>> round(length_of(1.0, 1), 1), round(length_of(0.5, 4), 2)
    (2.0, 2.48)
    """
    return 0.5 * float(np.sqrt(size * chdtri(size, RARE))) * deviation


def distance_between(far: float, chance: float, noise: float, moved: float, clients: float) -> Interval:
    """Return the interval of sqrt(S^2 - C^2).

    Args:
        far: S - C, with noise.
        chance: C, with noise.
        noise: deviation of both.
        moved: d, how far noise on shares moves S and C at most.
        clients: n.

    >>> found = distance_between(0.2, 0.1, 0.0, 0.0, 1000.0)  # sqrt(0.3^2 - 0.1^2)
    >>> round(found.low, 6), round(found.high, 6)
    (0.282843, 0.282843)
    >>> distance_between(0.05, 0.1, 0.0, 0.0, 100.0).low  # not clear: less than 4 / (2 sqrt(100))
    0.0
    """
    off, by_chance = SURELY * noise + 3 * moved, SURELY * noise + 2 * moved
    low, high = far - off, max(far + off, 0.0)
    least, most = max(chance - by_chance, 0.0), max(chance + by_chance, 0.0)
    is_clear = low > CLEAR * 0.5 / np.sqrt(max(clients, 1.0))
    lower = float(np.sqrt(low * (2 * least + low))) if is_clear else 0.0
    return Interval(lower, float(np.sqrt(high * (2 * most + high))))


def noise_on(state: State, bounds: Mapping[str, float], z: float) -> dict[str, float]:
    """Return the deviation of noise on each number of a sum, by the name of the value.

    Args:
        state: the sums.
        bounds: C of each value.
        z: noise multiplier.
    """
    noise: dict[str, float] = {}
    for of_far in (False, True):
        names = [name for name in state.means if name.endswith(("_far", "_chance")) == of_far]
        noise |= deviations({name: Group(state.means[name].numel(), bounds[name]) for name in names}, z)
    return noise


def bounded_answers(state: State, noise: Mapping[str, float], name: str = "clients", epsilon: float = 0.0) -> Answers:
    """Return the answers that noise leaves sure.

    Args:
        state: the sums.
        noise: deviation on each number of a sum, by the name of the value.
        name: of the clients together, for people.
        epsilon: of the study, for people; 0 without noise.
    """
    clients = min(state.clients) if len(state.clients) == len(STAGES) else 0.0
    how = f"{clients:.0f} clients, epsilon {epsilon:g}" if epsilon else f"{clients:.0f} clients"
    why = f"cannot be told with this noise ({how})"
    findings: dict[Question, Finding] = {}
    for question in QUESTIONS:
        lack = f"with noise: {NOT_ASKED[question]} too many numbers" if question in NOT_ASKED else why
        findings[question] = Finding(question, "not asked", lack)
    reading = Reading(state.means, {key: value / max(clients, 1.0) for key, value in noise.items()}, clients)
    if clients:
        findings |= {one.question: one for one in (reading.labels(), reading.presence(), reading.drift()) if one}
    lines = (f"{name}: sums of {how}; a word is said if noise leaves it sure",)
    none = np.zeros(0, np.int64)
    names = tuple(f"client {number}" for number in range(int(clients)))
    sample = Sample(none, (), np.zeros((0, 1)), None, None, none, names, None, Rng(state.seed))
    return Answers(Table(name, none, said=lines), findings, sample, None, {}, None)


@dataclass(frozen=True)
class Reading:
    """Readings of the means of clients, of which `noise` is the deviation."""

    means: Mapping[str, Tensor]
    noise: Mapping[str, float]
    clients: float

    def _distance(self, name: str) -> tuple[Interval, str]:
        """Return the distance of clients in labels or hours, and its two numbers in words."""
        far, chance = (float(self.means[f"{name}_{part}"]) for part in ("far", "chance"))
        noise = max(self.noise.get(f"{name}_far", 0.0), self.noise.get(f"{name}_chance", 0.0))
        moved = length_of(self.noise.get(name, 0.0), len(self.means[name]))
        words = f"{percent(max(far + chance, 0.0))} (chance: {percent(max(chance, 0.0))})"
        return distance_between(far, chance, noise, moved, self.clients), words

    def labels(self) -> Finding | None:
        """Return the answer about labels."""
        interval, words = self._distance("labels")
        level = interval.level(DISTANCE)
        return level and Finding("labels", level, f"difference of labels between clients: {words}")

    def presence(self) -> Finding | None:
        """Return the answer about hours: strong if clients keep hours of their own, "no" if all hours are alike."""
        interval, words = self._distance("hours")
        hours, habits = self.means["hours"].numpy(), interval.level(DISTANCE)
        uneven = 0.5 * float(np.abs(hours - 1 / HOURS).sum()) + length_of(self.noise.get("hours", 0.0), HOURS)
        if habits == "strong":
            return Finding("presence", "strong", f"clients keep times of their own: {words}", ("habits",))
        if habits == "no" and uneven < UNEVEN[0]:
            return Finding("presence", "no", "as many rows at all times of the day; clients keep the same times")
        return None

    def drift(self) -> Finding | None:
        """Return the answer about drift, if labels drift strongly."""
        parts = self.means["parts"].numpy()
        seen = 0.5 * float(np.abs(parts).sum())
        low = seen - length_of(self.noise.get("parts", 0.0), parts.size)
        chance = 0.5 * np.sqrt(parts.size / self.clients)
        if low <= 2 * chance or np.sqrt(low**2 - chance**2) < DISTANCE[1]:
            return None
        words = (
            f"between four parts of each client's own time labels by {percent(seen)} (chance: below {percent(chance)})"
        )
        return Finding("drift", "strong", words, ("labels",), ("same",))
