"""Tuning stage by stage, batch by batch: every method by itself, all with the same number of trials.

Optuna chooses the values of the next trials. It stores nothing: it is told all trials each time. They are in the
folder, and the whole memory of a tuning:

config.toml         the whole configuration, every default written out
environment.json    versions, machine, command
trials.jsonl        a line per trial of a method: its values, its accuracy at every evaluation, its outcome
tuned.toml          the experiment with the best values, ready to run
report.html         ranges, trials and best values
"""

import hashlib
import json
import math
import tempfile
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from shutil import rmtree
from statistics import fmean, median
from typing import Any, Literal

from pydantic import TypeAdapter
from rich.console import Console

from fedtide.config import (
    Experiment,
    Range,
    Tune,
    TuneStage,
    brief,
    from_dict,
    is_own,
    points,
    read,
    resolved,
    to_toml,
)  # fmt: skip
from fedtide.config.overrides import assign, locate, seed_list
from fedtide.core.atomic import append, write_text
from fedtide.core.base import Scores
from fedtide.core.errors import UNREADABLE, FedtideError, refused, uninstalled, unknown, within
from fedtide.core.memory import MemoryStore
from fedtide.core.record import read_lines, run_lock
from fedtide.core.rng import Rng
from fedtide.draw.prose import counted
from fedtide.evaluate.metrics import mean_of_last
from fedtide.runs.build import rows_of
from fedtide.runs.digest import digest_of
from fedtide.runs.display import TerminalBars
from fedtide.runs.experiment import in_parallel, started
from fedtide.runs.folder import check_entries, make_folder
from fedtide.runs.runner import GONE, evaluated, judge_of

TRIALS = "trials.jsonl"
READY = "tuned.toml"
COMMENT = "# Written by fedtide tune, with the values that it found.\n"
KNOWN = 4
"""Number of finished trials from which a median is trusted."""

WARM_UP = 0.25
"""Share of the rounds in which no trial is pruned, so that slow learners get a chance."""
DIGITS = 4
"""Significant digits of a searched number; a narrow range has more. All of them would make files hard to read."""

Bounds = dict[int, dict[str, dict[int, float]]]
"""Accuracy below which a trial is pruned, by seed, point of the sweep, and rounds done."""
Place = tuple[str, ...]
"""Path of a value in the tables of an experiment."""
Placed = list[tuple[Place, Any]]
"""Places and their values."""

FIXED = ("name", "algorithm", "shift", "safe", "transforms")
"""Keys of a method that no search may change, so that all compared methods meet the same data."""

NETWORK = "model"
"""Table of the network that all methods share. Sizes that one method finds go to all of them."""

USUAL_TRIALS = 20
"""Trials of a method, if none are set."""
NEAR = 0.05
"""Share of a range within which a value counts as lying at its edge."""


# -- stages ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parameter:
    """A value that is searched with one method.

    key: key in the file. place: path of the value, in this method or in the network that all methods share. also: other
    paths that the found value is written to. range: searched range. where: name of the range in messages.
    """

    key: str
    place: Place
    also: tuple[Place, ...]
    range: Range
    where: str

    @property
    def name(self) -> str:
        """Key within the method, or of the network."""
        return ".".join(self.place[2:] if self.place[0] == "method" else self.place)


@dataclass(frozen=True)
class Search:
    """Search for one method in one stage, independent of other methods."""

    stage: str
    method: str
    trials: int
    parameters: tuple[Parameter, ...]

    @property
    def title(self) -> str:
        """Name shown to people."""
        return f"{self.stage} · {self.method}" if self.stage else self.method

    def assigned(self, values: Mapping[str, Any]) -> Placed:
        """Return the places of a trial's values, with the values."""
        return [(place, values[p.key]) for p in self.parameters for place in (p.place, *p.also)]


def tune_of(experiment: Experiment, where: str) -> Tune:
    """Return the `[tune]` table of an experiment.

    Raises:
        FedtideError: it has none.
    """
    if experiment.tune is None:
        raise FedtideError(f"{where}: tune: missing; allowed: a table [tune] that says what is searched")
    return experiment.tune


def seeds_of(experiment: Experiment) -> tuple[int, ...]:
    """Return the seeds that a trial plays."""
    seeds = None if experiment.tune is None else experiment.tune.seeds
    return experiment.seeds[:1] if seeds is None else seeds


def digest_of_tuning(experiment: Experiment) -> str:
    """Return a short digest of everything that trials depend on; trials with another digest are refused."""
    base = from_dict(base_of(experiment), where="the configuration")
    seeds, played = seeds_of(experiment), [point.experiment for point in points(base)]
    runs = [digest_of(point, method, seed) for point in played for method in point.method for seed in seeds]
    content = [runs, base.late, tune_of(experiment, "the configuration").model_dump(mode="json")]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def with_budget(
    experiment: Experiment, where: str = "experiment", *, trials: int | None = None, seeds: str | None = None
) -> Experiment:
    """Return the experiment with another number of trials per method and stage, or other seeds (such as "0,1").

    Raises:
        FedtideError: it has no `[tune]` table, or the numbers are invalid.
    """
    staged = tune_of(experiment, where).stage
    sets = [f"tune.seeds={seed_list(seeds)}"] if seeds is not None else []
    if trials is not None:
        sets += [f"tune.trials={trials}", *([f"tune.stage.trials={trials}"] if staged else [])]
    return from_dict(resolved(experiment), where=where, sets=sets, timed=False) if sets else experiment


def stages(experiment: Experiment, where: str = "experiment") -> list[list[Search]]:
    """Return for each stage the search of each of its methods.

    Raises:
        FedtideError: a key, a method or a range is invalid.
    """
    return [_searches(stage, experiment, where) for stage in tune_of(experiment, where).stages()]


def names_of(experiment: Experiment) -> dict[str, str]:
    """Return the name of each method by that name, and by the written one if no other method has it."""
    written = [method.bare for method in experiment.method]
    shown = {method.name: method.name for method in experiment.method}
    return {name: full for name, full in zip(written, shown, strict=True) if written.count(name) == 1} | shown


def _searches(stage: TuneStage, experiment: Experiment, where: str) -> list[Search]:
    tune, methods = tune_of(experiment, where), names_of(experiment)
    swept = [key for keys in experiment.sweep for key in keys.split(", ")] if tune.over_sweep else []
    names = list(dict.fromkeys(methods.values()))
    at = f"{where}: tune.stage '{stage.name}'" if stage.name else f"{where}: tune"
    among = [methods.get(name, name) for name in stage.methods or ()]
    for name in among:
        if name not in names:
            raise unknown(f"{at}.methods", name, names, quoted=True)
    allowed = names if stage.methods is None else list(dict.fromkeys(among))
    shared = [key for key in stage.ranges if key.split(".")[0] == NETWORK]
    about = {key: _about(key, methods, f"{at}.ranges.{key}") for key in stage.ranges if key not in shared}
    scratch = base_of(experiment)
    for key in stage.ranges:
        with within(f"{at}.ranges"):
            assign(scratch, key.split("."), None)  # raises if there is no such method
    for key, (method, _) in about.items():
        if method is not None and method not in allowed:
            raise unknown(f"{at}.ranges.{key}", method, allowed, quoted=True)
    reached = [name for name in allowed if shared or any(method in (None, name) for method, _ in about.values())]
    if shared and len(reached) > 1:
        because = "because all methods share the network"
        raise FedtideError(f"{at}.ranges.{shared[0]}: allowed: one method, in `methods` of a [[tune.stage]], {because}")
    for name in allowed if stage.methods is not None else ():
        if name not in reached:
            raise refused(f"{at}.methods", name, "methods that a range of the stage is about")
    out = []
    for name in reached:
        parameters = []
        for key, range_ in stage.ranges.items():
            method, rest = about.get(key, (None, ()))
            if method in (None, name):
                label = f"{at}.ranges.{key}"
                also = tuple(_elsewhere(other, methods, label) for other in range_.also)
                if also and method is None and len(reached) > 1:
                    raise FedtideError(f"{label}.also: allowed with a range about one method, 'method.<name>.<key>'")
                place = tuple(key.split(".")) if key in shared else ("method", name, *rest)
                parameters.append(Parameter(key, place, also, range_, label))
        places = [parameter.place for parameter in parameters]
        if twice := next((place for i, place in enumerate(places) if place in places[:i]), None):
            raise FedtideError(f"{at}.ranges: two ranges are about '{'.'.join(twice)}'")
        for parameter in parameters:
            _refuse_swept(parameter, methods, swept)
        most = _combinations(parameters) if tune.sampler == "grid" else None
        count = stage.trials or tune.trials or most or USUAL_TRIALS
        if most is not None and count > most:
            raise refused(f"{at}.trials", count, f"1 to {most}", f"'{name}' has no more combinations")
        out.append(Search(stage.name, name, count, tuple(parameters)))
    return out


def _combinations(parameters: Iterable[Parameter]) -> int:
    for parameter in parameters:
        if parameter.range.choices is None:
            raise FedtideError(f"{parameter.where}: allowed: choices = [...], because the sampler is 'grid'")
    return math.prod(len(parameter.range.choices or ()) for parameter in parameters)


def _about(key: str, methods: Mapping[str, str], label: str) -> tuple[str | None, Place]:
    """Return the method that a key refers to (None for all) and the key within it."""
    first, *path = key.split(".")
    if first != "method" or not path or "" in path:
        keys = "'method.<key>' or 'method.<name>.<key>', or of the network, 'model.<key>'"
        raise FedtideError(f"{label}: allowed: keys of methods, {keys}: all methods of a comparison share the rest")
    method, rest = _parted(path, methods)
    if not rest or rest[0] in FIXED:
        first_key = "".join(rest[:1])
        raise refused(label, first_key, f"a key of the method other than {', '.join(FIXED)}")
    return method, rest


def _parted(path: Sequence[str], methods: Mapping[str, str]) -> tuple[str | None, Place]:
    """Return the method that a key below `method` is about (None for all), and the key within it."""
    names = list(dict.fromkeys(methods.values()))
    which, rest = locate(path, names)
    if which is None and not path[0].isdigit():  # a name as it is written in the file, without its form
        place, rest = locate(path, list(methods))
        which = None if place is None else names.index(methods[list(methods)[place]])
    return None if which is None else names[which], tuple(rest)


def _refuse_swept(parameter: Parameter, methods: Mapping[str, str], swept: Iterable[str]) -> None:
    """Raise if a key that trials set is swept, too: each point would set it anew."""
    for key in swept:
        first, *path = key.split(".")
        method, rest = _parted(path, methods) if first == "method" and path else (None, tuple(path))
        for root, *tuned in (parameter.place, *parameter.also) if rest or first == NETWORK else ():
            name = tuned.pop(0) if root == "method" else None
            length = min(len(rest), len(tuned))
            if root == first and method in (None, name) and list(rest[:length]) == tuned[:length]:
                raise FedtideError(f"{parameter.where}: the sweep sets '{key}', too; allowed: one of the two")


def _elsewhere(key: str, methods: Mapping[str, str], label: str) -> Place:
    method, rest = _about(key, methods, f"{label}.also: found '{key}'")
    if method is None:
        names = ", ".join(dict.fromkeys(methods.values()))
        raise refused(f"{label}.also", key, f"'method.<name>.<key>'; names: {names}")
    return ("method", method, *rest)


def base_of(experiment: Experiment) -> dict[str, Any]:
    """Return the tuned experiment as nested dicts, without the search.

    A sweep that trials do not play is left out, and so are claims about its points.
    """
    values = resolved(experiment)
    values.pop("tune", None)
    over_sweep = experiment.tune is not None and experiment.tune.over_sweep
    if not over_sweep and values.pop("sweep", None):
        values["claim"] = [c for c in values["claim"] if c.get("at") in (None, "chosen") and "beyond" not in c]
    return values


def with_values(experiment: Experiment, values: Placed) -> dict[str, Any]:
    """Return the tuned experiment with given values, as nested dicts that are not validated yet."""
    out = base_of(experiment)
    for place, value in values:
        assign(out, list(place), value)
    return out


def ends(experiment: Experiment, where: str = "experiment") -> Iterator[tuple[str, Experiment]]:
    """Yield the experiment at both ends of every range and every value of a list, with the methods concerned.

    A size of the network concerns all methods, because all get the size that one of them finds.

    Raises:
        FedtideError: a key does not exist, or a value is invalid.
    """
    for search in (search for stage in stages(experiment, where) for search in stage):
        for parameter in search.parameters:
            for value in parameter.range.edges():
                pairs = [(place, value) for place in (parameter.place, *parameter.also)]
                name = f"{parameter.where} = {value}"
                at_end = from_dict(with_values(experiment, pairs), where=name)
                for point in points(at_end, name):
                    methods = point.experiment.method
                    if parameter.place[0] != NETWORK:
                        methods = tuple(method for method in methods if method.name == search.method)
                    yield name, point.experiment.model_copy(update={"method": methods})


def at_edge(range_: Range, value: Any) -> Literal["low", "high"] | None:
    """Return the end of its range near which a found value lies, as better values may lie beyond; None for neither.

    >>> at_edge(Range(low=0.01, high=1.0, log=True), 0.9), at_edge(Range(low=0.0, high=1.0), 0.5)
    ('high', None)

    Of choices the least and the largest number are ends. A count of 1 is none, because nothing lies below.

    >>> at_edge(Range(choices=[0.1, 0.3, 1.0]), 1.0), at_edge(Range(choices=["sgd", "adam"]), "adam")
    ('high', None)
    """
    numbers = sorted({c for c in range_.choices or () if isinstance(c, int | float) and not isinstance(c, bool)})
    counts = range_.whole if range_.choices is None else all(isinstance(number, int) for number in numbers)
    if counts and value == 1 == (numbers[0] if numbers else range_.low):
        return None
    if range_.choices is not None:
        inside = len(numbers) < 2 or value not in (numbers[0], numbers[-1])
        return None if inside else "low" if value == numbers[0] else "high"
    if range_.low is None or range_.high is None or range_.low == range_.high:
        return None
    low, high, at = (math.log(v) if range_.log else float(v) for v in (range_.low, range_.high, value))
    share = (at - low) / (high - low)
    near = 1e-9 if range_.whole or range_.step else NEAR
    return "low" if share <= near else "high" if share >= 1 - near else None


# -- trials ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """Accuracy on validation rows with one seed, by rounds done.

    weights: what each evaluation counts for, if not all count alike. point: of the sweep, if trials play one.
    """

    seed: int
    rounds: tuple[int, ...]
    accuracy: tuple[float, ...]
    weights: tuple[float, ...] = ()
    point: str = ""

    def then(self, done: int, scores: Scores, *, dated: bool) -> "Curve":
        """Return the curve with one more evaluation; `dated`: rounds are windows of wall-clock time."""
        counted = scores.counted if dated else None
        weight = [number for number in (scores.reference, counted) if number is not None][:1]
        accuracy, weights = (*self.accuracy, scores.headline), (*self.weights, *weight)
        return Curve(self.seed, (*self.rounds, done), accuracy, weights, self.point)


@dataclass(frozen=True)
class Trial:
    """Line of `trials.jsonl`.

    number: from 0, within the stage and method. values: by the keys of the file. curves: one for each seed that was
    played, and for each point of the sweep if trials play one.
    by_seed: late accuracy of each seed, once all are played; accuracy: their mean. reason: cause of a failure. config:
    digest of the configuration that it belongs to.
    """

    stage: str
    method: str
    number: int
    values: Mapping[str, Any]
    state: Literal["finished", "pruned", "failed"] = "failed"
    curves: tuple[Curve, ...] = ()
    by_seed: tuple[float, ...] = ()
    accuracy: float | None = None
    reason: str = ""
    config: str = ""

    @property
    def shown(self) -> float | None:
        """Its accuracy, or that of its last evaluation; None without an evaluation."""
        values = [value for curve in self.curves for value in curve.accuracy if math.isfinite(value)]
        return values[-1] if values and self.accuracy is None else self.accuracy


def late(curves: Iterable[Curve], spans: Mapping[str, tuple[int, int]]) -> tuple[float, ...]:
    """Return the late accuracy of each seed, the number by which a sweep chooses its points; a mean over points.

    `spans` has by point the rounds that are late, and all rounds.
    """
    by_seed: dict[int, list[float]] = {}
    for curve in curves:
        window, end = spans[curve.point]
        accuracy = mean_of_last(curve.rounds, curve.accuracy, window, curve.weights or None, end)
        by_seed.setdefault(curve.seed, []).append(accuracy)
    return tuple(map(fmean, by_seed.values()))


def bounds(before: Sequence[Trial]) -> Bounds:
    """Return for each seed and evaluation the median accuracy of the earlier finished trials.

    Args:
        before: trials of the method in this stage that were asked for earlier, never those of the same batch, which may
            be missing yet.

    Returns:
        Empty if too few trials are finished.
    """
    finished = [trial for trial in before if trial.state == "finished"]
    if len(finished) < KNOWN:
        return {}
    out: Bounds = {}
    for at_seed in zip(*(trial.curves for trial in finished), strict=True):
        first, by_trial = at_seed[0], zip(*(curve.accuracy for curve in at_seed), strict=True)
        by_round = zip(first.rounds, by_trial, strict=True)
        out.setdefault(first.seed, {})[first.point] = {
            done: median(values) for done, values in by_round if done > WARM_UP * first.rounds[-1]
        }
    return out


def hopeless(curve: Curve, needed: Bounds) -> bool:
    """Tell whether a curve has never been as high as the median is now: such a trial is pruned."""
    bound = needed.get(curve.seed, {}).get(curve.point, {}).get(curve.rounds[-1])
    return bound is not None and max(curve.accuracy) < bound


def best_of(trials: Iterable[Trial]) -> Trial | None:
    """Return the finished trial with the highest accuracy, the first at a tie; None if none is finished."""
    finished = [trial for trial in trials if trial.accuracy is not None]
    return max(finished, key=lambda trial: trial.accuracy or 0.0) if finished else None


# -- the folder --------------------------------------------------------------------------------------------------------


def create(experiment: Experiment, root: Path, scale: str | None = None) -> None:
    """Create a new tune folder, with the scale of the file that is played, if any.

    Raises:
        FedtideError: something exists at `root`; it is left as it is.
    """
    make_folder(root, {"config.toml": to_toml(experiment), TRIALS: ""}, scale)


def load(root: Path, *, imports: bool = True) -> Experiment:
    """Return the experiment of a tune folder, as read for tuning; see `fedtide.config.read` for `imports`.

    Raises:
        FedtideError: there is something else in it than folders and files.
    """
    check_entries(root)
    return read(root / "config.toml", timed=False, imports=imports)


def read_trials(root: Path, planned: Sequence[Sequence[Search]], config: str | None) -> list[Trial]:
    """Return the recorded trials in the order of the searches; an incomplete last line is ignored.

    Args:
        root: the tune folder.
        planned: the searches of each stage.
        config: digest of the configuration that they have to belong to; None if it is not known.

    Raises:
        FedtideError: a line is damaged, or belongs to another configuration.
    """
    searches = {(search.stage, search.method): search for stage in planned for search in stage}
    trials = []
    for number, line in enumerate(read_lines(root, TRIALS), start=1):
        where = f"{root / TRIALS}: line {number}"
        try:
            trial = TypeAdapter(Trial).validate_python(line)
        except UNREADABLE:
            raise FedtideError(f"{where}: damaged: not a trial") from None
        if config not in (None, trial.config):
            raise FedtideError(
                f"{where} belongs to another configuration (digest {trial.config}, config.toml has {config}); restore "
                "config.toml or start a new tune folder"
            )
        search = searches.get((trial.stage, trial.method))
        keys = [] if search is None else [parameter.key for parameter in search.parameters]
        if search is None or not 0 <= trial.number < search.trials or sorted(trial.values) != sorted(keys):
            raise FedtideError(f"{where}: damaged: no trial that config.toml asks for")
        trials.append(trial)
    order = [*searches]
    return sorted(trials, key=lambda trial: (order.index((trial.stage, trial.method)), trial.number))


def write_trials(root: Path, trials: Sequence[Trial]) -> None:
    """Rewrite all lines."""
    write_text(root / TRIALS, "".join(f"{json.dumps(asdict(trial), allow_nan=False)}\n" for trial in trials))


@dataclass(frozen=True)
class Tuned:
    """Result of one method in one stage: search, every trial, and the best one (None if none is finished)."""

    search: Search
    trials: list[Trial]
    best: Trial | None


def read_tuning(root: Path) -> tuple[Experiment, list[list[Tuned]]]:
    """Return the experiment of a tune folder and, for each stage, the result of each method.

    Raises:
        FedtideError: the folder is not that of a tuning, or is damaged.
    """
    if not (root / TRIALS).is_file():
        raise FedtideError(f"{root}: not a tune folder (no {TRIALS} in it)")
    experiment = load(root, imports=False)
    planned = stages(experiment, str(root / "config.toml"))
    shipped = not any(is_own(method.algorithm) for method in experiment.method)
    trials = read_trials(root, planned, digest_of_tuning(experiment) if shipped else None)
    return experiment, [[tuned_of(search, trials) for search in stage] for stage in planned]


def tuned_of(search: Search, trials: Iterable[Trial]) -> Tuned:
    """Return the result of a method in a stage from the trials of all, in order."""
    played = [trial for trial in trials if (trial.stage, trial.method) == (search.stage, search.method)]
    played.sort(key=lambda trial: trial.number)
    return Tuned(search, played, best_of(played))


# -- play --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """A trial as sent to a process.

    trial: without an outcome. experiment: nested dicts with the trial's values. seeds: seeds to play. bounds: see
    `bounds`. folder: location for large client memory while the trial runs.
    """

    trial: Trial
    experiment: dict[str, Any]
    seeds: tuple[int, ...]
    bounds: Bounds
    folder: str


def play_trial(call: Call, stop: Callable[[], bool]) -> Generator[int, None, Trial | None]:
    """Play a trial: yield the rounds done with each seed, return the trial with its outcome.

    `stop` is asked after every round; a stopped trial has no outcome (None).
    """
    trial = call.trial
    try:
        played = points(from_dict(call.experiment, where="the trial"))
    except FedtideError as error:
        return replace(trial, reason=str(error))
    parts = [(seed, point) for seed in call.seeds for point in played]
    for seed, part in parts:
        point, experiment = part.name, part.experiment
        rows_of(experiment, seed)  # outside the try: unreadable data are no fault of a trial's values
        curve, before = Curve(seed, (), (), point=point), trial.curves
        try:
            for rounds, scores in judged(experiment, trial.method, seed, Path(call.folder)):
                yield rounds
                if stop():
                    return None
                if scores is None:
                    continue
                if not math.isnan(scores.headline):  # else nobody was there to be judged
                    curve = curve.then(rounds, scores, dated=experiment.dated)
                trial = replace(trial, curves=(*before, curve))
                last = rounds == experiment.rounds and len(trial.curves) == len(parts)
                if not last and curve.rounds and hopeless(curve, call.bounds):
                    return replace(trial, state="pruned")
        except FedtideError as error:
            at = f"seed {seed}, {point}" if point else f"seed {seed}"
            return replace(trial, curves=(*before, curve), reason=f"{at}: {error}")
    spans = {part.name: (part.experiment.late, part.experiment.rounds) for part in played}
    by_seed = late(trial.curves, spans)
    if any(map(math.isnan, by_seed)):
        return replace(trial, reason="no client was judged: there are no validation rows")
    return replace(trial, state="finished", by_seed=by_seed, accuracy=fmean(by_seed))


def judged(experiment: Experiment, name: str, seed: int, folder: Path) -> Iterator[tuple[int, Scores | None]]:
    """Yield after every round the rounds done and, at evaluations, the scores on validation rows.

    Raises:
        FedtideError: the values are invalid for the method, or training diverged to non-finite numbers.
    """
    method = next(method for method in experiment.method if method.name == name)
    judged_on_val = experiment.model_copy(update={"eval_splits": ("val",), "forgetting": None})
    if not folder.is_dir():
        raise FedtideError(f"{folder}: {GONE}")
    with tempfile.TemporaryDirectory(dir=folder, prefix="memory-") as memory:
        judge = judge_of(judged_on_val, method, seed, MemoryStore(Path(memory)))
        for step, views in evaluated(judge, rounds=experiment.rounds, seed=seed, every=experiment.eval_every):
            done = step.moment.round + 1
            if any(len(query.refused) and not len(query.answered) for query in judge.fleet.queries):
                raise FedtideError(f"in round {done} no client's answer was finite")
            last = None
            for _, scores, _ in views or ():
                if not math.isfinite(float(scores.loss.sum())):
                    raise FedtideError(f"after {done} rounds the loss on validation rows is not finite")
                last = scores
            yield done, last


def execute(
    experiment: Experiment, root: Path, *, workers: int | None = None, display: "LiveTuning | None" = None
) -> bool:
    """Play the remaining trials of a tune folder and write `tuned.toml`.

    The result depends neither on the number of processes nor on stops: every trial follows from the trials of earlier
    batches alone.

    Args:
        experiment: as in the folder's config.toml.
        root: the tune folder.
        workers: number of processes; None means the experiment's `fleet.workers`, or the machine's cores.
        display: shows progress.

    Returns:
        False if a person stopped it; every finished trial is saved then.

    Raises:
        FedtideError: all trials of a method failed, or the folder's trials belong to another configuration.
    """
    imported_optuna()
    display = display or LiveTuning(Console(quiet=True))
    searches, tune = stages(experiment, str(root / "config.toml")), tune_of(experiment, str(root))
    config = digest_of_tuning(experiment)
    with run_lock(root, "config.toml"), ExitStack() as stack:
        check_entries(root, played=True)
        for memory in root.glob("memory-????????"):  # of killed trials, as tempfile names it
            rmtree(memory)
        trials = read_trials(root, searches, config)
        wanted = sum(search.trials for stage in searches for search in stage)
        display.begin(wanted, len(trials))
        stack.callback(display.end)
        most = max(len(stage) for stage in searches) * tune.parallel_trials
        pool, stop = stack.enter_context(started(experiment, workers, most if len(trials) < wanted else 0))
        best: Placed = []
        for stage in searches:
            for first in range(0, max(search.trials for search in stage), tune.parallel_trials):
                batch = [
                    (search, call)
                    for search in stage
                    for call in _next_calls(experiment, root, tuned_of(search, trials), first, best)
                ]
                for message in in_parallel(play_trial, [call for _, call in batch], pool, stop):
                    if message.final and message.value is not None:
                        trial = replace(message.value, config=config)
                        trials.append(trial)
                        append(root / TRIALS, json.dumps(asdict(trial), allow_nan=False))
                        display.trial(trial, tuned_of(batch[message.call][0], trials))
                if stop.asked:
                    return False
            best += [pair for search in stage for pair in _best_values(root, tuned_of(search, trials))]
        write_trials(root, read_trials(root, searches, config))  # in order, whichever was done first
        ready = from_dict(with_values(experiment, best), where=str(root / READY))
        write_text(root / READY, f"{COMMENT}{brief(ready)}\n")
    return True


def _next_calls(experiment: Experiment, root: Path, tuned: Tuned, first: int, best: Placed) -> Iterator[Call]:
    """Yield the missing trials of a batch, which follow from the trials of earlier batches and stages alone."""
    tune, search = tune_of(experiment, str(root)), tuned.search
    done = {trial.number: trial for trial in tuned.trials}
    numbers = range(first, min(first + tune.parallel_trials, search.trials))
    if all(number in done for number in numbers):
        return
    before = [done[number] for number in range(first)]
    ended = bounds(before) if tune.pruning else {}
    for number, values in zip(numbers, asked(search, before, tune, len(numbers)), strict=True):
        if number not in done:
            trial = Trial(search.stage, search.method, number, values)
            with_trial = with_values(experiment, [*best, *search.assigned(values)])
            yield Call(trial, with_trial, seeds_of(experiment), ended, str(root))


def _best_values(root: Path, tuned: Tuned) -> Placed:
    """Return the places and values of a method's best trial."""
    if tuned.best is None:
        reason = f"all {len(tuned.trials)} trials of '{tuned.search.title}' failed; the first: {tuned.trials[0].reason}"
        raise FedtideError(f"{root}: {reason}")
    return tuned.search.assigned(tuned.best.values)


# -- the search --------------------------------------------------------------------------------------------------------


def imported_optuna() -> Any:
    """Return the Optuna module.

    Raises:
        FedtideError: it is not installed.
    """
    try:
        import optuna
    except ImportError:
        raise uninstalled("fedtide tune: the search needs Optuna", "tune") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # else every batch is a line
    return optuna


def asked(search: Search, before: Sequence[Trial], tune: Tune, count: int) -> list[dict[str, Any]]:
    """Return the values of the next `count` trials of a method, by the keys of the file.

    They depend on the seed and the earlier trials alone, not on the process or on stops in between.

    Args:
        search: the method and its parameters.
        before: all its earlier trials of this stage, in order.
        tune: sampler and seed.
        count: number of trials asked together; none of them knows the results of the others.
    """
    optuna = imported_optuna()
    space = {parameter.key: distribution(parameter.range) for parameter in search.parameters}
    number = Rng(tune.seed).at("tune", search.stage, search.method, len(before)).number % 2**32
    with warnings.catch_warnings(action="ignore", category=optuna.exceptions.ExperimentalWarning):
        if tune.sampler == "random":
            sampler = optuna.samplers.RandomSampler(seed=number)
        elif tune.sampler == "grid":
            sampler = optuna.samplers.BruteForceSampler(seed=number)
        else:
            sampler = optuna.samplers.TPESampler(seed=number, n_startup_trials=tune.startup_trials, constant_liar=True)
        study = optuna.create_study(direction="maximize", sampler=sampler)
        study.add_trials([_as_optuna(search, trial, space) for trial in before])
        asked_for = [study.ask(space).params for _ in range(count)]
    return [{p.key: _value(p.range, params[p.key]) for p in search.parameters} for params in asked_for]


def distribution(range_: Range) -> Any:
    """Return a range as an Optuna distribution; values of a list by index, so that tables can be among them."""
    kinds = imported_optuna().distributions
    if range_.choices is not None:
        return kinds.CategoricalDistribution(tuple(range(len(range_.choices))))
    low, high = range_.edges()
    if range_.whole:
        return kinds.IntDistribution(low, high, log=range_.log, step=int(range_.step or 1))
    return kinds.FloatDistribution(low, high, log=range_.log, step=range_.step)


def _value(range_: Range, value: Any) -> Any:
    """Return a value of an Optuna trial as it stands in a file."""
    if range_.choices is not None:
        return range_.choices[value]
    low, high = range_.edges()
    if range_.whole:
        return int(value)
    if range_.step:  # a digit less, and Optuna would not know the value again
        return min(float(f"{low + round((value - low) / range_.step) * range_.step:.15g}"), high)
    narrow = math.log10(max(abs(low), abs(high)) / (high - low)) if low < high else 0.0
    return min(max(float(f"{value:.{DIGITS + max(math.floor(narrow), 0)}g}"), low), high)


def _as_optuna(search: Search, trial: Trial, space: dict[str, Any]) -> Any:
    """Return a trial that was played, as an Optuna trial."""
    kinds = imported_optuna().trial
    lists = {parameter.key: parameter.range.choices for parameter in search.parameters}
    params = {
        key: value if (choices := lists[key]) is None else choices.index(value) for key, value in trial.values.items()
    }
    if trial.state == "finished":
        return kinds.create_trial(params=params, distributions=space, value=trial.accuracy)
    # A failed trial is told as pruned at once, so that the search avoids its values; Optuna ignores failures.
    curves = trial.curves if trial.state == "pruned" else ()
    seen = dict(enumerate(value for curve in curves for value in curve.accuracy))
    pruned = kinds.TrialState.PRUNED
    return kinds.create_trial(state=pruned, params=params, distributions=space, intermediate_values=seen)


# -- the display -------------------------------------------------------------------------------------------------------


class LiveTuning(TerminalBars):
    """Display of every finished trial with the best of its method so far."""

    def begin(self, trials: int, finished: int) -> None:
        """Start a tuning of `trials` trials, of which `finished` are done."""
        already = f", {finished} already done" if finished else ""
        self.say(f"{counted(trials, 'trial')}{already}")
        self.start(trials, "trials", finished, counted=True)

    def trial(self, trial: Trial, tuned: Tuned) -> None:
        """Show a finished trial of a method."""
        self.add(1)
        values = ", ".join(f"{_last(key)} {value}" for key, value in trial.values.items())
        shown = f"{100 * (trial.shown or 0.0):.1f} %"
        outcome = {"finished": shown, "pruned": f"pruned at {shown}", "failed": f"failed: {trial.reason}"}[trial.state]
        so_far = "" if tuned.best is None else f"; best so far {100 * (tuned.best.accuracy or 0.0):.1f} %"
        self.say(f"  {tuned.search.title}, trial {trial.number + 1} ({values}): {outcome}{so_far}")


def _last(key: str) -> str:
    """Return the last word of a dotted key, with the position behind it of a number in a list.

    >>> _last("model"), _last("model.channels.0")
    ('model', 'channels.0')
    """
    before, _, last = key.rpartition(".")
    return f"{before.rpartition('.')[2]}.{last}" if last.isdigit() else last
