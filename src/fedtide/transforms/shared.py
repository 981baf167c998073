"""Shared: models that differ in some of their layers alone, and share all others. Our own for most methods.

The shared layers are one trunk: it moves by the mean update of all participants, as FedAvg's model does, whatever
cluster or component they train. The method's models differ in the other layers, which it trains as it always does.
IFCA's paper shares layers in this way on FEMNIST.

When to use it: clients are of different kinds, each kind has few samples, and features serve all.

Choices:
    - ours: participants count for themselves in the mean. With Fielding they count for their part of the clients in
      their cluster, because it picks as many from small clusters as from large ones.
    - ours: the trunk begins as that of the method's first model. New models take the trunk as it is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from torch import Tensor

from fedtide.clusters.rounds import mean_of_all
from fedtide.core.base import Algorithm, Answer, Extended, Fleet, Memory, Moment, Payload, Shard, Weights, with_weights
from fedtide.core.errors import refused
from fedtide.core.rng import Rng
from fedtide.fields.types import ingredient
from fedtide.learn import Steps, Stepwise
from fedtide.learn.layers import TRUNK, Layers, match_layers, pick_layers, put_layers
from fedtide.transforms.transform import Transform, each_slot, keep_beside, made_with, shares_of, stepwise


@dataclass(frozen=True)
class Trunk:
    """The shared layers of all models, as weights of whole models, and the server optimizer's memo of them."""

    weights: Weights
    memo: Any


@ingredient
class Shared(Transform):
    """Models share some layers, which move by the mean update of all participants.

    Args:
        layers: the shared layers: "trunk" for all but the last one, "all", or names, for example ["conv1", "conv2"].

    >>> import fedtide as ft
    >>> task = ft.Task(lambda: ft.models.LeNet5().build((1, 28, 28), 2))
    >>> ft.transforms.apply(ft.algorithms.ifca(task), ft.transforms.Shared()).transforms
    (Shared(layers=('trunk',), kind='shared'),)
    """

    layers: Layers = (TRUNK,)
    kind: Literal["shared"] = "shared"
    place: ClassVar[int] = 1

    @property
    def label(self) -> str:
        """Words beside the name of a method with this transform."""
        return f"shared {' '.join(self.layers)}"

    def why_not(self, algorithm: Algorithm) -> str:
        """Return the reason why it has no meaning for an algorithm."""
        models = algorithm.traits.models
        if models == "branches":
            return "its branches share all other layers already; branch_layer says which one is repeated"
        return "it trains one model for all" if models == "one" else ""

    def change(self, algorithm: Algorithm) -> Algorithm:
        """Give all models of the method the same shared layers, and step these along the mean update of all."""
        task, server = made_with(algorithm, "task", "server")
        key = "transforms: 'shared'.layers"
        shared, work = match_layers(task, self.layers, key), algorithm.works["train"]
        if not any(map(shared, task.scratch.names)):
            raise refused(key, "no layer", "some of them, because nothing would be shared")

        def replace_shared(trunk: Weights, model: Weights) -> Weights:
            """Return a model with the shared layers of the trunk."""
            return put_layers(model, pick_layers(trunk, shared))

        def begin(inner: Any, rng: Rng) -> Trunk:
            return Trunk(inner.weights[0], server.init(inner.weights[0]))

        def with_trunk(inner: Any, trunk: Trunk) -> Extended:
            models = tuple(replace_shared(trunk.weights, model) for model in inner.weights)
            return Extended(with_weights(inner, models), trunk)

        def sent(payload: Payload, trunk: Weights) -> Payload:
            """Put the trunk into what clients receive; of several models only the first has it."""
            if isinstance(payload, Weights):
                return replace_shared(trunk, payload)
            if not hasattr(payload, "models"):
                return payload
            return replace(
                payload, models=send_models([replace_shared(trunk, model) for model in payload.models], shared)
            )

        def whole(payload: Payload) -> Payload:
            """Return the payload of the method, with whole models."""
            return replace(payload, models=receive_models(payload.models)) if hasattr(payload, "models") else payload

        @Stepwise
        def train(payload: Payload, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Steps[Answer | None]:
            return (yield from stepwise(work, whole(payload), memory, shard, moment, rng))

        def as_served(payload: Payload, memory: Memory, answer: Answer) -> tuple[Payload, Memory] | None:
            if algorithm.as_served is None:
                return whole(payload), memory if answer.memory is None else answer.memory
            return algorithm.as_served(whole(payload), memory, answer)

        def ask(state: Extended, fleet: Fleet, clients: Tensor, payload: Payload, options: Any) -> Any:
            trunk = state.own
            received = each_slot(payload, options, lambda part: sent(part, trunk.weights))
            reply = fleet.ask("train", clients, received, **options)
            sums = sums_of_updates(reply.total)
            if any(one is not None for one in sums):
                mean_update = mean_of_all(sums, shares_of(sums, reply, clients, options))
                trunk = Trunk(*server.step(trunk.weights, trunk.memo, mean_update))
            return reply, trunk, {}

        wrapped = work if hasattr(work, "sum_of") else train  # whole models need nothing
        works = {**algorithm.works, "train": wrapped}
        return replace(keep_beside(algorithm, begin, ask, with_trunk), works=works, as_served=as_served)


def send_models(models: Sequence[Weights], shared: Callable[[str], bool]) -> list[Weights]:
    """Return models as they are sent: shared layers only in the first."""
    return [*models[:1], *(pick_layers(model, lambda name: not shared(name)) for model in models[1:])]


def receive_models(models: Sequence[Weights]) -> list[Weights]:
    """Return models as a client uses them: the reverse of `send_models`."""
    return [*models[:1], *(put_layers(models[0], model) for model in models[1:])]


def sums_of_updates(total: Any) -> list[Any]:
    """Return the sums of the updates in the sums of a question, which may be in slots; None for a slot of nobody."""
    if total is None:
        return [None]
    if isinstance(total, list):
        return [one for part in total for one in sums_of_updates(part)]
    delta = total["delta"]
    return delta if isinstance(delta, list) else [delta]
