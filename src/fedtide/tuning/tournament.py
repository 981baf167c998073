"""Record of a tournament: methods of a study climb rungs on validation rows within a budget of seconds.

The folder is a run folder whose runs end early, and `ladder.jsonl`, the whole memory of the tournament:

config.toml         the study, with every candidate as a method
ladder.jsonl        how it began, the plan, a line per rung, and why it ended
<method>/<seed>/    runs, as far as they were played
study.toml          the study with the survivors, for a proper run
report.html         the page
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedtide.config import Experiment, brief, from_dict, resolved
from fedtide.core.atomic import flush, write_text
from fedtide.core.errors import UNREADABLE, FedtideError, printable
from fedtide.core.record import read_rounds
from fedtide.evaluate.rounds import score_in, weight_in
from fedtide.runs.digest import Verdict, verify_runs
from fedtide.runs.folder import load, plan
from fedtide.runs.preflight import resolve_auto
from fedtide.tuning.ladder import SEEDS, Cost, Standing, standings

LADDER = "ladder.jsonl"
STUDY = "study.toml"
COMMENT = """\
# Written by fedtide recommend: the methods of its tournament that may be the best{fedavg}, for a proper run.
# Its seeds are fresh: the tournament played only some of {seeds}.
"""
JUDGED = 4
"""Evaluations among the last rounds over which accuracy is averaged, if the study has fewer."""


@dataclass(frozen=True)
class Candidate:
    """An entry of a tournament: a method of the study. method: the entry is a variant of it. why: it was nominated."""

    entry: str
    method: str
    why: str = ""


@dataclass(frozen=True)
class Rung:
    """A rung that was reached: rounds done, seeds played, accuracy by entry and seed, and the entries that went on."""

    rounds: int
    seeds: tuple[int, ...]
    values: Mapping[str, Mapping[int, float]]
    kept: tuple[str, ...]


@dataclass(frozen=True)
class Tournament:
    """The record in a tournament folder.

    budget: seconds. candidates: in the order of nomination. said: lines of the inspection. rungs, seeds: planned.
    entered: entries in the plan. costs: seconds of each measured entry. reached: rungs so far, beyond the planned ones
    one for each seed more. failed: reasons, by entry. ended: why it is over, "" while it is not. spent: seconds so far.
    """

    study: Experiment
    budget: float
    candidates: tuple[Candidate, ...]
    said: tuple[str, ...] = ()
    rungs: tuple[int, ...] = ()
    seeds: int = 1
    entered: tuple[str, ...] = ()
    costs: Mapping[str, Cost] = field(default_factory=dict)
    reached: tuple[Rung, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)
    ended: str = ""
    spent: float = 0.0

    @property
    def standings(self) -> list[Standing]:
        """Standings of the entries that the last rung kept: of each method its best variant."""
        if not self.reached:
            return []
        rung = self.reached[-1]
        return standings({entry: rung.values[entry] for entry in rung.kept})

    @property
    def played(self) -> set[str]:
        """Entries with a score, or with a reason why there is none."""
        return {entry for rung in self.reached for entry in rung.values} | self.failed.keys()

    @property
    def survivors(self) -> list[str]:
        """Entries that are not clearly behind, the best first."""
        return [standing.entry for standing in self.standings if standing.verdict != "behind"]

    def last_rung(self, entry: str) -> Rung | None:
        """Return the highest rung that an entry reached."""
        return next((rung for rung in reversed(self.reached) if entry in rung.values), None)


class TooShort(FedtideError):
    """The budget was over before two methods could be compared."""


def played_by(study: Experiment) -> Experiment:
    """Return the experiment that a tournament plays: the study's world, other seeds, and validation rows alone."""
    first = max(study.seeds) + 1
    step = max(min(study.eval_every, study.late // JUDGED), 1)  # so that several evaluations are averaged
    changes: dict[str, Any] = {
        "seeds": tuple(range(first, first + SEEDS)), "eval_every": step, "eval_splits": ("val",),
        "average_last": study.late, "claim": (), "tune": None, "stop_at": None, "forgetting": None, "metrics": (),
        "embedding": None, "baseline": None, "checkpoint_every": None, "track": None,
    }  # fmt: skip
    return resolve_auto(study.model_copy(update=changes))[0]


def first_line(budget: float, candidates: Sequence[Candidate], lines: Iterable[str], spent: float) -> str:
    """Return the first line of `ladder.jsonl`; `spent` are the seconds that the inspection took."""
    entries = [vars(candidate) for candidate in candidates]
    return json.dumps({"budget": budget, "candidates": entries, "said": list(lines), "spent": spent}) + "\n"


def read_tournament(root: Path, *, imports: bool = True) -> Tournament:
    """Read the record of a tournament folder.

    Raises:
        FedtideError: the folder is not that of a tournament, or is damaged.
    """
    if not (root / LADDER).is_file():
        raise FedtideError(f"{root}: not the folder of a tournament (no {LADDER} in it)")
    study, lines = load(root, imports=imports), read_rounds(root, LADDER)
    fields: dict[str, Any] = {}
    try:
        first, *rest = lines
        candidates = tuple(Candidate(str(c["entry"]), str(c["method"]), str(c["why"])) for c in first["candidates"])
        fields = {"budget": float(first["budget"]), "said": tuple(map(str, first["said"])), "reached": (), "failed": {}}
        for line in rest:
            fields["failed"] |= {str(entry): str(why) for entry, why in line.get("failed", {}).items()}
            if "rungs" in line:
                fields["rungs"], fields["seeds"] = tuple(map(int, line["rungs"])), int(line["seeds"])
                fields["entered"] = tuple(map(str, line["entered"]))
                fields["costs"] = {str(entry): Cost(*map(float, cost)) for entry, cost in line["costs"].items()}
            if "values" in line:
                fields["reached"] += (_rung(line),)
            fields["ended"] = str(line.get("ended", ""))
        fields["spent"] = float(lines[-1]["spent"])
    except UNREADABLE:
        raise FedtideError(f"{root / LADDER}: damaged: not what a tournament writes") from None
    record = Tournament(study, candidates=candidates, **fields)
    names = {method.name for method in study.method}
    written = {c.entry for c in candidates} | {entry for rung in record.reached for entry in rung.values}
    whole = all(set(rung.kept) <= rung.values.keys() for rung in record.reached)
    if not written <= names or not set(record.entered) <= names or not whole:
        raise FedtideError(f"{root / LADDER}: damaged: it names methods that config.toml does not have")
    return record


def _rung(line: Mapping[str, Any]) -> Rung:
    values = {
        str(entry): {int(seed): math.nan if value is None else float(value) for seed, value in by_seed.items()}
        for entry, by_seed in line["values"].items()
    }
    return Rung(int(line["rounds"]), tuple(map(int, line["seeds"])), values, tuple(map(str, line["kept"])))


def append_line(root: Path, line: Mapping[str, Any]) -> None:
    """Append a line to `ladder.jsonl` and sync it to disk; NaN, of a failure, becomes null."""
    values = {
        entry: {seed: None if math.isnan(value) else value for seed, value in by_seed.items()}
        for entry, by_seed in line.get("values", {}).items()
    }
    with open(root / LADDER, "a", encoding="utf-8") as file:
        file.write(json.dumps({**line, **({"values": values} if values else {})}, allow_nan=False) + "\n")
    flush(root / LADDER)


def cut_line(root: Path) -> None:
    """Remove a line that a killed process left half-written."""
    text = (root / LADDER).read_text(encoding="utf-8")
    if not text.endswith("\n"):
        write_text(root / LADDER, text[: text.rfind("\n") + 1])


def write_study(root: Path, record: Tournament) -> Path:
    """Write the study with the survivors, and plain FedAvg to compare them with, ready for `fedtide run`."""
    names, first = list(record.survivors), record.candidates[0].method
    plain = next((candidate.entry for candidate in played_entries(record) if candidate.method == first), None)
    fedavg = ""
    if plain is not None and plain not in names:
        names, fedavg = [*names, plain], f", and {printable(plain)} to compare them with"
    values = resolved(record.study)
    values["method"] = [method for method in values["method"] if method["name"] in names]
    values["claim"] = [
        written
        for written, claim in zip(values["claim"], record.study.claim, strict=True)
        if {claim.method, *claim.rivals} <= set(names)
    ]
    if values.get("baseline") not in names:
        values["baseline"] = plain or names[0]
    text = brief(from_dict(values, where=str(root / STUDY)))
    seeds = played_by(record.study).seeds
    write_text(root / STUDY, COMMENT.format(fedavg=fedavg, seeds=f"{seeds[0]} to {seeds[-1]}") + text + "\n")
    return root / STUDY


def played_entries(record: Tournament) -> list[Candidate]:
    """Return the entries that reached a rung, those that reached the highest first, the best first on each."""
    order: dict[str, None] = {}
    for rung in reversed(record.reached):
        order |= dict.fromkeys(standing.entry for standing in standings(rung.values))
    by_name = {candidate.entry: candidate for candidate in record.candidates}
    return [by_name[entry] for entry in order]


def count_of_seeds(seeds: Sequence[int]) -> str:
    """Return the number of some seeds in words."""
    return f"{len(seeds)} seed{'s' * (len(seeds) != 1)}"


def curve_of(folder: Path) -> tuple[list[int], list[float], list[float] | None]:
    """Return the rounds done at each evaluation of a run, the accuracy on validation rows, and the weights.

    Evaluations without rows are left out, for example of a window in which nothing came. An accuracy is NaN if there is
    none; the weights are None if all evaluations count the same.
    """
    rounds, values, weights = [], [], []
    for line in read_rounds(folder):
        if scores := line.get("scores", {}).get("val"):
            value = score_in(scores)
            rounds.append(int(line["round"]) + 1)
            values.append(math.nan if value is None else float(value))
            weights.append(weight_in(line, "val"))
    numbers = [weight for weight in weights if weight is not None]
    return rounds, values, numbers if len(numbers) == len(weights) else None


def verify(root: Path) -> Iterator[Verdict]:
    """Check the runs that a tournament played, as far as it played them, and yield a verdict for each.

    Raises:
        FedtideError: it is no folder of a tournament, or its configuration or ladder cannot be read.
    """
    record = read_tournament(root, imports=False)
    reached = {
        (entry, seed): rung.rounds
        for rung in record.reached
        for entry, by_seed in rung.values.items()
        for seed in by_seed
    }
    runs = plan(played_by(record.study), root)
    played = [run for run in runs if (run.method.name, run.seed) in reached or run.folder.exists()]
    for verdict in verify_runs(played):
        least = reached.get((verdict.run.method.name, verdict.run.seed), 0)
        if verdict.wrong is None and verdict.rounds < least:
            verdict = replace(verdict, wrong=f"{verdict.run.folder}: {LADDER} has {least} rounds of it")
        yield verdict
