"""Auxo: cohorts that split where the updates of those who take part fall in two; nobody else is asked anything.

Liu, Lai, Dai, Akella, Madhyastha, Chowdhury: *Auxo: Efficient Federated Learning via Scalable Client Clustering*, SoCC
2023, in the simplified form that the comparison with other methods needs.

| symbol | meaning |
| --- | --- |
| `c` | cohort, with a model |
| `x_i` | sketch: the last tenth of the flat update of client i, minus the mean of the cohort's participants |
| `R_ic` | reward of client i in cohort c, 1 at the beginning |
| `S_ic` | its evidence for either side of c, (R_ic / 2, R_ic / 2) at the beginning |

    client i trains the model of  argmax_c R_ic;  a random one if it never did, or with chance epsilon * decay^t
    after the round of c, with at least `least` participants:
      sides     the first time 2-means of x_i / ||x_i||; later who has no side yet gets that of the nearest who has
                S_ic += 1 for its side, -1 for the other
      rewards   with several cohorts:  d_i = ||x_i - mean of those known||,  share = known / participants
                R_ic += (5 - 5 d_i / (mean d + std d)) share,  half of it for either side
                where that is negative the evidence for sides is forgotten
      split     at rounds of its own that are given, or when both sides have more than share N 0.9^(cohorts - 1)
                clients, and, from the second split on, neither more than twice as many as the other
                the new cohort begins with a copy of the model;  R_ic + 1 on the side of client i

When to use it: many clients of whom few take part at a time, groups that want different models, and nothing beyond
training may be asked of a client. Who does not take part is not moved, however its data change.

Choices:
    A client is known to a cohort that it has a reward above 1 in, and has been labelled or rewarded by. Re-assignment
    touches participants only; when a cohort splits, its members go with the side that they have evidence for, others
    stay. The released code asks for 100 participants' worth of clients before evidence may split, which most
    populations do not have, and therefore ships with fixed rounds, at which it splits even where a side is empty; ours
    does not. It gathers evidence for sides until one round after the last of them; ours always does. With several
    cohorts it does not split where fewer than two participants are known; ours may. Its exploration decays with every
    look at a client; ours with rounds. If one side alone has labels, the quarter of the participants nearest to the
    first of them gets its label, as in the code. Who takes part is whom the cohort of the experiment says, so cohorts
    train as many clients as come to them, not equal numbers. Clients weigh by rows. A client that was never asked takes
    the cohort whose model fits its labelled rows best before it is judged; one without takes the largest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtide.cohorts import Arrivals, Cohort
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.types import (
    Algorithm,
    Answer,
    Facts,
    Fleet,
    Memory,
    Moment,
    Payload,
    Shard,
    Slot,
    Weighted,
    Weights,
)
from fedtide.core.values import Count, Fraction, NonNegative, Whole
from fedtide.core.weights import flat
from fedtide.learn.local import LocalSolver, costing
from fedtide.learn.participation import with_cohort
from fedtide.learn.server import SGD, Server
from fedtide.learn.task import Task
from fedtide.learn.terms import Proximal
from fedtide.multi.clusters import by_given_model, finding, given, loss_of, stepped
from fedtide.parts.cluster import distances, kmeans, seeded
from fedtide.parts.weighting import Weighting, client_weight

SHARE = 0.05
"""Of all clients on either side: where cohorts split by evidence, if nothing else is said."""

REWARD, SHRINKS, TRIES = 5.0, 0.9, 10
"""Of a client at the mean; how the size that evidence asks for falls with each cohort; starts of 2-means."""


@dataclass(frozen=True)
class State:
    """The cohorts' models, the optimiser's memo of each, and what is known of clients.

    reward: (registered, C) R; sides: (registered, C, 2) S; times: (registered, C) how often a client was labelled or
    rewarded; divided: (C,) whether there are sides; rounds: (C,) how many each has had.
    """

    weights: tuple[Weights, ...]
    server: tuple[Any, ...]
    reward: Tensor
    sides: Tensor
    times: Tensor
    divided: Tensor
    rounds: Tensor
    cohort: Any = None


def auxo(
    task: Task,
    local: LocalSolver = LocalSolver(),
    split_rounds: tuple[Whole, ...] | None = None,
    share: Fraction = SHARE,
    least: Count = 5,
    cohorts: Count = 8,
    epsilon: Fraction = 0.01,
    decay: Fraction = 0.99,
    sketch: Fraction = 0.1,
    mu: NonNegative = 0.0,
    server: Server = SGD(),
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "samples",
) -> Algorithm:
    """Cohorts by the updates of those who take part.

    Sends a cohort's model down and its update up; of that the server sees the sketch by itself.

    Args:
        task: model and loss.
        local: local training.
        split_rounds: after how many of its own rounds a cohort splits, counting those of the cohort that it came from;
            None splits by evidence, () never.
        share: of all clients, how many must be on either side, by evidence; 0.9 times as many for each cohort there is.
        least: participants of a cohort without whom its round says nothing.
        cohorts: how many there may be.
        epsilon: chance that a client trains a random cohort's model.
        decay: of that chance, in every round.
        sketch: the share of the update that is looked at, from its end.
        mu: strength of FedProx's pull in local training.
        server: what the server does with a cohort's mean update.
        cohort: who is asked.
        weighting: "samples" weighs a client by its rows, "uniform" all alike.
    """
    if split_rounds is not None and share != SHARE:
        raise FedtideError(f"share: found {share:g}, allowed: none with split_rounds, which say when cohorts split")
    extra = Proximal(mu) if mu else None

    def init(fleet: Fleet, rng: Rng) -> State:
        weights, n = task.init(rng), len(fleet.clients)
        one = torch.ones(n, 1, dtype=torch.float64)
        nothing = torch.zeros(1, dtype=torch.int64)
        sides = torch.full((n, 1, 2), 0.5, dtype=torch.float64)
        never, memo = torch.zeros(n, 1).long(), cohort.init(fleet)
        return State((weights,), (server.init(weights),), one, sides, never, nothing > 0, nothing, memo)

    def train(payload: Weights, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        fitted = local(task, task.loss, payload, shard, moment, rng, extra=extra)
        if not fitted.steps:
            return None
        update = flat(fitted.delta.params)
        end = update[-max(math.ceil(sketch * len(update)), 1) :]
        total = {
            "delta": Weighted(fitted.delta, client_weight(shard, weighting)),
            "loss": Weighted(fitted.loss, len(shard)),
        }
        return Answer(total, {"sketch": end}, repeated=("sketch",))

    def visited(state: State, clients: Tensor, rng: Rng, now: int) -> Tensor:
        """Whose model each of the clients trains."""
        most = state.reward.shape[1]
        where = state.reward[clients].argmax(1)
        new = state.times[clients].sum(1) == 0
        chance = epsilon * decay ** max(now, 0)
        for place, client in enumerate(clients.tolist() if most > 1 else ()):
            draw = rng.at("explore", client).numpy()
            if draw.random() < chance or new[place]:
                where[place] = int(draw.integers(most))
        return where

    def round(state: State, fleet: Fleet, rng: Rng) -> tuple[State, Facts]:
        clients = cohort.pick(state.cohort, fleet, rng, partial(serve, state))
        slot = visited(state, clients, rng, fleet.moment.round)
        reply = fleet.ask("train", clients, list(state.weights), slot=slot, reveal=("sketch", *cohort.reveals))
        state = replace(state, cohort=cohort.learn(state.cohort, reply, fleet.moment))
        if reply.total is None:
            return state, {"cohorts": len(state.weights)}
        sums = [None if total is None else total["delta"] for total in reply.total]
        weights, memos = stepped(server, state.weights, state.server, sums)
        state = replace(state, weights=weights, server=memos)
        answered = slot[torch.isin(clients, reply.clients)]
        trained = torch.bincount(answered, minlength=len(weights))
        for c in range(len(weights)):
            at = (answered == c).nonzero().flatten()
            if len(at) >= least:
                state = learned(state, c, reply.clients[at], reply.rows["sketch"][at], rng.at("sides", c))
                if len(state.weights) < cohorts and wants_split(state, c, split_rounds, share):
                    state = split(state, c)
        return state, {
            "loss": loss_of(reply.total),
            "cohorts": len(state.weights),
            "members": trained,
        }

    def serve(state: State, clients: Tensor) -> tuple[Payload, Slot]:
        where = state.reward.argmax(1)
        usual = int(torch.bincount(where, minlength=len(state.weights)).argmax())
        # With one cohort nobody has to be known.
        known = (state.times.sum(1) > 0) | (len(state.weights) == 1)
        return given(state.weights, torch.where(known, where, -1), clients, torch.arange(len(state.weights)), usual)

    works, adapt, effort = {"train": train}, finding(task), costing(local, {})
    predict = by_given_model(task)
    made = Algorithm("auxo", init, works, round, serve, predict, adapt=adapt, reveals=("sketch",), effort=effort)
    return with_cohort(made, cohort, task, local)


def side_of(state: State, clients: Tensor, c: int) -> Tensor:
    """The side (n,) that clients have evidence for in a cohort, 0 or 1; 2 for none, or where they are out of place."""
    one, two = state.sides[clients, c].unbind(1)
    return torch.where((one == two) | (state.reward[clients, c] < 0), 2, (two > one).long())


def learned(state: State, c: int, clients: Tensor, sketches: Tensor, rng: Rng) -> State:
    """What the updates of a cohort's participants (n,), (n, d) tell of them: sides and rewards."""
    x = sketches.double() - sketches.double().mean(0)
    unit = x / x.norm(dim=1, keepdim=True).clamp(min=1e-12)
    known = (state.times[clients, c] > 0) & (state.reward[clients, c] > 1)
    several = len(state.weights) > 1
    rounds = state.rounds.clone()
    rounds[c] += 1
    told, side, divided = sides_told(state, c, clients, unit, known | (not several), rng)
    sides, times, reward = state.sides.clone(), state.times.clone(), state.reward.clone()
    sides[clients[told], c] += torch.nn.functional.one_hot(side, 2) * 2.0 - 1.0
    times[clients[told], c] += 1
    known = (times[clients, c] > 0) & (reward[clients, c] > 1)
    if several and known.sum() >= 2:
        more = rewards(x, known)
        reward[clients, c] += more
        sides[clients, c] += more[:, None] / 2
        times[clients, c] += 1
        lost = clients[more < 0]
        sides[lost, c], times[lost, c] = (reward[lost, c] / 2)[:, None], 1
    return replace(state, reward=reward, sides=sides, times=times, divided=divided, rounds=rounds)


def sides_told(
    state: State, c: int, clients: Tensor, unit: Tensor, may: Tensor, rng: Rng
) -> tuple[Tensor, Tensor, Tensor]:
    """Positions of the participants that are given a side, the side of each, and which cohorts have sides now.

    Args:
        state: before the round's evidence.
        c: the cohort.
        clients: (n,) its participants.
        unit: (n, d) their sketches, centred and of length one.
        may: (n,) who may begin the sides.
        rng: of 2-means.
    """
    nobody = torch.zeros(0, dtype=torch.int64)
    if not state.divided[c]:
        at = may.nonzero().flatten()
        if len(at) < 2:
            return nobody, nobody, state.divided
        divided = state.divided.clone()
        divided[c] = True
        return at, halves(unit[at], rng), divided
    side = side_of(state, clients, c)
    with_side, without = (side != 2).nonzero().flatten(), (side == 2).nonzero().flatten()
    if not len(with_side):
        return nobody, nobody, state.divided
    if (side[with_side] == side[with_side[0]]).all():
        from_first = (unit - unit[with_side[0]]).norm(dim=1)
        at = from_first.argsort(stable=True)[: len(clients) // 4]
        return at, side[with_side[0]].expand(len(at)), state.divided
    near = torch.cdist(unit[without], unit[with_side]).argmin(1)
    return without, side[with_side[near]], state.divided


def halves(x: Tensor, rng: Rng) -> Tensor:
    """Two clusters (n,) of rows by 2-means, the best of ten starts; the first row is in cluster 0."""
    rows, best, cost = x.numpy(), np.zeros(len(x), dtype=np.int64), np.inf
    for number in range(TRIES):
        centres, member = kmeans(rows, seeded(rows, 2, rng.at("start", number)))
        now = float(distances(rows, centres).min(1).sum())
        # Costs that differ by rounding alone are equal.
        if now < cost - 1e-9:
            best, cost = member, now
    return torch.from_numpy((best != best[0]).astype(np.int64))


def rewards(x: Tensor, known: Tensor) -> Tensor:
    """What participants (n,) are rewarded with, by how far their sketches (n, d) are from the mean of those known.

    >>> rewards(torch.tensor([[1.0], [3.0]]), torch.tensor([True, True])).tolist()
    [0.0, 0.0]
    """
    far = (x - x[known].mean(0)).norm(dim=1)
    scale = far.mean() + far.std(correction=0)
    return (REWARD - REWARD * far / scale.clamp(min=1e-12)) * known.double().mean()


def wants_split(state: State, c: int, split_rounds: tuple[int, ...] | None, share: float) -> bool:
    """Whether a cohort is to split now; one that has nobody on one of its sides does not."""
    members = (state.reward.argmax(1) == c).nonzero().flatten()
    one, two = torch.bincount(side_of(state, members, c), minlength=3)[:2].tolist()
    if not one or not two:
        return False
    if split_rounds is not None:
        return int(state.rounds[c]) in split_rounds
    size = share * len(state.reward) * SHRINKS ** (len(state.weights) - 1)
    even = len(state.weights) == 1 or 0.5 < one / two < 2
    return min(one, two) > size and even


def split(state: State, c: int) -> State:
    """The state with a cohort in two, the second side behind all others."""
    first, second = (state.sides[:, c, 0] > state.sides[:, c, 1]), (state.sides[:, c, 1] > state.sides[:, c, 0])
    new = len(state.weights)
    reward, times = (torch.cat([held, held[:, c : c + 1]], 1) for held in (state.reward, state.times))
    for k, side in ((c, first), (new, second)):
        reward[:, k] += side
        times[:, k] *= side
    sides = torch.cat([state.sides, state.sides[:, c : c + 1]], 1)
    sides[:, [c, new]] = (reward[:, [c, new]] / 2)[:, :, None].expand(-1, -1, 2)
    divided, rounds = (torch.cat([held, held[c : c + 1]]) for held in (state.divided, state.rounds))
    divided[[c, new]] = False
    weights, server = ((*held, held[c]) for held in (state.weights, state.server))
    return State(weights, server, reward, sides, times, divided, rounds, state.cohort)
