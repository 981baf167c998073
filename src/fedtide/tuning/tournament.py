"""Tournaments: methods of a study climb rungs on validation rows within a budget of seconds, and survivors are named.

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
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from fedtide.config import Experiment, brief, from_dict, resolved, slug
from fedtide.core.atomic import flush, write_text
from fedtide.core.errors import UNREADABLE, FedtideError, printable
from fedtide.core.record import read_rounds, run_lock
from fedtide.evaluate.rounds import score_in, weight_in
from fedtide.fields.types import rounded_up
from fedtide.fleets.pool import Processes
from fedtide.runs.auto import resolve_auto
from fedtide.runs.build import as_json
from fedtide.runs.folder import check_entries, plan
from fedtide.runs.folder import load as load_study
from fedtide.runs.parallel import Stop, in_parallel, started
from fedtide.runs.runner import Run
from fedtide.runs.verify import Verdict, verify_runs
from fedtide.tuning.ladder import (
    LEAST,
    SEEDS,
    Cost,
    Standing,
    climbing,
    half,
    planned,
    standings,
    value_at,
    window,
    without_loading,
)

LADDER = "ladder.jsonl"
STUDY = "study.toml"
COMMENT = """\
# Written by fedtide recommend: the methods of its tournament that may be the best{beside}, for a proper run.
# Its seeds are fresh: the tournament played none but some of {seeds}.
"""

MEASURED = 1 / 8
"""Share of the budget, once data are loaded, in which methods show how long they take; others are not entered."""
KEPT_BACK = 0.8
"""Share of what is left that the plan counts on: those that go on may take longer than others."""
OVER = "the budget was over"
"""Why a tournament may be over."""
NO_ROWS = "give data.split.val more, or data more clients or time"
"""What helps where no evaluation had rows."""
JUDGED = 4
"""Evaluations among the last rounds over which accuracy is averaged, where the study has fewer."""


@dataclass(frozen=True)
class Candidate:
    """An entry of a tournament: a method of the study. method: what it is a variant of. why: it was nominated."""

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
    """What a tournament folder says.

    budget: seconds. candidates: in the order of nomination. said: lines of the inspection. rungs, seeds: planned.
    entered: entries that the plan has. costs: seconds of each that was measured. reached: rungs so far, beyond the
    planned ones one for each seed more. failed: reasons, by entry. ended: why it is over, "" while it is not. spent:
    seconds so far.
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
        """How the entries stand that the last rung kept: of each method its best variant."""
        if not self.reached:
            return []
        rung = self.reached[-1]
        return standings({entry: rung.values[entry] for entry in rung.kept})

    @property
    def played(self) -> set[str]:
        """Entries of which there is a score, or a reason why there is none."""
        return {entry for rung in self.reached for entry in rung.values} | self.failed.keys()

    @property
    def survivors(self) -> list[str]:
        """Entries that are not clearly behind, the best first."""
        return [each.entry for each in self.standings if each.verdict != "behind"]

    def last_rung(self, entry: str) -> Rung | None:
        """Return the highest rung that an entry reached."""
        return next((rung for rung in reversed(self.reached) if entry in rung.values), None)


class TooShort(FedtideError):
    """The budget was over before two methods could be compared."""


class RungsDisplay:
    """Display of the progress of a tournament; this one shows nothing."""

    def begin(self, title: str, rounds: int) -> None:
        """Start a rung with so many rounds to play in all."""

    def going(self, rounds: int) -> None:
        """Show that so many rounds more are played."""

    def said(self, line: str) -> None:
        """Show a line."""

    def end(self) -> None:
        """Close the display."""


def played_by(study: Experiment) -> Experiment:
    """Return what a tournament plays of a study: its world, with seeds of its own, judged on validation rows alone."""
    first = max(study.seeds) + 1
    changes: dict[str, Any] = {
        "seeds": tuple(range(first, first + SEEDS)), "eval_every": step_of(study), "eval_splits": ("val",),
        "average_last": study.late, "claim": (), "tune": None, "stop_at": None, "forgetting": None, "metrics": (),
        "embedding": None, "baseline": None, "checkpoint_every": None, "track": None,
    }  # fmt: skip
    return resolve_auto(study.model_copy(update=changes)).experiment


def step_of(study: Experiment) -> int:
    """Return the rounds between evaluations: as in the study, or fewer, so that several are averaged."""
    return max(min(study.eval_every, study.late // JUDGED), 1)


# -- the folder --------------------------------------------------------------------------------------------------------


def first_line(budget: float, candidates: Sequence[Candidate], said: Iterable[str], spent: float) -> str:
    """Return the first line of `ladder.jsonl`; `spent` are the seconds that the inspection took."""
    about = {"budget": budget, "candidates": [vars(each) for each in candidates], "said": list(said), "spent": spent}
    return json.dumps(about) + "\n"


def is_tournament(root: Path) -> bool:
    """Tell whether a folder is that of a tournament."""
    return (root / LADDER).is_file() and (root / "config.toml").is_file()


def read_tournament(root: Path, *, imports: bool = True) -> Tournament:
    """Return what a tournament folder says.

    Raises:
        FedtideError: the folder is none of a tournament, or is damaged.
    """
    if not is_tournament(root):
        raise FedtideError(f"{root}: not the folder of a tournament (no {LADDER} and config.toml in it)")
    study, lines = load_study(root, imports=imports), read_rounds(root, LADDER)
    known: dict[str, Any] = {}
    try:
        first, *rest = lines
        candidates = tuple(Candidate(str(c["entry"]), str(c["method"]), str(c["why"])) for c in first["candidates"])
        known = {"budget": float(first["budget"]), "said": tuple(map(str, first["said"])), "reached": (), "failed": {}}
        for line in rest:
            known["failed"] |= {str(entry): str(why) for entry, why in line.get("failed", {}).items()}
            if "rungs" in line:
                known["rungs"], known["seeds"] = tuple(map(int, line["rungs"])), int(line["seeds"])
                known["entered"] = tuple(map(str, line["entered"]))
                known["costs"] = {str(entry): Cost(*map(float, cost)) for entry, cost in line["costs"].items()}
            if "values" in line:
                known["reached"] += (_rung(line),)
            known["ended"] = str(line.get("ended", ""))
        known["spent"] = float(lines[-1]["spent"])
    except UNREADABLE:
        raise FedtideError(f"{root / LADDER}: damaged: not what a tournament writes") from None
    made = Tournament(study, candidates=candidates, **known)
    names = {method.name for method in study.method}
    told = {c.entry for c in candidates} | {entry for rung in made.reached for entry in rung.values}
    kept = all(set(rung.kept) <= rung.values.keys() for rung in made.reached)
    if not told <= names or not set(made.entered) <= names or not kept:
        raise FedtideError(f"{root / LADDER}: damaged: it names methods that config.toml does not have")
    return made


def _rung(line: Mapping[str, Any]) -> Rung:
    values = {
        str(entry): {int(seed): math.nan if value is None else float(value) for seed, value in own.items()}
        for entry, own in line["values"].items()
    }
    return Rung(int(line["rounds"]), tuple(map(int, line["seeds"])), values, tuple(map(str, line["kept"])))


def _append(root: Path, line: Mapping[str, Any]) -> None:
    """Append a line and sync it to disk; NaN, of what failed, becomes null."""
    plain = {
        entry: {seed: None if math.isnan(value) else value for seed, value in own.items()}
        for entry, own in line.get("values", {}).items()
    }
    with open(root / LADDER, "a", encoding="utf-8") as file:
        file.write(json.dumps({**line, **({"values": plain} if plain else {})}, allow_nan=False) + "\n")
    flush(root / LADDER)


def _cut(root: Path) -> None:
    """Remove a line that a killed process left half-written."""
    text = (root / LADDER).read_text(encoding="utf-8")
    if not text.endswith("\n"):
        write_text(root / LADDER, text[: text.rfind("\n") + 1])


def write_study(root: Path, made: Tournament) -> Path:
    """Write the study with the survivors, and plain FedAvg to compare them with, ready for `fedtide run`."""
    names = list(made.survivors)
    plain = next((each.entry for each in played_entries(made) if made.candidates[0].method == each.method), None)
    beside = ""
    if plain is not None and plain not in names:
        names, beside = [*names, plain], f", and {printable(plain)} to compare them with"
    values = resolved(made.study)
    values["method"] = [method for method in values["method"] if method["name"] in names]
    values["claim"] = [
        claim
        for claim, said in zip(values["claim"], made.study.claim, strict=True)
        if {said.method, *said.rivals} <= set(names)
    ]
    if values.get("baseline") not in names:
        values["baseline"] = plain or names[0]
    text = brief(from_dict(values, where=str(root / STUDY)))
    seeds = played_by(made.study).seeds
    write_text(root / STUDY, COMMENT.format(beside=beside, seeds=f"{seeds[0]} to {seeds[-1]}") + text + "\n")
    return root / STUDY


def played_entries(made: Tournament) -> list[Candidate]:
    """Return the entries that reached a rung, those that reached the highest first, the best first on each."""
    order: dict[str, None] = {}
    for rung in reversed(made.reached):
        order |= dict.fromkeys(each.entry for each in standings(rung.values))
    by_name = {each.entry: each for each in made.candidates}
    return [by_name[entry] for entry in order]


def verify(root: Path) -> Iterator[Verdict]:
    """Check the runs that a tournament played, as far as it played them, and yield what was found run by run.

    Raises:
        FedtideError: it is no folder of a tournament, or its configuration or ladder cannot be read.
    """
    made = read_tournament(root, imports=False)
    reached = {
        (entry, seed): rung.rounds for rung in made.reached for entry, own in rung.values.items() for seed in own
    }
    runs = plan(played_by(made.study), root)
    played = [run for run in runs if (run.method.name, run.seed) in reached or run.folder.exists()]
    for verdict in verify_runs(played):
        least = reached.get((verdict.run.method.name, verdict.run.seed), 0)
        if verdict.wrong is None and verdict.rounds < least:
            verdict = replace(verdict, wrong=f"{verdict.run.folder}: {LADDER} has {least} rounds of it")
        yield verdict


# -- playing -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Climb:
    """One run, as it travels to a process: to which round, and when the budget is over (seconds since 1970)."""

    experiment: str
    method: str
    seed: int
    folder: str
    rounds: int
    until: float


def climbed(call: Climb, stop: Callable[[], bool]) -> Generator[int, None, dict[str, Any]]:
    """Play a run to a round, in whatever process: yield rounds, return how many, the seconds, and why it failed."""
    began, count, failed = time.time(), 0, ""
    try:
        experiment = from_dict(json.loads(call.experiment))
        method = next(method for method in experiment.method if method.name == call.method)
        run = Run(experiment, method, call.seed, Path(call.folder))
        playing = run.play(lambda: stop() or time.time() > call.until, until=call.rounds)
        for _ in playing if began < call.until else ():
            count += 1
            yield count
    except FedtideError as error:
        failed = str(error)
    return {"seconds": time.time() - began, "rounds": count, "failed": failed}


@dataclass(frozen=True)
class _Playing:
    """Context of a tournament that is the same for all rungs."""

    experiment: Experiment
    root: Path
    display: RungsDisplay
    pool: Processes | None
    stop: Stop
    until: float

    @property
    def processes(self) -> int:
        return 1 if self.pool is None else len(self.pool.processes)

    @property
    def left(self) -> float:
        return self.until - time.time()

    def runs(self, entries: Sequence[str], seeds: Sequence[int], rounds: int, until: float) -> list[dict[str, Any]]:
        """Play runs to a round and return what came of each, in order of seeds and entries."""
        told = as_json(self.experiment)
        calls = [
            Climb(told, entry, seed, str(self.folder(entry, seed)), rounds, until)
            for seed in seeds
            for entry in entries
        ]
        out: list[dict[str, Any]] = [{} for _ in calls]
        for message in in_parallel(climbed, calls, self.pool, self.stop):
            if message.final:
                out[message.call] = message.value or {}
            else:
                self.display.going(1)
        return out

    def rung(
        self, title: str, entries: Sequence[str], seeds: Sequence[int], rounds: int, below: int
    ) -> tuple[list[str], dict[str, str]]:
        """Play entries to a rung; return those that did not fail, and why others did."""
        self.display.begin(title, len(entries) * len(seeds) * (rounds - below))
        came = self.runs(entries, seeds, rounds, self.until)
        failed: dict[str, str] = {}
        for (_, entry), each in zip([(seed, entry) for seed in seeds for entry in entries], came, strict=True):
            if each.get("failed"):
                failed.setdefault(entry, each["failed"])
        return [entry for entry in entries if entry not in failed], failed

    def folder(self, entry: str, seed: int) -> Path:
        return self.root / slug(entry) / str(seed)

    def curve(self, entry: str, seed: int) -> tuple[list[int], list[float], list[float] | None]:
        """Return the curve of a run on validation rows, see `curve_of`."""
        return curve_of(self.folder(entry, seed))

    def cost(self, entry: str, seed: int, came: Mapping[str, Any]) -> Cost:
        """Return what a run costs from the times of its rounds, the first of which loads and warms up."""
        lines = read_rounds(self.folder(entry, seed), "timings.jsonl")
        each = fmean(float(line["seconds"]) + float(line["evaluation"]) for line in (lines[1:] or lines))
        return Cost(max(came["seconds"] - came["rounds"] * each, 0.0), each)

    def values(self, entries: Sequence[str], seeds: Sequence[int], rounds: int) -> dict[str, dict[int, float]]:
        """Return the accuracy at a rung, by entry and seed."""
        over = window(rounds, self.experiment.rounds, self.experiment.late, self.experiment.period)
        return {entry: {seed: value_at(rounds, over, *self.curve(entry, seed)) for seed in seeds} for entry in entries}

    def done(self, entry: str, seed: int) -> int:
        """Return the last evaluation of a run, in rounds done."""
        lines = read_rounds(self.folder(entry, seed))
        return max((int(line["round"]) + 1 for line in lines if "val" in line.get("scores", {})), default=0)


def curve_of(folder: Path) -> tuple[list[int], list[float], list[float] | None]:
    """Return the rounds done at each evaluation of a run, the accuracy on validation rows, and what each counts for.

    Evaluations without rows are left out, as of a window in which nothing came. An accuracy is NaN where there is none;
    the weights are None where all evaluations count the same.
    """
    rounds, values, weights = [], [], []
    for line in read_rounds(folder):
        if told := line.get("scores", {}).get("val"):
            value = score_in(told)
            rounds.append(int(line["round"]) + 1)
            values.append(math.nan if value is None else float(value))
            weights.append(weight_in(line, "val"))
    known = [weight for weight in weights if weight is not None]
    return rounds, values, known if len(known) == len(weights) else None


def execute(root: Path, *, workers: int | None = None, display: RungsDisplay | None = None) -> bool:
    """Play what is left of a tournament, and write its study.

    What was decided is in `ladder.jsonl`: after a stop or a kill the tournament goes on from there, with the seconds
    that were left at its last line. Which rungs there are depends on the seconds that methods take on this machine.

    Returns:
        False if a person stopped it; everything is saved then.

    Raises:
        FedtideError: all methods failed; `TooShort` where the budget was over before two of them could be compared.
    """
    display = display or RungsDisplay()
    with run_lock(root, "config.toml"), ExitStack() as stack:
        check_entries(root, played=True)
        _cut(root)
        made = read_tournament(root)
        experiment = played_by(made.study)
        stack.callback(display.end)
        if not made.ended:
            count = len(made.candidates) * (1 if made.rungs else 2)
            pool, stop = stack.enter_context(started(experiment, workers, count, root))
            until = time.time() + made.budget - made.spent
            playing = _Playing(experiment, root, display, pool, stop, until)
            for part in (_measure, _climb, _tell_apart):
                made = part(playing, made)
                if stop.asked:
                    return False
        if not made.survivors:
            reasons = "; ".join(f"{entry}: {why}" for entry, why in made.failed.items())
            if made.ended == OVER:
                failed = f"; others failed: {reasons}" if reasons else ""
                raise TooShort(too_short(root.name, made.budget, made.spent, "first rounds") + failed)
            why = f"as they failed: {reasons}" if reasons else f"as no validation rows came: {NO_ROWS}"
            raise FedtideError(f"{root}: no two methods could be compared, {why}")
        write_study(root, made)
    return True


def too_short(name: str, budget: float, spent: float, into: str) -> str:
    """Return the line that a budget is too short, with one that would do: seconds of a begin are a share of it."""
    enough = rounded_up(max(spent / MEASURED, 2 * budget) if spent < budget else 2 * budget)
    return f"--budget: {name}: found {budget:g} s, allowed: {enough} or more, as {spent:.0f} s went into {into}"


def _now(playing: _Playing, made: Tournament, **line: Any) -> Tournament:
    """Write a line, with the seconds that are spent, and return what the folder says then."""
    _append(playing.root, {**line, "spent": made.budget - playing.left})
    return read_tournament(playing.root)


def _measure(playing: _Playing, made: Tournament) -> Tournament:
    """Play a few rounds of the candidates, as far as a share of the budget goes, and plan with what they took."""
    if made.rungs:
        return made
    experiment, candidates = playing.experiment, made.candidates
    step = experiment.eval_every
    rounds, begins = rounds_timed(experiment), playing.left
    waiting = first_variants_first(candidates)
    taken: dict[str, Cost] = {}  # by methods, whose variants take as long
    failed: dict[str, str] = {}
    many = len({each.method for each in candidates})
    playing.display.begin(f"timing {many} methods", many * rounds)
    together, measured_first = max(playing.processes, 1), 0
    while waiting and not (len(taken) > 2 and begins - playing.left > MEASURED * begins):
        some, waiting = waiting[:together], waiting[together:]
        came = playing.runs([each.entry for each in some], experiment.seeds[:1], rounds, playing.until)
        for each, of_it in zip(some, came, strict=True):
            if of_it.get("failed"):
                failed[each.entry] = of_it["failed"]
            elif of_it and playing.done(each.entry, experiment.seeds[0]):
                taken[each.method] = playing.cost(each.entry, experiment.seeds[0], of_it)
        if playing.stop.asked:
            return made
        if not measured_first:  # every process has loaded the data now, and does so once
            measured_first, begins = len(taken), playing.left
        waiting = [each for each in waiting if each.method not in taken]
    taken = without_loading(taken, measured_first)
    methods = {
        method: [each.entry for each in candidates if each.method == method and each.entry not in failed]
        for method in dict.fromkeys(each.method for each in candidates)
        if method in taken
    }
    costs = {entry: taken[method] for method, entries in methods.items() for entry in entries}
    over = any(each.method not in taken and each.entry not in failed for each in candidates)
    if not methods or (over and len(methods) < LEAST):
        why = OVER if over else "all methods failed"
        return _now(playing, made, failed=failed, ended=why)
    seconds = max(KEPT_BACK * playing.left * playing.processes, 0.0)
    plan = planned([[costs[entry] for entry in own] for own in methods.values()], experiment.rounds, step, seconds)
    entered = [entry for own in list(methods.values())[: plan.entries] for entry in own]
    told = {entry: [cost.setup, cost.round] for entry, cost in costs.items()}
    made = _now(playing, made, rungs=plan.rungs, seeds=plan.seeds, entered=entered, costs=told, failed=failed)
    playing.display.said(f"{len(entered)} of {len(candidates)} are entered, for {_of(plan.rungs, experiment.rounds)}")
    return made


def rounds_timed(experiment: Experiment) -> int:
    """Return how many rounds show how long a method takes, and that it can be judged."""
    return min(max(experiment.eval_every, 3), experiment.rounds)


def first_variants_first(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return candidates in the order of nomination, but further variants of a method after the first of every other.

    >>> [each.entry for each in first_variants_first([Candidate("A1", "A"), Candidate("A2", "A"), Candidate("B", "B")])]
    ['A1', 'B', 'A2']
    """
    variant = {
        each.entry: sum(other.method == each.method for other in candidates[:place])
        for place, each in enumerate(candidates)
    }
    return sorted(candidates, key=lambda each: variant[each.entry])


def _of(rungs: Sequence[int], rounds: int) -> str:
    """Say how many of a study's rounds are played at each rung.

    >>> _of((32, 64), 64)
    '32 and 64 of 64 rounds'
    """
    return f"{' and '.join(map(str, rungs))} of {rounds} rounds"


def _climb(playing: _Playing, made: Tournament) -> Tournament:
    """Play the rungs of the plan that are left, and then on, as far as the budget pays for it."""
    method = {each.entry: each.method for each in made.candidates}
    seeds = playing.experiment.seeds[: made.seeds]
    while not made.ended:
        number, below = len(made.reached), made.reached[-1].rounds if made.reached else 0
        if number < len(made.rungs):
            rung, entries = made.rungs[number], made.reached[-1].kept if number else made.entered
        else:
            rung, entries = _further(playing, made, method)
            if rung == below:
                break
        title = f"{len(entries)} at {_of((rung,), playing.experiment.rounds)}, {_seeds(seeds)}"
        alive, failed = playing.rung(title, entries, seeds, rung, below)
        if playing.stop.asked:
            return made
        done = {entry: {seed: playing.done(entry, seed) for seed in seeds} for entry in alive}
        reached = min((at for own in done.values() for at in own.values()), default=rung)
        whole = reached >= rung
        if not whole and not below:
            timed = rounds_timed(playing.experiment)  # the first rounds of each are played already
            alive, seeds, reached = in_time(
                {entry: {seed: at * (at > timed) for seed, at in own.items()} for entry, own in done.items()}
            )
            if not alive:
                alive, seeds, reached = in_time(done)
        if not alive or (not whole and reached <= below):
            return _now(playing, made, failed=failed, ended=OVER if done else "all methods failed")
        values = playing.values(alive, seeds, min(reached, rung))
        methods = len({method[entry] for entry in alive})
        last = number >= len(made.rungs) - 1 or not whole
        kept = climbing(values, method, methods if last else half(methods))
        about = {"rounds": min(reached, rung), "seeds": seeds, "values": values, "kept": kept, "failed": failed}
        made = _now(playing, made, **about, ended="" if whole else OVER)
        playing.display.said(_best(made))
    return made


def in_time(done: Mapping[str, Mapping[int, int]]) -> tuple[list[str], tuple[int, ...], int]:
    """Return the entries and seeds that can be compared after a budget was over, and after how many rounds.

    The seeds in which all entries came farthest; where some did not begin, the first seed of those that came farthest.

    Args:
        done: rounds done, by entry and seed.

    >>> in_time({"A": {3: 50, 4: 50}, "B": {3: 50, 4: 8}})
    (['A', 'B'], (3,), 50)
    >>> in_time({"A": {3: 50, 4: 0}, "B": {3: 50, 4: 0}, "C": {3: 8, 4: 0}, "D": {3: 0, 4: 0}})
    (['A', 'B'], (3,), 50)
    >>> in_time({"A": {3: 50}, "B": {3: 8}, "C": {3: 0}}), in_time({"A": {3: 8}, "B": {3: 0}})
    ((['A', 'B'], (3,), 8), ([], (3,), 0))
    """
    entries, seeds = list(done), tuple(next(iter(done.values()), {}))
    shared = {seed: min(own[seed] for own in done.values()) for seed in seeds}
    if rounds := max(shared.values(), default=0):
        return entries, tuple(seed for seed in seeds if shared[seed] == rounds), rounds
    first = sorted((own[seed] for own in done.values() for seed in seeds[:1]), reverse=True)
    rounds = first[LEAST - 1] if len(first) >= LEAST else 0  # two came so far
    return [entry for entry in entries if done[entry][seeds[0]] >= rounds > 0], seeds[:1], rounds


def _further(playing: _Playing, made: Tournament, method: Mapping[str, str]) -> tuple[int, tuple[str, ...]]:
    """Return to which round the better half goes on beyond the plan, and who that is; the last rung if nobody does."""
    top, step, study = made.reached[-1], playing.experiment.eval_every, playing.experiment.rounds
    rung = min(step * math.ceil(2 * top.rounds / step), study)
    entries = climbing({entry: top.values[entry] for entry in top.kept}, method, half(len(top.kept)))
    seconds = [made.costs[entry].of(rung - top.rounds) for entry in entries for _ in top.seeds]
    begun = len(top.seeds) > made.seeds  # another seed was played already
    if begun or len(entries) < LEAST or max(sum(seconds) / playing.processes, *seconds) > KEPT_BACK * playing.left:
        return top.rounds, ()
    return rung, tuple(entries)


def _tell_apart(playing: _Playing, made: Tournament) -> Tournament:
    """Play more seeds with those that cannot be told apart, as long as the budget pays for it."""
    while not made.ended:
        rung, left = made.reached[-1], made.survivors
        fresh = [seed for seed in playing.experiment.seeds if seed not in rung.seeds][:1]
        seconds = [made.costs[entry].of(rung.rounds) for entry in left]
        if len(left) < 2 or not fresh:
            why = "one leads clearly" if len(left) == 1 else "all seeds are played"
            return _now(playing, made, ended=why if left else "all methods failed")
        if max(sum(seconds) / playing.processes, *seconds) > playing.left:
            return _now(playing, made, ended="the budget does not pay for another seed")
        title = f"{len(left)} that cannot be told apart, seed {fresh[0]}"
        alive, failed = playing.rung(title, left, fresh, rung.rounds, 0)
        if playing.stop.asked:
            return made
        if any(playing.done(entry, seed) < rung.rounds for entry in alive for seed in fresh):
            return _now(playing, made, failed=failed, ended=OVER)
        more = playing.values(alive, fresh, rung.rounds)
        values = {entry: {**rung.values[entry], **more[entry]} for entry in alive}
        seeds = (*rung.seeds, *fresh)
        made = _now(playing, made, rounds=rung.rounds, seeds=seeds, values=values, kept=alive, failed=failed)
        playing.display.said(_best(made))
    return made


def _seeds(seeds: Sequence[int]) -> str:
    return f"{len(seeds)} seed{'s' * (len(seeds) != 1)}"


def _best(made: Tournament) -> str:
    """Say who leads at the last rung, and who cannot be told apart."""
    rung, (first, *others) = made.reached[-1], made.survivors or ["nobody"]
    beside = f"; not told apart from it: {len(others)}" if others else ""
    return f"after {_of((rung.rounds,), made.study.rounds)} with {_seeds(rung.seeds)}: {first} leads{beside}"
