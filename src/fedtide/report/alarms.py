"""Warnings that a result must not be read without: answers that were refused, and models that say nothing."""

from __future__ import annotations

import math

from fedtide.report.summary import MethodSummary, Summary


def alarms(summary: Summary) -> list[str]:
    """Return a sentence for each method whose training went wrong.

    A client's answer with a number that is not finite is refused and not counted; a model with such weights predicts
    NaN, of which there is no accuracy.
    """
    return [line for method in summary.methods for line in _of(method)]


SOME = 0.1
"""Share of refused answers from which on a result is no method's merit."""


def broken(method: MethodSummary) -> bool:
    """Tell whether a method's training went so wrong that no headline may praise it."""
    refused = _total(method, "refused")
    return bool(_total(method, "diverged")) or refused > SOME * (_total(method, "answered") + refused)


def _total(method: MethodSummary, name: str) -> int:
    measure = method.measures.get(name)
    return 0 if measure is None else int(sum(value for value in measure.values if math.isfinite(value)))


def _of(method: MethodSummary) -> list[str]:
    refused, diverged = _total(method, "refused"), _total(method, "diverged")
    out = []
    if refused:
        asked = _total(method, "answered") + refused
        many = f"all {asked:,}" if refused == asked else f"{refused:,} of {asked:,}"
        out.append(
            f"{method.name}: {many} answers of clients were refused, as they were not finite; a smaller learning rate "
            "is the usual cure"
        )
    if diverged:
        out.append(
            f"{method.name}: at {diverged:,} evaluations its predictions were no numbers (NaN), so that there is no "
            "accuracy"
        )
    return out
