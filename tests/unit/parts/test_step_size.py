"""Step sizes: how far components and factors move, by hand."""

from __future__ import annotations

import pytest
import torch

from fedtide.parts.step_size import Certainty, certainty, first_whole, zero_mid


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


def test_certainty_may_begin_above_an_equal_share():
    """(0.9 - 0.8)/(1 - 0.8) = 1/2; up to 0.8 nothing moves; h = 1/K is the default."""
    assert certainty(torch.tensor([0.9, 0.1]).double(), 1.0, 0.8).tolist() == pytest.approx([0.5, 0])
    assert certainty(torch.tensor([0.8, 0.2], dtype=torch.float64), 1.0, 0.8).tolist() == [0, 0]
    shares = torch.tensor([0.7, 0.2, 0.1])
    assert certainty(shares, 0.3, 1 / 3).tolist() == pytest.approx(certainty(shares, 0.3).tolist())


def test_a_step_is_by_certainty_where_the_hour_is_known_and_else_by_the_share_of_the_rows():
    mass, update = torch.tensor([30.0, 10.0]), Certainty(a0=0.2, min_share=0.8)
    assert Certainty(a0=0.2)(torch.tensor([0.75, 0.25]), mass).tolist() == [0.1, 0.0]
    assert Certainty(min_share=0.8)(torch.tensor([0.9, 0.1]).double(), mass).tolist() == pytest.approx([0.5, 0])
    assert update(None, mass).tolist() == pytest.approx([0.15, 0.05])


def test_the_first_step_goes_all_the_way_where_something_was_found_and_a_step_is_due():
    steps, found = torch.tensor([0.5, 0.5, 0.0, 0.5]), torch.tensor([True, False, True, True])
    started = torch.tensor([False, False, False, True])
    assert first_whole(steps, found, started).tolist() == [1.0, 0.0, 0.0, 0.5]
