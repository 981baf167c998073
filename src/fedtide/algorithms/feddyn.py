"""FedDyn: FedAvg whose clients correct their loss by what they learned, so that local and global optima agree.

Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama: *Federated Learning Based on Dynamic Regularization*, ICLR
2021, Algorithm 1. With default options it follows Algorithm 1 with alpha = 0.01.

| symbol | meaning |
| --- | --- |
| `w` | the global weights (the paper's theta) |
| `g_i` | client i's gradient at its last local optimum, kept on the client; zero at first |
| `h` | the server's mean of all `g_i` |
| `N` | number of clients |

    w_i minimizes  L_i(v) - <g_i, v> + (alpha/2) * ||v - w||^2
    g_i <- g_i - alpha * (w_i - w)
    h   <- h - (alpha/N) * sum over the cohort of (w_i - w)
    w   <- mean over the cohort of w_i, minus h / alpha

When to use it: clients differ, do much local work, and participate often. The server's step is longer than FedAvg's: in
the first round, with everybody, it is twice the mean update. It sends as much as FedAvg.

Choices:
    - paper: the mean is uniform. The released code divides alpha by a client's number of samples, relative to the mean
      number.
    - paper: `w` is evaluated. The released code evaluates the mean of the participants' models, without `h / alpha`.
    - paper: the step is `h / alpha` also for a small alpha, so FedDyn does not become FedAvg.
    - ours: only trainable parameters have `g_i` and `h`; running statistics are averaged.
    - ours: a client that joins has the gradient zero, and `h` is the mean over all clients from then on.
    - ours: any optimizer may minimize the local loss. `local.proximal` pulls beside alpha.
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fedtide.algorithms.entry import Entry
from fedtide.cohorts import Arrivals, Cohort, take_part, with_cohort
from fedtide.core.base import Algorithm, Answer, Facts, Fleet, Moment, Shard, Weighted, Weights, mean, shared_weights
from fedtide.core.rng import Rng
from fedtide.core.weights import add, mul, sub, zeros_like
from fedtide.fields.types import Positive
from fedtide.learn import Correction, LocalTrainer, Proximal, Steps, Stepwise, Task, Train


@dataclass(frozen=True)
class State:
    """The global weights, the mean `h` of all gradients, the number of clients, N, and the memo of the cohort."""

    weights: Weights
    h: dict[str, Tensor]
    clients: int
    cohort: Any = None


def feddyn(
    task: Task, local: LocalTrainer = LocalTrainer(), alpha: Positive = 0.01, cohort: Cohort = Arrivals()
) -> Algorithm[State]:
    """FedAvg with dynamic regularization.

    Sends the weights down and the update up, in an unweighted sum; a client keeps a gradient.

    Args:
        alpha: strength of the regularization.
    """

    def init(fleet: Fleet, rng: Rng) -> State:
        weights = task.init(rng)
        return State(weights, zeros_like(weights.params), len(fleet.clients), cohort.init(fleet))

    @Stepwise
    def train(w: Weights, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Steps[Answer | None]:
        g = zeros_like(w.params) if memory is None else memory["gradient"]
        terms = [Correction([-g[name] for name in task.scratch.names]), Proximal(alpha)]
        fitted = yield Train(task, local, w, shard, moment, rng, terms)
        if not fitted.steps:
            return None
        delta = fitted.delta
        total = {"delta": Weighted(delta), "loss": Weighted(fitted.loss, len(shard))}
        return Answer(total, memory={"gradient": sub(g, mul(delta.params, alpha))}, update=delta)

    def round(state: State, fleet: Fleet, rng: Rng) -> tuple[State, Facts]:
        registered = len(fleet.clients)
        if registered != state.clients:  # a client that joins has the gradient zero, and h is the mean of all
            state = replace(state, h=mul(state.h, state.clients / registered), clients=registered)
        state, reply = take_part(cohort, fleet, state, rng, shared_weights, state.weights)
        if reply.total is None:
            return state, {}
        h = add(state.h, mul(reply.total["delta"].value.params, -alpha / registered))
        got = mean(reply.total)
        w = add(state.weights, got["delta"])
        w = replace(w, params=add(w.params, mul(h, -1 / alpha)))
        return replace(state, weights=w, h=h), {"loss": got["loss"]}

    algorithm = Algorithm("feddyn", init, {"train": train}, round, shared_weights, task.predict)
    unprivate = "clients keep a sum of their updates, and the server's sum would be of clipped ones"
    refuses = {"at-home": "clients keep gradients of all layers"}
    refuses |= dict.fromkeys(("robust", "trusted"), "the server's mean is that of all gradients that clients keep")
    return with_cohort(algorithm, cohort, task, local, keeps=1, unprivate=unprivate, refuses=refuses)


ENTRY = Entry(
    "feddyn", feddyn, "weights down, update up", "global", helps=("labels",),
    keeps="a gradient, as large as the weights",
    exempt={"newcomers": "clients that join change its steps, because its mean gradient is over all of them"},
)  # fmt: skip
