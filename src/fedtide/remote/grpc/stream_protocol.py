"""The protocol on a stream: messages in pieces of bounded size, and the proof of a node's key.

A message has a head that says its kind and sizes, then header and payload. A node signs bytes that the server has just
made up, with the key that never leaves the node. TLS has shown before that the server is that of the node's ticket. The
signed bytes name the site and its authority, so no server can use the signature at another site.
"""

import hashlib
import json
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from fedtide.core.bounds import DEEPEST
from fedtide.core.errors import uninstalled

METHOD = "/fedtide.Nodes/Talk"
"""The one method of the server, a stream both ways."""
SCHEME = 1
"""Version of what is said on a stream."""
PIECE = 2**18
"""Bytes of a piece; the last one of a header or payload may be smaller."""
HEAD = 2**12
"""Bytes of a head."""
MOST = 2**31
"""Bytes of a payload of which nothing else says how large it may be."""
BOTH = [
    ("grpc.max_receive_message_length", PIECE + HEAD),
    ("grpc.max_metadata_size", 2 * HEAD),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.per_message_decompression", 0),  # a small piece stays small
]
"""Settings of gRPC at both ends: a line that says nothing for half a minute is lost."""

INTRODUCTION, DISAGREEMENT = "introduction", "disagreement"
"""Kinds of the message by which a node shows its key: to take part, or to say that its rows are not those of the study
and to go. Neither tells more of rows: an introduction has at most that its owner was warned of them."""

Read = Callable[[], Awaitable[Any]]
"""Reads the next piece of a stream."""


def library() -> Any:
    """Return the package `grpc`, with its `aio`; raise with the name of the extra if it is missing."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # who comes and fails is said in our words
    logging.getLogger("grpc").setLevel(logging.CRITICAL)  # else whoever hangs up could fill a disk
    try:
        import grpc.aio
    except ImportError as error:
        raise uninstalled(f"real clients need grpcio ({error})", "deploy") from None
    return grpc


class Broken(Exception):
    """The error of bytes from the other end that are no message; its text is the reason."""


@dataclass(frozen=True)
class Message:
    """A message of one end to the other.

    Args:
        kind: one word.
        id: of the question that it is about.
        extra: further keys of the head.
        header: JSON.
        payload: a sealed tree.
    """

    kind: str
    id: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    header: bytes = b""
    payload: bytes = b""

    def pieces(self) -> Iterator[bytes]:
        """Yield the message in pieces.

        >>> [len(piece) for piece in Message("answer", payload=bytes(600_000)).pieces()]
        [60, 262144, 262144, 75712]
        """
        sizes = {"header": len(self.header), "payload": len(self.payload)}
        yield json.dumps({"kind": self.kind, "id": self.id, **sizes, **self.extra}).encode()
        for part in (self.header, self.payload):
            for at in range(0, len(part), PIECE):
                yield part[at : at + PIECE]


@dataclass(frozen=True)
class Head:
    """The head of a message, which comes first.

    Args:
        kind: one word.
        id: of the question that it is about.
        header: bytes of its header.
        payload: bytes of its payload.
        extra: further keys of the head.
    """

    kind: str
    id: str
    header: int
    payload: int
    extra: dict[str, Any]

    @staticmethod
    def of(piece: bytes) -> "Head":
        """Read a head that anyone may have written.

        Raises:
            Broken: it is none.
        """
        try:
            values = json.loads(piece) if len(piece) <= HEAD else None
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            raise Broken("the head of a message is not a JSON object")
        if _is_deeper(values, DEEPEST):  # another thread spells it, and may have room for fewer calls
            raise Broken("the head of a message is nested too deep")
        kind, name, header, payload = (values.pop(key, None) for key in ("kind", "id", "header", "payload"))
        whole = all(type(size) is int and 0 <= size <= 2**40 for size in (header, payload))
        if not (isinstance(kind, str) and isinstance(name, str) and len(name) <= 500 and whole):
            raise Broken("the head of a message has wrong keys")
        return Head(kind, name, header, payload, values)


def _is_deeper(value: Any, most: int) -> bool:
    """Tell whether a JSON value is nested deeper than allowed."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return most < 0 or any(_is_deeper(child, most - 1) for child in inside)


async def next_message(read: Read, end: Any, keep: Callable[[Head], bool]) -> Message | None:
    """Return the next message of a stream; None if that has ended.

    Args:
        read: reads a piece.
        end: what `read` returns at the end.
        keep: tells whether a message is wanted, from its head; another one is read and thrown away.

    Raises:
        Broken: the other end says something else.
    """
    while (piece := await read()) is not end:
        head = Head.of(piece)
        is_wanted = keep(head)
        parts = [await _part(read, end, size, is_wanted) for size in (head.header, head.payload)]
        if is_wanted:
            return Message(head.kind, head.id, head.extra, *parts)
    return None


async def _part(read: Read, end: Any, size: int, is_wanted: bool) -> bytes:
    content, left = bytearray(), size
    while left:
        piece = await read()
        if piece is end or len(piece) != min(PIECE, left):  # small pieces would cost more than they bring
            raise Broken("a message broke off" if piece is end else "a piece has another size")
        left -= len(piece)
        if is_wanted:
            content += piece
    return bytes(content)


def make_nonce() -> str:
    """Return 32 bytes from the system's generator, as hexadecimal digits."""
    return secrets.token_hex(32)


def claim_bytes(run: str, authority: bytes, name: str, asked: str, nonce: str) -> bytes:
    """Return the bytes that a node signs.

    Args:
        run: digest of the site's study.
        authority: the certificate of its authority, as PEM.
        name: of the node.
        asked: what the server made up.
        nonce: what the node made up.
    """
    site = hashlib.sha256(b"".join(authority.split())).hexdigest()
    return json.dumps(["fedtide node", SCHEME, run, site, name, asked, nonce]).encode()
