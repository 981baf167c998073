"""Stacking of K models, a local expert and a fine-tuned model, with a constant weight for each.

Smyth, Wolpert: *Linearly Combining Density Estimators via Stacking*, Machine Learning 36, 1999: the weights of fitted
models in a mixture, by EM on samples that none of them was fitted to. Here for the models that a client of adaptive
expert models has, on its validation samples: no step was taken on these, but its own two models stopped by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedtide.clusters.served import decision_rows
from fedtide.core.base import Moment, Prediction, Shard, Weights
from fedtide.core.rng import Rng
from fedtide.fields.types import NonNegative, Spelled, ingredient
from fedtide.learn.local import LocalTrainer
from fedtide.learn.shared_passes import mean_losses
from fedtide.learn.task import Task, needs_likelihood
from fedtide.models import Model
from fedtide.personal.early_stopping import train_early_stopping
from fedtide.personal.expert_nets import ALONE, TUNING, Networks, local_expert
from fedtide.personal.personalization import Personalization

STEPS = 200
"""EM steps at most."""

CLOSE = 1e-6
"""Largest change of a weight at which EM ends."""


@ingredient
class Stacking(Personalization):
    """A mixture of the K models, a local expert and a fine-tuned model, weighted by EM on validation samples.

    `p(y|x) = sum_e w_e p_e(y|x)`, with the same weights for all of a client's samples. There is no gate that learns to
    trust the local expert on the samples that it was trained on.

    A client without validation samples takes the received model with the lowest loss on its training samples, as these
    say nothing about models that were trained on them.

    Args:
        solver: training of the local expert; its epochs are an upper bound.
        tuning: fine-tuning of the received model with the lowest validation loss; its epochs are an upper bound.
        model: network of the local expert; None is that of the federation.
        pseudo_count: samples that each model is credited with before validation samples are counted.
    """

    solver: LocalTrainer = ALONE
    tuning: LocalTrainer = TUNING
    model: Annotated[Model, Spelled] | None = None
    pseudo_count: NonNegative = 0.5
    kind: Literal["stacking"] = "stacking"
    own_expert: ClassVar[bool] = True

    def check(self, nets: Networks, models: int) -> None:
        """Build the local expert's network once, and check that both solvers fit."""
        needs_likelihood(nets.task, "personal", self.kind)
        nets.check(self.model, self.solver, "personal.solver")
        nets.check(None, self.tuning, "personal.tuning")

    def fit(self, nets: Networks, models: Sequence[Weights], shard: Shard, moment: Moment, rng: Rng) -> Any:
        """Train the local expert and the fine-tuned model; weigh them and the received models."""
        rows = decision_rows(shard, "val")
        if not len(rows):
            return None
        best = mean_losses(nets.task, models, rows).argmin()
        chosen = F.one_hot(best, len(models)).double()
        if rows is shard:
            return {"private": [], "weights": chosen}
        own = local_expert(nets.of(self.model), self.solver, shard, moment, rng)
        tuned, _ = train_early_stopping(
            nets.task, self.tuning, nets.task.loss, models[int(best)], shard, rows, moment, rng
        )
        experts = self._experts(nets, models, [own, tuned])
        each = torch.stack([-task.row_losses(model, rows.x, rows.y) for task, model in experts], -1)
        each = each.flatten(0, -2) if rows.mask is None else each[rows.mask]
        usable = each.isfinite().all(0)
        if not usable.any():
            return {"private": [], "weights": chosen}
        weights = torch.zeros(len(experts), dtype=torch.float64)
        weights[usable] = stack(each[:, usable], self.pseudo_count)
        return {"private": [own, tuned], "weights": weights}

    def predict(self, nets: Networks, models: Sequence[Weights], kept: Any, x: Tensor) -> Prediction:
        """Predict by the mixture; of the reported weights the first is that of the client's two models together."""
        weights, experts = kept["weights"], self._experts(nets, models, kept["private"])
        # One without weight may say NaN.
        heard = [(*expert, weight) for expert, weight in zip(experts, weights, strict=True) if weight]
        told = torch.stack([task.predict_rows(model, x, double=True) for task, model, _ in heard])
        each = torch.stack([weight for *_, weight in heard]).log()
        mixed = nets.task.target.mixed(told, each.reshape(-1, *[1] * (told.dim() - 1)))
        shares = torch.cat([weights[len(models) :].sum().reshape(1), weights[: len(models)]])
        return Prediction(mixed, shares.argmax().expand(len(x)), shares.expand(len(x), -1))

    def _experts(
        self, nets: Networks, models: Sequence[Weights], private: Sequence[Weights]
    ) -> list[tuple[Task, Weights]]:
        """Return the received models, and the client's local and fine-tuned ones if it has them."""
        return [*((nets.task, each) for each in models), *zip((nets.of(self.model), nets.task), private, strict=False)]


def stack(log_likelihoods: Tensor, pseudo_count: float) -> Tensor:
    """Return the weights (E,) of experts by EM: those of highest likelihood, or highest posterior with pseudo-counts.

    `w_e = (c + sum_s w_e p_e(s) / sum_f w_f p_f(s)) / (n + c E)` of n rows, E experts and pseudo-count c, until nothing
    changes; the objective is concave, and the start is uniform.

    Args:
        log_likelihoods: log p_e(s) (rows, E).
        pseudo_count: rows that each expert is credited with.

    >>> rows = torch.tensor([[0.0, -torch.inf], [0.0, -torch.inf], [-torch.inf, 0.0]], dtype=torch.float64)
    >>> stack(rows, 0.5).tolist()
    [0.625, 0.375]
    """
    rows, experts = log_likelihoods.shape
    weights = torch.full((experts,), 1 / experts, dtype=torch.float64)
    for _ in range(STEPS):
        shares = (log_likelihoods.double() + weights.log()).softmax(1).sum(0)
        after = (pseudo_count + shares) / (rows + pseudo_count * experts)
        moved, weights = float((after - weights).abs().max()), after
        if moved < CLOSE:
            break
    return weights
