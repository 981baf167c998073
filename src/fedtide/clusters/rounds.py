"""K whole models of one task: a training round in clusters, model selection by clients, and prediction."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedtide.cohorts import Cohort, ask_to_train, with_cohort
from fedtide.core.base import (
    Algorithm,
    Answer,
    Facts,
    Fleet,
    Holdings,
    Memory,
    Moment,
    Notes,
    Prediction,
    Reply,
    Shard,
    Slotted,
    Sum,
    Weighted,
    Weights,
    Work,
    mean,
)
from fedtide.core.errors import FedtideError, refused
from fedtide.core.rng import Rng
from fedtide.core.sums import replace_divisor
from fedtide.core.trees import map_leaves
from fedtide.learn import LocalTrainer, Server, Task, Training, Weighting, client_weight, mean_losses
from fedtide.learn.target import CLASSES
from fedtide.models.base import begins_equal

NOT_POOLED = {"pooled": "its models begin with different weights, so their updates cannot be compared"}
"""Why models that begin apart are not pooled."""

Divisor = Literal["members", "participants"]
"""Divisor of a model's update: the weight of the clients that trained it, or of all that answered."""
UNPRIVATE = {
    "members": "",
    "participants": "a client has its whole weight in each model that it trains; normalize_by = 'members' allows it",
}
"""Why a client that trains several models cannot be private, by this divisor."""


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
        state: the state, with a model for each cluster.
        clients: the participants (clients,).
        cluster: the cluster of each participant (clients,).
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


def refuse_equal_start(task: Task, models: int, otherwise: str = "", *, is_best_chosen: bool = False) -> None:
    """Refuse given initial weights, or adapters alone, if several models would begin equal and stay so.

    Args:
        task: the task, with or without initial weights.
        otherwise: alternative that would tell them apart, for the message.
        is_best_chosen: whether clients train the best model alone. Then of adapters, which change nothing at first, all
            would choose the first for ever.
    """
    if is_best_chosen and models > 1 and begins_equal(task.scratch.module):
        but = "change nothing at first, so clients would choose the same one for ever"
        raise FedtideError(f"model.adapters: {models} models of adapters alone {but}; allowed: a new head{otherwise}")
    if task.begin is not None and models > 1:
        raise FedtideError(
            f"init_from: found weights, with which {models} models would stay equal; allowed: none{otherwise}"
        )


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
        total = leaves[largest].double() * parts[largest]
        for k, part in enumerate(parts.tolist()):
            if part > 0 and k != largest:
                total.add_(leaves[k], alpha=part)
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
        else server.step(model, memo, mean(total if normalize_by == "members" else replace_divisor(total, everyone)))
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


# -- the model of a client ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Served:
    """Models that a client is served, of which it takes one.

    numbers: server numbers of the models; None for their places. usual: place of the model for a client that finds
    none. count: number of all models of the method; None if these are all. places: payload to find a model by, if the
    method has a way of its own.
    """

    models: Sequence[Weights]
    numbers: Tensor | None = None
    usual: int | Tensor | None = None
    count: int | None = None
    places: Any = None


def decision_rows(shard: Shard) -> Shard:
    """Return the samples for decisions: validation samples if there are any, else training samples."""
    return shard.val if shard.val is not None and len(shard.val) else shard


def serve_clusters(
    models: Sequence[Weights], model: Tensor, clients: Tensor, among: Tensor | None = None, places: Any = None
) -> tuple[list[Served], Tensor]:
    """Build the `serve` of methods whose server knows each client's model: slot k has model k, the last slot all.

    Args:
        models: K models.
        model: (registered,) the model of each client; -1 if unknown.
        clients: the clients to serve. Clients without a known model, such as held-out ones, get the last slot. They
            find a model by `find_model`, or by the method's own way.
        among: (n,) the models that they may find; None means all. A client that finds none gets the model
            that most clients are known to have, the "usual" one.
        places: what clients of the last slot find their model by; None for `find_model`.

    >>> models = [Weights({"w": torch.tensor(k)}) for k in (0.0, 1.0)]
    >>> served, slot = serve_clusters(models, torch.tensor([1, -1, -1]), torch.tensor([0, 1, 9]))
    >>> slot.tolist(), served[2].usual
    ([1, 2, 2], 1)
    """
    served = [Served((weights,), torch.tensor([k]), 0, len(models)) for k, weights in enumerate(models)]
    among = torch.arange(len(models)) if among is None else among
    usual = int(torch.bincount(model[model >= 0], minlength=len(models))[among].argmax())
    registered = clients < len(model)
    slot = torch.full_like(clients, -1)
    slot[registered] = model[clients[registered]]
    everything = Served(tuple(models[k] for k in among.tolist()), among, usual, len(models), places)
    return [*served, everything], torch.where(slot < 0, len(models), slot)


def as_served_in_cluster(payload: Weights, memory: Any, answer: Answer) -> tuple[Served, None]:
    """Return the payload that would be served to a client asked in the slot of its cluster; see `Algorithm`."""
    return Served((payload,), usual=0), None


def find_model(task: Task) -> Work:
    """Build the `adapt` of methods whose clients take the model with the lowest loss on their validation samples.

    A client without validation samples judges on its training samples. The memory gets the place of the one "found".
    """

    def adapt(payload: Served, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        rows = decision_rows(shard)
        if len(payload.models) == 1 or not len(rows):
            return None
        return Answer({}, memory={"found": mean_losses(task, payload.models, rows).argmin()})

    return adapt


def predict_by_cluster(task: Task) -> Any:
    """Build the `predict` for `find_model`: by the model that a client has "found", else by the usual one."""

    def predict(payload: Any, memories: Sequence[Any], x: Tensor, owner: Tensor) -> Prediction:
        places = [payload.usual if memory is None else memory.get("found", payload.usual) for memory in memories]
        model = torch.tensor([int(k) for k in places])[owner]
        log_probs: Tensor | None = None
        for k in model.unique().tolist():
            rows = model == k
            part = task.predict_rows(payload.models[k], x[rows])
            log_probs = part.new_empty(len(x), *part.shape[1:]) if log_probs is None else log_probs
            log_probs[rows] = part
        assert log_probs is not None
        return Prediction(log_probs, model if payload.numbers is None else payload.numbers[model])

    return predict


def build_clustered(
    name: str,
    task: Task,
    local: LocalTrainer,
    cohort: Cohort,
    init: Any,
    round: Any,
    serve: Any,
    works: Mapping[str, Work],
    adapt: Work | None = None,
    check: Any = None,
    sends: tuple[type, ...] = (),
    **options: Any,
) -> Algorithm[Any]:
    """Build a method whose server knows the model of each client, or lets it `adapt`; options are of `with_cohort`."""
    predict, sends = predict_by_cluster(task), (Served, *sends)
    options.setdefault("groups_by", tuple(name for name in works if name != "train"))
    algorithm = Algorithm(name, init, works, round, serve, predict, adapt, as_served_in_cluster, check)
    return with_cohort(algorithm, cohort, task, local, adapt=False, sends=sends, models="clusters", **options)


def reveal_update(training: Training, show: Callable[[Weighted], dict[str, Tensor]], repeated: str) -> Work:
    """Build local training whose update the server sums, and of which it sees something by itself.

    Args:
        training: local training.
        show: weighted update -> values revealed per client.
        repeated: the one of these values that repeats a part of the update.
    """

    def train(payload: Weights, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        answer = training(payload, memory, shard, moment, rng)
        return None if answer is None else replace(answer, rows=show(answer.total["delta"]), repeated=(repeated,))

    return train


def answer_model(
    j: int, delta: Weights, loss: float, shard: Shard, models: int, weighting: Weighting, **more: Weighted | Slotted
) -> Answer:
    """Build the answer of a client that has trained one of several models: its update, its loss and its choice."""
    chosen = F.one_hot(torch.tensor(j), models).double()
    return answer_models({j: delta}, chosen, loss, shard, weighting, members=Weighted(chosen), **more)


def answer_models(
    updates: Mapping[int, Weights],
    share: Tensor,
    loss: float,
    shard: Shard,
    weighting: Weighting,
    memory: Memory = None,
    **more: Weighted | Slotted,
) -> Answer:
    """Build the answer of a client that has trained several models, or one: its update of each, and its loss.

    Args:
        updates: by the number of the model, new minus received weights.
        share: (K,) of the client's weight that counts for each model.
        loss: mean training loss.
        shard: the client's samples.
        weighting: weight of the client.
        memory: what it keeps from now on.
        more: further sums.
    """
    weight = client_weight(shard, weighting)
    parts = {k: Weighted(update, weight * float(share[k])) for k, update in updates.items()}
    total = {"delta": Slotted(parts, len(share)), "loss": Weighted(loss, len(shard))}
    return Answer(total | more, memory=memory, notes=Notes(branch=share.argmax()), update=updates)


def accuracy_question(task: Task) -> Work:
    """Build the question "val": accuracy of a client's model on its validation samples."""

    def val(payload: Weights, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        rows = shard.val if len(shard) else None
        if rows is None or not len(rows.labels):
            return None
        right = 1 - errors_of(task, payload, rows)
        return Answer({"right": Weighted(float(right.mean()), right.numel())})

    return val


def errors_of(task: Task, weights: Weights, shard: Shard) -> Tensor:
    """Return 1 for each label that counts and that a model does not predict, else 0 (labels,), float64.

    Of other targets return the plain losses of the rows, which of numbers is about 1 for a model that says the mean.
    """
    if task.target != CLASSES:
        return task.losses(weights, shard).double()
    wrong = (task.logits(weights, task.inputs(shard.x)).argmax(-1) != shard.y).double()
    return wrong if shard.mask is None else wrong[shard.mask]
