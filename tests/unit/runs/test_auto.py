"""`fleet.kind = "auto"`: measured before round 0, written down, never measured again."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from fedtide.cli.commands import main
from fedtide.config import to_toml
from fedtide.runs import auto, folder
from fedtide.runs.digest import digest_of
from helpers.toys import played, toy


@pytest.fixture
def wide(monkeypatch, pool):
    """A machine of three cores, on which every run is long enough to be measured; by the processes of all tests."""
    monkeypatch.setattr(auto, "Pool", lambda size, joined: nullcontext(pool))
    monkeypatch.setattr("fedtide.runs.parallel.cores", lambda: 3)
    monkeypatch.setattr(auto, "SHORT", 0.0)
    monkeypatch.setattr(auto, "shares", lambda threads: 1.0)


def pretending(monkeypatch, seconds, share=1.0):
    """Fleets need so many seconds for a round: local, workers, threads; for a share of them local has a core."""
    left = list(zip(seconds, [seconds[0] * share, 0.001, 0.1], strict=False))
    monkeypatch.setattr(auto, "timed", lambda once: (once(), left.pop(0))[1])


@pytest.mark.parametrize(
    ("seconds", "kind", "workers", "threads", "said"),
    [
        ((0.12, 0.087, 0.11), "workers", 3, 1, "workers x 3, 87 ms a round; local 120 ms; local, 3 threads 110 ms"),
        ((2.0, 3.0, 1.5), "local", None, 3, "local, 3 threads, 1.5 s a round; local 2 s; workers x 3 3 s"),
        ((0.1, 0.097, 0.2), "local", None, 1, "local, 100 ms a round; workers x 3 97 ms; local, 3 threads 200 ms"),
    ],
)  # fmt: skip
def test_the_fastest_fleet_is_chosen_if_clearly_so(wide, monkeypatch, seconds, kind, workers, threads, said):
    pretending(monkeypatch, seconds)
    choice = auto.resolve_auto(toy("fedavg", fleet={"kind": "auto"}))
    made = choice.experiment.fleet
    assert (made.kind, made.workers, made.threads, choice.message) == (kind, workers, threads, f"fleet: {said}")


def test_threads_are_not_taken_on_a_machine_that_others_use(wide, monkeypatch):
    """However fast they were while it was measured: another minute, and they wait for each other."""
    for seconds, kind, said in (
        ((2.0, 1.8, 1.0), "workers", "workers x 3, 1.8 s a round; local 2 s; local, 3 threads 1 s"),
        ((2.0, 3.0, 1.0), "local", "local, 2 s a round; workers x 3 3 s; local, 3 threads 1 s"),
    ):
        pretending(monkeypatch, seconds, share=0.7)
        choice = auto.resolve_auto(toy("fedavg", fleet={"kind": "auto"}))
        assert (choice.experiment.fleet.kind, choice.experiment.fleet.threads) == (kind, 1)
        assert choice.message == f"fleet: {said}; others use this machine, 30% of the time was waiting"


def test_every_fleet_computes_on_the_device_that_was_asked_for(wide, monkeypatch):
    asked = toy("fedavg", fleet={"kind": "auto", "device": "auto"})
    pretending(monkeypatch, (1.0, 1.0, 1.0))
    assert {each.settings.device for each in auto.measured(asked, None)} == {"auto"}
    assert auto.resolve_auto(asked.model_copy(update={"seeds": (0, 1)})).experiment.fleet.device == "auto"


def test_measuring_leaves_the_run_as_it_would_have_been(wide, monkeypatch):
    """Scaffold keeps memory: what was played to measure must not be in it."""
    monkeypatch.setattr(auto, "ROUNDS", 1)
    experiment = toy("scaffold", fleet={"kind": "auto"})
    before = played(toy("scaffold")).state
    auto.resolve_auto(experiment)
    after = played(toy("scaffold")).state
    assert all(before.weights.params[name].equal(after.weights.params[name]) for name in before.weights.params)


def test_a_short_run_and_several_runs_are_not_measured(monkeypatch):
    monkeypatch.setattr(auto, "Pool", None)
    short = auto.resolve_auto(toy("fedavg", fleet={"kind": "auto"}))
    assert (short.experiment.fleet.kind, short.workers) == ("local", None)
    assert short.message.startswith("fleet: local, ")
    monkeypatch.setattr(auto, "timed", None)
    several = auto.resolve_auto(toy("fedavg", fleet={"kind": "auto"}, seeds=[0, 1]), workers=5)
    assert (several.experiment.fleet.kind, several.workers) == ("local", 5)
    assert several.message == "fleet: local, 2 runs side by side"


def test_the_choice_is_written_down_and_resume_reads_it(wide, monkeypatch, tmp_path, capsys):
    file, root = tmp_path / "study.toml", tmp_path / "run"
    file.write_text(to_toml(toy("fedavg", fleet={"workers": 3})), encoding="utf-8")
    pretending(monkeypatch, (2.0, 3.0, 1.0))
    with pytest.raises(SystemExit) as left:
        main(["run", str(file), "--out", str(root), "--fleet", "auto"])
    assert left.value.code == 0
    assert "fleet: local, 3 threads, 1 s a round" in capsys.readouterr().out
    settings = folder.load(root)
    assert (settings.fleet.kind, settings.fleet.threads, settings.fleet.workers) == ("local", 3, None)
    monkeypatch.setattr(auto, "timed", None)  # would fail
    with pytest.raises(SystemExit) as left:
        main(["resume", str(root)])
    assert left.value.code == 0
    one = toy("fedavg")
    assert digest_of(settings, settings.method[0], 0) != digest_of(one, one.method[0], 0)  # threads are in it


@pytest.mark.parametrize(
    ("fleet", "line"), [("stacked", "method 'toy': fleet.kind: found 'stacked'"), ("ray-gun", "--fleet")]
)
def test_a_fleet_that_cannot_be_is_refused_before_anything_is_written(tmp_path, capsys, fleet, line):
    file, root = tmp_path / "study.toml", tmp_path / "run"
    file.write_text(to_toml(toy("cfl")), encoding="utf-8")
    with pytest.raises(SystemExit) as left:
        main(["run", str(file), "--out", str(root), "--fleet", fleet])
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert line in said
    assert said.count("\n") == 1
    assert not root.exists()
