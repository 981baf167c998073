"""Fielding by sums, by hand: six clients of two classes; r is the share of class 1, so that L1 is twice its difference.

Clients 0 to 5 hold r = 0, 1/4, 1/4, 3/4, 3/4, 1.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from fedtide.algorithms.fielding_by_sums import fielding_by_sums
from fedtide.clusters.clusterer import KMeans
from fedtide.clusters.triggers import FixedFraction, Gain
from fedtide.cohorts import Everyone
from fedtide.core.base import Moment, Weights
from fedtide.core.memory import MemoryStore
from fedtide.core.rng import Rng
from fedtide.fleets.engines import Host, LocalEngine
from fedtide.fleets.simulated import SimulatedFleet
from fedtide.learn.local import LocalTrainer
from fedtide.learn.task import Task
from helpers.stages import begun, holding

SHARES = (0, 1, 1, 3, 3, 4)
TASK = Task(lambda: nn.Linear(1, 2, bias=False), dtype=torch.float64, example=torch.zeros(1, 1, dtype=torch.float64))
STILL = LocalTrainer(lr=1e-300)


def people(shares: tuple[int, ...] = SHARES, before: int = 0):
    """Each holds four rows, so many of them of class 1."""
    return holding(
        [(torch.ones(4, 1, dtype=torch.float64), torch.tensor([0] * (4 - n) + [1] * n)) for n in shares],
        classes=2,
        before=before,
    )


def made(trigger, fewest: int = 2, k_max: int = 3):
    return fielding_by_sums(
        TASK, STILL, trigger=trigger, clustering=KMeans(k_max=k_max), cohort=Everyone(), fewest=fewest
    )


def drifted(algorithm, shares: tuple[int, ...]):
    """The state before, that after a round in which clients hold other shares, and what happened."""
    state, memory, fleet = begun(algorithm, people())
    models = tuple(Weights({"weight": torch.full((2, 1), w, dtype=torch.float64)}) for w in (1.0, 4.0))
    state = replace(state, weights=models)
    who = people(shares, before=24)
    fleet = SimulatedFleet(who, LocalEngine(Host(algorithm, who, 0, memory)), reveals=())
    fleet.begin(Moment(0, 2, 0.0))
    after, facts = algorithm.round(state, fleet, Rng(0).at(0, "server"))
    return after, facts, memory


def shares_of(centers: torch.Tensor) -> list[float]:
    return centers[:, 1].tolist()


def values(state) -> list[float]:
    return [float(model.params["weight"][0]) for model in state.weights]


def clusters_of(memory: MemoryStore) -> list[int]:
    return [int(memory.read(client, (99, 0))["cluster"]) for client in range(6)]


def test_the_first_clusters():
    """The mean is r = 1/2; the variance of both shares (2/4 + 4/16) / 6 = 1/8, so the first, of class 0, is split.

    Its halves are at 1/2 - s and 1/2 + s, so the first cell has the clients with little of class 0: 3, 4 and 5, of
    mean 5/6, and the other those of mean 1/6. With two clients a cell at least, three are not split again. Two clusters
    of two cells. Client 0 is 2 (1/4) = 1/2 from the mean of clients 1 and 2, and 2 (5/6) = 5/3 from
    the other center: 1 - 3/10 = 0.7. Client 1 is 2 (1/4 - 1/8) = 1/4 and 2 (5/6 - 1/4) = 7/6 away: 1 - 3/14 = 11/14.
    """
    algorithm = made(FixedFraction())
    state, memory, fleet = begun(algorithm, people())
    assert shares_of(state.centers) == pytest.approx([5 / 6, 1 / 6])
    assert state.members.tolist() == [3, 3]
    assert clusters_of(memory) == [1, 1, 1, 0, 0, 0]
    assert state.silhouette == pytest.approx((0.7 + 2 * 11 / 14) / 3)
    assert algorithm.traits.reveals == ()
    assert not any(query.ask.reveal for query in fleet.queries)


def test_one_cluster_where_the_silhouette_is_too_small():
    algorithm = fielding_by_sums(TASK, STILL, clustering=KMeans(min_silhouette=0.8), fewest=2)
    state, _, _ = begun(algorithm, people())
    assert shares_of(state.centers) == pytest.approx([1 / 2])
    assert state.members.tolist() == [6]


def test_who_drifted_moves_and_centers_follow():
    """Client 2 goes from 1/4 to 1, and to the first cluster: (1 + 3/4 + 3/4 + 1) / 4 = 7/8 and 1/8 are the means.

    Both moved by 2 / 24, less than a third of theta = 2 (7/8 - 1/8).
    """
    state, facts, memory = drifted(made(FixedFraction()), (0, 1, 4, 3, 3, 4))
    assert clusters_of(memory) == [1, 1, 0, 0, 0, 0]
    assert shares_of(state.centers) == pytest.approx([7 / 8, 1 / 8])
    assert (facts["drifted"], facts["moved"], facts["reclustered"]) == (1, 1, 0)
    assert (facts["theta"], facts["way"]) == pytest.approx((1.5, 1 / 12))
    assert values(state) == [1.0, 4.0]


def test_a_cluster_with_too_few_members_is_closed():
    """Clients 1 and 2 go to 1: client 0 alone is near 1/6, and counts with the others: (0 + 1 + 1 + 5/2) / 6 = 3/4.

    The other center stays, and its model is not trained: who would be there has the first one.
    """
    algorithm = made(FixedFraction(tau=math.inf))
    state, facts, memory = drifted(algorithm, (0, 4, 4, 3, 3, 4))
    assert clusters_of(memory) == [1, 0, 0, 0, 0, 0]  # where it would like to be
    assert shares_of(state.centers) == pytest.approx([3 / 4, 1 / 6])
    assert (facts["moved"], facts["reclustered"], facts["way"]) == (2, 0, pytest.approx(1 / 6))
    payload, slot = algorithm.serve(state, torch.arange(6))
    assert (payload.open.tolist(), slot) == ([True, False], None)
    alone = memory.read(0, (99, 0))
    assert (
        int(algorithm.adapt(payload, alone, people().shard(0, Moment(0, 1)), Moment(0, 1), Rng(0)).memory["found"]) == 0
    )


def test_new_clusters_have_the_mean_of_their_members_models():
    """With tau = 0 all are clustered anew. Clients 0 and 1 go to r = 1 and move to client 5, 3 and 4 move to client 2.

    New cells are those of r = 1 and of the rest, 1/12 on average, as the clusters are by then, so models stay.
    """
    state, facts, _ = drifted(made(FixedFraction(tau=0.0)), (4, 4, 0, 1, 0, 4))
    assert shares_of(state.centers) == pytest.approx([1.0, 1 / 12])
    assert (facts["moved"], facts["reclustered"]) == (4, 1)
    assert values(state) == [1.0, 4.0]


def test_gain():
    """Clients hold r = 0, 0, 1/2, 1/2, 1, 1. As far from 5/6 as from 1/6, those at 1/2 take the first cluster.

    Its mean is then 3/4, that of the second 0. From the mean of the others a client at 0 is 0 away, one at 1/2 is
    2 (5/6 - 1/2) = 2/3 and one at 1 is 2 (1 - 2/3) = 2/3: 4/9 on average. Three clusters of equal clients are 0 wide,
    which is less by more than a tenth. Members of those of 1/2 and of 1 had the first model.
    """
    state, facts, _ = drifted(made(Gain(), fewest=1), (0, 0, 2, 2, 4, 4))
    assert (facts["reclustered"], facts["moved"]) == (1, 1)
    assert sorted(shares_of(state.centers)) == pytest.approx([0.0, 0.5, 1.0])
    by_share = dict(zip(shares_of(state.centers), values(state), strict=True))
    assert by_share == {0.0: 4.0, 0.5: 1.0, 1.0: 1.0}
    # Clusters that only change their members are as tight as new ones.
    _, facts, _ = drifted(made(Gain()), (4, 4, 4, 0, 0, 0))
    assert (facts["reclustered"], facts["moved"]) == (0, 6)


def test_models_are_mixed_by_where_members_were():
    """r = 0, 1/4, 1/2 | 1/2, 3/4, 1 are hardly two clusters, so all are in one.

    Clients 2 and 3, as far from both centers, take the first: four had the model 1 and two 4, so it begins at 12 / 6.
    """
    algorithm = fielding_by_sums(
        TASK, STILL, trigger=FixedFraction(tau=0.0), clustering=KMeans(min_silhouette=0.74), cohort=Everyone(),
        fewest=2,
    )  # fmt: skip
    state, facts, _ = drifted(algorithm, (0, 1, 2, 2, 3, 4))
    assert facts["clusters"] == 1
    assert (facts["moved"], values(state)) == (1, [2.0])


def test_small_clusters_share_a_sum_of_updates():
    """Clusters {3, 4, 5} and {0, 1, 2}; clients 0 and 3 take part, so both train in one sum, and step alike.

    A client's update is a gradient step, 0.1 (y - p), with p = 1/2 for both classes at w = 0 and y the shares of its
    labels: 0.1 (1/2, -1/2) of client 0 and 0.1 (-1/4, 1/4) of client 3. Their mean is 0.1 (1/8, -1/8). By itself each
    cluster takes its own, and where three are wanted there are too few.
    """

    class Two(Everyone):
        def pick(self, memo, fleet, rng, serve, among=None, m=None):
            return torch.tensor([0, 3])

    steps = {}
    for fewest in (1, 2, 3):
        local = LocalTrainer(lr=0.1, batch_size=0)
        algorithm = fielding_by_sums(
            TASK, local, clustering=KMeans(k_max=3), cohort=Two(),
            fewest=2, fewest_updates=fewest,
        )  # fmt: skip
        state, _, fleet = begun(algorithm, people())
        zero = Weights({"weight": torch.zeros(2, 1, dtype=torch.float64)})
        fleet.begin(Moment(0, 2, 0.0))
        state, _ = algorithm.round(replace(state, weights=(zero, zero)), fleet, Rng(0).at(0, "server"))
        steps[fewest] = [round(float(model.params["weight"][0]) * 10, 9) for model in state.weights]
    assert steps == {1: [-0.25, 0.5], 2: [0.125, 0.125], 3: [0.0, 0.0]}
