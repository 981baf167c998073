"""K whole models of one task: a round of training in clusters, which model fits a client, predicting with its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedtide.cohorts import Cohort, Everyone, asked
from fedtide.cohorts.protocol import Served
from fedtide.core.errors import FedtideError, refused
from fedtide.core.rng import Rng
from fedtide.core.sums import mean
from fedtide.core.trees import map_leaves
from fedtide.core.types import (
    Answer,
    Facts,
    Fleet,
    Holdings,
    Memory,
    Moment,
    Payload,
    Prediction,
    Reply,
    Shard,
    Slot,
    Slotted,
    Sum,
    Weighted,
    Weights,
    Work,
)
from fedtide.learn.server import Server
from fedtide.learn.task import Task, row_losses
from fedtide.models.branched import WHOLE

ChooseOn = Literal["val", "train"]
"""The labeled rows on which a client chooses its model before it is judged."""

Divide = Literal["members", "participants"]
"""By how many a model's update is divided: by the clients that trained it, or by all that answered."""

S = TypeVar("S", bound=Any)
"""The state of a clustered method: a dataclass with `weights` and `server`, of each cluster, and `cohort`, its memo."""


def train_clusters(
    fleet: Fleet,
    state: S,
    clients: Tensor,
    cluster: Tensor,
    server: Server,
    cohort: Cohort,
    *,
    reveal: Sequence[str] = (),
    totals: Callable[[Any], Any] | None = None,
) -> tuple[S, Reply, Facts]:
    """Federated averaging inside each cluster: a round of "train", and a server step of every model that was trained.

    Args:
        fleet: the clients.
        state: with a model for each cluster.
        clients: who trains (clients,).
        cluster: the cluster of each of them (clients,).
        server: the optimizer.
        cohort: what it picked `clients` by; it learns from the reply.
        reveal: what else the server sees of each.
        totals: what is made of a cluster's sums (None where it has none) before their mean is taken.

    Returns:
        The state after it, the reply, and the "loss" and "members", how many trained each model; no facts, and the
        models as they were, where no client answered.
    """
    slots = len(state.weights)
    seen = (*reveal, *cohort.reveals)
    reply = fleet.ask("train", clients, list(state.weights), slot=cluster, slots=slots, reveal=seen)
    state = replace(state, cohort=cohort.learn(state.cohort, reply, fleet.moment))
    if reply.total is None:
        return state, reply, {}
    made = reply.total if totals is None else [totals(total) for total in reply.total]
    sums = [None if total is None else total["delta"] for total in made]
    weights, memos = stepped(server, state.weights, state.server, sums)
    trained = torch.bincount(cluster[torch.isin(clients, reply.clients)], minlength=slots)
    return replace(state, weights=weights, server=memos), reply, {"loss": loss_of(reply.total), "members": trained}


def beginnings(task: Task, rng: Rng, count: int, own_layer: str | None = None) -> tuple[Weights, ...]:
    """K models to begin with, the first that of FedAvg; with `own_layer` they differ in that layer alone."""
    keys = [rng, *(rng.at("model", k) for k in range(1, count))]
    return tuple(received(sent([task.init(key) for key in keys], own_layer)))


def begin_apart(task: Task, models: int, otherwise: str = "") -> None:
    """Refuse weights to begin with where several models would begin alike with them, and stay so.

    Args:
        task: with or without weights to begin with.
        models: how many there are.
        otherwise: what else would tell them apart, for the message.
    """
    if task.begin is not None and models > 1:
        raise FedtideError(
            f"weights: found weights to begin with, and {models} models that would stay alike; allowed: none{otherwise}"
        )


def picked_per_cluster(
    cohort: Cohort, memo: Any, fleet: Fleet, rng: Rng, served: Served, cluster: Tensor, count: int
) -> Tensor:
    """As many participants from each cluster (clients,), sorted.

    Args:
        cohort: who takes part.
        memo: the cohort's.
        fleet: the clients.
        rng: the round's key.
        served: what clients would be judged with now.
        cluster: (registered,) the cluster of each.
        count: how many clusters there are.
    """
    reachable = fleet.reachable
    each = [reachable[cluster[reachable] == k] for k in range(count)]
    wanted = len(reachable) if isinstance(cohort, Everyone) else asked(cohort)
    picked = [
        cohort.pick(memo, fleet, rng.at("cluster", k) if k else rng, served, among, m)
        for k, (among, m) in enumerate(zip(each, quotas([len(among) for among in each], wanted), strict=True))
    ]
    return torch.cat(picked).sort().values


def quotas(sizes: Sequence[int], wanted: int) -> list[int]:
    """How many participants each cluster sends: as many each, the rest the largest; the others send what one lacks.

    >>> quotas([10, 2, 0, 5], 9)
    [4, 2, 0, 3]
    """
    out = [0] * len(sizes)
    order = sorted((k for k, size in enumerate(sizes) if size), key=lambda k: (-sizes[k], k))
    for place, k in enumerate(order):
        out[k] = min(wanted // len(order) + (place < wanted % len(order)), sizes[k])
    while (room := [k for k in order if out[k] < sizes[k]]) and sum(out) < wanted:
        for k in room[: wanted - sum(out)]:
            out[k] += 1
    return out


def validating(task: Task) -> Work:
    """The question "val": how often a client's model is right on its validation rows."""

    def val(payload: Weights, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        rows = shard.val if len(shard) else None
        if rows is None or not len(rows) or (rows.mask is not None and not rows.mask.any()):
            return None
        right = task.logits(payload, task.inputs(rows.x)).argmax(-1) == rows.y
        right = right if rows.mask is None else right[rows.mask]
        return Answer({"right": Weighted(float(right.double().mean()), right.numel())})

    return val


def at_most_registered(clusters: int) -> Callable[[Holdings], None]:
    """The `check` of methods with a number of clusters that is given: there are as many clients."""

    def check(held: Holdings) -> None:
        if clusters > held.registered:
            allowed = f"at most {held.registered}, the registered clients (data.partition.clients)"
            raise refused("clusters", clusters, allowed)

    return check


def loss_of(totals: Sequence[Any]) -> float:
    """The mean training loss over all slots with an answer; NaN without any.

    >>> loss_of([{"loss": Sum(6.0, 2.0)}, None, {"loss": Sum(2.0, 2.0)}])
    2.0
    """
    losses = [total["loss"] for total in totals if total is not None]
    weight = sum(loss.weight for loss in losses)
    return sum(loss.value for loss in losses) / weight if weight else math.nan


def mean_losses(task: Task, models: Sequence[Weights], shard: Shard) -> Tensor:
    """Mean plain cross-entropy (K,) of each model on a client's rows, in evaluation mode; infinite if it is not finite.

    K forward passes over rows that are brought into the task's format once.
    """
    x, found = task.inputs(shard.x), []
    for weights in models:
        logp = F.log_softmax(task.logits(weights, x).double(), -1)
        found.append(row_losses(logp, shard.y, shard.mask).mean())
    losses = torch.stack(found)
    return torch.where(losses.isfinite(), losses, torch.inf)


def in_slot(delta: Weights, weight: float, k: int, models: int, *, hidden: bool = False) -> Slotted:
    """A client's update as one of K sums.

    Args:
        delta: new minus old.
        weight: what it counts for.
        k: of which model it is.
        models: K.
        hidden: send sums for the other models too, of zeros that count for nothing, so that under secure aggregation
            the server does not learn which one it was; K times as many bytes.
    """
    if not hidden:
        return Slotted({k: Weighted(delta, weight)}, models)
    nothing = map_leaves(torch.zeros_like, delta)
    return Slotted({j: Weighted(delta, weight) if j == k else Weighted(nothing, 0.0) for j in range(models)}, models)


def mixed(trees: Sequence[Any], share: Tensor) -> Any:
    """The mean of several trees, such as models, weighted by shares (K,) of any sum.

    What has no mean, such as how many steps an optimizer took, is that of the largest share, the first of equals.

    >>> mixed([{"w": torch.tensor(1.0), "steps": 9}, {"w": torch.tensor(5.0), "steps": 2}], torch.tensor([1.0, 3.0]))
    {'w': tensor(4.), 'steps': 2}
    """
    parts = share.double() / share.sum()
    largest = int(parts.argmax())

    def mean_of(*leaves: Any) -> Any:
        if not isinstance(leaves[0], Tensor) or not leaves[0].is_floating_point():
            return leaves[largest]
        total = sum(part * leaf.double() for part, leaf in zip(parts, leaves, strict=True) if part > 0)
        return total.to(leaves[0].dtype)

    return map_leaves(mean_of, *trees)


def put(held: tuple[Any, ...], k: int, value: Any) -> tuple[Any, ...]:
    """A tuple with another value at position k.

    >>> put((1, 2, 3), 1, 9)
    (1, 9, 3)
    """
    return (*held[:k], value, *held[k + 1 :])


def stepped(
    server: Server,
    models: Sequence[Weights],
    memos: Sequence[Any],
    sums: Sequence[Sum | None],
    divide: Divide = "members",
    own_layer: str | None = None,
    everyone: float | None = None,
) -> tuple[tuple[Weights, ...], tuple[Any, ...]]:
    """A server step of each model along the mean update of its members; one without members stays where it is.

    Args:
        server: the optimizer.
        models: K.
        memos: the optimizer's, one for each.
        sums: of the updates of each model's members; None where there are none.
        divide: whether a model's update is divided by the weights of its members, or by those of all participants.
        own_layer: the only layer in which the models differ; None means in all. The others move by the mean over all
            updates.
        everyone: the weights of all participants; None where each has trained one model, and they are those of all
            members.
    """
    if everyone is None:
        everyone = sum(total.weight for total in sums if total is not None)
    deltas = [
        None
        if total is None or not total.weight
        else mean(total if divide == "members" else Sum(total.value, everyone))
        for total in sums
    ]
    if own_layer is not None and everyone:
        deltas = [with_shared(delta, sums, own_layer) for delta in deltas]
    steps = [
        (model, memo) if delta is None else server.step(model, memo, delta)
        for model, memo, delta in zip(models, memos, deltas, strict=True)
    ]
    return tuple(weights for weights, _ in steps), tuple(memo for _, memo in steps)


def with_shared(delta: Weights | None, sums: Sequence[Sum | None], own_layer: str) -> Weights:
    """A model's mean update in its own layer, where it has one, and that of all participants everywhere else."""
    there = [total for total in sums if total is not None]
    value = there[0].value
    for total in there[1:]:
        value = map_leaves(torch.add, value, total.value)
    shared = mean(Sum(value, sum(total.weight for total in there)))
    own = {} if delta is None else {name: d for name, d in delta.params.items() if belongs(name, own_layer)}
    rest = {name: d for name, d in shared.params.items() if not belongs(name, own_layer)}
    return Weights(rest | own, shared.buffers)


def belongs(name: str, layer: str) -> bool:
    """Whether a parameter is one of a layer's.

    >>> belongs("head.weight", "head"), belongs("header.weight", "head")
    (True, False)
    """
    return name.startswith(f"{layer}.")


def sent(models: Sequence[Weights], own_layer: str | None) -> list[Weights]:
    """K models as they travel: what they share is in the first only."""
    if own_layer is None:
        return list(models)
    rest = [{name: p for name, p in model.params.items() if belongs(name, own_layer)} for model in models[1:]]
    return [models[0], *(Weights(params) for params in rest)]


def received(models: Sequence[Weights]) -> list[Weights]:
    """K models as a client has them: the reverse of `sent`."""
    first = models[0]
    return [first, *(Weights(first.params | model.params, first.buffers | model.buffers) for model in models[1:])]


def joint(models: Sequence[Weights], layer: str) -> Weights:
    """K models of one task as the weights of one network with `layer` repeated, as `with_branches` makes it.

    What they share is run once, and taken from the first.

    Args:
        models: K.
        layer: the layer in which they differ, or "*" for all.

    >>> one, two = (Weights({"conv.w": torch.ones(1), "head.w": torch.full((1,), k)}) for k in (1.0, 2.0))
    >>> list(joint([one, two], "head").params)
    ['model.conv.w', 'model.head.copies.0.w', 'model.head.copies.1.w']
    """
    params: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    for k, model in enumerate(models):
        params |= {_in_branch(name, layer, k): p for name, p in model.params.items() if not k or _own(name, layer)}
        buffers |= {_in_branch(name, layer, k): b for name, b in model.buffers.items() if not k or _own(name, layer)}
    return Weights(params, buffers)


def apart(weights: Weights, like: Weights, layer: str, count: int) -> list[Weights]:
    """The reverse of `joint`: each model, or each model's part of an update, by the names that `like` has.

    What they share is in all of them.
    """
    return [
        Weights(
            {name: weights.params[_in_branch(name, layer, k if _own(name, layer) else 0)] for name in like.params},
            {name: weights.buffers[_in_branch(name, layer, k if _own(name, layer) else 0)] for name in like.buffers},
        )
        for k in range(count)
    ]


def _own(name: str, layer: str) -> bool:
    return layer == WHOLE or belongs(name, layer)


def _in_branch(name: str, layer: str, k: int) -> str:
    """What a parameter of model k is called in the network of all."""
    if layer == WHOLE:
        return f"model.copies.{k}.{name}"
    return f"model.{layer}.copies.{k}{name[len(layer) :]}" if belongs(name, layer) else f"model.{name}"


def deciding(shard: Shard, on: ChooseOn) -> Shard:
    """The rows that decide: validation rows where they are wanted and there are any, else training rows."""
    val = shard.val if on == "val" else None
    return val if val is not None and len(val) else shard


def choosing(task: Task, on: ChooseOn) -> Work:
    """The `adapt` of methods whose clients take the model that fits their labeled rows best.

    The payload has the "models"; the memory gets the "model", a number. A client without labeled rows keeps none.
    """

    def adapt(payload: Any, memory: Memory, shard: Shard, moment: Moment, rng: Any) -> Answer | None:
        rows = deciding(shard, on)
        if not len(rows):
            return None
        return Answer({}, memory={"model": mean_losses(task, payload["models"], rows).argmin()})

    return adapt


def by_own_model(task: Task) -> Any:
    """The `predict` that goes with `choosing`: a client's rows by its model, or by the "usual" one of the payload."""

    def predict(payload: Any, memories: Sequence[Memory], x: Tensor, owner: Tensor) -> Prediction:
        usual = int(payload["usual"])
        own = torch.tensor([usual if memory is None else int(memory["model"]) for memory in memories])[owner]
        logp: Tensor | None = None
        for k in own.unique().tolist():
            rows = own == k
            found = F.log_softmax(task.logits(payload["models"][k], x[rows]), -1)
            logp = found.new_empty(len(x), *found.shape[1:]) if logp is None else logp
            logp[rows] = found
        assert logp is not None
        return Prediction(logp, own)

    return predict


def given(
    models: Sequence[Weights], model: Tensor, clients: Tensor, among: Tensor, usual: int, **more: Any
) -> tuple[list[Payload], Slot]:
    """The `serve` of methods whose server knows which model is whose: slot k has model k, the last slot all of them.

    Args:
        models: K.
        model: (registered,) whose is which; -1 where it is not known.
        clients: who is served. Those whose model is not known, held-out ones among them, get the last slot, and find a
            model by themselves (`finding`, or as the method has it).
        among: (n,) the models that they may find.
        usual: which of `among` they get that find none.
        more: what else the last slot has.
    """
    served: list[Payload] = [
        {"models": (weights,), "numbers": torch.tensor([k]), "usual": 0} for k, weights in enumerate(models)
    ]
    known = clients < len(model)
    slot = torch.full_like(clients, -1)
    slot[known] = model[clients[known]]
    everything = {"models": tuple(models[k] for k in among.tolist()), "numbers": among, "usual": usual, **more}
    return [*served, everything], torch.where(slot < 0, len(models), slot)


def finding(task: Task, on: ChooseOn = "val") -> Work:
    """The `adapt` that goes with `given`: of all models a client takes the one that fits its labeled rows best."""

    def adapt(payload: Any, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        rows = deciding(shard, on)
        if len(payload["models"]) == 1 or not len(rows):
            return None
        return Answer({}, memory={"found": mean_losses(task, payload["models"], rows).argmin()})

    return adapt


def by_given_model(task: Task) -> Any:
    """The `predict` that goes with `given`: by the model that a client was given, or has "found"."""

    def predict(payload: Any, memories: Sequence[Memory], x: Tensor, owner: Tensor) -> Prediction:
        found = [None if memory is None or "found" not in memory else {"model": memory["found"]} for memory in memories]
        made = choose(payload, found, x, owner)
        return Prediction(made.logp, payload["numbers"][made.choice])

    choose = by_own_model(task)
    return predict
