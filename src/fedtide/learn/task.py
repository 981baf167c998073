"""A task: a model, its loss and the reading of its outputs; the only place where weights are loaded into a module."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain
from math import ceil
from threading import RLock
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from fedtide.core.base import Memory, Prediction, Shard, Weights
from fedtide.core.errors import refused
from fedtide.core.rng import Rng
from fedtide.core.trees import map_leaves
from fedtide.core.weights import renamed, united
from fedtide.learn.device import CPU, Scratch, read, run_in_bfloat, to_cpu, to_device
from fedtide.learn.fast.passes import ModulePasses
from fedtide.learn.fast.stacks import LayerStack, stack_copies
from fedtide.learn.losses import Columns, CrossEntropy, as_loss, known_part, label_count
from fedtide.learn.module_check import check_fresh, check_ids, check_module
from fedtide.learn.target import CLASSES, Target
from fedtide.models.branched import Branched, Feature, branch_of, branched, in_branch, in_layer

ROWS = 2048
"""Samples evaluated in one pass; for sequences, steps."""
PIXELS = 2**18
"""Values of pictures evaluated in one pass on a CPU, as activations of more leave its caches."""
TURNS = RLock()
"""Held by a thread that plays or predicts: a task has one module, and all threads have torch's one generator."""
ROW_GRADIENT_BYTES = 8 * 2**20
"""Bytes of gradients of single samples that are computed at once."""


@dataclass(frozen=True)
class Task:
    """A model and its training objective.

    Args:
        build: returns a fresh module with logits (samples, classes); any `nn.Module` class or function. For sequences
            logits are (samples, steps, classes); for other targets outputs are (samples, width).
        loss: the loss that local training minimizes: a `fedtide.learn.losses.Loss`, or a function of (outputs, labels)
            such as `nn.CrossEntropyLoss(label_smoothing=0.1)`.
        dtype: number type of parameters and activations.
        channels_last: keep 4-D parameters and inputs in that memory format (faster CPU convolutions), if it is safe.
        example: any sample (1, ...), for algorithms that need the width of the model's features.
        public: (samples, ...) features that clients and server share, as the model sees them; None if there are none.
        begin: initial weights of the model; None draws them. Networks of another kind for the same samples, such as
            frozen ones, are always drawn.
        init_layers: draws the weights of a fresh module's layers anew, from torch's global generator; None keeps those
            that they were built with.
        bfloat: compute matrix products and convolutions in bfloat16; parameters, losses and outputs stay in `dtype`,
            which must be float32.
        target: kind of labels, and the reading of outputs. Other targets than classes have default losses of their own.
        device: device of forward and backward passes; weights and results stay on the CPU.

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
    init_layers: Callable[[nn.Module], None] | None = None
    bfloat: bool = False
    target: Target = CLASSES
    device: str = CPU

    def __post_init__(self) -> None:
        if isinstance(self.build, nn.Module) or not callable(self.build):
            allowed = "a function that makes a fresh module, such as lambda: nn.Linear(3, 2)"
            if hasattr(self.build, "build"):  # a model of a file, which is told the shape of rows and their classes
                allowed = f"lambda: {type(self.build).__name__}().build(shape, classes), with those of your rows"
            raise refused("Task.build", type(self.build).__name__, allowed)
        if not isinstance(self.dtype, torch.dtype):
            raise refused("Task.dtype", self.dtype, "a number type, such as torch.float32")
        if self.bfloat and self.dtype != torch.float32:
            raise refused("Task.dtype", self.dtype, "torch.float32, with bfloat")
        if isinstance(self.target, str):
            raise refused("Task.target", self.target, "population.target, or a target such as fedtide.data.Number()")
        if not callable(self.loss) and not hasattr(self.loss, "prepare"):
            raise refused("Task.loss", self.loss, "a loss of ft.losses, or a function of (outputs, labels)")
        loss = as_loss(self.loss)
        if self.target != CLASSES and getattr(loss, "kind", None) is not None:
            if not isinstance(loss, CrossEntropy):
                allowed = "'cross-entropy', which is then the loss of data.target, or your own"
                raise refused("loss", loss.kind, allowed, "rows have no classes")
            loss = self.target.loss
        object.__setattr__(self, "loss", loss)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which has a module of its own."""
        return {name: value for name, value in vars(self).items() if name != "scratch"}

    @cached_property
    def scratch(self) -> Scratch:
        """Module of the task, one per process."""
        return Scratch(self._fresh(Rng(0), overwritten=True), self.dtype, self.channels_last, self.device)

    def _fresh(self, rng: Rng, *, overwritten: bool = False) -> nn.Module:
        # Module initialization uses only torch's global generator: seed it for the call and restore it.
        before = torch.get_rng_state()
        torch.default_generator.manual_seed(rng.number)
        try:
            module = self.build()
            check_module(module)
            if self.init_layers is not None and not overwritten:  # an orthogonal matrix takes long
                self.init_layers(module)
            return module
        finally:
            torch.set_rng_state(before)

    def rebuild(self) -> nn.Module:
        """Return a module as `build` made it, in its own number type.

        Raises:
            FedtideError: it shares what training changes with the module of the task.
        """
        module = self._fresh(Rng(0), overwritten=True)
        check_fresh(self.scratch.module, module)
        return module

    def init(self, rng: Rng) -> Weights:
        """Return the initial weights: the given ones, or freshly drawn ones."""
        return self.init_random(rng) if self.begin is None else map_leaves(torch.clone, self.begin)

    def init_random(self, rng: Rng) -> Weights:
        """Draw initial weights, the same for the same key."""
        fresh = Scratch(self._fresh(rng.at("module")), self.dtype, channels_last=False)
        return map_leaves(torch.clone, fresh.weights)

    def module(self, weights: Weights) -> nn.Module:
        """Return a module of its own with these weights, in evaluation mode, for use without this package.

        >>> task = Task(lambda: nn.Linear(3, 2))
        >>> task.module(task.init(Rng(0)))(torch.zeros(5, 3)).shape
        torch.Size([5, 2])
        """
        fresh = self._fresh(Rng(0), overwritten=True)
        return Scratch(fresh, self.dtype, channels_last=False).load(weights, train=False)

    def inputs(self, x: Tensor) -> Tensor:
        """Convert samples to the task's number type and memory format."""
        if x.is_floating_point() and x.dtype != self.dtype:
            x = x.to(self.dtype)
        if self.channels_last and x.dim() == 4 and self.scratch.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        return x

    def to_device(self, value: Any) -> Any:
        """Move tensors, also in tuples, to the task's device."""
        return to_device(value, self.device)

    def run(self, module: nn.Module, x: Tensor, *, features: bool = False) -> Any:
        """Run the task's module on prepared `inputs`, on its device: the only place where it is called.

        Args:
            x: samples (rows, ...).
            features: return the features (rows, d) alone; the module is a branched one.
        """
        x, call = self.to_device(x), cast("Branched", module).features if features else module
        try:
            return run_in_bfloat(call, x) if self.bfloat else call(x)
        except (IndexError, RuntimeError) as error:
            check_ids(module, x, error)
            raise

    def outputs(self, weights: Weights, x: Tensor) -> Iterator[Any]:
        """Yield the module's outputs in evaluation mode, `ROWS` samples per pass, or `ROWS` steps of token sequences.

        Consume all of them before the task is used for anything else: there is one module.
        """
        return map(to_cpu, self._evaluated(weights, x))

    @torch.no_grad()
    def _evaluated(self, weights: Weights, x: Tensor, *, features: bool = False) -> Iterator[Any]:
        """Yield outputs on the device, or the features alone of a branched task."""
        module = self.scratch.load(weights, train=False)
        steps = x.shape[1] if x.dim() == 2 and not x.is_floating_point() else 1
        if x.dim() == 4 and torch.device(self.device).type == CPU:
            steps = ceil(x.shape[1:].numel() * ROWS / PIXELS)
        # Without samples there is one pass too, as the shapes of the outputs are needed.
        for rows in parts(max(len(x), 1), steps):
            yield self.run(module, self.inputs(x[rows]), features=features)

    def features(self, weights: Weights, x: Tensor) -> Tensor:
        """Return the features (rows, d) of samples by a branched task, in evaluation mode."""
        passes = self._passes(x)
        if passes is not None:
            self.scratch.load(weights, train=False)
            with torch.no_grad():
                features = passes.features(x)
            if features is not None:
                return features
        return torch.cat([to_cpu(features) for features in self._evaluated(weights, x, features=True)])

    def logits(self, weights: Weights, x: Tensor) -> Tensor:
        """Return logits (samples, classes), for sequences (samples, steps, classes), in evaluation mode."""
        return concat_passes(self.outputs(weights, x), len(x))

    def predict_rows(self, weights: Weights, x: Tensor, *, double: bool = False) -> Tensor:
        """Return the answers for samples (`Target.read_outputs`), in the shape of the logits."""
        logits = self.logits(weights, x)
        return self.target.read_outputs(logits.double() if double else logits)

    def row_losses(self, weights: Weights, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the plain loss of each sample in float64, in evaluation mode; for sequences that of each step.

        With `mask` (samples, steps), return that of each sequence: the mean over the steps that count.
        """
        losses, done = [], 0
        for outputs in self._evaluated(weights, x):
            rows = slice(done, done + len(outputs))
            counted = None if mask is None else self.to_device(mask[rows])
            answers = self.target.read_outputs(outputs.double())
            losses.append(to_cpu(self.target.losses(answers, self.to_device(y[rows]), counted)))
            done = rows.stop
        return torch.cat(losses)

    def losses(self, weights: Weights, shard: Shard) -> Tensor:
        """Return the plain loss of each sample (samples,), in evaluation mode; for sequences the mean."""
        answers = self.predict_rows(weights, shard.x)
        return self.target.losses(answers, shard.y, shard.mask) if len(shard) else answers.new_empty(0)

    @torch.no_grad()
    def objective(self, weights: Weights, shard: Shard) -> float:
        """Return the mean training loss of all samples (or steps that count), in evaluation mode; 0 without samples."""
        module = self.scratch.load(weights, train=False)
        shared, columns = self.loss.prepare(shard)
        values: list[tuple[Tensor, int]] = []
        whole = [slice(None)] if len(shard) else []
        for rows in parts(len(shard), shard.y.shape[1:].numel()) if self._is_of_labels else whole:
            values.append(self._loss(module, shard.pick(rows), shared, tuple(column[rows] for column in columns)))
        total, seen = 0.0, 0.0
        for value, count in read(values):
            total += value * count
            seen += count
        return total / max(seen, 1)

    @property
    def _is_of_labels(self) -> bool:
        """True if the loss of a batch is the mean over its labels; another mean may weigh them, as by class."""
        return known_part(self.loss, "each") is not None

    def _loss(self, module: nn.Module, shard: Shard, shared: Any, columns: Columns) -> tuple[Tensor, int]:
        """Return the mean training loss of one pass, and the number of labels in the mean."""
        outputs = self.run(module, self.inputs(shard.x))
        value = self.loss.value(outputs, *self.to_device((shard.y, shared, columns)))
        return value, label_count(shard.y, shard.mask)

    def differentiate(
        self, loss: Any, x: Tensor, y: Tensor, shared: Any, columns: Columns, *, names: Sequence[str] | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the loss of a batch, and its gradient by the parameters that the module has now.

        Small networks of known layers need no autograd (`fedtide.learn.fast`); their gradient is in storage that the
        next one overwrites.

        Args:
            loss: a `fedtide.learn.losses.Loss`.
            x: prepared `inputs`.
            y: labels.
            shared: what the loss has prepared.
            columns: and the batch's part of its columns.
            names: parameters whose gradient is wanted; None for all.
        """
        passes = self._passes(x) if names is None else None
        result = None if passes is None else passes(loss, x, y, shared, columns)
        if result is not None:
            return result
        scratch = self.scratch
        wanted = dict(zip(scratch.names, scratch.params, strict=True))
        value = loss.value(self.run(scratch.module, x), y, shared, columns)
        params = scratch.params if names is None else [wanted[name] for name in names]
        gradient = torch.autograd.grad(value, params, allow_unused=True, materialize_grads=True)
        return value.detach(), list(gradient)

    def _passes(self, x: Tensor) -> ModulePasses | None:
        """Return passes without autograd for a batch; None if the module needs it, or is as fast with it."""
        by_shape, (rows, *inner) = self.scratch.passes, x.shape
        shape = tuple(inner)
        if x.dtype != self.dtype or not rows:
            return None
        if shape not in by_shape:
            suits = torch.device(self.device).type == CPU and not self.bfloat
            by_shape[shape] = ModulePasses.of(self.scratch, shape) if suits else None
        passes = by_shape[shape]
        return passes if passes is not None and rows <= passes.most and not passes.stack.busy else None

    def gradient(
        self, weights: Weights, shard: Shard, *, train: bool = True, names: Sequence[str] | None = None
    ) -> tuple[dict[str, Tensor], float]:
        """Return the gradient of the mean training loss of all samples (or steps that count), and that loss.

        More than `ROWS` samples are passed in parts of equal size, so that BatchNorm in training mode never meets a
        part with a single sample. A loss without `each` needs all samples in one part. The gradient of a single part is
        returned unchanged. Multiplying and dividing by its size would change the last bit of a tenth of all numbers.

        Args:
            weights: the point of the gradient.
            train: in training mode, as a client's own steps. Else in evaluation mode, which is deterministic: without
                dropout, with fixed running statistics.
            names: parameters whose gradient is wanted; None for all.
        """
        self.scratch.load(weights, train=train)
        shared, columns = self.loss.prepare(shard)
        gradient: list[Tensor] = []
        values: list[tuple[Tensor, float]] = []
        loss, seen = 0.0, 0
        count = min(-(-shard.y.numel() // ROWS), len(shard)) if self._is_of_labels else 1
        for rows in torch.arange(len(shard)).tensor_split(max(count, 1)):
            part_shard = shard.pick(rows)
            labels = self.to_device((part_shard.y, shared, tuple(column[rows] for column in columns)))
            value, part = self.differentiate(self.loss, self.inputs(part_shard.x), *labels, names=names)
            count = label_count(part_shard.y, part_shard.mask)
            seen += count
            share = count / max(seen, 1)  # a running mean: a single part has share 1
            if gradient:
                gradient = list(torch._foreach_lerp(gradient, part, share))
            else:
                gradient = [leaf.clone(memory_format=torch.contiguous_format) for leaf in part]
            values.append((value, share))
        for part_loss, share in read(values):
            loss += share * (part_loss - loss)
        return dict(zip(names or self.scratch.names, map(to_cpu, gradient), strict=True)), loss

    def fisher(self, weights: Weights, shard: Shard) -> dict[str, Tensor]:
        """Return the diagonal of the empirical Fisher information: the mean square of the gradient of each sample.

        The gradient is of the plain loss, in evaluation mode. Samples without a step that counts are left out.

        >>> task = Task(lambda: nn.Linear(1, 2, bias=False))
        >>> rows = Shard(torch.ones(2, 1), torch.tensor([0, 1]), torch.arange(2))
        >>> task.fisher(Weights({"weight": torch.zeros(2, 1)}), rows)["weight"].flatten().tolist()
        [0.25, 0.25]
        """
        loss = self.target.loss
        if shard.mask is not None:
            shard = shard.pick(shard.mask.any(1))
        shared, columns = loss.prepare(shard)
        squares = [torch.zeros_like(value) for value in self.scratch.values]
        x, y, columns = self.to_device((self.inputs(shard.x), shard.y, columns))
        stack = None if columns or not len(shard) else self.layer_stack(loss, x, y, "rows")
        if stack is not None:
            few = max(ROW_GRADIENT_BYTES // sum(leaf.nbytes for leaf in squares), 1)
            size = few if stack.by_row else ROWS
            for part_x, part_y in zip(x.split(size), y.split(size), strict=True):
                named = stack.squares(weights, part_x, part_y)
                torch._foreach_add_(squares, [named[name] for name in self.scratch.names])
        else:
            self.scratch.load(weights, train=False)
            for k in range(len(shard)):
                row = slice(k, k + 1)
                _, gradient = self.differentiate(loss, x[row], y[row], shared, tuple(column[row] for column in columns))
                torch._foreach_addcmul_(squares, gradient, gradient)
        torch._foreach_div_(squares, max(len(shard), 1))
        return dict(zip(self.scratch.names, map(to_cpu, squares), strict=True))

    def layer_stack(self, loss: Any, x: Tensor, y: Tensor, use: Literal["rows", "batches"]) -> LayerStack | None:
        """Return a stack for gradients of single samples or of several clients; None if these need autograd."""
        shape, stacks = tuple(x.shape[1:]), self.scratch.stacks
        if y.dim() != 1 or y.dtype != torch.int64 or x.dtype != self.dtype:
            return None
        if (use, shape) not in stacks:
            suits = not self.bfloat and known_part(loss, "graded") is not None
            stack = stack_copies(self.scratch, loss, shape) if suits else None
            stacks[use, shape] = stack if isinstance(stack, LayerStack) and stack.branches is None else None
        return stacks[use, shape]

    def predict(self, payload: Weights, memories: Sequence[Memory], x: Tensor, owner: Tensor) -> Prediction:
        """Predict with one model per slot (the `predict` of most algorithms)."""
        del memories, owner
        return Prediction(self.predict_rows(payload, x))


def parts(rows: int, steps: int = 1) -> Iterator[slice]:
    """Split samples into parts for one evaluation pass: `ROWS` samples each, or as many sequences as have `ROWS` steps.

    >>> [rows.start for rows in parts(5000)], [rows.start for rows in parts(5, steps=1000)]
    ([0, 2048, 4096], [0, 2, 4])
    """
    size = max(ROWS // max(steps, 1), 1)
    return (slice(i, i + size) for i in range(0, rows, size))


def concat_passes(outputs: Iterable[Tensor], rows: int, dim: int = 0) -> Tensor:
    """Concatenate the outputs of several passes, with all `rows` along `dim`.

    Each pass is copied to its place as it comes. So there is never a second copy of everything, which may be large: a
    vocabulary has ten thousand logits at every step.
    """
    passes = iter(outputs)
    first = next(passes)
    if first.shape[dim] == rows:
        return first
    whole, done = first.new_empty(*first.shape[:dim], rows, *first.shape[dim + 1 :]), 0
    for one in chain([first], passes):
        whole.narrow(dim, done, one.shape[dim]).copy_(one)
        done += one.shape[dim]
        first = one
    return whole


def joined(columns: Sequence[Tensor]) -> Tensor:
    """Concatenate columns; without a copy if they were cut from one tensor in this order.

    If some are on another device than the CPU, such as new rows beside a client's kept rows, all go to that device.

    >>> rows = torch.arange(5)
    >>> joined(rows.split([2, 3])) is rows
    True
    """
    whole, sizes = columns[0]._base, [column.shape[0] for column in columns]
    if whole is not None and whole.shape[0] == sum(sizes) and whole.is_contiguous():
        start, size, look = whole.data_ptr(), whole[:1].nbytes, (whole.shape[1:], whole.stride(), whole.dtype)
        starts = [start + place * size for place in accumulate(sizes[:-1], initial=0)]
        parts = [(column, at) for column, rows, at in zip(columns, sizes, starts, strict=True) if rows]
        alike = all(c._base is whole and (c.shape[1:], c.stride(), c.dtype) == look for c, _ in parts)
        if alike and all(column.data_ptr() == at for column, at in parts):
            return whole
    where = next((column.device for column in columns if column.device.type != CPU), columns[0].device)
    return torch.cat([column.to(where) for column in columns])


def example_of(task: Task, purpose: str) -> Tensor:
    """Return the task's example sample (1, ...); refuse a task without one.

    Args:
        purpose: what needs to know how samples look, for the message.
    """
    if task.example is None:
        raise refused("Task.example", None, f"a sample, such as x[:1], for {purpose}")
    return task.example


def classes_of(task: Task) -> int:
    """Return the number of classes of a task, or of the bins of its numbers."""
    if task.target.bins:
        return task.target.bins
    outputs = next(iter(task.outputs(task.scratch.weights, example_of(task, "labels"))))
    return int((outputs[0] if isinstance(outputs, tuple) else outputs).shape[-1])  # a branch network adds features


def label_shares(shard: Shard, classes: int = 0) -> Tensor:
    """Return the share of each label (labels,) float64; for sequences, among the steps that count.

    Args:
        shard: a client's samples.
        classes: number of labels; 0 means up to the client's largest label.
    """
    counts = torch.bincount(shard.labels, minlength=classes).double()
    return counts / counts.sum().clamp(min=1)


def refuse_numbers(task: Task, key: str, value: Any, why: str, allowed: str = "another one") -> None:
    """Refuse a target that has no classes.

    Args:
        key: key of what needs classes.
        value: what stands there.
        why: the reason.
        allowed: what would do.
    """
    if task.target != CLASSES:
        raise refused(key, value, allowed, f"{why}, and rows have no classes (data.target)")


def refuse_without_likelihood(task: Task, key: str, value: str) -> None:
    """Refuse a target whose losses are no likelihoods, for what weighs models by posteriors."""
    if not task.target.likelihood:
        allowed = "one that needs no likelihood; or data.target = { kind = 'number', loss = 'gaussian' }, or counts"
        raise refused(key, value, allowed)


# -- tasks whose network has a layer repeated K times ------------------------------------------------------------------


def with_branches(
    task: Task, layer: str, count: int, feature: Feature = "shared", *, vectors: bool = False, key: str = "branch_layer"
) -> Task:
    """Return the task on a network with `layer` repeated `count` times; see `fedtide.models.branched.branched`.

    If the task has initial weights, all copies of the layer begin with them.

    Args:
        task: the task on the network without branches.
        layer: the layer to repeat.
        count: K.
        feature: kind of features.
        vectors: require features to be vectors, as for clustering.
        key: name of the option that gives the layer, for error messages.

    Raises:
        FedtideError: the model has no such layer, or its features are not vectors; raised before anything runs.
    """
    begin = None if task.begin is None else join_models([task.begin] * count, layer)
    branched_task = replace(task, build=lambda: branched(task.build(), layer, count, feature, key), begin=begin)
    scratch = branched_task.scratch
    if all(branch_of(name) is None for name in scratch.names):
        raise refused(key, layer, "a layer with parameters, such as 'head'")
    if vectors and branched_task.example is not None:
        width(branched_task, scratch.weights, key)
    return branched_task


def width(task: Task, weights: Weights, key: str = "branch_layer") -> int:
    """Return the width of the features of a branched task.

    Raises:
        FedtideError: the task has no example sample, or its features are not vectors.
    """
    shape = tuple(task.features(weights, example_of(task, "features")).shape[1:])
    if len(shape) != 1:
        raise refused(f"{key}: shape of its features", shape, "a layer that takes vectors, such as 'head'")
    return shape[0]


def logits_and_features(task: Task, weights: Weights, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits (K, rows, classes) and features (rows, d) of a branched task, in evaluation mode."""
    features = []

    def logits() -> Iterator[Tensor]:
        for outputs, z in task.outputs(weights, x):
            features.append(z)
            yield outputs

    return concat_passes(logits(), len(x), dim=1), torch.cat(features)


def join_models(models: Sequence[Weights], layer: str) -> Weights:
    """Merge K models of one task into the weights of one network with `layer` repeated, as of `with_branches`.

    Shared layers are run once, and taken from the first model.

    Args:
        models: K.
        layer: the layer in which they differ, or "*" for all.

    >>> one, two = (Weights({"conv.w": torch.ones(1), "head.w": torch.full((1,), k)}) for k in (1.0, 2.0))
    >>> list(join_models([one, two], "head").params)
    ['model.conv.w', 'model.head.copies.0.w', 'model.head.copies.1.w']
    """
    names = [*models[0].params, *models[0].buffers]
    return united(
        renamed(model, {name: in_branch(name, layer, k) for name in names if not k or in_layer(name, layer)})
        for k, model in enumerate(models)
    )


def split_models(weights: Weights, like: Weights, layer: str, count: int) -> list[Weights]:
    """Split joined weights into each model, or its part of an update, by the names in `like`.

    Shared layers are in all of them.
    """
    names = [*like.params, *like.buffers]
    return [
        renamed(weights, {in_branch(name, layer, k if in_layer(name, layer) else 0): name for name in names})
        for k in range(count)
    ]
