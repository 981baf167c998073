"""Studies without rounds: a model that is there is judged once, as the run that made it judged it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import fedtide as ft
from fedtide.config import from_dict
from fedtide.core.errors import FedtideError
from fedtide.report.page import write_report
from fedtide.report.study import read_study
from fedtide.runs.experiment import execute
from fedtide.runs.folder import plan
from fedtide.runs.preflight import preflight
from fedtide.runs.trained import Trained
from fedtide.site.owner import Owner
from fedtide.site.tickets import study_for
from helpers.shell import done
from helpers.studies import A, finished, lines_of, raw, record_of, study

WORLD = {"data": {"split": {"val": 0.2}}}
PRIVACY = {"clip": {"update": 1.0}, "multiplier": 1.0}
DITTO = {"name": "Ditto", "algorithm": "ditto", "cohort": 4}


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> Path:
    """A run that trains, whose last evaluation is known."""
    return finished(tmp_path_factory.mktemp("first") / "run", study(A, **WORLD, rounds=6, eval_every=6)) / "a" / "0"


def judging(path: Path, *methods, **changes):
    return study(*({**method, "init_from": str(path)} for method in methods or (A,)), **{**WORLD, **changes}, rounds=0)


def test_scores_are_those_of_the_run_that_made_the_model(tmp_path, first):
    root = finished(tmp_path / "run", judging(first, A, {**A, "name": "prox", "algorithm": "fedprox"}))
    trained = lines_of(first)[-1]
    for name in ("a", "prox"):
        (line,) = lines_of(root / name / "0")
        assert line["scores"] == trained["scores"]
        assert (line["round"], line["asked"], line["trained"], line["up"], line["down"]) == (-1, 0, [0, 0], 0, 0)
    rows = [row.partition(",") for row in (root / "a" / "0" / "clients.csv").read_text().splitlines()[1:]]
    last = [row for row in (first / "clients.csv").read_text().splitlines() if row.startswith("5,")]
    assert {number for number, _, _ in rows} == {"-1"}
    assert [row for _, _, row in rows] == [row.partition(",")[2] for row in last]


def test_the_run_is_whole_can_be_resumed_and_read(tmp_path, first):
    experiment = judging(first, seeds=[0, 1])
    root = finished(tmp_path / "run", experiment)
    assert all(run.finished for run in plan(experiment, root))
    assert [(verdict.rounds, verdict.wrong) for verdict in ft.verify(root)] == [(0, None)] * 2
    before = record_of(root)
    assert execute(experiment, root, workers=1)
    assert record_of(root) == before
    ours, theirs = Trained.read(root), Trained.read(first.parent.parent)
    rows = theirs.rows(8)
    assert torch.equal(ours.predict(rows).told, theirs.predict(rows).told)
    assert ours.moment.round == -1
    # An exported file is as good as a run.
    weights = theirs.networks[0]
    save_file({**weights.params, **weights.buffers}, tmp_path / "net.safetensors")
    other = finished(tmp_path / "other", judging(tmp_path / "net.safetensors"))
    assert lines_of(other / "a" / "0") == lines_of(root / "a" / "0")


def test_the_report_says_that_nothing_is_trained(tmp_path, first):
    root = finished(tmp_path / "run", judging(first, A, DITTO, seeds=[0, 1], baseline="A"))
    page = write_report([root]).read_text()
    for text in ("Nothing is trained: the models that methods begin with are judged.", "in the only evaluation",
                 "Over clients", "Over groups"):  # fmt: skip
        assert text in page
    for text in ("last round", "Cost", "over rounds", "worst point", "Swing"):
        assert text not in page, text
    (summary,) = read_study(root).summaries
    assert (
        summary.methods[0].measures["accuracy"].values[0]
        == lines_of(first)[-1]["scores"]["held_out_clients"]["accuracy"]
    )


@pytest.mark.parametrize(("changes", "line"), [
    ({"model": {"kind": "mlp", "hidden": [7]}}, r"method 'A'.init_from: .*: found \(5, 4\), allowed: \(7, 4\)$"),
    ({"data": {"source": {"kind": "gaussians", "classes": 4, "dims": 4, "samples": 64}}}, r"init_from: .*: shape of"),
    ({"wire": {"privacy": PRIVACY}}, r"rounds: found 0, .* allowed: 1 or more with wire.privacy"),
    ({"forgetting": {"rounds": [0]}}, r"forgetting: found a value, allowed: none with rounds = 0"),
    ({"stop_at": 0.5}, r"stop_at: found a value, allowed: none with rounds = 0"),
])  # fmt: skip
def test_a_study_that_has_nothing_to_judge(first, changes, line):
    with pytest.raises(FedtideError, match=line) as raised:
        preflight(judging(first, **changes))
    assert "\n" not in str(raised.value)


def test_a_study_without_a_model_and_commands_that_train(tmp_path, first, monkeypatch):
    with pytest.raises(FedtideError, match=r"rounds: found 0, but method 'A' has no init_from, .*; allowed: 1 or more"):
        preflight(study(A, rounds=0))
    with pytest.raises(FedtideError, match=r"rounds: found 0, allowed: 1 or more with \[tune\]"):
        from_dict(
            raw(
                {**A, "init_from": str(first)},
                rounds=0,
                tune={"ranges": {"method.local.lr": {"low": 0.1, "high": 1.0}}},
            )
        )
    with pytest.raises(FedtideError, match="rounds: found -1, allowed: 0 or more"):
        from_dict(raw(A, rounds=-1))
    monkeypatch.chdir(tmp_path)
    assert done("recommend", "recipe:demo", "--set", "rounds=0") == 2


def test_a_node_lets_the_model_be_judged_before_the_first_round_alone(tmp_path, first):
    assert from_dict(study_for(judging(first))).rounds == 0  # a ticket names no file
    owner = Owner(None, tmp_path / "judged.jsonl", 0, print)
    ask = {"kind": "score", "question": "adapt", "clients": [0], "members": 1, "reveal": [], "part": "test"}
    ask |= {"other": "", "personal": True}
    answers = [owner.refuses({**ask, "moment": {"round": number, "rounds": 1}}, "model") for number in (-1, 0)]
    assert answers[0] is None
    assert "before the first round" in answers[1]


def test_the_report_names_liars_only_if_rows_have_their_mark(tmp_path, first):
    for attack, named in (("sign-flip", False), ("backdoor", True)):
        root = finished(tmp_path / attack, judging(first, liars={"attack": attack}))
        assert ("of the clients lie" in write_report([root]).read_text()) == named
