"""Rollback of a run folder: its next round begins with a kept model, and with what clients kept then."""

import json

import pytest

import fedtide as ft
from fedtide.core import checkpoint, codec, loop
from fedtide.core.errors import FedtideError
from fedtide.core.memory import MemoryStore
from fedtide.core.record import ROLLBACKS, read_lines, run_lock
from fedtide.core.trees import same
from fedtide.report.page import write_report
from fedtide.runs.folder import create
from fedtide.runs.rollback import Rollback, roll_back
from helpers.shell import done, refused
from helpers.studies import SCAFFOLD, A, lines_of, record_of, run_of, study

KEPT = {"rounds": 8, "eval_every": 1, "checkpoint_every": 1, "keep": {"best": 8}, "data": {"split": {"val": 0.2}}}
DITTO = {"name": "Ditto", "algorithm": "ditto", "cohort": 4}
FEDBUFF = {**A, "name": "FedBuff", "algorithm": "fedbuff", "buffer": 2}


def playable(root, method=A, **changes):
    """A run in a new run folder."""
    experiment = study(method, **{**KEPT, **changes})
    create(experiment, root)
    return run_of(experiment, root)


def played(run, until=None):
    """Play a run up to a round, or to its end; return the rounds that are done."""
    *_, last = run.play(until=until)
    return last.round


def states(run):
    """The bytes of the newest checkpoint."""
    *_, newest = sorted((run.folder / "checkpoints").iterdir())
    return [(newest / name).read_bytes() for name in checkpoint.FILES]


@pytest.mark.parametrize("small", [None, 0], ids=["in memory", "in files"])
@pytest.mark.parametrize("method", [A, SCAFFOLD, DITTO], ids=["FedAvg", "SCAFFOLD", "Ditto"])
def test_the_next_round_begins_with_the_earlier_model_and_memory(tmp_path, method, small, monkeypatch):
    """After any kill, too; and the same rollbacks in another folder give the same bytes."""
    if small is not None:
        monkeypatch.setattr("fedtide.core.memory.MemoryStore.__init__", stored_in_files(small))
    run = playable(tmp_path / "run", method)
    assert played(run, 5) == 5
    before = {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}
    assert roll_back(run.folder, 2) == (Rollback(5, 2), tmp_path / "run")
    assert {path: path.read_bytes() for path in before} == before  # a line was written, and nothing else
    place = run.folder / "checkpoints" / "00000002"
    earlier, received = MemoryStore(run.folder / "memory"), []
    earlier.read_index(place / "memory.safetensors")

    def watched(algorithm, fleet, start, **named):
        received.append((start, [fleet.memory.read(client, (5, 0)) for client in fleet.clients.tolist()]))
        yield from loop.play(algorithm, fleet, start, **named)

    rows = [earlier.read(client, (2, 0)) for client in range(6)]
    with monkeypatch.context() as patch:
        patch.setattr("fedtide.runs.runner.play", watched)
        patch.setattr("fedtide.core.checkpoint.save", lambda *given, **named: 1 / 0)
        for _ in range(2):  # the second goes on after a kill before the next checkpoint
            with pytest.raises(ZeroDivisionError):
                played(run)
    assert len(received) == 2
    for start, memory in received:
        assert start.round == 5
        assert same(start.state, codec.from_file(place / "state.safetensors"))
        assert same(memory[:6], rows)
    assert any(row is not None for row in rows) == (method is not A)
    assert played(run, 7) == 7
    assert roll_back(run.folder, 6)[0] == Rollback(7, 6)
    assert played(run) == 8
    assert [verdict.wrong for verdict in ft.verify(tmp_path / "run")] == [None]
    lines = lines_of(run.folder)
    assert [line["round"] for line in lines] == list(range(8))
    assert {line["round"]: line["rolled_back_to"] for line in lines if "rolled_back_to" in line} == {5: 2, 7: 6}
    again = playable(tmp_path / "again", method)
    for rounds, number in ((5, 2), (7, 6)):
        played(again, rounds)
        roll_back(tmp_path / "again", number)
    played(again)
    assert record_of(tmp_path / "again") == record_of(tmp_path / "run")
    plain = playable(tmp_path / "plain", method)
    played(plain)
    assert states(plain) != states(run)


def stored_in_files(small):
    made = MemoryStore.__init__

    def start(self, directory, small=small, name=""):
        made(self, directory, small, name)

    return start


@pytest.mark.parametrize("method", [A, DITTO], ids=["FedAvg", "Ditto"])
def test_a_rollback_to_the_newest_round_takes_an_earlier_one_back(tmp_path, method):
    run, plain = playable(tmp_path / "run", method), playable(tmp_path / "plain", method)
    played(run, 3)
    for number in (1, 3):
        roll_back(run.folder, number)
    played(run)
    played(plain)
    assert read_lines(run.folder, ROLLBACKS) == [{"after": 3, "to": 1}, {"after": 3, "to": 3}]
    assert states(run) == states(plain)


def test_models_that_are_gone_do_not_come_back_when_better_ones_are_undone(tmp_path):
    """By the highest loss the first are best; by the lowest the last, for which the first had to go."""
    run = playable(tmp_path / "run", SCAFFOLD, keep={"best": 2, "by": "loss"})
    played(run, 4)
    folder = run.folder / "checkpoints"
    kept = checkpoint.check(folder, config=None).there
    assert 1 not in kept, "the loss falls"
    roll_back(run.folder, min(kept))
    assert played(run, 5) == 5
    assert set(checkpoint.check(folder, config=None).kept) <= {min(kept), 5}
    assert [verdict.wrong for verdict in ft.verify(tmp_path / "run")] == [None]
    assert played(run) == 8
    assert [verdict.wrong for verdict in ft.verify(tmp_path / "run")] == [None]


def test_the_command_says_what_comes_next_and_the_report_follows(tmp_path, capsys):
    root = tmp_path / "run"
    run = playable(root)
    played(run, 3)
    assert done("rollback", root, 1) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said == f"rollback: round 4 begins with the model after round 1 next: fedtide resume {root}"
    assert done("resume", root) == 0
    assert "Round 4 began with the model after round 1." in write_report([root]).read_text()


def test_rollbacks_of_runs_that_are_refused(tmp_path, capsys):
    run = playable(tmp_path / "run", rounds=4, keep={"best": 1})
    root = tmp_path / "run"
    assert "was never played, so there is no earlier model" in refused(capsys, root, "rollback", root, 1)
    played(run, 2)
    assert "ROUND: found 7, allowed: " in refused(capsys, root, "rollback", run.folder, 7)
    assert "not a run folder" in refused(capsys, root, "rollback", tmp_path / "nowhere", 1)
    assert "but it is not one of its runs; allowed: " in refused(capsys, root, "rollback", root / "a" / "7", 1)
    with run_lock(run.folder), pytest.raises(FedtideError, match="another process"):
        roll_back(root, 1)
    assert not (run.folder / ROLLBACKS).exists()
    (run.folder / ROLLBACKS).write_text('{"a": 1}\n')
    assert "rollbacks.jsonl: damaged" in refused(capsys, root, "rollback", root, 1)
    (run.folder / ROLLBACKS).unlink()
    played(run)
    with pytest.raises(FedtideError, match=r"the study is over; allowed: fedtide export .*run --model N, with N "):
        roll_back(root, 1)
    (run.folder / "asks.jsonl").write_text(json.dumps({"round": 0}) + "\n")
    with pytest.raises(FedtideError, match="its clients are real; allowed: the folder of its site"):
        roll_back(root, 1)


def test_a_run_folder_with_several_runs_wants_one_of_them(tmp_path):
    experiment = study(A, SCAFFOLD, **KEPT)
    create(experiment, tmp_path / "run")
    run = run_of(experiment, tmp_path / "run", method=1)
    played(run, 2)
    with pytest.raises(FedtideError, match=r"but it has several runs; allowed: .*/a/0, .*/scaffold/0$"):
        roll_back(tmp_path / "run", 1)
    assert roll_back(run.folder, 1) == (Rollback(2, 1), tmp_path / "run")


@pytest.mark.parametrize(("method", "changes", "line"), [
    (FEDBUFF, {}, r"ROUND: found 1, allowed: none, because clients of FedBuff are at work over"),
    (A, {"keep": None}, r"ROUND: found 1, but no earlier models were kept: .*; allowed: 2"),
])  # fmt: skip
def test_models_that_no_round_can_begin_with(tmp_path, method, changes, line):
    values = {key: value for key, value in {**KEPT, **changes}.items() if value is not None}
    experiment = study(method, **values)
    create(experiment, tmp_path / "run")
    run = run_of(experiment, tmp_path / "run")
    played(run, 2)
    with pytest.raises(FedtideError, match=line):
        roll_back(run.folder, 1)
