"""IFCA: K models; every client trains the one with the lowest loss on its samples.

Ghosh, Chung, Yin, Ramchandran: *An Efficient Framework for Clustered Federated Learning*, NeurIPS 2020, Algorithm 1.
With default options it follows the averaging of Algorithm 1; its gradients are options.

| symbol | meaning |
| --- | --- |
| `theta_j` | model of cluster j = 1..K |
| `F_i(theta)` | mean loss on client i's samples |
| `m` | participants of the round; in the paper all clients |

    j_i     = argmin_j F_i(theta_j)                                        every participant, on its training samples
    gradient:   theta_j -= (gamma / m) * sum_{i: j_i = j} grad F_i(theta_j)
    averaging:  theta_j  = mean_{i: j_i = j} (theta_j after local training)

When to use it: clients form a few groups that want different models, the groups are unknown, and every client can
evaluate all models. All K models are sent to every participant. If groups differ little, all clients may end up with
one model: check the entropy of the choices, and try several starts.

Choices:
    - released code: a model without members is not stepped.
    - released code: the choice uses plain cross-entropy in evaluation mode (on CIFAR its loss of training); ties go to
      the first model. A model with a non-finite loss is chosen only if all losses are non-finite (ours).
    - paper: `variant = "averaging"` trains locally. The paper's gradients are `variant = "gradient"`; their recorded
      loss is that of training mode.
    - paper: members have equal weights. The released code for FEMNIST weights them by samples, as the expert-model
      paper does (`weighting = "samples"`).
    - ours: before evaluation a client chooses on its labeled validation samples, or on training samples if it has none.
      The paper and its code choose with test labels on CIFAR and MNIST. A client without labeled samples takes the
      model that most clients have trained so far.
    - ours: `n_init > 1` draws several sets of models and begins with the one of the lowest loss on a round's clients,
      before any training. The paper repeats whole runs, as the seeds of an experiment do. The released code for CIFAR
      draws models anew until each has a share of the participants.

The paper shares layers between models on FEMNIST: `transforms = [{ kind = "shared", layers = "trunk" }]`. The safe form
has an anchor (docs/never-worse.md).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedtide.algorithms.entry import Entry, Safe
from fedtide.clusters.rounds import (
    NOT_POOLED,
    Divisor,
    Served,
    answer_model,
    at_most_registered,
    find_model,
    init_models,
    predict_by_cluster,
    refuse_equal_start,
    step_models,
)
from fedtide.cohorts import Arrivals, Cohort, play_rounds, with_cohort
from fedtide.core.base import Algorithm, Answer, Facts, Fleet, Moment, Reply, Shard, Weighted, Weights, Work, mean
from fedtide.core.rng import Rng
from fedtide.fields.types import ModelCount, Positive
from fedtide.learn import SGD, Losses, Server, Steps, Stepwise, Task, Weighting, local_update
from fedtide.learn.local import LocalTrainer, LocalUpdate, refuse_all_but_gradient
from fedtide.transforms import Anchored


@dataclass(frozen=True)
class State:
    """The models, the optimizer's memo of each, and how many clients have trained each so far (K,)."""

    weights: tuple[Weights, ...]
    server: tuple[Any, ...]
    members: Tensor
    cohort: Any = None


@dataclass(frozen=True)
class Starts:
    """Sets of models, of which one is to be the start."""

    sets: list[tuple[Weights, ...]]


def ifca(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    clusters: ModelCount = 2,
    variant: LocalUpdate = "averaging",
    init_noise: Positive | None = None,
    n_init: ModelCount = 1,
    server: Server = SGD(),
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "uniform",
) -> Algorithm[State]:
    """Iterative federated clustering.

    Sends all models down, and the update of one up, in a sum per model.

    Args:
        local: local training; for gradients its learning rate is the paper's gamma, and it is by plain SGD, without
            weight decay and augmentation.
        clusters: number of models, K.
        variant: "averaging" of local training, or one "gradient" over all samples of a client. Means of updates are
            over a model's members. Sums of gradients are divided by the weight of all participants, which is
            as printed if all clients take part.
        init_noise: standard deviation of the normal noise on the first model that makes the others; None draws K
            independent models.
        n_init: number of initial sets of models, of which the one with the lowest loss is taken.
    """
    refuse_equal_start(task, clusters if init_noise is None else 1, ", or `init_noise`", is_best_chosen=True)
    gradient = variant == "gradient"
    if gradient:
        refuse_all_but_gradient(local)

    def init(fleet: Fleet, rng: Rng) -> State:
        memo, members = cohort.init(fleet), torch.zeros(clusters, dtype=torch.float64)
        keys = [rng.at("set", n) if n else rng for n in range(n_init)]
        sets = [init_models(task, key, clusters, init_noise) for key in keys]
        models = best_set(fleet, lambda: cohort.pick(memo, fleet, rng, None), sets)
        return State(weights=models, server=tuple(map(server.init, models)), members=members, cohort=memo)

    @Stepwise
    def train(payload: Any, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Steps[Answer | None]:
        if not len(shard):
            return None
        j = int((yield Losses(task, payload.models, shard)).argmin())  # j_i = argmin_j F_i(theta_j)
        update = yield from local_update(task, local, variant, payload.models[j], shard, moment, rng)
        if update is None:
            return None
        return answer_model(j, *update, shard, clusters, weighting)

    def step(state: State, reply: Reply, moment: Moment, rng: Rng) -> tuple[State, Facts]:
        # theta_j
        members, everyone = reply.total["members"].value, reply.total["loss" if weighting == "samples" else "members"]
        divisor: Divisor = "participants" if gradient else "members"
        state = step_models(state, server, reply.total["delta"], divisor, everyone.weight)
        return replace(state, members=state.members + members), {"loss": mean(reply.total)["loss"], "members": members}

    def as_served(payload: Any, memory: Any, answer: Answer) -> tuple[Served, None]:
        return replace(payload, usual=answer.total["members"].value.argmax()), None

    works = {"train": train} | ({"fit": fit_question(task)} if n_init > 1 else {})
    round, serve = play_rounds(
        cohort,
        step,
        lambda state: Served(state.weights, usual=state.members.argmax()),
        lambda state: Served(state.weights),
    )
    predict, adapt, check = predict_by_cluster(task), find_model(task), at_most_registered(clusters)
    algorithm = Algorithm("ifca", init, works, round, serve, predict, adapt, as_served, check)
    # Every participant evaluates all models.
    forward = {"train": clusters, "fit": n_init * clusters, "loss": clusters + (clusters > 1)}
    trained: Any = (lambda rows: rows) if gradient else None
    traits: Any = {"sends": (Served, Starts), "models": "clusters", "refuses": NOT_POOLED}
    return with_cohort(algorithm, cohort, task, local, forward=forward, trained=trained, **traits)


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


ENTRY = Entry(
    "ifca", ifca, "K models down, the update of one up", "clustered", helps=("groups", "meaning", "hours"),
    tells="which model it trained, unless sums are secure", safe=Safe({}, {"weighting": "samples"}, (Anchored(),)),
)  # fmt: skip
