"""Small experiments with something to tune."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedtide.config import Experiment, from_dict
from fedtide.tuning import trials
from helpers.studies import A, raw

PROX = {**A, "name": "prox", "algorithm": "fedprox"}
RATE = {"low": 0.01, "high": 1.0, "log": True}
RATES = {"method.local.lr": RATE}


def tunable(*methods: dict[str, Any], tune: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """The toy experiment with a [tune] table, as nested dicts."""
    search = {"ranges": RATES} if tune is None or not tune.keys() & {"ranges", "stage"} else {}
    return raw(
        *methods, tune={"trials": 6, "startup_trials": 2, "parallel_trials": 2, **search, **(tune or {})}, **changes
    )


def tuning(*methods: dict[str, Any], **changes: Any) -> Experiment:
    """The same as it is read to be tuned."""
    return from_dict(tunable(*methods, **changes), timed=False)


def made(experiment: Experiment, root: Path) -> Path:
    """Its tune folder, not played yet."""
    trials.create(experiment, root)
    return root


def result_of(root: Path) -> tuple[bytes, bytes]:
    """What a tuning leaves."""
    return (root / trials.TRIALS).read_bytes(), (root / trials.READY).read_bytes()
