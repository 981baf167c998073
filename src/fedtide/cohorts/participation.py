"""Participation: answers of an algorithm's clients to the questions of its cohort."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedtide.cohorts.selection import Picking
from fedtide.core.base import Algorithm, Answer, Facts, Fleet, Moment, Reply, S, Shard, Weights, Work, mean, to_everyone
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.learn import LocalTrainer, Server, step_server, training_cost
from fedtide.learn.steps import utility
from fedtide.learn.target import Target
from fedtide.learn.task import Task, classes_of, label_shares
from fedtide.learn.training import Training, training_loss

P = TypeVar("P", bound=Any)
"""State of an algorithm with a cohort: a dataclass with the memo of `cohort`."""

Serving = Callable[[P, Tensor], tuple[Any, Tensor | None]]
"""The `serve` of an algorithm with such a state."""


def with_cohort(
    algorithm: Algorithm[S],
    cohort: Picking,
    task: Task,
    local: LocalTrainer,
    *,
    forward: Mapping[str, float] | None = None,
    trained: Callable[[Tensor], Tensor] | None = None,
    adapt: bool = True,
    asks: Sequence[str] | None = None,
    **traits: Any,
) -> Algorithm[S]:
    """Let an algorithm's clients also answer the questions of its cohort; every algorithm with a `cohort` ends so.

    Args:
        algorithm: an algorithm whose `round` selects clients by the cohort.
        cohort: the selection of participants.
        task: model and loss.
        local: local training, for the number of samples used in a round.
        forward: passes without gradients of the algorithm's questions, for the clock; see `training_cost`.
        trained: samples held -> samples that "train" trains on, for the clock; None means those of `local`.
        adapt: whether clients adapt before they report a loss. They do not if the server knows the model of each
            client, because a client without one would train, or try all models.
        asks: questions of the cohort that the algorithm asks; None for all.
        traits: of the algorithm.

    Raises:
        FedtideError: the cohort asks for label fractions, and the task does not know the number of classes. Terms of
            local training that do not suit the task or the method are refused, too.
    """
    algorithm = replace(algorithm, traits=replace(algorithm.traits, **traits))
    local.check_terms(task, algorithm.traits.models)
    works, train = dict(algorithm.works), algorithm.works["train"]
    asks = cohort.asks if asks is None else asks
    passes = {"train": train.forward_passes} if isinstance(train, Training) else {}
    base = algorithm.traits.compute_cost or training_cost(local, {**passes, **(forward or {})}, trained)
    if "count" in asks:
        works["count"] = count_question(local.distinct)
    if "labels" in asks:
        works["labels"] = label_question(classes_of(task))
    if "loss" in asks:
        works["loss"] = loss_question(algorithm if adapt else replace(algorithm, adapt=None), task.target)
    if "utility" in cohort.reveals:
        works["train"] = replace(train, utility=True) if isinstance(train, Training) else with_utility(train, local)
    looked = int("utility" in cohort.reveals and isinstance(train, Training))  # losses before training

    def cost(question: str, rows: Tensor) -> Tensor:
        if question in asks and question != "loss":
            return rows * 0.0
        return base(question, rows) + rows * looked / 3 if question == "train" else base(question, rows)

    shown = algorithm.traits.reveals
    reveals = (*shown, *(name for name in (*asks, *cohort.reveals) if name not in shown))
    first = cohort.clients_per_round if cohort.over_selection > 1.0 else None
    deadline = None if cohort.deadline == math.inf else cohort.deadline
    declared = replace(algorithm.traits, reveals=reveals, compute_cost=cost, first=first, deadline=deadline)
    return replace(algorithm, works=works, traits=declared, task=task)


@dataclass(frozen=True)
class OneModel:
    """The weights of one model, and the memos of the server optimizer and of the cohort."""

    weights: Weights
    server: Any
    cohort: Any = None


def play_rounds(
    cohort: Picking,
    step: Callable[[Any, Reply, Moment, Rng], tuple[Any, Facts]],
    serve: Callable[[Any], Any],
    send: Callable[[Any], Any] | None = None,
    reveal: Sequence[str] = (),
) -> tuple[Any, Any]:
    """Build the `round` and the `serve` of methods whose participants all receive the same, and train it.

    Args:
        cohort: selection of the participants.
        step: (state, reply with an answer, moment, key) -> next state and facts.
        serve: state -> what clients are evaluated with.
        send: state -> what participants receive; None is the same.
        reveal: values revealed per participant.
    """

    serve_all = to_everyone(serve)

    def round(state: Any, fleet: Fleet, rng: Rng) -> tuple[Any, Facts]:
        state, reply = take_part(cohort, fleet, state, rng, serve_all, (send or serve)(state), reveal=reveal)
        return (state, {}) if reply.total is None else step(state, reply, fleet.moment, rng)

    return round, serve_all


def build_method(
    name: str,
    task: Task,
    local: LocalTrainer,
    server: Server,
    cohort: Picking,
    train: Work,
    step: Callable[[Any, Reply, Moment, Rng], tuple[Any, Facts]] | None = None,
    predict: Any = None,
    forward: Mapping[str, float] | None = None,
    trained: Callable[[Tensor], Tensor] | None = None,
    **traits: Any,
) -> Algorithm[OneModel]:
    """Build a method with one model, which participants train.

    Args:
        name: of the method.
        task: model and loss.
        cohort: selection of the participants.
        train: the question "train".
        step: as of `play_rounds`; None takes the server's step along the mean of the leaf "delta".
        predict: of the method; None is that of the task.
        forward: costs, as of `with_cohort`.
        trained: costs, as of `with_cohort`.
        traits: of the method.
    """

    def init(fleet: Fleet, rng: Rng) -> OneModel:
        weights = task.init(rng)
        return OneModel(weights=weights, server=server.init(weights), cohort=cohort.init(fleet))

    def step_by_mean(state: OneModel, reply: Reply, moment: Moment, rng: Rng) -> tuple[OneModel, Facts]:
        return step_server(state, server, mean(reply.total))

    round, serve = play_rounds(cohort, step or step_by_mean, attrgetter("weights"))
    works, predict = {"train": train}, predict or task.predict
    algorithm = Algorithm(name, init, works, round, serve, predict)
    return with_cohort(algorithm, cohort, task, local, forward=forward, trained=trained, **traits)


def collect_before(
    algorithm: Algorithm[Any],
    cohort: Picking,
    collect: Work,
    rounds: int,
    reveals: tuple[str, ...],
    gather: Callable[[Any, Reply, Moment, Rng], Any],
    send: Callable[[Any], Any] = lambda state: {},
) -> Algorithm[Any]:
    """Put rounds of the question "collect" before round 0.

    Args:
        cohort: selection of the participants.
        collect: the question.
        rounds: number of these rounds.
        reveals: values revealed per client.
        gather: (state, reply, moment, key) -> next state.
        send: state -> what participants receive.
    """

    def round(state: Any, fleet: Any, rng: Rng) -> tuple[Any, Facts]:
        if fleet.moment.round >= 0:
            return algorithm.round(state, fleet, rng)
        clients = cohort.pick(state.cohort, fleet, rng, None)
        reply = fleet.ask("collect", clients, send(state), reveal=reveals)
        return gather(state, reply, fleet.moment, rng), {}

    traits = replace(algorithm.traits, reveals=(*reveals, *algorithm.traits.reveals), before=rounds)
    return replace(algorithm, works={"collect": collect, **algorithm.works}, round=round, traits=traits)


def take_part(
    cohort: Picking, fleet: Fleet, state: P, rng: Rng, serve: Serving, payload: Any, *, reveal: Sequence[str] = ()
) -> tuple[P, Reply]:
    """Pick a round's participants, ask them to train, and let the cohort learn; return the state and the reply.

    Args:
        cohort: the selection of participants.
        state: the state, with the memo of `cohort`.
        rng: the round's key.
        serve: of the algorithm, for cohorts that ask for losses.
        payload: what every participant receives.
        reveal: further values revealed per client.
    """
    clients = cohort.pick(state.cohort, fleet, rng, partial(serve, state))
    return ask_to_train(cohort, fleet, state, clients, payload, reveal=reveal)


def ask_to_train(
    cohort: Picking, fleet: Fleet, state: P, clients: Tensor, payload: Any, *, reveal: Sequence[str] = (), **bounds: Any
) -> tuple[P, Reply]:
    """Ask given clients to train, and let the cohort learn; `bounds` are further arguments of `fleet.ask`."""
    reply = fleet.ask("train", clients, payload, reveal=(*reveal, *cohort.reveals), **bounds)
    return replace(state, cohort=cohort.learn(state.cohort, reply, fleet.moment)), reply


def count_question(trained: Callable[[Tensor], Tensor]) -> Work:
    """Build the question "count": a client's samples, and how many of them a round uses; no answer without samples.

    Args:
        trained: samples held -> samples that local training uses.
    """

    def count(payload: Any, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        if not len(shard):
            return None
        rows = torch.tensor([len(shard)])
        return Answer({}, {"count": torch.cat([rows, trained(rows)]).double()})

    return count


def label_question(classes: int) -> Work:
    """Build the question "labels": the fraction of each of `classes` classes among a client's labels that count."""

    def labels(payload: Any, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        return Answer({}, {"labels": label_shares(shard, classes)}) if len(shard.labels) else None

    return labels


def loss_question(algorithm: Algorithm, target: Target) -> Work:
    """Build the question "loss": mean plain loss of the algorithm's predictions on a client's training samples."""

    def loss(payload: Any, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        if not len(shard.labels):
            return None
        adapted = None if algorithm.adapt is None else algorithm.adapt(payload, memory, shard, moment, rng)
        next_memory = memory if adapted is None or adapted.memory is None else adapted.memory
        owner = torch.zeros(len(shard), dtype=torch.int64)
        losses = target.losses(algorithm.predict(payload, [next_memory], shard.x, owner).told, shard.y).double()
        losses = losses if shard.mask is None else losses[shard.mask]
        return Answer({}, {"loss": losses.mean().reshape(1)})

    return loss


def with_utility(train: Work, local: LocalTrainer) -> Work:
    """Add Oort's utility, computed from the mean training loss, to a "train" question that does more than train."""

    def work(payload: Any, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        answer = train(payload, memory, shard, moment, rng)
        if answer is None:
            return None
        loss = training_loss(answer)
        if loss is None:
            raise FedtideError("cohort: 'oort' learns from losses, and the answers to 'train' have no leaf 'loss'")
        worth = utility(loss.reshape(1), int(local.distinct(torch.tensor(len(shard)))))
        return replace(answer, rows={**answer.rows, "utility": worth})

    return work
