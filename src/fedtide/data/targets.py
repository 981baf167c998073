"""Settings of `data.target`, which become a target of `fedtide.learn.target` once rows are known.

A model of numbers trains on standardized numbers, and readers of labels get bins. Both come from the known rows of a
source (`fedtide.data.rows.find_known_rows`). Bins may deal rows. Once rows are dealt, rows without a time are
standardized by the training rows (`recenter`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from fedtide.core.errors import FedtideError, refused
from fedtide.fields.types import InnerFraction, ingredient
from fedtide.learn.target import Classes, CountTarget, LabelsTarget, Measured, NumberTarget, QuantileTarget

Place = Callable[[int], str]
"""Says which row it is, for messages."""

BINS = 10
"""Bins of a number, for what reads labels: partitions, label shares, drift."""


@dataclass(frozen=True)
class TargetWords:
    """Words for a kind of target, and its metrics.

    Args:
        rows: what rows are labeled with.
        score: name of the headline number.
        scores: several headline numbers.
        constant: what the best constant answer does.
        scale: what scores are made of.
        explained: explains the headline number in a caption.
        metrics: names of further metrics in the record (`fedtide.evaluate.metrics.OF_TARGETS`).
    """

    rows: str
    score: str = "accuracy"
    scores: str = "accuracies"
    constant: str = "answering the commonest class"
    scale: str = "the share of rows with the right class"
    explained: str = ""
    metrics: tuple[str, ...] = ()

    @property
    def a_score(self) -> str:
        """One headline number, with its article."""
        return f"{'an' if self.score[0] in 'aeiou' else 'a'} {self.score}"


_NUMBERS = TargetWords(
    "numbers", "skill", "skills", "answering the mean", "squared errors of the labels as they are, without a logarithm",
    " Skill is 1 - error / error of the best constant answer on the same rows: 100 % is without any error, 0 % is no "
    "better than that.",
    ("mae", "rmse"),
)  # fmt: skip

TARGET_WORDS = {
    "classes": TargetWords("classes"),
    "number": _NUMBERS,
    "quantiles": replace(
        _NUMBERS, rows="numbers, of which quantiles", constant="answering the same quantiles",
        scale="pinball losses of the labels as they are", metrics=("pinball", "coverage", "mae"),
    ),
    "counts": replace(_NUMBERS, rows="counts", scale="the Poisson deviance", metrics=("deviance", "mae", "rmse")),
    "labels": TargetWords(
        "labels at once",
        constant="answering each label as it is most often",
        scale="the share of right labels",
        metrics=("micro-f1", "macro-f1", "exact"),
    ),
}  # fmt: skip
"""Words for each kind of target."""


@ingredient
class Number:
    """A number. The model trains on standardized values and predicts in the units of the data.

    Args:
        loss: "squared", "huber" or "gaussian". "huber" is squared up to one standard deviation of the data and grows
            linearly beyond. "gaussian" is the negative log-likelihood of a normal distribution; the model predicts the
            standard deviation, too. Mixtures need that likelihood.
    """

    loss: Literal["squared", "huber", "gaussian"] = "squared"
    kind: Literal["number"] = "number"

    def fitted(self, values: Tensor, positions: Tensor, seen: Tensor, place: Place) -> tuple[NumberTarget, Tensor]:
        """Return the target of numbers, and their bins."""
        rival = values[seen].double()
        constant = float(rival.quantile(0.5) if self.loss == "huber" else rival.mean())
        edges = edges_of(values[positions])
        target = NumberTarget(*_mean_and_spread(values, positions), (constant,), edges, self.loss)
        return target, assign_bins(values, edges)


@ingredient
class Quantiles:
    """Quantiles of a number, by the pinball loss, the mean over all of them.

    Args:
        at: ascending, between 0 and 1.
    """

    at: tuple[InnerFraction, ...] = (0.1, 0.5, 0.9)
    kind: Literal["quantiles"] = "quantiles"

    def __post_init__(self) -> None:
        if not self.at or any(after <= before for before, after in pairwise(self.at)):
            raise ValueError(f"found at {list(self.at)}, allowed: rising numbers between 0 and 1")

    def fitted(self, values: Tensor, positions: Tensor, seen: Tensor, place: Place) -> tuple[QuantileTarget, Tensor]:
        """Return the target of numbers, and their bins."""
        constant = values[seen].double().quantile(torch.tensor(self.at, dtype=torch.float64))
        edges = edges_of(values[positions])
        target = QuantileTarget(*_mean_and_spread(values, positions), tuple(constant.tolist()), edges, self.at)
        return target, assign_bins(values, edges)


@ingredient
class Counts:
    """A count, by the likelihood of a Poisson distribution; its skill is the explained share of the deviance."""

    kind: Literal["counts"] = "counts"

    def fitted(self, values: Tensor, positions: Tensor, seen: Tensor, place: Place) -> tuple[CountTarget, Tensor]:
        """Return the target of counts, and their bins."""
        wrong = (values < 0) | (values != values.floor())
        if wrong.any():
            row = int(wrong.nonzero()[0])
            raise refused(f"{place(row)}: label", float(values[row]), "a whole number from 0, because it is a count")
        center, scale = _mean_and_spread(values, positions)
        _check_counted(center)
        edges = edges_of(values[positions])
        return CountTarget(center, scale, (float(values[seen].double().mean()),), edges), assign_bins(values, edges)


@ingredient
class Labels:
    """Several labels at once: each of them is there or not."""

    kind: Literal["labels"] = "labels"

    def fitted(self, values: Tensor, positions: Tensor, seen: Tensor, place: Place) -> tuple[LabelsTarget, Tensor]:
        """Return the target of labels, and the first one of each row; their number if it has none.

        >>> values, rows = torch.tensor([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0]]), torch.arange(3)
        >>> Labels().fitted(values, rows, rows, "row {}".format)[1].tolist()
        [1, 0, 2]
        """
        wrong = (values != 0) & (values != 1)
        if wrong.any():
            row, label = wrong.nonzero()[0].tolist()
            raise refused(f"{place(row)}: label {label}", float(values[row, label]), "0 or 1")
        count = values.shape[1]
        first = torch.where(values > 0, torch.arange(count), count).min(1).values
        return LabelsTarget(count), first


Setting = Classes | Number | Quantiles | Counts | Labels
"""What `data.target` says.

`fitted(values, positions, seen, place)` of a setting returns the target, and a bin for each row (rows,), which readers
of labels get. `values` (rows,) or (rows, labels) are what rows are labeled with. `positions` are those of the rows that
standardize values and set borders (`find_known_rows`). `seen` are positions of all rows that are not for testing: the
rival without features says what is best of them. `place` says which row it is, for messages.

>>> values, rows = torch.tensor([1.0, 3.0, 5.0, 7.0]), torch.arange(4)
>>> target, bins = Number().fitted(values, rows[:2], rows, "row {}".format)
>>> target.center, target.scale, target.constant, bins.tolist()
(2.0, 1.0, (4.0,), [0, 9, 9, 9])
"""


def target_words(setting: Setting, usual: str = "") -> TargetWords:
    """Return the words for a setting; `usual` is the name of the commonest class, "" if it is not known.

    >>> target_words(Number(loss="huber")).constant, target_words(Classes(), "no").constant
    ('answering the median', "answering 'no'")
    """
    words = TARGET_WORDS[setting.kind]
    if isinstance(setting, Number) and setting.loss == "huber":
        return replace(words, constant="answering the median", scale=words.scale.replace("squared", "Huber's"))
    return replace(words, constant=f"answering '{usual}'") if usual and isinstance(setting, Classes) else words


def _mean_and_spread(values: Tensor, positions: Tensor) -> tuple[float, float]:
    """Return mean and standard deviation of the known values; a deviation of 0 counts as 1."""
    values_known = values[positions].double()
    spread = float(values_known.std(unbiased=False)) if len(values_known) > 1 else 0.0
    return float(values_known.mean()), spread or 1.0


def recenter(target: Measured, values: Tensor) -> Measured:
    """Return a target with the mean and the standard deviation of these values; its bins and its rival stay.

    Raises:
        FedtideError: they are counts, and all 0.
    """
    center, scale = _mean_and_spread(values, torch.arange(len(values)))
    if isinstance(target, CountTarget):
        _check_counted(center)
    return replace(target, center=center, scale=scale)


def _check_counted(center: float) -> None:
    if not center:
        raise FedtideError("data.target: found 0 in all rows that are known, allowed: some count above 0")


def edges_of(values: Tensor) -> tuple[float, ...]:
    """Return borders between bins that hold about as many values each; fewer bins where values repeat.

    >>> len(edges_of(torch.arange(100.0))), edges_of(torch.tensor([7.0, 7.0]))
    (9, ())
    """
    inner = torch.arange(1, BINS, dtype=torch.float64) / BINS
    edges = values.double().quantile(inner).unique()
    return tuple(edge for edge in edges.tolist() if edge > float(values.min()))


def assign_bins(values: Tensor, edges: Sequence[float]) -> Tensor:
    """Return the bin of each value (rows,): how many borders it reaches.

    >>> assign_bins(torch.tensor([0.0, 2.0, 9.0]), (2.0, 5.0)).tolist()
    [0, 1, 2]
    """
    return torch.bucketize(values.double(), torch.tensor(edges, dtype=torch.float64), right=True)
