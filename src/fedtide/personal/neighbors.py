"""Personalization by the nearest samples of a client: their labels vote beside the model.

Marfoq, Neglia, Kameni, Vidal: *Personalized Federated Learning through Local Memorization*, ICML 2022, Eqs. 6 to 8.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedtide.clusters.rounds import decision_rows
from fedtide.core.base import Moment, Prediction, Shard, Weights
from fedtide.core.errors import refused
from fedtide.core.rng import Rng
from fedtide.fields.types import Count, Fraction, ingredient
from fedtide.learn import mean_losses
from fedtide.learn.task import refuse_numbers
from fedtide.personal.client_networks import Networks, Personalization

GRID = torch.linspace(0, 1, 11, dtype=torch.float64)
"""Weights of the votes that are tried."""

LEAST = 1e-6
"""Share of a vote that each class has at least, so that no label is impossible."""


@ingredient
class Neighbors(Personalization):
    """The model with the lowest loss, mixed with the votes of the client's nearest samples.

    `p = lam p_votes + (1 - lam) p_model`. The k nearest training samples vote for their labels, each with the weight
    `exp(-d)` of its distance d in the features of the model.

    Args:
        k: number of nearest samples.
        lam: weight of the votes; None lets each client choose it among 0, 0.1, ..., 1 by its validation samples. A
            client without any takes 0.5.
        layer: layer whose inputs are the features; None is the last one.
    """

    k: Count = 10
    lam: Fraction | None = None
    layer: str | None = None
    kind: Literal["neighbors"] = "neighbors"

    def check(self, nets: Networks, models: int, key: str) -> None:
        """Find the features once; samples vote for one class each."""
        refuse_numbers(nets.task, key, self.kind, "its samples vote for classes", "another way")
        example = nets.task.example
        if example is not None and nets.task.logits(nets.task.init(Rng(0)), example).dim() != 2:
            raise refused(key, self.kind, "another way if rows are sequences", "each sample has one vote")
        nets.features(self.layer, key)

    def fit(self, nets: Networks, models: Sequence[Weights], shard: Shard, moment: Moment, rng: Rng) -> Any:
        """Return the model's index, features and labels of the client's samples, and the weight of their votes."""
        if not len(shard):
            return None
        k = int(mean_losses(nets.task, models, decision_rows(shard)).argmin()) if len(models) > 1 else 0
        memory = {"model": k, "features": nets.features(self.layer)(models[k], shard.x), "labels": shard.y}
        return memory | {"lam": self._weigh(nets, models[k], memory, shard.val) if self.lam is None else self.lam}

    def predict(self, nets: Networks, models: Sequence[Weights], memory: Any, x: Tensor) -> Prediction:
        """Predict by the mix of model and votes."""
        k, lam = int(memory["model"]), float(memory["lam"])
        parts = self._parts(nets, models[k], memory, x)
        return Prediction(mix(*parts, lam), torch.full((len(x),), k))

    def _parts(self, nets: Networks, model: Weights, memory: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities (rows, classes) of the model and of the votes."""
        logp = nets.task.predict_rows(model, x, double=True)
        features = nets.features(self.layer)(model, x)
        return logp, votes(features, memory["features"], memory["labels"], self.k, logp.shape[1])

    def _weigh(self, nets: Networks, model: Weights, memory: Any, val: Shard | None) -> float:
        """Return the weight of the votes of highest likelihood on validation samples."""
        if val is None or not len(val):
            return 0.5
        logp, voted = self._parts(nets, model, memory, val.x)
        rows = torch.arange(len(val))
        likelihoods = torch.stack([mix(logp, voted, lam)[rows, val.y].sum() for lam in GRID.tolist()])
        return float(GRID[int(likelihoods.nan_to_num(nan=-torch.inf).argmax())])


def votes(features: Tensor, store: Tensor, labels: Tensor, k: int, classes: int) -> Tensor:
    """Return the logarithm of the votes (rows, classes) of the nearest samples.

    Args:
        features: (rows, d).
        store: features (samples, d).
        labels: of these samples.
        k: number of samples that vote.

    >>> store, labels = torch.tensor([[0.0], [1.0], [9.0]]), torch.tensor([0, 1, 1])
    >>> votes(torch.tensor([[0.5]]), store, labels, 2, 3).exp().round(decimals=3).tolist()
    [[0.5, 0.5, 0.0]]
    """
    distance, nearest = torch.cdist(features, store).topk(min(k, len(store)), largest=False)
    shares = F.softmax(-distance, 1).unsqueeze(1) @ F.one_hot(labels[nearest], classes).to(distance.dtype)
    return ((shares.squeeze(1) + LEAST) / (1 + LEAST * classes)).log()


def mix(model: Tensor, voted: Tensor, lam: float) -> Tensor:
    """Return `log((1 - lam) p_model + lam p_votes)`; at 0 or 1 one of them, unchanged.

    >>> mix(torch.tensor([0.2]).log(), torch.tensor([0.6]).log(), 0.5).exp()
    tensor([0.4000])
    """
    if lam in (0.0, 1.0):
        return voted if lam else model
    weights = torch.tensor([1 - lam, lam], dtype=model.dtype).log()
    return torch.logaddexp(model + weights[0], voted + weights[1])
