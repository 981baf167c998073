"""Last two: FedAvg that moves by the mean of its last two updates.

Not from a paper: the worked example of the documentation.

| symbol | meaning |
| --- | --- |
| `w` | the global weights |
| `d_t` | the mean update of the cohort in round t |

    w <- w + (d_t + d_(t-1)) / 2

When to use it: to see how an algorithm is written, tested and added.

Choices:
    - ours: the first update counts whole, because there is none before it.
    - ours: a round without an answer changes nothing. Running statistics move like parameters.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import fedtide as ft
from fedtide.cohorts import with_cohort
from fedtide.core.base import Algorithm, Answer, Fleet, Moment, Shard, Weighted, Weights, mean, shared_weights
from fedtide.core.rng import Rng


@dataclass(frozen=True)
class State:
    """The global weights, the last mean update, None before the first, and the cohort's memo."""

    weights: Weights
    last: Weights | None
    cohort: Any


def last_two(
    task: ft.Task, local: ft.LocalTrainer = ft.LocalTrainer(), cohort: ft.cohorts.Cohort = ft.cohorts.Arrivals()
) -> Algorithm[State]:
    """FedAvg that moves by the mean of its last two updates.

    Args:
        task: model and loss.
        local: local training.
        cohort: who is asked.
    """

    def init(fleet: Fleet, rng: Rng) -> State:
        return State(task.init(rng), None, cohort.init(fleet))

    def train(w: Weights, memory: None, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        fitted = local(task, task.loss, w, shard, moment, rng)
        if not fitted.steps:
            return None  # no rows: a zero update would pull the mean to zero
        n = len(shard)
        delta = fitted.delta
        return Answer({"delta": Weighted(delta, n), "loss": Weighted(fitted.loss, n)}, update=delta)

    def round(state: State, fleet: Fleet, rng: Rng) -> tuple[State, dict[str, Any]]:
        clients = cohort.pick(state.cohort, fleet, rng, partial(shared_weights, state))
        reply = fleet.ask("train", clients, state.weights, reveal=cohort.reveals)
        state = replace(state, cohort=cohort.learn(state.cohort, reply, fleet.moment))
        if reply.total is None:
            return state, {}
        got = mean(reply.total)
        now = got["delta"]
        before = now if state.last is None else state.last
        step = ft.weights.map_leaves(lambda a, b: (a + b) / 2, now, before)
        return replace(state, weights=ft.weights.add(state.weights, step), last=now), {"loss": got["loss"]}

    works = {"train": train}
    result = Algorithm("last-two", init, works, round, serve=shared_weights, predict=task.predict)
    return with_cohort(result, cohort, task, local)
