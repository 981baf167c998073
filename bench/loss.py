"""What the re-weighted softmax costs: local training of the 1.2 M network with cross-entropy, with it, and once more.

python bench/loss.py [--repeats 60] [--out bench/results.jsonl]

The three take turns. Cross-entropy against itself says how much of a difference is noise. Speed is reported, never
asserted.
"""

import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from fedtide.core.base import Moment, Shard
from fedtide.core.rng import Rng
from fedtide.fleets.engines import threads
from fedtide.learn.local import LocalTrainer
from fedtide.learn.losses import WSM, CrossEntropy
from fedtide.learn.task import Task
from fedtide.models.networks import CNN
from machine import append, machine, now, options, quartiles

ROWS, BATCH, CLASSES, HELD = 128, 32, 62, 5
CONTENDERS = {"cross-entropy": CrossEntropy(), "re-weighted softmax": WSM(), "cross-entropy again": CrossEntropy()}
WARM_UP = 3
GOAL = 0.03


def client() -> Shard:
    """A client with random pictures of a few classes."""
    draw = torch.Generator().manual_seed(0)
    x = torch.rand(ROWS, 1, 28, 28, generator=draw)
    return Shard(x, torch.randint(HELD, (ROWS,), generator=draw), torch.arange(ROWS))


def measured(repeats: int) -> list[dict[str, Any]]:
    """Seconds of a client's local training with each loss, and the ratio to cross-entropy in the same turn."""
    held, solver, moment = client(), LocalTrainer(0.05, batch_size=BATCH), Moment(0, 1)
    tasks = {name: Task(lambda: CNN().build((1, 28, 28), CLASSES), loss) for name, loss in CONTENDERS.items()}
    weights = next(iter(tasks.values())).init(Rng(0))
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    with threads(1):
        for turn in range(WARM_UP + repeats):
            for name, task in tasks.items():
                began = time.perf_counter()
                solver(task, task.loss, weights, held, moment, Rng(0).at(turn))
                if turn >= WARM_UP:
                    seconds[name].append(time.perf_counter() - began)
    base = torch.tensor(seconds["cross-entropy"], dtype=torch.float64)
    lines = []
    for name, taken in seconds.items():
        ratios = quartiles(torch.tensor(taken, dtype=torch.float64) / base, 4)
        median = float(torch.tensor(taken, dtype=torch.float64).median())
        lines.append(
            {
                "loss": name,
                "step": round(median * BATCH / ROWS, 6),
                **dict(zip(("q1", "ratio", "q3"), ratios, strict=True)),
                "rows": ROWS,
                "batch_size": BATCH,
                "goal": GOAL,
                "repeats": repeats,
            }
        )
    return lines


def main() -> None:
    """Measure, print, append."""
    parser = options(__doc__)
    parser.add_argument("--repeats", type=int, default=60, help="how often each is timed")
    given = parser.parse_args()
    date, where = now(), machine()
    lines = measured(given.repeats)
    table = Table(title="a step of local training", title_justify="left")
    for column in ("loss", "milliseconds", "against cross-entropy", "quartiles", "goal"):
        table.add_column(column, no_wrap=True)
    for line in lines:
        spread = f"{line['q1'] - 1:+.1%} to {line['q3'] - 1:+.1%}"
        goal = f"< {GOAL:.0%}" if line["loss"] == "re-weighted softmax" else ""
        table.add_row(line["loss"], f"{1000 * line['step']:.1f}", f"{line['ratio'] - 1:+.1%}", spread, goal)
    Console(width=120).print(table)
    append(given.out, [{"bench": "loss", "date": date, **line, **where} for line in lines])


if __name__ == "__main__":
    main()
