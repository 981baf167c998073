"""What nodes in one process add to a round: every answer as a message, checked and summed as strangers' are.

python bench/near.py [--rows 40] [--rounds 6] [--clients 100] [--home /dev/shm] [--out bench/results.jsonl]

Each client is a node of its own, so nothing is shared between clients. Rounds of all fleets alternate, and the least
seconds of the processor count, as the disk's are not ours: nodes flush memory to it, which takes what it takes. What
clients keep lies in files as in a run, in the simulation too; "ram" is a simulation that keeps it in RAM.
"""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedtide.config import from_dict
from fedtide.core.loop import begin, play
from fedtide.core.memory import MemoryStore
from fedtide.fleets.devices import SteadyClock
from fedtide.fleets.engines import LocalEngine, threads
from fedtide.fleets.simulated import SimulatedFleet
from fedtide.remote.offline import near_fleet
from fedtide.runs.build import host_of
from machine import machine, now, options, told
from works import ENDLESS, RATE, source

METHODS = ("fedavg", "scaffold")
GOAL = 1.3


def rounds_of(
    algorithm: str, clients: int, rows: int, memory: Path | None = None, home: Path | None = None
) -> Iterator[Any]:
    """Play rounds of the small CNN with all clients: in nodes with homes, or simulated, memory in a folder or RAM."""
    experiment = from_dict(
        {
            "rounds": ENDLESS,
            "data": {
                "source": source(clients * rows),
                "partition": {"kind": "iid", "clients": clients},
                "split": {"val": 0.0, "test": 0.0},
            },
            "shift": {"who": "always"},
            "model": {"kind": "small-cnn"},
            "method": [
                {"algorithm": algorithm, "cohort": {"kind": "everyone"}, "local": {"lr": RATE, "batch_size": 20}}
            ],
        }
    )
    host = host_of(experiment, experiment.method[0], 0, MemoryStore(memory))
    fleet: Any
    if home is None:
        fleet = SimulatedFleet.of(host, LocalEngine(host), SteadyClock())
    else:
        fleet = near_fleet(host, clients, home)
    start = begin(host.algorithm, fleet, seed=0, rounds=ENDLESS)
    for number, step in enumerate(play(host.algorithm, fleet, start, seed=0, rounds=ENDLESS)):
        fleet.memory.settle((number, 0))  # as a checkpoint does
        yield step


def seconds(rounds: Iterator[Any]) -> float:
    """Return the processor's seconds of the next round."""
    began = time.process_time()
    next(rounds)
    return time.process_time() - began


def main() -> None:
    """Measure each method."""
    parser = options(__doc__)
    parser.add_argument("--rows", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--home", type=Path, default=None, help="where the nodes' folders are; /dev/shm is no disk")
    given = parser.parse_args()
    for algorithm in METHODS:
        with tempfile.TemporaryDirectory(dir=given.home) as folder, threads(1):
            places = ({}, {"memory": Path(folder) / "memory"}, {"home": Path(folder) / "nodes"})
            fleets = [rounds_of(algorithm, given.clients, given.rows, **place) for place in places]
            took = [[seconds(rounds) for rounds in fleets] for _ in range(given.rounds + 1)][1:]
        ram, local, near = (min(each[place] for each in took) for place in range(3))
        line = {"bench": "near", "date": now(), "algorithm": algorithm, "clients": given.clients, "rows": given.rows}
        line |= {"ram": round(ram, 3), "local": round(local, 3), "near": round(near, 3)}
        line |= {"ratio": round(near / local, 2), "goal": GOAL}
        told(f"{algorithm}: a round in nodes of one process", line | machine(), given.out)


if __name__ == "__main__":
    main()
