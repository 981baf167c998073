"""FedBuff: asynchronous training; the server steps whenever a buffer of answers is full.

Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba: *Federated Learning with Buffered Asynchronous Aggregation*,
AISTATS 2022, Algorithm 1. With default options it follows Algorithm 1 round by round, except for the choices below.

| symbol | meaning |
| --- | --- |
| `w^t` | the global weights after t server steps |
| `M_c` | concurrency: number of clients training at a time |
| `K` | buffer size: answers per server step |
| `tau_i` | staleness: server steps since client i was sent its model |
| `s(tau)` | factor on a stale update, `(1 + tau) ** -damping` |
| `Delta_i` | client i's weights after local training, minus those that it was sent |

When to use it: devices of very different speeds, where a round would wait for the slowest. Without a clock of devices
(`devices.kind`) all are equally fast, and answers are stale for nothing. If the concurrency is not above the buffer
size it is FedAvg.

Choices:
    - ours: `buffer` is 5 by default; the paper leaves K open, and mostly has 10.
    - ours: a round is a server step. It lasts until K of the clients in flight have answered; the others continue into
      the next round.
    - ours: places are filled after a step; in the paper whenever an answer comes. A client that began before the step
      would get the same weights, but would begin sooner. So steps take longer here, by about K / (2 M_c), and far more
      if K is close to M_c. At K = M_c no client is ever late, and it is FedAvg.
    - ours: a client trains on the samples that it holds when its answer comes. Shuffle and learning rate are those of
      that round. A client that has begun answers even if it is asleep by then.
    - paper: the update is `sum s(tau_i) n_i Delta_i / sum n_i`, with `n_i = 1` ("uniform") or a client's samples. The
      listing divides by K. Scaling (the paper's remark on staleness) shortens the step of a stale buffer, and does not
      only down-weight stale members.
    - ours: a client that drops out is noticed when its answer is due. A client that has not answered for
      `max_staleness` rounds is given up, so the server keeps the models of at most that many rounds.
"""

from dataclasses import replace

from fedtide.algorithms.entry import Entry
from fedtide.cohorts import Arrivals, Cohort, InFlight, build_asynchronous
from fedtide.core.base import Algorithm, Sum, Weights
from fedtide.core.trees import Tree
from fedtide.core.weights import mul
from fedtide.fields.types import Count, NonNegative
from fedtide.learn import SGD, LocalTrainer, Server, Task, Weighting


def fedbuff(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    buffer: Count = 5,
    damping: NonNegative = 0.5,
    max_staleness: Count = 50,
    server: Server = SGD(),
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "uniform",
) -> Algorithm[InFlight]:
    """Buffered asynchronous aggregation.

    Sends the weights down to clients that begin, and the update up. There is a weighted sum for each age of the model
    that updates began from. Clients keep nothing.

    Args:
        buffer: answers per server step; all clients in flight if there are fewer.
        damping: an update with staleness tau is scaled by `(1 + tau) ** -damping`; 0 scales none.
        max_staleness: rounds in which a client may answer; after that it is given up.
        cohort: selection of clients that begin; its size is the concurrency, so `over_selection` is not allowed.
    """

    def read(total: Tree, model: Weights, weights: Weights, late: int) -> Tree:
        return damp(total, late, damping)

    # Lines 3 to 13: clients begin with w^t; when K have answered, w moves by the mean of what was damped.
    return build_asynchronous("fedbuff", task, local, server, cohort, weighting, buffer, max_staleness, read)


def damp(total: Tree, staleness: int, damping: float) -> Tree:
    """Scale the updates of clients whose model was `staleness` steps old; their divisor and running statistics stay.

    >>> import torch
    >>> damp({"delta": Sum(Weights({"w": torch.tensor(8.0)}), 2.0)}, 3, 0.5)["delta"]
    Sum(value=Weights(params={'w': tensor(4.)}, buffers={}), weight=2.0)
    """
    if not staleness:
        return total
    delta: Sum = total["delta"]
    factor = (1 + staleness) ** -damping
    return {**total, "delta": replace(delta, value=Weights(mul(delta.value.params, factor), delta.value.buffers))}


ENTRY = Entry(
    "fedbuff", fedbuff, "weights down, update up; the server steps when K have answered", "global",
    tells="sums for each age of the model that they began from",
)  # fmt: skip
