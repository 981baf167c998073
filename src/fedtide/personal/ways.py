"""Personalization of K received models by a client: choose, mix, stack, average, fine-tune, or train alone.

Listo Zec, Mogren, Martinsson, Sütfeld, Gillblad: *Specialized Federated Learning Using a Mixture of Experts*, 2020, for
one global model; Isaksson, Listo Zec, Cöster, Gillblad, Girdzijauskas: *Adaptive Expert Models for Personalization in
Federated Learning*, 2022, section 3, for K.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedtide.clusters.served import ChooseOn, decision_rows
from fedtide.core.base import Moment, Prediction, Shard, Weights
from fedtide.core.errors import refused
from fedtide.core.rng import Rng
from fedtide.fields.types import Spelled, changed, ingredient
from fedtide.learn.local import LocalTrainer
from fedtide.learn.shared_passes import mean_losses
from fedtide.learn.target import CLASSES
from fedtide.learn.task import Task
from fedtide.models import Model
from fedtide.personal.client_networks import (
    ALONE,
    TUNING,
    Networks,
    Personalization,
    local_expert,
    train_early_stopping,
)
from fedtide.personal.expert_mixtures import Mixture, Stacking


@ingredient
class Choice(Personalization):
    """The model with the lowest loss, as in IFCA.

    Args:
        choose_on: labeled samples for the choice; "val" falls back to training samples.
    """

    choose_on: ChooseOn = "val"
    kind: Literal["choice"] = "choice"

    def fit(self, nets: Networks, models: Sequence[Weights], shard: Shard, moment: Moment, rng: Rng) -> Any:
        """Return the index of the best model."""
        rows = decision_rows(shard, self.choose_on)
        return {"model": mean_losses(nets.task, models, rows).argmin()} if len(rows) else None

    def predict(self, nets: Networks, models: Sequence[Weights], memory: Any, x: Tensor) -> Prediction:
        """Predict by the chosen model."""
        k = int(memory["model"])
        return Prediction(nets.task.predict_rows(models[k], x), torch.full((len(x),), k))


@ingredient
class FineTuned(Personalization):
    """The model with the lowest loss, fine-tuned with early stopping on validation samples.

    Args:
        solver: local training; its epochs are an upper bound.
        choose_on: labeled samples for the choice of the model.
    """

    solver: LocalTrainer = TUNING
    choose_on: ChooseOn = "val"
    kind: Literal["fine-tuned"] = "fine-tuned"

    def check(self, nets: Networks, models: int) -> None:
        """Check that the solver fits the federation's network."""
        nets.check(None, self.solver, "personal.solver")

    def fit(self, nets: Networks, models: Sequence[Weights], shard: Shard, moment: Moment, rng: Rng) -> Any:
        """Return the model's index and the client's fine-tuned copy."""
        rows = decision_rows(shard, self.choose_on)
        if not len(rows):
            return None
        k = mean_losses(nets.task, models, rows).argmin()
        tuned, _ = train_early_stopping(
            nets.task, self.solver, nets.task.loss, models[int(k)], shard, shard.val, moment, rng
        )
        return {"model": k, "own": tuned}

    def predict(self, nets: Networks, models: Sequence[Weights], memory: Any, x: Tensor) -> Prediction:
        """Predict by the client's fine-tuned copy."""
        return Prediction(nets.task.predict_rows(memory["own"], x), torch.full((len(x),), int(memory["model"])))


@ingredient
class OwnModel(Personalization):
    """A local model that the client trains from scratch.

    Args:
        solver: training of the local model; its epochs are an upper bound.
        model: network of the local model; None is that of the federation.
    """

    solver: LocalTrainer = ALONE
    model: Annotated[Model, Spelled] | None = None
    chooses: ClassVar[bool] = False

    def check(self, nets: Networks, models: int) -> None:
        """Build the client's network once."""
        nets.check(self.model, self.solver, "personal.solver")

    def fit(self, nets: Networks, models: Sequence[Weights], shard: Shard, moment: Moment, rng: Rng) -> Any:
        """Train the client's model."""
        if not len(shard):
            return None
        return {"own": local_expert(nets.of(self.model), self.solver, shard, moment, rng)}


@ingredient
class Alone(OwnModel):
    """A local model that the client trains from scratch, without the federation."""

    kind: Literal["alone"] = "alone"

    def predict(self, nets: Networks, models: Sequence[Weights], memory: Any, x: Tensor) -> Prediction:
        """Predict by the client's model."""
        return Prediction(nets.of(self.model).predict_rows(memory["own"], x))


@ingredient
class Ensemble(OwnModel):
    """An ensemble of all models and a local model trained from scratch, with equal weights.

    Args:
        of: average probabilities, or sum logits as in the authors' code.
    """

    of: Literal["probabilities", "logits"] = "probabilities"
    kind: Literal["ensemble"] = "ensemble"

    def check(self, nets: Networks, models: int) -> None:
        """Build the client's network once; logits are summed of classes alone."""
        if self.of == "logits" and nets.task.target != CLASSES:
            raise refused("personal.of", self.of, "'probabilities' if rows have no classes")
        nets.check(self.model, self.solver, "personal.solver")

    def predict(self, nets: Networks, models: Sequence[Weights], memory: Any, x: Tensor) -> Prediction:
        """Predict by the ensemble."""
        logits = [nets.of(self.model).logits(memory["own"], x), *(nets.task.logits(outputs, x) for outputs in models)]
        if self.of == "logits":
            return Prediction(F.log_softmax(torch.stack(logits).sum(0), -1))
        target = nets.task.target
        return Prediction(target.mix(torch.stack([target.read_outputs(outputs.double()) for outputs in logits])))


Personal = Annotated[Choice | FineTuned | Alone | Ensemble | Mixture | Stacking, Field(discriminator="kind")]


def names_of(ways: Sequence[Any]) -> list[str]:
    """Return a name for each of several personalizations: its kind, and where that is repeated what is not a default.

    >>> names_of([Choice(), Mixture(), Mixture(tune=True, held=0.3)])
    ['choice', 'mixture', 'mixture tune true held 0.3']
    """
    kinds, out = [way.kind for way in ways], list[str]()
    for way in ways:
        settings = {key: value for key, value in changed(way).items() if isinstance(value, bool | int | float | str)}
        telling = [f"{key} {str(value).lower()}" for key, value in settings.items() if key != "kind"]
        name = " ".join([way.kind, *telling]) if kinds.count(way.kind) > 1 else str(way.kind)
        again = sum(earlier == name or earlier.startswith(f"{name} #") for earlier in out)
        out.append(f"{name} #{again + 1}" if again else name)
    return out


def predict_personal(
    personal: Personalization,
    nets: Networks,
    models: Sequence[Weights],
    usual: int,
    memories: Sequence[Any],
    x: Tensor,
    owner: Tensor,
) -> Prediction:
    """Predict rows of many clients, each by its client's memory; by the model `usual` for clients without one.

    Args:
        personal: the personalization.
        nets: the clients' networks.
        models: the received models.
        usual: index of the model for clients without labeled samples.
        memories: result of `personal.fit` of every client.
        x: (rows, ...).
        owner: (rows,) the client of each row.
    """
    parts, places = [], []
    for place, memory in enumerate(memories):
        rows = (owner == place).nonzero().flatten()
        if memory is None:
            prediction = Choice().predict(nets, models, {"model": usual}, x[rows])
            if personal.own_expert:  # without a local expert, all weight is on one of the others
                choice = torch.full((len(rows),), usual + 1)
                prediction = Prediction(prediction.told, choice, F.one_hot(choice, len(models) + 1).double())
        else:
            prediction = personal.predict(nets, models, memory, x[rows])
        parts.append(prediction)
        places.append(rows)
    order = torch.cat(places).argsort()
    log_probs = torch.cat([part.told.double() for part in parts])[order]
    if not personal.chooses:
        return Prediction(log_probs)
    choice = torch.cat([part.choice for part in parts if part.choice is not None])[order]
    weights = [part.weights for part in parts if part.weights is not None]
    return Prediction(log_probs, choice, torch.cat(weights)[order] if weights else None)


def by_own_weights(task: Task, key: str) -> Any:
    """Build the `predict` of methods whose clients may keep a model: by the client's own, else by the payload's.

    Args:
        task: the task.
        key: key of the weights in a client's memory.
    """

    def predict(payload: Weights, memories: Sequence[Any], x: Tensor, owner: Tensor) -> Prediction:
        log_probs = task.predict(payload, memories, x, owner).told
        for place, memory in enumerate(memories):
            if memory is not None:
                rows = owner == place
                log_probs[rows] = task.predict(memory[key], (), x[rows], owner[rows]).told
        return Prediction(log_probs)

    return predict
