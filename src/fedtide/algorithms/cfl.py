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
    two thresholds are absolute in the paper and follow the size of a network; by default they are a tenth of the
    largest mean update that the cluster has had, and six times that. No split before round `after`, nor of two clients
    or fewer, as in the released code. With partial participation the updates of the last `recent` rounds stand for
    their clients, and whoever has none when its cluster is split is placed when it next takes part: by an update at the
    weights of the split, on the side whose mean direction it is closer to. So is a client that was never asked, before
    it is judged; one without rows takes the model that most clients have. `released` splits as the published code does:
    the two halves are positions within the cluster, taken for client ids. It is right for the first split only; after
    it clients are in two clusters and get the mean updates of both, or in none and stand still. It splits a cluster
    only when all of it was heard of, and never places anybody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

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
    Prediction,
    Reply,
    Shard,
    Slot,
    Weighted,
    Weights,
)
from fedtide.core.values import Count, Flag, Fraction, NonNegative, Whole
from fedtide.core.weights import flat, shaped
from fedtide.learn.local import LocalSolver
from fedtide.learn.server import SGD, Server
from fedtide.learn.several import by_own_model
from fedtide.learn.task import Task
from fedtide.parts.cluster import Linkage, cosines, evenness, halves
from fedtide.parts.cohort import Cohort, Everyone
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
class Heard:
    """The last updates of some clients (n,), (n, P), how much each counts for (n,), and the round it is of (n,)."""

    clients: Tensor
    updates: Tensor
    weight: Tensor
    round: Tensor


@dataclass(frozen=True)
class State:
    """The models, the optimiser's memo of each, and who has which.

    model: (registered,) the model of each client. placed: (registered,) how many of the splits it has been through.
    belongs: (C, registered) which clusters it is in: exactly one, and that of its model, unless `released`. largest:
    (C,) the largest mean update so far.
    """

    weights: tuple[Weights, ...]
    server: tuple[Any, ...]
    model: Tensor
    placed: Tensor
    belongs: Tensor
    largest: Tensor
    splits: tuple[Split, ...]
    heard: Heard


def cfl(
    task: Task,
    local: LocalSolver = LocalSolver(),
    stationary: NonNegative | None = None,
    apart: NonNegative | None = None,
    gamma: Fraction = 0.1,
    after: Whole = 20,
    linkage: Linkage = "single",
    recent: Count = 10,
    released: Flag = False,
    server: Server = SGD(),
    cohort: Cohort = Everyone(),
    weighting: Weighting = "uniform",
) -> Algorithm:
    """Clustered federated learning by recursive bipartition.

    Sends a cluster's model down and its update up; the server sees every update by itself.

    Args:
        task: model and loss.
        local: local training.
        stationary: eps1, below which a mean update says that the model has settled; None follows the largest so far.
        apart: eps2, above which the largest update says that somebody is not served; None is six times eps1.
        gamma: how far apart the two sides must be: 0 asks for nothing, 1 for opposite directions.
        after: rounds without a split.
        linkage: "single" (the paper's criterion) or "complete" (the released code).
        recent: how many rounds an update stands for its client.
        released: with the fault of the published code, to understand published comparisons.
        server: what the server does with a cluster's mean update.
        cohort: who is asked.
        weighting: "uniform" counts all clients alike, "samples" weighs them by their rows.
    """

    def init(fleet: Fleet, rng: Rng) -> State:
        weights, clients = task.init(rng), len(fleet.clients)
        nobody = torch.zeros(clients, dtype=torch.int64)
        none = torch.zeros(0, dtype=torch.int64)
        heard = Heard(none, flat(weights.params)[None][:0], none.double(), none)
        belongs, largest = torch.ones(1, clients, dtype=torch.bool), torch.zeros(1, dtype=torch.float64)
        return State((weights,), (server.init(weights),), nobody, nobody, belongs, largest, (), heard)

    def train(payload: Weights, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        fitted = local(task, task.loss, payload, shard, moment, rng)
        if not fitted.steps:
            return None
        weight = client_weight(shard, weighting)
        total = {"delta": Weighted(fitted.delta, weight), "loss": Weighted(fitted.loss, len(shard))}
        rows = {"update": flat(fitted.delta.params), "weight": torch.tensor(weight, dtype=torch.float64)}
        return Answer(total, rows)

    def place(payload: Weights, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        fitted = local(task, task.loss, payload, shard, moment, rng)
        return Answer({}, {"update": flat(fitted.delta.params)}) if fitted.steps else None

    def round(state: State, fleet: Fleet, rng: Rng) -> tuple[State, Facts]:
        clients, now = cohort(rng, fleet), fleet.moment.round
        if not released:
            state = all_placed(state, fleet, clients)
        slot = state.model[clients]
        reply = fleet.ask("train", clients, list(state.weights), slot=slot, reveal=("update", "weight"))
        if reply.total is None:
            return state, {"clusters": len(state.belongs)}
        state = replace(state, heard=joined(state.heard, reply, now, recent))
        norms = torch.stack([norms_of(state.heard, members) for members in state.belongs])
        state = replace(state, largest=torch.maximum(state.largest, norms[:, 0]))
        made = state
        for c in range(len(state.belongs)) if now >= after else ():
            eps1 = float(state.largest[c]) / 10 if stationary is None else stationary
            eps2 = 6 * eps1 if apart is None else apart
            if norms[c, 0] < eps1 and norms[c, 1] > eps2 and int(state.belongs[c].sum()) > 2:
                made = split(made, c, linkage, gamma, released)
        if released:
            made = regrouped(state, made)
        weights, memos = updated(server, state, made, reply)
        trained = made.belongs[:, reply.clients].sum(1)
        losses = [total["loss"] for total in reply.total if total is not None]
        facts: Facts = {
            "loss": sum(loss.value for loss in losses) / sum(loss.weight for loss in losses),
            "clusters": len(made.belongs),
            "members": trained,
            "evenness": evenness(trained.numpy()),
            "mean_update": norms[:, 0],
            "largest_update": norms[:, 1],
        }
        return replace(made, weights=weights, server=memos), facts

    def serve(state: State, clients: Tensor) -> tuple[Payload, Slot]:
        usual = torch.bincount(state.model, minlength=len(state.weights)).argmax()
        served: list[Payload] = [
            {"models": (weights,), "numbers": torch.tensor([k]), "splits": (), "usual": 0}
            for k, weights in enumerate(state.weights)
        ]
        # Whoever has a split still to go through finds its model by itself, in `adapt`.
        everything = {"models": state.weights, "numbers": torch.arange(len(served)), "splits": state.splits}
        slot, known = torch.full_like(clients, len(served)), clients < len(state.model)
        slot[known] = torch.where(pending(state)[clients[known]], len(served), state.model[clients[known]])
        return [*served, {**everything, "usual": usual}], slot

    def adapt(payload: Any, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        if not payload["splits"] or not len(shard):
            return None
        k = 0
        for number, made in enumerate(payload["splits"]):
            if made.model != k:
                continue
            fitted = local(task, task.loss, made.weights, shard, moment, rng.at("place", number))
            if fitted.steps and bool(second_side(made, flat(fitted.delta.params)[None])):
                k = made.other
        return Answer({}, memory={"model": torch.tensor(k)})

    choose = by_own_model(task)

    def predict(payload: Any, memories: Sequence[Memory], x: Tensor, owner: Tensor) -> Prediction:
        found = choose(payload, memories, x, owner)
        return Prediction(found.logp, payload["numbers"][found.choice])

    works = {"train": train, "place": place}
    return Algorithm("cfl", init, works, round, serve, predict, adapt=adapt, reveals=("update", "weight"))


def pending(state: State) -> Tensor:
    """Who (registered,) was not heard of when its cluster was split."""
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
    heard = without(state.heard, (model != state.model)[state.heard.clients])
    return replace(state, model=model, placed=placed, belongs=one_each(model, len(state.weights)), heard=heard)


def second_side(made: Split, updates: Tensor) -> Tensor:
    """Which updates (n, P) point more to the second side of a split (n,); the first of equals."""
    towards = cosines(torch.cat([made.sides, updates]))[2:, :2]
    return towards[:, 1] > towards[:, 0]


def joined(heard: Heard, reply: Reply, now: int, recent: int) -> Heard:
    """What was heard with the answers of this round, without what is too old."""
    kept = without(heard, torch.isin(heard.clients, reply.clients) | (now - heard.round >= recent))
    return Heard(
        torch.cat([kept.clients, reply.clients]),
        torch.cat([kept.updates, reply.rows["update"]]),
        torch.cat([kept.weight, reply.rows["weight"]]),
        torch.cat([kept.round, torch.full_like(reply.clients, now)]),
    )


def without(heard: Heard, some: Tensor) -> Heard:
    """What was heard but for some of it, a mask (n,)."""
    return Heard(heard.clients[~some], heard.updates[~some], heard.weight[~some], heard.round[~some])


def one_each(model: Tensor, models: int) -> Tensor:
    """Clusters (C, registered) that are the clients of each model."""
    return model == torch.arange(models)[:, None]


def norms_of(heard: Heard, members: Tensor) -> Tensor:
    """The norm of the mean update of a cluster, and the largest norm (2,); zeros where nobody was heard of."""
    at = members[heard.clients]
    if not at.any():
        return torch.zeros(2, dtype=torch.float64)
    updates = heard.updates[at].double()
    return torch.stack([weighted(updates, heard.weight[at]).norm(), updates.norm(dim=1).max()])


def weighted(updates: Tensor, weight: Tensor) -> Tensor:
    """The mean update (P,), in float64."""
    return weight @ updates.double() / weight.sum()


def split(state: State, c: int, linkage: Linkage, gamma: float, released: bool) -> State:
    """The state with cluster c in two, its second half behind all others; as it was if they are too close."""
    heard, members = state.heard, state.belongs[c]
    at = members[heard.clients].nonzero().flatten()
    at = at[heard.clients[at].argsort()]
    updates, clients = heard.updates[at].double(), heard.clients[at]
    if len(clients) <= 2 or (released and len(clients) < int(members.sum())):
        return state
    similarity = cosines(updates)
    second = torch.from_numpy(halves(similarity.numpy(), linkage))
    cross = float(similarity[~second][:, second].max())
    if ((1 - cross) / 2) ** 0.5 <= gamma:
        return state
    largest = torch.cat([state.largest, state.largest[c : c + 1]])
    if released:
        # The fault: places within the cluster for ids.
        halved = [
            torch.zeros_like(members).index_fill_(0, side.nonzero().flatten(), True) for side in (~second, second)
        ]
        belongs = torch.cat([state.belongs[:c], halved[0][None], state.belongs[c + 1 :], halved[1][None]])
        return replace(state, belongs=belongs, largest=largest)
    unit = updates / updates.norm(dim=1, keepdim=True).clamp(min=1e-12)
    sides = torch.stack([unit[~second].mean(0), unit[second].mean(0)]).to(heard.updates.dtype)
    other, model, placed = len(state.belongs), state.model.clone(), state.placed.clone()
    model[clients[second]], placed[clients] = other, len(state.splits) + 1
    made = Split(c, other, state.weights[c], sides)
    weights, server = ((*held, held[c]) for held in (state.weights, state.server))
    # What members sent was about weights that both halves now leave.
    left = without(heard, members[heard.clients])
    return State(weights, server, model, placed, one_each(model, other + 1), largest, (*state.splits, made), left)


def regrouped(before: State, made: State) -> State:
    """With the fault: a model for every set of clients that had the same one and are in the same clusters."""
    _, model = torch.cat([before.model[None], made.belongs]).unique(dim=1, return_inverse=True)
    source = [int(before.model[model == k][0]) for k in range(int(model.max()) + 1)]
    weights, server = (tuple(held[k] for k in source) for held in (before.weights, before.server))
    return replace(made, model=model, weights=weights, server=server)


def updated(server: Server, before: State, made: State, reply: Reply) -> tuple[tuple[Weights, ...], tuple[Any, ...]]:
    """A server step of each model along the mean updates of the clusters that its clients are in now."""
    weights, memos = [], []
    for k, (model, memo) in enumerate(zip(made.weights, made.server, strict=True)):
        holder = int((made.model == k).nonzero()[0])
        asked, clusters = int(before.model[holder]), made.belongs[made.belongs[:, holder]]
        total = reply.total[asked]
        delta = None if total is None else mean(total)["delta"]
        if delta is not None and (len(clusters) != 1 or not torch.equal(clusters[0], before.model == asked)):
            heard = [members[reply.clients] for members in clusters]
            means = [weighted(reply.rows["update"][at], reply.rows["weight"][at]) for at in heard if at.any()]
            delta = Weights(shaped(torch.stack(means).sum(0), model.params), delta.buffers) if means else None
        stepped = (model, memo) if delta is None else server.step(model, memo, delta)
        weights.append(stepped[0])
        memos.append(stepped[1])
    return tuple(weights), tuple(memos)
