"""Answers of nodes, read as bytes that anyone may have written."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fedtide.core import codec
from fedtide.core.base import LARGEST, Scores, Slotted
from fedtide.core.errors import FedtideError, printable, refused
from fedtide.core.trees import Tree
from fedtide.fleets.ask import ABSTAINED, NOT_FINITE, Ask
from fedtide.fleets.totals import ALL
from fedtide.remote import messages
from fedtide.remote.asks import ANSWERED, LOST, REFUSED
from fedtide.remote.messages import Response
from fedtide.remote.node import COLUMNS
from fedtide.wire.answer_schema import Schema, misfit
from fedtide.wire.masks import SEED
from fedtide.wire.pipeline import Wire

ROOM = 10_000
"""Bytes of a message beside the answers in it, and of what a client tells when it is judged."""

WIDEST = 256
"""Maximum number of columns for models or experts in what a client tells when it is judged."""

WORDS = 160
"""Letters of a reason that are kept: it stands in the record for each client and each question."""

Post = Literal["ask", "flight", "score", "keys", "deal", "unmask"]
"""Questions that are over with their ask, those that may be answered in a later round, evaluations, nodes' keys for
masks, clients' keys for a sum with shares of their secrets, and what opens a sum."""


SECRET = 160
"""Bytes that four secrets take in a message, with whose they are."""

READERS: Mapping[Post, Callable[[Tree], Any]] = {
    "keys": lambda tree: messages.read(messages.KeyHeader, tree, "key for masks").bundle(),
    "deal": messages.read_dealt,
    "unmask": messages.read_secrets,
}
"""How what a client sends is read, of questions about masks."""


@dataclass(frozen=True)
class SentQuestion:
    """A question at a node.

    Args:
        node: its name.
        post: how long it is waited for.
        ask: the question to the node's clients.
        wanted: what answers must look like, by slot, or 0; empty if clients answer with no work.
        at: when it was sent.
        seconds: within which an answer counts.
        wire: how sums in fixed point pass, of which each answer is looked at; None if they are masked.
    """

    node: str
    post: Post
    ask: Ask
    wanted: Mapping[int, Schema]
    at: float
    seconds: float
    wire: Wire | None = None


@dataclass(frozen=True)
class Received:
    """The answer of a client, or the reason why there is none.

    Args:
        word: what became of it.
        content: what it sends.
        keeps: whether it keeps more than before.
        ask: the question.
        seconds: after how many it came.
        fewest: how many clients its owner wants in a sum.
    """

    word: str
    content: Tree
    keeps: bool
    ask: Ask
    seconds: float
    fewest: int = 1


def read(sent: SentQuestion, response: Response, heaviest: float) -> dict[int, Received]:
    """Read an answer that anyone may have written."""
    if response.error:
        return all_alike(sent, LOST + one_line(response.error), response.seconds)
    try:
        answer = messages.read(messages.AnswerHeader, response.header)
    except FedtideError as error:
        return all_alike(sent, REFUSED + one_line(error), response.seconds)
    if answer.failed:
        return all_alike(sent, REFUSED + one_line(answer.failed), response.seconds)
    words = {client: _word(answer.clients.get(str(client))) for client in sent.ask.clients.tolist()}
    answered = [client for client, word in words.items() if word == ANSWERED]
    trees: Mapping[int, Tree] = {}
    try:
        if answered:
            trees = _decoded(sent, response.payload, answered)
    except FedtideError as error:
        words |= dict.fromkeys(answered, REFUSED + one_line(error))
    answers = {}
    slots = [ALL] * len(words) if sent.ask.slot is None else sent.ask.slot.tolist()
    for slot, (client, word) in zip(slots, words.items(), strict=True):
        tree = trees.get(client)
        if word == ANSWERED and sent.post in READERS:
            try:
                tree = READERS[sent.post](tree)
            except FedtideError as error:
                word = REFUSED + one_line(error)
        elif word == ANSWERED and sent.post != "score" and (why := _fault(tree, sent, slot, heaviest)):
            word = REFUSED + one_line(why)
        tree = tree if word == ANSWERED else None  # it may be large, and answers are kept until all have come
        answers[client] = Received(word, tree, client in answer.kept, sent.ask, response.seconds, answer.fewest)
    return answers


def most_bytes(sent: SentQuestion, clients: int) -> int:
    """Return how many bytes the answers of so many clients may have."""
    if sent.post in ("score", "keys", "deal"):  # shares for all nodes are below the room of a client
        return ROOM * (1 + clients)
    forms, largest = (sent.ask.forms or {}).values(), max((schema.bytes for schema in sent.wanted.values()), default=0)
    if sent.post == "unmask":
        most = max((form.people * (SECRET + SEED * len(form.parts)) for form in forms), default=0)
        return ROOM * (1 + clients) + clients * most
    numbers = max((8 * form.size + ROOM for form in forms), default=0)
    return ROOM + clients * (numbers + largest)


def _decoded(sent: SentQuestion, payload: bytes, answered: list[int]) -> Mapping[int, Tree]:
    """Decode the content of each client's answer."""
    most = most_bytes(sent, len(answered))
    if len(payload) > most:
        raise FedtideError(f"message: found {len(payload)} bytes, allowed: at most {most}")
    tree = codec.decode_message(payload)
    if sent.post == "score":
        return _scores_of(tree, answered)
    if not isinstance(tree, dict):
        raise refused("message", tree, "answers by client")
    return tree


def one_line(text: Any) -> str:
    """Return a stranger's words as one short line."""
    words = printable(" ".join(str(text)[: 2 * WORDS].split()))
    return words if len(words) <= WORDS else f"{words[: WORDS - 4]} ..."


def _word(word: str | None) -> str:
    """Return the word of a node for one of its clients."""
    if word in (ANSWERED, ABSTAINED, NOT_FINITE):
        return word
    if word is not None and word.startswith(REFUSED):
        return REFUSED + one_line(word.removeprefix(REFUSED))
    return f"{REFUSED}its node says nothing of it"


def all_alike(sent: SentQuestion, word: str, seconds: float) -> dict[int, Received]:
    """Return the same word for all clients of a question, of which nothing else came."""
    return {client: Received(word, None, False, sent.ask, seconds) for client in sent.ask.clients.tolist()}


def _fault(answer: Tree, sent: SentQuestion, slot: int, heaviest: float) -> str | None:
    """Return the reason why the answer of a client in a slot may not be summed; None if it may."""
    if not isinstance(answer, dict) or set(answer) != {"total", "rows"} or not isinstance(answer["rows"], dict):
        return "no answer came with it"
    wanted = sent.wanted[slot]
    if sent.ask.forms is not None:
        form, total = sent.ask.forms[slot], answer["total"]
        if not isinstance(total, Tensor) or total.dtype != torch.int64 or total.shape != (form.size,):
            return f"total: found {type(total).__name__}, allowed: {form.size} whole numbers"
        if sent.wire is not None and (why := sent.wire.fault(total, form, 1, heaviest)):
            return why
        answer = {"total": {}, "rows": answer["rows"]}
        wanted = replace(wanted, answer={**wanted.answer, "total": {}})
    return misfit(wanted, answer, heaviest)


def _scores_of(columns: Tree, answered: list[int]) -> dict[int, Scores]:
    """Read what a node's clients tell of an evaluation.

    Raises:
        FedtideError: it is not that.
    """
    if not isinstance(columns, dict) or set(columns) != set(COLUMNS) or not isinstance(columns["others"], dict):
        raise refused("scores", columns, f"columns {', '.join(COLUMNS)}")
    ids, others = columns["clients"], columns["others"]
    if not isinstance(ids, Tensor) or ids.dtype != torch.int64 or ids.tolist() != answered:
        raise refused("scores: clients", ids, f"{answered}")
    if not all(isinstance(name, str) and len(name) <= WORDS and name.isprintable() for name in others):
        raise refused("scores: others", list(others), f"words that can be seen, of {WORDS} letters at most")
    plain = [(name, columns[name]) for name in COLUMNS if name not in ("clients", "others")]
    for name, column in (*plain, *((f"others.{name}", column) for name, column in others.items())):
        wide = name in ("choice", "weights")
        if column is None and (wide or name == "density"):
            continue
        shaped = isinstance(column, Tensor) and column.dim() == 1 + wide and len(column) == len(answered)
        if not shaped or column.dtype != torch.float64:
            raise refused(f"scores: {name}", column, f"a float64 number for each of {len(answered)} clients")
        if wide and not 0 < column.shape[1] <= WIDEST:
            raise refused(f"scores: {name}", f"{column.shape[1]} columns", f"1 to {WIDEST}, or none of it")
        if wide and not bool(((column >= 0) & (column <= LARGEST)).all()):
            raise refused(f"scores: {name}", "numbers that are no counts of rows", f"0 to {LARGEST}")
    rows, correct = columns["rows"], columns["correct"]
    if not bool(((rows >= 0) & (rows <= LARGEST) & (rows == rows.floor())).all()):
        raise refused("scores: rows", rows.tolist(), f"whole numbers from 0 to {LARGEST}")
    for name, right in (("correct", correct), *((f"others.{name}", column) for name, column in others.items())):
        if not bool(((right >= 0) & (right <= rows)).all()):
            raise refused(f"scores: {name}", right.tolist(), "0 to the number of rows")
    scores = Scores(**columns)
    return {client: scores.pick(torch.tensor([place])) for place, client in enumerate(answered)}


def keep_wanted(answered: set[int], ask: Ask, answers: Mapping[int, Received]) -> set[int]:
    """Return the clients in whose sum there are as many as their owners want, once others are left out for that."""
    clients, slots = ask.clients.tolist(), [0] * len(ask.clients) if ask.slot is None else ask.slot.tolist()
    slot = dict(zip(clients, slots, strict=True))
    sums = {
        client: {(slot[client], *place) for place in [(), *_chosen(answers[client].content["total"])]}
        for client in answered
    }
    left, before = set(answered), -1
    while len(left) != before:
        before, members = len(left), Counter(place for client in left for place in sums[client])
        left = {client for client in left if min(members[place] for place in sums[client]) >= answers[client].fewest}
    return left


def _chosen(total: Tree) -> Iterator[tuple[Any, ...]]:
    """Yield where an answer says by itself which sums it is in; one that is masked does not say it."""
    if isinstance(total, Slotted):
        yield from ((k,) for k, part in total.parts.items() if part.weight > 0)
    elif isinstance(total, dict):
        yield from ((key, *place) for key, child in total.items() for place in _chosen(child))
