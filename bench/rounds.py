"""Seconds per FedAvg round: naive loops and other frameworks against the fleets, interleaved in one run.

python bench/rounds.py [--repeats 15] [--works mlp,lenet] [--peers pfl,fedjax] [--out bench/results.jsonl] [--no-memory]

Timed is the algorithm's round only: no evaluation, no record, no checkpoint. Speed is reported, never asserted. Peers
are those that `make bench-peers` has installed. Every contender first plays one round with all rows in one batch, after
which its weights must be those of the naive loop. Processor time is that of all processes of a contender in its rounds.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

from fedtide.config import Experiment
from fedtide.core.base import Weights
from fedtide.core.loop import begin, play
from fedtide.fleets.engines import Engine, Host, LocalEngine, WorkersEngine
from fedtide.fleets.pool import Pool
from fedtide.fleets.ray_pool import RayPool
from fedtide.fleets.simulated import SimulatedFleet
from fedtide.fleets.stacked_engine import StackedEngine
from fedtide.runs.build import host_of, spec_of
from machine import among, append, computed, cores, machine, now, options, peak_of, quartiles, timed
from peer import PEERS, Way, started, versions, write_job
from peer import alone as peer_alone
from works import ENDLESS, WORKS, Goal, Work, experiment, naive

UNTIMED, TIMED = 0.15, 0.3
"""Seconds that a turn plays at least before it counts, and while it does: a run's rounds follow each other, too."""
LEAST = 2
"""Rounds of a turn that count at least."""
WARM_UP = 12
"""Rounds that are not timed: stacked steps are recorded once they have come ten times."""
SEED = 0
BF16 = {"precision": "bf16"}


@dataclass(frozen=True)
class Contender:
    """Something that plays rounds.

    Args:
        kind: the naive loop, one of `ENGINES`, or a peer of `WAYS`.
        threads: torch threads; for worker processes how many of them, with one thread each.
        settings: tables of the experiment that are its own.
        suffix: what they are called in the name.
        closeness: how near it must come to the naive loop in the checked round, as a share of the largest change.
    """

    kind: str
    threads: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    suffix: str = ""
    closeness: float = 0.01

    @property
    def name(self) -> str:
        """For tables and results."""
        return f"{self.kind}-{self.threads}{self.suffix}"

    @property
    def peer(self) -> str | None:
        """The framework, where it is not ours."""
        return WAYS[self.kind].peer if self.kind in WAYS else None

    @property
    def who(self) -> str:
        """Whose it is; ours apart by precision, as all others compute in float32."""
        ours = "fedtide bf16" if self.settings == BF16 else "fedtide"
        return self.peer or (ours if self.ours else "naive")

    @property
    def ours(self) -> bool:
        """Whether it is one of our fleets."""
        return self.kind in ENGINES

    def counts(self, goal: Goal) -> bool:
        """Whether a goal is about it."""
        if goal.ours == "bf16":
            return self.who == "fedtide bf16"
        stacked = {"any": None, "one by one": False, "stacked": True}[goal.ours]
        return self.who == "fedtide" and stacked in (None, self.kind == "stacked")


def _local(stack: ExitStack, parsed: Experiment, host: Host, threads: int) -> Engine:
    return LocalEngine(host, threads)


def _workers(stack: ExitStack, parsed: Experiment, host: Host, threads: int) -> Engine:
    pool = stack.enter_context(Pool(threads, joined=True))
    return WorkersEngine(host, pool, spec_of(parsed, parsed.method[0], SEED, None))


def _stacked(stack: ExitStack, parsed: Experiment, host: Host, threads: int) -> Engine:
    return StackedEngine(host, threads)


def _ray(stack: ExitStack, parsed: Experiment, host: Host, threads: int) -> Engine:
    return WorkersEngine(host, stack.enter_context(RayPool(threads)), spec_of(parsed, parsed.method[0], SEED, None))


ENGINES: dict[str, Callable[[ExitStack, Experiment, Host, int], Engine]] = {
    "local": _local,
    "workers": _workers,
    "stacked": _stacked,
    "ray": _ray,
}
"""Our fleets: (what ends them, experiment, host, threads) -> what runs the clients' work."""

WAYS = {
    "pfl": Way("pfl"),
    "pfl-torchrun": Way("pfl", processes=2),
    "fedjax": Way("fedjax"),
    "fedjax-pmap": Way("fedjax", {"FEDJAX_BACKEND": "pmap"}),
    "flower": Way("flower"),
}
"""Peers, and how each is run."""


def contenders(work: Work, peers: Sequence[str]) -> list[Contender]:
    """Who plays a work, the naive loop first; of peers those that were asked for and are installed."""
    everyone = [
        Contender("naive", 1),
        Contender("naive", 2),
        Contender("local", 1),
        Contender("local", 2),
        *([Contender("local", 2, {"fleet": {"channels_last": False}}, "-contiguous")] if work.convolutional else []),
        Contender("workers", 2),
        Contender("stacked", 1),
        Contender("stacked", 2),
        Contender("ray", 2),
        *(
            [Contender(kind, 2, BF16, "-bf16", closeness=0.1) for kind in ("local", "workers")]
            if any(goal.ours == "bf16" for goal in work.goals)
            else []
        ),
        Contender("pfl", 1),
        Contender("pfl", 2),
        Contender("pfl-torchrun", 2),
        Contender("fedjax", 2),
        Contender("fedjax-pmap", 2),
        Contender("flower", 2),
    ]
    return [c for c in everyone if c.peer is None or (c.peer in peers and WAYS[c.kind].installed)]


@dataclass
class Player:
    """A contender at its work: plays one round, says how many seconds it took, and shows its weights.

    `processes` compute for it, once it is warm.
    """

    round: Callable[[], float]
    weights: Callable[[], dict[str, torch.Tensor]]
    processes: list[psutil.Process] = field(default_factory=list)


@contextmanager
def player(work: Work, contender: Contender, *, batch: int) -> Iterator[Player]:
    """A contender ready to play; its processes end with the block."""
    parsed = experiment(work, batch=batch, settings=contender.settings)
    host = host_of(parsed, parsed.method[0], SEED)
    with ExitStack() as stack:
        if contender.peer is not None:
            job = _job(work, host, batch, Path(stack.enter_context(tempfile.TemporaryDirectory())))
            way = WAYS[contender.kind]
            peer = stack.enter_context(started(contender.name, way, job, contender.threads))
            yield Player(peer.round, peer.weights)
        elif contender.ours:
            yield _fedtide(host, ENGINES[contender.kind](stack, parsed, host, contender.threads))
        else:
            yield _naive(work, contender, host, batch)


def _first(host: Host) -> Weights:
    """Where everybody begins."""
    fleet = SimulatedFleet(host.population, LocalEngine(host))
    return begin(host.algorithm, fleet, seed=SEED, rounds=1).state.weights


def _job(work: Work, host: Host, batch: int, folder: Path) -> Path:
    path = folder / "job.npz"
    write_job(path, work, host.population, _first(host).params, batch=batch)
    return path


def _naive(work: Work, contender: Contender, host: Host, batch: int) -> Player:
    loop = naive(work, host.population, _first(host), batch=batch)

    def one() -> None:
        torch.set_num_threads(contender.threads)
        loop.round()

    return Player(lambda: timed(one)[0], loop.model.state_dict)


def _fedtide(host: Host, engine: Engine) -> Player:
    fleet = SimulatedFleet(host.population, engine)
    start = begin(host.algorithm, fleet, seed=SEED, rounds=ENDLESS)
    steps = play(host.algorithm, fleet, start, seed=SEED, rounds=ENDLESS)
    state: Any = start.state

    def one() -> None:
        nonlocal state
        torch.set_num_threads(1)
        state = next(steps).state

    return Player(lambda: timed(one)[0], lambda: state.weights.params)


def check(work: Work, peers: Sequence[str]) -> None:
    """One round of each contender with all rows in one batch must give the same weights.

    The largest difference is told as a share of the largest change that the round made, as one step changes little.
    """
    expected: dict[str, torch.Tensor] = {}
    for contender in contenders(work, peers):
        with player(work, contender, batch=0) as each:
            if not expected:
                begins = {name: value.clone() for name, value in each.weights().items()}
                each.round()
                expected = {name: value.clone() for name, value in each.weights().items()}
                moved = max(float((expected[name] - value).abs().max()) for name, value in begins.items())
                continue
            each.round()
            got = each.weights()
        if got.keys() != expected.keys():
            raise AssertionError(f"{contender.name}: has {sorted(got)}, expected {sorted(expected)}")
        for name, value in expected.items():
            atol = contender.closeness * moved
            torch.testing.assert_close(
                got[name], value, rtol=0, atol=atol, msg=lambda m, n=name, c=contender.name: f"{c}, {n}: {m}"
            )


@dataclass
class Taken:
    """Seconds of a round, the median of each turn; processor seconds of all rounds together, and how many these are."""

    seconds: list[float] = field(default_factory=list)
    worked: float = 0.0
    rounds: int = 0


def measure(work: Work, repeats: int, peers: Sequence[str]) -> dict[str, Taken]:
    """What rounds of each contender took, in turns.

    A turn begins with rounds that do not count: threads of the contender before may still be spinning, and caches hold
    its data.
    """
    here = psutil.Process()
    with ExitStack() as stack:
        players: dict[str, Player] = {}
        for c in contenders(work, peers):
            before = set(here.children(recursive=True))
            each = players[c.name] = stack.enter_context(player(work, c, batch=work.batch))
            for _ in range(WARM_UP):
                each.round()
            own = [child for child in here.children(recursive=True) if child not in before]
            each.processes = own if c.peer else [here, *own]  # for a peer this process does nothing but wait
        taken = {name: Taken() for name in players}
        for _ in range(repeats):
            for name, each in players.items():
                rounds_for(UNTIMED, 1, each)
                before_it = computed(each.processes)
                turn = rounds_for(TIMED, LEAST, each)
                taken[name].seconds.append(median(turn))
                taken[name].worked += computed(each.processes) - before_it
                taken[name].rounds += len(turn)
    return taken


def rounds_for(seconds: float, least: int, each: Player) -> list[float]:
    """Play rounds for so many seconds, at least some, and return the seconds of each."""
    taken: list[float] = []
    while len(taken) < least or sum(taken) < seconds:
        taken.append(each.round())
    return taken


def alone(name: str, contender: str) -> None:
    """Play a few rounds of one contender, and say when the first was over: what is run to measure its memory."""
    chosen = next(c for c in contenders(WORKS[name], ()) if c.name == contender)
    with player(WORKS[name], chosen, batch=WORKS[name].batch) as each:
        for turn in range(WARM_UP):
            each.round()
            if turn == 0:
                print(time.time() - psutil.Process().create_time(), flush=True)


def apart(name: str, contender: Contender) -> dict[str, int | float | None]:
    """Its peak memory in MB, and seconds from the start of its process to the end of its first round; by itself."""
    if contender.peer is None:
        peak, said = peak_of([sys.executable, __file__, "--alone", name, contender.name])
        return {"peak_mb": None if peak is None else round(peak), "first": round(float(said), 3) if said else None}
    with tempfile.TemporaryDirectory() as folder:
        work = WORKS[name]
        parsed = experiment(work, batch=work.batch)
        host = host_of(parsed, parsed.method[0], SEED)
        job = _job(work, host, work.batch, Path(folder))
        try:
            first, peak = peer_alone(contender.name, WAYS[contender.kind], job, contender.threads, WARM_UP)
        except RuntimeError as error:  # its rounds are measured: they are worth more than its memory
            print(error, file=sys.stderr)
            return {"peak_mb": None, "first": None}
    return {"peak_mb": round(peak), "first": round(first, 3)}


def results(name: str, played: Mapping[str, Taken], peers: Sequence[str], *, memory: bool) -> list[dict[str, Any]]:
    """One line per contender; ratios are to the naive loop, and to the peer, with the best median."""
    everyone = {c.name: c for c in contenders(WORKS[name], peers)}
    taken = {key: torch.tensor(each.seconds, dtype=torch.float64) for key, each in played.items()}
    middle_of = {key: float(each.median()) for key, each in taken.items()}
    naive_best = min((key for key, c in everyone.items() if c.kind == "naive"), key=middle_of.__getitem__)
    peer_best = min((key for key, c in everyone.items() if c.peer), key=middle_of.__getitem__, default=None)
    lines = []
    for key, contender in everyone.items():
        q1, middle, q3 = quartiles(taken[key], 6)
        line: dict[str, Any] = {
            "work": name,
            "title": WORKS[name].title,
            "contender": key,
            "who": contender.who,
            "threads": contender.threads,
            "median": middle,
            "q1": q1,
            "q3": q3,
            "repeats": len(taken[key]),
            "cpu_ms": round(1000 * played[key].worked / played[key].rounds, 3),
            "ratio": round(float(taken[naive_best].quantile(0.5) / taken[key].quantile(0.5)), 3),
            "peak_mb": None,
            "first": None,
        }
        if peer_best is not None:
            paired = quartiles(taken[peer_best] / taken[key], 3)
            line |= dict(zip(("peer_q1", "peer_ratio", "peer_q3"), paired, strict=True))
            line["best_peer"] = peer_best
        if memory:
            line |= apart(name, contender)
        lines.append(line)
    return lines


def found(name: str, played: Mapping[str, Taken], peers: Sequence[str]) -> list[dict[str, Any]]:
    """One line per goal: the fastest of ours that it is about against the fastest of its peers, turn by turn."""
    everyone = {c.name: c for c in contenders(WORKS[name], peers)}
    taken = {key: torch.tensor(each.seconds, dtype=torch.float64) for key, each in played.items()}
    middle_of = {key: float(each.median()) for key, each in taken.items()}
    lines = []
    for goal in WORKS[name].goals:
        ours = min((key for key, c in everyone.items() if c.counts(goal)), key=middle_of.__getitem__)
        rivals = [key for key, c in everyone.items() if c.peer and goal.against in (None, c.peer)]
        if rivals:
            theirs = min(rivals, key=middle_of.__getitem__)
            q1, ratio, q3 = quartiles(taken[theirs] / taken[ours], 3)
            about = {"work": name, "title": WORKS[name].title, "ours": goal.ours}
            lines.append({**about, "contender": ours, "peer": theirs, "q1": q1, "ratio": ratio, "q3": q3})
    return lines


def show(lines: list[dict[str, Any]], goals: list[dict[str, Any]]) -> None:
    """Print the lines of one work as a table, and what was found of its goals."""
    table = Table(title=lines[0]["title"], title_justify="left")
    table.add_column("contender", no_wrap=True)
    for column in ("seconds", "quartiles", "naive / this", "best peer / this", "first round, s", "peak MB"):
        table.add_column(column, justify="right", no_wrap=True)
    for line in lines:
        quartiles = f"{line['q1']:.4f} to {line['q3']:.4f}"
        against = (
            f"{line['peer_ratio']:.2f} ({line['peer_q1']:.2f} to {line['peer_q3']:.2f})" if "best_peer" in line else ""
        )
        first = "" if line["first"] is None else f"{line['first']:.1f}"
        peak = "" if line["peak_mb"] is None else str(line["peak_mb"])
        cells = (f"{line['median']:.4f}", quartiles, f"{line['ratio']:.2f}", against, first, peak)
        table.add_row(line["contender"], *cells)
    console = Console(width=120)
    console.print(table)
    missing = [peer for peer in PEERS if peer not in {line["who"] for line in lines}]
    if missing:
        console.print(f"not installed, or not asked for: {', '.join(missing)}; make bench-peers")
    for line in goals:
        times = f"{line['ratio']:.2f} times as long ({line['q1']:.2f} to {line['q3']:.2f})"
        console.print(f"{line['contender']} against {line['peer']}: {times}")


def main() -> None:
    """Check, measure, print, append."""
    parser = options(__doc__)
    parser.add_argument("--repeats", type=int, default=15, help="turns, with two timed rounds of each contender")
    parser.add_argument("--works", type=among(WORKS), default=[*WORKS], help="which works, separated by commas")
    parser.add_argument(
        "--peers", type=among(PEERS), default=[*PEERS], help="which peers, of those installed; '' for none"
    )
    parser.add_argument("--no-memory", action="store_true", help="measure neither memory nor start")
    parser.add_argument("--alone", nargs=2, metavar=("WORK", "CONTENDER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.alone:
        alone(*given.alone)
        return
    date, where = now(), {**machine(), "peers": versions()}
    if cores() < 2:
        print("fewer than two cores: contenders with two threads or processes will not do well")
    for name in given.works:
        check(WORKS[name], given.peers)
        played = measure(WORKS[name], given.repeats, given.peers)
        lines, goals = results(name, played, given.peers, memory=not given.no_memory), found(name, played, given.peers)
        show(lines, goals)
        append(given.out, [{"bench": "rounds", "date": date, **line, **where} for line in lines])
        append(given.out, [{"bench": "goals", "date": date, **line, **where} for line in goals])


if __name__ == "__main__":
    main()
