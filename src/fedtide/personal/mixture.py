"""A mixture of K models and a local expert, weighted by a gate.

Listo Zec, Mogren, Martinsson, Sütfeld, Gillblad: *Specialized Federated Learning Using a Mixture of Experts*, 2020, for
one global model; Isaksson, Listo Zec, Cöster, Gillblad, Girdzijauskas: *Adaptive Expert Models for Personalization in
Federated Learning*, 2022, section 3, for K.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedtide.core.base import Moment, Prediction, Shard, Weights
from fedtide.core.errors import refused
from fedtide.core.rng import Rng
from fedtide.core.trees import detached
from fedtide.core.weights import renamed, united
from fedtide.fields.types import Flag, OpenFraction, Spelled, ingredient
from fedtide.learn.local import LocalTrainer
from fedtide.learn.losses import Columns
from fedtide.learn.target import CLASSES
from fedtide.learn.task import Task, needs_likelihood
from fedtide.models import Model
from fedtide.models.image_networks import MLP
from fedtide.personal.early_stopping import train_early_stopping
from fedtide.personal.expert_nets import ALONE, Networks, local_expert
from fedtide.personal.personalization import Personalization

GATING = LocalTrainer(lr=1e-3, epochs=200, batch_size=10, optimizer="adamw", weight_decay=1e-3)


@ingredient
class Mixture(Personalization):
    """A mixture of the K models and a local expert trained from scratch, weighted per row by a gate (Eq. 5).

    `p(y|x) = g_0(x) p_own(y|x) + sum_j g_j(x) p_j(y|x)`, trained by `-log p(y|x)` in log space.

    Args:
        gate: the gate's network.
        gating: training of the gate; its epochs are an upper bound.
        solver: training of the local expert.
        model: network of the local expert; None is that of the federation.
        tune: train private copies of all experts along with the gate, as most of the authors' configurations do.
        held: share of the training samples on which the local expert is not trained from scratch: the gate has these
            alone, or with `tune` gate and experts together all samples. 0 trains both on the same samples.
    """

    gate: Annotated[Model, Spelled] = MLP(hidden=(16,))
    gating: LocalTrainer = GATING
    solver: LocalTrainer = ALONE
    model: Annotated[Model, Spelled] | None = None
    tune: Flag = False
    held: OpenFraction = 0.0
    kind: Literal["mixture"] = "mixture"
    own_expert: ClassVar[bool] = True

    def check(self, nets: Networks, models: int) -> None:
        """Build the gate, the local expert and, with `tune`, the merged network, once."""
        needs_likelihood(nets.task, "personal", self.kind)
        if self.tune and nets.task.target != CLASSES:
            raise refused("personal.tune", True, "false where rows have no classes")
        nets.check(self.gate, self.gating, "personal.gating", models + 1)
        nets.check(self.model, self.solver, "personal.solver")
        if self.tune:
            nets.mixture(self.model, self.gate, models)

    def __post_init__(self) -> None:
        if self.gating.augment and not self.tune:
            raise ValueError("gating.augment: found some, allowed: none without `tune`, as experts judge the rows once")

    def fit(self, nets: Networks, models: Sequence[Weights], shard: Shard, moment: Moment, rng: Rng) -> Any:
        """Train the local expert and the gate; with `tune` also private copies of all experts."""
        if not len(shard):
            return None
        expert_rows, gate_rows = split_for_gate(shard, self.held, rng.at("held"))
        own = local_expert(nets.of(self.model), self.solver, expert_rows, moment, rng)
        gate = nets.of(self.gate, len(models) + 1)
        start = gate.init(rng.at("gate"))
        if not self.tune:
            loss = Mixed(((nets.of(self.model), own), *((nets.task, each) for each in models)))
            weights, _ = train_early_stopping(
                gate, self.gating, loss, start, gate_rows, shard.val, moment, rng.at("gating"), every=2, patience=20
            )
            return {"own": own, "gate": weights}
        whole = nets.mixture(self.model, self.gate, len(models))
        together = merge_networks(
            {"gate": start, "experts.0": own, **{f"experts.{k + 1}": m for k, m in enumerate(models)}}
        )
        tuned, _ = train_early_stopping(
            whole, self.gating, whole.loss, together, shard, shard.val, moment, rng.at("gating"), every=2, patience=20
        )
        return {"mixture": tuned}

    def predict(self, nets: Networks, models: Sequence[Weights], kept: Any, x: Tensor) -> Prediction:
        """Predict by the mixture, in log space; the weights are the gate's, the local expert first."""
        if self.tune:
            parts = split_networks(kept["mixture"], len(models) + 2)
            gate_weights, (own, *models) = parts[0], parts[1:]
        else:
            gate_weights, own = kept["gate"], kept["own"]
        log_gate = F.log_softmax(nets.of(self.gate, len(models) + 1).logits(gate_weights, x).double(), -1)
        told = [nets.of(self.model).predict_rows(own, x, double=True)]
        told += [nets.task.predict_rows(each, x, double=True) for each in models]
        mixed = nets.task.target.mixed(torch.stack(told, 1), log_gate[:, :, None], 1)
        return Prediction(mixed, log_gate.argmax(1), log_gate.exp())


@dataclass(frozen=True)
class Mixed:
    """The loss `-log sum_e g_e p_e(y)` of a gate's logits, with fixed experts."""

    experts: tuple[tuple[Task, Weights], ...] = field(repr=False)

    def prepare(self, shard: Shard) -> tuple[None, Columns]:
        """Return log p_e(y) of every row and expert (rows, E)."""
        return None, (torch.stack([-t.row_losses(w, shard.x, shard.y) for t, w in self.experts], 1),)

    def value(self, outputs: Tensor, y: Tensor, shared: None, columns: Columns) -> Tensor:
        """Return the mean over rows."""
        (logp,) = columns
        return -torch.logsumexp(F.log_softmax(outputs, -1) + logp.to(outputs.dtype), 1).mean()


def split_for_gate(shard: Shard, held: float, rng: Rng) -> tuple[Shard, Shard]:
    """Split samples between expert and gate, at least one each; both get all samples if none are held back."""
    if not held or len(shard) < 2:
        return shard, shard
    order = torch.from_numpy(rng.numpy().permutation(len(shard)))
    count = min(max(round(held * len(shard)), 1), len(shard) - 1)
    gate, expert = order[:count].sort().values, order[count:].sort().values
    return shard.pick(expert), shard.pick(gate)


def merge_networks(parts: dict[str, Weights]) -> Weights:
    """Merge weights of several networks into those of one network with these parts."""
    longer = [{key: f"{name}.{key}" for key in (*each.params, *each.buffers)} for name, each in parts.items()]
    return detached(united(map(renamed, parts.values(), longer)))


def split_networks(weights: Weights, parts: int) -> list[Weights]:
    """Return the gate's weights, then those of each expert: the reverse of `merge_networks`."""
    keys, names = [*weights.params, *weights.buffers], ["gate.", *(f"experts.{k}." for k in range(parts - 1))]
    return [renamed(weights, {key: key.removeprefix(name) for key in keys if key.startswith(name)}) for name in names]
