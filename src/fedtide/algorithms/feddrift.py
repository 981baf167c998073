"""FedDrift: a client whose best model became worse gets a new one; models that fit each other's clients merge.

Jothimurugesan, Hsieh, Wang, Joshi, Gibbons: *Federated Learning under Distributed Concept Drift*, AISTATS 2023,
Algorithms 1 (FedDrift-Eager) and 2 (FedDrift). With default options it follows the released code of Algorithm 2, on
streams.

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

When to use it: concepts come and go at different clients at different times, and their number is unknown. All clients
have to run every model at the beginning of a step. A concept that comes back finds its model again.

Choices:
    - released code: the loss of a model is its error rate; the paper's is its cross-entropy (`criterion = "loss"`).
    - released code: a new model begins as the one that its client leaves, for Eager as that of the lowest client.
    - released code: a new model stays apart in the step in which it is made, W = 1.
    - released code: clients are compared first with their loss before any training.
    - ours: a new model takes the least recently used of `max_clusters` places, if one is free.
    - ours: clients train and judge on the samples of the step alone, because a stream does not give back earlier ones.
    - ours: these samples also represent the client's previous model, if that is worse than its best by at most delta.
    - ours: the optimizer of a merged model is reset.

The paper's baseline "Window" is the method `window`. The safe form has an anchor (docs/never-worse.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedtide.algorithms.entry import Entry, Safe
from fedtide.clusters.rounds import (
    Served,
    build_clustered,
    errors_of,
    find_model,
    mix_models,
    replace_at,
    serve_clusters,
    train_clusters,
)
from fedtide.cohorts import Cohort, Everyone
from fedtide.core.base import Algorithm, Answer, Facts, Fleet, Moment, Reply, Shard, Weights, Work
from fedtide.core.rng import Rng
from fedtide.core.trees import per_client
from fedtide.fields.types import Count, ModelCount, NonNegative, Spelled, ingredient
from fedtide.learn import SGD, LocalTrainer, Server, Task, Training, Weighting, mean_losses
from fedtide.transforms import Anchored

Criterion = Literal["error", "loss"]
"""Loss of a model: its error rate, or its mean cross-entropy."""


@dataclass(frozen=True)
class Places:
    """The places for models (K,).

    in_use: mask of places with a model. used: last step in which a place had a client. pairs: (client, step) pairs of
    its model. fresh: mask of models that were made in this step.
    """

    in_use: Tensor
    used: Tensor
    pairs: Tensor
    fresh: Tensor

    @property
    def taken(self) -> Tensor:
        """Places in use."""
        return self.in_use.nonzero().flatten()

    def free(self, model: Tensor, step: int) -> int | None:
        """Return the least recently used place; None if all are in use in this step.

        Args:
            model: (registered,) the place of each client's model.
            step: now.
        """
        has_clients = torch.bincount(model, minlength=len(self.used)) > 0
        last = torch.where(has_clients, step, self.used).masked_fill(~self.in_use, -1)
        k = int(last.argmin())
        return None if last[k] == step else k

    def with_new(self, k: int, step: int) -> "Places":
        """Return the places with a new model in place k."""
        at = torch.tensor([k])
        return Places(
            self.in_use.index_fill(0, at, True),
            self.used.index_fill(0, at, step),
            self.pairs.index_fill(0, at, 0.0),
            self.fresh.index_fill(0, at, True),
        )

    def merged(self, group: Sequence[int]) -> "Places":
        """Return the places with the models of a group in the first of them."""
        first, gone = group[0], torch.tensor(group[1:])
        used, pairs = self.used.clone(), self.pairs.clone()
        used[first], pairs[first] = self.used[list(group)].max(), self.pairs[list(group)].sum()
        used[gone], pairs[gone] = 0, 0.0
        return replace(self, in_use=self.in_use.index_fill(0, gone, False), used=used, pairs=pairs)


@dataclass(frozen=True)
class State:
    """The places for models, the optimizer's memo of each, their initial weights, and the model of each client.

    step: the last time step that began, -1 before the first. model: (registered,) the place of each client's model.
    judged: (registered,) mask of clients that have judged models, least: (registered,) the loss of their best one.
    """

    weights: tuple[Weights, ...]
    server: tuple[Any, ...]
    start: Weights
    step: int
    model: Tensor = field(metadata=per_client(new=lambda state: int(torch.bincount(state.model).argmax())))
    judged: Tensor = field(metadata=per_client(new=False))
    least: Tensor = field(metadata=per_client(new=0.0))
    places: Places
    cohort: Any = None


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
    init_new_from: Literal["previous", "start"] = "previous",
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
        init_new_from: initial weights of a new model: those of the "previous" one, or those at the "start" of the run.
    """

    def init(fleet: Fleet, rng: Rng) -> State:
        start, registered = task.init(rng), len(fleet.clients)
        none, zero = torch.zeros(registered, dtype=torch.int64), torch.zeros(max_clusters, dtype=torch.int64)
        places = Places(torch.arange(max_clusters) == 0, zero, zero.double(), zero > 0)
        return State(
            weights=(start,) * max_clusters,
            server=tuple(server.init(start) for _ in range(max_clusters)),
            start=start,
            step=-1,
            model=none,
            judged=none > 0,
            least=none.double(),
            places=places,
            cohort=cohort.init(fleet),
        )

    def judge(payload: Any, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        """Return the loss of each model on the client's samples."""
        if not len(shard):
            return None
        bad = model_losses(task, payload.models, shard, criterion)
        return Answer({}, {"bad": bad, "rows": torch.tensor(float(len(shard)), dtype=torch.float64)})

    def round(state: State, fleet: Fleet, rng: Rng) -> tuple[State, Facts]:
        step, facts = fleet.moment.round // rounds_per_step, dict[str, Any]()
        if step > state.step:
            state, facts = begin_step(state, fleet, step)
        clients = cohort.pick(state.cohort, fleet, rng, partial(serve, state))
        state, _, trained = train_clusters(fleet, state, clients, state.model[clients], server, cohort)
        return state, {**facts, "models": len(state.places.taken), **trained}

    def begin_step(state: State, fleet: Fleet, step: int) -> tuple[State, dict[str, Any]]:
        """Give each client its best model, or a new one if that became worse; then merge models."""
        places = state.places.taken
        payload = Served([state.weights[k] for k in places.tolist()])
        reply = fleet.ask("judge", fleet.reachable, payload, reveal=("bad", "rows"), passes=len(places))
        if not len(reply.clients):
            return state, {}
        with fleet.clustering:
            return change_models(state, reply, step)

    def change_models(state: State, reply: Reply, step: int) -> tuple[State, dict[str, Any]]:
        """Do so by the reply to "judge"."""
        places, before = state.places.taken, state.model[reply.clients]
        state, left = with_best(state, reply, places, step, delta)
        leavers = reply.clients[left]
        for clients in [leavers] if isinstance(variant, Eager) else leavers.split(1):
            state = with_new(state, clients, init_new_from, server)
        new = int(state.places.fresh.sum())
        pairs = state.places.pairs + torch.bincount(state.model[reply.clients], minlength=max_clusters)
        state = replace(state, places=replace(state.places, pairs=pairs))
        groups: list[list[int]] = []
        if isinstance(variant, Isolate):
            mine = (state.model[reply.clients][:, None] == places) | still_good(reply, before, left, places, delta)
            cut = delta if variant.merge is None else variant.merge
            groups = groups_to_merge(reply, mine, places, ~state.places.fresh[places], cut)
        for group in groups:
            state = merge_models(state, group, server)
        return state, {"left": int(left.sum()), "new": new, "merged": sum(len(group) - 1 for group in groups)}

    def serve(state: State, clients: Tensor) -> tuple[Any, Tensor]:
        model = torch.where(state.judged, state.model, -1)
        return serve_clusters(state.weights, model, clients, state.places.taken)

    works: dict[str, Work] = {"train": Training(task, local, weighting), "judge": judge}
    adapt, reveals = find_model(task), ("bad", "rows")
    return build_clustered("feddrift", task, local, cohort, init, round, serve, works, adapt, reveals=reveals)


def model_losses(task: Task, models: Sequence[Weights], shard: Shard, criterion: Criterion) -> Tensor:
    """Return the loss of each model on a client's samples (M,), float64, in evaluation mode; at most 1e6."""
    if criterion == "loss":
        return mean_losses(task, models, shard).clamp(max=1e6)
    return torch.stack([errors_of(task, weights, shard).mean() for weights in models])


def with_best(state: State, reply: Reply, places: Tensor, step: int, delta: float) -> tuple[State, Tensor]:
    """Assign each client that answered its best model; return also the mask (n,) of clients that leave it.

    Args:
        state: the state at the end of the step before.
        reply: the reply to "judge".
        places: (U,) the places of the models that were judged.
        step: the step that begins.
        delta: tolerated increase of a client's loss since the last step.
    """
    clients, (now, best) = reply.clients, reply.rows["bad"].min(1)
    left = state.judged[clients] & (now - state.least[clients] > delta)
    model, judged = state.model.index_copy(0, clients, places[best]), state.judged.index_fill(0, clients, True)
    least, used = state.least.index_copy(0, clients, now), state.places.used.index_fill(0, places[best], step)
    after = replace(state.places, used=used, fresh=torch.zeros_like(state.places.fresh))
    return replace(state, step=step, model=model, judged=judged, least=least, places=after), left


def still_good(reply: Reply, before: Tensor, left: Tensor, places: Tensor, delta: float) -> Tensor:
    """Return the mask (n, U) of clients whose samples also represent their previous model: it is nearly their best."""
    bad = reply.rows["bad"]
    return (before[:, None] == places) & (bad <= bad.min(1).values[:, None] + delta) & ~left[:, None]


def with_new(state: State, clients: Tensor, init_new_from: str, server: Server) -> State:
    """Make a new model for some clients, in the least recently used place; unchanged if all are in use."""
    k = state.places.free(state.model, state.step) if len(clients) else None
    if k is None:
        return state
    begun = state.start if init_new_from == "start" else state.weights[int(state.model[clients[0]])]
    return replace(
        state,
        weights=replace_at(state.weights, k, begun),
        server=replace_at(state.server, k, server.init(begun)),
        model=state.model.index_fill(0, clients, k),
        places=state.places.with_new(k, state.step),
    )


def groups_to_merge(reply: Reply, mine: Tensor, places: Tensor, old: Tensor, cut: float) -> list[list[int]]:
    """Return the groups of places of models that merge.

    Args:
        reply: the reply to "judge", for the models at `places`.
        mine: (clients, U) bool, whether a client's samples of the step represent a model.
        places: (U,) places.
        old: (U,) bool, the models to compare; places taken by new models are excluded, as clients judged others there.
        cut: delta'.
    """
    compared = old.nonzero().flatten()
    losses, with_rows = cross_losses(reply, mine, compared)
    return [places[compared[with_rows[group]]].tolist() for group in linked_groups(losses, cut)]


def cross_losses(reply: Reply, mine: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of each model on all samples of each model (n, n), and which of `old` have samples (n,).

    Args:
        reply: the reply to "judge", for the models at U places.
        mine: (clients, U) bool, whether a client's samples of the step represent a model.
        old: positions among these of the models to compare.
    """
    rows_of = mine[:, old].double() * reply.rows["rows"][:, None]
    sums, rows = reply.rows["bad"].double()[:, old].T @ rows_of, rows_of.sum(0)
    with_rows = (rows >= 1).nonzero().flatten()  # numbers of samples are what clients say: a quotient stays finite
    return sums[with_rows][:, with_rows] / rows[with_rows], with_rows


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
    groups = [(label == number).nonzero().flatten() for number in label.unique()]
    return [group for group in groups if len(group) > 1]


def merge_models(state: State, group: Sequence[int], server: Server) -> State:
    """Merge the models of some places into the first of them: their mean, weighted by pairs."""
    first, *rest = group
    merged = mix_models([state.weights[k] for k in group], state.places.pairs[list(group)])
    weights, memos = replace_at(state.weights, first, merged), replace_at(state.server, first, server.init(merged))
    for k in rest:
        weights, memos = replace_at(weights, k, state.start), replace_at(memos, k, server.init(state.start))
    model = torch.where(torch.isin(state.model, torch.tensor(rest)), first, state.model)
    return replace(state, weights=weights, server=memos, model=model, places=state.places.merged(group))


ENTRY = Entry(
    "feddrift", feddrift, "its model down, update up; each step all models down, errors up", "clustered",
    tells="its model", reveals=("bad", "rows"), helps=("groups", "drift"), safe=Safe(transforms=(Anchored(),)),
)  # fmt: skip
