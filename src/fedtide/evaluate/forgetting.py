"""Local client forgetting: what a client's training costs the model on rows of other clients.

Legate: *Re-Weighted Softmax Cross-Entropy to Control Forgetting in Federated Learning*, section 2.1, Eq. 11 and 12.

| symbol | meaning |
| --- | --- |
| `A0[e]` | accuracy of the received model on rows of client e, the data owner |
| `A[m, e]` | accuracy there of what client m made of it, before anything was averaged |
| `F[m, e]` | `A0[e] - A[m, e]`: positive where m's training forgot what e's rows need |

The paper's text averages over the data of others and draws models as rows, while its Eq. 11 has the owner first. Here
rows are models and columns owners, everywhere. Its pictures show "post minus pre", the opposite sign.

It is a fact of an evaluation and part of no algorithm: each participant's training is done once more on copies, and
what would be served if its update alone were taken is judged. Only in a simulation do rows of a client meet the models
of others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtide.core.errors import FedtideError
from fedtide.core.loop import Step
from fedtide.core.rng import Rng
from fedtide.core.types import Grouping, Moment, Scores, Weights
from fedtide.data.population import Population
from fedtide.evaluate.judge import drawn
from fedtide.fleets.simulated import SimulatedFleet

QUESTION = "train"
"""The question whose update is a client's own model."""


@dataclass(frozen=True)
class Averages:
    """The averages of one matrix (models, owners), its own cells (m = e) left out.

    models: the mean over owners, for each model; owners: the mean over models, for each owner, NaN where it has no
    rows; mean: over all of them; own: over the own cells alone, NaN where there are none; known: whether there was
    anything to average. What has nothing to average is 0, by definition.
    """

    models: np.ndarray
    owners: np.ndarray
    mean: float
    own: float
    known: bool


def averages(matrix: np.ndarray, own: np.ndarray, judged: np.ndarray) -> Averages:
    """Averages of F, of accuracy or of loss.

    Args:
        matrix: (models, owners).
        own: (models, owners) bool: where an owner's rows meet its own model.
        judged: (owners,) bool: who has rows. The columns of the others count for nothing.

    >>> matrix, nobody = np.array([[-0.5, 0.2, np.nan], [0.1, -0.1, np.nan]]), np.array([True, True, False])
    >>> got = averages(matrix, np.eye(2, 3, dtype=bool), nobody)
    >>> got.models.tolist(), got.owners.tolist(), round(got.mean, 3), got.own
    ([0.2, 0.1], [0.1, 0.2, nan], 0.15, -0.3)
    """
    others, mine = judged & ~own, matrix[judged & own]
    filled = np.where(others, matrix, 0.0)
    with np.errstate(invalid="ignore"):  # a model that diverged has no mean, and that is what is said
        by_model, by_owner, total = filled.sum(axis=1), filled.sum(axis=0), float(filled.sum())
        on_own = float(mine.mean()) if len(mine) else float("nan")
    return Averages(
        by_model / others.sum(axis=1).clip(min=1),
        np.where(judged, by_owner / others.sum(axis=0).clip(min=1), np.nan),
        total / max(int(others.sum()), 1),
        on_own,
        bool(others.any()),
    )


def apart(matrix: np.ndarray, own: np.ndarray, models: np.ndarray, owners: np.ndarray) -> float:
    """The mean over pairs without a common class, where forgetting is worst; NaN where there is no such pair.

    Args:
        matrix: (models, owners), as in `averages`.
        own: (models, owners) bool.
        models: (models, classes) rows of each class that each model was trained on.
        owners: (owners, classes) rows of each class that it is judged on; who has none is in no pair.

    >>> trained, judged = np.array([[5, 0, 0], [0, 3, 1]]), np.array([[2, 0, 0], [0, 0, 1]])
    >>> apart(np.array([[0.1, 0.6], [0.8, 0.2]]), np.eye(2, dtype=bool), trained, judged)
    0.7
    """
    common = (models > 0).astype(int) @ (owners > 0).astype(int).T
    pairs = (common == 0) & (owners.sum(axis=1) > 0) & ~own
    with np.errstate(invalid="ignore"):
        return float(matrix[pairs].mean()) if pairs.any() else float("nan")


def owners_of(population: Population, part: str, at_most: int | None, seed: int) -> Tensor | None:
    """On whose rows models are judged for the whole run; None where that is whoever takes part in the round.

    Args:
        population: whose registered clients.
        part: of their rows, "val" or "test".
        at_most: so many of those that have such rows, drawn once; None for the participants.
        seed: of that draw.

    Raises:
        FedtideError: no registered client has such rows.
    """
    with_rows = population.clients[population.counts(population.clients, part) > 0]
    if not len(with_rows):
        others = [o for o in ("val", "test") if population.counts(population.clients, o).any()]
        allowed = " or ".join(f"'{o}'" for o in others) or "none, as there are only training rows"
        raise FedtideError(
            f"forgetting.part: found '{part}', of which no registered client has rows; allowed: {allowed} "
            "(see data.split)"
        )
    return None if at_most is None else drawn(with_rows, at_most, Rng(seed).at("judged", "forgetting"))


@dataclass(frozen=True)
class Probe:
    """Measures local client forgetting in a round that is over.

    Its cost is a training and a pass over all owners' rows for each participant: participants x owners. A cohort of
    hundreds should be judged on a number of owners, not on one another.

    Args:
        fleet: that played the round, and keeps it (`SimulatedFleet.repeatable`).
        part: on which rows models are judged.
        owners: of which clients; None means the participants of the round.
        grouping: which rows decide together at inference.
    """

    fleet: SimulatedFleet
    part: str = "val"
    owners: Tensor | None = None
    grouping: Grouping = "client"

    def line(self, step: Step) -> dict[str, Any]:
        """What `forgetting.jsonl` keeps of a round.

        `local` is A as [model][owner], `received` A0 as [owner]; `forgetting` and `loss_increase` are their averages.
        A round in which it cannot be said has `skipped`, with the reason, and nothing else.
        """
        number = step.moment.round
        if not _holds_weights(step.received):
            return {"round": number, "skipped": "its state holds no weights, one model or a tuple of them"}
        counted = [query.answered for query in self.fleet.queries if query.ask.question == QUESTION]
        if not counted:
            return {"round": number, "skipped": f"nobody was asked the question '{QUESTION}'"}
        owners = torch.cat(counted).unique() if self.owners is None else self.owners
        received, judged = self.fleet.replay(QUESTION, step.received, owners, part=self.part, grouping=self.grouping)
        models = sorted(judged)
        reasons = [judged[m].why for m in models if judged[m].scores is None]
        if reasons:
            return {"round": number, "skipped": reasons[0]}
        scored = [scores for scores in (received.scores, *(judged[m].scores for m in models)) if scores is not None]
        return {
            "round": number,
            "part": self.part,
            "models": models,
            "owners": owners.tolist(),
            "rows": [int(rows) for rows in scored[0].rows.tolist()],
            **self._numbers(scored, torch.tensor(models, dtype=torch.int64), owners),
        }

    def _numbers(self, scored: list[Scores], models: Tensor, owners: Tensor) -> dict[str, Any]:
        """The matrices and their averages; `scored` are the scores of the received model and of each local one."""
        accuracy, loss = (_per_row(scored, name) for name in ("correct", "loss"))
        with np.errstate(invalid="ignore"):  # an infinite loss that stays infinite
            changes = {"forgetting": accuracy[:1] - accuracy[1:], "loss_increase": loss[1:] - loss[:1]}
        own = (models[:, None] == owners[None, :]).numpy()
        got = {name: averages(matrix, own, (scored[0].rows > 0).numpy()) for name, matrix in changes.items()}
        told = {
            name: {"mean": a.mean, "own": a.own, "models": a.models.tolist(), "owners": a.owners.tolist()}
            for name, a in got.items()
        }
        if self.fleet.population.rows.steps is None:
            trained, judged = self._labels(models, "train"), self._labels(owners, self.part)
            for name, matrix in changes.items():
                told[name]["apart"] = apart(matrix, own, trained, judged)
        return {
            "accuracy": {"received": accuracy[0].tolist(), "local": accuracy[1:].tolist()},
            "loss": {"received": loss[0].tolist(), "local": loss[1:].tolist()},
            **told,
            "known": got["forgetting"].known,
        }

    def _labels(self, clients: Tensor, part: str) -> np.ndarray:
        """How many rows of each class each of `clients` holds now, as they mean now (clients, classes)."""
        population, moment = self.fleet.population, self.fleet.moment
        return np.array([_counted(population, client, moment, part) for client in clients.tolist()]).reshape(
            len(clients), population.rows.classes
        )


def _counted(population: Population, client: int, moment: Moment, part: str) -> np.ndarray:
    return np.bincount(population.shard(client, moment, part).y.numpy(), minlength=population.rows.classes)


def _per_row(scored: list[Scores], name: str) -> np.ndarray:
    """A sum of each scoring over its rows (scorings, owners); NaN where an owner has none."""
    rows = torch.stack([scores.rows for scores in scored])
    return torch.where(rows > 0, torch.stack([getattr(s, name) for s in scored]) / rows, torch.nan).numpy()


def _holds_weights(state: Any) -> bool:
    held = getattr(state, "weights", None)
    several = held if isinstance(held, tuple) else (held,)
    return bool(several) and all(isinstance(each, Weights) for each in several)
