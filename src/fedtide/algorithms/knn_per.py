"""kNN-Per: FedAvg, and the labels of a client's nearest samples beside what the model predicts.

Marfoq, Neglia, Kameni, Vidal: *Personalized Federated Learning through Local Memorization*, ICML 2022, Algorithm 1.
With default options it follows Algorithm 1, except for the choices below.

| symbol | meaning |
| --- | --- |
| `w` | the global weights, which are FedAvg's |
| `phi(x)` | features of a sample in the global model |
| `N_k(x)` | the k training samples of the client whose features are nearest to `phi(x)` |
| `lambda` | weight of the client's samples, here `lam` |

    p_votes(y|x) ~ sum of exp(-||phi(x) - phi(x')||) over (x', y) in N_k(x)
    p(y|x)       = lambda p_votes(y|x) + (1 - lambda) p_w(y|x)

When to use it: clients differ in labels or in their meaning, and have samples to compare with. Training stays as it is,
and a client changes its answers with its samples, without a step.

Choices:
    - paper: features are the inputs of the last layer (`layer`), and are computed anew with each model. `k = 10`.
    - paper: distances are Euclidean. The released code has squares of them over the number of features.
    - paper: a client chooses `lambda` among 0, 0.1, ..., 1 by its validation samples; by their likelihood (ours). A
      client without any takes 0.5 (ours). The released code shows the accuracy on test samples for each.
    - ours: each class has a millionth of a vote, so that no label is impossible.
    - ours: a client without labeled samples is evaluated with the global model.

The transform `neighbors` does the same for any method: `transforms = ["neighbors"]`.
"""

from dataclasses import replace

from fedtide.algorithms.entry import Entry
from fedtide.algorithms.fedavg import fedavg
from fedtide.cohorts import Arrivals, Cohort, OneModel
from fedtide.core.base import Algorithm
from fedtide.fields.types import Count, Fraction
from fedtide.learn import SGD, LocalTrainer, Server, Task, Weighting
from fedtide.personal import Neighbors
from fedtide.personal.client_networks import Networks
from fedtide.transforms.personalized import with_way


def knn_per(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    k: Count = 10,
    lam: Fraction | None = None,
    layer: str | None = None,
    server: Server = SGD(),
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "samples",
) -> Algorithm[OneModel]:
    """FedAvg, and the labels of a client's nearest samples beside what the model predicts.

    Sends the weights down and the update up, as a weighted sum; clients keep nothing but their samples.

    Args:
        k: number of nearest samples.
        lam: weight of the samples' labels; None lets each client choose it by validation samples.
        layer: layer whose inputs are the features; None is the last one.
    """
    plain = replace(fedavg(task, local, server, cohort, weighting), name="knn-per")
    usual = {"k": Neighbors.k, "lam": Neighbors.lam, "layer": Neighbors.layer}
    plain = replace(plain, traits=replace(plain.traits, personal=usual))
    voting = with_way(plain, Neighbors(k, lam, layer), Networks(task), "knn-per", clusters=1)
    return replace(voting, unpersonalized=plain)


ENTRY = Entry(
    "knn-per", knn_per, "weights down, update up", "personal", helps=("labels", "meaning"),
    exempt={"numbers": "it cannot predict numbers, because samples vote for classes"},
)  # fmt: skip
