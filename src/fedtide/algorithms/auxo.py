"""Auxo: clusters that split where the updates of their participants fall in two; clients only train.

Liu, Lai, Dai, Akella, Madhyastha, Chowdhury: *Auxo: Efficient Federated Learning via Scalable Client Clustering*,
SoCC 2023. With default options its splits and rewards are a simplified form of the paper's, which is ours. Its cohorts
are called clusters here.

| symbol | meaning |
| --- | --- |
| `c` | cluster, with a model |
| `x_i` | sketch: the last tenth of the flat update of client i, minus the mean of the cluster's participants |
| `R_ic` | reward of client i in cluster c, initially 1 |
| `S_ic` | evidence of client i for either side of c, initially (R_ic / 2, R_ic / 2) |

    client i trains the model of  argmax_c R_ic;  a random one if it never did, or with chance epsilon * decay^t
    after the round of c, with at least `min_participants` participants:
      sides     the first time 2-means of x_i / ||x_i||; later a client without a side gets that of the nearest with one
                S_ic += 1 for its side, -1 for the other
      rewards   with several clusters:  d_i = ||x_i - mean of those known||,  share = known / participants
                R_ic += (5 - 5 d_i / (mean d + std d)) share,  half of it for either side
                where that is negative the evidence for sides is forgotten
      split     at rounds of its own that are given, or when both sides have more than min_fraction N 0.9^(clusters - 1)
                clients, and, from the second split on, neither more than twice as many as the other
                the new cluster begins with a copy of the model;  R_ic + 1 on the side of client i

When to use it: few of many clients participate at a time, groups want different models, and clients only train. A
client that does not participate is not moved, however its data change.

Choices:
    - released code: a cluster knows a client with a reward above 1 there that was labeled or rewarded by it.
    - ours: re-assignment touches participants only. When a cluster splits, members without evidence for a side stay.
    - released code: a split needs evidence of 5 % of all clients. There it also needs a large cohort.
    - ours: a split at a given round needs two sides with clients.
    - ours: evidence for sides is always gathered; the released code stops after the last of its fixed rounds.
    - ours: with several clusters a cluster may split if fewer than two participants are known.
    - ours: exploration decays with rounds; in the released code each time a client is looked at.
    - released code: if only one side has labels, the quarter of the participants nearest to the first gets its label.
    - ours: the cohort selects participants, so clusters train the clients that come to them, weighted by samples.

The safe form pools the updates of clusters that are alike (docs/never-worse.md).
"""

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedtide.algorithms.entry import Entry, Safe
from fedtide.clusters.clusterer import best_kmeans
from fedtide.clusters.distance import unit
from fedtide.clusters.rounds import build_clustered, find_model, reveal_update, serve_clusters, train_clusters
from fedtide.cohorts import Arrivals, Cohort
from fedtide.core.base import Algorithm, Facts, Fleet, Payload, Slot, Weighted, Weights
from fedtide.core.rng import Rng
from fedtide.core.trees import per_client
from fedtide.core.weights import flat
from fedtide.fields.types import Count, Fraction, ModelCount, Spelled, Whole, ingredient
from fedtide.learn import SGD, LocalTrainer, Server, Task, Training, Weighting
from fedtide.transforms import Pooled

REWARD, SHRINKS = 5.0, 0.9
"""Reward of a client at the mean distance; factor on the size required for a split with each cluster."""


@dataclass(frozen=True)
class State:
    """The clusters' models, the optimizer's memo of each, and the evidence about clients.

    reward: (registered, C) R; sides: (registered, C, 2) S; times: (registered, C) how often a client was labeled or
    rewarded; divided: (C,) whether there are sides; rounds: (C,) number of rounds of each cluster;
    cohort: the cohort's memo.
    """

    weights: tuple[Weights, ...]
    server: tuple[Any, ...]
    reward: Tensor = field(metadata=per_client(new=1.0))
    sides: Tensor = field(metadata=per_client(new=0.5))
    times: Tensor = field(metadata=per_client(new=0))
    divided: Tensor
    rounds: Tensor
    cohort: Any = None


@ingredient
class ByEvidence:
    """Split a cluster when both of its sides have enough clients.

    Args:
        min_fraction: fraction of all clients required on either side; times 0.9 for each cluster beyond the first.
    """

    min_fraction: Fraction = 0.05
    kind: Literal["evidence"] = "evidence"

    def splits(self, state: State, c: int, one: int, two: int) -> bool:
        """Tell whether a cluster with these numbers of clients on its two sides splits now."""
        size = self.min_fraction * len(state.reward) * SHRINKS ** (len(state.weights) - 1)
        even = len(state.weights) == 1 or 0.5 < one / two < 2
        return min(one, two) > size and even


@ingredient
class AtRounds:
    """Split a cluster at given rounds.

    Args:
        rounds: rounds of the cluster, counting those of the cluster that it came from; () never splits.
    """

    rounds: tuple[Whole, ...]
    kind: Literal["rounds"] = "rounds"

    def splits(self, state: State, c: int, one: int, two: int) -> bool:
        """Tell whether a cluster splits now; the sizes of its sides do not matter."""
        return int(state.rounds[c]) in self.rounds


Split = Annotated[ByEvidence | AtRounds, Field(discriminator="kind")]


def auxo(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    split: Annotated[Split, Spelled] = ByEvidence(),
    min_participants: Count = 5,
    max_clusters: ModelCount = 8,
    epsilon: Fraction = 0.01,
    decay: Fraction = 0.99,
    update_fraction: Fraction = 0.1,
    server: Server = SGD(),
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "samples",
) -> Algorithm[State]:
    """Clustered federated learning by the updates of participants.

    Sends a cluster's model down and its update up; the server sees the sketch of each update.

    Args:
        split: rule for splits: by evidence, or at given rounds.
        min_participants: participants that a cluster needs for evidence from its round.
        max_clusters: largest number of clusters.
        epsilon: probability that a client trains a random cluster's model.
        decay: factor on that probability in every round.
        update_fraction: fraction of the update that is used as sketch, from its end.
    """

    def init(fleet: Fleet, rng: Rng) -> State:
        weights, n = task.init(rng), len(fleet.clients)
        return State(
            weights=(weights,),
            server=(server.init(weights),),
            reward=torch.ones(n, 1, dtype=torch.float64),
            sides=torch.full((n, 1, 2), 0.5, dtype=torch.float64),
            times=torch.zeros(n, 1, dtype=torch.int64),
            divided=torch.zeros(1, dtype=torch.bool),
            rounds=torch.zeros(1, dtype=torch.int64),
            cohort=cohort.init(fleet),
        )

    def show(delta: Weighted) -> dict[str, Tensor]:
        update = flat(delta.value.params)
        return {"sketch": update[-max(math.ceil(update_fraction * len(update)), 1) :]}

    def choose_models(state: State, clients: Tensor, rng: Rng, now: int) -> Tensor:
        """Return the cluster (clients,) whose model each trains: that of its largest reward, or a random one."""
        count = state.reward.shape[1]
        cluster = state.reward[clients].argmax(1)
        new = state.times[clients].sum(1) == 0
        chance = epsilon * decay ** max(now, 0)
        for place, client in enumerate(clients.tolist() if count > 1 else ()):
            draw = rng.at("explore", client).numpy()
            if draw.random() < chance or new[place]:
                cluster[place] = int(draw.integers(count))
        return cluster

    def round(state: State, fleet: Fleet, rng: Rng) -> tuple[State, Facts]:
        clients = cohort.pick(state.cohort, fleet, rng, partial(serve, state))
        cluster = choose_models(state, clients, rng, fleet.moment.round)
        state, reply, facts = train_clusters(fleet, state, clients, cluster, server, cohort, reveal=("sketch",))
        answered = cluster[torch.isin(clients, reply.clients)]
        for c in range(len(state.weights)):
            at = (answered == c).nonzero().flatten()
            if len(at) < min_participants:
                continue
            with fleet.clustering:
                sketches = reply.rows["sketch"][at].double()
                state = add_evidence(state, c, reply.clients[at], sketches - sketches.mean(0), rng.at("sides", c))
                if len(state.weights) < max_clusters and splits(state, c, split):
                    state = split_cluster(state, c)
        return state, {**facts, "clusters": len(state.weights)}

    def serve(state: State, clients: Tensor) -> tuple[Payload, Slot]:
        # With one cluster all clients count as known.
        is_known = (state.times.sum(1) > 0) | (len(state.weights) == 1)
        return serve_clusters(state.weights, torch.where(is_known, state.reward.argmax(1), -1), clients)

    works, adapt = {"train": reveal_update(Training(task, local, weighting), show, "sketch")}, find_model(task)
    return build_clustered("auxo", task, local, cohort, init, round, serve, works, adapt, reveals=("sketch",))


def side_of(state: State, clients: Tensor, c: int) -> Tensor:
    """Return the side (n,) that clients have evidence for, 0 or 1; 2 for none, or with a negative reward."""
    one, two = state.sides[clients, c].unbind(1)
    return torch.where((one == two) | (state.reward[clients, c] < 0), 2, (two > one).long())


def add_evidence(state: State, c: int, clients: Tensor, x: Tensor, rng: Rng) -> State:
    """Update sides, then rewards, by the centered sketches (n, d) of a cluster's participants (n,)."""
    may = is_known(state, c, clients) | (len(state.weights) == 1)
    at, side = sides_of(state, c, clients, unit(x), may, rng)
    sides, times, divided, rounds = (
        values.clone() for values in (state.sides, state.times, state.divided, state.rounds)
    )
    sides[clients[at], c] += torch.nn.functional.one_hot(side, 2) * 2.0 - 1.0
    times[clients[at], c] += 1
    divided[c] |= len(at) > 0
    rounds[c] += 1
    return reward_clients(replace(state, sides=sides, times=times, divided=divided, rounds=rounds), c, clients, x)


def is_known(state: State, c: int, clients: Tensor) -> Tensor:
    """Return the mask (n,) of clients known to a cluster: labeled or rewarded by it, with a reward above 1."""
    return (state.times[clients, c] > 0) & (state.reward[clients, c] > 1)


def sides_of(state: State, c: int, clients: Tensor, towards: Tensor, may: Tensor, rng: Rng) -> tuple[Tensor, Tensor]:
    """Return the positions of the participants that are given a side, and the side of each.

    Args:
        state: the state before the round's evidence.
        c: the cluster.
        clients: (n,) its participants.
        towards: (n, d) their sketches, centered and of length one.
        may: (n,) mask of clients that may start the sides.
        rng: the key of 2-means.
    """
    nothing = torch.zeros(0, dtype=torch.int64)
    if not state.divided[c]:
        at = may.nonzero().flatten()
        return (at, halves(towards[at], rng)) if len(at) >= 2 else (nothing, nothing)
    side = side_of(state, clients, c)
    with_side, without = (side != 2).nonzero().flatten(), (side == 2).nonzero().flatten()
    if not len(with_side):
        return nothing, nothing
    if (side[with_side] == side[with_side[0]]).all():
        from_first = (towards - towards[with_side[0]]).norm(dim=1)
        at = from_first.argsort(stable=True)[: len(clients) // 4]
        return at, side[with_side[0]].expand(len(at))
    near = torch.cdist(towards[without], towards[with_side]).argmin(1)
    return without, side[with_side[near]]


def halves(x: Tensor, rng: Rng) -> Tensor:
    """Return the clusters (n,) of rows by 2-means; the first row is in cluster 0."""
    best = torch.from_numpy(best_kmeans(x.numpy(), 2, rng.at("start"))[1])
    return (best != best[0]).long()


def reward_clients(state: State, c: int, clients: Tensor, x: Tensor) -> State:
    """Update the rewards of a cluster's participants (n,) by their sketches (n, d); unchanged with one cluster."""
    mask = is_known(state, c, clients)
    if len(state.weights) == 1 or mask.sum() < 2:
        return state
    sides, times, reward = state.sides.clone(), state.times.clone(), state.reward.clone()
    more = rewards(x, mask)
    reward[clients, c] += more
    sides[clients, c] += more[:, None] / 2
    times[clients, c] += 1
    lost = clients[more < 0]
    sides[lost, c], times[lost, c] = (reward[lost, c] / 2)[:, None], 1
    return replace(state, reward=reward, sides=sides, times=times)


def rewards(x: Tensor, mask: Tensor) -> Tensor:
    """Return rewards (n,) by the distances of sketches (n, d) from the mean of the known participants.

    >>> rewards(torch.tensor([[1.0], [3.0]]), torch.tensor([True, True])).tolist()
    [0.0, 0.0]
    """
    far = (x - x[mask].mean(0)).norm(dim=1)
    scale = far.mean() + far.std(correction=0)
    return (REWARD - REWARD * far / scale.clamp(min=1e-12)) * mask.double().mean()


def splits(state: State, c: int, rule: ByEvidence | AtRounds) -> bool:
    """Tell whether a cluster splits now; one with an empty side does not."""
    members = (state.reward.argmax(1) == c).nonzero().flatten()
    one, two = torch.bincount(side_of(state, members, c), minlength=3)[:2].tolist()
    return one > 0 and two > 0 and rule.splits(state, c, one, two)


def split_cluster(state: State, c: int) -> State:
    """Split a cluster in two; the second side comes after all other clusters."""
    first, second = (state.sides[:, c, 0] > state.sides[:, c, 1]), (state.sides[:, c, 1] > state.sides[:, c, 0])
    new = len(state.weights)
    reward, times = (torch.cat([values, values[:, c : c + 1]], 1) for values in (state.reward, state.times))
    for k, side in ((c, first), (new, second)):
        reward[:, k] += side
        times[:, k] *= side
    sides = torch.cat([state.sides, state.sides[:, c : c + 1]], 1)
    sides[:, [c, new]] = (reward[:, [c, new]] / 2)[:, :, None].expand(-1, -1, 2)
    divided, rounds = (torch.cat([values, values[c : c + 1]]) for values in (state.divided, state.rounds))
    divided[[c, new]] = False
    weights, server = ((*values, values[c]) for values in (state.weights, state.server))
    return replace(
        state, weights=weights, server=server, reward=reward, sides=sides, times=times, divided=divided, rounds=rounds
    )


ENTRY = Entry(
    "auxo", auxo, "weights of a cluster down, update up", "clustered", reveals=("sketch",), tells="its cluster",
    helps=("drift",), safe=Safe(transforms=(Pooled(),)),
)  # fmt: skip
