"""At home: some layers stay with their client. Neither the server nor anybody else receives them.

A client trains the model of the layers that it receives and of those that it keeps. It sends the update of the others
alone. FedPer keeps the head, LG-FedAvg the trunk, FedBN the layers that normalize; as a transform every method with one
model for a client does so.

When to use it: clients differ in what these layers say, and take part often enough to train them by themselves.

Choices:
    - ours: all clients begin with the same layers, drawn from a seed that the server sends. A client that never trained
      is evaluated with them.
    - ours: running statistics of a layer stay where its parameters are.
    - ours: of several models a client trains one. Its layers at home stand in all of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedtide.core.base import (
    Algorithm,
    Answer,
    Extended,
    Memory,
    Moment,
    Payload,
    Prediction,
    Shard,
    Weights,
    with_weights,
)
from fedtide.core.errors import FedtideError, Words, refused
from fedtide.core.rng import Rng
from fedtide.core.trees import Tree, map_leaves, same
from fedtide.core.weights import add, sub
from fedtide.fields.types import ingredient
from fedtide.learn import Steps, Stepwise, Task
from fedtide.learn.layers import HEAD, IsIn, Layers, match_layers, pick_layers, put_layers
from fedtide.personal import predict_by_memory
from fedtide.transforms.transform import Sending, Transform, each_slot, made_with, refuse_all, stepwise

NOT_OF_LAYERS = "count", "labels", "loss", "choice", "utility"
"""Values of single clients that tell nothing of their layers."""


@dataclass(frozen=True)
class Sent:
    """Payload of the method without layers at home, and the number that draws these."""

    method: Payload
    seed: Tensor


@ingredient
class AtHome(Transform):
    """Each client keeps these layers and sends the update of the others.

    A new client begins with layers drawn from a shared seed. Methods refuse it if the server receives updates of single
    clients, or if clients train several models at once or keep values of all layers. The page of all algorithms lists
    the transforms of each method.

    Args:
        layers: "head" for the last layer, "trunk" for all but the last one, "norm" for those that normalize, or names.

    >>> import fedtide as ft
    >>> task = ft.Task(lambda: ft.models.LeNet5().build((1, 28, 28), 2))
    >>> ft.transforms.apply(ft.algorithms.ifca(task), ft.transforms.AtHome()).transforms[0].label
    'head at home'
    """

    layers: Layers = (HEAD,)
    kind: Literal["at-home"] = "at-home"
    place: ClassVar[int] = 4

    @property
    def label(self) -> str:
        """Words beside the name of a method with this transform."""
        return f"{' '.join(self.layers)} at home"

    def why_not(self, algorithm: Algorithm) -> str:
        """Return the reason why it has no meaning for an algorithm."""
        traits = algorithm.traits
        if traits.models in ("mixture", "branches"):
            return "its clients train several models at once"
        if traits.kept_as_sent:
            return "its clients keep and send values of all layers"
        if any(name not in NOT_OF_LAYERS for name in traits.reveals):
            return f"the server receives '{traits.reveals[0]}' of single clients, which tells of all layers"
        return ""

    def change(self, algorithm: Algorithm) -> Algorithm:
        """Keep the layers with their clients."""
        key = "transforms: 'at-home'"
        for other in algorithm.transforms:
            if other.kind != "personalized":
                raise FedtideError(f"{key} is not allowed with '{other.kind}', which sends all layers")
        (task,) = made_with(algorithm, "task")
        is_home = match_layers(task, self.layers, f"{key}.layers", whole=False)
        return keep_home(algorithm, task, is_home, f"{key}.layers")


def with_home(algorithm: Algorithm, task: Task, layers: Layers, *, only_newcomers_adapt: bool = False) -> Algorithm:
    """Return a method that plays a paper in which some layers stay with their clients; see `keep_home`."""
    refuses = {**algorithm.traits.refuses, **refuse_all("layers of it stay at home")}
    method = replace(algorithm, traits=replace(algorithm.traits, refuses=refuses))
    is_home = match_layers(task, layers, "home", whole=False)
    return keep_home(method, task, is_home, "home", only_newcomers_adapt=only_newcomers_adapt)


def keep_home(
    algorithm: Algorithm, task: Task, is_home: IsIn, key: str, *, only_newcomers_adapt: bool = False
) -> Algorithm:
    """Return a method of which some layers stay with their clients.

    Args:
        is_home: tells which parameters and running statistics stay.
        key: where the layers are written, for errors.
        only_newcomers_adapt: whether only clients that have not trained adapt before they are judged.

    Raises:
        FedtideError: no layer would stay, or none would be left to send.
    """
    weights = task.scratch.weights
    if not any(map(is_home, [*weights.params, *weights.buffers])):
        raise refused(key, Words("no layer"), "some of them, because nothing would stay at home")
    if all(map(is_home, task.scratch.names)):
        raise refused(key, Words("all layers"), "some of them, because nothing is left to send; 'local' trains alone")

    @cache
    def first_model(seed: int) -> Weights:
        return task.init(Rng(seed))

    def strip(tree: Tree) -> Any:
        """Return models, or updates of them, without the layers at home."""
        return change_models(tree, lambda model: pick_layers(model, lambda name: not is_home(name)))

    def fill(payload: Sent, memory: Memory) -> tuple[Payload, Memory, Weights, Weights]:
        """Return payload and memory of the method, the layers at home, and those of a client that never trained."""
        whole = first_model(int(payload.seed))
        first = pick_layers(whole, is_home)
        row = {} if memory is None else memory
        layers = row.get("home", Weights({}))
        full = change_models(payload.method, lambda model: put_layers(put_layers(whole, model), layers))
        return full, row.get("method"), row.get("home", first), first

    def work_at_home(work: Any, *, once: bool = False) -> Any:
        @Stepwise
        def wrapped(payload: Sent, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Steps[Answer | None]:
            if once and memory is not None:
                return None
            full, inner, home, first = fill(payload, memory)
            answer = yield from stepwise(work, full, inner, shard, moment, rng)
            if answer is None:
                return None
            update, trained = answer.update, home
            if update is not None:
                several = update if isinstance(update, Mapping) else {0: update}
                (number, change), *others = several.items()
                if others:
                    raise FedtideError(f"{key}: a client trains several models, which share no layers at home")
                trained = add(home, pick_layers(change, is_home))
                # Whoever adds the update to the model that was served finds the first layers there, not the client's.
                change = put_layers(strip(change), sub(trained, first))
                update = {number: change} if isinstance(update, Mapping) else change
            inner = inner if answer.memory is None else answer.memory
            next_memory = {"home": trained} | ({} if inner is None else {"method": inner})
            changed = update is not None or answer.memory is not None
            return replace(answer, total=strip(answer.total), update=update, memory=next_memory if changed else None)

        return wrapped

    def predict_with(predict: Any) -> Any:
        def predict_each(payload: Sent, memories: Sequence[Memory], x: Tensor, owner: Tensor) -> Prediction:
            def predict_group(memory: Memory, members: Tensor, rows: Tensor) -> Prediction:
                full, inner, *_ = fill(payload, memory)
                places = torch.searchsorted(members, owner[rows])
                return predict(full, [inner] * len(members), x[rows], places)

            return predict_by_memory(memories, owner, predict_group)

        return predict_each

    def as_served(payload: Sent, memory: Memory, answer: Answer) -> tuple[Payload, Memory] | None:
        assert algorithm.as_served is not None
        full, inner, home, _ = fill(payload, memory)
        served = algorithm.as_served(full, inner, answer)
        if served is None:
            return None
        return Sent(strip(served[0]), payload.seed), {"home": home, "method": served[1]}

    def sent(seed: Tensor) -> Callable[[Any], Sent]:
        return lambda payload: Sent(strip(payload), seed)

    def shown(seed: Tensor) -> Callable[[Any], Sent]:
        """Return the payload of an evaluation; a state with a client's update in it shows the layers of the client."""
        first = pick_layers(first_model(int(seed)), is_home)

        def show(model: Weights) -> Weights:
            return strip(model) if same(pick_layers(model, is_home), first) else model

        return lambda payload: Sent(change_models(payload, show), seed)

    def init(fleet: Any, rng: Rng) -> Extended:
        seed = torch.tensor(rng.at("home").number)
        inner = algorithm.init(Sending(fleet, sent(seed)), rng)
        first = pick_layers(first_model(int(seed)), is_home)
        models = change_models(inner.weights, lambda model: put_layers(model, first))
        return Extended(with_weights(inner, models), seed)

    def round(state: Extended, fleet: Any, rng: Rng) -> tuple[Extended, Any]:
        inner, facts = algorithm.round(state.inner, Sending(fleet, sent(state.own)), rng)
        return Extended(inner, state.own), facts

    def serve(state: Extended, clients: Tensor) -> tuple[Any, Tensor | None]:
        payload, slot = algorithm.serve(state.inner, clients)
        return each_slot(payload, {"slot": slot}, shown(state.own)), slot

    def keep(method: Algorithm) -> Algorithm:
        adapt = None if method.adapt is None else work_at_home(method.adapt, once=only_newcomers_adapt)
        return replace(method, adapt=adapt, predict=predict_with(method.predict))

    sends, keeps = (*algorithm.traits.sends, Sent), algorithm.traits.keeps + 1
    traits = replace(algorithm.traits, sends=sends, keeps=keeps, at_home=True)
    return replace(
        keep(algorithm),
        init=init,
        works={name: work_at_home(work) for name, work in algorithm.works.items()},
        round=round,
        serve=serve,
        as_served=None if algorithm.as_served is None else as_served,
        others={name: keep(other) for name, other in algorithm.others.items()},
        traits=traits,
    )


def change_models(tree: Tree, change: Callable[[Weights], Weights]) -> Any:
    """Return a tree in which each model, or update of one, is changed."""
    return map_leaves(
        lambda leaf: change(leaf) if isinstance(leaf, Weights) else leaf,
        tree,
        stop=lambda node: isinstance(node, Weights),
    )
