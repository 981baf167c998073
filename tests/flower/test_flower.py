"""A study on a person's own SuperLink with TLS and three SuperNodes has the bits of the simulation."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")
pytest.importorskip("cryptography")

from fedtide.config import read
from fedtide.core.errors import FedtideError
from fedtide.remote.messages import Question
from fedtide.site import flower_app
from fedtide.site.certificates import make_authority
from fedtide.site.deploying import write_app
from fedtide.site.flower_app import GridCarrier, pack, seal, seat_of
from fedtide.site.parity import compare_with_simulation, free_port, replay
from fedtide.site.site import Site
from helpers.hospitals import hospitals

pytestmark = pytest.mark.xdist_group("flower")

BIN = Path(sys.executable).parent
METHODS: dict[str, dict[str, Any]] = {"fedavg": {}, "scaffold": {}, "ifca": {"clusters": 2}}
ROWS = {"berlin": "berlin", "lyon": "lyon,pilot", "oslo": "oslo,pilot"}
WAIT = 600.0
"""Seconds after which something surely happens, on a busy machine too."""


def write_study(folder: Path, **changes: Any) -> Path:
    """Write a study of five clients with all methods that are played."""
    method = [
        {"name": name, "algorithm": name, "cohort": 4, "local": {"lr": 0.1, "batch_size": 8}, **options}
        for name, options in METHODS.items()
    ]
    told = {"rounds": 2, "eval_every": 2, "eval_splits": ["train_clients"], "deploy": {"fewest": 4}} | changes
    return hospitals(folder, method=method, **told)


class Flower:
    """A SuperLink and three SuperNodes, as their owners start them.

    Args:
        folder: of the study, its rows, keys, and all that is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        study = read(write_study(folder))
        for name in METHODS:
            write_app(study, name, "berlin,lyon:2,oslo:2", folder / name, "study.toml")
        port, *own = (free_port() for _ in range(4))
        self.processes: list[subprocess.Popen[bytes]] = []
        keys = folder / "authority"
        keys.mkdir()
        make_authority(keys, f"127.0.0.1:{port}")
        self._start(
            "superlink", "flower-superlink", "--host", "127.0.0.1", "--port", str(port), "--ssl-ca-certfile",
            str(keys / "ca.crt"), "--ssl-certfile", str(keys / "server.crt"), "--ssl-keyfile", str(keys / "server.key"),
        )  # fmt: skip
        self._wait_for(port)
        for (name, files), at in zip(ROWS.items(), own, strict=True):
            data = ",".join(str(folder / f"{file}.csv") for file in files.split(","))
            self._start(
                name, "flower-supernode", "--superlink", f"127.0.0.1:{port}", "--root-certificates",
                str(keys / "ca.crt"), "--port", str(at), "--node-config", f'name="{name}" data="{data}"',
            )  # fmt: skip
        home = self._home("person")
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "mine"\n\n[superlink.mine]\naddress = "127.0.0.1:{port}"\n'
            f'root-certificates = "{keys / "ca.crt"}"\n'
        )

    def run(self, app: str, *words: str) -> str:
        """Run an app to its end, and return what is said meanwhile."""
        command = [BIN / "flwr", "run", self.folder / app, "--stream", *words]
        told = subprocess.run(
            command, cwd=self.folder, env=self._environment("person"), capture_output=True, text=True, timeout=WAIT
        )
        assert told.returncode == 0, told.stdout + told.stderr
        return told.stdout

    def site(self, app: str, rehearsal: bool) -> Path:
        """Return the folder of the site that the SuperLink has made."""
        digest = Site.read(self.folder / app / "fedtide_study").digest
        return self.folder / f"site-{digest}{'-rehearsal' if rehearsal else ''}"

    def _home(self, name: str) -> Path:
        home = self.folder / f"flwr-{name}"
        home.mkdir(exist_ok=True)
        return home

    def _environment(self, name: str) -> dict[str, str]:
        own = {"FLWR_HOME": str(self._home(name)), "FLWR_TELEMETRY_ENABLED": "0", "OMP_NUM_THREADS": "1"}
        return os.environ | own | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}

    def _start(self, name: str, *words: str) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes.append(
                subprocess.Popen(
                    [BIN / words[0], *words[1:]], cwd=self.folder, env=self._environment(name), stdout=log, stderr=log
                )
            )

    def _wait_for(self, port: int) -> None:
        end = time.monotonic() + WAIT
        while True:
            try:
                return socket.create_connection(("127.0.0.1", port), 1.0).close()
            except OSError:
                assert self.processes[0].poll() is None, (self.folder / "superlink.log").read_text()
                assert time.monotonic() < end
                time.sleep(0.2)

    def close(self) -> None:
        """End the SuperNodes, and then the SuperLink."""
        for process in reversed(self.processes):
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture(scope="module")
def flower(tmp_path_factory) -> Iterator[Flower]:
    made = Flower(tmp_path_factory.mktemp("flower"))
    yield made
    made.close()


@pytest.mark.deploy
@pytest.mark.slow
@pytest.mark.parametrize("name", ["scaffold", "ifca"])
def test_a_rehearsal_is_the_simulation(flower, name):
    said = flower.run(name, "--run-config", "rehearsal=true")
    assert "round 2 of 2: accuracy" in said
    assert list(compare_with_simulation(Site.read(flower.site(name, True)))) == []


@pytest.mark.deploy
@pytest.mark.slow
def test_own_rows_are_played_as_in_a_simulation(flower):
    said = flower.run("fedavg")
    assert "round 2 of 2: accuracy" in said
    data = [flower.folder / f"{file}.csv" for files in ROWS.values() for file in files.split(",")]
    again = replay(flower.site("fedavg", False) / "run", data)
    assert (again.rounds, again.equal, again.differs) == (2, True, None)


# -- without Flower's processes ----------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A folder with the app of a study, and its package."""
    monkeypatch.chdir(tmp_path)
    write_app(read(write_study(tmp_path)), "fedavg", "berlin,lyon:2,oslo:2", tmp_path / "app", "study.toml")
    return tmp_path / "app" / "fedtide_study"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "--node-config: name: found none, allowed: one of the roster"),
        ({"name": 1}, "--node-config: name: found 1, allowed: a text"),
        ({"name": "paris"}, "--node-config: name: found 'paris', allowed: berlin, lyon, oslo"),
        ({"name": "berlin", "rows": "a.csv"}, "--node-config: unknown key 'rows'|--node-config: found 'rows'"),
        ({"name": "berlin"}, "--node-config: data: found none, allowed: a file of rows for each client of berlin"),
        ({"name": "berlin", "data": "gone.csv"}, "gone.csv: no such file"),
        ({"name": "lyon", "data": "lyon.csv"}, "--data: found '1 files', allowed: 2"),
        ({"name": "berlin", "data": "berlin.csv", "home": "berlin.csv"}, "berlin.csv"),
    ],
)
def test_what_an_owner_mistypes_is_named(here, config, said):
    with pytest.raises(FedtideError, match=said):
        seat_of(here, tuple(config.items()), False)


def test_a_node_has_the_clients_of_its_files(here):
    name, node = seat_of(here, (("name", "lyon"), ("data", "lyon.csv,pilot.csv")), False)
    assert (name, node.clients) == ("lyon", frozenset({1, 2}))


def message(content: Any, node: int, kind: str, ttl: float) -> Any:
    """Return a message; Flower makes none outside of a run."""
    return SimpleNamespace(content=content, node=node, kind=kind, ttl=ttl)


class Grid:
    """A grid whose SuperNodes say what a test wants."""

    def __init__(self, names: dict[int, str]) -> None:
        self.names, self.sent, self.replies = names, [], []

    def get_node_ids(self) -> list[int]:
        return list(self.names)

    def push_messages(self, messages: list[Any]) -> list[str]:
        made = [f"m{len(self.sent) + place}" for place in range(len(messages))]
        self.sent += messages
        for name, each in zip(made, messages, strict=True):
            if each.kind == "query.who":
                self.reply(name, {"name": self.names[each.node]})
        return made

    def reply(self, message: str, header: dict[str, Any], payload: bytes = b"") -> None:
        self._reply(message, lambda: False, content=pack(header, seal(payload)))

    def fail(self, message: str) -> None:
        self._reply(message, lambda: True, error=SimpleNamespace(code=5, reason="node\nunavailable"))

    def _reply(self, message: str, has_error: Any, **more: Any) -> None:
        about = SimpleNamespace(reply_to_message_id=message)
        self.replies.append(SimpleNamespace(metadata=about, has_error=has_error, **more))

    def pull_messages(self, messages: list[str]) -> list[Any]:
        came = [reply for reply in self.replies if reply.metadata.reply_to_message_id in messages]
        self.replies = [reply for reply in self.replies if reply not in came]
        return came


@pytest.fixture
def carrying(monkeypatch) -> Iterator[tuple[Grid, GridCarrier, list[str], list[float]]]:
    """A grid of three SuperNodes, two of which say that they are berlin; its carrier, what that says, and the time."""
    now, said = [1000.0], list[str]()
    monkeypatch.setattr(flower_app.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(flower_app, "Message", message)
    grid = Grid({7: "berlin", 8: "lyon", 9: "berlin"})
    carrier = GridCarrier(grid, said.append)  # type: ignore[arg-type]
    assert carrier.present() == {"berlin", "lyon"}
    return grid, carrier, said, now


def question(name: str, node: str = "berlin") -> Question:
    return Question(name, node, {"kind": "ask"}, b"tree", 60.0, 100)


def test_the_first_of_a_name_is_asked_and_the_second_is_named(carrying):
    grid, carrier, said, now = carrying
    assert "SuperNode 9 cannot take part: says that it is berlin, as SuperNode 7 does" in said
    carrier.push([question("a"), question("b", "lyon"), question("c", "oslo")])
    assert [(each.node, each.ttl) for each in grid.sent[3:]] == [(7, 60.0), (8, 60.0)]
    grid.reply("m3", {"clients": {"0": "answered"}}, b"answer")
    grid.reply("m4", {"clients": {}}, b"x" * 101)
    now[0] += 1
    one, other = carrier.pull()
    assert (one.id, one.header, one.payload, one.error) == ("a", {"clients": {"0": "answered"}}, b"answer", "")
    assert (other.id, other.payload, other.error) == ("b", b"", "sent more than the 100 bytes that an answer may have")
    now[0] += 60
    (late,) = carrier.pull()
    assert (late.id, late.error) == ("c", "no answer within 60 s")


def test_a_question_that_failed_is_sent_again_when_its_node_is_there(carrying):
    grid, carrier, _, now = carrying
    carrier.push([question("a")])
    del grid.names[7]
    grid.fail("m3")
    now[0] += 5
    assert carrier.pull() == []
    assert carrier.present() == {"lyon"}
    grid.names[7] = "berlin"
    for name in ("m5", "m6"):
        for _ in range(3):
            now[0] += 2
            assert carrier.pull() == []
        grid.fail(name)
    now[0] += 1
    (gone,) = carrier.pull()
    assert gone.error == "Flower's error 5: node unavailable"


def test_what_is_no_answer_is_none(carrying):
    grid, carrier, _, now = carrying
    carrier.push([question("a")])
    came = []
    for name in ("m3", "m4", "m5"):
        about = SimpleNamespace(reply_to_message_id=name)
        grid.replies.append(SimpleNamespace(metadata=about, has_error=lambda: False, content={"header": 3}))
        for _ in range(3):
            now[0] += 2
            came += carrier.pull()
    assert [each.error for each in came] == ["sent something else than an answer (TypeError)"]
