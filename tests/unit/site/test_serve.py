"""What `fedtide serve` does when others write: a roster while it is edited, and answers that end a round."""

from __future__ import annotations

import io
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedtide.algorithms.feddrift import cross_losses
from fedtide.core.base import Moment
from fedtide.core.errors import FedtideError
from fedtide.remote.schedule import WallClock
from fedtide.site.machine import Log
from fedtide.site.serve import RosterFile, Watch, next_round, survive_failures
from fedtide.site.site import Roster, read_roster, write_roster
from helpers.carriers import host

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI"


def test_a_roster_that_is_being_edited_stays_as_it_was(tmp_path):
    write_roster(tmp_path, Roster.of("berlin,oslo:2"))
    told = io.StringIO()
    latest = RosterFile(tmp_path, read_roster(tmp_path), Log(file=told))
    whole = (tmp_path / "roster.toml").read_text(encoding="utf-8")
    for wrong in (whole[: len(whole) // 2 + 3], "node = 3", "", whole.replace("oslo", "paris")):
        (tmp_path / "roster.toml").write_text(wrong, encoding="utf-8")
        told.truncate(told.seek(0))
        assert [latest.read().clients for _ in range(3)] == [3, 3, 3]
        line, end = told.getvalue().split("\n")
        assert "roster.toml" in line
        assert "kept as it was" in line
        assert not end
    (tmp_path / "roster.toml").unlink()
    assert latest.read().clients == 3
    write_roster(tmp_path, Roster.of("berlin,oslo:2,paris"))
    assert latest.read().clients == 4


def test_a_status_that_cannot_be_written_is_said_once_and_ends_nothing(tmp_path):
    told = io.StringIO()
    experiment, roster = SimpleNamespace(rounds=3), Roster.of("berlin")
    site: Any = SimpleNamespace(status=tmp_path / "none" / "status.json", experiment=experiment, roster=roster)
    carrier: Any = SimpleNamespace(present=frozenset)
    watch = Watch(site, Log(file=told), carrier)
    with watch.looking():
        watch.write()
    (line,) = told.getvalue().splitlines()
    assert "status.json cannot be written (No such file or directory)" in line
    site.status.parent.mkdir()
    watch.write()
    site.status.unlink()
    site.status.parent.rmdir()
    watch.write()
    assert len(told.getvalue().splitlines()) == 2


def test_a_server_says_when_the_next_round_begins():
    clock = WallClock(0.0, "Europe/Berlin", every=3600.0, now=lambda: 5000.0)
    moment = Moment(0, 3, 5000.0 + 3600)  # Berlin's midnight was an hour before the epoch's
    fleet: Any = SimpleNamespace(clock=clock, moment=moment, elapsed=lambda: clock.elapsed(moment))
    due = next_round(fleet)
    assert due is not None
    assert 2195 < (due - datetime.now(UTC)).total_seconds() <= 2200
    fleet.clock = WallClock(0.0)
    assert next_round(fleet) is None
    deploy, roster = SimpleNamespace(zone="Europe/Berlin"), Roster.of("berlin")
    site: Any = SimpleNamespace(experiment=SimpleNamespace(rounds=3), roster=roster, deploy=deploy)
    carrier: Any = SimpleNamespace(present=lambda: {"berlin"})
    watch = Watch(site, Log(file=io.StringIO()), carrier, phase="playing", next=due)
    assert watch.look().phase == f"waiting for {due:%H:%M:%S} (Europe/Berlin), when the next round begins"
    watch.next = datetime.now(UTC)
    assert watch.look().phase == "playing"


def test_a_server_that_is_started_again_knows_its_rounds_and_lets_nodes_come_back(tmp_path):
    told = io.StringIO()
    (tmp_path / "rounds.jsonl").write_text('{"round": 0}\n{"round": 1}\n{"round"')
    site: Any = SimpleNamespace(
        experiment=SimpleNamespace(rounds=3), roster=Roster.of("berlin"), root=tmp_path, record=tmp_path,
        status=tmp_path / "status.json",
    )  # fmt: skip
    carrier: Any = SimpleNamespace(present=frozenset, knocked=dict)
    Watch(site, Log(file=told), carrier).write()
    watch = Watch(site, Log(file=told), carrier)
    watch.remember()
    assert watch.look().round == 2
    watch.wait_for(1, 2)
    assert told.getvalue() == ""
    watch._quiet = 0.0
    watch.wait_for(1, 2)
    assert "waiting for 1 more client before round 3 begins" in told.getvalue()


def rounds(answered: int, error: Exception) -> tuple[Any, list[Any]]:
    def round(state: Any, fleet: Any, rng: Any) -> Any:
        raise error

    failed: list[Any] = []
    ask = SimpleNamespace(ask=SimpleNamespace(question="train"), answered=torch.arange(answered))
    fleet: Any = SimpleNamespace(queries=[ask], moment=SimpleNamespace(round=7))
    made = replace(host("fedavg").algorithm, round=round)
    return survive_failures(made, fleet, lambda *told: failed.append(told)).round("state", fleet, None), failed


def test_answers_that_end_a_round_leave_the_state_as_it_was():
    error = KeyError("control")
    assert rounds(2, error) == (("state", {}), [("train", 7, error)])


@pytest.mark.parametrize(("answered", "error"), [(0, KeyError("control")), (2, FedtideError("the disk is full"))])
def test_other_errors_are_not_hidden(answered, error):
    with pytest.raises(type(error)):
        rounds(answered, error)


def test_numbers_of_samples_that_are_none_leave_distances_finite():
    rows = {"bad": torch.full((2, 2), 9e15, dtype=torch.float64), "rows": torch.tensor([1e-300, 5.0]).double()}
    reply: Any = SimpleNamespace(rows=rows, total=None)
    losses, known = cross_losses(reply, torch.eye(2) > 0, torch.arange(2))
    assert known.tolist() == [1]
    assert losses.isfinite().all()
