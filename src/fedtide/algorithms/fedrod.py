"""FedRoD: one network for all with a balanced loss, and beside its head a second one that each client keeps.

Chen, Chao: *On Bridging Generic and Personalized Federated Learning for Image Classification*, ICLR 2022, with the
linear personalized head. With default options its loss is the paper's balanced softmax.

| symbol | meaning |
| --- | --- |
| `theta` | the trunk, with features z = f(x; theta) |
| `psi`, `phi_m` | generic head G of all clients, and personalized head P of client m |
| `n_(m,c)` | number of samples of class c of client m |

    theta, psi <- a step on  -log softmax_y(G(z) + log n_m)                 sent, and averaged as in FedAvg
    phi_m      <- a step on  -log softmax_y(G(z) + P(z))                    kept; no gradient for theta and psi

When to use it: clients hold few of the classes. One model for all and one for each client come of the same training.

Choices:
    - paper: both steps are taken on the same batches with the same optimizer. The recorded loss is the sum of both.
    - ours: P begins at zero; in PFLlib it begins with a copy of G. A client that never trained is evaluated with G.
    - paper: G alone is evaluated beside the personalized predictions, as "generic head".
    - paper: P has the form of the last layer of the network.
    - ours: the loss of P is that of the method, cross-entropy by default.
    - paper: a class that a client does not hold gets no gradient in G. A client of one class changes only its P.
    - paper: clients are weighted by their samples.
"""

from dataclasses import replace
from typing import Any

from fedtide.algorithms.entry import Entry
from fedtide.cohorts import Arrivals, Cohort, OneModel, build_method
from fedtide.core.base import Algorithm, Answer, Moment, Shard, Weights
from fedtide.core.rng import Rng
from fedtide.core.trees import all_finite
from fedtide.core.weights import add
from fedtide.learn import SGD, LocalTrainer, Server, Steps, Stepwise, Task, Train, Weighting, answer_update
from fedtide.learn.local import refuse_terms
from fedtide.learn.losses import refuse_mean_loss
from fedtide.learn.task import refuse_numbers
from fedtide.personal import OWN_MODELS
from fedtide.personal.second_head import TwoHeads


def fedrod(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    server: Server = SGD(),
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "samples",
) -> Algorithm[OneModel]:
    """FedAvg with a balanced loss, and a second head for each client.

    Sends the weights of one head down and their update up, as a weighted sum; clients keep the other head.
    """
    refuse_numbers(task, "algorithm", "fedrod", "its loss counts classes")
    refuse_mean_loss(task.loss, "two heads have two losses for a label")
    refuse_terms(local, "the method trains two heads at once")
    heads = TwoHeads(task)

    @Stepwise
    def train(w: Weights, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Steps[Answer | None]:
        start = heads.join(w, None if memory is None else memory["own"])
        fitted = yield Train(heads.task, local, start, shard, moment, rng)
        if not fitted.steps:
            return None
        delta, change = heads.split(fitted.delta)
        head = add(heads.split(start)[1], change)
        next_memory = {"own": head} if all_finite(head) else None
        return answer_update(delta, fitted.loss, shard, weighting, next_memory)

    traits: dict[str, Any] = {"keeps": 1, "refuses": OWN_MODELS}
    plain = build_method("fedrod", task, local, server, cohort, train, **traits)
    return replace(plain, predict=heads.predict, others={"generic head": plain})


ENTRY = Entry(
    "fedrod", fedrod, "weights down, update up", "personal", keeps="a second head", helps=("labels",),
    exempt={"numbers": "it cannot predict numbers, because its loss counts classes"},
)  # fmt: skip
