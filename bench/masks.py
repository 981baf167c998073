"""What a masked sum costs: a client's vector in fixed point under its masks, what opens it, and the server's sum.

python bench/masks.py [--numbers 1200000] [--nodes 5,10,20] [--dropped 0,1] [--repeats 5] [--out bench/results.jsonl]

Every node has one client. Seconds are those of the processor, in one thread. Messages are not sent: over Flower each of
the two takes seconds. Speed is reported, never asserted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from fedtide.core.base import Weighted
from fedtide.fleets.engines import threads
from fedtide.wire.masks import Context, Masker, unmasked
from fedtide.wire.pipeline import Wire
from fedtide.wire.vector import form_of, opened
from machine import RESULTS, append, machine, now


def cost(numbers: int, nodes: int, dropped: int, number: int) -> dict[str, float]:
    """Return the seconds of one sum: in fixed point, masked, shown and opened; by client the median."""
    draw = torch.Generator().manual_seed(number)
    totals = [{"delta": Weighted(torch.randn(numbers, generator=draw) / 100, 20.0 + i)} for i in range(nodes)]
    form, wire, context = form_of(totals[0], nodes), Wire(), Context("bench", (number, 0), 0, "0")
    at = [Masker("bench", f"node-{i}") for i in range(nodes)]
    peers = {i: node.bundle.public for i, node in enumerate(at)}
    rounding, masking, showing, sent = [], [], [], {}
    for i, node in enumerate(at):
        began = time.process_time()
        vector = wire.send(form, totals[i])
        rounded = time.process_time()
        sent[i] = node.masked(context, i, vector, peers)
        rounding.append(rounded - began)
        masking.append(time.process_time() - rounded)
    alive = list(range(nodes - dropped))
    shown = {}
    for i in alive:
        began = time.process_time()
        shown[i] = at[i].show(context, i, alive, 2)
        showing.append(time.process_time() - began)
    began = time.process_time()
    total = opened(unmasked({i: sent[i] for i in alive}, shown))
    server = time.process_time() - began
    plain = sum(totals[i]["delta"].value.double() * totals[i]["delta"].weight for i in alive)
    error = float((total[:-1] - plain).abs().max())
    each = {"fixed point": rounding, "masks": masking, "show": showing}
    return {name: statistics.median(times) for name, times in each.items()} | {"server": server, "error": error}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--numbers", type=int, default=1_200_000)
    parser.add_argument("--nodes", default="5,10,20")
    parser.add_argument("--dropped", default="0,1")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    table = Table("nodes", "dropped", "fixed point s", "masks s", "show s", "client s", "server s", "up MB", "error")
    with threads(1):
        for nodes in map(int, given.nodes.split(",")):
            for dropped in map(int, given.dropped.split(",")):
                runs = [cost(given.numbers, nodes, dropped, number) for number in range(given.repeats)]
                mid = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
                client = mid["fixed point"] + mid["masks"] + mid["show"]
                seconds = [f"{mid[name]:.3f}" for name in ("fixed point", "masks", "show")]
                sizes = f"{8 * (given.numbers + 1) / 1e6:.1f}"
                table.add_row(
                    str(nodes),
                    str(dropped),
                    *seconds,
                    f"{client:.3f}",
                    f"{mid['server']:.3f}",
                    sizes,
                    f"{mid['error']:.1e}",
                )
                line = {
                    "bench": "masks",
                    "date": now(),
                    "numbers": given.numbers,
                    "nodes": nodes,
                    "dropped": dropped,
                    **mid,
                }
                append(given.out, [{**line, "client": client, **machine()}])
    Console().print(table)


if __name__ == "__main__":
    main()
