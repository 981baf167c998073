"""What Flower's processes are told of the environment, and what the relay makes of messages."""

from __future__ import annotations

import json
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest

from fedtide.deploy.flower.processes import environment, gate


def test_nothing_is_inherited_that_changes_what_flower_does(tmp_path, monkeypatch):
    for name in ("FLWR_INTERNAL_GRPC_CONTROL_API", "SSLKEYLOGFILE", "PYTHONPATH", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "1")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example.org")
    made = environment(tmp_path / "home", "server_app", tmp_path / "socket")
    door = gate("127.0.0.1", 1, 2, tmp_path / "ca", tmp_path / "crt", tmp_path / "key", tmp_path / "gate")["env"]
    ours = {"FLWR_HOME", "FLWR_TELEMETRY_ENABLED", "FLWR_DISABLE_UPDATE_CHECK"}
    ours |= {"FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION", "FLWR_SUPEREXEC_TASK_POLL_INTERVAL"}
    assert {name for name in made if name.startswith("FLWR_")} == ours
    for env in (made, door):
        assert not {"FLWR_INTERNAL_GRPC_CONTROL_API", "SSLKEYLOGFILE", "PYTHONPATH", "AWS_SECRET_ACCESS_KEY"} & set(env)
        assert env["HTTPS_PROXY"] == "http://proxy.example.org"
    assert made["FLWR_TELEMETRY_ENABLED"] == "0"
    assert made["NO_PROXY"].endswith("127.0.0.1,localhost")


def test_what_replies_to_nothing_or_cannot_be_read_does_not_end_the_relay(monkeypatch):
    pytest.importorskip("flwr")
    from fedtide.deploy.flower import server_app
    from fedtide.deploy.flower.server_app import _relay, unless_malformed

    monkeypatch.setattr(server_app, "Message", lambda *args, **kwargs: None)  # wants a run of Flower

    def fails(*args):
        raise IndexError("list index out of range")

    def answer(to):
        told = {"answer": {"json": "{}", "error": ""}, "tree": {"tree": SimpleNamespace(data=b"numbers")}}
        return SimpleNamespace(metadata=SimpleNamespace(reply_to_message_id=to), has_error=lambda: False, content=told)

    class Grid:
        met = 0

        def get_nodes(self):
            self.met += 1
            if self.met > 2:
                raise EOFError
            return []

        def push_messages(self, messages):
            return ["message"]

        def pull_messages(self, ids):
            return [unless_malformed(fails)("id", {}), answer(""), answer("of another"), answer("message")]

    here, there = Pipe()
    question = {"id": "q", "node": 5, "header": "{}", "seconds": 9.0, "payload": 0}
    here.send_bytes(json.dumps({"kind": "push", "payloads": 1, "questions": [question]}).encode())
    here.send_bytes(b"model")
    with pytest.raises(EOFError):
        _relay(Grid(), there)
    there.close()
    said = []
    while here.poll():
        try:
            said.append(here.recv_bytes())
        except EOFError:
            break
    answers = [json.loads(line) for line in said if line.startswith(b"{")]
    assert [told["question"] for told in answers if told["kind"] == "answer"] == ["q"]
    assert said.count(b"numbers") == 1
