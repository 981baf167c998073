"""FedSGD: one global model by averaging the gradients of clients.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: *Communication-Efficient Learning of Deep Networks from Decentralized
Data*, AISTATS 2017, section 2. With default options it is FedSGD as printed.

| symbol | meaning |
| --- | --- |
| `w` | the global weights |
| `g_i` | the gradient at `w` of client i's mean training loss |
| `eta` | the learning rate |

    w <- w - eta * sum_i (n_i / n) g_i

When to use it: to measure the gain of local steps, and where the exact gradient is wanted.

Choices:
    - ours: clients send the step, `-eta g_i`, so server optimizers treat it like an update.
    - paper: each client sends one gradient over all its samples. It equals FedAvg with one epoch of full-batch plain
      SGD, but for BatchNorm with more than 2,048 samples.
"""

from fedtide.algorithms.entry import Entry
from fedtide.cohorts import Arrivals, Cohort, OneModel, build_method
from fedtide.core.base import Algorithm, Answer, Memory, Moment, Shard, Weights
from fedtide.core.rng import Rng
from fedtide.learn import SGD, Server, Task, Weighting, answer_update
from fedtide.learn.local import LocalTrainer, gradient_step, refuse_all_but_gradient


def fedsgd(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    server: Server = SGD(),
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "samples",
) -> Algorithm[OneModel]:
    """FedSGD: one gradient over all samples of each client, one step of size `local.lr` on the server.

    Args:
        local: learning rate and schedule; batches and epochs have no effect, and what else changes a step is refused.
        server: server optimizer for the mean step.

    Raises:
        FedtideError: local training is not by plain SGD, or has weight decay or augmentation.
    """
    refuse_all_but_gradient(local)

    def train(payload: Weights, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        step = gradient_step(task, local, payload, shard, moment)
        if step is None:
            return None
        delta, loss = step
        return answer_update(delta, loss, shard, weighting)

    return build_method("fedsgd", task, local, server, cohort, train, trained=lambda rows: rows)


ENTRY = Entry("fedsgd", fedsgd, "weights down, gradient step up", "global")
