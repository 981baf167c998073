"""What an inspection finds in shifts that are known: nine, and pairs of them, over seeds; and how long it takes.

python bench/inspect_planted.py [--seeds 10] [--first 0] [--rows 2400] [--worlds NAME,NAME]

A line for each world: seeds in which everything that was planted was found and nothing else, what was missed, what was
found beside it, and seconds of CPU for one inspection. A false alarm is anything that is found in "nothing".
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fedtide.inspection.findings import found_in

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from helpers.planted import NINE, PAIRS, expected, planted, words


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seeds", type=int, default=10)
    options.add_argument("--first", type=int, default=0)
    options.add_argument("--rows", type=int, default=2400)
    options.add_argument("--worlds", default=",".join([*NINE, *PAIRS]))
    given = options.parse_args()
    shown = Table("planted", "as planted", "missed", "beside it", "seconds")
    for name in given.worlds.split(","):
        (must, may), began = expected(name), time.process_time()
        missed, beside, whole = Counter[str](), Counter[str](), 0
        for seed in range(given.first, given.first + given.seeds):
            seen = words(found_in(planted(name, seed, given.rows)))
            missed.update(must - seen)
            beside.update(seen - may)
            whole += must <= seen <= may
        seconds = (time.process_time() - began) / given.seeds
        counts = [", ".join(f"{what} ({count})" for what, count in each.items()) for each in (missed, beside)]
        shown.add_row(name, f"{whole} of {given.seeds}", *counts, f"{seconds:.2f}")
    Console(width=120).print(shown)


if __name__ == "__main__":
    main()
