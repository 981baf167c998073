"""Evaluation of pictures as it is, beside passes of 2,048 rows with freed memory given back: microseconds a picture.

python bench/passes.py [--networks cnn,lenet5] [--repeats 5] [--out bench/results.jsonl]

Each side is a process of its own with one thread. The two take turns at going first. Predictions of both are the same.
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import torch

from fedtide.config import from_dict
from fedtide.core.rng import Rng
from fedtide.fleets.this_machine import keep_freed_memory
from fedtide.learn import task as tasks
from machine import among, append, machine, now, options, quartiles

NETWORKS = {
    "small-cnn": (1, 28, 28), "lenet5": (1, 28, 28), "cnn": (1, 28, 28), "leaf-cnn": (1, 28, 28),
    "cifar-cnn": (3, 32, 32), "resnet8": (3, 32, 32),
}  # fmt: skip
"""Kinds of models, and the shape of a picture."""
PICTURES = 2048
SIDES = ("before", "now")


def serve(side: str, name: str) -> None:
    """Print the microseconds of a picture, and a sum of the outputs."""
    torch.set_num_threads(1)
    if side == "now":
        keep_freed_memory()
    else:
        tasks.PIXELS = sys.maxsize
    experiment = from_dict({"model": name, "method": [{"algorithm": "fedavg"}]})
    task = tasks.Task(lambda: experiment.model.build(NETWORKS[name], 10))
    weights, x = task.init(Rng(0)), torch.rand(PICTURES, *NETWORKS[name], generator=torch.Generator().manual_seed(0))
    outputs = task.logits(weights, x)  # others left the caches full
    begun = time.perf_counter()
    task.logits(weights, x)
    print(1e6 * (time.perf_counter() - begun) / PICTURES, float(outputs.double().sum()))


def ask(side: str, name: str) -> tuple[float, float]:
    """Let a side evaluate in a new process."""
    path = os.pathsep.join(str(Path(__file__).parents[1] / folder) for folder in ("src", "bench"))
    command = [sys.executable, __file__, "--serve", side, name]
    microseconds, total = subprocess.check_output(command, text=True, env={**os.environ, "PYTHONPATH": path}).split()
    return float(microseconds), float(total)


def main() -> None:
    """Compare, print, append."""
    if sys.argv[1:2] == ["--serve"]:
        serve(*sys.argv[2:])
        return
    parser = options(__doc__)
    parser.add_argument("--networks", type=among(NETWORKS), default=[*NETWORKS], help="which, separated by commas")
    parser.add_argument("--repeats", type=int, default=5, help="turns")
    given = parser.parse_args()
    about, lines = {"bench": "passes", "date": now(), "repeats": given.repeats, "pictures": PICTURES}, []
    where = machine()
    for name in given.networks:
        turns = []
        for turn in range(given.repeats):
            told = {side: ask(side, name) for side in SIDES[:: 1 if turn % 2 else -1]}
            assert told["before"][1] == told["now"][1], name
            turns.append([told[side][0] for side in SIDES])
        before, after = (round(median(side), 1) for side in zip(*turns, strict=True))
        q1, ratio, q3 = quartiles([old / new for old, new in turns], 3)
        lines.append(
            {**about, "network": name, "before": before, "now": after, "ratio": ratio, "q1": q1, "q3": q3, **where}
        )
        print(f"{name}: {before} and {after} microseconds, {ratio:.2f} times ({q1:.2f} to {q3:.2f})", flush=True)
    append(given.out, lines)


if __name__ == "__main__":
    main()
