"""Metrics of your own, which a configuration names as `python:module:function`."""

import json
import sys

import pytest
import torch

import fedtide as ft
from fedtide.config import from_dict, points, resolved
from fedtide.core.errors import FedtideError
from fedtide.core.record import read_lines
from fedtide.evaluate import Metric
from fedtide.report.accuracy import metrics_table
from fedtide.report.claims import claims_table
from fedtide.report.study import read_study
from fedtide.report.topics import check_measures
from fedtide.runs.preflight import preflight
from helpers.toys import toy

MINE = """
def worst(scores):
    return (scores.correct / scores.rows).min()

def cost(scores, price=2.0):
    return price * float((scores.rows - scores.correct).sum())

def word(scores):
    return "none"

def late_first_group(scores, since=1):
    right = scores.correct[scores.group == 0].sum() / scores.rows[scores.group == 0].sum()
    return right if scores.moment.round >= since else -1.0

def broken(scores):
    return 1 / 0

def balanced(scores):
    right, _, rows = scores.pooled["confusion"].T
    return (right / rows)[rows > 0].mean()
"""


pytestmark = pytest.mark.usefixtures("mine")


def measured(*metrics, **changes):
    return from_dict(resolved(toy("fedavg", rounds=3, **changes)) | {"metrics": list(metrics)})


WORST = {"kind": "python", "function": "mine:worst", "name": "worst client", "unit": "share"}
PRICEY = {"kind": "python", "function": "mine:cost", "options": {"price": 3.0}, "name": "pricey"}
CLAIMS = [
    {"text": "Cheap.", "method": "toy", "measure": "cost", "less": True, "bound": 1000},
    {"text": "Fair.", "method": "toy", "measure": "worst client", "bound": 0.5},
]


def test_they_are_recorded_summarized_and_shown(tmp_path):
    experiment = measured("mine:cost", PRICEY, WORST, eval_every=1, seeds=[0, 1], claim=CLAIMS)
    assert from_dict(resolved(experiment)) == experiment
    finished = ft.run(experiment, tmp_path / "run", workers=1)
    (summary,) = finished.summaries
    values = {}
    for seed in (0, 1):
        lines = read_lines(tmp_path / "run" / "toy" / str(seed))
        for view in (view for line in lines for view in line["scores"].values()):
            assert view["cost"] == pytest.approx(2 * view["rows"] * (1 - view["accuracy"]))
            assert view["pricey"] == pytest.approx(1.5 * view["cost"])
            assert 0 <= view["worst client"] <= view["accuracy"]
        values[seed] = sum(line["scores"][summary.view]["cost"] for line in lines) / 3
    assert summary.method("toy").by_seed("cost") == pytest.approx(values)
    table = metrics_table(None, summary)
    assert table.header == ["method", "cost", "pricey", "worst client"]
    assert claims_table(summary.claims).rows[1][1].endswith("%")
    sys.modules.pop("mine")
    (tmp_path / "mine.py").unlink()  # a report needs none of the person's code
    assert read_study(tmp_path / "run").summaries[0].metrics == {
        "cost": "number", "pricey": "number", "worst client": "share",
    }  # fmt: skip
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["methods"][0]["measures"]["cost"]["mean"]


def test_it_reads_what_is_counted_by_class(tmp_path):
    told = {"kind": "python", "function": "mine:balanced", "unit": "share", "needs": "confusion"}
    ft.run(measured("macro-f1", told, eval_every=1), tmp_path / "run")
    for line in read_lines(tmp_path / "run" / "toy" / "0"):
        for view in line["scores"].values():
            assert 0 < view["balanced"] <= 1
    with pytest.raises(FedtideError, match=r"metrics\[0\]"):  # nothing is counted where it is not said to be needed
        preflight(measured(told | {"needs": None}))
    with pytest.raises(FedtideError, match=r"metrics\[0\]: found 'confusion', but data.target is 'number'"):
        from_dict(resolved(toy("fedavg", data={"target": "number"})) | {"metrics": [told]})


def test_it_knows_the_groups_of_clients_and_the_round(tmp_path):
    grouped = {"groups": {"by": "domain"}}
    data = {"partition": {"kind": "by-group", "of": {"day": {"kind": "iid", "clients": 4},
                                                     "night": {"kind": "iid", "clients": 4}}}, **grouped}  # fmt: skip
    ft.run(measured("mine:late_first_group", eval_every=1, data=data), tmp_path / "run")
    lines = read_lines(tmp_path / "run" / "toy" / "0")
    for line in lines:
        for view in line["scores"].values():
            first = next(iter(view["groups"].values()))
            assert view["late_first_group"] == pytest.approx(first if line["round"] >= 1 else -1.0)


def test_from_python_a_metric_is_a_function():
    people = ft.population(torch.randn(100, 3), torch.arange(100) % 2, ft.data.IID(clients=5))
    algorithm = ft.algorithms.fedavg(ft.Task(lambda: torch.nn.Linear(3, 2)), cohort=ft.cohorts.Arrivals(3))
    wrong = Metric("wrong", lambda scores: float((scores.rows - scores.correct).sum()), "count")
    result = ft.simulate(algorithm, people, rounds=2, eval_every=1, metrics=[wrong])
    for line in result.lines:
        view = line["scores"]["train_clients"]
        assert view["wrong"] == pytest.approx(view["rows"] * (1 - view["accuracy"]))


@pytest.mark.parametrize(("metric", "said"), [
    ("python:absent:cost", "metrics[0].function: cannot import 'absent:cost'"),
    ("python:mine:absent", "metrics[0].function: cannot import 'mine:absent'"),
])  # fmt: skip
def test_one_that_is_not_there_is_one_line_before_a_run(metric, said):
    with pytest.raises(FedtideError) as error:
        preflight(measured(metric))
    assert str(error.value).startswith(said)


@pytest.mark.parametrize(("metric", "said"), [
    ("python:mine:word", "metrics[0].function: found 'none', allowed: a function that returns a number"),
    ("python:mine:broken", "metrics[0]: broken() failed with ZeroDivisionError"),
    ({"function": "mine:cost", "options": {"prize": 1}}, "metrics[0].options: cost() got an unexpected keyword"),
])  # fmt: skip
def test_one_that_does_not_work_is_one_line(metric, said, tmp_path):
    with pytest.raises(FedtideError) as error:
        ft.run(measured(metric), tmp_path / "run")
    assert said in str(error.value)


def test_of_other_targets_than_classes_it_is_refused():
    study = {"metrics": ["auc"], "data": {"target": "number"}, "method": [{"algorithm": "fedavg"}]}
    with pytest.raises(FedtideError, match=r"metrics\[0\]: found 'auc', but data.target is 'number'; allowed: metrics"):
        from_dict(study)
    swept = from_dict({**study, "data": {}, "sweep": {"data.target": ["classes", "number"]}})
    with pytest.raises(FedtideError, match=r"sweep point 'target number': metrics\[0\]: found 'auc', but data.target"):
        points(swept)


@pytest.mark.parametrize("name", ["accuracy", "swing", "rows", "accuracy_day", "cost"])
def test_a_name_that_is_taken_is_refused(name):
    experiment = measured({"function": "mine:cost"}, {"function": "mine:cost", "name": name})
    with pytest.raises(FedtideError, match=rf"metrics\[1\]\.name: found '{name}', allowed: a name that no other"):
        check_measures(experiment)


@pytest.mark.parametrize(("metric", "said"), [
    ("", "metrics[0]"), (3, "metrics[0]"),
    ("f1", "found 'f1', allowed: macro-f1, auc, perplexity, bits-per-byte, python"),
    ({"function": "mine:cost", "unit": "euro"}, "metrics[0].unit"),
])  # fmt: skip
def test_what_is_no_metric_is_one_line(metric, said):
    with pytest.raises(FedtideError) as error:
        measured(metric)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
