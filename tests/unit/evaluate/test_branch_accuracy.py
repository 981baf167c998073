"""Whether rows are at the branch of their true group, as branches and groups match best: by hand."""

import math
from itertools import permutations

import numpy as np
import pytest

from fedtide.evaluate.metrics import branch_accuracy, matched


@pytest.mark.parametrize(
    ("table", "share", "own"),
    [
        ([[10, 0], [0, 10]], 1.0, (0, 1)),
        ([[0, 10], [10, 0]], 1.0, (1, 0)),
        ([[1, 9], [8, 2]], 17 / 20, (1, 0)),
        ([[5, 5], [5, 5]], 0.5, (0, 1)),
        ([[9, 1], [6, 4]], 13 / 20, (0, 1)),  # both like branch 1 best, and only one can have it
        ([[10, 0], [10, 0]], 0.5, (0, 1)),
        ([[3], [7]], 0.7, (1, 0)),  # one branch: it is the larger group's
        ([[0, 4, 1], [5, 0, 0]], 9 / 10, (1, 0)),  # a third branch is nobody's
        ([[4, 0], [0, 4], [1, 1]], 8 / 10, (0, 1, 2)),  # a third group has none
        ([[0, 0, 7], [0, 6, 0], [5, 0, 0]], 1.0, (2, 1, 0)),
    ],
)
def test_by_hand(table, share, own):
    assert branch_accuracy(table) == pytest.approx(share, abs=1e-15)
    assert matched(np.array(table, dtype=float)) == own


def test_nobody_is_nowhere():
    assert math.isnan(branch_accuracy([[0, 0], [0, 0]]))


@pytest.mark.parametrize("shape", [(2, 2), (2, 3), (3, 2), (4, 4)])
def test_names_of_branches_and_groups_do_not_matter(shape):
    draw = np.random.default_rng(0)
    for _ in range(10):
        table = draw.integers(0, 20, shape)
        share = branch_accuracy(table)
        assert share == pytest.approx(branch_accuracy(table[:, draw.permutation(shape[1])]), abs=1e-12)
        assert share == pytest.approx(branch_accuracy(table[draw.permutation(shape[0])]), abs=1e-12)
        assert 1 / max(shape) - 1e-12 <= share <= 1.0
        wide = max(shape)
        square = np.zeros((wide, wide))
        square[: shape[0], : shape[1]] = table
        best = max(sum(square[k, order[k]] for k in range(wide)) for order in permutations(range(wide)))
        assert share == pytest.approx(best / table.sum(), abs=1e-12)
