"""What K models cost: a round of IFCA and its like against one of FedAvg, as K grows.

python bench/clusters.py [--repeats 12] [--algorithms ifca,aem] [--works mlp,lenet] [--out bench/results.jsonl]

IFCA should cost a round of FedAvg and K forward passes over the training rows, and nothing more: the passes are timed
in the same turns. Clients that are stacked are compared with a stacked FedAvg: of each model there is one pass over the
rows of all of them. Least processor times are compared with the arithmetic: a round of FedAvg for each model that a
client trains, and K passes. Who shares a trunk between K heads is timed beside it, and so are pFedEM, whose clients
divide their rows among K whole models, and Fielding, whose clients train one of K, in rounds without drift. Speed is
reported, never asserted.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from fedtide.config import Experiment, from_dict
from fedtide.core.base import Moment
from fedtide.core.loop import begin, play
from fedtide.core.rng import Rng
from fedtide.fleets.engines import Host, LocalEngine, threads
from fedtide.fleets.simulated import SimulatedFleet
from fedtide.fleets.stacked_engine import StackedEngine
from fedtide.learn.steps import mean_losses
from fedtide.runs.build import host_of, task_of
from machine import among, append, machine, now, options, quartiles, timed
from works import ENDLESS, RATE, Work, federation, source

WORKS = {
    "mlp": Work("MLP 784-200-10, 20 x 50 rows, batch 10", {"kind": "mlp", "hidden": [200]}, 20, 50, 10),
    "lenet": Work("LeNet-5, 8 x 60 rows, batch 20", {"kind": "lenet5"}, 8, 60, 20, convolutional=True),
}
"""As the works of `rounds.py`, with fewer clients: there are many contenders."""
MODELS = (1, 2, 4, 8)
"""K."""
WHOLE = ("ifca", "aem")
"""Whose clients try K whole models; the others have one network with K heads."""
TRAINED = {"ifca": "one", "aem": "one", "pfedem": "one", "fedem": "all"}
"""How many of K models a client trains with all its rows. Its arithmetic: a round of FedAvg for each, and K passes."""
TOGETHER = ("fedavg", "ifca")
"""Who is timed on the stacked fleet, too, under this name and `STACKED`."""
STACKED = ", stacked"
PUBLIC = 200
"""Rows that everybody may see, for pFedEM's principal components."""
ALGORITHMS: dict[str, Callable[[int], dict[str, Any]]] = {
    "ifca": lambda k: {"clusters": k},
    "aem": lambda k: {"clusters": k, "exploration": {"epsilon": 0.33}},
    "fedem": lambda k: {"components": k},
    "fedtem": lambda k: {"branches": k, "prior": {"kind": "linear", "period": 32}},
    "min-loss": lambda k: {"branches": k},
    "pfedem": lambda k: {"components": k, "gaussian_init": "random", "features": "pca"},
    "fielding": lambda k: {"clustering": {"kind": "k-means", "k_min": k, "k_max": k}},
}
"""The options of each with K models."""
SEED = 0
WARM_UP = 2


def experiment(work: Work, algorithms: list[str]) -> Experiment:
    """FedAvg, and each algorithm with each number of models; all with the same clients, rows and server optimizer."""
    methods: list[dict[str, Any]] = [{"name": "fedavg", "algorithm": "fedavg"}]
    for name in algorithms:
        methods += [{"name": f"{name} {k}", "algorithm": name, **ALGORITHMS[name](k)} for k in MODELS]
    begins = federation(work)
    return from_dict(
        {
            **begins,
            "data": {**begins["data"], "source": source(work.clients * work.rows + PUBLIC), "public_samples": PUBLIC},
            "defaults": {
                "cohort": {"kind": "everyone"},
                "server": "sgd",
                "local": {"lr": RATE, "epochs": 1, "batch_size": work.batch},
            },
            "method": methods,
        }
    )


def player(host: Host, engine: type[LocalEngine] = LocalEngine) -> Callable[[], Any]:
    """What plays one round."""
    fleet = SimulatedFleet(host.population, engine(host))
    start = begin(host.algorithm, fleet, seed=SEED, rounds=ENDLESS)
    steps = play(host.algorithm, fleet, start, seed=SEED, rounds=ENDLESS)
    return lambda: next(steps)


def passes(parsed: Experiment, host: Host) -> dict[str, Callable[[], Any]]:
    """One forward pass over every client's training rows: by itself, and as a client judges one model with it.

    "forward" runs a module that has its weights, on rows that are there, client by client. "judged" is what IFCA's
    clients do for each model: load its weights, pass, take the mean cross-entropy.
    """
    task = task_of(parsed, parsed.method[0], host.population.rows)
    shards = [host.population.shard(client, Moment(0, ENDLESS)) for client in host.population.clients.tolist()]
    weights = task.init(Rng(SEED))
    inputs = [task.inputs(shard.x) for shard in shards]

    def forward() -> None:
        with torch.no_grad():
            for x in inputs:
                task.scratch.module(x)

    def loaded() -> Callable[[], None]:
        task.scratch.load(weights, train=False)
        return forward

    return {"forward": loaded(), "judged": lambda: [mean_losses(task, [weights], shard) for shard in shards]}


def measured(name: str, algorithms: list[str], repeats: int) -> list[dict[str, Any]]:
    """A line for FedAvg, one for each algorithm and K; all take turns, and ratios are of the same turn."""
    work = WORKS[name]
    parsed = experiment(work, algorithms)
    hosts = {method.name: host_of(parsed, method, SEED) for method in parsed.method}
    acts = {**passes(parsed, hosts["fedavg"]), **{key: player(host) for key, host in hosts.items()}}
    for key, host in hosts.items():
        if key.split()[0] in TOGETHER:
            acts[key + STACKED] = player(host, StackedEngine)
    seconds: dict[str, list[float]] = {key: [] for key in acts}
    least = dict.fromkeys(acts, float("inf"))
    with threads(1):
        for turn in range(WARM_UP + repeats):
            for key, act in acts.items():
                act()  # the second time caches hold what the first worked on
                took, worked = timed(act)
                if turn >= WARM_UP:
                    seconds[key].append(took)
                    least[key] = min(least[key], worked)
    taken = {key: torch.tensor(each, dtype=torch.float64) for key, each in seconds.items()}
    about = {
        "work": name,
        "title": work.title,
        "model": work.model["kind"],
        "cohort": work.clients,
        "rows": work.rows,
        "batch_size": work.batch,
        "threads": 1,
        "forward": quartiles(taken["forward"], 6)[1],
        "judged": quartiles(taken["judged"], 6)[1],
        "repeats": repeats,
    }
    lines = []
    for key in [key for key in taken if key not in ("forward", "judged")]:
        one = key.removesuffix(STACKED)
        fleet = key.removeprefix(one)
        algorithm, _, k = one.partition(" ")
        line = {"algorithm": algorithm + fleet, "models": int(k or 1)}
        line |= dict(zip(("q1", "median", "q3"), quartiles(taken[key], 6), strict=True))
        ratios = quartiles(taken[key] / taken["fedavg" + fleet], 4)
        line |= dict(zip(("ratio_q1", "ratio", "ratio_q3"), ratios, strict=True))
        line["worked"] = round(least[key], 6)
        if algorithm in TRAINED and not fleet:  # passes are timed client by client
            trained = line["models"] if TRAINED[algorithm] == "all" else 1
            needed = trained * least["fedavg" + fleet] + line["models"] * least["forward"]
            line["arithmetic"] = round(least[key] / needed, 3)
        if algorithm in WHOLE:
            extra = (taken[key] - taken["fedavg" + fleet]) / (line["models"] * taken["forward"])
            line |= dict(zip(("passes_q1", "passes", "passes_q3"), quartiles(extra, 3), strict=True))
        lines.append({**line, **about})
    return lines


def show(lines: list[dict[str, Any]]) -> None:
    """Print the lines of one work as a table."""
    one = lines[0]
    share = one["judged"] / one["forward"]
    table = Table(title=f"{one['title']}, one thread", title_justify="left")
    for column in (
        "algorithm",
        "K",
        "milliseconds",
        "quartiles",
        "round / FedAvg",
        "beyond FedAvg / K passes",
        "",
        "/ arithmetic",
    ):
        table.add_column(column, no_wrap=True, justify="left" if column == "algorithm" else "right")
    for line in lines:
        passes, spread = "", ""
        if "passes" in line:
            passes, spread = f"{line['passes']:.2f}", f"{line['passes_q1']:.2f} to {line['passes_q3']:.2f}"
        quarters = f"{1000 * line['q1']:.1f} to {1000 * line['q3']:.1f}"
        median, ratio = f"{1000 * line['median']:.1f}", f"{line['ratio']:.2f}"
        needed = f"{line['arithmetic']:.2f}" if "arithmetic" in line else ""
        table.add_row(line["algorithm"], str(line["models"]), median, quarters, ratio, passes, spread, needed)
    console = Console(width=120)
    console.print(table)
    console.print(
        f"a pass over all training rows: {1000 * one['forward']:.2f} ms; to judge a model: {share:.2f} passes"
    )


def measure_each(
    bench: str,
    about: str | None,
    repeats: int,
    algorithms: Collection[str],
    kinds: tuple[str, Collection[str]],
    measured: Callable[[str, list[str], int], list[dict[str, Any]]],
    show: Callable[[list[dict[str, Any]]], None],
) -> None:
    """Read the command line; measure, print and append what is asked for, for each of the kinds."""
    parser = options(about)
    parser.add_argument("--repeats", type=int, default=repeats, help="how often each is timed")
    for option, allowed in (("algorithms", algorithms), kinds):
        parser.add_argument(f"--{option}", type=among(allowed), default=[*allowed], help="which, separated by commas")
    given = parser.parse_args()
    date, where = now(), machine()
    for kind in getattr(given, kinds[0]):
        lines = measured(kind, given.algorithms, given.repeats)
        show(lines)
        append(given.out, [{"bench": bench, "date": date, **line, **where} for line in lines])


if __name__ == "__main__":
    measure_each("clusters", __doc__, 12, ALGORITHMS, ("works", WORKS), measured, show)
