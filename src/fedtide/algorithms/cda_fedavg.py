"""CDA-FedAvg: FedAvg whose clients watch how sure the model is of their rows, and remember rows of earlier concepts.

Casado, Lema, Criado, Iglesias, Regueiro, Barro: *Concept drift detection and adaptation for federated and continual
learning*, Multimedia Tools and Applications 2022, Algorithms 4 to 6.

| symbol | meaning |
| --- | --- |
| `q` | confidence of a row: the largest probability that the received model gives to a class |
| `Q` | the window of a client: its last confidences of this concept, N in number |
| `Q_b`, `Q_a` | the window before and after a place k, at least Delta each |
| `f_b`, `f_a` | Beta densities with the mean and the variance of `Q_b` and `Q_a` |

    for each k with mean(Q_a) <= (1 - lambda) * mean(Q_b):  s_k = sum_{q in Q_a} log( f_a(q) / f_b(q) )
    a change is found if max_k s_k > -log(lambda)

A change empties the window, and the client remembers rows of the old concept. It trains on the rows that it holds now
and on those that it remembers.

When to use it: features of clients change at times of their own, old concepts come back, and labels keep their meaning.
It sees no change of meaning by itself: a model is as sure of a row whose label has another meaning.

Choices:
    - paper: lambda 0.05, Delta 100, 1000 confidences in a window, and 1400 rows of each concept, evenly by label.
    - ours: rounds, in which participants train whether there was a change or not. In the paper clients send an update
      when they find a change, and the server does not wait.
    - ours: confidences of all rows that a client holds join its window whenever it takes part, in the order of their
      ids. The paper tests after each row of a stream with probability `exp(-2 q)`; here one test follows all rows.
    - ours: the rows of a concept are those that the client held when the concept began, because a change is found late.
      A row that the client holds again counts once, as it is now.
    - ours: variances are at least 1e-8 and below the variance of a Bernoulli variable with the same mean. Confidences
      are at least 1e-7 from 0 and 1.
    - ours: clients without rows abstain, whatever they remember.
    - ours: recorded samples and simulated seconds are those of the rows that a client holds, without remembered ones.
"""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fedtide.algorithms.entry import Entry
from fedtide.cohorts import Arrivals, Cohort, OneModel, build_method
from fedtide.core.base import Algorithm, Answer, Facts, Memory, Moment, Reply, Shard, Weighted, Weights, mean
from fedtide.core.errors import refused
from fedtide.core.rng import Rng
from fedtide.fields.types import Count, InnerFraction
from fedtide.learn import SGD, LocalTrainer, Server, Steps, Stepwise, Task, Training, Weighting, step_server
from fedtide.learn.kept_rows import keep_rows, merge_shards
from fedtide.learn.task import refuse_numbers

SURE = "it detects changes by how sure its model is of a class"
"""Reason why numbers are refused."""


def cda_fedavg(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    sensitivity: InnerFraction = 0.05,
    part: Count = 100,
    window: Count = 1000,
    remembered: Count = 1400,
    server: Server = SGD(),
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "samples",
) -> Algorithm[OneModel]:
    """FedAvg with a change detector and a memory on each client.

    Sends the weights down; the update, and the number of changes, up in sums.

    Args:
        sensitivity: the paper's lambda. A larger one finds larger changes only, on weaker evidence.
        part: least number of confidences before and after a change, the paper's Delta.
        window: number of confidences that a client keeps.
        remembered: rows that a client remembers of each concept, at most.

    Raises:
        FedtideError: the window is too short for a change, or rows have no classes.
    """
    refuse_numbers(task, "algorithm", "cda-fedavg", SURE)
    if window < 2 * part:
        raise refused("window", window, f"at least {2 * part}, twice `part`")
    training = Training(task, local, weighting)

    @Stepwise
    def train(payload: Weights, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Steps[Answer | None]:
        if not len(shard):
            return None
        concept = pick_evenly(keep_rows(shard), remembered)
        store = memory or {"q": torch.empty(0, dtype=torch.float64), "concept": concept, "past": ()}
        q = torch.cat([store["q"], confidences(task, payload, shard)])[-window:]
        changed = largest_score(q, sensitivity, part) > -math.log(sensitivity)
        if changed:
            store = {"concept": concept, "past": (*store["past"], store["concept"])}
        rows = merge_shards([shard, *reversed(store["past"])])
        answer = yield from training.start(payload, None, rows, moment, rng)
        if answer is None:
            return None
        total = {**answer.total, "changes": Weighted(float(changed), 1.0)}
        return replace(answer, total=total, memory={**store, "q": q[:0] if changed else q})

    def step(state: OneModel, reply: Reply, moment: Moment, rng: Rng) -> tuple[OneModel, Facts]:
        state, facts = step_server(state, server, mean(reply.total))
        return state, {**facts, "changes": reply.total["changes"].value}

    forward = {"train": 1}
    return build_method("cda-fedavg", task, local, server, cohort, train, step, forward=forward, remembers=True)


ENTRY = Entry(
    "cda-fedavg", cda_fedavg, "weights down, update up", "global", helps=("drift",),
    exempt={"numbers": f"it cannot predict numbers, because {SURE}"},
    keeps="its last confidences, and rows of each concept",
)  # fmt: skip


def pick_evenly(shard: Shard, most: int) -> Shard:
    """Return at most so many rows of a shard, as evenly by label as there are rows; of sequences the first ones.

    >>> y = torch.tensor([0, 0, 0, 0, 1, 2])
    >>> pick_evenly(Shard(torch.zeros(6, 1), y, torch.arange(6)), 4).y.tolist()
    [0, 0, 1, 2]
    """
    y = shard.y if shard.y.dim() == 1 else torch.zeros(len(shard), dtype=torch.int64)
    turn = F.one_hot(y).cumsum(0).gather(1, y[:, None])[:, 0]
    return shard.pick(turn.argsort(stable=True)[:most].sort().values)


def confidences(task: Task, weights: Weights, shard: Shard) -> Tensor:
    """Return the largest probability of a class for each row (rows,); of sequences the mean over steps that count."""
    sure = task.predict_rows(weights, shard.x, double=True).amax(-1).exp().nan_to_num(0.0)
    if shard.mask is not None:
        return (sure * shard.mask).sum(1) / shard.mask.sum(1).clamp(min=1)
    return sure.flatten(1).mean(1) if sure.dim() > 1 else sure


def largest_score(q: Tensor, sensitivity: float, part: int) -> float:
    """Return the largest evidence of a fall in a window of confidences (N,); minus infinity without a place of one.

    The evidence of place k is `sum_{q in Q_a} log( f_a(q) / f_b(q) )`. Q_b and Q_a are the windows before and after k,
    f_b and f_a Beta densities with their means and variances.

    Args:
        q: confidences, the newest one last.
        sensitivity: the mean of Q_a is lower than that of Q_b by this share at least.
        part: least number of confidences before and after k.

    >>> q = torch.tensor([0.9, 0.8, 0.9, 0.5, 0.4, 0.5], dtype=torch.float64)
    >>> largest_score(q, 0.05, 2) > -math.log(0.05), largest_score(q.flip(0), 0.05, 2)
    (True, -inf)
    """
    if len(q) < 2 * part:
        return -math.inf
    q = q.clamp(1e-7, 1 - 1e-7)
    k = torch.arange(part, len(q) - part + 1)
    sums = torch.stack([q, q.square(), q.log(), torch.log1p(-q)]).cumsum(1)
    before, after = sums[:, k - 1], sums[:, -1:] - sums[:, k - 1]

    def fit(sums: Tensor, count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return mean, alpha and beta of the Beta density with the mean and the variance of confidences."""
        m = sums[0] / count
        v = torch.minimum((sums[1] / count - m.square()).clamp(min=1e-8), m * (1 - m) - 1e-9)
        return m, m * (m * (1 - m) / v - 1), (1 - m) * (m * (1 - m) / v - 1)

    def log_norm(a: Tensor, b: Tensor) -> Tensor:
        return torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)

    count = len(q) - k
    (m_b, a_b, b_b), (m_a, a_a, b_a) = fit(before, k), fit(after, count)
    scores = (a_a - a_b) * after[2] + (b_a - b_b) * after[3] - count * (log_norm(a_a, b_a) - log_norm(a_b, b_b))
    return float(scores.masked_fill(~(m_a <= (1 - sensitivity) * m_b), -math.inf).max())
