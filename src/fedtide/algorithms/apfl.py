"""APFL: FedAvg, and on each client a mix of the global model and one of its own, with a weight that it learns.

Deng, Kamani, Mahdavi: *Adaptive Personalized Federated Learning*, 2020, Algorithm 1. With default options it follows
Algorithm 1 with learned shares, except for the choices below.

| symbol | meaning |
| --- | --- |
| `w`, `w_i` | the global weights, and client i's after local training |
| `v_i` | the weights that client i keeps |
| `alpha_i` | the share of `v_i` in the mix, which client i keeps |
| `m` | the mix `alpha_i v_i + (1 - alpha_i) w_i` |

    w_i     <- w_i - eta * grad f_i(w_i)                                              for each batch
    v_i     <- v_i - eta * alpha_i * grad f_i(m)
    alpha_i <- alpha_i - eta * <v_i - w_i, grad f_i(m)>, clipped to [0, 1]
    w       <- mean of w_i

When to use it: clients differ by unknown degrees. Each client finds by itself how much of the global model it wants. It
costs twice the training of FedAvg.

Choices:
    - paper: a client is evaluated with `alpha_i v_i + (1 - alpha_i) w`, with the global model as it is now. A client
      that has never trained is evaluated with the global model (ours).
    - ours: `v_i` starts as the global model that the client receives first.
    - released code: `alpha_i` starts at `alpha = 0.5`.
    - ours: all three steps of a batch use gradients at the models before the batch. `alpha_i` moves with each batch;
      the code of the authors moves it with the first batch of a round.
    - paper: `adaptive = false` leaves `alpha_i` at `alpha`: at 0 it is FedAvg, and at 1 each client trains alone.
    - PFLlib: `variant = "pfllib"`. Both models step along gradients of their own. The gradient of `alpha_i` is
      `<v_i - w_i, alpha_i grad f_i(v_i) + (1 - alpha_i) grad f_i(w_i)> + 0.02 alpha_i`, with models after their steps,
      as in the code of the authors. The mix replaces `v_i` at the end of a round, and a client is evaluated with it.
      PFLlib begins with `alpha = 1`.
    - paper: weights are mixed. The code of the authors mixes outputs, in training and in evaluation.
    - ours: FedProx's pull (`local.proximal`) is on `w_i` alone. The mix has mixed running statistics, too.
    - paper: clients have equal weights. `weighting = "samples"` weights them by their samples, as PFLlib does.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from fedtide.algorithms.entry import Entry
from fedtide.cohorts import Arrivals, Cohort, OneModel, build_method
from fedtide.core.base import Algorithm, Answer, Moment, Shard, Weights
from fedtide.core.rng import Rng
from fedtide.core.trees import unshare
from fedtide.core.weights import mix, sub
from fedtide.fields.types import Flag, Fraction
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
from fedtide.learn.local import Batch, refuse_terms
from fedtide.personal import OWN_MODELS, by_own_weights
from fedtide.personal.own_models import take_own_model

PENALTY = 0.02
"""Weight of alpha in its own gradient, in PFLlib."""


def apfl(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    alpha: Fraction = 0.5,
    adaptive: Flag = True,
    variant: Literal["paper", "pfllib"] = "paper",
    server: Server = SGD(),
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "uniform",
) -> Algorithm[OneModel]:
    """FedAvg, and on each client a mix of the global model and one of its own, with a weight that it learns.

    Sends the weights down and the update up, as a weighted sum; clients keep a model and its share in the mix.

    Args:
        local: local training of both models.
        alpha: share of a client's own model in the mix; with `adaptive` its first value.
        adaptive: whether clients learn their shares.
        variant: "paper" is Algorithm 1; "pfllib" is the code of PFLlib.
    """
    refuse_terms(local, BY_BATCH)
    by_itself, mixes = replace(local, proximal=0), variant == "pfllib"
    step = step_as_pfllib if mixes else step_as_printed

    @Stepwise
    def train(w: Any, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Steps[Answer | None]:
        v, a = (w, alpha) if memory is None else (memory["own"], memory["alpha"])
        shared, personal = ModelByBatch(task, local, w, moment), ModelByBatch(task, by_itself, v, moment)
        seen = []
        for batch in local.batches(task, task.loss, shard, moment, rng):
            value, steep = yield from step(shared, personal, batch, a)
            if adaptive:
                a = min(max(a - shared.rate * steep, 0.0), 1.0)
            seen.append((value, batch.labels))
        if not shared.steps:
            return None
        w_i, v_i = shared.trained(), personal.trained()
        next_memory = {"own": mix(w_i, v_i, a) if mixes else v_i, "alpha": a}
        return answer_update(sub(w_i, w), mean_loss(seen), shard, weighting, next_memory)

    traits: dict[str, Any] = {"keeps": 1, "remembers": True, "refuses": OWN_MODELS}
    traits["trained"] = lambda rows: 2 * local.samples(rows)
    predict = by_own_weights(task, take_own_model if mixes else mix_own_model)
    return build_method("apfl", task, local, server, cohort, train, predict=predict, **traits)


def step_as_printed(
    shared: ModelByBatch, personal: ModelByBatch, batch: Batch, a: float
) -> Steps[tuple[Tensor, float]]:
    """Step both models of a client as Algorithm 1 does; return the loss of `w_i` and the gradient of its share."""
    difference = torch._foreach_sub(personal.values, shared.values)
    value, g = yield shared.ask(batch)
    shared.step(g)
    # m is made of the difference, because `w_i` has moved.
    _, slope = yield personal.ask(batch, torch._foreach_sub(personal.values, difference, alpha=1 - a))  # grad f_i(m)
    steep, slope = inner(difference, slope), unshare(slope)
    torch._foreach_mul_(slope, a)
    personal.step(slope)
    return value, steep


def step_as_pfllib(shared: ModelByBatch, personal: ModelByBatch, batch: Batch, a: float) -> Steps[tuple[Tensor, float]]:
    """Step both models of a client as PFLlib does; return the loss of `w_i` and the gradient of its share."""
    value, g = yield shared.ask(batch)
    g = [leaf.clone() for leaf in g]  # it is lost at the next request
    shared.step(g)
    _, h = yield personal.ask(batch)
    personal.step(h)
    difference = torch._foreach_sub(personal.values, shared.values)
    return value, inner(difference, torch._foreach_lerp(g, h, a)) + PENALTY * a


def mix_own_model(w: Weights, memory: Any) -> Weights:
    """Return the model by which a client judges in Algorithm 1: the mix with the global model as it is now."""
    return mix(w, memory["own"], memory["alpha"])


def inner(left: Iterable[Tensor], right: Iterable[Tensor]) -> float:
    """Return the inner product of two lists of tensors."""
    return sum(float(torch.dot(d.flatten(), s.flatten())) for d, s in zip(left, right, strict=True))


ENTRY = Entry(
    "apfl", apfl, "weights down, update up", "personal", keeps="a model of its own, and its share in the mix",
    helps=("groups", "meaning"),
)  # fmt: skip
