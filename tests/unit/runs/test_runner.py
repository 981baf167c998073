"""One run: what it records, and that stopping, dying and going on leave the same bytes."""

import csv
import gc
import shutil

import pytest
import torch

from fedtide.config import from_dict
from fedtide.core import checkpoint, codec
from fedtide.core import record as records
from fedtide.core.base import Cost, Moment, Notes
from fedtide.core.errors import FedtideError
from fedtide.core.memory import MemoryStore
from fedtide.core.trees import same
from fedtide.evaluate.rounds import losses
from fedtide.fleets.ask import Ask, Query
from fedtide.fleets.scoring import Clients
from fedtide.runs import runner
from fedtide.runs.digest import digest_of
from fedtide.runs.folder import plan
from helpers.blended import BLEND, SPLITTING
from helpers.studies import MOMENTUM, SCAFFOLD, STEADY, A, finished, lines_of, record_of, run_of, study
from helpers.toys import TOY


def left_in(folder) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# -- the record --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rounds", "every", "judged"), [
    (6, 2, [1, 3, 5]), (6, 4, [3, 5]), (5, 2, [1, 3, 4]), (3, 100, [2]), (3, 1, [0, 1, 2]), (1, 8, [0]),
])  # fmt: skip
def test_the_state_is_judged_every_so_many_rounds_and_after_the_last(tmp_path, rounds, every, judged):
    run = run_of(study(rounds=rounds, eval_every=every), tmp_path)
    told = list(run.play())
    lines = lines_of(run.folder)
    assert [line["round"] for line in lines] == list(range(rounds))
    assert [line["round"] for line in lines if "scores" in line] == judged
    assert [p.round for p in told] == list(range(1, rounds + 1))
    assert [p.accuracy for p in told] == [
        line["scores"]["held_out_clients"]["accuracy"] if "scores" in line else None for line in lines
    ]
    with open(run.folder / "clients.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(r["round"]) for r in rows] == [r for r in judged for _ in range(8 + 2 + 8)]


@pytest.mark.parametrize("when", [1, 2, 3])
def test_a_folder_that_is_removed_while_the_run_is_played_is_one_clear_line(tmp_path, when):
    run = run_of(study(rounds=6, checkpoint_every=2), tmp_path)
    playing = run.play()
    for _ in range(when):
        next(playing)
    shutil.rmtree(tmp_path)
    with pytest.raises(
        FedtideError,
        match="moved or removed while it was played; allowed: fedtide resume NEW_PLACE if it was moved, else a new run",
    ):
        list(playing)
    assert not tmp_path.exists()


def test_a_line_by_hand(tmp_path):
    """43 parameters: 172 bytes down to each of four; up the same, with two weights and a loss."""
    run = run_of(study(), tmp_path)
    list(run.play())
    lines = lines_of(run.folder)
    for number, line in enumerate(lines):
        assert line["seconds"] == number + 1
        assert (line["asked"], line["answered"], line["refused"]) == (4, 4, 0)
        assert (line["down"], line["up"]) == (4 * 172, 4 * (172 + 3 * 8))
        assert line["samples"] == 4 * 8  # one epoch of eight rows
        assert sum(line["groups"]) == 4
        assert set(line["participants"]) == {"accuracy", "loss"}
        assert set(line["facts"]) == {"loss"}
    assert [line["expected"] for line in lines] == [[1, 0], [0.5, 0.5], [0, 1], [0.5, 0.5], [1, 0], [0.5, 0.5]]
    assert [lines[r]["groups"] for r in (0, 2, 4)] == [[4, 0], [0, 4], [4, 0]]
    assert set(lines[1]["scores"]) == {"train_clients", "held_out_clients", "val"}
    assert lines[1]["scores"]["train_clients"]["rows"] == 24


DIVERGES = {**A, "name": "diverges", "local": {"lr": 1e30, "batch_size": 4}}


def test_a_run_in_which_no_client_answers_ends_and_says_why(tmp_path):
    """Eight clients, of which four are asked in each round, half of them by day."""
    run = run_of(study(DIVERGES, rounds=30), tmp_path)
    with pytest.raises(
        FedtideError, match=r"^method 'diverges', seed 0: round \d+: no answer has counted for \d+ rounds"
    ):
        list(run.play())
    lines = lines_of(run.folder)
    assert 3 <= len(lines) < 15
    assert {line["answered"] for line in lines} == {0}


def test_a_run_in_which_no_client_ever_had_anything_to_say_ends_again_when_it_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(Clients, "answer", lambda *given: None)
    run = run_of(study(rounds=30, checkpoint_every=1, shift={"who": "always"}), tmp_path)
    played = []
    for _ in range(2):
        with pytest.raises(FedtideError, match=r"no answer has counted for \d+ rounds: abstained"):
            list(run.play())
        played.append(len(lines_of(run.folder)))
    assert played == sorted(played)
    assert played[-1] < 30


def test_other_runs_go_on(tmp_path):
    experiment = study(DIVERGES, A, rounds=30)
    with pytest.raises(FedtideError, match=r"'diverges', seed 0: .*not finite"):
        finished(tmp_path / "runs", experiment)
    assert [run.finished for run in plan(experiment, tmp_path / "runs")] == [False, True]


def asked(answered=(), **failed):
    return runner.Outcome("train", len(answered), failed)


def test_rounds_in_which_nobody_could_answer_are_no_failures():
    failures = runner.Failures()
    for queries in ([asked(late=[1, 2])], [], [asked()], [asked(late=[1], lost=[3])], [asked(lost=[2])]):
        failures.check(3, 0)
        failures = failures.add(queries)
    failures.check(4, 0)  # one of four has not failed
    with pytest.raises(FedtideError, match=r"for 3 rounds: late \(3\), lost \(2\)"):
        failures.check(3, 0)
    failures.add([asked(late=[1]), asked([1])]).check(0, 0)


def test_a_run_ends_in_an_error_if_no_answer_has_ever_counted():
    failures = runner.Failures().add([asked(lost=[2])])
    failures.check(12, 3, rounds=5)  # eleven of twelve have not failed, and a round is left
    with pytest.raises(FedtideError, match=r"round 4: no answer has counted in any round: lost \(1\)"):
        failures.check(12, 4, rounds=5)
    failures.add([asked([1])]).add([asked(lost=[2])]).check(12, 4, rounds=5)
    runner.Failures().check(12, 4, rounds=5)  # nobody was there


@pytest.mark.parametrize("earlier", [[], [asked([1])]])
def test_clients_may_abstain_once_an_answer_has_counted(earlier):
    failures = runner.Failures()
    for queries in [*([query] for query in earlier), *[[asked(abstained=[1, 2, 3])]] * 3]:
        failures = failures.add(queries)
    if earlier:
        failures.check(3, 0)
    else:
        with pytest.raises(FedtideError, match="abstained"):
            failures.check(3, 0)


def test_clients_that_train_alone_abstain_if_nothing_is_new(tmp_path):
    alone = {"name": "alone", "algorithm": "local"}
    run = run_of(study(alone, rounds=6, checkpoint_every=2, shift={"who": "always"}), tmp_path)
    list(run.play(until=3))
    list(run.play())
    assert [line["answered"] for line in lines_of(run.folder)] == [8, 0, 0, 0, 0, 0]


def test_quantiles_by_hand():
    """Two asks of a round; whoever tells of no loss counts for nothing."""

    def asked(notes):
        none = torch.empty(0, dtype=torch.int64)
        return Query(Ask("train", "train", Moment(0, 1), none), None, none, none, Cost(), 0.0, notes)

    def told(*values):
        return {n: Notes(loss=torch.tensor(v, dtype=torch.float64)) for n, v in enumerate(values)}

    got = losses([asked(told(3.0, 1.0, 2.00000049)), asked({7: Notes(loss=torch.tensor(5.0)), 8: Notes()})])
    assert got == {"client_loss": {"min": 1.0, "q25": 1.75, "q50": 2.5, "q75": 3.5, "max": 5.0}}
    assert losses([asked({1: Notes()})]) == losses([]) == {}
    assert losses([asked(told(float("inf"), 1.0))])["client_loss"].keys() == got["client_loss"].keys()


TWICE = {**BLEND["shift"], "what": {**BLEND["shift"]["what"], "cycles": 2}}


def blend(*methods, **changes):
    return from_dict({**BLEND, "model": TOY["model"], "method": list(methods or [SPLITTING]), **changes})


def test_the_true_blend_and_the_split_of_rows_are_told(tmp_path):
    """Four participants hold 20 rows each; of day there is 1 - rho, of which cosine has 0 and 1 after a half cycle."""
    run = run_of(blend(shift=TWICE), tmp_path)
    list(run.play())
    lines = lines_of(run.folder)
    assert [line["domains"] for line in lines[::3]] == [[1.0, 0.0], [0.0, 1.0]] * 2
    for line in lines:
        assert sum(line["domains"]) == pytest.approx(1)
        assert [sum(row) / 80 for row in line["split"]] == pytest.approx(line["domains"])
        went = [sum(column) / 80 for column in zip(*line["split"], strict=True)]
        assert went == pytest.approx(line["facts"]["pi"], abs=0.2)  # what is hard is soft


def test_the_true_blend_is_told_of_any_method_and_of_no_other_shift(tmp_path):
    run = run_of(blend(A, {**A, "name": "steady", "shift": {"what": "static"}}, rounds=1), tmp_path)
    list(run.play())
    (line,) = lines_of(run.folder)
    assert (line["domains"], "split" in line) == ([1.0, 0.0], False)
    other = run_of(run.experiment, tmp_path, method=1)
    list(other.play())
    assert not {"domains", "split"} & set(lines_of(other.folder)[0])


def test_a_component_for_each_training_row_or_an_error(tmp_path):
    run = run_of(blend({**SPLITTING, "short": True}, rounds=1), tmp_path)
    with pytest.raises(
        FedtideError, match=r"note 'component': found 19 rows, client \d trains on 20; allowed: one for"
    ):
        list(run.play())


def test_more_asked_than_a_group_has_are_filled_in_and_counted(tmp_path):
    run = run_of(study({**A, "cohort": 6}), tmp_path)
    list(run.play())
    assert [line["substituted"] for line in lines_of(run.folder)][::2] == [2, 2, 2]
    assert [line["groups"] for line in lines_of(run.folder)][::2] == [[4, 2], [2, 4], [4, 2]]


def test_drop_outs_are_asked_and_do_not_answer(tmp_path):
    run = run_of(study(shift={"who": {"kind": "always", "dropout_rate": 0.5}}, rounds=8), tmp_path)
    list(run.play())
    lines = lines_of(run.folder)
    assert {line["asked"] for line in lines} == {4}
    assert len({line["answered"] for line in lines}) > 1
    assert all(line["up"] == line["answered"] * 196 for line in lines)


def test_methods_meet_the_same_participants(tmp_path):
    experiment = study(A, MOMENTUM, {**A, "name": "prox", "algorithm": "fedprox"})
    met = []
    for number in range(3):
        run = run_of(experiment, tmp_path, method=number)
        list(run.play())
        met.append([line["groups"] for line in lines_of(run.folder)])
    assert met[0] == met[1] == met[2]


def test_the_shift_is_saved_once_and_apart_for_a_method_with_its_own(tmp_path):
    experiment = study(A, MOMENTUM, STEADY)
    for number in range(3):
        list(run_of(experiment, tmp_path, method=number).play())
    assert sorted(path.name for path in (tmp_path / "shift").iterdir()) == ["0-steady.safetensors", "0.safetensors"]
    saved = codec.from_file(tmp_path / "shift" / "0.safetensors")
    assert saved["arrivals"].shape == (6, 4)
    assert saved["registered"] == 8


# -- stopping and going on ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Undisturbed runs of a method without and of one with memory."""
    made = {}
    for method in (A, SCAFFOLD):
        run = run_of(study(method), tmp_path_factory.mktemp("whole"))
        list(run.play())
        made[method["name"]] = left_in(run.folder)
    return made


def unchanged(run, before: dict[str, bytes]) -> None:
    after = left_in(run.folder)
    kept = [
        name
        for name in before
        if name.endswith(("rounds.jsonl", "clients.csv", "state.safetensors", "memory.safetensors"))
    ]
    assert len(kept) == 4
    for name in kept:
        assert after[name] == before[name]


@pytest.mark.parametrize("method", [A, SCAFFOLD], ids=lambda m: m["name"])
@pytest.mark.parametrize("at", range(1, 6))
def test_stopping_after_any_round_and_going_on_gives_the_same_bytes(tmp_path, whole, method, at):
    run = run_of(study(method), tmp_path)
    rounds = iter(range(1, 7))
    assert [p.round for p in run.play(lambda: next(rounds) == at)] == list(range(1, at + 1))
    assert [p.round for p in run.play()] == list(range(at + 1, 7))
    unchanged(run, whole[method["name"]])


@pytest.mark.parametrize("every", [None, 1, 2, 4])
@pytest.mark.parametrize("at", [1, 3, 5])
def test_dying_after_any_round_and_going_on_gives_the_same_bytes(tmp_path, whole, every, at):
    """The process is gone: nothing is saved beyond the last checkpoint, and there may be none."""
    run = run_of(study(SCAFFOLD, checkpoint_every=every), tmp_path)
    playing = run.play()
    for _ in range(at):
        next(playing)
    playing.close()
    first = next(iter(run.play())).round
    assert first == (at // every * every if every else 0) + 1
    list(run.play())
    unchanged(run, whole["scaffold"])


def test_a_run_that_another_process_plays_is_left_alone(tmp_path, monkeypatch):
    """Its memory lies in files, which whoever goes on with a run that was killed would tidy away."""
    monkeypatch.setattr(runner, "MemoryStore", lambda folder: MemoryStore(folder, small=0))
    run = run_of(study(SCAFFOLD, checkpoint_every=2), tmp_path)
    playing = run.play()
    for _ in range(3):
        next(playing)
    before = left_in(run.folder)
    with pytest.raises(FedtideError, match="another process is playing this run"):
        list(run_of(study(SCAFFOLD, checkpoint_every=2), tmp_path).play())
    gc.collect()  # a file that was left open is told now
    assert left_in(run.folder).keys() == before.keys()
    assert [p.round for p in playing] == [4, 5, 6]


def test_checkpoints_follow_the_clock_where_nothing_else_is_said(tmp_path, monkeypatch):
    saved = []
    monkeypatch.setattr(runner.checkpoint, "save", lambda folder, start, *rest, **named: saved.append(start.round))
    list(run_of(study(), tmp_path / "slow").play())
    assert saved == [6]
    monkeypatch.setattr(runner, "SAVE_SECONDS", 0.0)
    list(run_of(study(), tmp_path / "quick").play())
    assert saved == [6, 1, 2, 3, 4, 5, 6]


def test_a_checkpoint_holds_the_state_and_where_the_record_was(tmp_path):
    run = run_of(study(checkpoint_every=1), tmp_path)
    playing = run.play()
    for _ in range(3):
        next(playing)
    playing.close()
    resumed = checkpoint.load(
        run.folder / "checkpoints", runner.MemoryStore(None), config=digest_of(run.experiment, run.method, 0)
    )
    assert (resumed[0].round, resumed[0].seconds) == (3, 3.0)
    files = ("rounds.jsonl", "timings.jsonl", "clients.csv", "../../shift/0.safetensors")
    assert resumed[1] == {name: records.whole(run.folder / name) for name in files}


# -- what a checkpoint belongs to --------------------------------------------------------------------------------------

OTHER = {
    "rounds": {"rounds": 7},
    "evaluation": {"eval_every": 3},
    "model": {"model": {"hidden": [6]}},
    "data": {"data": {"split": {"val": 0.1, "test": 0.25}}},
    "shift": {"shift": {"who": {"kind": "periodic", "period": 8}}},
    "precision": {"precision": "fp64"},
    "threads": {"fleet": {"threads": 2}},
}


@pytest.mark.parametrize("change", OTHER)
def test_a_checkpoint_of_another_configuration_is_refused_and_left_alone(tmp_path, change):
    run = run_of(study(), tmp_path)
    next(run.play(lambda: True))
    before = left_in(run.folder)
    with pytest.raises(FedtideError, match="this checkpoint belongs to another configuration"):
        list(run_of(study(**OTHER[change]), tmp_path).play())
    assert left_in(run.folder) == before


@pytest.mark.parametrize("change", [
    {"title": "another"}, {"description": "another"}, {"fleet": {"kind": "workers", "workers": 2}},
    {"checkpoint_every": 3}, {"baseline": "A"}, {"average_last": 3}, {"data": {"directory": "elsewhere"}},
])  # fmt: skip
def test_what_changes_no_number_may_change(tmp_path, change):
    run = run_of(study(), tmp_path)
    next(run.play(lambda: True))
    assert [p.round for p in run_of(study(**change), tmp_path).play()] == [2, 3, 4, 5, 6]


# -- through the workers engine ----------------------------------------------------------------------------------------


def test_large_memory_goes_with_the_run(tmp_path, monkeypatch):
    """Rows in files instead of RAM: the same record, and the files of the last checkpoint only."""
    import fedtide.core.memory as memory

    monkeypatch.setattr(memory, "SMALL", 0)
    monkeypatch.setattr(runner, "MemoryStore", lambda folder: memory.MemoryStore(folder, small=0))
    small = run_of(study(SCAFFOLD, checkpoint_every=2), tmp_path / "files")
    playing = small.play()
    for _ in range(5):
        next(playing)
    playing.close()
    list(small.play())
    files = sorted(path.name for path in (small.folder / "memory").iterdir())
    named = codec.from_file(small.folder / "checkpoints" / "00000006" / "memory.safetensors")["files"]
    assert files == sorted(f"{client}.{when}.{asked}.safetensors" for client, when, asked, _ in named)
    monkeypatch.undo()
    plain = run_of(study(SCAFFOLD), tmp_path / "ram")
    list(plain.play())
    ours, theirs = record_of(small.folder), record_of(plain.folder)
    state = "checkpoints/00000006/state.safetensors"
    assert ours["rounds.jsonl"] == theirs["rounds.jsonl"]
    assert ours[state] == theirs[state]
    assert same(codec.from_file(small.folder / state), codec.from_file(plain.folder / state))
