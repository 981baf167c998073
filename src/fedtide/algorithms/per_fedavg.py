"""Per-FedAvg: a global model from which one step on a client's samples makes a good model for the client.

Fallah, Mokhtari, Ozdaglar: *Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning
Approach*, NeurIPS 2020, Algorithm 1 with the first-order gradient, Per-FedAvg (FO). With default options it follows
this algorithm, except for the choices below.

| symbol | meaning |
| --- | --- |
| `w`, `w_i` | the global weights, and client i's after local training |
| `alpha` | size of the step that a client takes for itself |
| `beta` | size of the steps of `w_i`, here `local.lr` |
| `D`, `D'` | two parts of a batch |

    w~  <- w_i - alpha * grad f_i(w_i, D)                                             for each batch
    w_i <- w_i - beta * grad f_i(w~, D')
    w   <- mean of w_i

When to use it: clients differ, each has few samples, and new clients shall have a model of their own at once. Clients
keep nothing.

Choices:
    - paper: before a client is evaluated, it takes one step of size `alpha` on its samples. The step is on all of them
      at once (ours); in PFLlib on one batch. A client without labeled samples is evaluated with the
      global model.
    - ours: `local.batch_size` counts the samples of both parts, which are the halves of a batch; the second is the
      larger one. PFLlib counts one half. In a batch too small for two parts both are the whole batch.
    - paper: first-order gradients. They leave out the second derivative, whose estimate (HF) costs two more gradients.
    - ours: `alpha = 0.01`. With 0 it is FedAvg on the second halves of batches.
    - ours: the `alpha` steps are plain gradient steps. The `beta` step uses the optimizer and schedule of `local`.
    - paper: clients have equal weights. `weighting = "samples"` weights them by their samples, as PFLlib does.

PFLlib repeats local training in each round: set `local.epochs = 2` and double the batch size.
"""

from dataclasses import replace
from typing import Annotated, Any

import torch

from fedtide.algorithms.entry import Entry
from fedtide.cohorts import Arrivals, Cohort, OneModel, build_method
from fedtide.core.base import Algorithm, Answer, Moment, Shard
from fedtide.core.rng import Rng
from fedtide.core.weights import add, sub
from fedtide.fields.types import ForWeights, NonNegative
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
from fedtide.learn.by_batch import BY_BATCH
from fedtide.learn.local import gradient_step, refuse_terms
from fedtide.personal import by_own_weights


def per_fedavg(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    alpha: Annotated[NonNegative, ForWeights] = 0.01,
    server: Server = SGD(),
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "uniform",
) -> Algorithm[OneModel]:
    """FedAvg of steps that make the model good after one step of each client.

    Sends the weights down and the update up, as a weighted sum; clients keep nothing.

    Args:
        local: local training; its learning rate is the paper's beta.
        alpha: size of the step that a client takes before it is evaluated, and in training.
    """
    refuse_terms(local, BY_BATCH)

    @Stepwise
    def train(w: Any, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Steps[Answer | None]:
        model, fewest = ModelByBatch(task, local, w, moment), 2 if task.scratch.needs_pairs else 1
        seen = []
        for batch in local.batches(task, task.loss, shard, moment, rng):
            half = len(batch.y) // 2
            first, second = (
                (batch, batch) if half < fewest else (batch.pick(slice(half)), batch.pick(slice(half, None)))
            )
            _, gradient = yield model.ask(first)
            value, gradient = yield model.ask(second, torch._foreach_add(model.values, gradient, alpha=-alpha))
            model.step(gradient)
            seen.append((value, second.labels))
        if not model.steps:
            return None
        return answer_update(sub(model.trained(), w), mean_loss(seen), shard, weighting)

    def adapt(w: Any, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        step = gradient_step(task, LocalTrainer(alpha), w, shard, moment) if alpha else None
        return None if step is None else Answer({}, memory={"own": add(w, step[0])})

    plain = build_method("per-fedavg", task, local, server, cohort, train)
    return replace(plain, adapt=adapt, predict=by_own_weights(task), unpersonalized=plain)


ENTRY = Entry("per-fedavg", per_fedavg, "weights down, update up", "personal", helps=("groups", "labels"))
