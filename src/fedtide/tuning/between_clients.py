"""A tournament between real clients: several methods play one study side by side, judged by sums. Our own.

A round of the study is a round of every entry that is still in. All entries play half of the rounds, the better half of
the methods plays all of them. In the last rounds of each half clients judge the entries on validation rows of their
own. The question `compare` sums the score of an entry. It also sums how much higher the score is than those of the
entries before, at the same client. So the server reads differences that are paired by clients, with their spread.

| sums | they tell |
| --- | --- |
| score, its square | mean over clients, each of which counts once |
| apart, its square | mean difference of two entries at the same clients, and its standard error |

An entry sees its own questions, its own memory of clients, and its own state. All begin with the same weights, and draw
the same clients if their cohorts are alike. The first entry has the bits that it has alone.

Choices:
    - ours: errors are over clients, because real clients play one seed. The luck of a seed is not in them.
    - ours: the variance of a difference that is judged several times is the mean of the variances, which is no less.
    - ours: entries that differ in the learning rate alone are one method, whose better entry goes on.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, Field
from torch import Tensor

from fedtide.algorithms import REGISTRY
from fedtide.config import Method, from_dict, resolved
from fedtide.core.base import (
    Algorithm,
    Answer,
    Facts,
    Memory,
    Moment,
    Payload,
    Prediction,
    Shard,
    Slot,
    Sum,
    Traits,
    Weighted,
    Work,
)
from fedtide.core.errors import FedtideError, Words, refused
from fedtide.core.rng import Rng
from fedtide.core.trees import Tree, detached, grown
from fedtide.evaluate.metrics import CONFIDENCE
from fedtide.fields.user_code import build_part
from fedtide.learn.task import Task
from fedtide.runs.build import algorithm_of
from fedtide.transforms.on_need import judge_question
from fedtide.transforms.transform import Sending, each_slot
from fedtide.tuning.ladder import climbing, half, rungs_of
from fedtide.wire.pipeline import why_not

COMPARE = "compare"
"""The question that judges an entry on validation rows."""
SCORES = "scores"
"""What a client keeps of its own scores, beside the memory of the entries."""
JUDGED = 8
"""Share of the rounds in which entries are judged before each decision, as 1 / 8."""


def written_out(tables: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
    """Return the tables of entries with every default.

    Raises:
        FedtideError: an entry is no registered method, begins with weights, or meets a shift of its own.
    """
    return tuple(resolved(_study_of(tables))["method"])


def _study_of(tables: Sequence[Mapping[str, Any]]) -> Any:
    study = from_dict({"method": list(tables)}, where="entries", timed=False, imports=False)
    for method in study.method:
        where = f"entries: method '{method.name}'"
        if method.algorithm not in REGISTRY:
            raise refused(f"{where}.algorithm", method.algorithm, "a registered name")
        for key, usual in {"init_from": None, "shift": None, "decide_per": "client"}.items():
            if getattr(method, key) != usual:
                raise refused(f"{where}.{key}", Words("a value"), "no such key in an entry")
    return study


Entries = Annotated[tuple[dict[str, Any], ...], AfterValidator(written_out), Field(min_length=2, max_length=100)]
"""Tables of methods, as `[[method]]` of a study has them."""


def methods_of(tables: Sequence[Mapping[str, Any]]) -> tuple[Method, ...]:
    """Return the methods of the tables of entries."""
    return _study_of(tables).method


@dataclass(frozen=True)
class Played:
    """Payload of clients: the number of an entry, and what the entry sends."""

    entry: int
    inner: Payload


@dataclass(frozen=True)
class Rung:
    """The sums of the clients' scores before a decision.

    Args:
        rounds: number of rounds that were played by then.
        entries: numbers of the entries that played.
        times: how often clients were asked.
        scores: (entries, 3) clients, scores and squares, summed; of all entries.
        apart: (entries, entries, 3) clients, differences and squares of a later entry to one before it.
    """

    rounds: int
    entries: tuple[int, ...]
    times: int
    scores: Tensor
    apart: Tensor

    def score(self, entry: int) -> float:
        """Return the mean score of an entry over clients; NaN if nobody judged it."""
        return self.mean(entry).mean

    def mean(self, entry: int) -> "Difference":
        """Return the mean score of an entry over clients with its error."""
        clients, summed, squares = self.scores[entry].tolist()
        return Difference.of(clients, summed, squares, self.times)

    def difference(self, one: int, other: int) -> "Difference":
        """Return how much higher clients score one entry than the other."""
        after, before = max(one, other), min(one, other)
        clients, summed, squares = self.apart[after, before].tolist()
        return Difference.of(clients, summed if one == after else -summed, squares, self.times)


@dataclass(frozen=True)
class Difference:
    """A mean over clients, its standard error, and half of its 95 % interval (Student's t); NaN if it is unknown."""

    mean: float
    error: float
    margin: float

    @staticmethod
    def of(clients: float, summed: float, squares: float, times: int) -> "Difference":
        """Compute a mean of clients that were asked several times, from sums over all of it.

        >>> found = Difference.of(4.0, 2.0, 2.0, 1)  # 1, 1, 0 and 0: variance 1/3, error sqrt(1/12)
        >>> found.mean, round(found.error, 4), round(found.margin, 4)
        (0.5, 0.2887, 0.9187)
        """
        people = clients / max(times, 1)
        mean = summed / clients if clients else math.nan
        if people < 2:
            return Difference(mean, math.nan, math.nan)
        error = math.sqrt(max(squares / clients - mean**2, 0.0) / (people - 1))
        from scipy.special import stdtrit  # here, as every process that plays runs would wait for it

        return Difference(mean, error, float(stdtrit(people - 1, (1 + CONFIDENCE) / 2)) * error)


@dataclass(frozen=True)
class State:
    """The states of all entries, and their sums.

    Args:
        states: of each entry; of one that was dropped the last.
        playing: numbers of the entries that are still in.
        now: the sums since the last decision.
        rungs: those of the decisions.
    """

    states: tuple[Any, ...]
    playing: tuple[int, ...]
    now: Rung
    rungs: tuple[Rung, ...] = ()

    @property
    def best(self) -> int:
        """The entry with the highest score at the last decision; before the first the first entry."""
        if not self.rungs:
            return self.playing[0]
        return max(self.playing, key=lambda entry: _or_least(self.rungs[-1].score(entry)))


def _or_least(score: float) -> float:
    return -math.inf if math.isnan(score) else score


def rung_ends(rounds: int, methods: int) -> tuple[int, ...]:
    """Return the rounds after which is decided: half of them, if any method can be dropped, and all.

    >>> rung_ends(9, 4), rung_ends(9, 2), rung_ends(1, 4)
    ((5, 9), (9,), (1,))
    """
    return (rounds,) if half(methods) >= methods else rungs_of(rounds, 1)


def tournament(task: Task, entries: Entries) -> Algorithm[State]:
    """Play several methods side by side; the better half of them plays all rounds.

    Args:
        task: model and loss; an entry may have a loss of its own.
        entries: the methods, as tables.

    Raises:
        FedtideError: one of them cannot be played beside others.
    """
    methods = methods_of(entries)
    tasks = [replace(task, loss=build_part(method.loss, f"method '{method.name}'.loss", ())) for method in methods]
    algorithms = [algorithm_of(method, one) for method, one in zip(methods, tasks, strict=True)]
    for method, algorithm in zip(methods, algorithms, strict=True):
        if why := why_alone(algorithm):
            raise FedtideError(f"entries: method '{method.name}': is not allowed beside others, because {why}")
    kinds = kinds_of(entries)
    judges = [judge_question(algorithm, task.target) for algorithm in algorithms]

    def see_as(fleet: Any, entry: int) -> Sending:
        return Sending(fleet, partial(Played, entry))

    def init(fleet: Any, rng: Rng) -> State:
        states = tuple(one.init(see_as(fleet, entry), rng) for entry, one in enumerate(algorithms))
        return State(states, tuple(range(len(algorithms))), empty(range(len(algorithms)), len(algorithms)))

    def round(state: State, fleet: Any, rng: Rng) -> tuple[State, Facts]:
        states, now, rungs = list(state.states), state.now, state.rungs
        number, rounds = fleet.moment.round, fleet.moment.rounds
        for entry in state.playing:
            received = grown(states[entry], len(fleet.clients))
            states[entry], _ = algorithms[entry].round(received, see_as(fleet, entry), rng)
        end = next(end for end in rung_ends(rounds, len(set(kinds))) if end > number)
        facts: dict[str, Any] = {"entries": len(state.playing)}
        if number < end - max(rounds // JUDGED, 1):
            return replace(state, states=tuple(states)), facts
        now = replace(now, times=now.times + 1)
        for entry in state.playing:
            payload, slot = algorithms[entry].serve(states[entry], fleet.reachable)
            reply = see_as(fleet, entry).ask(COMPARE, fleet.reachable, payload, slot=slot)
            now = added(now, entry, reply.total)
        playing = state.playing
        if number + 1 == end:
            rungs = (*rungs, replace(now, rounds=end))
            values = {str(entry): {0: _or_least(now.score(entry))} for entry in playing}
            count = len(set(kinds)) if end == rounds else half(len(set(kinds)))
            going = climbing(values, {str(entry): kinds[entry] for entry in playing}, count)
            playing = tuple(int(entry) for entry in going)
            now = empty(playing, len(algorithms))
            facts |= {f"score {methods[entry].name}": rungs[-1].score(entry) for entry in state.playing}
        return State(tuple(states), playing, now, rungs), facts

    def serve(state: State, clients: Tensor) -> tuple[Any, Slot | None]:
        payload, slot = algorithms[state.best].serve(state.states[state.best], clients)
        return each_slot(payload, {"slot": slot}, partial(Played, state.best)), slot

    def predict(payload: Played, memories: Sequence[Memory], x: Tensor, owner: Tensor) -> Prediction:
        parts = [own_part(memory, payload.entry) for memory in memories]
        return algorithms[payload.entry].predict(payload.inner, parts, x, owner)

    def adapt(payload: Played, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        work = algorithms[payload.entry].adapt
        return None if work is None else _through(work, payload, memory, shard, moment, rng)

    def work_of(question: str) -> Work:
        def work(payload: Played, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
            return _through(algorithms[payload.entry].works[question], payload, memory, shard, moment, rng)

        return work

    def compare(payload: Played, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        entry = payload.entry
        answer = judges[entry](payload.inner, own_part(memory, entry), shard, moment, rng)
        if answer is None:
            return None
        score, memory = float(answer.total["score"].value), memory or {}
        scores, when = memory.get(SCORES, (torch.zeros(len(algorithms)).double(), torch.full((len(algorithms),), -1)))
        is_judged = (when == moment.round).double()
        higher = (score - scores) * is_judged
        total = {
            "score": Weighted(torch.tensor([score, score**2], dtype=torch.float64)),
            "apart": Weighted(torch.stack([is_judged, higher, higher**2], 1)),
        }
        here = torch.arange(len(algorithms)) == entry
        newest = torch.where(here, score, scores), torch.where(here, moment.round, when)
        return Answer(total, memory={**memory, SCORES: newest})

    def check(clients: Any) -> None:
        for method, algorithm in zip(methods, algorithms, strict=True):
            size = getattr(algorithm.options.get("cohort"), "clients_per_round", None)
            if size is not None and size > clients.registered:
                key = f"entries: method '{method.name}'.cohort.clients_per_round"
                raise refused(key, size, f"at most {clients.registered}, the registered clients")
            if algorithm.check is not None:
                algorithm.check(clients)
        if not clients.has_val:
            raise refused("data.split.val", 0, "a share of the rows, by which entries are judged, such as 0.2")

    questions = dict.fromkeys(question for algorithm in algorithms for question in algorithm.works)
    works = {question: work_of(question) for question in questions} | {COMPARE: compare}
    traits = joined_traits([algorithm.traits for algorithm in algorithms])
    return Algorithm("tournament", init, works, round, serve, predict, adapt, check=check, traits=traits)


def why_alone(algorithm: Algorithm[Any]) -> str:
    """Return the reason why a method cannot play beside others; "" if it can."""
    traits = algorithm.traits
    if traits.before:
        return "it collects in rounds before the first one"
    if traits.first is not None or traits.deadline is not None:
        return "its cohort leaves late answers out"
    if "max_staleness" in algorithm.options:
        return "its clients answer in later rounds"
    if {"true_groups", "all_rows"} & set(traits.reveals):
        return "it asks for what only a simulation knows"
    return ""


def why_unfit(algorithm: Algorithm[Any], secure: bool) -> str:
    """Return the reason why a method is not entered at a site, whose sums may be masked; "" if it is."""
    return why_alone(algorithm) or (why_not(algorithm) if secure else "")


def kinds_of(tables: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return for each entry the method that it is of: entries of one differ in names and learning rates alone.

    >>> one = {"name": "A, lr 0.1", "algorithm": "fedavg", "local": {"lr": 0.1}}
    >>> kinds_of([one, {**one, "name": "B", "local": {"lr": 0.2}}, {**one, "algorithm": "ifca"}])
    ['A, lr 0.1', 'A, lr 0.1', 'A, lr 0.1 (2)']
    """
    first: dict[str, str] = {}
    kinds = []
    for number, table in enumerate(tables):
        rest = {key: value for key, value in table.items() if key != "name"}
        for key in ("local", "solver"):
            if isinstance(rest.get(key), Mapping):
                rest[key] = {name: value for name, value in rest[key].items() if name != "lr"}
        name = str(table["name"])
        unique = name if name not in first.values() else f"{name} ({number})"
        kinds.append(first.setdefault(json.dumps(rest, sort_keys=True, default=str), unique))
    return kinds


def joined_traits(traits: Sequence[Traits]) -> Traits:
    """Join the declarations of several methods."""
    fewest = [one.fewest for one in traits if one.fewest is not None]
    return Traits(
        reveals=tuple(dict.fromkeys(name for one in traits for name in one.reveals)),
        sends=(Played, *dict.fromkeys(kind for one in traits for kind in one.sends)),
        models="none",
        keeps=sum(one.keeps for one in traits),
        remembers=True,
        groups_by=tuple(dict.fromkeys(name for one in traits for name in one.groups_by)),
        unmaskable=next((one.unmaskable for one in traits if one.unmaskable), ""),
        fewest=min(fewest) if fewest else None,
        unprivate="no budget plans the questions of several methods",
    )


def own_part(memory: Memory, entry: int) -> Memory:
    """Return the part of the memory of a client that is of an entry."""
    return None if memory is None else memory.get(str(entry))


def _through(work: Work, payload: Played, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
    """Let an entry do a work, with its part of the memory of the client."""
    answer = work(payload.inner, own_part(memory, payload.entry), shard, moment, rng)
    if answer is None or answer.memory is None:
        return answer
    return replace(answer, memory={**(memory or {}), str(payload.entry): detached(answer.memory)})


def empty(entries: Sequence[int], count: int) -> Rung:
    """Return a rung without sums, of some of so many entries."""
    none = torch.zeros(count, count, 3, dtype=torch.float64)
    return Rung(0, tuple(entries), 0, none[0].clone(), none)


def added(rung: Rung, entry: int, total: Tree) -> Rung:
    """Return a rung with the sums of one question more; of an entry in slots those of all slots."""
    scores, pairs = rung.scores.clone(), rung.apart.clone()
    for part in total if isinstance(total, list) else [total]:
        score: Sum | None = None if part is None else part["score"]
        if score is not None and score.weight:
            scores[entry] += torch.cat([torch.tensor([score.weight], dtype=torch.float64), score.value])
            pairs[entry] += part["apart"].value
    return replace(rung, scores=scores, apart=pairs)


# -- how they stand ----------------------------------------------------------------------------------------------------

Verdict = Literal["highest", "cannot be told apart", "behind", "dropped"]


@dataclass(frozen=True)
class Standing:
    """How an entry stands.

    Args:
        name: of the entry.
        number: of the entry.
        rounds: that it played.
        score: mean over clients, with its error.
        difference: to the entry with the highest score, at the last decision of both; None for that entry.
        verdict: `dropped` entries were not in the better half of the methods, or their method had a better one.
    """

    name: str
    number: int
    rounds: int
    score: Difference
    difference: Difference | None
    verdict: Verdict


def standings(state: State, names: Sequence[str]) -> list[Standing]:
    """Return how entries stand after the last decision, the best first, and dropped ones last.

    An entry that went on is behind if the 95 % interval of the paired difference to the highest lies below 0.
    """
    best, rows = state.best, []
    for entry, name in enumerate(names):
        rung = next((rung for rung in reversed(state.rungs) if entry in rung.entries), None)
        if rung is None:
            continue
        score = rung.mean(entry)
        difference = None if entry == best else rung.difference(entry, best)
        verdict: Verdict = "highest"
        if difference is not None:
            behind = difference.mean + difference.margin < 0
            dropped = rung is not state.rungs[-1] or entry not in state.playing
            verdict = "dropped" if dropped else "behind" if behind else "cannot be told apart"
        rows.append(Standing(name, entry, rung.rounds, score, difference, verdict))
    return sorted(rows, key=lambda row: (-row.rounds, -_or_least(row.score.mean)))
