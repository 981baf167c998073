"""Targets: classes, numbers, quantiles of numbers, counts, or several labels at once.

A target turns a model's outputs into answers in the units of the data, in the shape of the outputs (`read_outputs`).
Losses, mixtures and sums of an evaluation take these answers. Settings that become targets once rows are known are in
`fedtide.data.targets`.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fedtide.core.base import Shard
from fedtide.fields.types import ingredient
from fedtide.learn.losses import Columns, CrossEntropy

LOG_SPREAD = 7.0
"""Largest logarithm of a predicted standard deviation, in standard deviations of the data."""
DEVIATION = "standard deviation"
"""What a column of predictions is called that is no value but how far these may be off."""


class Target(Protocol):
    """A kind of label: turns outputs of a model into answers, and compares answers with labels."""

    kind: str
    """Name in a configuration."""

    @property
    def width(self) -> int:
        """Number of outputs of a model for each row; 0 if it is the number of classes."""
        return 0

    @property
    def bins(self) -> int:
        """Number of classes of `Shard.labels`; 0 if it is the number of outputs."""
        return 0

    @property
    def likelihood(self) -> bool:
        """Tell whether losses are negative log-likelihoods, which mixtures need."""
        return True

    @property
    def loss(self) -> Any:
        """The loss that training minimizes by default (`fedtide.learn.losses.Loss`)."""
        return OfTarget(self)

    @abstractmethod
    def read_outputs(self, outputs: Tensor) -> Tensor:
        """Turn outputs (..., width) into answers of the same shape."""

    def each(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the training loss of each row (rows,) from outputs (rows, width)."""
        return self.losses(self.read_outputs(outputs), y)

    @abstractmethod
    def losses(self, answers: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the plain loss of each row (rows,), which decisions and posteriors read."""

    @abstractmethod
    def mix(self, answers: Tensor, log_shares: Tensor | None = None, dim: int = 0) -> Tensor:
        """Mix answers of models along a dimension, by logarithms of shares that broadcast to it; None mixes equally."""

    def predict_labels(self, answers: Tensor) -> Tensor:
        """Return the value that is compared with labels: the class, or the answer itself."""
        return answers

    @abstractmethod
    def score_rows(self, answers: Tensor, y: Tensor) -> Tensor:
        """Return the score of each row (rows,): 1 or 0; for numbers minus the error (see `Scores.credited`)."""

    def sums(self, answers: Tensor, y: Tensor) -> Mapping[str, Tensor]:
        """Return further values that are summed over rows, by name: (rows,) or (rows, k)."""
        return {}

    def score_constant(self, y: Tensor, rows: Tensor) -> Tensor:
        """Return the score of each of the rows `y` if always the same is said: what is best of the rows `rows`."""
        return torch.zeros(len(y))

    def columns(self, answers: Tensor) -> dict[str, Tensor]:
        """Return answers (rows, width) as named columns (rows,) for people."""
        return {}


@dataclass(frozen=True)
class OfTarget:
    """The loss of a target: the mean over rows of `Target.each`."""

    target: Any

    def prepare(self, shard: Shard) -> tuple[None, Columns]:
        """Return nothing, as outputs and values suffice."""
        return None, ()

    def value(self, outputs: Tensor, y: Tensor, shared: None, columns: Columns) -> Tensor:
        """Return the mean over rows."""
        return self.each(outputs, y, shared).mean()

    def each(self, outputs: Tensor, y: Tensor, shared: None, eps: float = 0.0) -> Tensor:
        """Return the loss of every row; a number that is smoothed would be another number."""
        return self.target.each(outputs, y)

    def stacked(self, shared: Sequence[None]) -> None:
        """Return None, as nothing is prepared."""


# -- classes -----------------------------------------------------------------------------------------------------------


@ingredient
class Classes(Target):
    """One class of several for each row, or for each step of a sequence; the model gives logits.

    >>> CLASSES.read_outputs(torch.zeros(1, 2)).exp()
    tensor([[0.5000, 0.5000]])
    """

    kind: Literal["classes"] = "classes"

    @property
    def loss(self) -> CrossEntropy:
        """Cross-entropy."""
        return CrossEntropy()

    def read_outputs(self, outputs: Tensor) -> Tensor:
        """Return log-probabilities."""
        return F.log_softmax(outputs, -1)

    def losses(self, answers: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the cross-entropy of each label, in the shape of `y`; with `mask` its mean over a sequence's steps."""
        losses = -answers.gather(-1, y.unsqueeze(-1)).squeeze(-1)
        if mask is None:
            return losses
        # Multiplying by the mask is not enough: a step that does not count may have an infinite loss.
        return losses.masked_fill(~mask, 0.0).sum(-1) / mask.sum(-1).clamp(min=1)

    def mix(self, answers: Tensor, log_shares: Tensor | None = None, dim: int = 0) -> Tensor:
        """Return the logarithm of mixed probabilities."""
        if log_shares is None:
            count = torch.tensor(float(answers.shape[dim]), dtype=answers.dtype)
            return torch.logsumexp(answers, dim) - torch.log(count)
        return torch.logsumexp(answers + log_shares, dim)

    def predict_labels(self, answers: Tensor) -> Tensor:
        """Return the likeliest class; -1 if a model says NaN, which is no class."""
        likeliest = answers.argmax(-1)  # NaN is the largest
        return likeliest.masked_fill(answers.gather(-1, likeliest[..., None])[..., 0].isnan(), -1)

    def score_rows(self, answers: Tensor, y: Tensor) -> Tensor:
        """Return 1 if the class is that of the row, else 0."""
        return (answers == y).double()

    def score_constant(self, y: Tensor, rows: Tensor) -> Tensor:
        """Return 1 for rows of the commonest class, else 0."""
        return (y == torch.bincount(rows).argmax()).double()


CLASSES = Classes()


# -- numbers, quantiles, counts ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured(Target):
    """A target of numbers: one value for each row, whose mean and standard deviation over known rows are known.

    The headline is the skill, 1 - error / error of a constant on the same rows: 0 is no better than the constant, 1 is
    perfect. The constant is the best one over all rows except the source's own test set, at any time: it is no easy
    rival if values drift.

    Args:
        center: mean of the known values.
        scale: their standard deviation.
        constant: answer of the rival without features: one number, or one for each quantile.
        edges: ascending borders between the bins.
    """

    center: float
    scale: float
    constant: tuple[float, ...]
    edges: tuple[float, ...] = ()

    @property
    def bins(self) -> int:
        """Number of bins."""
        return len(self.edges) + 1

    @property
    def width(self) -> int:
        """Number of outputs of the model for each row."""
        return 1

    def columns(self, answers: Tensor) -> dict[str, Tensor]:
        """Return the predicted number."""
        return {"value": self.point_answer(answers)}

    def standardize(self, values: Tensor) -> Tensor:
        """Return values less their mean, in standard deviations."""
        return (values - self.center) / self.scale

    def mix(self, answers: Tensor, log_shares: Tensor | None = None, dim: int = 0) -> Tensor:
        """Return the mean of what models say, weighted by their shares."""
        return answers.mean(dim) if log_shares is None else (answers * log_shares.exp()).sum(dim)

    @abstractmethod
    def errors(self, answers: Tensor, y: Tensor) -> Tensor:
        """Return the error (rows,) by which the skill is measured."""

    def point_answer(self, answers: Tensor) -> Tensor:
        """Return the single predicted number of each row (rows,)."""
        return answers[..., 0]

    def score_rows(self, answers: Tensor, y: Tensor) -> Tensor:
        """Return minus the error."""
        return -self.errors(answers.double(), y.double())

    def sums(self, answers: Tensor, y: Tensor) -> Mapping[str, Tensor]:
        """Return errors of the constant, and plain errors of the answers."""
        answers, y = answers.double(), y.double()
        off = self.point_answer(answers) - y
        return {
            "error": self.errors(answers, y), "reference": self.errors(self._rival(len(y)), y), "absolute": off.abs(),
            "square": off.square(),
        }  # fmt: skip

    def _rival(self, rows: int) -> Tensor:
        return self.as_answers(torch.tensor(self.constant, dtype=torch.float64)).expand(rows, -1)

    def as_answers(self, numbers: Tensor) -> Tensor:
        """Return the answers of a model that predicts these numbers (..., numbers)."""
        return numbers

    def skill_of(self, numbers: Tensor, y: Tensor) -> float:
        """Return the skill of any predictions (rows,), such as yesterday's values, or (rows, quantiles)."""
        answers = self.as_answers(numbers.double()).reshape(len(y), -1).expand(-1, len(self.constant))
        return 1 - float(self.errors(answers, y.double()).sum() / self.errors(self._rival(len(y)), y.double()).sum())


@dataclass(frozen=True)
class NumberTarget(Measured):
    """A number; `form` is the loss in standard deviations of the data (`Number`)."""

    form: str = "squared"
    kind: Literal["number"] = "number"

    @property
    def likelihood(self) -> bool:
        """True if the model also predicts a spread."""
        return self.form == "gaussian"

    @property
    def width(self) -> int:
        """One, or mean and logarithm of the standard deviation."""
        return 1 + (self.form == "gaussian")

    def read_outputs(self, outputs: Tensor) -> Tensor:
        """Return means and, if predicted, logarithms of standard deviations, in the units of the data."""
        means = self.center + self.scale * outputs[..., :1]
        if self.form != "gaussian":
            return means
        return torch.cat([means, outputs[..., 1:].clamp(-LOG_SPREAD, LOG_SPREAD) + math.log(self.scale)], -1)

    def losses(self, answers: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return squared or Huber errors, or negative log-likelihoods, of standardized values."""
        off = self.standardize(answers[..., 0]) - self.standardize(y)
        if self.form == "squared":
            return off.square()
        if self.form == "huber":
            return F.huber_loss(off, torch.zeros_like(off), reduction="none")
        log_spread = answers[..., 1] - math.log(self.scale)
        return 0.5 * (off / log_spread.exp()).square() + log_spread + 0.5 * math.log(2 * math.pi)

    def mix(self, answers: Tensor, log_shares: Tensor | None = None, dim: int = 0) -> Tensor:
        """Return the mean, and the standard deviation of the mixture if models predict theirs."""
        if self.form != "gaussian":
            return super().mix(answers, log_shares, dim)
        mean, variance = answers[..., :1], (2 * answers[..., 1:]).exp()
        middle = super().mix(mean, log_shares, dim)
        spread = super().mix(variance + (mean - middle.unsqueeze(dim)).square(), log_shares, dim)
        return torch.cat([middle, spread.log() / 2], -1)

    def columns(self, answers: Tensor) -> dict[str, Tensor]:
        """Return the number and, if predicted, its standard deviation."""
        return super().columns(answers) | ({DEVIATION: answers[..., 1].exp()} if self.likelihood else {})

    def errors(self, answers: Tensor, y: Tensor) -> Tensor:
        """Return squared errors, or Huber's in units of the data."""
        off = answers[..., 0] - y
        if self.form == "huber":
            return F.huber_loss(off, torch.zeros_like(off), reduction="none", delta=self.scale)
        return off.square()


@dataclass(frozen=True)
class QuantileTarget(Measured):
    """Some quantiles of a number."""

    at: tuple[float, ...] = (0.5,)
    kind: Literal["quantiles"] = "quantiles"

    @property
    def width(self) -> int:
        """One output for each quantile."""
        return len(self.at)

    @property
    def likelihood(self) -> bool:
        """Pinball losses are none."""
        return False

    def read_outputs(self, outputs: Tensor) -> Tensor:
        """Return quantiles in the units of the data, ascending: those that cross are sorted, which makes no error worse
        (Chernozhukov, Fernández-Val, Galichon, Econometrica 78, 2010).
        """
        return (self.center + self.scale * outputs).sort(-1).values

    def each(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the pinball loss of each row, the mean over quantiles."""
        return self._pinball(outputs, self.standardize(y))

    def losses(self, answers: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the pinball loss of standardized values."""
        return self._pinball(self.standardize(answers), self.standardize(y))

    def errors(self, answers: Tensor, y: Tensor) -> Tensor:
        """Return the pinball loss in the units of the data."""
        return self._pinball(answers, y)

    def _pinball(self, answers: Tensor, y: Tensor) -> Tensor:
        off = y.unsqueeze(-1) - answers
        at = torch.tensor(self.at, dtype=answers.dtype).to(answers.device, non_blocking=True)  # a GPU is not waited for
        return torch.maximum(at * off, (at - 1) * off).mean(-1)

    def columns(self, answers: Tensor) -> dict[str, Tensor]:
        """Return the quantiles."""
        return {f"quantile {at:g}": answers[..., k] for k, at in enumerate(self.at)}

    def point_answer(self, answers: Tensor) -> Tensor:
        """Return the quantile next to the median."""
        return answers[..., min(range(len(self.at)), key=lambda k: abs(self.at[k] - 0.5))]

    def sums(self, answers: Tensor, y: Tensor) -> Mapping[str, Tensor]:
        """Return errors, and how many rows lie below each quantile (rows, quantiles)."""
        return {**super().sums(answers, y), "below": (y.unsqueeze(-1) <= answers).double()}


@dataclass(frozen=True)
class CountTarget(Measured):
    """A count: the model predicts the logarithm of its mean."""

    kind: Literal["counts"] = "counts"

    def read_outputs(self, outputs: Tensor) -> Tensor:
        """Return logarithms of means; outputs of 0 say the mean of the known counts."""
        return outputs + math.log(self.center)

    def losses(self, answers: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the negative log-likelihood of a Poisson distribution."""
        return answers[..., 0].exp() - y * answers[..., 0] + torch.lgamma(y + 1)

    def mix(self, answers: Tensor, log_shares: Tensor | None = None, dim: int = 0) -> Tensor:
        """Return the logarithm of mixed means."""
        return CLASSES.mix(answers, log_shares, dim)

    def point_answer(self, answers: Tensor) -> Tensor:
        """Return means."""
        return answers[..., 0].exp()

    def as_answers(self, numbers: Tensor) -> Tensor:
        """Return logarithms; of 0, which would exclude all other counts, that of 1/2."""
        return torch.where(numbers > 0, numbers, 0.5).log()

    def errors(self, answers: Tensor, y: Tensor) -> Tensor:
        """Return the deviance of a Poisson distribution, `2 (y log(y / mu) - y + mu)`."""
        return 2 * (torch.xlogy(y, y) - y * answers[..., 0] - y + answers[..., 0].exp())


# -- several labels ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LabelsTarget(Target):
    """Some of several labels for each row: the model gives a logit for each.

    Args:
        labels: how many there are.
    """

    labels: int
    kind: Literal["labels"] = "labels"

    @property
    def bins(self) -> int:
        """A class for each label that is the first of a row, and one for rows without any."""
        return self.labels + 1

    @property
    def width(self) -> int:
        """One output for each label."""
        return self.labels

    def read_outputs(self, outputs: Tensor) -> Tensor:
        """Return logits, as they are."""
        return outputs

    def each(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the cross-entropy of each row, the mean over labels."""
        return self.losses(outputs, y) / self.labels

    def losses(self, answers: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the negative log-likelihood of each row, a sum over labels."""
        return F.binary_cross_entropy_with_logits(answers, y.to(answers.dtype), reduction="none").sum(-1)

    def mix(self, answers: Tensor, log_shares: Tensor | None = None, dim: int = 0) -> Tensor:
        """Return the logits of mixed probabilities."""
        present, absent = (CLASSES.mix(F.logsigmoid(sign * answers), log_shares, dim) for sign in (1, -1))
        return present - absent

    def columns(self, answers: Tensor) -> dict[str, Tensor]:
        """Return the probability of each label."""
        return {f"p {k}": answers[..., k].sigmoid() for k in range(self.labels)}

    def predict_labels(self, answers: Tensor) -> Tensor:
        """Return which labels are likelier than not: 1 or 0, and -1 if a model says NaN of any label."""
        return (answers > 0).long().masked_fill(answers.isnan().any(-1, keepdim=True), -1)

    def score_rows(self, answers: Tensor, y: Tensor) -> Tensor:
        """Return the share of correctly predicted labels."""
        return (answers == (y > 0.5).long()).double().mean(-1)

    def sums(self, answers: Tensor, y: Tensor) -> Mapping[str, Tensor]:
        """Return for each label true and false positives, and false negatives (rows, labels)."""
        present, nan = y > 0.5, answers.isnan().any(-1, keepdim=True)
        predicted = torch.where(nan, ~present, answers > 0)  # NaN is wrong about each label
        parts = {"hits": predicted & present, "false_alarms": predicted & ~present, "misses": ~predicted & present}
        exact = {"exact": (predicted == present).all(-1).double()}
        return {name: part.double() for name, part in parts.items()} | exact

    def score_constant(self, y: Tensor, rows: Tensor) -> Tensor:
        """Return the share of correct labels of each row if each label always has its commonest value."""
        usual = (rows > 0.5).double().mean(0) > 0.5
        return ((y > 0.5) == usual).double().mean(1)
