"""Training of several clients at once: their models are stacked, and one torch step trains all of them.

The steps equal those of local training: same shuffles from the same keys, same smaller last batches, same optimizers.
Only the order of summation in matrix products differs, and with it the last bits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from textwrap import shorten
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedtide.core.base import Shard, Weights
from fedtide.core.rng import Rng
from fedtide.core.trees import Tree, leaves, map_leaves, unshare
from fedtide.core.weights import add
from fedtide.learn.device import Scratch, to_cpu
from fedtide.learn.fast.stacks import Copies, stack_copies
from fedtide.learn.local import LocalOptimizer, LocalTrainer
from fedtide.learn.losses import Columns, is_stacked
from fedtide.learn.steps import Train
from fedtide.learn.task import joined
from fedtide.learn.terms import terms_of

CANNOT = (RuntimeError, ValueError, TypeError, IndexError)
"""Errors of torch if several copies of a model cannot be trained at once."""

RANDOM = nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU
"""Modules that draw random numbers in training."""


@dataclass(frozen=True)
class Fit:
    """The result of training several clients, clients along the first dimension.

    Args:
        delta: update (new - old) of params and buffers (clients, ...), in storage that the next training overwrites.
        loss: (clients,) mean training loss over all samples seen, in float64.
        steps: (clients,) number of steps.
        features: (rows, d) of each client's samples after training, if they were asked for; else None.
    """

    delta: Weights
    loss: Tensor
    steps: Tensor
    features: Sequence[Tensor | None]


@dataclass(frozen=True)
class FittedPart:
    """The result of one of several clients that were trained at once, as `fedtide.learn.local.Fitted`.

    `delta` is in storage that the next training overwrites.
    """

    loss: float
    steps: int
    lr_sum: float
    delta: Weights
    received: Weights
    features: Tensor | None

    @property
    def weights(self) -> Weights:
        """Weights after local training."""
        return add(self.received, self.delta)


def fitted_parts(fit: Fit, requests: Sequence[Train]) -> list[FittedPart]:
    """Return the result of each client."""
    local, moment, received = requests[0].local, requests[0].moment, [request.weights for request in requests]
    rate = local.lr * local.lr_schedule(moment)
    losses, steps, moved = fit.loss.tolist(), fit.steps.tolist(), map_leaves(to_cpu, fit.delta)
    deltas = [map_leaves(lambda leaf, k=k: leaf[k], moved) for k in range(len(losses))]
    parts = zip(losses, steps, deltas, received, fit.features, strict=True)
    return [FittedPart(loss, taken, taken * rate, delta, began, z) for loss, taken, delta, began, z in parts]


def unstackable(request: Train) -> str | None:
    """Return the reason why clients with such requests cannot be trained at once; None if they can."""
    task = request.task
    if not is_stacked(request.objective):
        return "its loss has no per-row form (`each`, `stacked`), so clients cannot be trained together"
    if not all(hasattr(term, "stacked") for term in terms_of(request.term)):
        return "its gradient term is not known to work on several clients at once"
    if task.bfloat:
        return "its passes are in bfloat16 (precision)"
    if request.local.augment:
        return "it changes pictures at random (local.augment)"
    modules = list(task.scratch.module.modules())
    drawing = next((type(m).__name__ for m in modules if isinstance(m, RANDOM) and getattr(m, "p", True)), None)
    if drawing is not None or any(isinstance(m, nn.RNNBase) and m.dropout for m in modules):
        return f"its model draws at random in training ({drawing or 'dropout'})"
    return None


def plan_steps(local: LocalTrainer, rows: int, generator: torch.Generator, smallest: int) -> tuple[list[int], Tensor]:
    """Return the batch size of each step, and the sample positions of all steps, concatenated.

    >>> plan_steps(LocalTrainer(batch_size=2), 3, torch.Generator().manual_seed(0), 1)
    ([2, 1], tensor([2, 0, 1]))
    """
    epochs = list(local.epochs_of(rows, generator, smallest))
    orders = [order[: sum(sizes)] for order, sizes in epochs] or [torch.empty(0, dtype=torch.int64)]
    return [size for _, sizes in epochs for size in sizes], orders[0] if len(orders) == 1 else torch.cat(orders)


def make_stack(request: Train) -> Copies | str:
    """Return a stack that trains several copies of the model of a request, or the reason why there is none.

    Two copies that are trained for a step on a few samples show whether torch can do that. Lack of memory is no such
    reason: it is raised.
    """
    local = replace(request.local, epochs=None, local_steps=1, batch_size=0)
    few = replace(request, local=local, shard=request.shard.pick(slice(0, 2)))
    reason = unstackable(few)
    if reason is not None:
        return reason
    try:
        stack = stack_copies(few.task.scratch, few.objective, tuple(few.shard.x.shape[1:]))
        train_stacked(stack, [replace(few, rng=Rng(k)) for k in range(2)])
    except CANNOT as error:
        reason = " ".join(str(error).split())
        if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in reason:
            raise
        return f"copies of the model do not train at once: {shorten(reason, 200, placeholder=' ...')}"
    return stack


def train_stacked(stack: Copies, requests: Sequence[Train]) -> Fit:
    """Train several clients from what each received, on its own samples.

    Args:
        stack: stacked models of the task.
        requests: one for each client, all with the same key; those of the same weights may share one object, which is
            then read once. Samples are in descending order of size, and each client has enough for a step.
    """
    first, shards = requests[0], [request.shard for request in requests]
    local = first.local
    scratch = stack.scratch
    local.check(scratch, tuple(shards[0].x.shape[1:]))
    prepared, columns = zip(*(request.objective.prepare(request.shard) for request in requests), strict=True)
    scratch.set_mode(True)  # terms of the loss may have evaluated models
    steps = _Steps(scratch, local, shards, [request.rng for request in requests], stack.device, columns)
    starts: Any = stack.starts([request.weights for request in requests])
    params, others = stack.load(starts)
    stacked = stack.loss.stacked(prepared)
    shared = map_leaves(lambda leaf: None if leaf is None else leaf.to(stack.device), stacked)
    each_term = zip(*(terms_of(request.term) for request in requests), strict=True)
    added = local.gradient_terms([terms[0].stacked(terms, stack.layout) for terms in each_term])
    rate = local.lr * local.lr_schedule(first.moment)
    update = LocalOptimizer(local, rate, params)
    plain = local.optimizer == "sgd" and not (local.momentum or local.max_grad_norm or local.weight_decay)
    fused = rate if plain and stack.fuses else None
    values = torch.zeros(steps.labels.shape, dtype=params[0].dtype, device=stack.device)
    cut, views = 0, (params, others, shared)
    for number, active in enumerate(steps.active):
        if active != cut:  # views, which see what later steps write
            cut, views = active, _select((params, others, shared), active, None)
        now = views[0]
        before = [start[:active] for start in leaves(starts)[: len(now)]] if added else []
        extra = [one(now, before) for one in added]
        gradient: list[Tensor] = []
        # Running statistics depend on all samples of a batch, so padding is not allowed: clients with equal batch sizes
        # go together.
        for group in steps.equal_sizes(number) if scratch.needs_pairs or stack.moves else [None]:
            weights = views if group is None else _select((params, others, shared), active, group)
            rows, more_columns = steps.rows(number, active, group)
            context = (weights[2], *more_columns) if more_columns else weights[2]
            part, value, moved = stack.gradient(weights[0], weights[1], *rows, context, rate=fused)
            where: Any = slice(active) if group is None else group
            values[number, where] = value
            for old, new in zip(others, moved, strict=True):
                if new is not old:
                    old[where] = new
            if group is None:
                gradient = part
            else:
                gradient = gradient or [torch.zeros_like(param[:active]) for param in params]
                for into, leaf in zip(gradient, part, strict=True):
                    into[group] = leaf
        if fused is not None:  # the step is taken
            for change in extra:
                torch._foreach_add_(now, change, alpha=-rate)
            continue
        if extra or local.weight_decay:
            gradient = unshare(gradient)
        for change in extra:
            torch._foreach_add_(gradient, change)
        if local.max_grad_norm is not None:
            gradient = _clip(gradient, local.max_grad_norm)
        update(now, gradient, number)
    labels = steps.labels.to(stack.device)
    loss = (values.double() * labels).sum(0) / labels.sum(0)
    taken = torch.from_numpy((steps.sizes > 0).sum(0))
    after: Sequence[Tensor | None] = [None] * len(shards)
    if first.features:
        passes = [stack.features(params, others, x) for x in steps.in_order()]
        after = [z[: len(shard)] for z, shard in zip(to_cpu(torch.cat(passes, 1)), shards, strict=True)]
    return Fit(stack.difference(first.weights, starts, params, others), to_cpu(loss), taken, after)


def _select(values: Tree, active: int, group: Tensor | None) -> Any:
    """Return the values of the active clients, or of a group of clients."""
    where: Any = slice(active) if group is None else group
    return map_leaves(lambda leaf: None if leaf is None else leaf[where], values)


class _Steps:
    """The samples of every step of several clients, padded to equal batch sizes.

    active: number of clients, from the first on, that take each step. labels: (steps, clients) float64, number of
    labels in the mean.
    """

    def __init__(
        self,
        scratch: Scratch,
        local: LocalTrainer,
        shards: Sequence[Shard],
        rngs: Sequence[Rng],
        device: torch.device,
        columns: Sequence[Columns],
    ) -> None:
        smallest = 2 if scratch.needs_pairs else 1
        draw = torch.Generator()
        plans = [
            plan_steps(local, len(shard), draw.manual_seed(rng.at("shuffle").number), smallest)
            for shard, rng in zip(shards, rngs, strict=True)
        ]
        self.counts = [len(shard) for shard in shards]
        starts = np.cumsum([0, *self.counts])[:-1]
        self.starts = starts.tolist()
        long, wide = max(len(sizes) for sizes, _ in plans), max(max(sizes) for sizes, _ in plans)
        self.sizes = np.zeros((long, len(shards)), dtype=np.int64)
        place = np.zeros((len(shards), long, wide), dtype=np.int64)
        for client, (sizes, _) in enumerate(plans):
            self.sizes[: len(sizes), client] = sizes
        counted_rows = np.arange(wide) < self.sizes.T[:, :, None]
        place[counted_rows] = np.concatenate([flat.numpy() + at for (_, flat), at in zip(plans, starts, strict=True)])
        # Batches are padded with their own first sample: one of another client may be non-finite.
        place = np.where(counted_rows, place, place[:, :, :1])
        self.active = (self.sizes > 0).sum(1).tolist()
        self.widths = self.sizes.max(1).tolist()
        self.even = ((self.sizes == 0) | (self.sizes == self.sizes.max(1, keepdims=True))).all(1).tolist()
        self.place = torch.from_numpy(np.ascontiguousarray(place.transpose(1, 0, 2))).to(device)
        self.x, y = (joined([getattr(shard, name) for shard in shards]).to(device) for name in "xy")
        if self.x.is_floating_point():
            self.x = self.x.to(scratch.dtype)
        pairs = zip(columns, shards, strict=True)
        no_masks = [[column for column in values if column is not shard.mask] for values, shard in pairs]
        row_columns = [y, *(joined(parts).to(device) for parts in zip(*no_masks, strict=True))]
        masks = [shard.mask for shard in shards]
        self.mask = None if masks[0] is None else joined([mask for mask in masks if mask is not None]).to(device)
        counted = torch.from_numpy(np.ascontiguousarray(counted_rows.transpose(1, 0, 2))).to(device)
        if self.mask is not None:
            counted = counted[..., None] & self.mask[self.place]
        self.labels = counted.flatten(2).sum(2).double()
        inner = (1,) * (counted.dim() - 2)
        self.share = (1 / self.labels).to(scratch.dtype).reshape(*self.labels.shape, *inner).expand(counted.shape)
        flat, shape = self.place.flatten(), self.place.shape
        by_step = [column.index_select(0, flat).unflatten(0, shape).unbind() for column in row_columns]
        self.steps = [*zip(self.place.unbind(), self.share.unbind(), counted.unbind(), *by_step, strict=True)]
        self.into = self.x.new_empty(wide * len(shards), *self.x.shape[1:])  # what a step reads, in warm caches

    def in_order(self) -> Iterator[Tensor]:
        """Yield all samples (clients, rows, ...) in order, as many at a time as a step has."""
        wide = self.place.shape[2]
        for first in range(0, max(self.counts), wide):
            rows = torch.arange(first, first + wide)
            place = torch.stack(
                [start + rows.where(rows < n, 0) for start, n in zip(self.starts, self.counts, strict=True)]
            )
            yield self.x.index_select(0, place.flatten().to(self.x.device)).unflatten(0, place.shape)

    def equal_sizes(self, number: int) -> list[Tensor | None]:
        """Group the clients of a step by batch size; [None] if all batch sizes are equal."""
        sizes = self.sizes[number, : self.active[number]]
        different = np.unique(sizes)
        return [None] if len(different) == 1 else [torch.from_numpy(np.nonzero(sizes == n)[0]) for n in different]

    def rows(
        self, number: int, active: int, who: Tensor | None
    ) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor | None], list[Tensor]]:
        """Return x, y, each label's weight in the mean, the mask of labels that count (None if all do); and columns."""
        wide = self.widths[number] if who is None else int(self.sizes[number, who[0]])
        place, share, counted, y, *columns = (
            column
            if who is None and column.shape[:2] == (active, wide)
            else (column[:active] if who is None else column[who])[:, :wide]
            for column in self.steps[number]
        )
        into = self.into[: place.numel()]
        x = torch.index_select(self.x, 0, place.flatten(), out=into).unflatten(0, place.shape)
        whole = self.mask is None and (who is not None or self.even[number])
        return (x, y, share, None if whole else counted), columns


def _clip(gradient: list[Tensor], largest: float) -> list[Tensor]:
    """Scale the gradient of each client so that its norm is at most `largest`."""
    norms = torch.stack([torch.linalg.vector_norm(g.reshape(len(g), -1), dim=1) for g in gradient])
    factor = torch.clamp(largest / torch.linalg.vector_norm(norms, dim=0), max=1.0)
    return [g * factor.reshape(-1, *(1,) * (g.dim() - 1)) for g in gradient]
