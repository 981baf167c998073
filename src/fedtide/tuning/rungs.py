"""Play of a tournament: methods are timed, climb the rungs of a plan, and the last ones play more seeds."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from fedtide.config import Experiment, from_dict, slug
from fedtide.core.errors import FedtideError
from fedtide.core.record import read_rounds, run_lock
from fedtide.fields.types import rounded_up
from fedtide.fleets.pool import Processes
from fedtide.runs.build import as_json
from fedtide.runs.display import TerminalBars
from fedtide.runs.folder import check_entries
from fedtide.runs.parallel import Stop, in_parallel, started
from fedtide.runs.runner import Run
from fedtide.tuning.ladder import LEAST, Cost, climbing, half, planned, value_at, window, without_loading
from fedtide.tuning.tournament import (
    Candidate,
    TooShort,
    Tournament,
    append_line,
    count_of_seeds,
    curve_of,
    cut_line,
    played_by,
    read_tournament,
    write_study,
)

MEASURED = 1 / 8
"""Share of the budget, once data are loaded, in which methods show how long they take; others are not entered."""
KEPT_BACK = 0.8
"""Share of the rest of the budget that the plan counts on, because entries that go on may take longer than others."""
OVER = "the budget was over"
"""A reason why a tournament has ended."""
NO_ROWS = "give data.split.val more, or data more clients or time"
"""Advice if no evaluation had rows."""


class LiveTournament(TerminalBars):
    """Display of every rung with a bar, and of the leader after it."""

    def begin(self, title: str, rounds: int) -> None:
        """Start a rung with so many rounds to play in all."""
        self.end()
        self.say(title)
        self.start(rounds)

    def result(self, line: str) -> None:
        """End a rung, and show a line about it."""
        self.end()
        self.say(f"  {line}")


@dataclass(frozen=True)
class Climb:
    """One run, as it travels to a process: its last round, and the end of the budget (seconds since 1970)."""

    experiment: str
    method: str
    seed: int
    folder: str
    rounds: int
    until: float


def climb(call: Climb, stop: Callable[[], bool]) -> Generator[int, None, dict[str, Any]]:
    """Play a run to a round, in any process: yield rounds; return their number, the seconds, and the failure."""
    began, count, failed = time.time(), 0, ""
    try:
        experiment = from_dict(json.loads(call.experiment))
        method = next(method for method in experiment.method if method.name == call.method)
        run = Run(experiment, method, call.seed, Path(call.folder))
        rounds = run.play(lambda: stop() or time.time() > call.until, until=call.rounds)
        for _ in rounds if began < call.until else ():
            count += 1
            yield count
    except FedtideError as error:
        failed = str(error)
    return {"seconds": time.time() - began, "rounds": count, "failed": failed}


@dataclass(frozen=True)
class Play:
    """Context of a tournament that is the same for all rungs."""

    experiment: Experiment
    root: Path
    display: LiveTournament
    pool: Processes | None
    stop: Stop
    until: float

    @property
    def processes(self) -> int:
        """Number of processes."""
        return 1 if self.pool is None else len(self.pool.processes)

    @property
    def left(self) -> float:
        """Seconds that are left of the budget."""
        return self.until - time.time()

    def pays_for(self, seconds: Sequence[float], share: float = 1.0) -> bool:
        """Tell whether a share of the rest of the budget pays for runs of so many seconds."""
        return max(sum(seconds) / self.processes, *seconds) <= share * self.left

    def runs(self, entries: Sequence[str], seeds: Sequence[int], rounds: int) -> list[dict[str, Any]]:
        """Play runs to a round and return the outcome of each, in order of seeds and entries."""
        text = as_json(self.experiment)
        calls = [
            Climb(text, entry, seed, str(self.folder(entry, seed)), rounds, self.until)
            for seed in seeds
            for entry in entries
        ]
        outcomes: list[dict[str, Any]] = [{} for _ in calls]
        for message in in_parallel(climb, calls, self.pool, self.stop):
            if message.final:
                outcomes[message.call] = message.value or {}
            else:
                self.display.add(1)
        return outcomes

    def rung(
        self, title: str, entries: Sequence[str], seeds: Sequence[int], rounds: int, below: int
    ) -> tuple[list[str], dict[str, str]]:
        """Play entries to a rung; return those that did not fail, and why others did."""
        self.display.begin(title, len(entries) * len(seeds) * (rounds - below))
        failed: dict[str, str] = {}
        for entry, outcome in zip([*entries] * len(seeds), self.runs(entries, seeds, rounds), strict=True):
            if outcome.get("failed"):
                failed.setdefault(entry, outcome["failed"])
        return [entry for entry in entries if entry not in failed], failed

    def folder(self, entry: str, seed: int) -> Path:
        """Return the folder of a run."""
        return self.root / slug(entry) / str(seed)

    def cost(self, entry: str, seed: int, outcome: Mapping[str, Any]) -> Cost:
        """Return the cost of a run from the times of its rounds, the first of which loads and warms up."""
        lines = read_rounds(self.folder(entry, seed), "timings.jsonl")
        per_round = fmean(float(line["seconds"]) + float(line["evaluation"]) for line in (lines[1:] or lines))
        return Cost(max(outcome["seconds"] - outcome["rounds"] * per_round, 0.0), per_round)

    def values(self, entries: Sequence[str], seeds: Sequence[int], rounds: int) -> dict[str, dict[int, float]]:
        """Return the accuracy at a rung, by entry and seed."""
        over = window(rounds, self.experiment.rounds, self.experiment.late, self.experiment.period)
        return {
            entry: {seed: value_at(rounds, over, *curve_of(self.folder(entry, seed))) for seed in seeds}
            for entry in entries
        }

    def done(self, entry: str, seed: int) -> int:
        """Return the last evaluation of a run, in rounds done."""
        lines = read_rounds(self.folder(entry, seed))
        return max((int(line["round"]) + 1 for line in lines if "val" in line.get("scores", {})), default=0)

    def write(self, record: Tournament, **line: Any) -> Tournament:
        """Write a line with the seconds that are spent, and return the record with it."""
        append_line(self.root, {**line, "spent": record.budget - self.left})
        return read_tournament(self.root)

    def write_rung(
        self, record: Tournament, rounds: int, seeds: Sequence[int], values: Any, survivors: Sequence[str], **line: Any
    ) -> Tournament:
        """Write a rung, and show the leader and how many cannot be told apart from it."""
        record = self.write(record, rounds=rounds, seeds=seeds, values=values, kept=survivors, **line)
        first, *others = record.survivors or ["nobody"]
        rest = f"; not told apart from it: {len(others)}" if others else ""
        self.display.result(
            f"after {_of((rounds,), record.study.rounds)} with {count_of_seeds(seeds)}: {first} leads{rest}"
        )
        return record


def execute(root: Path, *, workers: int | None = None, display: LiveTournament | None = None) -> bool:
    """Play the rest of a tournament, and write its study.

    Decisions are in `ladder.jsonl`: after a stop or a kill the tournament goes on from there, with the seconds that
    were left at its last line. Its rungs depend on the seconds that methods take on this machine.

    Returns:
        False if a person stopped it; everything is saved then.

    Raises:
        FedtideError: all methods failed; `TooShort` if the budget was over before two of them could be compared.
    """
    display = display or LiveTournament(Console(quiet=True))
    with run_lock(root, "config.toml"), ExitStack() as stack:
        check_entries(root, played=True)
        cut_line(root)
        record = read_tournament(root)
        experiment = played_by(record.study)
        stack.callback(display.end)
        if not record.ended:
            count = len(record.candidates) * (1 if record.rungs else 2)
            pool, stop = stack.enter_context(started(experiment, workers, count, root))
            play = Play(experiment, root, display, pool, stop, time.time() + record.budget - record.spent)
            for part in (measure, climb_rungs, tell_apart):
                record = part(play, record)
                if stop.asked:
                    return False
        if not record.survivors:
            reasons = "; ".join(f"{entry}: {why}" for entry, why in record.failed.items())
            if record.ended == OVER:
                failed = f"; others failed: {reasons}" if reasons else ""
                raise TooShort(too_short(root.name, record.budget, record.spent, "first rounds") + failed)
            why = f"as they failed: {reasons}" if reasons else f"as no validation rows came: {NO_ROWS}"
            raise FedtideError(f"{root}: no two methods could be compared, {why}")
        write_study(root, record)
    return True


def too_short(name: str, budget: float, spent: float, purpose: str) -> str:
    """Return the line about a budget that is too short, with one that would do: the first rounds are a share of it."""
    enough = rounded_up(max(spent / MEASURED, 2 * budget) if spent < budget else 2 * budget)
    return f"--budget: {name}: found {budget:g} s, allowed: {enough} or more, as {spent:.0f} s went into {purpose}"


def measure(play: Play, record: Tournament) -> Tournament:
    """Play a few rounds of the candidates, as far as a share of the budget goes, and plan with their seconds."""
    if record.rungs:
        return record
    experiment, candidates = play.experiment, record.candidates
    rounds, left_at_begin, seed = rounds_timed(experiment), play.left, experiment.seeds[0]
    waiting = first_variants_first(candidates)
    costs: dict[str, Cost] = {}  # by methods, whose variants take as long
    failed: dict[str, str] = {}
    methods = dict.fromkeys(candidate.method for candidate in candidates)
    play.display.begin(f"timing {len(methods)} methods", len(methods) * rounds)
    loaded = 0
    while waiting and not (len(costs) > 2 and left_at_begin - play.left > MEASURED * left_at_begin):
        batch, waiting = waiting[: play.processes], waiting[play.processes :]
        outcomes = play.runs([candidate.entry for candidate in batch], [seed], rounds)
        for candidate, outcome in zip(batch, outcomes, strict=True):
            if outcome.get("failed"):
                failed[candidate.entry] = outcome["failed"]
            elif outcome and play.done(candidate.entry, seed):
                costs[candidate.method] = play.cost(candidate.entry, seed, outcome)
        if play.stop.asked:
            return record
        if not loaded:  # every process has loaded the data now, and does so once
            loaded, left_at_begin = len(costs), play.left
        waiting = [candidate for candidate in waiting if candidate.method not in costs]
    costs = without_loading(costs, loaded)
    entries = {
        method: [
            candidate.entry for candidate in candidates if candidate.method == method and candidate.entry not in failed
        ]
        for method in methods
        if method in costs
    }
    over = any(candidate.method not in costs and candidate.entry not in failed for candidate in candidates)
    if not entries or (over and len(entries) < LEAST):
        return play.write(record, failed=failed, ended=OVER if over else "all methods failed")
    seconds = max(KEPT_BACK * play.left * play.processes, 0.0)
    variants = [[costs[method]] * len(names) for method, names in entries.items()]
    plan = planned(variants, experiment.rounds, experiment.eval_every, seconds)
    entered = [entry for names in list(entries.values())[: plan.entries] for entry in names]
    by_entry = {entry: [costs[method].setup, costs[method].round] for method in entries for entry in entries[method]}
    record = play.write(record, rungs=plan.rungs, seeds=plan.seeds, entered=entered, costs=by_entry, failed=failed)
    play.display.result(f"{len(entered)} of {len(candidates)} are entered, for {_of(plan.rungs, experiment.rounds)}")
    return record


def rounds_timed(experiment: Experiment) -> int:
    """Return the number of rounds that show how long a method takes, and that it can be judged."""
    return min(max(experiment.eval_every, 3), experiment.rounds)


def first_variants_first(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return candidates in the order of nomination, but further variants of a method after the first of every other.

    >>> [c.entry for c in first_variants_first([Candidate("A1", "A"), Candidate("A2", "A"), Candidate("B", "B")])]
    ['A1', 'B', 'A2']
    """
    variant = {
        candidate.entry: sum(other.method == candidate.method for other in candidates[:place])
        for place, candidate in enumerate(candidates)
    }
    return sorted(candidates, key=lambda candidate: variant[candidate.entry])


def _of(rungs: Sequence[int], rounds: int) -> str:
    """Return the rounds at each rung of those of a study.

    >>> _of((32, 64), 64)
    '32 and 64 of 64 rounds'
    """
    return f"{' and '.join(map(str, rungs))} of {rounds} rounds"


def climb_rungs(play: Play, record: Tournament) -> Tournament:
    """Play the rungs of the plan that are left, and further ones, as far as the budget pays for them."""
    method = {candidate.entry: candidate.method for candidate in record.candidates}
    seeds = play.experiment.seeds[: record.seeds]
    while not record.ended:
        number, below = len(record.reached), record.reached[-1].rounds if record.reached else 0
        if number < len(record.rungs):
            rung, entries = record.rungs[number], record.reached[-1].kept if number else record.entered
        else:
            rung, entries = _next_rung(play, record, method)
            if rung == below:
                break
        title = f"{len(entries)} at {_of((rung,), play.experiment.rounds)}, {count_of_seeds(seeds)}"
        alive, failed = play.rung(title, entries, seeds, rung, below)
        if play.stop.asked:
            return record
        done = {entry: {seed: play.done(entry, seed) for seed in seeds} for entry in alive}
        reached = min((at for by_seed in done.values() for at in by_seed.values()), default=rung)
        whole = reached >= rung
        if not whole and not below:
            timed = rounds_timed(play.experiment)  # the first rounds of every entry are played already
            later = {
                entry: {seed: at * (at > timed) for seed, at in by_seed.items()} for entry, by_seed in done.items()
            }
            alive, seeds, reached = in_time(later)
            if not alive:
                alive, seeds, reached = in_time(done)
        if not alive or (not whole and reached <= below):
            return play.write(record, failed=failed, ended=OVER if done else "all methods failed")
        rounds = min(reached, rung)
        values = play.values(alive, seeds, rounds)
        count = len({method[entry] for entry in alive})
        last = number >= len(record.rungs) - 1 or not whole
        survivors = climbing(values, method, count if last else half(count))
        record = play.write_rung(record, rounds, seeds, values, survivors, failed=failed, ended="" if whole else OVER)
    return record


def in_time(done: Mapping[str, Mapping[int, int]]) -> tuple[list[str], tuple[int, ...], int]:
    """Return the entries and seeds that can be compared after a budget was over, and after how many rounds.

    The seeds in which all entries came farthest; if some entries did not begin, the first seed of those that came
    farthest.

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
    shared = {seed: min(by_seed[seed] for by_seed in done.values()) for seed in seeds}
    if rounds := max(shared.values(), default=0):
        return entries, tuple(seed for seed in seeds if shared[seed] == rounds), rounds
    first = sorted((by_seed[seed] for by_seed in done.values() for seed in seeds[:1]), reverse=True)
    rounds = first[LEAST - 1] if len(first) >= LEAST else 0  # two came so far
    return [entry for entry in entries if done[entry][seeds[0]] >= rounds > 0], seeds[:1], rounds


def _next_rung(play: Play, record: Tournament, method: Mapping[str, str]) -> tuple[int, tuple[str, ...]]:
    """Return the round to which the better half goes on beyond the plan, and that half; else the last rung."""
    top, step, study = record.reached[-1], play.experiment.eval_every, play.experiment.rounds
    rung = min(step * math.ceil(2 * top.rounds / step), study)
    entries = climbing({entry: top.values[entry] for entry in top.kept}, method, half(len(top.kept)))
    seconds = [record.costs[entry].of(rung - top.rounds) for entry in entries for _ in top.seeds]
    another = len(top.seeds) > record.seeds  # another seed was played already
    if another or len(entries) < LEAST or not play.pays_for(seconds, KEPT_BACK):
        return top.rounds, ()
    return rung, tuple(entries)


def tell_apart(play: Play, record: Tournament) -> Tournament:
    """Play more seeds of the entries that cannot be told apart, as long as the budget pays for them."""
    while not record.ended:
        rung, survivors = record.reached[-1], record.survivors
        fresh = [seed for seed in play.experiment.seeds if seed not in rung.seeds][:1]
        if len(survivors) < 2 or not fresh:
            why = "one leads clearly" if len(survivors) == 1 else "all seeds are played"
            return play.write(record, ended=why if survivors else "all methods failed")
        if not play.pays_for([record.costs[entry].of(rung.rounds) for entry in survivors]):
            return play.write(record, ended="the budget does not pay for another seed")
        title = f"{len(survivors)} that cannot be told apart, seed {fresh[0]}"
        alive, failed = play.rung(title, survivors, fresh, rung.rounds, 0)
        if play.stop.asked:
            return record
        if any(play.done(entry, seed) < rung.rounds for entry in alive for seed in fresh):
            return play.write(record, failed=failed, ended=OVER)
        more = play.values(alive, fresh, rung.rounds)
        values = {entry: {**rung.values[entry], **more[entry]} for entry in alive}
        record = play.write_rung(record, rung.rounds, (*rung.seeds, *fresh), values, alive, failed=failed)
    return record
