"""The owner of a node: its policy as it is now, other nodes whose keys it trusts, and the terms of a study in words.

Some rules hold without a policy, because no study needs more. A client is judged on test and validation rows alone,
with few models in a round. The server receives its mean loss to three digits, and no scores of a private study.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fedtide.core.atomic import append, write_text
from fedtide.core.base import Algorithm, Scores, Shard
from fedtide.core.errors import UNREADABLE, FedtideError, printable
from fedtide.core.files import read_toml
from fedtide.core.record import read_lines
from fedtide.core.trees import size_in_bytes
from fedtide.draw.prose import counted
from fedtide.fields.types import checked
from fedtide.remote.offline import CLIENTS, trial
from fedtide.remote.policy import COLUMNS, SCORE, Policy, Unreadable
from fedtide.report.formats import bytes_of
from fedtide.site import certificates
from fedtide.site.accounts import Budget
from fedtide.wire.answer_schema import Schemas, made_up
from fedtide.wire.pipeline import FLOATING, Wire
from fedtide.wire.scores import is_score, parts_of
from fedtide.wire.vector import form_of

LARGEST = 64 * 1024
"""Maximum number of bytes of a policy file."""
KEYS = 10_000
"""Maximum number of nodes whose registered keys a node keeps, so that made-up nodes fill no disk."""
MODELS = 3
"""Models with which a client is judged in a round on the same rows: one, and others if the round is played again."""


@dataclass(frozen=True)
class Owner:
    """The owner's rules as they are now, and counts of judgments.

    Args:
        file: the policy, a TOML file, which may be edited while the node runs; None if there is none.
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
    _mistakes: list[str] = field(default_factory=list, repr=False, compare=False)

    def policy(self) -> Policy:
        """Return the rules as they are now.

        Raises:
            Unreadable: they cannot be read; the log is told why, once.
        """
        try:
            policy = read_policy(self.file)
        except FedtideError as error:
            if self._mistakes != [str(error)]:
                self.log(str(error))
            self._mistakes[:] = [str(error)]
            raise Unreadable from None
        self._mistakes.clear()
        return policy

    def shown(self, scores: Scores) -> Scores:
        """Return the scores that the server receives."""
        return self.policy().shown(scores)

    def refuses(self, header: Mapping[str, Any], model: str) -> str | None:
        """Return the reason why a question is not allowed, by its header and the digest of its payload."""
        try:
            policy = self.policy()
        except Unreadable as error:
            return str(error)
        why = policy.refuses(header)
        if why is None and header["kind"] == SCORE:
            return self._too_often(header, model, header.get("part", "test"), header.get("other", ""))
        if why is None and header["kind"] == "ask" and is_score(header["question"]):  # for a sum
            part, _, other = parts_of(header["question"])
            why = self._too_often(header, model, part, other)
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

    def _too_often(self, header: Mapping[str, Any], model: str, part: str, other: str) -> str | None:
        """Return the reason why clients are not judged with a model, on a part of their rows and in some other use.

        If they are judged, it is written down.
        """
        number = header["moment"]["round"]
        if part == "train" or not header.get("personal", True):
            return "it is judged on test and validation rows alone, with what it keeps"
        if number not in (range(self.rounds) or [-1]):  # a study without rounds judges before the first
            allowed = f"in rounds 0 to {self.rounds - 1}" if self.rounds else "before the first round"
            return f"it is judged {allowed}, and this is round {number}"
        try:
            judged = self._judged
        except FedtideError as error:  # what was forgotten would be judged with more models
            self.log(str(error))
            return "its own record of evaluations cannot be read now"
        new = []
        for client in header["clients"]:
            models = judged.setdefault((client, number, part, other), set())
            if (its_model := _model_of(header, client, model)) not in models:
                if len(models) >= MODELS:
                    return f"it was judged with {MODELS} models in round {number}, and with no more"
                new.append((client, number, part, other, its_model))
        if new:
            self.record.parent.mkdir(parents=True, exist_ok=True)
            append(self.record, "\n".join(map(json.dumps, new)))
        for *key, its_model in new:
            judged[tuple(key)].add(its_model)
        return None

    @cached_property
    def _judged(self) -> dict[Any, set[str]]:
        """Digests of the models that each client was judged with, by round, part and use.

        Raises:
            FedtideError: the record is damaged.
        """
        models: dict[Any, set[str]] = {}
        try:
            for *key, model in read_lines(self.record.parent, self.record.name):
                models.setdefault(tuple(key), set()).add(model)
        except UNREADABLE as error:
            raise FedtideError(f"{self.record}: damaged ({error})") from None
        return models


def _model_of(header: Mapping[str, Any], client: int, payload: str) -> str:
    """Return the digest of all that a client's predictions follow from, of which a payload is only a part."""
    slot, version = ((header.get(key) or {}).get(str(client)) for key in ("slot", "counted"))
    # A client that adapts draws by the purpose.
    question, purpose, grouping = header["question"], header.get("purpose"), header.get("grouping")
    if is_score(question):  # for a sum
        purpose, grouping = "adapt", parts_of(question)[1]
    how = [payload, slot, version, purpose, grouping, header["moment"]["rounds"]]
    return hashlib.sha256(json.dumps(how).encode()).hexdigest()


def read_policy(path: Path | None) -> Policy:
    """Read the rules of a node; a node without a file has none.

    Raises:
        FedtideError: the file cannot be read, or has something that is no rule.
    """
    return Policy() if path is None else checked(Policy, read_toml(path, LARGEST), str(path))


@dataclass(frozen=True)
class Peers:
    """The registered keys of other nodes, by name: the first that came, or a later one that the owner names.

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
        try:  # a file that cannot be read is not written anew: the first key would be another then
            text = self.file.read_text(encoding="utf-8") if self.file.exists() else "{}"
            keys = {str(name): str(value) for name, value in json.loads(text).items()}
        except (OSError, ValueError, AttributeError):
            return f"the keys of other nodes that it met before cannot be read now ({self.file.name})"
        if keys.get(node, key) != key and allowed is None:
            return f"its key is {print_}, and it was another before; ask its owner, and name it in `peers`"
        if any(name != node and other == key for name, other in keys.items()):
            return f"its key {print_} is that of another node, too"
        if node not in keys and len(keys) >= KEYS:
            return f"it knows {counted(len(keys), 'other node')}, and shares masks with no more"
        if keys.get(node) != key:
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
    """

    question: str
    down: int = 0
    up: int = 0
    sums: dict[str, str] = field(default_factory=dict)
    shown: dict[str, str] = field(default_factory=dict)


def terms_of(
    algorithm: Algorithm[Any], like: Shard, classes: int, clients: int = CLIENTS, wire: Wire = FLOATING
) -> tuple[list[Term], int]:
    """Try a method on made-up rows, as the server does that learns what answers look like.

    Args:
        like: rows as a model sees them, one at least.
        clients: number of clients; some methods need several.
        wire: path of sums to the server.

    Returns:
        A term for each question, one for evaluations behind them, and the number of bytes that a client keeps.
    """
    terms = {question: Term(question) for question in algorithm.works}
    schemas = Schemas(algorithm.works, made_up(like, classes))
    for fleet, state in trial(algorithm, like, classes, clients, wire):  # noqa: B007
        for query in fleet.queries:
            ask, term = query.ask, terms[query.ask.question]
            for _, received in list(ask.sent(query.payload))[:1]:
                answer = schemas.of(ask.question, received, ask.moment, ask.reveal).answer
                form = form_of(answer["total"], 1)
                total = 8 * form.size if ask.forms else size_in_bytes(answer["total"])
                term.down = max(term.down, size_in_bytes(received))
                term.up = max(term.up, total + size_in_bytes(answer["rows"]))
                for leaf in form.leaves:
                    slots = f" for some of {leaf.slots}" if leaf.slots > 1 else ""
                    term.sums[leaf.name or "the answer"] = f"{_count(leaf.size)}{slots}"
                term.shown |= {name: _count(rows.numel()) for name, rows in answer["rows"].items()}
    served, slot = algorithm.serve(state, fleet.clients)
    evaluation = Term(SCORE, down=max(map(size_in_bytes, served if slot is not None else [served])))
    if wire.sums_scores:
        return [*terms.values(), evaluation], size_in_bytes(schemas.memory)
    scores = fleet.score(served, fleet.clients, slot=slot)
    columns = {name: getattr(scores, name) for name in COLUMNS} | dict(scores.others)
    evaluation.sums |= {name: _count(column[0].numel()) for name, column in columns.items() if column is not None}
    return [*terms.values(), evaluation], size_in_bytes(schemas.memory)


def _count(count: int) -> str:
    return f"{count:,} {'number' if count == 1 else 'numbers'}"


def describe_terms(
    algorithm: Algorithm[Any], like: Shard, classes: int, policy: Policy, clients: int, wire: Wire = FLOATING
) -> Iterator[str]:
    """Say in lines what a node asks, sends, shows and keeps in a study, and what its policy forbids.

    Args:
        like: rows as a model sees them, one at least.
        policy: the owner's rules.
        clients: number of clients of the study.
        wire: path of sums to the server.
    """
    (*works, evaluation), memory = terms_of(algorithm, like, classes, max(clients, CLIENTS), wire)
    asked = [term for term in works if term.down or term.up]
    for term in asked:
        values = ", ".join(f"{name} ({numbers}{_cut(name, wire)})" for name, numbers in term.sums.items())
        sizes = f"receives {bytes_of(term.down)}, sends {bytes_of(term.up)}"
        yield printable(f"asks: {term.question}: {sizes}: {values or 'nothing to be summed'}")
    yield "sizes: of the numbers for each client and question; messages are some hundred bytes longer"
    columns = ", ".join(["rows", "hits", "mean loss to three digits", *filter(policy.shows, evaluation.sums)])
    sends = "sends after work on the rows here," if algorithm.adapt is not None else "sends"
    withheld = None if wire.sums_scores else policy.withholds_score(wire.hides)
    answer = f"{sends} of each client by itself: {columns}"
    if wire.sums_scores:
        noise = ", which gets noise" * wire.hides
        answer = f"{sends} in a sum{noise}: accuracy, and whether there are rows to be judged on"
    yield f"asks: {SCORE}: receives {bytes_of(evaluation.down)}, {'sends nothing' if withheld else answer}"
    if withheld:
        but = "its study has no `privacy.scores`" if wire.hides else "`questions` of your policy can name it"
        yield f"will be refused: {SCORE} ({but}; its answer is exact, outside epsilon)"
    elif not wire.sums_scores and policy.epsilon is not None:
        yield f"warning: your policy names {SCORE}: the server learns these numbers exactly, outside epsilon"
    if later := ", ".join(term.question for term in works if term not in asked):
        yield f"may ask later: {later}, of which a trial saw nothing"
    shown = {name: f"{name} ({numbers}), at {term.question}" for term in works for name, numbers in term.shown.items()}
    shown = {name: f"{name}, of which a trial saw nothing" for name in algorithm.traits.reveals} | shown
    nothing = "nothing" if withheld or wire.sums_scores else f"the answer to {SCORE}, and no extra values of the method"
    for line in shown.values() or [nothing]:
        yield printable(f"shows the server, for each client by itself: {line}")
    if wire.secure:
        fewest = max(wire.fewest, policy.fewest)
        bare = "shown values are" if withheld or wire.sums_scores else f"answers to {SCORE} and shown values are"
        yield f"sums: masked, opened for {fewest} clients or more; {bare} not masked"
        if policy.peers is None:
            yield "masks: shared with the nodes whose keys the server names first; `peers` of your policy can name them"
            if policy.secure:
                yield "warning: your policy has `secure` without `peers`: keys of other nodes are trusted at first use"
    else:
        yield "sums: the server adds them, so it receives the answer of each client by itself; nothing hides it"
    stays = f"{bytes_of(memory)} for each client" if memory else "nothing of the method"
    models = "the last and the best model that it scored"
    yield f"keeps here, in the node's folder: {stays}, its key, {models}, questions and answers"
    if policy.tells:
        yield f"tells the server of this machine: {', '.join(dict.fromkeys(policy.tells))}, with answers"
    yield "never leaves: rows, labels and memory; answers tell of them, the more the fewer rows there are"
    yield from (f"will be {line}" for line in _describe_refusals(algorithm, [*works, evaluation], policy, wire))


def _describe_refusals(algorithm: Algorithm[Any], terms: list[Term], policy: Policy, wire: Wire) -> Iterator[str]:
    if policy.secure and not wire.secure:
        but = "" if wire.sums_scores or policy.withholds_score(wire.hides) else f" but {SCORE}"
        yield f"refused: every question{but}, because your policy allows masked sums alone"
    for term in terms:
        if why := policy.objection(term.question, term.shown):
            yield f"refused: {term.question}, because {why}"
    if hidden := [name for name in terms[-1].sums if not policy.shows(name)]:
        yield f"left out of {SCORE}: {', '.join(hidden)} (forbidden by your policy)"
    if policy.rows_at_least > 1:
        few = f"a client with fewer than {policy.rows_at_least} rows for it"
        yield f"left out of {SCORE}: {few}" if wire.sums_scores else f"refused: {SCORE} of {few}"
    shown = {name for term in terms for name in term.shown}
    for name in algorithm.traits.reveals:
        if name not in shown and not policy.shows(name):
            yield f"refused: questions that reveal {name} (forbidden by your policy)"
    if policy.fewest > 1:
        yield f"refused: sums of fewer than {policy.fewest} clients, as the server counts them"


def _cut(name: str, wire: Wire) -> str:
    """Say the length to which a value is cut, if it has a bound."""
    clip = wire.clip
    if clip is None or name not in clip.bounds:
        return ""
    return f", cut to a length of {clip.largest_cut(name, 0):g}{' at first' if name in clip.adaptive else ''}"
