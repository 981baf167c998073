"""Clients in flight: asynchronous rounds, in which the server steps while other clients still train older models."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedtide.cohorts.participation import ask_to_train, with_cohort
from fedtide.cohorts.selection import Picking
from fedtide.core.base import Algorithm, Facts, Fleet, Moment, Timed, Traits, Weights, mean, shared_weights
from fedtide.core.errors import refused
from fedtide.core.rng import Rng
from fedtide.core.sums import merge
from fedtide.core.trees import Tree, map_leaves
from fedtide.learn import LocalTrainer, Server, Task, Training, Weighting, step_server

Adjust = Callable[[Tree, Weights, Weights, int], Tree]
"""(totals of clients, model that they began from, weights now, steps since) -> totals that count."""


@dataclass(frozen=True)
class Flight:
    """Clients in flight: ids (n,), step and round of their model, and the clock when they began."""

    clients: Tensor
    step: Tensor
    round: Tensor
    began: Tensor

    def pick(self, where: Tensor) -> "Flight":
        """Return the selected clients."""
        return map_leaves(lambda leaf: leaf[where], self)

    def with_more(self, clients: Tensor, step: int, moment: Moment) -> "Flight":
        """Add clients that begin now, from the model of a step."""
        began = torch.full((len(clients),), moment.seconds, dtype=torch.float64)
        more = Flight(clients, torch.full_like(clients, step), torch.full_like(clients, moment.round), began)
        return map_leaves(lambda *parts: torch.cat(parts), self, more)


@dataclass(frozen=True)
class InFlight:
    """The global weights, the optimizer's memo, the number of steps, the clients in flight, and their models.

    numbers and older: the models other than `weights` that clients in flight have, by step number, ascending.
    """

    weights: Weights
    server: Any
    step: int
    flight: Flight
    numbers: Tensor
    older: tuple[Weights, ...]
    cohort: Any = None


def build_asynchronous(
    name: str,
    task: Task,
    local: LocalTrainer,
    server: Server,
    cohort: Picking,
    weighting: Weighting,
    buffer: int,
    max_staleness: int,
    adjust: Adjust,
) -> Algorithm[InFlight]:
    """Build a method whose server steps whenever so many clients in flight have answered.

    Args:
        name: of the method.
        task: model and loss.
        cohort: selection of clients that begin; its size is the number of those in flight.
        weighting: weight of a client.
        buffer: answers per server step; all clients in flight if there are fewer.
        max_staleness: rounds in which a client may answer; after that it is given up.
        adjust: change of the totals of clients that began from the same model.

    Raises:
        FedtideError: the cohort asks more clients than count.
    """
    if cohort.over_selection != 1.0:
        why = "because the first answers count in any case"
        raise refused("cohort.over_selection", cohort.over_selection, f"1, {why}")

    def init(fleet: Fleet, rng: Rng) -> InFlight:
        weights, none = task.init(rng), torch.empty(0, dtype=torch.int64)
        flight, memo = Flight(none, none, none, torch.empty(0, dtype=torch.float64)), server.init(weights)
        joined = cohort.init(fleet)
        return InFlight(weights=weights, server=memo, step=0, flight=flight, numbers=none, older=(), cohort=joined)

    def round(state: InFlight, fleet: Timed, rng: Rng) -> tuple[InFlight, Facts]:
        # Clients fill the free places and begin with the weights of now.
        candidates = cohort.pick(state.cohort, fleet, rng, partial(shared_weights, state))
        fresh = candidates[~torch.isin(candidates, state.flight.clients)]
        free = max(len(candidates) - len(state.flight.clients), 0)
        drawn = torch.from_numpy(rng.at("places").numpy().permutation(len(fresh)))[:free]
        flight = state.flight.with_more(fresh[drawn].sort().values, state.step, fleet.moment)
        # Until so many clients in flight have answered, each from the model that it was sent.
        models = [*state.older, state.weights]
        numbers = torch.cat([state.numbers, torch.tensor([state.step])])
        slot = torch.searchsorted(numbers, flight.step)
        began = flight.began.masked_fill(flight.round == fleet.moment.round, torch.inf)
        state, reply = ask_to_train(cohort, fleet, state, flight.clients, models, slot=slot, first=buffer, began=began)
        late = state.step - flight.step
        facts: Facts = {}
        if reply.total is not None:
            total: Tree = None
            for number, model, part in zip(numbers.tolist(), models, reply.total, strict=True):
                if part is not None:
                    total = merge(total, adjust(part, model, state.weights, state.step - number))
            state, step_facts = step_server(state, server, mean(total))
            state = replace(state, step=state.step + 1)
            answered = late[torch.isin(flight.clients, reply.clients)].double()
            facts = {**step_facts, "staleness": answered.mean(), "stalest": int(answered.max())}
        done = torch.isin(flight.clients, torch.cat([reply.clients, reply.refused, reply.silent]))
        given_up = fleet.moment.round + 1 - flight.round >= max_staleness
        flight = flight.pick(~done & ~given_up)
        return land(state, flight, numbers, models), {**facts, "at_work": len(flight.clients)}

    works = {"train": Training(task, local, weighting)}
    few = "few answers of one age come at a time, which are no buckets"
    refuses = {"on-need": "clients in flight train over several rounds, and a pause would not stop them"}
    traits = Traits(
        refuses=refuses | {"robust": few, "trusted": few},
        unmaskable="its sums go by the age of the model that clients began from, and one of an age has a sum alone",
        unprivate="a client may answer in the rounds of several models, and no budget plans these",
    )
    algorithm = Algorithm(name, init, works, round, shared_weights, task.predict, traits=traits)
    return with_cohort(algorithm, cohort, task, local)


def land(state: InFlight, flight: Flight, numbers: Tensor, models: list[Weights]) -> InFlight:
    """Update the clients in flight and their models; the newest model is `weights` and not stored again."""
    in_flight = torch.isin(numbers, flight.step) & (numbers != state.step)
    older = tuple(model for model, keep in zip(models, in_flight.tolist(), strict=True) if keep)
    return replace(state, flight=flight, numbers=numbers[in_flight], older=older)
