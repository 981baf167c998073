"""Everything that an experiment names, built once before anything is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from fedtide.cohorts import PickedBy
from fedtide.config import Experiment, Method, points
from fedtide.core.base import Moment, Scores
from fedtide.core.errors import refused, within
from fedtide.core.memory import MemoryStore
from fedtide.core.rng import Rng
from fedtide.data.population import Population
from fedtide.data.targets import TARGET_WORDS
from fedtide.draw.prose import listed
from fedtide.evaluate.forgetting import owners_of
from fedtide.evaluate.judge import views
from fedtide.evaluate.metrics import metrics_for
from fedtide.fleets import ray_cluster
from fedtide.fleets.local_engine import Host
from fedtide.fleets.scoring import POOLED
from fedtide.fleets.stacked_engine import why_alone
from fedtide.learn.device import CPU, check_gain, find_device
from fedtide.learn.local import LocalTrainer, check_fit
from fedtide.runs import build
from fedtide.runs.private import plan_of, sums_of
from fedtide.wire.clip import check_form
from fedtide.wire.vector import Form


@dataclass(frozen=True)
class Preflight:
    """What a trial of an experiment found.

    forms: of all that its methods sum, where sums are private. alone: methods that a stacked fleet does not stack, and
    why.
    """

    forms: frozenset[Form] = frozenset()
    alone: Mapping[str, str] = field(default_factory=dict)

    @property
    def said(self) -> str:
        """A line about methods that a stacked fleet does not stack, "" where there are none."""
        told = [f"{name} ({why})" for name, why in self.alone.items()]
        return f"not stacked, one client after the other: {listed(told)}" if told else ""


def preflight(experiment: Experiment, where: str = "experiment", *, fresh: bool = True) -> Preflight:
    """Build everything that an experiment names once, before anything is written.

    Args:
        experiment: what is to be run.
        where: how messages call it.
        fresh: read its data again, as files may have changed since this process last did.

    Raises:
        FedtideError: whatever would stop a run: missing or damaged data, a model that does not fit, too large a cohort.
    """
    if fresh:
        build.load_rows.cache_clear()
    _check_ray(experiment, where)
    _try_metrics(experiment)
    dealt, sums, tried = set[tuple[str, str]](), dict[str, tuple[Form, ...]](), _Tried()
    unstacked: dict[str, str] = {}
    for point in points(experiment, where):
        _check_clock(point.experiment, where)
        if point.experiment.precision == "bf16":
            check_gain(find_device(point.experiment.fleet.device))
        alone: dict[str, str] = {}
        for method in point.experiment.method:
            host = _build(point.experiment, method, tried)
            _check_bounds(point.experiment, method, host, sums)
            if point.experiment.fleet.kind == "stacked" and (why := why_alone(host)):
                alone[method.name] = why
        if len(alone) == len(point.experiment.method):
            first = point.experiment.method[0].name
            but = f"it cannot train that, as {alone[first]}"
            raise refused(f"method '{first}': fleet.kind", "stacked", "local, workers, ray", but)
        unstacked |= alone
        for method in point.experiment.method if point.experiment.data.seed is None else ():
            # The rows of every seed, as those that cannot be dealt would stop the runs hours later.
            shift = point.experiment.shift_of(method)
            key = point.experiment.data.model_dump_json(), repr(shift)
            if key not in dealt:
                dealt.add(key)
                for seed in point.experiment.seeds[1:]:
                    build.population_of(point.experiment, shift, seed)
    return Preflight(frozenset(form for forms in sums.values() for form in forms), unstacked)


@dataclass(frozen=True)
class _Tried:
    """What several methods and points have in common, so that it is built and tried once.

    fitted: of the model's runs on some rows. populations: the last two, as methods may be with and without a shift.
    """

    fitted: set[str] = field(default_factory=set)
    populations: dict[tuple[str, str, int], Population] = field(default_factory=dict)

    def population(self, experiment: Experiment, method: Method) -> Population:
        """Return the population that a method meets with the first seed."""
        shift, seed = experiment.shift_of(method), experiment.seeds[0]
        key = experiment.data.model_dump_json(), repr(shift), seed
        if key not in self.populations:
            made = build.population_of(experiment, shift, seed)
            for old in list(self.populations)[:-1]:
                del self.populations[old]
            self.populations[key] = made
        return self.populations[key]


def _build(experiment: Experiment, method: Method, tried: _Tried) -> Host:
    """Build a method with the first seed, and run its model on some rows as in training and in evaluation."""
    seed, rounds = experiment.seeds[0], experiment.rounds
    population = tried.population(experiment, method)
    host = build.host_of(experiment, method, seed, MemoryStore(None), population)
    population.check(rounds)
    build.clock_of(experiment, method, host.algorithm, population)
    local = method.settings().get("local")
    parts = (local.local_steps or local.epochs or 1) if isinstance(local, LocalTrainer) else 0
    if experiment.timing.partial_work and parts == 1:
        allowed = f"0, as the local work of method '{method.name}' is one epoch or step; or more of these"
        raise refused("devices.partial_work", experiment.timing.partial_work, allowed)
    task = build.task_of(experiment, method, population.rows)
    shard, classes = population.few()
    of_data = shard.x.shape, shard.y.shape, classes, experiment.data.transforms, experiment.data.directory
    of_task = experiment.model, experiment.precision, experiment.fleet, method.loss, method.init_from
    if (key := repr((of_data, of_task, local))) not in tried.fitted:
        check_fit(task, shard, classes, local, f"method '{method.name}'.local")
        tried.fitted.add(key)
    views(population, named=experiment.eval_splits)
    build.embedded_of(experiment, method, population)
    if experiment.forgetting is not None:
        owners_of(population, experiment.forgetting.part, None, seed)
    last = Moment(rounds - 1, rounds, 0.0)
    population.expected(last)
    population.arrivals(build.cohort_size(method, population.registered), last)
    cohort = build.cohort_of(method)
    if isinstance(cohort, PickedBy):
        with within(f"method '{method.name}'"):
            cohort.choose(population.clients, cohort.clients_per_round, Moment(0, rounds, 0.0), Rng(seed))
    return host


def _check_bounds(experiment: Experiment, method: Method, host: Host, known: dict[str, tuple[Form, ...]]) -> None:
    """Raise where a value that a method sums has no bound, or one that will not do; add its sums to those known."""
    wire = experiment.wire
    if wire is None or wire.privacy is None:
        return
    key = build.as_json(experiment.model_copy(update={"wire": None, "title": "", "method": (method,)}))
    if key not in known:
        known[key] = sums_of(method, host)
    with within(f"method '{method.name}'"):
        for form in known[key]:
            check_form(form, wire.privacy.clip)
        plan_of(wire.privacy, experiment, method, host).epsilon(1.0, wire.privacy.delta)


def _try_metrics(experiment: Experiment) -> None:
    """Call the person's own metrics on the scores of two clients."""
    ids, rows = torch.arange(2), torch.tensor([4.0, 4.0])
    moment = Moment(0, experiment.rounds, 0.0)
    pooled = {name: of(torch.eye(2).log(), ids) for name, of in POOLED.items()}
    scores = Scores(ids, rows, torch.tensor([1.0, 3.0]), rows, group=torch.zeros_like(ids), moment=moment)
    for metric in build.metrics_of(experiment)[len(metrics_for(TARGET_WORDS[experiment.data.target.kind])) :]:
        metric.of(replace(scores, pooled=pooled) if metric.needs else scores)


def _check_ray(experiment: Experiment, where: str) -> None:
    """Raise for a Ray cluster that does not answer, and for GPUs without an algorithm that computes on them."""
    fleet = experiment.fleet
    if fleet.kind != "ray":
        return
    ray_cluster.check(fleet.address)
    named = next((method.algorithm for method in experiment.method if ":" not in method.algorithm), None)
    if fleet.gpus and named is not None and fleet.device == CPU:
        allowed = "0, or fleet.device = 'cuda', or algorithms of your own alone (module:function)"
        raise refused(f"{where}: fleet.gpus", fleet.gpus, allowed, f"'{named}' computes on the CPU")


def _check_clock(experiment: Experiment, where: str) -> None:
    """Raise if a shift reads seconds and no devices say how long a round takes."""
    clocks = {experiment.shift_of(method).clock for method in experiment.method}
    if experiment.devices is None and "seconds" in clocks:
        allowed = "'rounds', or [devices], such as devices = 'steady'"
        raise refused(f"{where}: shift.clock", "seconds", allowed, "no [devices] says how long a round takes")
