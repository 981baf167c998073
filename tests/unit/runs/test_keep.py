"""The best models by validation rows: which are kept, that kills lose none, and who can choose them."""

import multiprocessing
import os
import signal
import tomllib
from pathlib import Path

import pytest
import torch

import fedtide as ft
from fedtide.config import Keep, from_dict, to_toml
from fedtide.core import checkpoint
from fedtide.core.errors import FedtideError
from fedtide.core.memory import MemoryStore
from fedtide.core.trees import same
from fedtide.runs.digest import digest_of
from fedtide.runs.folder import create
from fedtide.runs.preflight import preflight
from fedtide.runs.trained import Trained
from helpers.shell import done
from helpers.studies import A, finished, lines_of, raw, record_of, run_of, study

WORLD = {"rounds": 16, "eval_every": 2, "data": {"split": {"val": 0.2}}}
DITTO = {"name": "Ditto", "algorithm": "ditto", "cohort": 4}
TWO = {"best": 2}


def by_hand(folder: Path, best: int, by: str = "accuracy", sign: int = -1) -> list[int]:
    """Rounds done at the best evaluations on validation rows, the best first and equal ones in their order."""
    scored = [(sign * line["scores"]["val"][by], line["round"] + 1) for line in lines_of(folder) if "scores" in line]
    return [number for _, number in sorted(scored)[:best]]


def kept_in(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir())


@pytest.mark.parametrize(("keep", "values", "best"), [
    ({}, {2: 0.5, 4: 0.7, 6: 0.7}, [4]), ({"best": 2}, {2: 0.5, 4: 0.7, 6: 0.7}, [4, 6]),
    ({"best": 3}, {2: 0.5, 4: None, 6: float("nan"), 8: 0.1}, [2, 8]), ({"by": "loss"}, {2: 1.5, 4: 0.5}, [4]),
    ({"by": "loss", "less": False}, {2: 1.5, 4: 0.5}, [2]), ({"by": "mine"}, {2: 1.5, 4: 0.5}, [2]),
    ({"by": "mine", "less": True}, {2: 1.5, 4: 0.5}, [4]), ({}, {}, []),
])  # fmt: skip
def test_the_best_are_ranked(keep, values, best):
    assert Keep(**keep).rank(values, "accuracy") == best


def test_a_run_keeps_the_best_and_the_last(tmp_path):
    root = finished(tmp_path / "run", study(A, **WORLD, keep=TWO))
    folder = root / "a" / "0"
    best = by_hand(folder, 2)
    assert kept_in(folder) == sorted({*best, 16})
    plain = finished(tmp_path / "plain", study(A, **WORLD))
    assert lines_of(folder) == lines_of(plain / "a" / "0")  # it changes no number
    whole = list(ft.verify(root))
    assert [(verdict.rounds, verdict.wrong) for verdict in whole] == [(16, None)]
    # The model is that of a run which ends there.
    short = finished(tmp_path / "short", study(A, **{**WORLD, "rounds": best[0]}))
    kept, ended = ft.trained(root, model="best"), Trained.read(short)
    assert same(kept.state, ended.state)
    assert kept.moment.round == ended.moment.round == best[0] - 1
    assert same(ft.trained(root, model=best[0]).state, kept.state)
    assert ft.trained(root).moment.round == ft.trained(root, model="last").moment.round == 15
    # A kept model that was changed is found.
    file = folder / "checkpoints" / f"{best[0]:08d}" / "state.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + b"\0\0\0\1")
    assert "damaged" in next(iter(ft.verify(root))).wrong
    with pytest.raises(FedtideError, match="damaged"):
        ft.trained(root, model="best")


def test_the_lowest_loss_is_the_best(tmp_path):
    folder = finished(tmp_path / "run", study(A, **WORLD, keep={"best": 3, "by": "loss"})) / "a" / "0"
    assert set(kept_in(folder)) == {*by_hand(folder, 3, "loss", 1), 16}


def test_a_client_is_predicted_with_the_memory_of_that_round(tmp_path):
    root = finished(tmp_path / "run", study(DITTO, **WORLD, keep=TWO))
    number = by_hand(root / "ditto" / "0", 1)[0]
    short = finished(tmp_path / "short", study(DITTO, **{**WORLD, "rounds": number}))
    ours, theirs = ft.trained(root, model="best"), ft.trained(short)
    rows = theirs.rows(8)
    for client in range(4):
        assert torch.equal(ours.predict(rows, client).told, theirs.predict(rows, client).told)


def test_large_memory_stays_as_long_as_a_checkpoint_that_counts_on_it(tmp_path):
    memory = MemoryStore(tmp_path / "memory", small=0)

    def saved(number: int, kept: list[int]) -> set[str]:
        memory.stage(1, {"c": torch.full((2,), float(number))})
        memory.commit((number - 1, 0), [1])
        start = checkpoint.Start(torch.zeros(1), number)
        checkpoint.save(tmp_path / "c", start, memory, config="x", marks={}, keep=kept)
        return {path.name.split(".")[1] for path in (tmp_path / "memory").iterdir()}

    assert saved(1, [1]) == {"0"}
    assert saved(2, [1]) == {"0", "1"}
    assert saved(3, [3, 1]) == {"0", "2"}
    assert saved(4, [3, 1]) == {"0", "2", "3"}
    again = MemoryStore(tmp_path / "memory", small=0)
    checkpoint.load(tmp_path / "c", again, config="x")
    assert len(list((tmp_path / "memory").iterdir())) == 3
    again.read_index(tmp_path / "c" / "00000001" / "memory.safetensors")
    again.check_files()
    memory = again
    checkpoint.load(tmp_path / "c", memory, config="x")
    assert saved(5, [3]) == {"2", "4"}
    memory.clear()
    assert not list((tmp_path / "memory").iterdir())


# -- kills -------------------------------------------------------------------------------------------------------------


def _play_and_die(root: Path, text: str, name: str, at: int) -> None:
    """Play a run, and kill this process when it calls a function of checkpoints for the `at`-th time."""
    function, calls = getattr(checkpoint, name), []

    def deadly(*given, **named):
        calls.append(name)
        if len(calls) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*given, **named)

    setattr(checkpoint, name, deadly)
    list(run_of(from_dict(tomllib.loads(text)), root).play())


def test_kills_lose_none(tmp_path):
    experiment = study(DITTO, **WORLD, keep=TWO, checkpoint_every=5)
    whole = run_of(experiment, tmp_path / "whole")
    list(whole.play())
    processes = multiprocessing.get_context("fork")
    for name in ("_remove_old", "_remove", "flush", "_indexes"):
        for at in (2, 5):
            root = tmp_path / f"{name}-{at}"
            given = (root, to_toml(experiment), name, at)
            process = processes.Process(target=_play_and_die, args=given)
            process.start()
            process.join()
            assert process.exitcode == -signal.SIGKILL, (name, at)
            run = run_of(experiment, root)
            about = checkpoint.check(run.folder / "checkpoints", config=digest_of(experiment, run.method, 0))
            for number in () if about is None else about.kept:
                assert (run.folder / "checkpoints" / f"{number:08d}" / "state.safetensors").is_file()
            list(run.play())
            assert kept_in(run.folder) == kept_in(whole.folder)
            assert record_of(root) == record_of(tmp_path / "whole")


def test_a_stopped_run_goes_on_with_its_best(tmp_path):
    experiment = study(A, **WORLD, keep=TWO)
    whole, stopped = (run_of(experiment, tmp_path / name) for name in ("whole", "stopped"))
    list(whole.play())
    for until in (3, 4, 9, None):
        list(stopped.play(until=until))
    assert kept_in(stopped.folder) == kept_in(whole.folder)
    assert record_of(tmp_path / "stopped") == record_of(tmp_path / "whole")


def test_commands_choose_the_best(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    root = finished(tmp_path / "run", study(A, **WORLD, keep=TWO))
    best = by_hand(root / "a" / "0", 2)
    (tmp_path / "rows.csv").write_text("a,b,c,d\n1,2,3,4\n")
    for choice, number in (("best", best[0]), ("last", 16), (str(best[1]), best[1])):
        assert done("export", "run", "--format", "safetensors", "--model", choice) == 0
        assert f"after round {number}:" in capsys.readouterr().out
        assert done("predict", "run", "rows.csv", "--model", choice, "--out", f"{choice}.csv") == 0
        assert f"after round {number}:" in capsys.readouterr().out
    files = sorted(path.name for path in tmp_path.glob("a-0*"))
    assert files == sorted(["a-0-best.safetensors", "a-0.safetensors", f"a-0-{best[1]}.safetensors"])
    assert done("predict", "run", "rows.csv", "--model", "worst", "--out", "x.csv") == 2
    assert "--model: found 'worst', allowed: last," in capsys.readouterr().err


# -- choices and mistakes ----------------------------------------------------------------------------------------------


def test_a_model_that_is_not_kept(tmp_path):
    root = finished(tmp_path / "plain", study(A, **WORLD))
    with pytest.raises(
        FedtideError, match=r"--model: found 'best', but the run has kept no others.*; allowed: last, 16$"
    ):
        ft.trained(root, model="best")
    root = finished(tmp_path / "run", study(A, **WORLD, keep={}))
    best = by_hand(root / "a" / "0", 1)[0]
    with pytest.raises(FedtideError, match=rf"--model: found '3', allowed: last, {best}, .*best$"):
        ft.trained(root, model=3)


@pytest.mark.parametrize(("changes", "line"), [
    ({"keep": {"best": 0}}, "keep.best: found 0, allowed: 1 or more"),
    ({"keep": {"by": "acuracy"}}, "keep.by: found 'acuracy', did you mean 'accuracy'?"),
    ({"keep": {"by": "auc"}}, "keep.by: found 'auc'"),
    ({"keep": {"worst": 1}}, "keep.worst"),
])  # fmt: skip
def test_a_wrong_table(changes, line):
    with pytest.raises(FedtideError) as raised:
        from_dict(raw(A, **changes))
    assert line in str(raised.value)


def test_a_metric_that_the_study_names_may_be_the_measure(tmp_path):
    folder = finished(tmp_path / "run", study(A, **WORLD, metrics=["auc"], keep={"by": "auc"})) / "a" / "0"
    assert set(kept_in(folder)) == {*by_hand(folder, 1, "auc"), 16}


@pytest.mark.parametrize("changes", [{"data": {"split": {"val": 0}}}, {"eval_splits": ["train_clients"]}])
def test_without_validation_rows_none_is_best(changes):
    with pytest.raises(FedtideError, match=r"keep.best: found 1, but no evaluation is on validation rows"):
        preflight(study(A, **{**WORLD, **changes}, keep={}))


def test_the_table_is_written_out_and_part_of_a_run(tmp_path):
    plain, keeping = study(A), study(A, keep=TWO)
    assert digest_of(plain, plain.method[0], 0) != digest_of(keeping, keeping.method[0], 0)
    assert from_dict(raw(A), sets=["keep.best=2"]).keep == keeping.keep
    create(keeping, tmp_path / "run")
    assert tomllib.loads((tmp_path / "run" / "config.toml").read_text())["keep"]["best"] == 2
