"""What a client makes of K models that it was sent, for itself: choose, mix, average, fine-tune, or do without.

Each way has `fit(nets, models, shard, moment, rng)`, what the client keeps of its labeled rows (None without any), and
`predict(nets, models, kept, x)`. Nothing of it leaves the client.

Listo Zec, Mogren, Martinsson, Sütfeld, Gillblad: *Specialized Federated Learning Using a Mixture of Experts*, 2020, for
one global model; Isaksson, Listo Zec, Cöster, Gillblad, Girdzijauskas: *Adaptive Expert Models for Personalization in
Federated Learning*, 2022, section 3, for K.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedtide.core.config_types import Spelled, ingredient
from fedtide.core.rng import Rng
from fedtide.core.types import Moment, Prediction, Shard, Weights
from fedtide.learn.local import LocalTrainer
from fedtide.learn.task import Task
from fedtide.models import Model
from fedtide.multi.clusters import ChooseOn, deciding, mean_losses
from fedtide.multi.early_stopping import early_stopped
from fedtide.multi.expert_nets import ALONE, Networks, local_expert
from fedtide.multi.mixture import Mixture

TUNING = LocalTrainer(lr=1e-4, epochs=200, batch_size=10, optimizer="adamw")


@runtime_checkable
class Way(Protocol):
    """What a client does with the models that it was sent, before it is judged."""

    own_expert: ClassVar[bool]
    """Whether the first of the experts whose weights it tells is the client's own."""
    chooses: ClassVar[bool]
    """Whether its predictions say by which model or expert they were made."""

    def check(self, nets: Networks, models: int) -> None:
        """Build its networks once."""

    def fit(self, nets: Networks, models: Sequence[Weights], shard: Shard, moment: Moment, rng: Rng) -> Any:
        """What it keeps of its labeled rows; None without any."""

    def predict(self, nets: Networks, models: Sequence[Weights], kept: Any, x: Tensor) -> Prediction:
        """Predictions for rows."""


@ingredient
class Choice:
    """The model that fits best, as in IFCA.

    Args:
        choose_on: the labeled rows that decide; "val" falls back to training rows.
    """

    choose_on: ChooseOn = "val"
    kind: Literal["choice"] = "choice"
    own_expert: ClassVar[bool] = False
    chooses: ClassVar[bool] = True

    def check(self, nets: Networks, models: int) -> None:
        """There is nothing to build."""

    def fit(self, nets: Networks, models: Sequence[Weights], shard: Shard, moment: Moment, rng: Rng) -> Any:
        """The number of the model."""
        rows = deciding(shard, self.choose_on)
        return {"model": mean_losses(nets.task, models, rows).argmin()} if len(rows) else None

    def predict(self, nets: Networks, models: Sequence[Weights], kept: Any, x: Tensor) -> Prediction:
        """By that model."""
        k = int(kept["model"])
        logp = F.log_softmax(nets.task.logits(models[k], x), -1)
        return Prediction(logp, torch.full((len(x),), k))


@ingredient
class FineTuned:
    """The model that fits best, trained on until validation rows gain nothing more.

    Args:
        solver: how; its epochs are the most there can be.
        choose_on: the labeled rows that decide which model.
    """

    solver: LocalTrainer = TUNING
    choose_on: ChooseOn = "val"
    kind: Literal["fine-tuned"] = "fine-tuned"
    own_expert: ClassVar[bool] = False
    chooses: ClassVar[bool] = True

    def check(self, nets: Networks, models: int) -> None:
        """The federation's network must suit its solver."""
        nets.check(None, self.solver, "solver")

    def fit(self, nets: Networks, models: Sequence[Weights], shard: Shard, moment: Moment, rng: Rng) -> Any:
        """The model's number and the client's own version of it."""
        rows = deciding(shard, self.choose_on)
        if not len(rows):
            return None
        k = mean_losses(nets.task, models, rows).argmin()
        own = early_stopped(nets.task, self.solver, nets.task.loss, models[int(k)], shard, shard.val, moment, rng)
        return {"model": k, "own": own}

    def predict(self, nets: Networks, models: Sequence[Weights], kept: Any, x: Tensor) -> Prediction:
        """By the client's own version."""
        logp = F.log_softmax(nets.task.logits(kept["own"], x), -1)
        return Prediction(logp, torch.full((len(x),), int(kept["model"])))


@ingredient
class Alone:
    """A model that the client trains from scratch, without the federation.

    Args:
        solver: how; its epochs are the most there can be.
        model: its network; None is that of the federation.
    """

    solver: LocalTrainer = ALONE
    model: Annotated[Model, Spelled] | None = None
    kind: Literal["alone"] = "alone"
    own_expert: ClassVar[bool] = False
    chooses: ClassVar[bool] = False

    def check(self, nets: Networks, models: int) -> None:
        """Build the client's network once."""
        nets.check(self.model, self.solver, "solver")

    def fit(self, nets: Networks, models: Sequence[Weights], shard: Shard, moment: Moment, rng: Rng) -> Any:
        """The client's model."""
        if not len(shard):
            return None
        return {"own": local_expert(nets.of(self.model), self.solver, shard, moment, rng)}

    def predict(self, nets: Networks, models: Sequence[Weights], kept: Any, x: Tensor) -> Prediction:
        """By it."""
        return Prediction(F.log_softmax(nets.of(self.model).logits(kept["own"], x), -1))


@ingredient
class Ensemble:
    """All models and one that the client trains from scratch, with equal weights.

    Args:
        of: whether probabilities are averaged, or logits summed as in the authors' code.
        solver: how the client's own model is trained.
        model: its network; None is that of the federation.
    """

    of: Literal["probabilities", "logits"] = "probabilities"
    solver: LocalTrainer = ALONE
    model: Annotated[Model, Spelled] | None = None
    kind: Literal["ensemble"] = "ensemble"
    own_expert: ClassVar[bool] = False
    chooses: ClassVar[bool] = False

    def check(self, nets: Networks, models: int) -> None:
        """Build the client's network once."""
        nets.check(self.model, self.solver, "solver")

    def fit(self, nets: Networks, models: Sequence[Weights], shard: Shard, moment: Moment, rng: Rng) -> Any:
        """The client's own model."""
        if not len(shard):
            return None
        return {"own": local_expert(nets.of(self.model), self.solver, shard, moment, rng)}

    def predict(self, nets: Networks, models: Sequence[Weights], kept: Any, x: Tensor) -> Prediction:
        """By all."""
        logits = [nets.of(self.model).logits(kept["own"], x), *(nets.task.logits(each, x) for each in models)]
        if self.of == "logits":
            return Prediction(F.log_softmax(torch.stack(logits).sum(0), -1))
        logp = torch.stack([F.log_softmax(each.double(), -1) for each in logits])
        return Prediction(torch.logsumexp(logp, 0) - torch.log(torch.tensor(float(len(logits)), dtype=torch.float64)))


Personal = Annotated[Choice | FineTuned | Alone | Ensemble | Mixture, Field(discriminator="kind")]


def predicted(
    way: Way,
    nets: Networks,
    models: Sequence[Weights],
    usual: int,
    memories: Sequence[Any],
    x: Tensor,
    owner: Tensor,
) -> Prediction:
    """Rows of many clients, each by what its client keeps; by the model `usual` where a client keeps nothing.

    Args:
        way: what clients did.
        nets: their networks.
        models: that they were sent.
        usual: place of the model of those who have no labeled rows.
        memories: of every client, what `way.fit` gave.
        x: (rows, ...).
        owner: (rows,) whose each is.
    """
    parts, places = [], []
    for place, kept in enumerate(memories):
        rows = (owner == place).nonzero().flatten()
        if kept is None:
            made = Choice().predict(nets, models, {"model": usual}, x[rows])
            if way.own_expert:  # without an expert of its own, and all the weight on one of the others
                choice = torch.full((len(rows),), usual + 1)
                made = Prediction(made.logp, choice, F.one_hot(choice, len(models) + 1).double())
        else:
            made = way.predict(nets, models, kept, x[rows])
        parts.append(made)
        places.append(rows)
    order = torch.cat(places).argsort()
    logp = torch.cat([part.logp.double() for part in parts])[order]
    if not way.chooses:
        return Prediction(logp)
    choice = torch.cat([part.choice for part in parts if part.choice is not None])[order]
    weights = [part.weights for part in parts if part.weights is not None]
    return Prediction(logp, choice, torch.cat(weights)[order] if weights else None)


def by_own_weights(task: Task, key: str) -> Any:
    """The `predict` of methods whose clients keep a model: rows by their client's own, or else by the payload's.

    Args:
        task: how the weights are read.
        key: where a client's memory has its weights.
    """

    def predict(payload: Weights, memories: Sequence[Any], x: Tensor, owner: Tensor) -> Prediction:
        logp = task.predict(payload, memories, x, owner).logp
        for place, memory in enumerate(memories):
            if memory is not None:
                rows = owner == place
                logp[rows] = task.predict(memory[key], (), x[rows], owner[rows]).logp
        return Prediction(logp)

    return predict
