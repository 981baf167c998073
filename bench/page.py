"""The tables of docs/performance.md, from the newest results.

python bench/page.py [--results bench/results.jsonl] [--page docs/performance.md]
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import crowd_page
from machine import RESULTS
from peer import PEERS
from works import WORKS

PAGE = Path(__file__).parent.parent / "docs" / "performance.md"
GAIN = 1.25
"""How much faster than the earlier commit every work should be."""
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
EMPTY = f"# Performance\n\n{BEGIN}\n{END}\n"
"""The page before anybody has written what stands above its tables."""


def newest(lines: Sequence[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """For each value of `key` the lines of its newest run, in the order in which they were written."""
    last: dict[Any, str] = {}
    for line in lines:
        last[line[key]] = max(line["date"], last.get(line[key], ""))
    return [line for line in lines if line["date"] == last[line[key]]]


def row(*cells: Any) -> str:
    """A row of a Markdown table."""
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """A Markdown table, the first column to the left and numbers to the right."""
    return [row(*header), row("---", *["---:"] * (len(header) - 1)), *(row(*cells) for cells in rows), ""]


def provenance(line: dict[str, Any]) -> str:
    """Where and when a line was measured."""
    return (
        f"Measured on {line['date'][:10]} with fedtide {line['fedtide']} and torch {line['torch']} "
        f"on {line['processor']}, {line['cores']} cores."
    )


def rounds(lines: list[dict[str, Any]]) -> list[str]:
    """A table per work."""
    by_work = {
        work: [line for line in lines if line["work"] == work] for work in dict.fromkeys(x["work"] for x in lines)
    }
    out: list[str] = []
    for mine in by_work.values():
        title, peers = mine[0]["title"], any("best_peer" in line for line in mine)
        apart = any(line["peak_mb"] is not None for line in mine)
        header = ["contender", "milliseconds per round", "quartiles", "best naive / this"]
        header += [f"{mine[0]['best_peer']} / this"] if peers else []
        cells = [
            (
                line["contender"],
                f"{1000 * line['median']:.1f}",
                f"{1000 * line['q1']:.1f} to {1000 * line['q3']:.1f}",
                f"{line['ratio']:.2f}",
                *([f"{line['peer_ratio']:.2f} ({line['peer_q1']:.2f} to {line['peer_q3']:.2f})"] if peers else []),
                *([] if not apart else ["" if line.get("first") is None else f"{line['first']:.1f}"]),
                *([] if not apart else ["" if line["peak_mb"] is None else line["peak_mb"]]),
            )
            for line in mine
        ]
        header += ["start and first round, s", "peak memory, MB"] if apart else []
        out += [f"### {title[0].upper()}{title[1:]}", "", *table(header, cells)]
        versions = "; ".join(mine[0].get("peers", {}).values())
        theirs = f"Peers: {versions}. " if peers and versions else ""
        missing = [peer for peer in PEERS if peer not in {line.get("who") for line in mine}]
        absent = f"Not installed, or not asked for (`make bench-peers`): {', '.join(missing)}. " if missing else ""
        about = f"{theirs}{absent}{provenance(mine[0])} Medians of {mine[0]['repeats']} turns."
        out += [about, ""]
    return out


DIVIDED = (("workers-2", "local-1"), ("pfl-torchrun-2", "pfl-1"))
"""Contenders with two processes, and the same with one."""


def processes(played: list[dict[str, Any]], beside: list[dict[str, Any]]) -> list[str]:
    """What two processes cost beyond one, in processor time, and what two do that share nothing but the machine."""
    cells = []
    for line in beside:
        worked = {one["contender"]: one.get("cpu_ms") for one in played if one["work"] == line["work"]}
        told = [f"{worked[two] / worked[one]:.2f}" if worked.get(two) else "" for two, one in DIVIDED]
        quartiles = f"{line['ratio']:.2f} ({line['q1']:.2f} to {line['q3']:.2f})"
        cells.append((line["title"], *told, f"{line['workers']:.2f}", quartiles))
    header = ["work", *(f"{two} / {one}, in turns" for two, one in DIVIDED)]
    header += ["workers-2 / local-1, by themselves", "two that share nothing / one"]
    return [
        "### What a second process costs",
        "",
        "Processor time of a round, of all processes together, divided by that of one; the goal is 1.10. In turns with "
        "others caches are cold, and two processes have two to warm; by themselves rounds follow each other as in a "
        "run. The last column is what it costs a process that another one plays the same beside it, without a word "
        "between them (`bench/beside.py`): what is above that is ours, or the peer's, calls and sums that are sent and "
        "added. The shorter a round is, the more they weigh.",
        "",
        *table(header, cells),
        f"{provenance(beside[0])} Means of rounds; medians of three in the last column but one, of "
        f"{beside[0]['repeats']} turns in the last.",
        "",
    ]


OURS = {"any": "", "one by one": "clients one by one", "stacked": "clients stacked", "bf16": "in bfloat16"}
"""What the table says of which of our fleets a goal is about."""


def goals(lines: list[dict[str, Any]]) -> list[str]:
    """Goal by goal the fastest of ours against the fastest peer, and what is in the way of those that are short."""
    wanted = {(name, goal.ours): goal for name, work in WORKS.items() for goal in work.goals}
    beside = [(line, wanted[line["work"], line["ours"]]) for line in lines]
    cells = [
        (
            line["title"],
            OURS[line["ours"]],
            line["contender"],
            line["peer"],
            f"{line['ratio']:.2f}",
            f"{line['q1']:.2f} to {line['q3']:.2f}",
            f"{goal.ratio:g}",
            "yes" if line["ratio"] >= goal.ratio else "short",
        )
        for line, goal in beside
    ]
    header = ("work", "of ours", "fastest of these", "fastest peer", "peer / ours", "quartiles", "goal", "reached")
    what = (
        "Rounds of the two are paired by their turn; a ratio is the median of the pairs. Peers compute in float32. "
        f"The load before was {lines[0]['load']}."
    )
    why: dict[str, list[str]] = {}
    for line, goal in beside:
        if line["ratio"] < goal.ratio:
            why.setdefault(goal.limit, []).append(line["work"])
    short = [f"{', '.join(dict.fromkeys(works))}: {limit}." for limit, works in why.items()]
    said = ["What is in the way where a goal is short:", "", *(f"- {each}" for each in short), ""] if short else []
    return ["### Against other frameworks", "", *table(header, cells), what, "", *said]


def versions(lines: list[dict[str, Any]]) -> list[str]:
    """Rounds beside those of an earlier commit."""
    one = lines[0]
    what = (
        f"Rounds of commit {one['of']} and of the earlier {one['commit']}, each in a process of its own. They are "
        "timed in pairs, and take turns at going first. A ratio is the median of those of the pairs; above 1 is "
        "faster. `python bench/versions.py COMMIT` compares with any other. The goal is "
        f"{GAIN:g} in every work. Where it is short, the tables of where the time goes tell what fills a round."
    )
    header = ("work", "contender", "milliseconds before", "now", "before / now", "quartiles")
    cells = [
        (
            line["work"],
            line["contender"],
            f"{1000 * line['before']:.2f}",
            f"{1000 * line['now']:.2f}",
            f"{line['ratio']:.2f}",
            f"{line['q1']:.2f} to {line['q3']:.2f}",
        )
        for line in lines
    ]
    about = f"{provenance(one)} Medians of {one['repeats']} pairs of turns."
    return ["### Beside an earlier commit", "", what, "", *table(header, cells), about, ""]


def where(lines: list[dict[str, Any]]) -> list[str]:
    """Operations per second against a product of matrices, and shares of a round."""
    header = ("work", "threads", "Gflop a round", "ms a round", "Gflop/s", "a product, Gflop/s", "share")
    cells = [
        (
            line["title"], each["threads"], f"{each['gflop']:.3f}", f"{1000 * each['median']:.1f}",
            f"{each['gflops']:.1f}", f"{each['product']:.0f}", f"{each['share']:.0%}",
        )
        for line in lines
        for each in line["reached"]
    ]  # fmt: skip
    parts = [(part, *(f"{line['shares'][part]:.0%}" for line in lines)) for part in lines[0]["shares"]]
    fleet = lines[0]["bench"].partition(" ")[2] or "local"
    what = (
        f"Operations of the forward and backward passes of `{fleet}`, against a product of two matrices of 1024 x 1024 "
        "in fp32 on as many threads, timed in turns. Batches are small: a product of ten rows with a matrix reads the "
        "matrix for ten rows' sake, and is bound by memory, not by arithmetic."
    )
    profiled = (
        f"Shares of a round of `{fleet}-1` by torch's profiler, which makes small operations look longer than they are:"
    )
    about = f"{provenance(lines[0])} Medians of {lines[0]['repeats']} rounds."
    title = "### Where the time goes" + ("" if fleet == "local" else f", {fleet}")
    return [
        title, "", what, "", *table(header, cells), profiled, "",
        *table(("part", *(line["work"] for line in lines)), parts), about, "",
    ]  # fmt: skip


def report(line: dict[str, Any]) -> list[str]:
    """What a report of many clients costs."""
    cells = [
        ("`fedtide report`, the process from start to end", f"{line['command']:.1f} s"),
        ("in a process that is there: records read, page and pictures made", f"{line['page']:.1f} s"),
        ("peak memory", f"{line['peak_mb']} MB"),
        ("the page's size", f"{line['page_mb']:.1f} MB"),
    ]
    title = f"The report of {line['clients']:,} clients and {line['rounds']} rounds"
    what = (
        f"{line['methods']} methods ({line['algorithms']}), one seed, every client judged in every "
        f"{line['every']} rounds. {provenance(line)}"
    )
    return [f"### {title}", "", *table(("", ""), cells), what, ""]


def population(line: dict[str, Any]) -> list[str]:
    """The table of the large population."""
    cells = [
        ("from process start to the end of the first round", f"{line['first_round']:.1f} s"),
        ("a round", f"{1000 * line['median']:.0f} ms"),
        ("resident memory after the first round", f"{line['start_mb']} MB"),
        (f"resident memory after {line['rounds']} more rounds", f"{line['end_mb']} MB"),
    ]
    title = f"{line['clients']:,} registered clients, {line['cohort']} in a round"
    what = f"{line['rows']} rows each, model `{line['model']}`, one thread. {provenance(line)}"
    return [f"### {title}", "", *table(("", ""), cells), what, ""]


def messages(line: dict[str, Any]) -> list[str]:
    """What a message to a node costs, beside bare Flower's, and what both ends hold."""
    sizes, all_three = ("1 kB", "250 kB", "20 MB"), ("ours", "bare Flower", "the app for Flower")
    there = [who for who in all_three if f"{who}, 1 kB s" in line]
    header = ("there and back to one node", *(f"{who}, ms" for who in there))
    trips = [(size, *(f"{1000 * line[f'{who}, {size} s']:,.1f}" for who in there)) for size in sizes]
    held = [
        ("resident at rest: server, with torch and the study", f"{line['ours, server MB']:.0f} MB"),
        ("resident at rest: node, with torch and its rows", f"{line['ours, node MB']:.0f} MB"),
        (
            "of that the process that is connected, and all after ten minutes without a question, "
            "or twice `deploy.deadline`",
            f"{line['a node without its worker MB']:.0f} MB",
        ),
    ]
    if len(there) > 1:
        ends = {"server": "SuperLink", "node": "SuperNode"}
        held += [
            (f"resident at rest: {end} and what it starts, of {who}", f"{line[f'{who}, {name} MB']:.0f} MB")
            for who in there[1:]
            for name, end in ends.items()
        ]
    others = [
        ("from `fedtide serve` until it listens", f"{line['serve to listening s']:.1f} s"),
        ("from then to the first answer of a node that waited", f"{line['listening to first answer s']:.1f} s"),
        *((name, f"{line[f'{name} s']:.2f} s") for name in (
            "100 nodes, all there", "100 nodes, 250 kB there and back", "1000 streams, all there",
            "1000 streams, 1 kB there and back",
        )),
        ("1000 streams, server", f"{line['1000 streams, server MB']:.0f} MB more"),
    ]  # fmt: skip
    what = (
        "A worker, or an app, that sends back what it gets; TLS and registered keys, all on one machine. Flower starts "
        "Python anew for each question, and looks for messages every few seconds. Bare Flower has no torch. "
        f"Medians of {line['trips']} trips. {provenance(line)}"
    )
    return ["### Messages to real clients", "", *table(header, trips), *table(("", ""), held + others), what, ""]


def evaluation(line: dict[str, Any]) -> list[str]:
    """The table of the evaluation."""
    cells = [
        ("`fleet.score`, results per client", f"{1000 * line['score']:.0f} ms"),
        ("one plain pass over the pooled rows", f"{1000 * line['plain']:.0f} ms"),
        ("ratio", f"{line['ratio']:.2f}"),
    ]
    title = f"Evaluating {line['clients']:,} clients on {line['rows']:,} test rows"
    return [f"### {title}", "", *table(("", ""), cells), f"Model `{line['model']}`. {provenance(line)}", ""]


def passes(lines: list[dict[str, Any]]) -> list[str]:
    """Evaluation of pictures in small passes with freed memory kept, beside neither."""
    header = ("network", "microseconds a picture before", "now", "before / now", "quartiles")
    cells = [
        (
            f"`{line['network']}`",
            line["before"],
            line["now"],
            f"{line['ratio']:.2f}",
            f"{line['q1']:.2f} to {line['q3']:.2f}",
        )
        for line in lines
    ]
    what = (
        f"{lines[0]['pictures']:,} pictures, one thread, in pairs of turns. Before: passes of 2,048 rows, and freed "
        f"memory goes back to the system. Predictions are the same. Made by `python bench/passes.py`. "
        f"{provenance(lines[0])}"
    )
    return ["### Evaluating pictures", "", *table(header, cells), what, ""]


def server(lines: list[dict[str, Any]]) -> list[str]:
    """What FedTEM and FedTKM add to the server's work."""
    header = (
        "network",
        "method",
        "added, ms",
        "quartiles",
        "round of FedAvg, ms",
        "share",
        "of a small-cnn round",
        "goal",
    )
    cells = [
        (
            f"`{line['network']}`, {line['features']} features",
            {"fedtem": "FedTEM", "fedtkm": "FedTKM"}[line["method"]],
            f"{1000 * line['extra']:.2f}",
            f"{1000 * line['extra_q1']:.2f} to {1000 * line['extra_q3']:.2f}",
            f"{1000 * line['round']:.1f}",
            f"{line['share']:.2%}",
            f"{line['share_of_demo']:.2%}" if "share_of_demo" in line else "",
            f"under {line['goal']:.0%}",
        )
        for line in lines
    ]
    one = lines[0]
    what = (
        f"{one['participants']} participants, {one['branches']} branches: the server's half of a round, clients' work "
        "left out, minus that of FedAvg on the same branched network; the optimizer's step is the same in both and "
        f"left out. Beside it a whole round of FedAvg on {one['participants']} x {one['rows']} rows in one process, "
        "with the same network, and with `small-cnn`."
    )
    about = f"{provenance(one)} Medians of {one['repeats']} turns."
    return ["### What FedTEM and FedTKM add to the server's work", "", what, "", *table(header, cells), about, ""]


def assigned(lines: list[dict[str, Any]]) -> list[str]:
    """The table of the assignment of a large cohort."""
    header = ("components", "participants", "milliseconds", "quartiles", "goal")
    cells = [
        (
            line["components"],
            {"mixed": "of all kinds", "leaning": "nearly all lean to one"}[line["cohort"]],
            f"{1000 * line['median']:.1f}",
            f"{1000 * line['q1']:.1f} to {1000 * line['q3']:.1f}",
            f"under {1000 * line['goal']:.0f}",
        )
        for line in lines
    ]
    one = lines[0]
    title = f"Assigning {one['participants']:,} participants under a prior"
    about = f"Equal room in each component. {provenance(one)} Medians of {one['repeats']} turns."
    return [f"### {title}", "", *table(header, cells), about, ""]


def loss(lines: list[dict[str, Any]]) -> list[str]:
    """What the re-weighted softmax costs."""
    header = ("loss", "milliseconds per step", "against cross-entropy", "quartiles")
    cells = [
        (line["loss"], f"{1000 * line['step']:.1f}", f"{line['ratio'] - 1:+.1%}",
         f"{line['q1'] - 1:+.1%} to {line['q3'] - 1:+.1%}")
        for line in lines
    ]  # fmt: skip
    one = lines[0]
    what = (
        f"Local training of the 1.2 M network on {one['rows']} rows in batches of {one['batch_size']}, one thread. "
        "Cross-entropy against itself, in turns as the others, says how much is noise."
    )
    about = f"{provenance(one)} Medians of {one['repeats']} turns."
    return ["### What the re-weighted softmax costs", "", what, "", *table(header, cells), about, ""]


MULTIPLE = 1.3
"""How many times its arithmetic a round of IFCA may take, at the largest K."""
APART = (
    "the weights of all models leave the second-level cache, unlike those of the pass beside it, losses are taken in "
    "float64, clients' updates are added one by one to the sum of their model, and the server steps K of them; all "
    "weigh most where a pass is short"
)


def clusters(lines: list[dict[str, Any]]) -> list[str]:
    """What K models cost, a table per work."""
    out = [
        "### What K models cost",
        "",
        "A client of IFCA judges K models on its training rows before it trains one: a round of FedAvg and K forward "
        "passes would be the least. Passes are timed in the same turns, with the weights and the rows in place; to "
        "judge one model is to load its weights, pass, and take the mean cross-entropy in float64. Several models of "
        "dense layers, and of convolutions with few channels, pass side by side. The last column but one is what a "
        "round takes beyond FedAvg's, over K passes: 1 is nothing more. The last is its processor time over the "
        "arithmetic: a round of FedAvg for each model that a client trains with all of its rows, and K passes. FedTEM "
        "and Min Loss share a trunk between K heads; clients of pFedEM divide their rows among K whole models, and "
        "those of Fielding train one of K, here in rounds without drift. Stacked, a model passes over the rows of all "
        "clients at once, and a round is compared with a stacked FedAvg's.",
        "",
    ]
    shares = ("round / FedAvg", "beyond FedAvg / K passes", "processor / arithmetic")
    header = ("algorithm", "K", "milliseconds per round", "quartiles", *shares)
    for work in dict.fromkeys(line["work"] for line in lines):
        mine = [line for line in lines if line["work"] == work]
        cells = [
            (
                line["algorithm"],
                line["models"],
                f"{1000 * line['median']:.1f}",
                f"{1000 * line['q1']:.1f} to {1000 * line['q3']:.1f}",
                f"{line['ratio']:.2f}",
                f"{line['passes']:.2f} ({line['passes_q1']:.2f} to {line['passes_q3']:.2f})"
                if "passes" in line
                else "",
                f"{line['arithmetic']:.2f}" if "arithmetic" in line else "",
            )
            for line in mine
        ]
        one = mine[0]
        title = f"{one['title'][0].upper()}{one['title'][1:]}"
        about = (
            f"{title}, all clients in every round, one thread. A pass over all training rows takes "
            f"{1000 * one['forward']:.1f} ms, to judge a model {one['judged'] / one['forward']:.2f} passes. "
            f"{provenance(one)} Medians of {one['repeats']} turns."
        )
        if ifca := [line for line in mine if line["algorithm"] == "ifca"]:
            last = max(ifca, key=lambda line: line["models"])
            about += f" Goal of IFCA at K = {last['models']}: {MULTIPLE} times its arithmetic; found "
            about += f"{last['arithmetic']:.2f}" + ("." if last["arithmetic"] <= MULTIPLE else f". Short: {APART}.")
        out += [*table(header, cells), about, ""]
    return out


def drift(lines: list[dict[str, Any]], every: list[dict[str, Any]]) -> list[str]:
    """The server's work under drift, beside the newest of `every` run on another processor."""
    others = newest([line for line in every if line["processor"] != lines[0]["processor"]], "bench")
    there = {(line["title"], line["about"]): f"{1000 * line['median']:,.1f}" for line in others}
    header = ("what", "of what", "milliseconds", "quartiles", "processor, ms", "goal, ms", "elsewhere, ms")
    cells = [
        (
            line["title"],
            line["about"],
            f"{1000 * line['median']:,.1f}",
            f"{1000 * line['q1']:,.1f} to {1000 * line['q3']:,.1f}",
            f"{1000 * line['worked']:,.1f}",
            "" if line["goal"] is None else f"under {1000 * line['goal']:,.0f}",
            there.get((line["title"], line["about"]), ""),
        )
        for line in lines
    ]
    one = lines[0]
    starts = f"{one['n_init']} starts for each K from 2 to {one['k_max']}, and the K of the best silhouette"
    what = (
        "The arithmetic of Fielding's server alone, without models: clients have reported, and their label vectors or "
        "embeddings are there in float32. "
        f"A re-clustering is k-means with {starts}. {one['threads']} thread. Clients are in groups with labels of "
        "their own; without groups Lloyd's algorithm runs longest. "
        "Processor time is the least of all repeats; waiting for a core that others use does not lengthen it."
    )
    about = f"{provenance(one)} The load before was {one['load']}. Medians of {one['repeats']} turns or fewer."
    about += "".join(f" Elsewhere: {provenance(line)}" for line in others[:1])
    return ["### What drift costs the server", "", what, "", *table(header, cells), about, ""]


def growth(lines: list[dict[str, Any]], picture: Path) -> list[str]:
    """How it grows with the number of clients, drawn; the picture is written beside the page."""
    ways = dict.fromkeys(line["way"] for line in lines)
    curves = {way: [(line["clients"], line["worked"]) for line in lines if line["way"] == way] for way in ways}
    crowd_page.write_curves(picture, curves, "clients", "seconds, one thread", "Seconds over the number of clients")
    last = lines[-1]
    peak = f" Peak memory at {last['clients']:,} clients: {last['peak_mb']:,.0f} MB." if last.get("peak_mb") else ""
    drawn = f"![Seconds over the number of clients, both logarithmic]({picture.parent.name}/{picture.name})"
    what = (
        drawn,
        "",
        f"Label vectors with {last['labels']} labels, L1, {last['n_init']} starts for each K up to {last['k_max']}. "
        "Exact: fits to all clients, silhouettes over all pairs. Sampled silhouettes: among 1,000 clients. Sampled "
        "fits: centers found with 5,000 clients, to which all others are assigned. Least processor times."
        f"{peak} {provenance(last)}",
        "",
    )
    return ["### How re-clustering grows", "", *what]


def crowds(lines: list[dict[str, Any]], images: Path) -> list[str]:
    """Large populations, clients that keep much, and precision."""
    out = []
    for name, drawn in (
        ("registered", crowd_page.registered),
        ("cohorts", crowd_page.cohorts),
        ("models", crowd_page.models),
    ):
        if found := newest([line for line in lines if line["bench"] == name], "bench"):
            out += drawn(found, images / f"{name}.svg", provenance(found[0]))
    for name, section in (("memory", crowd_page.memory), ("precision", crowd_page.precision)):
        for line in newest([line for line in lines if line["bench"] == name], "bench")[-1:]:
            out += section(line, table, provenance(line))
    return out


def tables(lines: list[dict[str, Any]], images: Path) -> str:
    """All tables as Markdown; pictures are written into a folder."""
    by_bench: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        by_bench[line["bench"]].append(line)
    found = newest(by_bench["goals"], "work")
    played = newest(by_bench["rounds"], "work")
    out = (goals(found) if found else []) + rounds(played)
    if beside := newest(by_bench["beside"], "work"):
        out += processes(played, beside)
    if newest_lines := newest(by_bench["versions"], "work"):
        out += versions(newest_lines)
    for name in ("where", "where stacked"):
        if newest_lines := newest(by_bench[name], "bench"):
            out += where(newest_lines)
    for line in newest(by_bench["population"], "bench")[-1:]:
        out += population(line)
    for line in newest(by_bench["evaluation"], "bench")[-1:]:
        out += evaluation(line)
    if newest_lines := newest(by_bench["passes"], "bench"):
        out += passes(newest_lines)
    out += crowds(lines, images)
    for line in newest(by_bench["messages"], "bench")[-1:]:
        out += messages(line)
    for line in newest(by_bench["report"], "bench")[-1:]:
        out += report(line)
    for name, section in (("server", server), ("assign", assigned), ("loss", loss)):
        if newest_lines := newest(by_bench[name], "bench"):
            out += section(newest_lines)
    if newest_lines := newest(by_bench["clusters"], "work"):
        out += clusters(newest_lines)
    if newest_lines := newest(by_bench["drift"], "bench"):
        out += drift(newest_lines, by_bench["drift"])
    if newest_lines := newest(by_bench["growth"], "bench"):
        out += growth(newest_lines, images / "growth.svg")
    return "\n".join(out)


def main() -> None:
    """Put the tables between the markers of the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    given = parser.parse_args()
    if not given.results.is_file():
        parser.exit(2, f"{given.results}: no such file; run bench/rounds.py first\n")
    lines = [json.loads(line) for line in given.results.read_text(encoding="utf-8").splitlines() if line.strip()]
    text = given.page.read_text(encoding="utf-8") if given.page.is_file() else EMPTY
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        parser.exit(2, f"{given.page}: needs a line {BEGIN} and after it a line {END}\n")
    given.page.parent.mkdir(parents=True, exist_ok=True)
    given.page.write_text(
        f"{before}{BEGIN}\n\n{tables(lines, given.page.parent / 'images')}\n{END}{after}", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
