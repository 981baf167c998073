"""A task: a model, its loss and how its outputs are read. The place where weights meet a module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.trees import map_leaves
from fedtide.core.types import Memory, Prediction, Shard, Weights
from fedtide.learn.bfloat import lowered
from fedtide.learn.loss import Columns, CrossEntropy, as_loss, label_count

ROWS = 2048
"""Rows that are evaluated in one pass; of sequences, steps."""


class Scratch:
    """One module whose parameters are overwritten again and again; `weights` looks at its storage."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, channels_last: bool) -> None:
        self.module = module.to(dtype)
        if channels_last:
            self.module = self.module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        trained = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        # Frozen parameters are carried like running statistics. Step counters (num_batches_tracked) are integers and
        # not carried: they start anew whenever weights are loaded.
        frozen = {name: p for name, p in self.module.named_parameters() if not p.requires_grad}
        buffers = {name: b for name, b in self.module.named_buffers() if b.is_floating_point()}
        counters = {name: b for name, b in self.module.named_buffers() if not b.is_floating_point()}
        self.counters = {name: b.clone() for name, b in counters.items()}
        self._counters = [(b, self.counters[name]) for name, b in counters.items()]
        self.names = list(trained)
        self.params = list(trained.values())
        self.weights = Weights(
            {name: param.detach() for name, param in trained.items()},
            {name: buffer.detach() for name, buffer in {**buffers, **frozen}.items()},
        )
        # The same storage without autograd: to be changed in place.
        self.values = list(self.weights.params.values())
        self.loads = 0
        self.needs_pairs = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in self.module.modules())

    @cached_property
    def _delta(self) -> Weights:
        """A buffer for `difference`; in memory order of the module, so that no copy is needed."""
        return map_leaves(torch.empty_like, self.weights)

    def difference(self, received: Weights, weights: Weights) -> Weights:
        """`weights` minus `received`, in a buffer that the next call writes again."""
        for name, out in self._delta.params.items():
            torch.sub(weights.params[name], received.params[name], out=out)
        for name, out in self._delta.buffers.items():
            torch.sub(weights.buffers[name], received.buffers[name], out=out)
        return self._delta

    def load(self, weights: Weights, *, train: bool) -> nn.Module:
        """Copy `weights` in and return the module, in training or evaluation mode; its own weights need no copy."""
        self.loads += weights is not self.weights
        torch._foreach_copy_(self.values, [weights.params[name] for name in self.names])
        for name, buffer in self.weights.buffers.items():
            buffer.copy_(weights.buffers[name])
        for counter, start in self._counters:
            counter.copy_(start)
        if self.module.training != train:
            self.module.train(train)
        return self.module


@dataclass(frozen=True)
class Task:
    """A model and what it is trained for.

    Args:
        build: makes a fresh module that returns logits (rows, classes), for sequences (rows, steps, classes); any
            `nn.Module` class or function will do.
        loss: what local training minimizes: a `fedtide.learn.loss.Loss`, or a function of (outputs, labels) such as
            `nn.CrossEntropyLoss(label_smoothing=0.1)`.
        dtype: of parameters and activations.
        channels_last: keep 4-D parameters and inputs in that memory format (faster CPU convolutions).
        example: some row (1, ...), for algorithms that have to know how wide the model's features are.
        public: (rows, ...) features that everybody may see, clients and server alike, as the model sees them; None
            where there are none.
        begin: the weights that a model begins with; None draws them. Networks of another kind that are made for the
            same rows, such as frozen ones, are drawn all the same.
        bfloat: compute forward and backward passes in bfloat16 where that gains; parameters, losses and whatever comes
            out of the model stay in `dtype`, which is float32 then.

    >>> task = Task(lambda: nn.Linear(3, 2))
    >>> weights = task.init(Rng(0))
    >>> task.logits(weights, torch.zeros(5, 3)).shape
    torch.Size([5, 2])
    """

    build: Callable[[], nn.Module]
    loss: Any = field(default_factory=CrossEntropy)
    dtype: torch.dtype = torch.float32
    channels_last: bool = False
    example: Tensor | None = field(default=None, compare=False)
    public: Tensor | None = field(default=None, compare=False)
    begin: Weights | None = field(default=None, compare=False)
    bfloat: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.build, nn.Module) or not callable(self.build):
            raise FedtideError(
                f"Task: found {type(self.build).__name__}, allowed: a function that makes a fresh module, such as "
                "lambda: nn.Linear(3, 2)"
            )
        if self.bfloat and self.dtype != torch.float32:
            raise FedtideError(f"Task: found bfloat with parameters of {self.dtype}, allowed: torch.float32")
        object.__setattr__(self, "loss", as_loss(self.loss))

    @cached_property
    def scratch(self) -> Scratch:
        """This process's one module of the task."""
        return Scratch(self._fresh(Rng(0)), self.dtype, self.channels_last)

    def _fresh(self, rng: Rng) -> nn.Module:
        # Module initialization knows only torch's global generator: seed it around the work and restore it.
        before = torch.get_rng_state()
        torch.manual_seed(rng.number)
        try:
            return self.build()
        finally:
            torch.set_rng_state(before)

    def init(self, rng: Rng) -> Weights:
        """The weights that a model begins with: those that were given, or drawn ones."""
        return self.drawn(rng) if self.begin is None else map_leaves(torch.clone, self.begin)

    def drawn(self, rng: Rng) -> Weights:
        """Freshly initialized weights, the same for the same key."""
        fresh = Scratch(self._fresh(rng.at("module")), self.dtype, channels_last=False)
        return Weights(
            {name: param.clone() for name, param in fresh.weights.params.items()},
            {name: buffer.clone() for name, buffer in fresh.weights.buffers.items()},
        )

    def inputs(self, x: Tensor) -> Tensor:
        """Rows in the task's number and memory format."""
        if x.is_floating_point() and x.dtype != self.dtype:
            x = x.to(self.dtype)
        if self.channels_last and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        return x

    def run(self, module: nn.Module, x: Tensor) -> Any:
        """What the task's module returns for some `inputs`: the one place where it is called."""
        return lowered(module, x) if self.bfloat else module(x)

    @torch.no_grad()
    def outputs(self, weights: Weights, x: Tensor) -> Iterator[Any]:
        """What the module returns in evaluation mode, pass by pass: `ROWS` rows each, of token sequences `ROWS` steps.

        Take all of them before the task is used for anything else: there is one module.
        """
        module = self.scratch.load(weights, train=False)
        steps = x.shape[1] if x.dim() == 2 and not x.is_floating_point() else 1
        # Without rows there is one pass too, as the shapes of what comes out are wanted.
        for rows in parts(max(len(x), 1), steps):
            yield self.run(module, self.inputs(x[rows]))

    def logits(self, weights: Weights, x: Tensor) -> Tensor:
        """Logits (rows, classes), of sequences (rows, steps, classes), in evaluation mode, without gradients."""
        return joined(self.outputs(weights, x), len(x))

    def losses(self, weights: Weights, shard: Shard) -> Tensor:
        """Plain cross-entropy of each row (rows,), in evaluation mode; of sequences the mean over steps that count."""
        logp = F.log_softmax(self.logits(weights, shard.x), -1)
        return row_losses(logp, shard.y, shard.mask) if len(shard) else logp.new_empty(0)

    @torch.no_grad()
    def objective(self, weights: Weights, shard: Shard) -> float:
        """The mean training loss of all rows (of sequences, of all steps that count), in evaluation mode; 0 without."""
        module = self.scratch.load(weights, train=False)
        shared, columns = self.loss.prepare(shard)
        total, seen = 0.0, 0
        for rows in parts(len(shard), shard.y.shape[1:].numel()):
            value, count = self._loss(module, shard.pick(rows), shared, tuple(column[rows] for column in columns))
            total += value.item() * count
            seen += count
        return total / max(seen, 1)

    def _loss(self, module: nn.Module, shard: Shard, shared: Any, columns: Columns) -> tuple[Tensor, int]:
        """The mean training loss of some rows in one pass, and how many labels it is taken over."""
        outputs = self.run(module, self.inputs(shard.x))
        return self.loss.value(outputs, shard.y, shared, columns), label_count(shard.y, shard.mask)

    def gradient(self, weights: Weights, shard: Shard, *, train: bool = True) -> tuple[dict[str, Tensor], float]:
        """The gradient of the mean training loss of all rows (of sequences, of all steps that count), and that loss.

        More than `ROWS` rows are passed in parts of equal size, so that BatchNorm in training mode never meets a single
        row that others come with. The gradient of one part is returned as it is: multiplied by its number of rows and
        divided again, a tenth of all numbers would change in their last bit.

        Args:
            weights: where it is taken.
            shard: the rows.
            train: in training mode, as a client's own steps take it; else in evaluation mode, where nothing is dropped
                and running statistics stay, so that the same rows always give the same.
        """
        module = self.scratch.load(weights, train=train)
        shared, columns = self.loss.prepare(shard)
        gradient: list[Tensor] = []
        loss, seen = 0.0, 0
        for rows in torch.arange(len(shard)).tensor_split(max(min(-(-shard.y.numel() // ROWS), len(shard)), 1)):
            value, count = self._loss(module, shard.pick(rows), shared, tuple(column[rows] for column in columns))
            part = list(torch.autograd.grad(value, self.scratch.params, allow_unused=True, materialize_grads=True))
            seen += count
            share = count / max(seen, 1)  # a running mean: a single part has share 1
            gradient = list(torch._foreach_lerp(gradient, part, share)) if gradient else part
            loss += share * (value.item() - loss)
        return dict(zip(self.scratch.names, gradient, strict=True)), loss

    def predict(self, payload: Weights, memories: Sequence[Memory], x: Tensor, owner: Tensor) -> Prediction:
        """The `predict` of every algorithm with one model per slot."""
        del memories, owner
        return Prediction(F.log_softmax(self.logits(payload, x), dim=-1))


def parts(rows: int, steps: int = 1) -> Iterator[slice]:
    """Rows in parts that are evaluated in one pass: `ROWS` each, or as many sequences as have `ROWS` steps.

    >>> [rows.start for rows in parts(5000)], [rows.start for rows in parts(5, steps=1000)]
    ([0, 2048, 4096], [0, 2, 4])
    """
    size = max(ROWS // max(steps, 1), 1)
    return (slice(i, i + size) for i in range(0, rows, size))


def joined(made: Iterable[Tensor], rows: int, dim: int = 0) -> Tensor:
    """The outputs of several passes as one, with all `rows` along `dim`.

    Passes are put where they belong as they come, so that there is never a second copy of all: a vocabulary has ten
    thousand logits at every step.
    """
    passes = iter(made)
    first, whole, done = next(passes), None, 0
    for one in passes:
        if whole is None:
            whole, done = first.new_empty(*first.shape[:dim], rows, *first.shape[dim + 1 :]), first.shape[dim]
            whole.narrow(dim, 0, done).copy_(first)
            del first
        whole.narrow(dim, done, one.shape[dim]).copy_(one)
        done += one.shape[dim]
    return first if whole is None else whole


def classes_of(task: Task) -> int:
    """How many labels a task has."""
    if task.example is None:
        raise FedtideError("labels: the algorithm needs to know how rows look; allowed: Task(..., example=x[:1])")
    made = next(iter(task.outputs(task.init(Rng(0)), task.example)))
    return int((made[0] if isinstance(made, tuple) else made).shape[-1])  # networks with branches return features, too


def row_losses(logp: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
    """Cross-entropy of each label from log-probabilities, in the shape of `y`.

    With `mask`, of each sequence (rows,): the mean over the steps that count.
    """
    losses = -logp.gather(-1, y.unsqueeze(-1)).squeeze(-1)
    if mask is None:
        return losses
    # Not times the mask: a step that does not count may well have an infinite loss.
    return losses.masked_fill(~mask, 0.0).sum(-1) / mask.sum(-1).clamp(min=1)
