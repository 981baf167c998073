"""Pools: several sources side by side."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedtide.core.errors import FedtideError
from fedtide.data.rows import Rows
from fedtide.data.sources import NPZ, Gaussians, Pools


def two(labels: str, **night) -> Rows:
    day = Gaussians(rows=9, test_rows=3, classes=3, pools=1)
    return Pools(("sun", "moon"), (day, Gaussians(**{"rows": 8, "classes": 4, "pools": 1, **night})), labels).load(
        None, 0
    )


def test_pools_are_the_sources_one_after_the_other():
    rows = two("shared")
    assert (rows.pool_names, rows.pool.tolist()) == (("sun", "moon"), [0] * 12 + [1] * 8)
    assert (len(rows), rows.shape) == (20, (8,))
    assert rows.held_out.tolist() == [False] * 9 + [True] * 3 + [False] * 8


def test_shared_labels_stay_and_disjoint_labels_follow_one_another():
    shared, disjoint = two("shared"), two("disjoint")
    assert (shared.classes, disjoint.classes) == (4, 7)
    assert sorted(set(shared.y[shared.pool == 1].tolist())) == [0, 1, 2, 3]
    assert sorted(set(disjoint.y[disjoint.pool == 1].tolist())) == [3, 4, 5, 6]
    assert torch.equal(shared.y[:12], disjoint.y[:12])


def test_pools_without_test_sets_hold_nothing_out():
    plain = Gaussians(rows=4, pools=1)
    assert Pools(("a", "b"), (plain, plain)).load(None, 0).held_out is None


def test_pools_of_other_shapes_are_one_line():
    with pytest.raises(FedtideError, match=r"rows of different shapes: \(5,\), \(8,\)"):
        two("shared", dims=5)


def test_pools_of_pictures_and_numbers_keep_their_scale(tmp_path):
    # uint8 pictures are read as 0..1; beside float pictures they must not become 0..255.
    for name, x in (("bytes", np.full((2, 1, 3, 3), 255, np.uint8)), ("floats", np.ones((2, 1, 3, 3), np.float32))):
        np.savez(tmp_path / f"{name}.npz", x=x, y=[0, 1])
    rows = Pools(("day", "night"), (NPZ("bytes.npz"), NPZ("floats.npz"))).load(tmp_path, 0)
    assert rows.x.float().mean((1, 2, 3)).tolist() == [1.0] * 4


def test_pools_of_one_source_with_the_same_settings_are_other_rows():
    plain = Gaussians(rows=10, pools=1)
    rows = Pools(("day", "night"), (plain, plain)).load(None, 0)
    assert not torch.equal(rows.x[:10], rows.x[10:])
