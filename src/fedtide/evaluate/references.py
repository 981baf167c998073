"""References: answers without a federation, on the same rows and with the same weights as the methods of a study."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedtide.core.base import Moment
from fedtide.core.errors import refused
from fedtide.core.rng import Rng, draw_some
from fedtide.core.trees import raw
from fedtide.data.population import Population
from fedtide.data.rows import BASELINES, Rows
from fedtide.data.targets import TargetWords
from fedtide.learn.target import CountTarget, LabelsTarget, Measured, NumberTarget, QuantileTarget, Target

MOST = 20_000
"""Rows that a boosted tree is fitted to at most: the latest ones of rows that arrive, else drawn ones."""
MISSING = 'not computed: it needs scikit-learn, pip install "fedtide[trees]"'
"""Note on a tree that was not fitted."""


class Reference(NamedTuple):
    """Words for a reference, and for how little or much it takes."""

    words: str
    takes: str = "no training"


REFERENCES: Mapping[str, Reference] = {
    "commonest_class": Reference("always {constant}"),
    **{name: Reference(baseline.words) for name, baseline in BASELINES.items()},
    "last_label": Reference("the last label of the same client"),
    "tree": Reference("a boosted tree", "pooled rows, no federation"),
}
"""References by the names of their measures. The last two are there if an experiment names them."""

KEYS = {name: ("baselines", name) for name in REFERENCES} | {"commonest_class": ("commonest",)}
"""Where an evaluation's entry in the record has the score of each reference."""


def reference_words(name: str, target: TargetWords) -> str:
    """Return the words for a reference in a sentence."""
    return REFERENCES[name].words.format(constant=target.constant)


@dataclass(frozen=True)
class References:
    """The references that an experiment names, of one population.

    Args:
        population: who holds what.
        names: "last_label", "tree" or both.

    Raises:
        FedtideError: rows are sequences, or made when they are needed.
    """

    population: Population
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.names and (self.population.rows.steps is not None or not isinstance(self.population.rows, Rows)):
            raise refused("references", self.names[0], "none, as rows are sequences, or made when they are needed")

    def scores(self, clients: Tensor, moment: Moment, part: str) -> dict[str, float]:
        """Return the headline score of each reference on the rows of a part that clients hold at a moment.

        One is left out if nothing can be known: without earlier rows, times, or scikit-learn.
        """
        people, target = self.population, self.population.target
        (rows, owner), (known, holder) = people.pool(clients, moment, part), people.known(moment)
        if not len(rows.y) or not len(known):
            return {}
        seen = people.shard_of(known, holder, moment)
        found: dict[str, Tensor | None] = {}
        if "last_label" in self.names:
            found["last_label"] = self._last(known, holder, seen.y, rows.ids, clients[owner])
        if "tree" in self.names:
            picked = self._recent(known)
            x, y = seen.x[picked].flatten(1).cpu(), seen.y[picked]
            found["tree"] = self._kept(part, target, x, y, rows.x.flatten(1).cpu())
        return {name: score_of(target, answers, rows.y) for name, answers in found.items() if answers is not None}

    def _last(self, known: Tensor, holder: Tensor, y: Tensor, judged: Tensor, owner: Tensor) -> Tensor | None:
        """Return the last label of the same client before each judged row; the usual one if there is none."""
        if self.population.rows.time is None:
            return None
        time = self.population.rows.time[torch.cat([known, judged]).long()]
        place = time.unique(return_inverse=True)[1]
        keys, order = (holder * len(time) + place[: len(known)]).sort(stable=True)
        before = torch.searchsorted(keys, owner * len(time) + place[len(known) :]) - 1
        at = order[before.clamp(min=0)]
        present = (before >= 0) & (holder[at] == owner)
        usual = usual_answer(self.population.target, y).expand(len(judged), *y.shape[1:])
        return torch.where(present.reshape(-1, *[1] * (y.dim() - 1)), y[at], usual.to(y.dtype))

    def _recent(self, known: Tensor) -> Tensor:
        """Return positions of the rows that a tree is fitted to."""
        time = self.population.rows.time
        if len(known) > MOST and self.population.apart and time is not None:
            return time[known.long()].argsort(stable=True)[-MOST:]
        return draw_some(torch.arange(len(known)), MOST, Rng(self.population.seed).at("reference"))

    def _kept(self, part: str, target: Target, x: Tensor, y: Tensor, judged: Tensor) -> Tensor | None:
        """Return the answers of a tree, which is fitted anew only if rows have changed."""
        digest = hashlib.blake2b(b"".join(raw(values.contiguous()).numpy().tobytes() for values in (x, y, judged)))
        if self._trees.get(part, ("",))[0] != digest.hexdigest():
            self._trees[part] = digest.hexdigest(), fit_and_predict(target, x, y, judged)
        return self._trees[part][1]

    @cached_property
    def _trees(self) -> dict[str, Any]:
        """Digest of the rows of the last tree of each part, and its answers."""
        return {}


def usual_answer(target: Target, y: Tensor) -> Tensor:
    """Return the best constant answer by some labels: the commonest class, the mean, or the usual value of each."""
    if isinstance(target, LabelsTarget):
        return (y.double().mean(0) > 0.5).double()
    return y.double().mean() if isinstance(target, Measured) else torch.bincount(y).argmax()


def score_of(target: Target, answers: Tensor, y: Tensor) -> float:
    """Return the headline score of answers (rows,) or (rows, k), in the units of the labels, as of a method."""
    return target.skill_of(answers, y) if isinstance(target, Measured) else float(target.score_rows(answers, y).mean())


def fit_and_predict(target: Target, x: Tensor, y: Tensor, judged: Tensor) -> Tensor | None:
    """Return the answers of boosted trees (`HistGradientBoosting`) to judged rows; None without scikit-learn."""
    try:
        from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
        from threadpoolctl import threadpool_limits
    except ImportError:
        return None

    def fitted(make: Callable[..., Any], labels: np.ndarray, **options: Any) -> Tensor:
        if (labels == labels[0]).all():
            return torch.full((len(judged),), labels[0].item(), dtype=torch.float64)
        model = make(early_stopping=False, random_state=0, **options)
        return torch.from_numpy(model.fit(x.numpy(), labels).predict(judged.numpy()))

    values = y.double().numpy()
    with threadpool_limits(1):
        if isinstance(target, QuantileTarget):
            by = {"loss": "quantile"}
            several = [fitted(HistGradientBoostingRegressor, values, quantile=at, **by) for at in target.at]
            return torch.stack(several, 1).sort(1).values
        if isinstance(target, Measured):
            robust = isinstance(target, NumberTarget) and target.form == "huber"
            loss = "poisson" if isinstance(target, CountTarget) else "absolute_error" if robust else "squared_error"
            return fitted(HistGradientBoostingRegressor, values, loss=loss)
        if isinstance(target, LabelsTarget):
            return torch.stack([fitted(HistGradientBoostingClassifier, column) for column in values.T], 1)
        return fitted(HistGradientBoostingClassifier, y.numpy()).long()
