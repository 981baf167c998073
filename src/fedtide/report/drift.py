"""Measures of runs whose clients drift: heterogeneity, reactions of methods, effects of known events."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedtide.evaluate.events import falls, noticed
from fedtide.evaluate.metrics import mean_of_known
from fedtide.report.reading import RunRecord

MARKED = ("mass", "change", "swap")
"""Events with a known round in which many clients change at once; the others happen all the time."""

COUNTS = ("clusters", "models")
"""Names of the facts in which algorithms report the number of their clusters."""


def is_about_drift(run: RunRecord) -> bool:
    """Tell whether the run's record is about drift: data that drift, or a method that follows it."""
    return bool(len(run.apart()[0])) or any(
        "drifted" in line or {"moved", "reclustered"} & line.get("facts", {}).keys() for line in run.lines
    )


def marks(run: RunRecord) -> list[int]:
    """Return the rounds of the known events, from 1 on, as an event in round 0 changes nothing."""
    return [line["round"] for line in run.lines if line["round"] > 0 and set(line.get("events", ())) & {*MARKED}]


def following(run: RunRecord, view: str) -> dict[str, float]:
    """Return the measures of drift and of the method's reactions; empty where the record is not about drift."""
    if not is_about_drift(run):
        return {}
    out: dict[str, float] = {}
    for by, name in (("heterogeneity", "heterogeneity"), ("embedding", "embedding_heterogeneity")):
        within, everyone = run.apart(by)[1:]
        if len(within):
            out |= {name: mean_of_known(within), f"{name}_all": mean_of_known(everyone)}
    for name, fact in (("spread", "spread"), ("silhouette", "silhouette"), ("moves", "moved")):
        if (values := run.fact(fact)).size and np.isfinite(values).any():
            out[name] = float(np.nansum(values) if name == "moves" else np.nanmean(values))
    if len(counts := cluster_counts(run)[1]):
        out |= {"clusters": mean_of_known(counts), "clusters_last": float(counts[-1])}
    anew, reactions, events = reclusterings(run), reclusterings(run, merges=False), marks(run)
    if anew is not None:
        out["reclusterings"] = float(len(anew))
    if events:
        out |= _at_events(run, view, events)
        if reactions is not None:
            out |= _noticed(reactions, events, len(run.lines))
    return out


def _at_events(run: RunRecord, view: str, events: Sequence[int]) -> dict[str, float]:
    found = falls(*run.accuracy(view), events, len(run.lines))
    return {
        "events_known": float(len(found)),
        "event_fall": mean_of_known(fall.depth for fall in found),
        "event_recovery": mean_of_known(fall.rounds for fall in found),
        "events_recovered": mean_of_known(fall.back for fall in found),
    }


def _noticed(reactions: Sequence[int], events: Sequence[int], rounds: int) -> dict[str, float]:
    met = noticed(reactions, events, rounds)
    return {
        "detection_delay": mean_of_known(delay for delay in met.delays if math.isfinite(delay)),
        "events_detected": met.detected,
        "false_alarms": float(met.false_alarms),
    }


def reclusterings(run: RunRecord, *, merges: bool = True) -> list[int] | None:
    """Return the rounds in which a method re-clustered all or some clients; None where it never reports.

    Fielding re-clusters all clients (`reclustered`); with FedDrift models are added (`new`) and merged (`merged`).

    Args:
        run: record of the run.
        merges: true to count rounds that only merge models. These answer to no event: FedDrift merges a step after
            models were added.
    """
    signs = ("reclustered", "new", *(("merged",) if merges else ()))
    told = [line for line in run.lines if {"reclustered", "new"} & line.get("facts", {}).keys()]
    anew = [line["round"] for line in told if any(_number(line["facts"].get(sign)) > 0 for sign in signs)]
    return anew if told else None


def cluster_counts(run: RunRecord) -> tuple[np.ndarray, np.ndarray]:
    """Return the rounds that report a number of clusters, and these numbers; empty clusters count.

    Where no fact has the number, it is the number of models whose `members` are reported.
    """
    found = []
    for line in run.lines:
        facts = line.get("facts", {})
        members = facts.get("members")
        count = next((_number(facts[name]) for name in COUNTS if name in facts), math.nan)
        if math.isnan(count) and isinstance(members, list):
            count = float(len(members))
        if not math.isnan(count):
            found.append((line["round"], count))
    return np.array([at for at, _ in found]), np.array([count for _, count in found], dtype=np.float64)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan
