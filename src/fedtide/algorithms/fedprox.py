"""FedProx: FedAvg with a proximal pull of every client towards the model it received.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: *Federated Optimization in Heterogeneous Networks*, MLSys 2020,
Algorithm 2. Client i minimizes `L_i(v) + (mu/2) * ||v - w||^2`, so every local gradient gains `mu * (v - w)`.

When to use it: clients differ, do many local steps, and drift apart. Keep `lr * mu` well below 2, where the pull itself
diverges.

Choices:
    The cohort is given by the shift and weighted by samples, as in the released code. `cohort = "by-size"` with
    `weighting = "uniform"` is the paper's, but without repetition; `weighting = "uniform"` alone minimizes the plain
    mean over clients.
    Stragglers, whose partial work is kept and counts in full, are a property of the clients and not of the method:
    `devices.partial_work = 0.9` lets nine of ten do 1 to epochs - 1 epochs, as in the released code (or 1 to
    local_steps - 1 steps). To see the loss of a FedAvg that drops them, set `shift.who.dropout_rate = 0.9`.
    Only trainable parameters are pulled. `mu = 0` is FedAvg bit for bit.
"""

from __future__ import annotations

from fedtide.algorithms.fedavg import State, average_updates
from fedtide.cohorts import Arrivals, Cohort
from fedtide.core.types import Algorithm
from fedtide.learn.local import LocalTrainer
from fedtide.learn.server import SGD, Server
from fedtide.learn.task import Task
from fedtide.learn.terms import Proximal, Pull
from fedtide.learn.training import Training
from fedtide.parts.weighting import Weighting


def fedprox(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    mu: Pull = 0.1,
    server: Server = SGD(),
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "samples",
) -> Algorithm[State]:
    """FedAvg with a pull of clients back to the model they received."""
    train = Training(task, local, weighting, Proximal(mu))
    return average_updates("fedprox", task, local, server, cohort, train)
