"""One run: one method with one seed, from its first round or from its checkpoint to its last."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtide.config import Experiment, Forgetting, Method, StopAt
from fedtide.core import checkpoint
from fedtide.core.errors import FedtideError, refused
from fedtide.core.loop import Start, Step, begin, play
from fedtide.core.memory import MemoryStore
from fedtide.core.record import STOPPED, Record, read_rounds, run_lock
from fedtide.core.types import Cost, Grouping, Moment, Scores
from fedtide.data.population import Population
from fedtide.data.saved import CLASSES, check, save
from fedtide.evaluate.clusters import accompanied, apart_within
from fedtide.evaluate.forgetting import Probe, owners_of
from fedtide.evaluate.judge import Judge, View, views
from fedtide.fleets.engine import Engine
from fedtide.fleets.local import LocalEngine, threads
from fedtide.fleets.pool import Processes
from fedtide.fleets.simulated import Query, SimulatedFleet
from fedtide.fleets.stacked import StackedEngine
from fedtide.fleets.workers import WorkersEngine
from fedtide.runs.build import clock_of, cohort_size, digest_of, host_of, metrics_of, spec_of
from fedtide.runs.folder import shift_file

SAVE_SECONDS = 20.0
"""How long a run goes on without a checkpoint where the configuration does not say."""


@dataclass(frozen=True)
class Progress:
    """How far a run is, for whoever shows it; `rounds` is the last round of one that has reached its target."""

    round: int
    rounds: int
    accuracy: float | None
    rate: float


@dataclass(frozen=True)
class Run:
    """One method with one seed, ready to be played.

    Args:
        experiment: the configuration (one point of a sweep).
        method: which of its methods.
        seed: of everything.
        folder: where its record goes, `<method>/<seed>` in the run folder.
        pool: processes for its clients; None runs them here.
    """

    experiment: Experiment
    method: Method
    seed: int
    folder: Path
    pool: Processes | None = None

    def play(self, stop: Callable[[], bool] = lambda: False) -> Iterator[Progress]:
        """Play all rounds that are left, recording; ends early, saved, after a round at which `stop()` is true."""
        # The server's own sums, too, have as many threads here as in a process beside others.
        with run_lock(self.folder), threads(self.experiment.fleet.threads):
            memory = MemoryStore(self.folder / "memory")
            judge = judge_of(self.experiment, self.method, self.seed, memory, self.pool)
            config = digest_of(self.experiment, self.method, self.seed)
            resumed = checkpoint.load(self.folder / "checkpoints", memory, config=config)
            if resumed is None:
                memory.clear()
            shift = self._save_shift(judge.fleet.population)
            marks = None if resumed is None else resumed.marks
            regrouped = judge.fleet.population.drifting_group(Moment(0, self.experiment.rounds)) is not None
            forgetting = self.experiment.forgetting is not None
            record = Record(self.folder, marks, forgetting=forgetting, truth=regrouped, beside=shift)
            known = accuracies(read_rounds(self.folder)) if self.experiment.stop_at is not None else []
            try:
                yield from self._rounds(judge, record, config, None if resumed is None else resumed.start, known, stop)
            finally:
                record.close()

    def _save_shift(self, population: Population) -> Path:
        """Write what was drawn for the population, once for all methods that meet it; return the file."""
        path = shift_file(self.folder.parent.parent, self.method, self.seed)
        others = (
            [] if getattr(self.experiment.data.source, "drawn", False) else sorted(path.parent.glob("*.safetensors"))
        )
        for known in [path] if path.is_file() else others[:1]:  # rows that are not drawn are the same for every seed
            check(population, known)
        if not path.is_file():
            largest = max(cohort_size(method, population.registered) for method in self.experiment.method)
            save(population, path, rounds=self.experiment.rounds, cohort=largest, seconds=self._steady(population))
        return path

    def _steady(self, population: Population) -> float | None:
        """Seconds that every round takes; None where the shift reads them and devices or a trace decide."""
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
        known: list[float | None],
        stop: Callable[[], bool],
    ) -> Iterator[Progress]:
        """Play the rounds from `start` on; `known` are the accuracies of the evaluations before."""
        rounds = self.experiment.rounds
        probe = probe_of(self.experiment.forgetting, judge.fleet, self.seed, self.method.decide_per)
        every = self.experiment.eval_every
        saved = began = lap = time.perf_counter()
        target = self.experiment.stop_at
        records = run_rounds(
            judge, rounds=rounds, seed=self.seed, every=every, start=start, probe=probe, stop_at=target, known=known
        )
        for done, told in enumerate(records, start=1):
            number = told.step.moment.round
            record.round(told.line)
            record.clients(told.clients)
            if told.forgetting is not None:
                record.forgetting(told.forgetting)
            now = time.perf_counter()
            record.timing({"round": number, "seconds": now - lap - told.judged_in, "evaluation": told.judged_in})
            stopping = stop()
            if number + 1 == rounds or STOPPED in told.line or stopping or self._due(number, now - saved):
                ahead = Start(told.step.state, number + 1, told.step.seconds, told.step.moment.seconds)
                folder = self.folder / "checkpoints"
                checkpoint.save(folder, ahead, judge.fleet.memory, config=config, marks=record.marks())
                saved = time.perf_counter()
            last = number + 1 if STOPPED in told.line else rounds
            yield Progress(number + 1, last, told.accuracy, done / (time.perf_counter() - began))
            if stopping:
                return
            lap = time.perf_counter()

    def _due(self, number: int, since: float) -> bool:
        every = self.experiment.checkpoint_every
        return since > SAVE_SECONDS if every is None else (number + 1) % every == 0


@dataclass(frozen=True)
class RoundRecord:
    """A round and what the record says about it."""

    step: Step
    line: dict[str, Any]
    clients: list[tuple[Any, ...]]
    accuracy: float | None
    judged_in: float
    forgetting: dict[str, Any] | None = None


def judge_of(
    experiment: Experiment, method: Method, seed: int, memory: MemoryStore, pool: Processes | None = None
) -> Judge:
    """What plays a method and judges it: its algorithm, its fleet (in processes if there are any), and the views."""
    host = host_of(experiment, method, seed, memory)
    engine: Engine = LocalEngine(host, experiment.fleet.threads)
    if experiment.fleet.kind == "stacked":
        engine = StackedEngine(host, experiment.fleet.threads)
    elif pool is not None:
        there = None if pool.multi_node else memory.directory
        engine = WorkersEngine(pool, spec_of(experiment, method, seed, there), memory if pool.multi_node else None)
    probed = () if experiment.forgetting is None else experiment.forgetting.rounds
    algorithm = host.algorithm
    clock = clock_of(experiment, method, algorithm, host.population)
    fleet = SimulatedFleet.of(host, engine, memory, clock, probed)
    judged = views(host.population, experiment.eval_clients, seed, experiment.eval_splits)
    return Judge(algorithm, fleet, judged, method.decide_per, metrics_of(experiment))


def probe_of(settings: Forgetting | None, fleet: SimulatedFleet, seed: int, grouping: Grouping) -> Probe | None:
    """What measures local client forgetting in a run; None where it is not to be measured."""
    if settings is None:
        return None
    at_most = None if settings.eval_clients == "participants" else settings.eval_clients
    owners = owners_of(fleet.population, settings.part, at_most, seed)
    return Probe(fleet, settings.part, owners, grouping)


def evaluated(
    judge: Judge, *, rounds: int, seed: int, every: int, start: Start | None = None
) -> Iterator[tuple[Step, Iterator[tuple[View, Scores, Tensor | None]] | None]]:
    """Play rounds, with the scores of the state (made as they are asked for) every so many rounds and after the last.

    Args:
        judge: knows the algorithm, the fleet and what is judged.
        rounds: how many in all.
        seed: of everything.
        every: rounds between evaluations.
        start: where to go on; None begins.
    """
    if every < 1 or rounds < 0:
        raise refused("rounds, eval_every", (rounds, every), "0 or more, 1 or more")
    if start is None:
        start = begin(judge.algorithm, judge.fleet, seed=seed, rounds=rounds)
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
    known: Sequence[float | None] = (),
) -> Iterator[RoundRecord]:
    """Play rounds as `evaluated` does and say about each what the record keeps.

    A run that is good enough ends; its last line says at what.

    Args:
        judge: knows the algorithm, the fleet and what is judged.
        rounds: how many in all.
        seed: of everything.
        every: rounds between evaluations.
        start: where to go on; None begins.
        probe: measures forgetting in the rounds that the fleet keeps for it.
        stop_at: when to end before all rounds are played; None never does.
        known: accuracies of the evaluations before `start`, which count for that.
    """
    told = list(known)
    if reached(stop_at, told):
        return
    fleet, spent = judge.fleet, Cost()
    for step, judged in evaluated(judge, rounds=rounds, seed=seed, every=every, start=start):
        began = time.perf_counter()
        cost, spent = Cost(fleet.spent.down - spent.down, fleet.spent.up - spent.up), fleet.spent
        line, accuracy = describe(step, fleet, judge, cost), None
        clients: list[tuple[Any, ...]] = []
        number = step.moment.round
        if judged is not None:
            line["scores"] = {}
            for view, scores, slot in judged:
                line["scores"][view.name] = judge.line(scores)
                clients += judge.rows(number, view, scores, slot)
                if "heterogeneity" not in line and view.name != "held_out_clients":
                    line |= heterogeneity(judge, scores, slot)
            accuracy = headline(line)
            told.append(accuracy)
        stopped = reached(stop_at, told)
        if stopped and stop_at is not None:
            line[STOPPED] = stop_at.model_dump()
        forgotten = None if probe is None or number not in fleet.replayable else probe.line(step)
        yield RoundRecord(step, line, clients, accuracy, time.perf_counter() - began, forgotten)
        if stopped:
            return


def headline(line: Mapping[str, Any]) -> float | None:
    """The accuracy of an evaluation: of held-out clients, else of the clients' test rows, else of their validation
    rows.

    >>> headline({"scores": {"val": {"accuracy": 0.5}, "train_clients": {"accuracy": 0.25}, "held_out_clients": {}}})
    0.25
    """
    shown = [line["scores"][view] for view in ("held_out_clients", "train_clients", "val") if line["scores"].get(view)]
    return shown[0].get("accuracy") if shown else None


def accuracies(lines: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """The accuracy of every evaluation that a record has."""
    return [headline(line) for line in lines if "scores" in line]


def reached(stop_at: StopAt | None, known: Sequence[float | None]) -> bool:
    """Whether the last evaluations are all good enough.

    >>> half = StopAt(accuracy=0.5, evaluations=2)
    >>> [reached(half, known) for known in ([0.6], [0.6, 0.4, 0.5], [0.4, 0.5, 0.6], [0.6, None])]
    [False, False, True, False]
    """
    if stop_at is None or len(known) < stop_at.evaluations:
        return False
    return all(value is not None and value >= stop_at.accuracy for value in known[-stop_at.evaluations :])


def describe(step: Step, fleet: SimulatedFleet, judge: Judge, cost: Cost) -> dict[str, Any]:
    """What `rounds.jsonl` keeps of every round; what was spent before round 0 is part of its cost."""
    trained = [query for query in fleet.queries if query.ask.question == "train"]
    # A client that began earlier and is only asked after takes part when its answer counts.
    took = [query.ask.clients if query.sent is None else query.answered for query in trained]
    participants = torch.cat(took) if took else torch.empty(0, dtype=torch.int64)
    return {
        "round": step.moment.round,
        "seconds": step.seconds,
        "asked": sum(map(_sent, fleet.queries)),
        "answered": sum(len(query.answered) for query in fleet.queries),
        "refused": sum(len(query.refused) for query in fleet.queries),
        "trained": [sum(map(_sent, trained)), sum(len(query.answered) for query in trained)],
        "down": cost.down,
        "up": cost.up,
        "substituted": fleet.substituted,
        **shares(fleet.population, step, participants),
        **branches(fleet.population, trained),
        **blends(fleet.population, step, trained),
        **losses(trained),
        **drifts(fleet.population, step),
        "participants": judge.participants(step.received, participants.unique()),
        "facts": step.facts,
    }


def _sent(query: Query) -> int:
    """How many clients were sent a question in this round."""
    return len(query.ask.clients) if query.sent is None else int(query.sent.sum())


def branches(population: Population, trained: list[Query]) -> dict[str, Any]:
    """How many participants of each group trained each branch or model; (groups, K).

    Where the server asked by slots it is the slot, else what their work notes.
    """
    noted = [
        (client, int(notes.branch))
        for query in trained
        for client, notes in query.notes.items()
        if notes.branch is not None
    ]
    for query in trained:
        counted = query.ask.of(torch.isin(query.ask.clients, query.answered))
        if counted.slot is not None:
            noted += zip(counted.clients.tolist(), counted.slot.tolist(), strict=True)
    if not noted:
        return {}
    clients, branch = torch.tensor(noted).T
    table = torch.zeros(len(population.group_names), int(branch.max()) + 1, dtype=torch.int64)
    return {"branches": table.index_put_((population.group[clients], branch), torch.tensor(1), accumulate=True)}


def blends(population: Population, step: Step, trained: list[Query]) -> dict[str, Any]:
    """What the participants' training rows are made of, where the source has several domains.

    `domains` (domains,): the share of each domain among them, under a shift that blends domains. `split` (domains, K):
    how many rows of each domain went to each component, where works note that.
    """
    if population.rows.domain is None or len(population.rows.domain_names) < 2:
        return {}
    domain, several, moment = population.rows.domain.long(), len(population.rows.domain_names), step.moment
    out = {}
    if trained and population.shift.cycle(moment.rounds) is not None:
        rows, _ = population.pooled(torch.cat([query.ask.clients for query in trained]).unique(), moment, "train")
        out["domains"] = torch.bincount(domain[rows.long()], minlength=several).double() / max(len(rows), 1)
    noted = [
        (client, notes.component.long())
        for query in trained
        for client, notes in query.notes.items()
        if notes.component is not None
    ]
    if noted:
        held = [_held(population, client, moment, len(component)).long() for client, component in noted]
        domains, components = domain[torch.cat(held)], torch.cat([component for _, component in noted])
        known = torch.as_tensor(step.facts.get("pi", 0.0)).numel()
        wide = max(known, int(components.max()) + 1 if len(components) else 1)
        table = torch.zeros(several, wide, dtype=torch.int64)
        out["split"] = table.index_put_((domains, components), torch.tensor(1), accumulate=True)
    return out


def _held(population: Population, client: int, moment: Moment, noted: int) -> torch.Tensor:
    rows = population.held(client, moment, "train")
    if len(rows) != noted:
        raise FedtideError(
            f"note 'component': found {noted} rows, client {client} trains on {len(rows)}; allowed: one for each"
        )
    return rows


def drifts(population: Population, step: Step) -> dict[str, Any]:
    """How many clients drifted since the round before, and what happened, where rows or labels change at events."""
    if not population.shift.drifts:
        return {}
    now = step.moment
    then = replace(now, round=now.round - 1, seconds=step.before)
    return {"drifted": len(population.changed(now, then)), "events": list(population.events(now, then))}


def heterogeneity(judge: Judge, scores: Scores, slot: torch.Tensor | None) -> dict[str, Any]:
    """How unlike the judged clients of a cluster are by what they hold now, where that drifts.

    `within`: the mean L1 distance of label shares between clients of a cluster (`fedtide.evaluate.clusters`), of which
    there is one for a method without any; null where all are at experts of their own. `shared`: the same of those who
    are not alone in their cluster, as who is alone has a distance of 0; null without any. `all`: if all were in one.
    """
    population, moment = judge.fleet.population, judge.fleet.moment
    if not population.shift.drifts or population.rows.steps is not None or population.rows.classes > CLASSES:
        return {}
    shares = population.label_shares(scores.clients, moment).numpy()
    found = judge.clusters(scores, slot)
    nowhere = -1 if any(each is not None for each in found) else 0
    cluster = np.array([nowhere if each is None else each for each in found], dtype=np.int64)
    held = shares.any(axis=1)
    clustered = held & (cluster >= 0)
    shares, cluster, everyone = shares[clustered], cluster[clustered], apart_within(shares[held], np.zeros(held.sum()))
    near = accompanied(cluster)
    told = {
        "within": apart_within(shares, cluster),
        "shared": apart_within(shares[near], cluster[near]),
        "all": everyone,
    }
    return {"heterogeneity": {name: round(value, 6) for name, value in told.items()}}


def losses(trained: list[Query]) -> dict[str, Any]:
    """How the training loss is spread over the participants whose answers counted; nothing where they tell of none."""
    told = [float(note.loss) for query in trained for note in query.notes.values() if note.loss is not None]
    if not told:
        return {}
    with np.errstate(invalid="ignore"):  # of infinite ones there may be no quantile, and that is what is said
        found = np.quantile(told, [0.0, 0.25, 0.5, 0.75, 1.0]).round(6).tolist()
    return {"client_loss": dict(zip(("min", "q25", "q50", "q75", "max"), found, strict=True))}


def shares(population: Population, step: Step, participants: torch.Tensor) -> dict[str, Any]:
    """How many participants were of each group, and what share the shift led to expect; nothing for one group."""
    if len(population.group_names) < 2:
        return {}
    counts = torch.bincount(population.group[participants], minlength=len(population.group_names))
    expected = population.expected(step.moment).tolist()
    return {"groups": counts, "expected": expected}
