"""Seconds per FedAvg round: naive loops against the fleets, interleaved in one run.

python bench/rounds.py [--repeats 15] [--works mlp,lenet] [--out bench/results.jsonl] [--no-memory]

Timed is the algorithm's round only: no evaluation, no record, no checkpoint. Speed is reported, never asserted.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table

from fedtide.core.loop import begin, play
from fedtide.core.memory import MemoryStore
from fedtide.core.types import Weights
from fedtide.fleets.host import Host
from fedtide.fleets.local import LocalEngine
from fedtide.fleets.pool import Pool
from fedtide.fleets.simulated import SimulatedFleet
from fedtide.fleets.workers import WorkersEngine
from fedtide.runs.assemble import host_of, spec_of
from machine import RESULTS, append, cores, machine, now, peak_of
from works import ENDLESS, WORKS, Work, experiment, naive

WARM_UP = 3
SEED = 0
QUARTILES = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)


@dataclass(frozen=True)
class Contender:
    """Something that plays rounds.

    Args:
        kind: the naive loop, this process, or worker processes.
        threads: torch threads; for worker processes how many of them, with one thread each.
        channels_last: the memory format of convolutions.
    """

    kind: Literal["naive", "local", "workers"]
    threads: int
    channels_last: bool = True

    @property
    def name(self) -> str:
        """For tables and results."""
        return f"{self.kind}-{self.threads}" + ("" if self.channels_last else "-contiguous")


def contenders(work: Work) -> list[Contender]:
    """Who plays a work."""
    out = [Contender("naive", 1), Contender("naive", 2), Contender("local", 1), Contender("local", 2)]
    if work.convolutional:
        out.append(Contender("local", 2, channels_last=False))
    return [*out, Contender("workers", 2)]


@dataclass
class Player:
    """A contender at its work: plays one round, and shows its weights."""

    round: Callable[[], None]
    weights: Callable[[], dict[str, torch.Tensor]]


@contextmanager
def player(work: Work, contender: Contender, *, batch: int) -> Iterator[Player]:
    """A contender ready to play; its processes end with the block."""
    parsed = experiment(work, batch=batch, channels_last=contender.channels_last)
    host = host_of(parsed, parsed.method[0], SEED, MemoryStore(None))
    with ExitStack() as stack:
        if contender.kind == "naive":
            yield _naive(work, contender, host, batch)
        elif contender.kind == "local":
            yield _fedtide(host, LocalEngine(host, contender.threads))
        else:
            pool = stack.enter_context(Pool(contender.threads))
            yield _fedtide(host, WorkersEngine(pool, spec_of(parsed, parsed.method[0], SEED, None)))


def _naive(work: Work, contender: Contender, host: Host, batch: int) -> Player:
    fleet = SimulatedFleet(host.population, LocalEngine(host), host.memory)
    first: Weights = begin(host.algorithm, fleet, seed=SEED, rounds=1).state.weights
    loop = naive(work, host.population, first, batch=batch)

    def one() -> None:
        torch.set_num_threads(contender.threads)
        loop.round()

    return Player(one, loop.model.state_dict)


def _fedtide(host: Host, engine: LocalEngine | WorkersEngine) -> Player:
    fleet = SimulatedFleet(host.population, engine, host.memory)
    start = begin(host.algorithm, fleet, seed=SEED, rounds=ENDLESS)
    steps = play(host.algorithm, fleet, start, seed=SEED, rounds=ENDLESS)
    state: Any = start.state

    def one() -> None:
        nonlocal state
        torch.set_num_threads(1)
        state = next(steps).state

    return Player(one, lambda: state.weights.params)


def check(work: Work) -> None:
    """One round of each contender with all rows in one batch must give the same weights to 1e-4."""
    with ExitStack() as stack:
        players = [stack.enter_context(player(work, contender, batch=0)) for contender in contenders(work)]
        for each in players:
            each.round()
        expected = players[0].weights()
        for contender, each in zip(contenders(work), players, strict=True):
            for name, value in each.weights().items():
                torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-4, msg=f"{contender.name}: {name}")


def measure(work: Work, repeats: int) -> dict[Contender, list[float]]:
    """Seconds of each round of each contender, in turns.

    A turn begins with a round that does not count: threads of the contender before may still be spinning, and caches
    hold its data.
    """
    with ExitStack() as stack:
        players = {c: stack.enter_context(player(work, c, batch=work.batch)) for c in contenders(work)}
        seconds: dict[Contender, list[float]] = {c: [] for c in players}
        for each in players.values():
            for _ in range(WARM_UP):
                each.round()
        for _ in range(repeats):
            for contender, each in players.items():
                for counts in (False, True, True):
                    began = time.perf_counter()
                    each.round()
                    if counts:
                        seconds[contender].append(time.perf_counter() - began)
    return seconds


def alone(name: str, contender: str) -> None:
    """Play a few rounds of one contender: what is run to measure its memory."""
    chosen = next(c for c in contenders(WORKS[name]) if c.name == contender)
    with player(WORKS[name], chosen, batch=WORKS[name].batch) as each:
        for _ in range(WARM_UP):
            each.round()


def results(name: str, seconds: dict[Contender, list[float]], *, memory: bool) -> list[dict[str, Any]]:
    """One line per contender."""
    quartiles = {c: torch.tensor(s, dtype=torch.float64).quantile(QUARTILES).tolist() for c, s in seconds.items()}
    best = min(median for c, (_, median, _) in quartiles.items() if c.kind == "naive")
    lines = []
    for contender, (q1, median, q3) in quartiles.items():
        command = [sys.executable, __file__, "--alone", name, contender.name]
        peak = peak_of(command) if memory else None
        lines.append(
            {
                "work": name,
                "title": WORKS[name].title,
                "contender": contender.name,
                "threads": contender.threads,
                "median": round(median, 6),
                "q1": round(q1, 6),
                "q3": round(q3, 6),
                "repeats": len(seconds[contender]),
                "ratio": round(best / median, 3),
                "peak_mb": None if peak is None else round(peak),
            }
        )
    return lines


def show(lines: list[dict[str, Any]]) -> None:
    """Print the lines of one work as a table."""
    table = Table(title=lines[0]["title"], title_justify="left")
    table.add_column("contender", no_wrap=True)
    for column in ("seconds", "quartiles", "naive / this", "peak MB"):
        table.add_column(column, justify="right", no_wrap=True)
    for line in lines:
        peak = "" if line["peak_mb"] is None else str(line["peak_mb"])
        quartiles = f"{line['q1']:.4f} to {line['q3']:.4f}"
        table.add_row(line["contender"], f"{line['median']:.4f}", quartiles, f"{line['ratio']:.2f}", peak)
    Console().print(table)


def main() -> None:
    """Check, measure, print, append."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="rounds of each contender that are timed")
    parser.add_argument("--works", default=",".join(WORKS), help="which works, separated by commas")
    parser.add_argument("--out", type=Path, default=RESULTS, help="file to which the results are appended")
    parser.add_argument("--no-memory", action="store_true", help="do not measure memory")
    parser.add_argument("--alone", nargs=2, metavar=("WORK", "CONTENDER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.alone:
        alone(*given.alone)
        return
    date, where = now(), machine()
    if cores() < 2:
        print("fewer than two cores: contenders with two threads or processes will not do well")
    for name in given.works.split(","):
        if name not in WORKS:
            parser.error(f"--works: found '{name}', allowed: {', '.join(WORKS)}")
        check(WORKS[name])
        lines = results(name, measure(WORKS[name], given.repeats), memory=not given.no_memory)
        show(lines)
        append(given.out, [{"bench": "rounds", "date": date, **line, **where} for line in lines])


if __name__ == "__main__":
    main()
