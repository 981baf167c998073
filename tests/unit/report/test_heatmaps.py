"""The pictures that are maps: what is drawn of a record, what is not, and in which scale."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes

from fedtide.core import codec
from fedtide.data.build import build
from fedtide.data.partition import IID
from fedtide.data.rows import Rows
from fedtide.data.saved import labels
from fedtide.report import heatmaps, tables
from fedtide.report.forgetting import local_forgetting, over_time
from fedtide.report.measures import percent
from fedtide.report.page import write_report
from fedtide.report.reading import ExperimentRecord, read_experiment
from fedtide.report.summary import summarize
from fedtide.runs import folder
from fedtide.runs.experiment import execute
from helpers.studies import MOMENTUM, STEADY, A, study

PROX = {**A, "name": "prox", "algorithm": "fedprox"}
THREE = {
    "source": {"kind": "gaussians", "samples": 120, "dims": 4, "classes": 3, "domains": 3},
    "partition": {"kind": "iid", "clients": 9},
    "held_out_clients": {"clients": 3},
}


def finished(root: Path, *methods: dict, **changes) -> ExperimentRecord:
    experiment = study(*methods, **changes)
    folder.create(experiment, root)
    assert execute(experiment, root, workers=1)
    (record,) = read_experiment(root)
    return record


def texts(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


# -- labels ------------------------------------------------------------------------------------------------------------


def dealt(rows: int, classes: int, clients: int, alpha: float | None, seed: int = 0) -> np.ndarray:
    draw = np.random.default_rng(seed)
    shares = np.full((clients, classes), 1 / classes) if alpha is None else draw.dirichlet([alpha] * classes, clients)
    return np.array([draw.multinomial(rows, share) for share in shares])


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(
    ("rows", "classes", "clients"), [(5, 3, 8), (20, 10, 60), (200, 10, 60), (500, 62, 60), (3, 2, 2)]
)
def test_labels_that_were_dealt_at_random_are_not_drawn(seed, rows, classes, clients):
    assert not heatmaps.heterogeneous(dealt(rows, classes, clients, None, seed))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("alpha", [0.05, 0.1, 1.0])
def test_labels_that_differ_are(seed, alpha):
    assert heatmaps.heterogeneous(dealt(100, 10, 20, alpha, seed))


def test_a_difference_that_nobody_would_see_is_not_drawn_though_it_is_no_chance():
    counts = np.array([[5200, 4800], [4800, 5200]])
    assert not heatmaps.heterogeneous(counts)
    assert heatmaps.heterogeneous(np.array([[7200, 2800], [2800, 7200]]))


@pytest.mark.parametrize("counts", [np.zeros((3, 4)), np.ones((1, 4)), np.array([[3.0, 0], [5, 0]]), np.zeros((0, 2))])
def test_without_two_clients_and_two_classes_nobody_differs(counts):
    assert not heatmaps.heterogeneous(counts)


def test_the_labels_of_a_run_are_counted_once_for_a_few_clients(tmp_path):
    record = finished(
        tmp_path / "run", A, rounds=1, shift={"who": "always"},
        data={"groups": {"by": "none"}, "partition": {"kind": "dirichlet", "clients": 8, "alpha": 0.05}},
    )  # fmt: skip
    (run,) = record.methods[0].runs
    saved = codec.from_file(tmp_path / "run" / "shift" / "0.safetensors")
    assert run.labels["clients"].tolist() == list(range(8))
    assert (run.labels["classes"], run.labels["of"]) == (3, 8)
    train = saved["parts"]["train"]
    assert run.labels["counts"].sum(1).tolist() == train["start"].diff()[:8].tolist()
    svg = heatmaps.label_shares(record)
    assert 'aria-label="who holds which labels"' in svg
    assert "8 clients, by the class that they have most of" in texts(svg)


def test_classes_that_have_names_are_called_by_them(tmp_path):
    word = ("high", "low", "mid")
    lines = [f"{number / 60},{word[number // 20]},{number // 10}" for number in range(60)]
    (tmp_path / "rows.csv").write_text("\n".join(["x,level,who", *lines]))
    record = finished(
        tmp_path / "run", A, rounds=1, shift={"who": "always"},
        data={
            "groups": {"by": "none"}, "partition": "natural",
            "source": {"kind": "csv", "path": str(tmp_path / "rows.csv"), "label": "level", "client": "who"},
        },
    )  # fmt: skip
    assert set(word) <= set(texts(heatmaps.label_shares(record)))


def test_of_many_clients_sixty_are_counted_and_of_sequences_none():
    made = labels(build(Rows("rows", torch.zeros(700, 2), torch.arange(700) % 2, 2), IID(clients=130)))
    assert len(made["clients"]) == len(made["counts"]) == 60
    assert (made["clients"][0], made["clients"][-1], made["of"]) == (0, 129, 130)
    assert made["clients"].unique().tolist() == made["clients"].tolist()
    steps = torch.ones(20, 3, dtype=torch.int64)
    for rows in (Rows("text", steps, steps, 2), Rows("many", torch.zeros(20, 2), steps[:, 0], 1001)):
        assert labels(build(rows, IID(clients=2)))["counts"] is None


def test_a_folder_of_an_older_version_has_no_such_picture(tmp_path):
    record = finished(
        tmp_path / "run", A, rounds=1, data={"partition": {"kind": "dirichlet", "clients": 8, "alpha": 0.05}}
    )
    assert record.methods[0].runs[0].labels is not None
    path = tmp_path / "run" / "shift" / "0.safetensors"
    content = codec.from_file(path)
    del content["labels"]
    codec.to_file(path, content)
    (again,) = read_experiment(tmp_path / "run")
    assert again.methods[0].runs[0].labels is None
    assert heatmaps.label_shares(again) is None
    assert "forward_transfer" not in summarize(again).methods[0].measures
    path.unlink()
    (without,) = read_experiment(tmp_path / "run")
    assert heatmaps.label_shares(without) is None


# -- local forgetting --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def probed(tmp_path_factory) -> ExperimentRecord:
    return finished(
        tmp_path_factory.mktemp("maps") / "run", A, PROX, MOMENTUM, {**A, "name": "$x$"}, STEADY,
        forgetting={"rounds": [0, 1, 2, 3, 4, 5]}, seeds=[0, 1],
    )  # fmt: skip


def test_every_method_and_round_has_a_map_with_its_mean(probed):
    found = texts(heatmaps.local_forgetting(probed))
    for method in probed.methods:
        for line in method.runs[0].forgetting:
            title = f"{method.name}, round {line['round']}"
            # Of six rounds five are drawn, the first and the last among them.
            assert (title in found) == (line["round"] != 3), title
            if title in found:
                mean = f"mean {100 * line['forgetting']['mean']:.1f} points"
                assert mean in found


@pytest.mark.parametrize(("rounds", "some"), [
    ([3], [3]), (list(range(5)), list(range(5))), (list(range(6)), [0, 1, 2, 4, 5]),
    (list(range(100)), [0, 25, 50, 74, 99]),
])  # fmt: skip
def test_of_many_rounds_some_are_drawn(rounds, some):
    assert heatmaps._some(rounds) == some


@pytest.fixture
def scales(monkeypatch):
    """The color scale of every map that is drawn."""
    seen, draw = [], Axes.imshow

    def drawn(axes, *given, **named):
        seen.append(named["norm"])
        return draw(axes, *given, **named)

    monkeypatch.setattr(Axes, "imshow", drawn)
    return seen


def test_all_maps_have_one_scale_around_zero(probed, scales):
    heatmaps.local_forgetting(probed)
    assert len(scales) == 5 * 5 * 3  # each with two strips
    assert len({id(scale) for scale in scales}) == 1
    largest = max(
        abs(100 * (r - a))
        for m in probed.methods
        for line in m.runs[0].forgetting
        for row in line["accuracy"]["local"]
        for a, r in zip(row, line["accuracy"]["received"], strict=True)
    )
    assert (scales[0].vmin, scales[0].vmax) == pytest.approx((-largest, largest))


def test_what_is_left_after_local_training_is_drawn_for_the_last_round(probed, scales):
    found = texts(heatmaps.after_local_training(probed))
    last = max(line["round"] for line in probed.methods[0].runs[0].forgetting)
    assert all(f"{method.name}, round {last}" in found for method in probed.methods if "$" not in method.name)
    assert "received" in found
    assert {(scale.vmin, scale.vmax) for scale in scales} == {(0, 100)}
    assert len(scales) == 5 * 3


def test_what_is_drawn_is_received_minus_local_in_points():
    line = {"accuracy": {"received": [0.5, None, 1.0], "local": [[0.25, None, 1.0], [1.0, None, 0.0]]}}
    assert heatmaps._forgotten(line) == pytest.approx(np.array([[25, np.nan, 0], [-50, np.nan, 100]]), nan_ok=True)


def test_measures_are_means_over_rounds(probed):
    (run, _) = probed.methods[1].runs
    lines = run.forgetting
    got = local_forgetting(run)
    assert got["local_forgetting"] == pytest.approx(np.mean([line["forgetting"]["mean"] for line in lines]))
    assert got["local_forgetting_own"] == pytest.approx(np.mean([line["forgetting"]["own"] for line in lines]))
    assert got["local_loss_increase"] == pytest.approx(np.mean([line["loss_increase"]["mean"] for line in lines]))
    table = tables.measured(summarize(probed), tables.LOCAL_FORGETTING)
    assert table.header[:2] == ["method", "on rows of other clients"]
    assert [row[0] for row in table.rows] == ["A", "prox", "momentum", "$x$", "steady"]


def test_a_round_with_nothing_to_compare_counts_for_nothing(tmp_path):
    record = finished(tmp_path / "run", {**A, "cohort": 1}, forgetting={"rounds": [0, 1]})
    (run,) = record.methods[0].runs
    assert [line["known"] for line in run.forgetting] == [False, False]
    got = local_forgetting(run)
    assert np.isnan(got["local_forgetting"])
    assert np.isfinite(got["local_forgetting_own"])
    assert "nothing to compare" in texts(heatmaps.local_forgetting(record))
    assert heatmaps.forgetting_over_rounds(record) is None
    assert tables.measured(summarize(record), tables.LOCAL_FORGETTING).header == ["method", "on own rows"]


def test_the_curve_is_there_from_two_rounds_on(probed, tmp_path):
    assert 'aria-label="local forgetting over rounds"' in heatmaps.forgetting_over_rounds(probed)
    single = finished(tmp_path / "run", A, forgetting={"rounds": [2]})
    assert heatmaps.forgetting_over_rounds(single) is None
    assert heatmaps.local_forgetting(single) is not None


def test_owners_without_rows_are_drawn_in_gray(tmp_path):
    record = finished(tmp_path / "run", A, forgetting={"rounds": [0]})
    before = heatmaps.local_forgetting(record)
    path = tmp_path / "run" / "a" / "0" / "forgetting.jsonl"
    (line,) = [json.loads(text) for text in path.read_text().splitlines()]
    for row in (line["accuracy"]["received"], *line["accuracy"]["local"]):
        row[1] = None
    line["forgetting"]["owners"][1] = None
    path.write_text(json.dumps(line) + "\n")
    (again,) = read_experiment(tmp_path / "run")
    after = heatmaps.local_forgetting(again)
    assert texts(after) == texts(before)
    assert after != before


def test_a_round_of_which_nothing_is_known_is_an_empty_panel(tmp_path):
    finished(tmp_path / "run", A, PROX, forgetting={"rounds": [0, 2]})
    path = tmp_path / "run" / "prox" / "0" / "forgetting.jsonl"
    nobody = {**json.loads(path.read_text().splitlines()[0]), "models": [], "known": False}
    path.write_text(json.dumps(nobody) + "\n" + path.read_text().splitlines()[1] + "\n")
    (record,) = read_experiment(tmp_path / "run")
    found = texts(heatmaps.local_forgetting(record))
    assert {"A, round 0", "prox, round 0", "A, round 2", "prox, round 2"} <= set(found)
    assert found.count("nothing to compare") == 1


# -- over time ---------------------------------------------------------------------------------------------------------


def test_what_was_forgotten_of_groups_is_what_their_curves_say(tmp_path):
    record = finished(tmp_path / "run", A, STEADY, rounds=12, eval_every=1, seeds=[0, 1])
    shifted, steady = record.methods
    for run in shifted.runs:
        day, night = (run.accuracy("held_out_clients", group)[1] for group in ("day", "night"))
        # Shares of the day with T = 4: 1, .5, 0, .5: turns day 0-2, night 2-4, day 4-6, ...; the window is 8 rounds.
        ends = [("night", 4, 6), ("day", 6, 8), ("night", 8, 10), ("day", 10, 12)]
        curves = {"day": day, "night": night}
        fell = [curves[group][end - 1] - curves[group][start - 1] for group, start, end in ends]
        got = over_time(record, run)
        assert got["backward_transfer"] == pytest.approx(np.mean(fell))
        past = {"day": [6, 7, 10, 11], "night": [4, 5, 8, 9]}
        for group, rounds in past.items():
            gaps = [curves[group][:i].max() - curves[group][i] for i in rounds]
            assert got[f"forgetting_{group}"] == pytest.approx(np.mean(gaps))
        assert got["forward_transfer"] == pytest.approx(night[1] - 1 / 3)
        assert 0 <= got["recovered"] <= 1
    assert "backward_transfer" in summarize(record).method("A").measures
    assert "backward_transfer" not in summarize(record).method("steady").measures
    assert over_time(record, steady.runs[0])["recovered"] != 0  # nobody asks: it has no turns, and nothing is known
    table = tables.transfer_table(summarize(record))
    assert table.header[:5] == [
        "method",
        "backward transfer",
        "forgetting",
        "forgetting, day clients",
        "forgetting, night clients",
    ]
    assert table.rows[1] == ["steady", *["-"] * (len(table.header) - 1)]


def test_without_groups_or_shift_there_is_no_table(tmp_path):
    record = finished(tmp_path / "run", A, data={"groups": {"by": "none"}}, shift={"who": "always"}, rounds=2)
    assert (
        tables.measured(summarize(record), tables.LOCAL_FORGETTING) is tables.transfer_table(summarize(record)) is None
    )
    assert over_time(record, record.methods[0].runs[0]) == {}


def test_three_groups_and_runs_shorter_than_a_period_have_a_map_of_groups(tmp_path):
    three = finished(tmp_path / "three", A, STEADY, data=THREE, rounds=8, seeds=[0, 1])
    svg = heatmaps.groups_over_rounds(three)
    assert {"domain 0", "domain 1", "domain 2", "A"} <= set(texts(svg))
    assert "steady" not in texts(svg)
    assert heatmaps.groups_over_rounds(finished(tmp_path / "two", A, rounds=8)) is None
    short = finished(tmp_path / "short", A, rounds=3)
    assert {"day", "night"} <= set(texts(heatmaps.groups_over_rounds(short)))
    replayed = finished(
        tmp_path / "again", A, rounds=8,
        shift={"who": {"kind": "replay", "path": str(tmp_path / "two" / "shift" / "0.safetensors")}},
    )  # fmt: skip
    assert heatmaps.groups_over_rounds(replayed) is not None
    steady = finished(tmp_path / "steady", STEADY, rounds=2)
    assert heatmaps.groups_over_rounds(steady) is None


# -- validation rows ---------------------------------------------------------------------------------------------------


def test_without_test_rows_the_report_is_about_validation_rows(tmp_path):
    record = finished(
        tmp_path / "run", A, MOMENTUM, rounds=4,
        data={"held_out_clients": {"clients": 0}, "split": {"val": 0.2, "test": 0.0}},
    )  # fmt: skip
    assert record.view == "val"
    lines = [line for line in record.methods[0].runs[0].lines if "scores" in line]
    made = summarize(record)
    assert made.method("A").measures["last"].mean == lines[-1]["scores"]["val"]["accuracy"]
    assert "validation rows" not in tables.accuracy_table(made).header
    text = write_report([tmp_path / "run"]).read_text()
    assert "accuracy of clients on their validation rows, %" in text
    assert "There are no test rows: the model is judged on the clients&#39; validation rows." in text


def test_with_test_rows_the_validation_rows_are_a_column(tmp_path):
    made = summarize(finished(tmp_path / "run", A, rounds=4))
    table = tables.accuracy_table(made)
    assert table.header[-1] == "validation rows"
    assert table.rows[0][-1] == percent(made.method("A").measures["val_accuracy"])
