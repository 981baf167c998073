"""Ditto: FedAvg, and a model of each client's own that is pulled towards the global one.

Li, Hu, Beirami, Smith: *Ditto: Fair and Robust Federated Learning Through Personalization*, ICML 2021, Algorithm 1.
With default options it follows Algorithm 1, except for the choices below.

| symbol | meaning |
| --- | --- |
| `w` | the global weights, which are FedAvg's |
| `v_k` | the weights that client k keeps |
| `lambda` | strength of the pull, here `lam` |
| `s`, `eta` | number and size of the steps of `v_k` |

    w_k <- local training from w                                          sent, and averaged as in FedAvg
    v_k <- v_k - eta * (grad F_k(v_k) + lambda * (v_k - w))               s times; kept

When to use it: clients differ and take part often, and each has too few samples for a model of its own. It is robust
to clients that send bad updates, because `v_k` follows the client's own samples. It costs twice the training of FedAvg.

Choices:
    - paper: a client is evaluated with `v_k`, or without one with the global model (ours).
    - ours: `v_k` starts as the global model that the client receives first. In the paper all start alike, before
      round 0. If all clients take part in round 0, both are the same.
    - ours: `v_k` takes its steps with optimizer, rate and epochs of `local`, or with those of `personal`, in an order
      of its own. The released code uses the same batches for both models.
    - released code: `lam = 1`, as in its scripts. The paper also tries 0.1 and 2, and lets clients choose by validation
      samples.
    - paper: the pull is towards the received global model, not towards the model after training.
    - ours: FedProx's pull (`local.proximal`) is on `w_k` alone, if `personal` has none.
    - ours: the pull is on trainable parameters only. Running statistics are those of the client's own training.
    - paper: clients have equal weights. The released code draws clients in proportion to their samples;
      `weighting = "samples"` comes nearest.
    - ours: a personal model that is no longer finite is not kept, and the update is sent all the same.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor

from fedtide.algorithms.entry import Entry
from fedtide.cohorts import Arrivals, Cohort, OneModel, build_method
from fedtide.core.base import Algorithm, Answer, Moment, Shard
from fedtide.core.rng import Rng
from fedtide.core.trees import all_finite, detached
from fedtide.fields.types import NonNegative
from fedtide.learn import SGD, LocalTrainer, Proximal, Server, Steps, Stepwise, Task, Train, Weighting, answer_update
from fedtide.personal import OWN_MODELS, by_own_weights


def ditto(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    personal: LocalTrainer | None = None,
    lam: NonNegative = 1.0,
    server: Server = SGD(),
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "uniform",
) -> Algorithm[OneModel]:
    """FedAvg, and a model of each client's own that is pulled towards the global one.

    Sends the weights down and the update up, as a weighted sum; clients keep a model.

    Args:
        local: local training of the global model.
        personal: local training of the client's own model; None is that of the global model.
        lam: strength of the pull of the client's own model towards the global one.
    """
    solver = personal or replace(local, proximal=0.0)

    @Stepwise
    def train(w: Any, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Steps[Answer | None]:
        fitted = yield Train(task, local, w, shard, moment, rng)
        if not fitted.steps:
            return None
        delta = detached(fitted.delta)
        pull = Proximal(lam, [w.params[name] for name in task.scratch.names])
        v = w if memory is None else memory["own"]
        solved = yield Train(task, solver, v, shard, moment, rng.at("own"), pull)
        model = {"own": detached(solved.weights)}
        next_memory = model if all_finite(model) else None
        return answer_update(delta, fitted.loss, shard, weighting, next_memory)

    def trained(rows: Tensor) -> Tensor:
        return local.samples(rows) + solver.samples(rows)

    predict = by_own_weights(task)
    traits: dict[str, Any] = {"keeps": 1, "refuses": OWN_MODELS}
    return build_method("ditto", task, local, server, cohort, train, predict=predict, trained=trained, **traits)


ENTRY = Entry(
    "ditto", ditto, "weights down, update up", "personal", keeps="a model of its own", helps=("groups", "meaning")
)
