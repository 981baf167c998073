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

from dataclasses import dataclass

from fedtide.core.rng import Rng
from fedtide.core.sums import mean
from fedtide.core.trees import map_leaves
from fedtide.core.types import (
    Algorithm,
    Answer,
    Facts,
    Fleet,
    Moment,
    Shard,
    Weighted,
    Weights,
    shared_weights,
)
from fedtide.core.weights import add, sub
from fedtide.learn.local import LocalTrainer
from fedtide.learn.task import Task
from fedtide.parts.cohort import Arrivals, Cohort


@dataclass(frozen=True)
class State:
    """The global weights and the last mean update, None before the first."""

    weights: Weights
    last: Weights | None


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
        return State(task.init(rng), None)

    def train(payload: Weights, memory: None, shard: Shard, moment: Moment, rng: Rng) -> Answer:
        fitted = local(task, task.loss, payload, shard, moment, rng)
        delta, n = sub(fitted.weights, payload), len(shard)
        return Answer({"delta": Weighted(delta, n), "loss": Weighted(fitted.loss, n)})

    def round(state: State, fleet: Fleet, rng: Rng) -> tuple[State, Facts]:
        reply = fleet.ask("train", cohort(rng, fleet), state.weights)
        got = mean(reply.total)
        if got is None or got["delta"] is None:
            return state, {}
        now = got["delta"]
        before = now if state.last is None else state.last
        step = map_leaves(lambda a, b: (a + b) / 2, now, before)
        return State(add(state.weights, step), now), {"loss": got["loss"]}

    works = {"train": train}
    return Algorithm("last-two", init, works, round, serve=shared_weights, predict=task.predict)
