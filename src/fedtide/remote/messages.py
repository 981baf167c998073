"""Headers between server and nodes, read as what anyone may have written: types, ranges, keys, and one kind of error.

A header is plain JSON. Its receiver reads it before anything else. Keys of JSON are words, and so clients' ids are.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol, TypeVar

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from fedtide.core.base import Grouping
from fedtide.core.bounds import HEADER
from fedtide.core.codec import parse
from fedtide.core.errors import FedtideError, refused, shown
from fedtide.core.trees import Tree
from fedtide.wire.masks import SEED, Bundle, Dealt, Shown
from fedtide.wire.shares import MOST, SEALED
from fedtide.wire.vector import Form, Leaf


@dataclass(frozen=True)
class Question:
    """A question to one node.

    Attributes:
        id: A name that no other question of the run has, "round.ask.try.node".
        node: The node's name in the roster.
        header: The question and the asked clients of the node, as plain JSON.
        payload: A sealed tree, the same object for all nodes that get it.
        expires: Seconds from now within which an answer counts.
        largest: Bytes that the payload of an answer may have.
    """

    id: str
    node: str
    header: Mapping[str, Any]
    payload: bytes
    expires: float
    largest: int


@dataclass(frozen=True)
class Response:
    """The answer of one node, or the reason why there is none.

    Attributes:
        id: The question's name.
        node: The node's name in the roster.
        header: The outcome of each client, as plain JSON; empty with an error.
        payload: A sealed tree of what the clients answered; empty with an error.
        seconds: From the push to the arrival.
        error: One sentence of the carrier: the node died, was late, cannot be reached.
    """

    id: str
    node: str
    header: Mapping[str, Any]
    payload: bytes
    seconds: float
    error: str = ""


@dataclass
class OpenQuestion:
    """A question that waits for its answer.

    Attributes:
        question: The question.
        asked: When it was asked.
    """

    question: Question
    asked: float = field(default_factory=lambda: time.monotonic(), kw_only=True)

    @property
    def left(self) -> float:
        """Seconds within which an answer counts."""
        return self.asked + self.question.expires - time.monotonic()

    def respond(self, header: Mapping[str, Any] | None = None, payload: bytes = b"", error: str = "") -> Response:
        """Return the response that ends the question."""
        seconds = time.monotonic() - self.asked
        return Response(self.question.id, self.question.node, header or {}, payload, seconds, error)


class Carrier(Protocol):
    """A way to nodes. A question is answered once at most, and no call ever blocks."""

    def present(self) -> frozenset[str]:
        """Return the names of the nodes that can be asked now."""

    def removed(self) -> frozenset[str]:
        """Return the names of nodes of which no answer counts from now on, since the last call."""

    def push(self, questions: Sequence[Question]) -> None:
        """Send questions on their way."""

    def drop(self, questions: Sequence[str]) -> None:
        """Wait for answers to some questions, by their names, no longer."""

    def pull(self) -> list[Response]:
        """Return the responses since the last pull."""


LONGEST = 2**31 - 1

LARGEST_FORM = 4096
"""Slots and groups of all leaves of a sum."""

ClientId = Annotated[int, Field(ge=0, le=LONGEST)]
ClientKey = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,9})$")]
Name = Annotated[str, Field(max_length=200)]
Words = Annotated[str, Field(max_length=2000)]
Secret = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Signature = Annotated[str, Field(pattern=r"^([0-9a-f]{2}){0,200}$")]
Round = Annotated[int, Field(ge=-LONGEST, le=LONGEST)]
Small = Annotated[int, Field(ge=0, le=LONGEST)]
Seconds = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
When = Annotated[list[Round], Field(min_length=2, max_length=2)]
"""Version of a memory: [round, number of the ask in it]."""


class Header(BaseModel):
    """A header: no other keys, no value of another type, nothing converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class MomentHeader(Header):
    """Point in time of a question."""

    round: Round
    rounds: Small
    seconds: Annotated[float, Field(ge=-1e12, le=1e12, allow_inf_nan=False)]


class LeafHeader(Header):
    """One weighted value of a sum in fixed point (`fedtide.wire.vector.Leaf`)."""

    name: Words
    size: Annotated[int, Field(ge=0, le=2**40)]
    slots: Annotated[int, Field(ge=1, le=1_000_000)]
    bound: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    groups: Annotated[list[Annotated[int, Field(ge=0, le=2**40)]], Field(max_length=10_000)] = []
    optional: bool = False

    def leaf(self) -> Leaf:
        """Return the leaf."""
        return Leaf(**dict(self) | {"groups": tuple(self.groups)})


def _check_leaves(leaves: list[LeafHeader]) -> list[LeafHeader]:
    if len({leaf.name for leaf in leaves}) < len(leaves):
        raise ValueError("each leaf has a name of its own")
    if any(leaf.groups and sum(leaf.groups) != leaf.size for leaf in leaves):
        raise ValueError("the groups of a leaf have all of its numbers")
    if sum(leaf.slots + len(leaf.groups) for leaf in leaves) > LARGEST_FORM:
        raise ValueError(f"all leaves have at most {LARGEST_FORM} slots and groups")
    return leaves


class FormHeader(Header):
    """The form of a sum in fixed point (`fedtide.wire.vector.Form`)."""

    leaves: Annotated[list[LeafHeader], Field(max_length=10_000), AfterValidator(_check_leaves)]
    people: Annotated[int, Field(ge=1, le=LONGEST)]
    counted: bool = False

    def form(self) -> Form:
        """Return the form."""
        return Form(tuple(leaf.leaf() for leaf in self.leaves), self.people, self.counted)


class KeyHeader(Header):
    """The public half of a node's key for masks (`fedtide.wire.masks.Bundle`)."""

    public: Secret
    identity: Words
    signature: Signature

    def bundle(self) -> Bundle:
        """Return the key."""
        return Bundle(**dict(self))


def secrets_tree(shown: Shown) -> dict[str, Any]:
    """Return the secrets of a client that open a sum as a message has them: bytes in tensors, with whose they are."""

    def table(secrets: Mapping[int, bytes], length: int) -> dict[str, Tensor]:
        rows = torch.tensor(list(b"".join(secrets.values())), dtype=torch.uint8)
        return {"clients": torch.tensor(list(secrets), dtype=torch.int64), "secrets": rows.view(len(secrets), length)}

    sealed = torch.tensor(list(shown.sealed), dtype=torch.uint8)
    opened = {"opens": table(shown.opens, SEED), "links": table(shown.links, len(sealed))}
    return {"sealed": sealed, **opened, "seeds": table(shown.seeds, SEED), "keys": table(shown.keys, SEED)}


def read_secrets(tree: Tree) -> Shown:
    """Return the secrets of a client that open a sum (`fedtide.wire.masks.Shown`).

    Raises:
        FedtideError: the tree of its message is not that.
    """

    def table(value: Any, length: int) -> dict[int, bytes]:
        ids = value.get("clients") if isinstance(value, dict) and set(value) == {"clients", "secrets"} else None
        if not isinstance(ids, Tensor) or ids.dtype != torch.int64 or ids.dim() != 1:
            raise refused("secrets", value, "clients, secrets")
        content = _bytes_of(value["secrets"], len(ids), length)
        return {client: content[length * place : length * (place + 1)] for place, client in enumerate(ids.tolist())}

    if not isinstance(tree, dict) or set(tree) != {"sealed", "opens", "links", "seeds", "keys"}:
        raise refused("secrets", tree, "sealed, opens, links, seeds, keys")
    length = tree["sealed"].numel() if isinstance(tree["sealed"], Tensor) else SEED
    if length % SEED:
        raise refused("secrets", tree["sealed"], f"{SEED} bytes for each part of the sum")
    shares = table(tree["seeds"], SEED), table(tree["keys"], SEED)
    return Shown(_bytes_of(tree["sealed"], length), table(tree["opens"], SEED), table(tree["links"], length), *shares)


def _bytes_of(value: Any, *shape: int) -> bytes:
    if not isinstance(value, Tensor) or value.dtype != torch.uint8 or value.shape != shape:
        raise refused("secrets", value, f"{shape[-1]} bytes each")
    return value.numpy().tobytes()


class DrawnHeader(Header):
    """A client's key for one sum, with the signature of its node."""

    public: Secret
    signature: Signature


class DealtHeader(DrawnHeader):
    """The same, and how many shares of its secrets give them back."""

    needed: Annotated[int, Field(ge=1, le=MOST)]


def dealt_tree(dealt: Dealt) -> dict[str, Any]:
    """Return the shares of a client's secrets as a message has them: bytes in tensors."""
    shares = {name: torch.tensor(list(getattr(dealt, name)), dtype=torch.uint8) for name in ("digest", "seeds", "keys")}
    return {"public": dealt.public, "signature": dealt.signature, "needed": dealt.needed, **shares}


def read_dealt(tree: Tree) -> Dealt:
    """Return the shares of a client's secrets (`fedtide.wire.masks.Dealt`).

    Raises:
        FedtideError: the tree of its message is not that.
    """
    if not isinstance(tree, dict) or set(tree) != {"public", "signature", "needed", "digest", "seeds", "keys"}:
        raise refused("shares", tree, "public, signature, needed, digest, seeds, keys")
    header = read(DealtHeader, {name: tree[name] for name in ("public", "signature", "needed")}, "key for a sum")
    holders = tree["seeds"].numel() // SEALED if isinstance(tree["seeds"], Tensor) else 0
    if not 1 <= holders <= MOST:
        raise refused("shares", tree["seeds"], f"{SEALED} bytes for each of 1 to {MOST} nodes")
    seeds, keys = (_bytes_of(tree[name], holders * SEALED) for name in ("seeds", "keys"))
    return Dealt(header.public, header.signature, header.needed, _bytes_of(tree["digest"], SEED), seeds, keys)


class MaskHeader(Header):
    """How answers to a question are masked.

    Args:
        attempt: name of the try.
        keys: by node.
        peers: by slot, or 0, the clients that are asked the same, each with its node.
        drawn: by client its key for this sum, in slots of which shares were dealt.
    """

    attempt: Name
    keys: dict[Name, KeyHeader]
    peers: dict[ClientKey, dict[ClientKey, Name]]
    drawn: dict[ClientKey, DrawnHeader] = {}


class QuestionHeader(Header):
    """The header of every question to a node's clients.

    Args:
        protocol: version of headers and payloads.
        run: digest of the run.
        question: name of the work.
        purpose: name of the question in keys.
        moment: point in time of the question.
        version: of the memory that this question leaves behind.
        clients: ids.
        members: how many clients of all nodes are asked the same, and so are in its sum.
        slot: by client the slot that it is in; None without slots.
        best: rounds of the model that was best so far, as the study says; None if no one is.
    """

    protocol: Small
    run: Name
    question: Name
    purpose: Name
    moment: MomentHeader
    version: When
    clients: list[ClientId]
    members: Small = 0
    slot: dict[ClientKey, Annotated[int, Field(ge=0, le=1_000_000)]] | None = None
    best: Small | None = None


class WorkHeader(QuestionHeader):
    """A question that clients answer with a work.

    Args:
        reveal: names of the rows that the server asks for.
        counted: by client the version of the memory that the server counted last.
        settled: by client the version that the last checkpoint counts.
        deadline: seconds within which an answer counts.
        forms: by slot, or 0, the form of the sum in fixed point; None if sums are in floating point.
        mask: how answers are masked; None if they are not.
    """

    kind: Literal["ask"]
    reveal: Annotated[list[Name], Field(max_length=100)]
    counted: dict[ClientKey, When | None]
    settled: dict[ClientKey, When | None]
    deadline: Seconds
    forms: dict[ClientKey, FormHeader] | None = None
    mask: MaskHeader | None = None


class ScoreHeader(QuestionHeader):
    """An evaluation of what was sent, on the clients' own rows.

    Args:
        counted: by client the version of the memory that the server counted last.
        part: part of the rows.
        personal: whether clients use their memory.
        grouping: which rows decide together.
        other: the other use of the state that is evaluated.
    """

    kind: Literal["score"]
    counted: dict[ClientKey, When | None]
    part: Literal["train", "val", "test"] = "test"
    personal: bool = True
    grouping: Grouping = "client"
    other: Name = ""


class KeysHeader(QuestionHeader):
    """A question for the key for masks."""

    kind: Literal["keys"]


class DealHeader(QuestionHeader):
    """A question for a client's key for a sum, and for shares of its secrets.

    Args:
        mask: how answers will be masked.
    """

    kind: Literal["deal"]
    mask: MaskHeader


class UnmaskHeader(QuestionHeader):
    """A question for what opens parts of a sum.

    Args:
        mask: how its answers are masked.
        alive: by slot, or 0, the clients of the sum to open.
        parts: by slot, or 0, the numbers of the parts to open (`fedtide.wire.vector.Form.parts`).
        counts: by slot, or 0, how many clients have something in each of these parts; none without units.
        lost: by slot, or 0, the clients of the sum that vanished, in whose place others give shares.
    """

    kind: Literal["unmask"]
    mask: MaskHeader
    alive: dict[ClientKey, list[ClientId]]
    parts: dict[ClientKey, list[Small]]
    counts: dict[ClientKey, list[Small]] = {}
    lost: dict[ClientKey, list[ClientId]] = {}


AnyHeader = WorkHeader | ScoreHeader | KeysHeader | DealHeader | UnmaskHeader
KINDS: Mapping[str, type[AnyHeader]] = {
    "ask": WorkHeader, "score": ScoreHeader, "keys": KeysHeader, "deal": DealHeader, "unmask": UnmaskHeader,
}  # fmt: skip


LINES, LINE = 3, 200
"""Lines of its log that a node tells with an answer at most, and the characters of each."""


class MachineHeader(Header):
    """Facts of a node's machine, as far as its owner lets them out.

    Args:
        load: processes that run or wait, for each processor.
        memory: share of memory in use.
        log: last lines of its log.
    """

    load: Seconds | None = None
    memory: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    log: Annotated[list[Annotated[str, Field(max_length=LINE)]], Field(max_length=LINES)] = []


class AnswerHeader(Header):
    """The header of an answer: the words for the clients.

    Args:
        clients: by client what became of it.
        kept: ids of those that keep more than before.
        fewest: how many clients its owner wants in a sum.
        seconds: that the node was at work.
        failed: reason why there is nothing of any client.
        machine: what it tells of its machine.
    """

    clients: dict[ClientKey, Words] = {}
    kept: list[ClientId] = []
    fewest: Small = 1
    seconds: Seconds = 0.0
    failed: Words = ""
    machine: MachineHeader | None = None


H = TypeVar("H", bound=Header)


def read(kind: type[H], header: Any, name: str = "header") -> H:
    """Return a header whose keys and values are what they must be.

    Args:
        kind: class of the header.
        header: the plain values.
        name: of the header, for messages.

    Raises:
        FedtideError: it is no such header. Nothing else is raised.

    >>> read(AnswerHeader, {"clients": {"3": "answered"}, "seconds": 0.5}).clients
    {'3': 'answered'}
    >>> read(AnswerHeader, {"clients": {"3": "answered"}, "kept": [True]})
    Traceback (most recent call last):
    fedtide.core.errors.FedtideError: header.kept.0: found True, allowed: input should be a valid integer
    """
    try:
        return kind.model_validate(dict(header) if isinstance(header, Mapping) else header)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join([name, *(shown(part).strip("'") for part in first["loc"])])
        message = first["msg"][:1].lower() + first["msg"][1:]
        raise FedtideError(f"{where}: found {shown(first['input'])}, allowed: {message}") from None


def read_question(header: Any) -> AnyHeader:
    """Return the header of a question to a node.

    Raises:
        FedtideError: it is none, or does not speak of the same clients throughout.
    """
    kind = header.get("kind") if isinstance(header, Mapping) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise FedtideError(f"question.kind: found {shown(kind)}, allowed: {', '.join(KINDS)}")
    asked = read(KINDS[kind], header, "question")
    clients = [str(client) for client in asked.clients]
    if len(set(clients)) != len(clients):
        raise FedtideError(f"question.clients: found {shown(clients)}, allowed: each once")
    for name in ("slot", "counted", "settled"):
        table = getattr(asked, name, None)
        if table is not None and set(table) != set(clients):
            raise FedtideError(f"question.{name}: found {shown(sorted(table))}, allowed: the clients asked")
    return asked


def from_json(text: str | bytes) -> dict[str, Any]:
    """Return the plain values of a header that came as JSON.

    Raises:
        FedtideError: it is not JSON within bounds, or not an object.
    """
    header = parse(text, HEADER, "header")
    if not isinstance(header, dict):
        raise FedtideError(f"header: found {shown(header)}, allowed: an object")
    return header
