"""Centralized: one model trained on the samples of all clients in one place. No federation, and a bound above FedAvg.

When to use it: as a baseline, to see what is lost because data stay where they are.

Choices:
    - ours: a round is local training on the samples of all reachable clients together, shuffled: with `epochs` as many
      passes over all data, with `local_steps` as many steps as one client of a federation would take.
    - ours: it costs no time on the simulated clock and no messages. Only a simulation has the samples; on a fleet of
      real clients it is refused.
"""

from dataclasses import dataclass

from fedtide.algorithms.entry import Entry
from fedtide.core.base import Algorithm, Facts, Simulation, Traits, Weights, shared_weights
from fedtide.core.rng import Rng
from fedtide.core.trees import detached
from fedtide.learn import LocalTrainer, Task


@dataclass(frozen=True)
class State:
    """The weights."""

    weights: Weights


def centralized(task: Task, local: LocalTrainer = LocalTrainer()) -> Algorithm[State]:
    """Training on all clients' samples in one place, without a federation.

    Sends nothing: the samples are taken from the simulation.
    """

    def init(fleet: Simulation, rng: Rng) -> State:
        return State(weights=task.init(rng))

    def round(state: State, fleet: Simulation, rng: Rng) -> tuple[State, Facts]:
        fitted = local(task, task.loss, state.weights, fleet.all_rows, fleet.moment, rng)
        return (State(detached(fitted.weights)), {"loss": fitted.loss}) if fitted.steps else (state, {})

    traits = Traits(models="none", reveals=("all_rows",))
    return Algorithm("centralized", init, {}, round, shared_weights, task.predict, traits=traits)


ENTRY = Entry(
    "centralized", centralized, "nothing", "baseline", reveals=("all_rows",),
    exempt={
        "dropouts": "it asks no client, so that none can be absent",
        "deployed": "no server has the rows of its clients",
        "degenerate": "rows that break training break it for all, because there is no answer to refuse",
    },
)  # fmt: skip
