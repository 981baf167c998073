"""Step sizes: how far components and factors move, by hand."""

from functools import cache

import pytest
import torch

from fedtide.core.base import Moment
from fedtide.mixtures.priors import Linear
from fedtide.mixtures.step_size import (
    Certainty,
    Integral,
    Leaky,
    PerPeriod,
    carry_along,
    certainty,
    first_whole,
    zero_mid,
)


def test_certainty_by_hand():
    """K = 2: a0 max(0, 2q - 1). K = 3, q = (2/3, 1/3, 0): (3 * 2/3 - 1)/2 = 1/2, and 0 at a third or less."""
    assert certainty(torch.tensor([1.0, 0.0]), 0.2).tolist() == [0.2, 0.0]
    assert certainty(torch.tensor([0.5, 0.5]), 1.0).tolist() == [0.0, 0.0]
    assert certainty(torch.tensor([0.25, 0.75]), 1.0).tolist() == [0.0, 0.5]
    three = certainty(torch.tensor([2, 1, 0], dtype=torch.float64) / 3, 1.0)
    assert three.tolist() == pytest.approx([0.5, 0, 0], abs=1e-15)
    assert certainty(torch.tensor([1.0]), 0.2).tolist() == [0.2]
    assert certainty(torch.tensor([1.0, 0.0]), 1.0).dtype == torch.float64


def test_zero_mid_by_hand():
    for q in (0.0, 0.1, 0.5, 0.75, 1.0):
        shares = torch.tensor([q, 1 - q], dtype=torch.float64)
        assert zero_mid(shares, 0.02) == pytest.approx(2 * abs(0.5 - q) * 0.02, abs=1e-16)
    assert zero_mid(torch.tensor([0.5, 0.5]), 0.02) == 0.0
    assert zero_mid(torch.tensor([0.0, 0.0, 1.0]), 0.02) == pytest.approx(0.02)
    assert zero_mid(torch.ones(3, dtype=torch.float64) / 3, 0.02) == pytest.approx(0, abs=1e-15)
    assert zero_mid(torch.tensor([1.0]), 0.02) == 0.02


def test_a_step_is_by_certainty_where_the_hour_is_known_and_else_by_the_share_of_the_rows():
    mass, update = torch.tensor([30.0, 10.0]), Certainty(a0=0.2, min_share=0.8)
    assert Certainty(a0=0.2)(torch.tensor([0.75, 0.25]), mass).tolist() == [0.1, 0.0]
    assert Certainty(min_share=0.8)(torch.tensor([0.9, 0.1]).double(), mass).tolist() == pytest.approx([0.5, 0])
    assert update(None, mass).tolist() == pytest.approx([0.15, 0.05])


def test_the_first_step_goes_all_the_way_where_something_was_found_and_a_step_is_due():
    steps, found = torch.tensor([0.5, 0.5, 0.0, 0.5]), torch.tensor([True, False, True, True])
    started = torch.tensor([False, False, False, True])
    assert first_whole(steps, found, started).tolist() == [1.0, 0.0, 0.0, 0.5]


def test_centers_without_members_make_the_mean_move_of_all_members():
    """30 samples move by (1, 0) and 10 by (0, 2): (30 * 1 / 40, 10 * 2 / 40) = (3/4, 1/2)."""
    moves = double([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
    assert carry_along(moves, double([30.0, 10.0, 0.0])).tolist() == [[1.0, 0.0], [0.0, 2.0], [0.75, 0.5]]
    assert torch.equal(carry_along(moves, double([1.0, 1.0, 1.0])), moves)
    assert torch.equal(carry_along(0 * moves, double([0.0, 0.0, 0.0])), 0 * moves)


# -- factors of distances ----------------------------------------------------------------------------------------------


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def test_the_rules_for_alpha_by_hand():
    """q = (1, 0), qbar = (1/4, 3/4): the excess is 3/4; eta 0.02 at a peak, 0.64 / 256 = 0.0025, and 0.95 kept."""
    q, qbar = double([1.0, 0.0]), double([0.25, 0.75])
    before = double([0.0, 0.4])
    assert Integral()(before, q, qbar).tolist() == pytest.approx([0.0, 0.4 + 0.02 * 0.75], abs=1e-15)
    assert PerPeriod()(before, q, qbar, 256.0).tolist() == pytest.approx([0.0, 0.4 + 0.0025 * 0.75], abs=1e-15)
    assert PerPeriod()(before, q, qbar, 32.0).tolist() == pytest.approx(Integral()(before, q, qbar).tolist(), abs=1e-15)
    assert Leaky()(before, q, qbar).tolist() == pytest.approx([0.0, 0.38 + 0.02 * 0.75], abs=1e-15)
    assert torch.equal(Leaky(rho=0.0)(before, q, qbar), Integral()(before, q, qbar))
    # q = 3/4: half a step, or a whole one with a constant schedule; at q = 1/2 none.
    q = double([0.75, 0.25])
    assert float(Leaky()(before, q, qbar)[1]) == pytest.approx(0.38 + 0.01 * 0.5, abs=1e-15)
    assert float(Leaky(schedule="constant")(before, q, qbar)[1]) == pytest.approx(0.38 + 0.02 * 0.5, abs=1e-15)
    assert float(Leaky()(before, double([0.5, 0.5]), qbar)[1]) == pytest.approx(0.38, abs=1e-15)


@cache
def linear(period, periods):
    """The expected shares of each round."""
    return [Linear(period).shares(Moment(t, periods * period), 2) for t in range(periods * period)]


def alphas(rule, exponent, period, periods):
    """alpha_2 after each round, the prior linear with exponent 1, where each participant is assigned rightly."""
    log_alpha, found = torch.zeros(2).double(), []
    for expected in linear(period, periods):
        true = float(expected[0]) ** exponent
        log_alpha = rule(log_alpha, expected, double([true, 1 - true]), float(period))
        found.append(float(log_alpha[1].exp()))
    return found


RUNS = [(p, period, periods) for period, periods in ((32, 12), (256, 8)) for p in (0.25, 0.5, 1.0, 2.0, 4.0)]


@pytest.mark.parametrize(("exponent", "period", "periods"), RUNS)
def test_a_leaky_alpha_stays_near_1_whatever_the_shift_and_its_period(exponent, period, periods):
    found = alphas(Leaky(), exponent, period, periods)
    assert min(found) > 0.5
    assert max(found) < 2.0
    if exponent == 1.0:
        assert found == pytest.approx([1.0] * len(found), abs=1e-9)


@pytest.mark.parametrize(("rule", "last"), [
    (Integral(), {32: (0.375, 0.591, 1.0, 1.604, 2.377), 256: (0.0067, 0.053, 1.0, 12.93, 109.1)}),
    (PerPeriod(), {32: (0.375, 0.591, 1.0, 1.604, 2.377), 256: (0.496, 0.693, 1.0, 1.377, 1.798)}),
])  # fmt: skip
def test_a_sum_that_forgets_nothing_goes_on_where_the_prior_is_wrong(rule, last):
    """Although every participant is assigned rightly; with steps per round further for a longer period."""
    for (exponent, period, periods), wanted in zip(RUNS, [*last[32], *last[256]], strict=True):
        assert alphas(rule, exponent, period, periods)[-1] == pytest.approx(wanted, rel=0.02)
