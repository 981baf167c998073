"""Algorithms of the user's own that do not tell what a client's model forgets: `unit.evaluate.unprobed:...`."""

from dataclasses import replace

from fedtide.algorithms.fedavg import fedavg
from fedtide.cohorts import Arrivals, Cohort
from fedtide.core.base import Algorithm, mean
from fedtide.learn.local import LocalTrainer
from fedtide.learn.server import SGD, step_server
from fedtide.learn.task import Task


def fitting(task: Task, local: LocalTrainer = LocalTrainer(), cohort: Cohort = Arrivals()) -> Algorithm:
    """FedAvg that calls its question "fit"."""
    made = fedavg(task, local, cohort=cohort)

    def round(state, fleet, rng):
        return step_server(
            state, SGD(), mean(fleet.ask("fit", cohort.pick(state.cohort, fleet, rng, None), state.weights).total)
        )

    return replace(made, works={"fit": made.works["train"]}, round=round)
