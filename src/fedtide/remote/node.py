"""A node, where clients live: it answers questions with the rows and the memory that never leave it."""

import hashlib
import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, get_args, get_type_hints

import torch
from torch import Tensor

from fedtide.core import codec
from fedtide.core.base import Algorithm, Answer, Memory, Moment, Payload, Scores, Weights
from fedtide.core.errors import FedtideError, refused
from fedtide.core.memory import Version
from fedtide.core.trees import Tree, detached
from fedtide.fields.shapes import bare
from fedtide.fleets.ask import ABSTAINED, NOT_FINITE, Ask, Scoring
from fedtide.fleets.engines import threads
from fedtide.fleets.scoring import ClientRows, Clients, is_finite, score
from fedtide.remote.asks import ANSWERED, REFUSED, TOO_LARGE
from fedtide.remote.messages import (
    AnyHeader,
    DealHeader,
    KeysHeader,
    MomentHeader,
    QuestionHeader,
    ScoreHeader,
    UnmaskHeader,
    WorkHeader,
    dealt_tree,
    read,
    read_question,
    secrets_tree,
)
from fedtide.remote.node_memory import Judged, JudgedModels, MemoryLost, NodeMemory
from fedtide.remote.policy import Policy, Unreadable
from fedtide.wire.masks import ALONE, Context, Masker, Question, fewest_in_unit, hidden
from fedtide.wire.pipeline import FLOATING, Wire
from fedtide.wire.scores import SCORE, is_score, is_spelled, listed, parts_of
from fedtide.wire.vector import Form, TooLarge, check_units, form_of

PROTOCOL = 5
"""Version of headers and payloads; a node refuses questions of another."""

Sent = tuple[tuple[WorkHeader | ScoreHeader, str], dict[str, Any], bytes, tuple[Any, ...]]
"""An answer that may be sent again: its question, its header, its payload, and the owner's rules on what it says. The
question is the header, but for what is another when it comes again, and the digest of the payload."""

ONCE = {"members": 0, "deadline": 0.0, "settled": {}, "mask": None, "best": None}
"""Values of a header that are others when a question comes again."""

EXACT = "its study allows scores in sums alone"
"""Reason for which a client is not judged by itself."""

CHANGED = "the rules of its owner have changed since it answered this"
"""Reason to hold an answer back: with the one before it would tell of a client what a sum hides."""

UNKNOWN = "it is no evaluation of its study"
"""Reason for which a client is not judged in another use of the state than the method has."""

SHARED = (*QuestionHeader.model_fields, "counted")
"""Keys that the headers of a work and of an evaluation share."""

SAFE = (TooLarge, MemoryLost, Unreadable)
"""Errors that tell nothing of rows, but for the range of their numbers."""

PEOPLE = 1000
"""Clients that a masked sum may always have room for; a larger sum has to name half of its clients."""

COLUMNS = ("clients", "rows", "correct", "loss", "choice", "weights", "others", "density")
"""Columns of `Scores` that a node sends."""


class NewRows(Protocol):
    """The rows that clients hold now, for one question."""

    def new_rows(self, client: int, received: Payload) -> ClientRows | None:
        """Return the rows of a client for this question; None if it was asked about them before."""

    def note(self, client: int, moment: Moment) -> None:
        """Write down that a client has answered with them."""


@dataclass(frozen=True)
class Node:
    """A node with its clients.

    Args:
        algorithm: the algorithm whose works it does.
        seed: seed of every random key.
        rows: the clients' rows.
        folder: folder for their memory, of this run alone.
        run: digest of the run that it takes part in; it refuses questions of another.
        policy: returns the rules of its owner as they are now.
        refuses: returns the reason why its owner does not allow a question, from its header and the digest of its
            payload; None if it is allowed.
        shown: returns the part of an evaluation that the server may see.
        partial_work: probability that a client asked to train does only a part of its local work.
        threads: torch threads of one client's work; the number changes the last bits.
        log: takes what went wrong here in full, which the server is not told.
        judged: keeps with what its clients were evaluated last, and with what best; None keeps nothing.
        wire: how sums pass to the server, as its study says.
        masker: its secrets, if the wire is secure.
        clients: whose work it does; None does that of all whose rows are at hand.
        rounds: of the study, whose sums alone it opens; None opens those of all.
        live: the rows for a question, by its name, if they are those that clients hold now.
    """

    algorithm: Algorithm
    seed: int
    rows: ClientRows
    folder: Path
    run: str = ""
    policy: Callable[[], Policy] = Policy
    refuses: Callable[[Mapping[str, Any], str], str | None] = lambda header, model: None
    shown: Callable[[Scores], Scores] = lambda scores: scores
    partial_work: float = 0.0
    threads: int = 1
    log: Callable[[str], None] = print
    judged: JudgedModels | None = None
    wire: Wire = FLOATING
    masker: Masker | None = field(default=None, repr=False)
    clients: frozenset[int] | None = None
    rounds: int | None = None
    live: Mapping[str, NewRows] = field(default_factory=dict)
    _sent: dict[tuple[str, int], Sent] = field(default_factory=dict, init=False, repr=False, compare=False)

    def handle(self, header: Mapping[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        """Answer a question; whatever goes wrong is part of the answer.

        Args:
            header: what is asked, of which clients; plain JSON.
            payload: a sealed tree; if clients are in slots, a dict by slot.

        Returns:
            A header with what became of each client, and by client what it sends, sealed. A question that comes again
            is answered as before, without work, as long as its clients were asked nothing else.
        """
        began = time.monotonic()
        try:
            asked = read_question(header)
        except Exception as error:
            answer: dict[str, Any] = {"clients": {}, "failed": self._described(error)}
            return {**answer, "seconds": round(time.monotonic() - began, 3)}, b""
        try:
            with threads(self.threads):
                answer, sent = self._answer(asked, header, payload, began)
        except Exception as error:
            answer, sent = _refusal(asked, self._described(error))
        return {**answer, "seconds": round(time.monotonic() - began, 3)}, sent

    def _answer(
        self, asked: AnyHeader, header: Mapping[str, Any], payload: bytes, began: float
    ) -> tuple[dict[str, Any], bytes]:
        model = hashlib.sha256(payload).hexdigest()
        why = self._objection(asked) or self.refuses(header, model)
        if why is not None:
            return _refusal(asked, why)
        self._keep_best(asked)
        if isinstance(asked, KeysHeader | DealHeader | UnmaskHeader):
            return self._about_masks(asked)
        question = asked.model_copy(update=ONCE), model
        rules = self._rules
        if (before := self._sent_before(asked, question)) is not None:
            return self._leaving(asked, before, payload) if before[3] == rules else _refusal(asked, CHANGED)
        received = codec.decode_message(payload, self._classes)
        if isinstance(asked, ScoreHeader):
            answer, tree = self._score(asked, received, header, payload)
        else:
            answer, tree = self._work(asked, received, began)
            if is_score(asked.question):
                judged = score_header(asked)
                self._keep_received(judged, judged.model_dump(), payload, _memory_of(self.folder, asked))
        sent = question, answer, codec.to_bytes(tree), rules
        if not any(word.startswith(REFUSED) for word in answer["clients"].values()):
            self._sent.update(dict.fromkeys(((asked.kind, client) for client in asked.clients), sent))
        return self._leaving(asked, sent, payload)

    def _leaving(self, asked: WorkHeader | ScoreHeader, sent: Sent, payload: bytes) -> tuple[dict[str, Any], bytes]:
        """Return an answer as it leaves the node: masked, if its wire is secure."""
        _, header, content, _ = sent
        if self.masker is None or not isinstance(asked, WorkHeader) or asked.forms is None:
            return header, content
        try:
            received = codec.decode_message(payload, self._classes)
            return header, codec.to_bytes(masked(self.masker, asked, received, codec.from_bytes(content)))
        except FedtideError as error:
            return _refusal(asked, error)

    def _about_masks(self, asked: KeysHeader | DealHeader | UnmaskHeader) -> tuple[dict[str, Any], bytes]:
        """Say the key for masks, or deal shares before a sum, or say what opens it."""
        assert self.masker is not None
        answer = {"clients": dict.fromkeys(map(str, asked.clients), ANSWERED)}
        if isinstance(asked, KeysHeader):
            return answer, codec.to_bytes(dict.fromkeys(asked.clients, asdict(self.masker.bundle)))
        try:
            if isinstance(asked, DealHeader):
                return answer, codec.to_bytes(deal(self.masker, asked, self.wire.fewest, self._fewest))
            return answer, codec.to_bytes(show(self.masker, asked, self._fewest, counted=self.wire.clip is None))
        except FedtideError as error:
            return _refusal(asked, error)

    @property
    def _fewest(self) -> int:
        """How many clients there must be in a sum that is masked."""
        return max(self.policy().fewest, self.wire.fewest)

    @property
    def _rules(self) -> tuple[Any, ...]:
        """The owner's rules on what an answer says."""
        policy = self.policy()
        return policy.clip, policy.rows_at_least, policy.reveals

    def _sent_before(self, asked: WorkHeader | ScoreHeader, question: tuple[AnyHeader, str]) -> Sent | None:
        """Return the answer to the same question, unless what was kept with it is gone."""
        sent = self._sent.get((asked.kind, asked.clients[0])) if asked.clients else None
        if sent is None or sent[0] != question:
            return None
        memory, version = NodeMemory(self.folder, {}), _version(asked.version)
        present = all(memory.file(client, version).is_file() for client in sent[1].get("kept", ()))
        return sent if present else None

    def _work(self, asked: WorkHeader, received: Tree, began: float) -> tuple[dict[str, Any], Tree]:
        """Do the work of each client in time."""
        words: dict[str, str] = {}
        sent: dict[int, Tree] = {}
        keeping: list[int] = []
        ask, memory = _ask_of(asked, asked.clients), _memory_of(self.folder, asked)
        live = self.live.get(asked.question)
        for place, (client, received_by_client) in enumerate(ask.sent(received), start=1):
            if time.monotonic() - began > asked.deadline:
                words[str(client)] = REFUSED + "too late"
                continue
            try:
                rows = self.rows if live is None else live.new_rows(client, received_by_client)
                answer = None if rows is None else self._clients(memory, rows).answer(ask, client, received_by_client)
                if answer is None:
                    words[str(client)] = ABSTAINED
                elif not is_finite(answer):
                    words[str(client)] = NOT_FINITE
                else:
                    tree, keeps = self._keep_and_send(asked, ask, client, answer, memory)
                    keeping += [client] * keeps
                    sent[client] = detached(tree) if place < len(asked.clients) else tree  # the next may write over it
                    words[str(client)] = ANSWERED
                    if live is not None:
                        live.note(client, ask.moment)
            except Exception as error:
                sent.pop(client, None)
                about = f"round {ask.moment.round + 1}, '{ask.question}' of client {client}: "
                words[str(client)] = REFUSED + self._described(error, about)
                if self.wire.hides and not isinstance(error, SAFE):  # another one may tell of the rows
                    with suppress(MemoryLost):
                        sent[client], keeps = self._keep_and_send(asked, ask, client, Answer({}), memory)
                        keeping += [client] * keeps
                        words[str(client)] = ANSWERED
        return {"clients": words, "kept": keeping, "fewest": self.policy().fewest}, sent

    def _keep_and_send(
        self, asked: WorkHeader, ask: Ask, client: int, answer: Answer, memory: NodeMemory
    ) -> tuple[Tree, bool]:
        """Keep what a client keeps; return the content that leaves the node, and whether the client has kept something.

        In a private study a client without news keeps its memory once more, because that would tell of its rows.
        """
        tree, traits = self._to_send(ask, client, answer, asked.reveal), self.algorithm.traits
        is_work = not is_score(ask.question)
        keeps = answer.memory is not None or (self.wire.hides and is_work and bool(traits.keeps or traits.remembers))
        if keeps:
            row = memory.read(client, ask.version) if answer.memory is None else answer.memory
            memory.write(client, ask.version, row, _counted(asked.settled[str(client)]))
        return tree, keeps

    def _to_send(self, ask: Ask, client: int, answer: Answer, reveal: Sequence[str]) -> Tree:
        """Return the content that leaves the node; its sum is not masked yet."""
        rows = {name: answer.rows[name] for name in reveal}
        if not self.wire.fixed_point:
            return {"total": answer.total, "rows": rows}
        if ask.forms is None:
            if form_of(answer.total, 1).size:
                raise FedtideError(f"'{ask.question}' has a sum, and is asked as if it had none")
            return {"total": {}, "rows": rows}
        slot = 0 if ask.slot is None else int(ask.slot[ask.clients == client])
        if ask.forms[slot].counted and answer.total:
            grouped = self.algorithm.traits.models == "branches" and self.wire.clip is None
            check_units(ask.forms[slot], form_of(answer.total, 1, counted=True, grouped=grouped))
        return {"total": self.wire.within(self.policy().clip).send(ask.forms[slot], answer.total), "rows": rows}

    @cached_property
    def _classes(self) -> tuple[type, ...]:
        method = self.algorithm.plain or self.algorithm
        return (Weights, *classes_in(_state_of(method)), *self.algorithm.traits.sends)

    def _objection(self, asked: QuestionHeader) -> str | None:
        """Return why a question is not one of this node's study; None if it is."""
        if asked.protocol != PROTOCOL:
            return f"it speaks version {PROTOCOL} of the protocol, and the server version {asked.protocol}"
        if asked.run != self.run:
            return f"it takes part in run {self.run}, and the question is of run {asked.run}"
        if self.clients is not None and (others := sorted(set(asked.clients) - self.clients)):
            return f"it has no client {others[0]}"
        if isinstance(asked, ScoreHeader):
            if asked.other not in ("", *self.algorithm.others):
                return UNKNOWN
            return EXACT if self.wire.sums_scores else None
        if isinstance(asked, WorkHeader) and is_score(asked.question):
            if not is_spelled(asked.question) or score_header(asked).other not in ("", *self.algorithm.others):
                return UNKNOWN
            if not self.wire.sums_scores or asked.forms is None:
                return "its study does not ask for scores in a sum"
            if score_header(asked).part == "train":
                return "it is judged on test and validation rows alone"
        elif isinstance(asked, WorkHeader) and asked.question not in self.algorithm.works:
            return "its method has no such question"
        if isinstance(asked, WorkHeader):
            allowed = () if self.wire.hides else self.algorithm.traits.reveals
            if more := [name for name in asked.reveal if name not in allowed]:
                study = "its study is private, and shows" if self.wire.hides else "its study shows"
                return f"{study} nothing of a client by itself, such as '{more[0]}'"
        if self.policy().secure and self.masker is None:
            return "its owner allows masked sums alone, and its study does not mask them"
        if self.masker is None:
            if isinstance(asked, WorkHeader) and asked.mask is None and (asked.forms is None or self.wire.fixed_point):
                return None
            return "its study does not mask sums"
        mask = getattr(asked, "mask", None)
        if not self.wire.shares and (isinstance(asked, DealHeader) or (mask is not None and mask.drawn)):
            return "its study deals no shares"
        if isinstance(asked, WorkHeader) and mask is not None and asked.forms is None:
            return "it masks sums alone"
        if mask is not None and self.clients is not None:
            for peers in mask.peers.values():
                if any(name != self.masker.node and int(peer) in self.clients for peer, name in peers.items()):
                    return "the server says that one of its clients is at another node"
        if isinstance(asked, DealHeader | UnmaskHeader) or (isinstance(asked, WorkHeader) and asked.forms is not None):
            number = asked.moment.round
            first = -1 - self.algorithm.traits.before
            if self.rounds is not None and not first <= number < self.rounds:
                return f"its study has rounds 0 to {self.rounds - 1}, and this is round {number}"
            if asked.version[0] != number:
                return f"its sum is of round {asked.version[0]}, and its question of round {number}"
            return objection(self.masker, asked, self._fewest)
        return None

    def _described(self, error: Exception, about: str = "") -> str:
        """Describe an error without its text, which may hold data; the node's log has the text, behind `about`."""
        if isinstance(error, TooLarge):
            return TOO_LARGE.removeprefix(REFUSED)
        if isinstance(error, Unreadable):
            return str(error)
        if isinstance(error, MemoryLost):
            self.log(about + (f"{error} ({error.__cause__})" if error.__cause__ else str(error)))
            return str(error)
        text = str(error) if isinstance(error, FedtideError) else "".join(traceback.format_exception(error))
        about = about.strip() or "error:"
        self.log(f"{about}\n{text}")  # a text of several lines is never told: this one may quote values of rows
        return f"{type(error).__name__} at the node, whose log says more"

    def _clients(self, memory: NodeMemory, rows: ClientRows | None = None) -> Clients:
        rows, least = rows or self.rows, self.policy().rows_at_least
        return Clients(self.algorithm, rows, self.seed, memory, self.partial_work, self.wire.hides, least)

    def _score(
        self, asked: ScoreHeader, received: Tree, header: Mapping[str, Any], payload: bytes
    ) -> tuple[dict[str, Any], Tree]:
        """Judge what was received on the clients' own rows; what is sent are sums over these."""
        memory, words = _memory_of(self.folder, asked), dict.fromkeys(map(str, asked.clients), ANSWERED)
        if why := self.policy().withholds_score(self.wire.hides):
            self._keep_received(asked, header, payload, memory)
            return {"clients": dict.fromkeys(words, f"{REFUSED}{why}")}, {}
        ask, least, whole = _ask_of(asked, asked.clients), self.policy().rows_at_least, list[int]()
        rows = self.rows.counts(ask.clients, asked.part, ask.moment)
        few = set(ask.clients[(rows > 0) & (rows < least)].tolist())
        for client in asked.clients:
            if client in few:
                words[str(client)] = f"{REFUSED}its owner wants {least} rows or more for an evaluation"
                continue
            try:
                if asked.personal:
                    memory.check(client)
                whole.append(client)
            except FedtideError as error:
                words[str(client)] = REFUSED + self._described(error)
        scoring = Scoring(_ask_of(asked, whole), asked.part, asked.personal, asked.grouping, asked.other)
        scores = score(self._clients(memory), scoring, received)
        self._keep_received(asked, header, payload, memory)
        shown = self.shown(scores)
        if self.masker is not None:  # its sums hide which model a client trained
            named = self.policy().reveals or ()
            withheld: dict[str, Any] = {name: None for name in ("choice", "weights") if name not in named}
            shown = replace(shown, **withheld)
        return {"clients": words}, {name: getattr(shown, name) for name in COLUMNS} | {"others": dict(shown.others)}

    def _keep_received(self, asked: ScoreHeader, header: Mapping[str, Any], payload: bytes, memory: NodeMemory) -> None:
        """Keep with what clients are evaluated: a node predicts its own rows with it."""
        if self.judged is not None and asked.part == "test" and asked.personal and not asked.other:
            try:
                self.judged.write(Judged(header, payload, memory))
            except OSError as error:  # an evaluation does not fail by it
                self.log(f"{self.judged.folder}: {error}")

    def _keep_best(self, asked: QuestionHeader) -> None:
        """Keep the model that the server says to be best beyond the next evaluation."""
        if self.judged is not None and asked.best is not None:
            try:
                self.judged.note_best(asked.best)
            except OSError as error:
                self.log(f"{self.judged.folder}: {error}")

    def last_evaluation(self, judged: Judged, client: int) -> tuple[Payload, Memory]:
        """Return the payload and the memory of a client in an evaluation.

        Raises:
            FedtideError: it was not evaluated, or its memory is gone.
        """
        asked = read(ScoreHeader, judged.header, "the evaluation")
        if client not in asked.clients:
            raise refused("--client", client, ", ".join(map(str, asked.clients)), "it was not evaluated then")
        ask, clients = _ask_of(asked, [client]), self._clients(judged.memory)
        with threads(self.threads):
            ((_, received),) = ask.sent(codec.decode_message(judged.payload, self._classes))
            if self.algorithm.adapt is None or not asked.personal:
                return received, judged.memory.read(client, ask.version)
            return received, clients.adapt(ask, client, received, asked.part)


def classes_in(hint: Any) -> tuple[type, ...]:
    """List the dataclasses in a type and in the fields of those: all that a message may build of it.

    >>> [kind.__name__ for kind in classes_in(tuple[Ask, ...] | None)]
    ['Ask', 'Moment', 'Rng', 'Form', 'Leaf']
    """
    classes: dict[type, None] = {}
    hints = [hint]
    while hints:
        kind = bare(hints.pop(0))
        hints += get_args(kind)
        if isinstance(kind, type) and is_dataclass(kind) and kind not in classes:
            classes[kind] = None
            hints += get_type_hints(kind).values()
    return tuple(classes)


def _state_of(algorithm: Algorithm) -> Any:
    """Return the type of an algorithm's state, of which its payloads are made; None if `init` does not say."""
    hint = getattr(algorithm.init, "__annotations__", {}).get("return")
    return getattr(sys.modules.get(algorithm.init.__module__), hint, None) if isinstance(hint, str) else hint


def _refusal(asked: AnyHeader, why: object) -> tuple[dict[str, Any], bytes]:
    return {"clients": dict.fromkeys(map(str, asked.clients), f"{REFUSED}{why}")}, b""


def score_header(asked: WorkHeader) -> ScoreHeader:
    """Return the header of the evaluation whose sum a question asks for.

    Raises:
        FedtideError: its name is not that of one.
    """
    part, grouping, other = parts_of(asked.question)
    shared = {name: value for name, value in asked.model_dump().items() if name in SHARED}
    judged = {"kind": SCORE, "part": part, "grouping": grouping, "other": other}
    return read(ScoreHeader, shared | judged, "the question")


def _version(pair: Sequence[int]) -> Version:
    return pair[0], pair[1]


def _counted(pair: Sequence[int] | None) -> Version | None:
    return None if pair is None else _version(pair)


def _ask_of(asked: WorkHeader | ScoreHeader, clients: list[int]) -> Ask:
    slot = None
    if asked.slot is not None:
        slot = torch.tensor([asked.slot[str(client)] for client in clients], dtype=torch.int64)
    moment, ids = Moment(**dict(asked.moment)), torch.tensor(clients, dtype=torch.int64)
    forms = getattr(asked, "forms", None)
    forms = None if forms is None else {int(k): form.form() for k, form in forms.items()}
    return Ask(asked.question, asked.purpose, moment, ids, slot, number=asked.version[1], forms=forms)


def _memory_of(folder: Path, asked: WorkHeader | ScoreHeader) -> NodeMemory:
    return NodeMemory(folder, {client: _counted(asked.counted[str(client)]) for client in asked.clients})


# -- masked sums -------------------------------------------------------------------------------------------------------


def objection(masker: Masker, asked: WorkHeader | DealHeader | UnmaskHeader, fewest: int) -> str | None:
    """Return why a node does not deal shares or mask answers to a question, or open a sum; None if it does."""
    mask = asked.mask
    if mask is None:
        return "its study masks sums, and this one would not be"
    if isinstance(asked, WorkHeader) and not all(form.counted for form in (asked.forms or {}).values()):
        return "its study counts clients before it opens a slot, and this question does not"
    for client in asked.clients:
        peers = mask.peers.get(_slot(asked, client), {})
        if peers.get(str(client)) != masker.node or not set(peers.values()) <= mask.keys.keys():
            return "the server does not say who else is asked"
        form = (asked.forms or {}).get(_slot(asked, client)) if isinstance(asked, WorkHeader) else None
        room = 0 if form is None else form.people
        if room > max(PEOPLE, 2 * len(peers)):  # who has a number beyond its room says so, and so tells how large it is
            return f"a sum of {len(peers)} clients has room for {room}; allowed: at most {max(PEOPLE, 2 * len(peers))}"
        if len(peers) < fewest:
            return f"a sum of {len(peers)} clients is not masked; allowed: {fewest} or more"
        if not hidden(_publics(asked, client), fewest):
            return ALONE
    try:
        bundles = {name: key.bundle() for name, key in mask.keys.items()}
        masker.check(bundles)
        by_slot = {_slot(asked, client): client for client in asked.clients if str(client) in mask.drawn}
        for slot, client in by_slot.items():  # all clients of a slot are asked with the same keys
            nodes = {int(peer): (node, bundles[node]) for peer, node in mask.peers[slot].items()}
            masker.check_drawn(_context(asked, client), _drawn(asked, client) or {}, nodes)
    except FedtideError as error:
        return str(error)
    return None


def deal(masker: Masker, asked: DealHeader, fewest: int, wanted: int) -> dict[int, Tree]:
    """Return by client its key for a sum, and shares of its secrets for all nodes that are asked.

    Args:
        masker: draws the secrets.
        asked: the question.
        fewest: how many clients there must be in a sum, as the study says.
        wanted: the same, as the owner says.
    """
    dealt = {}
    for client in asked.clients:
        peers = asked.mask.peers[_slot(asked, client)]
        nodes = {int(peer): (name, asked.mask.keys[name].public) for peer, name in peers.items()}
        dealt[client] = dealt_tree(masker.deal(_context(asked, client), client, nodes, fewest, wanted))
    return dealt


def question_key(
    question: str, purpose: str, moment: Moment | MomentHeader, reveal: Sequence[str], form: Form | None, received: Tree
) -> str:
    """Return a digest of everything that the clients of a slot are asked with: the same at the server and at nodes."""
    what = [question, purpose, moment.round, moment.rounds, float(moment.seconds), sorted(reveal)]
    return json.dumps([*what, form and asdict(form), hashlib.sha256(codec.to_bytes(received)).hexdigest()])


def masked(masker: Masker, asked: WorkHeader, received: Tree, sent: Mapping[int, Tree]) -> dict[int, Tree]:
    """Mask the answers of clients, under the masks of a question and of its payload."""
    about, parts = dict[str, Question](), dict[str, Sequence[slice | Tensor]]()
    for slot in {_slot(asked, client) for client in sent}:
        header = (asked.forms or {}).get(slot)
        form = None if header is None else header.form()
        sent_to = received if asked.slot is None else received[int(slot)]
        key = question_key(asked.question, asked.purpose, asked.moment, asked.reveal, form, sent_to)
        about[slot] = Question(asked.moment.round, listed(asked.question), key)
        parts[slot] = (slice(None),) if form is None else form.parts

    def mask(client: int, total: Tensor) -> Tensor:
        slot, peers, keys = _slot(asked, client), _publics(asked, client), _drawn(asked, client)
        drawn = None if keys is None else {peer: public for peer, (public, _) in keys.items()}
        return masker.masked(_context(asked, client), client, total, peers, about[slot], parts[slot], drawn)

    return {client: answer | {"total": mask(client, answer["total"])} for client, answer in sent.items()}


def show(masker: Masker, asked: UnmaskHeader, fewest: int, *, counted: bool) -> dict[int, Tree]:
    """Return by client what opens parts of the sum that it is in.

    Args:
        masker: has the secrets.
        asked: the question.
        fewest: how many clients there must be in a sum.
        counted: whether the server says how many have something in each part but the first.
    """
    shown = {}
    for client in asked.clients:
        slot = _slot(asked, client)
        parts, counts = asked.parts.get(slot, []), asked.counts.get(slot, [])
        alive = asked.alive.get(slot, [])
        holders = {peer: asked.mask.peers.get(slot, {}).get(str(peer)) for peer in alive}
        least = fewest_in_unit(holders, fewest) if alive else fewest
        if counted and any(parts) and (len(counts) != len(parts) or min(counts) < least):
            raise refused("clients in slots", counts, f"{least} or more in each")
        secrets = masker.show(_context(asked, client), client, alive, fewest, parts, asked.lost.get(slot, []))
        shown[client] = secrets_tree(secrets)
    return shown


def _slot(asked: WorkHeader | DealHeader | UnmaskHeader, client: int) -> str:
    return "0" if asked.slot is None else str(asked.slot[str(client)])


def _context(asked: WorkHeader | DealHeader | UnmaskHeader, client: int) -> Context:
    assert asked.mask is not None
    return Context(asked.run, _version(asked.version), int(_slot(asked, client)), asked.mask.attempt)


def _drawn(asked: WorkHeader | DealHeader | UnmaskHeader, client: int) -> dict[int, tuple[str, str]] | None:
    """Return by peer of a client its key for the sum and its signature; None if no shares were dealt."""
    assert asked.mask is not None
    if str(client) not in asked.mask.drawn:
        return None
    peers = asked.mask.peers[_slot(asked, client)]
    return {int(k): (key.public, key.signature) for k, key in asked.mask.drawn.items() if k in peers}


def _publics(asked: WorkHeader | DealHeader | UnmaskHeader, client: int) -> dict[int, str]:
    assert asked.mask is not None
    peers = asked.mask.peers[_slot(asked, client)]
    return {int(other): asked.mask.keys[node].public for other, node in peers.items()}
