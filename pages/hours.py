"""Work of an experiment, computed before a run: samples that clients train on, and processor hours.

A sample is one row, forward and backward through one model. Training of methods is counted, as their traits say it, and
training before evaluations, of ways to personalize. Evaluation itself and questions beside training are not counted.
pages/rows.toml has the rows of published data, pages/steps.json the measured time of a sample (bench/steps.py).
"""

import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedtide.config import Experiment, Method, maker, points, resolved
from fedtide.core.base import Algorithm
from fedtide.data.rows import Rows
from fedtide.data.transforms import shape_after
from fedtide.learn.local import question_cost
from fedtide.models import LSTM, MLP
from fedtide.runs.build import cohort_size, rows_of, task_of
from fedtide.transforms.transform import apply

HERE = Path(__file__).parent
AHEAD = ("domain-mixture", "cluster-drift")
"""Shifts that say how many rows a client holds."""
TRIALS = 20
"""Trials of a stage of a tuning, if nothing else is said."""
PUBLIC = 100
"""Public rows that a method may look at before it begins."""
RATES = re.compile(r'"(lr|lam|eps)": [^,}]*')
"""Values that grids are about and that change no number of samples, as JSON."""
SMALL = MLP(hidden=(2,))
"""A network that is built soon: how many samples a method trains on does not depend on the network."""


class Step(NamedTuple):
    """A kind of step: the model as JSON, the shape and classes of rows, and rows in a batch."""

    model: str
    shape: tuple[int, ...]
    classes: int
    batch: int


class Source(NamedTuple):
    """A row of a source, the number of its training rows and of its natural clients, and if it has test rows."""

    rows: Rows
    train: int
    clients: int
    tests: bool


def hours(experiment: Experiment) -> float:
    """Compute the processor hours of the training of all methods, points and seeds, or of all trials of a tuning."""
    return sum(samples * microseconds()[step] for step, samples in passes(experiment)) / 3.6e9


@cache
def microseconds() -> dict[Step, float]:
    """Read the measured time of a sample for each kind of step."""
    lines = json.loads((HERE / "steps.json").read_text(encoding="utf-8"))["steps"]
    return {step_of(line): line["microseconds"] for line in lines}


def step_of(line: dict[str, Any]) -> Step:
    """Read a kind of step."""
    return Step(line["model"], tuple(line["shape"]), line["classes"], line["batch"])


def passes(experiment: Experiment) -> Iterator[tuple[Step, float]]:
    """Yield the kind of step and the number of samples of each method at each point, with all seeds or trials."""
    counted: dict[str, tuple[Step, float]] = {}
    for point in points(experiment):
        whole = resolved(point.experiment)
        for method, written in zip(point.experiment.method, whole["method"], strict=True):
            about = [whole["data"], whole["model"], whole["shift"]["what"], whole["rounds"], written]
            key = RATES.sub("", json.dumps(about))
            if key not in counted:
                counted[key] = count_samples(point.experiment, method)
            step, samples = counted[key]
            yield step, samples * runs(point.experiment, method)


def runs(experiment: Experiment, method: Method) -> int:
    """Count the runs of a method at a point: one for each seed, or of a tuning one for each trial and seed."""
    tune = experiment.tune
    if tune is None:
        return len(experiment.seeds)
    stages = [stage for stage in tune.stages() if stage.methods is None or method.name in stage.methods]
    return sum(stage.trials or tune.trials or TRIALS for stage in stages) * len(tune.seeds or (0,))


def count_samples(experiment: Experiment, method: Method) -> tuple[Step, float]:
    """Count the samples that a method trains on in a run.

    Experts and gates that clients of AEM train for themselves are not counted. Other training is counted at the network
    of the experiment, also if a method names one for itself.
    """
    source, clients, count = source_of(experiment), registered(experiment), rows_held(experiment)
    algorithm, rows = build(experiment, method, source.rows), torch.tensor([count])
    local = algorithm.options.get("local") or algorithm.options["solver"]
    rounds, asked = experiment.rounds, cohort_size(method, clients)
    if method.algorithm == "centralized":
        trained, asked = local.samples(rows * clients), 1
    else:
        trained = question_cost(algorithm)("train", rows)
    if method.algorithm == "local":
        rounds = 1  # clients train again only if their rows change
    judged = clients * ceil(experiment.rounds / experiment.eval_every)
    fits = sum(float(solver.samples(rows)) for solver in solvers(method)) * judged
    shape = tuple(shape_after(experiment.data.transforms, source.rows.name, source.rows.shape))
    model = json.dumps(resolved(experiment)["model"], sort_keys=True)
    step = Step(model, shape, source.rows.classes, min(local.batch_size or count, count))
    return step, float(trained) * asked * rounds + fits


def build(experiment: Experiment, method: Method, rows: Rows) -> Algorithm[Any]:
    """Build a method on a small network; files that it names need not be there."""
    model = LSTM(embedding=2, hidden=2) if rows.steps else SMALL
    small = experiment.model_copy(update={"model": model})
    options = {name: without_files(value) for name, value in method.settings().items()}
    task = task_of(small, method, rows, torch.zeros(PUBLIC, *rows.shape))
    algorithm = replace(maker(method.algorithm)(task, **options), options={"task": task, **options})
    return apply(algorithm, *(transform for transform in method.all_transforms if transform.kind != "personalized"))


def without_files(part: Any) -> Any:
    """Return a part of a configuration that names no weights."""
    if isinstance(part, tuple):
        return tuple(map(without_files, part))
    if not is_dataclass(part):
        return part
    changed = {field.name: without_files(getattr(part, field.name)) for field in fields(part) if field.init}
    return replace(part, **changed | ({"weights": None} if changed.get("weights") else {}))


def solvers(method: Method) -> Iterator[Any]:
    """Yield local training that a client does before each evaluation, with each of its ways to personalize."""
    for transform in method.all_transforms:
        for way in (getattr(transform, "way", None), *getattr(transform, "others", ())):
            yield from (getattr(way, name) for name in ("solver", "tuning") if hasattr(way, name))


def registered(experiment: Experiment) -> int:
    """Count the clients that take part."""
    partition = experiment.data.partition
    if hasattr(partition, "of"):
        return sum(part.clients for part in partition.of.values())
    return getattr(partition, "clients", None) or source_of(experiment).clients


def rows_held(experiment: Experiment) -> int:
    """Count the training rows of a client, in the mean; of a stream as if all had come."""
    data, what, source = experiment.data, experiment.shift.what, source_of(experiment)
    if what.kind in AHEAD:
        return int(what.samples)
    parts = list(data.partition.of.values()) if hasattr(data.partition, "of") else [data.partition]
    fixed = [part.samples for part in parts if getattr(part, "samples", None)]
    natural = getattr(data.partition, "kind", "natural") == "natural"
    copies = len(getattr(data.partition, "angles", "1"))
    count = copies * source.train / (source.clients if natural else registered(experiment))
    if fixed:
        count = min(count, sum(fixed) / len(fixed))
    count = min(count, getattr(data.source, "max_samples", None) or count)
    default = 0.0 if source.tests or data.held_out_clients.clients else 0.2
    test = default if data.split.test is None else data.split.test
    return max(round(count * (1 - data.split.val) * (1 - test)), 1)


def source_of(experiment: Experiment) -> Source:
    """Return the published numbers of an experiment's data, or the data that ship."""
    source = experiment.data.source
    tables = [table for part in getattr(source, "sources", [source]) if (table := published(part))]
    if not tables:
        rows = rows_of(experiment, 0)
        tests = 0 if rows.held_out is None else int(rows.held_out.sum())
        return Source(rows, len(rows) - tests, len(rows.client_names), tests > 0)
    first, disjoint = tables[0], getattr(source, "labels", "") == "disjoint"
    classes, steps = sum(table["classes"] for table in tables) if disjoint else first["classes"], first.get("steps")
    x = torch.zeros(1, *first["shape"], dtype=torch.int64 if steps else torch.uint8)
    rows = Rows(source.kind, x, torch.zeros((1, steps) if steps else 1, dtype=torch.int64), classes)
    return Source(rows, sum(t["train"] for t in tables), first.get("clients", 0), first.get("tests", True))


def published(source: Any) -> dict[str, Any] | None:
    """Return the line of pages/rows.toml for a source that reads files; None for one that ships."""
    path = getattr(source, "path", None)
    return None if path is None else published_rows()[path if isinstance(path, str) else path[0]]


@cache
def published_rows() -> dict[str, dict[str, Any]]:
    """Read pages/rows.toml."""
    return tomllib.loads((HERE / "rows.toml").read_text(encoding="utf-8"))
