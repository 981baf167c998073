"""`fleet.kind = "auto"`: chosen by sizes before round 0, and written down."""

import pytest

from fedtide.cli.commands import main
from fedtide.config import to_toml
from fedtide.runs import folder, preflight
from helpers.toys import toy


def test_a_large_run_gets_processes_and_a_small_one_does_not(monkeypatch):
    asked = toy("fedavg", fleet={"kind": "auto", "device": "auto"})
    small, line = preflight.resolve_auto(asked)
    assert (small.fleet.kind, small.fleet.device, line.partition(",")[0]) == ("local", "auto", "fleet: local")
    monkeypatch.setattr(preflight, "LARGE", 1)
    assert preflight.resolve_auto(asked)[0].fleet.kind == "local"  # too few rounds
    monkeypatch.setattr(preflight, "LONG", 1)
    large, line = preflight.resolve_auto(asked)
    assert (large.fleet.kind, large.fleet.device, line.partition(",")[0]) == ("workers", "auto", "fleet: workers")
    several, line = preflight.resolve_auto(asked.model_copy(update={"seeds": (0, 1)}))
    assert (several.fleet.kind, line) == ("local", "fleet: local, 2 runs side by side")


def test_the_choice_is_written_down(tmp_path, capsys):
    file, root = tmp_path / "study.toml", tmp_path / "run"
    file.write_text(to_toml(toy("fedavg")), encoding="utf-8")
    with pytest.raises(SystemExit) as left:
        main(["run", str(file), "--out", str(root), "--fleet", "auto"])
    assert left.value.code == 0
    assert "fleet: local, " in capsys.readouterr().out
    assert folder.load(root).fleet.kind == "local"


@pytest.mark.parametrize(
    ("fleet", "line"), [("stacked", "method 'toy': fleet.kind: found 'stacked'"), ("ray-gun", "--fleet")]
)
def test_a_fleet_that_cannot_be_is_refused_before_anything_is_written(tmp_path, capsys, fleet, line):
    file, root = tmp_path / "study.toml", tmp_path / "run"
    file.write_text(to_toml(toy("cfl")), encoding="utf-8")
    with pytest.raises(SystemExit) as left:
        main(["run", str(file), "--out", str(root), "--fleet", fleet])
    assert left.value.code == 2
    error = capsys.readouterr().err
    assert line in error
    assert error.count("\n") == 1
    assert not root.exists()
