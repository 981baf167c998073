"""How long a message to a node and back takes, what a node holds at rest, and how soon its first answer comes.

python bench/messages.py [--trips 20] [--out bench/results.jsonl]

Everything runs on this machine, with TLS and admitted keys. A small question goes to one node and back, by our carrier,
and by Flower's if `make bench-peers` has installed it. A SuperNode of Flower looks for messages every 3 s and starts
Python anew for each; our node has a stream open and keeps a worker. Then a site is served to one node that joins it. It
needs the extra `deploy`.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from fedtide.deploy import certificates
from fedtide.deploy.rehearse import free_port
from helpers.federation import Federation, until
from helpers.processes import children, offspring, used
from helpers.serving import Serving
from machine import RESULTS, machine, now, told
from peer import ENVIRONMENTS

BIN = ENVIRONMENTS / "flower" / "bin"
WAIT = 400.0
PYPROJECT = """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "bare-app"
version = "1.0.0"
description = "round trips"
license = { file = "LICENSE" }
dependencies = ["flwr>=1.41,<1.43"]
[tool.hatch.build.targets.wheel]
packages = ["."]
[tool.flwr.app]
publisher = "bench"
fab-format-version = 1
flwr-version-target = "1.41.0"
[tool.flwr.app.components]
serverapp = "bare_app.server:app"
clientapp = "bare_app.client:app"
[tool.flwr.app.config]
"""
CLIENT = """from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
app = ClientApp()
@app.train("ask")
def ask(message, context):
    data = message.content["tree"]["tree"].data
    tree = ArrayRecord({"tree": Array("uint8", (len(data),), "x", data)})
    return Message(RecordDict({"answer": ConfigRecord({"json": "{}"}), "tree": tree}), reply_to=message)
"""
SERVER = """import json, time
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp
app = ServerApp()
@app.main()
def main(grid, context):
    while not (nodes := list(grid.get_nodes())):
        time.sleep(0.5)
    took = []
    for number in range(%d):
        data = b"tree%%d" %% number
        tree = ArrayRecord({"tree": Array("uint8", (len(data),), "x", data)})
        content = RecordDict({"question": ConfigRecord({"json": "{}"}), "tree": tree})
        began = time.monotonic()
        ids = list(grid.push_messages([Message(content, nodes[0].node_id, "train.ask", ttl=300.0)]))
        while not (got := list(grid.pull_messages(ids))):
            time.sleep(0.1)
        assert not got[0].has_error(), got[0].error
        took.append(time.monotonic() - began)
    open(%r, "w").write(json.dumps(took))
"""


def bare(root: Path, trips: int) -> list[float]:
    """Return the seconds of round trips with Flower alone, as its documentation deploys it."""
    home, done, port = root / "flower", root / "took.json", free_port()
    app = root / "app" / "bare_app"
    for folder in (home, root / "a", app):
        folder.mkdir(parents=True)
    for file, text in (
        (app.parent / "pyproject.toml", PYPROJECT),
        (app.parent / "LICENSE", "Apache-2.0\n"),
        (app / "__init__.py", ""),
        (app / "client.py", CLIENT),
        (app / "server.py", SERVER % (trips + 1, str(done))),
    ):
        file.write_text(text, encoding="utf-8")
    certificates.make_authority(root / "a", f"127.0.0.1:{port}")
    certificates.make_node_key(root / "key", root / "key.pub", "berlin")
    lines = ["[superlink]", 'default = "x"', "[superlink.x]", f'address = "127.0.0.1:{port}"']
    lines += [f'root-certificates = "{root}/a/ca.crt"', ""]
    (home / "config.toml").write_text("\n".join(lines), encoding="utf-8")
    env = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ} | {
        "PATH": f"{BIN}:/usr/bin:/bin",
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25",  # a second if nothing is said
        "OMP_NUM_THREADS": "1",
    }
    with ExitStack() as stack:
        log = stack.enter_context(open(root / "log", "wb"))
        stack.enter_context(
            _running(
                env, log, "flower-superlink", "--ssl-ca-certfile", f"{root}/a/ca.crt", "--ssl-certfile",
                f"{root}/a/server.crt", "--ssl-keyfile", f"{root}/a/server.key", "--enable-supernode-auth",
                "--disable-runtime-dependency-installation", "--host", "127.0.0.1", "--port", str(port), "--database",
                f"{root}/db",
            )
        )  # fmt: skip
        until(lambda: _open(port), WAIT)
        _flwr(env, log, "supernode", "register", f"{root}/key.pub", "x")
        stack.enter_context(
            _running(
                env, log, "flower-supernode", "--root-certificates", f"{root}/a/ca.crt", "--superlink",
                f"127.0.0.1:{port}", "--host", "127.0.0.1", "--port", str(free_port()), "--auth-supernode-private-key",
                f"{root}/key",
            )
        )  # fmt: skip
        _flwr(env, log, "run", str(app.parent), "x")
        until(done.exists, 60.0 * (trips + 10))
        time.sleep(0.5)
        return list(map(float, json.loads(done.read_text())))[1:]


def _open(port: int) -> bool:
    with socket.socket() as line:
        return line.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def _running(env: Mapping[str, str], log: object, *words: str) -> Iterator[None]:
    process = subprocess.Popen([str(BIN / words[0]), *words[1:]], env=dict(env), stdout=log, stderr=log)  # type: ignore[call-overload]
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)


def _flwr(env: Mapping[str, str], log: object, *words: str) -> None:
    subprocess.run([str(BIN / "flwr"), *words], env=dict(env), check=True, stdout=log, stderr=log)  # type: ignore[call-overload]


def ours(root: Path, trips: int) -> list[float]:
    """Return the seconds of round trips by our carrier, to a worker that echoes."""
    made, took = Federation(root), []
    try:
        made.start("berlin")
        until(lambda: made.carrier.present() == {"berlin"}, WAIT)
        for number in range(trips + 1):
            began = time.monotonic()
            found = made.ask("berlin", {}, b"tree%d" % number)
            assert not found.error, found.error
            took.append(time.monotonic() - began)
    finally:
        made.close()
    return took[1:]


def node(root: Path) -> dict[str, float]:
    """Serve a site to one node; return when its first answer came, and what both hold when all is over but them."""
    root.mkdir()
    serving = Serving(root, "berlin:3", "FedAvg", {"deadline": "5m", "fewest": 3}, rounds=3, eval_every=3)
    try:
        server = serving.serve()
        server.wait_for("nodes are let in")
        began = time.monotonic()
        there = serving.join("berlin", ("berlin", "lyon", "oslo"))
        server.wait_for("berlin is connected")
        connected = time.monotonic() - began
        server.wait_for("round 1 of 3")
        first = time.monotonic() - began
        server.wait_for("round 2 of 3")
        held = {"node": _held(there.process.pid), "server": _held(server.process.pid)}
        return {"connected s": connected, "first answer s": first} | {f"{name} MB": mb for name, mb in held.items()}
    finally:
        serving.close()


def _held(number: int) -> float:
    """Return the resident megabytes of a process and those that it started, pages they share counted in each."""
    there = {number, *offspring(number)}
    for each in sorted(there):
        line = Path(f"/proc/{each}/cmdline").read_bytes().replace(b"\0", b" ").decode()[-70:]
        print(f"  {used(each):6.0f} MB, {len(children(each))} started: {line}")
    return sum(used(each) for each in there)


def main() -> None:
    """Measure all of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trips", type=int, default=20)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    line: dict[str, object] = {"bench": "messages", "date": now(), "trips": given.trips}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for name, measure in (("flower", bare), ("ours", ours)):
            if name == "flower" and not (BIN / "flower-superlink").exists():
                continue
            (root := Path(folder) / name).mkdir()
            took = measure(root, given.trips)
            line |= {f"{name} s": round(statistics.median(took), 4), f"{name} most s": round(max(took), 4)}
        line |= {name: round(value, 1) for name, value in node(Path(folder) / "site").items()}
    told("A message to a node", line | machine(), given.out)


if __name__ == "__main__":
    main()
