"""FedAvg whose clients end their own process, sleep or fail: for tests of worker processes.

An algorithm of the user's own, named `unit.fleets.deadly:...` in a configuration.
"""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import torch

from fedtide.algorithms.fedavg import fedavg
from fedtide.cohorts import Arrivals, Cohort
from fedtide.core.base import Algorithm, Answer, Notes
from fedtide.core.errors import FedtideError
from fedtide.learn.local import LocalTrainer
from fedtide.learn.task import Task


def dying(task: Task, local: LocalTrainer = LocalTrainer(), cohort: Cohort = Arrivals(), flags: str = "", at: int = 1):
    """A process is killed by its own work, once for every file in the folder `flags`, in round `at`.

    A file may hold the number of a process that is spared.
    """

    def before(moment):
        for flag in sorted(Path(flags).glob("*")) if flags and moment.round == at else []:
            try:
                if flag.read_text() == str(os.getpid()):
                    continue
                flag.unlink()
            except FileNotFoundError:
                continue  # another process took it
            os.kill(os.getpid(), signal.SIGKILL)

    return _with(fedavg(task, local, cohort=cohort), before)


def failing(task: Task, local: LocalTrainer = LocalTrainer(), cohort: Cohort = Arrivals(), kind: str = "user"):
    """Every work fails: with an error of the user's, without memory, or with one of the program's."""

    def before(moment):
        if kind == "memory":
            raise MemoryError("Unable to allocate 18.2 TiB")
        raise FedtideError("the well is dry") if kind == "user" else ZeroDivisionError("a fault in the program")

    return _with(fedavg(task, local, cohort=cohort), before)


def remembering(
    task: Task, local: LocalTrainer = LocalTrainer(), cohort: Cohort = Arrivals(), flags: str = "", seconds: float = 0.0
):
    """Clients keep a large row, work slowly and may be killed: every way in which memory could be torn."""
    made = dying(task, local, cohort, flags)
    train = made.works["train"]

    def slow(payload, memory, shard, moment, rng):
        time.sleep(seconds)
        answer = train(payload, memory, shard, moment, rng)
        count = 1 if memory is None else memory["count"] + 1
        last = answer.total["delta"].value
        return Answer(answer.total, memory={"count": count, "last": last}, notes=Notes(branch=torch.tensor(count)))

    return replace(made, works={"train": slow})


def _with(algorithm: Algorithm, before) -> Algorithm:
    train = algorithm.works["train"]

    def work(payload, memory, shard, moment, rng):
        before(moment)
        return train(payload, memory, shard, moment, rng)

    return replace(algorithm, works={"train": work})
