"""Results as data: frames, figures of matplotlib, and what a notebook shows."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

import fedtide as ft
from fedtide.report.page import pictures_of
from helpers import studies
from helpers.pages import Page
from helpers.studies import A, study

MEASURES = ["method", "algorithm", "seed", "accuracy", "worst_point"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    made = study(A, {**A, "name": "IFCA <2>", "algorithm": "ifca"}, seeds=[0, 1], rounds=4, title="Day & night")
    return studies.finished(tmp_path_factory.mktemp("results") / "run", made)


@pytest.fixture(scope="module")
def done(root):
    return ft.results(root)


@pytest.fixture
def library(monkeypatch):
    """Stands in for libraries of data frames, which need not be installed here."""

    def only(*names):
        for name in ("pandas", "polars"):
            module = SimpleNamespace(DataFrame=lambda columns, name=name: (name, columns)) if name in names else None
            monkeypatch.setitem(sys.modules, name, module)

    return only


def test_measures_of_each_method_and_seed_are_rows(done, library):
    library("pandas", "polars")
    name, columns = done.frame()
    assert name == "pandas"
    assert set(MEASURES) <= columns.keys()
    assert columns["method"] == ["A", "A", "IFCA <2>", "IFCA <2>"]
    assert columns["seed"] == [0, 1, 0, 1]
    assert columns["accuracy"][2:] == done.summaries[0].methods[1].measures["accuracy"].values
    assert columns["ari"][:2] == [None, None]  # which one method alone has


def test_curves_rounds_and_clients_have_the_names_of_the_records(done, library):
    library("polars")
    name, curves = done.curves()
    assert name == "polars"
    record = done.study.records[0].methods[1].runs[1]
    here = [(m, s) == ("IFCA <2>", 1) for m, s in zip(curves["method"], curves["seed"], strict=True)]
    for view in set(curves["view"]):
        mine = [k for k, found in enumerate(here) if found and curves["view"][k] == view]
        rounds, values = record.accuracy(view)
        assert [curves["round"][k] + 1 for k in mine] == rounds.tolist()
        assert np.allclose([curves["accuracy"][k] for k in mine], values)
    _, rounds = done.rounds()
    assert len(rounds["round"]) == 4 * 4
    assert sum(rounds["up"]) == sum(line["up"] for run in done.study.records[0].runs for line in run.lines)
    _, clients = done.clients()
    assert {type(value) for value in clients["client"]} == {int}
    assert {type(value) for value in clients["accuracy"]} == {float}
    slots = dict(zip(clients["method"], clients["slot"], strict=True))
    assert slots["A"] is None
    assert slots["IFCA <2>"] in (0, 1)
    _, clusters = done.clusters()
    assert set(clusters["method"]) == {"IFCA <2>"}
    names = ("seed", "round", "view")
    for k in range(len(clusters["slot"])):
        of_it = [
            (clients["rows"][i], clients["accuracy"][i], clients["loss"][i])
            for i in range(len(clients["slot"]))
            if clients["method"][i] == "IFCA <2>"
            and clients["slot"][i] == clusters["slot"][k]
            and all(clients[name][i] == clusters[name][k] for name in names)
        ]
        rows, accuracy, loss = map(np.array, zip(*of_it, strict=True))
        assert (clusters["clients"][k], clusters["rows"][k]) == (len(of_it), rows.sum())
        assert clusters["accuracy"][k] == pytest.approx((rows * accuracy).sum() / rows.sum())
        assert clusters["loss"][k] == pytest.approx((rows * loss).sum() / rows.sum())


def test_points_of_a_sweep_are_columns(tmp_path, library):
    swept = study(A, rounds=1, sweep={"method.local.lr": [0.1, 0.2], "shift.who": ["always", {"kind": "periodic"}]})
    done = ft.results(studies.finished(tmp_path / "run", swept))
    library("pandas")
    _, columns = done.frame()
    assert columns["method.local.lr"] == [0.1, 0.1, 0.2, 0.2]
    assert columns["shift.who"] == ["always", "{'kind': 'periodic'}"] * 2
    assert columns["point"] == [summary.point for summary in done.summaries]
    with pytest.raises(ft.FedtideError, match=r"^point: found None, allowed: lr 0\.1, who always, "):
        ft.plot.accuracy(done)
    with pytest.raises(ft.FedtideError, match=r"^point: found 'lr 3'"):
        ft.plot.accuracy(done, "lr 3")
    assert "lr 0.2" in done._repr_html_()
    late = "in the last round"
    assert done.summaries[0].late == done.study.records[0].averaged == late, "a mean over one round is none"


def test_a_notebook_explains_its_table(done):
    assert "± one standard error" in done._repr_html_()


def test_what_is_missing_for_a_frame_is_said_in_a_line(done, library):
    with pytest.raises(ft.FedtideError, match=r"^library of data frames: found 'arrow', allowed: pandas, polars$"):
        done.frame("arrow")
    library()
    with pytest.raises(ft.FedtideError, match=r'^a data frame needs pandas or polars; pip install "fedtide\[frames\]"'):
        done.frame()
    with pytest.raises(ft.FedtideError, match=r"^a data frame needs polars; "):
        done.curves("polars")


def test_a_simulation_is_a_frame_and_a_curve(library):
    people = ft.population(torch.randn(60, 3), torch.arange(60) % 2, ft.data.IID(clients=5))
    algorithm = ft.algorithms.fedavg(ft.Task(lambda: nn.Linear(3, 2)), cohort=2)
    result = ft.simulate(algorithm, people, rounds=4, eval_every=2)
    library("pandas")
    _, columns = result.frame()
    tested = [k for k, view in enumerate(columns["view"]) if view == "train_clients"]
    assert [columns["round"][k] for k in tested] == [1, 3]
    assert [columns["accuracy"][k] for k in tested] == result.accuracy
    assert repr(result) in Page(result._repr_html_()).text["code"]
    assert "<svg" in result._repr_html_()
    (line,) = ft.plot.accuracy(result).axes[0].lines
    assert line.get_xdata().tolist() == [2, 4]
    assert ["", repr(people)] in Page(people._repr_html_()).cells
    assert ["rows to train on", "45, 9 a client"] in Page(people._repr_html_()).cells


def test_every_picture_of_a_report_is_a_plot(done):
    """A run without a picture gets one line with the condition."""
    refused = {}
    for name in ft.plot.__all__:
        assert getattr(ft.plot, name).__doc__.startswith("Draw ")
        try:
            assert isinstance(getattr(ft.plot, name)(done), Figure)
        except ft.FedtideError as error:
            refused[name] = str(error)
    assert all(line.startswith("plot: this run has no such picture; needed: ") for line in refused.values())
    drawn = [title for title, _, picture in pictures_of(done.study.records[0]) if picture]
    assert len(drawn) == len(ft.plot.__all__) - len(refused) - 1  # `accuracy_of_all` is of several runs
