"""The door of a server to the network: lets nodes through to Flower, and nothing else.

Flower's SuperLink serves nodes and those who command it at one port, and asks only nodes for a key: whoever reaches
that port may start programs. So it listens on the loopback, and this stands before it. It runs as a program of its own
and imports neither Fedtide nor Flower. Its argument is a JSON file: {"host", "port", "certificate", "key", "ca",
"behind"}.
"""

import json
import ssl
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

import httpx
import uvicorn

OPEN = frozenset(
    f"/v1/fleet/{name}"
    for name in (
        "activate-node", "deactivate-node", "send-node-heartbeat", "pull-messages", "push-messages", "get-run",
        "get-fab", "push-object", "pull-object", "confirm-message-received",
    )
)  # fmt: skip
"""All that a node asks, to the letter: another spelling of a path may be another path behind the gate. Nodes do not
register themselves: their keys are admitted by the server's owner."""
LARGEST = 32 * 2**20
"""Bytes of one request: Flower cuts what is larger into pieces of 5 MB."""
SECONDS = 120.0
"""Seconds that Flower may take for one request."""
HOP = {b"host", b"connection", b"transfer-encoding", b"content-length", b"keep-alive", b"upgrade"}
"""Headers that belong to one connection."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def make_app(behind: str, ca: str) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    """Return the server's program for requests: an ASGI application."""
    context = ssl.create_default_context(cafile=ca)
    client = httpx.AsyncClient(base_url=behind, verify=context, timeout=SECONDS, trust_env=False)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            while (await receive())["type"] != "lifespan.shutdown":
                await send({"type": "lifespan.startup.complete"})
            await client.aclose()
            await send({"type": "lifespan.shutdown.complete"})
            return
        if scope["type"] != "http":
            return
        path = scope["path"]
        if scope["method"] != "POST" or path not in OPEN or scope.get("query_string"):
            return await _answer(send, 403, b"only nodes are served here")
        body = bytearray()
        while True:
            part = await receive()
            if part["type"] == "http.disconnect":
                return None
            body += part.get("body", b"")
            if len(body) > LARGEST:
                return await _answer(send, 413, b"too large")
            if not part.get("more_body"):
                break
        headers = [(name, value) for name, value in scope["headers"] if name not in HOP]
        try:
            reply = await client.post(path, content=bytes(body), headers=headers)
        except httpx.HTTPError:
            return await _answer(send, 503, b"the server is being started")
        await _answer(send, reply.status_code, reply.content, reply.headers.raw)

    return app


async def _answer(send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    kept = [(name.lower(), value) for name, value in headers or [] if name.lower() not in HOP | {b"content-encoding"}]
    await send({"type": "http.response.start", "status": status, "headers": kept})
    await send({"type": "http.response.body", "body": body})


def main(told: dict[str, Any]) -> None:
    """Serve until the process is ended."""
    uvicorn.run(
        make_app(told["behind"], told["ca"]),
        host=told["host"],
        port=told["port"],
        ssl_certfile=told["certificate"],
        ssl_keyfile=told["key"],
        log_level="warning",
        access_log=False,
    )


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
