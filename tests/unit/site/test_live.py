"""The live status of a site, for people who watch it."""

import io
import json
import re
import urllib.error
import urllib.request
from contextlib import closing
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

pytest.importorskip("cryptography")

from fedtide.core.errors import FedtideError
from fedtide.remote.asks import LastAnswer
from fedtide.remote.machine_facts import RecentLog, read_facts, tell
from fedtide.remote.messages import AnswerHeader, read
from fedtide.report.terminal import Screen
from fedtide.site import live
from fedtide.site.live import View, describe_changes, follow
from fedtide.site.machine import Health, Log
from fedtide.site.owner import read_policy
from fedtide.site.seat import Seat
from fedtide.site.serve import Reporter, hold
from fedtide.site.site import Site
from fedtide.site.status import OVER, Status
from fedtide.site.tickets import Ticket
from helpers.near_sites import nodes_of, played, site_of

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
HOSTILE = "refused: \x1b[2J\u202e\ufffd\n<script>" + "x" * 500


def heard(node: str, seconds: float, word: str = "answered", ago: float = 0.0) -> LastAnswer:
    return LastAnswer(node=node, at=NOW - timedelta(seconds=ago), seconds=seconds, word=word)


def status(**changes: Any) -> Status:
    values = {"at": NOW, "round": 2, "rounds": 4, "phase": "playing", "present": ["berlin"]}
    return Status(**values | changes)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Site:
    return site_of(tmp_path_factory.mktemp("hospitals"), "berlin,lyon:2", "SCAFFOLD")


@pytest.fixture
def site(made) -> Site:
    made.status.unlink(missing_ok=True)
    return made


def test_the_table_has_each_node_and_its_last_answer(site):
    told = {"load": 1.5, "memory": 0.25}
    said = status(
        heard=[heard("berlin", 0.5123, ago=12).model_copy(update=told), heard("paris", 600, "lost: it died", ago=600)]
    )
    rows = View.of(site, said, False).table(NOW).rows
    assert rows == [
        ["berlin", "yes", "answered", "0.512 s", "12 s", "1.5", "25 %"],
        ["lyon", "no", "-", "-", "-", "-", "-"],
        ["paris", "no", "late", "600 s", "10 min", "-", "-"],  # it was invited since
    ]
    assert [row[1] for row in View.of(site, said, True).table(NOW).rows] == ["-", "-", "-"]
    assert [row[1:] for row in View.of(site, None, False).table(NOW).rows] == [["no", *["-"] * 5]] * 2


def test_changes_are_said_once(site):
    first = View.of(site, status(heard=[heard("berlin", 0.5)]), False)
    begin = ["server: round 2 of 4, playing", "rounds: begin if 1 client or more are connected"]
    assert list(describe_changes(None, first)) == [*begin, "berlin is connected", "berlin: answered, after 0.5 s"]
    assert list(describe_changes(first, first)) == []
    then = status(present=["lyon"], heard=[heard("berlin", 0.5), heard("lyon", 2, "refused: too large")])
    want = ["berlin is gone", "lyon is connected", "lyon: refused: too large, after 2 s"]
    assert list(describe_changes(first, View.of(site, then, False))) == want
    (server, *rest) = describe_changes(first, View.of(site, status(), True))
    assert server.startswith("server: not running since")
    assert rest == ["berlin is gone"]


def watched(site: Site, monkeypatch, steps: list[Any], screen: Console) -> str:
    """What is shown while a server writes one status after the other; bytes are damage."""
    left = iter(steps)

    def write(seconds: float) -> None:
        step = next(left)
        site.status.write_bytes(step) if isinstance(step, bytes) else step.write(site.status)

    monkeypatch.setattr(live.time, "sleep", write)
    with hold(site):
        follow(site, screen)
    return screen.file.getvalue()


def test_without_a_terminal_each_change_is_a_line_until_the_study_is_over(site, monkeypatch):
    steps = [status(), status(at=NOW + timedelta(seconds=1)), status(heard=[heard("berlin", 0.5)]), status(phase=OVER)]
    out = watched(site, monkeypatch, steps, Console(file=io.StringIO(), width=200)).splitlines()
    said = [line.partition(" ")[2].partition(";")[0] for line in out]
    assert said == [
        "server: never served", "server: round 2 of 4, playing", "rounds: begin if 1 client or more are connected",
        "berlin is connected", "berlin: answered, after 0.5 s", "server: all 4 rounds are played",
    ]  # fmt: skip


def test_a_terminal_has_a_table_in_which_nothing_is_obeyed(site, monkeypatch):
    word = LastAnswer.of("berlin", 0.5, ["answered", HOSTILE]).word
    steps = [status(heard=[heard("berlin", 0.5, word)], problem="[red]x[/red]"), status(phase=OVER)]
    screen = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    out = watched(site, monkeypatch, steps, screen)
    assert "berlin" in out
    assert "problem: [red]x[/red]" in out
    assert "\x1b[2J" not in out
    assert "all 4 rounds are played" in out


def test_words_of_strangers_are_short_and_visible():
    last = LastAnswer.of("berlin", 0.5, ["answered", HOSTILE])
    assert last.word.startswith("refused: ?[2J?? <script>x")
    assert len(last.word) == 200
    assert Status(**dict(status()) | {"heard": [last]}).heard == (last,)


def fetched(address: str, **headers: str) -> tuple[int, str, Any]:
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=5) as response:
            return response.status, response.read().decode(), response.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(), error.headers


def test_a_page_on_the_loopback_shows_the_same_and_nothing_in_it_is_run(site):
    word = LastAnswer.of("berlin", 0.5, [HOSTILE]).word
    fleet: Any = SimpleNamespace(heard={"berlin": heard("berlin", 0.25, word), "<b>": heard("<b>", 2)})
    carrier: Any = SimpleNamespace(present=lambda: frozenset({"berlin"}), knocked=dict, rows_apart=lambda: (0, 0))
    watch = Reporter(site, Log(file=io.StringIO()), carrier, fleet=fleet, problem="<script>alert(1)</script>")
    with closing(Health(0, dict, watch.page)) as health:
        address = health.address.removesuffix("health")
        code, page, headers = fetched(address)
        assert fetched(address, Host="evil.example.org:80")[0] == 404
        assert fetched(f"{address}other")[0] == 404
        assert fetched(health.address)[:2] == (200, "{}")
    with closing(Health(0, dict)) as health:
        assert fetched(health.address.removesuffix("health"))[0] == 404
    assert code == 200
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert '<meta http-equiv="refresh"' in page
    assert "<h1>Three hospitals</h1>" in page
    assert "problem: &lt;script&gt;alert(1)" in page
    assert re.findall(r"<th scope=.row.>(.*?)</th>", page) == ["berlin", "lyon", "&lt;b&gt;"]
    assert re.findall(r"<td[^>]*>(.*?)</td>", page)[:3] == ["yes", "refused", "0.25 s"]
    assert not re.search(r"<script|<b>|https?:", page)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"at": 5}', b"\xff"])
def test_a_status_that_is_damaged_ends_it_in_one_line(site, monkeypatch, content):
    with pytest.raises(FedtideError, match=r"status\.json: ") as error:
        watched(site, monkeypatch, [status(), content], Console(file=io.StringIO()))
    assert "\n" not in str(error.value)


def test_it_ends_when_nobody_reads_it(site):
    status().write(site.status)
    screen = Screen(file=io.StringIO(), quiet=True)
    follow(site, screen)
    assert screen.file.getvalue() == ""


@pytest.mark.parametrize(
    "wrong", [{"seconds": -1.0}, {"seconds": float("nan")}, {"word": "\x1b[2J"}, {"node": "x" * 201}]
)
def test_an_answer_that_none_could_write_is_refused(wrong):
    with pytest.raises(FedtideError):
        LastAnswer(**{"node": "berlin", "at": NOW, "seconds": 1.0, "word": "answered"} | wrong)


def test_a_node_tells_of_its_machine_what_its_owner_lets_out_and_writes_it_down(tmp_path, capsys):
    rules = {"berlin": 'tells = ["load", "memory", "log"]', "lyon": 'tells = ["log"]', "oslo": ""}
    site = site_of(tmp_path)
    nodes = nodes_of(tmp_path, site, rules.__getitem__)
    for node in nodes.values():
        log = RecentLog(node.node.log)
        for text in ("one", "two", "three", "a\x1b[2J" + "x" * 300, "Traceback\nValueError: patient 17"):
            log(text)
        node.tells = partial(tell, node.node.policy, log)
    last = played(site, nodes, rounds=1).heard
    assert last["lyon"].log == last["berlin"].log == ("two", "three", "a\\x1b[2J" + "x" * 192)
    assert (last["lyon"].load, last["lyon"].memory, last["oslo"].log, last["oslo"].load) == (None, None, (), None)
    if Path("/proc/meminfo").exists():
        assert 0 < last["berlin"].memory <= 1
        assert last["berlin"].load >= 0
    told = {
        name: [
            json.loads(line).get("machine", {}) for line in (tmp_path / name / "asked.jsonl").read_text().splitlines()
        ]
        for name in rules
    }
    assert told["lyon"][-1] == {"log": list(last["lyon"].log)}
    assert not any(told["oslo"])
    ticket, rows = site.root / "tickets" / "lyon.ticket", [tmp_path / "lyon.csv"]
    said = list(Seat.read(Ticket.read(ticket), rows, tmp_path / "lyon.toml", tmp_path / "lyon").describe_study())
    assert "tells the server of this machine: log, with answers" in said
    (tmp_path / "lyon.toml").write_text("tells = [")
    assert nodes["lyon"].tells() == {}
    capsys.readouterr()


@pytest.mark.parametrize("machine", [
    5, [], {"load": -1.0}, {"load": float("inf")}, {"memory": 2.0}, {"log": ["x" * 201]}, {"log": ["x"] * 4},
    {"log": "x"}, {"other": 1}, {"memory": True},
])  # fmt: skip
def test_facts_that_are_none_are_not_shown_and_refuse_the_answer(machine):
    assert read_facts({"machine": machine}) == {}
    with pytest.raises(FedtideError, match="machine"):
        read(AnswerHeader, {"machine": machine})


def test_lines_of_strangers_are_harmless_and_said_once(site):
    log = read_facts({"machine": {"log": ["a\x1b[2J\u202e\ufffd\nb"]}})["log"]
    assert log == ("a\\x1b[2J\\u202e? b",)
    first = View.of(site, status(heard=[heard("berlin", 0.5)]), False)
    then = View.of(site, status(heard=[heard("berlin", 1).model_copy(update={"log": log})]), False)
    want = ["berlin: answered, after 1 s", "berlin: log: a\\x1b[2J\\u202e? b"]
    assert list(describe_changes(first, then)) == want
    assert list(describe_changes(then, then)) == []


def test_a_fact_that_no_machine_tells_is_refused(tmp_path):
    policy = tmp_path / "policy.toml"
    policy.write_text('tells = ["rows"]')
    with pytest.raises(FedtideError, match=r"policy\.toml: tells.*allowed: .*load.*memory.*log"):
        read_policy(policy)


def test_a_fleet_knows_the_last_answer_of_each_node(tmp_path):
    site = site_of(tmp_path)
    nodes = nodes_of(tmp_path, site, lambda name: "fewest = 9" if name == "oslo" else "")
    last = played(site, nodes, rounds=1).heard
    assert {name: answer.word.partition(":")[0] for name, answer in last.items()} == {
        "berlin": "answered", "lyon": "answered", "oslo": "refused",
    }  # fmt: skip
    assert all(0 <= answer.seconds < 60 for answer in last.values())
