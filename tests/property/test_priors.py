"""Laws of curves and priors: the simplex, the period, the formulas of the paper."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedtide.core.base import Moment
from fedtide.core.rng import Rng
from fedtide.data.shift.who import BlockCyclic, Periodic, periodic_shares
from fedtide.mixtures.priors import Block, Cosine, Linear, Soft, Uniform
from helpers.examples import examples

law = examples(40)

CLOCKS = {"linear": Linear, "cosine": Cosine, "block": Block}
curves = st.sampled_from(list(CLOCKS))
smooth = st.sampled_from(["linear", "cosine"])
exponents = st.one_of(st.sampled_from([0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 10.0]), st.floats(0.01, 100))
periods = st.one_of(st.integers(1, 512), st.floats(0.5, 1e4))
whole_periods = st.integers(1, 512)
phases = st.integers(-600, 600)
rounds = st.integers(-1, 10_000)
groups = st.integers(1, 5)


def at(round: int) -> Moment:
    return Moment(round, 100)


# -- curves -----------------------------------------------------------------------------------------------------------


@law
@given(curves, periods, exponents, st.floats(-1e5, 1e5), st.integers(2, 5))
def test_curves_are_on_the_simplex(curve, period, exponent, time, groups):
    q = periodic_shares(curve, time, period, exponent, groups)
    assert (q >= 0).all()
    assert (q <= 1 + 1e-12).all()
    assert math.isclose(q.sum(), 1, abs_tol=1e-9)


@law
@given(curves, whole_periods, exponents, phases, st.integers(2, 5))
def test_curves_repeat_after_a_period_exactly(curve, period, exponent, time, groups):
    one, other = (periodic_shares(curve, t, period, exponent, groups) for t in (time, time + period))
    assert one.tolist() == other.tolist()


@law
@given(smooth, whole_periods, exponents, st.integers(0, 512))
def test_two_groups_follow_the_formulas_of_the_paper_for_every_exponent(curve, period, exponent, time):
    s = time % period
    base = abs(2 * s / period - 1) if curve == "linear" else (math.cos(2 * math.pi * s / period) + 1) / 2
    q = periodic_shares(curve, time, period, exponent, 2)
    np.testing.assert_allclose(q, [base**exponent, 1 - base**exponent], rtol=1e-6, atol=1e-9)


@law
@given(smooth, whole_periods, exponents, st.integers(3, 5), st.integers(0, 512))
def test_an_exponent_acts_on_the_first_group_and_rescales_the_others(curve, period, exponent, groups, time):
    plain, q = (periodic_shares(curve, time, period, p, groups) for p in (1.0, exponent))
    assert math.isclose(q[0], plain[0] ** exponent, abs_tol=1e-12)
    if 1e-6 < plain[0] < 1 - 1e-6:
        np.testing.assert_allclose(q[1:], plain[1:] * (1 - q[0]) / (1 - plain[0]), atol=1e-9)


@law
@given(smooth, whole_periods, exponents, st.integers(2, 5))
def test_the_first_group_is_alone_at_the_beginning(curve, period, exponent, groups):
    q = periodic_shares(curve, 0, period, exponent, groups)
    np.testing.assert_allclose(q, [1.0] + [0.0] * (groups - 1), atol=1e-12)


@law
@given(curves, st.integers(1, 128).map(lambda n: 2 * n), exponents)
def test_two_groups_have_pure_peaks(curve, period, exponent):
    assert periodic_shares(curve, 0, period, exponent, 2).tolist() == [1.0, 0.0]
    assert periodic_shares(curve, period / 2, period, exponent, 2).tolist() == [0.0, 1.0]


@law
@given(smooth, st.integers(1, 128).map(lambda n: 4 * n))
def test_a_quarter_of_a_period_is_even(curve, period):
    np.testing.assert_allclose(periodic_shares(curve, period / 4, period, 1.0, 2), [0.5, 0.5], atol=1e-12)


@law
@given(st.integers(2, 300), exponents)
def test_the_mean_over_a_period(period, exponent):
    linear, cosine = (
        np.mean([periodic_shares(curve, s, period, p, 2)[0] for s in range(period)])
        for curve, p in (("linear", exponent), ("cosine", 1.0))
    )
    assert math.isclose(linear, sum(abs(2 * s / period - 1) ** exponent for s in range(period)) / period, abs_tol=1e-9)
    assert math.isclose(cosine, 0.5, abs_tol=1e-9)


@pytest.mark.parametrize("exponent", [0.25, 1.0, 4.0])
def test_the_mean_over_a_long_period_tends_to_its_integral(exponent):
    mean = np.mean([periodic_shares("linear", s, 4096, exponent, 2)[0] for s in range(4096)])
    assert math.isclose(mean, 1 / (exponent + 1), abs_tol=1e-3)


# -- priors -----------------------------------------------------------------------------------------------------------


@law
@given(curves, periods, phases, rounds, st.integers(2, 5))
def test_a_prior_is_the_shift_with_the_exponent_one(curve, period, phase, round, groups):
    prior = CLOCKS[curve](period, phase).shares(at(round), groups)
    who = BlockCyclic(period, phase) if curve == "block" else Periodic(curve, period, 1.0, phase)
    shift = who.shares(float(round), np.ones(groups))
    assert prior.tolist() == shift.tolist()


@law
@given(curves, periods, phases, rounds, groups)
def test_priors_are_on_the_simplex(curve, period, phase, round, groups):
    for prior in (CLOCKS[curve](period, phase), Uniform()):
        q = prior.shares(at(round), groups)
        assert q.shape == (groups,)
        assert (q >= 0).all()
        assert math.isclose(float(q.sum()), 1, abs_tol=1e-9)


@law
@given(whole_periods, phases, st.lists(st.floats(0, 1), min_size=1, max_size=60), st.integers(0, 50))
def test_soft_falls_for_half_a_period_and_rises_for_the_other(period, phase, counted, begin):
    prior, before = Soft(period, phase), None
    for t, now in enumerate(counted, begin):
        q, s = (
            prior.see(before, at(t), {"modes": torch.tensor([now, 1 - now], dtype=torch.float64)}, Rng(0)),
            (t - phase) % period,
        )
        if s == 0:
            assert q == 1
        elif s == period // 2:
            assert q == 0
        elif before is not None:
            assert q in (now, before)
            assert (q <= min(now, before)) if s < period // 2 else (q >= max(now, before))
        before = q


@law
@given(periods, st.integers(0, 100), st.floats(0, 1), st.floats(0, 1))
def test_soft_is_a_share_whatever_the_period(period, round, now, before):
    assert 0 <= Soft(period).see(before, at(round), {"modes": torch.tensor([now, 1 - now])}, Rng(0)) <= 1
