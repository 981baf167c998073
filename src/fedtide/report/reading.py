"""Run folders as arrays."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedtide.config import Experiment, Method
from fedtide.core.errors import FedtideError
from fedtide.core.record import FORGETTING, STOPPED, TRUTH, read_rounds
from fedtide.data.saved import domains_of, groups_of, labels_of
from fedtide.evaluate.metrics import branch_accuracy, matched
from fedtide.evaluate.transfer import Transfer, turns
from fedtide.runs.folder import load, plan, shift_file

EVERY_LINE = {"round": int, "seconds": (int, float), "down": int, "up": int, "refused": int, "participants": dict}
"""What every line of `rounds.jsonl` has that a report needs."""

PROBED_LINE = {
    "round": int, "models": list, "owners": list, "known": int, "accuracy": dict, "forgetting": dict,
    "loss_increase": dict,
}  # fmt: skip
"""What every line of `forgetting.jsonl` has where something was measured."""


@dataclass(frozen=True)
class RunRecord:
    """What one run wrote: one method, one seed."""

    seed: int
    folder: Path
    finished: bool
    rounds: int
    probed: tuple[int, ...] = ()
    shift: Path | None = None

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        """`rounds.jsonl`, line by line.

        Raises:
            FedtideError: the run is finished and the record has not all of its rounds.
        """
        lines = read_rounds(self.folder)
        for number, line in enumerate(lines, start=1):
            _check(line, EVERY_LINE, f"{self.folder / 'rounds.jsonl'}: line {number}")
        ended = len(lines) if lines and STOPPED in lines[-1] else self.rounds
        if self.finished and [line.get("round") for line in lines] != list(range(ended)):
            raise FedtideError(f"{self.folder / 'rounds.jsonl'}: not the {self.rounds} rounds of a finished run")
        return lines

    @cached_property
    def forgetting(self) -> list[dict[str, Any]]:
        """`forgetting.jsonl`, line by line; a round of which nothing could be said has `skipped`, the reason.

        Raises:
            FedtideError: the run is finished and has not all of the rounds that its configuration names.
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
        """The accuracy at which it ended, and how many evaluations in a row had to have it; None if it played on."""
        stopped = self.lines[-1].get(STOPPED) if self.lines else None
        return (stopped["accuracy"], stopped["evaluations"]) if stopped else None

    @cached_property
    def labels(self) -> dict[str, Any] | None:
        """How many rows of each class some clients hold (`fedtide.data.saved.labels`); None where nobody counted."""
        return labels_of(self.shift) if self.shift is not None and self.shift.is_file() else None

    @property
    def group_names(self) -> list[str]:
        """The groups of its population; none where the shift was not saved."""
        return groups_of(self.shift) if self.shift is not None and self.shift.is_file() else []

    @property
    def domain_names(self) -> list[str]:
        """The domains of its source; none where the shift was not saved, or by an older version."""
        return domains_of(self.shift) if self.shift is not None and self.shift.is_file() else []

    def transfer(self, view: str, groups: list[str]) -> Transfer | None:
        """Accuracy of each group at each evaluation, and who was in the majority when; None for one group."""
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
        """Rounds done at each evaluation, and the mean gate weights there.

        Of clients' own experts (evaluations,), NaN where there are none, and of the shared ones (evaluations, models).
        Of all rows of a view, or of those of one group of clients; nothing where nobody mixes.
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
        """The lines of the evaluation rounds."""
        return [line for line in self.lines if line.get("scores")]

    def curve(self, view: str, value: Callable[[dict[str, Any]], Any]) -> tuple[np.ndarray, np.ndarray]:
        """Evaluation rounds, counted as rounds done, and a value of each evaluation of one view."""
        found = [(line["round"] + 1, value(line["scores"][view])) for line in self.judged if view in line["scores"]]
        pairs = [(r, v) for r, v in found if v is not None]
        return np.array([r for r, _ in pairs]), np.array([v for _, v in pairs], dtype=np.float64)

    def accuracy(self, view: str, group: str | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The accuracy curve of one view, pooled or of one group of clients."""
        if group is None:
            return self.curve(view, lambda scores: scores.get("accuracy"))
        return self.curve(view, lambda scores: scores.get("groups", {}).get(group))

    def other_way(self, view: str, name: str) -> tuple[np.ndarray, np.ndarray]:
        """The accuracy curve of another way to put a method's models together."""
        return self.curve(view, lambda scores: scores.get("others", {}).get(name))

    def density(self, view: str, group: str | None = None) -> tuple[np.ndarray, np.ndarray]:
        """How likely the method takes the inputs of one view to be at each evaluation, or those of one group of it."""
        if group is None:
            return self.curve(view, lambda scores: scores.get("density"))
        return self.curve(view, lambda scores: scores.get("densities", {}).get(group))

    def branches(self, view: str) -> tuple[np.ndarray, np.ndarray]:
        """The share of rows that the branch of their true group answers for, as branches match groups best."""
        return self.curve(view, lambda scores: branch_accuracy(scores["choice"]) if "choice" in scores else None)

    def share_of_first(self, window: int) -> np.ndarray:
        """The share of participants, round by round, that trained the branch which is the first group's."""
        tables = [line.get("branches") for line in self.lines]
        late = [table for table in tables[-window:] if table]
        if not late:
            return np.full(len(tables), np.nan)
        wide = max(len(table[0]) for table in tables if table)
        own = matched(np.sum([np.pad(table, ((0, 0), (0, wide - len(table[0])))) for table in late], axis=0))[0]
        shares = [np.nan if not table else np.array(table)[:, own].sum() / np.sum(table)
                  if own < len(table[0]) else 0.0 for table in tables]  # fmt: skip
        return np.array(shares, dtype=np.float64)

    def every_round(self, value: Callable[[dict[str, Any]], Any]) -> np.ndarray:
        """A value of every round; NaN where it has none."""
        found = [value(line) for line in self.lines]
        return np.array([np.nan if v is None else v for v in found], dtype=np.float64)

    def every_row(self, value: Callable[[dict[str, Any]], Any]) -> np.ndarray:
        """A list of numbers of every round (rounds, longest); NaN where a round has none, or a shorter one."""
        found = [value(line) for line in self.lines]
        rows = [each if isinstance(each, list) else [] for each in found]
        table = np.full((len(rows), max(map(len, rows), default=0)), np.nan)
        for row, each in zip(table, rows, strict=True):
            row[: len(each)] = [np.nan if v is None else v for v in each]
        return table

    def fact(self, name: str) -> np.ndarray:
        """A number among the facts of every round; NaN where it is none."""
        found = (line.get("facts", {}).get(name) for line in self.lines)
        return np.array([v if isinstance(v, int | float) else np.nan for v in found], dtype=np.float64)

    def apart(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rounds done at each evaluation that tells how unlike clients are by what they hold, and two curves of that.

        Within clusters, NaN where nobody is in one, and of all clients together.
        """
        found = [(line["round"] + 1, line["heterogeneity"]) for line in self.judged if "heterogeneity" in line]
        within, everyone = (
            np.array([np.nan if told[name] is None else told[name] for _, told in found], dtype=np.float64)
            for name in ("within", "all")
        )
        return np.array([at for at, _ in found]), within, everyone

    def seconds(self, key: str) -> float:
        """Wall-clock seconds over all rounds, of "seconds" (training) or "evaluation"."""
        path = self.folder / "timings.jsonl"
        try:
            lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
            return float(sum(json.loads(line)[key] for line in lines if line.endswith("}")))
        except (ValueError, LookupError, TypeError):
            raise FedtideError(f"{path}: a line is damaged") from None

    def client_rows(self, view: str, since: int) -> list[dict[str, str]]:
        """The rows of `clients.csv` of one view, from round `since` on."""
        path = self.folder / "clients.csv"
        if not path.is_file():
            return []
        with open(path, encoding="utf-8", newline="") as file:
            try:
                rows = [row for row in csv.DictReader(file) if row["view"] == view and int(row["round"]) >= since]
                numbered = all(row[TRUTH].isdecimal() for row in rows if TRUTH in row)
                if not numbered:
                    raise ValueError
                return [row | {"accuracy": str(float(row["accuracy"] or "nan"))} for row in rows]
            except (ValueError, LookupError, TypeError, AttributeError, csv.Error):
                raise FedtideError(f"{path}: a line is damaged") from None

    def clusters(self, view: str) -> dict[int, dict[int, tuple[str, int]]]:
        """For each evaluation round the group and the cluster of each client, where clients have one.

        Where groups drift, the group is the number of that of the moment.
        """
        out: dict[int, dict[int, tuple[str, int]]] = {}
        for row in self.client_rows(view, 0):
            if row["slot"]:
                group = row.get(TRUTH, row["group"])
                out.setdefault(int(row["round"]), {})[int(row["client"])] = (group, int(row["slot"]))
        return out

    @cached_property
    def regrouped(self) -> bool:
        """Whether clients have groups that drift, so that their group is that of the moment."""
        path = self.folder / "clients.csv"
        if not path.is_file():
            return False
        with open(path, encoding="utf-8", newline="") as file:
            return TRUTH in file.readline().rstrip("\n").split(",")


@dataclass(frozen=True)
class MethodRecord:
    """What one method did, over seeds."""

    method: Method
    experiment: Experiment
    runs: list[RunRecord]
    unfinished: int

    @property
    def name(self) -> str:
        """Its name in the experiment."""
        return self.method.name

    @property
    def shifted(self) -> bool:
        """Whether the population changes for it."""
        return self.experiment.shift_of(self.method).who.changes

    @property
    def drifts(self) -> bool:
        """Whether what clients hold, or what it means, changes at events."""
        return self.experiment.shift_of(self.method).drifts

    @property
    def cycles(self) -> float | None:
        """How many cycles of a blend of domains it meets over the run; None where no domains are blended."""
        return self.experiment.shift_of(self.method).what.rhythm(self.experiment.rounds).get("cycles")


@dataclass(frozen=True)
class ExperimentRecord:
    """What one experiment did: every method, one point of a sweep."""

    point: str
    experiment: Experiment
    methods: list[MethodRecord]

    @property
    def view(self) -> str:
        """Whose accuracy is the headline: held-out clients where there are any, else the clients' own test rows.

        Without test rows there are only their validation rows to look at.
        """
        found = {view for m in self.methods for run in m.runs for line in run.judged for view in line["scores"]}
        return next(
            (view for view in ("held_out_clients", "train_clients", "val") if view in found), "held_out_clients"
        )

    @property
    def clustered(self) -> str:
        """Of whom clusters are shown: clients that take part, who are many, where they are judged; else as `view`."""
        found = {view for m in self.methods for run in m.runs for line in run.judged for view in line["scores"]}
        return "train_clients" if "train_clients" in found else self.view

    @property
    def whose(self) -> str:
        """Whose accuracy it is, in words."""
        return "clients on their validation rows" if self.view == "val" else f"{self.view} clients"

    @cached_property
    def groups(self) -> list[str]:
        """The names of the groups of clients, where there is more than one; judged or not."""
        saved = (run.group_names for method in self.methods for run in method.runs)
        return next((names for names in saved if len(names) > 1), [])

    @cached_property
    def domains(self) -> list[str]:
        """The names of the domains of the source, where there is more than one."""
        saved = (run.domain_names for method in self.methods for run in method.runs)
        return next((names for names in saved if len(names) > 1), [])

    @property
    def blended(self) -> bool:
        """Whether clients hold a blend of domains that follows a schedule, and rounds tell which."""
        return any("domains" in line for method in self.methods for run in method.runs for line in run.lines)

    @property
    def period(self) -> float | None:
        """The period of the shift in rounds, of the first method that has one; None where none has."""
        return self.experiment.period

    @property
    def window(self) -> int:
        """Rounds over which late accuracy is averaged."""
        return self.experiment.late


def _check(line: Any, wanted: Any, where: str) -> None:
    """Refuse a line that was not written like this, before a report trips over it."""
    if not isinstance(line, dict):
        raise FedtideError(f"{where}: damaged: not a table")
    for key, kind in dict(wanted).items():
        if not isinstance(line.get(key), kind):
            raise FedtideError(f"{where}: damaged: '{key}' is missing or of another kind")
    scores = line.get("scores", {})
    if not isinstance(scores, dict) or not all(isinstance(view, dict) for view in scores.values()):
        raise FedtideError(f"{where}: damaged: 'scores' is of another kind")
    for key, known in (
        ("domains", _are_numbers), ("split", _are_counts), ("client_loss", _are_quantiles), ("drifted", _is_count),
        ("events", _are_names), ("trained", _is_pair), ("heterogeneity", _is_apart),
    ):  # fmt: skip
        if key in line and not known(line[key]):
            raise FedtideError(f"{where}: damaged: '{key}' is of another kind")
    if not all(_are_ways(view) for view in scores.values()):
        raise FedtideError(f"{where}: damaged: 'others' or 'densities' is of another kind")
    if not all(_are_weights(view["weights"]) for view in scores.values() if "weights" in view):
        raise FedtideError(f"{where}: damaged: 'weights' is of another kind")


def _are_numbers(found: Any) -> bool:
    return isinstance(found, list) and all(isinstance(value, int | float) for value in found)


def _are_counts(found: Any) -> bool:
    """Whether this is a table, of one width."""
    return isinstance(found, list) and all(map(_are_numbers, found)) and len({len(row) for row in found}) == 1


def _are_quantiles(found: Any) -> bool:
    """Whether these are what `fedtide.runs.runner.losses` tells; null where nobody knows."""
    names = {"min", "q25", "q50", "q75", "max"}
    return isinstance(found, dict) and names <= found.keys() and all(_may_be_number(found[name]) for name in names)


def _is_count(found: Any) -> bool:
    return isinstance(found, int)


def _is_pair(found: Any) -> bool:
    return isinstance(found, list) and len(found) == 2 and all(map(_is_count, found))


def _are_names(found: Any) -> bool:
    return isinstance(found, list) and all(isinstance(name, str) for name in found)


def _is_apart(found: Any) -> bool:
    """Whether this is what `fedtide.runs.runner.heterogeneity` tells; null where nobody is in a cluster."""
    names = {"within", "all"}  # `shared` came later
    return isinstance(found, dict) and names <= found.keys() and all(map(_may_be_number, found.values()))


def _are_ways(view: dict[str, Any]) -> bool:
    tables = [view.get("others", {}), view.get("densities", {}), {"": view.get("density")}]
    return all(isinstance(table, dict) and all(map(_may_be_number, table.values())) for table in tables)


def _may_be_number(value: Any) -> bool:
    return value is None or isinstance(value, int | float)


def _are_weights(found: Any) -> bool:
    """Whether these are mean gate weights (`fedtide.evaluate.metrics.mean_weights`), with those of groups in them."""
    if not isinstance(found, dict) or not isinstance(found.get("groups", {}), dict):
        return False
    if not found.keys() - {"groups"}:
        return True  # nobody that was judged has any
    shared = found.get("shared")
    numbers = isinstance(shared, list) and all(isinstance(w, int | float) for w in [*shared, found.get("own", 0.0)])
    return numbers and all(_are_weights(each) for each in found.get("groups", {}).values())


def read_experiment(root: Path) -> list[ExperimentRecord]:
    """Every point of the experiment of a run folder; one where there is no sweep."""
    experiment = load(root)
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
    return [ExperimentRecord(point, points[point], list(methods.values())) for point, methods in records.items()]
