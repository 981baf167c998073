"""Whether training in bfloat16 is as accurate as in float32: the same federations with both, seed by seed.

python bench/precision.py [--seeds 5] [--rounds 60] [--model cnn] [--out bench/results.jsonl]
"""

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from fedtide.config import Experiment, from_dict
from fedtide.runs.experiment import execute
from fedtide.runs.folder import create
from machine import machine, now, options, told

COHORT = 10
LATE = 5
"""Evaluations, the last ones, whose mean is compared."""


def federation(precision: str, seeds: int, rounds: int, model: str) -> Experiment:
    """FedAvg on the characters that ship with the package."""
    return from_dict(
        {
            "rounds": rounds,
            "seeds": list(range(seeds)),
            "eval_every": 4,
            "eval_splits": ["train_clients"],
            "precision": precision,
            "data": {"source": "day-night-characters", "partition": {"kind": "dirichlet", "clients": 60, "alpha": 0.3}},
            "model": {"kind": model},
            "method": [
                {"name": "FedAvg", "algorithm": "fedavg", "cohort": COHORT, "local": {"lr": 0.1, "batch_size": 20}}
            ],
        }
    )


def late(folder: Path, seeds: int) -> list[float]:
    """For each seed the mean accuracy of the last evaluations."""
    found = []
    for seed in range(seeds):
        lines = [json.loads(line) for line in (folder / "fedavg" / str(seed) / "rounds.jsonl").read_text().splitlines()]
        judged = [line["scores"]["train_clients"]["accuracy"] for line in lines if "scores" in line]
        found.append(statistics.fmean(judged[-LATE:]))
    return found


def compared(seeds: int, rounds: int, model: str) -> dict[str, Any]:
    """Accuracies with both precisions, and their difference over seeds with its standard error."""
    accuracy, seconds = {}, {}
    with tempfile.TemporaryDirectory() as temporary:
        for precision in ("fp32", "bf16"):
            experiment, folder = federation(precision, seeds, rounds, model), Path(temporary) / precision
            create(experiment, folder)
            began = time.perf_counter()
            execute(experiment, folder, workers=1)
            seconds[precision] = round(time.perf_counter() - began, 1)
            accuracy[precision] = late(folder, seeds)
    difference = [after - before for before, after in zip(accuracy["fp32"], accuracy["bf16"], strict=True)]
    return {
        "model": model,
        "rounds": rounds,
        "seeds": seeds,
        **{name: [round(value, 5) for value in values] for name, values in accuracy.items()},
        "mean": {name: round(statistics.fmean(values), 5) for name, values in accuracy.items()},
        "spread": round(statistics.stdev(accuracy["fp32"]), 5),
        "difference": round(statistics.fmean(difference), 5),
        "error": round(statistics.stdev(difference) / seeds**0.5, 5),
        "seconds": seconds,
    }


def main() -> None:
    """Measure, print, append."""
    parser = options(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--model", choices=("cnn", "small-cnn"), default="cnn")
    given = parser.parse_args()
    line = {"bench": "precision", "date": now(), **compared(given.seeds, given.rounds, given.model), **machine()}
    told("bfloat16 against float32", line, given.out)


if __name__ == "__main__":
    main()
