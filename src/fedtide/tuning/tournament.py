"""Tournaments: methods that an inspection nominates climb rungs on validation rows within a budget of seconds.

The folder is a run folder whose runs end early, and `ladder.jsonl`, the whole memory of the tournament:

config.toml         the study, with every candidate as a method
ladder.jsonl        how it began, the plan, a line per rung, and why it ended
inspection/         what an inspection of data wrote
<method>/<seed>/    runs, as far as they were played
study.toml          the study with the survivors, for a proper run
report.html         the page
"""

import json
import math
import shutil
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from pydantic import TypeAdapter
from rich.console import Console

from fedtide.config import Experiment, Method, brief, from_dict, resolved, slug, to_toml
from fedtide.core.atomic import append, write_text
from fedtide.core.base import Moment
from fedtide.core.errors import UNREADABLE, FedtideError, refused, within
from fedtide.core.record import read_lines, run_lock
from fedtide.data.saved import usual_class
from fedtide.data.targets import target_words
from fedtide.draw.prose import counted, listed
from fedtide.evaluate.judge import views
from fedtide.evaluate.metrics import mean_of_last
from fedtide.evaluate.references import KEYS, References, notes_on_missing, reference_words
from fedtide.evaluate.rounds import score_in
from fedtide.fields.types import changed, rounded_up
from fedtide.fleets.pool import Processes
from fedtide.inspection import findings as inspection
from fedtide.inspection.findings import Findings
from fedtide.inspection.table import of_study
from fedtide.personal.client_networks import ALONE as FULL_TRAINING
from fedtide.report.lead import BySeed, find_doubt
from fedtide.report.run_records import Curve, RunRecord, at
from fedtide.runs.build import as_json, population_of
from fedtide.runs.digest import Verdict, verify_runs
from fedtide.runs.display import TerminalBars
from fedtide.runs.experiment import RunCall, Stop, in_parallel, started
from fedtide.runs.folder import check_entries, fill_folder, load, make_folder, new_folder, plan, shift_file
from fedtide.runs.preflight import preflight, resolve_auto
from fedtide.runs.privacy import check_needed
from fedtide.runs.runner import Run
from fedtide.tuning.ladder import (
    LEAST,
    SEEDS,
    Cost,
    Standing,
    climbing,
    describe_others,
    half,
    pays_for_all,
    planned,
    standings,
    window,
)

LADDER = "ladder.jsonl"
STUDY = "study.toml"
INSPECTION = "inspection"
COMMENT = """\
# Written by fedtide recommend: the methods of its tournament that may be the best, and {first} to compare them with.
# Its seeds are fresh: the tournament played only some of {seeds}.
"""
JUDGED = 4
"""Evaluations among the last rounds over which accuracy is averaged, if the study has fewer."""
MEASURED = 1 / 8
"""Share of the budget, once data are loaded, in which methods show how long they take; others are not entered."""
KEPT_BACK = 0.8
"""Share of the rest of the budget that the plan counts on, because entries that go on may take longer than others."""
OVER = "the budget was over"
FAILED = "all methods failed"
"""Reasons why a tournament has ended."""
NO_VALUE = "no accuracy on validation rows that is finite; give data.split.val more, or data more clients or time"
"""Reason for the failure of an entry that was played."""
LOCAL = "local"
"""Its clients train from scratch whenever their rows change: it may take longer than all other methods together."""
PLAIN = "one model for all, the baseline to beat"
RATES = 0.5, 2.0
"""Learning rates of methods that are nominated for data, as multiples of those in the inspection's study."""
VALIDATED = 0.2
"""Share of the training rows of such data by which methods are judged."""


# -- the record --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """An entry of a tournament: a method of the study. method: the entry is a variant of it. why: it was nominated."""

    entry: str
    method: str
    why: str = ""


@dataclass(frozen=True)
class Rung:
    """A rung that was reached: rounds done, seeds played, accuracy by entry and seed, and the entries that went on.

    references: scores of answers without a federation by their words and seed, on the same rows.
    """

    rounds: int
    seeds: tuple[int, ...]
    values: Mapping[str, Mapping[int, float]]
    kept: tuple[str, ...]
    references: Mapping[str, Mapping[int, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Tournament:
    """The record in a tournament folder.

    budget: seconds. candidates: in the order of nomination. said: lines of the inspection. spent: seconds so far.
    rungs, seeds: planned. entered: entries in the plan. costs: of each measured method. reached: rungs so far, beyond
    the planned ones one for each seed more. failed: reasons, by entry. ended: why it is over, "" while it is not.
    enough: seconds of a budget that would pay for all candidates and all rounds, by the costs; 0 if nothing is known.
    """

    study: Experiment
    budget: float
    candidates: tuple[Candidate, ...]
    said: tuple[str, ...]
    spent: float
    rungs: tuple[int, ...] = ()
    seeds: int = 1
    entered: tuple[str, ...] = ()
    costs: Mapping[str, Cost] = field(default_factory=dict)
    reached: tuple[Rung, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)
    ended: str = ""
    enough: float = 0.0

    @property
    def standings(self) -> list[Standing]:
        """Standings of the entries that the last rung kept: of each method its best variant."""
        return standings({entry: rung.values[entry] for rung in self.reached[-1:] for entry in rung.kept})

    @property
    def played(self) -> set[str]:
        """Entries with a score, or with a reason why there is none."""
        return {entry for rung in self.reached for entry in rung.values} | self.failed.keys()

    @property
    def survivors(self) -> list[str]:
        """Entries that are not clearly behind, the highest first."""
        return [standing.entry for standing in self.standings if standing.verdict != "behind"]

    @property
    def doubt(self) -> str:
        """Why the entry with the highest score does not lead, as the beginning of a sentence; "" if it does."""
        rung, first = self.reached[-1], self.standings[0].entry
        others = {entry: rung.values[entry] for entry in rung.kept if entry != first}
        complete = rung.rounds == self.study.rounds
        return find_doubt(rung.values[first], others, rung.references, complete=complete)

    @property
    def stands(self) -> str:
        """The verb of the entry with the highest score: it leads, or it has that score and no more."""
        return "has the highest score" if self.doubt else "leads"

    def last_rung(self, entry: str) -> Rung:
        """Return the highest rung that an entry reached."""
        return next(rung for rung in reversed(self.reached) if entry in rung.values)


class TooShort(FedtideError):
    """The budget was over before two methods could be compared."""


def played_by(study: Experiment) -> Experiment:
    """Return the experiment that a tournament plays: the study's world, other seeds, and validation rows alone."""
    first = max(study.seeds) + 1
    step = max(min(study.eval_every, study.late // JUDGED), 1)  # so that several evaluations are averaged
    changes: dict[str, Any] = {
        "seeds": tuple(range(first, first + SEEDS)), "eval_every": step, "eval_splits": ("val",),
        "average_last": study.late, "claim": (), "tune": None, "stop_at": None, "keep": None, "forgetting": None,
        "metrics": (), "embedding": None, "baseline": None, "references": (), "checkpoint_every": None, "track": None,
    }  # fmt: skip
    return resolve_auto(study.model_copy(update=changes))[0]


def first_line(budget: float, candidates: Sequence[Candidate], lines: Iterable[str], spent: float) -> str:
    """Return the first line of `ladder.jsonl`; `spent` are the seconds that the inspection took."""
    entries = [asdict(candidate) for candidate in candidates]
    return json.dumps({"budget": budget, "candidates": entries, "said": list(lines), "spent": spent}) + "\n"


def read_tournament(root: Path, *, imports: bool = True) -> Tournament:
    """Read the record of a tournament folder.

    Raises:
        FedtideError: the folder is not that of a tournament, or is damaged.
    """
    if not (root / LADDER).is_file():
        raise FedtideError(f"{root}: not the folder of a tournament (no {LADDER} in it)")
    study = load(root, imports=imports)
    fields: dict[str, Any] = {"study": study, "reached": [], "failed": {}}
    try:
        for line in read_lines(root, LADDER):
            reached = fields["reached"] + ([line["rung"]] if "rung" in line else [])
            failed = fields["failed"] | line.get("failed", {})
            fields |= {**line, "reached": reached, "failed": failed, "spent": line["spent"]}
        record = TypeAdapter(Tournament).validate_python(fields)
    except UNREADABLE:
        raise FedtideError(f"{root / LADDER}: damaged: not what a tournament writes") from None
    written = {*record.entered, *record.played, *(candidate.entry for candidate in record.candidates)}
    if not written <= {method.name for method in study.method}:
        raise FedtideError(f"{root / LADDER}: damaged: it names methods that config.toml does not have")
    return record


def write_study(root: Path, record: Tournament) -> None:
    """Write the study with the survivors, and plain FedAvg to compare them with, ready for `fedtide run`."""
    order, first = played_entries(record), record.candidates[0].method
    plain = next((candidate.entry for candidate in order if candidate.method == first), order[0].entry)
    values, names = resolved(record.study), {*record.survivors, plain}
    pairs = zip(record.study.method, values["method"], strict=True)  # a table has no form such as "(safe)" in its name
    values |= {"method": [table for method, table in pairs if method.name in names], "claim": []}
    if values.get("baseline") not in names:
        values["baseline"] = plain
    text, seeds = brief(from_dict(values, where=str(root / STUDY))), played_by(record.study).seeds
    comment = COMMENT.format(first=json.dumps(plain), seeds=f"{seeds[0]} to {seeds[-1]}")
    write_text(root / STUDY, f"{comment}{text}\n")


def played_entries(record: Tournament) -> list[Candidate]:
    """Return the entries that reached a rung, those that reached the highest first, the best first on each."""
    order: dict[str, None] = {}
    for rung in reversed(record.reached):
        order |= dict.fromkeys(standing.entry for standing in standings(rung.values))
    by_name = {candidate.entry: candidate for candidate in record.candidates}
    return [by_name[entry] for entry in order]


def curve_of(folder: Path) -> tuple[RunRecord, Curve]:
    """Return the record of a run, and its accuracy on validation rows by rounds done.

    Evaluations without rows are left out, for example of a window in which nothing came. An accuracy is NaN if there is
    none.
    """
    run = RunRecord(0, folder, rounds=0)
    return run, run.curve("val", lambda scores: math.nan if score_in(scores) is None else score_in(scores))


def value_at(folder: Path, rounds: int, over: int) -> float:
    """Return the mean accuracy of a run over the last `over` of the first rounds; NaN without an evaluation."""
    run, (after, values) = curve_of(folder)
    done = after <= rounds
    return mean_of_last(after[done], values[done], over, run.weights_of("val", after[done]))


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


# -- the beginning -----------------------------------------------------------------------------------------------------


def nominated(findings: Findings | None, methods: Sequence[Method]) -> list[tuple[Method, str]]:
    """Return methods in the order in which they are entered, with the reasons.

    Plain FedAvg is the first, the methods without a federation are the last. Of several methods with one algorithm and
    loss the first comes before the others, because a shift concerns algorithms. Then those come first that findings
    support, the strongest first, else as they are given.

    Args:
        findings: of an inspection; None if nothing could be asked.
        methods: the candidates.
    """
    kinds = [(method.algorithm, str(getattr(method.loss, "kind", ""))) for method in methods]
    plain = next((m for m, kind in zip(methods, kinds, strict=True) if kind == ("fedavg", "cross-entropy")), None)
    repeats: dict[tuple[str, str], int] = {}
    order = []
    for number, (method, kind) in enumerate(zip(methods, kinds, strict=True)):
        repeats[kind] = repeats.get(kind, -1) + 1
        support = inspection.reasons(findings, *kind) if findings is not None else {}
        why = PLAIN if method is plain else "; ".join(support)
        place = (method is not plain) + (method.algorithm == LOCAL)
        order.append(((place, repeats[kind], -max(support.values(), default=0), number), method, why))
    return [(method, why) for _, method, why in sorted(order, key=lambda entry: entry[0])]


def begin_with_data(root: Path, findings: Findings, budget: float, began: float) -> None:
    """Make the folder of a tournament about data, with the inspection and its study in it.

    Args:
        root: the folder, which must not exist or be empty.
        findings: of an inspection.
        budget: seconds.
        began: when the inspection began, as `time.monotonic` says it.

    Raises:
        FedtideError: there are no features, methods cannot be judged by the data, or half of the budget is gone.
    """
    name = findings.table.name
    if findings.table.features is None:
        raise FedtideError(f"{name}: no columns of features, without which there is no model")
    _check_left(name, budget, began)
    with new_folder(root) as temporary:
        looked, place = temporary / INSPECTION, root / INSPECTION
        looked.mkdir()
        inspection.write_files(findings, looked, place)
        check_judged(_candidates(findings, looked)[0], name)  # its rows are still there
        _check_left(name, budget, began)
        study, candidates = _candidates(findings, place)
        lines = [*str(findings).splitlines(), *notes_on_missing(study.references)]
        line = first_line(budget, candidates, lines, time.monotonic() - began)
        fill_folder(temporary, {"config.toml": to_toml(study), LADDER: line})


def begin_with_study(
    root: Path, study: Experiment, where: str, budget: float, began: float, scale: str | None = None
) -> None:
    """Make the folder of a tournament among the methods of a study, whose world is inspected.

    Args:
        root: the folder, which must not exist or be empty.
        where: its name in messages.
        budget: seconds.
        began: when its reading began, as `time.monotonic` says it.
        scale: that of a recipe that is played, if any.

    Raises:
        FedtideError: the study has a sweep, one method alone, or no validation rows, could not be run, or half of the
            budget is gone.
    """
    if study.sweep:
        raise refused(f"{where}: sweep", next(iter(study.sweep)), "none: a tournament is about one point of it")
    check_judged(study, where)
    playing, findings = played_by(study), None
    with suppress(FedtideError):  # rows without one label each, or of one label alone, nominate as they are given
        findings = inspection.inspect_table(of_study(playing, where), playing.seeds[0])
    _check_left(where, budget, began)
    candidates = [Candidate(method.name, method.name, why) for method, why in nominated(findings, study.method)]
    lines = [answer.line for answer in findings or ()]
    lines += notes_on_missing(study.references)
    line = first_line(budget, candidates, lines, time.monotonic() - began)
    make_folder(root, {"config.toml": to_toml(study), LADDER: line}, scale)


def remove(root: Path) -> None:
    """Remove what a tournament wrote, by its names, and the folder; what a person put into it stays."""
    record = read_tournament(root, imports=False)
    runs = {run.folder.relative_to(root).parts[0] for run in plan(played_by(record.study), root)}
    ours = "config.toml", LADDER, "environment.json", "shift", INSPECTION  # without the first it is nothing to resume
    for name in (*ours, *runs):
        path = root / name
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    with suppress(OSError):
        root.rmdir()


def _check_left(name: str, budget: float, began: float) -> None:
    """Raise if half of a budget is gone before the tournament, whose processes load the data anew."""
    spent = time.monotonic() - began
    if spent > budget / 2:
        raise TooShort(too_short(name, budget, spent, "reading and looking"))


def check_judged(study: Experiment, where: str) -> None:
    """Raise if a study cannot be played, has one method alone, or no validation rows."""
    if len(study.method) < 2:
        raise refused(f"{where}: method", len(study.method), "two methods or more, which are compared")
    if study.fleet.kind == "ray":
        raise refused(f"{where}: fleet.kind", "ray", "local, workers, stacked or auto in a tournament, of one machine")
    if not study.data.split.val:
        raise refused(f"{where}: data.split.val", 0, "a share of the rows, by which methods are judged, such as 0.2")
    playing = played_by(study)
    with_references = playing.model_copy(update={"references": study.references})
    with within(where):
        forms = preflight(with_references, where).forms
    check_needed(playing, forms, where)


def _candidates(findings: Findings, place: Path) -> tuple[Experiment, list[Candidate]]:
    """Return the study of an inspection, whose folder is `place`, with each method at each rate, and the candidates."""
    values: dict[str, Any] = inspection.study(findings, place) or {}
    values["data"]["split"] = {"val": VALIDATED}
    del values["baseline"]
    entries = list(at_rates(inspection.methods(findings), values["defaults"]["local"]))
    values["method"] = [table for table, _, _ in entries]
    study = from_dict(values, where=str(place / "study.toml"))
    pairs = zip(study.method, entries, strict=True)
    return study, [Candidate(entry.name, f"{method}{entry.form}", why) for entry, (_, method, why) in pairs]


def at_rates(
    proposals: Sequence[inspection.Proposal], usual: Mapping[str, Any]
) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Yield the table of each proposed method at each rate, with the method and the reason; local training comes last.

    Args:
        usual: training of a study that has no other.
    """
    for name, algorithm, options, why in sorted(proposals, key=lambda proposal: proposal.algorithm == LOCAL):
        key = "solver" if algorithm == LOCAL else "local"
        trainings = {name: options.get(key, usual)}
        if algorithm == LOCAL and key not in options:
            # A budget may not pay for the training of the study.
            trainings = {f"{name}, short training": usual, f"{name}, full training": changed(FULL_TRAINING)}
        for method, training in trainings.items():
            for rate in (share * training["lr"] for share in RATES):
                entry = {"name": f"{method}, lr {rate:g}", "algorithm": algorithm, **options}
                yield {**entry, key: {**training, "lr": rate}}, method, why


# -- play --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Climb:
    """One run, as it travels to a process: its last round, and the end of the budget, as `time.monotonic` says it."""

    run: RunCall
    rounds: int
    until: float


def climb(call: Climb, stop: Callable[[], bool]) -> Generator[int, None, dict[str, Any]]:
    """Play a run to a round, in any process: yield rounds; return their number, the seconds, and the failure."""
    began, count, failed = time.monotonic(), 0, ""
    try:
        experiment = from_dict(json.loads(call.run.experiment))
        method = next(method for method in experiment.method if method.name == call.run.method)
        run = Run(experiment, method, call.run.seed, Path(call.run.folder))
        rounds = run.play(lambda: stop() or time.monotonic() > call.until, until=call.rounds)
        for _ in rounds if began < call.until else ():
            count += 1
            yield count
    except FedtideError as error:
        failed = str(error)
    return {"seconds": time.monotonic() - began, "rounds": count, "failed": failed}


@dataclass(frozen=True)
class Refer:
    """References of a study on validation rows, as they travel to a process: the seed, and rounds with their times."""

    experiment: str
    seed: int
    moments: tuple[tuple[int, float], ...]


def refer(call: Refer, stop: Callable[[], bool]) -> Generator[int, None, dict[str, list[tuple[int, float]]]]:
    """Judge the references that a study names; return rounds done and scores of each by its name."""
    experiment, curves = from_dict(json.loads(call.experiment)), dict[str, list[tuple[int, float]]]()
    people = population_of(experiment, experiment.shift, call.seed)
    references = References(people, experiment.references)
    (view,) = views(people, experiment.eval_clients, call.seed, experiment.eval_splits)
    for number, seconds in call.moments if not stop() else ():
        moment = Moment(number, experiment.rounds, seconds)
        scores = references.scores(people.judged(view.clients, view.part, moment), moment, view.part)
        for name, score in scores.items():
            curves.setdefault(name, []).append((number + 1, score))
        yield number
    return curves


@dataclass(frozen=True)
class Step:
    """The next runs of a tournament: entries and seeds, to how many rounds."""

    rounds: int
    entries: Sequence[str]
    seeds: Sequence[int]


@dataclass(frozen=True)
class Play:
    """Context of a tournament that is the same for all rungs."""

    experiment: Experiment
    root: Path
    display: TerminalBars
    pool: Processes | None
    stop: Stop
    budget: float
    until: float

    @property
    def processes(self) -> int:
        """Number of processes."""
        return 1 if self.pool is None else len(self.pool.processes)

    @property
    def left(self) -> float:
        """Seconds that are left of the budget."""
        return self.until - time.monotonic()

    def pays_for(self, seconds: Sequence[float], share: float = 1.0) -> bool:
        """Tell whether a share of the rest of the budget pays for runs of so many seconds."""
        return max(sum(seconds) / self.processes, *seconds) <= share * self.left

    def runs(self, step: Step, below: int = 0) -> dict[tuple[str, int], dict[str, Any]]:
        """Play runs, which have `below` rounds, to a round; return the outcome by entry and seed, {} if there is none.

        The first seed of all entries comes first.
        """
        text = as_json(self.experiment)
        pairs = [(entry, seed) for seed in step.seeds for entry in step.entries]
        calls = [Climb(RunCall(text, *pair, str(self.folder(*pair))), step.rounds, self.until) for pair in pairs]
        outcomes: dict[tuple[str, int], dict[str, Any]] = {pair: {} for pair in pairs}
        self.display.start(len(calls) * (step.rounds - below))
        for message in in_parallel(climb, calls, self.pool, self.stop):
            if message.final:
                outcomes[pairs[message.call]] = message.value or {}
            else:
                self.display.add(1)
        self.display.end()
        return outcomes

    def folder(self, entry: str, seed: int) -> Path:
        """Return the folder of a run."""
        return self.root / slug(entry) / str(seed)

    def done(self, entry: str, seed: int) -> int:
        """Return the last evaluation of a run, in rounds done."""
        lines = read_lines(self.folder(entry, seed))
        return max((int(line["round"]) + 1 for line in lines if "val" in line.get("scores", {})), default=0)

    def value(self, entry: str, seed: int, rounds: int) -> float:
        """Return the accuracy of a run at a rung."""
        over = window(rounds, self.experiment.rounds, self.experiment.late, self.experiment.period)
        return value_at(self.folder(entry, seed), rounds, over)

    def references(self, study: Experiment, entry: str, seeds: Sequence[int], rounds: int) -> dict[str, BySeed]:
        """Return the scores of references by their words and seed, on the rows on which a rung judges an entry."""
        method = next(method for method in self.experiment.method if method.name == entry)
        changes = {"references": study.references, "shift": self.experiment.shift_of(method)}
        text, calls = as_json(self.experiment.model_copy(update=changes)), list[Refer]()
        over = window(rounds, self.experiment.rounds, self.experiment.late, self.experiment.period)
        runs = [RunRecord(s, self.folder(entry, s), 0, shift=shift_file(self.root, method, s)) for s in seeds]
        for run in runs:
            starts = [0.0, *(float(line["seconds"]) for line in run.lines)]
            judged = [after - 1 for after, _ in run.entries("val") if rounds - over < after <= rounds]
            calls.append(Refer(text, run.seed, tuple((number, starts[number]) for number in judged)))
        played = in_parallel(refer, calls, self.pool, self.stop) if study.references else ()
        fitted = {message.call: message.value or {} for message in played if message.final}
        scores: dict[str, dict[int, float]] = {}
        for number, run in enumerate(runs):
            curves = {name: run.curve("val", at(*keys)) for name, keys in KEYS.items()}
            curves |= {name: tuple(np.array(pairs).T) for name, pairs in fitted.get(number, {}).items()}
            words = target_words(self.experiment.data.target, usual_class(run.labels))
            for name, (after, values) in curves.items():
                if (done := after <= rounds).any():
                    value = mean_of_last(after[done], values[done], over, run.weights_of("val", after[done]))
                    scores.setdefault(reference_words(name, words), {})[run.seed] = value
        return {**scores}

    def write(self, **line: Any) -> Tournament:
        """Write a line with the seconds that are spent, and return the record with it."""
        append(self.root / LADDER, json.dumps({**line, "spent": self.budget - self.left}, allow_nan=False))
        return read_tournament(self.root)

    def span(self, *rungs: int) -> str:
        """Return rounds of those of the study, such as "32 and 64 of 64 rounds"."""
        return f"{listed([str(rung) for rung in rungs])} of {self.experiment.rounds} rounds"


def execute(root: Path, *, workers: int | None = None, display: TerminalBars | None = None) -> bool:
    """Play the rest of a tournament, and write its study.

    Decisions are in `ladder.jsonl`: after a stop or a kill the tournament goes on from there, with the seconds that
    were left at its last line. Its rungs depend on the seconds that methods take on this machine.

    Returns:
        False if a person stopped it; everything is saved then.

    Raises:
        FedtideError: all methods failed; `TooShort` if the budget was over before two of them could be compared.
    """
    display = display or TerminalBars(Console(quiet=True))
    with run_lock(root, "config.toml"), ExitStack() as stack:
        check_entries(root, played=True)
        record = read_tournament(root)
        experiment = played_by(record.study)
        stack.callback(display.end)
        if not record.ended:
            count = len(record.candidates) * (1 if record.rungs else 2)
            pool, stop = stack.enter_context(started(experiment, workers, count))
            until = time.monotonic() + record.budget - record.spent
            play = Play(experiment, root, display, pool, stop, record.budget, until)
            if not record.rungs:
                record = make_plan(play, record)
            while not record.ended and not stop.asked:
                record = climb_further(play, record)
            if stop.asked:
                return False
        if not record.survivors:
            reasons = "; ".join(f"{entry}: {why}" for entry, why in record.failed.items())
            if record.ended == OVER:
                failed = f"; others failed: {reasons}" if reasons else ""
                raise TooShort(too_short(root.name, record.budget, record.spent, "first rounds") + failed)
            raise FedtideError(f"{root}: no two methods could be compared, as they failed: {reasons}")
        write_study(root, record)
    return True


def too_short(name: str, budget: float, spent: float, purpose: str) -> str:
    """Return the line about a budget that is too short, with one that would do: the first rounds are a share of it.

    Seconds beyond the budget went into rounds that had begun, and are not asked for again.

    >>> too_short("study", 10.0, 24.0, "first rounds")
    '--budget: study: found 10 s, allowed: 50s or more, as 24 s went into first rounds'
    """
    enough = rounded_up(max(spent / MEASURED, 2 * budget) if spent < budget else 2 * spent)
    return f"--budget: {name}: found {budget:g} s, allowed: {enough} or more, as {spent:.0f} s went into {purpose}"


def make_plan(play: Play, record: Tournament) -> Tournament:
    """Time the first variant of methods for a few rounds, as far as a share of the budget goes, and plan the rungs."""
    experiment, variants = play.experiment, dict[str, list[str]]()
    for candidate in record.candidates:
        variants.setdefault(candidate.method, []).append(candidate.entry)
    rounds, seed = min(max(experiment.eval_every, 3), experiment.rounds), experiment.seeds[0]
    waiting, left_at_begin = list(variants), play.left
    costs: dict[str, Cost] = {}
    failed, loaded = dict[str, str](), list[str]()
    play.display.say(f"timing {len(variants)} methods")
    while waiting and not (len(costs) > LEAST and left_at_begin - play.left > MEASURED * left_at_begin):
        batch, waiting = waiting[: play.processes], waiting[play.processes :]
        outcomes = play.runs(Step(rounds, [variants[method][0] for method in batch], [seed]))
        for method, (run, outcome) in zip(batch, outcomes.items(), strict=True):
            if outcome.get("failed"):
                failed[run[0]] = outcome["failed"]
            elif outcome and play.done(*run):
                lines = read_lines(play.folder(*run), "timings.jsonl")  # the first round loads and warms up
                per_round = fmean(float(line["seconds"]) + float(line["evaluation"]) for line in (lines[1:] or lines))
                setup = max(outcome["seconds"] - outcome["rounds"] * per_round, 0.0)
                costs[method] = Cost(setup, per_round, len(variants[method]))
        if play.stop.asked:
            return record
        if not loaded:  # every process has loaded the data now, and does so once
            loaded, left_at_begin = list(costs), play.left
    over = len(costs) + len(failed) < len(variants)
    if not costs or (over and len(costs) < LEAST):
        return play.write(failed=failed, ended=OVER if over else FAILED)
    later = max((cost.setup for method, cost in costs.items() if method not in loaded), default=math.inf)
    costs |= {method: replace(costs[method], setup=min(costs[method].setup, later)) for method in loaded}
    seconds = max(KEPT_BACK * play.left * play.processes, 0.0)
    ladder = planned(list(costs.values()), experiment.rounds, experiment.eval_every, seconds)
    by_entered = {method: variants[method] for method in list(costs)[: ladder.entries]}
    entered = [entry for entries in by_entered.values() for entry in entries]
    play.display.say(f"  {describe_plan(by_entered, ladder.rungs)}")
    # Methods that were not timed are taken to cost as much as others.
    mean = Cost(fmean(cost.setup for cost in costs.values()), fmean(cost.round for cost in costs.values()))
    working = [entries[0] not in failed for entries in variants.values()]
    every = [
        costs.get(method, replace(mean, variants=len(entries)))
        for (method, entries), works in zip(variants.items(), working, strict=True) if works
    ]  # fmt: skip
    timing = sum(cost.of(rounds) for cost in every) / play.processes
    climb_all = pays_for_all(every, experiment.rounds, experiment.eval_every) / KEPT_BACK / play.processes
    enough = play.budget - left_at_begin + max(timing / MEASURED, timing + climb_all)
    by_method = {method: asdict(cost) for method, cost in costs.items()}
    return play.write(
        rungs=ladder.rungs, seeds=ladder.seeds, entered=entered, costs=by_method, failed=failed, enough=enough
    )


def describe_plan(entered: Mapping[str, Sequence[str]], rungs: Sequence[int]) -> str:
    """Describe the plan in a sentence.

    Args:
        entered: entries of each method.
        rungs: rounds of each rung.

    >>> describe_plan({"FedAvg": ["lr 0.1", "lr 0.2"], "IFCA": ["lr 0.1", "lr 0.2"]}, (54, 100))
    '2 methods at 2 learning rates make 4 entries. All play 54 rounds, the better half 100.'
    """
    rates = {len(entries) for entries in entered.values()}
    at = f" at {max(rates)} learning rates" if len(rates) == 1 and max(rates) > 1 else ""
    count = sum(map(len, entered.values()))
    make = f"{counted(len(entered), 'method')}{at} make {count} entries" if count > len(entered) else f"{count} methods"
    later = "".join(f", the better half {rung}" for rung in rungs[1:])
    return f"{make}{'' if count > len(entered) else ' are entered'}. All play {rungs[0]} rounds{later}."


def next_step(play: Play, record: Tournament) -> Step | str:
    """Return the next runs, or the reason why a tournament is over.

    The rungs of the plan come first. If the budget pays for that, the better half then plays twice the rounds. Last
    come more seeds of the entries that cannot be told apart.
    """
    seeds, number = play.experiment.seeds[: record.seeds], len(record.reached)
    if number < len(record.rungs):
        return Step(record.rungs[number], record.reached[-1].kept if number else record.entered, seeds)
    method = {candidate.entry: candidate.method for candidate in record.candidates}
    top, step, study = record.reached[-1], play.experiment.eval_every, play.experiment.rounds
    further = min(step * math.ceil(2 * top.rounds / step), study)
    better = climbing({entry: top.values[entry] for entry in top.kept}, method, half(len(top.kept)))
    seconds = [record.costs[method[entry]].of(further - top.rounds) for entry in better for _ in seeds]
    if top.seeds == seeds and further > top.rounds and len(better) >= LEAST and play.pays_for(seconds, KEPT_BACK):
        return Step(further, better, seeds)
    fresh = [seed for seed in play.experiment.seeds if seed not in top.seeds][:1]
    if len(record.survivors) < LEAST or not fresh:
        return "the others are behind" if len(record.survivors) == 1 else "all seeds are played"
    if not play.pays_for([record.costs[method[entry]].of(top.rounds) for entry in record.survivors]):
        return "the budget does not pay for another seed"
    return Step(top.rounds, record.survivors, fresh)


def climb_further(play: Play, record: Tournament) -> Tournament:
    """Play the next runs, and write the rung with the entries that go on, or the reason why the tournament is over."""
    step = next_step(play, record)
    if isinstance(step, str):
        return play.write(ended=step)
    top = record.reached[-1] if record.reached else None
    again = top is not None and top.rounds == step.rounds  # with another seed
    played = "another seed" if again else counted(len(step.seeds), "seed")
    play.display.say(f"{len(step.entries)} at {play.span(step.rounds)}, {played}")
    outcomes = play.runs(step, 0 if top is None or again else top.rounds)
    if play.stop.asked:
        return record
    failed = {entry: outcome["failed"] for (entry, _), outcome in outcomes.items() if outcome.get("failed")}
    done = {pair: play.done(*pair) for pair in outcomes if pair[0] not in failed}
    rounds, entries = step.rounds, [entry for entry in step.entries if entry not in failed]
    seeds = [seed for seed in step.seeds if all(done[entry, seed] >= rounds for entry in entries)]
    over = len(seeds) < len(step.seeds)
    if over and top is not None:
        return play.write(failed=failed, ended=OVER)
    if over and not seeds:  # with the first seed those are compared that came farthest
        seeds, reached = list(step.seeds[:1]), {entry: done[entry, step.seeds[0]] for entry in entries}
        rounds = sorted([0, 0, *reached.values()])[-LEAST]
        entries = [entry for entry in entries if reached[entry] >= rounds > 0]
    values = {entry: {seed: play.value(entry, seed, rounds) for seed in seeds} for entry in entries}
    lacking = [entry for entry in entries if not all(map(math.isfinite, values[entry].values()))]
    failed |= dict.fromkeys(lacking, NO_VALUE)
    values = {entry: values[entry] for entry in entries if entry not in lacking}
    if not values:
        return play.write(failed=failed, ended=OVER if over else FAILED)
    references = play.references(record.study, next(iter(values)), seeds, rounds)
    if play.stop.asked:
        return record
    if top is not None and again:
        values = {entry: {**top.values[entry], **values[entry]} for entry in values}
        references = {name: {**top.references.get(name, {}), **by_seed} for name, by_seed in references.items()}
        seeds = [*top.seeds, *seeds]
    method = {candidate.entry: candidate.method for candidate in record.candidates}
    count = len({method[entry] for entry in values})
    last = over or len(record.reached) >= len(record.rungs) - 1
    going_on = climbing(values, method, count if last else half(count))
    rung = {"rounds": rounds, "seeds": seeds, "values": values, "kept": going_on, "references": references}
    record = play.write(rung=rung, failed=failed, ended=OVER if over else "")
    result = f"{record.survivors[0]} {record.stands}. {describe_others(record.standings)}".strip()
    play.display.say(f"  after {play.span(rounds)} with {counted(len(seeds), 'seed')}: {result}")
    return record
