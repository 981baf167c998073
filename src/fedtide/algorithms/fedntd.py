"""FedNTD: FedAvg whose clients keep what the received model says of the classes that a sample is not.

Lee, Jeong, Shin, Bae, Yun: *Preservation of the Global Knowledge by Not-True Distillation in Federated Learning*,
NeurIPS 2022, Algorithm 1. With default options it follows Algorithm 1 with beta = tau = 1.

| symbol | meaning |
| --- | --- |
| `q` | softmax of a model's logits divided by `tau`, over all classes but the sample's own |
| `beta` | weight of the distillation |

    minimize  cross-entropy + beta * KL( q_received || q_now )

When to use it: clients hold few of the classes and forget the others in local training. It sends as much as FedAvg. A
client takes one more pass without gradients over its samples.

Choices:
    - ours: the distillation is a term of local training, which other methods have with `local.terms = ["distill"]`.
      Mixtures, branches, and methods with steps of their own refuse it: APFL, FedRoD, FedSGD, Per-FedAvg, pFedMe,
      SCAFFOLD.
    - ours: the received model is evaluated once a round, in evaluation mode and on samples without augmentation. The
      released code evaluates it on each batch, as the batch is.
    - paper: the divergence is as in equation 3. The released code multiplies it by `tau^2`, which is 1 by default.
    - released code: clients are weighted by their samples, as in FedAvg. With `beta = 0` it is FedAvg.
"""

from dataclasses import replace

from fedtide.algorithms.entry import Entry
from fedtide.algorithms.fedavg import fedavg
from fedtide.cohorts import Arrivals, Cohort, OneModel
from fedtide.core.base import Algorithm
from fedtide.core.errors import refused
from fedtide.fields.types import NonNegative, Positive
from fedtide.learn import SGD, LocalTrainer, Server, Task, Weighting
from fedtide.learn.task import refuse_numbers
from fedtide.learn.terms import Distill


def fedntd(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    beta: NonNegative = 1.0,
    tau: Positive = 1.0,
    server: Server = SGD(),
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "samples",
) -> Algorithm[OneModel]:
    """FedAvg with distillation from the received model, of all classes but the true one.

    Sends the weights down and the update up, as a weighted sum; clients keep nothing.

    Args:
        beta: weight of the distillation.
        tau: temperature of the distillation.

    Raises:
        FedtideError: `local.terms` has a distillation, too, or rows have no classes.
    """
    refuse_numbers(task, "algorithm", "fedntd", "it distills classes")
    if any(isinstance(term, Distill) for term in local.terms):
        kinds = [term.kind for term in local.terms]
        raise refused("local.terms", kinds, "none; set beta and tau", "'fedntd' adds the distillation by itself")
    terms = (*local.terms, Distill(beta, tau)) if beta else local.terms
    return replace(fedavg(task, replace(local, terms=terms), server, cohort, weighting), name="fedntd")


ENTRY = Entry(
    "fedntd", fedntd, "weights down, update up", "global", helps=("labels",),
    exempt={"numbers": "it cannot predict numbers, because it distills classes"},
)  # fmt: skip
