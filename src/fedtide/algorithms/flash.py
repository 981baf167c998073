"""Flash: FedAvg whose server takes longer steps while updates are larger than usual, and whose clients stop early.

Panchal, Choudhary, Mitra, Mukherjee, Sarkhel, Mitra, Guan: *Flash: Concept Drift Adaptation in Federated Learning*,
ICML 2023, Algorithm 1. The server's step is the optimizer `flash` (`fedtide.learn.server.Flash`), which other methods
take too.

| symbol | meaning |
| --- | --- |
| `w`, `Delta` | the global weights, and the mean of the clients' updates |
| `m`, `v` | moments of `Delta`, as in FedAdam; v begins at `tau^2` |
| `d` | the drift term |
| `l_e` | loss on a client's validation samples after epoch e = 1, 2, ...; `l_0` is infinite |

    client: stop after epoch e if l_{e-1} - l_e < gamma / e
    m  <- b1 * m + (1 - b1) * Delta
    v  <- b2 * v' + (1 - b2) * Delta^2,  v' the v before
    b3 <- |v'| / (|Delta^2 - v| + |v'|)
    d  <- b3 * d + (1 - b3) * (Delta^2 - v)
    w  <- w + lr * m / (sqrt(v) - d + tau)

When to use it: one model for all clients, whose samples change together. Keep updates small: as printed, the
denominator is negative, and the weight steps backward, if an update of a weight suddenly is larger than about 0.1.

Choices:
    - paper: all formulas as printed, element by element, without a guard on the denominator.
    - FedCCFA's code: rate 0.01 on the server, `tau` 0.001 (`server.eps`), b1 0.9, b2 0.99, gamma 0.004 and five epochs.
      A `LocalTrainer` of Python without epochs has one, and then nobody stops early.
    - ours: the loss is the training loss, on validation samples. FedCCFA's code uses test samples, and stops only
      at a small fall, not at a rise. It compares the first epoch with the client's last round.
    - paper: the first epoch is always done. A client without validation samples trains all epochs (ours).
    - paper: clients have equal weights. `weighting = "samples"` weights them by their samples, as FedCCFA's code does.
    - ours: the clock of devices counts all epochs.
"""

import math
from typing import Any

from fedtide.algorithms.entry import Entry
from fedtide.cohorts import Arrivals, Cohort, OneModel, build_method
from fedtide.core.base import Algorithm, Answer, Moment, Shard, Weights
from fedtide.core.errors import refused
from fedtide.core.rng import Rng
from fedtide.fields.types import NonNegative
from fedtide.learn import LocalTrainer, Server, Task, Weighting, answer_update
from fedtide.learn.server import Flash


def flash(
    task: Task,
    local: LocalTrainer = LocalTrainer(epochs=5),
    gamma: NonNegative = 0.004,
    server: Server = Flash(),
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "uniform",
) -> Algorithm[OneModel]:
    """FedAvg with Flash's step on the server, and clients that stop early.

    Args:
        local: local training; its epochs are the most that a client trains.
        gamma: a client stops after epoch e > 1 if its validation loss fell by less than gamma / e.

    Raises:
        FedtideError: local training is in steps, after which nobody could stop.
    """
    if local.local_steps is not None:
        allowed = "none, because clients check for early stopping after each epoch; use `epochs`"
        raise refused("local.local_steps", local.local_steps, allowed)

    def train(w: Weights, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        val, last = shard.val, math.inf
        for epoch, fitted in enumerate(local.iter_epochs(task, task.loss, w, shard, moment, rng), start=1):
            if val is None or not len(val):
                continue
            loss = task.objective(fitted.weights, val)
            if last - loss < gamma / epoch:
                break
            last = loss
        if not fitted.steps:
            return None
        return answer_update(fitted.delta, fitted.loss, shard, weighting)

    return build_method("flash", task, local, server, cohort, train)


ENTRY = Entry("flash", flash, "weights down, update up", "server-optimizer", helps=("drift",))
