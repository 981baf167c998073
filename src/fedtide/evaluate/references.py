"""References: answers without a federation, on the same rows and with the same weights as the methods of a study."""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedtide.core.base import Moment, Over, mean_of_rows
from fedtide.core.errors import refused
from fedtide.core.rng import Rng, draw_some
from fedtide.core.trees import raw
from fedtide.data.population import Population
from fedtide.data.rows import BASELINES, Rows
from fedtide.data.targets import TargetWords
from fedtide.learn.target import CountTarget, LabelsTarget, Measured, NumberTarget, QuantileTarget, Target

MOST = 20_000
"""Rows that a boosted tree is fitted to at most: the latest ones of rows that arrive, else drawn ones."""
FITS = 20
"""Moments of a run at which a tree is fitted anew, if rows arrive."""
MISSING = {
    "last_label": "not computed, because rows have no time",
    "tree": 'not computed, because it needs scikit-learn; pip install "fedtide[trees]"',
}
"""Reasons why a reference has no score, if a method has one."""


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
        over: what accuracies are means of.

    Raises:
        FedtideError: rows are sequences, or made when they are needed.
    """

    population: Population
    names: tuple[str, ...]
    over: Over = "rows"

    def __post_init__(self) -> None:
        if self.names and (self.population.rows.steps is not None or not isinstance(self.population.rows, Rows)):
            raise refused("references", self.names[0], "none, as rows are sequences, or made when they are needed")

    def scores(self, clients: Tensor, moment: Moment, part: str) -> dict[str, float]:
        """Return the headline score of each reference on the rows of a part that clients hold at a moment.

        One is left out if nothing can be known: without earlier rows, times, or scikit-learn.
        """
        people, target = self.population, self.population.target
        (rows, owner), (past, holder) = people.pool(clients, moment, part), people.training_rows(moment)
        if not len(rows.y) or not len(past):
            return {}
        answers: dict[str, Tensor | None] = {}
        if "last_label" in self.names:
            y = people.shard_of(past, holder, moment).y
            answers["last_label"] = self._last(past, holder, y, rows.ids, clients[owner])
        if "tree" in self.names and (trees := self._trees(moment)) is not None:
            answers["tree"] = predict(target, trees, rows.x)

        def score(answers: Tensor) -> float:
            if isinstance(target, Measured):
                return target.skill_of(answers, rows.y)
            return mean_of_rows(self.over, target.score_rows(answers, rows.y), owner)

        return {name: score(answer) for name, answer in answers.items() if answer is not None}

    def _last(self, past: Tensor, holder: Tensor, y: Tensor, judged: Tensor, owner: Tensor) -> Tensor | None:
        """Return the last label of the same client before each judged row; the best constant answer without one."""
        if self.population.rows.time is None:
            return None
        time = self.population.rows.time[torch.cat([past, judged]).long()]
        place = time.unique(return_inverse=True)[1]
        keys, order = (holder * len(time) + place[: len(past)]).sort(stable=True)
        before = torch.searchsorted(keys, owner * len(time) + place[len(past) :]) - 1
        at = order[before.clamp(min=0)]
        present = (before >= 0) & (holder[at] == owner)
        target = self.population.target
        last = y[at][:, None] if isinstance(target, Measured) else y[at]
        return torch.where(present.reshape(-1, *[1] * (last.dim() - 1)), last, usual_answer(target, y))

    def _trees(self, moment: Moment) -> "Trees | None":
        """Return trees of the rows that are known, which are fitted anew only if rows have changed.

        If rows arrive, they are those of the last of `FITS` moments of the run.
        """
        people = self.population
        earlier = replace(moment, round=moment.round - moment.round % math.ceil(moment.rounds / FITS))
        past, holder = people.training_rows(earlier if people.apart else moment)
        if not len(past):
            past, holder = people.training_rows(moment)
        if len(past) > MOST and people.apart and people.rows.time is not None:
            picked = people.rows.time[past.long()].argsort(stable=True)[-MOST:]
        else:
            picked = draw_some(torch.arange(len(past)), MOST, Rng(people.seed).at("reference"))
        seen = people.shard_of(past[picked], holder[picked], moment)
        digest = hashlib.blake2b(raw(seen.x).numpy().tobytes() + raw(seen.y).numpy().tobytes()).hexdigest()
        if digest not in self._fitted:
            self._fitted.clear()
            self._fitted[digest] = fit_trees(people.target, seen.x, seen.y)
        return self._fitted[digest]

    @cached_property
    def _fitted(self) -> "dict[str, Trees | None]":
        """The last trees, by the digest of their rows."""
        return {}


def usual_answer(target: Target, y: Tensor) -> Tensor:
    """Return the best constant answer: by some labels the commonest class, or value of each; of numbers theirs.

    That of numbers is the constant by which their skill is measured: a mean, a median, or each quantile.
    """
    if isinstance(target, Measured):
        return torch.tensor(target.constant, dtype=y.dtype)
    return (y.double().mean(0) > 0.5).to(y.dtype) if isinstance(target, LabelsTarget) else torch.bincount(y).argmax()


def explain_missing(name: str, *, judged: bool) -> str:
    """Return the reason why a reference has no score; `judged` tells whether a method has one.

    >>> explain_missing("tree", judged=False)
    'not computed, because no method has a score'
    """
    return MISSING[name] if judged else "not computed, because no method has a score"


def notes_on_missing(references: Sequence[str]) -> list[str]:
    """Return a line if a study asks for a tree and scikit-learn is not installed, as it is said before it is played.

    >>> notes_on_missing(["last_label"])
    []
    """
    lacks = "tree" in references and find_spec("sklearn") is None
    return [f"references: a boosted tree is {MISSING['tree']}"] * lacks


Trees = Sequence[Callable[[np.ndarray], np.ndarray]]
"""Predicts rows (rows, d): one for each quantile or label, else a single one."""


def fit_trees(target: Target, x: Tensor, y: Tensor) -> Trees | None:
    """Fit boosted trees (`HistGradientBoosting`) to rows; None without scikit-learn."""
    try:
        from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
        from threadpoolctl import threadpool_limits
    except ImportError:
        return None

    def fit(labels: np.ndarray, loss: str = "", **options: Any) -> Callable[[np.ndarray], np.ndarray]:
        if (labels == labels[0]).all():
            return lambda rows: np.full(len(rows), labels[0])
        options |= {"early_stopping": False, "random_state": 0}
        make = (
            HistGradientBoostingRegressor(loss=loss, **options) if loss else HistGradientBoostingClassifier(**options)
        )
        return make.fit(x.flatten(1).cpu().numpy(), labels).predict

    values = y.double().numpy()
    with threadpool_limits(1):
        if isinstance(target, QuantileTarget):
            return [fit(values, "quantile", quantile=at) for at in target.at]
        if isinstance(target, Measured):
            robust = isinstance(target, NumberTarget) and target.form == "huber"
            loss = "poisson" if isinstance(target, CountTarget) else "absolute_error" if robust else "squared_error"
            return [fit(values, loss)]
        return [fit(column) for column in np.atleast_2d(y.numpy().T)]


def predict(target: Target, trees: Trees, x: Tensor) -> Tensor:
    """Return the answers of trees to rows: (rows,), or (rows, k) of several quantiles or labels."""
    answers = torch.from_numpy(np.stack([tree(x.flatten(1).cpu().numpy()) for tree in trees], 1))
    if isinstance(target, QuantileTarget):
        return answers.sort(1).values
    return answers if isinstance(target, LabelsTarget) else answers[:, 0]
