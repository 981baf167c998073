"""A model for each client at the server: clients receive models that differ, and the server mixes what each trained.

A method that uses this declares `REVEALED` in `Traits.reveals`, because no sum over clients holds a mixture that is
chosen after training. Models are rows of a matrix: parameters, and then running statistics.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedtide.cohorts import Cohort, ask_to_train
from fedtide.core.base import Answer, Fleet, Memory, Moment, Reply, Shard, Weights
from fedtide.core.rng import Rng
from fedtide.core.weights import flat, shaped
from fedtide.learn import Steps, Stepwise, Training

REVEALED = ("update", "weight")
"""Values of single clients that the server sees."""
TINY = 1e-300
"""Less than any weight that is not zero."""
COLUMNS = 1 << 16
"""Parameters that are mixed at a time, in float64."""
APART: Mapping[str, Any] = {
    "reveals": REVEALED,
    "refuses": dict.fromkeys(
        ("anchored", "pooled", "shared"), "its server mixes the models of single clients, and not sums"
    ),
}
"""Traits of such a method, and why transforms of sums have no meaning for it."""

S = TypeVar("S", bound=Any)
"""State of a method: a dataclass with the memo of `cohort`."""


@dataclass(frozen=True)
class ClientModels:
    """Models that single clients trained.

    clients: (n,) ids, sorted; models: (n, P); weight: (n,) float64, what each counts for in a mean.
    """

    clients: Tensor
    models: Tensor
    weight: Tensor


def no_models(like: Weights) -> ClientModels:
    """Return the models of no client yet, of the shape of `like`."""
    nobody = torch.zeros(0, dtype=torch.int64)
    return ClientModels(nobody, flatten_model(like)[None][:0], nobody.double())


def flatten_model(weights: Weights) -> Tensor:
    """Concatenate parameters and running statistics (P,).

    >>> flatten_model(Weights({"w": torch.ones(2)}, {"mean": torch.zeros(1)}))
    tensor([1., 1., 0.])
    """
    return flat(weights.params | weights.buffers)


def shape_model(vector: Tensor, like: Weights) -> Weights:
    """Cut a vector (P,) into parameters and running statistics: the reverse of `flatten_model`."""
    leaves = shaped(vector, like.params | like.buffers)
    return Weights(*({name: leaves[name] for name in part} for part in (like.params, like.buffers)))


def reveal_model(training: Training, *, summed: bool = True) -> Stepwise:
    """Build local training whose whole update, and its weight, the server may see by itself.

    Args:
        training: local training.
        summed: whether some questions ask for the sum of updates; else it is not computed.
    """

    @Stepwise
    def train(payload: Weights, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Steps[Answer | None]:
        answer = yield from training.start(payload, memory, shard, moment, rng)
        if answer is None:
            return None
        update, weight = answer.total["delta"].value, answer.total["delta"].weight
        rows = {"update": flatten_model(update), "weight": torch.tensor(weight, dtype=torch.float64)}
        rows = {**answer.rows, **rows}
        if not summed:
            return replace(answer, total={k: v for k, v in answer.total.items() if k != "delta"}, rows=rows)
        return replace(answer, rows=rows, repeated=("update",))

    return train


def train_apart(
    fleet: Fleet, state: S, clients: Tensor, models: Sequence[Weights], place: Tensor, cohort: Cohort
) -> tuple[S, Reply, ClientModels]:
    """Let each client train a model of its own place, and return what each of them trained.

    Args:
        clients: (n,) the participants.
        models: the models to send.
        place: (n,) which of the models each participant receives.
        cohort: the cohort that picked `clients`; it learns from the reply.
    """
    slots: dict[str, Any] = {"slot": place, "slots": len(models)}
    state, reply = ask_to_train(cohort, fleet, state, clients, list(models), reveal=REVEALED, **slots)
    if not len(reply.clients):
        return state, reply, no_models(models[0])
    order = clients.argsort()
    received = place[order][torch.isin(clients[order], reply.clients)]
    starts, update = [flatten_model(model) for model in models], reply.rows["update"]
    trained = torch.empty_like(update)
    for k, delta, into in zip(received.tolist(), update, trained, strict=True):
        torch.add(starts[k], delta, out=into)
    return state, reply, ClientModels(reply.clients, trained, reply.rows["weight"])


def mix_client_models(trained: ClientModels, share: Tensor) -> Tensor:
    """Return mixtures (m, P) of clients' models: client j counts share_ij * weight_j in mixture i.

    Args:
        trained: the models of n clients.
        share: (m, n) shares, not negative, of any positive sum.

    >>> trained = ClientModels(torch.arange(2), torch.tensor([[0.0], [4.0]]), torch.tensor([1.0, 3.0]))
    >>> mix_client_models(trained, torch.tensor([[1.0, 1.0], [1.0, 0.0]])).tolist()
    [[3.0], [0.0]]
    """
    part = share.double() * trained.weight.double()
    part = part / part.sum(1, keepdim=True).clamp(min=TINY)
    mixed = [(part @ block.double()).to(block.dtype) for block in trained.models.split(COLUMNS, dim=1)]
    return torch.cat(mixed, dim=1)
