"""Laws of curves, priors and step sizes: the simplex, the period, the formulas of the paper."""

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
from fedtide.mixtures.step_size import Leaky, certainty, zero_mid
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
@given(smooth, whole_periods, exponents, st.integers(3, 5), st.integers(0, 512))
def test_an_exponent_acts_on_the_first_group_and_rescales_the_others(curve, period, exponent, groups, time):
    plain, q = (periodic_shares(curve, time, period, p, groups) for p in (1.0, exponent))
    assert math.isclose(q[0], plain[0] ** exponent, abs_tol=1e-12)
    if 1e-6 < plain[0] < 1 - 1e-6:
        np.testing.assert_allclose(q[1:], plain[1:] * (1 - q[0]) / (1 - plain[0]), atol=1e-9)


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


# -- step sizes --------------------------------------------------------------------------------------------------------

simplex = st.lists(st.floats(0.001, 1), min_size=1, max_size=5).map(
    lambda w: torch.tensor(w, dtype=torch.float64) / sum(w)
)


@law
@given(simplex, st.floats(0, 1))
def test_certainty_is_between_zero_and_its_largest(shares, a0):
    a = certainty(shares, a0)
    assert (a >= 0).all()
    assert (a <= a0 + 1e-12).all()
    assert float(a.max()) == zero_mid(shares, a0)
    assert torch.equal(certainty(shares.flip(0), a0), a.flip(0))


@law
@given(st.floats(0, 1), st.floats(0, 1))
def test_certainty_of_two_groups_is_that_of_the_paper(q, a0):
    a = certainty(torch.tensor([q, 1 - q], dtype=torch.float64), a0).tolist()
    assert a == pytest.approx([a0 * max(0, 2 * q - 1), a0 * max(0, 1 - 2 * q)], abs=1e-12)
    assert zero_mid(torch.tensor([q, 1 - q], dtype=torch.float64), a0) == pytest.approx(
        2 * abs(0.5 - q) * a0, abs=1e-12
    )


@law
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=200), st.floats(0.01, 1))
def test_a_leaky_alpha_is_within_its_bound_whatever_is_expected_and_counted(rounds, rho):
    rule, log_alpha = Leaky(eta=0.02, rho=rho, schedule="constant"), torch.zeros(2, dtype=torch.float64)
    for expected, counted in rounds:
        log_alpha = rule(log_alpha, torch.tensor([expected, 1 - expected]), torch.tensor([counted, 1 - counted]))
        assert abs(float(log_alpha[1])) <= 0.02 / rho + 1e-6
