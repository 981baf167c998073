"""q-FedAvg: more even accuracy over clients, by weighing those with a high loss more.

Li, Sanjabi, Beirami, Smith: *Fair Resource Allocation in Federated Learning*, ICLR 2020, Algorithm 2. It minimizes
`sum_i p_i F_i(w)^(q+1) / (q+1)`, with `p_i` the chance that client i is asked, times its rows with
`weighting = "samples"`. With one epoch of one full batch it is the paper's q-FedSGD.

| symbol | meaning |
| --- | --- |
| `F_i` | mean training loss of the received weights `w` on client i's rows, before training |
| `L` | the Lipschitz estimate, 1 / (local rate) |
| `w_i` | client i's weights after local training |

    dw_i    = L * (w - w_i)
    delta_i = F_i^q * dw_i
    h_i     = q * F_i^(q-1) * ||dw_i||^2 + L * F_i^q
    w      <- w - sum_i delta_i / sum_i h_i

When to use it: the worst-served clients matter more than the mean. `q = 0` is FedAvg with equal weights.

Choices:
    `L = 1 / local.lr` with the rate before its schedule. Clients are not weighted by their rows, as in the released
    code (`weighting = "samples"` does). `F_i + 1e-10` inside powers; at q = 0 the first term of `h_i` is left out. The
    norm is taken over trainable parameters in float64; running statistics move by the mean with weights `L * F_i^q`.
    What clients send, and what is made of the sums, is in `fedtide.learn.fair`.
"""

from __future__ import annotations

from typing import Annotated

from fedtide.algorithms.fedavg import averaging
from fedtide.core.config_types import NonNegative, Spelled
from fedtide.core.types import Algorithm
from fedtide.learn.fair import Fair
from fedtide.learn.local import LocalTrainer
from fedtide.learn.server import SGD
from fedtide.learn.task import Task
from fedtide.parts.cohort import Arrivals, Cohort
from fedtide.parts.select import Select
from fedtide.parts.weighting import Weighting


def qfedavg(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    q: NonNegative = 1.0,
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "uniform",
    select: Annotated[Select | None, Spelled] = None,
) -> Algorithm:
    """FedAvg with fairness q.

    Args:
        task: model and loss.
        local: local training; its rate is also 1 / L.
        q: 0 is FedAvg with equal weights; the larger, the more even.
        cohort: who is asked.
        weighting: "uniform" (the released code) or "samples".
        select: picks who is asked by what is known of clients, as for FedAvg; None means whoever the cohort says.
    """
    fair = Fair(q, 1.0 / local.lr)
    return averaging("q-fedavg", task, local, SGD(), cohort, weighting, select=select, fair=fair)
