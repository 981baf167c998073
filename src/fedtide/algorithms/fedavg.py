"""FedAvg: one global model by averaging the clients' updates.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: *Communication-Efficient Learning of Deep Networks from Decentralized
Data*, AISTATS 2017, Algorithm 1. With default options it follows Algorithm 1, except for the choices below.

| symbol | meaning |
| --- | --- |
| `w` | the global weights |
| `S_t` | the participants of round t |
| `n_i` | number of samples of client i |
| `Delta_i` | client i's weights after local training, minus `w` |

When to use it: always, first. It is the baseline for everything else, and hard to beat when clients are alike.

Choices:
    - ours: the mean is over the clients that answered; the paper's `n` over all clients is wrong if only some take
      part.
    - paper: clients are weighted by their samples; `weighting = "uniform"` weights them equally.
    - paper: `server` steps along the mean update; SGD with rate 1, the default, makes the mean the next model.
    - ours: the shift sends a round's clients (`cohort`); the paper draws them uniformly.
"""

from fedtide.algorithms.entry import Entry
from fedtide.cohorts import Arrivals, Cohort, OneModel, build_method
from fedtide.core.base import Algorithm
from fedtide.learn import SGD, LocalTrainer, Server, Task, Training, Weighting


def fedavg(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    server: Server = SGD(),
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "samples",
) -> Algorithm[OneModel]:
    """Federated averaging.

    Sends the weights down and the update up, as a weighted sum; clients keep nothing.
    """
    # In each round S_t trains w: a client sends n_i Delta_i, and w moves by the mean of Delta_i.
    return build_method("fedavg", task, local, server, cohort, Training(task, local, weighting))


ENTRY = Entry("fedavg", fedavg, "weights down, update up", "global")
