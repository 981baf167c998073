"""FedBuff: asynchronous training; the server steps whenever a buffer of answers is full.

Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba: *Federated Learning with Buffered Asynchronous Aggregation*,
AISTATS 2022, Algorithm 1.

| symbol | meaning |
| --- | --- |
| `w^t` | the global weights after t server steps |
| `M_c` | concurrency: how many clients are at work at a time |
| `K` | the buffer: how many answers make a server step |
| `tau_i` | staleness: server steps since client i was sent its model |
| `s(tau)` | what a stale update is scaled by, `(1 + tau) ** -damping` |
| `Delta_i` | client i's weights after local training, minus those that it was sent |

When to use it: devices of very different speeds, where a round would wait for the slowest. It shows only on a clock of
devices (`devices.kind`). With no more at work than it counts it is FedAvg.

Choices:
    A round is a server step. It lasts until K of the clients in flight have answered; the others go on and are asked
    after in the next one. Places are filled when a step is done and not, as in the paper, whenever an answer comes:
    until then whoever began would get the same weights, but would begin sooner. So steps take longer here, by about
    K / (2 M_c) and far more where K comes near to M_c; at K = M_c nobody is ever late, and it is FedAvg.

    A client trains on the rows that it holds when its answer comes, shuffled by the key of that round and at that
    round's rate. Whoever has begun answers even if it is asleep by then.

    The update is `sum s(tau_i) n_i Delta_i / sum n_i`, with `n_i = 1` ("uniform", the paper's) or a client's rows:
    the listing divides by K, and scaling (the paper's remark on staleness) makes a stale buffer's step shorter, and not
    only its stale members lighter.

    A client that drops out is noticed when its answer is due. One that has not answered for `max_staleness` rounds is
    given up, so the server keeps the models of at most so many rounds. The paper leaves both open.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedtide.cohorts import Arrivals, Cohort
from fedtide.core.config_types import Count, NonNegative
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.sums import mean, merge
from fedtide.core.trees import Tree, map_leaves
from fedtide.core.types import (
    Algorithm,
    Facts,
    Fleet,
    Moment,
    Sum,
    Timed,
    Weights,
    shared_weights,
)
from fedtide.learn.local import LocalTrainer, costing
from fedtide.learn.participation import with_cohort
from fedtide.learn.server import SGD, Server, averaged
from fedtide.learn.task import Task
from fedtide.learn.terms import Proximal
from fedtide.learn.training import Training
from fedtide.parts.weighting import Weighting


@dataclass(frozen=True)
class Flight:
    """Who is at work: the clients (n,), of which step and round their model is, and the clock when they began."""

    clients: Tensor
    step: Tensor
    round: Tensor
    began: Tensor

    def pick(self, where: Tensor) -> Flight:
        """Some of them."""
        return Flight(self.clients[where], self.step[where], self.round[where], self.began[where])

    def with_more(self, clients: Tensor, step: int, moment: Moment) -> Flight:
        """With some who begin now, from the model of a step."""
        return Flight(
            torch.cat([self.clients, clients]),
            torch.cat([self.step, torch.full_like(clients, step)]),
            torch.cat([self.round, torch.full_like(clients, moment.round)]),
            torch.cat([self.began, torch.full((len(clients),), moment.seconds, dtype=torch.float64)]),
        )


@dataclass(frozen=True)
class State:
    """The global weights, the optimizer's memo, how many steps were done, who is at work, and the models they have.

    older: the models that are not `weights` and that somebody still has, by the number of the step, ascending.
    """

    weights: Weights
    server: Any
    step: int
    flight: Flight
    numbers: Tensor
    older: tuple[Weights, ...]
    cohort: Any = None


def fedbuff(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    buffer: Count = 5,
    mu: NonNegative = 0.0,
    damping: NonNegative = 0.5,
    max_staleness: Count = 50,
    server: Server = SGD(),
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "uniform",
) -> Algorithm:
    """Buffered asynchronous aggregation.

    Sends the weights down to whoever begins and the update up, as a weighted sum for each age of the model that the
    update began from; clients keep nothing.

    Args:
        task: model and loss.
        local: local training.
        buffer: how many answers make a server step; all of them, where no more are at work.
        mu: strength of FedProx's pull in local training.
        damping: an update that is tau steps late counts `(1 + tau) ** -damping`; 0 makes all count alike.
        max_staleness: rounds in which a client may answer; then it is given up.
        server: what the server does with the mean update.
        cohort: who begins; it says how many clients are at work at a time, so `over_selection` is not for this one.
        weighting: "samples" weighs a client by its rows, "uniform" all alike.
    """

    over = getattr(cohort, "over_selection", 1.0)
    if over != 1.0:
        raise FedtideError(f"cohort.over_selection: found {over:g}, allowed: 1, as `buffer` says how many count")

    def init(fleet: Fleet, rng: Rng) -> State:
        weights, nobody = task.init(rng), torch.empty(0, dtype=torch.int64)
        flight = Flight(nobody, nobody, nobody, torch.empty(0, dtype=torch.float64))
        return State(weights, server.init(weights), 0, flight, nobody, (), cohort.init(fleet))

    def round(state: State, fleet: Timed, rng: Rng) -> tuple[State, Facts]:
        # Lines 3 and 4: free places are filled by clients that begin with w^t.
        came = cohort.pick(state.cohort, fleet, rng, partial(shared_weights, state))
        fresh = came[~torch.isin(came, state.flight.clients)]
        free = max(len(came) - len(state.flight.clients), 0)
        drawn = torch.from_numpy(rng.at("places").numpy().permutation(len(fresh)))[:free]
        flight = state.flight.with_more(fresh[drawn].sort().values, state.step, fleet.moment)
        # Lines 5 to 8: until K of those at work have answered, each from the model that it was sent.
        models = [*state.older, state.weights]
        numbers = torch.cat([state.numbers, torch.tensor([state.step])])
        slot = torch.searchsorted(numbers, flight.step)
        began = flight.began.masked_fill(flight.round == fleet.moment.round, torch.inf)
        reply = fleet.ask("train", flight.clients, models, slot=slot, first=buffer, began=began, reveal=cohort.reveals)
        state = replace(state, cohort=cohort.learn(state.cohort, reply, fleet.moment))
        late = state.step - flight.step
        facts: Facts = {}
        if reply.total is not None:
            # Lines 9 to 13: the buffer's mean, with stale updates scaled down.
            total: Tree = None
            for number, part in zip(numbers.tolist(), reply.total, strict=True):
                total = merge(total, damped(part, state.step - number, damping))
            state, told = averaged(state, server, mean(total))
            state = replace(state, step=state.step + 1)
            answered = late[torch.isin(flight.clients, reply.clients)].double()
            facts = {**told, "staleness": answered.mean(), "stalest": int(answered.max())}
        done = torch.isin(flight.clients, torch.cat([reply.clients, reply.refused, reply.silent]))
        given_up = fleet.moment.round + 1 - flight.round >= max_staleness
        flight = flight.pick(~done & ~given_up)
        return landed(state, flight, numbers, models), {**facts, "at_work": len(flight.clients)}

    works = {"train": Training(task, local, weighting, Proximal(mu) if mu else None)}
    made = Algorithm("fedbuff", init, works, round, shared_weights, task.predict, effort=costing(local, {}))
    return with_cohort(made, cohort, task, local)


def damped(total: Tree, staleness: int, damping: float) -> Tree:
    """The sums of clients whose model was so many steps old: updates scaled, what they are divided by not.

    >>> damped({"delta": Sum(8.0, 2.0), "loss": Sum(3.0, 2.0)}, 3, 0.5)
    {'delta': Sum(value=4.0, weight=2.0), 'loss': Sum(value=3.0, weight=2.0)}
    """
    if total is None or not staleness:
        return total
    scale = (1 + staleness) ** -damping
    delta = total["delta"]
    return {**total, "delta": Sum(map_leaves(lambda value: value * scale, delta.value), delta.weight)}


def landed(state: State, flight: Flight, numbers: Tensor, models: list[Weights]) -> State:
    """The state with who is still at work, and the models that they have; not the newest one, if it still is that."""
    kept = torch.isin(numbers, flight.step) & (numbers != state.step)
    older = tuple(model for model, keep in zip(models, kept.tolist(), strict=True) if keep)
    return replace(state, flight=flight, numbers=numbers[kept], older=older)
