"""Parts of personalizations: their protocol, networks of clients, and training with early stopping."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedtide.core.base import Moment, Prediction, Shard, Weights
from fedtide.core.errors import FedtideError, within
from fedtide.core.rng import Rng
from fedtide.core.trees import detached
from fedtide.learn.device import to_cpu, to_float32
from fedtide.learn.features import Extract, Network
from fedtide.learn.layers import last_layer
from fedtide.learn.local import LocalTrainer
from fedtide.learn.losses import CrossEntropy, Loss
from fedtide.learn.target import CLASSES
from fedtide.learn.task import Task, example_of
from fedtide.models import Model
from fedtide.models.networks import initialize


def train_early_stopping(
    task: Task,
    solver: LocalTrainer,
    loss: Loss,
    weights: Weights,
    shard: Shard,
    moment: Moment,
    rng: Rng,
    every: int = 5,
    patience: int = 10,
    whole: bool = False,
) -> tuple[Weights, Weights]:
    """Return the weights of the lowest validation loss, and the last ones, as far as training went.

    The lowest is sought among the initial ones, those after every few epochs, and the last.

    Args:
        solver: local training; its epochs, or steps, are an upper bound.
        loss: the loss to minimize, also used for validation.
        weights: the initial weights.
        shard: training samples, without which there is no training; without validation samples the last weights are
            taken.
        moment: the time, for the solver's schedule.
        rng: the client's key.
        every: epochs between two evaluations.
        patience: evaluations without improvement before training stops.
        whole: train on to the end, where the last weights are those of a client without validation samples.

    >>> task = Task(lambda: torch.nn.Linear(1, 2))
    >>> rows = Shard(torch.ones(4, 1), torch.tensor([0, 0, 0, 1]), torch.arange(4), fetch_val=lambda: rows)
    >>> start = task.init(Rng(0))
    >>> local, now = LocalTrainer(0.1, epochs=50), Moment(0, 1)
    >>> best, _ = train_early_stopping(task, local, task.loss, start, rows, now, Rng(0))
    >>> bool(task.objective(best, rows) < task.objective(start, rows))
    True
    """
    best, least, stale, val = detached(weights), math.inf, 0, shard.val
    last = best
    judged = None if val is None or not len(val) else (val, loss.prepare(val))
    if judged is not None:
        least = _loss(task, loss, weights, *judged)
    for number, fitted in enumerate(solver.iter_epochs(task, loss, weights, shard, moment, rng), start=1):
        if not fitted.steps:
            break
        last = fitted.weights
        if judged is None or stale >= patience:
            continue
        steps = solver.local_steps
        ends = number == (solver.epochs or 1) if steps is None else fitted.steps >= steps
        if number % every and not ends:
            continue
        value = _loss(task, loss, fitted.weights, *judged)
        if value < least:
            best, least, stale = detached(fitted.weights), value, 0
            continue
        stale += 1
        if stale >= patience and not whole:
            break
    last = detached(last)
    return (last if judged is None else best), last


@torch.no_grad()
def _loss(task: Task, loss: Loss, weights: Weights, shard: Shard, prepared: tuple[Any, Any]) -> float:
    """Return the mean loss of all samples at once, in evaluation mode."""
    module = task.scratch.load(weights, train=False)
    losses = loss.value(task.run(module, task.inputs(shard.x)), *task.to_device((shard.y, *prepared)))
    value = float(to_cpu(losses))
    return value if math.isfinite(value) else math.inf


ALONE = LocalTrainer(lr=3e-4, epochs=200, batch_size=10, optimizer="adamw", weight_decay=1e-2)
"""Training of a model from scratch on one client's samples."""

TUNING = LocalTrainer(lr=1e-4, epochs=200, batch_size=10, optimizer="adamw")
"""Fine-tuning of a received model on one client's samples."""


class Networks:
    """Networks of clients besides the federated model, for the same samples; each is built once.

    Args:
        task: the federated task.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self._made: dict[str, Task] = {}
        self._features: dict[str, Extract] = {}

    def of(self, model: Model | None, classes: int | None = None, key: str = "personal") -> Task:
        """Return a task on another network; without a name the federated task itself.

        Raises:
            FedtideError: the network does not fit the samples, or the task has no example.
        """
        if model is None:
            return self.task
        name = f"{model} {classes}"
        if name in self._made:
            return self._made[name]
        task = self.task
        example = example_of(task, "networks of a client's own")
        shape = tuple(example.shape[1:])
        outputs = task.logits(task.init(Rng(0)), example).shape[-1] if classes is None else classes
        init: Any = getattr(model, "init", "torch")
        own_task = Task(
            lambda: model.build(shape, outputs), task.loss if classes is None else CrossEntropy(), task.dtype,
            task.channels_last, example, init_layers=partial(initialize, init=init), bfloat=task.bfloat,
            target=task.target if classes is None else CLASSES, device=task.device,
        )  # fmt: skip
        with within(key):  # a network refuses rows as the federation's model
            try:
                own_task.logits(own_task.init(Rng(0)), example)
            except (RuntimeError, ValueError, IndexError, TypeError) as error:
                raise FedtideError(f"a network of clients does not fit rows of shape {shape}: {error}") from None
        self._made[name] = own_task
        return own_task

    def check(self, model: Model | None, solver: LocalTrainer, key: str, classes: int | None = None) -> None:
        """Build a network and check that its solver fits it.

        Raises:
            FedtideError: the network or its solver does not fit.
        """
        own_task, example = self.of(model, classes, key.rpartition(".")[0]), self.task.example
        if example is not None:
            solver.check(own_task.scratch, tuple(example.shape[1:]), key)

    def features(self, layer: str | None, key: str = "personal") -> Extract:
        """Return the extractor of a layer's inputs in the federated network; None is the last layer.

        Raises:
            FedtideError: there is no such layer, or its inputs are not vectors.
        """
        name = last_layer(self.task) if layer is None else layer
        if name not in self._features:
            whole = not name and layer is None  # the model is one layer
            self._features[name] = inputs_as_features if whole else Network(name).of(self.task, key)
        return self._features[name]

    def mixture(self, model: Model | None, gate: Model, models: int) -> Task:
        """Return gate, local expert and K other experts as one task with loss -log p(y|x), whatever the task's loss."""
        key = f"{gate} {model} {models} models"
        if key not in self._made:
            task, gated, local = self.task, self.of(gate, models + 1), self.of(model)
            self._made[key] = Task(
                lambda: Experts(gated.build(), [local.build(), *(task.build() for _ in range(models))]),
                CrossEntropy(), task.dtype, task.channels_last, task.example, bfloat=task.bfloat, device=task.device,
            )  # fmt: skip
        return self._made[key]


def inputs_as_features(weights: Weights, x: Tensor) -> Tensor:
    """Return samples as features (rows, d), of a model that is one layer."""
    return to_cpu(x).flatten(1).double()


class Experts(nn.Module):
    """A gate and experts as one network with log-probabilities as output."""

    def __init__(self, gate: nn.Module, experts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.gate, self.experts = gate, nn.ModuleList(experts)

    def forward(self, x: Tensor) -> Tensor:
        """Map inputs (rows, ...) to log-probabilities (rows, classes)."""
        logp = torch.stack([F.log_softmax(to_float32(expert(x)), -1) for expert in self.experts], 1)
        return torch.logsumexp(F.log_softmax(to_float32(self.gate(x)), -1)[:, :, None] + logp, 1)


def train_alone(
    task: Task, solver: LocalTrainer, shard: Shard, moment: Moment, rng: Rng, whole: bool = False
) -> tuple[Weights, Weights]:
    """Train a model from scratch with early stopping; return also its last weights, as of `train_early_stopping`."""
    start = task.init(rng.at("own"))
    return train_early_stopping(task, solver, task.loss, start, shard, moment, rng.at("alone"), whole=whole)


@runtime_checkable
class Personalization(Protocol):
    """A personalization of the received models, before evaluation; by default it builds no network."""

    own_expert: ClassVar[bool] = False
    """True if the first of the reported expert weights is that of the local expert."""
    chooses: ClassVar[bool] = True
    """True if predictions report the chosen model or expert."""

    def check(self, nets: Networks, models: int, key: str) -> None:
        """Build the needed networks once; `key` is where the personalization is written, for errors."""
        return

    @abstractmethod
    def fit(self, nets: Networks, models: Sequence[Weights], shard: Shard, moment: Moment, rng: Rng) -> Any:
        """Return the client's memory from its labeled samples; None without any."""

    @abstractmethod
    def predict(self, nets: Networks, models: Sequence[Weights], memory: Any, x: Tensor) -> Prediction:
        """Predict rows."""
