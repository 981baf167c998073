"""What a masked sum costs: a client's vector in fixed point under its masks, what opens it, and the server's sum.

python bench/masks.py [--numbers 1200000] [--nodes 5,10,20] [--dropped 0,1] [--repeats 5] [--out bench/results.jsonl]

Every node has one client. Of each number of nodes that may deal shares there is a row more: all answer and deal, and
then as many vanish as may. What they deal is signed, and looked at by all others before they mask. Seconds are those of
the processor, in one thread. Messages are not sent: over Flower each of them takes seconds. Speed is reported, never
asserted.
"""

import statistics
import time

import torch
from rich.console import Console
from rich.table import Table

from fedtide.core import codec
from fedtide.core.base import Weighted
from fedtide.fleets.engines import threads
from fedtide.remote.messages import dealt_tree, secrets_tree
from fedtide.wire.keys import library
from fedtide.wire.masks import Context, Masker
from fedtide.wire.pipeline import FEWEST, Wire
from fedtide.wire.shares import needed
from fedtide.wire.unmask import recovered, unmasked, unsealed
from fedtide.wire.vector import form_of, opened
from machine import append, machine, now, options


def cost(numbers: int, nodes: int, dropped: int, vanished: int, number: int) -> dict[str, float]:
    """Return the seconds of one sum, and the bytes that a client sends beside its vector.

    Args:
        numbers: of a vector.
        nodes: that are asked.
        dropped: those that do not answer.
        vanished: those that answer and open nothing; if there are any, all have dealt shares before.
        number: of the repeat.
    """
    draw = torch.Generator().manual_seed(number)
    totals = [{"delta": Weighted(torch.randn(numbers, generator=draw) / 100, 20.0 + i)} for i in range(nodes)]
    form, wire, context = form_of(totals[0], nodes), Wire(), Context("bench", (number, 0), 0, "0")
    ec = library().hazmat.primitives.asymmetric.ec
    at = [Masker("bench", f"node-{i:03}", ec.generate_private_key(ec.SECP384R1())) for i in range(nodes)]
    peers = {i: node.bundle.public for i, node in enumerate(at)}
    bundles = {i: (node.node, node.bundle) for i, node in enumerate(at)}
    asked = {i: (node.node, node.bundle.public) for i, node in enumerate(at)}
    rounding, dealing, masking, showing, sent, dealt = [], [], [], [], {}, {}
    for i, node in enumerate(at) if vanished else ():
        began = time.process_time()
        dealt[i] = node.deal(context, i, asked, FEWEST)
        dealing.append(time.process_time() - began)
    signed = {i: (each.public, each.signature) for i, each in dealt.items()}
    drawn = {i: public for i, (public, _) in signed.items()} or None
    for i, node in enumerate(at):
        began = time.process_time()
        vector = wire.send(form, totals[i])
        rounded = time.process_time()
        if drawn:
            node.check_drawn(context, signed, bundles)
        sent[i] = node.masked(context, i, vector, peers, drawn=drawn)
        rounding.append(rounded - began)
        masking.append(time.process_time() - rounded)
    alive = list(range(nodes - dropped))
    lost = alive[len(alive) - vanished :]
    shown = {}
    for i in alive[: len(alive) - vanished]:
        began = time.process_time()
        shown[i] = at[i].show(context, i, alive, FEWEST, lost=lost)
        showing.append(time.process_time() - began)
    began = time.process_time()
    # The place of a node among those that have shares is its number, by its name.
    back, _ = recovered(context, "", dealt, lost, [], unsealed(shown)) if lost else ({}, [])
    total = opened(unmasked({i: sent[i] for i in alive}, shown, vanished=back)[0])
    server = time.process_time() - began
    plain = sum(totals[i]["delta"].value.double() * totals[i]["delta"].weight for i in alive)
    error = float((total[:-1] - plain).abs().max())
    each = {"fixed point": rounding, "shares": dealing or [0.0], "masks": masking, "show": showing}
    more = {"server": server, "error": error, "opening": len(codec.to_bytes(secrets_tree(shown[0])))}
    more["dealing"] = len(codec.to_bytes(dealt_tree(dealt[0]))) if dealt else 0
    return {name: statistics.median(times) for name, times in each.items()} | more


def main() -> None:
    """Measure and print."""
    parser = options(__doc__)
    parser.add_argument("--numbers", type=int, default=1_200_000)
    parser.add_argument("--nodes", default="5,10,20")
    parser.add_argument("--dropped", default="0,1")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    seconds = ("fixed point", "shares", "masks", "show")
    names = [f"{name} s" for name in (*seconds, "client", "server")]
    table = Table("nodes", "dropped", "vanished", *names, "up MB", "more kB", "error")
    with threads(1):
        for nodes in map(int, given.nodes.split(",")):
            ways = [(int(dropped), 0) for dropped in given.dropped.split(",")]
            if (may := nodes - needed(nodes, FEWEST)) > 0:
                ways.append((0, may))
            for dropped, vanished in ways:
                runs = [cost(given.numbers, nodes, dropped, vanished, number) for number in range(given.repeats)]
                mid = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
                client = sum(mid[name] for name in seconds)
                times = [*(mid[name] for name in seconds), client, mid["server"]]
                table.add_row(
                    str(nodes),
                    str(dropped),
                    str(vanished),
                    *(f"{spent:.3f}" for spent in times),
                    f"{8 * (given.numbers + 1) / 1e6:.1f}",
                    f"{(mid['opening'] + mid['dealing']) / 1e3:.1f}",
                    f"{mid['error']:.1e}",
                )
                line = {
                    "bench": "masks",
                    "date": now(),
                    "numbers": given.numbers,
                    "nodes": nodes,
                    "dropped": dropped,
                    "vanished": vanished,
                    **mid,
                }
                append(given.out, [{**line, "client": client, **machine()}])
    Console().print(table)


if __name__ == "__main__":
    main()
