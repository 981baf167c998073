"""The terms of a method, for those who are to take part: what it asks, sends, shows to the server and keeps, in words.

They are found by trying it: a few rounds with clients whose rows are made up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from fedtide.core.base import Algorithm, Answer, Memory, Moment, Payload, Shard, Slotted, Weighted, Work
from fedtide.core.errors import printable
from fedtide.core.trees import Tree, children, is_node, leaves, size_in_bytes
from fedtide.fleets.simulated import SimulatedFleet
from fedtide.remote.offline import CLIENTS, trial
from fedtide.site.policy import COLUMNS, SCORE, Policy
from fedtide.wire.clip import clip_of
from fedtide.wire.pipeline import Wire


@dataclass
class Term:
    """What a question brings about.

    Args:
        question: its name.
        down: bytes that a client receives at most.
        up: bytes that a client sends at most.
        sums: by name, what a client sends to be summed; of an evaluation, what it tells beside rows, hits and loss.
        shown: by name, what the server is shown of each client by itself.
        keeps: bytes that a client keeps after it.
    """

    question: str
    down: int = 0
    up: int = 0
    sums: dict[str, str] = field(default_factory=dict)
    shown: dict[str, str] = field(default_factory=dict)
    keeps: int = 0


def terms_of(
    algorithm: Algorithm[Any], like: Shard, classes: int, clients: int = CLIENTS, wire: Wire | None = None
) -> list[Term]:
    """Try a method and return a term for each of its questions, those that were not asked included.

    Args:
        algorithm: the method.
        like: rows as a model sees them, one at least.
        classes: number of classes.
        clients: how many there are; some methods need several.
        wire: how sums pass to the server.
    """
    terms = {question: Term(question) for question in algorithm.works}
    answers: dict[str, list[Answer]] = {question: [] for question in algorithm.works}

    def heard(question: str, work: Work) -> Work:
        def run(payload: Payload, memory: Memory, shard: Shard, moment: Moment, rng: Any) -> Answer | None:
            answer = work(payload, memory, shard, moment, rng)
            term = terms[question]
            term.down = max(term.down, size_in_bytes(payload))
            if answer is not None:
                term.sums |= _sums(answer.total)
                term.keeps = max(term.keeps, size_in_bytes(answer.memory))
                answers[question].append(replace(answer, memory=None, update=None))
            return answer

        return run

    works = {question: heard(question, work) for question, work in algorithm.works.items()}
    tried = replace(algorithm, works=works)
    for fleet, state in trial(tried, like, classes, clients, wire):  # noqa: B007
        _note(fleet, terms, answers)
    served, slot = algorithm.serve(state, fleet.clients)
    judged = Term(SCORE, down=max(map(size_in_bytes, served if slot is not None else [served])))
    scores = fleet.score(served, fleet.clients, slot=slot)
    columns = {name: getattr(scores, name) for name in COLUMNS} | dict(scores.others)
    judged.sums |= {name: _numbers(column[0]) for name, column in columns.items() if column is not None}
    return [*terms.values(), judged]


def _note(fleet: SimulatedFleet, terms: Mapping[str, Term], answers: Mapping[str, list[Answer]]) -> None:
    """Note what was shown in the questions of a round, and forget the answers."""
    for query in fleet.queries:
        term = terms[query.ask.question]
        for answer in answers[query.ask.question]:
            shown = {name: answer.rows[name] for name in query.ask.reveal}
            term.shown |= {name: _numbers(row) for name, row in shown.items()}
            beside = [row for name, row in shown.items() if name not in answer.repeated]
            numbers = max((form.size for form in (query.ask.forms or {}).values()), default=0)
            total = 8 * numbers if numbers else size_in_bytes(answer.total)
            term.up = max(term.up, total + size_in_bytes(beside))
    for heard in answers.values():
        heard.clear()


def _sums(total: Tree, at: str = "") -> dict[str, str]:
    """Say what each weighted value of a total is."""
    if isinstance(total, Weighted):
        return {at or "the answer": _numbers(total.value)}
    if isinstance(total, Slotted):
        part = next(iter(total.parts.values()), Weighted(None))
        return {at or "the answer": f"{_numbers(part.value)} for some of {total.slots}"}
    made: dict[str, str] = {}
    for key, child in children(total) if is_node(total) else ():
        made |= _sums(child, f"{at}.{key}" if at else str(key))
    return made


def _numbers(tree: Tree) -> str:
    """Say how many numbers a value has, and in which shape where it is one tensor."""
    found = leaves(tree)
    count = sum(leaf.numel() if isinstance(leaf, Tensor) else 1 for leaf in found)
    shape = (
        f", {tuple(found[0].shape)}" if len(found) == 1 and isinstance(found[0], Tensor) and found[0].dim() > 1 else ""
    )
    tensors = f" in {len(found)} arrays" if len(found) > 1 else ""
    return f"{count:,} {'number' if count == 1 else 'numbers'}{tensors}{shape}"


def in_words(algorithm: Algorithm[Any], terms: list[Term], policy: Policy, wire: Wire | None = None) -> Iterator[str]:
    """Say what taking part means, in lines for people, with what the owner's rules forbid.

    Args:
        algorithm: the method.
        terms: of it.
        policy: the owner's rules.
        wire: how sums pass to the server.
    """
    *works, judged = terms
    asked = [term for term in works if term.down or term.up]
    for term in asked:
        sums = ", ".join(f"{name} ({what}{_cut(name, wire)})" for name, what in term.sums.items())
        sums = sums or "nothing to be summed"
        yield f"asks: {term.question}: receives {_bytes(term.down)}, sends {_bytes(term.up)}: {sums}"
    told = ["rows", "hits", "mean loss to three digits", *filter(policy.shows, judged.sums)]
    trained = "after work on the rows here, " if algorithm.adapt is not None else ""
    yield f"asks: {SCORE}: receives {_bytes(judged.down)}, sends {trained}of each client by itself: {', '.join(told)}"
    if later := ", ".join(term.question for term in works if term not in asked):
        yield f"may ask later: {later}, of which a trial saw nothing"
    shown = {name: f"{name} ({what}), at {term.question}" for term in works for name, what in term.shown.items()}
    for name in {**shown, **dict.fromkeys(algorithm.traits.reveals)}:
        yield f"shows the server, for each client by itself: {shown.get(name, f'{name}, of which a trial saw nothing')}"
    if not shown and not algorithm.traits.reveals:
        yield "shows the server, for each client by itself: what score sends, and no extra values of the method"
    if wire is not None and wire.secure:
        yield (
            f"sums: masked; the server can open them for {max(wire.fewest, policy.fewest)} clients or more together; "
            f"{SCORE}, and what is shown, are not masked"
        )
        if policy.peers is None:
            yield "masks: shared with the nodes whose keys the server names first; `peers` of your rules can name them"
    else:
        yield "sums: the server makes them, so it receives the answer of each client by itself; nothing hides it"
        if policy.secure:
            yield "will be refused: every question but score, as its owner allows masked sums alone"
    kept = max((term.keeps for term in works), default=0)
    memory = f"{_bytes(kept)} for each client" if kept else "nothing of the method"
    yield f"keeps here, in the node's folder: {memory}, its key, the last model that it scored, what was asked and sent"
    yield "never leaves: rows, labels, and what is kept; what is sent tells of them, the more the fewer rows there are"
    for term in terms:
        if why := policy.objection(term.question, term.shown):
            yield f"will be refused: {term.question}, as {why}"
    if hidden := [name for name in judged.sums if not policy.shows(name)]:
        yield f"will be left out of {SCORE}: {', '.join(hidden)}, as its owner does not reveal it"
    if policy.rows_at_least > 1:
        yield f"will be refused: {SCORE} of a client with fewer than {policy.rows_at_least} rows for it"
    for name in algorithm.traits.reveals:
        if name not in shown and policy.reveals is not None and name not in policy.reveals:
            yield f"will be refused: what shows {name}, as its owner does not reveal it"
    if policy.fewest > 1:
        yield f"will be refused: sums of fewer than {policy.fewest} clients, as the server counts them"


def _cut(name: str, wire: Wire | None) -> str:
    """Say how long a value is at most, where it is cut to a bound."""
    clip = clip_of(wire)
    if clip is None or name not in clip.bounds:
        return ""
    return f", cut to a length of {clip.cut(name, 0):g}{' at first' if name in clip.adaptive else ''}"


def _bytes(count: int) -> str:
    """Spell a number of bytes.

    >>> _bytes(20), _bytes(5321), _bytes(46_800_000)
    ('20 B', '5.3 kB', '46.8 MB')
    """
    if count < 1000:
        return f"{count} B"
    return f"{count / 1000:.1f} kB" if count < 1_000_000 else f"{count / 1_000_000:.1f} MB"


def what_it_means(
    algorithm: Algorithm[Any], like: Shard, classes: int, policy: Policy, clients: int, wire: Wire | None = None
) -> list[str]:
    """Return in lines what taking part in a method means for a node with these rules."""
    terms = terms_of(algorithm, like, classes, max(clients, CLIENTS), wire)
    return [printable(line) for line in in_words(algorithm, terms, policy, wire)]
