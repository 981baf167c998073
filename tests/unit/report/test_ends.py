"""Every way in which an experiment can end has a report: nobody of a group judged, nobody at all, a sweep of one."""

import json
import shutil

import pytest

from fedtide.api import run
from fedtide.core.errors import FedtideError
from fedtide.report.page import write_report
from helpers.pages import Page
from helpers.studies import A, finished, raw, study

FEDTEM = {**A, "name": "FedTEM", "algorithm": "fedtem", "prior": {"kind": "linear", "period": 4}}
TURNS = {"rounds": 8, "seeds": [0, 1], "eval_every": 2, "baseline": "A"}
ENDS = {
    "one unseen client of two groups": {"data": {"held_out_clients": {"clients": 1}}},
    "one judged client of two groups": {"eval_clients": 1},
    "one judged client, unseen": {"eval_clients": 1, "data": {"held_out_clients": {"clients": 4}}},
    "no test rows": {"data": {"split": {"val": 0.0, "test": 0.0}}},
    "validation rows alone": {"data": {"split": {"val": 0.2, "test": 0.0}}},
    "judged once": {"eval_every": 100},
}


ALIKE = ("one unseen client of two groups", "one judged client of two groups")
"""Where one client is judged, and unseen, both are so."""


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[pytest.mark.thorough] if name in ALIKE else []) for name in ENDS]
)
def ended(request, tmp_path_factory):
    return run(raw(A, FEDTEM, **{**TURNS, **ENDS[request.param]}), tmp_path_factory.mktemp("ends") / "run", workers=1)


def test_every_end_has_a_page_that_names_both_groups(ended):
    page = ended.report.read_text(encoding="utf-8")
    (summary,) = ended.summaries
    assert len(summary.groups) == 2
    assert all(group in page for group in summary.groups)
    assert "nan" not in " ".join(" ".join(row) for row in Page(page).cells)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return finished(tmp_path_factory.mktemp("whole") / "run", study(A, rounds=2, eval_every=1))


@pytest.mark.parametrize(("key", "wrong"), [
    *((key, wrong) for key in ("round", "seconds", "down", "participants") for wrong in (None, "gone", [1])),
    ("scores", "gone"), ("scores", [1]),
])  # fmt: skip
def test_a_damaged_line_is_named(tmp_path, whole, key, wrong):
    folder = shutil.copytree(whole, tmp_path / "run")
    path = folder / "a" / "0" / "rounds.jsonl"
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    if wrong is None:
        del second[key]
    else:
        second[key] = wrong
    path.write_text(f"{json.dumps(first)}\n{json.dumps(second)}\n")
    with pytest.raises(FedtideError, match=r"a/0/rounds.jsonl: line 2: damaged: '[.\w]+' is") as raised:
        write_report([folder])
    assert key in str(raised.value)
