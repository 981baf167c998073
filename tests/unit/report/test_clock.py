"""The simulated clock in reports: who was late, how long runs took, accuracy over seconds, by hand."""

from __future__ import annotations

import pytest

from fedtide.evaluate.measure import Measure
from fedtide.report import clock, narrative, tables
from fedtide.report.measures import UNITS, difference
from fedtide.report.page import write_report
from fedtide.report.reading import read_experiment
from fedtide.report.summary import summarize
from fedtide.runs import folder
from helpers.pages import Page
from helpers.studies import A, lines_of, run_of, study

SHIFT = {"who": "always"}
HASTY = {**A, "name": "hasty", "cohort": {"kind": "uniform", "clients_per_round": 3, "over_selection": 1.5}}


def played(root, *methods, **changes):
    experiment = study(*methods, **{"shift": SHIFT, **changes})
    folder.create(experiment, root)
    for number in range(len(methods)):
        list(run_of(experiment, root, method=number).play())
    return read_experiment(root)[0]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("clock") / "run"
    played(root, HASTY, A, devices="log-normal", eval_every=2)
    return root


def test_of_five_that_are_asked_the_first_three_count(root):
    assert [line["trained"] for line in lines_of(root / "hasty" / "0")] == [[5, 3]] * 6
    record = read_experiment(root)[0]
    made = clock.clock_table(record, summarize(record))
    assert made.header == [
        "method", "simulated time", "asked to train, in a round", "counted, in a round", "counted of those asked",
    ]  # fmt: skip
    took = lines_of(root / "hasty" / "0")[-1]["seconds"]
    assert made.rows[0] == ["hasty", f"{took:.1f} s", "5", "3", "60.0 %"]
    assert made.rows[1][2:] == ["4", "4", "100.0 %"]


def test_the_page_has_accuracy_over_simulated_time(root):
    page = Page(write_report([root]).read_text(encoding="utf-8"))
    assert all(
        title in page.text["h2"] + page.text["h3"] for title in ("The simulated clock", "Accuracy over simulated time")
    )
    picture = clock.accuracy_over_seconds(read_experiment(root)[0])
    assert "simulated time, seconds" in picture


def test_seconds_are_no_other_word_for_rounds(tmp_path):
    record = played(tmp_path / "run", A)
    assert clock.clock_table(record, summarize(record)) is None
    assert clock.accuracy_over_seconds(record) is None


def test_a_clock_of_days_is_in_days(tmp_path):
    devices = {"kind": "log-normal", "overhead": 86400.0}
    record = played(tmp_path / "run", A, devices=devices)
    assert "simulated time, days" in clock.accuracy_over_seconds(record)


def test_late_means_of_runs_that_stop_are_said_to_be_of_fewer_rounds(tmp_path):
    record = played(tmp_path / "run", A, stop_at={"accuracy": 0.0}, average_last=4)
    assert tables.accuracy_table(summarize(record)).header[1] == "mean over its last 4 rounds or fewer"


def test_what_a_stream_did_is_said(tmp_path):
    """Four intervals, one every two rounds, each for four: by round 5 two more came and two went."""
    stream = {"kind": "stream", "by": "order", "intervals": 4, "gap": 2, "retention": 4}
    record = played(tmp_path / "run", A, shift={"who": "always", "what": stream}, data={"groups": {"by": "none"}})
    assert (
        "Over the run something arrives in 2 rounds and expires in 2 rounds; at such a round 8 clients hold other rows "
        "than before, on average."
    ) in narrative.setting(record)


def test_known_events_are_named(tmp_path):
    swaps = {"who": "always", "how": {"kind": "label-swaps", "every": 2}}
    record = played(tmp_path / "run", A, shift=swaps)
    assert "Known events are its label swaps, after 2 and 4 rounds." in narrative.setting(record)


def test_given_weights_are_said(tmp_path):
    played(tmp_path / "first", A)
    weights = str(tmp_path / "first" / "a" / "0")
    record = played(tmp_path / "run", {**A, "init_from": weights}, {**HASTY, "init_from": weights}, {**A, "name": "B"})
    assert f"A and hasty begin with the weights of {weights}." in narrative.setting(record)


@pytest.mark.parametrize(("name", "value", "said"), [
    ("event_recovery", 1.0, "+1 round"), ("recovery_rounds", -2.5, "-2.5 rounds"), ("moves", 3.0, "3"),
])  # fmt: skip
def test_a_difference_of_rounds_has_its_unit(name, value, said):
    assert difference(name, Measure(value, None, [value]), UNITS[name]) == said
