"""Local training: epochs or steps of SGD or Adam on one client's samples."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedtide.core.base import Algorithm, ComputeCost, Models, Moment, Shard, Weights
from fedtide.core.errors import FedtideError, refused
from fedtide.core.rng import Rng
from fedtide.core.trees import detached, unshare
from fedtide.core.weights import sub
from fedtide.fields.types import (
    Count,
    Finite,
    ForWeights,
    Fraction,
    NonNegative,
    OpenFraction,
    Positive,
    Spelled,
    StepCount,
    Whole,
    changed,
    ingredient,
)
from fedtide.learn.device import Scratch, read
from fedtide.learn.losses import Columns, Loss
from fedtide.learn.module_check import check_first_label, check_outputs, find_notes
from fedtide.learn.schedules import Constant, Schedule
from fedtide.learn.target import CLASSES
from fedtide.learn.task import Task
from fedtide.learn.terms import Distill, Proximal, Summed, Term, Terms, terms_of


@ingredient
class RandomCrop:
    """Pad images on all sides and cut out a window at a random place.

    Args:
        padding: width of the padding on each side.
        size: height and width of the window; None keeps the size of the image.
        fill: the padding. "edge" repeats the nearest pixel; a tuple gives one number per channel, in the model's scale;
            None means 0. With `data.transforms` that normalize, black is (0 - mean) / std.

    >>> x = torch.ones(2, 1, 3, 3)
    >>> RandomCrop(padding=1)(x, torch.Generator().manual_seed(0)).shape
    torch.Size([2, 1, 3, 3])
    """

    padding: Whole = 4
    size: Count | None = None
    fill: Literal["edge"] | tuple[Finite, ...] | None = None
    kind: Literal["random-crop"] = "random-crop"

    def shape(self, shape: tuple[int, ...], key: str = "local") -> tuple[int, ...]:
        """Return the shape of an image after cropping.

        Raises:
            FedtideError: the samples are not images, or are smaller than the window.
        """
        depth, height, width = _picture(self.kind, shape, key)
        if isinstance(self.fill, tuple) and len(self.fill) != depth:
            raise refused(f"{key}.augment: 'random-crop': fill", list(self.fill), f"{depth} numbers, one per channel")
        largest = min(height, width) + 2 * self.padding
        if self.size is None:
            return shape
        if self.size > largest:
            side = f"the smaller side of pictures of {height} x {width} with the padding of {self.padding}"
            raise refused(f"{key}.augment: 'random-crop': size", self.size, f"at most {largest}, {side}")
        return depth, self.size, self.size

    def __call__(self, x: Tensor, draw: torch.Generator) -> Tensor:
        """Return a random window of each image (samples, channels, height, width)."""
        _, high, wide = self.shape(tuple(x.shape[1:]))
        padded = self._padded(x)
        rows, _, height, width = padded.shape
        top = torch.randint(height - high + 1, (rows,), generator=draw, device=x.device)
        left = torch.randint(width - wide + 1, (rows,), generator=draw, device=x.device)
        # A view of all windows of every image; one window per image is copied.
        windows = padded.unfold(2, high, 1).unfold(3, wide, 1)
        return windows[torch.arange(rows, device=x.device), :, top, left]

    def _padded(self, x: Tensor) -> Tensor:
        sides = (self.padding,) * 4
        if self.fill is None:
            return F.pad(x, sides)
        if self.fill == "edge":
            return F.pad(x, sides, mode="replicate")
        fill = torch.tensor(self.fill, dtype=x.dtype, device=x.device)[:, None, None]
        padded = fill.expand(len(x), -1, x.shape[2] + 2 * self.padding, x.shape[3] + 2 * self.padding).clone()
        padded[:, :, self.padding : self.padding + x.shape[2], self.padding : self.padding + x.shape[3]] = x
        return padded


@ingredient
class Flip:
    """Mirror images horizontally at random.

    Args:
        p: probability of mirroring an image.

    >>> Flip(p=1.0)(torch.tensor([[[[1.0, 2.0]]]]), torch.Generator()).tolist()
    [[[[2.0, 1.0]]]]
    """

    p: Fraction = 0.5
    kind: Literal["flip"] = "flip"

    def shape(self, shape: tuple[int, ...], key: str = "local") -> tuple[int, ...]:
        """Return the shape of an image, which mirroring leaves unchanged.

        Raises:
            FedtideError: the samples are not images.
        """
        return _picture(self.kind, shape, key)

    def __call__(self, x: Tensor, draw: torch.Generator) -> Tensor:
        """Mirror each image (samples, channels, height, width) with probability `p`."""
        mirrored = torch.rand(len(x), generator=draw, device=x.device) < self.p
        return torch.where(mirrored[:, None, None, None], x.flip(-1), x)


Augment = Annotated[RandomCrop | Flip, Field(discriminator="kind")]


def _picture(kind: str, shape: tuple[int, ...], key: str) -> tuple[int, int, int]:
    if len(shape) != 3:
        allowed = "(channels, height, width), pictures; or [], no augmentation"
        raise refused(f"{key}.augment: '{kind}': shape of rows", shape, allowed)
    return shape[0], shape[1], shape[2]


# -- local training ----------------------------------------------------------------------------------------------------


LocalUpdate = Literal["averaging", "gradient"]
"""Ways for a client to make its update: by local training, or by one gradient over all its samples."""


@dataclass(frozen=True)
class Batch:
    """A mini-batch of local training, on the device of the task.

    Args:
        epoch: its number, from 0 on.
        x: prepared inputs (samples, ...).
        y: labels.
        shared: what the loss has prepared for all samples.
        columns: and for these samples.
        counts: (samples,) number of labels that count in each sequence; None if each sample has one.
    """

    epoch: int
    x: Tensor
    y: Tensor
    shared: Any
    columns: Columns
    counts: Tensor | None = None

    @property
    def labels(self) -> int:
        """Number of labels that count."""
        return self.y.shape[0] if self.counts is None else int(self.counts.sum())

    def pick(self, where: slice) -> "Batch":
        """Return a part of the samples."""
        counts = None if self.counts is None else self.counts[where]
        columns = tuple(column[where] for column in self.columns)
        return Batch(self.epoch, self.x[where], self.y[where], self.shared, columns, counts)


@dataclass(frozen=True)
class Fitted:
    """The result of local training.

    `weights` and `delta` are views of storage that the task's module reuses, and raise once other weights have been
    loaded into it. Copy them (`detached(fitted.weights)`, `sub(fitted.weights, received)`) if other weights are trained
    or evaluated before they are used, as in a work that trains several models.

    Args:
        loss: mean training loss over all samples seen; for sequences, over all steps that count.
        steps: number of steps.
        lr_sum: the sum of the step sizes.
        scratch: the module that was trained.
        received: the weights that training started from.
        features: of a branched task (rows, d) of the client's samples after training, if they were asked for.
    """

    loss: float
    steps: int
    lr_sum: float
    scratch: Scratch = field(repr=False)
    received: Weights = field(repr=False)
    load: int = field(repr=False)
    features: Tensor | None = field(default=None, repr=False)

    @property
    def weights(self) -> Weights:
        """Weights after local training."""
        if self.scratch.loads != self.load:
            raise RuntimeError("the module has been given other weights since; copy fitted.weights before that")
        return self.scratch.weights

    @property
    def delta(self) -> Weights:
        """Update (new minus old), in a buffer that the next call overwrites."""
        return self.scratch.difference(self.received, self.weights)


@ingredient
class LocalTrainer:
    """Local training from the received weights, with fresh optimizer state in every round.

    Args:
        lr: learning rate.
        epochs: passes over the client's samples, reshuffled each time; 1 without `local_steps`.
        local_steps: mini-batch steps in place of epochs; samples are reshuffled whenever an epoch ends.
        batch_size: samples in a mini-batch; 0 means full batch. A smaller last batch is kept, unless it is a single
            sample and the model has BatchNorm.
        optimizer: "sgd", "adam" or "adamw".
        momentum: momentum of SGD.
        weight_decay: weight decay, added to the gradient (decoupled for "adamw").
        max_grad_norm: largest gradient norm, None for no clipping.
        lr_schedule: factor on the learning rate over the rounds.
        augment: random changes of images, applied in order, in training only (never in evaluation or decisions).
        proximal: strength mu of FedProx's pull toward the received weights; 0 for none.
        terms: terms that are added to the loss, in training only, beside `proximal`; `terms = ["distill"]` adds that of
            FedNTD. There is one `loss`, and the contrast of MOON is a method.
    """

    lr: Annotated[Positive, ForWeights] = 0.1
    epochs: StepCount | None = None
    local_steps: StepCount | None = None
    batch_size: Whole = 20
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    momentum: OpenFraction = 0.0
    weight_decay: Annotated[NonNegative, ForWeights] = 0.0
    max_grad_norm: Positive | None = None
    lr_schedule: Annotated[Schedule, Spelled] = Constant()
    augment: tuple[Annotated[Augment, Spelled], ...] = ()
    proximal: NonNegative = 0.0
    terms: tuple[Annotated[Distill, Spelled], ...] = ()

    def __post_init__(self) -> None:
        if self.epochs is not None and self.local_steps is not None:
            raise ValueError(f"found epochs {self.epochs} and local_steps {self.local_steps}, allowed: one of the two")
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(f"momentum belongs to optimizer = 'sgd', not to '{self.optimizer}'")

    def __call__(
        self, task: Task, loss: Loss, weights: Weights, shard: Shard, moment: Moment, rng: Rng, *, term: Terms = None
    ) -> Fitted:
        """Train from `weights` on `shard`.

        Args:
            loss: the loss to minimize (the task's own, or one made for this client).
            weights: the initial weights; left unchanged.
            shard: the client's samples; without samples there is no step.
            moment: the time, for the schedule and for clients that do only a part of their work.
            rng: the client's key; shuffles come from `rng.at("shuffle")`, augmentation from `rng.at("augment")`.
            term: a gradient term or several, for example a proximal pull or a control variate.
        """
        *_, fitted = self.iter_epochs(task, loss, weights, shard, moment, rng, term)
        return fitted

    def iter_epochs(
        self, task: Task, loss: Loss, weights: Weights, shard: Shard, moment: Moment, rng: Rng, term: Terms = None
    ) -> Iterator[Fitted]:
        """Train like `__call__`, and yield the result so far after each epoch, and at the end.

        The caller may read and evaluate `fitted.weights`, but must not load other weights into the task.
        """
        scratch = task.scratch
        self.check(scratch, tuple(shard.x.shape[1:]))
        if weights is scratch.weights:  # training continues from fitted weights: keep a copy of the start
            weights = detached(weights)
        loss = self.objective(task, loss, weights)
        batches = self.batches(task, loss, shard, moment, rng)  # first, as terms of the loss may evaluate models
        scratch.load(weights, train=True)
        rate = self.lr * self.lr_schedule(moment)
        optimizer = LocalOptimizer(self, rate, scratch.values)
        terms = self.gradient_terms(term)
        received = [task.to_device(weights.params[name]) for name in scratch.names] if terms else []
        # Gradients are changed in place.
        separate = bool(terms) or self.max_grad_norm is not None or self.weight_decay > 0
        total, seen, steps, done = 0.0, 0, 0, 0
        unread: list[tuple[Tensor, int]] = []

        def fitted() -> Fitted:
            nonlocal total
            for mean, count in read(unread):  # a device is waited for here alone
                total += mean * count
            unread.clear()
            return Fitted(total / seen if seen else 0.0, steps, steps * rate, scratch, weights, scratch.loads)

        for batch in batches:
            if batch.epoch > done:
                done = batch.epoch
                yield fitted()
                scratch.set_mode(True)  # the caller may have evaluated
            value, gradient = task.differentiate(loss, batch.x, batch.y, batch.shared, batch.columns)
            if separate:
                gradient = unshare(gradient)  # autograd lets added parameters share one storage
            for added in terms:
                torch._foreach_add_(gradient, added(scratch.values, received))
            if self.max_grad_norm is not None:
                clip(gradient, self.max_grad_norm)
            optimizer(scratch.values, gradient, steps)
            labels = batch.labels
            unread.append((value, labels))
            seen += labels
            steps += 1
        yield fitted()

    def batches(self, task: Task, loss: Loss, shard: Shard, moment: Moment, rng: Rng) -> Iterator[Batch]:
        """Return the mini-batches of local training in their order, for methods that take steps of their own.

        Args:
            loss: the loss of the steps.
            shard: the client's samples.
            moment: the time, for clients that do only a part of their work.
            rng: the client's key, as of `__call__`.
        """
        shared, columns = loss.prepare(shard)
        shared, table = task.to_device((shared, (task.inputs(shard.x), shard.y, *columns)))
        # Labels are counted on the CPU: a device would be waited for in every step.
        table += () if shard.mask is None else (shard.mask.sum(1),)
        draw = rng.at("augment").torch(task.device) if self.augment else None
        work = self if moment.part is None else self.draw_partial(moment.part)
        cut = work._batches(table, rng.at("shuffle").torch(), smallest=2 if task.scratch.needs_pairs else 1)

        def batches() -> Iterator[Batch]:
            for epoch, (x, y, *rest) in cut:
                if draw is not None:
                    x = task.inputs(self.augmented(x, draw))
                counts = None if shard.mask is None else rest[-1]
                yield Batch(epoch, x, y, shared, tuple(rest[: len(columns)]), counts)

        return batches()

    def gradient_terms(self, term: Terms) -> list[Term]:
        """Return the terms of each gradient: the method's own terms, and FedProx's pull."""
        pull: list[Term] = [Proximal(self.proximal)] if self.proximal else []
        return [*terms_of(term), *pull]

    def objective(self, task: Task, loss: Loss, received: Weights) -> Loss:
        """Return a loss with the terms of local training from these weights."""
        return Summed.of(loss, self.terms, task, received)

    @property
    def passes(self) -> int:
        """Number of passes without gradients over a client's samples before training, for its terms."""
        return sum(term.passes for term in self.terms)

    def check(self, scratch: Scratch, shape: tuple[int, ...], key: str = "local") -> None:
        """Raise if the settings, written at `key`, do not fit the model or samples of this shape."""
        if scratch.needs_pairs and self.batch_size == 1:
            raise refused(f"{key}.batch_size", 1, "2 or more (or 0), as the model has BatchNorm")
        for change in self.augment:
            shape = change.shape(shape, key)

    def check_terms(self, task: Task, models: Models) -> None:
        """Raise if the terms do not suit the task, or a method that trains such models."""
        for term in self.terms:
            term.check(task, "local")
        if models in ("mixture", "branches"):
            refuse_terms(self, "the method trains several branches at once")

    def augmented(self, x: Tensor, draw: torch.Generator) -> Tensor:
        """Apply the augmentation to a batch."""
        for change in self.augment:
            x = change(x, draw)
        return x

    def samples(self, rows: Tensor) -> Tensor:
        """Count the samples that clients process in all local steps (clients,), given their numbers of samples.

        >>> rows = torch.tensor([30])
        >>> LocalTrainer(epochs=2).samples(rows), LocalTrainer(local_steps=5, batch_size=20).samples(rows)
        (tensor([60]), tensor([80]))
        """
        if self.local_steps is None:
            return rows * (self.epochs or 1)
        batch = torch.full_like(rows, self.batch_size) if self.batch_size else rows
        in_epoch = (-(-rows // batch.clamp(min=1))).clamp(min=1)
        return self.local_steps // in_epoch * rows + torch.minimum(self.local_steps % in_epoch * batch, rows)

    def distinct(self, rows: Tensor) -> Tensor:
        """Count the distinct samples that clients train on in a round (clients,), given their numbers of samples.

        >>> rows = torch.tensor([30])
        >>> LocalTrainer(epochs=2).distinct(rows), LocalTrainer(local_steps=1, batch_size=20).distinct(rows)
        (tensor([30]), tensor([20]))
        """
        return torch.minimum(self.samples(rows), rows)

    def draw_partial(self, rng: Rng) -> Self:
        """Return a trainer with a random part of the work: 1 to epochs - 1 epochs, or 1 to local_steps - 1 steps.

        >>> LocalTrainer(epochs=2).draw_partial(Rng(0)).epochs
        1
        """
        if self.local_steps is not None:
            return replace(self, local_steps=int(rng.numpy().integers(1, max(self.local_steps, 2))))
        return replace(self, epochs=int(rng.numpy().integers(1, max(self.epochs or 1, 2))))

    def epochs_of(self, rows: int, generator: torch.Generator, smallest: int = 1) -> Iterator[tuple[Tensor, list[int]]]:
        """Yield the shuffled positions of the rows and the batch sizes of each epoch.

        Args:
            generator: draws the shuffles.
            smallest: batches of fewer rows are left out.

        >>> [sizes for _, sizes in LocalTrainer(batch_size=2, epochs=2).epochs_of(3, torch.Generator())]
        [[2, 1], [2, 1]]
        """
        batch = self.batch_size or rows
        sizes = [min(batch, rows - start) for start in range(0, rows, max(batch, 1))]
        sizes = [size for size in sizes if size >= smallest]
        left = self.local_steps or (self.epochs or 1) * len(sizes)
        while sizes and left > 0:
            yield torch.randperm(rows, generator=generator), sizes[:left]
            left -= len(sizes)

    def _batches(
        self, columns: tuple[Tensor, ...], generator: torch.Generator, smallest: int
    ) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """Yield the epoch and the batch of each step."""
        rows, device = len(columns[0]), columns[0].device
        for epoch, (order, sizes) in enumerate(self.epochs_of(rows, generator, smallest)):
            moved = order.to(device, non_blocking=True)
            shuffled = tuple(c.index_select(0, order if c.device == order.device else moved) for c in columns)
            # Many a client has a single batch, which needs no cutting.
            batches: Any = [shuffled]
            if sizes != [rows]:
                batches = zip(*(column[: sum(sizes)].split(sizes) for column in shuffled), strict=True)
            for batch in batches:
                yield epoch, batch


def on_local_default(default: LocalTrainer, value: Any) -> Any:
    """Read a table of local training as one that changes a method's default; anything else as it is.

    Epochs and steps replace each other. A trainer of Python without either has one epoch, whatever the default. That is
    written out, because a file without it would mean the default.

    >>> on_local_default(LocalTrainer(epochs=5, proximal=0.1), {"lr": 0.5})
    {'epochs': 5, 'proximal': 0.1, 'lr': 0.5}
    >>> on_local_default(LocalTrainer(epochs=5, proximal=0.1), {"local_steps": 3})
    {'proximal': 0.1, 'local_steps': 3}
    """
    if isinstance(value, dict):
        usual = changed(default)
        for key, other in (("epochs", "local_steps"), ("local_steps", "epochs")):
            if value.get(other) is not None:
                usual.pop(key, None)
        return usual | value
    if isinstance(value, LocalTrainer) and value.epochs is None and value.local_steps is None:
        return value if default.epochs is default.local_steps is None else replace(value, epochs=1)
    return value


# -- the optimizer -----------------------------------------------------------------------------------------------------

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8
"""Constants of Adam."""


class LocalOptimizer:
    """SGD, Adam or AdamW, with fresh state, for one client or for several that are stacked.

    The steps are those of `torch.optim` with its default settings, bit for bit. The classes of `torch.optim` import the
    compiler of torch, which takes two seconds, and their steps take longer than those of a small model.

    Args:
        local: optimizer, momentum, weight decay.
        rate: current learning rate.
        params: parameters, or of several clients (clients, ...) each; clients with fewer steps come last.

    >>> w = [torch.ones(2)]
    >>> step = LocalOptimizer(LocalTrainer(momentum=0.5), 0.1, w)
    >>> for number in range(2):
    ...     step(w, [torch.ones(2)], number)
    >>> w
    [tensor([0.7500, 0.7500])]
    """

    def __init__(self, local: LocalTrainer, rate: float, params: list[Tensor]) -> None:
        self.local, self.lr = local, rate
        moments = {"sgd": int(local.momentum > 0)}.get(local.optimizer, 2)
        self.moments = [[torch.zeros_like(value) for value in params] for _ in range(moments)]

    def __call__(self, params: list[Tensor], gradient: list[Tensor], number: int) -> None:
        """Take step `number`, from 0 on, along a gradient, which is changed by weight decay.

        Of stacked clients, `params` are those of the clients that still take steps, which come first.
        """
        local = self.local
        if local.weight_decay and local.optimizer != "adamw":
            torch._foreach_add_(gradient, params, alpha=local.weight_decay)
        moments = self.moments
        if any(buffers[0].shape != params[0].shape for buffers in moments):
            moments = [[buffer[: len(params[0])] for buffer in buffers] for buffers in moments]
        if local.optimizer != "sgd":
            self._adam(params, gradient, moments, number)
            return
        if moments:
            torch._foreach_mul_(moments[0], local.momentum)
            torch._foreach_add_(moments[0], gradient)
            gradient = moments[0]
        torch._foreach_add_(params, gradient, alpha=-self.lr)

    def _adam(self, params: list[Tensor], gradient: list[Tensor], moments: list[list[Tensor]], number: int) -> None:
        if self.local.optimizer == "adamw":
            torch._foreach_mul_(params, 1 - self.lr * self.local.weight_decay)
        first, second = moments
        torch._foreach_lerp_(first, gradient, 1 - BETA1)
        torch._foreach_mul_(second, BETA2)
        torch._foreach_addcmul_(second, gradient, gradient, 1 - BETA2)
        root = list(torch._foreach_sqrt(second))
        torch._foreach_div_(root, (1 - BETA2 ** (number + 1)) ** 0.5)
        torch._foreach_add_(root, EPS)
        torch._foreach_addcdiv_(params, first, root, -(self.lr / (1 - BETA1 ** (number + 1))))


# -- one gradient in place of training, and costs ----------------------------------------------------------------------


def refuse_terms(local: LocalTrainer, why: str) -> None:
    """Refuse terms of the loss, for a method whose training does not take them.

    >>> refuse_terms(LocalTrainer(terms=(Distill(),)), "clients take one gradient")
    Traceback (most recent call last):
        ...
    fedtide.core.errors.FedtideError: local.terms: found ['distill'], but clients take one gradient; allowed: none
    """
    if local.terms:
        raise refused("local.terms", [term.kind for term in local.terms], "none", why)


def refuse_all_but_sgd(local: LocalTrainer, why: str) -> None:
    """Refuse local training other than by SGD without momentum, clipping, FedProx's pull and terms of the loss.

    >>> refuse_all_but_sgd(LocalTrainer(momentum=0.9), "the method infers gradients")
    Traceback (most recent call last):
        ...
    fedtide.core.errors.FedtideError: local.momentum: found 0.9, allowed: 0, as the method infers gradients
    """
    usual = {"optimizer": "sgd", "momentum": 0, "max_grad_norm": None, "proximal": 0}
    refuse_terms(local, why)
    for key, plain in usual.items():
        if getattr(local, key) != plain:
            words = "none" if plain is None else repr(plain)
            raise refused(f"local.{key}", getattr(local, key), f"{words}, as {why}")


def refuse_all_but_gradient(local: LocalTrainer) -> None:
    """Refuse what `gradient_step` would leave without effect, but for how samples are divided into steps.

    >>> refuse_all_but_gradient(LocalTrainer(weight_decay=0.1))
    Traceback (most recent call last):
        ...
    fedtide.core.errors.FedtideError: local.weight_decay: found 0.1, allowed: 0, as each client takes one gradient
    """
    why = "each client takes one gradient"
    refuse_all_but_sgd(local, why)
    if local.weight_decay:
        raise refused("local.weight_decay", local.weight_decay, f"0, as {why}")
    if local.augment:
        raise refused("local.augment", [change.kind for change in local.augment], f"none, as {why}")


def gradient_step(
    task: Task, local: LocalTrainer, weights: Weights, shard: Shard, moment: Moment
) -> tuple[Weights, float] | None:
    """Take one step of gradient descent on all samples of a client, as FedSGD and IFCA's gradients do.

    Args:
        task: model and loss.
        local: learning rate and schedule; see `refuse_all_but_gradient`.
        weights: the point of the gradient.
        shard: the client's samples.
        moment: the time, for the schedule.

    Returns:
        The step (minus learning rate times gradient) and the training loss before it; None if samples are too few.
    """
    if len(shard) < (2 if task.scratch.needs_pairs else 1):
        return None
    gradient, loss = task.gradient(weights, shard)
    rate = local.lr * local.lr_schedule(moment)
    # The forward pass has moved the running statistics; they are averaged like any buffer.
    moved = sub(task.scratch.weights.buffers, weights.buffers)
    return Weights({name: part.mul(-rate) for name, part in gradient.items()}, moved), loss


def training_cost(
    local: LocalTrainer, forward: Mapping[str, float], train: Callable[[Tensor], Tensor] | None = None
) -> ComputeCost:
    """Return the computation that an algorithm's questions cost clients, for the simulated clock.

    Args:
        local: local training, the cost of "train".
        forward: for each question, the number of passes without gradients over all of a client's samples. By default
            none for "train" and one for any other question.
        train: cost of "train" in place of `local`: samples held -> samples trained on (forward and backward).

    >>> cost = training_cost(LocalTrainer(epochs=2), {"train": 3})
    >>> cost("train", torch.tensor([30])).tolist(), cost("report", torch.tensor([30])).tolist()
    ([90.0], [10.0])
    """

    def cost(question: str, rows: Tensor) -> Tensor:
        passes = forward.get(question, 0 if question == "train" else 1) + (local.passes if question == "train" else 0)
        once = rows * passes / 3
        return once + (train or local.samples)(rows) if question == "train" else once

    return cost


def question_cost(algorithm: Algorithm) -> ComputeCost:
    """Return the computation that an algorithm's questions cost clients: as it declares, else that of its training."""
    local = algorithm.options.get("local")
    solver = local if isinstance(local, LocalTrainer) else LocalTrainer()  # a user's algorithm may have none
    return algorithm.traits.compute_cost or training_cost(solver, {})


def clip(gradient: list[Tensor], largest: float) -> None:
    """Scale a gradient in place so that its norm is at most `largest`.

    >>> g = [torch.tensor([3.0, 4.0])]
    >>> clip(g, 1.0); [round(v, 6) for v in g[0].tolist()]
    [0.6, 0.8]
    """
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradient)))
    torch._foreach_mul_(gradient, torch.clamp(largest / norm, max=1.0))


# -- whether a model fits its rows -------------------------------------------------------------------------------------


def check_parts(partial_work: float, local: object, method: str) -> None:
    """Raise for devices that do a part of the work of a method whose local work has but one, an epoch or a step."""
    parts = (local.local_steps or local.epochs or 1) if isinstance(local, LocalTrainer) else 0
    if partial_work and parts == 1:
        allowed = f"0, as the local work of {method} is one epoch or step; or more of these"
        raise refused("devices.partial_work", partial_work, allowed)


def check_fit(task: Task, shard: Shard, classes: int, local: object = None, key: str = "local") -> list[str]:
    """Run a task's model on some samples, as in training and as in evaluation.

    Returns:
        A line for each thing of the model that its author may not know.

    Args:
        task: model and loss.
        shard: a few samples.
        classes: number of classes of all samples.
        local: local training, if there is any.
        key: key of local training, for messages.

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
            fresh = task.rebuild()
            check_outputs(task.run(task.scratch.load(weights, train=False), task.inputs(x[:1])))
            logits = task.logits(weights, x)
            if width and logits.shape != (len(x), width):
                raise refused("model: shape of outputs", tuple(logits.shape), f"{(len(x), width)}, as of data.target")
            if not width and (logits.shape[:-1] != y.shape or logits.shape[-1] < classes):
                check_first_label(y, logits.shape[-1], classes)
                wanted = f"(rows, {steps[0]} steps, classes)" if steps else "(rows, classes)"
                raise FedtideError(
                    f"model: it returns shape {tuple(logits.shape)} for {len(x)} rows, allowed: logits {wanted} with "
                    f"{classes} classes"
                )
            if isinstance(local, LocalTrainer):
                local.check(task.scratch, tuple(x.shape[1:]), key)
                x = local.augmented(x, Rng(0).torch())
            outputs = task.run(task.scratch.load(weights, train=True), task.inputs(x))
            _check_loss(task, outputs, shard)
            task.scratch.check_constants()
    except (RuntimeError, ValueError, IndexError, TypeError, AttributeError) as error:
        raise FedtideError(f"model: it does not fit rows of shape {tuple(x.shape[1:])}: {error}") from None
    types = {name: value.dtype for name, value in fresh.named_parameters()}
    return find_notes(task.scratch.module, outputs, types, classes if task.target == CLASSES else 0)


def _check_loss(task: Task, outputs: Any, shard: Shard) -> None:
    """Raise if the loss, which may be a person's own, has no value by which a model can be trained."""
    try:
        value = task.loss.value(outputs, *task.to_device((shard.y, *task.loss.prepare(shard))))
    except FedtideError:
        raise
    except Exception as error:  # whatever the user's code raises
        reason = " ".join(str(error).split())
        raise FedtideError(f"loss: it failed with {type(error).__name__}: {reason}") from error
    if not (isinstance(value, Tensor) and value.shape == () and value.requires_grad):
        result = tuple(value.shape) if isinstance(value, Tensor) and value.shape else value
        key = "loss: shape" if isinstance(result, tuple) else "loss"
        raise refused(key, result, "a tensor without dimensions that follows from the outputs, such as a mean")
