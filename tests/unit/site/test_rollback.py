"""Rollback of a site: the next round begins with a kept model, as the record says and a replay repeats."""

import json
import re

import pytest

pytest.importorskip("cryptography")

import fedtide as ft
from fedtide.core import checkpoint, codec, loop
from fedtide.core.errors import FedtideError
from fedtide.core.record import LEDGER, ROLLBACKS, read_lines
from fedtide.core.trees import same
from fedtide.report.page import write_report
from fedtide.runs import folder
from fedtide.runs.rollback import check_kept
from fedtide.site.parity import replay
from fedtide.site.rollback import Rollback, roll_back
from fedtide.site.serve import hold
from helpers.near_sites import site_of
from helpers.shell import done, refused

from .test_parity import files, made, play

KEPT = {"rounds": 8, "eval_every": 1, "keep": {"best": 8}, "checkpoint_every": 1}
FEDBUFF = {"name": "FedBuff", "algorithm": "fedbuff", "cohort": 3, "buffer": 2, "local": {"lr": 0.1, "batch_size": 20}}


def stopping(after: int):
    """Stop after so many rounds of this start."""
    left = iter(range(after - 1))
    return lambda: next(left, None) is None


def state_of(site, number: int | None = None):
    place = site.record if number is None else site.record / "checkpoints" / f"{number:08d}" / "state.safetensors"
    return codec.from_file(checkpoint.file_of(place))


def kept_in(site) -> list[int]:
    return sorted(int(path.name) for path in (site.record / "checkpoints").iterdir())


def test_the_next_round_begins_with_the_earlier_model(tmp_path, capsys):
    site = made(tmp_path, "FedAvg", **KEPT)
    assert play(site, stop=stopping(5)) == 5
    before = {path: path.read_bytes() for path in site.record.rglob("*") if path.is_file()}
    assert done("rollback", site.root, 2) == 0
    assert re.findall(r"round (\d+)", " ".join(capsys.readouterr().out.split())) == ["6", "2"]
    assert {path: path.read_bytes() for path in before} == before  # a line was written, and nothing else
    assert read_lines(site.record, ROLLBACKS) == [{"after": 5, "to": 2}]
    assert [verdict.wrong for verdict in ft.verify(site.run)] == [None]
    earlier, received = state_of(site, 2), []

    def watched(algorithm, fleet, start, **named):
        received.append(start)
        yield from loop.play(algorithm, fleet, start, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedtide.runs.runner.play", watched)
        assert play(site, stop=stopping(1)) == 6
    assert same(received[0].state, earlier)
    assert received[0].round == 5
    # The server may be stopped, and rolled back again.
    assert play(site, stop=stopping(1)) == 7
    # Models that a rollback undid are kept no more: 3, 4 and 5.
    assert kept_in(site) == [1, 2, 6, 7]
    with pytest.raises(FedtideError, match="ROUND: found 4, allowed: 1, 2, 6, 7"):
        roll_back(site, 4)
    assert roll_back(site, 6) == Rollback(7, 6)
    assert play(site) == 8
    assert kept_in(site) == [1, 2, 6, 8]
    lines = read_lines(site.record)
    assert [line["round"] for line in lines] == list(range(8))
    assert {line["round"]: line["rolled_back_to"] for line in lines if "rolled_back_to" in line} == {5: 2, 7: 6}
    assert [verdict.wrong for verdict in ft.verify(site.run)] == [None]
    again = replay(site.run, files(site))
    assert (again.rounds, again.equal, again.differs) == (8, True, None)
    said = re.findall(r"Round (\d+) began [a-z ]* round (\d+)\.", write_report([site.run]).read_text())
    assert said == [("6", "2"), ("8", "6")]
    # Without its line it would have other weights.
    (site.record / ROLLBACKS).write_text(json.dumps({"after": 5, "to": 3}) + "\n")
    with pytest.raises(FedtideError, match=r"rollbacks\.jsonl: damaged"):
        replay(site.run, files(site), tmp_path / "other")


def test_a_rollback_that_was_not_played_yet_survives_kills_and_can_be_taken_back(tmp_path, monkeypatch):
    site = made(tmp_path, "FedAvg", **KEPT)
    play(site, stop=stopping(3))
    roll_back(site, 1)
    whole_lines = (site.record / ROLLBACKS).read_text()
    (site.record / ROLLBACKS).write_text(whole_lines + '{"after": 3, "to"')  # a kill left half a line
    with monkeypatch.context() as patch:
        patch.setattr("fedtide.core.checkpoint.save", lambda *given, **named: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            play(site)
    assert read_lines(site.record, ROLLBACKS) == [{"after": 3, "to": 1}]
    roll_back(site, 3)
    assert read_lines(site.record, ROLLBACKS) == [{"after": 3, "to": 1}, {"after": 3, "to": 3}]
    assert play(site) == 8
    (tmp_path / "whole").mkdir()
    whole = made(tmp_path / "whole", "FedAvg", **KEPT)
    assert play(whole) == 8
    assert same(state_of(site), state_of(whole))


def test_evaluations_that_a_rollback_undid_do_not_end_a_study(tmp_path):
    """Of the first three one is left, so that the fourth is that of round 6."""
    site = made(tmp_path, "FedAvg", **KEPT, stop_at={"accuracy": 0.01, "evaluations": 4})
    play(site, stop=stopping(3))
    roll_back(site, 1)
    assert play(site, stop=stopping(2)) == 5
    assert play(site) == 6


def test_rollbacks_that_are_refused(tmp_path, capsys):
    site = made(tmp_path, "FedAvg", **{**KEPT, "rounds": 4, "keep": {"best": 1}})
    with pytest.raises(FedtideError, match="was never served"):
        roll_back(site, 1)
    assert not site.record.exists()
    play(site, stop=stopping(2))
    site.lock.touch()
    assert "ROUND: found 7, allowed: " in refused(capsys, site.root, "rollback", site.root, 7)
    with hold(site), pytest.raises(FedtideError, match="a server plays this site already"):
        roll_back(site, 1)
    play(site)
    with pytest.raises(FedtideError, match=r"the study is over; allowed: fedtide export .*run --model N, with N "):
        roll_back(site, 1)


@pytest.mark.parametrize(("method", "changes", "line"), [
    ("SCAFFOLD", {}, r"ROUND: found 1, but nodes have what clients kept in later rounds alone; allowed: none, because "
                     r"clients of SCAFFOLD keep something"),
    ("FedBuff", {"method": [FEDBUFF]}, r"ROUND: found 1, .*allowed: none, because clients of FedBuff are at work over"),
    ("FedAvg", {"keep": None}, r"ROUND: found 1, but no earlier models were kept: .*; allowed: 2"),
])  # fmt: skip
def test_clients_that_went_on_without_the_model(tmp_path, method, changes, line):
    settings = {key: value for key, value in {**KEPT, **changes}.items() if value is not None}
    site = site_of(tmp_path, played=method, rows=90, **settings)
    folder.create(site.experiment, site.run)
    play(site, stop=stopping(2))
    with pytest.raises(FedtideError, match=line):
        roll_back(site, 1)
    assert not (site.record / ROLLBACKS).exists()


def test_a_rollback_cannot_be_taken_back_once_its_round_has_begun(tmp_path):
    """Else the round would be played from one model with the released sums of another."""
    place = tmp_path
    (place / ROLLBACKS).write_text(json.dumps({"after": 6, "to": 4}) + "\n")
    (place / LEDGER).write_text(json.dumps({"round": 6}) + "\n")
    about = checkpoint.About("", 6, 0.0, 0.0, (), {}, "", kept=(4,))
    with pytest.raises(FedtideError, match=r"ROUND: found 6, but round 6 was played, .*allowed: 4 alone"):
        check_kept(place, about, 6, name="A", go_on="fedtide serve x")
