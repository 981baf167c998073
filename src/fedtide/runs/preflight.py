"""Everything that an experiment names, built once before anything is written, and the disk space that it needs."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from fedtide.cohorts import PickedBy
from fedtide.config import Experiment, Local, Method, Workers, points
from fedtide.core.base import Moment, Scores
from fedtide.core.errors import FedtideError, Words, refused, within
from fedtide.core.memory import SMALL
from fedtide.core.rng import Rng
from fedtide.core.trees import size_in_bytes
from fedtide.data.population import Population
from fedtide.data.sources.cells import KEPT_APART
from fedtide.data.targets import TARGET_WORDS
from fedtide.draw.prose import counted, listed
from fedtide.evaluate.judge import NOT_JUDGED, View, views
from fedtide.evaluate.metrics import metrics_for
from fedtide.evaluate.probe import owners_of
from fedtide.evaluate.references import References, notes_on_missing
from fedtide.fleets import ray_pool
from fedtide.fleets.scoring import POOLED
from fedtide.fleets.stacked_engine import why_alone
from fedtide.learn.device import CPU, find_device, warn_of_bfloat
from fedtide.learn.local import check_fit, check_parts
from fedtide.runs import build
from fedtide.runs.folder import plan
from fedtide.runs.privacy import check_delta, check_scores, ledger_with, plan_of, sums_of, warn_of_blur
from fedtide.transforms import Watch
from fedtide.wire.clip import check_form
from fedtide.wire.vector import Form

WORTH_SAYING = 10**8
"""Bytes from which a person is told."""

LARGE = 10**7
"""Training rows of a round x parameters from which worker processes gain more than their messages cost."""

LONG = 10**10
"""Training rows of a run x parameters from which worker processes gain more than they take to start."""


@dataclass(frozen=True)
class Need:
    """Disk space that the clients of runs need in the end, in bytes, and how it comes about.

    For moments there is more, `most`: the memory of every client at the last checkpoint and now. Asked clients also
    have the next memory until the ask has ended.
    """

    size: int
    most: int
    how: str


@dataclass(frozen=True)
class Preflight:
    """Findings of a trial of an experiment.

    forms: of everything that its methods sum, if sums are private. alone: methods that a stacked fleet does not stack,
    and why. needs: disk space of each method at each point. epsilon: the largest one of a private run. notes: lines
    about references, models and test rows.
    """

    forms: frozenset[Form] = frozenset()
    alone: Mapping[str, str] = field(default_factory=dict)
    needs: Sequence[Need] = ()
    epsilon: float = 0.0
    notes: Sequence[str] = ()

    @property
    def messages(self) -> list[str]:
        """Lines for people: about methods that a stacked fleet does not stack, about models and test rows."""
        names = [f"{name} ({why})" for name, why in self.alone.items()]
        return [*([f"not stacked, one client after the other: {listed(names)}"] if names else []), *self.notes]

    @property
    def need(self) -> Need:
        """Disk space of all runs, explained by the largest part."""
        largest = max(self.needs, key=lambda need: need.size, default=Need(0, 0, ""))
        return Need(sum(need.size for need in self.needs), sum(need.most for need in self.needs), largest.how)


def preflight(experiment: Experiment, where: str = "experiment", *, fresh: bool = True) -> Preflight:
    """Build everything that an experiment names once, before anything is written.

    Args:
        experiment: to be run.
        where: its name in messages.
        fresh: read its data again, because files may have changed since this process last did.

    Raises:
        FedtideError: something would stop a run: missing or damaged data, a model that does not fit, a large cohort.
    """
    if fresh:
        build.read_again()
    _check_ray(experiment, where)
    _try_metrics(experiment)
    dealt, sums, tried = set[tuple[str, str]](), dict[str, tuple[Form, ...]](), _Tried()
    unstacked: dict[str, str] = {}
    needs: list[Need] = []
    epsilon = 0.0
    for point in (point.experiment for point in points(experiment, where)):
        if point.devices is None and "seconds" in {point.shift_of(method).clock for method in point.method}:
            allowed = "'rounds', or [devices], such as devices = 'steady'"
            raise refused(f"{where}: shift.clock", "seconds", allowed, "no [devices] says how long a round takes")
        if point.rounds == 0:
            _check_judging(point, where)
        check_scores(point, where)
        if point.precision == "bf16":
            warn_of_bfloat(find_device(point.fleet.device))
        unstacked_here: dict[str, str] = {}
        for method in point.method:
            built = _build(point, method, tried)
            epsilon = max(epsilon, _check_privacy(built, sums, tried.notes))
            needs += _needs(built)
            if point.fleet.kind == "stacked" and (why := why_alone(built.host)):
                unstacked_here[method.name] = why
        if len(unstacked_here) == len(point.method):
            first = point.method[0].name
            because = f"it cannot train this method, because {unstacked_here[first]}"
            raise refused(f"method '{first}': fleet.kind", "stacked", "local, workers, ray", because)
        unstacked |= unstacked_here
        for method in point.method if point.data.seed is None else ():
            # The rows of every seed: those that cannot be dealt would stop the runs hours later.
            shift = point.shift_of(method)
            key = point.data.model_dump_json(), repr(shift)
            if key not in dealt:
                dealt.add(key)
                for seed in point.seeds[1:]:
                    build.population_of(point, shift, seed)
    forms = frozenset(form for forms in sums.values() for form in forms)
    notes = [*notes_on_missing(experiment.references), *dict.fromkeys(tried.notes)]
    return Preflight(forms, unstacked, needs, epsilon, notes)


@dataclass(frozen=True)
class _Tried:
    """Parts that several methods and points share, built and tried once.

    fitted: keys of models that ran on some rows. populations: the last two, because methods may be with and without a
    shift. notes: lines about them.
    """

    fitted: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    populations: dict[tuple[str, str, int], Population] = field(default_factory=dict)

    def population(self, experiment: Experiment, method: Method) -> Population:
        """Return the population that a method meets with the first seed."""
        shift, seed = experiment.shift_of(method), experiment.seeds[0]
        key = experiment.data.model_dump_json(), repr(shift), seed
        if key not in self.populations:
            population = build.population_of(experiment, shift, seed)
            for old in list(self.populations)[:-1]:
                del self.populations[old]
            self.populations[key] = population
        return self.populations[key]


def _build(experiment: Experiment, method: Method, tried: _Tried) -> build.Built:
    """Build a method with the first seed, and run its model on some rows as in training and in evaluation."""
    seed, rounds = experiment.seeds[0], experiment.shift_rounds
    population = tried.population(experiment, method)
    built = build.built(experiment, method, seed, population=population)
    population.check(rounds)
    _ = built.clock
    local = method.settings().get("local")
    check_parts(experiment.timing.partial_work, local, f"method '{method.name}'")
    shard, classes = population.few()
    of_data = shard.x.shape, shard.y.shape, classes, experiment.data.transforms, experiment.data.directory
    of_task = experiment.model, experiment.precision, experiment.fleet, method.loss, method.init_from
    if (key := repr((of_data, of_task, local))) not in tried.fitted:
        tried.notes.extend(check_fit(built.task, shard, classes, local, f"method '{method.name}'.local"))
        tried.fitted.add(key)
    if method.init_from is None and any(isinstance(one, Watch) and one.train == "never" for one in method.transforms):
        tried.notes.append(f"method '{method.name}': a random model is watched, because no init_from names one")
    if population.rows.cut:
        rows, cut = population.rows, population.rows.cut
        tried.notes.append(f"{rows.name}: {cut:,} of {len(rows):,} rows are cut to {rows.shape[0]} tokens (context)")
    notes = [f"{population.rows.name}: {line}" for line in population.rows.said if line.endswith(KEPT_APART)]
    tried.notes.extend(notes)
    judged = views(population, named=experiment.eval_splits)
    if not judged:
        tried.notes.append(NOT_JUDGED)
    check_kept(experiment, judged)
    _ = built.embedded
    References(population, experiment.references)  # refuses rows that have none
    if experiment.forgetting is not None:
        owners_of(population, experiment.forgetting.part, None, seed)
    last = Moment(rounds - 1, rounds, 0.0)
    population.expected(last)
    population.arrivals(build.cohort_size(method, population.registered), last)
    cohort = build.cohort_of(method)
    if isinstance(cohort, PickedBy):
        with within(f"method '{method.name}'"):
            cohort.choose(population.clients, cohort.clients_per_round, Moment(0, rounds, 0.0), Rng(seed))
    return built


def check_kept(experiment: Experiment, judged: Sequence[View]) -> None:
    """Raise if the best models are to be kept, and no view is of the validation rows that say which these are."""
    if experiment.keep is not None and not any(view.name == "val" for view in judged):
        allowed = 'data.split.val above 0, with "val" in eval_splits if these are named; or no [keep]'
        raise refused("keep.best", experiment.keep.best, allowed, "no evaluation is on validation rows")


def _check_judging(experiment: Experiment, where: str) -> None:
    """Raise unless a study without rounds has a model to judge, and no calendar, privacy or table about training."""
    for method in experiment.method:
        if method.init_from is None:
            because = f"method '{method.name}' has no init_from, which names the model that is judged"
            raise refused(f"{where}: rounds", 0, "1 or more, or init_from in each method", because)
    if experiment.dated:
        raise refused(f"{where}: rounds", 0, "1 or more on a calendar", "each round is a window of time")
    if experiment.privacy is not None:
        raise refused(f"{where}: rounds", 0, "1 or more with wire.privacy", "scores are no private sums")
    for key in ("forgetting", "stop_at"):
        if getattr(experiment, key) is not None:
            raise refused(f"{where}: {key}", Words("a value"), "none with rounds = 0, because nothing is trained")


def _check_privacy(built: build.Built, forms: dict[str, tuple[Form, ...]], notes: list[str]) -> float:
    """Return epsilon of a private run, else 0; add its sums to those known, and a note if noise hides its scores.

    Raises:
        FedtideError: a value that the method sums has no bound, or a wrong one, or the budget promises nothing.
    """
    experiment, method, host = built.experiment, built.method, built.host
    if (privacy := experiment.privacy) is None:
        return 0.0
    check_delta(privacy, host.population.registered)
    key = build.as_json(experiment.model_copy(update={"wire": None, "title": "", "method": (method,)}))
    if key not in forms:
        forms[key] = sums_of(method, host)
    with within(f"method '{method.name}'"):
        for form in forms[key]:
            check_form(form, privacy.clip)
        plan = plan_of(privacy, experiment, method, host)
        if privacy.scores is not None:
            ledger, at_most = ledger_with(privacy, plan, experiment, host.algorithm), experiment.eval_clients
            most = max((len(view.clients) for view in views(host.population, at_most)), default=0)
            notes.extend(filter(None, [warn_of_blur(ledger, most)]))
            return ledger.whole
        return privacy.epsilon or plan.epsilon(privacy.multiplier or 1.0, privacy.delta)


def _try_metrics(experiment: Experiment) -> None:
    """Call the person's own metrics on the scores of two clients."""
    ids, rows = torch.arange(2), torch.tensor([4.0, 4.0])
    moment = Moment(0, experiment.shift_rounds, 0.0)
    pooled = {name: pool(torch.eye(2).log(), ids) for name, pool in POOLED.items()}
    scores = Scores(ids, rows, torch.tensor([1.0, 3.0]), rows, group=torch.zeros_like(ids), moment=moment)
    for metric in build.metrics_of(experiment)[len(metrics_for(TARGET_WORDS[experiment.data.target.kind])) :]:
        metric.of(replace(scores, pooled=pooled) if metric.needs else scores)


def _check_ray(experiment: Experiment, where: str) -> None:
    """Raise for a Ray cluster that does not answer, and for GPUs without an algorithm that computes on them."""
    fleet = experiment.fleet
    if fleet.kind != "ray":
        return
    ray_pool.check_address(fleet.address)
    named = next((method.algorithm for method in experiment.method if ":" not in method.algorithm), None)
    if fleet.gpus and named is not None and fleet.device == CPU:
        allowed = "0, or fleet.device = 'cuda', or algorithms of your own alone (module:function)"
        raise refused(f"{where}: fleet.gpus", fleet.gpus, allowed, f"'{named}' computes on the CPU")


def resolve_auto(experiment: Experiment) -> tuple[Experiment, str]:
    """Return the experiment with the fleet that "auto" stands for, and a line about it; any other as it is.

    A large run (`LARGE`, `LONG`) gets worker processes, any other one process. Several runs are played side by side.
    All of these give the same bits.
    """
    fleet = experiment.fleet
    if fleet.kind != "auto":
        return experiment, ""
    kind: type[Local | Workers] = Local
    runs = plan(experiment, Path())
    reason = f"{len(runs)} runs side by side"
    if len(runs) == 1:
        (run,) = runs
        built = build.built(run.experiment, run.method, run.seed)
        people = built.host.population
        share = build.cohort_size(run.method, people.registered) / people.registered
        rows = share * float(people.counts(people.clients, "train").sum())
        parameters = sum(value.numel() for value in built.task.init(Rng(0)).params.values())
        size = rows * parameters
        kind = Workers if size >= LARGE and size * experiment.rounds >= LONG else Local
        reason = f"{rows:,.0f} rows a round, {parameters:,} parameters"
    chosen = kind(workers=fleet.workers, channels_last=fleet.channels_last, device=fleet.device)
    return experiment.model_copy(update={"fleet": chosen}), f"fleet: {chosen.kind}, {reason}"


# -- disk space --------------------------------------------------------------------------------------------------------


def _needs(built: build.Built) -> list[Need]:
    """Return the disk space of a method's runs at a point; none if its clients keep no files."""
    experiment, method, host = built.experiment, built.method, built.host
    keeps = host.algorithm.traits.keeps
    size = keeps * size_in_bytes(built.task.init(Rng(0)).params) if keeps else 0
    if size <= SMALL:
        return []
    seeds, registered = len(experiment.seeds), host.population.registered
    asked = build.cohort_size(method, registered)
    clients = min(registered, experiment.rounds * asked)
    how = f"'{method.name}': {counted(seeds, 'seed')} x {clients} clients x {size / 1e6:.1f} MB"
    copies = 1 if experiment.keep is None else 1 + experiment.keep.best
    return [Need(seeds * copies * clients * size, seeds * ((1 + copies) * clients + asked) * size, how)]


def check_room(need: Need, root: Path) -> str:
    """Return a message before a run that needs much of the disk; "" if it needs little.

    Raises:
        FedtideError: the disk has too little.
    """
    place = next(folder for folder in (root, *root.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(place).free
    line = f"clients keep about {_bytes(need.size)} on disk, for moments up to {_bytes(need.most)} ({need.how})"
    if need.most > free:
        raise FedtideError(
            f"{root}: {line}, and {place} has {_bytes(free)} free; allowed: fewer clients, seeds or methods, or "
            "another --out"
        )
    return "" if need.size < WORTH_SAYING else f"{line}; {_bytes(free)} are free"


def _bytes(size: int) -> str:
    """Return bytes in MB or GB.

    >>> _bytes(2_100_000), _bytes(7_000_000_000)
    ('2.1 MB', '7.0 GB')
    """
    return f"{size / 1e6:.1f} MB" if size < 10**9 else f"{size / 1e9:.1f} GB"
