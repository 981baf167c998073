"""The server's own work: what FedTEM and FedTKM add to a round of FedAvg, and the assignment of a large cohort.

python bench/server.py [--repeats 40] [--networks cnn,small-cnn] [--out bench/results.jsonl]

Clients have answered before the clock starts: a fleet hands out a prepared reply. Speed is reported, never asserted.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fedtide.algorithms.fedavg import fedavg
from fedtide.algorithms.fedtem import KERAS, fedtem
from fedtide.algorithms.fedtkm import fedtkm
from fedtide.config import Experiment, from_dict
from fedtide.core.base import Algorithm, Moment, Reply, State, Weights
from fedtide.core.loop import begin, play
from fedtide.core.rng import Rng
from fedtide.fleets.engines import Host, LocalEngine, threads
from fedtide.fleets.simulated import SimulatedFleet
from fedtide.learn.task import width, with_branches
from fedtide.mixtures.assign import assign, capacities
from fedtide.mixtures.priors import Linear
from fedtide.runs.build import host_of, task_of
from machine import among, append, machine, now, options, quartiles, timed
from works import ENDLESS, source

PARTICIPANTS, ROWS, BATCH, BRANCHES, PERIOD = 10, 60, 20, 2, 32
NETWORKS = {"cnn": 62, "small-cnn": 10}
"""Model and classes: the paper's network for EMNIST, whose features have 128 numbers, and `small-cnn`."""
METHODS: dict[str, Callable[..., Algorithm]] = {"fedtem": fedtem, "fedtkm": fedtkm}
MANY = 10_000
COMPONENTS = (2, 3, 5)
SEED = 0
WARM_UP, INNER = 3, 5
SHARE_GOAL, ASSIGN_GOAL = 0.05, 0.1


@dataclass
class Prepared:
    """A fleet whose clients have answered already."""

    reply: Reply
    moment: Moment

    def arrivals(self, m: int) -> Tensor:
        """Clients that answered."""
        return self.reply.clients

    def ask(self, *given: Any, **named: Any) -> Reply:
        """The reply, whatever is asked."""
        return self.reply


@dataclass(frozen=True)
class Still:
    """A server optimizer that stays where it is.

    All methods have the optimizer's arithmetic in common; its memory traffic takes longer than what is looked for, and
    varies by more.
    """

    def init(self, weights: Weights) -> None:
        """Nothing to keep."""

    def step(self, weights: Weights, memo: Any, delta: Weights | None) -> tuple[Weights, Any]:
        """No step."""
        return weights, memo


@dataclass
class Listening:
    """A fleet that keeps what it replies."""

    fleet: SimulatedFleet
    replies: list[Reply] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.fleet, name)

    def ask(self, *given: Any, **named: Any) -> Reply:
        """As the fleet."""
        self.replies.append(self.fleet.ask(*given, **named))
        return self.replies[-1]


def experiment(network: str) -> Experiment:
    """FedAvg, FedTEM and FedTKM on random pictures; cohort, local training and server of the recipe fedtem-emnist."""
    timed = {"prior": {"kind": "linear", "period": PERIOD}, "branches": BRANCHES}
    return from_dict(
        {
            "rounds": ENDLESS,
            "data": {
                "source": source(PARTICIPANTS * ROWS, classes=NETWORKS[network]),
                "partition": {"kind": "iid", "clients": PARTICIPANTS, "samples": ROWS},
                "split": {"val": 0.0, "test": 0.0},
            },
            "model": {"kind": network},
            "defaults": {
                "cohort": PARTICIPANTS,
                "server": KERAS,
                "local": {"lr": 0.02, "batch_size": BATCH, "epochs": 1},
            },
            "method": [{"algorithm": "fedavg"}, *({"algorithm": name, **timed} for name in METHODS)],
        }
    )


def hosts(parsed: Experiment) -> Iterator[tuple[Host, SimulatedFleet]]:
    """Each method in this process, on one thread."""
    for method in parsed.method:
        host = host_of(parsed, method, SEED)
        yield host, SimulatedFleet(host.population, LocalEngine(host))


def server_of(algorithm: Algorithm, state: State, reply: Reply) -> Callable[[], Any]:
    """The server's half of a round, from a state and a reply."""
    # Between two peaks, where the prior shares the participants between the modes.
    fleet = Prepared(reply, Moment(PERIOD // 8, ENDLESS, 0.0))
    return lambda: algorithm.round(state, fleet, Rng(SEED))


def contenders(network: str) -> tuple[int, dict[str, Callable[[], Any]]]:
    """The width of the features; a whole round of FedAvg, and the server's half of FedAvg, FedTEM and FedTKM."""
    parsed = experiment(network)
    (host, fleet), *others = hosts(parsed)
    steps = play(
        host.algorithm, fleet, begin(host.algorithm, fleet, seed=SEED, rounds=ENDLESS), seed=SEED, rounds=ENDLESS
    )
    out: dict[str, Callable[[], Any]] = {"round": lambda: next(steps)}
    task = task_of(parsed, parsed.method[0], host.population.rows)
    branched = with_branches(task, "head", BRANCHES)
    for (name, make), (other, simulated) in zip(METHODS.items(), others, strict=True):
        listening = Listening(simulated)
        start = begin(other.algorithm, listening, seed=SEED, rounds=ENDLESS)
        state = next(play(other.algorithm, listening, start, seed=SEED, rounds=ENDLESS)).state
        reply = listening.replies[-1]
        if "fedavg" not in out:
            # The same sum of updates of the same branched network.
            total = {leaf: reply.total[leaf] for leaf in ("delta", "loss")}
            plain = fedavg(branched, server=Still())
            out["fedavg"] = server_of(
                plain, plain.init(fleet, Rng(SEED)), Reply(total, {}, reply.clients, reply.seconds, reply.cost)
            )
        ours = make(task, prior=Linear(PERIOD), branches=BRANCHES, server=Still())
        out[name] = server_of(ours, state, reply)
    return width(branched, branched.init(Rng(SEED))), out


def overhead(networks: list[str], repeats: int) -> list[dict[str, Any]]:
    """What a round of each method costs the server beyond FedAvg, as a share of a whole round of FedAvg.

    All contenders on all networks take turns: a whole round, then the servers some times, of which the first does not
    count, as caches hold what clients worked on. What is added is a difference of neighbors in time.
    """
    made = {network: contenders(network) for network in networks}
    seconds: dict[tuple[str, str], list[float]] = {(n, c): [] for n, (_, acts) in made.items() for c in acts}
    with threads(1):
        for turn in range(WARM_UP + repeats):
            for network, (_, acts) in made.items():
                servers = {name: act for name, act in acts.items() if name != "round"}
                took = [{"round": timed(acts["round"])[0]}]
                took += [{name: timed(act)[0] for name, act in servers.items()} for _ in range(1 + INNER)]
                for each in took[:1] + took[2:] if turn >= WARM_UP else []:
                    for name, one in each.items():
                        seconds[network, name].append(one)
    lines = []
    for network, (features, _) in made.items():
        whole = quartiles(seconds[network, "round"], 7)
        for name in METHODS:
            pairs = zip(seconds[network, name], seconds[network, "fedavg"], strict=True)
            extra = quartiles([ours - theirs for ours, theirs in pairs], 7)
            line = {
                "network": network,
                "method": name,
                "participants": PARTICIPANTS,
                "rows": ROWS,
                "branches": BRANCHES,
                "features": features,
                **dict(zip(("extra_q1", "extra", "extra_q3"), extra, strict=True)),
                **dict(zip(("round_q1", "round", "round_q3"), whole, strict=True)),
                "share": round(extra[1] / whole[1], 5),
                "goal": SHARE_GOAL,
                "repeats": repeats,
            }
            if ("small-cnn", "round") in seconds:
                line["share_of_demo"] = round(extra[1] / quartiles(seconds["small-cnn", "round"], 7)[1], 5)
            lines.append(line)
    return lines


def cohort(kind: str, components: int) -> tuple[Tensor, Tensor, Tensor]:
    """Posteriors, log-joints and even room; participants are of all kinds, or all lean to the first component."""
    draw = torch.Generator().manual_seed(SEED)
    joint = 3 * torch.randn(MANY, components, generator=draw, dtype=torch.float64)
    if kind == "leaning":
        joint[:, 0] += 12
    return joint.softmax(1), joint, capacities(torch.full((components,), 1 / components), MANY)


def assignments(repeats: int) -> list[dict[str, Any]]:
    """Seconds of `assign` for each number of components, in turns."""
    cases = {(kind, k): cohort(kind, k) for k in COMPONENTS for kind in ("mixed", "leaning")}
    seconds: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    with threads(1):
        for turn in range(WARM_UP + repeats):
            for case, given in cases.items():
                took = timed(lambda given=given: assign(*given))[0]
                if turn >= WARM_UP:
                    seconds[case].append(took)
    return [
        {
            "participants": MANY,
            "components": k,
            "cohort": kind,
            **dict(zip(("q1", "median", "q3"), quartiles(each, 7), strict=True)),
            "goal": ASSIGN_GOAL,
            "repeats": repeats,
        }
        for (kind, k), each in seconds.items()
    ]


def show(added: list[dict[str, Any]], assigned: list[dict[str, Any]]) -> None:
    """Print both as tables, with the goals beside the figures."""
    table = Table(title="the server's work beyond FedAvg's", title_justify="left")
    for column in (
        "network",
        "method",
        "added, ms",
        "quartiles",
        "FedAvg round, ms",
        "share",
        "of a small-cnn round",
        "goal",
    ):
        table.add_column(column, no_wrap=True)
    for line in added:
        table.add_row(
            line["network"],
            line["method"],
            f"{1000 * line['extra']:.2f}",
            f"{1000 * line['extra_q1']:.2f} to {1000 * line['extra_q3']:.2f}",
            f"{1000 * line['round']:.1f}",
            f"{line['share']:.2%}",
            f"{line['share_of_demo']:.2%}" if "share_of_demo" in line else "",
            f"< {line['goal']:.0%}",
        )
    Console(width=120).print(table)
    table = Table(title=f"assignment of {MANY:,} participants", title_justify="left")
    for column in ("components", "cohort", "milliseconds", "quartiles", "goal"):
        table.add_column(column, no_wrap=True)
    for line in assigned:
        table.add_row(
            str(line["components"]),
            line["cohort"],
            f"{1000 * line['median']:.1f}",
            f"{1000 * line['q1']:.1f} to {1000 * line['q3']:.1f}",
            f"< {1000 * line['goal']:.0f}",
        )
    Console(width=120).print(table)


def main() -> None:
    """Measure, print, append."""
    parser = options(__doc__)
    parser.add_argument("--repeats", type=int, default=40, help="how often each is timed")
    parser.add_argument(
        "--networks", type=among(NETWORKS), default=[*NETWORKS], help="which networks, separated by commas"
    )
    given = parser.parse_args()
    date, where = now(), machine()
    added, assigned = overhead(given.networks, given.repeats), assignments(given.repeats)
    show(added, assigned)
    append(given.out, [{"bench": "server", "date": date, **line, **where} for line in added])
    append(given.out, [{"bench": "assign", "date": date, **line, **where} for line in assigned])


if __name__ == "__main__":
    main()
