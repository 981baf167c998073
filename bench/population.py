"""A million clients, and the evaluation of thousands: start-up, seconds per round, memory, cost of scoring.

python bench/population.py [--clients 1000000] [--rounds 200] [--model small-cnn] [--out bench/results.jsonl]
"""

import statistics
import time
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor

from fedtide.config import Experiment, from_dict
from fedtide.core.base import Moment
from fedtide.core.loop import begin, play
from fedtide.fleets.engines import Host, LocalEngine, threads
from fedtide.fleets.simulated import SimulatedFleet
from fedtide.runs.build import host_of
from machine import machine, now, options, resident, told
from works import source

COHORT = 100
ROWS = 60
JUDGED = 3400
TEST_ROWS = 20
BATCH = 2048
SEED = 0


def crowd(clients: int, model: str) -> Experiment:
    """A federation of so many clients that share the bundled pictures, of which 100 take part in a round."""
    return from_dict(
        {
            "rounds": 1_000_000,
            "data": {
                "source": "day-night-characters",
                "partition": {"kind": "resample", "clients": clients, "samples": ROWS},
                "split": {"val": 0.0},
                "held_out_clients": {"clients": 100},
            },
            "model": {"kind": model},
            "method": [{"algorithm": "fedavg", "cohort": COHORT, "local": {"lr": 0.02, "batch_size": 20}}],
        }
    )


def judged() -> Experiment:
    """A federation whose clients have about 20 test rows each."""
    each = TEST_ROWS + 5
    return from_dict(
        {
            "rounds": 1,
            "data": {
                "source": source(JUDGED * each),
                "partition": {"kind": "iid", "clients": JUDGED, "samples": each},
                "split": {"val": 0.0, "test": TEST_ROWS / each},
            },
            "model": {"kind": "small-cnn"},
            "method": [{"algorithm": "fedavg"}],
        }
    )


def ready(experiment: Experiment) -> tuple[Host, SimulatedFleet]:
    """The experiment's only method in this process, on one thread."""
    host = host_of(experiment, experiment.method[0], SEED)
    return host, SimulatedFleet(host.population, LocalEngine(host))


def population(clients: int, rounds: int, model: str) -> dict[str, Any]:
    """Seconds from the start of this process to the end of the first round, then seconds per round; memory."""
    host, fleet = ready(crowd(clients, model))
    start = begin(host.algorithm, fleet, seed=SEED, rounds=1_000_000)
    steps = play(host.algorithm, fleet, start, seed=SEED, rounds=1_000_000)
    next(steps)
    first = time.time() - psutil.Process().create_time()
    before, seconds = resident(), []
    for _ in range(rounds):
        began = time.perf_counter()
        next(steps)
        seconds.append(time.perf_counter() - began)
    return {
        "clients": clients,
        "cohort": COHORT,
        "rows": ROWS,
        "model": model,
        "first_round": round(first, 3),
        "median": round(statistics.median(seconds), 6),
        "rounds": rounds,
        "start_mb": round(before),
        "end_mb": round(resident()),
    }


def evaluation(repeats: int) -> dict[str, Any]:
    """Seconds of `fleet.score` on every client against one plain pass of the same module over the pooled rows."""
    host, fleet = ready(judged())
    fleet.begin(Moment(0, 1))
    state = begin(host.algorithm, fleet, seed=SEED, rounds=1).state
    payload, slot = host.algorithm.serve(state, fleet.clients)
    module = judged().model.build(host.population.rows.shape, host.population.rows.classes).eval()
    module.load_state_dict(state.weights.params)
    rows, _ = host.population.pooled(fleet.clients, fleet.moment, "test")
    x, y = host.population.rows.x[rows], host.population.rows.y[rows]
    ours, plain = [], []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        scores = fleet.score(payload, fleet.clients, slot=slot)
        ours.append(time.perf_counter() - began)
        with threads(1):
            began = time.perf_counter()
            correct, loss = one_pass(module, x, y)
            plain.append(time.perf_counter() - began)
    judged_alike = torch.tensor([scores.correct.sum(), scores.loss.sum()])
    torch.testing.assert_close(judged_alike, torch.tensor([correct, loss]).double(), rtol=1e-3, atol=0)
    score, reference = statistics.median(ours[1:]), statistics.median(plain[1:])
    return {
        "clients": JUDGED,
        "rows": len(rows),
        "model": "small-cnn",
        "score": round(score, 6),
        "plain": round(reference, 6),
        "repeats": repeats,
        "ratio": round(score / reference, 3),
    }


@torch.no_grad()
def one_pass(module: torch.nn.Module, x: Tensor, y: Tensor) -> tuple[int, float]:
    """Correct rows and summed loss over all rows, in large batches."""
    correct, loss = 0, 0.0
    for i in range(0, len(x), BATCH):
        logits = module(x[i : i + BATCH].float() / 255)
        correct += int((logits.argmax(1) == y[i : i + BATCH]).sum())
        loss += F.cross_entropy(logits, y[i : i + BATCH], reduction="sum").item()
    return correct, loss


def main() -> None:
    """Measure, print, append."""
    parser = options(__doc__)
    parser.add_argument("--clients", type=int, default=1_000_000, help="how many are registered")
    parser.add_argument("--rounds", type=int, default=200, help="rounds after the first")
    parser.add_argument("--model", choices=("small-cnn", "linear"), default="small-cnn")
    parser.add_argument("--repeats", type=int, default=9, help="evaluations")
    given = parser.parse_args()
    date, where = now(), machine()
    crowded = population(given.clients, given.rounds, given.model)
    told("a large population", {"bench": "population", "date": date, **crowded, **where}, given.out)
    scored = evaluation(given.repeats)
    told("evaluation of many clients", {"bench": "evaluation", "date": date, **scored, **where}, given.out)


if __name__ == "__main__":
    main()
