"""Rungs of a tournament: how many rounds a budget pays for, who goes on, and who cannot be told apart.

Methods climb together: all that are entered play half of the rounds, the better half of them all rounds. They are not
dropped sooner, because methods that learn slowly at first may win in the end. If the budget does not pay for that,
fewer are entered; then all play fewer rounds, and none is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from fedtide.evaluate.measure import Measure
from fedtide.evaluate.metrics import mean_of_last

SEEDS = 5
"""Seeds that a tournament has; the last ones are for those that cannot be told apart."""
ENOUGH = 3
"""Seeds from which the spread of a difference is known."""
FEW = 5
"""Methods below which rather fewer rounds are played than fewer methods are entered."""
LEAST = 2
"""Methods that go on at least: a comparison."""
LEAST_ROUNDS = 8
"""Rounds below which a tournament says nothing."""

Verdict = Literal["leads", "cannot be told apart", "behind"]
BySeed = Mapping[int, float]


@dataclass(frozen=True)
class Cost:
    """Seconds of a process: to begin or go on with a run, and for a round with its share of the evaluations."""

    setup: float
    round: float

    def of(self, rounds: int) -> float:
        """Return the seconds of some rounds."""
        return self.setup + rounds * self.round


def without_loading(costs: Mapping[str, Cost], first: int) -> dict[str, Cost]:
    """Return costs without that of loading the data, which the `first` of them had: a process does so once.

    >>> without_loading({"A": Cost(60.0, 5.0), "B": Cost(4.0, 7.0)}, 1)["A"]
    Cost(setup=4.0, round=5.0)
    """
    later = max((cost.setup for cost in [*costs.values()][first:]), default=math.inf)
    return {
        entry: Cost(min(cost.setup, later), cost.round) if place < first else cost
        for place, (entry, cost) in enumerate(costs.items())
    }


@dataclass(frozen=True)
class Ladder:
    """Plan of a tournament.

    rungs: rounds done at each, rising. seeds: that every entry plays. entries: how many methods are entered, the first
    in the order of nomination.
    """

    rungs: tuple[int, ...]
    seeds: int
    entries: int


def half(methods: int) -> int:
    """Return how many of some methods go on.

    >>> half(7), half(3), half(2)
    (4, 2, 2)
    """
    return max(math.ceil(methods / 2), LEAST)


def needed(costs: Sequence[Sequence[Cost]], ladder: Ladder) -> float:
    """Return the seconds that a ladder takes, if those that go on cost as much as others.

    Args:
        costs: of each method, of each of its variants: after the first rung each goes on with its best one.
        ladder: the plan. Two of the last play as many seeds as it takes to tell them apart.
    """
    entered = costs[: ladder.entries]
    first, *higher = ladder.rungs
    seconds = ladder.seeds * sum(cost.of(first) for variants in entered for cost in variants)
    mean = Cost(
        *(
            fmean(fmean(getattr(c, part) for c in costs_of_method) for costs_of_method in entered)
            for part in ("setup", "round")
        )
    )
    below, alive = first, len(entered)
    for rung in higher:
        alive = min(half(alive), alive)
        seconds += ladder.seeds * alive * mean.of(rung - below)
        below = rung
    return seconds + min(LEAST, alive) * max(ENOUGH - ladder.seeds, 0) * mean.of(below)


def planned(costs: Sequence[Sequence[Cost]], rounds: int, step: int, seconds: float) -> Ladder:
    """Return the best plan that some seconds pay for.

    All methods with three, two or one seed. Then fewer methods, in the order of nomination, but at least five. Then
    half of the rounds for all, and half of these. If nothing fits, the cheapest.

    Args:
        costs: of each method, in the order of nomination, of each of its variants.
        rounds: of the study.
        step: rounds between evaluations; rungs are multiples of it.
        seconds: of processes.
    """
    top, plan = rounds, Ladder((rounds,), 1, len(costs))
    while True:
        rungs = (top,) if top < rounds else tuple(dict.fromkeys((min(step * math.ceil(top / 2 / step), top), top)))
        for seeds in (3, 2, 1):
            plan = Ladder(rungs, seeds, len(costs))
            if needed(costs, plan) <= seconds:
                return plan
        lower = step * math.ceil(top / 2 / step)
        last = lower >= top or lower < LEAST_ROUNDS
        for entries in range(len(costs) - 1, (LEAST if last else min(FEW, len(costs))) - 1, -1):
            plan = Ladder(rungs, 1, entries)
            if needed(costs, plan) <= seconds:
                return plan
        if last:
            return plan
        top = lower


def window(at: int, rounds: int, late: int, period: float | None) -> int:
    """Return over how many rounds the accuracy at a rung is averaged: the study's share of them, or a whole period.

    >>> window(50, 100, 20, None), window(32, 64, 32, 32.0), window(16, 64, 32, 32.0)
    (10, 32, 16)
    """
    share = max(late * at // rounds, 1)
    return share if period is None else max(share, min(math.ceil(period), at))


def value_at(
    at: int, over: int, rounds: Sequence[int], accuracy: Sequence[float], weights: Sequence[float] | None = None
) -> float:
    """Return the mean accuracy of the evaluations in the last `over` rounds of the first `at`; NaN without any.

    >>> value_at(8, 4, [4, 6, 8, 10], [0.1, 0.2, 0.4, 0.9])
    0.30000000000000004
    """
    count = sum(done <= at for done in rounds)
    return mean_of_last(rounds[:count], accuracy[:count], over, weights and weights[:count]) if count else math.nan


def mean(values: BySeed) -> float:
    """Return the mean over seeds; minus infinity if a seed failed."""
    return fmean(values.values()) if values and all(map(math.isfinite, values.values())) else -math.inf


def climbing(values: Mapping[str, BySeed], method: Mapping[str, str], count: int) -> list[str]:
    """Return the entries that go on: the best variant of each method, of the `count` best methods; none that failed.

    Args:
        values: at this rung, by entry; ties go to the first.
        method: of each entry.
        count: how many go on.
    """
    best: dict[str, str] = {}
    for entry, by_seed in values.items():
        other = best.get(method[entry])
        if mean(by_seed) > -math.inf and (other is None or mean(by_seed) > mean(values[other])):
            best[method[entry]] = entry
    order = sorted(best.values(), key=lambda entry: -mean(values[entry]))[:count]
    return [entry for entry in values if entry in order]


@dataclass(frozen=True)
class Standing:
    """How an entry stands: its score, and its difference to the one that leads, over the seeds of both."""

    entry: str
    score: Measure
    difference: Measure
    verdict: Verdict


def standings(values: Mapping[str, BySeed]) -> list[Standing]:
    """Return how entries stand, the best first.

    The entry of the highest mean leads. Another one is behind if the 95 % interval of the paired difference over seeds
    (Student's t) lies below 0. Else the two cannot be told apart, as always with fewer than three seeds.
    """
    order = sorted((entry for entry in values if mean(values[entry]) > -math.inf), key=lambda e: -mean(values[e]))
    if not order:
        return []
    leader, out = values[order[0]], []
    for entry in order:
        by_seed = values[entry]
        difference = Measure.of([by_seed[seed] - leader[seed] for seed in by_seed if seed in leader])
        verdict: Verdict = "leads" if entry == order[0] else "cannot be told apart"
        if entry != order[0] and len(difference.values) >= ENOUGH and difference.side() < 0:
            verdict = "behind"
        out.append(Standing(entry, Measure.of(list(by_seed.values())), difference, verdict))
    return out
