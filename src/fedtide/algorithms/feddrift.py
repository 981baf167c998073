"""FedDrift: a client whose best model became worse gets a new one; models that fit each other's clients merge.

Jothimurugesan, Hsieh, Wang, Joshi, Gibbons: *Federated Learning under Distributed Concept Drift*, AISTATS 2023,
Algorithms 1 (FedDrift-Eager) and 2 (FedDrift).

| symbol | meaning |
| --- | --- |
| `s` | time step: `rounds_per_step` rounds |
| `L_mi` | loss of model m on the samples that client i has at the beginning of a step |
| `L_mj` | loss of model m on all samples of the clients of model j |
| `delta`, `delta'` | tolerated increase of a client's loss, largest distance of models that merge |

    beginning of a step, every client, with every model in use:
        b = argmin_m L_mi                                          its model in this step
        if  L_bi > L_i + delta,  L_i its least a step before:      it leaves for a new model
            FedDrift: one for each such client;  Eager: one for all of them together
        FedDrift, among the models that are not new:
        D(i, j) = max(L_ij - L_ii, L_ji - L_jj, 0);  complete linkage, cut at delta';
        each resulting group becomes one model, the mean weighted by (client, step) pairs
    rounds of the step: FedAvg inside each model, on the samples of the steps in which clients had that model

When to use it: concepts come and go at different clients at different times, their number is unknown, and all clients
can answer at the beginning of a step and run every model. A concept that comes back finds its model again.

Choices:
    The loss of a model is its error rate, as in the released code, or its cross-entropy, as in the paper. A new model
    begins as the one that its client leaves (the code; for Eager that of the lowest client), or as the run began. It
    stays apart in the step in which it is made, W = 1. The first loss that clients are compared with is that before any
    training, as in the code, so a drift between the first two steps goes unnoticed. A new model takes the least
    recently used of `max_clusters` places; if all are in use, clients stay with their best model.
    A stream does not give back the samples of earlier steps. With `window = 1` clients train on the samples of the step
    alone, and models are compared on those. These samples also represent the model that a client had a step ago, if
    that is worse than its best by at most delta and the client does not leave. A model that no client had then or has
    now does not merge. With a larger window a client keeps the samples that it trained on in the last `window - 1`
    steps, and the model of each; it then receives every model in every round.
    The optimizer of a merged model is reset. Before evaluation, a client that was never asked takes the model with the
    lowest loss on its labeled samples; one without takes the model that most clients have. With delta = 1 and errors no
    client ever leaves: one model, trained on the samples of the last `window` steps, which is the paper's baseline
    "Window". With `cluster_layer` other than "*" models share all other layers, which move by the mean of all updates;
    new and merged models have them as they are, and their moments.
    The `anchor` is ours, and `anchor = false` the paper: FedAvg's model beside the others, mixed into what a client's
    own predicts (`fedtide.multi.anchor`). In ten small settings over five seeds the paper's form lost up to
    2.0 points to the best single model and gained up to 6.8, anchored it lost none in the mean and gained up to 7.5
    (recipe never-worse).
    `pooling`, ours and off, draws the updates of models that are alike together (`fedtide.multi.pooling`): by day and
    by night it lost what the paper's form had gained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedtide.cohorts import Cohort, Everyone
from fedtide.core.config_types import Count, Flag, ModelCount, NonNegative, Spelled, ingredient
from fedtide.core.ids import per_client
from fedtide.core.rng import Rng
from fedtide.core.sums import merge
from fedtide.core.trees import detached
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
    Slotted,
    Weighted,
    Weights,
    Work,
)
from fedtide.learn.device import home
from fedtide.learn.judging import mean_losses
from fedtide.learn.local import LocalTrainer
from fedtide.learn.participation import ask_to_train, with_cohort
from fedtide.learn.server import SGD, Server
from fedtide.learn.steps import Steps, Stepwise, Train
from fedtide.learn.task import Task
from fedtide.learn.terms import Pull, proximal
from fedtide.learn.training import sum_update
from fedtide.models.branched import WHOLE
from fedtide.multi.anchor import Anchor, Anchored, Anchoring
from fedtide.multi.clusters import (
    check_layer,
    errors_of,
    find_model,
    mix_models,
    predict_by_cluster,
    receive_models,
    replace_at,
    send_models,
    serve_clusters,
    share_layers,
    step_models,
    step_pooled,
)
from fedtide.multi.pooling import Evidence
from fedtide.parts.weighting import Weighting, client_weight

Criterion = Literal["error", "loss"]
"""Loss of a model: its error rate, or its mean cross-entropy."""


@dataclass(frozen=True)
class State:
    """The places for models, the optimizer's memo of each, their initial weights, and the model of each client.

    step: the last time step that began, -1 before the first. model: (registered,) the place of each client's model.
    judged: (registered,) mask of clients that have judged models, least: (registered,) the loss of their best one.
    in_use: (K,) mask of places that have a model, used: (K,) the last step in which it had a client, pairs: (K,) its
    number of (client, step) pairs, number: (K,) its number among all models ever made. place: (made,) the current place
    of each of those, or of the model it was merged into; -1 if it is gone. anchor: the model of all samples, if any.
    cohort: the cohort's memo. evidence: of `pooling`.
    """

    weights: tuple[Weights, ...]
    server: tuple[Any, ...]
    start: Weights
    step: int
    model: Tensor = field(metadata=per_client(new=lambda state: int(torch.bincount(state.model).argmax())))
    judged: Tensor = field(metadata=per_client(new=False))
    least: Tensor = field(metadata=per_client(new=0.0))
    in_use: Tensor
    used: Tensor
    pairs: Tensor
    number: Tensor
    place: Tensor
    anchor: Anchor | None = None
    cohort: Any = None
    evidence: Evidence | None = None

    @property
    def there(self) -> Tensor:
        """Places in use."""
        return self.in_use.nonzero().flatten()


@dataclass(frozen=True)
class Kept:
    """Samples that a client keeps, with their step and the number of their model among all ever made."""

    step: int
    number: int
    rows: Shard


@ingredient
class Isolate:
    """FedDrift: a new model for each client that leaves; then models that fit each other's clients merge (Algorithm 2).

    Args:
        merge: delta', largest distance of models that merge; None is `delta`.
    """

    merge: NonNegative | None = None
    kind: Literal["isolate"] = "isolate"


@ingredient
class Eager:
    """FedDrift-Eager: one new model for all clients that leave, and no merging (Algorithm 1)."""

    kind: Literal["eager"] = "eager"


Variant = Annotated[Isolate | Eager, Field(discriminator="kind")]


def feddrift(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    variant: Annotated[Variant, Spelled] = Isolate(),
    rounds_per_step: Count = 10,
    delta: NonNegative = 0.1,
    criterion: Criterion = "error",
    max_clusters: ModelCount = 10,
    cluster_layer: str = WHOLE,
    pooling: Flag = False,
    init_new_from: Literal["previous", "start"] = "previous",
    window: Count = 1,
    mu: Pull = 0.0,
    anchor: Anchored = True,
    server: Server = SGD(),
    cohort: Cohort = Everyone(),
    weighting: Weighting = "samples",
) -> Algorithm[State]:
    """Clustering that follows drift by the losses of all models on all clients.

    Sends all models down and their losses up at the beginning of a step; otherwise like FedAvg for each model.

    Args:
        variant: "isolate" (FedDrift) or "eager" (FedDrift-Eager): new models for clients that leave, and merging.
        rounds_per_step: rounds of a time step.
        delta: increase of a client's loss since the last step above which it leaves; an error rate, or nats.
        criterion: loss of a model: "error" (the released code) or "loss" (the paper).
        max_clusters: largest number of models at a time; each uses the memory of a model, whether used or not.
        cluster_layer: the only layer in which the models differ, for example "head"; "*" for whole models.
        pooling: draw the update of each model toward that of all, as far as chance sets them apart; clients then also
            send the squared length of their update in each layer. "false" is the paper.
        init_new_from: initial weights of a new model: those of the "previous" one, or those at the "start" of the run.
        window: number of steps whose samples count, including the current one; above 1, clients keep samples.
    """
    check_layer(task, cluster_layer, "cluster_layer")
    term = proximal(mu)
    beside, predict = Anchoring(anchor, task, local, server, weighting, term=term), predict_by_cluster(task)

    def init(fleet: Fleet, rng: Rng) -> State:
        start, registered = task.init(rng), len(fleet.clients)
        memos, none = tuple(server.init(start) for _ in range(max_clusters)), torch.zeros(registered, dtype=torch.int64)
        zeros, in_use = torch.zeros(max_clusters, dtype=torch.int64), torch.arange(max_clusters) == 0
        return State((start,) * max_clusters, memos, start, -1, none, none > 0, none.double(), in_use, zeros,
                     zeros.double(), zeros, zeros[:1], beside.start(rng), cohort.init(fleet))  # fmt: skip

    def judge(payload: Any, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        """Return the loss of each model on the client's samples, and sums over kept samples by their model."""
        if not len(shard):
            return None
        models = receive_models(payload["models"])
        bad = model_losses(task, models, shard, criterion)
        rows = {"bad": bad, "rows": torch.tensor(float(len(shard)), dtype=torch.float64)}
        if window == 1:
            return Answer({}, rows)
        held = torch.zeros(max_clusters, dtype=torch.float64)
        sums = torch.zeros(len(bad), max_clusters, dtype=torch.float64)
        for j, past in kept_rows(memory, payload["place"], payload["step"], window).items():
            held[j] = len(past)
            sums[:, j] = len(past) * model_losses(task, models, past, criterion)
        return Answer({"past": Weighted({"bad": sums, "rows": held})}, rows)

    @Stepwise
    def train(payload: Any, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Steps[Answer | None]:
        """Train the client's model on its samples and, with a window, every model on the samples kept for it."""
        own, received = payload["own"], receive_models(list(payload["models"].values()))
        models = dict(zip(payload["models"], received, strict=True))
        mine = {} if window == 1 else kept_rows(memory, payload["place"], payload["step"], window)
        mine[own] = merge_shards([shard, *([mine[own]] if own in mine else [])])
        judged = {**payload, "models": [models[own]], "usual": 0}
        more = yield from beside.train(predict, judged, None, shard, moment, rng)
        parts, updates, losses, seen = {}, {}, 0.0, 0
        for k in sorted(mine):
            key = rng if k == own else rng.at("model", k)
            fitted = yield Train(task, local, models[k], mine[k], moment, key, term)
            if fitted.steps:
                updates[k] = fitted.delta if len(mine) == 1 else detached(fitted.delta)
                parts[k] = Weighted(updates[k], client_weight(mine[k], weighting))
                losses, seen = losses + fitted.loss * len(mine[k]), seen + len(mine[k])
        if not parts:
            return None
        total: dict[str, Any] = {"delta": Slotted(parts, max_clusters), "loss": Weighted(losses / seen, seen), **more}
        if pooling:
            told = {k: sum_update(part.value, part.weight, squares=True) for k, part in parts.items()}
            for name in ("squares", "weight"):
                total[name] = Slotted({k: each[name] for k, each in told.items()}, max_clusters)
        if window == 1 or not len(shard):
            return Answer(total, update=updates)
        kept = with_kept(memory, payload["step"], int(payload["number"]), shard, window)
        return Answer(total, memory={"kept": kept}, update=updates)

    def sent(state: State) -> list[Payload]:
        """Return the payload for the clients of each place: their model, or with a window all models in use."""
        there, places, more = state.there.tolist(), range(max_clusters), beside.sent(state)
        if window == 1:
            return [{"models": {k: state.weights[k]}, "own": k, **more} if k in there else {} for k in places]
        models = dict(zip(there, send_models([state.weights[k] for k in there], cluster_layer), strict=True))
        everything = {"models": models, "step": state.step, "place": state.place, **more}
        return [{**everything, "own": k, "number": state.number[k]} if k in there else {} for k in places]

    def round(state: State, fleet: Fleet, rng: Rng) -> tuple[State, Facts]:
        step, facts = fleet.moment.round // rounds_per_step, dict[str, Any]()
        if step > state.step:
            state, facts = begin_step(state, fleet, step)
        clients = cohort.pick(state.cohort, fleet, rng, partial(serve, state))
        state, reply = ask_to_train(cohort, fleet, state, clients, sent(state), slot=state.model[clients])
        facts["models"] = len(state.there)
        if reply.total is None:
            return state, facts
        total = reduce(merge, [total for total in reply.total if total is not None])
        members = torch.bincount(state.model[reply.clients], minlength=max_clusters)
        facts |= {"loss": total["loss"].value / total["loss"].weight, "members": members}
        state, weighed = beside.step(state, total)
        facts |= weighed
        if not pooling:
            return step_models(state, server, total["delta"], own_layer=cluster_layer), facts
        each = [
            None if total["delta"][k] is None else {name: total[name][k] for name in ("delta", "squares", "weight")}
            for k in range(max_clusters)
        ]
        state, apart = step_pooled(state, server, each, cluster_layer)
        return state, facts | apart

    def begin_step(state: State, fleet: Fleet, step: int) -> tuple[State, dict[str, Any]]:
        """Give each client its best model, or a new one if that became worse; then merge models."""
        there = state.there
        models = send_models([state.weights[k] for k in there.tolist()], cluster_layer)
        payload = {"models": models, "place": state.place, "step": step}
        reply = fleet.ask("judge", fleet.reachable, payload, reveal=("bad", "rows"), passes=len(there))
        if not len(reply.clients):
            return state, {}
        made, before = len(state.place), state.model[reply.clients]
        state, left = with_best(state, reply, there, step, delta)
        leavers = reply.clients[left]
        for each in [leavers] if isinstance(variant, Eager) else leavers.split(1):
            state = with_new(state, each, init_new_from, server, cluster_layer)
        one_each = torch.ones(len(reply.clients), dtype=torch.float64)
        state = replace(state, pairs=state.pairs.index_add(0, state.model[reply.clients], one_each))
        groups: list[list[int]] = []
        if isinstance(variant, Isolate):
            mine = state.model[reply.clients][:, None] == there
            if window == 1:
                mine |= still_good(reply, before, left, there, delta)
            groups = groups_to_merge(
                reply, mine, there, state.number[there] < made, delta if variant.merge is None else variant.merge
            )
        for places in groups:
            state = merge_models(state, places, server, cluster_layer)
        gone = sum(len(places) - 1 for places in groups)
        if state.evidence is not None and (len(state.place) > made or gone):
            state = replace(state, evidence=state.evidence.of_new_clusters())
        return state, {"left": int(left.sum()), "new": len(state.place) - made, "merged": gone}

    def serve(state: State, clients: Tensor) -> tuple[Payload, Slot]:
        model = torch.where(state.judged, state.model, -1)
        served, slot = serve_clusters(state.weights, model, clients, state.there)
        return [{**each, **beside.sent(state)} for each in served], slot

    works: dict[str, Work] = {"train": train, "judge": judge}
    reveals = ("bad", "rows")
    made = Algorithm("feddrift", init, works, round, serve, predict, find_model(task), reveals)
    # On a clock it costs what it would without kept samples.
    return with_cohort(beside.added_to(made), cohort, task, local, adapt=False, trained=beside.trained())


def model_losses(task: Task, models: Sequence[Weights], shard: Shard, criterion: Criterion) -> Tensor:
    """Return the loss of each model on a client's samples (M,), float64, in evaluation mode; at most 1e6."""
    if criterion == "loss":
        return mean_losses(task, models, shard).clamp(max=1e6)
    return torch.stack([errors_of(task, weights, shard).mean() for weights in models])


def kept_rows(memory: Memory, place: Tensor, step: int, window: int) -> dict[int, Shard]:
    """Return the samples that a client keeps from the last `window - 1` steps, by the place of their model."""
    found: dict[int, list[Shard]] = {}
    for kept in memory["kept"] if memory else ():
        k = int(place[kept.number])
        if step - window < kept.step < step and k >= 0:
            found.setdefault(k, []).insert(0, kept.rows)
    return {k: merge_shards(shards) for k, shards in found.items()}


def with_kept(memory: Memory, step: int, number: int, shard: Shard, window: int) -> tuple[Kept, ...]:
    """Return the samples that a client keeps from now on: those of recent steps, and those of this step."""
    before = [kept for kept in memory["kept"] if step - window < kept.step < step] if memory else []
    return (*before, Kept(step, number, replace(shard, x=home(shard.x), fetch_val=None)))


def merge_shards(shards: Sequence[Shard]) -> Shard:
    """Concatenate samples of several shards; a sample in several of them comes from the first."""
    first, *rest = shards
    for more in rest:
        first = first.joined(more.pick(~torch.isin(more.ids, first.ids)))
    return first


def with_best(state: State, reply: Reply, there: Tensor, step: int, delta: float) -> tuple[State, Tensor]:
    """Assign each client that answered its best model; return also the mask (n,) of clients that leave it.

    Args:
        state: the state at the end of the step before.
        reply: the reply to "judge".
        there: (U,) the places of the models that were judged.
        step: the step that begins.
        delta: tolerated increase of a client's loss since the last step.
    """
    clients, (now, best) = reply.clients, reply.rows["bad"].min(1)
    left = state.judged[clients] & (now - state.least[clients] > delta)
    return replace(
        state, step=step,
        model=state.model.index_copy(0, clients, there[best]),
        judged=state.judged.index_fill(0, clients, True),
        least=state.least.index_copy(0, clients, now),
        used=state.used.index_fill(0, there[best], step),
    ), left  # fmt: skip


def still_good(reply: Reply, before: Tensor, left: Tensor, there: Tensor, delta: float) -> Tensor:
    """Return the mask (n, U) of clients whose samples also represent their previous model: it is nearly their best."""
    bad = reply.rows["bad"]
    return (before[:, None] == there) & (bad <= bad.min(1).values[:, None] + delta) & ~left[:, None]


def with_new(state: State, clients: Tensor, init_new_from: str, server: Server, layer: str = WHOLE) -> State:
    """Make a new model for some clients, in the least recently used place; unchanged if all are in use."""
    held = torch.bincount(state.model, minlength=len(state.used)) > 0
    last = torch.where(held, state.step, state.used).masked_fill(~state.in_use, -1)
    k = int(last.argmin())
    if not len(clients) or last[k] == state.step:
        return state
    begun = state.start if init_new_from == "start" else state.weights[int(state.model[clients[0]])]
    _, begun = share_layers([state.weights[k], begun], layer)
    _, memo = share_layers([state.server[k], server.init(begun)], layer)
    at = torch.tensor([k])
    place = torch.cat([torch.where(state.place == k, -1, state.place), at])
    return replace(
        state,
        weights=replace_at(state.weights, k, begun),
        server=replace_at(state.server, k, memo),
        model=state.model.index_fill(0, clients, k),
        in_use=state.in_use.index_fill(0, at, True),
        used=state.used.index_fill(0, at, state.step),
        number=state.number.index_fill(0, at, len(state.place)),
        pairs=state.pairs.index_fill(0, at, 0.0),
        place=place,
    )


def groups_to_merge(reply: Reply, mine: Tensor, there: Tensor, old: Tensor, cut: float) -> list[list[int]]:
    """Return the groups of places of models that merge.

    Args:
        reply: the reply to "judge", for the models at `there`.
        mine: (clients, U) bool, whether a client's samples of the step represent a model.
        there: (U,) places.
        old: (U,) bool, the models to compare; places taken by new models are excluded, as clients judged others there.
        cut: delta'.
    """
    compared = old.nonzero().flatten()
    losses, known = cross_losses(reply, mine, there, compared)
    return [there[compared[known[group]]].tolist() for group in linked_groups(losses, cut)]


def cross_losses(reply: Reply, mine: Tensor, there: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of each model on all samples of each model (n, n), and which of `old` have samples (n,).

    Args:
        reply: the reply to "judge", for the models at `there`.
        mine: (clients, U) bool, whether a client's samples of the step represent a model.
        there: (U,) places.
        old: positions in `there` of the models to compare.
    """
    held = mine[:, old].double() * reply.rows["rows"][:, None]
    sums, rows = reply.rows["bad"].double()[:, old].T @ held, held.sum(0)
    if reply.total:
        past = reply.total["past"].value
        sums, rows = sums + past["bad"][old][:, there[old]], rows + past["rows"][there[old]]
    known = (rows >= 1).nonzero().flatten()  # numbers of samples are what clients say: a quotient stays finite
    return sums[known][:, known] / rows[known], known


def distances(losses: Tensor) -> Tensor:
    """Return the distances D (n, n) from the losses of model i on the samples of model j (n, n).

    >>> distances(torch.tensor([[0.1, 0.4], [0.2, 0.3]]))
    tensor([[0.0000, 0.3000],
            [0.3000, 0.0000]])
    """
    worse = losses - losses.diagonal()[:, None]
    return torch.maximum(worse, worse.T).clamp(min=0.0)


def linked_groups(losses: Tensor, cut: float) -> list[Tensor]:
    """Return groups of positions of models to merge: complete linkage of `distances`, cut at `cut`."""
    if len(losses) < 2:
        return []
    # SciPy is slow to import, and only this function needs it.
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import squareform

    tree = linkage(squareform(distances(losses).numpy(), checks=False), "complete")
    label = torch.from_numpy(fcluster(tree, cut, "distance").astype(np.int64))
    groups = [(label == each).nonzero().flatten() for each in label.unique()]
    return [group for group in groups if len(group) > 1]


def merge_models(state: State, places: Sequence[int], server: Server, layer: str = WHOLE) -> State:
    """Merge the models of some places into the first of them: their mean, weighted by pairs."""
    first, *rest = places
    made = mix_models([state.weights[k] for k in places], state.pairs[list(places)])
    _, start = share_layers([made, state.start], layer)
    _, *reset = share_layers([state.server[first], server.init(made), server.init(start)], layer)
    weights, memos = replace_at(state.weights, first, made), replace_at(state.server, first, reset[0])
    used, pairs, gone = state.used.clone(), state.pairs.clone(), torch.tensor(rest)
    used[first], pairs[first] = state.used[list(places)].max(), state.pairs[list(places)].sum()
    used[gone], pairs[gone] = 0, 0.0
    for k in rest:
        weights, memos = replace_at(weights, k, start), replace_at(memos, k, reset[1])
    model, place = (torch.where(torch.isin(each, gone), first, each) for each in (state.model, state.place))
    in_use = state.in_use.index_fill(0, gone, False)
    return replace(
        state, weights=weights, server=memos, in_use=in_use, used=used, pairs=pairs, model=model, place=place
    )
