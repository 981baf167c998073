"""K whole models of one task: a training round in clusters, model selection by clients, and prediction."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from fedtide.cohorts import Cohort, ask_to_train
from fedtide.cohorts.selection import Serve
from fedtide.core.base import Answer, Facts, Fleet, Holdings, Moment, Reply, Shard, Sum, Weighted, Weights, Work, mean
from fedtide.core.errors import FedtideError, refused
from fedtide.core.rng import Rng
from fedtide.core.trees import map_leaves
from fedtide.learn import Losses, Server, Steps, Stepwise, Task

NOT_POOLED = {"pooled": "its models begin with different weights, so their updates cannot be compared"}
"""Why models that begin apart are not pooled."""

Divisor = Literal["members", "participants"]
"""Divisor of a model's update: the weight of the clients that trained it, or of all that answered."""
UNPRIVATE = {
    "members": "",
    "participants": "a client has its whole weight in each model that it trains; normalize_by = 'members' allows it",
}
"""Why a client that trains several models cannot be private, by this divisor."""

T = TypeVar("T")


S = TypeVar("S", bound=Any)
"""State of a clustered method: a dataclass with `weights` and `server` of each cluster, and the memo of `cohort`."""


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
    sizes: Tensor | None = None,
) -> tuple[S, Reply, Facts]:
    """Run federated averaging inside each cluster: a round of "train", and a server step of every trained model.

    Args:
        fleet: the clients.
        state: the state, with a model for each cluster.
        clients: the participants (clients,).
        cluster: the cluster of each participant (clients,).
        server: the optimizer.
        cohort: the cohort that picked `clients`; it learns from the reply.
        reveal: further values revealed per client.
        totals: transforms a cluster's sums (None if it has none) before their mean is taken.
        sizes: (K,) number of clients in each cluster, for transforms; None: participants count for themselves.

    Returns:
        The new state, the reply, and the facts "loss" and "members" (number of clients that trained each model). If no
        client answered, the models are unchanged and there are no facts.
    """
    slots = len(state.weights)
    models = list(state.weights)
    bounds = {"slot": cluster, "slots": slots, "sizes": sizes}
    state, reply = ask_to_train(cohort, fleet, state, clients, models, reveal=reveal, **bounds)
    if reply.total is None:
        return state, reply, {}
    changed = reply.total if totals is None else [totals(total) for total in reply.total]
    sums = [None if total is None else total["delta"] for total in changed]
    trained = torch.bincount(cluster[torch.isin(clients, reply.clients)], minlength=slots)
    facts: dict[str, Any] = {"loss": mean_over_slots(reply.total, "loss"), "members": trained}
    return step_models(state, server, sums), reply, facts


def init_models(task: Task, rng: Rng, count: int, noise: float | None = None) -> tuple[Weights, ...]:
    """Initialize K models, the first like FedAvg's.

    Args:
        task: model and loss.
        rng: the key of the first model.
        count: K.
        noise: standard deviation of the normal noise on the first model that makes the others; None draws K models.
    """
    first, keys = task.init(rng), [rng.at("model", k) for k in range(1, count)]
    return (first, *(task.init(key) if noise is None else perturb(first, noise, key) for key in keys))


def perturb(weights: Weights, noise: float, rng: Rng) -> Weights:
    """Add normal noise to every parameter."""
    draw = rng.numpy()
    params = {name: p + torch.from_numpy(draw.normal(0.0, noise, p.shape)).to(p) for name, p in weights.params.items()}
    return Weights(params, weights.buffers)


@dataclass(frozen=True)
class Starts:
    """Sets of models, of which one is to be the start."""

    sets: list[tuple[Weights, ...]]


def fit_question(task: Task) -> Work:
    """Build the question "fit": a client's lowest mean loss among the models of each of several sets."""

    @Stepwise
    def fit(payload: Any, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Steps[Answer | None]:
        if not len(shard):
            return None
        least = []
        for models in payload.sets:
            least.append((yield Losses(task, models, shard)).min())
        return Answer({"losses": Weighted(torch.stack(least).clamp(max=1e6), len(shard))})

    return fit


def best_set(fleet: Fleet, pick: Callable[[], Tensor], sets: Sequence[tuple[Weights, ...]]) -> tuple[Weights, ...]:
    """Return the set of models that fits some clients best, by the question "fit"; the first if none answers."""
    got = mean(fleet.ask("fit", pick(), Starts(list(sets))).total) if len(sets) > 1 else None
    return sets[0 if got is None else int(got["losses"].argmin())]


def refuse_equal_start(task: Task, models: int, otherwise: str = "") -> None:
    """Refuse given initial weights if several models would begin equal and stay so.

    Args:
        task: the task, with or without initial weights.
        models: number of models.
        otherwise: alternative that would tell them apart, for the message.
    """
    if task.begin is not None and models > 1:
        raise FedtideError(
            f"init_from: found weights, with which {models} models would stay equal; allowed: none{otherwise}"
        )


def pick_per_cluster(
    cohort: Cohort, memo: Any, fleet: Fleet, rng: Rng, serve: Serve, cluster: Tensor, count: int
) -> Tensor:
    """Pick equally many participants from each cluster (clients,), sorted; for one cluster those of the cohort.

    Args:
        cohort: the selection of participants.
        memo: the cohort's memo.
        fleet: the clients.
        rng: the round's key.
        serve: models that clients would be evaluated with now.
        cluster: (registered,) the cluster of each client.
        count: number of clusters.
    """
    reachable = fleet.reachable
    members = [reachable[cluster[reachable] == k] for k in range(count)]
    wanted = cohort.asked(len(reachable))
    picked = [
        cohort.pick(memo, fleet, rng, serve, among, m)
        for among, m in zip(members, quotas([len(among) for among in members], wanted), strict=True)
    ]
    return torch.cat(picked).sort().values


def quotas(sizes: Sequence[int], wanted: int) -> list[int]:
    """Divide participants among clusters: equally, the rest to the largest; others fill the gap of a small cluster.

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


def at_most_registered(clusters: int) -> Callable[[Holdings], None]:
    """Build the `check` of methods with a given number of clusters: there must be as many clients."""

    def check(clients: Holdings) -> None:
        if clusters > clients.registered:
            allowed = f"at most {clients.registered}, the registered clients (data.partition.clients)"
            raise refused("clusters", clusters, allowed)

    return check


def mean_over_slots(totals: Sequence[Any] | None, name: str) -> float:
    """Return the mean of a leaf, such as "loss", over all slots with an answer; NaN without any.

    >>> mean_over_slots([{"loss": Sum(6.0, 2.0)}, None, {"loss": Sum(2.0, 2.0)}], "loss")
    2.0
    """
    leaves = [total[name] for total in totals or () if total is not None]
    weight = sum(leaf.weight for leaf in leaves)
    return sum(float(leaf.value) for leaf in leaves) / weight if weight else math.nan


def mix_models(trees: Sequence[Any], share: Tensor) -> Any:
    """Return the mean of several trees, such as models, weighted by shares (K,) of any sum.

    Leaves without a mean, such as step counts of an optimizer, come from the tree of largest share; ties: the first.

    >>> trees = [{"w": torch.tensor(1.0), "steps": 9}, {"w": torch.tensor(5.0), "steps": 2}]
    >>> mix_models(trees, torch.tensor([1.0, 3.0]))
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


def mix_clusters(state: S, share: Tensor) -> S:
    """Make the models of new clusters: means of the old ones, as clients bring them along.

    Args:
        state: the state, with K models.
        share: (new clusters, K) share of its members that each new cluster has from an old one.
    """
    weights, server = (tuple(mix_models(trees, row) for row in share) for trees in (state.weights, state.server))
    return replace(state, weights=weights, server=server)


def replace_at(values: tuple[Any, ...], k: int, value: Any) -> tuple[Any, ...]:
    """Return a tuple with another value at position k.

    >>> replace_at((1, 2, 3), 1, 9)
    (1, 9, 3)
    """
    return (*values[:k], value, *values[k + 1 :])


def step_models(
    state: S,
    server: Server,
    sums: Sequence[Sum | None],
    normalize_by: Divisor = "members",
    everyone: float | None = None,
) -> S:
    """Take a server step of each model along the mean update of its members; a model without members stays unchanged.

    Args:
        state: the state, with K models.
        server: the optimizer.
        sums: sums of the updates of each model's members; None if there are none.
        normalize_by: divide a model's update by the weights of its members, or by those of all participants.
        everyone: total weight of all participants; None if each has trained one model, so that it is that of all
            members.
    """
    if everyone is None:
        everyone = sum(total.weight for total in sums if total is not None)
    steps = [
        (model, memo)
        if total is None or not total.weight
        else server.step(model, memo, mean(total if normalize_by == "members" else replace(total, weight=everyone)))
        for model, memo, total in zip(state.weights, state.server, sums, strict=True)
    ]
    weights, memos = zip(*steps, strict=True)
    return replace(state, weights=weights, server=memos)


def mean_of_all(sums: Sequence[Sum | None], share: Tensor) -> Weights:
    """Return the mean update over all models, each with its share (K,).

    >>> sums = [Sum(Weights({"w": torch.tensor(2.0)}), 1.0), None, Sum(Weights({"w": torch.tensor(12.0)}), 2.0)]
    >>> mean_of_all(sums, torch.tensor([6.0, 0.0, 2.0])).params
    {'w': tensor(3.)}
    """
    trained = [k for k in range(len(sums)) if share[k] > 0]
    return mix_models([mean(sums[k]) for k in trained], share[trained])
