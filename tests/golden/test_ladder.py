"""The decision rule of a tournament, by hand."""

import math

import pytest

from fedtide.tuning.ladder import Cost, Ladder, climbing, needed, planned, standings, window


def test_the_seconds_of_a_ladder():
    """Four methods, 1 s to begin and 0.5 s a round, to rungs of 4 and 8 rounds with two seeds.

    First rung 2 * 4 * (1 + 2) = 24. Half go on: 2 * 2 * (1 + 2) = 12. Two of the last play a third seed from the start:
    2 * (1 + 4) = 10.
    """
    costs = [Cost(1.0, 0.5)] * 4
    assert needed(costs, Ladder((4, 8), 2, 4)) == pytest.approx(24 + 12 + 10)
    """With two variants each the first rung is twice as much; only the better one goes on."""
    assert needed([Cost(1.0, 0.5, variants=2)] * 4, Ladder((4, 8), 2, 4)) == pytest.approx(48 + 12 + 10)
    """Two methods of 0.5 and 1.5 s a round: 3 + 7, then both at the mean of 1 s, 2 * (1 + 4), and seeds 2 * (1 + 8)."""
    mixed = [Cost(1.0, 0.5), Cost(1.0, 1.5)]
    assert needed(mixed, Ladder((4, 8), 2, 2)) == pytest.approx(2 * (3 + 7) + 2 * 2 * 5 + 2 * 9)


def test_the_plan_that_a_budget_pays_for():
    """Eight methods at 1 s a round, 16 rounds. First rung 8 * 8 = 64 s a seed, then 4 * 8 = 32: 96 a seed.

    Three seeds: 288. Two: 192 and a third for two of the last, 2 * 16: 224. One: 96 + 2 * 2 * 16 = 160.
    One seed with six: 48 + 24 + 64 = 136, with five 40 + 24 + 64 = 128. Half of the rounds for all: 192, 128 + 2 * 8 =
    144, 64 + 2 * 2 * 8 = 96; with six one seed is 48 + 32 = 80.
    """
    costs = [Cost(0.0, 1.0)] * 8
    plans = {seconds: planned(costs, 16, 1, seconds) for seconds in (288, 287, 224, 160, 136, 135, 110, 80, 0)}
    assert plans[288] == Ladder((8, 16), 3, 8)
    assert plans[287] == plans[224] == Ladder((8, 16), 2, 8)
    assert plans[160] == Ladder((8, 16), 1, 8)
    assert plans[136] == Ladder((8, 16), 1, 6)
    assert plans[135] == Ladder((8, 16), 1, 5)
    assert plans[110] == Ladder((8,), 1, 8)
    assert plans[80] == Ladder((8,), 1, 6)
    assert plans[0] == Ladder((8,), 1, 2)


def test_rungs_are_where_methods_are_judged():
    assert planned([Cost(0.0, 1.0)] * 2, 50, 8, 1e9).rungs == (32, 50)
    assert planned([Cost(0.0, 1.0)], 3, 8, 1e9).rungs == (3,)


def test_a_whole_period_is_averaged():
    """Of 100 rounds the last 20 are a fifth: 10 of 50. A period of 32 counts as a whole from 32 rounds on."""
    assert [window(50, 100, 20, period) for period in (None, 8.0, 32.0, 64.0)] == [10, 10, 32, 50]


def test_who_goes_on():
    """Means: A 0.5 at rate 1 and 0.7 at rate 2, B 0.6, C 0.65 (0.9 and 0.4)."""
    values = {
        "A1": {0: 0.5, 1: 0.5}, "A2": {0: 0.7, 1: 0.7}, "B": {0: 0.6, 1: 0.6}, "C": {0: 0.9, 1: 0.4},
    }  # fmt: skip
    method = {entry: entry[0] for entry in values}
    assert climbing(values, method, 4) == ["A2", "B", "C"]
    assert climbing(values, method, 2) == ["A2", "C"]
    assert climbing(values, method, 1) == ["A2"]


def test_a_large_difference_at_few_seeds_is_not_within_errors():
    """B: -0.02 and +0.01, mean -0.005, s = 0.0212, error 0.015: within two errors. C: -0.16 and -0.15, error 0.005."""
    values = {"A": {0: 0.8, 1: 0.7}, "B": {0: 0.78, 1: 0.71}, "C": {0: 0.64, 1: 0.55}}
    verdicts = {each.entry: each.verdict for each in standings(values)}
    assert verdicts == {"A": "highest", "B": "cannot be told apart", "C": "too few seeds to tell"}
    one = {entry: {0: by_seed[0]} for entry, by_seed in values.items()}
    assert {each.verdict for each in standings(one)} == {"highest", "too few seeds to tell"}


def test_who_cannot_be_told_apart():
    """Three seeds; A's mean is 0.8.

    B: differences -0.1, -0.2, -0.3: mean -0.2, s = 0.1, error 0.1 / sqrt(3) = 0.0577; t of two degrees of freedom is
    4.303: 0.248 reaches 0, but the mean is 3.5 errors away.
    C: -0.20, -0.21, -0.19: s = 0.01, error 0.00577, margin 0.0248: behind. D has two seeds,
    with -0.4 each: nothing is known of their spread.
    """
    a = {5: 0.8, 6: 0.9, 7: 0.7}
    values = {"C": {5: 0.6, 6: 0.69, 7: 0.51}, "B": {5: 0.7, 6: 0.7, 7: 0.4}, "A": a, "D": {5: 0.4, 6: 0.5}}
    found = standings(values)
    verdicts = {each.entry: each.verdict for each in found}
    assert found[0].entry == "A"
    assert verdicts == {"A": "highest", "B": "too few seeds to tell", "C": "behind", "D": "too few seeds to tell"}
    b = next(each for each in found if each.entry == "B")
    assert (b.difference.mean, b.difference.error) == pytest.approx((-0.2, 0.1 / math.sqrt(3)))
    assert b.difference.margin == pytest.approx(0.2484, abs=1e-3)
