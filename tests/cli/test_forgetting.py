"""Forgetting as a person measures it: a table in the file, maps in the report, one line for every mistake."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest

from fedtide.config import read
from helpers.shell import contents, done, refused, written
from helpers.studies import SCAFFOLD, A

PROX = {**A, "name": "prox", "algorithm": "fedprox", "local": {**A["local"], "proximal": 1.0}}
SKEWED = {
    "source": {"kind": "gaussians", "samples": 400, "dims": 4, "classes": 5},
    "partition": {"kind": "dirichlet", "clients": 8, "alpha": 0.1},
    "groups": {"by": "none"},
    "held_out_clients": {"clients": 0},
}
MAPS = ["who holds which labels", "local client forgetting", "local forgetting over rounds"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def study(here: Path, *methods, forgetting=None, **changes) -> Path:
    changes = {"data": SKEWED, "shift": {"who": "always"}, "rounds": 4} | changes
    if forgetting is not None:
        changes["forgetting"] = forgetting
    return written(here / "study.toml", *(methods or (A,)), **changes)


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "forgetting.jsonl").read_text().splitlines()]


def pictures(page: Path) -> list[str]:
    return re.findall(r'<svg[^>]*aria-label="([^"]*)"', page.read_text(encoding="utf-8"))


def test_a_study_of_forgetting_has_its_maps_its_table_and_its_record(capsys, here):
    study(here, A, PROX, forgetting={"rounds": [0, 3]}, seeds=[0, 1])
    assert done("run", "study.toml", "--workers", 1) == 0
    root = here / "runs" / "study"
    assert re.search(r"local forgetting *\n", capsys.readouterr().out)
    assert read(root / "config.toml").forgetting == read(here / "study.toml").forgetting
    for method in ("a", "prox"):
        for seed in "01":
            found = lines(root / method / seed)
            assert [line["round"] for line in found] == [0, 3]
            assert all(len(line["models"]) == len(line["owners"]) == 4 for line in found)
    text = (root / "report.html").read_text(encoding="utf-8")
    assert [name for name in pictures(root / "report.html") if name in MAPS] == MAPS
    for words in (
        "A, round 0",
        "A, round 3",
        "prox, round 0",
        "prox, round 3",
        "accuracy lost by local training, points",
    ):
        assert words in text
    measures = json.loads((root / "summary.json").read_text())["methods"][1]["measures"]
    means = [sum(line["forgetting"]["mean"] for line in lines(root / "prox" / seed)) / 2 for seed in "01"]
    assert measures["local_forgetting"]["values"] == pytest.approx(means)
    mean = f"{100 * sum(means) / 2:.1f}"
    assert re.search(
        rf">Forgetting within a round <a class=.*?<td>{re.escape(mean)} ± [\d.]+ points</td>", text, re.DOTALL
    )
    assert ">on rows of clients without a common class</th>" in text


def test_without_it_there_is_nothing_of_it(capsys, here):
    study(here)
    assert done("run", "study.toml") == 0
    root = here / "runs" / "study"
    assert not list(root.rglob("forgetting.jsonl"))
    assert "forgetting" not in (root / "config.toml").read_text() + capsys.readouterr().out
    assert [name for name in pictures(root / "report.html") if name in MAPS] == MAPS[:1]
    assert ">Forgetting within" not in (root / "report.html").read_text()


def test_what_cannot_be_probed_is_said_in_the_report_and_stops_nothing(here):
    study(here, A, {**A, "name": "fitting", "algorithm": "helpers.unprobed:fitting"}, forgetting={"rounds": [1, 3]})
    assert done("run", "study.toml", "--workers", 1) == 0
    root = here / "runs" / "study"
    why = "no client was asked the question 'train'"
    assert lines(root / "fitting" / "0") == [{"round": 1, "skipped": why}, {"round": 3, "skipped": why}]
    text = (root / "report.html").read_text()
    assert "Local forgetting of fitting cannot be measured: no client was asked the question &#39;train&#39;." in text
    assert "fitting, round 1" not in text
    measures = {m["name"]: m["measures"] for m in json.loads((root / "summary.json").read_text())["methods"]}
    assert "local_forgetting" in measures["A"]
    assert "local_forgetting" not in measures["fitting"]


def test_workers_and_resuming_leave_the_same(here, monkeypatch, pool):
    study(here, SCAFFOLD, forgetting={"rounds": [0, 2, 3], "eval_clients": 5})
    monkeypatch.setattr("fedtide.report.page.pictures_of", lambda record: [])
    assert done("run", "study.toml", "--out", "one") == 0
    monkeypatch.setattr("fedtide.runs.parallel.Pool", lambda size, joined: nullcontext(pool))  # that of all tests
    assert done("run", "study.toml", "--out", here / "two", "--workers", 2) == 0
    for file in ("forgetting.jsonl", "rounds.jsonl"):
        one, two = ((here / part / "scaffold" / "0" / file).read_bytes() for part in ("one", "two"))
        assert one == two
    before = contents(here / "one")
    assert done("resume", "one") == 0
    after = contents(here / "one")
    assert all(after[name] == before[name] for name in before if not name.endswith(("report.html", "summary.json")))


@pytest.mark.parametrize(("forgetting", "said"), [
    ({"rounds": [4]}, "forgetting.rounds: found 4, allowed: 0 to 3"),
    ({"rounds": [1, 0, 1]}, "forgetting.rounds: found 1 twice, allowed: each once"),
    ({"rounds": []}, "forgetting.rounds: found [], allowed: one value or more"),
    ({"rounds": [0.5]}, "forgetting.rounds[0]: found 0.5, allowed: a whole number"),
    ({"eval_clients": 3}, "forgetting.rounds: missing"),
    ({"rounds": [0], "part": "train"}, "forgetting.part: found 'train', allowed: val, test"),
    ({"rounds": [0], "eval_clients": "all"},
     "forgetting.eval_clients: found 'all', allowed: 'participants', or a whole number of 1 or more"),
])  # fmt: skip
def test_a_mistake_is_one_line_and_leaves_no_folder(capsys, here, forgetting, said):
    study(here, forgetting=forgetting)
    assert refused(capsys, here, "run", "study.toml") == f"study.toml: {said}"


def test_rows_that_nobody_has_are_a_mistake(capsys, here):
    study(here, data=SKEWED | {"split": {"val": 0.0, "test": 0.25}}, forgetting={"rounds": [0]})
    said = refused(capsys, here, "run", "study.toml")
    assert said.startswith("forgetting.part: found 'val', but no registered client has such rows; allowed: 'test'")


def test_a_sweep_over_rounds_is_checked_at_every_point(capsys, here):
    study(here, forgetting={"rounds": [3]}, sweep={"rounds": [4, 2]})
    said = refused(capsys, here, "run", "study.toml")
    assert said == "study.toml: sweep point 'rounds 2': forgetting.rounds: found 3, allowed: 0 to 1"


# -- damaged folders ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The folder of a finished study."""
    folder = tmp_path_factory.mktemp("whole")
    study(folder, forgetting={"rounds": [0, 3]})
    assert done("run", folder / "study.toml", "--out", folder / "x") == 0
    return folder / "x"


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text.splitlines()[0] + "\n",
        lambda text: "{nonsense\n" + text,
        lambda text: '{"round": 0}\n' + text,
        lambda text: "3\n" + text,
    ],
)
def test_a_damaged_record_is_one_line(capsys, here, whole, damage):
    path = shutil.copytree(whole, here / "x") / "a" / "0" / "forgetting.jsonl"
    path.write_text(damage(path.read_text()))
    assert "a/0/forgetting.jsonl: damaged (" in refused(capsys, here, "report", "x")
