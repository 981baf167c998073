"""Rungs of a tournament: how many rounds a budget pays for, who goes on, and who cannot be told apart.

Methods climb together: all that are entered play half of the rounds, the better half of them all rounds. They are not
dropped sooner, because methods that learn slowly at first may win in the end. If the budget does not pay for that,
fewer are entered; then all play fewer rounds, and none is dropped.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from fedtide.draw.prose import counted
from fedtide.evaluate.metrics import Measure
from fedtide.report.lead import ENOUGH, BySeed, gap

SEEDS = 5
"""Seeds that a tournament has; the last ones are for those that cannot be told apart."""
FEW = 5
"""Methods below which rather fewer rounds are played than fewer methods are entered."""
LEAST = 2
"""Methods that go on at least: a comparison."""
LEAST_ROUNDS = 8
"""Rounds below which a tournament says nothing."""

Verdict = Literal["highest", "cannot be told apart", "too few seeds to tell", "behind"]


@dataclass(frozen=True)
class Cost:
    """Seconds of a method: to begin or go on with a run, and for a round with its share of the evaluations.

    variants: how many of the method's variants play the first rung; the best one goes on.
    """

    setup: float
    round: float
    variants: int = 1

    def of(self, rounds: int) -> float:
        """Return the seconds of some rounds of one variant."""
        return self.setup + rounds * self.round


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


def needed(costs: Sequence[Cost], ladder: Ladder) -> float:
    """Return the seconds that a ladder takes, if those that go on cost as much as others.

    Args:
        costs: of each method, in the order of nomination.
        ladder: the plan. Two of the last play as many seeds as it takes to tell them apart.
    """
    entered = costs[: ladder.entries]
    mean = Cost(fmean(cost.setup for cost in entered), fmean(cost.round for cost in entered))
    below, *higher = ladder.rungs
    seconds = ladder.seeds * sum(cost.variants * cost.of(below) for cost in entered)
    alive = len(entered)
    for rung in higher:
        alive = min(half(alive), alive)
        seconds += ladder.seeds * alive * mean.of(rung - below)
        below = rung
    return seconds + min(LEAST, alive) * max(ENOUGH - ladder.seeds, 0) * mean.of(below)


def pays_for_all(costs: Sequence[Cost], rounds: int, step: int) -> float:
    """Return the seconds of processes from which on `planned` enters all methods for all rounds.

    >>> costs = [Cost(0.0, 1.0)] * 8
    >>> seconds = pays_for_all(costs, 16, 1)
    >>> planned(costs, 16, 1, seconds).entries, planned(costs, 16, 1, seconds - 1).entries
    (8, 7)
    """
    return needed(costs, Ladder(rungs_of(rounds, step), 1, len(costs)))


def rungs_of(rounds: int, step: int) -> tuple[int, ...]:
    """Return the rungs of all rounds: half of them, in multiples of the step, and all."""
    lower = step * math.ceil(rounds / 2 / step)
    return (rounds,) if lower >= rounds else (lower, rounds)


def planned(costs: Sequence[Cost], rounds: int, step: int, seconds: float) -> Ladder:
    """Return the best plan that some seconds pay for.

    All methods with three, two or one seed. Then fewer methods, in the order of nomination, but at least five. Then
    half of the rounds for all, and half of these. If nothing fits, the cheapest.

    Args:
        costs: of each method, in the order of nomination.
        rounds: of the study.
        step: rounds between evaluations; rungs are multiples of it.
        seconds: of processes.
    """
    top = rounds
    while True:
        lower = rungs_of(top, step)[0]
        last = lower >= top or lower < LEAST_ROUNDS
        rungs = (top,) if top < rounds else rungs_of(top, step)
        fewest = LEAST if last else min(FEW, len(costs))
        plans = [Ladder(rungs, seeds, len(costs)) for seeds in (3, 2, 1)]
        plans += [Ladder(rungs, 1, entries) for entries in range(len(costs) - 1, fewest - 1, -1)]
        fitting = [plan for plan in plans if needed(costs, plan) <= seconds]
        if fitting or last:
            return fitting[0] if fitting else plans[-1]
        top = lower


def window(at: int, rounds: int, late: int, period: float | None) -> int:
    """Return over how many rounds the accuracy at a rung is averaged: the study's share of them, or a whole period.

    >>> window(50, 100, 20, None), window(32, 64, 32, 32.0), window(16, 64, 32, 32.0)
    (10, 32, 16)
    """
    share = max(late * at // rounds, 1)
    return share if period is None else max(share, min(math.ceil(period), at))


def climbing(values: Mapping[str, BySeed], method: Mapping[str, str], count: int) -> list[str]:
    """Return the entries that go on: the best variant of each method, of the `count` best methods.

    Args:
        values: at this rung, by entry; ties go to the first.
        method: of each entry.
        count: how many go on.
    """
    best: dict[str, str] = {}
    for entry in sorted(values, key=lambda entry: -fmean(values[entry].values())):
        best.setdefault(method[entry], entry)
    chosen = list(best.values())[:count]
    return [entry for entry in values if entry in chosen]


@dataclass(frozen=True)
class Standing:
    """How an entry stands: its score, and its difference to the highest one, over the seeds of both."""

    entry: str
    score: Measure
    difference: Measure
    verdict: Verdict


def standings(values: Mapping[str, BySeed]) -> list[Standing]:
    """Return how entries stand, the best first.

    An entry is behind the one with the highest mean if the 95 % interval of the paired difference over seeds (Student's
    t) lies below 0. Else the two cannot be told apart if the difference is 0 or below two standard errors. If it is
    larger, or if a single seed has no errors, there are too few seeds to tell.
    """
    order, out = sorted(values, key=lambda entry: -fmean(values[entry].values())), []
    for entry in order:
        by_seed = values[entry]
        difference = gap(by_seed, values[order[0]])
        verdict: Verdict = "highest" if entry == order[0] else _verdict(difference)
        out.append(Standing(entry, Measure.of(list(by_seed.values())), difference, verdict))
    return out


def _verdict(difference: Measure) -> Verdict:
    """Return the verdict on an entry with a difference to the highest one."""
    if len(difference.values) >= ENOUGH and difference.side() < 0:
        return "behind"
    away = abs(difference.mean or 0.0)
    level = away < 1e-12 or (difference.error is not None and away < 2 * difference.error)
    return "cannot be told apart" if level else "too few seeds to tell"


def describe_others(stands: Sequence[Standing]) -> str:
    """Say how many others may be as good as the highest one; "" if all are behind.

    >>> describe_others(standings({"A": {0: 0.7}, "B": {0: 0.7}, "C": {0: 0.5}}))
    '1 other cannot be told apart from it. For 1 other there are too few seeds to tell.'
    """
    verdicts = [stand.verdict for stand in stands]
    level, few = (verdicts.count(verdict) for verdict in ("cannot be told apart", "too few seeds to tell"))
    lines = [f"{counted(level, 'other')} cannot be told apart from it."] * (level > 0)
    lines += [f"For {counted(few, 'other')} there are too few seeds to tell."] * (few > 0)
    return " ".join(lines)
