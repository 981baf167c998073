"""Run folders as arrays."""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedtide.config import Experiment, Method
from fedtide.core.errors import UNREADABLE, FedtideError
from fedtide.core.record import FORGETTING, OTHERS, STOPPED, TRUTH, read_rounds, view_of
from fedtide.data.saved import labels_of, names_of
from fedtide.evaluate.metrics import branch_accuracy, faded, matched
from fedtide.evaluate.rounds import score_in, weight_in
from fedtide.evaluate.transfer import Transfer, turns
from fedtide.runs.folder import load, plan, shift_file

EVERY_LINE = {"round": int, "seconds": (int, float), "down": int, "up": int, "refused": int, "participants": dict}
"""Keys that a report needs in every line of `rounds.jsonl`, with their types."""

PROBED_LINE = {
    "round": int, "models": list, "owners": list, "known": int, "accuracy": dict, "forgetting": dict,
    "loss_increase": dict,
}  # fmt: skip
"""Keys of every line of `forgetting.jsonl` with a measurement, with their types."""

CLIENTS = {
    "train_clients": "training clients",
    "held_out_clients": "held-out clients",
    "val": "clients on their validation rows",
}
"""Words for the clients of a view."""


Clock = Literal["rounds", "seconds"]
"""What times are in: simulated seconds, or rounds where all rounds take equally long."""

Weigh = Callable[[dict[str, Any], str], float | None]
"""What an evaluation, a line of the record, counts for in a mean over several, in a view."""


@dataclass(frozen=True)
class ClientColumns:
    """Columns of `clients.csv`, an entry for each client and evaluation.

    slot: NaN where a client has none. group: where groups drift, the number of the current one.
    """

    round: np.ndarray
    client: np.ndarray
    rows: np.ndarray
    accuracy: np.ndarray
    slot: np.ndarray
    group: list[str]

    @staticmethod
    def of(lines: Sequence[tuple[int, int, int, float, int | None, str]]) -> ClientColumns:
        """Turn lines into columns."""
        round_, client, rows, accuracy, slot, group = zip(*lines, strict=True) if lines else ((),) * 6
        slots = np.array([math.nan if each is None else each for each in slot], dtype=np.float64)
        return ClientColumns(
            np.array(round_, np.int64),
            np.array(client, np.int64),
            np.array(rows, np.int64),
            np.array(accuracy),
            slots,
            [*group],
        )


@dataclass(frozen=True)
class RunRecord:
    """Record of one run: one method, one seed; with `other`, of another use of its models."""

    seed: int
    folder: Path
    finished: bool
    rounds: int
    probed: tuple[int, ...] = ()
    shift: Path | None = None
    other: str = ""

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        """Lines of `rounds.jsonl`.

        Raises:
            FedtideError: the run is finished and the record lacks some of its rounds.
        """
        lines = read_rounds(self.folder)
        for number, line in enumerate(lines, start=1):
            _check(line, EVERY_LINE, f"{self.folder / 'rounds.jsonl'}: line {number}")
        ended = len(lines) if lines and STOPPED in lines[-1] else self.rounds
        if self.finished and [line.get("round") for line in lines] != list(range(ended)):
            raise FedtideError(f"{self.folder / 'rounds.jsonl'}: not the {self.rounds} rounds of a finished run")
        if not self.other:
            return lines
        return [{**line, "scores": line[OTHERS].get(self.other, {})} if OTHERS in line else line for line in lines]

    @cached_property
    def forgetting(self) -> list[dict[str, Any]]:
        """Lines of `forgetting.jsonl`; a round without a measurement has `skipped`, the reason.

        Raises:
            FedtideError: the run is finished and lacks some of the rounds that its configuration names.
        """
        lines = read_rounds(self.folder, FORGETTING) if self.probed else []
        for number, line in enumerate(lines, start=1):
            probed = () if isinstance(line, dict) and "skipped" in line else PROBED_LINE
            _check(line, probed, f"{self.folder / FORGETTING}: line {number}")
        reached = [number for number in sorted(self.probed) if number < len(self.lines)]
        if self.finished and [line.get("round") for line in lines] != reached:
            raise FedtideError(f"{self.folder / FORGETTING}: not the rounds that forgetting.rounds names")
        return lines

    @property
    def target(self) -> tuple[float, int] | None:
        """Accuracy at which the run ended, and the required evaluations in a row; None if it did not stop early."""
        stopped = self.lines[-1].get(STOPPED) if self.lines else None
        return (stopped["accuracy"], stopped["evaluations"]) if stopped else None

    @cached_property
    def labels(self) -> dict[str, Any] | None:
        """Counts of each class for some clients (`fedtide.data.saved.labels`); None where they were not saved."""
        return labels_of(self.shift) if self.shift is not None and self.shift.is_file() else None

    @property
    def group_names(self) -> list[str]:
        """Names of the groups of the population; empty where the shift was not saved."""
        return names_of(self.shift, "group_names") if self.shift is not None and self.shift.is_file() else []

    @property
    def domain_names(self) -> list[str]:
        """Names of the domains of the source; empty where the shift was not saved."""
        return names_of(self.shift, "domain_names") if self.shift is not None and self.shift.is_file() else []

    def transfer(self, view: str, groups: list[str]) -> Transfer | None:
        """Return the accuracy of each group at each evaluation, with the turns of groups; None for one group."""
        expected = [line.get("expected") for line in self.lines]
        if len(groups) < 2 or not all(expected):
            return None
        after, rows = [], []
        for line in self.judged:
            scores = line["scores"].get(view, {}).get("groups", {})
            after.append(line["round"] + 1)
            rows.append([scores.get(group, np.nan) for group in groups])
        matrix = np.array(rows, dtype=np.float64).reshape(len(after), len(groups))
        return Transfer(after, matrix, turns(np.array(expected, dtype=np.float64)))

    def weights(self, view: str, group: str | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return rounds done at each evaluation, and the mean gate weights of own and of shared experts.

        Own experts (evaluations,), NaN without any; shared experts (evaluations, models). Averaged over all rows of a
        view, or over those of one group of clients; empty where no method mixes.
        """
        found = []
        for line in self.judged:
            weights = line["scores"].get(view, {}).get("weights", {})
            weights = weights if group is None else weights.get("groups", {}).get(group, {})
            if weights:
                found.append((line["round"] + 1, weights.get("own", np.nan), weights["shared"]))
        wide = max((len(shared) for _, _, shared in found), default=0)
        table = [[*shared, *[0.0] * (wide - len(shared))] for _, _, shared in found]
        after, own = np.array([r for r, _, _ in found]), np.array([w for _, w, _ in found], dtype=np.float64)
        return after, own, np.array(table, dtype=np.float64).reshape(len(found), wide)

    @cached_property
    def judged(self) -> list[dict[str, Any]]:
        """Lines of the evaluation rounds, with the views of which any row was judged: real clients may all be away."""
        lines = [line for line in self.lines if line.get("scores")]
        return [line | {"scores": {view: told for view, told in line["scores"].items() if told}} for line in lines]

    def curve(self, view: str, value: Callable[[dict[str, Any]], Any]) -> tuple[np.ndarray, np.ndarray]:
        """Return rounds done at each evaluation of one view, and a value of each."""
        found = [(line["round"] + 1, value(line["scores"][view])) for line in self.judged if view in line["scores"]]
        pairs = [(r, v) for r, v in found if v is not None]
        return np.array([r for r, _ in pairs]), np.array([v for _, v in pairs], dtype=np.float64)

    def accuracy(self, view: str, group: str | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return the accuracy curve of one view, pooled or of one group of clients."""
        if group is None:
            return self.curve(view, score_in)
        return self.curve(view, lambda scores: scores.get("groups", {}).get(group))

    def counts_for(self, view: str, rounds: np.ndarray, weigh: Weigh = weight_in) -> np.ndarray | None:
        """Return what evaluations count for in a mean, by default in that of the headline; None for all the same."""
        known = {line["round"] + 1: weigh(line, view) for line in self.judged if view in line["scores"]}
        found = np.array([known.get(at) for at in rounds], dtype=np.float64)
        return found if len(found) and np.isfinite(found).all() and found.sum() > 0 else None

    def course(self, view: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the accuracy curve by which moments are told apart.

        Where rounds are windows of wall-clock time it is the faded one, as a window may have a row alone.
        """
        rounds, values = self.accuracy(view)
        dated = any("window" in line for line in self.judged)
        return rounds, faded(rounds, values, self.counts_for(view, rounds)) if dated else values

    def commonest(self, view: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the curve of the share of the commonest class among the judged rows; empty for real clients."""
        return self.curve(view, lambda scores: scores.get("commonest"))

    def baseline(self, view: str, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the curve of the skill of a baseline of time series, `yesterday` or `last_week`."""
        return self.curve(view, lambda scores: scores.get("baselines", {}).get(name))

    def other_way(self, view: str, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the accuracy curve of another way to combine a method's models."""
        return self.curve(view, lambda scores: scores.get("others", {}).get(name))

    def density(self, view: str, group: str | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return the curve of the inputs' mean log-density under the method, of one view or of one group in it."""
        if group is None:
            return self.curve(view, lambda scores: scores.get("density"))
        return self.curve(view, lambda scores: scores.get("densities", {}).get(group))

    def branches(self, view: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the curve of the share of rows that the branch of their true group answers, under the best match."""
        return self.curve(view, lambda scores: branch_accuracy(scores["choice"]) if "choice" in scores else None)

    def share_of_first(self, window: int) -> np.ndarray:
        """Return for each round the share of participants that trained the first group's branch."""
        tables = [line.get("branches") for line in self.lines]
        late = [table for table in tables[-window:] if table]
        if not late:
            return np.full(len(tables), np.nan)
        wide = max(len(table[0]) for table in tables if table)
        own = matched(np.sum([np.pad(table, ((0, 0), (0, wide - len(table[0])))) for table in late], axis=0))[0]
        shares = [np.nan if not table else np.array(table)[:, own].sum() / np.sum(table)
                  if own < len(table[0]) else 0.0 for table in tables]  # fmt: skip
        return np.array(shares, dtype=np.float64)

    def times(self, clock: Clock) -> np.ndarray:
        """Return the time at the end of every round: simulated seconds, or how many rounds are done."""
        seconds = self.every_round(lambda line: line["seconds"])
        return seconds if clock == "seconds" else np.arange(1.0, len(seconds) + 1)

    def total(self, name: str) -> float:
        """Return the sum of a number over all rounds."""
        return float(np.nansum(self.every_round(lambda line: line.get(name))))

    def every_round(self, value: Callable[[dict[str, Any]], Any]) -> np.ndarray:
        """Return a value of every round; NaN in rounds without one."""
        found = [value(line) for line in self.lines]
        return np.array([np.nan if v is None else v for v in found], dtype=np.float64)

    def every_row(self, value: Callable[[dict[str, Any]], Any]) -> np.ndarray:
        """Return a list of numbers of every round (rounds, longest); NaN where a round has none or a shorter list."""
        found = [value(line) for line in self.lines]
        rows = [each if isinstance(each, list) else [] for each in found]
        table = np.full((len(rows), max(map(len, rows), default=0)), np.nan)
        for row, each in zip(table, rows, strict=True):
            row[: len(each)] = [np.nan if v is None else v for v in each]
        return table

    def fact(self, name: str) -> np.ndarray:
        """Return a numeric fact of every round; NaN where it is missing or no number."""
        found = (line.get("facts", {}).get(name) for line in self.lines)
        return np.array([v if isinstance(v, int | float) else np.nan for v in found], dtype=np.float64)

    def apart(self, by: str = "heterogeneity") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return rounds done at each evaluation with heterogeneity of labels (or `by` "embedding"), and its two curves.

        The first is within clusters, NaN where no client is in one, the second over all clients together.
        """
        found = [(line["round"] + 1, line[by]) for line in self.judged if by in line]
        within, everyone = (
            np.array([np.nan if told[name] is None else told[name] for _, told in found], dtype=np.float64)
            for name in ("within", "all")
        )
        return np.array([at for at, _ in found]), within, everyone

    def seconds(self, key: str) -> float:
        """Sum wall-clock seconds over all rounds, of "seconds" (training) or "evaluation"."""
        path = self.folder / "timings.jsonl"
        try:
            lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
            return float(sum(json.loads(line)[key] for line in lines if line.endswith("}")))
        except UNREADABLE:
            raise FedtideError(f"{path}: a line is damaged") from None

    def client_rows(self, view: str) -> Iterator[dict[str, str]]:
        """Yield the rows of `clients.csv` of one view."""
        called = view_of(view, self.other)
        return (row for row in self._read_clients() if row["view"] == called)

    def _read_clients(self) -> Iterator[dict[str, str]]:
        """Yield all rows of `clients.csv`; accuracies that are missing are "nan"."""
        path = self.folder / "clients.csv"
        if not path.is_file():
            return
        with open(path, encoding="utf-8", newline="") as file:
            try:
                for row in csv.DictReader(file):
                    if TRUTH in row and not row[TRUTH].isdecimal():
                        raise ValueError
                    yield row | {"accuracy": str(float(row["accuracy"] or "nan"))}
            except (csv.Error, *UNREADABLE):
                raise FedtideError(f"{path}: a line is damaged") from None

    @cached_property
    def _columns(self) -> dict[str, ClientColumns]:
        """What pictures and tables need of `clients.csv`, by view: it is long, and read once."""
        found: dict[str, list[tuple[int, int, int, float, int | None, str]]] = {}
        try:
            for row in self._read_clients():
                slot, group = int(row["slot"]) if row["slot"] else None, sys.intern(row.get(TRUTH, row["group"]))
                numbers = int(row["round"]), int(row["client"]), int(row["rows"]), float(row["accuracy"])
                each = (*numbers, slot, group)
                found.setdefault(row["view"], []).append(each)
        except UNREADABLE:
            raise FedtideError(f"{self.folder / 'clients.csv'}: a line is damaged") from None
        return {view: ClientColumns.of(rows) for view, rows in found.items()}

    def columns(self, view: str) -> ClientColumns:
        """Return what is known of each client at each evaluation."""
        return self._columns.get(view_of(view, self.other), ClientColumns.of([]))

    def clusters(self, view: str) -> dict[int, dict[int, tuple[str, int]]]:
        """Return for each evaluation round the group and the cluster of each client that has one.

        Where groups drift, the group is the number of the current one.
        """
        out: dict[int, dict[int, tuple[str, int]]] = {}
        told = self.columns(view)
        for number, client, group, slot in zip(
            told.round.tolist(), told.client.tolist(), told.group, told.slot.tolist(), strict=True
        ):
            if not math.isnan(slot):
                out.setdefault(number, {})[client] = (group, int(slot))
        return out

    @cached_property
    def regrouped(self) -> bool:
        """True if clients have groups that drift, so that their group is the current one."""
        path = self.folder / "clients.csv"
        if not path.is_file():
            return False
        with open(path, encoding="utf-8", newline="") as file:
            return TRUTH in file.readline().rstrip("\n").split(",")


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
    def shifted(self) -> bool:
        """True if the population changes for this method."""
        return self.experiment.shift_of(self.method).who.changes

    @property
    def drifts(self) -> bool:
        """True if clients' rows or the meaning of their labels change at events."""
        return self.experiment.shift_of(self.method).drifts

    @property
    def cycles(self) -> float | None:
        """Number of cycles of a blend of domains over the run; None without blended domains."""
        return self.experiment.shift_of(self.method).what.rhythm(self.experiment.rounds).get("cycles")


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
        found = {view for m in self.methods for run in m.runs for line in run.judged for view in line["scores"]}
        return next(
            (view for view in ("held_out_clients", "train_clients", "val") if view in found), "held_out_clients"
        )

    @cached_property
    def clustered(self) -> str:
        """Name of the view whose clusters are shown: training clients, who are many, if judged; else as `view`."""
        found = {view for m in self.methods for run in m.runs for line in run.judged for view in line["scores"]}
        return "train_clients" if "train_clients" in found else self.view

    @property
    def whose(self) -> str:
        """Description of the clients of the headline accuracy."""
        return CLIENTS[self.view]

    @cached_property
    def groups(self) -> list[str]:
        """Names of the groups of clients, judged or not; empty for a single group."""
        saved = (run.group_names for method in self.methods for run in method.runs)
        return next((names for names in saved if len(names) > 1), [])

    @cached_property
    def domains(self) -> list[str]:
        """Names of the domains of the source; empty for a single domain."""
        saved = (run.domain_names for method in self.methods for run in method.runs)
        return next((names for names in saved if len(names) > 1), [])

    @property
    def timed(self) -> bool:
        """True if devices differ, or the shift reads seconds."""
        clocks = {self.experiment.shift_of(method.method).clock for method in self.methods}
        return self.experiment.timing.seconds is None or "seconds" in clocks

    @cached_property
    def clock(self) -> Clock:
        """What times are in: rounds, unless they differ in length."""
        each = self.experiment.timing.seconds
        ends = [line for method in self.methods for run in method.runs for line in run.lines[-1:]]
        if self.timed or each is None:
            return "seconds"
        equal = all(math.isclose(end["seconds"], each * (end["round"] + 1)) for end in ends)
        return "rounds" if equal else "seconds"

    @property
    def blended(self) -> bool:
        """True if clients hold a blend of domains that follows a schedule, and rounds record it."""
        return any("domains" in line for method in self.methods for run in method.runs for line in run.lines)

    @cached_property
    def dated(self) -> bool:
        """True if rounds are windows of wall-clock time."""
        return any("window" in line for method in self.methods for run in method.runs for line in run.lines)

    @property
    def period(self) -> float | None:
        """Period of the shift in rounds, of the first method that has one; None without any."""
        return self.experiment.period

    @property
    def window(self) -> int:
        """Number of rounds over which late accuracy is averaged."""
        return self.experiment.late

    @property
    def span(self) -> str:
        """What late accuracy is averaged over, in words."""
        return span_of(self.window, self.experiment.rounds, stops=self.experiment.stop_at is not None)


def span_of(window: int, rounds: int, *, stops: bool = False) -> str:
    """Say what is averaged, in the same words everywhere.

    Args:
        window: rounds that are averaged, at the end of a run.
        rounds: of a run.
        stops: true if runs end at a target, and may have fewer rounds.

    >>> span_of(100, 384), span_of(1, 5), span_of(6, 6), span_of(6, 6, stops=True)
    ('the last 100 rounds', 'the last round', 'the whole run', 'its last 6 rounds or fewer')
    """
    if stops:
        return f"its last {window} rounds or fewer" if window > 1 else "its last round"
    return "the whole run" if window >= rounds else f"the last {window} rounds" if window > 1 else "the last round"


def _check(line: Any, wanted: Any, where: str) -> None:
    """Raise a clear error for a line of another form, before the report fails on it."""
    if not isinstance(line, dict):
        raise FedtideError(f"{where}: damaged: not a table")
    for key, kind in dict(wanted).items():
        if not isinstance(line.get(key), kind):
            raise FedtideError(f"{where}: damaged: '{key}' is missing or of another kind")
    scores, others = line.get("scores", {}), line.get(OTHERS, {})
    if not isinstance(scores, dict) or not all(isinstance(view, dict) for view in scores.values()):
        raise FedtideError(f"{where}: damaged: 'scores' is of another kind")
    if not isinstance(others, dict):
        raise FedtideError(f"{where}: damaged: '{OTHERS}' is of another kind")
    for entries in others.values():
        _check({**{key: value for key, value in line.items() if key != OTHERS}, "scores": entries}, {}, where)
    for key, known in (
        ("domains", _are_numbers), ("split", _are_counts), ("client_loss", _are_quantiles), ("drifted", _is_count),
        ("events", _are_names), ("trained", _is_pair), ("heterogeneity", _is_apart), ("embedding", _is_apart),
        ("facts", _is_table), ("window", _is_window),
    ):  # fmt: skip
        if key in line and not known(line[key]):
            raise FedtideError(f"{where}: damaged: '{key}' is of another kind")
    if not all(_may_be_number(score_in(view)) for view in scores.values()):
        raise FedtideError(f"{where}: damaged: 'accuracy' is of another kind")
    if not all(_are_baselines(view.get("baselines", {})) for view in scores.values()):
        raise FedtideError(f"{where}: damaged: 'baselines' is of another kind")
    if not all(_are_ways(view) for view in scores.values()):
        raise FedtideError(f"{where}: damaged: 'others' or 'densities' is of another kind")
    for name in ("commonest", "reference"):
        if not all(_may_be_number(view.get(name)) for view in scores.values()):
            raise FedtideError(f"{where}: damaged: '{name}' is of another kind")
    if not all(_are_weights(view["weights"]) for view in scores.values() if "weights" in view):
        raise FedtideError(f"{where}: damaged: 'weights' is of another kind")


def _are_baselines(found: Any) -> bool:
    return isinstance(found, dict) and all(map(_may_be_number, found.values()))


def _are_numbers(found: Any) -> bool:
    return isinstance(found, list) and all(isinstance(value, int | float) for value in found)


def _are_counts(found: Any) -> bool:
    """Tell whether `found` is a table with rows of equal length."""
    return isinstance(found, list) and all(map(_are_numbers, found)) and len({len(row) for row in found}) == 1


def _are_quantiles(found: Any) -> bool:
    """Tell whether `found` has the form of `fedtide.runs.runner.losses`; null where unknown."""
    names = {"min", "q25", "q50", "q75", "max"}
    return isinstance(found, dict) and names <= found.keys() and all(_may_be_number(found[name]) for name in names)


def _is_window(value: Any) -> bool:
    try:
        times = [datetime.fromisoformat(value[name]) for name in ("begin", "next")]
    except (KeyError, TypeError, ValueError):
        return False
    return all(at.tzinfo is not None for at in times) and _is_count(value.get("came"))


def _is_table(found: Any) -> bool:
    return isinstance(found, dict)


def _is_count(found: Any) -> bool:
    return isinstance(found, int)


def _is_pair(found: Any) -> bool:
    return isinstance(found, list) and len(found) == 2 and all(map(_is_count, found))


def _are_names(found: Any) -> bool:
    return isinstance(found, list) and all(isinstance(name, str) for name in found)


def _is_apart(found: Any) -> bool:
    """Tell whether `found` has the form of `fedtide.runs.runner.heterogeneity`; null without clients in a cluster."""
    names = {"within", "all"}
    return isinstance(found, dict) and names <= found.keys() and all(map(_may_be_number, found.values()))


def _are_ways(view: dict[str, Any]) -> bool:
    tables = [view.get("others", {}), view.get("densities", {}), {"": view.get("density")}]
    return all(isinstance(table, dict) and all(map(_may_be_number, table.values())) for table in tables)


def _may_be_number(value: Any) -> bool:
    return value is None or isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63)


def _are_weights(found: Any) -> bool:
    """Tell whether `found` has the form of `fedtide.evaluate.metrics.mean_weights`, with those of groups inside."""
    if not isinstance(found, dict) or not isinstance(found.get("groups", {}), dict):
        return False
    if not found.keys() - {"groups"}:
        return True  # no judged client has weights
    shared = found.get("shared")
    numbers = isinstance(shared, list) and all(isinstance(w, int | float) for w in [*shared, found.get("own", 0.0)])
    return numbers and all(_are_weights(each) for each in found.get("groups", {}).values())


def read_experiment(root: Path) -> list[ExperimentRecord]:
    """Return every point of the experiment of a run folder; a single one without a sweep."""
    experiment = load(root, imports=False)
    records: dict[str, dict[str, MethodRecord]] = {}
    points: dict[str, Experiment] = {}
    for planned in plan(experiment, root):
        points[planned.point] = planned.experiment
        methods = records.setdefault(planned.point, {})
        held = methods.setdefault(planned.method.name, MethodRecord(planned.method, planned.experiment, [], 0))
        probed = planned.experiment.forgetting
        run = RunRecord(
            planned.seed,
            planned.folder,
            planned.finished,
            planned.experiment.rounds,
            () if probed is None else probed.rounds,
            shift_file(planned.folder.parent.parent, planned.method, planned.seed),
        )
        if planned.finished:
            held.runs.append(run)
        else:
            methods[planned.method.name] = MethodRecord(held.method, held.experiment, held.runs, held.unfinished + 1)
    return [
        ExperimentRecord(point, points[point], [each for method in methods.values() for each in with_others(method)])
        for point, methods in records.items()
    ]


def with_others(record: MethodRecord) -> list[MethodRecord]:
    """Return the record of a method, followed by one for each other use of its models."""
    others = [
        replace(record, method=record.method.named(other), runs=[replace(run, other=other) for run in record.runs])
        for other in record.method.others
    ]
    return [record, *others]
