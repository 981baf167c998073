"""Last two: FedAvg that moves by the mean of its last two updates.

Not from a paper: the worked example of the documentation.

| symbol | meaning |
| --- | --- |
| `w` | the global weights |
| `d_t` | the mean update of the cohort in round t |

    w <- w + (d_t + d_(t-1)) / 2

When to use it: to see how an algorithm is written, tested and added.

Choices:
    The first update counts whole, as there is none before it. A round in which nobody answers
    changes nothing. Running statistics move like parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fedtide.cohorts import Arrivals, Cohort
from fedtide.core.rng import Rng
from fedtide.core.sums import mean
from fedtide.core.trees import map_leaves
from fedtide.core.types import Algorithm, Facts, Fleet, Weights, shared_weights
from fedtide.core.weights import add
from fedtide.learn.local import LocalTrainer
from fedtide.learn.participation import with_cohort
from fedtide.learn.task import Task
from fedtide.learn.training import Training


@dataclass(frozen=True)
class State:
    """The global weights, the last mean update, None before the first, and the cohort's memo."""

    weights: Weights
    last: Weights | None
    cohort: Any = None


def last_two(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    cohort: Cohort = Arrivals(),
) -> Algorithm[State]:
    """FedAvg that moves by the mean of its last two updates.

    Args:
        task: model and loss.
        local: local training.
        cohort: who is asked.
    """

    def init(fleet: Fleet, rng: Rng) -> State:
        return State(task.init(rng), None, cohort.init(fleet))

    def round(state: State, fleet: Fleet, rng: Rng) -> tuple[State, Facts]:
        clients = cohort.pick(state.cohort, fleet, rng, partial(shared_weights, state))
        reply = fleet.ask("train", clients, state.weights, reveal=cohort.reveals)
        state = replace(state, cohort=cohort.learn(state.cohort, reply, fleet.moment))
        got = mean(reply.total)
        if got is None or got["delta"] is None:
            return state, {}
        now = got["delta"]
        before = now if state.last is None else state.last
        step = map_leaves(lambda a, b: (a + b) / 2, now, before)
        return replace(state, weights=add(state.weights, step), last=now), {"loss": got["loss"]}

    works = {"train": Training(task, local, "samples")}
    made = Algorithm("last-two", init, works, round, shared_weights, task.predict)
    return with_cohort(made, cohort, task, local)
