"""SCAFFOLD: FedAvg whose clients correct every local step for their drift, by control variates.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: *SCAFFOLD: Stochastic Controlled Averaging for Federated Learning*, ICML
2020, Algorithm 1. With default options it follows Algorithm 1, except for the choices below.

| symbol | meaning |
| --- | --- |
| `w` | the global weights (the paper's x) |
| `c` | the server's control variate: an estimate of the mean gradient of all clients |
| `c_i` | client i's control variate, kept on the client: an estimate of its own gradient |
| `y` | client i's weights during local training |
| `tau`, `eta` | number and size of local steps |

    y    <- y - eta * (g_i(y) - c_i + c)                          tau times
    c_i+ <- option I:  the gradient of client i's loss at w, over all its samples
            option II: c_i - c + (w - y) / (tau * eta)
    w    <- w + eta_g * mean over the cohort of (y - w)
    c    <- c + (1/N) * sum over the cohort of (c_i+ - c_i)       N: all clients

When to use it: clients differ, do many local steps, and participate often. If most participate once or never, it is
FedAvg with a stale direction. It sends twice as much as FedAvg both ways, and needs a smaller local learning rate.

Choices:
    - paper: all variates start at zero, so the first round is FedAvg's with equal weights. Widely used code starts them
      from a random network, which pushes every newcomer in a random direction.
    - ours: only trainable parameters have variates; running statistics are averaged like an update.
    - paper: option II is the default, as in the experiments.
    - paper: the mean of updates is uniform. `weighting = "samples"` weights updates by samples, as in NIID-Bench, and
      never the variates.
    - paper: `eta_g` is the learning rate of `server`.
    - ours: option II infers a client's mean gradient from its update, which is correct for plain SGD alone. Momentum,
      Adam, clipping and a proximal pull are refused.
    - ours: weight decay is part of the gradient, in both options. Option I takes one more pass, in training mode and
      without augmentation.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from fedtide.algorithms.entry import Entry
from fedtide.cohorts import Arrivals, Cohort, take_part, with_cohort
from fedtide.core.base import Algorithm, Answer, Facts, Fleet, Moment, Shard, Weighted, Weights, mean, shared_weights
from fedtide.core.rng import Rng
from fedtide.core.weights import add, div, mul, sub, zeros_like
from fedtide.fields.types import Positive
from fedtide.learn import SGD, Correction, Server, Steps, Stepwise, Task, Train, Weighting, client_weight, step_server
from fedtide.learn.local import LocalTrainer, clip, refuse_all_but_sgd

Variate = dict[str, Tensor]


@dataclass(frozen=True)
class Sent:
    """Payload of participants: the weights, and the server's variate."""

    weights: Weights
    control: Variate


@dataclass(frozen=True)
class State:
    """The global weights, the server optimizer's memo, the control variate `c`, and the number of clients, N."""

    weights: Weights
    server: Any
    control: Variate
    clients: int
    cohort: Any = None


def scaffold(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    variant: Literal["I", "II"] = "II",
    server: Server = SGD(),
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "uniform",
    max_control_norm: Positive | None = None,
) -> Algorithm[State]:
    """FedAvg with control variates, so that heterogeneous clients do not drift apart.

    Args:
        local: local training, by plain SGD.
        variant: update of a client's variate: "I" by the gradient at the received weights, which is one more pass over
            its samples; "II" from its local steps.
        server: server optimizer for the mean update; its learning rate is the paper's `eta_g`.
        weighting: weight of an update: "uniform" 1, "samples" the client's number of samples; variates have weight 1.
        max_control_norm: largest norm of the change of a client's variate; None means no clipping. For privacy, which
            bounds what is sent: a client has to keep what it sent.

    Raises:
        FedtideError: local training is not by plain SGD.
    """
    refuse_all_but_sgd(local, "control variates are made for plain SGD")

    def init(fleet: Fleet, rng: Rng) -> State:
        weights = task.init(rng)
        control = zeros_like(weights.params)
        return State(weights, server.init(weights), control, len(fleet.clients), cohort.init(fleet))

    @Stepwise
    def train(payload: Any, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Steps[Answer | None]:
        w, c = payload.weights, payload.control
        c_i = zeros_like(c) if memory is None else memory["control"]
        correction = Correction([c[name] - c_i[name] for name in task.scratch.names])
        fitted = yield Train(task, local, w, shard, moment, rng, correction)
        if not fitted.steps:
            return None
        delta = fitted.delta
        if variant == "I":
            new, _ = task.gradient(w, shard)
            new = add(new, mul(w.params, local.weight_decay)) if local.weight_decay else new
        else:
            new = sub(sub(c_i, c), div(delta.params, fitted.lr_sum))
        change = sub(new, c_i)
        if max_control_norm is not None:
            clip(list(change.values()), max_control_norm)
            new = add(c_i, change)
        total = {"delta": Weighted(delta, client_weight(shard, weighting)), "control": Weighted(change)}
        return Answer({**total, "loss": Weighted(fitted.loss, len(shard))}, memory={"control": new}, update=delta)

    def round(state: State, fleet: Fleet, rng: Rng) -> tuple[State, Facts]:
        registered = len(fleet.clients)
        if registered != state.clients:  # a client that joins has the variate zero, and c is the mean of all
            control = mul(state.control, state.clients / registered)
            state = replace(state, control=control, clients=registered)
        payload = Sent(state.weights, state.control)
        state, reply = take_part(cohort, fleet, state, rng, shared_weights, payload)
        if reply.total is None:
            return state, {}
        # The sum over the cohort divided by the number of all clients: not the mean over the cohort.
        control = add(state.control, div(reply.total["control"].value, registered))
        return step_server(replace(state, control=control), server, mean(reply.total))

    algorithm = Algorithm("scaffold", init, {"train": train}, round, shared_weights, task.predict)
    forward = {"train": 3 if variant == "I" else 0}  # a pass forward and back costs three forward passes
    norms = {"control": math.inf if max_control_norm is None else max_control_norm}
    traits: Any = {"sends": (Sent,), "keeps": 1, "kept_as_sent": norms}
    traits["refuses"] = dict.fromkeys(("robust", "trusted"), "its control variate is the mean of all that clients keep")
    return with_cohort(algorithm, cohort, task, local, forward=forward, **traits)


ENTRY = Entry(
    "scaffold", scaffold, "weights and control variate down, updates of both up", "global", helps=("labels",),
    keeps="its control variate, as large as the weights",
    exempt={"newcomers": "clients that join change its steps, because its control variate is a mean over all"},
)  # fmt: skip
