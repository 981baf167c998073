"""Simulation from Python: one algorithm on one population, without a configuration or files."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Generic

from pydantic import BeforeValidator
from torch import nn

from fedtide.config import Data, Forgetting, StopAt
from fedtide.config.schema import as_stop_at
from fedtide.core.base import Algorithm, S, Scores
from fedtide.core.errors import Words, refused
from fedtide.core.memory import MemoryStore
from fedtide.data.partition import Groups, HeldOutClients, OneGroup, Partition, Split
from fedtide.data.population import Population
from fedtide.data.population_builder import build
from fedtide.data.rows import Rows, with_target
from fedtide.data.shift import Shift
from fedtide.data.sources.arrays import from_arrays
from fedtide.data.targets import TARGET_WORDS, Setting
from fedtide.data.transforms import Prepare
from fedtide.draw.tables import Library, frame
from fedtide.evaluate.judge import NOT_JUDGED, Judge, views
from fedtide.evaluate.metrics import Metric, metrics_for
from fedtide.evaluate.rounds import rows_of_scores
from fedtide.fields.types import Count, Spelled, Strict, Whole, as_written
from fedtide.fleets.devices import Devices, Steady
from fedtide.fleets.engines import Host, LocalEngine
from fedtide.fleets.simulated import SimulatedFleet
from fedtide.learn.local import check_fit, check_parts, question_cost
from fedtide.learn.target import CLASSES
from fedtide.learn.task import TURNS, Task
from fedtide.runs.build import read_metric, rows_for
from fedtide.runs.runner import probe_of, run_rounds
from fedtide.runs.trained import Models


def population(
    x: Any,
    y: Any = None,
    partition: Partition | None = None,
    *,
    client: Any = None,
    domain: Any = None,
    time: Any = None,
    held_out: Any = None,
    groups: Groups = OneGroup(),
    split: Split = Split(),
    held_out_clients: HeldOutClients = HeldOutClients(),
    shift: Shift = Shift(),
    seed: int = 0,
    transforms: Sequence[Prepare] = (),
    public_samples: int = 0,
    target: Setting = CLASSES,
) -> Population:
    """Build a population from arrays, or from the rows of a source or of a table.

    Args:
        x: (rows, ...) features; uint8 pictures are read as 0..1. They are not copied, so do not change them later. Or
            Rows with all of their columns, such as those of `ft.data.table(frame)`.
        y: (rows,) labels from 0, or names; with a `target` numbers, or (rows, labels) of several labels at once.
        partition: how rows are dealt to clients; None means natural if `client` is given, else iid to 100 clients.
        client: (rows,) natural clients.
        domain: (rows,) which of several data sets or modes a row is from.
        time: (rows,) seconds, dates, or ISO 8601.
        held_out: (rows,) true for rows of a test set.
        groups: which rows belong to which group of clients.
        split: train, validation and test part of each client.
        held_out_clients: clients for evaluation only.
        shift: who, what, how.
        seed: of everything that is drawn.
        transforms: changes of images before a model sees them, in order.
        public_samples: number of training rows that no client holds; `population.public_features()` returns them.
        target: what rows are labeled with: "classes", "number", "quantiles", "counts" or "labels", or one of
            `fedtide.data` such as `Number(loss="huber")`. Rows of a table have their own. A task of such a population
            is `ft.Task(model, target=population.target)`, of a model with `population.target.width` outputs.

    >>> import torch
    >>> population(torch.randn(100, 3), torch.arange(100) % 2, "iid").registered
    100
    >>> population(torch.randn(100, 3), torch.arange(100) % 2, client=torch.arange(100) % 5).registered
    5
    >>> population(torch.randn(100, 3), torch.randn(100), "iid", target="number")
    Population(100 clients, 100 rows of shape (3,), numbers)
    >>> from fedtide.data import table
    >>> population(table({"a": [1.5, 2.0] * 9, "user": ["ann"] * 9 + ["bob"] * 9, "label": [0, 1] * 9}, quiet=True))
    Population(2 clients, 18 rows of shape (1,), 2 classes)
    """
    options = {key: value for key, value in locals().items() if key in PopulationOptions.model_fields}
    columns = {"y": y, "client": client, "domain": domain, "time": time, "held_out": held_out}
    if isinstance(x, Rows):
        if target != CLASSES:
            raise refused("population: target", target, "none beside Rows, which have their own")
        for name in (name for name, column in columns.items() if column is not None):
            raise refused(
                f"population: {name}",
                type(columns[name]).__name__,
                "none beside Rows, which have their own; a partition is named, partition=...",
            )
        rows = x
    elif y is None:
        raise refused("population: y", None, "labels; or rows alone: ft.data.table(frame), or ft.data.stack(dataset)")
    else:
        setting = as_written("population", PopulationOptions, {"target": target})["target"]
        rows = with_target(from_arrays("arrays", x, **columns, measured=setting != CLASSES), setting)
    if rows.classes < 2 and rows.value is None and rows.steps is None:
        raise refused("population: y", Words(f"{len(rows)} labels of one class"), "labels of two classes or more")
    options.pop("target")
    return build(rows, **as_written("population", PopulationOptions, options | {"transforms": tuple(transforms)}))


class PopulationOptions(Data):
    """Arguments of `population` that are read as in a file."""

    shift: Shift = Shift()
    seed: Whole = 0


class SimulationOptions(Strict):
    """Arguments of `simulate` that are read as in a file."""

    rounds: Count = 1
    seed: Whole = 0
    eval_every: Count = 8
    threads: Count = 1
    forgetting: Forgetting | None = None
    devices: Annotated[Devices, Spelled] = Steady()
    stop_at: Annotated[StopAt | None, BeforeValidator(as_stop_at)] = None


@dataclass(frozen=True, repr=False, eq=False)
class Result(Generic[S]):
    """Result of a simulation.

    Args:
        state: the last state.
        lines: the record of each round.
        rounds: how many rounds were done at each evaluation.
        accuracy: the accuracy then, of held-out clients if there are any, else on the clients' own test rows.
        forgetting: lines of `forgetting.jsonl`, one per round in which it was measured.
        trained: the trained models (`model(client=7)`, `predict(x)`); None if the algorithm has no task, for example
            one that ends in `with_cohort` does. A pickled result has none, because functions stay in their process.
    """

    state: S
    lines: list[dict[str, Any]]
    rounds: list[int]
    accuracy: list[float]
    forgetting: list[dict[str, Any]] = field(default_factory=list)
    trained: Models | None = None

    def __copy__(self) -> "Result[S]":
        return replace(self)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"trained": None}  # functions of an algorithm stay in their process

    @property
    def model(self) -> nn.Module:
        """Module that predicts as the model of a new client does, in evaluation mode, for use without this package.

        Its outputs are logits, or with another target what `population.target.read_outputs` reads.

        Raises:
            FedtideError: the algorithm has no task, the result was pickled, or which network predicts depends on rows.
        """
        if self.trained is None:
            but = "the algorithm has no task, or the result was pickled"
            allowed = "task.module(result.state.weights), or with_cohort in the algorithm"
            raise refused("Result.model", None, allowed, but)
        return self.trained.model()

    def __repr__(self) -> str:
        last = [f"accuracy={self.accuracy[-1]:.4g}"] if self.accuracy else []
        return f"Result({', '.join([f'rounds={len(self.lines)}', *last])})"

    def _repr_html_(self) -> str:
        from fedtide.report.notebook import render_simulation  # draws, which playing alone does not wait for

        return render_simulation(self)

    def frame(self, library: Library | None = None) -> Any:
        """Return a data frame with a row for each evaluation, by whose rows were judged (`view`).

        Its `round` is the number of the round, from 0, before the evaluation; `Result.rounds` has one more.

        Args:
            library: "pandas" or "polars"; by default pandas, or polars if only that is installed.
        """
        return frame(list(rows_of_scores(self.lines)), library)


def simulate(
    algorithm: Algorithm[S],
    population: Population,
    *,
    rounds: int,
    seed: int = 0,
    eval_every: int = 8,
    threads: int = 1,
    forgetting: Forgetting | None = None,
    devices: Devices = Steady(),
    stop_at: StopAt | float | None = None,
    metrics: Sequence[Metric | Callable[[Scores], float] | str] = (),
) -> Result[S]:
    """Run one algorithm on one population, in this process, and keep nothing on disk.

    Args:
        algorithm: made by its function, for example `fedavg(task, LocalTrainer(lr=0.1))`.
        population: who holds what.
        rounds: how many.
        seed: of everything.
        eval_every: rounds between evaluations.
        threads: torch threads of one client's work.
        forgetting: at which rounds local client forgetting is measured, and on whose rows.
        devices: how long clients take on the simulated clock. Training costs one pass over a client's rows if the
            algorithm does not declare its cost.
        stop_at: end once an evaluation reaches this accuracy, or so many in a row do.
        metrics: for `Result.lines`: functions of scores, "macro-f1", "auc" or "perplexity", or a `Metric`.

    >>> import torch
    >>> from fedtide import Task
    >>> from fedtide.algorithms import fedavg
    >>> from fedtide.cohorts import Arrivals
    >>> people = population(torch.randn(100, 3), torch.arange(100) % 2, client=torch.arange(100) % 5)
    >>> task = Task(lambda: torch.nn.Linear(3, 2))
    >>> result = simulate(fedavg(task, cohort=Arrivals(3)), people, rounds=4, eval_every=2)
    >>> result.rounds, len(result.accuracy)
    ([2, 4], 2)
    >>> result.model(torch.zeros(5, 3)).shape
    torch.Size([5, 2])
    """
    options = {key: value for key, value in locals().items() if key in SimulationOptions.model_fields}
    with TURNS:
        return _simulate(algorithm, population, options, metrics)


def _simulate(algorithm: Algorithm[S], population: Population, options: Mapping[str, Any], metrics: Any) -> Result[S]:
    if not isinstance(algorithm, Algorithm):
        raise refused("simulate.algorithm", algorithm, "an Algorithm, such as ft.algorithms.fedavg(task)")
    if not isinstance(population, Population):
        raise refused("simulate.population", population, "a Population, made by ft.population")
    read = SimulationOptions(**as_written("simulate", SimulationOptions, options))
    devices, forgetting, rounds, seed = read.devices, read.forgetting, read.rounds, read.seed
    population.check(rounds)
    check_parts(devices.partial_work, algorithm.options.get("local"), algorithm.name)
    if algorithm.task is not None:
        population = replace(population, rows=rows_for(population.rows, algorithm.task.build))
    if algorithm.check is not None:
        algorithm.check(population)
    judged, notes = views(population), list[str]()
    if isinstance(task := algorithm.options.get("task"), Task):
        notes = check_fit(task, *population.few(), algorithm.options.get("local"))
    elif algorithm.task is not None:  # it may have branches, with outputs of its own
        algorithm.task.rebuild()
    for line in notes if judged else [*notes, NOT_JUDGED]:
        print(f"fedtide: {line}", file=sys.stderr)
    host = Host(algorithm, population, seed, MemoryStore(None), devices.partial_work)
    engine = LocalEngine(host, read.threads)
    probed = () if forgetting is None else forgetting.rounds
    late = [number for number in probed if number >= rounds]
    if late:
        raise refused("forgetting.rounds", late[0], f"0 to {rounds - 1}")
    clock = devices.clock(population.registered, seed, None, question_cost(algorithm))
    fleet = SimulatedFleet.of(host, engine, clock, probed)
    reported = [*metrics_for(TARGET_WORDS[population.target.kind])]
    if isinstance(metrics, str) or not isinstance(metrics, Sequence):
        raise refused("simulate.metrics", metrics, "a list, such as ['auc']")
    for number, metric in enumerate(metrics):
        more = read_metric(metric, key := f"simulate.metrics[{number}]", population.target)
        taken = {"accuracy", "skill", "loss", "rows", *(other.name for other in reported)}
        for name in (one.name for one in more if one.name in taken):
            raise refused(f"{key}.name", name, "a name that no other measure has")
        reported += more
    judge = Judge(algorithm, fleet, judged, metrics=reported)
    probe = probe_of(forgetting, fleet, seed, "client")
    record = None
    lines, at, accuracy, forgotten = [], [], [], []
    for record in run_rounds(judge, rounds=rounds, seed=seed, every=read.eval_every, probe=probe, stop_at=read.stop_at):
        lines.append(record.line)
        if record.forgetting is not None:
            forgotten.append(record.forgetting)
        if record.accuracy is not None:
            at.append(record.step.moment.round + 1)
            accuracy.append(record.accuracy)
    assert record is not None
    step, trained = record.step, None
    if algorithm.task is not None:
        trained = Models(title=algorithm.name, host=host, task=algorithm.task, state=step.state, moment=step.moment)
    return Result(step.state, lines, at, accuracy, forgotten, trained)
