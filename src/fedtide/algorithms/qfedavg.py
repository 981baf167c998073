"""q-FedAvg: more even accuracy over clients, by larger weights for clients with a high loss.

Li, Sanjabi, Beirami, Smith: *Fair Resource Allocation in Federated Learning*, ICLR 2020, Algorithm 2. It minimizes
`sum_i p_i F_i(w)^(q+1) / (q+1)`, with `p_i` the probability that client i participates, times its samples with
`weighting = "samples"`. With one epoch of full batches it is the paper's q-FedSGD. With default options it follows the
released code of Algorithm 2, with q = 1.

| symbol | meaning |
| --- | --- |
| `F_i` | mean training loss of the received weights `w` on client i's samples, before training |
| `L` | the Lipschitz estimate, 1 / (local learning rate) |
| `w_i` | client i's weights after local training |

    dw_i    = L * (w - w_i)
    delta_i = F_i^q * dw_i
    h_i     = q * F_i^(q-1) * ||dw_i||^2 + L * F_i^q
    w      <- w - sum_i delta_i / sum_i h_i

When to use it: the worst-served clients matter more than the mean. `q = 0` is FedAvg with equal weights.

Choices:
    - paper: `L = 1 / local.lr`, with the learning rate before its schedule (ours).
    - released code: clients are not weighted by their samples; `weighting = "samples"` does.
    - released code: powers are of `F_i + 1e-10`. At q = 0 the first term of `h_i` is left out (ours).
    - ours: the norm is over trainable parameters in float64; running statistics move by the mean with weights `L *
      F_i^q`.
"""

from fedtide.algorithms.entry import Entry
from fedtide.cohorts import Arrivals, Cohort, OneModel, build_method
from fedtide.core.base import Algorithm, Facts, Moment, Reply, mean
from fedtide.core.rng import Rng
from fedtide.fields.types import NonNegative
from fedtide.learn import SGD, FairTraining, LocalTrainer, Task, Weighting, fair_totals, step_server


def qfedavg(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    q: NonNegative = 1.0,
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "uniform",
) -> Algorithm[OneModel]:
    """FedAvg with fairness q.

    Args:
        local: local training; its learning rate is also 1 / L.
        q: fairness; 0 is FedAvg with equal weights, larger values give more even accuracy.
        weighting: weight of a client: "uniform" 1 (the released code), "samples" its number of samples.
    """
    train, server = FairTraining(task, local, weighting, q=q), SGD()
    unprivate = "a client's weight is a power of its loss, which has no bound"

    def step(state: OneModel, reply: Reply, moment: Moment, rng: Rng) -> tuple[OneModel, Facts]:
        return step_server(state, server, mean(fair_totals(reply.total)))  # Algorithm 2

    return build_method("q-fedavg", task, local, server, cohort, train, step, unprivate=unprivate)


ENTRY = Entry("q-fedavg", qfedavg, "weights down, update and one number up", "global")
