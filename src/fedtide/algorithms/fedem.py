"""FedEM on a branched network: every client's data are a blend, and every row trains each branch by its posterior.

Marfoq, Neglia, Bellet, Kameni, Vidal: *Federated Multi-Task Learning under a Mixture of Distributions*, NeurIPS 2021,
Algorithm 1, with the K models sharing a trunk, as compared in Zhu et al.: *Diurnal or Nocturnal?*, ICLR 2022.

| symbol | meaning |
| --- | --- |
| `pi_i` | client i's blend of the K components (K,), kept on the client |
| `q_k(s)` | posterior of component k for row s |

    q_k(s)  = softmax_k( log pi_ik - loss_k(s) )
    pi_ik   = mean_s q_k(s)
    minimise (1/B) sum_{s in batch} sum_k q_k(s) * loss_k(s)

When to use it: clients are blends rather than members of one group, and keep taking part.

Choices:
    The E-step runs once a round, in evaluation mode, on plain cross-entropy whatever loss trains, and its posteriors
    stay with their rows through every shuffle. `loss_k` of the M-step is the method's loss of a row. The sum over a
    batch is divided by B and not by the sum of posteriors, as in the released code. The mean is over participants (the
    code also counts those who were not asked). At inference a client's own blend weighs the branches' probabilities;
    before it is judged a client adapts its blend by `e_steps` on its own training rows, and one without rows keeps the
    uniform blend. (The periodic-shift paper runs EM on labelled test data, which nobody has.) Posteriors are at least
    1e-12."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.sums import mean
from fedtide.core.types import (
    Algorithm,
    Answer,
    Facts,
    Fleet,
    Memory,
    Moment,
    Prediction,
    Shard,
    Weighted,
    Weights,
    shared_weights,
)
from fedtide.core.values import Count
from fedtide.learn.branches import blended, losses_of, with_branches
from fedtide.learn.local import LocalSolver
from fedtide.learn.loss import CrossEntropy
from fedtide.learn.server import KERAS, Server, averaged
from fedtide.learn.task import Task
from fedtide.parts.cohort import Arrivals, Cohort
from fedtide.parts.weighting import Weighting, client_weight

LEAST = 1e-12


@dataclass(frozen=True)
class State:
    """The network and the server optimiser's memo."""

    weights: Weights
    server: Any


@dataclass(frozen=True)
class Blended:
    """The mean over rows of sum_k q_k * loss_k, with q (rows, K) from the E-step.

    Args:
        q: posteriors.
        base: the loss of a component, one that has a value for each label.
    """

    q: Tensor
    base: Any = CrossEntropy()

    def prepare(self, shard: Shard) -> tuple[Any, Tensor]:
        """What the base needs to know; each row's posteriors, and for sequences which steps count beside them."""
        shared, _ = self.base.prepare(shard)
        return shared, self.q if shard.mask is None else torch.cat([self.q, shard.mask.to(self.q.dtype)], 1)

    def value(self, outputs: tuple[Tensor, Tensor], y: Tensor, shared: Any, per_row: Tensor | None) -> Tensor:
        """Divided by the rows of the batch, not by the sum of posteriors."""
        assert per_row is not None
        k = len(outputs[0])
        q, mask = per_row[:, :k], per_row[:, k:]
        each = torch.stack([self.base.each(z, y, shared).flatten() for z in outputs[0]], 1)
        if y.dim() == 1:
            return (q.to(each.dtype) * each).sum() / len(y)
        # Not times the mask: a step that does not count may well have an infinite loss.
        counted = each.T.reshape(k, *y.shape).to(mask.dtype).masked_fill(mask == 0, 0.0).sum(-1)
        return (q.T.to(each.dtype) * counted).sum() / mask.sum()


def fedem(
    task: Task,
    local: LocalSolver = LocalSolver(),
    branches: Count = 2,
    layer: str = "head",
    e_steps: Count = 5,
    server: Server = KERAS,
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "samples",
) -> Algorithm:
    """Federated EM over branches.

    Args:
        task: model and loss, which must have a value for each label; components are weighed by plain cross-entropy.
        local: local training.
        branches: K.
        layer: the layer that is repeated.
        e_steps: E-steps of a client before it is judged.
        server: what the server does with the mean update.
        cohort: who is asked.
        weighting: "samples" weighs a client by its rows, "uniform" all alike.

    Raises:
        FedtideError: the loss has only a mean.
    """
    if not hasattr(task.loss, "each"):
        raise FedtideError(
            f"loss: found {type(task.loss).__name__}, allowed with FedEM: CrossEntropy, WSM, or one with `each`, as it "
            "weighs rows"
        )
    task = with_branches(task, layer, branches)
    uniform = torch.full((branches,), 1 / branches, dtype=torch.float64)

    def init(fleet: Fleet, rng: Rng) -> State:
        weights = task.init(rng)
        return State(weights, server.init(weights))

    def e_step(losses: Tensor, pi: Tensor) -> tuple[Tensor, Tensor]:
        """Posteriors (rows, K) and the new blend (K,), from losses (K, rows)."""
        q = torch.softmax(pi.clamp(min=LEAST).log() - losses.double().T, 1)
        return q, q.mean(0)

    def train(payload: Weights, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        if not len(shard):
            return None
        pi = uniform if memory is None else memory["pi"]
        q, pi = e_step(losses_of(task, payload, shard), pi)
        fitted = local(task, Blended(q, task.loss), payload, shard, moment, rng)
        if not fitted.steps:
            return None
        total = {
            "delta": Weighted(fitted.delta, client_weight(shard, weighting)),
            "loss": Weighted(fitted.loss, len(shard)),
        }
        return Answer(total, memory={"pi": pi}, notes={"branch": pi.argmax()})

    def round(state: State, fleet: Fleet, rng: Rng) -> tuple[State, Facts]:
        reply = fleet.ask("train", cohort(rng, fleet), state.weights)
        return averaged(state, server, mean(reply.total))

    def adapt(payload: Weights, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        if not len(shard):
            return None
        losses = losses_of(task, payload, shard)
        pi = uniform if memory is None else memory["pi"]
        for _ in range(e_steps):
            _, pi = e_step(losses, pi)
        return Answer({}, memory={"pi": pi})

    def predict(payload: Weights, memories: Any, x: Tensor, owner: Tensor) -> Prediction:
        blends = torch.stack([uniform if memory is None else memory["pi"] for memory in memories])
        pi = blends[owner]
        return Prediction(blended(task, payload, x, pi), pi.argmax(1), pi)

    return Algorithm("fedem", init, {"train": train}, round, shared_weights, predict, adapt=adapt)
