"""Fielding by hand: what moves, what is clustered anew, and fair aggregation within clusters."""

import math

import pytest
import torch

from fedtide.algorithms.fielding import State, fielding, handle_drift
from fedtide.clusters.clusterer import KCenter
from fedtide.clusters.representation import Gradient
from fedtide.clusters.triggers import Adaptive, FixedFraction
from fedtide.cohorts import Everyone
from fedtide.core.rng import Rng
from fedtide.learn.local import LocalTrainer
from fedtide.learn.server import SGD
from helpers.quadratics import TASK, after, at

TWO = KCenter(2)


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def drifted(trigger: Adaptive) -> State:
    """Clients at 0, 6 | 7, 9 with centers 3 and 8; then client 0 says 3. Models 1 and 4."""
    return state_of(trigger, column(3, 6, 7, 9), [0, 0, 1, 1], column(3, 8))


def state_of(trigger, reported: torch.Tensor, cluster: list[int], centers: torch.Tensor) -> State:
    models = (at(1.0), at(4.0))
    return State(models, (None, None), reported, torch.tensor(cluster), centers, centers, "l1", trigger.start())


def test_those_that_drifted_move_alone():
    """3 is nearest to 3. Client 1 at 6 is nearer to 8 than to 3 and stays all the same. Centers 4.5 and 8."""
    trigger = Adaptive(c=4.0)
    state, facts = handle_drift(drifted(trigger), torch.tensor([0]), TWO, trigger, "last-event", Rng(0))
    assert (state.cluster.tolist(), state.centers.flatten().tolist()) == ([0, 0, 1, 1], [4.5, 8.0])
    assert (facts["moved"], facts["reclustered"]) == (0, 0)


def test_all_move_in_algorithm_four():
    """Centers are recomputed after each move: client 0 at 3 stays, and the center 3 becomes (3 + 6) / 2.

    So client 1 at 6 stays as well, because 4.5 is nearer than 8, although 3 was farther. Nobody in a cluster is more
    than 3 apart, which is less than 4.
    """
    trigger = Adaptive(c=4.0)
    state, facts = handle_drift(drifted(trigger), torch.arange(4), TWO, trigger, "last-event", Rng(0))
    assert (state.cluster.tolist(), state.centers.flatten().tolist()) == ([0, 0, 1, 1], [4.5, 8.0])
    assert (facts["moved"], facts["reclustered"]) == (0, 0)
    assert [float(model.params["weight"]) for model in state.weights] == [1.0, 4.0]


def test_a_move_changes_the_centers_that_the_next_client_compares():
    """Reports 0, 4 | 4.5, 5.2, 10 with centers 2 and 6; clients 2 and 3 drifted, to 3.8 and 5.2.

    Client 2 at 3.8 is nearer to 2 than to 6, and leaves: the centers are (0 + 4 + 3.8) / 3 = 2.6 and (5.2 + 10) / 2 =
    7.6. Client 3 at 5.2 is 2.6 from the first and 2.4 from the second: it stays. If client 4 is at 12, the second
    center is 8.6, which is 3.4 away, so client 3 leaves, too: the centers are 13 / 4 and 12. With fixed centers it
    would stay, because 6 is nearer than 2.
    """
    for last, cluster, centers in ((10.0, [0, 0, 0, 1, 1], [2.6, 7.6]), (12.0, [0, 0, 0, 0, 1], [3.25, 12.0])):
        trigger = FixedFraction(tau=math.inf)
        state = state_of(trigger, column(0, 4, 3.8, 5.2, last), [0, 0, 1, 1, 1], column(2, 6))
        state, facts = handle_drift(state, torch.tensor([2, 3]), TWO, trigger, "last-event", Rng(0))
        assert state.cluster.tolist() == cluster
        assert state.centers.flatten().tolist() == pytest.approx(centers)
        assert facts["way"] == pytest.approx(max(centers[0] - 2, centers[1] - 6))


def test_clients_that_swap_do_not_swap_centers():
    """Reports 10 | 0 with centers 0 and 10, both drifted: client 0 joins 1, whose center becomes (0 + 10) / 2 = 5.

    Its own cluster is empty and nobody's nearest, so client 1 at 0 stays. With fixed centers they would change places.
    """
    trigger = FixedFraction(tau=math.inf)
    state = state_of(trigger, column(10, 0), [0, 1], column(0, 10))
    state, facts = handle_drift(state, torch.tensor([0, 1]), TWO, trigger, "last-event", Rng(0))
    assert (state.cluster.tolist(), state.centers.flatten().tolist(), facts["moved"]) == ([1, 1], [0.0, 5.0], 1)


def test_k_center_clustering_where_a_cluster_is_too_wide():
    """6 - 3 = 3 > 2. Farthest from client 0 (3) is client 3 (9); 6 is as far from both and goes to the first, 7 to 9.

    These are the clusters as they were: models 1 and 4, centers 4.5 and 8.
    """
    trigger = Adaptive(c=2.0)
    state, facts = handle_drift(drifted(trigger), torch.arange(4), TWO, trigger, "last-event", Rng(0))
    assert (facts["reclustered"], state.cluster.tolist()) == (1, [0, 0, 1, 1])
    assert state.centers.flatten().tolist() == state.baseline.flatten().tolist() == [4.5, 8.0]
    assert [float(model.params["weight"]) for model in state.weights] == [1.0, 4.0]


@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_clusters_aggregate_as_q_fedavg_does(rate):
    """Clients 0 and 1 are those of `test_golden.test_qfedavg`, whose step from 1 is 0.65.

    Clients 2 and 3 want 0: F = 0.5, dw = 2 (1 - 0.5) = 1, delta = 0.5, h = 1 + 2 * 0.5 = 2 each; step -1 / 4.
    """
    local = LocalTrainer(lr=0.5, batch_size=0)
    options = {"reporters": "once", "cohort": Everyone(), "server": SGD(rate)}
    algorithm = fielding(TASK, local, Gradient(sketch=1_000_000), q=1.0, **options)
    cluster = torch.tensor([0, 0, 1, 1])
    state = State((at(1.0), at(1.0)), (None, None), column(1, 1, 1, 1), cluster, column(1, 1), column(1, 1), "cosine")
    made = after(algorithm, state, targets=[[0], [4, 4, 4], [0], [0]])
    found = [float(model.params["weight"]) for model in made.weights]
    assert found == pytest.approx([1 + 0.65 * rate, 1 - 0.25 * rate], abs=1e-9)
