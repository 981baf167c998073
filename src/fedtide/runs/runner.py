"""One run: one method with one seed, from its first round or from its checkpoint to its last."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from fedtide.config import Experiment, Forgetting, Method, StopAt
from fedtide.core import checkpoint
from fedtide.core.atomic import naming
from fedtide.core.base import Cost, Grouping, Moment, Scores
from fedtide.core.errors import FedtideError, Words, refused
from fedtide.core.loop import Start, Step, begin, play
from fedtide.core.memory import MemoryStore
from fedtide.core.record import (
    ALARMS,
    ASKS,
    FORGETTING,
    LEDGER,
    OTHERS,
    STOPPED,
    Record,
    first_work_in,
    not_undone,
    read_lines,
    rolled_back,
    run_lock,
    view_of,
)
from fedtide.data.population import Population
from fedtide.data.saved import save
from fedtide.evaluate.judge import Judge, Recorded, View, views
from fedtide.evaluate.probe import Probe, owners_of
from fedtide.evaluate.references import References
from fedtide.evaluate.rounds import accuracies, describe, describe_spending, headline, heterogeneity, noise_of
from fedtide.fleets.ask import ABSTAINED, NOT_FINITE
from fedtide.fleets.engines import Engine, LocalEngine, WorkersEngine, threads
from fedtide.fleets.pool import Processes
from fedtide.fleets.simulated import SimulatedFleet
from fedtide.fleets.stacked_engine import StackedEngine, why_alone
from fedtide.remote.asks import find_failed
from fedtide.remote.fleet import RemoteFleet
from fedtide.runs.build import built, cohort_size, metrics_of, spec_of
from fedtide.runs.digest import device_of, digest_of, digests_of_files
from fedtide.runs.folder import check_rows, shift_file
from fedtide.runs.privacy import server_wire
from fedtide.transforms.watch import is_watched
from fedtide.wire.ledger import check_released
from fedtide.wire.noise import simulated_noise

GONE = "was moved or removed while it was played; allowed: fedtide resume NEW_PLACE if it was moved, else a new run"
"""What is said of a folder that is not there any more."""

SAVE_SECONDS = 20.0
"""Seconds between checkpoints if the configuration has no number of rounds."""


FAILED_ROUNDS, FAILED_CLIENTS = 3, 20
"""Rounds in a row without an answer that counts, and clients in them that fail, after which a run ends."""


class NothingTrained(FedtideError):
    """No client has answered for some rounds, or in any."""


class Outcome(NamedTuple):
    """The outcome of a question: how many answers count, or if none does, by reason the clients that failed."""

    question: str
    answered: int
    failed: Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Failures:
    """The last rounds without an answer that counts: their number, answers by reason, and the clients.

    answered: whether an answer has counted before. Then a client may abstain, because it has nothing new to say.
    """

    answered: bool = False
    rounds: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    clients: frozenset[int] = frozenset()

    def add(self, asks: Sequence[Outcome]) -> "Failures":
        """Return the failures after the questions of a round; one in which nobody could answer changes nothing."""
        asked = [ask for ask in asks if ask.question == "train"] or asks
        if any(ask.answered for ask in asked):
            return Failures(answered=True)
        failed = [(reason, client) for ask in asked for reason, ids in ask.failed.items() for client in ids
                  if not (self.answered and reason == ABSTAINED)]  # fmt: skip
        reasons, clients = self.reasons + Counter(reason for reason, _ in failed), {client for _, client in failed}
        return Failures(self.answered, self.rounds + bool(failed), reasons, self.clients | clients)

    @classmethod
    def before(cls, folder: Path) -> "Failures":
        """Return the failures up to a checkpoint, by the record; of simulated clients it has no reasons."""
        failures = cls(any(line["trained"][1] or (not line["trained"][0] and line["answered"])
                           for line in read_lines(folder)))  # fmt: skip
        for line in read_lines(folder, ASKS):
            asks = [Outcome(ask["question"], len(ask["answered"]), {} if ask["answered"] else find_failed(ask["nodes"]))
                    for ask in line["asks"]]  # fmt: skip
            failures = failures.add(asks)
        return failures

    def check(self, clients: int, number: int, rounds: int | None = None) -> None:
        """Raise if so many rounds and clients, or all of `clients`, have failed up to a round.

        At the end of all `rounds` one that failed is enough, if no answer has ever counted.
        """
        enough = self.rounds >= FAILED_ROUNDS and len(self.clients) >= min(clients, FAILED_CLIENTS)
        if enough or (number + 1 == rounds and self.rounds > 0 and not self.answered):
            counts = ", ".join(f"{reason} ({count})" for reason, count in self.reasons.most_common(3))
            counts += ", often because a learning rate is too large" * (NOT_FINITE in self.reasons)
            when = f"for {self.rounds} rounds" if enough else "in any round"
            raise NothingTrained(f"round {number}: no answer has counted {when}: {counts}")


@dataclass(frozen=True)
class Progress:
    """Progress of a run, for displays; `rounds` is the last round of one that has reached its target.

    `noise` is the standard deviation of the noise on the accuracy, if it has any.
    """

    round: int
    rounds: int
    accuracy: float | None
    rate: float
    noise: float | None = None


@dataclass(frozen=True)
class Run:
    """One method with one seed, ready to be played.

    Args:
        experiment: the configuration (one point of a sweep).
        method: which of its methods.
        seed: of everything.
        folder: of its record, `<method>/<seed>` in the run folder.
        pool: processes for its clients; None runs them here.
        keep: rounds done whose checkpoints stay, whatever their scores.
    """

    experiment: Experiment
    method: Method
    seed: int
    folder: Path
    pool: Processes | None = None
    keep: tuple[int, ...] = ()

    def simulated(self) -> Judge:
        """Build the judge of the run in simulation."""
        memory, ledger = MemoryStore(self.folder / "memory"), self.folder / LEDGER
        return judge_of(self.experiment, self.method, self.seed, memory, self.pool, ledger)

    def play(
        self,
        stop: Callable[[], bool] = lambda: False,
        judge_of: "Callable[[Run], Judge]" = simulated,
        until: int | None = None,
    ) -> Iterator[Progress]:
        """Play all rounds that are left, recording; ends early, saved, after a round at which `stop()` is true.

        `judge_of` builds the judge with its fleet, of real clients for example. With `until` it ends, saved, once so
        many rounds are played.
        """
        # The server's own sums, too, have as many threads here as in one of several processes.
        with run_lock(self.folder), threads(self.experiment.fleet.threads):
            judge = judge_of(self)
            truth = judge.fleet.truth
            if truth is not None and (self.folder / ASKS).exists():
                raise FedtideError(f"{self.folder}: its clients are real; go on with: fedtide serve SITE")
            config = digest_of(self.experiment, self.method, self.seed)
            resumed = checkpoint.load(self.folder / "checkpoints", judge.fleet.memory, config=config)
            start = None if resumed is None else resumed[0]
            if start is None:
                judge.fleet.memory.clear()
            elif until is not None and start.round >= until:
                return
            earlier = None if start is None else rolled_back(self.folder).get(start.round)
            if start is not None and earlier is not None:
                folder = self.folder / "checkpoints"
                start = replace(start, state=checkpoint.kept_state(folder, earlier, config=config))
                if truth is not None:  # nodes of real clients have what they kept in later rounds alone
                    checkpoint.kept_memory(folder, earlier, judge.fleet.memory)
            shift = None if truth is None else self._save_shift(truth)
            regrouped = truth is not None and truth.drifting_group(Moment(0, self.experiment.shift_rounds)) is not None
            record = Record(
                self.folder,
                None if resumed is None else resumed[1],
                forgetting=self.experiment.forgetting is not None,
                asks=truth is None,
                alarms=is_watched(judge.algorithm),
                truth=regrouped,
                beside=shift,
            )
            try:
                check_released(self.folder, 0 if start is None else start.round)
                yield from self._rounds(judge, record, config, start, stop, until, earlier)
            except (FedtideError, OSError) as error:
                if isinstance(error, NothingTrained):
                    raise NothingTrained(f"method '{self.method.name}', seed {self.seed}: {error}") from None
                if self.folder.is_dir():
                    raise
                raise FedtideError(f"{self.folder}: {GONE}") from None
            finally:
                record.close()

    def _rank(self, scored: Mapping[int, float | None], fleet: Recorded) -> list[int]:
        """Return the rounds of the best models, the best first; real clients are told which that is."""
        keep = self.experiment.keep
        best = [] if keep is None else keep.rank(scored, self.experiment.score)
        if isinstance(fleet, RemoteFleet):
            fleet.best = best[0] if best else None
        return best

    def _save_shift(self, population: Population) -> Path:
        """Write the drawn population, once for all methods that meet it; return the file."""
        experiment = self.experiment
        check_rows(self.folder, experiment, self.method, self.seed, population)
        path = shift_file(self.folder.parent.parent, self.method, self.seed)
        if not path.is_file():
            largest = max(cohort_size(method, population.registered) for method in experiment.method)
            save(population, path, rounds=experiment.shift_rounds, cohort=largest, seconds=self._steady(population))
        return path

    def _steady(self, population: Population) -> float | None:
        """Return the seconds that every round takes; None if the shift reads them and devices or a trace decide."""
        shift = self.experiment.shift_of(self.method)
        if shift.clock == "seconds" and population.availability is not None:
            return None  # a round lasts until a client is there
        return self.experiment.timing.seconds or (None if shift.clock == "seconds" else 1.0)

    def _rounds(
        self,
        judge: Judge,
        record: Record,
        config: str,
        start: Start | None,
        stop: Callable[[], bool],
        until: int | None,
        rolled_back_to: int | None = None,
    ) -> Iterator[Progress]:
        """Play the rounds from `start` on and record them; save after the rounds at which a checkpoint is due.

        The first line says to which model the run was rolled back before it, if it was.
        """
        experiment = self.experiment
        rounds, every, target = experiment.rounds, experiment.checkpoint_every, experiment.stop_at
        lines = not_undone(read_lines(self.folder), rolled_back_to)
        earlier = accuracies(lines) if target is not None else []
        before = Failures() if start is None else Failures.before(self.folder)
        if isinstance(judge.fleet, SimulatedFleet):
            judge.fleet.first_work |= first_work_in(read_lines(self.folder))
        if start is not None and start.round >= rounds:
            before.check(0, rounds - 1)
        scored = by_validation(experiment, lines)
        if (about := checkpoint.check(self.folder / "checkpoints", config=None)) is not None:
            # A rollback undoes better models, and brings none back whose checkpoint had to go for them.
            scored = {number: value for number, value in scored.items() if number in about.there}
        best = self._rank(scored, judge.fleet)
        files = digests_of_files(experiment, self.method)
        probe = probe_of(experiment.forgetting, judge.fleet, self.seed, self.method.decide_per)
        saved = began = lap = time.perf_counter()
        played = run_rounds(
            judge, rounds=rounds, seed=self.seed, every=experiment.eval_every, start=start, probe=probe,
            stop_at=target, earlier=earlier, answered=before.answered,
        )  # fmt: skip
        for count, result in enumerate(played, start=1):
            done = result.step.moment.round + 1
            returned = {} if count > 1 or rolled_back_to is None else {"rolled_back_to": rolled_back_to}
            record.append("rounds.jsonl", result.line | returned)
            if judge.fleet.truth is not None or judge.fleet.ledger is None:  # numbers of real clients stay private
                record.clients(result.clients)
            for line in judge.fleet.record_lines():
                record.append(ASKS, line)
            for alarm in result.line["facts"].get("watch", {}).get("alarms", ()):
                record.append(ALARMS, {"round": done - 1, **alarm})
            if result.forgetting is not None:
                record.append(FORGETTING, result.forgetting)
            now = time.perf_counter()
            trained_in = now - lap - result.judged_in - result.aside
            timing = {"round": done - 1, "seconds": trained_in, "evaluation": result.judged_in}
            timing |= {"clustering": result.clustered_in} if result.clustered_in else {}
            record.append("timings.jsonl", timing)
            last = done if STOPPED in result.line else rounds
            stopping = stop() or done == until
            scored |= by_validation(experiment, [result.line])
            best = self._rank(scored, judge.fleet)
            best += [number for number in self.keep if number not in best and number <= done]
            due = now - saved > SAVE_SECONDS if every is None else done % every == 0
            if done == last or stopping or due or done in best:
                folder, step = self.folder / "checkpoints", result.step
                ahead = Start(step.state, done, step.seconds, step.moment.seconds)
                memory, device = judge.fleet.memory, device_of(experiment)
                with naming(folder):
                    checkpoint.save(
                        folder, ahead, memory, config=config, marks=record.marks(), device=device, keep=best,
                        files=files,
                    )  # fmt: skip
                saved = time.perf_counter()
            rate = count / (time.perf_counter() - began)
            yield Progress(done, last, result.accuracy, rate, noise_of(result.line))
            if stopping:
                return
            lap = time.perf_counter()


@dataclass(frozen=True)
class RoundRecord:
    """A round and what the record says about it.

    `aside` are seconds of references and of waiting, `clustered_in` those of the server's work on clusters.
    """

    step: Step
    line: dict[str, Any]
    clients: list[tuple[Any, ...]]
    accuracy: float | None
    judged_in: float
    forgetting: dict[str, Any] | None = None
    aside: float = 0.0
    clustered_in: float = 0.0


def judge_of(
    experiment: Experiment,
    method: Method,
    seed: int,
    memory: MemoryStore,
    pool: Processes | None = None,
    ledger: Path | None = None,
) -> Judge:
    """Build the judge of a method: its algorithm, its fleet (in processes if there are any), and the views.

    `ledger` is the file of what was released, where sums are private.
    """
    parts = built(experiment, method, seed, memory)
    host = parts.host
    engine: Engine = LocalEngine(host, experiment.fleet.threads)
    if experiment.fleet.kind == "stacked":
        # Some methods of an experiment may not be stacked: `preflight` wants one that is.
        if why_alone(host) is None:
            engine = StackedEngine(host, experiment.fleet.threads)
    elif pool is not None:
        directory = None if pool.multi_node else memory.directory
        engine = WorkersEngine(host, pool, spec_of(experiment, method, seed, directory), experiment.fleet.threads)
    probed = () if experiment.forgetting is None else experiment.forgetting.rounds
    wire = server_wire(experiment, method, host, simulated_noise(seed), ledger)
    fleet = SimulatedFleet.of(host, engine, parts.clock, probed, wire)
    judged = views(host.population, experiment.eval_clients, seed, experiment.eval_splits)
    # One method of those that meet the same rows records what needs no method.
    first = next(other for other in experiment.method if other.shift == method.shift)
    over, references = experiment.accuracy_over, None
    if experiment.references:
        references = References(host.population, experiment.references, over)
    return Judge(
        host.algorithm, fleet, judged, method.decide_per, metrics_of(experiment), parts.embedded,
        references if method.name == first.name else None, over,
    )  # fmt: skip


def probe_of(settings: Forgetting | None, fleet: Recorded, seed: int, grouping: Grouping) -> Probe | None:
    """Build the probe that measures local client forgetting in a run; None if it is not measured.

    Raises:
        FedtideError: the clients are real, and no client's model is judged on rows of others.
    """
    if settings is None:
        return None
    if not isinstance(fleet, SimulatedFleet):
        raise refused(
            "forgetting", Words("a table"), "none", "only a simulation can judge models on rows of other clients"
        )
    at_most = None if settings.eval_clients == "participants" else settings.eval_clients
    owners = owners_of(fleet.population, settings.part, at_most, seed)
    return Probe(fleet, settings.part, owners, grouping)


def evaluated(
    judge: Judge, *, rounds: int, seed: int, every: int, start: Start | None = None
) -> Iterator[tuple[Step, Iterator[tuple[View, Scores, Tensor | None]] | None]]:
    """Play rounds, with the scores of the state (made as they are asked for) every so many rounds and after the last.

    Without rounds the first state is judged, in a round -1 in which nothing is trained.

    Args:
        judge: of the algorithm, its fleet and the views.
        rounds: how many in all.
        seed: of everything.
        every: rounds between evaluations.
        start: of the rounds that are left; None begins.
    """
    if start is None:
        start = begin(judge.algorithm, judge.fleet, seed=seed, rounds=max(rounds, 1))
        if rounds == 0:
            yield Step(judge.fleet.moment, start.state, start.state, {}, start.seconds), judge.scores(start.state)
    for step in play(judge.algorithm, judge.fleet, start, seed=seed, rounds=rounds):
        done = step.moment.round + 1
        yield step, judge.scores(step.state) if done % every == 0 or done == rounds else None


def run_rounds(
    judge: Judge,
    *,
    rounds: int,
    seed: int,
    every: int,
    start: Start | None = None,
    probe: Probe | None = None,
    stop_at: StopAt | None = None,
    earlier: Sequence[float | None] = (),
    answered: bool = False,
) -> Iterator[RoundRecord]:
    """Play rounds as `evaluated` does, and yield the record of each.

    A run that is good enough ends; its last line says at what.

    Args:
        judge: of the algorithm, its fleet and the views.
        rounds: how many in all.
        seed: of everything.
        every: rounds between evaluations.
        start: of the rounds that are left; None begins.
        probe: measures forgetting in the rounds that the fleet keeps for it.
        stop_at: when to end before all rounds are played; None never does.
        earlier: accuracies of the evaluations before `start`, which count for that.
        answered: whether an answer has counted before `start`.

    Raises:
        NothingTrained: no client has answered for some rounds, or in any.
    """
    accuracies_so_far = list(earlier)
    if reached(stop_at, accuracies_so_far):
        return
    fleet, spent, failures, waited, clustered = judge.fleet, dict[str, Cost](), Failures(answered), 0.0, 0.0
    for step, judged in evaluated(judge, rounds=rounds, seed=seed, every=every, start=start):
        began = time.perf_counter()
        cost = {question: now - spent.get(question, Cost()) for question, now in fleet.spent_on.items()}
        spent = dict(fleet.spent_on)
        clustered_in, clustered = fleet.clustering.seconds - clustered, fleet.clustering.seconds
        line, accuracy = describe(step, judge, cost), None
        if isinstance(fleet, SimulatedFleet):
            line["first_work"] = fleet.take_first_work()
        clients: list[tuple[Any, ...]] = []
        number, aside = step.moment.round, 0.0
        if judged is not None:
            line["scores"], who = {}, dict[str, Tensor]()
            for view, scores, slot in judged:
                line["scores"][view.name], who[view.name] = judge.line(view, scores), scores.clients
                clients += judge.rows(number, view, scores, slot)
                if "heterogeneity" not in line and view.name != "held_out_clients":
                    line |= heterogeneity(judge, scores, slot)
            for name, other in judge.others():
                entries = line.setdefault(OTHERS, {}).setdefault(name, {})
                for view, scores, slot in judge.scores(step.state, name):
                    entries[view.name] = other.line(view, scores)
                    clients += other.rows(number, replace(view, name=view_of(view.name, name)), scores, slot)
            accuracy = headline(line)
            accuracies_so_far.append(accuracy)
            aside = time.perf_counter()
            judge.refer(line["scores"], who)
            aside = time.perf_counter() - aside
            if fleet.ledger is not None:
                line |= describe_spending(fleet.ledger, number)  # by these scores, too
        stopped = reached(stop_at, accuracies_so_far)
        if stopped and stop_at is not None:
            line[STOPPED] = stop_at.model_dump()
        forgetting = None if probe is None or number not in probe.fleet.replayable else probe.line(step)
        judged_in = time.perf_counter() - began - aside
        if isinstance(fleet, RemoteFleet):
            aside, waited = aside + fleet.waited - waited, fleet.waited
        yield RoundRecord(step, line, clients, accuracy, judged_in, forgetting, aside, clustered_in)
        if stopped:
            return
        failures = failures.add([Outcome(ask.ask.question, len(ask.answered), ask.failed) for ask in fleet.queries])
        present = fleet.attendance.present if isinstance(fleet, RemoteFleet) else fleet.clients
        failures.check(len(present), number, rounds)


def by_validation(experiment: Experiment, lines: Iterable[Mapping[str, Any]]) -> dict[int, float | None]:
    """Return by rounds done the number of each evaluation on validation rows by which models are kept; {} for none."""
    if experiment.keep is None:
        return {}
    by = experiment.keep.by or experiment.score
    return {line["round"] + 1: line["scores"].get("val", {}).get(by) for line in lines if "scores" in line}


def reached(stop_at: StopAt | None, accuracies: Sequence[float | None]) -> bool:
    """Tell whether the last evaluations are all good enough.

    >>> half = StopAt(accuracy=0.5, evaluations=2)
    >>> [reached(half, known) for known in ([0.6], [0.6, 0.4, 0.5], [0.4, 0.5, 0.6], [0.6, None])]
    [False, False, True, False]
    """
    if stop_at is None or len(accuracies) < stop_at.evaluations:
        return False
    return all(value is not None and value >= stop_at.accuracy for value in accuracies[-stop_at.evaluations :])
