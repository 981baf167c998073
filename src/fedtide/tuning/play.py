"""Playing one trial: training as in a run, judged on validation rows alone, and nothing kept on disk."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedtide.config import Experiment, from_dict
from fedtide.core.errors import FedtideError
from fedtide.core.loop import begin, play
from fedtide.core.memory import MemoryStore
from fedtide.core.trees import Tree
from fedtide.evaluate.judge import Judge, views
from fedtide.fleets.local import LocalEngine
from fedtide.fleets.simulated import SimulatedFleet
from fedtide.fleets.worker import Line
from fedtide.runs.assemble import host_of, rows_of
from fedtide.tuning.trials import Curve, hopeless


@dataclass(frozen=True)
class Going:
    """A trial has played another round, the `done`-th over all its seeds."""

    done: int


@dataclass(frozen=True)
class Outcome:
    """What came of a trial. state: as in `Trial`, or "stopped" where a person asked for that."""

    state: str
    curves: tuple[Curve, ...]
    reason: str = ""


def tried(call: dict[str, Any], stop: Callable[[], bool]) -> Iterator[Going | Outcome]:
    """Play a trial, and say last what came of it.

    Args:
        call: JSON values alone: `experiment` (as text, with the trial's values in it), `method`, `seeds`, `bounds` (see
            `fedtide.tuning.trials.bounds`), `folder` (where clients may keep what is large for the time of the trial).
        stop: asked after every round.
    """
    raw, name = json.loads(call["experiment"]), call["method"]
    curves: list[Curve] = []
    done = 0
    for seed in call["seeds"]:
        try:
            experiment = from_dict(raw, where="the trial")
        except FedtideError as error:
            yield Outcome("failed", tuple(curves), str(error))
            return
        rows_of(experiment, seed)  # here: data that cannot be read are nobody's values
        curve = Curve(seed, (), ())
        try:
            for rounds, accuracy in judged(experiment, name, seed, Path(call["folder"])):
                done += 1
                yield Going(done)
                if stop():
                    yield Outcome("stopped", tuple(curves))
                    return
                if accuracy is None:
                    continue
                curve = Curve(seed, (*curve.rounds, rounds), (*curve.accuracy, accuracy))
                last = rounds == experiment.rounds and seed == call["seeds"][-1]
                if not last and hopeless(curve, call["bounds"]):
                    yield Outcome("pruned", (*curves, curve))
                    return
        except FedtideError as error:
            yield Outcome("failed", (*curves, curve), f"seed {seed}: {error}")
            return
        curves.append(curve)
    yield Outcome("finished", tuple(curves))


def judged(experiment: Experiment, name: str, seed: int, folder: Path) -> Iterator[tuple[int, float | None]]:
    """Every round: how many are done, and at evaluations the accuracy on pooled validation rows.

    Raises:
        FedtideError: the method cannot be made of its values, or training came to numbers that are not finite.
    """
    method = next(method for method in experiment.method if method.name == name)
    rounds, every = experiment.rounds, experiment.evaluate_every
    with tempfile.TemporaryDirectory(dir=folder, prefix="memory-") as kept:
        memory = MemoryStore(Path(kept))
        host = host_of(experiment, method, seed, memory)
        engine = LocalEngine(host, experiment.fleet.threads)
        fleet = SimulatedFleet(host.population, engine, memory, reveals=host.algorithm.reveals)
        valid = views(host.population, experiment.evaluate_clients, seed, ("valid",))
        judge = Judge(host.algorithm, fleet, valid, method.grouping)
        start = begin(host.algorithm, fleet, seed=seed, rounds=rounds)
        for step in play(host.algorithm, fleet, start, seed=seed, rounds=rounds):
            done = step.moment.round + 1
            if any(len(asked.refused) and not len(asked.answered) for asked in fleet.ledger):
                raise FedtideError(f"in round {done} no client's answer was finite")
            accuracy = None
            if done % every == 0 or done == rounds:
                for _, scores, _ in judge.scores(step.state):
                    if not math.isfinite(float(scores.loss.sum())):
                        raise FedtideError(f"after {done} rounds the loss on validation rows is not finite")
                    accuracy = scores.accuracy
            yield done, accuracy


def play_in_worker(call: Tree, line: Line) -> Tree:
    """In a worker process: play one trial; what it says on the way is sent, the outcome returned."""
    flag = Path(call["stop"])
    if flag.exists():
        return Outcome("stopped", ())
    for said in tried(call, flag.exists):
        if isinstance(said, Outcome):
            return said
        line.send(said)
    raise AssertionError("a trial ended without an outcome")
