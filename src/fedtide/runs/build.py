"""Construction of the parts that a configuration names: population, task, algorithm, host.

Everything is built from JSON values alone, so any process can build the same.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedtide.cohorts import Arrivals, Picking, Poisson
from fedtide.config import Data, Experiment, Method, from_dict, maker, resolved
from fedtide.config.schema import OwnMetric
from fedtide.core.base import Algorithm, Scores
from fedtide.core.checkpoint import load_weights
from fedtide.core.errors import FedtideError, quote, refused
from fedtide.core.memory import MemoryStore
from fedtide.core.rng import Rng
from fedtide.data.population import Population
from fedtide.data.population_builder import build
from fedtide.data.rows import GeneratedRows, Rows, check_classes, with_target
from fedtide.data.shift import Shift
from fedtide.data.sources import Domains
from fedtide.data.sources.files import find
from fedtide.data.sources.texts import Texts
from fedtide.data.targets import TARGET_WORDS
from fedtide.data.transforms import apply_transforms, shape_after
from fedtide.evaluate.judge import Embedded
from fedtide.evaluate.metrics import SHIPPED, Metric, bits_per_byte, metrics_for
from fedtide.fields.shapes import fields_of, marks_of
from fedtide.fields.types import WEIGHTS, IsFile
from fedtide.fields.user_code import build_part, call, called_itself, imported
from fedtide.fleets.devices import Clock
from fedtide.fleets.engines import Host
from fedtide.fleets.liars import with_liars
from fedtide.learn.device import CPU, find_device, name_of
from fedtide.learn.local import question_cost
from fedtide.learn.module_check import Embeddings, check_module
from fedtide.learn.target import CLASSES, Classes, Target
from fedtide.learn.task import Task
from fedtide.models.adapters import adapter_files, load_adapters
from fedtide.models.networks import initialize
from fedtide.models.tokenizing import bytes_of_tokens, check_tokenizer, load_tokenizer
from fedtide.models.transformer import Transformer
from fedtide.transforms.transform import apply
from fedtide.wire.clip import check_private
from fedtide.wire.pipeline import FLOATING, check_wire


def place(path: str, directory: Path | None, key: str, mark: IsFile) -> str:
    """Return the place of a file: below the data directory, or as it is written.

    Args:
        path: the file as the configuration names it.
        directory: the configured data directory, if any.
        key: configuration key, for the error.
        mark: the mark of the key's type.

    Raises:
        FedtideError: there is no such file.
    """
    file = find(path, directory, key, hint=mark.hint)
    return path if file == Path(path).expanduser() else str(file.absolute())


def located(part: Any, directory: Path | None, key: str, places: list[str] | None = None) -> Any:
    """Return a part of a configuration in which each value marked as a file is the file's place.

    Args:
        part: an ingredient, which may hold others; any other value is returned as it is.
        directory: the configured data directory, if any.
        key: configuration key of the part, for errors.
        places: a list to which every place is added.
    """
    if isinstance(part, tuple):
        return tuple(located(item, directory, f"{key}[{n}]", places) for n, item in enumerate(part))
    changed: dict[str, Any] = {}
    kind: Any = type(part)
    marks = marks_of(kind, IsFile)
    for name in fields_of(kind):
        path = value = getattr(part, name)
        inside = f"{key}.{name}"
        if name not in marks:
            path = located(value, directory, inside, places)
        elif value is not None:
            path = place(value, directory, inside, marks[name])
            if places is not None:
                places.append(path)
        if path is not value:
            changed[name] = path
    return replace(part, **changed) if changed else part


def as_json(experiment: Experiment) -> str:
    """Return an experiment as text; equal experiments have equal text."""
    return json.dumps(resolved(experiment), sort_keys=True)


@lru_cache(maxsize=4)
def _experiment(text: str) -> Experiment:
    return from_dict(json.loads(text), where="the resolved configuration")


@lru_cache(maxsize=2)
def load_rows(data: str, seed: int) -> Rows | GeneratedRows:
    """Load the samples that a source, as JSON, and a seed name; a process keeps the last ones."""
    parsed = Data.model_validate(json.loads(data))
    directory = parsed.folder
    source: Any = parsed.source
    if isinstance(parsed.target, Classes):
        rows = source.load(directory, seed)
    elif source.measures:
        rows = with_target(source.load(directory, seed, measured=True), parsed.target)
    else:
        but = f"rows of source '{source.kind}' have no other labels"
        raise refused("data.target", "one without classes", "'classes'", but)
    if isinstance(rows, Rows):
        check_classes(rows)
    return rows


def read_again() -> None:
    """Let the next rows be read from files, which may have changed since this process last read them."""
    load_rows.cache_clear()


def rows_of(experiment: Experiment, seed: int) -> Rows | GeneratedRows:
    """Load the samples, once per process for all seeds and points unless the source itself is drawn.

    Each call has the model look at two rows if they are integers.
    """
    data = experiment.data.model_dump(mode="json", include={"source", "directory", "target"})
    data_seed = experiment.data.seed if experiment.data.seed is not None else seed
    rows = load_rows(json.dumps(data, sort_keys=True), data_seed if experiment.data.source.drawn else 0)
    model = model_of(experiment)
    if isinstance(model, Transformer):
        for texts in texts_in(experiment):
            check_tokenizer(texts.folder(experiment.data.folder), model.folder)
            if (texts.label is None) != (model.head == "next-token"):
                allowed = "'next-token'" if texts.label is None else "'classification'"
                but = f"data.source has {'no' if texts.label is None else 'a'} label"
                raise refused("model.head", model.head, allowed, but)
    return rows_for(rows, partial(model.build, rows.shape, rows.target.width or rows.classes))


def texts_in(experiment: Experiment) -> list[Texts]:
    """Return the sources of texts: that of the experiment, or those of its domains."""
    source = experiment.data.source
    parts = source.sources if isinstance(source, Domains) else (source,)
    return [part for part in parts if isinstance(part, Texts)]


def model_of(experiment: Experiment) -> Any:
    """Return the network of an experiment, which finds its files."""
    return located(experiment.model, experiment.data.folder, "model")


def rows_for(rows: Rows | GeneratedRows, build: Callable[[], nn.Module]) -> Rows | GeneratedRows:
    """Return rows with integers as floats, unless the model takes integers alone, such as one with an Embedding.

    Args:
        rows: features of any type.
        build: returns a fresh module.

    Raises:
        FedtideError: it returns no module, or one that cannot be trained.
    """
    if not isinstance(rows, Rows) or rows.x.dtype != torch.int64 or rows.steps is not None:
        return rows
    few = rows.x[:2]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        module = build()
        check_module(module)
        module.eval()
        if not _takes(module, few.float()):
            embeds = any(isinstance(layer, Embeddings) for layer in module.modules())
            if embeds or _takes(module, torch.zeros_like(few)):  # 0 is an id of every vocabulary
                return rows
    return rows.in_floats


def _takes(module: nn.Module, x: Tensor) -> bool:
    """Tell whether a module has an answer to rows."""
    try:
        module(x)
    except Exception:  # whatever a layer raises for another type
        return False
    return True


def population_of(experiment: Experiment, shift: Shift, seed: int) -> Population:
    """Build the population of a method."""
    data = experiment.data
    rows = rows_of(experiment, seed)
    partition = located(data.partition, data.folder, "data.partition")
    dealt = (partition, data.groups, data.split, data.held_out_clients)
    who = located(shift.who, data.folder, "shift.who")
    shift = replace(shift, who=who, what=located(shift.what, data.folder, "shift.what"))
    return build(
        rows, *dealt, shift, seed, dealing=data.seed, transforms=data.transforms, public_samples=data.public_samples,
        without_clients=data.without_clients or (),
    )  # fmt: skip


def task_of(experiment: Experiment, method: Method, rows: Rows | GeneratedRows, public: Tensor | None = None) -> Task:
    """Build a method's task: model and loss; `public` are features that all clients may see."""
    prepare = experiment.data.transforms
    shape, width = shape_after(prepare, rows.name, rows.shape), rows.target.width or rows.classes
    make = partial(model_of(experiment).build, shape, width)
    first, _ = rows.take(torch.zeros(1, dtype=torch.int64))
    example = apply_transforms(prepare, first if first.dtype != torch.uint8 else first.float())
    bfloat = experiment.precision == "bf16"
    dtype = torch.float64 if experiment.precision == "fp64" else torch.float32
    last = experiment.fleet.channels_last
    key = f"method '{method.name}'.loss"
    loss = called_itself(method.loss, key) or build_part(method.loss, key, ())
    if not (callable(loss) or hasattr(loss, "prepare")):
        raise refused(f"{key}.function", loss, "a loss, or a function of outputs and labels")
    init: Any = getattr(experiment.model, "init", "torch")
    task = Task(
        make, loss, dtype, last, example, public, init_layers=partial(initialize, init=init), bfloat=bfloat,
        target=rows.target, device=find_device(experiment.fleet.device),
    )  # fmt: skip
    if method.init_from is None:
        return task
    path, key = Path(place_of_weights(method, experiment.data)), f"method '{method.name}'.init_from"
    if adapter_files(path):
        return replace(task, begin=load_adapters(path, task.scratch.module, task.init(Rng(0)), key))
    return replace(task, begin=load_weights(path, task.init(Rng(0)), key))


def place_of_weights(method: Method, data: Data) -> str:
    """Return the file or run folder that a method begins with."""
    assert method.init_from is not None
    return place(method.init_from, data.folder, f"method '{method.name}'.init_from", WEIGHTS)


def algorithm_of(method: Method, task: Task, directory: Path | None = None) -> Algorithm:
    """Build a method's algorithm, which finds its files and has its own cohort, if any."""
    where = f"method '{method.name}'"
    key = f"{where}.algorithm"
    options = {name: located(value, directory, f"{where}.{name}") for name, value in method.settings().items()}
    if "cohort" in options:
        options["cohort"] = cohort_of(method)
    with _of_method(method):
        algorithm = call(maker(method.algorithm), key, task, **options)
    if not isinstance(algorithm, Algorithm):
        raise FedtideError(f"{key}: '{method.algorithm}' returned {type(algorithm).__name__}, allowed: an Algorithm")
    algorithm = replace(algorithm, options={"task": task, **options})
    with _of_method(method):
        return apply(algorithm, *method.all_transforms)


@contextmanager
def _of_method(method: Method) -> Iterator[None]:
    """Prefix the keys of errors with the method: an algorithm does not know its name in the experiment."""
    try:
        yield
    except FedtideError as error:
        line = str(error)
        raise FedtideError(line if line.startswith("method ") else f"method '{method.name}'.{line}") from error


def metrics_of(experiment: Experiment) -> tuple[Metric, ...]:
    """Return the metrics of each evaluation: those of every experiment, and those that this one asks for.

    Raises:
        FedtideError: the module or the function of one cannot be found, or next tokens are not what is predicted.
    """
    metrics: list[Metric] = []
    for number, setting in enumerate(experiment.metrics):
        if setting.kind == "bits-per-byte":
            texts = next(iter(texts_in(experiment)), None)
            if texts is None or texts.label is not None:
                raise refused(f"metrics[{number}]", setting.kind, 'data.source.kind = "texts" without a label')
            tokenizer = load_tokenizer(texts.folder(experiment.data.folder), "data.source.tokenizer")
            metrics.append(bits_per_byte(bytes_of_tokens(tokenizer)))
            continue
        if not isinstance(setting, OwnMetric):
            metrics += SHIPPED[setting.kind]
            continue
        key = f"metrics[{number}]"
        value = partial(_valued, imported(setting.function, f"{key}.function"), key, setting.options)
        metrics.append(Metric(setting.key, value, setting.unit, needs=setting.needs or ""))
    return (*metrics_for(TARGET_WORDS[experiment.data.target.kind]), *metrics)


def read_metric(value: Any, key: str, target: Target) -> tuple[Metric, ...]:
    """Read a metric of Python: one as it is, a function of scores, or a name.

    >>> [metric.name for metric in read_metric("auc", "metrics[0]", CLASSES)]
    ['auc', 'auc_bound']
    """
    named = {name: metrics for name, metrics in SHIPPED.items() if name != "bits-per-byte"}  # whose tokens are a run's
    if isinstance(value, str) and value in named:
        metrics = named[value]
    elif isinstance(value, Metric):
        metrics = (value,)
    elif callable(value):
        name = getattr(value, "__name__", type(value).__name__)
        metrics = (Metric(name, partial(_valued, value, key, {})),)
    else:
        raise refused(key, value, f"a function of scores, a Metric, or {quote([*named])}")
    if target != CLASSES and (metrics in named.values() or metrics[0].needs):
        allowed = "metrics of your own, or classes"
        raise refused(key, metrics[0].name, allowed, f"the target is '{target.kind}'")
    return metrics


def _valued(function: Callable[..., Any], key: str, options: Mapping[str, Any], scores: Scores) -> float:
    """Return the number that a person's function makes of the scores of an evaluation."""
    value = call(function, f"{key}.options", scores, **options)
    try:
        return float(value)
    except (RuntimeError, TypeError, ValueError):
        raise refused(f"{key}.function", value, "a function that returns a number") from None


@dataclass(frozen=True)
class Built:
    """A method as it is played with one seed: its host, and the task (model and loss) that the host's algorithm has."""

    experiment: Experiment
    method: Method
    host: Host
    task: Task

    @cached_property
    def clock(self) -> Clock:
        """The clock of a run; the device of each client follows from the run's seed."""
        population, cost = self.host.population, question_cost(self.host.algorithm)
        return self.experiment.timing.clock(population.registered, population.seed, self.experiment.data.folder, cost)

    @cached_property
    def embedded(self) -> Embedded | None:
        """Features by which clients of a cluster are compared; None if only labels are.

        Raises:
            FedtideError: the network has no such layer, or rows are sequences.
        """
        embedding = self.experiment.embedding
        if embedding is None:
            return None
        if self.host.population.rows.steps is not None:
            raise refused("embedding", embedding.kind, "none, as rows are sequences")
        embedding = located(embedding, self.experiment.data.folder, "embedding")
        return Embedded(partial(embedding.of(self.task, "embedding"), None), embedding.distance)


def built(
    experiment: Experiment,
    method: Method,
    seed: int,
    memory: MemoryStore | None = None,
    population: Population | None = None,
) -> Built:
    """Build a method with everything that a process needs to play it; the population and a memory unless given."""
    if population is None:
        population = population_of(experiment, experiment.shift_of(method), seed)
    public = population.public_features() if len(population.public) else None
    task = task_of(experiment, method, population.rows, public)
    if population.device != task.device:
        population = replace(population, device=task.device)
    algorithm = algorithm_of(method, task, experiment.data.folder)
    if experiment.liars is not None:
        if experiment.liars.collude and experiment.wire is not None:
            but = "liars who tell each other their updates would be in its sums"
            raise refused("liars.attack", experiment.liars.attack.kind, "other attacks with [wire]", but)
        algorithm = with_liars(algorithm, experiment.liars, population.clients, seed)
    check_cohort(method, population)
    cohort = cohort_of(method)
    if algorithm.check is not None:
        with _of_method(method):
            algorithm.check(population)
    if method.decide_per == "oracle" and algorithm.adapt is not None:
        but = f"that joins rows of several clients, and '{method.algorithm}' predicts for each client alone"
        raise refused(f"method '{method.name}'.decide_per", "oracle", "client, batch, sample", but)
    wire = FLOATING
    if experiment.wire is not None:
        wire = experiment.wire.build()
        if wire.clip is not None and isinstance(cohort, Poisson):
            wire = replace(wire, divisor=cohort.clients_per_round)
        check_wire(wire, algorithm, cohort_size(method, population.registered), f"method '{method.name}'")
        if wire.clip is not None:
            check_private(wire.clip, algorithm, bool(task.init(Rng(0)).buffers), f"method '{method.name}'")
    host = Host(algorithm, population, seed, memory or MemoryStore(None), experiment.timing.partial_work, wire)
    return Built(experiment, method, host, task)


def host_of(
    experiment: Experiment,
    method: Method,
    seed: int,
    memory: MemoryStore | None = None,
    population: Population | None = None,
) -> Host:
    """Build the host, with which a process runs the clients of one run; see `built`."""
    return built(experiment, method, seed, memory, population).host


def cohort_of(method: Method) -> Any:
    """Return the cohort of a method, made by the user's function if it is their own; None if it has none."""
    cohort = method.settings().get("cohort")
    needs = [name for name in vars(Picking) if not name.startswith("_") and name != "select"]
    return build_part(cohort, f"method '{method.name}'.cohort", needs)


def check_cohort(method: Method, population: Population) -> None:
    """Raise if a method asks more clients in a round than there are."""
    cohort = cohort_of(method)
    size = None if cohort is None else cohort.clients_per_round
    if size is not None and size > population.registered:
        source = "of the source" if population.names else "(data.partition.clients)"
        allowed = f"at most {population.registered}, the registered clients {source}"
        key = "cohort" if cohort == Arrivals(size) else "cohort.clients_per_round"
        raise refused(f"method '{method.name}'.{key}", size, allowed)


def cohort_size(method: Method, registered: int) -> int:
    """Return the number of clients that a method asks in a round: as its cohort says, else all of them."""
    cohort = cohort_of(method)
    if cohort is None:
        return registered
    return max(cohort.clients_per_round or 0, min(cohort.asked(registered), registered))


def spec_of(experiment: Experiment, method: Method, seed: int, memory: Path | None) -> dict[str, Any]:
    """Return the spec from which another process builds the same host, on the device that was found here."""
    device: Any = find_device(experiment.fleet.device)
    fleet = replace(experiment.fleet, device=device)
    only: dict[str, Any] = {"method": (method,), "sweep": {}, "baseline": None, "references": (), "tune": None}
    single = experiment.model_copy(update=only | {"fleet": fleet})
    named = {} if device == CPU else {"device": name_of(device)}
    return named | {
        "make": f"{host_from.__module__}:{host_from.__name__}",
        "experiment": as_json(single),
        "seed": seed,
        "memory": None if memory is None else str(memory),
    }


def host_from(spec: Mapping[str, Any], name: str) -> Host:
    """Build the host of a spec in a process of its own, and set its number of torch threads.

    Raises:
        FedtideError: there is another device, which the digest of the run does not name.
    """
    experiment = _experiment(spec["experiment"])
    wanted, device = spec.get("device", CPU), name_of(find_device(experiment.fleet.device))
    if device != wanted:
        raise refused("fleet.device", device, wanted, "this worker's is another one than that of the run")
    torch.set_num_threads(experiment.fleet.threads)  # they change the last bits
    store = MemoryStore(None if spec["memory"] is None else Path(spec["memory"]), name=name)
    return host_of(experiment, experiment.method[0], spec["seed"], store)
