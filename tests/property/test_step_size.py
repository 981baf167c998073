"""Laws of step sizes: their range, and the formulas of the paper."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedtide.mixtures.step_size import Leaky, certainty, zero_mid
from helpers.examples import examples

law = examples(40)

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
