"""Fielding: clusters of clients that follow drift; who drifted moves, and everybody is clustered anew when need be.

Li, Avdiukhin, Shahout, Ivkin, Braverman, Yu: *Fielding: Clustered Federated Learning with Data Drift*, Algorithms 1 to
3, section 2.

| symbol | meaning |
| --- | --- |
| `r_i` | representation of client i as it last reported it: shares of labels, an embedding or a gradient |
| `c_k`, `w_k` | centre and model of cluster k |
| `theta` | mean distance between centres |
| `tau` | how far a centre may move, as a share of theta |
| `M` | participants of a round in all |

    drifted clients report r_i;  each moves to argmin_k dist(r_i, c_k), centres held fixed            Algorithm 2
    c_k' = mean of its members' r_i
    if max_k dist(c_k', c_k) >= tau * theta:  cluster all r_i anew (Algorithm 3), K by the silhouette;
                                              w_k = mean over members of the model that each had
    else                                      c_k = c_k'
    M / K participants of each cluster train w_k; FedAvg within the cluster                           Algorithm 1

When to use it: clients are of a few kinds and change, some all the time, many at once now and then, and may say what
kind they are by a vector that costs little. Label shares tell shifts of labels, embeddings those of inputs; where the
meaning of labels changes, only gradients tell.

Choices:
    No code was found. A client reports when its representation is more than `drift_eps` away from what it last said,
    and no model travels for that unless gradients are taken at the global one. A centre without members stays where it
    is and counts neither for moves nor for theta. With one cluster left theta is twice the mean distance to its
    centre. `reference = "last-event"` measures how far centres moved in this drift event alone, as in the paper, so
    that slow creep never triggers; "last-clustering" measures it since clients were last clustered. Models are mixed
    by who comes from where, running statistics and the optimiser's moments alike. Of clusters smaller than their share
    all members train, and the others get the rest. `select = None` takes whoever the cohort says, whatever their
    cluster. Clients weigh alike within a cluster, as in the pseudo-code. A client that was never heard of is in the
    cluster that is nearest to even shares, or the largest; an unseen one finds its cluster by its own representation
    before it is judged. `moves = false` is static clustering; with `trigger = { kind = "fraction", tau = inf }` clients
    move and are never clustered anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.sums import mean
from fedtide.core.trees import map_leaves
from fedtide.core.types import (
    Algorithm,
    Answer,
    Facts,
    Fleet,
    Memory,
    Moment,
    Payload,
    Prediction,
    Shard,
    Slot,
    Weighted,
    Weights,
)
from fedtide.core.values import Count, Flag, NonNegative, Spelled
from fedtide.learn.local import LocalSolver
from fedtide.learn.representation import Labels, Representation
from fedtide.learn.server import SGD, Server
from fedtide.learn.several import by_own_model
from fedtide.learn.task import Task, row_losses
from fedtide.learn.terms import Proximal
from fedtide.parts.cohort import Arrivals, Cohort, wanted
from fedtide.parts.distance import Centre, Kind, between, means
from fedtide.parts.drift import Adaptive, Event, Fraction, Learned, heterogeneity, shifted, theta, transfer
from fedtide.parts.drift import moves as moved
from fedtide.parts.recluster import clusters
from fedtide.parts.select import AtRandom, Select, utility
from fedtide.parts.weighting import Weighting, client_weight

Triggers = Annotated[Fraction | Adaptive | Learned, Field(discriminator="kind")]


@dataclass(frozen=True)
class State:
    """The models, the optimiser's memo of each, what is known of clients, and the clusters.

    said: (registered, r) what each client last reported. heard: (registered,) bool, who ever did. cluster:
    (registered,) of each client. centres: (K, r) now; before: (K, r) when clients were last clustered. trigger, select:
    their memos. events: drift events so far.
    """

    weights: tuple[Weights, ...]
    server: tuple[Any, ...]
    said: Tensor
    heard: Tensor
    cluster: Tensor
    centres: Tensor
    before: Tensor
    trigger: Any
    select: Any


def fielding(
    task: Task,
    local: LocalSolver = LocalSolver(),
    representation: Representation = Labels(),
    distance: Kind | None = None,
    trigger: Annotated[Triggers, Spelled] = Fraction(),
    moves: Flag = True,
    reference: Literal["last-event", "last-clustering"] = "last-event",
    drift_eps: NonNegative = 0.0,
    k_min: Count = 2,
    k_max: Count = 10,
    n_init: Count = 10,
    centre: Centre = "mean",
    silhouette_rows: Count | None = 1000,
    mu: NonNegative = 0.0,
    server: Server = SGD(),
    cohort: Cohort = Arrivals(),
    select: Annotated[Select | None, Spelled] = AtRandom(),
    weighting: Weighting = "uniform",
) -> Algorithm:
    """Clustered federated learning that follows drift.

    Sends a cluster's model down and its update up in sums; the server sees the representation of every client that
    drifted.

    Args:
        task: model and loss; `example` set, for label shares.
        local: local training.
        representation: what clients report.
        distance: how representations are compared; None is as suits them.
        trigger: when everybody is clustered anew.
        moves: whether clients that drifted move; without, nothing changes after the first clustering.
        reference: since when a centre's way is measured.
        drift_eps: how far a representation must be from what was said last to be said again.
        k_min: the fewest clusters.
        k_max: the most.
        n_init: starts of k-means.
        centre: what stands for a cluster.
        silhouette_rows: clients among which silhouettes are taken; None means all.
        mu: pull of every client towards the model that it received, as FedProx.
        server: what the server does with a cluster's mean update.
        cohort: how many are asked in all; without `select`, who.
        select: who is asked within a cluster; None means whoever the cohort says, of all clusters together.
        weighting: "samples" weighs a client by its rows, "uniform" all alike.
    """
    if k_max < k_min and k_max != 1:
        raise FedtideError(f"k_max: found {k_max}, allowed: k_min, which is {k_min}, or more; or 1 for one cluster")
    kind: Kind = distance or representation.distance
    represent = representation.of(task)
    extra = Proximal(mu) if mu else None

    def init(fleet: Fleet, rng: Rng) -> State:
        weights = task.init(rng)
        count = len(fleet.clients)
        said = torch.full((count, 1), 1.0, dtype=torch.float64)
        nobody = torch.zeros(count, dtype=torch.bool)
        one = torch.zeros(count, dtype=torch.int64)
        memo = None if select is None else select.init(count)
        state = State((weights,), (server.init(weights),), said, nobody, one, said[:1], said[:1], trigger.start(), memo)
        state, drifted = reported(state, fleet)
        return clustered(state, rng.at("cluster")) if len(drifted) else state

    def reported(state: State, fleet: Fleet) -> tuple[State, Tensor]:
        """The state with what clients say now, and which of them (n,) said something."""
        payload = {"model": mixed(state.weights, members(state))} if representation.follows else {}
        reply = fleet.ask("report", fleet.reachable, payload, reveal=("said",))
        if not len(reply.clients):
            return state, reply.clients
        width = reply.rows["said"].shape[1]
        if state.said.shape[1] != width:  # nobody was ever heard of: everybody is taken to be even
            even = torch.full((len(state.said), width), 1 / width, dtype=torch.float64)
            state = replace(state, said=even, centres=even[:1], before=even[:1])
        said, heard = state.said.clone(), state.heard.clone()
        said[reply.clients], heard[reply.clients] = reply.rows["said"], True
        chosen = state.select
        if select is not None and select.needs == "labels":
            chosen = select.told(chosen, reply.clients, reply.rows["said"])
        return replace(state, said=said, heard=heard, select=chosen), reply.clients

    def report(payload: Any, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        if not len(shard):
            return None
        vector = represent(payload.get("model"), shard)
        order = representation.order(task, rng) if memory is None else memory["order"]
        vector = vector if order is None else vector[order]
        if memory is not None and float(between(vector[None], memory["said"][None], kind)) <= drift_eps:
            return None  # it did not drift: nothing is sent
        return Answer({"reports": Weighted(1.0)}, {"said": vector}, memory={"said": vector, "order": order})

    def clustered(state: State, rng: Rng) -> State:
        """Everybody who was ever heard of, clustered anew, with models mixed by who comes from where."""
        heard = state.heard.nonzero().flatten()
        found = clusters(
            state.said[heard], kind, rng,
            k_min=k_min, k_max=k_max, n_init=n_init, centre=centre, silhouette_rows=silhouette_rows,
        )  # fmt: skip
        label = between(state.said, found.centres, kind).argmin(1)
        label[heard] = found.label
        share = transfer(state.cluster[heard], found.label, len(state.weights), found.k)
        weights, server = (tuple(mixed(held, row) for row in share) for held in (state.weights, state.server))
        return replace(
            state, weights=weights, server=server, cluster=label, centres=found.centres, before=found.centres
        )

    def followed(state: State, drifted: Tensor, rng: Rng) -> tuple[State, Facts]:
        """Algorithm 2: moves, new centres, and whether that is enough."""
        if not moves or not len(drifted):
            return state, {"moved": 0, "reclustered": 0}
        cluster = moved(state.said, state.cluster, drifted, state.centres, kind, members(state) > 0)
        heard, filled = state.heard, torch.bincount(cluster, minlength=len(state.weights)) > 0
        now = means(state.said[heard], cluster[heard], len(filled), state.centres, kind, centre)
        since = state.centres if reference == "last-event" else state.before
        event = Event(since, now, filled, state.said[heard], cluster[heard], kind)
        fired = trigger.fires(state.trigger, event)
        facts = {
            "drifted": len(drifted),
            "moved": int((cluster != state.cluster).sum()),
            "reclustered": int(fired),
            "theta": theta(now, filled, kind, event.x),
            "way": float(shifted(since, now, kind).max()),
        }
        state = replace(state, cluster=cluster, trigger=trigger.after(state.trigger, fired))
        return (clustered(state, rng.at("cluster")) if fired else replace(state, centres=now)), facts

    def asked(state: State, fleet: Fleet, rng: Rng) -> Tensor:
        """M / K participants of each cluster; the rest from the largest, and what a small one lacks from the others."""
        if select is None:
            return cohort(rng, fleet)
        reachable = fleet.reachable
        each = [reachable[state.cluster[reachable] == k] for k in range(len(state.weights))]
        sizes = quotas([len(among) for among in each], wanted(cohort, fleet))
        picked = [
            select.pick(state.select, rng.at("cluster", k) if k else rng, fleet, among, m)
            for k, (among, m) in enumerate(zip(each, sizes, strict=True))
            if m
        ]
        return torch.cat(picked).sort().values if picked else reachable[:0]

    def trained_rows(rows: int) -> int:
        return int(torch.minimum(local.samples(torch.tensor(rows)), torch.tensor(rows)))

    def train(payload: Weights, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        seen = select is not None and select.learns
        rows = {"utility": utility(losses_of(task, payload, shard), trained_rows(len(shard)))} if seen else {}
        fitted = local(task, task.loss, payload, shard, moment, rng, extra=extra)
        if not fitted.steps:
            return None
        weight = client_weight(shard, weighting)
        return Answer({"delta": Weighted(fitted.delta, weight), "loss": Weighted(fitted.loss, len(shard))}, rows)

    def round(state: State, fleet: Fleet, rng: Rng) -> tuple[State, Facts]:
        state, drifted = reported(state, fleet)
        state, facts = followed(state, drifted, rng)
        chosen = asked(state, fleet, rng)
        slots = len(state.weights)
        wants = ("utility",) if select is not None and select.learns else ()
        reply = fleet.ask("train", chosen, list(state.weights), slot=state.cluster[chosen], slots=slots, reveal=wants)
        facts = {**facts, "clusters": slots, "members": members(state), "spread": spread(state, kind)}
        if reply.total is None:
            return state, facts
        steps = [
            (model, memo) if total is None else server.step(model, memo, mean(total)["delta"])
            for model, memo, total in zip(state.weights, state.server, reply.total, strict=True)
        ]
        if select is not None and wants:
            learned = select.learn(
                state.select, reply.clients, reply.rows["utility"], reply.seconds, fleet.moment.round
            )
            state = replace(state, select=learned)
        losses = [total["loss"] for total in reply.total if total is not None]
        loss = sum(each.value for each in losses) / sum(each.weight for each in losses)
        weights, server_memos = (tuple(part) for part in zip(*steps, strict=True))
        return replace(state, weights=weights, server=server_memos), {"loss": loss, **facts}

    def serve(state: State, clients: Tensor) -> tuple[Payload, Slot]:
        served: list[Payload] = [
            {"models": (weights,), "numbers": torch.tensor([k]), "centres": None, "usual": 0}
            for k, weights in enumerate(state.weights)
        ]
        # Whoever is not registered finds its cluster by itself, in `adapt`.
        usual = members(state).argmax()
        everything = {
            "models": state.weights, "numbers": torch.arange(len(served)), "usual": usual,
            "centres": state.centres, "filled": members(state) > 0,
            "model": mixed(state.weights, members(state)) if representation.follows else None,
        }  # fmt: skip
        known = clients < len(state.cluster)
        slot = torch.full_like(clients, len(served))
        slot[known] = state.cluster[clients[known]]
        return [*served, everything], slot

    def adapt(payload: Any, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        if payload["centres"] is None or not len(shard):
            return None
        vector = represent(payload["model"], shard)[None]
        own = moved(
            vector, torch.zeros(1, dtype=torch.int64), torch.tensor([0]), payload["centres"], kind, payload["filled"]
        )
        return Answer({}, memory={"model": own[0]})

    choose = by_own_model(task)

    def predict(payload: Any, memories: Sequence[Memory], x: Tensor, owner: Tensor) -> Prediction:
        found = choose(payload, [None if payload["centres"] is None else m for m in memories], x, owner)
        return Prediction(found.logp, payload["numbers"][found.choice])

    reveals = ("said", "utility") if select is not None and select.learns else ("said",)
    works = {"report": report, "train": train}
    return Algorithm("fielding", init, works, round, serve, predict, adapt=adapt, reveals=reveals)


def losses_of(task: Task, weights: Weights, shard: Shard) -> Tensor:
    """Cross-entropy of each row under a model; (1,) zero without rows."""
    if not len(shard):
        return torch.zeros(1)
    return row_losses(F.log_softmax(task.logits(weights, shard.x), -1), shard.y, shard.mask)


def members(state: State) -> Tensor:
    """How many clients (K,) each cluster has."""
    return torch.bincount(state.cluster, minlength=len(state.weights))


def spread(state: State, kind: Kind) -> float:
    """How unlike each other the clients of a cluster are, of those that were ever heard of."""
    return heterogeneity(state.said[state.heard], state.cluster[state.heard], kind) if state.heard.any() else 0.0


def mixed(trees: Sequence[Any], share: Tensor) -> Any:
    """The mean of several trees, such as models, weighted by shares (K,) of any sum."""
    parts = share.double() / share.sum()

    def mean_of(*leaves: Any) -> Any:
        if not isinstance(leaves[0], Tensor):
            return leaves[0]
        total = sum(part * leaf.double() for part, leaf in zip(parts, leaves, strict=True) if part > 0)
        return total.to(leaves[0].dtype) if leaves[0].is_floating_point() else leaves[0]

    return map_leaves(mean_of, *trees)


def quotas(sizes: Sequence[int], wanted: int) -> list[int]:
    """How many participants each cluster sends: as many each, the rest the largest; what one lacks the others send.

    >>> quotas([10, 2, 0, 5], 9)
    [4, 2, 0, 3]
    """
    filled = [k for k, size in enumerate(sizes) if size]
    out = [0] * len(sizes)
    if not filled:
        return out
    order = sorted(filled, key=lambda k: (-sizes[k], k))
    for place, k in enumerate(order):
        out[k] = wanted // len(filled) + (place < wanted % len(filled))
    lacking = sum(max(out[k] - sizes[k], 0) for k in filled)
    out = [min(n, size) for n, size in zip(out, sizes, strict=True)]
    while lacking and any(out[k] < sizes[k] for k in filled):
        for k in order:
            if lacking and out[k] < sizes[k]:
                out[k] += 1
                lacking -= 1
    return out
