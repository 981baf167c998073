"""The commonest class: the line that tables, sentences, headlines and pages have where a method is no better."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fedtide.config import from_dict
from fedtide.core.errors import FedtideError
from fedtide.evaluate.measure import Measure
from fedtide.report import narrative, tables
from fedtide.report.alarms import alarms, broken
from fedtide.report.page import write_report
from fedtide.report.reading import ExperimentRecord, MethodRecord, read_experiment
from fedtide.report.summary import MethodSummary, Paired, Summary, summarize
from fedtide.runs import folder
from fedtide.runs.experiment import execute
from helpers.pages import Page
from helpers.studies import A, finished, lines_of, raw, study


def method(name: str, values, floor=0.5) -> MethodSummary:
    measures = {"accuracy": Measure.of(list(values)), "commonest_class": Measure.of([floor] * len(values))}
    return MethodSummary(name, "fedavg", list(range(len(values))), 0, measures)


def summary(*methods: MethodSummary) -> Summary:
    pairs = [Paired(m.name, methods[0].name, m.against(methods[0], "accuracy")) for m in methods[1:]]
    return Summary("", "", 100, "held_out_clients", 64, None, [], list(methods), pairs)


def test_a_headline_says_what_is_had_without_training():
    """The best of two forecasts is level with the value of a week ago, and ahead of that of a day ago."""

    def made(known: dict[str, float]) -> list[MethodSummary]:
        return [
            MethodSummary(name, "fedavg", [0, 1, 2], 0, {
                "accuracy": Measure.of([score] * 3), **{key: Measure.of([value] * 3) for key, value in known.items()}
            })
            for name, score in (("A", 0.8), ("B", 0.7))
        ]  # fmt: skip

    record = ExperimentRecord("", from_dict(raw(A)), [])
    said = narrative.headline(record, summary(*made({"yesterday": 0.75, "last_week": 0.8})))
    assert said.endswith(
        " That is no better than saying the value of a week ago, which needs no training and gets 80.0 %."
    )
    assert "no better" not in narrative.headline(record, summary(*made({"yesterday": 0.75})))


@pytest.mark.parametrize(("values", "no_better"), [
    ([0.6, 0.61, 0.62], False),
    ([0.5, 0.5, 0.5], True),
    ([0.4, 0.3, 0.2], True),
    ([0.5, 0.52, 0.49], True),   # 0.0033, error 0.0088: not clear
    ([0.51, 0.52, 0.54], False),  # two errors above: more seeds would do
    ([0.6], False),
    ([0.45], True),
    ([0.9, 0.6], False),
])  # fmt: skip
def test_who_is_no_better_than_the_commonest_class(values, no_better):
    assert method("A", values).no_better is no_better


def test_where_nothing_was_judged_a_line_says_so():
    never = MethodSummary("A", "fedavg", [0], 0, {})
    assert alarms(summary(never)) == [
        "nothing was judged: no client has test rows (data.split.test), and none is held out"
    ]
    assert not alarms(summary(never, method("B", [0.8, 0.9])))
    assert not alarms(summary(MethodSummary("A", "fedavg", [], 1, {})))  # nothing is finished


def test_without_labels_nobody_is_compared():
    assert not MethodSummary("A", "fedavg", [0], 0, {"accuracy": Measure.of([0.1])}).no_better


def test_the_line_stands_where_a_method_is_no_better():
    good, bad = method("Good", [0.8, 0.81, 0.82]), method("Bad", [0.5, 0.5, 0.5])
    made = summary(good, bad)
    for table in (tables.methods_table(made), tables.accuracy_table(made), tables.brief_table(made)):
        assert table.rows[-1][:2] == ["commonest class, without training", "50.0 %"]
        assert len(table.rows[-1]) == len(table.header)
    assert "no better than always answering the commonest class (50.0 %)." in narrative.sentence(made, bad)
    assert "commonest" not in narrative.sentence(made, good)
    assert [row[0] for row in tables.methods_table(summary(good)).rows] == ["Good"]


@pytest.mark.parametrize(("held_out", "untrained"), [
    ({"clients": 2}, True), ({"clients": 2, "labeled": 0.5}, False), ({"clients": 0}, False),
])  # fmt: skip
def test_clients_without_a_model_are_not_compared_with_the_commonest_class(tmp_path, held_out, untrained):
    alone = {"name": "Alone", "algorithm": "local", "solver": {"lr": 1e-6, "batch_size": 4}}
    data = {**raw()["data"], "held_out_clients": held_out}
    (record,) = read_experiment(finished(tmp_path / "run", study(A, alone, rounds=1, seeds=[0], data=data)))
    made = summarize(record)
    assert [each.untrained for each in made.methods] == [False, untrained]
    bad = replace(method("Alone", [0.5, 0.5, 0.5]), untrained=untrained)
    said = narrative.sentence(summary(bad), bad)
    assert ("New clients have no model of their own, so this is an untrained one." in said) is untrained
    assert ("no better than always answering" in said) is bad.no_better is not untrained
    assert ("commonest class, without training" in str(tables.methods_table(summary(bad)))) is not untrained


def test_no_headline_praises_what_needs_no_training():
    experiment = from_dict(raw(A))
    record = ExperimentRecord("", experiment, [MethodRecord(m, experiment, [], 0) for m in experiment.method])
    made = summary(method("A", [0.5, 0.5, 0.5]), method("B", [0.4, 0.4, 0.4]))
    assert narrative.headline(record, made) == (
        "No method is better than always answering the commonest class (50.0 %): A has the highest mean, 50.0 % over "
        "the last 64 rounds."
    )


@pytest.mark.parametrize(("losses", "exploded"), [
    ((1.4, 2.0), False), ((0.01, 9.0), False), ((175.0, 1.8e6), True), ((2.3, 101.0), True), ((50.0, 400.0), False),
])  # fmt: skip
def test_a_loss_that_exploded_is_an_alarm(losses, exploded):
    bad = method("A", [0.5])
    for name, loss in zip(("first_loss", "peak_loss"), losses, strict=True):
        bad.measures[name] = Measure.of([loss])
    said = alarms(summary(bad))
    assert len(said) == exploded == broken(bad)
    if exploded:
        assert said[0].startswith(
            f"A: the training loss rose from {losses[0]:,.4g} to {losses[1]:,.4g}, and in the end "
        )
    bad.measures["accuracy"] = Measure.of([0.9])
    assert not broken(bad)


@pytest.mark.parametrize(("clusters", "silhouette", "warned"), [
    (4.0, 0.09, True), (4.0, 0.3, False), (1.0, 0.09, False), (4.0, math.nan, False),
])  # fmt: skip
def test_clusters_of_clients_without_groups_are_said_and_break_nothing(clusters, silhouette, warned):
    made = method("A", [0.9])
    made.measures.update(clusters=Measure.of([clusters]), silhouette=Measure.of([silhouette]))
    assert [line.partition(",")[0] for line in alarms(summary(made))] == ["A: its clusters are hardly any"] * warned
    assert not broken(made)


def test_the_first_and_the_highest_loss_are_those_of_the_record(tmp_path):
    experiment = study({**A, "local": {"lr": 1e4, "batch_size": 4}}, rounds=3, seeds=[0])
    folder.create(experiment, tmp_path / "run")
    assert execute(experiment, tmp_path / "run", workers=1)
    told = [line["client_loss"]["q50"] for line in lines_of(tmp_path / "run" / "a" / "0")]
    (record,) = read_experiment(tmp_path / "run")
    found = summarize(record).method("A").measures
    assert (found["first_loss"].mean, found["peak_loss"].mean) == (told[0], max(told))


def test_the_page_has_the_line_of_the_record(tmp_path):
    experiment = study({**A, "local": {"lr": 1e-6, "batch_size": 4}}, rounds=2, seeds=[0])
    folder.create(experiment, tmp_path / "run")
    assert execute(experiment, tmp_path / "run", workers=1)
    line = lines_of(tmp_path / "run" / "a" / "0")[-1]
    (record,) = read_experiment(tmp_path / "run")
    made = summarize(record)
    assert made.method("A").measures["commonest_class"].values == [line["scores"]["held_out_clients"]["commonest"]]
    page = Page(write_report([tmp_path / "run"]).read_text(encoding="utf-8"))
    assert ("commonest class, without training" in [row[0] for row in page.cells]) is made.method("A").no_better
    path = tmp_path / "run" / "a" / "0" / "rounds.jsonl"
    path.write_text(path.read_text().replace('"commonest": ', '"commonest": "so", "was": '))
    with pytest.raises(FedtideError, match=r"line \d: damaged: 'commonest' is of another kind"):
        write_report([tmp_path / "run"])
