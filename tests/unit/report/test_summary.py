"""The summary: every number once more by hand, from the record files of a small experiment."""

import copy
import csv
import json
import math
import shutil
import statistics
from pathlib import Path

import pytest

from fedtide.core.errors import FedtideError
from fedtide.evaluate.metrics import Measure
from fedtide.report.claims import chosen_points
from fedtide.report.page import write_report
from fedtide.report.run_records import ExperimentRecord, MethodRecord, read_experiment
from fedtide.report.study import summarize
from fedtide.report.summary import MethodSummary
from fedtide.report.topic import words_of
from fedtide.runs import folder
from helpers.studies import MOMENTUM, STEADY, A, finished, lines_of, run_of, study

ROUNDS, PERIOD, SEEDS = 12, 4, (0, 1, 2)
EXPERIMENT = study(A, STEADY, MOMENTUM, rounds=ROUNDS, seeds=list(SEEDS), baseline="A", eval_every=1, title="Toy")


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return finished(tmp_path_factory.mktemp("summary") / "run", EXPERIMENT)


@pytest.fixture(scope="module")
def summary(root):
    (record,) = read_experiment(root)
    return summarize(record)


def curve(root: Path, method: str, seed: int, *path: str) -> list[float]:
    out = []
    for line in lines_of(root / method.lower() / str(seed)):
        value = line["scores"]
        for key in path:
            value = value[key]
        out.append(value)
    return out


def over_seeds(root: Path, method: str, number) -> tuple[float, float, list[float]]:
    values = [number(seed) for seed in SEEDS]
    return statistics.mean(values), statistics.stdev(values) / math.sqrt(len(values)), values


def agrees(measure: Measure, expected: tuple[float, float, list[float]]) -> None:
    assert measure.mean == pytest.approx(expected[0], abs=1e-12)
    assert measure.error == pytest.approx(expected[1], abs=1e-12)
    assert measure.values == pytest.approx(expected[2], abs=1e-12)


METHODS = ("A", "steady", "momentum")
WINDOW = 2 * PERIOD


def test_what_is_compared_and_over_which_rounds(summary):
    assert (summary.title, summary.point, summary.rounds, summary.view) == ("Toy", "", ROUNDS, "held_out_clients")
    assert (summary.window, summary.period, summary.groups) == (WINDOW, PERIOD, ["day", "night"])
    assert [m.name for m in summary.methods] == list(METHODS)
    assert [m.algorithm for m in summary.methods] == ["fedavg", "fedavg", "fedavgm"]
    assert all(m.seeds == list(SEEDS) and m.unfinished == 0 for m in summary.methods)


def swing(values):
    return statistics.mean(max(p) - min(p) for p in (values[-PERIOD:], values[-2 * PERIOD : -PERIOD]))


BY_HAND = {
    "accuracy": lambda values: statistics.mean(values[-WINDOW:]),
    "last": lambda values: values[-1],
    "best": max,
    "worst_point": lambda values: min(values[-WINDOW:]),
    "mean_over_rounds": statistics.mean,
    "std_over_rounds": statistics.pstdev,
    "swing": swing,
}


@pytest.mark.parametrize("method", METHODS)
def test_accuracies_by_hand(root, summary, method):
    measures = summary.method(method).measures

    def expected(number, *path):
        return over_seeds(root, method, lambda seed: number(curve(root, method, seed, "held_out_clients", *path)))

    for name, number in BY_HAND.items():
        agrees(measures[name], expected(number, "accuracy"))
    for group in ("day", "night"):
        for name in ("accuracy", "swing"):
            agrees(measures[f"{name}_{group}"], expected(BY_HAND[name], "groups", group))


@pytest.mark.parametrize("method", METHODS)
def test_spread_over_clients_and_validation_by_hand(root, summary, method):
    measures = summary.method(method).measures

    def late(seed, number):
        """From clients.csv, whose accuracies have six digits."""
        with open(root / method.lower() / str(seed) / "clients.csv", newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["view"] == "held_out_clients"]
        by_round = [
            [float(r["accuracy"]) for r in rows if int(r["round"]) == n] for n in range(ROUNDS - WINDOW, ROUNDS)
        ]
        return statistics.mean(number(values) for values in by_round)

    for name, number in (
        ("client_mean", statistics.mean),
        ("worst_decile", min),
        ("client_variance", statistics.pvariance),
        ("client_std", statistics.pstdev),
    ):
        values = [late(seed, number) for seed in SEEDS]
        assert measures[name].values == pytest.approx(values, abs=2e-6)
    val = over_seeds(root, method, lambda s: statistics.mean(curve(root, method, s, "val", "accuracy")[-WINDOW:]))
    agrees(measures["val_accuracy"], val)

    def at_best_val(seed):
        val, judged = (curve(root, method, seed, view, "accuracy") for view in ("val", "held_out_clients"))
        return judged[val.index(max(val))]

    agrees(measures["at_best_val"], over_seeds(root, method, at_best_val))


@pytest.mark.parametrize("method", METHODS)
def test_costs_by_hand(root, summary, method):
    measures = summary.method(method).measures
    folders = root / method.lower()
    for name in ("down", "up", "refused"):
        agrees(
            measures[name],
            over_seeds(root, method, lambda s, n=name: float(sum(line[n] for line in lines_of(folders / str(s))))),
        )
    assert measures["down"].mean == ROUNDS * 4 * 172
    assert measures["up"].mean == ROUNDS * 4 * 196
    timings = [json.loads(line) for line in (folders / "0" / "timings.jsonl").read_text().splitlines()]
    assert measures["seconds"].values[0] == pytest.approx(sum(t["seconds"] for t in timings))
    assert measures["evaluation_seconds"].values[0] == pytest.approx(sum(t["evaluation"] for t in timings))
    # All participants train on each of their rows once, and every round trains.
    assert measures["rounds_trained"].values == [ROUNDS] * len(SEEDS)
    work = over_seeds(root, method, lambda seed: float(sum(line["samples"] for line in lines_of(folders / str(seed)))))
    agrees(measures["samples"], work)
    assert 4 * ROUNDS < work[0] < 64 * ROUNDS
    for seed in SEEDS:
        mean = statistics.mean(curve(root, method, seed, "held_out_clients", "accuracy"))
        assert measures["per_million_samples"].values[seed] == pytest.approx(mean / work[2][seed] * 1e6)
        assert measures["per_second"].values[seed] == pytest.approx(mean / measures["seconds"].values[seed])


@pytest.mark.parametrize("method", METHODS)
def test_time_to_the_accuracy_of_the_baseline_by_hand(root, summary, method):
    measures = summary.method(method).measures
    for place, seed in enumerate(SEEDS):
        target = curve(root, "A", seed, "held_out_clients", "accuracy")[-1]
        values = curve(root, method, seed, "held_out_clients", "accuracy")
        staying = [n for n in range(ROUNDS) if all(v >= target for v in values[n:])]
        assert measures["time_to_accuracy"].values[place] == (staying[0] + 1 if staying else ROUNDS)
        assert measures["reached_accuracy"].values[place] == bool(staying)


def test_paired_differences_by_hand(root, summary):
    base = summary.method("A").measures["accuracy"].values
    assert [(p.name, p.baseline) for p in summary.paired] == [("steady", "A"), ("momentum", "A")]
    for pair in summary.paired:
        ours = summary.method(pair.name).measures["accuracy"].values
        differences = [o - b for o, b in zip(ours, base, strict=True)]
        error = statistics.stdev(differences) / math.sqrt(3)
        agrees(pair.difference, (statistics.mean(differences), error, differences))


def test_the_summary_file_says_the_same(root, summary):
    write_report([root])
    written = json.loads((root / "summary.json").read_text())
    assert written["window"] == WINDOW
    for method in written["methods"]:
        for name, measure in method["measures"].items():
            ours = summary.method(method["name"]).measures[name]
            assert (measure["mean"], measure["error"]) == (ours.mean, ours.error)
            assert measure["values"] == [v if math.isfinite(v) else None for v in ours.values]
    assert written["paired"][0]["difference"]["mean"] == summary.paired[0].difference.mean


# -- measures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("values", "mean"), [([0.5], 0.5), ([], None), ([1.0, math.inf], None), ([math.nan], None)])
def test_a_measure_has_a_mean_if_it_is_finite_at_every_seed(values, mean):
    """The mean of the seeds that got there would flatter."""
    assert (Measure.of(values).mean, Measure.of(values).error) == (mean, None)


# -- what is left out --------------------------------------------------------------------------------------------------


def summarized(tmp_path, *methods, **changes):
    return summarize(read_experiment(finished(tmp_path / "run", study(*methods, **changes)))[0])


def test_numbers_that_need_a_baseline_a_period_groups_or_validation_rows_are_left_out(tmp_path):
    data = {"groups": {"by": "none"}, "split": {"val": 0.0}, "held_out_clients": {"clients": 0}}
    plain = summarized(tmp_path, A, MOMENTUM, shift={"who": "always"}, data=data)
    assert (plain.paired, plain.period, plain.groups, plain.view) == ([], None, [], "train_clients")
    prefixes = ("swing", "accuracy_", "val_", "time_to", "ari", "backward")
    assert not [name for method in plain.methods for name in method.measures if name.startswith(prefixes)]
    lines = [line for line in lines_of(tmp_path / "run" / "a" / "0") if "scores" in line]
    assert plain.methods[0].measures["last"].mean == lines[-1]["scores"]["train_clients"]["accuracy"]


def test_without_test_rows_the_report_is_about_validation_rows(tmp_path):
    data = {"held_out_clients": {"clients": 0}, "split": {"val": 0.2, "test": 0.0}}
    made = summarized(tmp_path, A, rounds=4, data=data)
    lines = [line for line in lines_of(tmp_path / "run" / "a" / "0") if "scores" in line]
    assert made.view == "val"
    assert made.methods[0].measures["last"].mean == lines[-1]["scores"]["val"]["accuracy"]
    assert "accuracy of clients on their validation rows, %" in write_report([tmp_path / "run"]).read_text()


@pytest.mark.parametrize(("changes", "window"), [
    ({}, 6), ({"rounds": 20}, 8), ({"rounds": 20, "average_last": 3}, 3), ({"rounds": 4, "average_last": 30}, 4),
    ({"rounds": 20, "shift": {"who": "always"}}, 5), ({"rounds": 3, "shift": {"who": "always"}}, 1),
    ({"shift": {"who": {"kind": "periodic", "period": 2.5}}}, 5),
])  # fmt: skip
def test_late_accuracy_is_over_the_window_or_two_periods_or_the_last_quarter(tmp_path, changes, window):
    experiment = study(A, **changes)
    folder.create(experiment, tmp_path / "run")
    (record,) = read_experiment(tmp_path / "run")
    assert record.window == window


SHIFTED = {**A, "name": "shifted", "shift": {"who": {"kind": "periodic", "period": 3}}}


@pytest.mark.parametrize(("methods", "shift", "period", "window"), [
    ((A, SHIFTED), {"who": "always"}, 3, 6),
    ((SHIFTED, A), {"who": {"kind": "periodic", "period": 4}}, 4, 8),
    ((A, STEADY), {"who": {"kind": "periodic", "period": 4}}, 4, 8),
    ((A, SHIFTED), {"who": {"kind": "periodic", "period": 4}, "clock": "seconds"}, None, 250),
    ((A,), {"who": "always"}, None, 250),
])  # fmt: skip
def test_the_period_is_that_of_the_shift_or_of_the_first_method_with_one(methods, shift, period, window):
    experiment = study(*methods, shift=shift, rounds=1000)
    record = ExperimentRecord("", experiment, [MethodRecord(m, experiment, [], 0) for m in experiment.method])
    assert (record.experiment.period, record.window) == (period, window)


def test_a_swing_of_a_period_that_was_judged_once_is_unknown(tmp_path):
    made = summarized(tmp_path, A, rounds=8, eval_every=4)
    measures = made.methods[0].measures
    assert made.period == 4
    assert [measures[name].mean for name in ("swing", "swing_day", "swing_night")] == [None] * 3
    assert measures["worst_point"].mean is not None
    write_report([tmp_path / "run"])
    (written,) = json.loads((tmp_path / "run" / "summary.json").read_text())["methods"]
    assert written["measures"]["swing"] == {"mean": None, "error": None, "values": [None]}


# -- unfinished runs ---------------------------------------------------------------------------------------------------


def test_runs_that_are_not_finished_are_counted_and_left_out(tmp_path):
    experiment = study(A, MOMENTUM, seeds=[0, 1, 2], baseline="A")
    root = tmp_path / "run"
    folder.create(experiment, root)
    for seed in (0, 1):
        list(run_of(study({**A, "name": "a"}, MOMENTUM, seeds=[0, 1, 2]), root, seed).play())
    list(run_of(experiment, root, 1, method=1).play())
    list(run_of(experiment, root, 2, method=1).play(lambda: True))
    (record,) = read_experiment(root)
    made = summarize(record)
    assert [(m.name, m.seeds, m.unfinished) for m in made.methods] == [("A", [0, 1], 1), ("momentum", [1], 2)]
    assert words_of(record)["band"] == " Lines are means over 1 to 2 seeds, bands one standard error."
    (pair,) = made.paired
    assert pair.difference.values == [
        made.method("momentum").measures["accuracy"].values[0] - made.method("A").measures["accuracy"].values[1]
    ]


# -- sweeps ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    experiment = study(A, MOMENTUM, rounds=3, eval_every=1, sweep={"method.local.lr": [0.001, 0.1, 1.0]})
    return finished(tmp_path_factory.mktemp("swept") / "run", experiment)


def test_a_point_is_chosen_by_validation_rows(swept):
    summaries = [summarize(record) for record in read_experiment(swept)]
    chosen = chosen_points(summaries)
    for name in ("A", "momentum"):
        scores = [summary.method(name).measures["val_accuracy"].mean for summary in summaries]
        assert chosen[name] is summaries[scores.index(max(scores))]


def test_test_rows_have_no_say_in_the_choice(swept, tmp_path):
    """Every score on test rows is turned around, and the choice stays."""
    before = chosen_points([summarize(record) for record in read_experiment(swept)])
    root = tmp_path / "run"
    shutil.copytree(swept, root)
    for path in root.rglob("rounds.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            for view in ("train_clients", "held_out_clients"):
                line["scores"][view]["accuracy"] = 1 - line["scores"][view]["accuracy"]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    after = chosen_points([summarize(record) for record in read_experiment(root)])
    assert {n: s.point for n, s in after.items()} == {n: s.point for n, s in before.items()}


def test_ties_go_to_the_first_point_and_methods_choose_for_themselves(swept):
    summaries = [summarize(record) for record in read_experiment(swept)]
    tied = copy.deepcopy(summaries)
    for summary in tied:
        for method in summary.methods:
            method.measures["val_accuracy"] = Measure(0.5, None, [0.5])
    tied[2].method("momentum").measures["val_accuracy"] = Measure(0.6, None, [0.6])
    chosen = chosen_points(tied)
    assert (chosen["A"], chosen["momentum"]) == (tied[0], tied[2])


def test_other_uses_of_models_are_at_the_point_of_their_federation(swept):
    """A use that trusts rows it was fitted to would choose by chance, and no federation is trained for it."""
    summaries = copy.deepcopy([summarize(record) for record in read_experiment(swept)])
    for k, summary in enumerate(summaries):
        value = Measure(0.9 - 0.1 * k, None, [0.9 - 0.1 * k])
        summary.methods.append(MethodSummary("A, mixture", "fedavg", [0], 0, {"val_accuracy": value}, "A"))
    chosen = chosen_points(summaries)
    assert chosen["A, mixture"] is chosen["A"] is not summaries[0]


def test_without_validation_rows_or_without_a_sweep_nothing_is_chosen(swept, summary):
    assert chosen_points([summary]) == {}
    summaries = [summarize(record) for record in read_experiment(swept)]
    for one in summaries:
        for method in one.methods:
            del method.measures["val_accuracy"]
    assert chosen_points(summaries) == {}


# -- damaged records ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["removed", "emptied", "cut", "rubbish"])
def test_a_finished_run_without_its_record_is_one_clear_line(root, tmp_path, damage):
    copied = shutil.copytree(root, tmp_path / "run")
    path = copied / "a" / "1" / "rounds.jsonl"
    if damage == "removed":
        path.unlink()
    else:
        path.write_text({"emptied": "", "cut": path.read_text()[:-40], "rubbish": "{nonsense}\n" * ROUNDS}[damage])
    with pytest.raises(FedtideError, match=r"rounds.jsonl|a/1"):
        write_report([copied])
