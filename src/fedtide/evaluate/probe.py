"""Local client forgetting: the loss of accuracy on other clients' rows caused by a client's local training.

Legate: *Re-Weighted Softmax Cross-Entropy to Control Forgetting in Federated Learning*, section 2.1, Eq. 11 and 12.

| symbol | meaning |
| --- | --- |
| `A0[e]` | accuracy of the received model on rows of client e, the data owner |
| `A[m, e]` | accuracy on the same rows of client m's local model, before aggregation |
| `F[m, e]` | `A0[e] - A[m, e]`: positive if m's training forgot rows of e |

The paper's text averages over the data of others and draws models as rows, while its Eq. 11 has the owner first. Here
rows are always models and columns owners. The paper's figures show "post minus pre", the opposite sign.

The measure belongs to no algorithm. Each participant's training is repeated on copies, and the model that would be
served from its update alone is evaluated. Only a simulation can evaluate a client's model on rows of other clients.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtide.core.base import Grouping, Scores, Weights
from fedtide.core.errors import refused
from fedtide.core.loop import Step
from fedtide.core.rng import Rng, draw_some
from fedtide.data.population import Population
from fedtide.fleets.simulated import SimulatedFleet

QUESTION = "train"
"""Name of the question whose update is a client's own model."""


@dataclass(frozen=True)
class Averages:
    """Averages of one matrix (models, owners) without its own cells (m = e).

    Args:
        models: mean over owners, for each model.
        owners: mean over models, for each owner; NaN for an owner without rows.
        mean: mean over all these cells; 0 without any.
        own: mean over the own cells; NaN without any.
        known: true if there is any cell.
    """

    models: np.ndarray
    owners: np.ndarray
    mean: float
    own: float
    known: bool


def averages(matrix: np.ndarray, diagonal: np.ndarray, judged: np.ndarray) -> Averages:
    """Return the averages of a matrix of F, of accuracy or of loss.

    Args:
        matrix: (models, owners).
        diagonal: (models, owners) bool: true for a model on the rows of its own client.
        judged: (owners,) bool: owners that have rows; the columns of the others are ignored.

    >>> matrix, judged = np.array([[-0.5, 0.2, np.nan], [0.1, -0.1, np.nan]]), np.array([True, True, False])
    >>> got = averages(matrix, np.eye(2, 3, dtype=bool), judged)
    >>> got.models.tolist(), got.owners.tolist(), round(got.mean, 3), got.own
    ([0.2, 0.1], [0.1, 0.2, nan], 0.15, -0.3)
    """
    others, on_diagonal = judged & ~diagonal, matrix[judged & diagonal]
    filled = np.where(others, matrix, 0.0)
    with np.errstate(invalid="ignore"):  # the mean of a model that diverged is NaN
        by_model, by_owner, total = filled.sum(axis=1), filled.sum(axis=0), float(filled.sum())
        on_own = float(on_diagonal.mean()) if len(on_diagonal) else float("nan")
    return Averages(
        by_model / others.sum(axis=1).clip(min=1),
        np.where(judged, by_owner / others.sum(axis=0).clip(min=1), np.nan),
        total / max(int(others.sum()), 1),
        on_own,
        bool(others.any()),
    )


def without_common_class(matrix: np.ndarray, diagonal: np.ndarray, models: np.ndarray, owners: np.ndarray) -> float:
    """Return the mean over pairs without a common class, which forget most; NaN without such a pair.

    Args:
        matrix: (models, owners), as in `averages`.
        diagonal: (models, owners) bool.
        models: (models, classes) number of training rows of each class for each model.
        owners: (owners, classes) number of evaluated rows of each class; an owner without rows is in no pair.

    >>> trained, judged = np.array([[5, 0, 0], [0, 3, 1]]), np.array([[2, 0, 0], [0, 0, 1]])
    >>> without_common_class(np.array([[0.1, 0.6], [0.8, 0.2]]), np.eye(2, dtype=bool), trained, judged)
    0.7
    """
    common = (models > 0).astype(int) @ (owners > 0).astype(int).T
    pairs = (common == 0) & (owners.sum(axis=1) > 0) & ~diagonal
    with np.errstate(invalid="ignore"):
        return float(matrix[pairs].mean()) if pairs.any() else float("nan")


def owners_of(population: Population, part: str, at_most: int | None, seed: int) -> Tensor | None:
    """Return the clients on whose rows models are evaluated in the whole run; None for each round's participants.

    Args:
        population: source of the registered clients.
        part: evaluated part of their rows, "val" or "test".
        at_most: number of clients to draw once among those with such rows; None for the participants.
        seed: seed of that draw.

    Raises:
        FedtideError: no registered client has such rows.
    """
    clients = population.clients[population.remains(population.clients)]
    with_rows = clients[population.counts(clients, part) > 0]
    if not len(with_rows):
        others = [o for o in ("val", "test") if population.counts(population.clients, o).any()]
        allowed = " or ".join(f"'{o}'" for o in others) or "none, as there are only training rows"
        raise refused("forgetting.part", part, f"{allowed} (see data.split)", "no registered client has such rows")
    return None if at_most is None else draw_some(with_rows, at_most, Rng(seed).at("judged", "forgetting"))


@dataclass(frozen=True)
class Probe:
    """Measurement of local client forgetting in a round that is over.

    Its cost is, for each participant, a training and a pass over all owners' rows: participants x owners. For cohorts
    of hundreds, fix a number of owners rather than use all participants.

    Args:
        fleet: fleet that played the round and keeps it (`SimulatedFleet.replayable`).
        part: part of the rows that models are evaluated on.
        owners: clients whose rows are used; None means the participants of the round.
        grouping: rows that are decided together at inference.
    """

    fleet: SimulatedFleet
    part: str = "val"
    owners: Tensor | None = None
    grouping: Grouping = "client"

    def line(self, step: Step) -> dict[str, Any]:
        """Return the line of `forgetting.jsonl` for a round.

        `local` is A as [model][owner], `received` A0 as [owner]; `forgetting` and `loss_increase` are their averages. A
        round that cannot be measured has `skipped`, with the reason, and nothing else.
        """
        number = step.moment.round
        if not _holds_weights(step.received):
            return {"round": number, "skipped": "its state holds no weights, one model or a tuple of them"}
        counted = [query.answered for query in self.fleet.queries if query.ask.question == QUESTION]
        if not counted:
            return {"round": number, "skipped": f"no client was asked the question '{QUESTION}'"}
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
        """Return the matrices and their averages; `scored` starts with the received model."""
        accuracy, loss = (_per_row(scored, name) for name in ("correct", "loss"))
        with np.errstate(invalid="ignore"):  # infinity minus infinity is NaN
            changes = {"forgetting": accuracy[:1] - accuracy[1:], "loss_increase": loss[1:] - loss[:1]}
        diagonal = (models[:, None] == owners[None, :]).numpy()
        got = {name: averages(matrix, diagonal, (scored[0].rows > 0).numpy()) for name, matrix in changes.items()}
        entries = {
            name: {"mean": a.mean, "own": a.own, "models": a.models.tolist(), "owners": a.owners.tolist()}
            for name, a in got.items()
        }
        if self.fleet.population.rows.steps is None:
            trained, judged = self._labels(models, "train"), self._labels(owners, self.part)
            for name, matrix in changes.items():
                entries[name]["apart"] = without_common_class(matrix, diagonal, trained, judged)
        return {
            "accuracy": {"received": accuracy[0].tolist(), "local": accuracy[1:].tolist()},
            "loss": {"received": loss[0].tolist(), "local": loss[1:].tolist()},
            **entries,
            "known": got["forgetting"].known,
        }

    def _labels(self, clients: Tensor, part: str) -> np.ndarray:
        """Count the rows of each class that each of `clients` holds now, by current labels (clients, classes)."""
        population, classes = self.fleet.population, self.fleet.population.rows.classes
        labels = [population.shard(client, self.fleet.moment, part).labels.numpy() for client in clients.tolist()]
        return np.array([np.bincount(y, minlength=classes) for y in labels]).reshape(len(clients), classes)


def _per_row(scored: list[Scores], name: str) -> np.ndarray:
    """Return a sum of each scoring divided by its rows (scorings, owners); NaN for an owner without rows."""
    rows = torch.stack([scores.rows for scores in scored])
    return torch.where(rows > 0, torch.stack([getattr(s, name) for s in scored]) / rows, torch.nan).numpy()


def _holds_weights(state: Any) -> bool:
    weights = getattr(state, "weights", None)
    several = weights if isinstance(weights, tuple) else (weights,)
    return bool(several) and all(isinstance(single, Weights) for single in several)
