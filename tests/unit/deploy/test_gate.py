"""The gate before Flower: what nodes ask passes, and nothing else reaches what is behind."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("httpx")
pytest.importorskip("uvicorn")
gate: Any = pytest.importorskip("fedtide.deploy.flower.gate")


@pytest.fixture
def asked(monkeypatch):
    """Paths that reach Flower."""
    reached: list[str] = []

    class Client:
        def __init__(self, **options: Any) -> None:
            assert options["trust_env"] is False

        async def post(self, path: str, content: bytes, headers: Any) -> Any:
            reached.append(path)
            return SimpleNamespace(status_code=200, content=b"said", headers=SimpleNamespace(raw=[]))

    monkeypatch.setattr(gate.httpx, "AsyncClient", Client)
    monkeypatch.setattr(gate.ssl, "create_default_context", lambda cafile: None)
    return reached


def ask(path: str, method: str = "POST", query: bytes = b"", body: bytes = b"{}", parts: int = 1) -> int:
    """Ask the gate; the status of its answer."""
    sent: list[dict[str, Any]] = []
    told = [{"type": "http.request", "body": body, "more_body": number + 1 < parts} for number in range(parts)]

    async def receive() -> dict[str, Any]:
        return told.pop(0)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "query_string": query, "headers": []}
    asyncio.run(gate.make_app("https://127.0.0.1:1", "ca.crt")(scope, receive, send))
    return int(sent[0]["status"])


@pytest.mark.parametrize("name", ["pull-messages", "push-object", "activate-node", "send-node-heartbeat"])
def test_what_nodes_ask_passes(asked, name):
    assert ask(f"/v1/fleet/{name}") == 200
    assert asked == [f"/v1/fleet/{name}"]


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
    assert ask("/v1/fleet/push-object", body=b"x" * 2**20, parts=33) == 413
    assert asked == []
