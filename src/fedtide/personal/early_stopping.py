"""Local training with early stopping on validation samples."""

from __future__ import annotations

import math
from typing import Any

import torch

from fedtide.core.base import Moment, Shard, Weights
from fedtide.core.rng import Rng
from fedtide.core.trees import detached
from fedtide.learn.device import to_cpu
from fedtide.learn.local import LocalTrainer
from fedtide.learn.losses import Loss
from fedtide.learn.task import Task


def train_early_stopping(
    task: Task,
    solver: LocalTrainer,
    loss: Loss,
    weights: Weights,
    shard: Shard,
    val: Shard | None,
    moment: Moment,
    rng: Rng,
    *,
    every: int = 5,
    patience: int = 10,
    whole: bool = False,
) -> tuple[Weights, Weights]:
    """Return the weights of the lowest validation loss, and the last ones, as far as training went.

    The lowest is sought among the initial ones, those after every few epochs, and the last.

    Args:
        task: the model.
        solver: local training; its epochs, or steps, are an upper bound.
        loss: the loss to minimize, also used for validation.
        weights: the initial weights.
        shard: training samples; without samples there is no training.
        val: validation samples; without any the last weights are taken.
        moment: the time, for the solver's schedule.
        rng: the client's key.
        every: epochs between two evaluations.
        patience: evaluations without improvement before training stops.
        whole: train on to the end, where the last weights are those of a client without validation samples.

    >>> task = Task(lambda: torch.nn.Linear(1, 2))
    >>> rows = Shard(torch.ones(4, 1), torch.tensor([0, 0, 0, 1]), torch.arange(4))
    >>> start = task.init(Rng(0))
    >>> local, now = LocalTrainer(0.1, epochs=50), Moment(0, 1)
    >>> best, _ = train_early_stopping(task, local, task.loss, start, rows, rows, now, Rng(0))
    >>> bool(task.objective(best, rows) < task.objective(start, rows))
    True
    """
    best, least, stale = detached(weights), math.inf, 0
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
    found = loss.value(task.run(module, task.inputs(shard.x)), *task.to_device((shard.y, *prepared)))
    value = float(to_cpu(found))
    return value if math.isfinite(value) else math.inf
