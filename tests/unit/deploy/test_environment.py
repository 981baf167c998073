"""What Flower's processes are told of the environment, and of where the others are."""

from __future__ import annotations

from fedtide.deploy.flower.processes import environment, gate, supernode


def test_nothing_is_inherited_that_changes_what_flower_does(tmp_path, monkeypatch):
    for name in ("FLWR_INTERNAL_GRPC_CONTROL_API", "SSLKEYLOGFILE", "PYTHONPATH", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "1")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example.org")
    made = environment(tmp_path / "home", "server_app", tmp_path / "flower", tmp_path / "socket")
    door = gate(
        "127.0.0.1", 1, tmp_path / "flower", tmp_path / "ca", tmp_path / "crt", tmp_path / "key", tmp_path / "gate"
    )["env"]
    ours = {"FLWR_HOME", "FLWR_TELEMETRY_ENABLED", "FLWR_DISABLE_UPDATE_CHECK"}
    ours |= {"FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION", "FLWR_SUPEREXEC_TASK_POLL_INTERVAL"}
    assert {name for name in made if name.startswith("FLWR_")} == ours
    for env in (made, door):
        assert not {"FLWR_INTERNAL_GRPC_CONTROL_API", "SSLKEYLOGFILE", "PYTHONPATH", "AWS_SECRET_ACCESS_KEY"} & set(env)
        assert env["HTTPS_PROXY"] == "http://proxy.example.org"
    assert made["FLWR_TELEMETRY_ENABLED"] == "0"
    assert made["NO_PROXY"].endswith("127.0.0.1,localhost")


def test_flower_s_programs_are_started_at_a_socket(tmp_path):
    made = supernode("10.0.0.5:8300", tmp_path / "ca", tmp_path / "key", tmp_path / "w", tmp_path / "home")
    script = (tmp_path / "home" / "bin" / "flower-superexec").read_text(encoding="utf-8")
    for command in (" ".join(made["command"]), script):
        assert f"local.py {tmp_path / 'flower.socket'} 127.0.0.1:9 " in command
