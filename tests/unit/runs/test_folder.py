"""The run folder: new, whole, and never written over."""

import json
import sys
from pathlib import Path

import pytest

from fedtide.config import read
from fedtide.core.errors import FedtideError
from fedtide.runs import folder
from helpers.studies import MOMENTUM, A, run_of, study


def names(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def test_a_new_folder_holds_the_whole_configuration_and_what_it_was_made_with(tmp_path):
    root = tmp_path / "deep" / "down" / "run"
    folder.create(study(A, MOMENTUM), root)
    assert names(root) == ["config.toml", "environment.json"]
    assert folder.load(root) == study(A, MOMENTUM)
    about = json.loads((root / "environment.json").read_text())
    assert set(about) == {"made", "command", "python", "platform", "processor", "cores", "packages"}
    assert set(about["packages"]) == set(folder.PACKAGES)
    assert about["packages"]["torch"].startswith("2.")


def test_code_of_ones_own_is_known_by_file_digest_and_commit(tmp_path, monkeypatch):
    file = tmp_path / "my_models_for_tests.py"
    file.write_text("from torch import nn\n\n\ndef net():\n    return nn.Linear(4, 3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(folder, "_git", lambda file, *arguments: {"rev-parse": "abc\n", "status": ""}[arguments[0]])
    experiment = study(A, model="python:my_models_for_tests:net")
    experiment.model.build((4,), 3)
    folder.create(experiment, tmp_path / "run")
    code = json.loads((tmp_path / "run" / "environment.json").read_text())["code"]["my_models_for_tests"]
    assert (code["file"], code["commit"], code["changed"]) == (str(file), "abc", False)
    assert list(folder.changed_code(tmp_path / "run")) == []
    file.write_text("def net(): ...\n")
    assert list(folder.changed_code(tmp_path / "run")) == [str(file)]
    (tmp_path / "run" / "environment.json").write_text("{")
    assert list(folder.changed_code(tmp_path / "run")) == list(folder.changed_code(tmp_path)) == []
    sys.modules.pop("my_models_for_tests")


@pytest.mark.parametrize("content", ["config.toml", "anything"])
def test_a_folder_with_something_in_it_is_left_alone(tmp_path, content):
    (tmp_path / content).write_text("mine")
    with pytest.raises(FedtideError, match="already exists, allowed: a new or empty folder") as error:
        folder.create(study(), tmp_path)
    assert ("fedtide resume" in str(error.value)) == (content == "config.toml")
    assert names(tmp_path) == [content]
    assert (tmp_path / content).read_text() == "mine"


@pytest.mark.parametrize("path", ["", "nowhere", "file"])
def test_only_a_run_folder_can_be_gone_on_with(tmp_path, path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(FedtideError, match=r"not a run folder \((no config.toml in it|it is a file|there is none)\)"):
        folder.load(tmp_path / path)


def test_a_free_name_is_found(tmp_path):
    assert folder.unused(tmp_path, "x") == tmp_path / "x"
    for name in ("x", "x-2", "x-4"):
        (tmp_path / name).mkdir()
    assert folder.unused(tmp_path, "x") == tmp_path / "x-3"


def test_every_run_has_a_place_and_a_title(tmp_path):
    planned = folder.plan(study(A, {**MOMENTUM, "name": "With momentum!"}, seeds=[0, 5]), tmp_path)
    assert [(str(p.folder.relative_to(tmp_path)), p.title) for p in planned] == [
        ("a/0", "A · seed 0"), ("with-momentum/0", "With momentum! · seed 0"),
        ("a/5", "A · seed 5"), ("with-momentum/5", "With momentum! · seed 5"),
    ]  # fmt: skip
    swept = folder.plan(study(A, sweep={"method.local.lr": [0.5]}), tmp_path)
    assert [(str(p.folder.relative_to(tmp_path)), p.title) for p in swept] == [("lr-0.5/a/0", "lr 0.5 · A · seed 0")]


def test_a_run_is_finished_when_its_last_round_is_saved(tmp_path):
    experiment = study({**A, "name": "a"})
    (planned,) = folder.plan(experiment, tmp_path)
    assert not planned.finished
    list(run_of(experiment, tmp_path).play(lambda: True))
    assert not planned.finished
    list(run_of(experiment, tmp_path).play())
    assert planned.finished


def test_a_folder_is_read_as_the_same_experiment_in_any_place(tmp_path):
    folder.create(study(), tmp_path / "one")
    (tmp_path / "one").rename(tmp_path / "two")
    assert folder.load(tmp_path / "two") == read(tmp_path / "two" / "config.toml") == study()


def test_a_run_of_real_clients_goes_on_at_its_site(tmp_path):
    root = tmp_path / "site" / "run"
    root.mkdir(parents=True)
    assert folder.go_on(root) == f"fedtide resume {root}"
    (root.parent / "roster.toml").touch()
    assert folder.go_on(root) == f"fedtide serve {root.parent}"
