"""Measure how long a sample takes, forward and backward, in every network of the sizes of docs/papers.md.

python bench/steps.py [--all]

Time is processor time of one thread, in local training as clients do it one by one. Networks that pages/steps.json has
are not measured again, except with `--all`.
"""

import argparse
import json
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "pages"))

import hours
import papers
from fedtide.config import from_dict
from fedtide.core.base import Moment, Shard
from fedtide.core.rng import Rng
from fedtide.learn.local import LocalTrainer
from fedtide.learn.task import Task
from machine import machine

FILE = Path(__file__).parents[1] / "pages" / "steps.json"
REPEATS, SECONDS = 3, 1.0
"""How often a network is timed, and about how many processor seconds each time."""
LONG = 4.0
"""Processor seconds of a step that need no second one."""


def main(everything: bool) -> None:
    """Write the file."""
    before = json.loads(FILE.read_text(encoding="utf-8"))["steps"] if FILE.is_file() and not everything else []
    kept = {hours.step_of(line): line for line in before}
    torch.set_num_threads(1)
    lines = []
    for step in sorted(needed()):
        line = kept.get(step) or step._asdict() | {"microseconds": round(measure(step), 1)}
        lines.append(line)
        print(line, flush=True)
        about = {"processor": machine()["processor"], "made": datetime.now(UTC).date().isoformat()}
        FILE.write_text(json.dumps(about | {"steps": lines}, indent=1) + "\n", encoding="utf-8")


def needed() -> set[hours.Step]:
    """Collect the kinds of steps of all commands at the papers' sizes."""
    rows = [row for paper in papers.contents() for row in paper["rows"] if papers.command(row, "paper")]
    return {step for row in rows for step, _ in hours.passes(papers.experiment_of(row))}


def measure(step: hours.Step) -> float:
    """Measure the microseconds of a sample: the median of several times."""
    experiment = from_dict({"model": json.loads(step.model), "method": [{"algorithm": "fedavg"}]})
    task = Task(lambda: experiment.model.build(step.shape, step.classes))
    shape, sequence = (step.batch, *step.shape), hasattr(experiment.model, "embedding")
    x = torch.randint(step.classes, shape) if sequence else torch.rand(shape)
    y = torch.randint(step.classes, shape if sequence else (step.batch,))
    shard = Shard(x, y, torch.arange(step.batch), mask=torch.ones_like(y, dtype=torch.bool) if sequence else None)
    weights = task.init(Rng(0))

    def seconds(steps: int) -> float:
        local = LocalTrainer(lr=1e-4, batch_size=step.batch, local_steps=steps)
        begun = time.process_time()
        local(task, task.loss, weights, shard, Moment(0, 1), Rng(0))
        return time.process_time() - begun

    first = seconds(1)
    if first > LONG:
        return 1e6 * first / step.batch
    steps = max(round(SECONDS / seconds(2) * 2), 1)
    return 1e6 * median(seconds(steps) for _ in range(REPEATS)) / (steps * step.batch)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="measure all again")
    main(parser.parse_args().all)
