"""A measure along a swept key: the panels, and the picture of gate weights."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fedtide.evaluate.measure import Measure
from fedtide.report import gating
from fedtide.report.summary import MethodSummary, Study, Summary
from fedtide.report.sweeps import over_sweep
from helpers.mixtures import MIXTURE, STEADY, shown, texts
from helpers.studies import A, finished, study


def point(name: str, **own: float) -> Summary:
    methods = [MethodSummary("FedAvg", "fedavg", [0], 0, {"accuracy": Measure.of([0.5])})]
    methods += [MethodSummary(k, "aem", [0], 0, {"own_weight": Measure.of([v])}) for k, v in own.items()]
    return Summary("x", name, 4, "train_clients", 4, None, [], methods)


def test_a_measure_along_a_sweep_has_a_panel_for_every_choice_of_the_others():
    """The first key with several numbers is the axis; the norm, and the rate that is one for all, are in the titles."""
    axes = {"model.norm": ("batch", "group"), "data.partition.p": (0.8, 0.2), "lr": (0.1,)}
    names = [f"norm {norm}, p {p}, lr 0.1" for norm in ("batch", "group") for p in (0.8, 0.2)]
    summaries = [point(names[0], a=0.9, b=0.7), point(names[1], a=0.4), point(names[2], a=0.8), point(names[3])]
    study = Study([], summaries, {}, [], True, axes)
    swept = over_sweep(study, "own_weight")
    assert (swept.key, swept.values, swept.numbers) == ("p", (0.8, 0.2), True)
    assert [panel.title for panel in swept.panels] == ["norm batch, lr 0.1", "norm group, lr 0.1"]
    found = [{k: [(at, m.mean) for at, m in c] for k, c in panel.curves.items()} for panel in swept.panels]
    assert found == [{"a": [(0, 0.9), (1, 0.4)], "b": [(0, 0.7)]}, {"a": [(0, 0.8)]}]
    drawn = texts(gating.own_weight_over_sweep(study))
    assert {"a", "b", "norm batch, lr 0.1", "norm group, lr 0.1", "p"} <= set(drawn)
    assert "FedAvg" not in drawn


def test_what_is_no_number_is_an_axis_of_words():
    axes = {"partition": ({"kind": "iid"}, {"kind": "label-shards"})}
    study = Study([], [point("partition iid", a=0.9), point("partition shards", a=0.7)], {}, [], True, axes)
    assert {"iid", "label-shards", "partition"} <= set(texts(gating.own_weight_over_sweep(study)))


@pytest.mark.parametrize("axes", [{}, {"p": (0.5,)}])
def test_without_a_sweep_of_several_points_there_is_no_such_picture(axes):
    study = Study([], [point("p 0.5", a=0.9)], {}, [], bool(axes), axes)
    assert over_sweep(study, "own_weight") is None


def test_where_nobody_mixes_there_is_no_such_picture():
    study = Study([], [point("p 0.1"), point("p 0.2")], {}, [], True, {"p": (0.1, 0.2)})
    assert gating.own_weight_over_sweep(study) is None
    unknown = replace(study, summaries=[point("p 0.1", a=float("nan")), point("p 0.2")])
    assert gating.own_weight_over_sweep(unknown) is None


def test_the_page_of_a_sweep_has_the_gate_weight_along_it(tmp_path):
    values = study(MIXTURE, A, **STEADY, sweep={"method.local.lr": [0.05, 0.1]})
    folder = finished(tmp_path / "run", values)
    assert {"gate weight over the sweep", "gate weights"} <= shown(folder)
    told = json.loads((folder / "summary.json").read_text())
    assert all("own_weight" in p["methods"][0]["measures"] for p in told["points"])
