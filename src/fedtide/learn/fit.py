"""Whether a model fits the samples of a population, found out before anything is trained."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedtide.core.base import Shard
from fedtide.core.errors import FedtideError, refused
from fedtide.core.rng import Rng
from fedtide.learn.local import LocalTrainer
from fedtide.learn.target import CLASSES
from fedtide.learn.task import Task


def check_fit(task: Task, shard: Shard, classes: int, local: object = None, key: str = "local") -> None:
    """Run a task's model on some samples, as in training and as in evaluation.

    Args:
        task: model and loss.
        shard: a few samples.
        classes: number of classes of all samples.
        local: local training, if there is any.
        key: where local training stands, for messages.

    Raises:
        FedtideError: the model does not take such samples, or has no logits for their classes.
    """
    if shard.bins is not None and task.target == CLASSES:
        raise refused("Task.target", "classes", "target=population.target, as rows have none")
    x, y, width = shard.x, shard.y, task.target.width
    steps = () if width else shard.y.shape[1:]
    try:
        with torch.random.fork_rng(devices=[]):  # of dropout
            weights = task.scratch.weights if task.begin is None else task.begin
            if not weights.params:
                raise FedtideError("model: found no parameters, allowed: a module with some to train")
            logits = task.logits(weights, x)
            if width and logits.shape != (len(x), width):
                raise refused("model: shape of outputs", tuple(logits.shape), f"{(len(x), width)}, as of data.target")
            if logits.dim() < 2 or logits.shape[-1] < (width or classes) or (steps and logits.shape[:-1] != y.shape):
                wanted = f"(rows, {steps[0]} steps, classes)" if steps else "(rows, classes)"
                raise FedtideError(
                    f"model: it returns shape {tuple(logits.shape)} for {len(x)} rows, allowed: logits {wanted} with "
                    f"{classes} classes"
                )
            if isinstance(local, LocalTrainer):
                local.check(task.scratch, tuple(x.shape[1:]), key)
                x = local.augmented(x, Rng(0).torch())
            made = task.run(task.scratch.load(weights, train=True), task.inputs(x))
            _check_loss(task, made, shard)
    except (RuntimeError, ValueError, IndexError, TypeError, AttributeError) as error:
        raise FedtideError(f"model: it does not fit rows of shape {tuple(x.shape[1:])}: {error}") from None


def _check_loss(task: Task, outputs: Any, shard: Shard) -> None:
    """Raise where the loss, which may be a person's own, has no value by which a model can be trained."""
    try:
        value = task.loss.value(outputs, *task.there((shard.y, *task.loss.prepare(shard))))
    except FedtideError:
        raise
    except Exception as error:  # whatever the user's code raises
        said = " ".join(str(error).split())
        raise FedtideError(f"loss: it failed with {type(error).__name__}: {said}") from error
    if not (isinstance(value, Tensor) and value.shape == () and value.requires_grad):
        found = tuple(value.shape) if isinstance(value, Tensor) and value.shape else value
        key = "loss: shape" if isinstance(found, tuple) else "loss"
        raise refused(key, found, "a tensor without dimensions that follows from the outputs, such as a mean")
