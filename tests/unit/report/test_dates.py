"""Reports of runs whose rounds are windows of wall-clock time."""

import json
import shutil

import numpy as np
import pytest

from fedtide.evaluate.metrics import faded
from fedtide.report import periods
from fedtide.report.run_records import read_experiment
from fedtide.report.study import summarize
from helpers.studies import finished, study

WHAT = {"kind": "calendar", "window": "6h", "hold": "1d", "begin": "1970-01-02", "zone": "Europe/Berlin"}
STUDY = {
    "rounds": 60, "eval_every": 1,
    "data": {"source": {"kind": "gaussians", "samples": 100, "dims": 4, "classes": 3, "domains": 2, "every": 14400.0},
             "groups": {"by": "none"}, "split": {"val": 0.0}, "held_out_clients": {"clients": 0}},
    "shift": {"who": "data", "what": WHAT},
}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Fifteen days of four windows each, of which a day is without rows."""
    return finished(tmp_path_factory.mktemp("dates") / "run", study(**STUDY))


@pytest.fixture
def record(root):
    return read_experiment(root)[0]


def test_what_fades_fades_with_each_window_however_often_is_evaluated():
    """Judged after 20, 40 and 45 windows, the first counts 0.95^25 in the end, and the second 0.95^5."""
    weights, values = 0.95 ** np.array([25, 5, 0]), np.array([0.5, 1.0, 0.0])
    assert faded(np.array([20, 40, 45]), values)[-1] == pytest.approx(float(weights @ values / weights.sum()))


def test_accuracy_by_hour_and_weekday_is_that_of_the_windows_that_begin_then(record):
    run = record.methods[0].runs[0]
    hour, weekday = periods.cycles_of(record)
    assert (hour.name, weekday.name) == ("hour of the day", "weekday")
    lines = [line for line in run.judged if line["window"]["next"][11:13] == "06"]
    at, values = periods.by_cycle(record.view, hour, run)
    assert at.tolist() == [0.0, 6.0, 12.0, 18.0]
    scores = [line["scores"]["train_clients"] for line in lines]
    right = sum(entry["rows"] * entry["accuracy"] for entry in scores)
    assert values[1] == pytest.approx(right / sum(entry["rows"] for entry in scores))
    assert periods.by_cycle(record.view, weekday, run)[0].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def few_and_many(root, folder, rows, accuracy):
    """Copy a run whose last windows have these rows and accuracies."""
    shutil.copytree(root, folder)
    path = folder / "a" / "0" / "rounds.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    judged = [line["scores"]["train_clients"] for line in lines if line.get("scores", {}).get("train_clients")]
    for entry, count, right in zip(judged[-len(rows) :], rows, accuracy, strict=True):
        entry |= {"rows": count, "accuracy": right, "client_mean": right, "loss": 1 - right, "commonest": 1 - right}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = folder / "config.toml"
    config.write_text(f"average_last = {len(rows)}\n" + config.read_text())
    return read_experiment(folder)[0]


def test_windows_count_by_their_rows(root, tmp_path):
    """Of 500 rows 400 are right, of 5 none, of one none: 400 of 506."""
    record = few_and_many(root, tmp_path / "run", rows := [500, 5, 1], [0.8, 0.0, 0.0])
    run, found = record.methods[0].runs[0], summarize(record).methods[0].measures
    late = 400 / 506
    assert [found[name].mean for name in ("accuracy", "client_mean")] == [pytest.approx(late)] * 2
    assert [found[name].mean for name in ("loss", "commonest_class")] == [pytest.approx(1 - late)] * 2
    scores = [line["scores"][record.view] for line in run.judged]
    right = sum(entry["rows"] * entry["accuracy"] for entry in scores)
    assert found["mean_over_rounds"].mean == pytest.approx(right / sum(entry["rows"] for entry in scores))
    # A window of a row is no moment: of these it is the mean that fades, its last one as the formula says.
    fading = np.array([entry["rows"] for entry in scores]) * 0.95 ** np.arange(len(scores))[::-1]
    last = float(fading @ np.array([entry["accuracy"] for entry in scores]) / fading.sum())
    assert found["last"].mean == found["worst_point"].mean == pytest.approx(last)
    assert 0.7 < last < 0.8
    assert len(rows) == record.window
    assert periods.course(record.view, run)[1][-1] == pytest.approx(last)


def test_rounds_that_are_no_windows_count_the_same(root, tmp_path):
    assert few_and_many(root, tmp_path / "run", [500, 5, 1], [0.8, 0.0, 0.1]).dated
    path = tmp_path / "run" / "a" / "0" / "rounds.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({k: v for k, v in line.items() if k != "window"}) + "\n" for line in lines))
    found = summarize(read_experiment(tmp_path / "run")[0]).methods[0].measures
    assert (found["accuracy"].mean, found["worst_point"].mean) == (pytest.approx(0.3), 0.0)
    assert found["last"].mean == 0.1


@pytest.mark.parametrize("target", ["classes", "counts"])
def test_a_group_counts_by_its_own_rows_in_the_same_windows(tmp_path, target):
    data = STUDY["data"] | {"groups": {"by": "domain"}, "target": target}
    shift = {"who": "data", "what": WHAT | {"begin": "1970-01-03"}}
    changes = {"rounds": 28, "average_last": 12, "data": data, "shift": shift}
    root = finished(tmp_path / "run", study(**STUDY | changes))
    record = read_experiment(root)[0]
    run, found = record.methods[0].runs[0], summarize(record).methods[0].measures
    score = record.experiment.score
    late = [line for line in run.judged if line["round"] >= 28 - 12]
    entries = [line["scores"][record.view] for line in late if record.view in line["scores"]]
    whole, parts = {"above": 0.0, "below": 0.0}, {group: {"above": 0.0, "below": 0.0} for group in record.groups}
    for entry in entries:
        total = entry.get("reference", entry["rows"])
        assert sum(entry["group_weights"].values()) == pytest.approx(total)
        whole["above"] += total * entry[score]
        whole["below"] += total
        for group, weight in entry["group_weights"].items():
            parts[group]["above"] += weight * entry["groups"][group]
            parts[group]["below"] += weight
    assert sum(part["above"] for part in parts.values()) == pytest.approx(whole["above"])
    assert found[score].mean == pytest.approx(whole["above"] / whole["below"])
    for group, part in parts.items():
        assert found[f"{score}_{group}"].mean == pytest.approx(part["above"] / part["below"])
    # A group without rows in these windows has no number there, although it had one before.
    path = root / "a" / "0" / "rounds.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    gone = record.groups[0]
    for line in lines[-12:]:
        for entry in filter(None, line.get("scores", {}).values()):
            entry["groups"].pop(gone, None)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert f"{score}_{gone}" not in summarize(read_experiment(root)[0]).methods[0].measures


def test_a_skill_is_that_of_all_rows_of_the_windows(tmp_path):
    """Windows have few rows, and in some the constant hardly errs: a mean of their skills would be of these alone."""
    data = STUDY["data"] | {"target": "counts"}
    shift = {"who": "data", "what": WHAT | {"begin": "1970-01-03"}}
    record = read_experiment(finished(tmp_path / "run", study(**STUDY | {"rounds": 28, "data": data, "shift": shift})))[
        0
    ]
    run, summary = record.methods[0].runs[0], summarize(record)
    scores = [line["scores"]["train_clients"] for line in run.judged]
    assert len({entry["reference"] for entry in scores}) > 5
    error = sum((1 - entry["skill"]) * entry["reference"] for entry in scores)
    whole = 1 - error / sum(entry["reference"] for entry in scores)
    assert summary.methods[0].measures["skill"].values == [pytest.approx(whole)]
    assert whole != pytest.approx(np.mean([entry["skill"] for entry in scores]), abs=1e-3)
    hour = periods.cycles_of(record)[0]
    night = [line["scores"]["train_clients"] for line in run.judged if line["window"]["next"][11:13] == "00"]
    error = sum((1 - entry["skill"]) * entry["reference"] for entry in night)
    skill = 1 - error / sum(entry["reference"] for entry in night)
    assert periods.by_cycle(record.view, hour, run)[1][0] == pytest.approx(skill)
    errors = np.array([entry["reference"] for entry in scores])
    worst = np.average([entry["worst_decile"] for entry in scores], weights=errors)
    assert summary.methods[0].measures["worst_decile"].values == [pytest.approx(worst)]
    mae = np.average([entry["mae"] for entry in scores], weights=[entry["rows"] for entry in scores])
    assert summary.methods[0].measures["mae"].values == [pytest.approx(mae)]
