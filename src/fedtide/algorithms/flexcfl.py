"""FlexCFL: groups by the directions of a pre-training from the same weights; clients with label shift are regrouped.

Duan, Liu, Ji, Wu, Liang, Chen, Tan, Ren: *Flexible Clustered Federated Learning for Client-Level Data Distribution
Shift*, IEEE TPDS 2021 (its groups: *FedGroup*, 2021). With default options it follows the paper, except for the choices
below.

| symbol | meaning |
| --- | --- |
| `w0` | the initial weights, kept for good |
| `u_i` | update of client i after `pretrain` steps from `w0`, flat |
| `v_1..v_m` | the first m singular directions of all `u_i` |
| `o_g` | direction of group g, kept for good |
| `p_i` | label distribution of client i |

    cold start    min(alpha m, N) clients send u_i
                  groups = k-means (m clusters) of  ( cos(u_i, v_1), ..., cos(u_i, v_m) )      EDC
                  o_g = mean_{i in g} u_i,   w_g = w0 + o_g
    newcomer      sends u_i, goes to  argmin_g (1 - cos(u_i, o_g)) / 2
    migration     ||p_i now - p_i when it was grouped||_1 > migrate: client i is a newcomer again
    round         FedAvg inside each group, and then, with eta_g > 0,
                  w_g = (w_g + sum_{l != g} eta_g w_l / ||w_l||) / (1 + sum_{l != g} eta_g / ||w_l||)

When to use it: a known number of groups that want different models, and single clients that move between them. Groups
are made only once, so they stop fitting if a drift changes what the groups are.

Choices:
    - ours: all reachable clients check for a label shift in every round, and report its size. The threshold of the
      released code, 0.2 n_i / C, corresponds to our 0.2.
    - ours: cosines to directions come from the updates' inner products. They are those of the truncated SVD of the
      released code, which is randomized there and exact here. k-means is the best of ten starts.
    - ours: members of the cold start have equal weights. With `group_init = "same"` all groups begin at w0.
    - ours: a group that k-means leaves empty has no direction, and gets clients that turn away from all others.
    - ours: the cold start asks reachable clients before round 0, and again while fewer than m answer.
    - released code: the step between groups is divided by the sum of its weights, and moves parameters only.
    - ours: `clusters = "silhouette"` makes as many groups as Fielding begins with, from clients' label distributions.

The safe form pools the updates of groups that are alike (docs/never-worse.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fedtide.algorithms.entry import Entry, Safe
from fedtide.clusters.client_models import flatten_model, shape_model
from fedtide.clusters.clusterer import KMeans, kmeans_groups
from fedtide.clusters.distance import cosines
from fedtide.clusters.rounds import at_most_registered, build_clustered, mix_models, serve_clusters, train_clusters
from fedtide.cohorts import Arrivals, Cohort, label_question
from fedtide.core.base import Algorithm, Answer, Facts, Fleet, Memory, Moment, Payload, Shard, Slot, Weights, Work
from fedtide.core.rng import Rng, draw_some
from fedtide.core.trees import per_client
from fedtide.core.weights import add, flat
from fedtide.fields.types import Count, ModelCount, NonNegative, StepCount
from fedtide.learn import SGD, LocalTrainer, Server, Training, Weighting
from fedtide.learn.task import Task, classes_of, label_shares
from fedtide.transforms import Pooled

PART = 1 << 16
"""Parameters per block of inner products."""


@dataclass(frozen=True)
class Places:
    """Payload to find a group by: the model that a client trains, and the groups' directions from there."""

    start: Weights
    directions: Tensor


@dataclass(frozen=True)
class State:
    """The groups' models, the optimizer's memo of each, w0, the group of each client, and the groups' directions.

    group: (registered,) int64, -1 before a client is grouped. directions: (m, P), zeros before the cold start. cohort:
    the cohort's memo.
    """

    weights: tuple[Weights, ...]
    server: tuple[Any, ...]
    start: Weights
    group: Tensor = field(metadata=per_client(new=-1))
    directions: Tensor
    cohort: Any = None


def flexcfl(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    clusters: ModelCount | Literal["silhouette"] = 3,
    alpha: Count = 20,
    pretrain: StepCount = 50,
    migrate: NonNegative = 0.2,
    group_init: Literal["trained", "same"] = "trained",
    eta_g: NonNegative = 0.0,
    server: Server = SGD(),
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "samples",
) -> Algorithm[State]:
    """Flexible clustered federated learning.

    Sends a group's model down and its update up in sums; the server sees the pre-training update of a client that is
    grouped.

    Args:
        clusters: number of groups, m; "silhouette" takes that of the best k-means clustering of the label distributions
            that clients have at the start.
        alpha: clients of the cold start for each group.
        pretrain: pre-training steps from w0, by which a client is grouped.
        migrate: L1 distance (0 to 2) between label distributions above which a client is regrouped; from 2 on never.
        group_init: initial weights of a group: mean of its members' pre-trained weights ("trained"), or w0 ("same").
        eta_g: step size between groups; 0 keeps them apart.
    """
    first = replace(local, epochs=None, local_steps=pretrain)

    def init(fleet: Fleet, rng: Rng) -> State:
        start = task.init(rng)
        count = clusters if isinstance(clusters, int) else count_clusters(fleet, rng.at("cluster"))
        models = (start,) * count
        ungrouped = torch.full((len(fleet.clients),), -1)
        still, memos = torch.zeros_like(flat(start.params)).repeat(count, 1), tuple(map(server.init, models))
        memo = cohort.init(fleet)
        state = State(weights=models, server=memos, start=start, group=ungrouped, directions=still, cohort=memo)
        return cold_start(state, fleet, rng)

    def cold_start(state: State, fleet: Fleet, rng: Rng) -> State:
        """Group min(alpha m, N) clients by their pre-training; unchanged if fewer than m answer."""
        count = len(state.weights)
        drawn = draw_some(fleet.reachable, alpha * count, rng.at("cold"))
        reply = fleet.ask("cold", drawn, state.start, reveal=("update",))
        if len(reply.clients) < count:
            return state
        # Running statistics come after the parameters.
        updates, parameters = reply.rows["update"], state.directions.shape[1]
        with fleet.clustering:
            member = groups_of(updates[:, :parameters], count, rng.at("groups"))
        pulls = [mean_update(updates, member == g) for g in range(count)]
        trained = group_init == "trained"
        models = tuple(add(state.start, shape_model(pull, state.start)) if trained else state.start for pull in pulls)
        group, directions = state.group.index_copy(0, reply.clients, member), torch.stack(pulls)[:, :parameters]
        memos = tuple(map(server.init, models))
        return replace(state, weights=models, server=memos, group=group, directions=directions)

    def migration(state: State, fleet: Fleet, clients: Tensor) -> State:
        """Group all reachable clients whose labels have shifted, and the newcomers among the participants."""
        shifted = clients[:0]
        if migrate < 2:
            shifted = fleet.ask("shifted", fleet.reachable, {}, reveal=("shifted",)).clients
        newcomers = clients[state.group[clients] < 0]
        late = torch.cat([shifted, newcomers]).unique()
        if not len(late):
            return state
        reply = fleet.ask("cold", late, state.start, reveal=("update",))
        if not len(reply.clients):
            return state
        with fleet.clustering:
            nearest = nearest_group(reply.rows["update"][:, : state.directions.shape[1]], state.directions)
        return replace(state, group=state.group.index_copy(0, reply.clients, nearest))

    def cold(payload: Weights, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        fitted = first(task, task.loss, payload, shard, moment, rng)
        if not fitted.steps:
            return None
        return Answer({}, {"update": flatten_model(fitted.delta)}, memory={"labels": label_shares(shard).float()})

    def shifted(payload: Payload, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        """Report the distance of the label distribution from that at grouping, if it exceeds the threshold."""
        if memory is None or not len(shard):
            return None
        # The shorter vector is padded with zeros.
        far = pad_sequence([label_shares(shard).float(), memory["labels"]]).diff(dim=1).abs().sum()
        return Answer({}, {"shifted": far}) if float(far) > migrate else None

    def round(state: State, fleet: Fleet, rng: Rng) -> tuple[State, Facts]:
        clients, before = cohort.pick(state.cohort, fleet, rng, partial(serve, state)), state.group
        if not (state.group >= 0).any():
            state = cold_start(state, fleet, rng)
        if not (state.group >= 0).any():
            return state, {"newcomers": 0, "moved": 0}
        state = migration(state, fleet, clients)
        grouped = clients[state.group[clients] >= 0]
        state, reply, facts = train_clusters(fleet, state, grouped, state.group[grouped], server, cohort)
        if reply.total is not None:
            state = replace(state, weights=inter_group(state.weights, eta_g))
        return state, {
            **facts,
            "newcomers": int(((before < 0) & (state.group >= 0)).sum()),
            "moved": int(((before >= 0) & (before != state.group)).sum()),
        }

    def serve(state: State, clients: Tensor) -> tuple[Payload, Slot]:
        places = Places(state.start, state.directions)
        return serve_clusters(state.weights, state.group, clients, places=places)

    def adapt(payload: Any, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        if payload.places is None or not len(shard):
            return None
        fitted = first(task, task.loss, payload.places.start, shard, moment, rng.at("cold"))
        if not fitted.steps:
            return None
        group = nearest_group(flat(fitted.delta.params)[None], payload.places.directions)
        return Answer({}, memory={"found": group[0]})

    works: dict[str, Work] = {"cold": cold, "shifted": shifted, "train": Training(task, local, weighting)}
    reveals = ("update", "shifted") if migrate < 2 else ("update",)
    if clusters == "silhouette":
        works, reveals = {**works, "labels": label_question(classes_of(task))}, (*reveals, "labels")

    def cost(question: str, rows: Tensor) -> Tensor:
        costs = {"train": local.samples, "cold": first.samples, "loss": lambda rows: rows / 3}
        return costs.get(question, torch.zeros_like)(rows)

    check = at_most_registered(clusters) if isinstance(clusters, int) else None
    traits: Any = {"sends": (Places,), "reveals": reveals, "compute_cost": cost, "unless_changed": ("shifted",)}
    return build_clustered("flexcfl", task, local, cohort, init, round, serve, works, adapt, check, **traits)


def count_clusters(fleet: Fleet, rng: Rng) -> int:
    """Return the number of clusters that Fielding would begin with: k-means of the reported label distributions."""
    reply = fleet.ask("labels", fleet.reachable, {}, reveal=("labels",))
    with fleet.clustering:
        return KMeans().fit(reply.rows["labels"], "l1", rng).k if len(reply.clients) else 1


def mean_update(updates: Tensor, member: Tensor) -> Tensor:
    """Return the mean update (P,) of a group's members; zeros for an empty group."""
    mine = updates[member]
    return mine.double().mean(0).to(mine.dtype) if len(mine) else torch.zeros_like(updates[0])


def edc(updates: Tensor, m: int) -> np.ndarray:
    """Return cosines (n, m) of updates (n, P) to their first m singular directions; 0 for missing directions.

    With `U = Q S V'` the cosine of row i to direction j is `Q_ij S_j / ||u_i||`. Q and S^2 are eigenvectors and
    eigenvalues of `U U'`. The sign of a direction is arbitrary.

    >>> edc(torch.tensor([[2.0, 0.0], [-1.0, 0.0]]), 2).round(6).__abs__().tolist()
    [[1.0, 0.0], [1.0, 0.0]]
    """
    inner = torch.zeros(len(updates), len(updates), dtype=torch.float64)
    for part in updates.split(PART, dim=1):
        inner += part.double() @ part.double().T
    value, vector = torch.linalg.eigh(inner)
    value, vector = value.flip(0)[:m], vector.flip(1)[:, :m]
    # Smaller eigenvalues are rounding errors with arbitrary directions.
    size = torch.where(value > 1e-12 * value[0].clamp(min=1e-300), value, 0.0).sqrt()
    directions = torch.zeros(len(updates), m, dtype=torch.float64)
    directions[:, : len(size)] = vector * size / inner.diagonal().sqrt().clamp(min=1e-150)[:, None]
    return directions.numpy()


def groups_of(updates: Tensor, m: int, rng: Rng) -> Tensor:
    """Return the group (n,) of each update (n, P): k-means of `edc`; groups in the order of their first members."""
    return kmeans_groups(edc(updates, m), m, rng.at("start"))


def nearest_group(updates: Tensor, directions: Tensor) -> Tensor:
    """Return the group (n,) whose direction (m, P) is closest to each update (n, P); ties: the lowest."""
    return ((1 - cosines(updates, directions)) / 2).argmin(1)


def inter_group(models: Sequence[Weights], eta_g: float) -> tuple[Weights, ...]:
    """Take the step between groups, of parameters; `eta_g` = 0 and models of norm zero change nothing."""
    if not eta_g:
        return tuple(models)
    norms = [float(torch.stack([p.double().norm() for p in model.params.values()]).norm()) for model in models]
    pulls = [eta_g / norm if norm else 0.0 for norm in norms]
    shares = torch.tensor(pulls, dtype=torch.float64).expand(len(models), -1).clone().fill_diagonal_(1.0)
    params = [mix_models([model.params for model in models], share) for share in shares]
    return tuple(Weights(mixed, model.buffers) for mixed, model in zip(params, models, strict=True))


ENTRY = Entry(
    "flexcfl", flexcfl, "weights of a group down, update up", "clustered", reveals=("update", "shifted"),
    tells="its group", keeps="its label shares when it was grouped", helps=("labels", "groups", "drift"),
    safe=Safe(transforms=(Pooled(),)),
)  # fmt: skip
