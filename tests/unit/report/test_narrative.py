"""The report in words: sentences, headlines, settings, tables; one seed and several, with and without a shift."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fedtide.config import from_dict
from fedtide.evaluate.measure import UNKNOWN, Measure
from fedtide.report import measures, narrative, tables
from fedtide.report.alarms import alarms
from fedtide.report.reading import ExperimentRecord, MethodRecord
from fedtide.report.summary import MethodSummary, Paired, Summary
from helpers.studies import A, raw


def measure(mean: float | None, error: float | None = None, seeds: int = 3) -> Measure:
    return Measure(mean, error, [mean] * seeds)


def method(name: str, seeds: int = 3, **measures: float | tuple[float, float]) -> MethodSummary:
    made = {
        key: measure(*(value if isinstance(value, tuple) else (value, None)), seeds) for key, value in measures.items()
    }
    return MethodSummary(name, "fedavg", list(range(seeds)), 0, made)


def summary(
    *methods: MethodSummary, groups: tuple[str, ...] = (), paired: tuple[Paired, ...] = (), point: str = ""
) -> Summary:
    return Summary(
        "Toy", point, 100, "held_out_clients", 64, 32.0 if groups else None, list(groups), list(methods), list(paired)
    )


# -- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (measure(0.9149, 0.0021), "91.5 ± 0.2 %"),
        (measure(0.5), "50.0 %"),
        (measure(None), "-"),
        (UNKNOWN, "-"),
        (measure(1.0, 0.0), "100.0 %"),
    ],
)
def test_a_share_is_said_in_percent_with_its_error(given, said):
    assert measures.percent(given) == said


@pytest.mark.parametrize(
    ("given", "signed", "said"),
    [
        (measure(0.017, 0.002), True, "+1.7 ± 0.2 points"),
        (measure(-0.017), True, "-1.7 points"),
        (measure(0.017), False, "1.7 points"),
        (UNKNOWN, True, "-"),
        (measure(None), False, "-"),
    ],
)
def test_a_difference_is_said_in_points_with_its_sign(given, signed, said):
    assert measures.points(given, signed=signed) == said


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (12_345, "12.3 kB"),
        (1e6, "1 MB"),
        (2.5e9, "2.5 GB"),
        (1e12, "1 TB"),
        (5e15, "5000 TB"),
    ],
)
def test_bytes_are_said_in_the_unit_that_fits(size, said):
    assert measures.size(measure(size)) == said
    assert measures.size(measure(None)) == "-"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (measure(1.25), "1.2 s"),
        (measure(599.9), "599.9 s"),
        (measure(600.0), "10.0 min"),
        (UNKNOWN, "-"),
        (Measure(12.5, 0.5, [12.0, 13.0]), "12.5 ± 0.5 s"),
        (Measure(None, None, [math.nan]), "-"),
    ],
)
def test_seconds_are_said_in_the_unit_that_fits(given, said):
    assert measures.seconds(given) == said


def test_counts_and_plain_numbers():
    assert measures.count(measure(3.0)) == "3"
    assert measures.count(measure(3.5)) == "3.5"
    assert measures.count(measure(None)) == measures.number(measure(None)) == "-"
    assert measures.number(measure(0.01234, 0.001)) == "0.0123 ± 0.0010"
    assert measures.number(measure(0.01234)) == "0.0123"


# -- one sentence a method ---------------------------------------------------------------------------------------------

SHIFTED = method(
    "FedAvg",
    accuracy=(0.9, 0.01),
    worst_point=(0.8, 0.02),
    swing=(0.1, 0.01),
    swing_day=(0.2, 0.01),
    swing_night=(0.05, 0.01),
)
STEADY = method("Steady", accuracy=(0.95, 0.01), worst_decile=(0.7, 0.02))


def test_a_method_under_a_shift():
    assert narrative.sentence(summary(SHIFTED, groups=("day", "night")), SHIFTED) == (
        "FedAvg has an accuracy of 90.0 ± 1.0 % over the last 64 rounds, and of 80.0 ± 2.0 % at its worst moment; "
        "within a period its accuracy swings by 10.0 ± 1.0 points (20.0 ± 1.0 points for day clients, 5.0 ± 1.0 points "
        "for night clients)."
    )


def test_a_method_without_a_shift():
    assert narrative.sentence(summary(STEADY), STEADY) == (
        "Steady has an accuracy of 95.0 ± 1.0 % over the last 64 rounds; the worst-served tenth of the clients gets "
        "70.0 ± 2.0 %."
    )


UNKNOWN = method(
    "FedAvg", accuracy=0.9, worst_point=0.8, worst_decile=0.7, swing=None, swing_day=None, swing_night=None
)


def test_a_swing_that_is_not_known_is_no_number_in_a_table():
    made = summary(UNKNOWN, groups=("day", "night"))
    assert tables.accuracy_table(made).rows == [["FedAvg", "90.0 %", "80.0 %", "-"]]
    assert tables.swings_table(made).rows == [["FedAvg", "-", "-"]]
    assert tables.brief_table(made).rows == [["FedAvg", "90.0 %", "80.0 %", "-"]]


def test_a_swing_that_is_not_known_is_not_claimed_in_a_sentence():
    said = narrative.sentence(summary(UNKNOWN, groups=("day", "night")), UNKNOWN)
    assert said.startswith("FedAvg has an accuracy of 90.0 % over the last 64 rounds")
    assert "swing" not in said


def test_a_method_with_one_seed_has_no_errors():
    one = method("FedAvg", 1, accuracy=0.9, worst_decile=0.7)
    assert "±" not in narrative.sentence(summary(one), one)


def test_a_method_that_was_never_judged_says_so():
    for never in (method("FedAvg"), MethodSummary("FedAvg", "fedavg", [0], 0, {"accuracy": measure(None)})):
        assert narrative.sentence(summary(never), never) == "FedAvg was never judged."


@pytest.mark.parametrize(("difference", "said"), [
    (measure(0.05, 0.01), "Its accuracy is 5.0 ± 1.0 points higher than that of Base, seed by seed."),
    (measure(-0.05, 0.01), "Its accuracy is 5.0 ± 1.0 points lower than that of Base, seed by seed."),
    (measure(0.015, 0.01), "Against Base that is no clear difference: +1.5 ± 1.0 points, seed by seed."),
    (measure(-0.019, 0.01), "Against Base that is no clear difference: -1.9 ± 1.0 points, seed by seed."),
    (measure(-0.02, 0.01), "Against Base that is -2.0 ± 1.0 points, seed by seed: too few seeds to tell."),
    (measure(0.05, None, 1), "That is +5.0 points against Base, from one seed."),
    (measure(None, None), ""),
])  # fmt: skip
def test_a_method_is_compared_with_the_baseline(difference, said):
    ours = method("Ours", accuracy=(0.9, 0.01), worst_decile=0.7)
    made = summary(method("Base", accuracy=0.8), ours, paired=(Paired("Ours", "Base", difference),))
    sentence = narrative.sentence(made, ours)
    assert sentence.endswith(said or "%.")
    assert "  " not in sentence


def test_the_baseline_is_what_the_others_are_compared_with():
    base = method("Base", accuracy=0.8, worst_decile=0.7)
    made = summary(base, paired=(Paired("Ours", "Base", measure(0.1, 0.01)),))
    assert narrative.sentence(made, base).endswith("The others are compared with it.")
    assert not narrative.sentence(summary(base), base).endswith("it.")


# -- headline and setting ----------------------------------------------------------------------------------------------


def record(*methods: dict, point: str = "", runs: bool = False, **changes) -> ExperimentRecord:
    experiment = from_dict(raw(*methods, **changes))
    return ExperimentRecord(point, experiment, [MethodRecord(m, experiment, [], 0) for m in experiment.method])


def test_the_headline_claims_no_swing_that_is_not_known():
    made = record({**A, "name": "FedAvg"}, {**A, "name": "FedAvg, steady", "shift": {"who": "always"}})
    steady = method("FedAvg, steady", accuracy=1.0, worst_point=0.9, swing=None, swing_day=None, swing_night=None)
    said = narrative.headline(made, summary(UNKNOWN, steady, groups=("day", "night")))
    assert said.startswith("The shift costs 10.0 points of accuracy on average")
    assert "swing" not in said


def test_the_headline_is_what_the_shift_costs_where_a_method_runs_with_and_without_it():
    made = record({**A, "name": "FedAvg"}, {**A, "name": "FedAvg, steady", "shift": {"who": "always"}})
    shifted = method("FedAvg", accuracy=0.8, worst_point=0.6, swing=0.2, swing_day=0.3, swing_night=0.1)
    steady = method("FedAvg, steady", accuracy=0.9, worst_point=0.85, swing=0.02, swing_day=0.03, swing_night=0.01)
    assert narrative.headline(made, summary(shifted, steady, groups=("day", "night"))) == (
        "The shift costs 10.0 points of accuracy on average and 25.0 points at the worst moment. Within "
        "every period accuracy swings: that of day clients by 30.0 points instead of 3.0 points and that of night "
        "clients by 10.0 points instead of 1.0 points."
    )


def test_a_shift_that_costs_on_average_may_help_at_the_worst_moment():
    made = record({**A, "name": "FedAvg"}, {**A, "name": "FedAvg, steady", "shift": {"who": "always"}})
    shifted = method("FedAvg", accuracy=0.8, worst_point=0.7, swing=0.2)
    steady = method("FedAvg, steady", accuracy=0.9, worst_point=0.65, swing=0.02)
    assert narrative.headline(made, summary(shifted, steady)).startswith(
        "The shift costs 10.0 points of accuracy on average; at the worst moment accuracy is 5.0 points higher with it."
    )


def test_a_shift_that_helps_costs_nothing():
    made = record({**A, "name": "FedAvg"}, {**A, "name": "FedAvg, steady", "shift": {"who": "always"}})
    shifted = method("FedAvg", accuracy=0.9, worst_point=0.6, swing=0.2)
    steady = method("FedAvg, steady", accuracy=0.8, worst_point=0.85, swing=0.02)
    assert narrative.headline(made, summary(shifted, steady)).startswith(
        "With the shift accuracy is 10.0 points higher on average and 25.0 points lower at the worst moment."
    )


def test_who_copes_best_is_one_method_only_where_it_is_clearly_ahead():
    made = record({**A, "name": "FedAvg"}, {**A, "name": "Steady", "shift": {"who": "always"}}, {**A, "name": "X"})
    base, steady = ([0.5, 0.52, 0.51], [0.8, 0.81, 0.82])

    def said(**others: list[float]) -> str:
        values = {"FedAvg": base, "Steady": steady, **others}
        done = [MethodSummary(n, "fedavg", [0, 1, 2], 0, {"accuracy": Measure.of(v)}) for n, v in values.items()]
        return narrative.headline(made, summary(*done))

    assert "X copes best: it wins back 20.0" in said(X=[0.7, 0.72, 0.71], Y=[0.6, 0.62, 0.61])
    level = "X and Y cope best, without a clear difference between them: X wins"
    assert level in said(X=[0.7, 0.72, 0.71], Y=[0.69, 0.72, 0.7])
    assert level in said(X=[0.7, 0.72, 0.71], Y=[0.5, 0.95, 0.6])  # whose own gain is not clear either
    # As good as without a shift is never what too few seeds or an unclear difference say.
    assert said(X=[0.79, 0.83, 0.8]).endswith(
        " points; beside no shift that is -0.3 ± 1.2 points, no clear difference."
    )
    assert said(X=[0.51, 0.60, 0.56]).endswith("None of the others clearly gains on that: too few seeds to tell.")


def test_no_headline_praises_a_method_whose_training_went_wrong():
    good = method("Good", accuracy=0.8, answered=290.0, refused=10.0)
    refused = method("Refused", accuracy=0.9, answered=0.0, refused=30.0)
    diverged = method("Diverged", accuracy=(None, None), diverged=2.0)
    made = summary(refused, diverged, good)
    assert narrative.headline(record(A), made) == "Good has an accuracy of 80.0 % over the last 64 rounds."
    assert narrative.headline(record(A), summary(refused)) == "No method was trained as it should be."
    assert [line.partition(":")[0] for line in alarms(made)] == ["Refused", "Diverged", "Good"]


def test_with_one_seed_the_headline_has_no_errors():
    made = record({**A, "name": "FedAvg"}, {**A, "name": "Steady", "shift": {"who": "always"}})
    both = method("FedAvg", 1, accuracy=0.8), method("Steady", 1, accuracy=0.9)
    assert (
        narrative.headline(made, summary(*both)) == "The shift costs 10.0 points of accuracy on average, from one seed."
    )


def test_the_difference_is_taken_over_the_seeds_that_both_have():
    made = record({**A, "name": "FedAvg"}, {**A, "name": "Steady", "shift": {"who": "always"}})
    shifted = MethodSummary("FedAvg", "fedavg", [0, 1, 2], 0, {"accuracy": Measure(0.5, 0.1, [0.8, 0.1, 0.6])})
    steady = MethodSummary("Steady", "fedavg", [2, 0], 1, {"accuracy": Measure(0.9, 0.1, [0.8, 0.9])})
    assert narrative.headline(made, summary(shifted, steady)).startswith(
        "So far, 1 run is not finished and not counted. The shift costs 15.0 ± 5.0 points"
    )


def test_otherwise_the_headline_is_who_came_first():
    made = record({**A, "name": "FedAvg"}, {**A, "name": "Other", "algorithm": "fedavgm"})
    ours, theirs, near = (
        MethodSummary(name, "fedavg", [0, 1, 2], 0, {"accuracy": Measure.of(values)})
        for name, values in (
            ("Other", [0.90, 0.92, 0.91]), ("FedAvg", [0.80, 0.81, 0.81]), ("FedAvg", [0.80, 0.93, 0.92]),
        )
    )  # fmt: skip
    said = "Other has the highest mean, 91.0 ± 0.6 % over the last 64 rounds, and no clear lead over FedAvg."
    assert narrative.headline(made, summary(near, ours)) == said
    said = "Other came out first, with 91.0 ± 0.6 % over the last 64 rounds: 10.3 ± 0.3 points more than FedAvg"
    assert narrative.headline(made, summary(theirs, ours)).startswith(said)
    few = [
        replace(m, seeds=[0, 1], measures={"accuracy": Measure.of(values)})
        for m, values in ((ours, [0.90, 0.92]), (theirs, [0.80, 0.84]))
    ]
    said = "Other has the highest mean, 91.0 ± 1.0 % over the last 64 rounds, from too few seeds to tell a lead over"
    assert narrative.headline(made, summary(*few)).startswith(said)


def test_methods_that_are_one_are_first_together():
    made = record({**A, "name": "FedAvg"}, {**A, "name": "Other", "algorithm": "fedavgm"})
    values = {"FedAvg": [0.8, 0.9, 0.85], "Other": [0.8, 0.9, 0.85], "Third": [0.6, 0.7, 0.65]}
    done = [MethodSummary(n, "fedavg", [0, 1, 2], 0, {"accuracy": Measure.of(v)}) for n, v in values.items()]
    assert narrative.headline(made, summary(*done)).startswith(
        "FedAvg and Other, which are the same run, came out first, with 85.0 ± 2.9 % over the last 64 rounds: 20.0 "
    )
    assert narrative.headline(made, summary(*done[:2])).startswith("FedAvg and Other, which are the same run, have an")


def test_where_one_of_the_two_is_not_finished_the_headline_is_who_came_first():
    made = record({**A, "name": "FedAvg"}, {**A, "name": "Steady", "shift": {"who": "always"}})
    assert narrative.headline(made, summary(method("FedAvg", accuracy=0.8))).startswith(
        "FedAvg has an accuracy of 80.0 %"
    )


def test_where_nobody_was_judged_there_is_no_headline():
    assert narrative.headline(record(A), summary()) == ""
    never = MethodSummary("A", "fedavg", [0], 0, {"accuracy": measure(None)})
    assert narrative.headline(record(A), summary(never)) == ""


def test_methods_with_different_settings_are_not_the_same_with_and_without_the_shift():
    made = record({**A, "name": "FedAvg"}, {**A, "name": "Steady", "local": {"lr": 0.5}, "shift": {"who": "always"}})
    both = summary(method("FedAvg", accuracy=0.8), method("Steady", accuracy=0.9))
    assert narrative.headline(made, both).startswith("Steady came out first")


def test_real_clients_hold_no_rows_of_the_study(monkeypatch):
    monkeypatch.setattr(narrative, "are_real", lambda record: True)
    said = narrative.setting(record(A))
    assert said.startswith("The clients are real, and have rows of their own; 1 seed, 6 rounds. The model is judged")


def test_the_setting_is_said_for_someone_who_has_never_heard_of_it():
    made = record(
        A, data={"source": "day-night-characters", "partition": {"kind": "iid", "clients": 200}}, seeds=[0, 1]
    )
    said = narrative.setting(made)
    assert said.startswith(
        "200 clients hold real pictures of handwritten digits and letters, each digits (day) or letters (night), dealt "
        "at random; 2 seeds, 6 rounds."
    )
    assert narrative.setting(record(A, data={"partition": "natural"})).startswith(
        "The clients hold rows of gaussians, each those of one domain; 1 seed, 6"
    )
    assert "rows of a.csv" in narrative.setting(record(A, data={"source": "csv:a.csv"}))
    assert "hold rows of a Python session" in narrative.setting(record(A, data={"source": "python:session_0a:rows"}))
    assert "rows of mine:load" in narrative.setting(record(A, data={"source": "python:mine:load"}))
    assert "rows of a.jsonl, " in narrative.setting(record(A, data={"source": "text:a.jsonl"}))
    plays = record(A, data={"source": "play-roles", "partition": "natural"})
    assert narrative.setting(plays).startswith(
        "The clients hold what Shakespeare's roles say, each comedies (day) or tragedies"
    )
    several = {"kind": "text", "path": ["a.jsonl", "b.jsonl", "c.jsonl"]}
    assert "rows of a.jsonl, b.jsonl and c.jsonl" in narrative.setting(record(A, data={"source": several}))


def test_the_setting_says_how_rows_are_dealt_not_only_where_they_are_from():
    turned = {"source": "day-night-characters", "partition": {"kind": "rotation", "clients": 6, "angles": [0, 180]},
              "groups": {"by": "none"}}  # fmt: skip
    said = narrative.setting(record(A, data=turned, shift={"who": "always"}))
    assert said.startswith(
        "6 clients hold real pictures of handwritten digits and letters, dealt at random, in groups whose pictures are "
        "turned by 0 and 180 degrees; 1 seed"
    )


def test_the_setting_says_what_is_blended():
    what = {"who": "always", "what": {"kind": "domain-mixture", "cycles": 3}}
    said = narrative.setting(record(A, shift=what))
    assert "What a client holds is a blend of domains that changes from round to round, 3 cycles over the run." in said
    assert "blend" not in narrative.setting(record(A))


def test_the_setting_says_who_takes_turns_and_who_is_judged(tmp_path):
    from fedtide.report.reading import read_experiment
    from fedtide.runs import folder
    from fedtide.runs.experiment import execute

    experiment = from_dict(raw(A))
    folder.create(experiment, tmp_path / "run")
    execute(experiment, tmp_path / "run", workers=1)
    (made,) = read_experiment(tmp_path / "run")
    said = narrative.setting(made)
    assert (
        "They belong to groups, day and night, that take turns: every 4 rounds the participants change from only day "
        "clients to only night clients and back. The model is judged on clients of every group that never take part in "
        "training."
    ) in said


# -- tables ------------------------------------------------------------------------------------------------------------

PAIRED = (Paired("Steady", "FedAvg", measure(0.05, 0.01)),)


def test_the_accuracy_table_has_a_column_for_whatever_some_method_has():
    made = tables.accuracy_table(summary(SHIFTED, STEADY, groups=("day", "night"), paired=PAIRED))
    assert made.header == [
        "method",
        "mean over the last 64 rounds",
        "against FedAvg, paired",
        "worst point",
        "swing",
    ]
    assert made.rows == [
        ["FedAvg", "90.0 ± 1.0 %", "-", "80.0 ± 2.0 %", "10.0 ± 1.0 points"],
        ["Steady", "95.0 ± 1.0 %", "+5.0 ± 1.0 points", "-", "-"],
    ]
    assert tables.accuracy_table(summary(STEADY)).header == ["method", "mean over the last 64 rounds"]


def test_what_is_about_groups_has_tables_of_its_own():
    grouped = method("Grouped", accuracy=0.9, accuracy_day=(0.95, 0.01), accuracy_night=0.8, branch_accuracy=0.7)
    made = summary(SHIFTED, grouped, groups=("day", "night"))
    assert tables.groups_table(made) == tables.Table(
        ["method", "day clients", "night clients", "branch or model of the true group"],
        [["FedAvg", "-", "-", "-"], ["Grouped", "95.0 ± 1.0 %", "80.0 %", "70.0 %"]],
    )
    assert tables.swings_table(made) == tables.Table(
        ["method", "day clients", "night clients"],
        [["FedAvg", "20.0 ± 1.0 points", "5.0 ± 1.0 points"], ["Grouped", "-", "-"]],
    )
    assert tables.groups_table(summary(SHIFTED)) is tables.swings_table(summary(SHIFTED)) is None


def test_the_table_over_clients():
    spread = method("A", client_mean=0.5, client_std=(0.12, 0.01), worst_decile=0.3)
    made = tables.clients_table(summary(spread, SHIFTED))
    assert made.header == ["method", "mean over clients", "standard deviation", "worst tenth of clients"]
    assert made.rows[0] == ["A", "50.0 %", "12.0 ± 1.0 points", "30.0 %"]
    assert tables.clients_table(summary(SHIFTED)) is None


def test_a_collapse_is_said_and_experts_of_their_own_are_none():
    warning = "nearly all clients are at one of its models or branches: in effect there is no other. "
    collapsed = method("IFCA", 1, accuracy=0.9, worst_decile=0.7, fullest_cluster=0.99)
    assert warning.capitalize().strip() in narrative.sentence(summary(collapsed), collapsed)
    even = method("IFCA", 1, accuracy=0.9, worst_decile=0.7, fullest_cluster=0.6)
    assert "in effect" not in narrative.sentence(summary(even), even)
    sometimes = method("FedTKM", 3, accuracy=0.9, worst_decile=0.7)
    sometimes.measures["fullest_cluster"] = Measure.of([0.5, 1.0, 0.6])
    assert f"In 1 of 3 seeds {warning}".strip() in narrative.sentence(summary(sometimes), sometimes)
    own = method("AEM", 1, accuracy=0.9, worst_decile=0.7, fullest_cluster=0.6, own_weight=0.96)
    said = narrative.sentence(summary(own), own)
    assert "; clients' own experts have 96.0 % of the weight in its mixtures" in said
    assert "in effect" not in said
    both = method("AEM", 1, accuracy=0.9, worst_decile=0.7, fullest_cluster=0.99, own_weight=0.3)
    assert "in effect" in narrative.sentence(summary(both), both)
    blend = method("FedEM", 1, accuracy=0.9, worst_decile=0.7, fullest_cluster=0.99, split_purity=0.5)
    assert "in effect" not in narrative.sentence(summary(blend), blend)


def test_the_brief_table_fits_a_terminal():
    made = tables.brief_table(summary(SHIFTED, STEADY, groups=("day", "night"), paired=PAIRED))
    assert made.header == ["method", "mean over the last 64 rounds", "worst point", "swing", "against FedAvg"]
    assert made.rows[1] == ["Steady", "95.0 ± 1.0 %", "-", "-", "+5.0 ± 1.0 points"]
    assert tables.brief_table(summary(STEADY)).header == ["method", "mean over the last 64 rounds"]


def test_the_first_table_marks_what_is_clear_and_counts_refused_answers():
    refused = method("A", accuracy=(0.9, 0.01), refused=30.0)
    base = method("Base", accuracy=(0.8, 0.01), worst_point=0.7)
    others = [method(name, accuracy=0.8) for name in "BC"]
    differences = zip("ABC", ((0.1, 0.01), (-0.1, 0.01), (0.01, 0.02)), strict=True)
    pairs = tuple(Paired(name, "Base", measure(*found)) for name, found in differences)
    made = tables.methods_table(summary(base, refused, *others, paired=pairs))
    assert made.header == ["method", "mean over the last 64 rounds", "against Base", "worst point", "refused answers"]
    assert [row[2] for row in made.rows] == ["-", "▲ +10.0 ± 1.0 points", "▼ -10.0 ± 1.0 points", "≈ +1.0 ± 2.0 points"]
    assert [row[-1] for row in made.rows] == ["-", "30", "-", "-"]
    assert "refused answers" not in tables.methods_table(summary(base)).header


def test_a_table_as_csv_and_latex():
    made = tables.Table(
        ["method", "mean", "against A_1", "to clients"],
        [["A_1", "91.5 ± 0.2 %", "-", "2 MB"], ["5 & 6", "90.0 ± 1.0 %", "▼ -1.5 ± 0.4 points", "999 B"]],
    )
    assert made.csv().splitlines() == [
        'method,"mean, %","mean, standard error","against A_1, points","against A_1, standard error",to clients',
        "A_1,91.5,0.2,,,2 MB",
        "5 & 6,90.0,1.0,-1.5,0.4,999 B",
    ]
    assert made.latex().splitlines() == [
        r"\begin{tabular}{lrrr}", r"\toprule", r"method & mean & against A\_1 & to clients \\", r"\midrule",
        r"A\_1 & 91.5 $\pm$ 0.2 \% & -- & 2 MB \\",
        r"5 \& 6 & 90.0 $\pm$ 1.0 \% & $\blacktriangledown$ -1.5 $\pm$ 0.4 points & 999 B \\",
        r"\bottomrule", r"\end{tabular}",
    ]  # fmt: skip


def test_columns_of_words_are_aligned_to_the_left():
    made = tables.Table(
        ["method", "averaged over", "time", "gain", "verdict", "nothing"],
        [["A", "the last round", "≥ 7.5 rounds", "▲ +1.0 points", "holds", "-"],
         ["B", "the last round", "-", "= -0.0 points", "-", ""]],
    )  # fmt: skip
    assert made.words == [True, True, False, False, True, False]
    assert made.latex().startswith(r"\begin{tabular}{llrrlr}")


def test_the_cost_table():
    costly = method("FedAvg", down=2e6, up=1e6, seconds=3.0, evaluation_seconds=1.0, refused=2.0, time_to_accuracy=40.0,
                    reached_accuracy=1.0)  # fmt: skip
    made = tables.cost_table(summary(costly, paired=PAIRED))
    assert made.header[-1] == "simulated time to the final accuracy of FedAvg"
    assert made.rows == [["FedAvg", "2 MB", "1 MB", "3.0 s", "1.0 s", "2", "40.0 s"]]
    in_rounds = tables.cost_table(replace(summary(costly, paired=PAIRED), clock="rounds"))
    assert (in_rounds.header[-1], in_rounds.rows[0][-1]) == ("rounds to the final accuracy of FedAvg", "40 rounds")
    assert len(tables.cost_table(summary(costly)).header) == 6


def test_the_table_of_a_sweep_marks_what_was_chosen():
    points = [
        summary(method("FedAvg", accuracy=0.8), point="rate 0.1"),
        summary(method("FedAvg", accuracy=0.7), method("Other", accuracy=0.5), point="rate 0.2"),
    ]
    made = tables.sweep_table(points, {"FedAvg": points[1]})
    assert made.header == ["point", "FedAvg", "Other"]
    assert made.rows == [["rate 0.1", "80.0 %", "-"], ["rate 0.2", "70.0 % ← chosen", "50.0 %"]]


def test_a_method_that_is_only_finished_at_a_later_point_is_in_the_table_of_the_sweep():
    points = [
        summary(method("FedAvg", accuracy=0.8), point="rate 0.1"),
        summary(method("FedAvg", accuracy=0.7), method("Other", accuracy=0.5), point="rate 0.2"),
    ]
    assert tables.sweep_table(points, {}).header == ["point", "FedAvg", "Other"]


# -- drift -------------------------------------------------------------------------------------------------------------

POOLS = {"kind": "gaussians", "samples": 64, "classes": 6, "domains": 2}


@pytest.mark.parametrize(("shift", "said"), [
    ({"what": {"kind": "stream", "intervals": 10, "gap": 50, "retention": 100, "empty": "wait"}},
     "The rows of every client come in 10 intervals, each some of its labels: one arrives every 50 rounds and expires "
     "100 rounds later. A client without rows waits. "),
    ({"what": {"kind": "stream", "by": "order", "intervals": 4, "shared": "half"}},
     "All clients hold a few shared rows at all times, one of each label of the rarer half. "),
    ({"clock": "seconds", "what": {"kind": "change-points", "when": {"kind": "drawn", "every": 4, "fraction": 1.0}}},
     "A client holds its rows of one domain and every 4 seconds all of the clients change to another. "),
    ({"what": {"kind": "change-points", "when": "file:changes.csv"}},
     "A client holds its rows of one domain and changes to another when a file of change points says so. "),
    ({"what": {"kind": "change-points", "when": "file:changes.csv", "concepts": "label-shares:mixes.csv"}},
     "A client draws its rows by one of several mixes of labels and changes to another when a file of change points "
     "says so. "),
    ({"what": {"kind": "cluster-drift", "migrate_fraction": 0.0, "resample_fraction": 0.0,
               "events": {"at": [3, 2, 900], "fraction": 0.25}}},
     "hold rows of the labels of their group. At rounds 2 and 3 25 % of them are dealt to 4 new groups"),
    ({"how": {"kind": "rotation", "angles": [0, 90]}}, "Pictures are turned: those of group 1 clients by 90 degrees. "),
    ({"how": "permutation"}, "Labels are exchanged, for all clients alike. "),
    ({"how": {"kind": "label-swaps", "every": 30}},
     "Labels change their meaning: every 30 rounds half of the clients each swap two labels, in all of their rows. "),
    ({"how": {"kind": "label-swaps", "concepts": 4}},
     "There are 4 ways to read the labels, and every 30 rounds half of the clients go to another one. "),
])  # fmt: skip
def test_the_setting_says_how_data_change(shift, said):
    assert said in narrative.setting(record(A, shift={"who": "always", **shift}, data={"source": POOLS}))


def test_labels_that_groups_exchange():
    shift = from_dict(raw(A, shift={"who": "always", "how": "permutation"})).shift
    assert shift.how.words(["day", "late shift", "night"], "rounds") == (
        "Labels are exchanged: what is one class to day clients is another to late shift and night clients. "
    )


def test_domains_that_clients_change_between_are_named():
    shift = from_dict(raw(A, shift={"who": "always", "what": {"kind": "change-points"}})).shift
    assert shift.what.words(["day", "night"], "rounds", 100).startswith(
        "A client holds its rows of one domain, day or night, and every 20 rounds 30 % of the clients change to "
        "another."
    )


@pytest.mark.parametrize(("devices", "said"), [("log-normal", True), ({"kind": "steady"}, False)])
def test_the_setting_says_that_devices_differ(devices, said):
    assert ("at different speeds" in narrative.setting(record(A, devices=devices))) is said


BASE = {"accuracy": 0.8, "worst_decile": 0.6}


@pytest.mark.parametrize(("measures", "said"), [
    ({"moves": 83.0, "reclusterings": 1.0}, "Over a run it re-clusters 1 time and moves clients 83 times."),
    ({"moves": 78.34}, "Over a run it moves clients 78.3 times."),
    ({"moves": 3.0, "reclusterings": 0.0}, "Over a run it never re-clusters and moves clients 3 times."),
    ({"moves": 0.0, "reclusterings": 0.0}, "Its clusters never change."),
    ({"event_fall": -0.01, "events_recovered": 1.0}, "Each known event leaves its accuracy as it was."),
    ({"event_fall": (0.1, 0.02), "events_recovered": 0.5},
     "Each known event costs it 10.0 ± 2.0 points, which it makes up for before the next one, or the end of the run, "
     "after 50 % of them."),
    ({"event_fall": 0.15, "events_recovered": 0.5, "events_known": 1.0, "events_detected": 0.0},
     "The known event costs it 15.0 points, which it makes up for before the end of the run in 50 % of the runs; it "
     "does not notice it."),
    ({"event_fall": 0.1, "events_known": 1.0, "events_detected": 1.0, "detection_delay": 1.0, "false_alarms": 0.5},
     "The known event costs it 10.0 points; it notices it in all runs after 1 round, with 0.5 false alarms."),
    ({"event_fall": 0.1, "events_recovered": 0.0, "events_known": 2.0, "events_detected": 0.0, "false_alarms": 0.0},
     "Each known event costs it 10.0 points, which it makes up for before the next one, or the end of the run, after "
     "none of them; it does not notice any."),
    ({"event_fall": -0.1, "events_detected": 1.0, "detection_delay": 0.0, "false_alarms": 0.0},
     "Each known event leaves its accuracy as it was; it notices 100 % of them in the same round, without a false "
     "alarm."),
    ({"event_fall": -0.1, "events_detected": 0.5, "detection_delay": 1.0, "false_alarms": 2.5},
     "Each known event leaves its accuracy as it was; it notices 50 % of them after 1 round, with 2.5 false alarms."),
])  # fmt: skip
def test_what_a_method_does_about_drift_is_said(measures, said):
    made = method("Fielding", **BASE, **measures)
    assert narrative.sentence(summary(made), made).endswith(f"gets 60.0 %. {said}")
