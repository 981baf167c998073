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
    gradients differ by within a group, which nobody knows: 0.1, as in other code, asks for little, and where clients
    have few rows the noise of their updates alone can split a group; 0.7 and more asks for sides that turn away from
    each other. No split before round `split_after`, nor of two clients or fewer, as in the released code. Clients weigh
    alike, as in that code; the paper weighs them by rows. With partial participation the updates of the last `remember`
    rounds stand for their clients, and whoever has none when its cluster is split is placed when it next takes part: by
    an update at the weights of the split, on the side whose mean direction it is closer to (the paper: closest member).
    So is a client that was never asked, before it is judged; one without rows takes the model that most clients have.
    The code as it was released is `cfl-released`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedtide.cohorts import Cohort, Everyone
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
from fedtide.core.values import Count, Fraction, NonNegative, Whole
from fedtide.core.weights import flat, shaped
from fedtide.learn.local import LocalSolver
from fedtide.learn.participation import with_cohort
from fedtide.learn.server import SGD, Server
from fedtide.learn.task import Task
from fedtide.multi.clusters import by_given_model, given, loss_of
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
class Heard:
    """The last updates of some clients (n,), (n, P), how much each counts for (n,), and the round it is of (n,)."""

    clients: Tensor
    updates: Tensor
    weight: Tensor
    round: Tensor


@dataclass(frozen=True)
class State:
    """The models, the optimiser's memo of each, and who has which.

    model: (registered,) the model of each client, which is its cluster. placed: (registered,) how many of the splits it
    has been through. largest: (K,) the largest mean update of each cluster so far.
    """

    weights: tuple[Weights, ...]
    server: tuple[Any, ...]
    model: Tensor
    placed: Tensor
    largest: Tensor
    splits: tuple[Split, ...]
    heard: Heard
    cohort: Any = None


def cfl(
    task: Task,
    local: LocalSolver = LocalSolver(),
    eps1: NonNegative | None = None,
    eps2: NonNegative | None = None,
    gamma: Fraction = 0.1,
    split_after: Whole = 20,
    linkage: Linkage = "single",
    remember: Count = 10,
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
        eps2: above it the largest update says that somebody is not served; None is six times eps1.
        gamma: how far apart the two sides must be: 0 asks for nothing, 0.7 for a right angle, 1 for opposite ways.
        split_after: rounds without a split.
        linkage: "single" (the paper's criterion) or "complete" (the released code).
        remember: how many rounds an update stands for its client.
        server: what the server does with a cluster's mean update.
        cohort: who is asked.
        weighting: "uniform" counts all clients alike, "samples" weighs them by their rows.
    """

    def init(fleet: Fleet, rng: Rng) -> State:
        weights, nobody = task.init(rng), torch.zeros(len(fleet.clients), dtype=torch.int64)
        none = torch.zeros(0, dtype=torch.int64)
        heard = Heard(none, flat(weights.params)[None][:0], none.double(), none)
        largest = torch.zeros(1, dtype=torch.float64)
        return State((weights,), (server.init(weights),), nobody, nobody, largest, (), heard, cohort.init(fleet))

    def place(payload: Weights, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        fitted = local(task, task.loss, payload, shard, moment, rng)
        return Answer({}, {"update": flat(fitted.delta.params)}) if fitted.steps else None

    def round(state: State, fleet: Fleet, rng: Rng) -> tuple[State, Facts]:
        now = fleet.moment.round
        clients = cohort.pick(state.cohort, fleet, rng, partial(serve, state))
        state = all_placed(state, fleet, clients)
        slot = state.model[clients]
        reply = fleet.ask(
            "train", clients, list(state.weights), slot=slot, reveal=("update", "weight", *cohort.reveals)
        )
        state = replace(state, cohort=cohort.learn(state.cohort, reply, fleet.moment))
        if reply.total is None:
            return state, {"clusters": len(state.weights)}
        state = replace(state, heard=joined(state.heard, reply, now, remember))
        norms = torch.stack([norms_of_members(state, k) for k in range(len(state.weights))])
        state = replace(state, largest=torch.maximum(state.largest, norms[:, 0]))
        made = state
        for k in range(len(state.weights)) if now >= split_after else ():
            small = float(state.largest[k]) / 10 if eps1 is None else eps1
            large = 6 * small if eps2 is None else eps2
            if norms[k, 0] < small and norms[k, 1] > large:
                made = split(made, k, linkage, gamma)
        weights, memos = updated(server, state, made, reply)
        facts: Facts = {
            "loss": loss_of(reply.total),
            "clusters": len(made.weights),
            "members": torch.bincount(made.model[reply.clients], minlength=len(made.weights)),
            "mean_update": norms[:, 0],
            "largest_update": norms[:, 1],
        }
        return replace(made, weights=weights, server=memos), facts

    def serve(state: State, clients: Tensor) -> tuple[Payload, Slot]:
        # Whoever has a split still to go through finds its model by itself, in `adapt`.
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
        effort=lambda question, rows: local.samples(rows),  # whoever is placed trains for it
    )
    return with_cohort(made, cohort, task, local)


def sent_update(task: Task, local: LocalSolver, weighting: Weighting) -> Work:
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
    return replace(state, model=model, placed=placed, heard=heard)


def second_side(made: Split, updates: Tensor) -> Tensor:
    """Which updates (n, P) point more to the second side of a split (n,); the first of equals."""
    towards = cosines(updates, made.sides)
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


def norms_of_members(state: State, k: int) -> Tensor:
    """`norms_of` of the clients of a cluster that were heard of."""
    at = (state.model == k)[state.heard.clients]
    return norms_of(state.heard.updates[at], state.heard.weight[at])


def norms_of(updates: Tensor, weight: Tensor) -> Tensor:
    """The norm of the mean update (n, P) and the largest norm (2,), float64; zeros without updates."""
    if not len(updates):
        return torch.zeros(2, dtype=torch.float64)
    return torch.stack([weighted(updates, weight).norm(), updates.double().norm(dim=1).max()])


def weighted(updates: Tensor, weight: Tensor) -> Tensor:
    """The mean update (P,), in float64."""
    return weight @ updates.double() / weight.sum()


def split(state: State, k: int, linkage: Linkage, gamma: float) -> State:
    """The state with a cluster in two, its second half behind all others; as it was if they are too close."""
    heard, members = state.heard, state.model == k
    at = members[heard.clients].nonzero().flatten()
    at = at[heard.clients[at].argsort()]
    updates, clients = heard.updates[at].double(), heard.clients[at]
    if len(clients) <= 2:
        return state
    similarity = cosines(updates)
    second = torch.from_numpy(halves(similarity.numpy(), linkage))
    cross = float(similarity[~second][:, second].max())
    if ((1 - cross) / 2) ** 0.5 <= gamma:
        return state
    unit = updates / updates.norm(dim=1, keepdim=True).clamp(min=1e-12)
    sides = torch.stack([unit[~second].mean(0), unit[second].mean(0)]).to(heard.updates.dtype)
    other, model, placed = len(state.weights), state.model.clone(), state.placed.clone()
    model[clients[second]], placed[clients] = other, len(state.splits) + 1
    made = Split(k, other, state.weights[k], sides)
    largest = torch.cat([state.largest, state.largest[k : k + 1]])
    weights, server = ((*held, held[k]) for held in (state.weights, state.server))
    # What members sent was about weights that both halves now leave.
    left = without(heard, members[heard.clients])
    return State(weights, server, model, placed, largest, (*state.splits, made), left, state.cohort)


def updated(server: Server, before: State, made: State, reply: Reply) -> tuple[tuple[Weights, ...], tuple[Any, ...]]:
    """A server step of each model along the mean update of its clients; of halves along that of either."""
    source = list(range(len(before.weights)))
    for each in made.splits[len(before.splits) :]:
        source.append(each.model)
    halved = {k for each in made.splits[len(before.splits) :] for k in (each.model, each.other)}
    weights, memos = [], []
    for k, (model, memo) in enumerate(zip(made.weights, made.server, strict=True)):
        total = reply.total[source[k]]
        delta = None if total is None else mean(total)["delta"]
        if k in halved and delta is not None:
            at = made.model[reply.clients] == k
            own = weighted(reply.rows["update"][at], reply.rows["weight"][at]) if at.any() else None
            delta = None if own is None else Weights(shaped(own, model.params), delta.buffers)
        stepped = (model, memo) if delta is None else server.step(model, memo, delta)
        weights.append(stepped[0])
        memos.append(stepped[1])
    return tuple(weights), tuple(memos)
