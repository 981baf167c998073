"""Personalized: clients adapt the models that they receive before they are evaluated.

Choose one, fine-tune it, average or mix all with a model of its own, let its nearest samples vote, or train alone
(`fedtide.personal.ways`). Nothing of it leaves the client, and training stays as it is. Further ways in `others` are
judged beside, each as a method of its own, so one training serves several.

With `anchored`, the anchor is mixed into what a client chooses; other ways have it as one model more.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import BeforeValidator
from torch import Tensor

from fedtide.clusters.rounds import Served
from fedtide.core.base import Algorithm, Answer, Holdings, Memory, Moment, Payload, Prediction, Shard, Weights
from fedtide.core.errors import FedtideError, refused
from fedtide.core.rng import Rng
from fedtide.fields.types import by_kind, ingredient
from fedtide.personal.client_networks import Networks, Personalization
from fedtide.personal.ways import WAYS, Choice, Personal, names_of, predict_personal
from fedtide.transforms.anchored import Anchored, Received
from fedtide.transforms.transform import Transform, apply, made_with, unpersonalized

KEY = "transforms: 'personalized'.way"

Way = Annotated[Personal, BeforeValidator(by_kind)]


@ingredient
class Personalized(Transform):
    """A personalization of the received models before evaluation; nothing of it leaves the client.

    Args:
        way: what is judged as the method; None leaves what the method does itself.
        others: further ways with the same models, each judged and reported as a method of its own.

    >>> import fedtide as ft
    >>> task = ft.Task(lambda: ft.models.Linear().build((3,), 2))
    >>> ft.transforms.apply(ft.algorithms.fedavg(task), ft.transforms.Personalized("fine-tuned")).transforms[0].label
    'fine-tuned'
    """

    way: Annotated[Personal | None, BeforeValidator(by_kind)] = None
    others: tuple[Way, ...] = ()
    kind: Literal["personalized"] = "personalized"
    place: ClassVar[int] = 3

    @property
    def label(self) -> str:
        """Words beside the name of a method with this transform."""
        return "" if self.way is None else self.way.kind

    def why_not(self, algorithm: Algorithm) -> str:
        """Return the reason why it has no meaning for an algorithm."""
        models = algorithm.traits.models
        if models == "branches":
            return "its models are branches of one network, which clients choose from"
        return "clients mix its models already" if models == "mixture" else ""

    def change(self, algorithm: Algorithm) -> Algorithm:
        """Let clients personalize before they are evaluated."""
        if self.way is None and not self.others:
            raise refused(KEY, None, "one of " + ", ".join(WAYS))
        nets = Networks(*made_with(algorithm, "task"))
        changed = algorithm if self.way is None else with_way(algorithm, self.way, nets, KEY)
        others = {
            name: with_way(algorithm, way, nets, f"transforms: 'personalized'.others[{number}]")
            for number, (name, way) in enumerate(self.named().items())
        }
        # All are judged by what the algorithm serves; ways read the models in it.
        return replace(changed, others={**algorithm.others, **others})

    def named(self) -> dict[str, Any]:
        """Return the other ways by the names with which they are reported."""
        return dict(zip(names_of(self.others), self.others, strict=True))


def with_way(algorithm: Algorithm, way: Any, nets: Networks, key: str, *, clusters: int | None = None) -> Algorithm:
    """Return an algorithm whose clients personalize in one way.

    Args:
        algorithm: what it serves are models, or a model.
        way: the personalization, which is written at `key`.
        nets: the clients' networks.
        key: where the way stands, for errors.
        clusters: number of models if the way is checked before a run, and not now, because a transform may replace it.

    Raises:
        FedtideError: it is no personalization, or a network of it does not fit the samples.
    """
    if not isinstance(way, Personalization):
        raise refused(key, type(way).__name__, "one of fedtide.personal, such as Choice()")
    anchored = any(isinstance(before, Anchored) for before in algorithm.transforms)
    if anchored and isinstance(way, Choice):
        # A client alone can hardly tell the better of two models: the anchor is mixed into what it chooses.
        assert algorithm.plain is not None
        inner = unpersonalized(algorithm.plain)
        return apply(replace(with_way(inner, way, nets, key), plain=None, transforms=()), *algorithm.transforms)
    late, count = clusters is not None, clusters or algorithm.options.get("clusters", 1)

    def check(clients: Holdings | None) -> None:
        if clients is not None and algorithm.check is not None:
            algorithm.check(clients)
        way.check(nets, (count if isinstance(count, int) else 1) + anchored, key)

    if not late:
        check(None)

    def adapt(payload: Payload, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        next_memory = way.fit(nets, received(payload)[0], shard, moment, rng)
        return None if next_memory is None else Answer({}, memory=next_memory)

    def predict(payload: Payload, memories: Sequence[Memory], x: Tensor, owner: Tensor) -> Prediction:
        models, numbers, usual, count = received(payload)
        prediction = predict_personal(way, nets, models, usual, memories, x, owner)
        return renumber(prediction, numbers, count, with_own=way.own_expert)

    traits = replace(algorithm.traits, own_expert=way.own_expert)
    return replace(
        algorithm, predict=predict, adapt=adapt, check=check if late else algorithm.check, traits=traits, others={}
    )


def received(payload: Payload) -> tuple[Sequence[Weights], Tensor, int, int]:
    """Return the models that a client is served, their numbers, the usual one, and the number of all models.

    The anchor of an anchored method is the last model, and the usual one.

    Raises:
        FedtideError: there are none.
    """
    if isinstance(payload, Received):
        models, numbers, _, count = received(payload.method)
        return (*models, payload.anchor), torch.cat([numbers, torch.tensor([count])]), len(models), count + 1
    if isinstance(payload, Weights):
        return (payload,), torch.zeros(1, dtype=torch.int64), 0, 1
    if not isinstance(payload, Served) and not hasattr(payload, "usual"):  # a payload of its own may hold models, too
        raise FedtideError(
            "transforms: 'personalized' is not allowed, because the method serves clients no whole models"
        )
    numbers = torch.arange(len(payload.models)) if payload.numbers is None else payload.numbers
    count = int(numbers.max() + 1) if payload.count is None else payload.count
    return payload.models, numbers, int(payload.usual or 0), count


def renumber(prediction: Prediction, numbers: Tensor, count: int, *, with_own: bool) -> Prediction:
    """Renumber a prediction of some of the models by the server's numbers.

    Args:
        prediction: with choices and weights of the models that were sent, in their order;
            with `with_own` the local expert comes first.
        numbers: server numbers of the models that were sent.
        count: number of all models; one that was not sent has no weight.
        with_own: whether the first expert is the local one; then model j has number j + 1.
    """
    if prediction.choice is None:
        return prediction
    places = torch.cat([torch.zeros(1, dtype=torch.int64), numbers + 1]) if with_own else numbers
    weights = None
    if prediction.weights is not None:
        weights = torch.zeros(len(prediction.choice), count + with_own, dtype=torch.float64)
        weights[:, places] = prediction.weights
    return Prediction(prediction.told, places[prediction.choice], weights)
