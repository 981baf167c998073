"""FeSEM: K models; the server assigns each client to the model that is nearest to its weights after training.

Long, Xie, Shen, Zhou, Wang, Jiang: *Multi-Center Federated Learning: Clients Clustering for Better Personalization*,
World Wide Web 2023 (Xie et al., arXiv 2005.01026), Algorithm 1. With default options it follows Algorithm 1, except for
the choices below.

| symbol | meaning |
| --- | --- |
| `m_k` | model of cluster k = 1..K, its center |
| `w_i` | weights of client i after local training |
| `r_i` | the cluster of client i |

    client i trains m_{r_i}                                      w_i
    E-step    r_i = argmin_k ||w_i - m_k||
    M-step    m_k = mean_{i: r_i = k} w_i

When to use it: clients form a few groups that want different models, the number of groups is known, and the server may
see single models. A client trains one model and needs no others. Weights of large networks differ by chance as well, so
distances tell less of them than losses do (IFCA).

Choices:
    - paper: members of a cluster have equal weights; `weighting = "samples"` weights them by samples.
    - paper: the pull towards the received center is an option, `local.proximal`, and 0 by default.
    - ours: all participants of the first round train the same initial weights. Its first centers come from k-means of
      their models, the best of ten starts. Independent initial models would be so far apart that no client moves. The
      released code begins with random clusters.
    - paper: one E-step and one M-step follow a round. The released code (`fedsem.py`) takes a step of k-means from
      centers of its own, and makes them anew after a cluster was empty. Another script makes k-means anew each time.
      In both, a cluster of one client is skipped.
    - ours: if only some clients participate, the M-step is over participants. A cluster without one keeps its model.
    - ours: distances are between all parameters; in the released code between one dense kernel of each. Running
      statistics are averaged as parameters are.
    - ours: a client without a cluster trains the mean of all centers, and joins the nearest. So does a client that was
      never asked, before evaluation. One without samples takes the model that most clients have.
    - ours: while fewer than K clients answer, there is one cluster.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedtide.algorithms.entry import Entry
from fedtide.clusters.client_models import (
    APART,
    REVEALED,
    ClientModels,
    mix_client_models,
    reveal_model,
    shape_model,
    train_apart,
)
from fedtide.clusters.clusterer import kmeans_groups
from fedtide.clusters.distance import between
from fedtide.clusters.rounds import at_most_registered, build_clustered, mean_over_slots, mix_models, serve_clusters
from fedtide.cohorts import Arrivals, Cohort
from fedtide.core.base import Algorithm, Answer, Facts, Fleet, Memory, Moment, Shard, Weights
from fedtide.core.rng import Rng
from fedtide.core.trees import per_client
from fedtide.core.weights import flat
from fedtide.fields.types import ModelCount
from fedtide.learn import LocalTrainer, Task, Training, Weighting
from fedtide.learn.schedules import Constant


@dataclass(frozen=True)
class State:
    """The models, the cluster of each client (registered,), -1 for none, and the cohort's memo."""

    weights: tuple[Weights, ...]
    cluster: Tensor = field(metadata=per_client(new=-1))
    cohort: Any = None


def fesem(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    clusters: ModelCount = 2,
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "uniform",
) -> Algorithm[State]:
    """Multi-center federated learning.

    Sends the model of a cluster down and its update up; the server sees every single update.

    Args:
        clusters: number of models, K.
    """

    even = torch.ones(clusters)
    placing = replace(local, lr_schedule=Constant())  # it is no round of the run

    def init(fleet: Fleet, rng: Rng) -> State:
        models = (task.init(rng),) * clusters
        return State(models, torch.full((len(fleet.clients),), -1), cohort.init(fleet))

    def round(state: State, fleet: Fleet, rng: Rng) -> tuple[State, Facts]:
        clients = cohort.pick(state.cohort, fleet, rng, partial(serve, state))
        place = state.cluster[clients]
        place = torch.where(place < 0, clusters, place)
        models = [*state.weights, mix_models(state.weights, even)]
        state, reply, trained = train_apart(fleet, state, clients, models, place, cohort)
        if reply.total is None:
            return state, {}
        parameters = trained.models[:, : flat(state.weights[0].params).numel()]
        begun = bool((state.cluster >= 0).any())
        few = not begun and len(trained.clients) < clusters
        with fleet.clustering:
            if begun:
                member = nearest_model(parameters, state.weights)  # E-step
            elif few:
                member = torch.zeros_like(trained.clients)
            else:
                member = kmeans_groups(parameters.double().numpy(), clusters, rng.at("centers"))
        weights = tuple(mean_client_models(trained, member, clusters, state.weights))  # M-step
        facts: Facts = {"loss": mean_over_slots(reply.total, "loss"), "members": member.bincount(minlength=clusters)}
        if few:  # one cluster, and nobody is in it yet
            return replace(state, weights=weights[:1] * clusters), facts
        return replace(state, weights=weights, cluster=state.cluster.index_copy(0, trained.clients, member)), facts

    def serve(state: State, clients: Tensor) -> Any:
        return serve_clusters(state.weights, state.cluster, clients)

    def adapt(payload: Any, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        if len(payload.models) == 1 or not len(shard):
            return None
        fitted = placing(task, task.loss, mix_models(payload.models, even), shard, moment, rng.at("place"))
        if not fitted.steps:
            return None
        return Answer({}, memory={"found": nearest_model(flat(fitted.weights.params)[None], payload.models)[0]})

    works = {"train": reveal_model(Training(task, local, weighting), summed=False)}
    check = at_most_registered(clusters)
    return build_clustered("fesem", task, local, cohort, init, round, serve, works, adapt, check, **APART)


def mean_client_models(trained: ClientModels, member: Tensor, count: int, like: Sequence[Weights]) -> list[Weights]:
    """Return the mean model of each of `count` groups of clients; a group of no weight keeps that of `like`.

    Args:
        trained: the models of n clients.
        member: (n,) the group of each client.
        count: number of groups.
        like: a model for each group.
    """
    share = torch.nn.functional.one_hot(member, count).T
    filled = [k for k in range(count) if (share[k] * trained.weight).any()]
    means = dict(zip(filled, mix_client_models(trained, share[filled]), strict=True))
    return [shape_model(means[k], like[k]) if k in means else like[k] for k in range(count)]


def nearest_model(parameters: Tensor, models: Sequence[Weights]) -> Tensor:
    """Return the model (n,) whose parameters are nearest to rows of parameters (n, P); ties: the first.

    >>> nearest_model(torch.tensor([[1.0], [9.0]]), [Weights({"w": torch.tensor([k])}) for k in (0.0, 8.0)]).tolist()
    [0, 1]
    """
    return between(parameters, torch.stack([flat(model.params) for model in models]), "l2").argmin(1)


ENTRY = Entry(
    "fesem", fesem, "weights of a cluster down, update up", "clustered", reveals=REVEALED, tells="its cluster",
    helps=("groups", "meaning"),
)  # fmt: skip
