"""The gate before Flower: what nodes ask passes, and nothing else reaches what is behind."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("httpx")
pytest.importorskip("uvicorn")
gate: Any = pytest.importorskip("fedtide.deploy.flower.gate")


@pytest.fixture
def asked(monkeypatch):
    """Requests that reach Flower: path and headers."""
    reached: list[tuple[str, dict[bytes, bytes]]] = []

    class Reply:
        status_code = 200
        headers = SimpleNamespace(raw=[(b"Content-Type", b"x"), (b"Connection", b"close")])

        async def aiter_raw(self) -> Any:
            yield b"sa"
            yield b"id"

    class Client:
        def __init__(self, **options: Any) -> None:
            assert options["trust_env"] is False

        @asynccontextmanager
        async def stream(self, method: str, path: str, content: bytes, headers: Any) -> Any:
            reached.append((path, dict(headers)))
            yield Reply()

    monkeypatch.setattr(gate.httpx, "AsyncClient", Client)
    monkeypatch.setattr(gate.ssl, "create_default_context", lambda cafile: None)
    monkeypatch.setattr(gate.httpx, "AsyncHTTPTransport", lambda **options: None)
    return reached


def ask(
    path: str,
    method: str = "POST",
    query: bytes = b"",
    body: bytes = b"{}",
    parts: int = 1,
    length: bytes | None = None,
    pause: float = 0.0,
    app: Any = None,
    **more: bytes,
) -> int:
    """Ask the gate; the status of its answer."""
    sent: list[dict[str, Any]] = []
    told = [{"type": "http.request", "body": body, "more_body": number + 1 < parts} for number in range(parts)]

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(pause)
        return told.pop(0)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    length = str(len(body) * parts).encode() if length is None else length
    headers = [(b"content-length", length), *((name.encode(), value) for name, value in more.items())]
    scope = {"type": "http", "method": method, "path": path, "query_string": query, "headers": headers}
    asyncio.run((app or gate.Gate("/socket", "https://127.0.0.1:9", "ca.crt"))(scope, receive, send))
    return int(sent[0]["status"])


@pytest.mark.parametrize("name", ["pull-messages", "push-object", "activate-node", "send-node-heartbeat"])
def test_what_nodes_ask_passes(asked, name):
    assert ask(f"/v1/fleet/{name}") == 200
    assert [path for path, _ in asked] == [f"/v1/fleet/{name}"]


@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/start-run",
        "/v1/fleet/../control/start-run",
        "/v1/fleet/pull-messages/../../control/start-run",
        "/v1/fleet/./register-node",
        "/v1/fleet/register-node",
        "/v1/fleet/unregister-node",
        "/v1/fleet/register-node/",
        "/v1/fleet//register-node",
        "//v1/fleet/pull-messages",
        "/v1/fleet/pull-messages?x=/../",
        "/v1/fleet/pull-messages#x",
        "/v1/fleet/pull-messages\\..\\control",
        "/v1/fleet/Pull-Messages",
        "/v1/fleet/pull-messages\n",
        "https://evil.example.org/v1/fleet/pull-messages",
        "/v1/fleet/",
        "/",
        "",
    ],
)
def test_nothing_else_reaches_what_is_behind(asked, path):
    assert ask(path) == 403
    assert asked == []


def test_other_methods_queries_and_large_bodies_do_not_pass(asked):
    assert ask("/v1/fleet/pull-messages", method="GET") == 403
    assert ask("/v1/fleet/pull-messages", query=b"a=b") == 403
    assert ask("/v1/fleet/push-object", body=b"x" * 2**20, parts=9) == 413
    assert ask("/v1/fleet/push-object", body=b"x" * 2**20, parts=9, length=b"2") == 413  # as chunked ones may
    assert ask("/v1/fleet/pull-messages", body=b"x" * 2**20, parts=2) == 413
    assert ask("/v1/fleet/pull-messages", length=b"") == 411
    assert ask("/v1/fleet/pull-messages", length=b"-1") == 411
    assert asked == []
    assert ask("/v1/fleet/push-object", body=b"x" * 2**20, parts=8) == 200


def test_a_stranger_does_not_choose_the_host(asked):
    assert ask("/v1/fleet/pull-messages", host=b"x/v1/control/start-run?", connection=b"close", signature=b"s") == 200
    assert asked == [("/v1/fleet/pull-messages", {b"signature": b"s"})]


def test_all_requests_together_have_little_room_and_little_time(asked, monkeypatch):
    app = gate.Gate("/socket", "https://127.0.0.1:9", "ca.crt")
    monkeypatch.setattr(gate, "HELD", 1000)
    assert ask("/v1/fleet/push-object", body=b"x" * 600, parts=2, app=app) == 503
    assert ask("/v1/fleet/push-object", body=b"x" * 400, parts=2, app=app) == 200  # the room is given back
    monkeypatch.setattr(gate, "SECONDS", 0.05)
    assert ask("/v1/fleet/push-object", body=b"x", pause=60.0, app=app) == 504


def pushed(**changes: Any) -> bytes:
    """Return what a node pushes."""
    from flwr.proto.fleet_pb2 import PushMessagesRequest
    from flwr.proto.message_pb2 import Message, Metadata, ObjectTree
    from flwr.proto.node_pb2 import Node

    told = {"to": "question", "source": 7, "messages": 1, "pieces": 3} | changes
    message = Message(metadata=Metadata(reply_to_message_id=told["to"], src_node_id=told["source"], dst_node_id=1))
    tree = ObjectTree(object_id="0", children=[ObjectTree(object_id=str(n)) for n in range(1, told["pieces"])])
    lists = {"messages_list": [message] * told["messages"], "message_object_trees": [tree]}
    made: bytes = PushMessagesRequest(node=Node(node_id=7), **lists).SerializeToString()
    return made


def test_a_node_answers_questions_and_asks_none(asked):
    assert ask("/v1/fleet/push-messages", body=pushed()) == 200
    assert ask("/v1/fleet/push-messages", body=pushed(pieces=gate.OBJECTS)) == 200
    wrong = [{"to": ""}, {"source": 1}, {"source": 8}, {"messages": 0}, {"messages": 2}, {"pieces": gate.OBJECTS + 1}]
    for change in wrong:
        assert ask("/v1/fleet/push-messages", body=pushed(**change)) == 403, change
    assert ask("/v1/fleet/push-messages", body=b"no message") == 403
    assert ask("/v1/fleet/push-messages", body=pushed() + pushed()) == 403  # together they would be two
    assert len(asked) == 2


def test_a_connection_without_a_request_ends_and_so_does_one_too_many(monkeypatch):
    import uvicorn

    monkeypatch.setattr(gate, "IDLE", 0.5)
    monkeypatch.setattr(gate, "CONNECTIONS", 3)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async def play() -> None:
        options = {"http": gate.Impatient, "ws": "none", "lifespan": "off", "log_level": "critical"}
        server = uvicorn.Server(uvicorn.Config(app, port=0, timeout_keep_alive=60, **options))
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        lines = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        lines[0][1].write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await lines[0][0].readline()).startswith(b"HTTP/1.1 200")
        lines[0][1].write(b"GET / HTTP/1.1\r\nHost: x\r\n")  # the next one never comes to its end
        lines[1][1].write(b"GET / HTTP")
        last = await asyncio.open_connection("127.0.0.1", port)
        for reader, writer in (last, *lines):
            with suppress(ConnectionError):
                await asyncio.wait_for(reader.read(), 10)
            writer.close()
        server.should_exit = True
        await serving

    asyncio.run(play())
