"""FedPer: one trunk for all by FedAvg, and a head for each client that never leaves it.

Arivazhagan, Aggarwal, Singh, Choudhary: *Federated Learning with Personalization Layers*, 2019, Algorithm 1. With
default options it follows Algorithm 1 with the last layer as the personalization layer.

| symbol | meaning |
| --- | --- |
| `W_B` | base layers: the trunk, which the server averages |
| `W_P_j` | personalization layers of client j: the head, which stays with it |

When to use it: clients want different answers for the same features, and take part often enough to train a head.

Choices:
    - ours: all clients begin with the same head, drawn from a seed that the server sends. The paper's clients may
      begin with any. A client that never trained is evaluated with it.
    - paper: a client trains trunk and head together, by the same steps.
    - ours: `home` names other layers that stay, such as ["fc2", "head"] for the last two.
    - paper: clients are weighted by their samples.
"""

from fedtide.algorithms.entry import Entry
from fedtide.cohorts import Arrivals, Cohort, OneModel, build_method
from fedtide.core.base import Algorithm
from fedtide.learn import SGD, LocalTrainer, Server, Task, Training, Weighting
from fedtide.learn.layers import HEAD, Layers
from fedtide.transforms.at_home import with_home


def fedper(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    home: Layers = (HEAD,),
    server: Server = SGD(),
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "samples",
) -> Algorithm[OneModel]:
    """FedAvg whose last layer stays with its client.

    Args:
        home: layers that stay: "head" for the last layer, "trunk" for all but the last one, "norm" for those that
            normalize, or names.
    """
    # A client trains (W_B, W_P_j) and sends n_j times the change of W_B alone.
    plain = build_method("fedper", task, local, server, cohort, Training(task, local, weighting))
    return with_home(plain, task, home)


ENTRY = Entry(
    "fedper", fedper, "the trunk down, its update up", "personal", keeps="its head", helps=("meaning", "labels"),
)  # fmt: skip
