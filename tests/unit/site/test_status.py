"""What a site says of itself: to a person, to programs, in logs."""

from __future__ import annotations

import io
import json
import socket
import threading
import urllib.error
import urllib.request
from datetime import UTC, datetime, timedelta

import pytest

from fedtide.config import read
from fedtide.core.errors import FedtideError
from fedtide.core.record import ASKS
from fedtide.site.deploying import make_site
from fedtide.site.machine import Health, Log
from fedtide.site.site import Roster, Site
from fedtide.site.status import HEADER, Connected, Status, describe_status, list_nodes, list_reasons
from helpers.hospitals import hospitals

pytest.importorskip("cryptography")

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)


def status(**changes) -> Status:
    nodes = {"berlin": Connected(online=True, since=NOW - timedelta(hours=3)), "lyon": Connected(online=False)}
    return Status(**{"at": NOW, "round": 2, "rounds": 4, "phase": "waiting for answers", "nodes": nodes} | changes)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Site:
    folder = tmp_path_factory.mktemp("hospitals")
    return make_site(read(hospitals(folder)), "SCAFFOLD", Roster.of("berlin,lyon:2"), folder / "site", None, "s.toml")


def test_a_status_is_read_as_it_was_written(tmp_path):
    status().write(tmp_path / "status.json")
    assert Status.read(tmp_path / "status.json") == status()
    assert Status.read(tmp_path / "none.json") is None


@pytest.mark.parametrize("content", [b"", b"\xff", b"[]", b'{"at": 5}', b"[" * 100_000, b'{"phase": "\\u001b[2J"}'])
def test_damaged_status_is_refused(tmp_path, content):
    (tmp_path / "status.json").write_bytes(content)
    with pytest.raises(FedtideError, match=r"status\.json: ") as error:
        Status.read(tmp_path / "status.json")
    assert "\n" not in str(error.value)


def test_a_site_that_was_never_served_says_so(site):
    assert "never served" in list(describe_status(site, NOW))[-1]
    assert [row[0] for row in list_nodes(site, NOW)] == ["berlin", "lyon"]


def test_a_served_site_says_who_is_there_and_what_came(site):
    status().write(site.status)
    site.record.mkdir(parents=True)
    nodes = {"lyon": {"clients": {"1": "answered", "2": "refused: weight 1e30"}, "down": 2000, "up": 1000}}
    line = {"round": 0, "present": ["lyon"], "asks": [{"question": "train", "reveal": ["pi"], "nodes": nodes}]}
    (site.record / ASKS).write_text(json.dumps(line) + "\n")
    said = list(describe_status(site, NOW + timedelta(seconds=5)))
    assert said[-1] == "server: round 2 of 4, waiting for answers (5 seconds ago)"
    berlin, lyon = (dict(zip(HEADER, row, strict=True)) for row in list_nodes(site, NOW))
    assert (berlin["connected"], berlin["asked"], berlin["key"]) == ("yes, since 3 hours", "0", "not admitted")
    assert (lyon["connected"], lyon["clients"], lyon["asked"], lyon["answered"]) == ("never", "1-2", "2", "1")
    assert (lyon["refused"], lyon["shown by client"], lyon["received"], lyon["sent"]) == ("1", "pi", "2 kB", "1 kB")
    assert list(list_reasons(site)) == ["lyon: refused: weight 1e30 (1 times)"]


def test_a_server_that_is_gone_is_not_taken_for_one_that_runs(site):
    status(problem="fewer nodes than deploy.fewest").write(site.status)
    said = list(describe_status(site, NOW + timedelta(minutes=10)))
    assert any("server: not running; last seen 10 minutes ago" in line for line in said)
    assert said[-1] == "problem: fewer nodes than deploy.fewest"
    assert [row[3] for row in list_nodes(site, NOW + timedelta(minutes=10))] == ["-", "-"]


# -- logs and health ---------------------------------------------------------------------------------------------------


def test_a_log_is_for_people_or_for_programs():
    people, programs = io.StringIO(), io.StringIO()
    Log(file=people).say("refused", "lyon: refused\n\x1b[2J", node="lyon", loss=float("nan"))
    Log(lines=True, file=programs).say("refused", "lyon: refused", node="lyon", loss=float("nan"))
    assert people.getvalue().count("\n") == 1
    assert "\x1b" not in people.getvalue()
    line = json.loads(programs.getvalue())
    assert {key: line[key] for key in line if key != "at"} == {
        "event": "refused",
        "text": "lyon: refused",
        "node": "lyon",
        "loss": None,
    }


def test_lines_of_several_threads_are_whole():
    file = io.StringIO()
    log = Log(lines=True, file=file)
    threads = [threading.Thread(target=lambda: [log.say("x", "y" * 100) for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len([json.loads(line) for line in file.getvalue().splitlines()]) == 200


def answer(address: str, **headers: str) -> tuple[int, dict]:
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=5) as found:
            return found.status, json.load(found)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_health_is_told_on_the_loopback_alone():
    told = {"round": 3, "problem": ""}
    with Health(0, lambda: told) as health:
        assert answer(health.address) == (200, told)
        told["problem"] = "no node"
        assert answer(health.address) == (503, told)
        assert answer(health.address.replace("/health", "/other"))[0] == 404
        assert answer(health.address, Host="evil.example.org:80")[0] == 404
        port = int(health.address.rpartition(":")[2].removesuffix("/health"))
        with pytest.raises(FedtideError, match=f"--health {port}: .*allowed: a free port"):
            Health(port, lambda: told)
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):  # noqa: PT011
        pass
