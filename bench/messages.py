"""What a message to a node costs beside Flower's, what a server and a node hold at rest, how soon a first answer comes.

python bench/messages.py [--trips 20] [--flower .venv/flower/bin] [--out bench/results.jsonl]

Everything runs on this machine, with TLS and registered keys. Ours, bare Flower and our app for Flower pass the same
payload to a node and back; what they hold is looked at after the small ones. Flower is deployed as its documentation
says, in an environment of its own (`make flower` makes one). Flower
starts Python anew for each question and looks for messages every few seconds; ours keeps a stream and a worker.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from fedtide.remote.grpc.grpc_carrier import GrpcCarrier
from fedtide.remote.messages import Question
from fedtide.site import certificates
from fedtide.site.parity import free_port
from helpers.federation import RUN, Federation, until
from helpers.processes import offspring, used
from helpers.serving import Serving
from machine import machine, now, options, told

WAIT = 400.0
SIZES = {"1 kB": 1_000, "250 kB": 250_000, "20 MB": 20_000_000}
LIGHT = Path(__file__).with_name("light_worker.py")
MANY, STREAMS = 100, 1000
PYPROJECT = """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "bare-app"
version = "1.0.0"
description = "round trips"
license = { file = "LICENSE" }
dependencies = ["flwr>=1.41"]
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
SERVER = """import json, os, time
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp
app = ServerApp()
@app.main()
def main(grid, context):
    while not (nodes := list(grid.get_nodes())):
        time.sleep(0.5)
    took = {}
    for name, size in %r.items():
        took[name] = []
        for number in range(%d):
            data = os.urandom(size)
            tree = ArrayRecord({"tree": Array("uint8", (len(data),), "x", data)})
            content = RecordDict({"question": ConfigRecord({"json": "{}"}), "tree": tree})
            began = time.monotonic()
            ids = list(grid.push_messages([Message(content, nodes[0].node_id, "train.ask", ttl=300.0)]))
            while not (got := list(grid.pull_messages(ids))):
                time.sleep(0.1)
            assert not got[0].has_error(), got[0].error
            took[name].append(time.monotonic() - began)
        if size == 1000:  # what both ends hold at rest is looked at now
            open(%r, "w").close()
            time.sleep(8)
    open(%r, "w").write(json.dumps(took))
"""
ADAPTED = """from flwr.app import Message
from flwr.clientapp import ClientApp
from fedtide.site.flower_app import ASK, WHO, pack, seal, unpack
app = ClientApp()
@app.query("who")
def who(message, context):
    return Message(pack({"name": "berlin"}, seal(b"")), reply_to=message)
@app.train("ask")
def ask(message, context):
    return Message(pack({}, seal(unpack(message.content)[1])), reply_to=message)
"""
ADAPTER = """import json, os, time
from flwr.serverapp import ServerApp
from fedtide.remote.messages import Question
from fedtide.site.flower_app import GridCarrier
app = ServerApp()
@app.main()
def main(grid, context):
    carrier = GridCarrier(grid, print)
    while "berlin" not in carrier.present():
        time.sleep(0.1)
    took = {}
    for name, size in %r.items():
        took[name] = []
        for number in range(%d):
            data, began = os.urandom(size), time.monotonic()
            carrier.push([Question(f"{name}.{number}", "berlin", {}, data, 300.0, 10**9)])
            while not (found := carrier.pull()):
                time.sleep(0.05)
            assert found[0].payload == data, found[0].error
            took[name].append(time.monotonic() - began)
        if size == 1000:
            open(%r, "w").close()
            time.sleep(8)
    open(%r, "w").write(json.dumps(took))
"""


def flower(
    root: Path, trips: int, bins: Path, client: str, server: str
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return the seconds of round trips of an app of Flower, deployed by the book, and what both ends hold."""
    rest = root / "rest"
    home, done, port = root / "flower", root / "took.json", free_port()
    app = root / "app" / "bare_app"
    for folder in (home, root / "a", app):
        folder.mkdir(parents=True)
    for file, text in (
        (app.parent / "pyproject.toml", PYPROJECT),
        (app.parent / "LICENSE", "Apache-2.0\n"),
        (app / "__init__.py", ""),
        (app / "client.py", client),
        (app / "server.py", server % (SIZES, trips + 1, str(rest), str(done))),
    ):
        file.write_text(text, encoding="utf-8")
    certificates.make_authority(root / "a", f"127.0.0.1:{port}")
    certificates.make_node_key(root / "key", root / "key.pub", "berlin")
    lines = ["[superlink]", 'default = "x"', "[superlink.x]", f'address = "127.0.0.1:{port}"']
    lines += [f'root-certificates = "{root}/a/ca.crt"', ""]
    (home / "config.toml").write_text("\n".join(lines), encoding="utf-8")
    env = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ} | {
        "PATH": f"{bins.absolute()}:/usr/bin:/bin",
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "OMP_NUM_THREADS": "1",
    }
    with ExitStack() as stack:
        log = stack.enter_context(open(root / "log", "wb"))
        superlink = stack.enter_context(
            _running(
                env, log, "flower-superlink", "--ssl-ca-certfile", f"{root}/a/ca.crt", "--ssl-certfile",
                f"{root}/a/server.crt", "--ssl-keyfile", f"{root}/a/server.key", "--enable-supernode-auth",
                "--disable-runtime-dependency-installation", "--host", "127.0.0.1", "--port", str(port), "--database",
                f"{root}/db",
            )
        )  # fmt: skip
        until(lambda: _flwr(env, log, "supernode", "register", f"{root}/key.pub", "x") == 0, WAIT)
        supernode = stack.enter_context(
            _running(
                env, log, "flower-supernode", "--root-certificates", f"{root}/a/ca.crt", "--superlink",
                f"127.0.0.1:{port}", "--host", "127.0.0.1", "--port", str(free_port()), "--auth-supernode-private-key",
                f"{root}/key",
            )
        )  # fmt: skip
        assert _flwr(env, log, "run", str(app.parent), "x") == 0
        until(rest.exists, 60.0 * (trips + 10))
        time.sleep(4)
        held = {"server": _held(superlink.pid), "node": _held(supernode.pid)}
        until(done.exists, 60.0 * (len(SIZES) * trips + 10))
        time.sleep(1)
        return {name: took[1:] for name, took in json.loads(done.read_text()).items()}, held


@contextmanager
def _running(env: Mapping[str, str], log: Any, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([f"{env['PATH'].partition(':')[0]}/{words[0]}", *words[1:]], env=dict(env), stdout=log,
                               stderr=log)  # fmt: skip
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def _flwr(env: Mapping[str, str], log: Any, *words: str) -> int:
    command = [f"{env['PATH'].partition(':')[0]}/flwr", *words]
    return subprocess.run(command, env=dict(env), check=False, stdout=log, stderr=log).returncode


def ours(root: Path, trips: int) -> dict[str, list[float]]:
    """Return the seconds of round trips to a worker that echoes."""
    made, took = Federation(root), dict[str, list[float]]()
    try:
        made.start("berlin")
        until(lambda: made.carrier.present() == {"berlin"}, WAIT)
        for name, size in SIZES.items():
            took[name] = []
            for _ in range(trips + 1):
                data, began = os.urandom(size), time.monotonic()
                made.push("berlin", {}, data)
                while not (found := made.carrier.pull()):
                    time.sleep(0.001)
                assert found[0].payload == data, found[0].error
                took[name].append(time.monotonic() - began)
    finally:
        made.close()
    return {name: seconds[1:] for name, seconds in took.items()}


def site(root: Path) -> dict[str, float]:
    """Serve a site to one node that waits for it; return when its first answer came, and what both hold at rest."""
    root.mkdir()
    serving = Serving(
        root, "berlin:3", "FedAvg", {"deadline": "5m", "fewest": 3, "every": "10s"}, rounds=3, eval_every=3
    )
    try:
        there = serving.join("berlin", ("berlin", "lyon", "oslo"))
        there.wait_for("cannot be reached now")
        time.sleep(8)
        began = time.monotonic()
        server = serving.serve()
        server.wait_for("nodes are let in")
        served = time.monotonic()
        server.wait_for("round 1 of 3")
        first = time.monotonic()
        time.sleep(3)
        held = {"ours, server MB": _held(server.process.pid), "ours, node MB": _held(there.process.pid)}
        return {"serve to listening s": served - began, "listening to first answer s": first - served} | held
    finally:
        serving.close()


def hundred(root: Path) -> dict[str, float]:
    """Start many nodes on this machine, whose workers are light; return how long they take, and what one holds."""
    root.mkdir()
    made = Federation(root)
    try:
        began = time.monotonic()
        for number in range(MANY):
            made.start(f"n{number}", worker=LIGHT)
        until(lambda: len(made.carrier.present()) == MANY, WAIT)
        there = time.monotonic() - began
        payload = os.urandom(SIZES["250 kB"])
        asked = _asked(made.carrier, [f"n{number}" for number in range(MANY)], payload)
        largest = max(used(process.pid) for process in made.nodes.values())
        return {f"{MANY} nodes, all there s": there, f"{MANY} nodes, 250 kB there and back s": asked,
                "a node without its worker MB": largest}  # fmt: skip
    finally:
        made.close()


def streams(root: Path) -> dict[str, float]:
    """Hold many streams of one process; return how long they take to come, and what they cost the server."""
    root.mkdir()
    made = Federation(root)
    made.carrier.close()
    made.carrier = GrpcCarrier("127.0.0.1", 0, run=RUN, authority=made.authority, nodes=STREAMS)
    made.port = made.carrier.port
    try:
        names = [f"n{number}" for number in range(STREAMS)]
        for name in names:
            made.line(name)
            made.keys[name] = certificates.read_public_key(root / name / "key.pub")[0]
        made.admit()
        before, began = used(os.getpid()), time.monotonic()
        with subprocess.Popen([sys.executable, str(LIGHT), str(root), str(made.port), *names]) as clients:
            until(lambda: len(made.carrier.present()) == STREAMS, WAIT)
            there = time.monotonic() - began
            held = used(os.getpid()) - before
            asked = _asked(made.carrier, names, os.urandom(SIZES["1 kB"]))
            clients.kill()
        return {f"{STREAMS} streams, all there s": there, f"{STREAMS} streams, server MB": held,
                f"{STREAMS} streams, 1 kB there and back s": asked}  # fmt: skip
    finally:
        made.close()


def _asked(carrier: GrpcCarrier, names: Sequence[str], payload: bytes) -> float:
    began, left = time.monotonic(), len(names)
    carrier.push([Question(f"q.{name}", name, {}, payload, WAIT, 10**9) for name in names])
    while left:
        for response in carrier.pull():
            assert not response.error, response.error
            left -= 1
        time.sleep(0.002)
    return time.monotonic() - began


def _held(number: int) -> float:
    """Return the resident megabytes of a process and those that it started, pages they share counted in each."""
    there = {number, *offspring(number)}
    for each in sorted(there):
        line = Path(f"/proc/{each}/cmdline").read_bytes().replace(b"\0", b" ").decode()[-70:]
        print(f"  {used(each):6.0f} MB: {line}", flush=True)
    return sum(used(each) for each in there)


def main() -> None:
    """Measure all of it."""
    parser = options(__doc__)
    parser.add_argument("--trips", type=int, default=20)
    parser.add_argument("--flower", type=Path, default=Path(".venv/flower/bin"))
    given = parser.parse_args()
    line: dict[str, object] = {"bench": "messages", "date": now(), "trips": given.trips}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        found: dict[str, float] = {}
        (root := Path(folder) / "ours").mkdir()
        took = {"ours": ours(root, given.trips)}
        for name, measure in (("site", site), ("hundred", hundred), ("streams", streams)):
            found |= measure(Path(folder) / name)
        if (given.flower / "flwr").exists():
            for who, client, server in (("bare Flower", CLIENT, SERVER), ("the app for Flower", ADAPTED, ADAPTER)):
                (root := Path(folder) / who.replace(" ", "-")).mkdir()
                took[who], held = flower(root, given.trips, given.flower, client, server)
                found |= {f"{who}, {name} MB": mb for name, mb in held.items()}
        for who, times in took.items():
            line |= {f"{who}, {size} s": round(statistics.median(each), 4) for size, each in times.items()}
            line |= {f"{who}, {size} most s": round(max(each), 4) for size, each in times.items()}
        line |= {name: round(value, 2) for name, value in found.items()}
    told("A message to a node", line | machine(), given.out)


if __name__ == "__main__":
    main()
