"""How sure a model is of rows, and whether it has become less sure: the change detector of CDA-FedAvg."""

import math

import torch
from torch import Tensor

from fedtide.core.base import Shard, Weights
from fedtide.learn.task import Task


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
