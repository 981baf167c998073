"""On need: participants judge the model before they train it, and a round trains only if it is needed.

Han, Wu, Varghese: *DriftGuard: Mitigating Asynchronous Data Drift in Federated Learning*, arXiv 2603.18872, 2026: all
clients train again when their mean accuracy is below a threshold. Here this trigger is for any method.

    a_t = sum_i right_i / sum_i rows_i                     of this round's participants, before they train
    with a threshold:     train if a_t < threshold
    without:              m_t = mean of a_t, a_(t-1), ..., which fade by `FADE`
                          m_t < level - fall:  train, level = m_t = a_t, and earlier judgments are forgotten;
                                               also in a pause with m_t > level + max(fall, rise)
                          m_t > level + rise, and no pause:  level = m_t
                          neither in `patience` rounds:  pause

A round in a pause asks for two sums in place of training. All else that a method asks goes on: clusters follow drift. A
large rise is a change of data, too: after labels have come back a model that had adapted to others can become better
again.

When to use it: training costs clients more than prediction does, and data change now and then. Compare the accuracy for
the work in the report's table of costs, and the accuracy itself: a method that trains once does little work.

Choices:
    - paper: the trigger is the mean accuracy of clients on rows that they have not trained on yet.
    - ours: such rows are validation rows. A client without any judges its training rows. After a drift these are new,
      but before it the model knows them.
    - ours: clients weigh by rows; in the released code equally. Participants judge; in the paper all clients do.
    - ours: without a threshold the level is what the method itself has reached, because the reachable accuracy is
      unknown. The paper's threshold is fixed (0.65 in the released code).
    - ours: a phase ends when accuracy is no longer rising, or is at the threshold; in the paper after a given number of
      rounds. If a method rises only after more than `patience` rounds, take more patience.
    - ours: of numbers the skill is judged, as in reports.
    - ours: a round that trains sends the model twice, to be judged and to be trained.
    - ours: the paper's group retraining is not here. It trains the experts of clients with similar gates alone.
    - ours: clients that adapt before an evaluation also adapt before they judge.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedtide.core.base import (
    Algorithm,
    Answer,
    Cost,
    Extended,
    Facts,
    Memory,
    Moment,
    Payload,
    Reply,
    Shard,
    Weighted,
    Work,
)
from fedtide.core.rng import Rng
from fedtide.fields.types import Count, Fraction, ingredient
from fedtide.learn.target import Target
from fedtide.transforms.transform import Through, Transform, cost_as_loss, made_with, predict_own, with_own

FADE = 0.8
"""Factor on the judgments of earlier rounds. With 0.5 chance wakes a method often if a few unlike clients judge."""


@dataclass(frozen=True)
class Need:
    """Whether rounds train, and what says so.

    Args:
        trains: whether they do.
        right: faded sum over rounds of right rows.
        rows: faded sum of judged rows.
        level: the accuracy that was reached; None before any judgment.
        waited: rounds since then.
    """

    trains: bool = True
    right: float = 0.0
    rows: float = 0.0
    level: float | None = None
    waited: int = 0


@ingredient
class OnNeed(Transform):
    """Rounds train only if accuracy has fallen or is still rising; participants judge the model first.

    They judge what they would use: if the method fine-tunes for each client, every judgment fine-tunes, too.

    Args:
        fall: training begins if the mean accuracy is so far below the best one, or in a pause so far above it.
        rise: a new best accuracy is so far above the one before.
        patience: training ends after so many rounds without a new best accuracy.
        threshold: training begins and ends at this accuracy, whatever `fall`, `rise` and `patience` say; None for them.

    >>> import fedtide as ft
    >>> task = ft.Task(lambda: ft.models.Linear().build((3,), 2))
    >>> ft.transforms.apply(ft.algorithms.fedavg(task), ft.transforms.OnNeed(fall=0.1)).transforms[0].fall
    0.1
    """

    fall: Fraction = 0.05
    rise: Fraction = 0.01
    patience: Count = 5
    threshold: Fraction | None = None
    kind: Literal["on-need"] = "on-need"
    place: ClassVar[int] = 5

    @property
    def label(self) -> str:
        """Words beside the name of a method with this transform."""
        return "on need"

    def change(self, algorithm: Algorithm) -> Algorithm:
        """Let participants judge, and play a round only if it is needed."""
        (task,) = made_with(algorithm, "task")

        def round(state: Extended, fleet: Any, rng: Rng) -> tuple[Extended, Facts]:
            if fleet.moment.round < 0:  # before the first round nothing is trained
                inner, facts = algorithm.round(state.inner, fleet, rng)
                return Extended(inner, state.own), facts
            need, shown, judged = state.own, dict[str, Any](), False

            def train(clients: Tensor, payload: Payload, **options: Any) -> Reply:
                nonlocal need, judged
                if not judged:  # a method may train twice in a round
                    judged = True
                    right, rows = judge_model(algorithm, state.inner, fleet, clients)
                    if rows > 0:
                        need = decide(self, need, right, rows)
                        shown.update(judged=right / rows, level=need.level)
                if not need.trains:
                    return Reply(None, {}, clients[:0], torch.empty(0, dtype=torch.float64), Cost())
                return fleet.ask("train", clients, payload, **options)

            inner, facts = algorithm.round(state.inner, Through(fleet, train), rng)
            return Extended(inner, need), {**facts, **shown}

        unprivate = algorithm.traits.unprivate or "noise would decide which rounds train"
        cost = cost_as_loss(algorithm.traits.compute_cost, "need")
        traits = replace(algorithm.traits, compute_cost=cost, unprivate=unprivate)
        works = {**algorithm.works, "need": judge_question(algorithm, task.target)}
        extended = with_own(algorithm, lambda inner, fleet, rng: Extended(inner, Need()), round)
        return replace(extended, works=works, traits=traits)


def decide(rule: OnNeed, need: Need, right: float, rows: float) -> Need:
    """Return the need after a judgment.

    >>> need = decide(OnNeed(patience=1), Need(), 8.0, 10.0)
    >>> need.trains, need.level, decide(OnNeed(patience=1), need, 8.0, 10.0).trains
    (True, 0.8, False)
    """
    now, faded = right / rows, replace(need, right=right + FADE * need.right, rows=rows + FADE * need.rows)
    if rule.threshold is not None:
        return replace(faded, trains=now < rule.threshold, level=rule.threshold)
    mean = faded.right / faded.rows
    if need.level is None or mean < need.level - rule.fall:
        return Need(True, right, rows, now)
    if not need.trains and mean > need.level + max(rule.fall, rule.rise):  # data have changed, because no model has
        return Need(True, right, rows, now)
    if need.trains and mean > need.level + rule.rise:
        return replace(faded, level=mean, waited=0)
    return replace(faded, trains=need.trains and need.waited + 1 < rule.patience, waited=need.waited + 1)


def judge_model(algorithm: Algorithm, state: Any, fleet: Any, clients: Tensor) -> tuple[float, float]:
    """Return how many rows of clients are right, and how many there are, both 0 if no client answers."""
    payload, slot = algorithm.serve(state, clients)
    total = fleet.ask("need", clients, payload, slot=slot).total
    sums = [part["score"] for part in (total if slot is not None else [total]) or () if part is not None]
    return sum(float(one.value) for one in sums), sum(one.weight for one in sums)


def judge_question(algorithm: Algorithm, target: Target) -> Work:
    """Build the question "need": the share of a client's validation rows that are predicted right, with their number.

    Of numbers it is the skill, with the summed error of the constant.
    """

    def judge(payload: Payload, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        judged = predict_own(algorithm, payload, memory, shard, moment, rng)
        if judged is None:
            return None
        rows, outputs = judged
        right = target.score_rows(target.predict_labels(outputs), rows.y).double()
        reference = target.sums(outputs, rows.y).get("reference")
        if reference is not None:
            unit = float(reference.sum())
            return Answer({"score": Weighted(1 + right.sum() / unit, unit)}) if unit > 0 else None
        right = right.masked_fill(outputs.isnan().any(-1), 0.0)  # of NaN, argmax is one of them
        right = right if rows.mask is None else right[rows.mask]
        return Answer({"score": Weighted(right.mean(), right.numel())})

    return judge
