"""Works in steps: generators that yield requests, which are computed for one client or for many at once.

A client of IFCA takes the losses of K models and then trains one of them. As a generator that yields `Losses` and
`Train` it reads like the listing. Called, it is a work like any other, with the same bits as a plain function. The
stacked fleet starts the works of many clients, computes equal requests together, and sends each client its part.
"""

from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedtide.core.base import Answer, Memory, Moment, Payload, Shard, Weights
from fedtide.core.rng import Rng
from fedtide.core.trees import leaves
from fedtide.learn.device import CPU, to_cpu
from fedtide.learn.fast.stacks import LayerStack, stack_models
from fedtide.learn.local import Fitted, LocalTrainer, LocalUpdate, gradient_step
from fedtide.learn.losses import Loss
from fedtide.learn.task import Task, joined
from fedtide.learn.terms import kind_of, terms_of

SIDE_BY_SIDE_BYTES = 32 * 2**20
"""Bytes of models that are held side by side: of larger ones the product takes so long that a copy weighs little."""
PASS_BYTES = 16 * 2**20
"""Bytes that a pass through models side by side takes, as if it went back, too."""
GPU_PASS_BYTES = 2**30
"""Bytes that a pass takes on a GPU, which is fast only with much to do at once."""


def mean_losses(task: Task, models: Sequence[Weights], shard: Shard) -> Tensor:
    """Return the mean plain loss (K,) of each model on a client's samples; infinite if it is not finite."""
    return finite_losses(row_losses(task, models, shard).flatten(1).mean(1))


def row_losses(task: Task, models: Sequence[Weights], shard: Shard) -> Tensor:
    """Return the plain loss (K, samples) of each sample by each model in float64, in evaluation mode.

    Sequences without a mask have a loss for each step.
    """
    x, count, stack = task.inputs(shard.x), len(models), _stack_of(task, models, shard)
    if stack is None:
        return torch.stack([task.row_losses(model, x, shard.y, shard.mask) for model in models])
    most, losses = PASS_BYTES if stack.device.type == CPU else GPU_PASS_BYTES, []
    size = max(most // (stack.row_bytes * count), 1)
    with torch.no_grad():
        for rows, labels in zip(x.split(size), shard.y.split(size), strict=True):
            outputs = stack.outputs(task.to_device(rows).expand(count, *rows.shape))
            answers = task.target.read_outputs(to_cpu(outputs).double().flatten(0, 1))
            labels = labels.expand(count, *labels.shape).flatten(0, 1)
            losses.append(task.target.losses(answers, labels, None).unflatten(0, (count, -1)))
    return torch.cat(losses, 1)


def finite_losses(losses: Tensor) -> Tensor:
    """Return losses with infinity in place of values that are not finite, so that no such model is chosen."""
    return torch.where(losses.isfinite(), losses, torch.inf)


def _stack_of(task: Task, models: Sequence[Weights], shard: Shard) -> LayerStack | None:
    """Return models side by side, as they are from the last call if they are the same; None if they cannot be."""
    if len(models) < 2 or task.bfloat or shard.mask is not None or not len(shard) or not shard.x.is_floating_point():
        return None  # rows that torch refuses are refused here, too
    tensors, shape, scratch = leaves(list(models)), tuple(shard.x.shape[1:]), task.scratch
    if any(leaf.is_inference() for leaf in tensors):
        return None  # changes of such tensors have no version
    state = shape, tuple((id(leaf), leaf._version) for leaf in tensors)
    if scratch.compared is None or scratch.compared[0] != state:
        scratch.compared = None
        if sum(leaf.nbytes for leaf in tensors) > SIDE_BY_SIDE_BYTES or models[0].buffers:
            return None
        stack = stack_models(scratch, shape)
        if stack is not None:
            stack.read(stack.starts(models))
            scratch.compared = state, stack, models  # which keeps their storage from being reused for other models
    return None if scratch.compared is None else scratch.compared[1]


def utility(losses: Tensor, trained: int) -> Tensor:
    """Return Oort's utility of a client (1,): samples that it trains on times the root of their mean squared loss.

    Args:
        losses: (samples,) cross-entropy of its samples under the model that it received.
        trained: number of samples that a round uses.

    >>> utility(torch.tensor([3.0, 4.0, 5.0, 5.0]), 2).tolist()
    [8.660254037844387]
    """
    return trained * losses.double().square().mean().sqrt().reshape(1) if len(losses) else torch.zeros(1).double()


# -- requests ----------------------------------------------------------------------------------------------------------


T = TypeVar("T")

Steps = Generator[Any, Any, T]
"""A generator that yields requests, is sent their results, and returns its own result.

A request has `run_single()`, which computes it for its client, and a `key`: requests with equal keys may be computed
together, by a stack or by `run_batched(requests)`.
"""


def run_steps(steps: Steps[T]) -> T:
    """Run steps to their end, each request by itself.

    >>> from types import SimpleNamespace
    >>> def twice():
    ...     one = yield SimpleNamespace(run_single=lambda: 1)
    ...     return one + (yield SimpleNamespace(run_single=lambda: 2))
    >>> run_steps(twice())
    3
    """
    result = None
    while True:
        try:
            request = steps.send(result)
        except StopIteration as end:
            return end.value
        result = request.run_single()


@dataclass(frozen=True)
class Stepwise:
    """A work made of a generator; a decorator.

    Args:
        start: (payload, memory, shard, moment, rng) -> steps that return the answer.
    """

    start: Callable[[Payload, Memory, Shard, Moment, Rng], Steps[Answer | None]]

    def __call__(self, payload: Payload, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        """Do the work of one client."""
        return run_steps(self.start(payload, memory, shard, moment, rng))


def same_weights(weights: Sequence[Weights]) -> Hashable:
    """Return a key that is equal for weights that share their storage, such as those that all clients received."""
    return tuple(id(leaf) for leaf in leaves(list(weights)))


@dataclass(frozen=True, eq=False)
class Train:
    """Local training: what `LocalTrainer` is called with. The result is a `Fitted`, or a `FittedPart` of a stack.

    Results share storage with those of other trainings: detach what is used after a further request. With `features`
    it has, of a branched task, those of the client's samples after training, too.
    """

    task: Task
    local: LocalTrainer
    weights: Weights
    shard: Shard
    moment: Moment
    rng: Rng
    term: Any = None
    loss: Loss | None = None
    features: bool = False

    @property
    def key(self) -> Hashable:
        """Model and loss, settings, the kinds of the gradient terms, and whether features are wanted."""
        terms = tuple(map(kind_of, terms_of(self.term)))
        return Train, id(self.task), kind_of(self.objective), self.local, terms, self.features

    @property
    def objective(self) -> Loss:
        """The loss that is minimized, with the terms of local training."""
        return self.local.objective(self.task, self._loss, self.weights)

    @property
    def _loss(self) -> Loss:
        return self.task.loss if self.loss is None else self.loss

    def run_single(self) -> Fitted:
        """Train one client."""
        fitted = self.local(self.task, self._loss, self.weights, self.shard, self.moment, self.rng, term=self.term)
        if not (self.features and fitted.steps):
            return fitted
        return replace(fitted, features=Features(self.task, fitted.weights, self.shard.x).run_single())


@dataclass(frozen=True, eq=False)
class Features:
    """Features (rows, d) of a client's samples by a branched task, without storing logits, which may be large."""

    task: Task
    weights: Weights
    x: Tensor

    @property
    def key(self) -> Hashable:
        """The model."""
        return Features, id(self.task), same_weights([self.weights])

    def run_single(self) -> Tensor:
        """Compute them for one client."""
        return self.task.features(self.weights, self.x)

    def run_batched(self, others: Sequence["Features"]) -> Sequence[Tensor]:
        """Compute them for several clients, from one pass over all of their samples; `others` has this one, too."""
        samples = [other.x for other in others]
        return replace(self, x=joined(samples)).run_single().split([len(x) for x in samples])


def all_rows(shards: Sequence[Shard]) -> Shard:
    """Return the samples of several clients, all with a mask or all without."""
    x, y, ids = (joined([getattr(shard, name) for shard in shards]) for name in ("x", "y", "ids"))
    masks = [shard.mask for shard in shards if shard.mask is not None]
    return Shard(x, y, ids, mask=joined(masks) if masks else None)


@dataclass(frozen=True, eq=False)
class Losses:
    """Mean losses (K,) of models on a client's samples, as of `fedtide.learn.steps.mean_losses`."""

    task: Task
    models: Sequence[Weights]
    shard: Shard

    @property
    def key(self) -> Hashable:
        """The models; samples with a mask and without go apart."""
        return Losses, id(self.task), same_weights(self.models), self.shard.mask is None

    def run_single(self) -> Tensor:
        """Compute them for one client."""
        return mean_losses(self.task, self.models, self.shard)

    def run_batched(self, others: Sequence["Losses"]) -> list[Tensor]:
        """Compute them for several clients, from passes of all models over all of their samples.

        Args:
            others: the requests, this one among them.
        """
        whole, sizes = all_rows([other.shard for other in others]), [len(other.shard) for other in others]
        losses = row_losses(self.task, self.models, whole).split(sizes, 1)
        return list(finite_losses(torch.stack([part.flatten(1).mean(1) for part in losses])).unbind())


def local_update(
    task: Task, local: LocalTrainer, variant: LocalUpdate, weights: Weights, shard: Shard, moment: Moment, rng: Rng
) -> Steps[tuple[Weights, float] | None]:
    """Return a client's update and its training loss, by local training or by one gradient; None without a step."""
    if variant == "gradient":
        return gradient_step(task, local, weights, shard, moment)
    fitted = yield Train(task, local, weights, shard, moment, rng)
    return (fitted.delta, fitted.loss) if fitted.steps else None
