"""Metrics over clients and over curves, and quantities over seeds."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from fedtide.core.base import Scores
from fedtide.data.targets import TargetWords
from fedtide.mixtures.assign import best_assignment

Curve = Sequence[float] | Sequence[int] | np.ndarray
"""Axis of a curve: rounds, times or values."""

Unit = Literal["share", "points", "number", "count", "seconds", "rounds", "bytes"]
"""Unit of a quantity, for its format in reports: a share is written as percent, a difference of shares as points."""


@dataclass(frozen=True)
class Metric:
    """A number of every evaluation: recorded, averaged over the last rounds, and shown in reports.

    Args:
        name: name in records, claims and reports.
        of: scores of all clients of a view -> the value; NaN if there is none.
        unit: unit of the value.
        title: column header in the table over clients; "" for a metric without a column there.
        needs: name of the sum over all rows that it reads, of `fedtide.fleets.scoring`; "" for none.
    """

    name: str
    of: Callable[[Scores], float]
    unit: Unit = "number"
    title: str = ""
    needs: str = ""


def client_accuracies(scores: Scores) -> np.ndarray:
    """Return the accuracy of each client that has rows (clients,); all NaN if all models say NaN.

    A row of which a model says NaN is wrong.
    """
    judged = scores.rows > 0
    silent = math.isnan(scores.accuracy)
    return (scores.correct[judged] / scores.rows[judged] + (math.nan if silent else 0.0)).numpy()


def per_row(scores: Scores, summed: torch.Tensor) -> float:
    """Return the mean over all rows of a quantity that was summed for each client (clients,)."""
    return float(summed.sum() / scores.rows.sum())


def _over_clients(of: Callable[[np.ndarray], Any]) -> Callable[[Scores], float]:
    return lambda scores: float(of(client_accuracies(scores)))


def _worst_tenth(accuracies: np.ndarray) -> float:
    """Return the mean of the ceil(0.1 N) lowest accuracies."""
    return float(np.sort(accuracies)[: math.ceil(0.1 * len(accuracies))].mean())


METRICS = (
    Metric("accuracy", lambda scores: scores.accuracy, "share"),
    Metric("loss", lambda scores: per_row(scores, scores.loss)),
    Metric("client_mean", _over_clients(np.mean), "share", "mean over clients"),
    Metric("client_variance", _over_clients(np.var)),
    Metric("worst_decile", _over_clients(_worst_tenth), "share", "worst tenth of clients"),
    Metric("q10", _over_clients(partial(np.quantile, q=0.1)), "share", "a tenth has at most"),
    Metric("q50", _over_clients(partial(np.quantile, q=0.5)), "share", "median"),
    Metric("q90", _over_clients(partial(np.quantile, q=0.9)), "share", "a tenth has at least"),
)
"""The metrics of every evaluation. A line here is all that a new one needs."""

OVER_CLIENTS = METRICS[2:]
"""Those whose values may be of single clients."""

NO_METRICS = (
    "rows", "choice", "weights", "others", "density", "densities", "groups", "group_weights", "commonest", "baselines",
    "reference", "noise", "clients",
)  # fmt: skip
"""Keys of an evaluation's entry in the record that are not metrics, so that no metric may have their name."""


def macro_f1(counts: np.ndarray) -> float:
    """Return the mean of F1 = 2 TP / (predicted + rows) over the classes that any row has or is predicted to have.

    Args:
        counts: (classes, 3) right predictions TP, all predictions, and rows, of each class.

    >>> macro_f1(np.array([[2, 2, 3], [1, 2, 2], [0, 0, 0]]))  # (0.8 + 0.5) / 2
    0.65
    """
    right, predicted, rows = np.asarray(counts, dtype=np.float64).T
    present = predicted + rows > 0
    return float((2 * right[present] / (predicted + rows)[present]).mean()) if present.any() else math.nan


def auc(counts: np.ndarray) -> tuple[float, float]:
    """Return the area under the ROC curve, a mean over classes of each against the rest, and the bound of its error.

    It is the share of pairs of a row of the class and another row in which the former scores higher. Equal scores
    count half (Hanley and McNeil 1982), as do pairs in one bin. So the error is at most half their share.

    Args:
        counts: (classes, 2, bins) rows of the class, and others, by their score for it, from low to high. A class of
            all rows, or of none, is left out; NaN without any other.

    >>> auc(np.array([[[0, 1, 2], [1, 1, 0]]]))  # of six pairs five are in order and one is in the middle bin
    (0.9166666666666666, 0.08333333333333333)
    """
    positives, negatives = (np.asarray(counts, dtype=np.float64)[:, side] for side in (0, 1))
    pairs = positives.sum(1) * negatives.sum(1)
    tied = (positives * negatives).sum(1)
    below = (positives * (negatives.cumsum(1) - negatives)).sum(1)
    comparable = pairs > 0
    if not comparable.any():
        return math.nan, math.nan
    areas = (below + tied / 2)[comparable] / pairs[comparable]
    return float(areas.mean()), float((tied[comparable] / pairs[comparable]).mean() / 2)


def _of_pooled(name: str, of: Callable[[np.ndarray], float]) -> Callable[[Scores], float]:
    """Return a metric of a sum over all rows; NaN if accuracy is NaN."""
    return lambda scores: math.nan if math.isnan(scores.accuracy) else of(scores.pooled[name].numpy())


MACRO_F1 = Metric("macro-f1", _of_pooled("confusion", macro_f1), "share", needs="confusion")
"""Macro-averaged F1 of all rows together."""

AUC = Metric("auc", _of_pooled("odds", lambda counts: auc(counts)[0]), needs="odds")
"""Area under the ROC curve of all rows together, of scores in bins."""

AUC_BOUND = Metric("auc_bound", _of_pooled("odds", lambda counts: auc(counts)[1]), needs="odds")
"""Bound of the error of the AUC, because scores in one bin count as equal."""


PERPLEXITY = Metric("perplexity", lambda scores: float(torch.tensor(per_row(scores, scores.loss)).double().exp()))
"""Exponential of the mean loss of a label, or of a step of a sequence: padding and ignored labels do not count."""


def bits_per_byte(sizes: torch.Tensor) -> Metric:
    """Return the metric of the loss in bits, by byte of the text of the tokens that were to be predicted.

    Models with other tokenizers can be compared by it. Marks, such as the end of a text, add to the loss and have no
    bytes. NaN without bytes.

    Args:
        sizes: (tokens,) bytes of each token's text.
    """

    def of(scores: Scores) -> float:
        counts = scores.pooled["tokens"]
        seen = counts.nonzero().flatten()
        many = float((counts[seen] * sizes[seen]).sum())
        return float(scores.loss.sum()) / math.log(2) / many if many else math.nan

    return Metric("bits-per-byte", of, needs="tokens")


def _mean_of(name: str) -> Callable[[Scores], float]:
    return lambda scores: per_row(scores, scores.sums[name])


def _coverage(scores: Scores) -> float:
    """Return the share of rows between the lowest and the highest quantile."""
    below = scores.sums["below"].sum(0) / scores.rows.sum()
    return float(below[-1] - below[0])


def _hits(scores: Scores) -> torch.Tensor:
    """Return hits, false alarms and misses of each label (3, labels)."""
    return torch.stack([scores.sums[name].sum(0) for name in ("hits", "false_alarms", "misses")])


def f1_of_labels(counts: torch.Tensor) -> tuple[float, float]:
    """Return micro- and macro-averaged F1 = 2 hits / (2 hits + false alarms + misses) of labels (3, labels).

    Labels that no row has or is said to have are left out of the mean.

    >>> f1_of_labels(torch.tensor([[2.0, 1.0, 0.0], [1.0, 0.0, 0.0], [1.0, 2.0, 0.0]]))  # 6/10; of 4/6 and 2/4
    (0.6, 0.5833333333333333)
    """
    hits, false_alarms, misses = counts.double()
    both = 2 * hits + false_alarms + misses
    return float(2 * hits.sum() / both.sum()), float((2 * hits / both)[both > 0].mean())


OF_TARGETS = {
    metric.name: metric
    for metric in (
        Metric("mae", _mean_of("absolute")),
        Metric("rmse", lambda scores: math.sqrt(_mean_of("square")(scores))),
        Metric("pinball", _mean_of("error")),
        Metric("coverage", _coverage, "share"),
        Metric("deviance", _mean_of("error")),
        Metric("micro-f1", lambda scores: f1_of_labels(_hits(scores))[0], "share"),
        Metric("macro-f1", lambda scores: f1_of_labels(_hits(scores))[1], "share"),
        Metric("exact", _mean_of("exact"), "share"),
    )
}
"""Metrics of what targets sum over rows; which ones a target has its `TargetWords.metrics` says."""

BY_WAY = "accuracy_by_"
"""Prefix of accuracies of other ways to combine a method's models, such as `accuracy_by_global`."""

LOWER_IS_BETTER = ("mae", "rmse", "pinball", "deviance", "perplexity", "bits-per-byte")
"""Metrics that are errors: claims and tables take the lower one for the better one."""


def metrics_for(about: TargetWords) -> tuple[Metric, ...]:
    """Return the metrics of every evaluation of a kind of target, the headline first."""
    return (replace(METRICS[0], name=about.score), *METRICS[1:], *(OF_TARGETS[name] for name in about.metrics))


SHIPPED: Mapping[str, tuple[Metric, ...]] = {
    "macro-f1": (MACRO_F1,), "auc": (AUC, AUC_BOUND), "perplexity": (PERPLEXITY,),
    "bits-per-byte": (bits_per_byte(torch.zeros(0)),),
}  # fmt: skip
"""Metrics that an experiment may ask for by name, each with what is recorded of it; a run gives bytes of tokens."""


def summarized(
    scores: Scores,
    groups: torch.Tensor,
    names: Sequence[str],
    *,
    own_expert: bool = False,
    metrics: Sequence[Metric] = METRICS,
) -> dict[str, Any]:
    """Return the summary of a scoring for the record: pooled, per group, and over clients.

    Args:
        scores: scores of each client.
        groups: (clients,) group of each scored client.
        names: names of the groups.
        own_expert: true if the first of the mixed experts is the client's own.
        metrics: numbers of all these scores.
    """
    if not float(scores.rows.sum()):
        return {}
    pooled: dict[str, Any] = {"rows": int(scores.rows.sum()), **{metric.name: metric.of(scores) for metric in metrics}}
    if scores.over == "clients":
        pooled["clients"] = int(scores.counted)
    if scores.reference is not None:
        pooled["reference"] = scores.reference
    if scores.choice is not None:
        table = torch.zeros(len(names), scores.choice.shape[1], dtype=torch.float64)
        pooled["choice"] = table.index_add_(0, groups, scores.choice).long()
    if scores.weights is not None:
        pooled["weights"] = mean_weights(scores, own_expert=own_expert)
    if scores.others:
        pooled["others"] = {name: scores.share(correct) for name, correct in scores.others.items()}
    if scores.density is not None:
        pooled["density"] = per_row(scores, scores.density)
    if len(names) > 1:
        parts = {name: scores.pick(groups == k) for k, name in enumerate(names)}
        judged = {name: part for name, part in parts.items() if float(part.rows.sum())}
        pooled["groups"] = {name: part.accuracy for name, part in judged.items()}
        # A group's skill is in units of the error of all, so its weight is its rows' share of that.
        unit = 1.0 if scores.reference is None else scores.reference / float(scores.rows.sum())
        pooled["group_weights"] = {name: unit * part.counted for name, part in judged.items()}
        if scores.density is not None:
            pooled["densities"] = {
                name: per_row(part, part.density) for name, part in judged.items() if part.density is not None
            }
        if scores.weights is not None:
            by_group = {name: mean_weights(part, own_expert=own_expert) for name, part in parts.items()}
            pooled["weights"]["groups"] = {name: weights for name, weights in by_group.items() if weights}
    return pooled


def mean_weights(scores: Scores, *, own_expert: bool) -> dict[str, Any]:
    """Return the mean weight of each expert over rows: "own" for the client's own expert, if any, and "shared".

    >>> one = torch.ones(1)
    >>> scores = Scores(one, one, one, one, weights=torch.tensor([[3.0, 1.0, 0.0]]))
    >>> mean_weights(scores, own_expert=True), mean_weights(scores, own_expert=False)
    ({'own': 0.75, 'shared': [0.25, 0.0]}, {'shared': [0.75, 0.25, 0.0]})
    """
    if scores.weights is None or not float(scores.weights.sum()):
        return {}
    first, *others = shares = (scores.weights.sum(0) / scores.weights.sum()).tolist()
    return {"own": first, "shared": others} if own_expert else {"shared": shares}


def branch_accuracy(table: Sequence[Sequence[float]] | np.ndarray) -> float:
    """Return the share of rows (or clients) at the branch of their true group, under the best match of both.

    Args:
        table: (groups, K) number of rows of each group at each branch.

    >>> branch_accuracy([[1, 9], [8, 2]])
    0.85
    """
    counts = np.asarray(table, dtype=np.float64)
    if not counts.sum():
        return math.nan
    right = sum(counts[k, branch] for k, branch in enumerate(matched(counts)) if branch < counts.shape[1])
    return float(right / counts.sum())


def matched(table: np.ndarray) -> tuple[int, ...]:
    """Return the branch of each group that maximizes the matched part of `table` (groups, K); >= K for no branch.

    >>> matched(np.array([[1, 9], [8, 2]]))
    (1, 0)
    """
    groups, branches = table.shape
    side = max(groups, branches)
    square = np.zeros((side, side), dtype=np.int64)
    square[:groups, :branches] = table
    # Among equally good matches, prefer the one that keeps most groups in order.
    values = square.astype(object) * (side + 1) + np.eye(side, dtype=np.int64).astype(object)
    return tuple(best_assignment(values, [1] * side)[:groups])


def mean_of_known(values: Iterable[float | None]) -> float:
    """Return the mean of the values that are neither missing nor NaN; NaN without any.

    >>> mean_of_known([1.0, None, math.nan, 3.0])
    2.0
    """
    numbers = [float(value) for value in values if value is not None and not math.isnan(value)]
    return float(np.mean(numbers)) if numbers else math.nan


def mean_of_last(
    rounds: Curve, values: Curve, window: int, weights: Curve | None = None, end: int | None = None
) -> float:
    """Return the mean over the evaluations in the last `window` rounds, which may be weighted; NaN without any.

    They are the last ones up to round `end`; None means that of the last value.

    Skills are weighted by the error of the constant, so that their mean is the skill on all rows. Windows of wall-clock
    time are weighted by their rows.

    >>> mean_of_last([9, 19, 29, 39], [0.1, 0.2, 0.3, 0.5], window=20)
    0.4
    >>> mean_of_last([1, 2], [-3.0, 0.5], window=2, weights=[1.0, 9.0])  # errors of 4 and 4.5, of 10
    0.15
    """
    late = _late(rounds, values, window, end)
    if not late:
        return math.nan
    return float(np.mean(late) if weights is None else np.average(late, weights=_late(rounds, weights, window, end)))


FADING = 0.95
"""Weight of the past after a window of time (Gama, Sebastião, Rodrigues: Machine Learning 90, 2013, section 4)."""


def faded(rounds: np.ndarray, values: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Return the mean of each value and those before it, whose weights fade with each round that is a window.

    >>> faded(np.array([1, 2]), np.array([1.0, 0.0])).round(4).tolist()
    [1.0, 0.4872]
    >>> faded(np.array([20, 40]), np.array([1.0, 0.0])).round(4).tolist()  # 0.95^20 / (1 + 0.95^20)
    [1.0, 0.2639]
    """
    out, above, below = np.empty(len(values)), 0.0, 0.0
    fading = FADING ** np.diff(rounds, prepend=rounds[:1])
    counts = np.ones(len(values)) if weights is None else weights
    for k, (value, weight, fade) in enumerate(zip(values, counts, fading, strict=True)):
        above, below = fade * above + weight * value, fade * below + weight
        out[k] = above / below
    return out


def worst_point(rounds: Curve, values: Curve, window: int) -> float:
    """Return the lowest value among the evaluations in the last `window` rounds; NaN without any."""
    return float(min(_late(rounds, values, window), default=math.nan))


def _late(rounds: Curve, values: Curve, window: int, end: int | None = None) -> list[float]:
    """Return the values of the evaluations in the last `window` rounds up to `end`."""
    return [v for r, v in zip(rounds, values, strict=True) if r > (rounds[-1] if end is None else end) - window]


def swing(rounds: Curve, values: Curve, period: float, window: int, end: int | None = None) -> float:
    """Return highest minus lowest value within a period, averaged over whole periods in the last `window` rounds.

    They end with round `end`; None means that of the last value. A window shorter than a period counts as one period.
    NaN if a period has fewer than two evaluations.

    >>> swing(range(8), [0, 1, 0, 1, 0, 3, 0, 1], period=4, window=8)
    2.0
    """
    if not len(rounds):
        return math.nan
    last = rounds[-1] if end is None else end
    periods = max(int(window // period), 1)
    swings = []
    for k in range(periods):
        inside = [v for r, v in zip(rounds, values, strict=True) if last - (k + 1) * period < r <= last - k * period]
        swings.append(max(inside) - min(inside) if len(inside) > 1 else math.nan)
    return float(np.mean(swings))


def time_to_accuracy(times: Curve, values: Curve, target: float) -> float:
    """Return the first time from which the curve stays at or above `target` until the end; infinity if it never does.

    NaN without a target.

    >>> time_to_accuracy([1, 2, 3, 4], [0.9, 0.2, 0.8, 0.9], target=0.5)
    3.0
    """
    if math.isnan(target):
        return math.nan
    below = np.flatnonzero(np.asarray(values) < target)
    first = int(below[-1]) + 1 if len(below) else 0
    return float(times[first]) if first < len(times) else math.inf


# -- over seeds --------------------------------------------------------------------------------------------------------

CONFIDENCE = 0.95
"""Confidence of intervals in reports: without any difference, one in twenty intervals excludes zero."""

Clarity = Literal["clear", "unclear", "too few seeds"]
"""Clarity of a number against a bound, over seeds."""


@dataclass(frozen=True)
class Measure:
    """A quantity over seeds: mean, standard error (None for one seed), and the value of each seed."""

    mean: float | None
    error: float | None
    values: list[float]

    @staticmethod
    def of(values: list[float]) -> "Measure":
        """Compute a measure from the value of each seed; the error is s / sqrt(n), s with n - 1."""
        array = np.array(values, dtype=np.float64)
        finite = len(array) > 0 and np.isfinite(array).all()
        error = array.std(ddof=1) / math.sqrt(len(array)) if finite and len(array) > 1 else math.nan
        return Measure(float(array.mean()) if finite else None, float(error) if math.isfinite(error) else None, values)

    @property
    def margin(self) -> float | None:
        """Half the width of the confidence interval of the mean, by Student's t; None if there are too few seeds.

        Two equal values may be equal by chance: only from three on do equal values have a margin, of 0.

        >>> round(Measure.of([0.1, 0.2, 0.3]).margin, 3), Measure.of([0.2]).margin, Measure.of([0.2, 0.2]).margin
        (0.248, None, None)
        """
        seeds = len(self.values)
        if self.mean is None or self.error is None or seeds < 2:
            return None
        if self.error <= self._rounding:
            return 0.0 if seeds > 2 else None
        from scipy.special import stdtrit  # here, as every process that plays runs would wait for it

        return float(stdtrit(seeds - 1, (1 + CONFIDENCE) / 2)) * self.error

    @property
    def _rounding(self) -> float:
        return 1e-12 * max(1.0, abs(self.mean or 0.0))

    def clarity(self, gap: float) -> Clarity:
        """Tell whether a mean that is `gap` away from a bound is clearly so: the interval does not reach the bound.

        Seeds are too few if there are fewer than three. They are also too few if many seeds of the same mean and spread
        would be clear, at two standard errors.
        """
        if self.mean is None:
            return "unclear"
        away = abs(gap) if abs(gap) > self._rounding else 0.0
        if len(self.values) > 2 and self.margin is not None and away and away >= self.margin:
            return "clear"
        few = len(self.values) < 3 or self.error is None or (away and away >= 2 * self.error)
        return "too few seeds" if few else "unclear"

    @property
    def level(self) -> bool:
        """True if a difference is not above 0, or not clearly; with fewer than three seeds the mean decides."""
        return self.mean is not None and (self.mean <= 0 or self.clarity(self.mean) == "unclear")

    def side(self) -> int:
        """Return 1 for a mean clearly above 0, -1 for one clearly below, else 0.

        >>> [Measure(mean, 0.1, [0.0] * 5).side() for mean in (0.3, 0.1, -0.3)], Measure(1.0, None, [1.0]).side()
        ([1, 0, -1], 0)
        """
        mean = self.mean or 0.0
        return int(math.copysign(1, mean)) if self.clarity(mean) == "clear" else 0


UNKNOWN = Measure(None, None, [])
"""A quantity that was not measured."""
