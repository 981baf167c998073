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
    - PFLlib: `variant = "pfllib"`. Both models step along gradients of their own. The gradient of
      `alpha_i` is `<v_i - w_i, alpha_i grad f_i(v_i) + (1 - alpha_i) grad f_i(w_i)> + 0.02 alpha_i`, with models after
      their steps. The mix replaces `v_i` at the end of a round, and a client is evaluated with it. PFLlib begins with
      `alpha = 1`.
    - ours: FedProx's pull (`local.proximal`) is on `w_i` alone. The mix has mixed running statistics, too.
    - paper: clients have equal weights. `weighting = "samples"` weights them by their samples, as PFLlib does.
"""

from dataclasses import replace
from typing import Any, Literal

import torch

from fedtide.algorithms.entry import Entry
from fedtide.cohorts import Arrivals, Cohort, OneModel, build_method
from fedtide.core.base import Algorithm, Answer, Moment, Shard
from fedtide.core.rng import Rng
from fedtide.core.weights import mix, sub
from fedtide.fields.types import Flag, Fraction
from fedtide.learn import SGD, LocalTrainer, ModelByBatch, Server, Task, Weighting, answer_update, mean_loss
from fedtide.learn.by_batch import BY_BATCH
from fedtide.learn.local import refuse_terms
from fedtide.personal import OWN_MODELS, by_own_weights

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
    pfllib, by_itself = variant == "pfllib", replace(local, proximal=0)

    def train(w: Any, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        v, a = (w, alpha) if memory is None else (memory["own"], memory["alpha"])
        shared, personal = ModelByBatch(task, local, w, moment), ModelByBatch(task, by_itself, v, moment)
        seen = []
        for batch in local.batches(task, task.loss, shard, moment, rng):
            value, g = shared.gradient(batch)
            difference = torch._foreach_sub(personal.values, shared.values)
            at = None if pfllib else torch._foreach_lerp(shared.values, personal.values, a)
            _, slope = personal.gradient(batch, at)
            shared.step(g)
            personal.step(slope if pfllib else torch._foreach_mul(slope, a))
            if pfllib:
                difference = torch._foreach_sub(personal.values, shared.values)
                slope = list(torch._foreach_lerp(g, slope, a))
            if adaptive:
                steep = sum(float((d * s).sum()) for d, s in zip(difference, slope, strict=True))
                a = min(max(a - shared.rate * (steep + PENALTY * a * pfllib), 0.0), 1.0)
            seen.append((value, batch.labels))
        if not shared.steps:
            return None
        w_i, v_i = shared.trained(), personal.trained()
        next_memory = {"own": mix(w_i, v_i, a) if pfllib else v_i, "alpha": a}
        return answer_update(sub(w_i, w), mean_loss(seen), shard, weighting, next_memory)

    traits: dict[str, Any] = {"keeps": 1, "remembers": True, "refuses": OWN_MODELS}
    traits["trained"] = lambda rows: 2 * local.samples(rows)
    predict = by_own_weights(task, "own" if pfllib else lambda w, memory: mix(w, memory["own"], memory["alpha"]))
    return build_method("apfl", task, local, server, cohort, train, predict=predict, **traits)


ENTRY = Entry(
    "apfl", apfl, "weights down, update up", "personal", keeps="a model of its own, and its share in the mix",
    helps=("groups", "meaning"),
)  # fmt: skip
