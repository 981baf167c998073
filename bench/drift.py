"""The arithmetic of the server under drift: moves, centers and trigger, and re-clustering.

python bench/drift.py [--repeats 10] [--largest 1000000] [--out bench/results.jsonl]

Clients have reported before the clock starts: their label vectors, or embeddings, are there. Everything is on one
thread and in float32, but for what `fielding` does in an event, which keeps float64 and mixes models (here of one
number each) where it clusters anew. Beside the time on the clock is the least processor time of all repeats,
which other processes do not lengthen. Speed is reported, never asserted.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fedtide.algorithms.fielding import MovingCenters, State, cluster_reports, handle_drift, recluster
from fedtide.clusters.clusterer import Clustering, KMeans
from fedtide.clusters.distance import Kind, heterogeneity, means
from fedtide.clusters.triggers import FixedFraction, event_of
from fedtide.core.base import Weights
from fedtide.core.rng import Rng
from fedtide.fleets.engines import threads
from machine import append, machine, now, options, peak_of, quartiles, timed

CLIENTS, FEW, LABELS, WIDTH = 5078, 302, 100, 512
"""As in the paper: the clients of FMoW, and those whose gradients were clustered; and how wide an embedding is."""
GROUPS, OWN, OTHER = 5, 0.3, 0.005
"""A group has a fifth of the labels; Dirichlet parameters of a client's own labels and of the others."""
STARTS, FEW_STARTS, K_MAX = 10, 5, 10
SAMPLED, FITTED, JS_FITTED = 1000, 5000, 2000
SIZES = (1000, 3162, 10_000, 31_623, 100_000, 316_228, 1_000_000)
EXACT_UP_TO, FITS_UP_TO = 10_000, 31_623
"""All pairs, and fits to all rows, are measured up to so many clients."""
GROWTH_REPEATS = 3
BLOCK = 20_000
SEED = 0
WAYS: dict[str, dict[str, int]] = {
    "exact": {},
    "sampled silhouettes": {"silhouette_samples": SAMPLED},
    "sampled fits": {"silhouette_samples": SAMPLED, "fit_samples": FITTED},
}


@dataclass(frozen=True)
class Case:
    """Something to time. goal: seconds, None where there is none; many: whether it is short enough for many repeats."""

    title: str
    about: str
    act: Callable[[], Any]
    goal: float | None = None
    many: bool = False


def label_vectors(clients: int, labels: int = LABELS, *, groups: int = GROUPS) -> Tensor:
    """Label vectors of clients in groups with labels of their own, or without groups; made in blocks."""
    draw, out = Rng(SEED).numpy(), torch.empty(clients, labels)
    for begin in range(0, clients, BLOCK):
        group = draw.integers(groups, size=min(BLOCK, clients - begin))
        own = torch.arange(labels)[None] % groups == torch.from_numpy(group)[:, None]
        shape = torch.where(own, OWN, OTHER).double() if groups > 1 else torch.full(own.shape, 0.1).double()
        some = torch.from_numpy(draw.standard_gamma(shape.numpy())).clamp_(min=1e-12)
        out[begin : begin + BLOCK] = some / some.sum(1, keepdim=True)
    return out


def embeddings(clients: int, width: int = WIDTH) -> Tensor:
    """Mean features of clients in groups, as far apart as clients of one group are."""
    draw = Rng(SEED).torch()
    middles = torch.randn(GROUPS, width, generator=draw)
    return middles[torch.randint(GROUPS, (clients,), generator=draw)] + torch.randn(clients, width, generator=draw)


def clustered(x: Tensor, kind: Kind = "l1", **ways: int) -> Clustering:
    """All clients anew, K by silhouette."""
    return KMeans(
        **{"k_max": K_MAX, "n_init": STARTS, "silhouette_samples": len(x), "fit_samples": len(x), **ways}
    ).fit(x, kind, Rng(SEED))


def handled(x: Tensor, found: Clustering, trigger: FixedFraction) -> bool:
    """A drift event in which all clients drifted: moves, centers, trigger."""
    clusters = MovingCenters(x, found.label, found.centers, "l1")
    for i in range(len(x)):
        clusters.move(i, clusters.nearest(i))
    label, filled = clusters.label, clusters.counts > 0
    centers = means(x, label, found.k, found.centers)
    return trigger.fires(None, event_of(found.centers, centers, filled, x, label, "l1", lambda: label))


def stated(x: Tensor, found: Clustering) -> State:
    """The state of `fielding` with these clusters, in float64, and models of one number each."""
    models = tuple(Weights({"w": torch.zeros(1)}) for _ in range(found.k))
    centers = found.centers.double()
    return State(models, (None,) * found.k, x.double(), found.label, centers, centers, "l1")


def cases() -> list[Case]:
    """What is timed once, at the sizes of the paper."""
    x, few, wide = label_vectors(CLIENTS), label_vectors(FEW), embeddings(CLIENTS)
    loose = label_vectors(CLIENTS, groups=1)
    found = clustered(x, k_min=K_MAX)
    all_pairs, some = "silhouettes of all", f"silhouettes among {SAMPLED:,}"
    size, small = f"{CLIENTS:,} x {LABELS}", f"{FEW} x {LABELS}"
    fewer = {"silhouette_samples": SAMPLED, "fit_samples": JS_FITTED}
    one_by_one = f"{size}, L1, K = {K_MAX}"
    state, everybody = stated(x, found), torch.arange(len(x))
    rule = KMeans(k_max=K_MAX, n_init=STARTS, silhouette_samples=SAMPLED, fit_samples=CLIENTS)
    wholly = f"{size} float64, L1"
    return [
        Case("moves of all, centers, trigger", one_by_one, lambda: handled(x, found, FixedFraction()), 0.5, True),
        Case("all of `handle_drift`", f"{wholly}, K = {K_MAX}",
             lambda: handle_drift(state, everybody, rule, FixedFraction(), "last-event", Rng(SEED)), 0.5, True),
        Case("clusters made, models mixed", f"{wholly}, {some}",
             lambda: recluster(state, cluster_reports(state, rule, Rng(SEED)))),
        Case("heterogeneity", one_by_one, lambda: heterogeneity(x, found.label, "l1"), None, True),
        Case("re-clustering", f"{small}, L1, {all_pairs}", lambda: clustered(few), 0.02, True),
        Case("re-clustering", f"{small}, L1, {all_pairs}, {FEW_STARTS} starts",
             lambda: clustered(few, n_init=FEW_STARTS), 0.02, True),
        Case("re-clustering", f"{size}, L1, {all_pairs}", lambda: clustered(x), 2.0),
        Case("re-clustering", f"{size}, L1, {some}", lambda: clustered(x, silhouette_samples=SAMPLED), 1.0),
        Case("re-clustering", f"{size}, JS, {all_pairs}", lambda: clustered(x, "js"), 10.0),
        Case("re-clustering", f"{size}, JS, {some}", lambda: clustered(x, "js", silhouette_samples=SAMPLED), 2.0),
        Case("re-clustering", f"{size}, JS, {some}, fits to {JS_FITTED:,}", lambda: clustered(x, "js", **fewer), 2.0),
        Case("re-clustering", f"{CLIENTS:,} x {WIDTH}, squared L2, {all_pairs}", lambda: clustered(wide, "sq-l2"), 3.0),
        Case("re-clustering", f"{size} without groups, L1, {all_pairs}", lambda: clustered(loose)),
    ]  # fmt: skip


def measured(act: Callable[[], Any], repeats: int) -> dict[str, Any]:
    """Quartiles of the clock, and the least of the processor."""
    act()
    took = torch.tensor([timed(act) for _ in range(repeats)], dtype=torch.float64)
    spread = dict(zip(("q1", "median", "q3"), quartiles(took[:, 0], 6), strict=True))
    return {**spread, "worked": round(took[:, 1].min().item(), 6), "repeats": repeats}


def sized(repeats: int) -> list[dict[str, Any]]:
    """A line for each case."""
    fixed = {"threads": 1, "n_init": STARTS, "k_max": K_MAX}
    return [
        {"title": case.title, "about": case.about, **measured(case.act, repeats * (5 if case.many else 1)),
         "goal": case.goal, **fixed}
        for case in cases()
    ]  # fmt: skip


def growth(largest: int) -> list[dict[str, Any]]:
    """Seconds at each size: the moves, and a re-clustering in each way that is feasible there."""
    lines = []
    for clients in (size for size in SIZES if size <= largest):
        x = label_vectors(clients)
        found = clustered(x, k_min=K_MAX, **WAYS["sampled fits"])
        acts = {"moves, centers, trigger": lambda x=x, found=found: handled(x, found, FixedFraction())}
        for way, given in WAYS.items():
            limit = {"exact": EXACT_UP_TO, "sampled silhouettes": FITS_UP_TO}.get(way, largest)
            if clients <= limit:
                acts[way] = lambda x=x, given=given: clustered(x, **given)
        fixed = {"clients": clients, "labels": LABELS, "threads": 1, "n_init": STARTS, "k_max": K_MAX}
        lines += [{"way": way, **measured(act, GROWTH_REPEATS), **fixed} for way, act in acts.items()]
    return lines


def show(lines: list[dict[str, Any]], grown: list[dict[str, Any]]) -> None:
    """Print both as tables, with the goals beside the figures."""
    table = Table(title="the server's work under drift, one thread", title_justify="left")
    for column in ("what", "of what", "milliseconds", "quartiles", "processor", "goal"):
        table.add_column(column)
    for line in lines:
        goal = "" if line["goal"] is None else f"< {1000 * line['goal']:,.0f}"
        quarters = f"{1000 * line['q1']:,.1f} to {1000 * line['q3']:,.1f}"
        milliseconds = (f"{1000 * line[key]:,.1f}" for key in ("median", "worked"))
        median, processor = milliseconds
        table.add_row(line["title"], line["about"], median, quarters, processor, goal)
    Console(width=140).print(table)
    table = Table(title="growth", title_justify="left")
    for column in ("clients", "way", "seconds", "processor", "peak memory, MB"):
        table.add_column(column)
    for line in grown:
        peak = "" if "peak_mb" not in line else f"{line['peak_mb']:,.0f}"
        table.add_row(f"{line['clients']:,}", line["way"], f"{line['median']:.4f}", f"{line['worked']:.4f}", peak)
    Console(width=120).print(table)


def main() -> None:
    """Measure, print, append."""
    parser = options(__doc__)
    parser.add_argument(
        "--repeats", type=int, default=10, help="how often each is timed; what is short five times that"
    )
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="the most clients")
    parser.add_argument("--alone", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    with threads(1):
        if given.alone:
            clustered(label_vectors(given.alone), **WAYS["sampled fits"])
            return
        date, where = now(), machine()
        lines, grown = sized(given.repeats), growth(given.largest)
    for line in grown[-1:]:
        line["peak_mb"] = peak_of([sys.executable, __file__, "--alone", str(line["clients"])])[0]
    show(lines, grown)
    append(given.out, [{"bench": "drift", "date": date, **line, **where} for line in lines])
    append(given.out, [{"bench": "growth", "date": date, **line, **where} for line in grown])


if __name__ == "__main__":
    main()
