"""FedNova: FedAvg whose updates are divided by the local work that they took, so that no client counts by its steps.

Wang, Liu, Liang, Joshi, Poor: *Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization*,
NeurIPS 2020, equation 6, sections 4 and 5. With default options it is FedNova with local SGD.

| symbol | meaning |
| --- | --- |
| `p_i` | client i's share of the participants' samples |
| `w_i` | client i's weights after local training |
| `a_i` | length of local training: how far it would go, in learning rates, along a gradient that is always one |
| `mu`, `rho` | `local.proximal` and `local.momentum`; `tau_i` steps of rate `eta` |

    a_i = tau_i                                                                plain SGD
        = (1 - (1 - eta mu)^tau_i) / (eta mu)                                  with FedProx's pull
        = (tau_i - rho (1 - rho^tau_i) / (1 - rho)) / (1 - rho)                with momentum
    w  <- w + ( sum_i p_i a_i ) * sum_i p_i (w_i - w) / a_i

When to use it: clients take different numbers of steps, because they hold different numbers of samples or do a part of
their work. It sends one number more than FedAvg.

Choices:
    - paper: the effective number of steps is `sum_i p_i a_i`; clients are weighted by their samples. `weighting =
      "uniform"` weights them equally.
    - ours: with momentum and a pull `a_i` follows the steps of both. The released code counts them one after the other.
    - ours: with a pull the server steps by `sum_i p_i a_i`, too. The released code steps by `sum_i p_i tau_i`.
    - ours: weight decay is no part of `a_i`, as in the released code.
    - ours: running statistics are averaged as they are.
    - ours: Adam is refused, because its steps do not add gradients up.
"""

from typing import Any

from fedtide.algorithms.entry import Entry
from fedtide.cohorts import Arrivals, Cohort, OneModel, build_method
from fedtide.core.base import Algorithm, Answer, Facts, Moment, Reply, Shard, Weighted, Weights, mean
from fedtide.core.errors import refused
from fedtide.core.rng import Rng
from fedtide.core.weights import div, mul
from fedtide.learn import SGD, LocalTrainer, Server, Steps, Stepwise, Task, Train, Weighting, client_weight, step_server


def fednova(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    server: Server = SGD(),
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "samples",
) -> Algorithm[OneModel]:
    """FedAvg with normalized updates.

    Sends the weights down, and a normalized update and its length up, as weighted sums; clients keep nothing.

    Args:
        local: local training, by SGD.

    Raises:
        FedtideError: local training is not by SGD.
    """
    if local.optimizer != "sgd":
        raise refused("local.optimizer", local.optimizer, "'sgd', because updates are divided by the steps of SGD")

    @Stepwise
    def train(w: Weights, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Steps[Answer | None]:
        fitted = yield Train(task, local, w, shard, moment, rng)
        if not fitted.steps:
            return None
        delta, weight = fitted.delta, client_weight(shard, weighting)
        a = length_of(local, fitted.lr_sum / fitted.steps, fitted.steps)
        normalized = Weights(div(delta.params, a), delta.buffers)
        total = {"delta": Weighted(normalized, weight), "length": Weighted(a, weight)}
        return Answer({**total, "loss": Weighted(fitted.loss, len(shard))}, update=delta)

    def step(state: OneModel, reply: Reply, moment: Moment, rng: Rng) -> tuple[OneModel, Facts]:
        got = mean(reply.total)
        got["delta"] = Weights(mul(got["delta"].params, got["length"]), got["delta"].buffers)  # eq. 6
        state, facts = step_server(state, server, got)
        return state, {**facts, "length": got["length"]}

    return build_method("fednova", task, local, server, cohort, train, step)


def length_of(local: LocalTrainer, rate: float, steps: int) -> float:
    """Return how far local training goes, in learning rates, along a gradient that is always one.

    >>> length_of(LocalTrainer(), 0.1, 3), length_of(LocalTrainer(momentum=0.5), 0.1, 3)
    (3.0, 4.25)
    """
    velocity, length = 0.0, 0.0
    for _ in range(steps):
        velocity = local.momentum * velocity + 1.0 - rate * local.proximal * length
        length += velocity
    return length


ENTRY = Entry("fednova", fednova, "weights down, update and one number up", "global")
