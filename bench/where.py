"""Where the time of a round goes, and how far that is from what the machine can do.

python bench/where.py [--fleet stacked] [--repeats 20] [--works mlp,lenet] [--out bench/results.jsonl]

Operations are those of the forward and backward passes as torch counts them: products of matrices and convolutions, a
multiplication and an addition each. They are compared with one plain product of matrices on as many threads. Shares of
a round are of the processor's time of one process with one thread, by torch's profiler, which slows small operations:
read them as shares, not as seconds. What torch does not see is Python's own time, among it keys, blocks and records.
Small convolutions are products with shifted lines of pictures, copied before and added up after; these are apart.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.flop_counter import FlopCounterMode

from fedtide.core.loop import begin, play
from fedtide.fleets.engines import Host, LocalEngine, threads
from fedtide.fleets.simulated import SimulatedFleet
from fedtide.fleets.stacked_engine import StackedEngine
from fedtide.learn.fast.layers import Conv2d, Plan
from fedtide.runs.build import host_of
from machine import among, append, cores, machine, now, options
from works import CLASSES, ENDLESS, WORKS, Work, experiment, pictures

SEED = 0
WARM_UP = 3
FLEETS = {"local": LocalEngine, "stacked": StackedEngine}
SIZE = 1024
"""Rows and columns of the product of matrices: large enough to be as fast as it gets, in a few milliseconds."""
PARTS = {
    "products and convolutions": ("mm", "addmm", "bmm", "matmul", "linear", "convolution", "mkldnn", "onednn"),
    "activations, pools, loss": (
        "relu", "threshold", "max_pool", "softmax", "nll_loss", "cross_entropy", "log_softmax", "clamp_min",
    ),
    "steps of SGD": ("_foreach_add", "_foreach_sub", "_foreach_copy", "_foreach_mul"),
    "sums of updates": ("float64", "add_", "mul_", "sub_", "add", "mul", "sub"),
    "fetching and shuffling rows": ("index_select", "index", "randperm", "div", "split", "gather"),
    "copies and changes of format": ("copy_", "clone", "contiguous", "to", "_to_copy", "fill_", "zero_"),
}  # fmt: skip
"""Parts of a round by the operations that are theirs: names of torch's own, without "aten::"; the first that fits."""
PRODUCTS, SHIFTED = next(iter(PARTS)), "shifted lines of pictures"


def player(work: Work, count: int, fleet: str) -> tuple[Host, Any]:
    """The host, and what plays one round."""
    parsed = experiment(work, batch=work.batch)
    host = host_of(parsed, parsed.method[0], SEED)
    simulated = SimulatedFleet(host.population, FLEETS[fleet](host, count))
    start = begin(host.algorithm, simulated, seed=SEED, rounds=ENDLESS)
    steps = play(host.algorithm, simulated, start, seed=SEED, rounds=ENDLESS)
    return host, lambda: next(steps)


def operations(work: Work) -> int:
    """Floating-point operations of a round: forward and backward of every step; updates and sums are left out."""
    model = experiment(work, batch=work.batch).model.build((1, 28, 28), CLASSES)
    x, y = pictures(work.batch)
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(model(x.unsqueeze(1).float() / 255), y).backward()
    if work.rows % work.batch:
        raise ValueError(f"{work.title}: the last batch is smaller, and operations are counted for whole ones")
    return counter.get_total_flops() * (work.rows // work.batch) * work.clients


def product(count: int, repeats: int) -> float:
    """Operations per second of a product of two large matrices in fp32, the best of `repeats`."""
    a, b = torch.rand(SIZE, SIZE), torch.rand(SIZE, SIZE)
    with threads(count):
        for _ in range(WARM_UP):
            a @ b
        taken = []
        for _ in range(repeats):
            began = time.perf_counter()
            a @ b
            taken.append(time.perf_counter() - began)
    return 2 * SIZE**3 / min(taken)


def reached(name: str, count: int, fleet: str, repeats: int) -> dict[str, Any]:
    """Operations per second of a round of one process with so many threads, and of the product beside it."""
    work = WORKS[name]
    _, one = player(work, count, fleet)
    torch.set_num_threads(1)
    for _ in range(WARM_UP):
        one()
    taken, limits = [], []
    for _ in range(repeats):
        began = time.perf_counter()
        one()
        taken.append(time.perf_counter() - began)
        limits.append(product(count, 3))
    flops, seconds, limit = operations(work), statistics.median(taken), statistics.median(limits)
    return {
        "threads": count,
        "gflop": round(flops / 1e9, 4),
        "median": round(seconds, 6),
        "gflops": round(flops / seconds / 1e9, 2),
        "product": round(limit / 1e9, 2),
        "share": round(flops / seconds / limit, 4),
    }


def part_of(operation: str) -> str:
    """The part of a round that an operation of torch belongs to.

    >>> part_of("aten::addmm"), part_of("aten::_foreach_add_"), part_of("aten::view")
    ('products and convolutions', 'steps of SGD', 'other operations of torch')
    """
    name = operation.removeprefix("aten::")
    for part, names in PARTS.items():
        whole = part in ("sums of updates", "fetching and shuffling rows", "copies and changes of format")
        if any(name == each if whole else each in name for each in names):
            return part
    return "other operations of torch"


def named(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of convolutions whose operations the profiler knows by name: what they copy is a copy like any other."""

    def noted(self: Conv2d, given: Any, plan: Plan) -> Any:
        def do(function: Callable[..., object], *args: Any, **settings: Any) -> None:
            def run(*args: Any, **settings: Any) -> None:
                with record_function(SHIFTED):
                    function(*args, **settings)

            copies = getattr(function, "__name__", "") in ("copy_", "add_", "zero_")  # a name costs as much as they do
            Plan.do(plan, run if copies else function, *args, **settings)

        with patch.object(plan, "do", do):
            return method(self, given, plan)

    return noted


def shares(name: str, fleet: str, rounds: int) -> dict[str, float]:
    """Shares of the time of a round by part, one thread; what is left of the time is Python's and autograd's own."""
    methods: dict[str, Any] = {key: named(getattr(Conv2d, key)) for key in ("forward", "backward")}
    with patch.multiple(Conv2d, **methods):
        _, one = player(WORKS[name], 1, fleet)
        torch.set_num_threads(1)
        for _ in range(WARM_UP):
            one()
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
            began = time.perf_counter()
            for _ in range(rounds):
                one()
            total = 1e6 * (time.perf_counter() - began)  # microseconds, as the profiler's
    spent = dict.fromkeys((PRODUCTS, SHIFTED, *PARTS, "other operations of torch", "nodes of autograd"), 0.0)
    for event in profiler.events() or ():
        if event.name == SHIFTED:  # Python's own
            continue
        part = part_of(event.name) if event.name.startswith("aten::") else "nodes of autograd"
        parent = event.cpu_parent
        while part != PRODUCTS and parent is not None:
            part, parent = (SHIFTED, None) if parent.name == SHIFTED else (part, parent.cpu_parent)
        spent[part] += event.self_cpu_time_total
    out = {part: round(value / total, 4) for part, value in spent.items()}
    return {**out, "Python, keys, blocks": round(max(0.0, 1 - sum(out.values())), 4)}


def show(lines: list[dict[str, Any]]) -> None:
    """Print the two tables."""
    console = Console(width=140)
    table = Table(title="operations per second against a plain product of matrices", title_justify="left")
    for column in ("work", "threads", "Gflop a round", "ms a round", "Gflop/s", "product, Gflop/s", "share"):
        table.add_column(column, justify="left" if column == "work" else "right")
    for line in lines:
        for each in line["reached"]:
            table.add_row(
                line["work"], str(each["threads"]), f"{each['gflop']:.3f}", f"{1000 * each['median']:.1f}",
                f"{each['gflops']:.1f}", f"{each['product']:.1f}", f"{each['share']:.0%}",
            )  # fmt: skip
    console.print(table)
    table = Table(title="shares of a round, one thread, by the profiler", title_justify="left")
    for column in ("part", *(line["work"] for line in lines)):
        table.add_column(column, justify="left" if column == "part" else "right")
    for part in lines[0]["shares"]:
        table.add_row(part, *(f"{line['shares'][part]:.0%}" for line in lines))
    console.print(table)


def main() -> None:
    """Measure, print, append."""
    parser = options(__doc__)
    parser.add_argument("--repeats", type=int, default=20, help="rounds that are timed")
    parser.add_argument("--fleet", choices=list(FLEETS), default="local", help="which of our fleets")
    parser.add_argument("--works", type=among(WORKS), default=[*WORKS], help="which works, separated by commas")
    given = parser.parse_args()
    date, where, lines = now(), machine(), []
    for name in given.works:
        each = [reached(name, count, given.fleet, given.repeats) for count in sorted({1, min(2, cores())})]
        about = {"work": name, "title": WORKS[name].title, "repeats": given.repeats}
        lines.append({**about, "reached": each, "shares": shares(name, given.fleet, 2)})
    show(lines)
    bench = "where" if given.fleet == "local" else f"where {given.fleet}"
    append(given.out, [{"bench": bench, "date": date, **line, **where} for line in lines])


if __name__ == "__main__":
    main()
