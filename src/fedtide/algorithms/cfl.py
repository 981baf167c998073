"""CFL: one model until it is stationary, then two wherever clients pull in opposite directions, and so on.

Sattler, Müller, Samek: *Clustered Federated Learning: Model-Agnostic Distributed Multitask Optimization under Privacy
Constraints*, IEEE TNNLS 2020, Algorithms 1 to 3.

| symbol | meaning |
| --- | --- |
| `delta_i` | update of client i, flat over trainable parameters |
| `c` | a cluster, its clients |
| `alpha_ij` | cosine of the updates of clients i and j |

    every client of c trains the model of c                                                      delta_i
    c is split if  ||mean_{i in c} delta_i|| < eps1  and  max_{i in c} ||delta_i|| > eps2          Eqs. 29, 30
    into           argmin_{c1 + c2 = c} max_{i in c1, j in c2} alpha_ij                            Eq. 17
    provided that  sqrt((1 - alpha_cross) / 2) > gamma,  alpha_cross the maximum above             Eq. 34
    theta_c += mean_{i in c} delta_i                                                             in every new cluster

When to use it: groups want models that contradict each other, all clients can take part in nearly every round, and the
server may see single updates. A split is never undone.

Choices:
    Single linkage on the cosines is the exact optimum of the bipartition; the released code has complete linkage. The
    two thresholds are absolute in the paper and follow the size of a network and of local training; by default they are
    a tenth of the largest mean update that the cluster has had, and six times that. `gamma` in the paper bounds what
    gradients differ by within a group, which cannot be known: 0.1, as in other code, asks for little, and where clients
    have few rows the noise of their updates alone can split a group; 0.7 and more asks for sides that turn away from
    each other. No split before round `split_after`, nor of two clients or fewer, as in the released code. Clients weigh
    alike, as in that code; the paper weighs them by rows. With partial participation the updates of the last
    `update_ttl` rounds stand for their clients, and a client that has none when its cluster is split is placed when it
    next takes part: by an update at the weights of the split, on the side whose mean direction it is closer to (the
    paper: closest member). So is a client that was never asked, before it is judged; one without rows takes the model
    that most clients have. The code as it was released is `cfl-released`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedtide.cohorts import Cohort, Everyone
from fedtide.core.config_types import Count, Fraction, NonNegative, Whole
from fedtide.core.rng import Rng
from fedtide.core.sums import mean
from fedtide.core.types import (
    Algorithm,
    Answer,
    Facts,
    Fleet,
    Memory,
    Moment,
    Payload,
    Reply,
    Shard,
    Slot,
    Weighted,
    Weights,
    Work,
)
from fedtide.core.weights import flat, shaped
from fedtide.learn.local import LocalTrainer
from fedtide.learn.participation import with_cohort
from fedtide.learn.server import SGD, Server
from fedtide.learn.task import Task
from fedtide.multi.clusters import by_given_model, given, put, train_clusters
from fedtide.parts.cluster import Linkage, cosines, halves
from fedtide.parts.weighting import Weighting, client_weight


@dataclass(frozen=True)
class Split:
    """A split that was made: where, at which weights, and the mean direction of either side (2, P).

    model: whose cluster was split, and which one of its sides keeps; other: that of the second side.
    """

    model: int
    other: int
    weights: Weights
    sides: Tensor


@dataclass(frozen=True)
class Recent:
    """The last updates of some clients (n,), (n, P), how much each counts for (n,), and the round it is of (n,)."""

    clients: Tensor
    updates: Tensor
    weight: Tensor
    round: Tensor

    def without(self, some: Tensor) -> Recent:
        """The rest, where `some` (n,) bool are left out."""
        return Recent(self.clients[~some], self.updates[~some], self.weight[~some], self.round[~some])


@dataclass(frozen=True)
class State:
    """The models, the optimizer's memo of each, and the model of each client.

    model: (registered,) the model of each client, which is its cluster. placed: (registered,) how many of the splits it
    has been through. largest: (K,) the largest mean update of each cluster so far. splits: in their order. recent: the
    updates that stand for their clients. cohort: its memo.
    """

    weights: tuple[Weights, ...]
    server: tuple[Any, ...]
    model: Tensor
    placed: Tensor
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
) -> Algorithm:
    """Clustered federated learning by recursive bipartition.

    Sends a cluster's model down and its update up; the server sees every update by itself.

    Args:
        task: model and loss.
        local: local training.
        eps1: below it a mean update says that the model has settled; None follows the largest so far.
        eps2: above it the largest update says that some client is not served; None is six times eps1.
        gamma: how far apart the two sides must be: 0 asks for nothing, 0.7 for a right angle, 1 for opposite ways.
        split_after: rounds without a split.
        linkage: "single" (the paper's criterion) or "complete" (the released code).
        update_ttl: how many rounds an update stands for its client.
        server: what the server does with a cluster's mean update.
        cohort: who is asked.
        weighting: "uniform" counts all clients alike, "samples" weighs them by their rows.
    """

    def init(fleet: Fleet, rng: Rng) -> State:
        weights, first = task.init(rng), torch.zeros(len(fleet.clients), dtype=torch.int64)
        none = torch.zeros(0, dtype=torch.int64)
        recent = Recent(none, flat(weights.params)[None][:0], none.double(), none)
        largest = torch.zeros(1, dtype=torch.float64)
        return State((weights,), (server.init(weights),), first, first, largest, (), recent, cohort.init(fleet))

    def place(payload: Weights, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        fitted = local(task, task.loss, payload, shard, moment, rng)
        return Answer({}, {"update": flat(fitted.delta.params)}) if fitted.steps else None

    def round(state: State, fleet: Fleet, rng: Rng) -> tuple[State, Facts]:
        clients, now = cohort.pick(state.cohort, fleet, rng, partial(serve, state)), fleet.moment.round
        before = all_placed(state, fleet, clients)
        cluster = before.model[clients]
        state, reply, facts = train_clusters(
            fleet, before, clients, cluster, server, cohort, reveal=("update", "weight")
        )
        if reply.total is None:
            return state, {"clusters": len(state.weights)}
        state = replace(state, recent=remembered(state.recent, reply, now, update_ttl))
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
        """Whether a cluster's model has settled and still does not serve every client (Eqs. 29 and 30)."""
        small = float(state.largest[k]) / 10 if eps1 is None else eps1
        large = 6 * small if eps2 is None else eps2
        return bool(norms[0] < small and norms[1] > large)

    def split(state: State, before: State, k: int, reply: Reply) -> State:
        """The state with a cluster in two; as it was where the sides are too close, or there are two clients or fewer.

        Each half leaves the weights of `before` along the mean update of its own clients.
        """
        clients, updates = updates_of(state, k)
        second = sides_of(updates, linkage, gamma)
        if second is None:
            return state
        state = with_halves(state, before, k, clients, updates, second)
        for half in (k, state.splits[-1].other):
            delta = mean_update_of(state, half, k, reply)
            weights, memo = before.weights[k], before.server[k]
            if delta is not None:
                weights, memo = server.step(weights, memo, delta)
            state = replace(state, weights=put(state.weights, half, weights), server=put(state.server, half, memo))
        return state

    def serve(state: State, clients: Tensor) -> tuple[Payload, Slot]:
        # A client that has a split still to go through finds its model by itself, in `adapt`.
        usual = int(torch.bincount(state.model, minlength=len(state.weights)).argmax())
        own = torch.where(pending(state), -1, state.model)
        return given(state.weights, own, clients, torch.arange(len(state.weights)), usual, splits=state.splits)

    def adapt(payload: Any, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        if not payload.get("splits") or not len(shard):
            return None
        k = 0
        for number, made in enumerate(payload["splits"]):
            if made.model != k:
                continue
            fitted = local(task, task.loss, made.weights, shard, moment, rng.at("place", number))
            if fitted.steps and bool(second_side(made, flat(fitted.delta.params)[None])):
                k = made.other
        return Answer({}, memory={"found": torch.tensor(k)})

    works = {"train": sent_update(task, local, weighting), "place": place}
    made = Algorithm(
        "cfl",
        init,
        works,
        round,
        serve,
        by_given_model(task),
        adapt=adapt,
        reveals=("update", "weight"),
        effort=lambda question, rows: local.samples(rows),  # a client that is placed trains for it
    )
    return with_cohort(made, cohort, task, local)


def sent_update(task: Task, local: LocalTrainer, weighting: Weighting) -> Work:
    """Local training whose update the server sums, and sees by itself."""

    def train(payload: Weights, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        fitted = local(task, task.loss, payload, shard, moment, rng)
        if not fitted.steps:
            return None
        weight = client_weight(shard, weighting)
        total = {"delta": Weighted(fitted.delta, weight), "loss": Weighted(fitted.loss, len(shard))}
        rows = {"update": flat(fitted.delta.params), "weight": torch.tensor(weight, dtype=torch.float64)}
        return Answer(total, rows, repeated=("update",))

    return train


def pending(state: State) -> Tensor:
    """Which clients (registered,) had no recent update when their cluster was split."""
    late = torch.zeros(len(state.model), dtype=torch.bool)
    for number, made in enumerate(state.splits):
        late |= (state.model == made.model) & (state.placed <= number)
    return late


def all_placed(state: State, fleet: Fleet, clients: Tensor) -> State:
    """The state after some clients have been put on their side of the splits that were made without them."""
    model, placed = state.model.clone(), state.placed.clone()
    for number, made in enumerate(state.splits):
        late = clients[(model[clients] == made.model) & (placed[clients] <= number)]
        if not len(late):
            continue
        reply = fleet.ask("place", late, made.weights, reveal=("update",))
        if not len(reply.clients):
            continue
        placed[reply.clients] = number + 1
        model[reply.clients[second_side(made, reply.rows["update"])]] = made.other
    recent = state.recent.without((model != state.model)[state.recent.clients])
    return replace(state, model=model, placed=placed, recent=recent)


def second_side(made: Split, updates: Tensor) -> Tensor:
    """Which updates (n, P) point more to the second side of a split (n,); ties: the first."""
    towards = cosines(updates, made.sides)
    return towards[:, 1] > towards[:, 0]


def remembered(recent: Recent, reply: Reply, now: int, ttl: int) -> Recent:
    """The recent updates with those of this round, without what is too old."""
    kept = recent.without(torch.isin(recent.clients, reply.clients) | (now - recent.round >= ttl))
    return Recent(
        torch.cat([kept.clients, reply.clients]),
        torch.cat([kept.updates, reply.rows["update"]]),
        torch.cat([kept.weight, reply.rows["weight"]]),
        torch.cat([kept.round, torch.full_like(reply.clients, now)]),
    )


def norms_of_members(state: State, k: int) -> Tensor:
    """`norms_of` the recent updates of a cluster."""
    at = (state.model == k)[state.recent.clients]
    return norms_of(state.recent.updates[at], state.recent.weight[at])


def norms_of(updates: Tensor, weight: Tensor) -> Tensor:
    """The norm of the mean update (n, P) and the largest norm (2,), float64; zeros without updates."""
    if not len(updates):
        return torch.zeros(2, dtype=torch.float64)
    return torch.stack([weighted(updates, weight).norm(), updates.double().norm(dim=1).max()])


def weighted(updates: Tensor, weight: Tensor) -> Tensor:
    """The mean update (P,), in float64."""
    return weight @ updates.double() / weight.sum()


def updates_of(state: State, k: int) -> tuple[Tensor, Tensor]:
    """The clients of a cluster that have a recent update (n,), in order, and these (n, P) float64."""
    at = (state.model == k)[state.recent.clients].nonzero().flatten()
    at = at[state.recent.clients[at].argsort()]
    return state.recent.clients[at], state.recent.updates[at].double()


def sides_of(updates: Tensor, linkage: Linkage, gamma: float) -> Tensor | None:
    """Which updates (n,) bool are of the second side (Eq. 17); None without two sides that are apart (Eq. 34)."""
    if len(updates) <= 2:
        return None
    similarity = cosines(updates)
    second = torch.from_numpy(halves(similarity.numpy(), linkage))
    cross = float(similarity[~second][:, second].max())
    return second if ((1 - cross) / 2) ** 0.5 > gamma else None


def with_halves(state: State, before: State, k: int, clients: Tensor, updates: Tensor, second: Tensor) -> State:
    """The state with a cluster in two, its second half behind all others, a copy of the model for each.

    Args:
        state: after the round's training.
        before: with the weights that all updates are from.
        k: the cluster.
        clients: its members with a recent update (n,).
        updates: these (n, P), float64.
        second: (n,) bool, who is of the second half.
    """
    unit = updates / updates.norm(dim=1, keepdim=True).clamp(min=1e-12)
    sides = torch.stack([unit[~second].mean(0), unit[second].mean(0)]).to(state.recent.updates.dtype)
    other, model, placed = len(state.weights), state.model.clone(), state.placed.clone()
    model[clients[second]], placed[clients] = other, len(state.splits) + 1
    return State(
        (*state.weights, state.weights[k]),
        (*state.server, state.server[k]),
        model,
        placed,
        torch.cat([state.largest, state.largest[k : k + 1]]),
        (*state.splits, Split(k, other, before.weights[k], sides)),
        # What members sent was about weights that both halves now leave.
        state.recent.without((state.model == k)[state.recent.clients]),
        state.cohort,
    )


def mean_update_of(state: State, half: int, k: int, reply: Reply) -> Weights | None:
    """The mean update of the clients of one half of what was cluster k; running statistics are those of all of it."""
    total, at = reply.total[k], state.model[reply.clients] == half
    if total is None or not at.any():
        return None
    delta: Weights = mean(total)["delta"]
    return Weights(shaped(weighted(reply.rows["update"][at], reply.rows["weight"][at]), delta.params), delta.buffers)
