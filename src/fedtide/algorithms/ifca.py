"""IFCA: K models; every client trains the one with the lowest loss on its samples.

Ghosh, Chung, Yin, Ramchandran: *An Efficient Framework for Clustered Federated Learning*, NeurIPS 2020, Algorithm 1.

| symbol | meaning |
| --- | --- |
| `theta_j` | model of cluster j = 1..K |
| `F_i(theta)` | mean loss on client i's samples |
| `m` | participants of the round |

    j_i     = argmin_j F_i(theta_j)                                        every participant, on its training samples
    gradient:   theta_j -= (gamma / m) * sum_{i: j_i = j} grad F_i(theta_j)
    averaging:  theta_j  = mean_{i: j_i = j} (theta_j after local training)

When to use it: clients form a few groups that want different models, the groups are unknown, and every client can
evaluate all models. All K models are sent to every participant. If groups differ little, or one model is ahead from the
start, all clients may end up with one model: check the entropy of the choices, and try several starts.

Choices:
    The choice uses plain cross-entropy in evaluation mode; ties go to the first model, and a model with a non-finite
    loss is chosen only if all losses are non-finite. Members are weighted by samples, as in the expert-model paper (the
    authors' code averages uniformly: `weighting = "uniform"`). A model without members is not stepped. Before
    evaluation, a client chooses on its labeled validation samples, or on training samples if it has none; one without
    labeled samples takes the model that most clients have trained so far. (The authors' code chooses with the test
    labels.) `n_init > 1` draws several sets of models and begins with the one of the lowest loss on a round's clients,
    before any training; the paper repeats whole runs, as the seeds of an experiment do. The paper's gradients are
    `variant = "gradient"` with `normalize_by = "participants"` and `weighting = "uniform"`; their recorded loss is that
    of training mode. With `cluster_layer` the models differ in one layer and share all others, as in the paper's
    FEMNIST: the shared layers move by the mean over all participants. With `mu` clients train as in FedProx.
    The `anchor` is ours, and `anchor = false` the paper: FedAvg's model beside the K models, mixed into what a client's
    own predicts, with one weight for all that clients' validation samples choose (`fedtide.multi.anchor`). It is
    weighed beside the model that a client trains, which is chosen on training samples; clients choose and train their
    models as without it. In ten small settings over five seeds the paper's form lost up to 2.8 points to the best
    single model and gained up to 22.8, anchored it lost none in the mean and gained as much (recipe never-worse).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedtide.cohorts import Arrivals, Cohort
from fedtide.core.config_types import Flag, ModelCount, Positive
from fedtide.core.errors import refused
from fedtide.core.rng import Rng
from fedtide.core.sums import mean
from fedtide.core.types import (
    Algorithm,
    Answer,
    Facts,
    Fleet,
    Memory,
    Moment,
    Notes,
    Payload,
    Shard,
    Weighted,
    Weights,
)
from fedtide.learn.local import LocalTrainer, LocalUpdate, one_gradient
from fedtide.learn.participation import take_part, with_cohort
from fedtide.learn.server import SGD, Server
from fedtide.learn.steps import Losses, Steps, Stepwise, local_update
from fedtide.learn.task import Task
from fedtide.learn.terms import Pull, proximal
from fedtide.models.branched import WHOLE
from fedtide.multi.anchor import Anchor, Anchored, Anchoring
from fedtide.multi.clusters import (
    ChooseOn,
    Divisor,
    at_most_registered,
    best_set,
    check_layer,
    find_model,
    fit_question,
    in_slot,
    init_models,
    predict_by_cluster,
    receive_models,
    refuse_equal_start,
    send_models,
    step_models,
)
from fedtide.parts.weighting import Weighting, client_weight


@dataclass(frozen=True)
class State:
    """The models, the optimizer's memo of each, and how many clients have trained each so far (K,).

    anchor: the model of all samples, if any.
    """

    weights: tuple[Weights, ...]
    server: tuple[Any, ...]
    members: Tensor
    anchor: Anchor | None = None
    cohort: Any = None


def ifca(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    clusters: ModelCount = 2,
    variant: LocalUpdate = "averaging",
    normalize_by: Divisor = "members",
    choose_on: ChooseOn = "val",
    init_noise: Positive | None = None,
    n_init: ModelCount = 1,
    cluster_layer: str = WHOLE,
    hide_choice: Flag = False,
    mu: Pull = 0.0,
    anchor: Anchored = True,
    server: Server = SGD(),
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "samples",
) -> Algorithm[State]:
    """Iterative federated clustering.

    Sends all models down, and the update of one up, in a sum per model, or in sums of all models (`hide_choice`).

    Args:
        local: local training; for gradients its learning rate is the paper's gamma, and it is by plain SGD, without
            weight decay and augmentation.
        clusters: number of models, K.
        variant: "averaging" of local training, or one "gradient" over all samples of a client.
        normalize_by: divisor of a model's update: the weight of its "members", or of all "participants".
        choose_on: labeled samples on which a client chooses before evaluation.
        init_noise: standard deviation of the normal noise on the first model that makes the others; None draws K
            independent models.
        n_init: number of initial sets of models, of which the one with the lowest loss is taken.
        cluster_layer: the only layer in which the models differ, for example "head"; "*" for whole models.
        hide_choice: hide which model a client trained, by sums for all of them, at K times the upload.
    """
    if init_noise is None:
        refuse_equal_start(task, clusters, ", or `init_noise`")
    check_layer(task, cluster_layer, "cluster_layer")
    if variant == "gradient":
        one_gradient(local)
        if mu:
            raise refused("mu", mu, "0 with variant 'gradient', as one gradient is taken where the pull is zero")
    term = proximal(mu)
    beside = Anchoring(anchor, task, local, server, weighting, variant, term)
    by_cluster = predict_by_cluster(task)

    def init(fleet: Fleet, rng: Rng) -> State:
        memo: Any = cohort.init(fleet)
        keys = [rng.at("set", place) if place else rng for place in range(n_init)]
        sets = [init_models(task, key, clusters, cluster_layer, init_noise) for key in keys]
        models = best_set(fleet, cohort.pick(memo, fleet, rng, None), sets) if n_init > 1 else sets[0]
        none = torch.zeros(clusters, dtype=torch.float64)
        return State(models, tuple(map(server.init, models)), none, beside.start(rng), memo)

    @Stepwise
    def train(payload: Any, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Steps[Answer | None]:
        if not len(shard):
            return None
        models = receive_models(payload["models"])
        j = int((yield Losses(task, models, shard)).argmin())
        parts = yield from beside.train(by_cluster, {**payload, "models": models, "usual": j}, None, shard, moment, rng)
        update = yield from local_update(task, local, variant, models[j], shard, moment, rng, term)
        if update is None:
            return None
        delta, loss = update
        total = {
            "delta": in_slot(delta, client_weight(shard, weighting), j, clusters, hidden=hide_choice),
            "loss": Weighted(loss, len(shard)),
            "members": Weighted(F.one_hot(torch.tensor(j), clusters).double(), 1.0),
        }
        return Answer(total | parts, notes=Notes(branch=torch.tensor(j)), update={j: delta})

    def round(state: State, fleet: Fleet, rng: Rng) -> tuple[State, Facts]:
        payload = {"models": send_models(state.weights, cluster_layer), **beside.sent(state)}
        state, reply = take_part(cohort, fleet, state, rng, serve, payload)
        if reply.total is None:
            return state, {}
        state = step_models(state, server, reply.total["delta"], normalize_by, cluster_layer)
        state, weighed = beside.step(state, reply.total)
        members = reply.total["members"].value
        facts = {"loss": mean(reply.total)["loss"], "members": members, **weighed}
        return replace(state, members=state.members + members), facts

    def serve(state: State, clients: Tensor) -> tuple[Payload, None]:
        return {"models": state.weights, "usual": state.members.argmax(), **beside.sent(state)}, None

    # Every participant evaluates all models; one gradient is one pass.
    forward = {"train": clusters, "fit": n_init * clusters, "loss": clusters + (clusters > 1)}
    works = {"train": train} | ({"fit": fit_question(task)} if n_init > 1 else {})
    adapt, check = find_model(task, choose_on), at_most_registered(clusters)
    made = Algorithm("ifca", init, works, round, serve, by_cluster, adapt, check=check)
    return with_cohort(beside.added_to(made), cohort, task, local, forward=forward, trained=beside.trained())
