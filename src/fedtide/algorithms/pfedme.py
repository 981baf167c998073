"""pFedMe: each client's own model is the best one near a local copy of the global model (a Moreau envelope).

T. Dinh, Tran, Nguyen: *Personalized Federated Learning with Moreau Envelopes*, NeurIPS 2020, Algorithm 1. With default
options it follows Algorithm 1, except for the choices below.

| symbol | meaning |
| --- | --- |
| `w`, `w_i` | the global weights, and client i's copy during local training |
| `theta_i` | the weights of client i's own model |
| `lambda` | strength of the pull of `theta_i` towards `w_i`, here `lam` |
| `K` | steps of `theta_i` for each batch, here `inner_steps` |
| `eta`, `beta` | rate of `w_i`, here `local.lr`; rate of the server, here `server.lr` |

    theta_i <- theta_i - inner_lr * (grad f_i(theta_i) + lambda * (theta_i - w_i))        K times, for each batch
    w_i     <- w_i - eta * lambda * (w_i - theta_i)
    w       <- (1 - beta) w + beta * mean of w_i

When to use it: clients differ, and their own models shall stay near a common one. It trains K times as much as FedAvg.

Choices:
    - paper: a client is evaluated with `theta_i` of its last batch, or without one with the global model (ours).
    - released code: `theta_i` starts as `w` in each round, and goes on from batch to batch. The paper solves the
      problem of each batch to a given accuracy.
    - released code: `lam = 15`, `inner_steps = 5` and `inner_lr = 0.09`. `theta_i` takes plain steps, with
      `local.weight_decay` and the schedule of `local`. The released code has a decay of 0.001.
    - ours: the default of `local` is that of all methods. The released `eta` is 0.005; with `eta * lam` above 1, `w_i`
      steps beyond `theta_i`.
    - ours: only participants train, as in PFLlib, so others keep an older `theta_i`. In the paper all clients train in
      each round, and some of them send.
    - released code: `beta = 1`. PFLlib's defaults are `lam = 1`, `inner_lr = 0.01` and `beta = 0`, with which its
      server never moves.
    - paper: R local rounds on a batch each. Here they are `local.local_steps`, or the batches of `local.epochs`.
    - ours: running statistics are those of `theta_i`, and are averaged like an update.
    - paper: clients have equal weights. `weighting = "samples"` weights them by their samples, as PFLlib does.

With one inner step and one batch a round, it is FedAvg with the rate `eta * lambda * inner_lr`.
"""

from dataclasses import replace
from typing import Annotated, Any

import torch
from torch import Tensor

from fedtide.algorithms.entry import Entry
from fedtide.cohorts import Arrivals, Cohort, OneModel, build_method
from fedtide.core.base import Algorithm, Answer, Moment, Shard, Weights
from fedtide.core.rng import Rng
from fedtide.core.weights import sub
from fedtide.fields.types import ForWeights, Positive, StepCount
from fedtide.learn import (
    SGD,
    LocalTrainer,
    ModelByBatch,
    Server,
    Steps,
    Stepwise,
    Task,
    Weighting,
    answer_update,
    mean_loss,
)
from fedtide.learn.device import to_cpu
from fedtide.learn.local import refuse_all_but_sgd
from fedtide.learn.terms import Proximal
from fedtide.personal import OWN_MODELS, by_own_weights


def pfedme(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    lam: Annotated[Positive, ForWeights] = 15.0,
    inner_steps: StepCount = 5,
    inner_lr: Annotated[Positive, ForWeights] = 0.09,
    server: Server = SGD(),
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "uniform",
) -> Algorithm[OneModel]:
    """Federated averaging of copies that follow each client's own model, which stays near its copy.

    Sends the weights down and the update up, as a weighted sum; clients keep a model.

    Args:
        local: local training of the copy, by plain SGD; its learning rate is the paper's eta.
        lam: strength of the pull of a client's own model towards its copy of the global model.
        inner_steps: steps of the client's own model for each batch, K.
        inner_lr: learning rate of these steps.
        server: server optimizer for the mean update; its learning rate is the paper's beta.

    Raises:
        FedtideError: local training is not by plain SGD.
    """
    refuse_all_but_sgd(local, "the copy moves towards the client's own model")
    inner = replace(local, lr=inner_lr)

    @Stepwise
    def train(w: Any, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Steps[Answer | None]:
        theta = ModelByBatch(task, inner, w, moment)
        w_i, rate = [value.clone() for value in theta.values], lam * local.lr * local.lr_schedule(moment)
        seen = []
        for batch in local.batches(task, task.loss, shard, moment, rng):
            for number in range(inner_steps):
                value, gradient = yield theta.ask(batch)
                pull = Proximal(lam)(theta.values, w_i)
                torch._foreach_add_(pull, gradient)
                theta.step(pull)
                if not number:
                    seen.append((value, batch.labels))
            torch._foreach_lerp_(w_i, theta.values, rate)
        if not theta.steps:
            return None
        personal = theta.trained()
        delta = sub(Weights(dict(zip(task.scratch.names, map(to_cpu, w_i), strict=True)), personal.buffers), w)
        return answer_update(delta, mean_loss(seen), shard, weighting, {"own": personal})

    def trained(rows: Tensor) -> Tensor:
        return inner_steps * local.samples(rows)

    traits: dict[str, Any] = {"keeps": 1, "refuses": OWN_MODELS}
    predict = by_own_weights(task)
    return build_method("pfedme", task, local, server, cohort, train, predict=predict, trained=trained, **traits)


ENTRY = Entry(
    "pfedme", pfedme, "weights down, update up", "personal", keeps="a model of its own", helps=("groups", "meaning")
)
