"""What an inspection finds in shifts that are known: nine, and pairs of them, over seeds; and how long it takes.

python bench/inspect_planted.py [--seeds 10] [--first 0] [--rows 2400] [--worlds NAME,NAME] [--keep]

A line for each world: seeds in which everything that was planted was found and nothing else, what was missed, what was
found beside it, and seconds of CPU for one inspection. A false alarm is anything that is found and was not planted.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table
from scipy.stats import binomtest

from fedtide.inspection.findings import QUESTIONS, found_in
from machine import keep

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from helpers.planted import NINE, PAIRS, expected, planted, words

ALL = {*QUESTIONS, "mix: others", "mix: same"} - {"mix"}
"""Whatever may be found."""
ALARMS = 0.05
"""Share of what is not there that may be found."""
HEADER = ("planted", "all of it, and nothing else", "missed", "beside it", "seconds")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seeds", type=int, default=10)
    options.add_argument("--first", type=int, default=0)
    options.add_argument("--rows", type=int, default=2400)
    options.add_argument("--worlds", default=",".join([*NINE, *PAIRS]))
    options.add_argument("--keep", action="store_true", help="for the documentation")
    given = options.parse_args()
    rows, found, looked = [], Counter[str](), Counter[str]()
    for name in given.worlds.split(","):
        (must, may), began = expected(name), time.process_time()
        missed, beside, whole = Counter[str](), Counter[str](), 0
        for seed in range(given.first, given.first + given.seeds):
            seen = words(found_in(planted(name, seed, given.rows)))
            missed.update(must - seen)
            beside.update(seen - may)
            whole += must <= seen <= may
        found.update({"there": given.seeds * len(must) - missed.total(), "not there": beside.total()})
        looked.update({"there": given.seeds * len(must), "not there": given.seeds * len(ALL - may)})
        seconds = (time.process_time() - began) / given.seeds
        counts = [", ".join(f"{what} ({count})" for what, count in each.items()) for each in (missed, beside)]
        rows.append([name, f"{whole} of {given.seeds}", *counts, f"{seconds:.2f}"])
    claims = claimed(found, looked, rows)
    for header, lines in ((HEADER, rows), (claims["header"], claims["rows"])):
        shown = Table(*header)
        for line in lines:
            shown.add_row(*line)
        Console(width=120).print(shown)
    if given.keep:
        results = {"header": HEADER, "rows": rows}
        command = " ".join(["python bench/inspect_planted.py", *(word for word in sys.argv[1:] if word != "--keep")])
        about = {"command": command, "minutes": time.process_time() / 60, "claims": claims, "results": results}
        keep("inspect-planted", about)


def claimed(found: Counter[str], looked: Counter[str], rows: list[list[str]]) -> dict[str, list]:
    """What is claimed of all worlds, with exact (Clopper-Pearson) 95 % intervals of shares."""
    alarms = binomtest(found["not there"], looked["not there"])
    upper = alarms.proportion_ci().high
    least = min(int(row[1].split()[0]) / int(row[1].split()[-1]) for row in rows)
    share = f"{found['not there']} of {looked['not there']}, the interval ends at {100 * upper:.1f} %"
    return {
        "header": ["claim", "found", "verdict"],
        "rows": [
            [
                "What was planted is found, and nothing else, in nine of ten seeds of every world",
                f"{100 * least:.0f} % in the worst world; {found['there']} of {looked['there']} findings in all",
                "holds" if least >= 0.9 else "does not hold",
            ],
            ["False alarms are below 5 %", share, "holds" if upper < ALARMS else "does not hold"],
        ],
    }


if __name__ == "__main__":
    main()
