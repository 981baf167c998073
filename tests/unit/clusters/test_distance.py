"""Distances by hand, and against numbers worked out one by one."""

import math
from typing import get_args

import numpy as np
import pytest
import torch

from fedtide.clusters.distance import Joint, Kind, between, lengths, means, set_scales, sum_distances, unit
from helpers import naive_clusters as naive

KINDS = get_args(Kind)
EXACT = ("l1", "l2", "js")


def shares(rows: int, d: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Label vectors, with zeros among them."""
    counts = np.random.default_rng(seed).poisson(0.8, size=(rows, d)) + np.eye(rows, d)
    return torch.from_numpy(counts / counts.sum(1, keepdims=True)).to(dtype)


@pytest.mark.parametrize(
    ("kind", "far"),
    [("l1", 1.0), ("l2", math.sqrt(0.5)), ("sq-l2", 0.5), ("cosine", 1 - math.sqrt(0.5)), ("js", 0.464501404)],
)
def test_two_label_vectors_by_hand(kind, far):
    # JS: the mean (3/4, 1/4) has entropy 0.562335, the rows 0 and ln 2; the root of 0.562335 - 0.346574 is 0.464501.
    x = torch.tensor([[1.0, 0.0], [0.5, 0.5]], dtype=torch.float64)
    assert between(x[:1], x[1:], kind).item() == pytest.approx(far, abs=1e-9)


def test_representations_side_by_side_by_hand():
    """|1 - 0| + |0 - 1| = 2 by half, and 3^2 + 4^2 = 25 by ten: 1 + 2.5."""
    x = torch.tensor([[1.0, 0.0, 3.0, 0.0], [0.0, 1.0, 0.0, 4.0]], dtype=torch.float64)
    kind = Joint(("l1", "sq-l2"), (2, 2), (2.0, 10.0))
    assert between(x[:1], x[1:], kind).item() == pytest.approx(3.5)


@pytest.mark.parametrize("units", [(1.0, 1.0), (1e-4, 1e5)])
def test_every_part_counts_alike_whatever_its_units(units):
    x = torch.cat([part * unit for part, unit in zip(shares(30, 7).split([3, 4], 1), units, strict=True)], 1)
    kind = set_scales(Joint(("l1", "sq-l2"), (3, 4), (1.0, 1.0)), x)
    apart = between(x, x, kind).fill_diagonal_(0)
    assert float(apart.sum() / (30 * 29)) == pytest.approx(2.0)
    assert set_scales("l1", x) == "l1"


def test_a_part_in_which_all_are_alike_counts_for_nothing():
    x = torch.tensor([[5.0, 0.0], [5.0, 2.0]])
    kind = set_scales(Joint(("l1", "sq-l2"), (1, 1), (1.0, 1.0)), x)
    assert kind.scales == (1.0, 4.0)
    assert set_scales(kind, x[:1]).scales == (1.0, 1.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-7), (torch.float32, 2e-6)])
def test_all_ways_agree_with_one_by_one(kind, dtype, tolerance):
    x, y = shares(40, 7, dtype=dtype), shares(11, 7, seed=1, dtype=dtype)
    expected = torch.tensor([[naive.distance(a, b, kind) for b in y.tolist()] for a in x.tolist()])
    far = between(x, y, kind)
    assert far.dtype is dtype
    torch.testing.assert_close(far, expected.to(dtype), atol=tolerance, rtol=0)
    ways = far[:11].diagonal().sqrt() if kind in ("sq-l2", "cosine") else far[:11].diagonal()
    torch.testing.assert_close(lengths(x[:11], y, kind), ways, atol=50 * tolerance, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_do_not_show(kind, monkeypatch):
    x, y, weights = shares(50, 6), shares(9, 6, seed=1), torch.rand(50, 3, dtype=torch.float64)
    whole = between(x, y, kind), sum_distances(x, weights, kind)
    for name in ("BLOCK", "CELLS"):
        monkeypatch.setattr(f"fedtide.clusters.distance.{name}", 24)
    parts = between(x, y, kind), sum_distances(x, weights, kind)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("kind", EXACT)
def test_a_row_is_at_distance_zero_from_itself_in_float32_too(kind):
    x = shares(30, 9, dtype=torch.float32)
    assert between(x, x, kind).diagonal().max() == 0
    assert lengths(x, x, kind).max() == 0


def test_squared_distances_of_what_is_far_from_the_origin_are_not_lost():
    x = 1000 + torch.tensor([[0.0, 0.25], [0.5, 0.0]])
    assert between(x, x, "sq-l2").flatten().tolist() == pytest.approx([0.0, 0.3125, 0.3125, 0.0], abs=1e-6)


def test_a_row_of_zeros_is_at_cosine_distance_one_from_everything():
    x = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
    assert between(x, x, "cosine").flatten().tolist() == pytest.approx([1, 1, 1, 0], abs=1e-6)
    assert unit(x).tolist() == [[0.0, 0.0], pytest.approx([0.6, 0.8])]


# -- centers ----------------------------------------------------------------------------------------------------------


def test_a_center_under_cosine_is_a_unit_vector_and_one_without_direction_is_kept():
    x = torch.tensor([[2.0, 0.0], [0.0, 5.0], [1.0, 0.0], [-1.0, 0.0]])
    found = means(x, torch.tensor([0, 0, 1, 1]), 2, torch.tensor([[1.0, 0.0], [0.0, 1.0]]), "cosine")
    assert found[0].tolist() == pytest.approx([math.sqrt(0.5)] * 2)
    assert found[1].tolist() == [0.0, 1.0]
