"""What a round costs more while another process computes the same beside it: what two processes cannot be without.

python bench/beside.py [--repeats 20] [--works mlp,lenet] [--out bench/results.jsonl]

The two share nothing but the machine: its memory, its last cache, perhaps a core. Processor time of rounds of one
process, in turns alone and beside the other. And two workers, whose sums are added, against one process, each with
nobody else playing: the turns of `rounds.py` find their caches full of others' numbers.
"""

import multiprocessing
import time
from multiprocessing.synchronize import Event
from typing import Any

import psutil
import torch
from rich.console import Console

from machine import among, append, computed, machine, now, options, quartiles
from rounds import LEAST, TIMED, UNTIMED, WARM_UP, Contender, player, rounds_for
from works import WORKS

ALONE, WORKERS = Contender("local", 1), Contender("workers", 2)
BY_ITSELF = 3.0
"""Seconds for which a contender plays while nobody else does."""


def compute(name: str, go: Event) -> None:
    """Play rounds of a work whenever `go` is set, without end."""
    with player(WORKS[name], ALONE, batch=WORKS[name].batch) as each:
        while go.wait():
            each.round()


def by_itself(name: str, contender: Contender) -> float:
    """Processor seconds of a round, of all processes, while rounds follow each other."""
    with player(WORKS[name], contender, batch=WORKS[name].batch) as each:
        for _ in range(WARM_UP):
            each.round()
        here = psutil.Process()
        everyone = [here, *here.children(recursive=True)]
        began = computed(everyone)
        count = len(rounds_for(BY_ITSELF, LEAST, each))
        return (computed(everyone) - began) / count


def measured(name: str, repeats: int) -> dict[str, Any]:
    """Processor milliseconds of a round alone and beside the other process, and quartiles of their ratio."""
    context = multiprocessing.get_context("spawn")
    go = context.Event()
    other = context.Process(target=compute, args=(name, go), daemon=True)
    other.start()
    took: dict[bool, list[float]] = {False: [], True: []}
    with player(WORKS[name], ALONE, batch=WORKS[name].batch) as each:
        for _ in range(WARM_UP):
            each.round()
        go.set()
        time.sleep(10)  # it imports, and warms up
        for _ in range(repeats):
            for beside in took:
                (go.set if beside else go.clear)()
                rounds_for(UNTIMED, 1, each)
                began = time.process_time()
                count = len(rounds_for(TIMED, LEAST, each))
                took[beside].append((time.process_time() - began) / count)
    other.kill()
    other.join()
    pairs = [(by_itself(name, WORKERS), by_itself(name, ALONE)) for _ in range(3)]
    workers = float(torch.tensor([two / one for two, one in pairs]).median())
    alone, beside = (torch.tensor(took[key], dtype=torch.float64) for key in (False, True))
    q1, ratio, q3 = quartiles(beside / alone, 3)
    times = {"alone_ms": round(1000 * float(alone.median()), 3), "beside_ms": round(1000 * float(beside.median()), 3)}
    return {
        "work": name,
        "title": WORKS[name].title,
        **times,
        "q1": q1,
        "ratio": ratio,
        "q3": q3,
        "repeats": repeats,
        "workers": round(workers, 3),
    }


def main() -> None:
    """Measure, print, append."""
    parser = options(__doc__)
    parser.add_argument("--repeats", type=int, default=20, help="turns")
    parser.add_argument("--works", type=among(WORKS), default=[*WORKS], help="which works, separated by commas")
    given = parser.parse_args()
    date, where = now(), machine()
    for name in given.works:
        line = measured(name, given.repeats)
        said = f"{line['alone_ms']:.2f} ms alone, {line['beside_ms']:.2f} ms beside the same"
        Console(width=120).print(f"{line['title']}: {said}: {line['ratio']:.2f} ({line['q1']:.2f} to {line['q3']:.2f})")
        Console(width=120).print(f"two workers against one process, by themselves: {line['workers']:.2f}")
        append(given.out, [{"bench": "beside", "date": date, **line, **where}])


if __name__ == "__main__":
    main()
