"""Fielding by hand: what moves, what is clustered anew, and fair aggregation within clusters."""

from __future__ import annotations

import pytest
import torch

from fedtide.algorithms.fielding import State, fielding, reassign_clients
from fedtide.cohorts import Everyone
from fedtide.core.rng import Rng
from fedtide.learn.local import LocalTrainer
from fedtide.learn.server import SGD
from fedtide.multi.representation import Gradient
from fedtide.parts.clusterer import KCenter
from fedtide.parts.drift import Adaptive
from helpers.quadratics import TASK, after, at

TWO = KCenter(2)


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def drifted(trigger: Adaptive) -> State:
    """Clients at 0, 6 | 7, 9 with centers 3 and 8; then client 0 says 3. Models 1 and 4."""
    reported, cluster = column(3, 6, 7, 9), torch.tensor([0, 0, 1, 1])
    models, centers = (at(1.0), at(4.0)), column(3, 8)
    return State(models, (None, None), reported, cluster, centers, centers, "l1", trigger.start())


def test_those_that_drifted_move_alone():
    """3 is nearest to 3. Client 1 at 6 is nearer to 8 than to 3 and stays all the same. Centers 4.5 and 8."""
    trigger = Adaptive(c=4.0)
    state, facts = reassign_clients(drifted(trigger), torch.tensor([0]), TWO, trigger, "last-event", Rng(0))
    assert (state.cluster.tolist(), state.centers.flatten().tolist()) == ([0, 0, 1, 1], [4.5, 8.0])
    assert (facts["moved"], facts["reclustered"]) == (0, 0)


def test_all_move_in_algorithm_four():
    """Client 1 goes to 8. Centers 3 and (6 + 7 + 9) / 3; nobody is more than 3 apart, which is less than 4."""
    trigger = Adaptive(c=4.0)
    state, facts = reassign_clients(drifted(trigger), torch.arange(4), TWO, trigger, "last-event", Rng(0))
    assert state.cluster.tolist() == [0, 1, 1, 1]
    assert state.centers.flatten().tolist() == pytest.approx([3.0, 22 / 3])
    assert (facts["moved"], facts["reclustered"]) == (1, 0)
    assert [float(model.params["weight"]) for model in state.weights] == [1.0, 4.0]


def test_k_center_clustering_where_a_cluster_is_too_wide():
    """9 - 6 = 3 > 2. Farthest from client 0 (3) is client 3 (9); 6 is as far from both and goes to the first, 7 to 9.

    Client 0 has the model 1 and client 1, which has moved, the model 4: their cluster begins at 2.5, the other at 4.
    Centers are the means 4.5 and 8.
    """
    trigger = Adaptive(c=2.0)
    state, facts = reassign_clients(drifted(trigger), torch.arange(4), TWO, trigger, "last-event", Rng(0))
    assert (facts["reclustered"], state.cluster.tolist()) == (1, [0, 0, 1, 1])
    assert state.centers.flatten().tolist() == state.baseline.flatten().tolist() == [4.5, 8.0]
    assert [float(model.params["weight"]) for model in state.weights] == [2.5, 4.0]


@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_clusters_aggregate_as_q_fedavg_does(rate):
    """Clients 0 and 1 are those of `test_golden.test_qfedavg`, whose step from 1 is 0.65.

    Clients 2 and 3 want 0: F = 0.5, dw = 2 (1 - 0.5) = 1, delta = 0.5, h = 1 + 2 * 0.5 = 2 each; step -1 / 4.
    """
    local = LocalTrainer(lr=0.5, batch_size=0)
    options = {"reporters": "once", "cohort": Everyone(), "server": SGD(rate)}
    algorithm = fielding(TASK, local, Gradient(sketch=None), q=1.0, **options)
    cluster = torch.tensor([0, 0, 1, 1])
    state = State((at(1.0), at(1.0)), (None, None), column(1, 1, 1, 1), cluster, column(1, 1), column(1, 1), "cosine")
    made = after(algorithm, state, targets=[[0], [4, 4, 4], [0], [0]])
    found = [float(model.params["weight"]) for model in made.weights]
    assert found == pytest.approx([1 + 0.65 * rate, 1 - 0.25 * rate], abs=1e-9)
