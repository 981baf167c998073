"""Terms of the local loss.

There are two kinds, and a list of either is a sum.

- A *gradient term* is `(current parameters, received parameters) -> additions to the gradient`: a pull, a correction.
  Methods make them of what a client received and keeps, and pass them to local training (`term=`).
- A *loss term* is a value for each row, of the outputs for a batch. `prepare(task, received, shard)` makes references,
  which are columns, once for a client. `each` compares the outputs with them. `Summed` adds such terms to any loss.

Clients whose terms are alike are trained together (`alike`, `stacked`).
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fedtide.core.base import Shard, Weights
from fedtide.fields.types import NonNegative, Positive, ingredient
from fedtide.learn.losses import Columns, Loss, is_stacked, known_part
from fedtide.learn.task import Task, refuse_numbers

# -- gradient terms ----------------------------------------------------------------------------------------------------


Layout = Callable[[list[Tensor]], list[Tensor]]
"""Puts tensors of the shapes of the parameters into the layout in which several clients' are held."""

Term = Callable[[list[Tensor], list[Tensor]], list[Tensor]]
"""A gradient term: (current parameters, received parameters) -> tensors to add to the gradient, in the same order."""

Terms = Term | Sequence[Term] | None
"""One gradient term, several, or none."""


def terms_of(term: Any) -> tuple[Any, ...]:
    """Return gradient terms as a tuple, given one, several or None.

    >>> terms_of(None), terms_of(Proximal(1.0)), terms_of([Proximal(1.0)])
    ((), (Proximal(mu=1.0),), (Proximal(mu=1.0),))
    """
    if term is None:
        return ()
    return tuple(term) if isinstance(term, Sequence) else (term,)


def kind_of(part: Any) -> Hashable:
    """Return a key that is equal for losses, or gradient terms, of clients that can be trained together.

    >>> kind_of(Proximal(1.0)) == kind_of(Proximal(1.0, [torch.tensor([3.0])]))
    False
    """
    alike = getattr(part, "alike", None)
    return None if part is None else (type(part), id(part) if alike is None else alike)


@dataclass(frozen=True)
class Proximal:
    """The gradient of (mu/2) * ||v - a||^2, a pull towards parameters a.

    It is of FedProx (Li et al. 2020) and Ditto (Li et al. 2021). Only trainable parameters are affected, not running
    statistics. If several clients are trained at once, anchors are (clients, ...), and those that take the step come
    first.

    Args:
        mu: strength of the pull.
        anchor: a; None means the received parameters.

    >>> Proximal(0.5)([torch.tensor([3.0])], [torch.tensor([1.0])])
    [tensor([1.])]
    >>> Proximal(0.5, [torch.tensor([1.0])])([torch.tensor([3.0])], [torch.tensor([9.0])])
    [tensor([1.])]
    >>> Proximal(0.5, [torch.tensor([[1.0], [2.0]])])([torch.tensor([[3.0]])], [])
    [tensor([[1.]])]
    """

    mu: float
    anchor: list[Tensor] | None = field(default=None, repr=False)

    @property
    def alike(self) -> Hashable:
        """Terms of several clients are of one kind if this is equal."""
        return self.mu, self.anchor is None

    def __call__(self, now: list[Tensor], received: list[Tensor]) -> list[Tensor]:
        """Return mu * (v - a)."""
        pull = list(torch._foreach_sub(now, received if self.anchor is None else _of_step(self.anchor, now)))
        torch._foreach_mul_(pull, self.mu)
        return pull

    def stacked(self, terms: Sequence["Proximal"], layout: Layout) -> "Proximal":
        """Return the term of several clients that are trained at once, which are alike."""
        anchors = [layout(term.anchor) for term in terms if term.anchor is not None]
        return Proximal(self.mu, _side_by_side(anchors) or None)


@dataclass(frozen=True)
class Correction:
    """A constant correction at every step, such as the difference of two control variates (Karimireddy et al. 2020).

    >>> Correction([torch.tensor([-1.0])])([torch.tensor([3.0])], [torch.tensor([1.0])])
    [tensor([-1.])]
    """

    by: list[Tensor]
    alike: ClassVar[bool] = True

    def __call__(self, now: list[Tensor], received: list[Tensor]) -> list[Tensor]:
        """Return the correction, which does not depend on the parameters."""
        return _of_step(self.by, now)

    def stacked(self, terms: Sequence["Correction"], layout: Layout) -> "Correction":
        """Return the term of several clients that are trained at once."""
        return Correction(_side_by_side([layout(term.by) for term in terms]))


@dataclass(frozen=True)
class Curvature:
    """The gradient F v + b of a quadratic with a diagonal F (Shoham et al. 2019, FedCurv).

    Args:
        fisher: F.
        offset: b.

    >>> Curvature([torch.tensor([2.0])], [torch.tensor([-4.0])])([torch.tensor([3.0])], [])
    [tensor([2.])]
    """

    fisher: list[Tensor] = field(repr=False)
    offset: list[Tensor] = field(repr=False)
    alike: ClassVar[bool] = True

    def __call__(self, now: list[Tensor], received: list[Tensor]) -> list[Tensor]:
        """Return F v + b."""
        return list(torch._foreach_addcmul(_of_step(self.offset, now), _of_step(self.fisher, now), now))

    def stacked(self, terms: Sequence["Curvature"], layout: Layout) -> "Curvature":
        """Return the term of several clients that are trained at once."""
        fisher = _side_by_side([layout(term.fisher) for term in terms])
        return Curvature(fisher, _side_by_side([layout(term.offset) for term in terms]))


def _of_step(leaves: list[Tensor], now: list[Tensor]) -> list[Tensor]:
    """Return tensors of a client; or, stacked (clients, ...), of the clients that take the step, which come first."""
    pairs = zip(leaves, now, strict=True)
    return [(leaf[: len(value)] if leaf.dim() else leaf).to(value.device) for leaf, value in pairs]


def _side_by_side(parts: Sequence[list[Tensor]]) -> list[Tensor]:
    return [torch.stack(leaves) for leaves in zip(*parts, strict=True)]


# -- loss terms --------------------------------------------------------------------------------------------------------


class LossTerm(Protocol):
    """A term that is added to the loss of each row.

    Args:
        columns: number of columns of `prepare`.
        passes: number of passes without gradients over a client's samples before training.
        reads_features: whether it depends on features.
    """

    columns: ClassVar[int]
    passes: ClassVar[int]
    reads_features: ClassVar[bool]

    @property
    def alike(self) -> Hashable:
        """Terms of several clients are of one kind if this is equal."""

    def prepare(self, task: Task, received: Weights, shard: Shard) -> Columns:
        """Return the references for the outputs: columns with an entry for each sample."""

    def each(self, logits: Tensor, features: Tensor | None, y: Tensor, columns: Columns) -> Tensor:
        """Return the value of every label, in the shape of `y`; or of every row, without the dimensions after it."""

    def graded(self, logits: Tensor, features: Any, y: Tensor, columns: Columns) -> tuple[Tensor, Tensor]:
        """Return the value of every label of rows (..., rows), and its gradient by features if it reads them, else by
        logits."""


def _parted(outputs: Any) -> tuple[Any, Tensor | None]:
    """Return logits and features: outputs of a network with one branch (`fedtide.learn.task.with_branches`), or any."""
    return (outputs[0][0], outputs[1]) if isinstance(outputs, tuple) else (outputs, None)


@ingredient
class Distill:
    """Not-true distillation: the ranking of all classes but the true one stays that of the received model.

    Lee, Jeong, Shin, Bae, Yun: *Preservation of the Global Knowledge by Not-True Distillation in Federated Learning*,
    NeurIPS 2022, equation 3. `beta * KL(q_received || q_now)`, with q the softmax of the logits divided by `tau`, over
    all classes but the row's own.

    Args:
        beta: weight in the loss; with 0 the loss is unchanged.
        tau: temperature.

    >>> z, received = torch.zeros(1, 3), torch.tensor([[5.0, 1.0986123, 0.0]])
    >>> round(Distill().each(z, None, torch.tensor([0]), (received,)).item(), 4)  # (3/4) log(3/2) + (1/4) log(1/2)
    0.1308
    """

    beta: NonNegative = 1.0
    tau: Positive = 1.0
    kind: Literal["distill"] = "distill"
    columns: ClassVar[int] = 1
    passes: ClassVar[int] = 1
    reads_features: ClassVar[bool] = False

    @property
    def alike(self) -> Hashable:
        """Terms of several clients are of one kind if this is equal."""
        return self.beta, self.tau

    def check(self, task: Task, key: str) -> None:
        """Raise for a task whose outputs are no classes."""
        refuse_numbers(task, f"{key}.terms", self.kind, "it distills classes", "none")

    def prepare(self, task: Task, received: Weights, shard: Shard) -> Columns:
        """Return the logits of the received model, without augmentation and in evaluation mode."""
        return (torch.cat([_parted(outputs)[0] for outputs in task.outputs(received, shard.x)]),)

    def each(self, logits: Tensor, features: Tensor | None, y: Tensor, columns: Columns) -> Tensor:
        """Return the divergence of every label, in the shape of `y`."""
        now, before = (self._others(z, y) for z in (logits, columns[0]))
        return self.beta * (before.exp() * (before - now)).sum(-1)

    def graded(self, logits: Tensor, features: Any, y: Tensor, columns: Columns) -> tuple[Tensor, Tensor]:
        """Return the divergence of every label, and its gradient by the logits."""
        now, before = (self._others(z, y) for z in (logits, columns[0]))
        old = before.exp()
        losses = self.beta * (old * (before - now)).sum(-1)
        return losses, now.exp_().sub_(old).mul_(self.beta / self.tau)

    def _others(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return log-probabilities (..., classes) of all classes but the true one, whose own is next to minus infinity.

        It is finite, so that its product with the probability zero is zero.
        """
        true = torch.arange(logits.shape[-1], device=logits.device) == y[..., None]
        least = torch.finfo(logits.dtype).min / 4
        return F.log_softmax((logits / self.tau).masked_fill(true, least), -1)


def divide_by_length(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Return vectors (..., d) divided by their lengths (..., 1), and these, of at least 1e-8 as in torch's cosines."""
    length = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True).clamp(min=1e-8)
    return vectors / length, length


def require_features(features: Tensor | None) -> Tensor:
    """Return features, of a network that has them."""
    if features is None:
        raise TypeError("the task has no features: it needs a network with one branch (`with_branches`)")
    return features


@dataclass(frozen=True)
class Summed:
    """A loss and terms that are added to it.

    Args:
        base: the loss of the outputs, or of the logits of a network with one branch.
        terms: loss terms.
        task: the model, for the references of the terms.
        received: the weights that the client received.
    """

    base: Any
    terms: tuple[LossTerm, ...]
    task: Task = field(repr=False)
    received: Weights = field(repr=False)

    @classmethod
    def of(cls, base: Loss, terms: Sequence[LossTerm], task: Task, received: Weights) -> Loss:
        """Return the sum of a loss, which may be a sum itself, and terms; the loss itself without terms."""
        if not terms:
            return base
        if isinstance(base, Summed):
            return replace(base, terms=(*base.terms, *terms))
        return cls(base, tuple(terms), task, received)

    @property
    def alike(self) -> Hashable:
        """Losses of several clients are of one kind if this is equal."""
        return kind_of(self.base), tuple(map(kind_of, self.terms))

    def prepare(self, shard: Shard) -> tuple[Any, Columns]:
        """Prepare the base loss and the terms, whose columns come first."""
        shared, columns = self.base.prepare(shard)
        references = [column for term in self.terms for column in term.prepare(self.task, self.received, shard)]
        return shared, (*references, *columns)

    def value(self, outputs: Any, y: Tensor, shared: Any, columns: Columns) -> Tensor:
        """Return the mean over samples, or over the steps that count."""
        logits, features = _parted(outputs)
        parts, rest = self._split(columns)
        total: Tensor = self.base.value(logits, y, shared, rest)
        mask = next((column for column in rest if column.dtype == torch.bool), None)
        for term, references in zip(self.terms, parts, strict=True):
            values = term.each(logits, features, y, references)
            if mask is None:
                total = total + values.mean()
            else:  # multiplying by the mask is not enough: a step that does not count may have an infinite value
                counted = _wide(values, mask).expand(mask.shape).masked_fill(~mask, 0.0)
                total = total + counted.sum() / mask.sum()
        return total

    @property
    def each(self) -> Callable[..., Tensor] | None:
        """Return the function of a `StackedLoss`; None if the base loss has none."""

        def values(outputs: Any, y: Tensor, shared: Any, eps: float = 0.0) -> Tensor:
            logits, features = _parted(outputs)
            prepared, parts = self._context(shared)
            losses: Tensor = self.base.each(logits, y, prepared, eps)
            for term, references in zip(self.terms, parts, strict=True):
                losses = losses + _wide(term.each(logits, features, y, references), losses)
            return losses

        return values if is_stacked(self.base) else None

    @property
    def graded(self) -> Callable[[Tensor, Tensor, Any], tuple[Tensor, Tensor]] | None:
        """Return the function of losses and gradients by logits; None without that of the base, or with features."""
        by_all = None if any(term.reads_features for term in self.terms) else self.graded_by_features
        return None if by_all is None else lambda logits, y, shared: by_all(logits, None, y, shared)[:2]

    @property
    def graded_by_features(self) -> Callable[[Tensor, Any, Tensor, Any], tuple[Tensor, Tensor, Tensor | None]] | None:
        """Return the function of losses, and gradients by logits and by features; None without that of the base.

        It takes logits (clients, rows, classes) and features (clients, rows, d); the gradient by features is None if
        no term reads them.
        """
        base = known_part(self.base, "graded")

        def by_all(logits: Tensor, features: Any, y: Tensor, shared: Any) -> tuple[Tensor, Tensor, Tensor | None]:
            prepared, parts = self._context(shared)
            losses, by_logits = base(logits, y, prepared)
            by_features = None
            for term, references in zip(self.terms, parts, strict=True):
                more, slope = term.graded(logits, features, y, references)
                losses = losses + more
                if not term.reads_features:
                    by_logits.add_(slope)
                else:
                    by_features = slope if by_features is None else by_features.add_(slope)
            return losses, by_logits, by_features

        return None if base is None else by_all

    def stacked(self, shared: Sequence[Any]) -> Any:
        """Stack the prepared values of the base losses of several clients."""
        return self.base.stacked(shared)

    def _split(self, columns: Columns) -> tuple[list[Columns], Columns]:
        """Return the columns of each term, and those of the base loss."""
        parts, rest = [], columns
        for term in self.terms:
            parts.append(rest[: term.columns])
            rest = rest[term.columns :]
        return parts, rest

    def _context(self, shared: tuple[Any, ...]) -> tuple[Any, list[Columns]]:
        """Return the context for `each` of the base loss, and the columns of each term."""
        prepared, *columns = shared
        parts, rest = self._split(tuple(columns))
        return ((prepared, *rest) if rest else prepared), parts


def _wide(values: Tensor, like: Tensor) -> Tensor:
    """Return values of rows with the dimensions of values of labels."""
    return values.reshape(*values.shape, *(1,) * (like.dim() - values.dim()))
