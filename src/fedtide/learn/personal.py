"""What a client makes of K models that it was sent, for itself: choose, mix, average, fine-tune, or do without.

Each way has `fit(nets, models, shard, moment, rng)`, what the client keeps of its labelled rows (None without any), and
`predict(nets, models, kept, x)`. Nothing of it leaves the client.

Listo Zec, Mogren, Martinsson, Sütfeld, Gillblad: *Specialized Federated Learning Using a Mixture of Experts*, 2020, for
one global model; Isaksson, Listo Zec, Cöster, Gillblad, Girdzijauskas: *Adaptive Expert Models for Personalization in
Federated Learning*, 2022, section 3, for K.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.trees import detached
from fedtide.core.types import Moment, Prediction, Shard, Weights
from fedtide.core.values import Flag, OpenFraction, Spelled, ingredient
from fedtide.learn.early import early_stopped, log_likelihood
from fedtide.learn.local import LocalSolver
from fedtide.learn.loss import CrossEntropy
from fedtide.learn.several import ChooseOn, deciding, mean_losses
from fedtide.learn.task import Task
from fedtide.models import Model
from fedtide.models.images import MLP

TUNING = LocalSolver(rate=1e-4, epochs=200, batch=10, optimiser="adamw")
ALONE = LocalSolver(rate=3e-4, epochs=200, batch=10, optimiser="adamw", weight_decay=1e-2)
GATING = LocalSolver(rate=1e-3, epochs=200, batch=10, optimiser="adamw", weight_decay=1e-3)


class Networks:
    """The networks that clients have besides the model of the federation, for the same rows; each is built once.

    Args:
        task: that of the federation.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self._made: dict[str, Task] = {}

    def of(self, model: Model | None, classes: int | None = None) -> Task:
        """A task on another network; the federation's own where none is named.

        Raises:
            FedtideError: it does not fit the rows, or these are not known.
        """
        if model is None:
            return self.task
        key = f"{model} {classes}"
        if key not in self._made:
            self._made[key] = self._built(model, classes)
        return self._made[key]

    def _built(self, model: Model, classes: int | None) -> Task:
        task = self.task
        if task.example is None:
            raise FedtideError("Task: found no example, allowed: some row (1, ...), for networks of a client's own")
        shape = tuple(task.example.shape[1:])
        outputs = task.logits(task.init(Rng(0)), task.example).shape[-1] if classes is None else classes
        made = Task(lambda: model.build(shape, outputs), task.loss, task.dtype, task.channels_last, task.example)
        try:
            made.logits(made.init(Rng(0)), task.example)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise FedtideError(f"a network of clients does not fit rows of shape {shape}: {error}") from None
        return made

    def check(self, model: Model | None, solver: LocalSolver, key: str, classes: int | None = None) -> None:
        """Build a network, and find out what its solver cannot do with it.

        Raises:
            FedtideError: what does not fit.
        """
        made, example = self.of(model, classes), self.task.example
        if example is not None:
            try:
                solver.check(made.scratch, tuple(example.shape[1:]))
            except FedtideError as error:
                raise FedtideError(str(error).replace("local.", f"{key}.", 1)) from None

    def mixture(self, model: Model | None, gate: Model, models: int) -> Task:
        """Gate, an expert of the client's own and K others as one task, minimised by -log p(y|x) whatever the others
        are."""
        key = f"{gate} {model} {models} models"
        if key not in self._made:
            task, gated, own = self.task, self.of(gate, models + 1), self.of(model)
            self._made[key] = Task(
                lambda: Experts(gated.build(), [own.build(), *(task.build() for _ in range(models))]),
                CrossEntropy(), task.dtype, task.channels_last, task.example,
            )  # fmt: skip
        return self._made[key]


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
        """What it keeps of its labelled rows; None without any."""

    def predict(self, nets: Networks, models: Sequence[Weights], kept: Any, x: Tensor) -> Prediction:
        """Predictions for rows."""


@ingredient
class Choice:
    """The model that fits best, as in IFCA.

    Args:
        choose_on: the labelled rows that decide; "valid" falls back to training rows.
    """

    choose_on: ChooseOn = "valid"
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
        choose_on: the labelled rows that decide which model.
    """

    solver: LocalSolver = TUNING
    choose_on: ChooseOn = "valid"
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
        own = early_stopped(nets.task, self.solver, nets.task.loss, models[int(k)], shard, shard.valid, moment, rng)
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

    solver: LocalSolver = ALONE
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
    solver: LocalSolver = ALONE
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


@ingredient
class Mixture:
    """A gate weighs the K models and one that the client trains from scratch, row by row (the paper's Eq. 5).

    `p(y|x) = g_0(x) p_own(y|x) + sum_j g_j(x) p_j(y|x)`, trained by `-log p(y|x)` in log space.

    Args:
        gate: the gate's network.
        gating: how the gate is trained; its epochs are the most there can be.
        solver: how the client's own expert is trained.
        model: its network; None is that of the federation.
        tune: train private copies of all experts along with the gate, as most of the authors' configurations do.
        held: share of the training rows that only the gate sees; 0 trains gate and own expert on the same rows.
    """

    gate: Annotated[Model, Spelled] = MLP(hidden=(16,))
    gating: LocalSolver = GATING
    solver: LocalSolver = ALONE
    model: Annotated[Model, Spelled] | None = None
    tune: Flag = False
    held: OpenFraction = 0.0
    kind: Literal["mixture"] = "mixture"
    own_expert: ClassVar[bool] = True
    chooses: ClassVar[bool] = True

    def check(self, nets: Networks, models: int) -> None:
        """Build the gate, the client's own network and, with `tune`, all in one, once."""
        nets.check(self.gate, self.gating, "gating", models + 1)
        nets.check(self.model, self.solver, "solver")
        if self.tune:
            nets.mixture(self.model, self.gate, models)

    def __post_init__(self) -> None:
        if self.gating.augment and not self.tune:
            raise ValueError("gating.augment: found some, allowed: none without `tune`, as experts judge the rows once")

    def fit(self, nets: Networks, models: Sequence[Weights], shard: Shard, moment: Moment, rng: Rng) -> Any:
        """The client's own expert and its gate; with `tune` its own versions of all experts."""
        if not len(shard):
            return None
        expert_rows, gate_rows = divided(shard, self.held, rng.at("held"))
        own = local_expert(nets.of(self.model), self.solver, expert_rows, moment, rng)
        gate = nets.of(self.gate, len(models) + 1)
        start = gate.init(rng.at("gate"))
        if not self.tune:
            loss = Mixed(((nets.of(self.model), own), *((nets.task, each) for each in models)))
            weights = early_stopped(
                gate, self.gating, loss, start, gate_rows, shard.valid, moment, rng.at("gating"), every=2, patience=20
            )
            return {"own": own, "gate": weights}
        whole = nets.mixture(self.model, self.gate, len(models))
        together = merged({"gate": start, "experts.0": own, **{f"experts.{k + 1}": m for k, m in enumerate(models)}})
        tuned = early_stopped(
            whole, self.gating, whole.loss, together, gate_rows, shard.valid, moment, rng.at("gating"), every=2,
            patience=20,
        )  # fmt: skip
        return {"mixture": tuned}

    def predict(self, nets: Networks, models: Sequence[Weights], kept: Any, x: Tensor) -> Prediction:
        """By the mixture, in log space; the weights are the gate's, the client's own expert first."""
        if self.tune:
            parts = split(kept["mixture"], len(models) + 2)
            gate_weights, (own, *models) = parts[0], parts[1:]
        else:
            gate_weights, own = kept["gate"], kept["own"]
        log_gate = F.log_softmax(nets.of(self.gate, len(models) + 1).logits(gate_weights, x).double(), -1)
        logits = [nets.of(self.model).logits(own, x), *(nets.task.logits(each, x) for each in models)]
        logp = torch.stack([F.log_softmax(each.double(), -1) for each in logits], 1)
        mixed = torch.logsumexp(log_gate[:, :, None] + logp, 1)
        return Prediction(mixed, log_gate.argmax(1), log_gate.exp())


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
        usual: place of the model of those who have no labelled rows.
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


@dataclass(frozen=True)
class Mixed:
    """`-log sum_e g_e p_e(y)` of a gate's logits, with experts that stand still."""

    experts: tuple[tuple[Task, Weights], ...] = field(repr=False)

    def prepare(self, shard: Shard) -> tuple[None, Tensor]:
        """log p_e(y) of every row and expert (rows, E)."""
        return None, torch.stack([log_likelihood(t, w, shard.x, shard.y) for t, w in self.experts], 1)

    def value(self, outputs: Tensor, y: Tensor, shared: None, per_row: Tensor | None) -> Tensor:
        """The mean over rows."""
        assert per_row is not None
        return -torch.logsumexp(F.log_softmax(outputs, -1) + per_row.to(outputs.dtype), 1).mean()


class Experts(nn.Module):
    """A gate and experts as one network, whose outputs are log-probabilities."""

    def __init__(self, gate: nn.Module, experts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.gate, self.experts = gate, nn.ModuleList(experts)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, ...) -> (rows, classes)."""
        logp = torch.stack([F.log_softmax(expert(x), -1) for expert in self.experts], 1)
        return torch.logsumexp(F.log_softmax(self.gate(x), -1)[:, :, None] + logp, 1)


def local_expert(own: Task, solver: LocalSolver, shard: Shard, moment: Moment, rng: Rng) -> Weights:
    """A model trained from scratch on a client's rows, until its validation rows gain nothing more."""
    start = own.init(rng.at("own"))
    return early_stopped(own, solver, own.loss, start, shard, shard.valid, moment, rng.at("alone"))


def divided(shard: Shard, held: float, rng: Rng) -> tuple[Shard, Shard]:
    """Rows for the expert and rows for the gate; the same where nothing is held back, at least one row each."""
    if not held or len(shard) < 2:
        return shard, shard
    order = torch.from_numpy(rng.numpy().permutation(len(shard)))
    count = min(max(round(held * len(shard)), 1), len(shard) - 1)
    gate, expert = order[:count].sort().values, order[count:].sort().values
    return rows_of(shard, expert), rows_of(shard, gate)


def rows_of(shard: Shard, where: Tensor) -> Shard:
    """Some rows of a client; its validation rows stay what they are."""
    time, mask = (None if column is None else column[where] for column in (shard.time, shard.mask))
    return Shard(shard.x[where], shard.y[where], shard.ids[where], time, mask, shard.held_out)


def merged(parts: dict[str, Weights]) -> Weights:
    """Weights of several networks as those of one that has them as parts."""
    params = {f"{name}.{key}": value for name, each in parts.items() for key, value in each.params.items()}
    buffers = {f"{name}.{key}": value for name, each in parts.items() for key, value in each.buffers.items()}
    return detached(Weights(params, buffers))


def split(weights: Weights, parts: int) -> list[Weights]:
    """The gate's weights, then those of each expert: the reverse of `merged`."""
    names = ["gate.", *(f"experts.{k}." for k in range(parts - 1))]

    def under(values: dict[str, Tensor], name: str) -> dict[str, Tensor]:
        return {key.removeprefix(name): value for key, value in values.items() if key.startswith(name)}

    return [Weights(under(dict(weights.params), name), under(dict(weights.buffers), name)) for name in names]
