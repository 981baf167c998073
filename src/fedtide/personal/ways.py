"""Personalization of K received models by a client: choose, mix, stack, average, fine-tune, or train alone.

Listo Zec, Mogren, Martinsson, Sütfeld, Gillblad: *Specialized Federated Learning Using a Mixture of Experts*, 2020, for
one global model; Isaksson, Listo Zec, Cöster, Gillblad, Girdzijauskas: *Adaptive Expert Models for Personalization in
Federated Learning*, 2022, section 3, for K.

Stacking: Smyth, Wolpert: *Linearly Combining Density Estimators via Stacking*, Machine Learning 36, 1999. The weights
of fitted models in a mixture come from EM on samples that none of them was fitted to. Here these are the validation
samples of a client: no step was taken on them, but the client's two models stopped by them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedtide.clusters.rounds import decision_rows
from fedtide.core.base import Moment, Prediction, Shard, Weights
from fedtide.core.rng import Rng
from fedtide.core.trees import detached
from fedtide.core.weights import renamed, united
from fedtide.fields.shapes import tags_of
from fedtide.fields.types import Flag, NonNegative, OpenFraction, Spelled, changed, ingredient
from fedtide.learn import LocalTrainer, Task, mean_losses, refuse_without_likelihood
from fedtide.learn.losses import Columns
from fedtide.learn.task import refuse_numbers
from fedtide.models import Model
from fedtide.models.networks import MLP
from fedtide.personal.client_networks import ALONE, TUNING, Networks, Personalization, train_alone, train_early_stopping
from fedtide.personal.neighbors import Neighbors


@ingredient
class Choice(Personalization):
    """The model with the lowest loss on validation samples, or without any on training samples, as in IFCA."""

    kind: Literal["choice"] = "choice"

    def fit(self, nets: Networks, models: Sequence[Weights], shard: Shard, moment: Moment, rng: Rng) -> Any:
        """Return the index of the best model."""
        rows = decision_rows(shard)
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
    """

    solver: LocalTrainer = TUNING
    kind: Literal["fine-tuned"] = "fine-tuned"

    def check(self, nets: Networks, models: int, key: str) -> None:
        """Check that the solver fits the federation's network."""
        nets.check(None, self.solver, f"{key}.solver")

    def fit(self, nets: Networks, models: Sequence[Weights], shard: Shard, moment: Moment, rng: Rng) -> Any:
        """Return the model's index and the client's fine-tuned copy."""
        chosen = Choice().fit(nets, models, shard, moment, rng)
        if chosen is None:
            return None
        start = models[int(chosen["model"])]
        tuned, _ = train_early_stopping(nets.task, self.solver, nets.task.loss, start, shard, moment, rng)
        return chosen | {"own": tuned}

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

    def check(self, nets: Networks, models: int, key: str) -> None:
        """Build the client's network once."""
        nets.check(self.model, self.solver, f"{key}.solver")

    def fit(self, nets: Networks, models: Sequence[Weights], shard: Shard, moment: Moment, rng: Rng) -> Any:
        """Train the client's model."""
        if not len(shard):
            return None
        return {"own": train_alone(nets.of(self.model), self.solver, shard, moment, rng)[0]}


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

    def check(self, nets: Networks, models: int, key: str) -> None:
        """Build the client's network once; logits are summed of classes alone."""
        if self.of == "logits":
            refuse_numbers(nets.task, f"{key}.of", self.of, "logits are of classes", "'probabilities'")
        nets.check(self.model, self.solver, f"{key}.solver")

    def predict(self, nets: Networks, models: Sequence[Weights], memory: Any, x: Tensor) -> Prediction:
        """Predict by the ensemble."""
        logits = [nets.of(self.model).logits(memory["own"], x), *(nets.task.logits(outputs, x) for outputs in models)]
        if self.of == "logits":
            return Prediction(F.log_softmax(torch.stack(logits).sum(0), -1))
        target = nets.task.target
        return Prediction(target.mix(torch.stack([target.read_outputs(outputs.double()) for outputs in logits])))


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
        tune: train private copies of all experts along with the gate, as half of the authors' configurations do.
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

    def check(self, nets: Networks, models: int, key: str) -> None:
        """Build the gate, the local expert and, with `tune`, the merged network, once."""
        refuse_without_likelihood(nets.task, key, self.kind)
        if self.tune:
            refuse_numbers(nets.task, f"{key}.tune", True, "gate and experts are tuned by cross-entropy", "false")
        nets.check(self.gate, self.gating, f"{key}.gating", models + 1)
        nets.check(self.model, self.solver, f"{key}.solver")
        if self.tune:
            nets.mixture(self.model, self.gate, models)

    def __post_init__(self) -> None:
        if self.gating.augment and not self.tune:
            raise ValueError("gating.augment: found some, allowed: none without `tune`, because rows are scored once")

    def fit(self, nets: Networks, models: Sequence[Weights], shard: Shard, moment: Moment, rng: Rng) -> Any:
        """Train the local expert and the gate; with `tune` also private copies of all experts."""
        if not len(shard):
            return None
        expert_rows, gate_rows = split_for_gate(shard, self.held, rng.at("held"))
        expert, _ = train_alone(nets.of(self.model), self.solver, expert_rows, moment, rng)
        gate = nets.of(self.gate, len(models) + 1)
        start, rng = gate.init(rng.at("gate")), rng.at("gating")
        if not self.tune:
            loss = Mixed(((nets.of(self.model), expert), *((nets.task, model) for model in models)))
            weights, _ = train_early_stopping(gate, self.gating, loss, start, gate_rows, moment, rng, 2, 20)
            return {"own": expert, "gate": weights}
        whole = nets.mixture(self.model, self.gate, len(models))
        joined = merge_networks({"gate": start} | {f"experts.{k}": m for k, m in enumerate((expert, *models))})
        return {"mixture": train_early_stopping(whole, self.gating, whole.loss, joined, shard, moment, rng, 2, 20)[0]}

    def predict(self, nets: Networks, models: Sequence[Weights], memory: Any, x: Tensor) -> Prediction:
        """Predict by the mixture, in log space; the weights are the gate's, the local expert first."""
        if self.tune:
            parts = split_networks(memory["mixture"], len(models) + 2)
            gate_weights, (expert, *models) = parts[0], parts[1:]
        else:
            gate_weights, expert = memory["gate"], memory["own"]
        log_gate = F.log_softmax(nets.of(self.gate, len(models) + 1).logits(gate_weights, x).double(), -1)
        log_probs = [nets.of(self.model).predict_rows(expert, x, double=True)]
        log_probs += [nets.task.predict_rows(model, x, double=True) for model in models]
        mixed = nets.task.target.mix(torch.stack(log_probs, 1), log_gate[:, :, None], 1)
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


def split_for_gate(shard: Shard, share: float, rng: Rng) -> tuple[Shard, Shard]:
    """Split samples between expert and gate, at least one each; both get all samples if none are held back."""
    if not share or len(shard) < 2:
        return shard, shard
    order = torch.from_numpy(rng.numpy().permutation(len(shard)))
    count = min(max(round(share * len(shard)), 1), len(shard) - 1)
    gate, expert = order[:count].sort().values, order[count:].sort().values
    return shard.pick(expert), shard.pick(gate)


def merge_networks(parts: dict[str, Weights]) -> Weights:
    """Merge weights of several networks into those of one network with these parts."""
    longer = [{key: f"{name}.{key}" for key in (*weights.params, *weights.buffers)} for name, weights in parts.items()]
    return detached(united(map(renamed, parts.values(), longer)))


def split_networks(weights: Weights, parts: int) -> list[Weights]:
    """Return the gate's weights, then those of each expert: the reverse of `merge_networks`."""
    keys, names = [*weights.params, *weights.buffers], ["gate.", *(f"experts.{k}." for k in range(parts - 1))]
    return [renamed(weights, {key: key.removeprefix(name) for key in keys if key.startswith(name)}) for name in names]


STEPS = 200
"""EM steps at most."""

CLOSE = 1e-6
"""Largest change of a weight at which EM ends."""


@ingredient
class Stacking(Personalization):
    """A mixture of the K models, a local expert and a fine-tuned model, weighted by EM on validation samples.

    `p(y|x) = sum_e w_e p_e(y|x)`, with the same weights for all of a client's samples. There is no gate that learns to
    trust the local expert on the samples that it was trained on.

    A client without validation samples takes the received model with the lowest loss on its training samples. These say
    nothing about models that were trained on them.

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

    def check(self, nets: Networks, models: int, key: str) -> None:
        """Build the local expert's network once, and check that both solvers fit."""
        refuse_without_likelihood(nets.task, key, self.kind)
        nets.check(self.model, self.solver, f"{key}.solver")
        nets.check(None, self.tuning, f"{key}.tuning")

    def fit(self, nets: Networks, models: Sequence[Weights], shard: Shard, moment: Moment, rng: Rng) -> Any:
        """Train the local expert and the fine-tuned model; weigh them and the received models."""
        rows = decision_rows(shard)
        if not len(rows):
            return None
        best = mean_losses(nets.task, models, rows).argmin()
        chosen = F.one_hot(best, len(models)).double()
        if rows is shard:
            return {"private": [], "weights": chosen}
        local, _ = train_alone(nets.of(self.model), self.solver, shard, moment, rng)
        tuned, _ = train_early_stopping(nets.task, self.tuning, nets.task.loss, models[int(best)], shard, moment, rng)
        experts = self._experts(nets, models, [local, tuned])
        likelihoods = torch.stack([-task.row_losses(model, rows.x, rows.y) for task, model in experts], -1)
        likelihoods = likelihoods.flatten(0, -2) if rows.mask is None else likelihoods[rows.mask]
        usable = likelihoods.isfinite().all(0)
        if not usable.any():
            return {"private": [], "weights": chosen}
        weights = torch.zeros(len(experts), dtype=torch.float64)
        weights[usable] = stack(likelihoods[:, usable], self.pseudo_count)
        return {"private": [local, tuned], "weights": weights}

    def predict(self, nets: Networks, models: Sequence[Weights], memory: Any, x: Tensor) -> Prediction:
        """Predict by the mixture; of the reported weights the first is that of the client's two models together."""
        weights, experts = memory["weights"], self._experts(nets, models, memory["private"])
        # One without weight may say NaN.
        weighted = [(*expert, weight) for expert, weight in zip(experts, weights, strict=True) if weight]
        log_probs = torch.stack([task.predict_rows(model, x, double=True) for task, model, _ in weighted])
        log_weights = torch.stack([weight for *_, weight in weighted]).log()
        mixed = nets.task.target.mix(log_probs, log_weights.reshape(-1, *[1] * (log_probs.dim() - 1)))
        shares = torch.cat([weights[len(models) :].sum().reshape(1), weights[: len(models)]])
        return Prediction(mixed, shares.argmax().expand(len(x)), shares.expand(len(x), -1))

    def _experts(
        self, nets: Networks, models: Sequence[Weights], private: Sequence[Weights]
    ) -> list[tuple[Task, Weights]]:
        """Return the received models, and the client's local and fine-tuned ones if it has them."""
        return [
            *((nets.task, model) for model in models),
            *zip((nets.of(self.model), nets.task), private, strict=False),
        ]


def stack(log_likelihoods: Tensor, pseudo_count: float) -> Tensor:
    """Return the weights (E,) of experts by EM: those of highest likelihood, or highest posterior with pseudo-counts.

    `w_e = (c + sum_s w_e p_e(s) / sum_f w_f p_f(s)) / (n + c E)` of n rows, E experts and pseudo-count c, until nothing
    changes. The objective is concave, and the start is uniform.

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


Personal = Annotated[
    Choice | FineTuned | Alone | Ensemble | Mixture | Neighbors | Stacking, Field(discriminator="kind")
]

WAYS = tuple(tags_of(Personal))
"""Kinds of personalizations."""


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
