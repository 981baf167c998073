"""FedBuff: asynchronous training; the server steps whenever a buffer of answers is full.

Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba: *Federated Learning with Buffered Asynchronous Aggregation*,
AISTATS 2022, Algorithm 1. With nothing but its name it plays Algorithm 1 as printed, round by round.

| symbol | meaning |
| --- | --- |
| `w^t` | the global weights after t server steps |
| `M_c` | concurrency: number of clients training at a time |
| `K` | buffer size: answers per server step |
| `tau_i` | staleness: server steps since client i was sent its model |
| `s(tau)` | factor on a stale update, `(1 + tau) ** -damping` |
| `Delta_i` | client i's weights after local training, minus those that it was sent |

When to use it: devices of very different speeds, where a round would wait for the slowest. It only matters with a
clock of devices (`devices.kind`). If the concurrency is not above the buffer size it is FedAvg.

Choices:
    - ours: a round is a server step. It lasts until K of the clients in flight have answered; the others continue into
      the next round.
    - ours: places are filled after a step; in the paper whenever an answer comes. A client that began before the step
      would get the same weights, but would begin sooner. So steps take longer here, by about K / (2 M_c), and far more
      if K is close to M_c. At K = M_c no client is ever late, and it is FedAvg.
    - ours: a client trains on the samples that it holds when its answer comes. Shuffle and learning rate are those of
      that round. A client that has begun answers even if it is asleep by then.
    - paper: the update is `sum s(tau_i) n_i Delta_i / sum n_i`, with `n_i = 1` ("uniform") or a client's samples. The
      listing divides by K. Scaling (the paper's remark on staleness) shortens the step of a stale buffer, and does not
      only down-weight stale members.
    - ours: a client that drops out is noticed when its answer is due. A client that has not answered for
      `max_staleness` rounds is given up, so the server keeps the models of at most that many rounds.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedtide.algorithms.entry import Entry
from fedtide.cohorts import Arrivals, Cohort, ask_to_train, with_cohort
from fedtide.core.base import Algorithm, Facts, Fleet, Moment, Timed, Traits, Weights, mean, shared_weights
from fedtide.core.errors import refused
from fedtide.core.rng import Rng
from fedtide.core.sums import merge, scaled
from fedtide.core.trees import Tree, map_leaves
from fedtide.fields.types import Count, NonNegative
from fedtide.learn import SGD, LocalTrainer, Server, Task, Training, Weighting, step_server


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
class State:
    """The global weights, the optimizer's memo, the number of steps, the clients in flight, and their models.

    older: the models other than `weights` that clients in flight have, by step number, ascending.
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
    damping: NonNegative = 0.5,
    max_staleness: Count = 50,
    server: Server = SGD(),
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "uniform",
) -> Algorithm[State]:
    """Buffered asynchronous aggregation.

    Sends the weights down to clients that begin, and the update up. There is a weighted sum for each age of the model
    that updates began from. Clients keep nothing.

    Args:
        buffer: answers per server step; all clients in flight if there are fewer.
        damping: an update with staleness tau is scaled by `(1 + tau) ** -damping`; 0 scales none.
        max_staleness: rounds in which a client may answer; after that it is given up.
        cohort: selection of clients that begin; its size is the concurrency, so `over_selection` is not allowed.
    """

    if cohort.over_selection != 1.0:
        raise refused("cohort.over_selection", cohort.over_selection, "1, because `buffer` says how many answers count")

    def init(fleet: Fleet, rng: Rng) -> State:
        weights, none = task.init(rng), torch.empty(0, dtype=torch.int64)
        flight, memo = Flight(none, none, none, torch.empty(0, dtype=torch.float64)), server.init(weights)
        joined = cohort.init(fleet)
        return State(weights=weights, server=memo, step=0, flight=flight, numbers=none, older=(), cohort=joined)

    def round(state: State, fleet: Timed, rng: Rng) -> tuple[State, Facts]:
        # Lines 3 and 4: clients fill the free places and begin with w^t.
        candidates = cohort.pick(state.cohort, fleet, rng, partial(shared_weights, state))
        fresh = candidates[~torch.isin(candidates, state.flight.clients)]
        free = max(len(candidates) - len(state.flight.clients), 0)
        drawn = torch.from_numpy(rng.at("places").numpy().permutation(len(fresh)))[:free]
        flight = state.flight.with_more(fresh[drawn].sort().values, state.step, fleet.moment)
        # Lines 5 to 8: until K clients in flight have answered, each from the model that it was sent.
        models = [*state.older, state.weights]
        numbers = torch.cat([state.numbers, torch.tensor([state.step])])
        slot = torch.searchsorted(numbers, flight.step)
        began = flight.began.masked_fill(flight.round == fleet.moment.round, torch.inf)
        state, reply = ask_to_train(cohort, fleet, state, flight.clients, models, slot=slot, first=buffer, began=began)
        late = state.step - flight.step
        facts: Facts = {}
        if reply.total is not None:
            # Lines 9 to 13: the buffer's mean, with stale updates scaled down.
            total: Tree = None
            for number, part in zip(numbers.tolist(), reply.total, strict=True):
                total = merge(total, damp(part, state.step - number, damping))
            state, step_facts = step_server(state, server, mean(total))
            state = replace(state, step=state.step + 1)
            answered = late[torch.isin(flight.clients, reply.clients)].double()
            facts = {**step_facts, "staleness": answered.mean(), "stalest": int(answered.max())}
        done = torch.isin(flight.clients, torch.cat([reply.clients, reply.refused, reply.silent]))
        given_up = fleet.moment.round + 1 - flight.round >= max_staleness
        flight = flight.pick(~done & ~given_up)
        return land(state, flight, numbers, models), {**facts, "at_work": len(flight.clients)}

    works = {"train": Training(task, local, weighting)}
    traits = Traits(
        unmaskable="its sums go by the age of the model that clients began from, and one of an age has a sum alone",
        unprivate="a client may answer in the rounds of several models, and no budget plans these",
    )
    algorithm = Algorithm("fedbuff", init, works, round, shared_weights, task.predict, traits=traits)
    return with_cohort(algorithm, cohort, task, local)


def damp(total: Tree, staleness: int, damping: float) -> Tree:
    """Scale the updates of clients whose model was `staleness` steps old; their divisor stays.

    >>> from fedtide.core.base import Sum
    >>> damp({"delta": Sum(8.0, 2.0), "loss": Sum(3.0, 2.0)}, 3, 0.5)
    {'delta': Sum(value=4.0, weight=2.0), 'loss': Sum(value=3.0, weight=2.0)}
    """
    if total is None or not staleness:
        return total
    return {**total, "delta": scaled(total["delta"], (1 + staleness) ** -damping)}


def land(state: State, flight: Flight, numbers: Tensor, models: list[Weights]) -> State:
    """Update the clients in flight and their models; the newest model is `weights` and not stored again."""
    in_flight = torch.isin(numbers, flight.step) & (numbers != state.step)
    older = tuple(model for model, keep in zip(models, in_flight.tolist(), strict=True) if keep)
    return replace(state, flight=flight, numbers=numbers[in_flight], older=older)


ENTRY = Entry(
    "fedbuff", fedbuff, "weights down, update up; the server steps when K have answered", "global",
    tells="sums for each age of the model that they began from",
)  # fmt: skip
