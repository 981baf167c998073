"""Who is in which cluster when, and how much weight experts have: what is drawn, and what is measured."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from fedtide.core.errors import FedtideError
from fedtide.report import cluster_maps, figures, gating
from fedtide.report.clusters import Membership, clustering, draw_evenly, membership
from fedtide.report.measures import percent, points, unit_of
from fedtide.report.page import write_report
from fedtide.report.reading import ExperimentRecord, RunRecord, read_experiment
from fedtide.report.summary import summarize
from helpers.mixtures import MIXTURE, STEADY, shown, texts
from helpers.studies import A, finished, study

IFCA = {**A, "name": "IFCA", "algorithm": "ifca"}
FEDEM = {**A, "name": "FedEM", "algorithm": "fedem", "components": 2}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    values = study(A, IFCA, MIXTURE, FEDEM, **STEADY, seeds=[0, 1], average_last=6)
    return finished(tmp_path_factory.mktemp("members") / "run", values)


@pytest.fixture(scope="module")
def record(root) -> ExperimentRecord:
    (made,) = read_experiment(root)
    return made


def copy_of(root: Path, to: Path) -> Path:
    shutil.copytree(root, to)
    return to


# -- membership --------------------------------------------------------------------------------------------------------

CSV = """round,view,client,group,rows,accuracy,loss,slot,name
1,train_clients,0,night,4,1,0,0,
1,train_clients,1,day,4,1,0,2,
1,train_clients,2,day,4,1,0,0,
1,train_clients,3,day,4,1,0,0,
1,held_out_clients,9,day,4,1,0,1,
3,train_clients,0,night,4,1,0,2,
3,train_clients,1,day,4,1,0,2,
3,train_clients,2,day,0,,,,
3,train_clients,3,day,4,1,0,0,
"""


def by_hand(folder: Path) -> RunRecord:
    (folder / "clients.csv").write_text(CSV)
    return RunRecord(0, folder, False, 4)


def test_membership_is_what_clients_csv_says(tmp_path):
    """Two evaluations; night's only client comes last, and client 2 has no rows at the second."""
    made = membership(by_hand(tmp_path), "train_clients", ["day", "night"], 200)
    assert made.after.tolist() == [2, 4]
    assert made.clients.tolist() == [1, 2, 3, 0]
    assert made.group.tolist() == [0, 0, 0, 1]
    np.testing.assert_array_equal(made.table, [[2, 2], [0, np.nan], [0, 0], [0, 2]])
    assert {k: v.tolist() for k, v in made.sizes.items()} == {0: [3 / 4, 1 / 3], 2: pytest.approx([1 / 4, 2 / 3])}
    assert made.of == 4
    got = clustering(by_hand(tmp_path), "train_clients", ["day", "night"], 0)
    assert got["churn"] == pytest.approx(1 / 3)  # of 0, 1 and 3, who were judged twice


def test_without_clusters_or_groups(tmp_path):
    made = membership(by_hand(tmp_path), "held_out_clients", [], 200)
    assert (made.clients.tolist(), made.group.tolist(), made.table.tolist()) == ([9], [0], [[1.0]])
    assert membership(by_hand(tmp_path), "val", [], 200) is None


def test_of_many_clients_some_are_drawn_and_sizes_are_those_of_all(tmp_path):
    made = membership(by_hand(tmp_path), "train_clients", ["day", "night"], 2)
    assert (made.clients.tolist(), made.of) == ([1, 0], 4)
    assert made.sizes[0].tolist() == [3 / 4, 1 / 3]


def test_clients_are_drawn_evenly_over_groups():
    groups = dict.fromkeys(range(900), 0) | dict.fromkeys(range(900, 999), 1) | {999: 2}
    drawn = draw_evenly(groups, 200)
    counts = np.bincount([groups[client] for client in drawn])
    assert counts.tolist() == [180, 19, 1]
    assert drawn == sorted(set(drawn))
    assert (drawn[0], drawn[179], drawn[180], drawn[-1]) == (0, 899, 900, 999)
    assert draw_evenly({7: 1, 3: 1, 5: 0}, 200) == [5, 3, 7]


def made_of(sizes: dict[int, float]) -> Membership:
    one = np.array([1])
    table = np.array([[float(min(sizes))]])
    return Membership(one, one, one * 0, table, {k: np.array([v]) for k, v in sizes.items()}, 1)


def test_models_beyond_the_palette_are_others():
    """Of nine models the two in which fewest clients are have no color."""
    many = made_of({k: (0.2 if k not in (3, 5) else 0.01) for k in range(9)})
    colors = cluster_maps.palette([many])
    assert list(colors) == [0, 1, 2, 4, 6, 7, 8]
    # A number is a color, and what has none takes what is left over: of models 3 and 5.
    assert [colors[k] for k in (0, 1, 2, 4, 6)] == [figures.MODEL_COLORS[k] for k in (0, 1, 2, 4, 6)]
    assert [colors[k] for k in (7, 8)] == [figures.MODEL_COLORS[k] for k in (3, 5)]
    assert [cluster_maps._color(k, colors) for k in (-1, 0, 3)] == ["#4D4D4D", "#0072B2", "#BDBDBD"]
    assert cluster_maps.palette([made_of({1: 1.0})]) == {1: figures.MODEL_COLORS[1]}
    assert len(set(figures.MODEL_COLORS)) == len(figures.MODEL_COLORS) == 7


def test_the_picture_has_a_panel_for_every_method_with_clusters(record):
    made = summarize(record)
    names = [method.name for method in made.methods if "churn" in method.measures]
    assert names == ["IFCA", "AEM", "FedEM"]
    found = texts(cluster_maps.clusters_over_time(record, names))
    assert {"IFCA", "AEM", "FedEM", "day", "night", "8 clients", "a client's own expert", "rounds done"} <= set(found)
    assert "A" not in found
    assert cluster_maps.clusters_over_time(record, []) is None


def test_in_a_mixture_a_client_of_its_own_expert_is_at_minus_one_and_shared_models_count_from_0(record):
    mixture = next(method for method in record.methods if method.name == "AEM").runs[0]
    numbers = {number for members in mixture.clusters("train_clients").values() for _, number in members.values()}
    assert -1 in numbers
    assert numbers <= {-1, 0, 1}


OWN = """round,view,client,group,rows,accuracy,loss,slot,name
1,train_clients,0,day,4,1,0,-1,
1,train_clients,1,day,4,1,0,-1,
1,train_clients,2,night,4,1,0,3,
1,train_clients,3,night,4,1,0,3,
"""


ABOUT = {"round": 1, "seconds": 1.0, "down": 0, "up": 0, "refused": 0, "participants": {}}
LINE = json.dumps({**ABOUT, "facts": {"members": [4, 0, 0, 0, 0, 0]}}) + "\n"


def test_own_experts_are_no_cluster_and_models_that_nobody_is_in_are_empty_ones(tmp_path):
    """Two night clients at model 3 of 6, two day clients at experts of their own: one cluster of two clients."""
    (tmp_path / "clients.csv").write_text(OWN)
    (tmp_path / "rounds.jsonl").write_text(LINE)
    run = RunRecord(0, tmp_path, False, 2)
    got = clustering(run, "train_clients", ["day", "night"], 0)
    assert got["evenness"] == 0
    assert got["fullest_cluster"] == 1
    assert got["purity"] == 1
    made = membership(run, "train_clients", ["day", "night"], 200)
    assert made.table.tolist() == [[-1], [-1], [3], [3]]
    assert cluster_maps._legend([made], cluster_maps.palette([made])) == [-1, 0, 1, 2, 3]


@pytest.mark.parametrize(("slots", "used"), [("0101", 2), ("0505", 2), ("5555", 1), ("0123", 4)])
def test_evenness_does_not_depend_on_what_models_are_called(tmp_path, slots, used):
    """Of six models."""
    rows = [f"1,train_clients,{client},day,4,1,0,{slot}," for client, slot in enumerate(slots)]
    (tmp_path / "clients.csv").write_text("\n".join([OWN.splitlines()[0], *rows, ""]))
    (tmp_path / "rounds.jsonl").write_text(LINE)
    got = clustering(RunRecord(0, tmp_path, False, 2), "train_clients", ["day"], 0)
    assert got["evenness"] == pytest.approx(math.log(used) / math.log(6))
    assert got["fullest_cluster"] == 1 / used


def test_places_for_models_that_there_are_not_are_no_empty_clusters(tmp_path):
    """FedDrift has six places and two models, of two clients each: as even as can be."""
    rows = [f"1,train_clients,{client},day,4,1,0,{slot}," for client, slot in enumerate("0505")]
    (tmp_path / "clients.csv").write_text("\n".join([OWN.splitlines()[0], *rows, ""]))
    line = {**ABOUT, "facts": {"members": [2, 0, 0, 0, 0, 2], "models": 2}}
    (tmp_path / "rounds.jsonl").write_text(json.dumps(line) + "\n")
    assert clustering(RunRecord(0, tmp_path, False, 2), "train_clients", ["day"], 0)["evenness"] == pytest.approx(1.0)


def test_where_nobody_has_clusters_nothing_is_drawn(tmp_path):
    folder = finished(tmp_path / "run", study(A, **STEADY))
    assert not shown(folder) & {"clusters of clients over time", "gate weights"}


# -- gate weights ------------------------------------------------------------------------------------------------------


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_own_weight_is_the_mean_over_the_last_evaluations(root, record):
    made = summarize(record)
    values = []
    for seed in (0, 1):
        judged = [line for line in lines(root / "aem" / str(seed) / "rounds.jsonl") if line.get("scores")]
        assert len(judged) == 2
        values.append(np.mean([line["scores"]["held_out_clients"]["weights"]["own"] for line in judged]))
        seen = judged[-1]["scores"]["train_clients"]["weights"]
        assert sum([seen["own"], *seen["shared"]]) == pytest.approx(1)
        assert 0 < seen["own"] < 1
        assert set(seen["groups"]) == {"day", "night"}
    assert made.method("AEM").measures["own_weight"].values == pytest.approx(values)
    # The blends of FedEM are of shared branches alone.
    assert all("own_weight" not in made.method(name).measures for name in ("A", "IFCA", "FedEM"))
    _, none, shared = record.methods[3].runs[0].weights("train_clients")
    assert np.isnan(none).all()
    assert shared.shape == (2, 2)
    assert [part.shape for part in record.methods[1].runs[0].weights("train_clients")] == [(0,), (0,), (0, 0)]
    assert (unit_of("own_weight"), unit_of("client_std")) == (percent, points)


def test_bars_are_means_over_the_last_evaluations_of_the_first_seed(root, tmp_path):
    copied = copy_of(root, tmp_path / "run")
    path = copied / "aem" / "0" / "rounds.jsonl"
    changed, own = lines(path), iter((0.2, 0.6))
    for line in changed:
        if line.get("scores"):
            first = next(own)
            one = {"own": first, "shared": [1 - first, 0.0]}
            line["scores"]["held_out_clients"]["weights"] = one | {
                "groups": {"day": one, "night": {"own": 0.5, "shared": [0.5]}}
            }
    path.write_text("".join(json.dumps(line) + "\n" for line in changed))
    (again,) = read_experiment(copied)
    day, night, *others = gating.bars(again)
    assert (day.method, day.group, night.group) == ("AEM", "day", "night")
    assert (day.own, *day.shared) == pytest.approx((0.4, 0.6, 0.0))
    assert (night.own, *night.shared) == pytest.approx((0.5, 0.5))
    assert [(bar.method, bar.own, len(bar.shared)) for bar in others] == [("FedEM", None, 2)] * 2
    found = texts(gating.gate_weights(again))
    assert {"AEM, day clients", "AEM, night clients", "FedEM, day clients", "40", "60", "50"} <= set(found)


def test_a_folder_of_an_older_version_has_no_weights_and_a_page(root, tmp_path):
    copied = copy_of(root, tmp_path / "run")
    assert {"clusters of clients over time", "gate weights"} <= shown(copied)
    for path in copied.rglob("rounds.jsonl"):
        changed = lines(path)
        for line in changed:
            for view in line.get("scores", {}).values():
                view.pop("weights", None)
        path.write_text("".join(json.dumps(line) + "\n" for line in changed))
    assert "gate weights" not in shown(copied)
    (again,) = read_experiment(copied)
    made = summarize(again)
    assert "own_weight" not in made.method("AEM").measures
    assert made.method("AEM").measures["client_std"].mean is not None


@pytest.mark.parametrize("wrong", [
    [0.5, 0.5], None, {"own": 0.5}, {"own": "much", "shared": [0.5]}, {"shared": 1.0}, {"shared": [None]},
    {"shared": [1.0], "groups": [1]}, {"shared": [1.0], "groups": {"day": {"shared": "all"}}},
])  # fmt: skip
def test_damaged_weights_are_named(root, tmp_path, wrong):
    copied = copy_of(root, tmp_path / "run")
    path = copied / "aem" / "1" / "rounds.jsonl"
    changed = lines(path)
    changed[1]["scores"]["train_clients"]["weights"] = wrong
    path.write_text("".join(json.dumps(line) + "\n" for line in changed))
    with pytest.raises(FedtideError, match=r"aem/1/rounds.jsonl: line 2: damaged: 'weights' is of another kind"):
        write_report([copied])
