"""k-FED: the server's round and local k-means by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import fedtide as ft
from fedtide.algorithms.kfed import kfed, local_centers
from fedtide.algorithms.tshot import tshot
from fedtide.core.base import Sum
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from helpers.answering import Answering, begun, identity


def collected(algorithm, centers, counts) -> list[list[float]]:
    rows = {"centers": torch.tensor(centers), "counts": torch.tensor(counts)}
    fleet = Answering({"rows": Sum(1.0, 1.0)}, rows, round=-1)
    state, _ = algorithm.round(begun(algorithm), fleet, Rng(0))
    return state.centers.tolist()


def test_one_round_of_aggregation_by_hand():
    """Five clients send one center each: 1 (9 rows), 2, 3, 6, 10 (1 row each).

    Seeds: 1, of the first client, and 10, the farthest. One round of Lloyd: 1, 2, 3 to the first, 6 and 10 to the
    second, so 2 and 8. A second round would give 6 to the first: 6 is 4 from 2, and 2 from 8, so it stays here. Rows do
    not count. T-shot weighs: (9 + 2 + 3) / 11.
    """
    centers = [[[1.0, 0.0]], [[2.0, 0.0]], [[3.0, 0.0]], [[6.0, 0.0]], [[10.0, 0.0]]]
    counts = [[9.0], [1.0], [1.0], [1.0], [1.0]]
    assert collected(kfed(identity()), centers, counts) == [[2.0, 0.0], [8.0, 0.0]]
    weighed = collected(tshot(identity(), shots=1), centers, counts)
    assert weighed == [[pytest.approx(14 / 11), 0.0], [8.0, 0.0]]


def test_it_stops_after_one_round():
    """Centers 0, 6, 7, 7.6 and 15. Seeds 0 and 15: 0, 6, 7 go to the first, 7.6 and 15 to the second: 13/3 and 11.3.

    In a second round 7.6 would go to the first, 3.27 away, and not to the second, 3.7 away. T-shot goes on: 5.15, 15.
    """
    centers = [[[x, 0.0]] for x in (0.0, 6.0, 7.0, 7.6, 15.0)]
    first, second = collected(kfed(identity()), centers, [[1.0]] * 5)
    assert (first[0], second[0]) == (pytest.approx(13 / 3), pytest.approx(11.3))
    first, second = collected(tshot(identity(), shots=1), centers, [[1.0]] * 5)
    assert (first[0], second[0]) == (pytest.approx(20.6 / 4), pytest.approx(15.0))


def test_all_centers_of_the_first_client_are_seeds():
    """With k' = 2 and K = 3: seeds 0 and 1 of the first client, then 9, not 8.

    0 takes 0, 1 takes 1, and 9 takes 8 and 9.
    """
    centers = [[[0.0, 0.0], [1.0, 0.0]], [[8.0, 0.0], [9.0, 0.0]]]
    found = collected(kfed(identity(), branches=3, client_centers=2), centers, [[1.0, 1.0]] * 2)
    assert found == [[0.0, 0.0], [1.0, 0.0], [8.5, 0.0]]


def test_seeds_are_of_the_first_client_alone():
    """It has one row, at 0; the next client sends 1 and 9. Seeds are 0 and the farthest, 9; 0 takes 0 and 1: 0.5."""
    found = collected(
        kfed(identity(), client_centers=2),
        [[[0.0, 0.0], [0.0, 0.0]], [[1.0, 0.0], [9.0, 0.0]]],
        [[1.0, 0.0], [1.0, 1.0]],
    )
    assert found == [[0.5, 0.0], [9.0, 0.0]]


def test_more_centers_of_a_client_than_branches_are_refused():
    with pytest.raises(FedtideError, match="client_centers: found 3, allowed: 1 to 2"):
        kfed(identity(), client_centers=3)


def test_a_client_with_one_center_sends_its_mean():
    x = np.array([[0.0, 2.0], [4.0, 0.0], [2.0, 1.0]])
    centers, counts = local_centers(x, 1, Rng(0))
    np.testing.assert_allclose(centers, [[2.0, 1.0]])
    assert counts.tolist() == [3.0]


@pytest.mark.parametrize("seed", range(8))
def test_two_heaps_of_a_client_are_its_centers(seed):
    """Whatever the seeds: rows at (0, 1), (0, 3) and (20, 0), (22, 0)."""
    x = np.array([[0.0, 1.0], [0.0, 3.0], [20.0, 0.0], [22.0, 0.0]])
    centers, counts = local_centers(x, 2, Rng(seed))
    np.testing.assert_allclose(centers[centers[:, 0].argsort()], [[0.0, 2.0], [21.0, 0.0]], atol=1e-9)
    assert counts.tolist() == [2.0, 2.0]


def test_fewer_rows_than_centers_are_centers():
    centers, counts = local_centers(np.array([[3.0, 4.0]]), 2, Rng(0))
    assert centers[0].tolist() == [3.0, 4.0]
    assert counts.tolist() == [1.0, 0.0]


def test_a_first_client_that_reports_no_rows_does_not_stop_it():
    """No client with rows has none in all of its centers: this one lies, and the others are clustered."""
    task = ft.Task(lambda: ft.models.MLP((4,)).build((2,), 2))
    algorithm = ft.algorithms.k_fed(task, branches=2, client_centers=1, cohort="everyone")
    people = ft.population(torch.randn(40, 2), torch.arange(40) % 2, client=torch.arange(40) % 4)
    collect, asked = algorithm.works["collect"], []

    def lie(payload, memory, shard, moment, rng):
        answer = collect(payload, memory, shard, moment, rng)
        asked.append(answer)
        return answer if len(asked) > 1 else replace(answer, rows={**answer.rows, "counts": 0 * answer.rows["counts"]})

    result = ft.simulate(replace(algorithm, works={**algorithm.works, "collect": lie}), people, rounds=1)
    assert torch.isfinite(result.state.centers).all()
