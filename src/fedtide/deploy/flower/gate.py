"""The door of a server to the network: lets nodes through to Flower, and nothing else.

Flower's SuperLink serves nodes and those who command it at one port, and asks only nodes for a key: all who reach
it may start programs. So it is served at a socket of its owner's alone, and this stands before it. It runs as a program
of its own and imports nothing of Fedtide, and of Flower the classes of its messages. Its argument is a JSON file:
{"host", "port", "certificate", "key", "ca", "behind", "name"}.
"""

import asyncio
import json
import ssl
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from flwr.proto.fleet_pb2 import PushMessagesRequest
from google.protobuf.message import DecodeError
from uvicorn.protocols.http.h11_impl import H11Protocol

OPEN = frozenset(
    f"/v1/fleet/{name}"
    for name in (
        "activate-node", "deactivate-node", "send-node-heartbeat", "pull-messages", "push-messages", "get-run",
        "get-fab", "push-object", "pull-object", "confirm-message-received",
    )
)  # fmt: skip
"""All that a node asks, to the letter: another spelling of a path may be another path behind the gate. Nodes do not
register themselves: their keys are admitted by the server's owner."""
ANSWERS, PIECES = "/v1/fleet/push-messages", "/v1/fleet/push-object"
"""What carries answers, and their pieces."""
LARGEST, SMALL = 8 * 2**20, 2**20
"""Bytes of one request that carries a piece of an answer, of which Flower makes 5 MB each, and of any other."""
OBJECTS = 512
"""Pieces of one answer."""
HELD = 256 * 2**20
"""Bytes of all requests that are in memory at a time."""
SECONDS = 120.0
"""Seconds that one request may take to come, and as many for its answer."""
IDLE = 15.0
"""Seconds in which a connection has to begin a request."""
CONNECTIONS, FORWARDED = 500, 32
"""Connections at a time, and requests of them that are before Flower."""
HOP = {b"host", b"connection", b"transfer-encoding", b"keep-alive", b"upgrade"}
"""Headers that belong to one connection. Flower goes by the path, which a stranger's `host` might change."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Refusal = tuple[int, bytes]


class Gate:
    """The server's program for requests: an ASGI application.

    Args:
        behind: the socket of what it stands before.
        name: the address under which that has its certificate.
        ca: the authority of the certificate.
    """

    def __init__(self, behind: str, name: str, ca: str) -> None:
        context = ssl.create_default_context(cafile=ca)
        way = httpx.AsyncHTTPTransport(verify=context, uds=behind, limits=httpx.Limits(max_connections=FORWARDED))
        self._client = httpx.AsyncClient(base_url=name, transport=way, timeout=SECONDS, trust_env=False)
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or begin and end."""
        if scope["type"] == "lifespan":
            while (await receive())["type"] != "lifespan.shutdown":
                await send({"type": "lifespan.startup.complete"})
            await self._client.aclose()
            await send({"type": "lifespan.shutdown.complete"})
        elif scope["type"] == "http":
            await self._serve(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on once all of it is here and may pass, and what is said to it back."""
        body, began = bytearray(), list[int]()
        try:
            why = _objection(scope)
            if why is None:
                async with asyncio.timeout(SECONDS):
                    why = await self._take(body, receive, _most(scope["path"]))
            if why is None and scope["path"] == ANSWERS and not replies(bytes(body)):
                why = 403, b"only answers to questions are taken here"
            if why is not None:
                return await _answer(send, *why)
            async with asyncio.timeout(SECONDS):
                await self._pass_on(scope, bytes(body), send, began)
        except ConnectionResetError:
            pass  # who asked has gone
        except TimeoutError:
            if not began:
                await _answer(send, 504, b"too slow")  # nodes try that again, and give up after 408
        except httpx.HTTPError:
            if not began:
                await _answer(send, 503, b"the server is being started")
        finally:
            self._held -= len(body)

    async def _take(self, body: bytearray, receive: Receive, most: int) -> Refusal | None:
        """Put a request's body together, of which there is room for so many bytes."""
        more = True
        while more:
            part = await receive()
            if part["type"] == "http.disconnect":
                raise ConnectionResetError
            body += part.get("body", b"")
            self._held += len(part.get("body", b""))
            more = part.get("more_body", False)
            if len(body) > most:  # a chunked one is as long as it likes
                return 413, b"too large"
            if self._held > HELD:
                return 503, b"too much at a time"
        return None

    async def _pass_on(self, scope: Scope, body: bytes, send: Send, began: list[int]) -> None:
        """Have a request answered; `began` notes that the answer has begun."""
        kept = [(name, value) for name, value in scope["headers"] if name not in {*HOP, b"content-length"}]
        async with self._client.stream("POST", scope["path"], content=body, headers=kept) as reply:
            told = [(name.lower(), value) for name, value in reply.headers.raw if name.lower() not in HOP]
            await send({"type": "http.response.start", "status": reply.status_code, "headers": told})
            began.append(reply.status_code)
            async for piece in reply.aiter_raw():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body"})


def _objection(scope: Scope) -> Refusal | None:
    """Return why a request may not pass, by what is said before its body."""
    if scope["method"] != "POST" or scope["path"] not in OPEN or scope.get("query_string"):
        return 403, b"only nodes are served here"
    length = dict(scope["headers"]).get(b"content-length", b"")
    if not (length.isdigit() and len(length) < 10):
        return 411, b"its length is to be said"
    return (413, b"too large") if int(length) > _most(scope["path"]) else None


def _most(path: str) -> int:
    """Return how many bytes a request may have."""
    return LARGEST if path == PIECES else SMALL


def replies(body: bytes) -> bool:
    """Whether what a node pushes is one answer of its own to a question, in not too many pieces.

    Flower would take a message that replies to nothing for a question, to another node or to the server.
    """
    try:
        pushed = PushMessagesRequest.FromString(body)
    except DecodeError:
        return False
    if len(pushed.messages_list) != 1 or len(pushed.message_object_trees) != 1:
        return False
    about, left, pieces = pushed.messages_list[0].metadata, [pushed.message_object_trees[0]], 0
    while left and pieces <= OBJECTS:
        left.extend(left.pop().children)
        pieces += 1
    return bool(about.reply_to_message_id) and about.src_node_id == pushed.node.node_id and pieces <= OBJECTS


class Impatient(H11Protocol):
    """A connection that ends when no request begins in time, or there are too many."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection."""
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS:
            transport.abort()
        self._look(None, self.loop.time())

    def _look(self, before: Any, since: float) -> None:
        """End the connection if it is between the same two requests for too long."""
        if self.transport.is_closing():
            return
        if self.cycle is not before or (self.cycle is not None and not self.cycle.response_complete):
            before, since = self.cycle, self.loop.time()
        if self.loop.time() - since >= IDLE:
            return self.transport.abort()
        self.loop.call_later(1.0, self._look, before, since)


async def _answer(send: Send, status: int, body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": body})


def main(told: dict[str, Any]) -> None:
    """Serve until the process is ended."""
    uvicorn.run(
        Gate(told["behind"], told["name"], told["ca"]),
        host=told["host"],
        port=told["port"],
        ssl_certfile=told["certificate"],
        ssl_keyfile=told["key"],
        http=Impatient,
        ws="none",
        proxy_headers=False,
        log_level="error",
        access_log=False,
    )


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
