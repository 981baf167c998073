"""Small experiments with several methods and seeds, and what their folders hold."""

import copy
import json
from pathlib import Path
from typing import Any

from fedtide.config import Experiment, from_dict, slug
from fedtide.runs.experiment import execute
from fedtide.runs.folder import create
from fedtide.runs.runner import Run
from fedtide.tuning import tune
from helpers.toys import TOY

A = {"name": "A", "algorithm": "fedavg", "cohort": 4, "local": {"lr": 0.1, "batch_size": 4}}
STEADY = {**A, "name": "steady", "shift": {"who": "always"}}
MOMENTUM = {**A, "name": "momentum", "algorithm": "fedavgm"}
SCAFFOLD = {**A, "name": "scaffold", "algorithm": "scaffold"}


def study(*methods: dict[str, Any], **changes: Any) -> Experiment:
    """The toy experiment with these methods; tables are merged into the toy's."""
    return from_dict(raw(*methods, **changes))


def raw(*methods: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The same as nested dicts."""
    values = copy.deepcopy(TOY)
    for key, value in changes.items():
        both = isinstance(values.get(key), dict) and isinstance(value, dict)
        values[key] = {**values[key], **value} if both else value
    return {**values, "method": copy.deepcopy(list(methods) or [A])}


def finished(root: Path, experiment: Experiment) -> Path:
    """The folder of an experiment that was played, without a report, whose pictures take longer to draw."""
    create(experiment, root)
    assert execute(experiment, root, workers=1)
    return root


def run_of(experiment: Experiment, root: Path, seed: int = 0, method: int = 0, pool: Any = None) -> Run:
    """One run of an experiment, where a run folder has it."""
    chosen = experiment.method[method]
    return Run(experiment, chosen, seed, root / slug(chosen.name) / str(seed), pool)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """`rounds.jsonl`."""
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


def record_of(root: Path) -> dict[str, bytes]:
    """Everything below a folder that depends on the configuration alone."""
    found = {}
    for path in sorted(root.rglob("*")):
        told = path.name in ("rounds.jsonl", "clients.csv", "state.safetensors", "memory.safetensors", "config.toml")
        if told or path.parent.name in ("memory", "shift"):
            found[str(path.relative_to(root))] = path.read_bytes()
    return found


# -- small experiments with something to tune --------------------------------------------------------------------------


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
    tune.create(experiment, root)
    return root


def result_of(root: Path) -> tuple[bytes, bytes]:
    """What a tuning leaves."""
    return (root / tune.TRIALS).read_bytes(), (root / tune.READY).read_bytes()
