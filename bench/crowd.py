"""Crowds: memory as registered clients grow, rounds per second as cohorts grow to 10,000 and models to 64.

python bench/crowd.py [--seconds 10] [--sources shared,generated] [--curves cohorts,models] [--out bench/results.jsonl]

Each point is a process of its own. Clients are of two kinds: "shared" ones hold lists of 50 of the same 60,000 random
pictures, "generated" ones 50 rows that are made when they are asked for.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import psutil
from rich.console import Console

from fedtide.config import Experiment, from_dict
from fedtide.core.loop import begin, play
from fedtide.fleets.engines import LocalEngine
from fedtide.fleets.simulated import SimulatedFleet
from fedtide.runs.build import host_of
from machine import MB, among, append, machine, now, options, resident
from works import source

PICTURES = 60_000
ROWS = 50
REGISTERED = (100, 1_000, 10_000, 100_000, 1_000_000, 10_000_000)
CROWD = 1_000_000
"""Registered clients while cohorts or models grow."""
COHORTS = (10, 100, 1_000, 10_000)
MODELS = (1, 2, 4, 8, 16, 32, 64)
"""Models of IFCA, of which each client judges all and trains one."""
SOURCES = ("shared", "generated")
CURVES = ("registered", "cohorts", "models")
SEED = 0


def crowd(kind: str, clients: int, cohort: int, models: int | None = None) -> Experiment:
    """So many clients, of which so many take part in a round, one local epoch of one linear model, or of `models`."""
    algorithm = {"algorithm": "fedavg"} if models is None else {"algorithm": "ifca", "clusters": models}
    data: dict[str, Any] = {
        "source": {"kind": "generated", "clients": clients, "samples": ROWS, "dims": 784},
        "partition": {"kind": "natural"},
    }
    if kind == "shared":
        data = {"source": source(PICTURES), "partition": {"kind": "resample", "clients": clients, "samples": ROWS}}
    return from_dict(
        {
            "rounds": 1_000_000,
            "data": data,
            "model": {"kind": "linear"},
            "method": [{**algorithm, "cohort": cohort, "local": {"lr": 0.02, "batch_size": 10}}],
        }
    )


def probe(kind: str, clients: int, cohort: int, seconds: float, models: int | None = None) -> dict[str, Any]:
    """In a process of its own: start, play for so long and two rounds at least, and say what it took."""
    experiment = crowd(kind, clients, cohort, models)
    before = resident()
    host = host_of(experiment, experiment.method[0], SEED)
    fleet = SimulatedFleet(host.population, LocalEngine(host))
    steps = play(
        host.algorithm, fleet, begin(host.algorithm, fleet, seed=SEED, rounds=1_000_000), seed=SEED, rounds=1_000_000
    )
    next(steps)
    first, settled = time.time() - psutil.Process().create_time(), resident()
    took: list[float] = []
    worked: list[float] = []
    while len(took) < 2 or sum(took) < seconds:
        began, busy = time.perf_counter(), time.process_time()
        next(steps)
        took.append(time.perf_counter() - began)
        worked.append(time.process_time() - busy)
    return {
        "source": kind,
        "clients": clients,
        "cohort": cohort,
        "models": models or 1,
        "rows": ROWS,
        "model": "linear",
        "first_round": round(first, 2),
        "median": round(statistics.median(took), 6),
        "worked": round(min(worked), 6),
        "rounds": len(took),
        "before_mb": round(before, 1),
        "start_mb": round(settled, 1),
        "end_mb": round(resident(), 1),
        "peak_mb": round(_peak(), 1),
    }


def _peak() -> float:
    """The largest resident memory of this process so far, in MB."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / MB


def apart(**point: Any) -> dict[str, Any]:
    """`probe` in a fresh process."""
    made = subprocess.run([sys.executable, __file__, "--probe", json.dumps(point)], stdout=subprocess.PIPE, check=True)
    line: dict[str, Any] = json.loads(made.stdout)
    return line


def main() -> None:
    """Measure, print, append."""
    parser = options(__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="of rounds for each point")
    parser.add_argument("--sources", type=among(SOURCES), default=[*SOURCES])
    parser.add_argument("--curves", type=among(CURVES), default=[*CURVES], help="which, separated by commas")
    parser.add_argument("--probe", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.probe:
        print(json.dumps(probe(**json.loads(given.probe))))
        return
    date, where, lines = now(), machine(), []
    points: list[tuple[str, int, int, int | None]] = [
        *(("registered", clients, min(clients, 100), None) for clients in REGISTERED),
        *(("cohorts", CROWD, cohort, None) for cohort in COHORTS),
        *(("models", CROWD, COHORTS[1], models) for models in MODELS),
    ]
    for kind in given.sources:
        for bench, clients, cohort, models in (point for point in points if point[0] in given.curves):
            line = apart(kind=kind, clients=clients, cohort=cohort, seconds=given.seconds, models=models)
            lines.append({"bench": bench, "date": date, **line, **where})
            Console().print(
                f"{kind}: {clients:,} clients, {cohort:,} in a round, {models or 1} models: "
                f"{1 / line['worked']:.2f} rounds/s, "
                f"{line['end_mb']:.0f} MB, at most {line['peak_mb']:.0f} MB"
            )
    append(given.out, lines)


if __name__ == "__main__":
    main()
