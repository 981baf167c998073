"""Warnings that a result must not be read without: refused answers, exploded losses, mute models, no clusters."""

from __future__ import annotations

import math
from operator import itemgetter

from fedtide.data.targets import TargetWords
from fedtide.report.summary import MethodSummary, Summary


def alarms(summary: Summary) -> list[str]:
    """Return a sentence for each method whose training went wrong, or that made clusters where there are none.

    A client's answer with a number that is not finite is refused and not counted; a model with such weights predicts
    NaN, of which there is no accuracy. A loss that rises without bound leaves a model that may say one class for ever.
    """
    lines = [line for method in summary.methods for line in _of(method, summary.target)]
    if not lines and summary.methods and all(m.seeds and m.measure(m.score).mean is None for m in summary.methods):
        lines = ["nothing was judged: no client has test rows (data.split.test), and none is held out"]
    return lines


SOME = 0.1
"""Share of refused answers from which on a result is no method's merit."""


GROUPED = 0.15
"""Mean silhouette that clusters of clients have where there are groups: .2 to .5, without them .05 to .12."""

RISE, LOUD = 10.0, 10.0
"""Factor by which a loss that exploded is above the first one, and what is taken for a large first loss (in nats).

A guess among a thousand classes costs 7 nats.
"""


def broken(method: MethodSummary) -> bool:
    """Tell whether a method's training went so wrong that no headline may praise it."""
    refused = _total(method, "refused")
    nothing = bool(_explosions(method)) and method.no_better
    return nothing or bool(_total(method, "diverged")) or refused > SOME * (_total(method, "answered") + refused)


def _explosions(method: MethodSummary) -> list[tuple[float, float]]:
    """Return the first and the highest training loss of every seed at which it exploded."""
    first, peak = method.by_seed("first_loss"), method.by_seed("peak_loss")
    return [(first[seed], peak[seed]) for seed in first if peak[seed] > RISE * max(first[seed], LOUD)]


def _total(method: MethodSummary, name: str) -> int:
    return int(sum(value for value in method.measure(name).values if math.isfinite(value)))


def _of(method: MethodSummary, words: TargetWords) -> list[str]:
    refused, diverged = _total(method, "refused"), _total(method, "diverged")
    out = []
    if refused:
        asked = _total(method, "answered") + refused
        many = f"all {asked:,}" if refused == asked else f"{refused:,} of {asked:,}"
        out.append(
            f"{method.name}: {many} answers of clients were refused, as they were not finite, or too large for a sum "
            "in fixed point ([wire]); a smaller learning rate is the usual cure"
        )
    if diverged:
        out.append(
            f"{method.name}: at {diverged:,} evaluations its predictions were no numbers (NaN), so that there is no "
            f"{words.score}"
        )
    if exploded := _explosions(method):
        first, peak = max(exploded, key=itemgetter(1))
        after = f", and in the end it is no better than always {words.constant}" * method.no_better
        out.append(
            f"{method.name}: the training loss rose from {first:,.4g} to {peak:,.4g}{after}; features that are not "
            "scaled (data.source.scaled) and too large a learning rate are the usual causes"
        )
    clusters, silhouette = (method.measure(name).mean for name in ("clusters", "silhouette"))
    if clusters is not None and clusters > 1 and silhouette is not None and silhouette < GROUPED:
        out.append(
            f"{method.name}: its clusters are hardly any, with a mean silhouette of {silhouette:.2f}; if clients "
            f"are of a few kinds it is above {GROUPED} as a rule, and else one model may do as well"
        )
    return out
