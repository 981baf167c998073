"""Plain local training: the work of every method whose clients train what they receive and send the update."""

from __future__ import annotations

from dataclasses import dataclass

from fedtide.core.rng import Rng
from fedtide.core.types import Answer, Memory, Moment, Shard, Weighted, Weights
from fedtide.learn.local import LocalTrainer, Term
from fedtide.learn.task import Task
from fedtide.parts.weighting import Weighting, client_weight


@dataclass(frozen=True)
class Training:
    """Train the received weights and send what changed, as a weighted sum; a work.

    A method that uses it for a question declares with it that the clients of that question may be trained at once
    (`fedtide.fleets.stacked`), as nothing else happens there.

    Args:
        task: model and loss.
        local: local training.
        weighting: what a client counts for.
        term: a gradient term.

    >>> import torch
    >>> train = Training(Task(lambda: torch.nn.Linear(3, 2)), LocalTrainer(), "samples")
    >>> rows = Shard(torch.zeros(4, 3), torch.tensor([0, 1, 0, 1]), torch.arange(4))
    >>> answer = train(train.task.init(Rng(0)), None, rows, Moment(0, 1), Rng(0))
    >>> {name: leaf.weight for name, leaf in answer.total.items()}
    {'delta': 4.0, 'loss': 4}
    """

    task: Task
    local: LocalTrainer
    weighting: Weighting
    term: Term | None = None

    def __call__(self, payload: Weights, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        """One client's training; None without a step."""
        fitted = self.local(self.task, self.task.loss, payload, shard, moment, rng, extra=self.term)
        if not fitted.steps:
            return None  # no rows, or a single one and BatchNorm: "no step" must not pull the mean to zero
        weight = client_weight(shard, self.weighting)
        return Answer({"delta": Weighted(fitted.delta, weight), "loss": Weighted(fitted.loss, len(shard))})
