"""The protocol of transforms, the order in which several apply, and helpers for their rounds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from fedtide.clusters.rounds import decision_rows
from fedtide.core.base import (
    Algorithm,
    Answer,
    ComputeCost,
    Extended,
    Facts,
    Fleet,
    Memory,
    Moment,
    Payload,
    Reply,
    Scores,
    Shard,
    Sum,
    Weights,
    Work,
)
from fedtide.core.errors import FedtideError, refused
from fedtide.core.rng import Rng
from fedtide.core.trees import Tree, children, detached, is_node
from fedtide.learn.steps import Steps, Stepwise


class Transform(Protocol):
    """An improvement of ours, or a way to personalize, as a function `Algorithm -> Algorithm`."""

    place: ClassVar[int]
    """Transforms with a lower place are applied first, in whichever order they are given."""

    kind: Any
    """Its name in a configuration."""

    @property
    def label(self) -> str:
        """Words beside the name of a method with this transform."""
        return str(self.kind)

    def why_not(self, algorithm: Algorithm) -> str:
        """Return the reason why it has no meaning for an algorithm; "" if it has one."""
        return ""

    def change(self, algorithm: Algorithm) -> Algorithm:
        """Return the algorithm with it; `apply` checks before whether it is allowed."""


OF_MODELS = "anchored", "at-home", "personalized", "pooled", "shared"
"""Kinds of transforms that read or change the models of a method. Others change how rounds are played."""


def refuse_all(why: str) -> Mapping[str, str]:
    """Return the transforms that have no meaning for a method whose clients keep parts of its model; `why` says so."""
    return dict.fromkeys(OF_MODELS, why)


def apply(algorithm: Algorithm, *transforms: Transform) -> Algorithm:
    """Apply transforms to an algorithm, which may have some already; their order does not matter.

    Raises:
        FedtideError: one of them has no meaning for the algorithm, or is there twice.
    """
    if not isinstance(algorithm, Algorithm):
        raise refused("transforms", type(algorithm).__name__, "an Algorithm, such as ft.algorithms.ifca(task)")
    for transform in transforms:
        if not hasattr(transform, "why_not"):
            raise refused("transforms", transform, "a transform, such as ft.transforms.Anchored()")
    plain = algorithm if algorithm.plain is None else algorithm.plain
    wanted = sorted((*algorithm.transforms, *transforms), key=lambda transform: transform.place)
    changed = plain
    if any(getattr(transform, "way", None) for transform in wanted):
        changed = unpersonalized(plain)
        for option, default in plain.traits.personal.items():
            if plain.options.get(option, default) != default:
                raise FedtideError(f"{option}: is not allowed with 'personalized', which replaces it; leave one out")
    for number, transform in enumerate(wanted):
        if transform.kind in [before.kind for before in wanted[:number]]:
            if transform.kind == "personalized":
                raise FedtideError(
                    f"transforms: '{transform.label}' is a second way to personalize; put it into others"
                )
            twice = "stands twice, by itself or through safe = true"
            raise FedtideError(f"transforms: '{transform.kind}' {twice}; leave one out")
        if why := why_not(plain, transform):
            raise FedtideError(f"transforms: '{transform.kind}' is not allowed with '{plain.name}', because {why}")
        changed = replace(transform.change(changed), plain=plain, transforms=(*changed.transforms, transform))
    return changed


def unpersonalized(plain: Algorithm) -> Algorithm:
    """Return an algorithm without the personalization of its paper."""
    without = plain.unpersonalized
    return plain if without is None else replace(without, options=plain.options, task=plain.task)


def why_not(algorithm: Algorithm, transform: Transform) -> str:
    """Return the reason why an algorithm cannot take a transform; "" if it can."""
    traits = algorithm.traits
    if why := traits.refuses.get(transform.kind, ""):
        return why
    if traits.models == "none" or "train" not in algorithm.works:
        return "its clients train no model together"
    return transform.why_not(algorithm)


class Through:
    """A fleet that passes the question "train" through a transform, and all others on as they are."""

    def __init__(self, fleet: Any, train: Callable[..., Reply]) -> None:
        self._fleet, self._train = fleet, train

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fleet, name)

    def ask(self, question: str, clients: Any, payload: Any, **options: Any) -> Reply:
        """Ask some clients one question."""
        if question == "train":
            return self._train(clients, payload, **options)
        return self._fleet.ask(question, clients, payload, **options)


class Sending:
    """A fleet whose clients receive something else, for training and to be judged: what `change` makes of a payload."""

    def __init__(self, fleet: Any, change: Callable[[Any], Any]) -> None:
        self._fleet, self._change = fleet, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fleet, name)

    def ask(self, question: str, clients: Tensor, payload: Any, **options: Any) -> Reply:
        """Ask some clients one question."""
        return self._fleet.ask(question, clients, each_slot(payload, options, self._change), **options)

    def score(self, payload: Any, clients: Tensor, **options: Any) -> Scores:
        """Judge predictions on the rows of some clients."""
        return self._fleet.score(each_slot(payload, options, self._change), clients, **options)


def keep_beside(
    algorithm: Algorithm,
    begin: Callable[[Any, Rng], Any],
    ask: Callable[..., tuple[Reply, Any, Facts]],
    join: Callable[[Any, Any], Extended] = Extended,
) -> Algorithm:
    """Return an algorithm that keeps a memo beside its state, by which the question "train" and its reply change.

    Args:
        algorithm: the method; all that does not concern its training is forwarded.
        begin: (first state of the method, key) -> memo.
        ask: (state and memo, fleet, clients, payload, options) -> (reply for the method, next memo, facts).
        join: (next state of the method, next memo) -> state and memo.
    """

    def round(state: Extended, fleet: Fleet, rng: Rng) -> tuple[Extended, Facts]:
        memo, more = state.own, dict[str, Any]()

        def train(clients: Tensor, payload: Any, **options: Any) -> Reply:
            nonlocal memo
            reply, memo, facts = ask(replace(state, own=memo), fleet, clients, payload, options)
            more.update(facts)
            return reply

        inner, facts = algorithm.round(state.inner, Through(fleet, train), rng)  # type: ignore[arg-type]
        return join(inner, memo), {**facts, **more}

    return with_own(algorithm, lambda inner, fleet, rng: join(inner, begin(inner, rng)), round)


def with_own(
    algorithm: Algorithm,
    begin: Callable[[Any, Any, Rng], Extended],
    round: Callable[[Extended, Any, Rng], tuple[Extended, Facts]],
) -> Algorithm:
    """Return an algorithm with a state of a transform's own beside its state.

    Args:
        algorithm: the method.
        begin: (first state of the method, fleet, key) -> both states.
        round: a round with both.
    """

    def init(fleet: Any, rng: Rng) -> Extended:
        return begin(algorithm.init(fleet, rng), fleet, rng)

    def serve(state: Extended, clients: Tensor) -> tuple[Any, Tensor | None]:
        return algorithm.serve(state.inner, clients)

    return replace(algorithm, init=init, round=round, serve=serve)


def cost_as_loss(cost: ComputeCost | None, question: str) -> ComputeCost | None:
    """Return the cost of a method's questions, and of one more that costs as much as "loss"; None without costs."""
    return cost and (lambda asked, rows: cost("loss" if asked == question else asked, rows))


def each_slot(payload: Any, options: Mapping[str, Any], change: Callable[[Any], Any]) -> Any:
    """Change what clients receive: the payload, or the entry of each slot."""
    return [change(part) for part in payload] if options.get("slot") is not None else change(payload)


def models_in(payload: Tree) -> list[Weights]:
    """List all models in a payload."""
    if isinstance(payload, Weights):
        return [payload]
    return [model for _, child in children(payload) for model in models_in(child)] if is_node(payload) else []


def shares_of(sums: Sequence[Sum | None], reply: Reply, clients: Tensor, options: Mapping[str, Any]) -> Tensor:
    """Return the weight of each model's mean update in the mean of all (K,) float64.

    Args:
        sums: sums of the updates of each model's members; None if there are none.
        reply: the reply, from whose clients they are.
        clients: those that were asked.
        options: of the question: with "sizes" a slot counts for so many clients.
    """
    weight = torch.tensor([0.0 if one is None else one.weight for one in sums], dtype=torch.float64)
    sizes = options.get("sizes")
    if sizes is None:
        return weight
    answered = options["slot"][torch.isin(clients, reply.clients)]
    return weight * (sizes / torch.bincount(answered, minlength=len(sums)).clamp(min=1))


def made_with(algorithm: Algorithm, *names: str) -> tuple[Any, ...]:
    """Return arguments that an algorithm was made with, such as "task", "local", "server", "weighting".

    Raises:
        FedtideError: its function does not take one of them.
    """
    if missing := [name for name in names if name not in algorithm.options]:
        words = ", ".join(missing)
        raise FedtideError(f"transforms: the function of '{algorithm.name}' must take {words}")
    return tuple(algorithm.options[name] for name in names)


def stepwise(work: Work, payload: Any, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Steps[Answer | None]:
    """Begin a work in steps, whatever it is made of."""
    start = getattr(work, "start", None)
    if start is None:
        return work(payload, memory, shard, moment, rng)
    return (yield from start(payload, memory, shard, moment, rng))


def changed_answer(work: Work, change: Callable[[Answer], Answer]) -> Work:
    """Build a work that changes what another answers."""

    @Stepwise
    def changed(payload: Any, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Steps[Answer | None]:
        answer = yield from stepwise(work, payload, memory, shard, moment, rng)
        return None if answer is None else change(answer)

    return changed


def predict_own(
    algorithm: Algorithm, payload: Payload, memory: Memory, shard: Shard, moment: Moment, rng: Rng
) -> tuple[Shard, Tensor] | None:
    """Return a client's rows for decisions, and what it predicts for them as in an evaluation; None without rows."""
    rows = decision_rows(shard)
    if not len(shard) or not len(rows.labels):
        return None
    if algorithm.adapt is not None:
        # Rows that are judged must not be adapted on, which in a dated study are the held ones too.
        adapted = algorithm.adapt(payload, memory, replace(shard, fetch_val=None), moment, rng)
        memory = memory if adapted is None or adapted.memory is None else detached(adapted.memory)
    return rows, algorithm.predict(payload, [memory], rows.x, torch.zeros(len(rows), dtype=torch.int64)).told
