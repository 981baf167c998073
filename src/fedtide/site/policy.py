"""A node's own policy: rules that its owner sets, whatever the study asks; and the terms of a study in words.

    reveals = []                     # no extra values of a client by itself
    questions = ["train", "score"]   # the works that are done here; "score" judges what was sent on the rows here
    fewest = 3                       # clients that are asked the same question, and so are in its sum
    rows_at_least = 20               # rows that a client needs to be judged on them
    secure = true                    # only masked sums, which the server cannot open for a single client
    peers = ["SHA256:..."]           # fingerprints of the other nodes' keys, from their owners
    epsilon = 4.0                    # limit for a client's answers in a private study, by the node's own ledger
    clip = { delta = 0.5 }           # bounds of a private study are no larger here, whatever it says

A missing rule forbids nothing. The number of clients in a sum is the server's word: if answers are not masked, it could
look at each of them. If they are masked, it is the word of the keys that masks are shared with.

Some rules hold without a file, because no study needs more. A client is judged on test and validation rows alone, with
few models in a round. The server receives its mean loss to three digits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, Field
from torch import Tensor

from fedtide.core.atomic import write_text
from fedtide.core.base import Algorithm, Answer, Memory, Moment, Payload, Scores, Shard, Slotted, Weighted, Work
from fedtide.core.errors import FedtideError, printable, shown
from fedtide.core.trees import Tree, children, is_node, leaves, size_in_bytes
from fedtide.fields.types import Count, Flag, Positive, Strict, checked
from fedtide.fleets.simulated import SimulatedFleet
from fedtide.remote.offline import CLIENTS, trial
from fedtide.report.formats import bytes_of
from fedtide.site import certificates
from fedtide.site.accounts import Budget
from fedtide.site.machine import read_toml
from fedtide.wire.pipeline import FLOATING, Wire

SCORE = "score"
"""Name of the question that judges what was sent on the clients' own rows."""
LARGEST = 64 * 1024
"""Maximum number of bytes of a policy file."""
COLUMNS = ("choice", "weights", "density")
"""Columns of an evaluation that a policy can hide, beside `others` by their names."""
MODELS = 3
"""Models with which a client is judged in a round on the same rows: one, and others if the round is played again."""

Name = Annotated[str, Field(strict=True, min_length=1, max_length=200)]


def _check_fingerprint(value: str) -> str:
    if not re.fullmatch("SHA256:[A-Za-z0-9+/]{43}", value):
        raise ValueError(f"found {shown(value)}, allowed: a fingerprint as fedtide join prints it, SHA256:...")
    return value


class Policy(Strict):
    """The rules of a node.

    Args:
        reveals: names of values that the server may see client by client; None allows what the study asks.
        questions: names of the works that are done here; None allows what the study asks.
        fewest: minimum number of clients in a sum.
        rows_at_least: minimum number of rows of a part for a client to be judged on it.
        secure: whether sums must be masked.
        peers: fingerprints of the keys of nodes that masks may be shared with. None takes the first key that comes with
            a node's name, and no other one after it.
        epsilon: limit for all answers of a client, at the delta of the study; None allows what it plans.
        clip: by name of a summed value, the largest bound to which answers are cut.
    """

    reveals: tuple[Name, ...] | None = None
    questions: tuple[Name, ...] | None = None
    fewest: Count = 1
    rows_at_least: Count = 1
    secure: Flag = False
    peers: tuple[Annotated[str, AfterValidator(_check_fingerprint)], ...] | None = None
    epsilon: Positive | None = None
    clip: dict[Name, Positive] = Field(default_factory=dict)

    @staticmethod
    def read(path: Path) -> Policy:
        """Read the rules from a TOML file.

        Raises:
            FedtideError: the file cannot be read, or has something that is no rule.
        """
        return checked(Policy, read_toml(path, LARGEST), str(path))

    def refuses(self, header: Mapping[str, Any]) -> str | None:
        """Return the reason why the owner does not allow a question, by its header; None if it is allowed.

        >>> Policy(reveals=(), fewest=3).refuses({"kind": "ask", "question": "train", "reveal": ["utility"]})
        "its owner does not reveal 'utility'; allowed: nothing"
        """
        question = SCORE if header.get("kind") == SCORE else header["question"]
        return self.objection(question, header.get("reveal", ()), header.get("members", 0))

    def objection(self, question: str, reveal: Any, members: int | None = None) -> str | None:
        """Return the reason why a question is not allowed.

        Args:
            question: its name.
            reveal: names of the values that it shows to the server.
            members: number of clients in the sum; None if it is not known yet.
        """
        if self.questions is not None and question not in self.questions:
            return f"its owner does not allow the question '{question}'; allowed: {_listed(self.questions)}"
        hidden = [name for name in reveal if not self.shows(name)]
        if hidden:
            return f"its owner does not reveal '{hidden[0]}'; allowed: {_listed(self.reveals or ())}"
        if members is not None and members < self.fewest:
            return f"its owner does not answer for a sum of {members}; allowed: {self.fewest} clients or more"
        return None

    def shows(self, name: str) -> bool:
        """Tell whether the server may see a value of a client by itself."""
        return self.reveals is None or name in self.reveals

    def shown(self, scores: Scores) -> Scores:
        """Return the scores that the server receives: losses to three digits, and no columns that are hidden.

        >>> one = torch.ones(1)
        >>> scores = Policy(reveals=()).shown(Scores(one, 8 * one, 4 * one, 3.14159 * one, density=one))
        >>> scores.loss.tolist(), scores.density
        ([3.144], None)
        """
        pairs = zip(scores.loss.tolist(), scores.rows.tolist(), strict=True)
        coarse = torch.tensor([float(f"{loss / max(rows, 1):.3g}") * rows for loss, rows in pairs], dtype=torch.float64)
        others = {name: column for name, column in scores.others.items() if self.shows(name)}
        hidden: dict[str, Any] = {name: None for name in COLUMNS if not self.shows(name)}
        return replace(scores, loss=coarse, others=others, **hidden)


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "nothing"


@dataclass(frozen=True)
class Owner:
    """The owner's rules as they are now (`fedtide.remote.node.Rules`), and counts of judgments.

    Args:
        file: the policy, which may be edited while the node runs; None if there is none.
        record: file with a line for each model that a client was judged with.
        rounds: number of rounds of the study.
        log: takes mistakes in the file.
        budget: account of the answers of its clients, if the study is private.
    """

    file: Path | None
    record: Path
    rounds: int
    log: Callable[[str], None] = print
    budget: Budget | None = None

    @property
    def policy(self) -> Policy:
        """The rules as they are now."""
        return Policy() if self.file is None else Policy.read(self.file)

    @property
    def fewest(self) -> int:
        """Minimum number of clients in a sum."""
        return self.policy.fewest

    @property
    def rows_at_least(self) -> int:
        """Minimum number of rows of a part for a client to be judged on it."""
        return self.policy.rows_at_least

    @property
    def secure(self) -> bool:
        """Whether sums must be masked."""
        return self.policy.secure

    def shown(self, scores: Scores) -> Scores:
        """Return the scores that the server receives."""
        return self.policy.shown(scores)

    def within(self, wire: Wire) -> Wire:
        """Return the wire with bounds that are no larger than the owner's."""
        return wire.within(self.policy.clip)

    def refuses(self, header: Mapping[str, Any], model: str) -> str | None:
        """Return the reason why a question is not allowed, by its header and the digest of its payload."""
        try:
            policy = self.policy
        except FedtideError as error:
            self.log(str(error))
            return "its owner's rules cannot be read now"
        why = policy.refuses(header)
        if why is None and header["kind"] == SCORE:
            return self._too_often(header, model)
        if why is None and header["kind"] in ("ask", "unmask"):
            return self._too_much(header, model, policy.epsilon)
        return why

    def _too_much(self, header: Mapping[str, Any], model: str, most: float | None) -> str | None:
        """Return the reason why clients would say too much; if they do not, their answers are written down."""
        if self.budget is None:
            return None if most is None else f"its owner allows epsilon {most:g}, and its study adds no noise"
        try:
            return self.budget.refuses(header, model, most)
        except FedtideError as error:
            self.log(str(error))
            return "its own ledger cannot be read now"

    def _too_often(self, header: Mapping[str, Any], model: str) -> str | None:
        """Return the reason why clients are not judged with a model; if they are, write it down."""
        part, number, other = header.get("part", "test"), header["moment"]["round"], header.get("other", "")
        if part == "train" or not header.get("personal", True):
            return "it is judged on test and validation rows alone, with what it keeps"
        if not 0 <= number < self.rounds:
            return f"it is judged in rounds 0 to {self.rounds - 1}, and this is round {number}"
        new = []
        for client in header["clients"]:
            models = self._judged.setdefault((client, number, part, other), set())
            if model not in models:
                if len(models) >= MODELS:
                    return f"it was judged with {MODELS} models in round {number}, and with no more"
                new.append((client, number, part, other, model))
        if new:
            self.record.parent.mkdir(parents=True, exist_ok=True)
            with open(self.record, "a", encoding="utf-8") as file:
                file.writelines("\n" + json.dumps(line) for line in new)  # a kill may have left half a line
        for *key, _ in new:
            self._judged[tuple(key)].add(model)
        return None

    @cached_property
    def _judged(self) -> dict[Any, set[str]]:
        """Digests of the models that each client was judged with, by round, part and use."""
        models: dict[Any, set[str]] = {}
        for line in self.record.read_text(encoding="utf-8").splitlines() if self.record.is_file() else []:
            with suppress(TypeError, ValueError):
                *key, model = json.loads(line)
                models.setdefault(tuple(key), set()).add(model)
        return models


@dataclass(frozen=True)
class Peers:
    """The registered keys of other nodes, by name: those that the owner names, or the first that came.

    A server that invents nodes could give each of them a key of its own. Owners who compare fingerprints notice it.

    Args:
        file: keys by name that were met before.
        policy: () -> the owner's rules as they are now.
        log: takes a line for each new key.
    """

    file: Path
    policy: Callable[[], Policy]
    log: Callable[[str], None]

    def trusts(self, node: str, key: str) -> str | None:
        """Return the reason why the key of a node does not count; None if it does."""
        try:
            print_ = certificates.fingerprint(certificates.check_public_key(key, "key"))
            allowed = self.policy().peers
        except FedtideError:
            return "its registered key is none, or the owner's rules cannot be read now"
        if allowed is not None and print_ not in allowed:
            return f"its key {print_} is not among the peers that the owner named"
        keys: dict[str, str] = {}
        with suppress(OSError, ValueError):
            keys = {str(name): str(value) for name, value in json.loads(self.file.read_text(encoding="utf-8")).items()}
        if keys.get(node, key) != key:
            return f"its key is {print_}, and it was another before; ask its owner"
        if any(name != node and other == key for name, other in keys.items()):
            return f"its key {print_} is that of another node, too"
        if node not in keys:
            self.log(f"masks are shared with {node} from now on, key {print_}: compare it with its owner")
            write_text(self.file, json.dumps({**keys, node: key}))
        return None


# -- the terms of a study ----------------------------------------------------------------------------------------------


@dataclass
class Term:
    """The effect of a question.

    Args:
        question: its name.
        down: maximum number of bytes that a client receives.
        up: maximum number of bytes that a client sends.
        sums: by name, the values that a client sends to be summed; of an evaluation, those beside rows, hits and loss.
        shown: by name, the values of a client by itself that the server sees.
        keeps: number of bytes that a client keeps after it.
    """

    question: str
    down: int = 0
    up: int = 0
    sums: dict[str, str] = field(default_factory=dict)
    shown: dict[str, str] = field(default_factory=dict)
    keeps: int = 0


def terms_of(
    algorithm: Algorithm[Any], like: Shard, classes: int, clients: int = CLIENTS, wire: Wire = FLOATING
) -> list[Term]:
    """Try a method with clients whose rows are made up; return a term for each question, and one for evaluations.

    Args:
        algorithm: the method.
        like: rows as a model sees them, one at least.
        classes: number of classes.
        clients: number of clients; some methods need several.
        wire: path of sums to the server.
    """
    terms = {question: Term(question) for question in algorithm.works}
    answers: dict[str, list[Answer]] = {question: [] for question in algorithm.works}

    def watch(question: str, work: Work) -> Work:
        def run(payload: Payload, memory: Memory, shard: Shard, moment: Moment, rng: Any) -> Answer | None:
            answer = work(payload, memory, shard, moment, rng)
            term = terms[question]
            term.down = max(term.down, size_in_bytes(payload))
            if answer is not None:
                term.sums |= _describe_sums(answer.total)
                term.keeps = max(term.keeps, size_in_bytes(answer.memory))
                answers[question].append(replace(answer, memory=None, update=None))
            return answer

        return run

    watched = replace(algorithm, works={question: watch(question, work) for question, work in algorithm.works.items()})
    for fleet, state in trial(watched, like, classes, clients, wire):  # noqa: B007
        _note_shown(fleet, terms, answers)
    served, slot = algorithm.serve(state, fleet.clients)
    evaluation = Term(SCORE, down=max(map(size_in_bytes, served if slot is not None else [served])))
    scores = fleet.score(served, fleet.clients, slot=slot)
    columns = {name: getattr(scores, name) for name in COLUMNS} | dict(scores.others)
    evaluation.sums |= {name: _describe_numbers(column[0]) for name, column in columns.items() if column is not None}
    return [*terms.values(), evaluation]


def _note_shown(fleet: SimulatedFleet, terms: Mapping[str, Term], answers: Mapping[str, list[Answer]]) -> None:
    """Note the values that questions of a round showed, and forget the answers."""
    for query in fleet.queries:
        term = terms[query.ask.question]
        for answer in answers[query.ask.question]:
            rows = {name: answer.rows[name] for name in query.ask.reveal}
            term.shown |= {name: _describe_numbers(row) for name, row in rows.items()}
            sent = [row for name, row in rows.items() if name not in answer.repeated]
            numbers = max((form.size for form in (query.ask.forms or {}).values()), default=0)
            total = 8 * numbers if numbers else size_in_bytes(answer.total)
            term.up = max(term.up, total + size_in_bytes(sent))
    for batch in answers.values():
        batch.clear()


def _describe_sums(total: Tree, at: str = "") -> dict[str, str]:
    """Describe each weighted value of a total."""
    if isinstance(total, Weighted):
        return {at or "the answer": _describe_numbers(total.value)}
    if isinstance(total, Slotted):
        part = next(iter(total.parts.values()), Weighted(None))
        return {at or "the answer": f"{_describe_numbers(part.value)} for some of {total.slots}"}
    sums: dict[str, str] = {}
    for key, child in children(total) if is_node(total) else ():
        sums |= _describe_sums(child, f"{at}.{key}" if at else str(key))
    return sums


def _describe_numbers(tree: Tree) -> str:
    """Say how many numbers a value has, and the shape of a single tensor."""
    numbers = leaves(tree)
    count = sum(leaf.numel() if isinstance(leaf, Tensor) else 1 for leaf in numbers)
    words = f"{count:,} {'number' if count == 1 else 'numbers'}"
    if len(numbers) > 1:
        return f"{words} in {len(numbers)} arrays"
    is_matrix = bool(numbers) and isinstance(numbers[0], Tensor) and numbers[0].dim() > 1
    return f"{words}, {tuple(numbers[0].shape)}" if is_matrix else words


def describe_terms(
    algorithm: Algorithm[Any], like: Shard, classes: int, policy: Policy, clients: int, wire: Wire = FLOATING
) -> list[str]:
    """Say in lines what a node asks, sends, shows and keeps in a study, and what its policy forbids.

    Args:
        algorithm: the method.
        like: rows as a model sees them, one at least.
        classes: number of classes.
        policy: the owner's rules.
        clients: number of clients of the study.
        wire: path of sums to the server.
    """
    terms = terms_of(algorithm, like, classes, max(clients, CLIENTS), wire)
    arguments = (algorithm, terms, policy, wire)
    return [printable(line) for line in (*_describe_questions(*arguments), *_describe_refusals(*arguments))]


def _describe_questions(algorithm: Algorithm[Any], terms: list[Term], policy: Policy, wire: Wire) -> Iterator[str]:
    *works, evaluation = terms
    asked = [term for term in works if term.down or term.up]
    for term in asked:
        values = ", ".join(f"{name} ({numbers}{_cut(name, wire)})" for name, numbers in term.sums.items())
        sizes = f"receives {bytes_of(term.down)}, sends {bytes_of(term.up)}"
        yield f"asks: {term.question}: {sizes}: {values or 'nothing to be summed'}"
    columns = ", ".join(["rows", "hits", "mean loss to three digits", *filter(policy.shows, evaluation.sums)])
    sends = "sends after work on the rows here," if algorithm.adapt is not None else "sends"
    yield f"asks: {SCORE}: receives {bytes_of(evaluation.down)}, {sends} of each client by itself: {columns}"
    if later := ", ".join(term.question for term in works if term not in asked):
        yield f"may ask later: {later}, of which a trial saw nothing"
    shown = {name: f"{name} ({numbers}), at {term.question}" for term in works for name, numbers in term.shown.items()}
    for name in {**shown, **dict.fromkeys(algorithm.traits.reveals)}:
        yield f"shows the server, for each client by itself: {shown.get(name, f'{name}, of which a trial saw nothing')}"
    if not shown and not algorithm.traits.reveals:
        yield f"shows the server, for each client by itself: the answer to {SCORE}, and no extra values of the method"
    if wire.secure:
        fewest = max(wire.fewest, policy.fewest)
        yield f"sums: masked, opened for {fewest} clients or more; answers to {SCORE} and shown values are not masked"
        if policy.peers is None:
            yield "masks: shared with the nodes whose keys the server names first; `peers` of your policy can name them"
    else:
        yield "sums: the server adds them, so it receives the answer of each client by itself; nothing hides it"
    size = max((term.keeps for term in works), default=0)
    memory = f"{bytes_of(size)} for each client" if size else "nothing of the method"
    yield f"keeps here, in the node's folder: {memory}, its key, the last model that it scored, questions and answers"
    yield "never leaves: rows, labels and memory; answers tell of them, the more the fewer rows there are"


def _describe_refusals(algorithm: Algorithm[Any], terms: list[Term], policy: Policy, wire: Wire) -> Iterator[str]:
    if policy.secure and not wire.secure:
        yield f"will be refused: every question but {SCORE}, because your policy allows masked sums alone"
    for term in terms:
        if why := policy.objection(term.question, term.shown):
            yield f"will be refused: {term.question}, because {why}"
    if hidden := [name for name in terms[-1].sums if not policy.shows(name)]:
        yield f"will be left out of {SCORE}: {', '.join(hidden)} (forbidden by your policy)"
    if policy.rows_at_least > 1:
        yield f"will be refused: {SCORE} of a client with fewer than {policy.rows_at_least} rows for it"
    shown = {name for term in terms for name in term.shown}
    for name in algorithm.traits.reveals:
        if name not in shown and not policy.shows(name):
            yield f"will be refused: questions that reveal {name} (forbidden by your policy)"
    if policy.fewest > 1:
        yield f"will be refused: sums of fewer than {policy.fewest} clients, as the server counts them"


def _cut(name: str, wire: Wire) -> str:
    """Say the length to which a value is cut, if it has a bound."""
    clip = wire.clip
    if clip is None or name not in clip.bounds:
        return ""
    return f", cut to a length of {clip.largest_cut(name, 0):g}{' at first' if name in clip.adaptive else ''}"
