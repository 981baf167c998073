"""A server while others write, its status for a person and for programs, and logs."""

import io
import json
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("cryptography")

from fedtide.algorithms.feddrift import cross_losses
from fedtide.core.errors import FedtideError
from fedtide.core.record import ASKS
from fedtide.runs.runner import Progress
from fedtide.site.certificates import fingerprint, make_node_key, read_public_key
from fedtide.site.machine import Health, Log
from fedtide.site.serve import Reporter, RosterFile, hold, play_rounds, repeat, survive_failures
from fedtide.site.site import Roster, Site, read_roster, write_roster
from fedtide.site.status import HEADER, Status, describe_status, list_nodes, list_reasons
from helpers.carriers import host
from helpers.near_sites import site_of

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)


@pytest.fixture
def log() -> Log:
    return Log(file=io.StringIO())


def reporter_of(folder: Path, log: Log, present: Any = frozenset(), **settings: Any) -> Reporter:
    """The reports of a server of one node."""
    experiment, deploy = SimpleNamespace(rounds=3), SimpleNamespace(zone="Europe/Berlin", wait="5m")
    site: Any = SimpleNamespace(
        experiment=experiment, roster=Roster.of("berlin"), deploy=deploy, root=folder, record=folder,
        status=folder / "status.json",
    )  # fmt: skip
    carrier: Any = SimpleNamespace(present=lambda: present, knocked=dict, rows_apart=lambda: (0, 0))
    return Reporter(site, log, carrier, **settings)


def test_a_roster_that_is_being_edited_stays_as_it_was(tmp_path, log):
    path = tmp_path / "roster.toml"
    write_roster(tmp_path, Roster.of("berlin,oslo:2"))
    latest = RosterFile(tmp_path, read_roster(tmp_path), log)
    whole = path.read_text(encoding="utf-8")
    for wrong in (whole[: len(whole) // 2 + 3], "node = 3", "", whole.replace("oslo", "paris")):
        path.write_text(wrong, encoding="utf-8")
        log.file.truncate(log.file.seek(0))
        assert [latest.read().clients for _ in range(3)] == [3, 3, 3]
        (line,) = log.file.getvalue().splitlines()
        assert "roster.toml" in line
        assert "kept as it was" in line
    path.unlink()
    assert latest.read().clients == 3
    write_roster(tmp_path, Roster.of("berlin,oslo:2,paris"))
    assert latest.read().clients == 4


def test_work_that_fails_is_said_once_and_ends_nothing(tmp_path, log):
    watch = reporter_of(tmp_path / "status", log)
    watch.site.status.parent.mkdir()
    with repeat(watch.write, 0.05, log):
        watch.site.status.parent.rename(tmp_path / "away")
        time.sleep(0.2)
        (tmp_path / "away").rename(watch.site.status.parent)
    (line,) = log.file.getvalue().splitlines()
    assert "status: was moved or removed while it is served" in line
    assert "it is tried again" in line
    assert Status.read(watch.site.status) is not None


def test_a_server_says_for_whom_it_waits(tmp_path, log):
    watch = reporter_of(tmp_path, log)
    for _ in range(2):
        watch.wait_for(1, 2)
    first, second = log.file.getvalue().splitlines()
    assert "waiting for 1 more client before round 3 begins" in first
    assert "berlin: not admitted: fedtide admit" in second
    assert watch.look().phase == "waiting for 1 more client"


def test_a_server_says_how_many_nodes_have_other_rows_and_never_which(tmp_path, log):
    watch, counts = reporter_of(tmp_path, log), [(0, 0), (1, 0), (1, 0), (2, 1)]
    watch.carrier.rows_apart = lambda: counts.pop(0)
    found = [watch.look() for _ in range(len(counts))]
    assert [(status.disagreeing, status.warned) for status in found] == [(0, 0), (1, 0), (1, 0), (2, 1)]
    said = [line.partition("rows: ")[2] for line in log.file.getvalue().splitlines()]
    assert said == [
        "1 node cannot take part: its rows do not agree with the study; its owner knows why",
        "2 nodes cannot take part: their rows do not agree with the study; their owners know why",
        "1 node found rows far from the study's; its owner knows in what",
    ]


def test_a_node_that_was_admitted_and_is_lost_is_asked_to_join_again(tmp_path, log):
    """Its key came into the roster after the server began."""
    write_roster(tmp_path, Roster.of("berlin"))
    latest = RosterFile(tmp_path, read_roster(tmp_path), log)
    watch = reporter_of(tmp_path, log, latest=latest)
    watch.wait_for(1, 0)
    assert "berlin: not admitted" in log.file.getvalue()
    make_node_key(tmp_path / "berlin.key", tmp_path / "berlin.pub", "berlin")
    admitted = Roster.of("berlin").node[0].model_copy(update={"key": read_public_key(tmp_path / "berlin.pub")[0]})
    write_roster(tmp_path, Roster(node=(admitted,)))
    assert "berlin: not connected: fedtide join berlin.ticket" in watch.look().waiting[0]


def test_a_key_that_knocked_before_it_was_admitted_is_not_said_to_be_another(tmp_path, log):
    """Until the server reads the roster again, and the node calls again, the key is among those that knocked."""
    for name in ("berlin", "other"):
        make_node_key(tmp_path / f"{name}.key", tmp_path / f"{name}.pub", "berlin")
    own, other = (read_public_key(tmp_path / f"{name}.pub")[0] for name in ("berlin", "other"))
    write_roster(tmp_path, Roster.of("berlin"))
    watch = reporter_of(tmp_path, log, latest=RosterFile(tmp_path, read_roster(tmp_path), log), missing=1)
    watch.carrier.knocked = lambda: {"berlin": own}
    assert f"it came with the key {fingerprint(own)}, which you compare with its owner" in watch.look().waiting[0]
    admitted = Roster.of("berlin").node[0].model_copy(update={"key": own})
    write_roster(tmp_path, Roster(node=(admitted,)))
    assert watch.look().waiting == ("berlin: admitted, and let in when it calls again, within seconds",)
    watch.carrier.knocked = lambda: {"berlin": other}
    assert f"another key than the admitted one, {fingerprint(other)}" in watch.look().waiting[0]


def test_a_server_ends_if_clients_do_not_come_within_the_wait(tmp_path, log, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("fedtide.site.serve.time", SimpleNamespace(monotonic=lambda: now[0]))
    watch = reporter_of(tmp_path, log)
    for missing in (1, 0, 1):  # those that came in between begin the wait anew
        watch.wait_for(missing, 0)
        now[0] += 299
    now[0] += 2
    with pytest.raises(FedtideError, match=r"round 1: 1 more clients did not come within 5m.*\(berlin\)"):
        watch.wait_for(1, 0)


def play_round(answered: int, error: Exception, number: int = 7) -> tuple[Any, str]:
    def round(state: Any, fleet: Any, rng: Any) -> Any:
        raise error

    log = Log(file=io.StringIO())
    ask = SimpleNamespace(ask=SimpleNamespace(question="train"), answered=torch.arange(answered))
    fleet: Any = SimpleNamespace(queries=[ask], moment=SimpleNamespace(round=number))
    survive = survive_failures(replace(host("fedavg").algorithm, round=round), fleet, log)
    return survive.round("state", fleet, None), log.file.getvalue()


def test_answers_that_end_a_round_leave_the_state_as_it_was_and_other_errors_are_not_hidden():
    error = KeyError("control")
    result, said = play_round(2, error)
    assert result == ("state", {})
    assert "round 7 is not counted: answers to 'train' end in KeyError: 'control'" in said
    with pytest.raises(KeyError):
        play_round(0, error, 0)
    with pytest.raises(FedtideError, match="the disk is full"):
        play_round(2, FedtideError("the disk is full"))


def test_what_was_answered_before_ends_the_server_in_one_line():
    """A lie of an earlier round has become part of the state, and no round after it can be played."""
    with pytest.raises(FedtideError, match="round 7: earlier answers end in ValueError: pvals < 0; allowed"):
        play_round(0, ValueError("pvals < 0"))


def test_a_cluster_that_too_few_choose_is_told_once_a_change(tmp_path, log, monkeypatch):
    rounds = [{"cluster 0": (2, 4)}, {"cluster 0": (2, 4)}, {"cluster 0": (3, 4)}, {}, {"cluster 0": (3, 4)}]
    fleet: Any = SimpleNamespace(record=SimpleNamespace())

    class Played:
        def __init__(self, *unused: Any) -> None: ...

        def play(self, look: Any, judge_of: Any) -> Any:
            for number, few in enumerate(rounds):
                fleet.record.asks = [{"question": "train", "nodes": {}, **({"few": few} if few else {})}]
                look()
                yield Progress(number + 1, len(rounds), None, 1.0)

    monkeypatch.setattr("fedtide.site.serve.Run", Played)
    site = site_of(tmp_path, "berlin,lyon:2", "SCAFFOLD")
    list(play_rounds(site, fleet, None, log, SimpleNamespace(read=lambda: site.roster)))
    said = [line.partition(" ")[2] for line in log.file.getvalue().splitlines() if "masked" in line]
    counts = ("2 clients", "3 clients", "3 clients")
    assert said == [f"cluster 0: {many} chose it, 4 are needed: its sum stayed masked" for many in counts]


# -- status ------------------------------------------------------------------------------------------------------------


def test_numbers_of_samples_that_are_none_leave_distances_finite():
    rows = {"bad": torch.full((2, 2), 9e15, dtype=torch.float64), "rows": torch.tensor([1e-300, 5.0]).double()}
    reply: Any = SimpleNamespace(rows=rows, total=None)
    losses, known = cross_losses(reply, torch.eye(2) > 0, torch.arange(2))
    assert known.tolist() == [1]
    assert losses.isfinite().all()


def status(**changes) -> Status:
    values = {"at": NOW, "round": 2, "rounds": 4, "phase": "waiting for answers", "present": ["berlin"]}
    return Status(**values | changes)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Site:
    return site_of(tmp_path_factory.mktemp("hospitals"), "berlin,lyon:2", "SCAFFOLD")


@pytest.mark.parametrize("content", [b"", b"\xff", b"[]", b'{"at": 5}', b"[" * 100_000, b'{"phase": "\\u001b[2J"}'])
def test_a_status_is_read_as_it_was_written_and_a_damaged_one_is_refused(tmp_path, content):
    path = tmp_path / "status.json"
    assert Status.read(path) is None
    status().write(path)
    assert Status.read(path) == status()
    path.write_bytes(content)
    with pytest.raises(FedtideError, match=r"status\.json: ") as error:
        Status.read(path)
    assert "\n" not in str(error.value)


def test_a_site_says_how_it_is(site):
    assert "never served" in list(describe_status(site, NOW))[-1]
    status().write(site.status)
    site.record.mkdir(parents=True)
    nodes = {"lyon": {"clients": {"1": "answered", "2": "refused: weight 1e30"}, "down": 2000, "up": 1000}}
    line = {"round": 0, "present": ["lyon"], "asks": [{"question": "train", "reveal": ["pi"], "nodes": nodes}]}
    (site.record / ASKS).write_text(json.dumps(line) + "\n")
    with hold(site):
        lines = list(describe_status(site, NOW + timedelta(seconds=5)))
        assert lines[-2] == "server: round 2 of 4, waiting for answers"
        assert "if 1 client or more are connected" in lines[-1]
        berlin, lyon = (dict(zip(HEADER, row, strict=True)) for row in list_nodes(site, NOW))
    assert (berlin["connected"], berlin["asked"], berlin["key"]) == ("yes", "0", "not admitted")
    assert (lyon["connected"], lyon["clients"], lyon["asked"], lyon["answered"]) == ("no", "1, 2", "2", "1")
    assert lyon["late or lost"] == "0"
    assert (lyon["refused"], lyon["shown beside scores"], lyon["received"], lyon["sent"]) == ("1", "pi", "2 kB", "1 kB")
    assert list(list_reasons(site)) == ["lyon: refused: weight 1e30 (1 times)"]


def test_a_server_that_is_gone_is_said_to_be_as_soon_as_it_is(site, log):
    status(waiting=["oslo: not connected"]).write(site.status)
    on = f"2026-11-21 12:00 UTC; go on with: fedtide serve {site.root}"
    assert list(describe_status(site, NOW))[-1] == f"server: not running since {on}"  # it was killed
    assert [row[HEADER.index("connected")] for row in list_nodes(site, NOW)] == ["-", "-"]
    status(phase="over").write(site.status)
    assert any("all 4 rounds are played" in line for line in describe_status(site, NOW + timedelta(days=9)))
    watch = reporter_of(site.root, log, phase="playing")
    for error, problem in ((KeyboardInterrupt(), []), (FedtideError("no disk"), ["problem: no disk"])):
        with pytest.raises(type(error)), repeat(watch.write, 5.0, log), watch.ending():
            raise error
        server, *rest = list(describe_status(site, NOW))[-1 - len(problem) :]
        assert server.startswith("server: ended at 2")
        assert rest == problem
    with hold(site), pytest.raises(FedtideError, match="a server plays this site already; end it first"), hold(site):
        pass


def test_a_lock_that_is_a_pipe_is_not_waited_for(site):
    site.lock.unlink(missing_ok=True)
    os.mkfifo(site.lock)
    for use in (lambda: hold(site).__enter__(), lambda: list(describe_status(site, NOW))):
        with pytest.raises(FedtideError, match=r"server.lock: is a folder, a pipe or a device, allowed: a file"):
            use()
    site.lock.unlink()


# -- logs and health ---------------------------------------------------------------------------------------------------


def test_a_log_is_for_people_or_for_programs(log):
    log.say("refused", "lyon: refused\n\x1b[2J", node="lyon", loss=float("nan"))
    assert log.file.getvalue().count("\n") == 1
    assert "\x1b" not in log.file.getvalue()
    programs = Log(lines=True, file=io.StringIO())
    programs.say("refused", "lyon: refused", node="lyon", loss=float("nan"))
    line = json.loads(programs.file.getvalue()) | {"at": ""}
    assert line == {"at": "", "event": "refused", "text": "lyon: refused", "node": "lyon", "loss": None}
    threads = [threading.Thread(target=lambda: [programs.say("x", "y" * 100) for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len([json.loads(line) for line in programs.file.getvalue().splitlines()]) == 201


def answer(address: str, **headers: str) -> tuple[int, dict]:
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=5) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_health_is_told_on_the_loopback_alone():
    values = {"round": 3, "problem": ""}
    with closing(Health(0, lambda: values)) as health:
        assert answer(health.address) == (200, values)
        values["problem"] = "no node"
        assert answer(health.address) == (503, values)
        assert answer(health.address.replace("/health", "/other"))[0] == 404
        assert answer(health.address, Host="evil.example.org:80")[0] == 404
        port = int(health.address.rpartition(":")[2].removesuffix("/health"))
        with pytest.raises(FedtideError, match=f"--health {port}: .*allowed: a free port"):
            Health(port, lambda: values)
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):  # noqa: PT011
        pass
