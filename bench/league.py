"""What methods of the league cost beside their arithmetic: a round of each against rounds of FedAvg and what it adds.

python bench/league.py [--repeats 9] [--algorithms ditto,moon] [--fleets local,stacked] [--out bench/results.jsonl]

A method should take the time of what its listing says, and nothing more. As in `clusters.py`, a model that a client
trains is priced as a round of FedAvg: with the method's optimizer, and with as many gradients. So what a round costs
beside its steps is counted once for each model. A head that a client trains by itself is priced as a round of FedAvg
that trains the last layer alone. Further steps of a head are what more epochs add to such a round. What else a listing
has is timed bare, in plain loops, in the same turns: a gradient of all rows, passes without gradients over a client's
rows, operations on vectors as long as the weights, and what a server computes beyond sums. The loops are of one client
after the other, or of all of them in one stack. The network and the clients are those of the multilayer perceptron of
`clusters.py`, with two epochs. Times are the least processor time of the repeats; from process to process some differ
by a quarter. Speed is reported, never asserted.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from clusters import WORKS, measure_each, player
from fedtide.algorithms.fedavg import fedavg
from fedtide.algorithms.fedccfa import merge
from fedtide.algorithms.fedpac import mix_shares
from fedtide.cohorts import Everyone
from fedtide.config import Experiment, from_dict
from fedtide.core.base import Moment, Shard
from fedtide.core.rng import Rng
from fedtide.fleets.engines import Host, LocalEngine, threads
from fedtide.fleets.stacked_engine import StackedEngine
from fedtide.learn.fast.stacks import LayerStack
from fedtide.learn.layers import TRUNK, freeze_layers, match_layers
from fedtide.learn.local import LocalTrainer
from fedtide.learn.stack import make_stack
from fedtide.learn.steps import Train
from fedtide.learn.task import Task
from fedtide.runs.build import host_of, task_of
from works import ENDLESS, source

WORK = WORKS["mlp"]
CLIENTS, ROWS, BATCH = WORK.clients, WORK.rows, WORK.batch
STEPS = 2 * ROWS // BATCH
"""Steps of a client in a round of FedAvg."""
SEED, WARM_UP = 0, 3
FLEETS: dict[str, type[LocalEngine]] = {"local": LocalEngine, "stacked": StackedEngine}


@dataclass(frozen=True)
class Adds:
    """What a client does in a round.

    Args:
        rounds: rounds of FedAvg, one for each model that a client trains with all its steps.
        decayed: those with momentum and weight decay.
        halves: those with half the batch, and so twice as many gradients.
        heads: rounds of FedAvg of the last layer alone, of one epoch.
        decayed_heads: those with momentum and weight decay.
        head_steps: further gradients of a batch by the last layer alone, each with a step along it.
        decayed_head_steps: those with momentum and weight decay.
        whole: gradients of all rows.
        passes: passes without gradients over all rows.
        vectors: operations on vectors as long as the weights, each a third of a pull.
        features: operations on the features of a batch, each a third of a pull of features.
        sums: such vectors that go into sums of the server, beside the update.
        options: of the method.
    """

    rounds: int = 1
    decayed: int = 0
    halves: int = 0
    heads: int = 0
    decayed_heads: int = 0
    head_steps: int = 0
    decayed_head_steps: int = 0
    whole: int = 0
    passes: int = 0
    vectors: int = 0
    features: int = 0
    sums: int = 0
    options: dict[str, Any] | None = None


ROUNDS: dict[str, dict[str, Any]] = {
    "rounds": {"batch_size": BATCH},
    "decayed": {"batch_size": BATCH, "momentum": 0.5, "weight_decay": 1e-5},
    "halves": {"batch_size": BATCH // 2},
}
"""Local training of each kind of round of FedAvg."""
MORE = 5
"""Epochs of a round that prices further steps of a head."""
PIECES = tuple(field.name for field in fields(Adds) if field.name != "options")
PULL = 3
"""Vector operations of a pull at a step: a difference, its multiple, and their sum with the gradient."""
DISTANCE = 3
"""Vector operations of a distance: a difference, its squares, and their sum."""
CONTRAST = 20
"""Operations on the features of a batch of a contrast: directions, cosines, softmax, and the way back through them."""
ALGORITHMS = {
    "fedper": Adds(),
    "lg-fedavg": Adds(),
    "fedbn": Adds(options={"home": ["head"]}),
    "fedrep": Adds(heads=1, head_steps=STEPS // 2, options={"head_epochs": 2}),
    "fedbabu": Adds(),
    "fedrod": Adds(head_steps=STEPS),
    "ditto": Adds(rounds=2, vectors=PULL * STEPS),
    "apfl": Adds(rounds=2, vectors=4 * STEPS),
    "pfedme": Adds(rounds=5, vectors=5 * PULL * STEPS + 3 * STEPS),
    "per-fedavg": Adds(rounds=0, halves=1, vectors=STEPS),
    "fedala": Adds(head_steps=STEPS // 2, vectors=STEPS),
    "knn-per": Adds(),
    "fedpac": Adds(decayed_heads=1, passes=2, rounds=0, decayed=1, features=(PULL + 2) * STEPS),
    "fesem": Adds(vectors=4 * DISTANCE + 1, options={"clusters": 4}),
    "fednova": Adds(vectors=1),
    "feddyn": Adds(vectors=(PULL + 1) * STEPS + 2),
    "moon": Adds(passes=2, features=CONTRAST * STEPS),
    "fedntd": Adds(passes=1, features=CONTRAST // 2 * STEPS),
    "fedcurv": Adds(whole=1, vectors=(PULL + 1) * STEPS + 4, sums=2),
    "adaptive-fedavg": Adds(),
    "flash": Adds(passes=2, options={"local": {"lr": 0.2, "epochs": 2, "batch_size": BATCH}}),
    "feroma": Adds(passes=1, vectors=CLIENTS),  # its model is a mix of those of all
    "flux-like": Adds(passes=1),
    "fedccfa": Adds(
        decayed_heads=2,  # the head, and the balanced one
        decayed_head_steps=5,
        passes=1,
        rounds=0,
        decayed=1,
        features=CONTRAST * STEPS,
        options={"align_from": 1},
    ),
    "fedrc": Adds(rounds=4, passes=4, sums=3, options={"components": 4}),
    "fedsoft": Adds(passes=4, vectors=PULL * STEPS + 2 * 4, sums=3, options={"clusters": 4}),
    "cda-fedavg": Adds(passes=1),
}

SERVERS: dict[str, Callable[[], Any]] = {
    "fedpac": lambda: mix_shares(torch.rand(CLIENTS, 10, 200), torch.rand(CLIENTS)),
    "fedccfa": lambda: merge(*(torch.rand(CLIENTS, 10, d) for d in (201, 201, 200)), torch.ones(CLIENTS, 10), 0.1),
}
"""Arithmetic of a server beyond sums."""


def experiment(algorithms: list[str]) -> Experiment:
    """FedAvg and the methods, all with the same clients and rows."""
    methods: list[dict[str, Any]] = [
        {"name": name, "algorithm": "fedavg", "local": {"lr": 0.2, "epochs": 2, **local}}
        for name, local in ROUNDS.items()
    ]
    methods += [{"name": name, "algorithm": name, **(ALGORITHMS[name].options or {})} for name in algorithms]
    rows = ROWS * 5 // 4
    return from_dict(
        {
            "rounds": ENDLESS,
            "data": {
                "source": source(CLIENTS * rows),
                "partition": {"kind": "iid", "clients": CLIENTS, "samples": rows},
                "split": {"val": 0.2, "test": 0.0},
            },
            "model": WORK.model,
            "defaults": {"cohort": {"kind": "everyone"}, "local": {"lr": 0.2, "epochs": 2, "batch_size": BATCH}},
            "method": methods,
        }
    )


def bare(task: Task, host: Host, *, stacked: bool) -> dict[str, Callable[[], Any]]:
    """Each piece once for each client, in a plain loop or in one stack."""
    shards = [host.population.shard(client, Moment(0, ENDLESS)) for client in host.population.clients.tolist()]
    leaves = list(task.init(Rng(SEED)).params.values())
    totals = [torch.zeros_like(leaf, dtype=torch.float64) for leaf in leaves]

    def pull(shapes: list[torch.Size]) -> Callable[[], Any]:
        shape = (CLIENTS,) if stacked else ()
        now, received, gradient = ([torch.ones(*shape, *leaf) for leaf in shapes] for _ in "abc")

        def act() -> None:
            for _ in range(1 if stacked else CLIENTS):
                change = torch._foreach_sub(now, received)
                torch._foreach_mul_(change, 0.5)
                torch._foreach_add_(gradient, change)

        return act

    def summed() -> None:
        for _ in range(CLIENTS):
            torch._foreach_add_(totals, leaves, alpha=0.5)

    wide = [leaf for leaf in leaves if leaf.dim() > 1][-1].shape[1]
    return {
        "pulls": pull([leaf.shape for leaf in leaves]),
        "feature pulls": pull([torch.Size([BATCH, wide])]),
        "sums": summed,
        **(stacked_passes if stacked else single_passes)(task, shards),
    }


def single_passes(task: Task, shards: list[Shard]) -> dict[str, Callable[[], Any]]:
    """A gradient and a pass of all rows of each client, one client after the other."""
    prepared = [(task.inputs(shard.x), shard.y, *task.loss.prepare(shard)) for shard in shards]

    @torch.no_grad()
    def passes() -> None:
        for x, *_ in prepared:
            task.scratch.module(x)

    return {"whole": lambda: [task.differentiate(task.loss, *rows) for rows in prepared], "passes": passes}


def stacked_passes(task: Task, shards: list[Shard]) -> dict[str, Callable[[], Any]]:
    """The same of all clients in one stack."""
    start, loss = task.scratch.weights, task.loss
    stack = make_stack(Train(task, LocalTrainer(), start, shards[0], Moment(0, ENDLESS), Rng(0)))
    assert isinstance(stack, LayerStack)
    params, others = stack.load(stack.starts([start] * len(shards)))
    shared = loss.stacked([loss.prepare(shard)[0] for shard in shards])
    x, y = torch.stack([task.inputs(shard.x) for shard in shards]), torch.stack([shard.y for shard in shards])
    batch = x, y, torch.full(y.shape, 1 / ROWS), None, shared
    return {"whole": lambda: stack.gradient(params, others, *batch), "passes": lambda: stack.outputs(x)}


def least(act: Callable[[], Any], seconds: float) -> float:
    """Processor seconds that it takes, the lesser of what was before and of two more times."""
    for _ in range(2):
        began = time.process_time()
        act()
        seconds = min(seconds, time.process_time() - began)
    return seconds


def measured(fleet: str, algorithms: list[str], repeats: int) -> list[dict[str, Any]]:
    """A line for each method; all take turns."""
    parsed = experiment(algorithms)
    hosts = {method.name: host_of(parsed, method, SEED) for method in parsed.method}
    task = task_of(parsed, parsed.method[0], hosts["rounds"].population.rows)
    last = freeze_layers(task, match_layers(task, (TRUNK,), "layers"))
    for epochs in (1, MORE):
        for piece, kind in (("heads", "rounds"), ("decayed_heads", "decayed")):
            local = LocalTrainer(lr=0.2, epochs=epochs, **ROUNDS[kind])
            algorithm = fedavg(last, local, cohort=Everyone())
            hosts[piece if epochs == 1 else f"{piece} {epochs}"] = replace(hosts["rounds"], algorithm=algorithm)
    acts = bare(task, hosts["rounds"], stacked=fleet == "stacked")
    acts |= {key: player(host, FLEETS[fleet]) for key, host in hosts.items()}
    acts |= {f"{name}'s server": act for name, act in SERVERS.items() if name in algorithms}
    taken = dict.fromkeys(acts, float("inf"))
    with threads(1):
        for act in acts.values():
            for _ in range(WARM_UP):
                act()
        for _ in range(repeats):
            taken = {key: least(act, taken[key]) for key, act in acts.items()}
    for steps, piece in (("head_steps", "heads"), ("decayed_head_steps", "decayed_heads")):
        taken[steps] = (taken[f"{piece} {MORE}"] - taken[piece]) / (STEPS * (MORE - 1) / 2)
    taken["vectors"], taken["features"] = taken["pulls"] / PULL, taken["feature pulls"] / PULL
    lines = []
    for name in algorithms:
        adds = ALGORITHMS.get(name, Adds())
        counts = {piece: getattr(adds, piece) for piece in PIECES}
        arithmetic = taken.get(f"{name}'s server", 0.0) + sum(count * taken[piece] for piece, count in counts.items())
        lines.append(
            {
                "algorithm": name,
                "fleet": fleet,
                "ms": round(1000 * taken[name], 3),
                "arithmetic_ms": round(1000 * arithmetic, 3),
                "ratio": round(taken[name] / arithmetic, 3),
                **{piece: count for piece, count in counts.items() if count},
                "repeats": repeats,
            }
        )
    lines[0] |= {f"{piece}_ms": round(1000 * taken[piece], 4) for piece in PIECES}
    return lines


def show(lines: list[dict[str, Any]]) -> None:
    """Print the lines of one fleet as a table."""
    table = Table(title=f"{lines[0]['fleet']} fleet, {WORK.title}", title_justify="left")
    for column in ("algorithm", "milliseconds", "its own arithmetic", "ratio"):
        table.add_column(column, no_wrap=True, justify="left" if column == "algorithm" else "right")
    for line in lines:
        numbers = (f"{line['ms']:.1f}", f"{line['arithmetic_ms']:.1f}", f"{line['ratio']:.2f}")
        table.add_row(line["algorithm"], *numbers)
    console = Console(width=120)
    console.print(table)
    console.print(", ".join(f"{piece} {lines[0][f'{piece}_ms']:.2f} ms" for piece in PIECES))


if __name__ == "__main__":
    measure_each("league", __doc__, 9, ALGORITHMS, ("fleets", FLEETS), measured, show)
