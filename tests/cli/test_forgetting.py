"""Forgetting as a person measures it: a table in the file, maps in the report, one line for every mistake."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from helpers.shell import contents, done, refused, written
from helpers.studies import SCAFFOLD, A

SKEWED = {
    "source": {"kind": "gaussians", "samples": 400, "dims": 4, "classes": 5},
    "partition": {"kind": "dirichlet", "clients": 8, "alpha": 0.1},
    "groups": {"by": "none"},
    "held_out_clients": {"clients": 0},
}


pytestmark = pytest.mark.usefixtures("here")


def study(here: Path, *methods, forgetting=None, **changes) -> Path:
    changes = {"data": SKEWED, "shift": {"who": "always"}, "rounds": 4} | changes
    if forgetting is not None:
        changes["forgetting"] = forgetting
    return written(here / "study.toml", *(methods or (A,)), **changes)


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "forgetting.jsonl").read_text().splitlines()]


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


def test_workers_and_resuming_leave_the_same(here, undrawn, monkeypatch, pool):
    study(here, SCAFFOLD, forgetting={"rounds": [0, 2, 3], "eval_clients": 5})
    assert done("run", "study.toml", "--out", "one") == 0
    monkeypatch.setattr("fedtide.runs.experiment.Pool", lambda size, joined: nullcontext(pool))  # that of all tests
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
    ({"rounds": [0.5]}, "forgetting.rounds[0]: found 0.5, allowed: a whole number"),
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


# -- damaged folders ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The folder of a finished study."""
    folder = tmp_path_factory.mktemp("whole")
    study(folder, forgetting={"rounds": [0, 3]})
    assert done("run", folder / "study.toml", "--out", folder / "x") == 0
    return folder / "x"
