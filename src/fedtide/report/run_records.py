"""Run folders as arrays."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedtide.config import Experiment, Method
from fedtide.config.settings import Privacy
from fedtide.core.errors import UNREADABLE, FedtideError
from fedtide.core.record import ASKS, CLIENT_COLUMNS, FORGETTING, OTHERS, STOPPED, TRUTH, read_lines, view_of
from fedtide.core.trees import leaves
from fedtide.data.saved import labels_of, names_of, usual_class
from fedtide.data.shift import Shift
from fedtide.data.targets import TargetWords, target_words
from fedtide.draw.figures import Curve
from fedtide.evaluate.metrics import faded, mean_of_last
from fedtide.evaluate.rounds import score_in, weight_in, weight_of_group
from fedtide.runs.folder import Planned, load, plan, shift_file
from fedtide.wire.accounting import Plan, Sampling, Spent, total_epsilon

# -- lines of a record -------------------------------------------------------------------------------------------------

ROUND = {
    "round": int, "seconds": float | int, "down": int, "up": int, "refused": int, "participants": dict,
    "scores": dict, "facts": dict,
}  # fmt: skip
"""Kinds of the values in a line of `rounds.jsonl` without which there is no report."""


def _check(line: Any, kinds: dict[str, Any], where: str) -> None:
    """Raise a clear error for a line of another form."""
    present = {"scores": {}, "facts": {}, **line} if isinstance(line, dict) else {}
    wrong = [key for key, kind in kinds.items() if not isinstance(present.get(key), kind)]
    if not wrong:
        for view, score in present["scores"].items():
            if not (isinstance(score, dict) and isinstance(score.get("accuracy"), float | int | None)):
                wrong.append(view)
        wrong += ["a number"] * any(isinstance(leaf, int) and abs(leaf) >= 2**63 for leaf in leaves(line))
    if wrong:
        raise FedtideError(f"{where}: damaged: '{wrong[0]}' is missing or of another kind")


# -- records -----------------------------------------------------------------------------------------------------------

CLIENTS = {
    "held_out_clients": "held-out clients",
    "train_clients": "training clients",
    "val": "clients on their validation rows",
}
"""Clients of each view in words, the view of the headline first."""


Clock = Literal["rounds", "seconds"]
"""Unit of times: simulated seconds, or rounds if all rounds take equally long."""


def at(*keys: str) -> Callable[[dict[str, Any]], Any]:
    """Return a function that gets a value inside nested tables; None without it.

    >>> at("facts", "loss")({"facts": {"loss": 0.5}}), at("facts", "loss")({})
    (0.5, None)
    """

    def get(value: Any) -> Any:
        for key in keys:
            value = (value or {}).get(key)
        return value

    return get


Weigh = Callable[[dict[str, Any], str], float | None]
"""Weight of an evaluation, a line of the record, in a mean over several evaluations of a view."""


def weigher(keys: Sequence[str]) -> Weigh:
    """Return the weight of a number of the evaluations: that of a group has the group's weight.

    >>> weigher(["groups", "day"]) is weigher([]), weigher(["others", "own"]) is weigher([])
    (False, True)
    """
    return weight_of_group(keys[1]) if keys and keys[0] == "groups" else weight_in


@dataclass(frozen=True)
class RunRecord:
    """Record of one run, that is one method and one seed.

    rounds: rounds of the finished run; 0 for a run that goes on. other: name of another use of its models.
    """

    seed: int
    folder: Path
    rounds: int
    probed: tuple[int, ...] = ()
    shift: Path | None = None
    other: str = ""

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        """Lines of `rounds.jsonl`.

        Raises:
            FedtideError: the record lacks some of the rounds.
        """
        lines = read_lines(self.folder)
        for number, line in enumerate(lines, start=1):
            _check(line, ROUND, f"{self.folder / 'rounds.jsonl'}: line {number}")
        ended = len(lines) if lines and STOPPED in lines[-1] else self.rounds
        if self.rounds and [line.get("round") for line in lines] != list(range(ended)):
            raise FedtideError(f"{self.folder / 'rounds.jsonl'}: not the {self.rounds} rounds of a finished run")
        if not self.other:
            return lines
        return [{**line, "scores": line[OTHERS].get(self.other, {})} if OTHERS in line else line for line in lines]

    @cached_property
    def forgetting(self) -> list[dict[str, Any]]:
        """Lines of `forgetting.jsonl`; a round without a measurement has `skipped`, the reason.

        Raises:
            FedtideError: the record lacks some of the rounds that its configuration names.
        """
        lines = read_lines(self.folder, FORGETTING) if self.probed else []
        for number, line in enumerate(lines, start=1):
            if not (isinstance(line, dict) and "skipped" in line):
                _check(line, {"round": int, "known": bool}, f"{self.folder / FORGETTING}: line {number}")
        reached = [number for number in sorted(self.probed) if number < len(self.lines)]
        if [line.get("round") for line in lines] != reached:
            raise FedtideError(f"{self.folder / FORGETTING}: not the rounds that forgetting.rounds names")
        return lines

    @cached_property
    def labels(self) -> dict[str, Any] | None:
        """Counts of each class for some clients (`fedtide.data.saved.labels`); None if they were not saved."""
        return labels_of(self.shift) if self.shift is not None and self.shift.is_file() else None

    @cached_property
    def judged(self) -> list[dict[str, Any]]:
        """Lines of the evaluation rounds, with the views that have judged rows: real clients may all be away."""
        lines = [line for line in self.lines if line.get("scores")]
        return [line | {"scores": {view: entry for view, entry in line["scores"].items() if entry}} for line in lines]

    def entries(self, view: str) -> list[tuple[int, dict[str, Any]]]:
        """Return rounds done and the scores of each evaluation of one view."""
        return [(line["round"] + 1, line["scores"][view]) for line in self.judged if view in line["scores"]]

    def curve(self, view: str, value: Callable[[dict[str, Any]], Any]) -> Curve:
        """Return rounds done at each evaluation of one view, and a value of each."""
        pairs = [(after, value(scores)) for after, scores in self.entries(view)]
        pairs = [(after, number) for after, number in pairs if number is not None]
        return np.array([after for after, _ in pairs]), np.array([number for _, number in pairs], dtype=np.float64)

    def accuracy(self, view: str, group: str | None = None) -> Curve:
        """Return the accuracy curve of one view, of all rows or of one group of clients."""
        return self.curve(view, score_in if group is None else at("groups", group))

    def ends_judged(self, view: str) -> bool:
        """Tell whether the last evaluation has an accuracy: a mean over earlier ones would be of another model."""
        entries = self.entries(view)
        return bool(entries) and score_in(entries[-1][1]) is not None

    def weights_of(self, view: str, rounds: np.ndarray, weigh: Weigh = weight_in) -> np.ndarray | None:
        """Return the weights of evaluations in a mean, by default of the headline; None if all count the same."""
        weights = {line["round"] + 1: weigh(line, view) for line in self.judged if view in line["scores"]}
        values = np.array([weights.get(after) for after in rounds], dtype=np.float64)
        return values if len(values) and np.isfinite(values).all() and values.sum() > 0 else None

    def late(self, view: str, curve: Curve, window: int, weigh: Weigh = weight_in) -> float:
        """Return the mean of a curve over the evaluations in the last `window` rounds of the run; NaN without any.

        The curve may end before the run, if a group of clients has no rows any more.
        """
        return mean_of_last(*curve, window, self.weights_of(view, curve[0], weigh), self.end)

    @property
    def end(self) -> int | None:
        """Rounds done at the last evaluation; None without any."""
        return self.judged[-1]["round"] + 1 if self.judged else None

    def course(self, view: str, keys: Sequence[str] = ()) -> Curve:
        """Return the accuracy curve for moments, such as the worst one, or that of another score in the entries.

        If rounds are windows of wall-clock time the past fades in it, because a window may have a single row.
        """
        rounds, values = self.curve(view, at(*keys)) if keys else self.accuracy(view)
        dated = any("window" in line for line in self.judged)
        return rounds, faded(rounds, values, self.weights_of(view, rounds, weigher(keys))) if dated else values

    def times(self, clock: Clock) -> np.ndarray:
        """Return the time at the end of every round: simulated seconds, or how many rounds are done."""
        seconds = self.every_round(at("seconds"))
        return seconds if clock == "seconds" else np.arange(1.0, len(seconds) + 1)

    def every_round(self, value: Callable[[dict[str, Any]], Any]) -> np.ndarray:
        """Return a value of every round; NaN in rounds without one."""
        return np.array([value(line) for line in self.lines], dtype=np.float64)

    def every_row(self, value: Callable[[dict[str, Any]], Any]) -> np.ndarray:
        """Return a list of numbers of every round (rounds, longest); NaN beyond the end of a list."""
        values = [value(line) for line in self.lines]
        rows = [row if isinstance(row, list) else [] for row in values]
        table = np.full((len(rows), max(map(len, rows), default=0)), np.nan)
        for target, row in zip(table, rows, strict=True):
            target[: len(row)] = row
        return table

    def fact(self, name: str) -> np.ndarray:
        """Return a numeric fact of every round; NaN if it is missing or no number."""
        facts = map(at("facts", name), self.lines)
        return np.array([v if isinstance(v, int | float) else np.nan for v in facts], dtype=np.float64)

    def listed_fact(self, name: str) -> np.ndarray:
        """Return a fact that is a list, of every round (rounds, longest); NaN in rounds without one."""
        return self.every_row(at("facts", name))

    def seconds(self, key: str) -> float:
        """Sum wall-clock seconds over all rounds, of "seconds" (training) or "evaluation"."""
        return float(sum(self._timings(lambda line: line[key])))

    def clustering(self) -> list[float]:
        """Return the wall-clock seconds of the server's work on clusters, of each round with any."""
        return [seconds for seconds in self._timings(lambda line: line.get("clustering", 0.0)) if seconds]

    def _timings(self, value: Callable[[dict[str, Any]], float]) -> list[float]:
        path = self.folder / "timings.jsonl"
        try:
            return [float(value(line)) for line in read_lines(self.folder, path.name)]
        except UNREADABLE:
            raise FedtideError(f"{path}: a line is damaged") from None

    @cached_property
    def _clients(self) -> Any:
        """Table of `clients.csv` of pyarrow, null for empty cells."""
        from pyarrow import BufferReader, csv, float64, int64, string  # slow to import

        path = self.folder / "clients.csv"
        kinds = {**dict.fromkeys(CLIENT_COLUMNS, string()), **dict.fromkeys(("accuracy", "loss"), float64())}
        kinds |= dict.fromkeys(("round", "client", "rows", "slot", TRUTH), int64())
        cells = csv.ConvertOptions(column_types=kinds, null_values=[""], strings_can_be_null=True)
        try:
            source = path if path.is_file() else BufferReader(f"{','.join(CLIENT_COLUMNS)}\n".encode())
            table = csv.read_csv(source, parse_options=csv.ParseOptions(newlines_in_values=True), convert_options=cells)
            table.select(["round", "view", "client", "group", "rows", "accuracy", "slot"])
        except UNREADABLE:
            raise FedtideError(f"{path}: a line is damaged") from None
        return table

    def clients(self, view: str) -> Any:
        """Return the table of `clients.csv` of one view."""
        from pyarrow import compute

        return self._clients.filter(compute.equal(self._clients["view"], view_of(view, self.other)))

    @property
    def regrouped(self) -> bool:
        """True if clients have groups that drift, so that their group is the current one."""
        return TRUTH in self._clients.column_names


@dataclass(frozen=True)
class MethodRecord:
    """Record of one method, over seeds."""

    method: Method
    experiment: Experiment
    runs: list[RunRecord]
    unfinished: int

    @property
    def name(self) -> str:
        """Name in the experiment."""
        return self.method.name

    @property
    def federation(self) -> str:
        """Name of the method whose models these are another use of; empty if they are its own."""
        other = self.runs[0].other if self.runs else ""
        return self.name.rpartition(f", {other}")[0] + self.method.form if other else ""

    @property
    def shift(self) -> Shift:
        """Shift of the population and of clients' rows under this method."""
        return self.experiment.shift_of(self.method)

    @property
    def cycles(self) -> float | None:
        """Number of cycles of a blend of domains over the run; None without a blend."""
        return self.shift.what.rhythm(self.experiment.rounds).get("cycles")


@dataclass(frozen=True)
class ExperimentRecord:
    """Record of one experiment, or of one point of a sweep: every method."""

    point: str
    experiment: Experiment
    methods: list[MethodRecord]

    @cached_property
    def view(self) -> str:
        """Name of the headline view: held-out clients if there are any, else training clients on their test rows.

        Without test rows it is the view of their validation rows.
        """
        return next((view for view in CLIENTS if view in self._views), "held_out_clients")

    @cached_property
    def clustered(self) -> str:
        """Name of the view for clusters: training clients, who are many, if judged; else as `view`."""
        return "train_clients" if "train_clients" in self._views else self.view

    @cached_property
    def _views(self) -> set[str]:
        return {view for run in self.runs for line in run.judged for view in line["scores"]}

    @property
    def privacy(self) -> Privacy | None:
        """Differential privacy of the study; None without it."""
        return self.experiment.privacy

    @property
    def private(self) -> bool:
        """True if the study is private, so that numbers of single clients are left out."""
        return self.privacy is not None

    @cached_property
    def real(self) -> bool:
        """True if clients were real, and not simulated."""
        return any(read_lines(run.folder, ASKS) for run in self.runs)

    @cached_property
    def private_runs(self) -> list[list[Spent]]:
        """Releases of each run, whose models may have several uses."""
        runs = [run for run in self.runs if not run.other and "epsilon" in run.lines[-1]]
        assert self.privacy is not None
        return [_spent(run.lines[-1], len(run.lines), self.privacy.delta) for run in runs]

    @cached_property
    def spent(self) -> float | None:
        """Epsilon of all runs together, for one client; None if the library that tells it is not installed."""
        assert self.privacy is not None
        try:
            return total_epsilon(chain.from_iterable(self.private_runs), self.privacy.delta)
        except FedtideError:
            return None

    @property
    def runs(self) -> list[RunRecord]:
        """All runs of all methods."""
        return [run for method in self.methods for run in method.runs]

    @property
    def whose(self) -> str:
        """Description of the clients of the headline accuracy."""
        return CLIENTS[self.view]

    @cached_property
    def groups(self) -> list[str]:
        """Names of the groups of clients, judged or not; empty for a single group."""
        return self._saved_names("group_names")

    @cached_property
    def domains(self) -> list[str]:
        """Names of the domains of the source; empty for a single domain."""
        return self._saved_names("domain_names")

    def _saved_names(self, key: Literal["group_names", "domain_names"]) -> list[str]:
        saved = (names_of(run.shift, key) for run in self.runs if run.shift is not None and run.shift.is_file())
        return next((names for names in saved if len(names) > 1), [])

    @cached_property
    def target(self) -> TargetWords:
        """Words for the labels."""
        return target_words(self.experiment.data.target, next((usual_class(run.labels) for run in self.runs), ""))

    @property
    def timed(self) -> bool:
        """True if devices differ, or the shift reads seconds; clients that are real have no simulated clock."""
        if self.real:
            return False
        clocks = {method.shift.clock for method in self.methods}
        return self.experiment.timing.seconds is None or "seconds" in clocks

    @cached_property
    def clock(self) -> Clock:
        """Unit of times: rounds, unless rounds of a simulation differ in length."""
        if self.real:
            return "rounds"
        length = self.experiment.timing.seconds
        ends = [line for run in self.runs for line in run.lines[-1:]]
        if self.timed or length is None:
            return "seconds"
        equal = all(math.isclose(end["seconds"], length * (end["round"] + 1)) for end in ends)
        return "rounds" if equal else "seconds"

    @property
    def blended(self) -> bool:
        """True if clients hold a blend of domains that follows a schedule."""
        return any("domains" in line for run in self.runs for line in run.lines)

    @cached_property
    def dated(self) -> bool:
        """True if rounds are windows of wall-clock time."""
        return any("window" in line for run in self.runs for line in run.lines)

    @property
    def window(self) -> int:
        """Number of rounds over which late accuracy is averaged."""
        return self.experiment.late

    @property
    def span(self) -> str:
        """Rounds of the late means in words."""
        return span_of(self.window, self.experiment.rounds, stops=self.experiment.stop_at is not None)

    @property
    def averaged(self) -> str:
        """Kind of the late numbers, in words."""
        return averaged_over(self.window, self.span)

    @cached_property
    def targets(self) -> dict[int, float]:
        """Final accuracy of the baseline at each seed that has one, the target of all methods."""
        base = next((m for m in self.methods if m.name == self.experiment.baseline), None)
        runs = [] if base is None else [run for run in base.runs if run.ends_judged(self.view)]
        return {run.seed: float(run.course(self.view)[1][-1]) for run in runs}

    @property
    def names(self) -> list[str]:
        """Names of all methods."""
        return [method.name for method in self.methods]

    def curves(self, value: Callable[[RunRecord], Curve]) -> dict[int, list[Curve]]:
        """Return a curve of every run of each method with any values, by the number of the method."""
        curves = {number: [value(run) for run in method.runs] for number, method in self.numbered}
        return {number: c for number, c in curves.items() if any(np.isfinite(values).any() for _, values in c)}

    @cached_property
    def accuracies(self) -> dict[int, list[Curve]]:
        """Accuracy curve of every run of each method, by the number of the method."""
        return self.curves(lambda run: run.accuracy(self.view))

    @cached_property
    def noises(self) -> dict[int, list[Curve]]:
        """Standard deviation of the noise on each accuracy, as these; empty if scores have none."""
        return self.curves(lambda run: run.curve(self.view, at("noise")))

    @property
    def late_noise(self) -> float:
        """Largest standard deviation of the noise on the late accuracy of a run; 0 if scores have none."""
        ends = [noise[rounds > rounds[-1] - self.window] for of_runs in self.noises.values()
                for rounds, noise in of_runs if len(rounds)]  # fmt: skip
        return max((float(np.sqrt((noise**2).sum()) / len(noise)) for noise in ends), default=0.0)

    @property
    def played(self) -> int:
        """Rounds of the longest run: a target may end all runs early."""
        return max((len(run.lines) for run in self.runs), default=0)

    @property
    def numbered(self) -> list[tuple[int, MethodRecord]]:
        """Methods that have runs, with their numbers, which determine their colors."""
        return [(number, method) for number, method in enumerate(self.methods) if method.runs]


def _spent(last: dict[str, Any], times: int, delta: float) -> list[Spent]:
    """Return the releases of a run by its last line; its draws say the noise of a round, and how clients are drawn.

    If clients are drawn, evaluations are counted apart, because every client is in them.
    """
    draws = dict(last.get("sampled", {}))
    z = draws.pop("z", 1.0)
    sampling = Sampling(**draws) if draws else None
    if sampling is None or "scored" not in last:
        return [Spent(last["epsilon"], z, sampling, times)]
    return [Spent(Plan(times, times, sampling=sampling).epsilon(z, delta), z, sampling, times), Spent(last["scored"])]


def averaged_over(window: int, span: str) -> str:
    """Describe late numbers: means over several rounds, or those of the last one alone.

    >>> averaged_over(100, "the last 100 rounds"), averaged_over(1, "the last round")
    ('as means over the last 100 rounds', 'in the last round')
    """
    return f"as means over {span}" if window > 1 else f"in {span}"


def span_of(window: int, rounds: int, *, stops: bool = False) -> str:
    """Describe the rounds of a late mean.

    Args:
        window: number of averaged rounds at the end of a run.
        rounds: number of rounds of a run.
        stops: true if runs end at a target and may have fewer rounds.

    >>> span_of(100, 384), span_of(1, 1), span_of(6, 6), span_of(6, 6, stops=True), span_of(1, 0)
    ('the last 100 rounds', 'the last round', 'the whole run', 'its last 6 rounds or fewer', 'the only evaluation')
    """
    if not rounds:
        return "the only evaluation"
    if window == 1:
        return "its last round" if stops else "the last round"
    return (
        f"its last {window} rounds or fewer"
        if stops
        else "the whole run"
        if window >= rounds
        else f"the last {window} rounds"
    )


def read_experiment(root: Path) -> list[ExperimentRecord]:
    """Return every point of the experiment of a run folder; a single one without a sweep."""
    points: dict[str, dict[str, list[Planned]]] = {}
    for run in plan(load(root, imports=False), root):
        points.setdefault(run.point, {}).setdefault(run.method.name, []).append(run)
    records = {point: [record for runs in methods.values() for record in _method_records(runs)]
               for point, methods in points.items()}  # fmt: skip
    return [ExperimentRecord(point, methods[0].experiment, methods) for point, methods in records.items()]


def _method_records(planned: list[Planned]) -> list[MethodRecord]:
    """Return the record of a method, followed by one for each other use of its models."""
    method, experiment = planned[0].method, planned[0].experiment
    probed = () if experiment.forgetting is None else experiment.forgetting.rounds
    runs = [
        RunRecord(run.seed, run.folder, experiment.rounds, probed, shift_file(run.folder.parents[1], method, run.seed))
        for run in planned
        if run.finished
    ]
    unfinished = len(planned) - len(runs)
    others = [
        MethodRecord(method.named(other), experiment, [replace(run, other=other) for run in runs], unfinished)
        for other in method.others
    ]
    return [MethodRecord(method, experiment, runs, unfinished), *others]


# -- environment.json --------------------------------------------------------------------------------------------------

NANO = "played to see that it works; its numbers mean nothing, and descriptions may speak of other data"
"""Warning about folders of the scale nano."""


def environment_line(root: Path, name: str) -> str:
    """Describe the time, machine and packages that made a folder; "" if unknown."""
    try:
        about = _environment_of(root)
        packages = ", ".join(f"{package} {version}" for package, version in about["packages"].items() if version)
        machine = f"Python {about['python']}, {about['processor']}, {about['cores']} cores"
        return f"{name}: {about['made']}, {machine}; {packages}"
    except FileNotFoundError:
        return ""
    except UNREADABLE:
        reason = "it is needed for the last line of the report only and may be removed"
        raise FedtideError(f"{root / 'environment.json'}: damaged; {reason}") from None


def _environment_of(root: Path) -> Any:
    return json.loads((root / "environment.json").read_text(encoding="utf-8"))


def is_nano(root: Path) -> bool:
    """Tell whether a folder was played at the scale nano; the line about the environment reports a damaged file."""
    try:
        return bool(_environment_of(root)["scale"] == "nano")
    except (FileNotFoundError, *UNREADABLE):
        return False
