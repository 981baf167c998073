"""Losses that clients minimize.

A loss has four parts, of which the last two are optional:

- `prepare(shard) -> (shared, columns)` is called once per client. It returns a value for all samples (class fractions),
  and tensors with an entry for each sample (posteriors, masks).
- `value(outputs, y, shared, columns)` is the mean over a batch, given the batch's part of each column.
- `each(outputs, y, shared, eps)` is the loss of every label, with label smoothing. Methods that weight samples, idle
  branches, and clients that are trained together need it; the latter need `stacked(shared)`, too.
- `graded(outputs, y, shared, eps)` is the loss of every label and its gradient, for small networks.

Decisions (best model, posteriors, utilities) use plain cross-entropy, whatever the training loss; for numbers they use
the losses of `fedtide.learn.target`.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeGuard, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from fedtide.core.base import LARGEST, Shard, Weighted
from fedtide.core.errors import FedtideError, refused
from fedtide.fields.types import Flag, Fraction, NonNegative, ingredient
from fedtide.learn.device import CPU

__all__ = [
    "WSM",
    "CrossEntropy",
    "FedLC",
    "Loss",
    "Masked",
]  # fmt: skip

Columns = tuple[Tensor, ...]
"""Tensors with one entry for each sample, split and shuffled along with the samples."""


def label_count(y: Tensor, mask: Tensor | None) -> int:
    """Count the labels in a batch's mean: its samples, or the steps that count."""
    return len(y) if mask is None else int(mask.sum())


def mask_of(shard: Shard) -> Columns:
    """Return the mask of steps that count in a client's sequences as a column; no column without a mask."""
    return () if shard.mask is None else (shard.mask,)


IGNORED = -100
"""Label that a mean cross-entropy of torch leaves out."""


def keep_counted(outputs: Tensor, y: Tensor, columns: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return outputs (labels, classes) and labels (labels,) of a batch, restricted to the mask if there is one.

    On another device, which would be waited for to count them, all labels are returned, with `IGNORED` for those that
    do not count. Values that are no classes stay as they are.
    """
    if y.is_floating_point():
        return outputs, y
    if not columns:
        return outputs.flatten(0, -2), y.flatten()
    (mask,) = columns
    if y.device.type != CPU:
        return outputs.flatten(0, -2), y.masked_fill(~mask, IGNORED).flatten()
    return outputs[mask], y[mask]


def mean_of_each(
    loss: "StackedLoss", outputs: Tensor, y: Tensor, columns: Sequence[Tensor], shared: Any, eps: float
) -> Tensor:
    """Return the mean of `loss.each` over a batch, restricted to the mask if there is one."""
    if y.device.type == CPU or not columns:
        return loss.each(*keep_counted(outputs, y, columns), shared, eps).mean()
    (mask,) = columns
    # Multiplying by the mask is not enough: a step that does not count may have an infinite loss.
    return loss.each(outputs, y, shared, eps).masked_fill(~mask, 0.0).sum() / mask.sum()


class Loss(Protocol):
    """A loss that clients minimize."""

    def prepare(self, shard: Shard) -> tuple[Any, Columns]:
        """Return one value for all of the client's samples, and columns with an entry for each sample."""

    def value(self, outputs: Any, y: Tensor, shared: Any, columns: Columns) -> Tensor:
        """Return the mean loss of a batch, a differentiable scalar."""


@runtime_checkable
class StackedLoss(Loss, Protocol):
    """A loss for training several clients at once: the mean of `each` over all labels that count.

    If `prepare` returns columns beside the mask, `shared` is a tuple: the shared value, and these columns of the batch.
    """

    def each(self, outputs: Any, y: Tensor, shared: Any, eps: float = 0.0) -> Tensor:
        """Return the loss of every label, in the shape of `y`, with label smoothing `eps` (of idle branches)."""

    def stacked(self, shared: Sequence[Any]) -> Tensor | tuple[Any, ...] | None:
        """Stack the shared values of several clients along the first dimension; None if there are none."""


@ingredient
class CrossEntropy:
    """Mean cross-entropy of logits (samples, classes) against labels (samples,).

    For sequences, logits (samples, steps, classes) and labels (samples, steps): the mean over all steps that count.

    >>> import torch
    >>> loss = CrossEntropy()
    >>> round(float(loss.value(torch.zeros(4, 2), torch.tensor([0, 1, 0, 1]), None, ())), 6)
    0.693147
    """

    kind: Literal["cross-entropy"] = "cross-entropy"

    def prepare(self, shard: Shard) -> tuple[None, Columns]:
        """Return the mask of sequences as the only column; no column otherwise."""
        return None, mask_of(shard)

    def value(self, outputs: Tensor, y: Tensor, shared: None, columns: Columns) -> Tensor:
        """Return the mean over samples, or over the steps that count."""
        if y.is_floating_point():
            raise refused("loss", "cross-entropy", "Task(..., target=population.target), as rows have no classes")
        return F.cross_entropy(*keep_counted(outputs, y, columns))

    def each(self, outputs: Tensor, y: Tensor, shared: None, eps: float = 0.0) -> Tensor:
        """Return the loss of every label, in the shape of `y`, with label smoothing `eps`."""
        return label_losses(outputs, y, eps)

    def graded(self, outputs: Tensor, y: Tensor, shared: None, eps: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the loss of every label, in the shape of `y`, and its gradient by the outputs.

        Args:
            outputs: logits (..., classes).
            y: labels (...).
            shared: nothing.
            eps: label smoothing of each label, in a shape that fits `y`; None for none.
        """
        logp, y = outputs.log_softmax(-1), y[..., None]
        losses = -logp.gather(-1, y)[..., 0]
        if eps is None:
            return losses, logp.exp_().scatter_(-1, y, -1.0, reduce="add")
        losses = torch.lerp(losses, -logp.mean(-1), eps.expand(losses.shape))
        gradient = logp.exp_().sub_((eps / logp.shape[-1])[..., None])
        return losses, gradient.scatter_add_(-1, y, (eps - 1)[..., None].expand(y.shape))

    def stacked(self, shared: Sequence[None]) -> None:
        """Return None, as nothing is prepared."""


def label_losses(outputs: Tensor, y: Tensor, eps: float = 0.0) -> Tensor:
    """Return the cross-entropy of logits (..., classes) with every label, in the shape of `y`, smoothed by `eps`.

    >>> import torch
    >>> [round(value, 6) for value in label_losses(torch.zeros(2, 2), torch.tensor([0, 1])).tolist()]
    [0.693147, 0.693147]
    """
    losses = F.cross_entropy(outputs.flatten(0, -2), y.flatten(), reduction="none", label_smoothing=eps)
    return losses.reshape(y.shape)


@dataclass(frozen=True)
class Plain:
    """A loss made of a function of (outputs, labels), such as any torch loss that returns the mean of a batch.

    Of sequences it takes the steps that count: outputs (steps, classes) and labels (steps,).

    >>> import torch
    >>> loss = Plain(torch.nn.CrossEntropyLoss())
    >>> round(float(loss.value(torch.zeros(4, 2), torch.tensor([0, 1, 0, 1]), None, ())), 6)
    0.693147
    """

    function: Callable[[Any, Tensor], Tensor]

    def prepare(self, shard: Shard) -> tuple[None, Columns]:
        """Return the mask of sequences, as the function needs only outputs and labels."""
        return None, mask_of(shard)

    def value(self, outputs: Any, y: Tensor, shared: None, columns: Columns) -> Tensor:
        """Return the value of the function, of sequences on the steps that count.

        Raises:
            FedtideError: the function does not fit the model's outputs, for example by its class weights.
        """
        for mask in columns:
            outputs, y = outputs[mask], y[mask]
        try:
            return self.function(outputs, y)
        except RuntimeError as error:
            raise FedtideError(f"loss: it does not fit the model's outputs: {' '.join(str(error).split())}") from None


def known_part(loss: Any, name: str) -> Any:
    """Return an optional part of a loss, such as `graded`; None without it, or if it belongs to another loss.

    A class that overrides `value` or `each` is another loss than the class that it inherits `graded` from.

    >>> class Doubled(CrossEntropy):
    ...     def value(self, outputs, y, shared, columns):
    ...         return 2 * super().value(outputs, y, shared, columns)
    >>> known_part(CrossEntropy(), "graded") is None, known_part(Doubled(), "graded") is None
    (False, True)
    """
    for kind in type(loss).__mro__:
        if name in vars(kind):
            return getattr(loss, name)
        if "value" in vars(kind) or "each" in vars(kind):
            return None
    return getattr(loss, name, None)


def is_stacked(loss: Any) -> TypeGuard[StackedLoss]:
    """Tell whether a loss is defined per label, by the class that says what its `value` is."""
    return isinstance(loss, StackedLoss) and known_part(loss, "each") is not None


def as_loss(loss: Any) -> Any:
    """Return a loss unchanged, or wrap a plain function as a loss."""
    return loss if hasattr(loss, "prepare") else Plain(loss)


# -- softmaxes by the client's counts of labels ----------------------------------------------------------------------


class CountedSoftmax:
    """Cross-entropy of logits that are adjusted by how many labels of each class the client has.

    A kind of it says by `_shift` what is added to the logits.
    """

    kind: str

    def prepare(self, shard: Shard) -> tuple[Tensor, Columns]:
        """Return the number of samples (or steps) of each class, up to the largest label; and the mask column."""
        return _counts(shard), mask_of(shard)

    def value(self, outputs: Tensor, y: Tensor, shared: Tensor, columns: Columns) -> Tensor:
        """Return the mean over samples, or over the steps that count."""
        outputs, y = keep_counted(outputs, y, columns)
        return F.cross_entropy(self._adjusted(outputs, self._checked_shift(shared, outputs)), y)

    def each(self, outputs: Tensor, y: Tensor, shared: Tensor, eps: float = 0.0) -> Tensor:
        """Return the loss of every label, in the shape of `y`, smoothed over only the classes that the client has."""
        shift = self._checked_shift(shared, outputs)
        adjusted = self._adjusted(outputs, shift)
        if not eps:
            return label_losses(adjusted, y)
        logp, has = F.log_softmax(adjusted, -1), shift.isfinite()
        losses = F.nll_loss(logp.flatten(0, -2), y.flatten(), reduction="none").reshape(y.shape)
        others = -logp.masked_fill(~has, 0.0).sum(-1)  # as in torch, so that equal fractions give the same bits
        return (1 - eps) * losses + others * (eps / has.sum().double())

    def graded(self, outputs: Tensor, y: Tensor, shared: Tensor, eps: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the loss of every label of several clients, and its gradient by the outputs.

        Args:
            outputs: logits (clients, ..., classes).
            y: labels (clients, ...).
            shared: counts of the clients (clients, classes), up to the largest label of all.
            eps: label smoothing of each label over only the classes that its client has, in a shape that fits `y`.
        """
        shift = self._checked_shift(shared, outputs).view(len(shared), *(1,) * (y.dim() - 1), -1)
        adjusted = self._adjusted(outputs, shift)
        if eps is None:
            losses, gradient = CrossEntropy().graded(adjusted, y, None)
            return losses, self._through(gradient, shift)
        has, at = shift.isfinite(), y[..., None]
        logp = F.log_softmax(adjusted, -1)
        losses, others = -logp.gather(-1, at)[..., 0], logp.masked_fill(~has, 0.0).sum(-1) / has.sum(-1)
        gradient = logp.exp_().sub_(eps[..., None] * has / has.sum(-1, keepdim=True))
        off = (eps - 1)[..., None].expand(at.shape)
        gradient = self._through(gradient.scatter_add_(-1, at, off), shift)
        return (1 - eps) * losses - eps * others, gradient

    def stacked(self, shared: Sequence[Tensor]) -> Tensor:
        """Stack the counts of several clients (clients, classes), up to the largest label of all."""
        longest = max(len(counts) for counts in shared)
        return torch.stack([_padded(counts, longest) for counts in shared])

    def _checked_shift(self, counts: Tensor, outputs: Tensor) -> Tensor:
        classes = outputs.shape[-1]
        if counts.shape[-1] > classes:
            raise refused(f"loss: '{self.kind}': label", counts.shape[-1] - 1, f"0 to {classes - 1}, the model's")
        return self._shift(_padded(counts, classes)).to(outputs.dtype)

    def _shift(self, counts: Tensor) -> Tensor:
        """Return the addition to the logits (..., classes), given counts; minus infinity leaves a class out."""
        raise NotImplementedError

    def _adjusted(self, outputs: Tensor, shift: Tensor) -> Tensor:
        """Return the logits of the softmax."""
        return outputs + shift

    def _through(self, gradient: Tensor, shift: Tensor) -> Tensor:
        """Return the gradient by the outputs, given that by the logits of the softmax, which may be overwritten."""
        return gradient


SAFE_BLEND = 0.3
"""Blend in the safe form of a method (docs/never-worse.md)."""


@ingredient
class WSM(CountedSoftmax):
    """The re-weighted softmax (WSM): each class is weighted in the softmax by its fraction of the client's samples.

    Equation 15 of Legate's thesis (2022): `-(z_y - log sum_c a_c exp(z_c))`, with `a_c` the fraction of class c among
    the samples that the client trains on. As in the released code, `-log(a_y)` is added. The gradients are the same,
    the value is never negative, and it equals cross-entropy if a client has equally many samples of each class.

    With `blend = 0`, the thesis, a class that a client does not hold gets no gradient: training does not push it out of
    the model. With plain SGD a client of one class changes only running statistics. Weight decay, a proximal or control
    term and `blend` reach all classes. `safe = true` in a method stands for `blend = 0.3` (docs/never-worse.md).

    Evaluation and decisions between models use plain cross-entropy. q-FedAvg weights clients by this loss: with
    `blend = 0` clients of one class count next to nothing.

    When to use it: clients hold few of the classes, and few clients participate in a round. It adds no communication.
    The thesis found that at most rates it helps with BatchNorm, or BatchNorm and GroupNorm mixed, and hurts with
    GroupNorm alone.

    For sequences, fractions and loss are over the steps that count. Without `blend` a label that is not among the
    prepared samples has infinite loss.

    Args:
        blend: part b of equal fractions in `a_c = (1 - b) n_c / n + b / C`, with C classes. 0 is the thesis, 1 is
            cross-entropy.
        val: also count the client's validation samples, as in the released code. The thesis can be read either way.

    Raises:
        FedtideError: a label exceeds the model's outputs.

    >>> y = torch.tensor([0, 0, 0, 1])
    >>> shared, columns = WSM(blend=0.0).prepare(Shard(torch.zeros(4, 1), y, torch.arange(4)))
    >>> logits = torch.zeros(4, 3, requires_grad=True)
    >>> value = WSM(blend=0.0).value(logits, y, shared, columns)
    >>> round(value.item(), 4)  # -(3/4) log(3/4) - (1/4) log(1/4)
    0.5623
    >>> torch.autograd.grad(value, logits)[0].sum(0).tolist()
    [0.0, 0.0, 0.0]
    """

    blend: Fraction = 0.0
    val: Flag = False
    kind: Literal["wsm"] = "wsm"

    def prepare(self, shard: Shard) -> tuple[Tensor, Columns]:
        """Return the number of samples (or steps) of each class, up to the largest label; and the mask column."""
        counts, mask = super().prepare(shard)
        if self.val and shard.val is not None:
            more = _counts(shard.val)
            longest = max(len(counts), len(more))
            counts = _padded(counts, longest) + _padded(more, longest)
        return counts, mask

    def _shift(self, counts: Tensor) -> Tensor:
        """Return the logarithm of the fractions (..., classes), minus that of the largest.

        A constant for all logits changes nothing, and with this one the shift of equal fractions is exactly zero. For a
        class without samples it is minus infinity: its probability and its gradient are exactly zero.
        """
        fractions = (1 - self.blend) * counts + self.blend * counts.sum(-1, keepdim=True) / counts.shape[-1]
        return (fractions / fractions.amax(-1, keepdim=True)).log()


@ingredient
class FedLC(CountedSoftmax):
    """Calibrated logits (FedLC): the logit of each class is lowered by `tau * n_c^(-1/4)`, most for rare classes.

    Zhang, Li, Li, Xu, Wu, Ding, Wu: *Federated Learning with Label Distribution Skew via Logits Calibration*, ICML
    2022, section 4. `n_c` is the number of the client's samples of class c. A class that a client does not hold is left
    out of the softmax: it gets no gradient.

    When to use it: clients hold classes unevenly, and some hold few samples of a class. It adds no communication.

    Choices:
        - ours: the softmax sums over all classes that the client holds, as in public code. The sum that the paper
          prints leaves out the sample's own class, and has no least value.
        - ours: `tau` is 1; the paper tunes it.
        - paper: each client calibrates by its own counts. PFLlib calibrates by the counts of all clients.
        - ours: of sequences, steps that count are counted.

    Args:
        tau: strength of the calibration; with 0 absent classes are left out of the softmax, and nothing else.

    Raises:
        FedtideError: a label exceeds the model's outputs.

    >>> y = torch.tensor([0] * 16 + [1])
    >>> shared, columns = FedLC().prepare(Shard(torch.zeros(17, 1), y, torch.arange(17)))
    >>> value = FedLC().value(torch.zeros(1, 3), torch.tensor([1]), shared, columns)
    >>> round(value.item(), 4)  # logits -1/2 and -1, and none of the third: log(1 + exp(1/2))
    0.9741
    """

    tau: NonNegative = 1.0
    kind: Literal["fedlc"] = "fedlc"

    def _shift(self, counts: Tensor) -> Tensor:
        return (-self.tau * counts.pow(-0.25)).masked_fill(counts == 0, -torch.inf)


@ingredient
class Masked(CountedSoftmax):
    """Masked cross-entropy: logits of classes that a client does not hold are set to zero.

    Diao, Ding, Tarokh: *HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous
    Clients*, ICLR 2021, section 3. Such a class gets no gradient: training does not push it out of the model.

    When to use it: clients hold few of the classes. It adds no communication.

    Choices:
        - paper: a logit that is set to zero still counts in the sum of the softmax. FedLC with `tau = 0` leaves absent
          classes out of the sum.
        - ours: of sequences, steps that count say which classes a client holds.

    Raises:
        FedtideError: a label exceeds the model's outputs.

    >>> y = torch.tensor([0, 1])
    >>> shared, columns = Masked().prepare(Shard(torch.zeros(2, 1), y, torch.arange(2)))
    >>> logits = torch.tensor([[0.0, 0.0, 9.0]], requires_grad=True)
    >>> value = Masked().value(logits, torch.tensor([1]), shared, columns)
    >>> round(value.item(), 4)  # log(3)
    1.0986
    >>> torch.autograd.grad(value, logits)[0][0, 2].item()
    0.0
    """

    kind: Literal["masked"] = "masked"

    def _shift(self, counts: Tensor) -> Tensor:
        return torch.zeros_like(counts).masked_fill(counts == 0, -torch.inf)

    def _adjusted(self, outputs: Tensor, shift: Tensor) -> Tensor:
        return outputs.masked_fill(~shift.isfinite(), 0.0)

    def _through(self, gradient: Tensor, shift: Tensor) -> Tensor:
        return gradient.masked_fill_(~shift.isfinite(), 0.0)


def _counts(shard: Shard) -> Tensor:
    return torch.bincount(shard.labels).double()


def _padded(counts: Tensor, length: int) -> Tensor:
    return F.pad(counts, (0, length - counts.shape[-1]))


LEAST = 1e-12
"""Smallest share of a component, so that a vanished one can come back."""


def refuse_mean_loss(loss: Any, why: str) -> None:
    """Refuse a loss that has only a mean; `why` is the reason of a method that needs the loss of each label."""
    if known_part(loss, "each") is None:
        raise refused("loss", type(loss).__name__, f"CrossEntropy, WSM, or one with `each`, as {why}")


def mixture_notes(posteriors: Tensor, joints: Tensor) -> dict[str, Weighted]:
    """Build the part of an answer by which a mixture is watched: mean entropy and mean log-likelihood of its rows.

    A server of real clients refuses larger numbers than `LARGEST`, and a liar may send components that are far away.

    Args:
        posteriors: (rows, K).
        joints: (rows, ...) log-joints of components and row.
    """
    n = len(posteriors)
    return {
        "entropy": Weighted(torch.special.entr(posteriors).sum(1).mean(), n),
        "log_likelihood": Weighted(joints.flatten(1).logsumexp(1).mean().clamp(-LARGEST, LARGEST), n),
    }


@dataclass(frozen=True)
class Blended:
    """The mean over rows of sum_k q_k * loss_k, with q (rows, K) from the E-step.

    Args:
        q: posteriors.
        base: the loss of a component, one that is defined per label.
    """

    q: Tensor
    base: Any = CrossEntropy()

    def prepare(self, shard: Shard) -> tuple[Any, Columns]:
        """Prepare the base loss; columns are each row's posteriors and, for sequences, the mask."""
        return self.base.prepare(shard)[0], (self.q, *mask_of(shard))

    def value(self, outputs: tuple[Tensor, Tensor], y: Tensor, shared: Any, columns: Columns) -> Tensor:
        """Return the sum divided by the number of rows, not by the sum of posteriors."""
        q, *masks = columns
        losses = torch.stack([self.base.each(z, y, shared).flatten() for z in outputs[0]], 1)
        if not masks:
            return (q.to(losses.dtype) * losses).sum() / len(y)
        (mask,) = masks
        # Multiplying by the mask is not enough: a step that does not count may have an infinite loss.
        counted = losses.T.reshape(-1, *y.shape).double().masked_fill(~mask, 0.0).sum(-1)
        return (q.T.to(losses.dtype) * counted).sum() / mask.sum()

    @property
    def graded(self) -> Callable[[Tensor, Tensor, tuple[Any, Tensor]], tuple[Tensor, Tensor]] | None:
        """Return a function: losses (clients, rows), gradients by logits (clients, rows, K, classes); or None."""
        graded = known_part(self.base, "graded")

        def both(logits: Tensor, y: Tensor, shared: tuple[Any, Tensor]) -> tuple[Tensor, Tensor]:
            prepared, q = shared
            q = q.to(logits.dtype)
            losses, gradient = graded(logits, y[..., None].expand(q.shape), prepared)
            return (losses * q).sum(-1), gradient.mul_(q[..., None])

        return None if graded is None else both

    @property
    def alike(self) -> Hashable:
        """Losses of several clients are of one kind if this is equal; None: they are not."""
        return id(self.base) if is_stacked(self.base) else None

    def stacked(self, shared: Sequence[Any]) -> Any:
        """Stack the prepared values of the base losses of several clients."""
        return self.base.stacked(shared)

    def each(self, outputs: tuple[Tensor, Tensor], y: Tensor, shared: tuple[Any, Tensor]) -> Tensor:
        """Return the loss of every label, in the shape of `y`, of one of several clients."""
        prepared, q = shared
        losses = torch.stack([self.base.each(z, y, prepared) for z in outputs[0]], -1)
        return (q.to(losses.dtype).reshape(len(y), *[1] * (losses.dim() - 2), -1) * losses).sum(-1)
