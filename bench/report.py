"""What a report costs: many clients, every one judged, and hundreds of rounds of records.

python bench/report.py [--clients 3400] [--rounds 300] [--every 4] [--profile] [--out bench/results.jsonl]

The records are those of a real run of a small model, which is played first and takes longer than what is measured.
"""

import cProfile
import pstats
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fedtide.config import Experiment, from_dict
from fedtide.report.page import write_report
from fedtide.runs.experiment import execute
from fedtide.runs.folder import create
from machine import MB, machine, now, options, peak_of, told
from works import source

ROWS = 25
TEST_ROWS = 10
COHORT = 20
ALGORITHMS: dict[str, dict[str, Any]] = {"fedavg": {}, "ifca": {}}


def crowd(clients: int, rounds: int, every: int) -> Experiment:
    """A federation whose records are as long as a study's: one method with one model, and one with clusters."""
    return from_dict(
        {
            "rounds": rounds,
            "eval_every": every,
            "data": {
                "source": source(clients * ROWS),
                "partition": {"kind": "iid", "clients": clients, "samples": ROWS},
                "split": {"val": 0.0, "test": TEST_ROWS / ROWS},
            },
            "model": {"kind": "linear"},
            "defaults": {"cohort": COHORT, "local": {"lr": 0.02, "batch_size": 0}},
            "method": [{"name": name, "algorithm": name, **options} for name, options in ALGORITHMS.items()],
        }
    )


def measured(clients: int, rounds: int, every: int, *, profiled: bool) -> dict[str, Any]:
    """Play, and then report."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "crowd"
        experiment = crowd(clients, rounds, every)
        create(experiment, root)
        execute(experiment, root)
        began = time.perf_counter()
        with cProfile.Profile() as profile:
            if not profiled:
                profile.disable()
            path = write_report([root])
        page = time.perf_counter() - began
        size = path.stat().st_size / MB
        if profiled:
            pstats.Stats(profile).sort_stats("cumulative").print_stats(40)
        began = time.perf_counter()
        peak, _ = peak_of([sys.executable, "-m", "fedtide", "report", str(root)])
        command = time.perf_counter() - began
    return {
        "clients": clients,
        "rounds": rounds,
        "every": every,
        "methods": len(ALGORITHMS),
        "algorithms": ", ".join(ALGORITHMS),
        "command": round(command, 3),
        "page": round(page, 3),
        "peak_mb": None if peak is None else round(peak),
        "page_mb": round(size, 3),
    }


def main() -> None:
    """Measure, print, append."""
    parser = options(__doc__)
    parser.add_argument("--clients", type=int, default=3400)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--every", type=int, default=4, help="rounds between evaluations")
    parser.add_argument("--profile", action="store_true", help="print where the time goes; slows it, nothing is kept")
    given = parser.parse_args()
    date, where = now(), machine()
    line = measured(given.clients, given.rounds, given.every, profiled=given.profile)
    line = {"bench": "report", "date": date, **line, **where}
    told("a report of many clients", line, None if given.profile else given.out)


if __name__ == "__main__":
    main()
