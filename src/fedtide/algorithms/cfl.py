"""CFL: one model until it is stationary, then recursive splits where clients pull in opposite directions.

Sattler, Müller, Samek: *Clustered Federated Learning: Model-Agnostic Distributed Multitask Optimization under Privacy
Constraints*, IEEE TNNLS 2020, Algorithms 1 to 3. With default options it follows these with thresholds of ours, because
the paper names none.

| symbol | meaning |
| --- | --- |
| `delta_i` | update of client i, flat over trainable parameters |
| `c` | a cluster of clients |
| `alpha_ij` | cosine of the updates of clients i and j |

    every client of c trains the model of c                                                      delta_i
    c is split if  ||mean_{i in c} delta_i|| < eps1  and  max_{i in c} ||delta_i|| > eps2          Eqs. 29, 30
    into           argmin_{c1 + c2 = c} max_{i in c1, j in c2} alpha_ij                            Eq. 17
    provided that  sqrt((1 - alpha_cross) / 2) > gamma,  alpha_cross the maximum above             Eq. 34
    theta_c += mean_{i in c} delta_i                                                             in every new cluster

When to use it: groups want models that contradict each other, and the server may see single updates. All clients
should participate in nearly every round. A split is never undone.

Choices:
    - paper: single linkage on the cosines is the exact optimum of the bipartition; the released code has complete
      linkage.
    - ours: the two thresholds are absolute in the paper and depend on the size of the network and on local training. By
      default they are a tenth of the cluster's largest mean update so far, and six times that. FedDrift's code of CFL
      has the same rule with one largest update for all clusters, and its `gamma` of 0.1. With plain steps at a
      fixed rate no mean gets there, and there is one model. Thresholds of one's own then lie between the norms that a
      run without splits records (`mean_update`, `largest_update`).
    - ours: in the paper `gamma` bounds the difference of gradients within a group, which cannot be known. 0.1
      requires little; if clients have few samples the noise of their updates alone can split a group. 0.7
      and more requires sides that turn away from each other.
    - released code: there is no split before round `split_after`, nor of two clients or fewer.
    - released code: clients have equal weights; the paper weights them by samples.
    - ours: with partial participation the updates of the last `update_ttl` rounds represent their clients. A client
      without one when its cluster is split is placed when it next participates: by an update at the weights of the
      split, on the side with the closer mean direction (the paper: the closest member).
    - ours: a client that was never asked is placed in the same way before evaluation; one without samples takes the
      model that most clients have.
    - ours: the released code takes places within a cluster for clients, a fault that is not played here.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedtide.algorithms.entry import Entry
from fedtide.clusters.distance import cosines, unit
from fedtide.clusters.rounds import build_clustered, replace_at, reveal_update, serve_clusters, train_clusters
from fedtide.cohorts import Cohort, Everyone
from fedtide.core.base import Algorithm, Answer, Facts, Fleet, Moment, Reply, Shard, Weighted, Weights, mean
from fedtide.core.rng import Rng
from fedtide.core.trees import map_leaves, per_client
from fedtide.core.weights import flat, shaped
from fedtide.fields.types import Count, Fraction, NonNegative, Whole
from fedtide.learn import SGD, LocalTrainer, Server, Task, Training, Weighting

Linkage = Literal["single", "complete"]
"""Similarity of two sets of rows: that of their nearest pair (single) or of their farthest pair (complete)."""


@dataclass(frozen=True)
class Split:
    """A split: the cluster, its weights at that time, and the mean direction of either side (2, P).

    model: the model of the cluster, kept by its first side; other: the model of the second side.
    """

    model: int
    other: int
    weights: Weights
    sides: Tensor


@dataclass(frozen=True)
class Recent:
    """Last updates (n, P) of some clients (n,), their weights (n,), and their rounds (n,)."""

    clients: Tensor
    updates: Tensor
    weight: Tensor
    round: Tensor

    def without(self, mask: Tensor) -> "Recent":
        """Return all entries except those in the mask `mask` (n,)."""
        return map_leaves(lambda leaf: leaf[~mask], self)


@dataclass(frozen=True)
class State:
    """The models, the optimizer's memo of each, and the model of each client.

    model: (registered,) the model of each client, which is its cluster. placed: (registered,) number of splits that
    each client has been placed in. largest: (K,) the largest mean update of each cluster so far. splits: all splits, in
    order. recent: the updates that represent their clients. cohort: the cohort's memo.
    """

    weights: tuple[Weights, ...]
    server: tuple[Any, ...]
    model: Tensor = field(metadata=per_client(new=0))
    placed: Tensor = field(metadata=per_client(new=0))
    largest: Tensor
    splits: tuple[Split, ...]
    recent: Recent
    cohort: Any = None


def cfl(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    eps1: NonNegative | None = None,
    eps2: NonNegative | None = None,
    gamma: Fraction = 0.1,
    split_after: Whole = 20,
    linkage: Linkage = "single",
    update_ttl: Count = 10,
    server: Server = SGD(),
    cohort: Cohort = Everyone(),
    weighting: Weighting = "uniform",
) -> Algorithm[State]:
    """Clustered federated learning by recursive bipartition.

    Sends a cluster's model down and its update up; the server sees every single update.

    Args:
        eps1: norm of the mean update below which a model is stationary; None is a tenth of the largest so far.
        eps2: norm of the largest update above which clients disagree; None is six times eps1.
        gamma: required separation of the two sides: 0 for none, 0.7 for a right angle, 1 for opposite directions.
        split_after: number of initial rounds without a split.
        linkage: "single" (the paper's criterion) or "complete" (the released code).
        update_ttl: rounds that an update represents its client.
    """

    def init(fleet: Fleet, rng: Rng) -> State:
        weights, first = task.init(rng), torch.zeros(len(fleet.clients), dtype=torch.int64)
        none = torch.zeros(0, dtype=torch.int64)
        return State(
            weights=(weights,),
            server=(server.init(weights),),
            model=first,
            placed=first,
            largest=torch.zeros(1, dtype=torch.float64),
            splits=(),
            recent=Recent(none, flat(weights.params)[None][:0], none.double(), none),
            cohort=cohort.init(fleet),
        )

    def place(payload: Weights, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        fitted = local(task, task.loss, payload, shard, moment, rng)
        return Answer({}, {"update": flat(fitted.delta.params)}) if fitted.steps else None

    def round(state: State, fleet: Fleet, rng: Rng) -> tuple[State, Facts]:
        clients, now = cohort.pick(state.cohort, fleet, rng, partial(serve, state)), fleet.moment.round
        before = place_clients(state, fleet, clients)
        cluster = before.model[clients]
        state, reply, facts = train_clusters(
            fleet, before, clients, cluster, server, cohort, reveal=("update", "weight")
        )
        if reply.total is None:
            return state, {"clusters": len(state.weights)}
        state = replace(state, recent=remember_updates(state.recent, reply, now, update_ttl))
        with fleet.clustering:
            norms = torch.stack([norms_of_members(state, k) for k in range(len(state.weights))])
            state = replace(state, largest=torch.maximum(state.largest, norms[:, 0]))
            for k in range(len(state.weights)) if now >= split_after else ():
                if incongruent(state, k, norms[k]):
                    state = split(state, before, k, reply)
        return state, {
            **facts,
            "clusters": len(state.weights),
            "members": torch.bincount(state.model[reply.clients], minlength=len(state.weights)),
            "mean_update": norms[:, 0],
            "largest_update": norms[:, 1],
        }

    def incongruent(state: State, k: int, norms: Tensor) -> bool:
        """Tell whether a cluster's model is stationary while clients disagree (Eqs. 29 and 30)."""
        small = float(state.largest[k]) / 10 if eps1 is None else eps1
        large = 6 * small if eps2 is None else eps2
        return bool(norms[0] < small and norms[1] > large)

    def split(state: State, before: State, k: int, reply: Reply) -> State:
        """Split a cluster in two; unchanged if the sides are too close, or with two clients or fewer.

        The step of the whole cluster is undone: each half steps from the weights in `before`, along the mean update of
        its own clients.
        """
        clients, updates = stack_updates(state, k)
        second = sides_of(updates, linkage, gamma)
        if second is None:
            return state
        state = make_halves(state, before, k, clients, updates, second)
        for half in (k, state.splits[-1].other):
            delta = mean_update_of(state, half, k, reply)
            weights, memo = before.weights[k], before.server[k]
            if delta is not None:
                weights, memo = server.step(weights, memo, delta)
            state = replace(
                state, weights=replace_at(state.weights, half, weights), server=replace_at(state.server, half, memo)
            )
        return state

    def serve(state: State, clients: Tensor) -> tuple[Any, Tensor]:
        # A client with pending splits finds its model by itself, in `adapt`.
        model = torch.where(pending(state), -1, state.model)
        return serve_clusters(state.weights, model, clients, places=state.splits)

    def adapt(payload: Any, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        if not payload.places or not len(shard):
            return None
        k = 0
        for number, split in enumerate(payload.places):
            if split.model != k:
                continue
            fitted = local(task, task.loss, split.weights, shard, moment, rng.at("place", number))
            if fitted.steps and bool(second_side(split, flat(fitted.delta.params)[None])):
                k = split.other
        return Answer({}, memory={"found": torch.tensor(k)})

    train = reveal_update(Training(task, local, weighting), show_update, "update")
    return build_clustered(
        "cfl",
        task,
        local,
        cohort,
        init,
        round,
        serve,
        {"train": train, "place": place},
        adapt,
        reveals=("update", "weight"),
        refuses={"pooled": "each half of a split steps along its own mean"},
        # A client that is placed trains for it.
        compute_cost=lambda question, rows: rows / 3 if question == "loss" else local.samples(rows),
    )


def show_update(delta: Weighted) -> dict[str, Tensor]:
    """Return the values of a client's answer that the server sees by itself."""
    return {"update": flat(delta.value.params), "weight": torch.tensor(delta.weight, dtype=torch.float64)}


def pending(state: State) -> Tensor:
    """Return the mask (registered,) of clients without a recent update when their cluster was split."""
    late = torch.zeros(len(state.model), dtype=torch.bool)
    for number, split in enumerate(state.splits):
        late |= (state.model == split.model) & (state.placed <= number)
    return late


def place_clients(state: State, fleet: Fleet, clients: Tensor) -> State:
    """Place clients on their side of the splits that were made without them."""
    model, placed = state.model.clone(), state.placed.clone()
    for number, split in enumerate(state.splits):
        late = clients[(model[clients] == split.model) & (placed[clients] <= number)]
        if not len(late):
            continue
        reply = fleet.ask("place", late, split.weights, reveal=("update",))
        if not len(reply.clients):
            continue
        placed[reply.clients] = number + 1
        model[reply.clients[second_side(split, reply.rows["update"])]] = split.other
    recent = state.recent.without((model != state.model)[state.recent.clients])
    return replace(state, model=model, placed=placed, recent=recent)


def second_side(split: Split, updates: Tensor) -> Tensor:
    """Return the mask (n,) of updates (n, P) that are closer to the second side of a split; ties: the first."""
    towards = cosines(updates, split.sides)
    return towards[:, 1] > towards[:, 0]


def remember_updates(recent: Recent, reply: Reply, now: int, ttl: int) -> Recent:
    """Add this round's updates to the recent ones, and remove those that are too old."""
    younger = recent.without(torch.isin(recent.clients, reply.clients) | (now - recent.round >= ttl))
    newer = Recent(reply.clients, reply.rows["update"], reply.rows["weight"], torch.full_like(reply.clients, now))
    return map_leaves(lambda *parts: torch.cat(parts), younger, newer)


def norms_of_members(state: State, k: int) -> Tensor:
    """Return the norm of a cluster's mean recent update and the largest norm (2,), float64; zeros without updates."""
    at = (state.model == k)[state.recent.clients]
    updates, weight = state.recent.updates[at], state.recent.weight[at]
    if not len(updates):
        return torch.zeros(2, dtype=torch.float64)
    return torch.stack([weighted_mean(updates, weight).norm(), updates.double().norm(dim=1).max()])


def weighted_mean(updates: Tensor, weight: Tensor) -> Tensor:
    """Return the mean update (P,), in float64; zero if nobody has a weight."""
    return weight @ updates.double() / weight.sum().clamp(min=1e-300)


def stack_updates(state: State, k: int) -> tuple[Tensor, Tensor]:
    """Return the clients of a cluster with a recent update (n,), in order, and their updates (n, P) float64."""
    at = (state.model == k)[state.recent.clients].nonzero().flatten()
    at = at[state.recent.clients[at].argsort()]
    return state.recent.clients[at], state.recent.updates[at].double()


def bipartition(similarity: np.ndarray, linkage: Linkage = "single") -> np.ndarray:
    """Split rows into two halves; return the mask (rows,) of the second. The first row is in the first half.

    Single linkage minimizes the largest similarity between the two halves.

    >>> bipartition(np.array([[1.0, -0.5, 0.9], [-0.5, 1.0, -0.6], [0.9, -0.6, 1.0]])).tolist()
    [False, True, False]
    """
    # SciPy is slow to import, and only this function needs it.
    from scipy.cluster.hierarchy import linkage as tree
    from scipy.cluster.hierarchy import to_tree
    from scipy.spatial.distance import squareform

    root = to_tree(tree(squareform(1.0 - similarity, checks=False), linkage))
    second = np.zeros(len(similarity), dtype=bool)
    second[root.get_right().pre_order()] = True
    return ~second if second[0] else second


def sides_of(updates: Tensor, linkage: Linkage, gamma: float) -> Tensor | None:
    """Return the mask (n,) of updates on the second side (Eq. 17); None if the sides are too close (Eq. 34)."""
    if len(updates) <= 2:
        return None
    similarity = cosines(updates)
    second = torch.from_numpy(bipartition(similarity.numpy(), linkage))
    cross = float(similarity[~second][:, second].max())
    return second if ((1 - cross) / 2) ** 0.5 > gamma else None


def make_halves(state: State, before: State, k: int, clients: Tensor, updates: Tensor, second: Tensor) -> State:
    """Split a cluster in two, each with a copy of the model; the second half comes after all other clusters.

    Args:
        state: the state after the round's training.
        before: the state with the weights that all updates started from.
        k: the cluster.
        clients: its members with a recent update (n,).
        updates: these updates (n, P), float64.
        second: (n,) mask of the second half.
    """
    towards = unit(updates)
    sides = torch.stack([towards[~second].mean(0), towards[second].mean(0)]).to(state.recent.updates.dtype)
    other, model, placed = len(state.weights), state.model.clone(), state.placed.clone()
    model[clients[second]], placed[clients] = other, len(state.splits) + 1
    weights, server = (*state.weights, state.weights[k]), (*state.server, state.server[k])
    largest = torch.cat([state.largest, state.largest[k : k + 1]])
    splits = (*state.splits, Split(k, other, before.weights[k], sides))
    # Updates of members belong to weights that both halves now leave.
    recent = state.recent.without((state.model == k)[state.recent.clients])
    return replace(
        state, weights=weights, server=server, model=model, placed=placed, largest=largest, splits=splits, recent=recent
    )


def mean_update_of(state: State, half: int, k: int, reply: Reply) -> Weights | None:
    """Return the mean update of one half of the former cluster k; running statistics are those of all of it."""
    total, at = reply.total[k], state.model[reply.clients] == half
    if total is None or not at.any():
        return None
    delta: Weights = mean(total)["delta"]
    return Weights(
        shaped(weighted_mean(reply.rows["update"][at], reply.rows["weight"][at]), delta.params), delta.buffers
    )


ENTRY = Entry("cfl", cfl, "weights of a cluster down, update up", "clustered", reveals=("update", "weight"))
