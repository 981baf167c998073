"""Networks that clients have besides the model of the federation: an expert of their own, a gate, all in one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.types import Moment, Shard, Weights
from fedtide.learn.bfloat import full
from fedtide.learn.local import LocalTrainer
from fedtide.learn.loss import CrossEntropy
from fedtide.learn.task import Task
from fedtide.models import Model
from fedtide.multi.early_stopping import early_stopped

ALONE = LocalTrainer(lr=3e-4, epochs=200, batch_size=10, optimizer="adamw", weight_decay=1e-2)
"""How a model is trained from scratch on one client's rows."""


class Networks:
    """The networks that clients have besides the model of the federation, for the same rows; each is built once.

    Args:
        task: that of the federation.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self._made: dict[str, Task] = {}

    def of(self, model: Model | None, classes: int | None = None) -> Task:
        """A task on another network; the federation's own where none is named.

        Raises:
            FedtideError: it does not fit the rows, or these are not known.
        """
        if model is None:
            return self.task
        key = f"{model} {classes}"
        if key not in self._made:
            self._made[key] = self._built(model, classes)
        return self._made[key]

    def _built(self, model: Model, classes: int | None) -> Task:
        task = self.task
        if task.example is None:
            raise FedtideError("Task: found no example, allowed: some row (1, ...), for networks of a client's own")
        shape = tuple(task.example.shape[1:])
        outputs = task.logits(task.init(Rng(0)), task.example).shape[-1] if classes is None else classes
        made = Task(
            lambda: model.build(shape, outputs), task.loss, task.dtype, task.channels_last, task.example,
            bfloat=task.bfloat,
        )  # fmt: skip
        try:
            made.logits(made.init(Rng(0)), task.example)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise FedtideError(f"a network of clients does not fit rows of shape {shape}: {error}") from None
        return made

    def check(self, model: Model | None, solver: LocalTrainer, key: str, classes: int | None = None) -> None:
        """Build a network, and find out what its solver cannot do with it.

        Raises:
            FedtideError: what does not fit.
        """
        made, example = self.of(model, classes), self.task.example
        if example is not None:
            solver.check(made.scratch, tuple(example.shape[1:]), key)

    def mixture(self, model: Model | None, gate: Model, models: int) -> Task:
        """Gate, an expert of the client's own and K others as one task, minimized by -log p(y|x) whatever the others
        are."""
        key = f"{gate} {model} {models} models"
        if key not in self._made:
            task, gated, own = self.task, self.of(gate, models + 1), self.of(model)
            self._made[key] = Task(
                lambda: Experts(gated.build(), [own.build(), *(task.build() for _ in range(models))]),
                CrossEntropy(), task.dtype, task.channels_last, task.example, bfloat=task.bfloat,
            )  # fmt: skip
        return self._made[key]


class Experts(nn.Module):
    """A gate and experts as one network, whose outputs are log-probabilities."""

    def __init__(self, gate: nn.Module, experts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.gate, self.experts = gate, nn.ModuleList(experts)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, ...) -> (rows, classes)."""
        logp = torch.stack([F.log_softmax(full(expert(x)), -1) for expert in self.experts], 1)
        return torch.logsumexp(F.log_softmax(full(self.gate(x)), -1)[:, :, None] + logp, 1)


def local_expert(own: Task, solver: LocalTrainer, shard: Shard, moment: Moment, rng: Rng) -> Weights:
    """A model trained from scratch on a client's rows, until its validation rows gain nothing more."""
    start = own.init(rng.at("own"))
    return early_stopped(own, solver, own.loss, start, shard, shard.val, moment, rng.at("alone"))
