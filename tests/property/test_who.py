"""Laws of who is there: the expected shares of the groups, and the arrivals that are drawn from them."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedtide.core.rng import Rng
from fedtide.data.shift.who import Always, BlockCyclic, Periodic, _substitute
from helpers.examples import examples

law = examples(40)

curves = st.sampled_from(["linear", "cosine", "block"])
smooth = st.sampled_from(["linear", "cosine"])
exponents = st.one_of(st.sampled_from([0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 10.0]), st.floats(0.01, 100))
periods = st.one_of(st.integers(1, 512).map(float), st.floats(0.1, 1e5))
times = st.one_of(st.integers(-1000, 10_000).map(float), st.floats(-1e6, 1e6))
seeds = st.integers(0, 2**32)
group_sizes = st.lists(st.integers(1, 12), min_size=2, max_size=5)


def equal(groups: int) -> np.ndarray:
    return np.full(groups, 10)


def groups_of(sizes: list[int]) -> list[torch.Tensor]:
    """Groups of clients with consecutive ids."""
    return list(torch.arange(sum(sizes)).split(sizes))


# -- expected shares --------------------------------------------------------------------------------------------------


def periodic(curve: str, period: float, exponent: float = 1.0, phase: float = 0.0) -> Periodic | BlockCyclic:
    """Groups that take turns; blocks have no exponent."""
    return BlockCyclic(period, phase) if curve == "block" else Periodic(curve, period, exponent, phase)


@law
@given(curves, periods, exponents, st.floats(-1e4, 1e4), times, st.integers(2, 5))
def test_shares_are_on_the_simplex(curve, period, exponent, phase, time, groups):
    q = periodic(curve, period, exponent, phase).shares(time, equal(groups))
    assert q.shape == (groups,)
    assert (q >= 0).all()
    assert (q <= 1 + 1e-12).all()
    assert math.isclose(q.sum(), 1, abs_tol=1e-9)


@law
@given(curves, st.integers(1, 512), exponents, st.integers(-50, 50), st.integers(-2000, 2000), st.integers(2, 5))
def test_shares_repeat_after_a_period_exactly(curve, period, exponent, phase, time, groups):
    who = periodic(curve, period, exponent, phase)
    assert who.shares(time, equal(groups)).tolist() == who.shares(time + period, equal(groups)).tolist()
    assert who.shares(time, equal(groups)).tolist() == who.shares(time - 7 * period, equal(groups)).tolist()


@law
@given(smooth, periods, exponents, st.floats(0, 1, exclude_max=True))
def test_two_groups_follow_the_formulas_of_the_paper(curve, period, exponent, at):
    s = at * period
    base = abs(2 * s / period - 1) if curve == "linear" else (math.cos(2 * math.pi * s / period) + 1) / 2
    q = periodic(curve, period, exponent).shares(s, equal(2))
    assert math.isclose(q[0], base**exponent, rel_tol=1e-6, abs_tol=1e-9)
    assert math.isclose(q[1], 1 - base**exponent, rel_tol=1e-6, abs_tol=1e-9)


@law
@given(st.integers(1, 300), st.integers(0, 1000))
def test_block_cyclic_is_the_first_group_in_the_first_half(period, time):
    day = 1.0 if time % period < period / 2 else 0.0
    assert BlockCyclic(period).shares(time, equal(2)).tolist() == [day, 1 - day]


@law
@given(st.integers(2, 5), st.integers(1, 40))
def test_blocks_of_more_groups_take_turns(groups, each):
    who = BlockCyclic(groups * each)
    turns = [int(who.shares(t, equal(groups)).argmax()) for t in range(groups * each)]
    assert turns == [k for k in range(groups) for _ in range(each)]


@law
@given(curves, st.integers(1, 256).map(lambda n: 2 * n), exponents)
def test_the_peaks_are_pure(curve, period, exponent):
    who = periodic(curve, period, exponent)
    assert who.shares(0, equal(2)).tolist() == [1.0, 0.0]
    assert who.shares(period / 2, equal(2)).tolist() == [0.0, 1.0]


@law
@given(smooth, st.integers(2, 5), st.integers(1, 50), exponents)
def test_group_k_peaks_at_its_part_of_the_period(curve, groups, each, exponent):
    who = Periodic(curve, groups * each, exponent)
    for k in range(groups):
        np.testing.assert_allclose(who.shares(k * each, equal(groups)), np.eye(groups)[k], atol=1e-9)


@law
@given(smooth, st.integers(3, 5), st.floats(0, 1))
def test_only_neighboring_groups_are_awake_together(curve, groups, at):
    assert (Periodic(curve, 1.0).shares(at, equal(groups)) > 1e-12).sum() <= 2


@law
@given(group_sizes, times)
def test_without_shift_a_group_expects_its_share_of_the_clients(sizes, time):
    np.testing.assert_allclose(Always().shares(time, np.array(sizes)), np.array(sizes) / sum(sizes))


# -- arrivals ---------------------------------------------------------------------------------------------------------

whos = st.one_of(
    st.builds(Always), st.builds(periodic, curves, st.integers(1, 64).map(float), st.sampled_from([0.25, 1.0, 4.0]))
)


@law
@given(whos, group_sizes, st.integers(1, 40), st.integers(0, 100), seeds)
def test_arrivals_are_distinct_and_a_smaller_cohort_is_the_beginning_of_a_larger_one(who, sizes, m, time, seed):
    groups = groups_of(sizes)
    larger = who.arrivals(m, groups, float(time), Rng(seed)).tolist()
    assert len(larger) == len(set(larger)) == min(m, sum(sizes))
    assert set(larger) <= set(range(sum(sizes)))
    for fewer in {0, 1, m // 2, m - 1}:
        smaller = who.arrivals(fewer, groups, float(time), Rng(seed)).tolist()
        assert smaller == larger[: len(smaller)]
        assert len(smaller) == min(fewer, len(larger))


@law
@given(st.integers(1, 5), st.integers(6, 20), st.integers(1, 12), seeds)
def test_a_group_smaller_than_its_demand_is_filled_up_from_the_others(day, night, m, seed):
    arrived = Periodic(period=8).arrivals(m, groups_of([day, night]), 0.0, Rng(seed))
    assert (arrived < day).sum() == min(m, day)
    assert len(arrived) == min(m, day + night)


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """Pearson's statistic over the cells that expect five or more; the others are pooled."""
    large = expected >= 5
    cells = [(counts[large], expected[large])]
    if (~large).any():
        cells.append((counts[~large].sum(keepdims=True), expected[~large].sum(keepdims=True)))
    return float(sum(((o - e) ** 2 / np.maximum(e, 1)).sum() for o, e in cells))


@pytest.mark.parametrize("time", [1.0, 4.0, 7.0])
def test_the_first_groups_arrivals_are_binomial(time):
    m, draws, who, groups = 10, 1500, Periodic(period=32), groups_of([40, 40])
    q = who.shares(time, equal(2))[0]
    key = Rng(0)
    day = np.array([int((who.arrivals(m, groups, time, key.at(r)) < 40).sum()) for r in range(draws)])
    assert abs(day.mean() - m * q) < 4 * math.sqrt(m * q * (1 - q) / draws)
    pmf = np.array([math.comb(m, k) * q**k * (1 - q) ** (m - k) for k in range(m + 1)])
    assert chi_square(np.bincount(day, minlength=m + 1), draws * pmf) < 35  # 10 degrees of freedom: p < 1e-4


def test_the_arrivals_of_three_groups_are_multinomial():
    m, draws, who, groups = 12, 800, Periodic(period=30, exponent=2.0), groups_of([30, 30, 30])
    q = who.shares(3.0, equal(3))
    counts = sum(np.bincount(who.arrivals(m, groups, 3.0, Rng(r)).numpy() // 30, minlength=3) for r in range(draws))
    assert counts[2] == 0
    np.testing.assert_allclose(counts / (m * draws), q, atol=4 * math.sqrt(0.25 / (m * draws)))


def test_clients_of_a_group_arrive_equally_often():
    who, groups = Periodic(period=32), groups_of([20, 20])
    counts = sum(np.bincount(who.arrivals(8, groups, 8.0, Rng(r)).numpy(), minlength=40) for r in range(1000))
    assert chi_square(counts, np.full(40, 200.0)) < 85  # 39 degrees of freedom


def test_without_shift_everyone_arrives_equally_often_and_groups_are_hypergeometric():
    m, draws, sizes = 10, 1500, [6, 14]
    cohorts = [Always().arrivals(m, groups_of(sizes), 0.0, Rng(r)).numpy() for r in range(draws)]
    counts = np.bincount(np.concatenate(cohorts), minlength=20)
    assert chi_square(counts, np.full(20, m * draws / 20)) < 50  # 19 degrees of freedom
    first = np.array([(cohort < 6).sum() for cohort in cohorts])
    ways = [math.comb(6, k) * math.comb(14, m - k) / math.comb(20, m) for k in range(7)]
    assert chi_square(np.bincount(first, minlength=7), draws * np.array(ways)) < 30


# -- reachable --------------------------------------------------------------------------------------------------------


@law
@given(whos, st.lists(st.integers(0, 12), min_size=2, max_size=5), st.integers(0, 40), st.integers(0, 100), seeds)
def test_the_reachable_are_the_first_arrivals(who, sizes, m, time, seed):
    groups, key = groups_of(sizes), Rng(seed)
    reachable = who.reachable(groups, float(time), key).tolist()
    arrived = who.arrivals(m, groups, float(time), key).tolist()
    assert reachable == sorted(set(reachable))
    assert set(arrived[: len(reachable)]) <= set(reachable)
    assert set(reachable) <= set(who.arrivals(max(m, len(reachable)), groups, float(time), key).tolist())
    assert bool(reachable) == bool(sum(sizes))
    if isinstance(who, Always):
        assert reachable == list(range(sum(sizes)))


@law
@given(curves, group_sizes, st.integers(0, 31), seeds)
def test_as_many_are_reachable_as_the_fullest_turn_lets_be(curve, sizes, time, seed):
    who = periodic(curve, 32)
    q = who.shares(float(time), np.array(sizes))
    expected = sum(n * share for n, share in zip(sizes, q.tolist(), strict=True)) / q.max()
    assert abs(len(who.reachable(groups_of(sizes), float(time), Rng(seed))) - expected) <= 0.5


@pytest.mark.parametrize("time", [0.0, 1.0, 4.0, 8.0, 12.0, 16.0])
def test_a_uniform_draw_among_the_reachable_follows_the_shares(time):
    who = Periodic(period=32)
    reachable = who.reachable(groups_of([4000, 4000]), time, Rng(1))
    q = who.shares(time, equal(2))
    day = int((reachable < 4000).sum()) / len(reachable)
    assert abs(day - q[0]) < 0.03
    assert len(reachable) == round(4000 / q.max())


@law
@given(group_sizes, st.lists(st.integers(0, 4), max_size=60))
def test_stand_ins_come_from_the_next_group_that_still_has_a_client(sizes, wanted):
    wanted = np.array([k % len(sizes) for k in wanted][: sum(sizes)], dtype=np.int64)
    left, naive = list(sizes), []
    for k in wanted.tolist():
        k = next((k + step) % len(sizes) for step in range(len(sizes)) if left[(k + step) % len(sizes)])
        left[k] -= 1
        naive.append(k)
    assert _substitute(wanted, np.array(sizes)).tolist() == naive
