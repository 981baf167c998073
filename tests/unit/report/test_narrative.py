"""Text of the report: sentences, headlines, alarms and the setting."""

import json
import math
from dataclasses import replace

import pytest

from fedtide.config import from_dict
from fedtide.data.targets import TARGET_WORDS
from fedtide.evaluate.metrics import UNKNOWN, Measure
from fedtide.evaluate.references import REFERENCES, reference_words
from fedtide.report import narrative
from fedtide.report.accuracy import methods_table
from fedtide.report.narrative import alarms, broken
from fedtide.report.run_records import ExperimentRecord, MethodRecord, read_experiment
from fedtide.report.study import summarize
from fedtide.report.summary import MethodSummary, Paired, Summary
from helpers.studies import A, finished, lines_of, raw, study

STEADY = {**A, "name": "Steady", "shift": {"who": "always"}}


def method(name: str, *accuracies: float, **measures: float) -> MethodSummary:
    """A method with these accuracies at seeds 0, 1, ..., and measures that are equal at all seeds."""
    values = {"accuracy": accuracies, **{key: [value] * len(accuracies) for key, value in measures.items()}}
    return MethodSummary(
        name, "fedavg", [*range(len(accuracies))], 0, {key: Measure.of([*row]) for key, row in values.items()}
    )


def summary(*methods: MethodSummary, baseline: str = "", groups: tuple[str, ...] = ()) -> Summary:
    base = next((m for m in methods if m.name == baseline), None)
    others = [m for m in methods if base is not None and m is not base]
    paired = [Paired(m.name, base.name, m.against(base, "accuracy"), m.same_run(base)) for m in others]
    names = dict.fromkeys(name for name in REFERENCES for m in methods if name in m.measures)
    holders = {name: next(m for m in methods if name in m.measures) for name in names}
    references = [
        MethodSummary(reference_words(name, TARGET_WORDS["classes"]), name, m.seeds, 0, {"accuracy": m.measures[name]})
        for name, m in holders.items()
    ]
    return Summary("Toy", "", 100, "held_out_clients", 64, None, [*groups], [*methods], paired, references=references)


def record(*methods: dict, **changes) -> ExperimentRecord:
    experiment = from_dict(raw(*methods, **changes))
    return ExperimentRecord("", experiment, [MethodRecord(m, experiment, [], 0) for m in experiment.method])


# -- one sentence per method -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("measures", "text"), [
    ({}, "A has an accuracy of 90.0 % over the last 64 rounds."),
    ({"swing": 0.2, "worst_point": 0.8},
     "A has an accuracy of 90.0 % over the last 64 rounds, and 80.0 % at its worst moment."),
    ({"swing": math.nan, "worst_point": 0.8}, "A has an accuracy of 90.0 % over the last 64 rounds."),
    ({"commonest_class": 0.9}, " no better than always answering the commonest class (90.0 %)."),
    ({"rounds_to_target": 7.5, "reached_target": 1.0}, "It reaches the target after 7.5 rounds."),
    ({"rounds_to_target": 8.0, "reached_target": 0.0}, "It reaches the target in 0 of 3 runs."),
])  # fmt: skip
def test_a_method_has_one_plain_sentence(measures, text):
    one = method("A", 0.9, 0.9, 0.9, **measures)
    assert narrative.sentence(summary(one), one).endswith(text)


@pytest.mark.parametrize(("ours", "text", "sign"), [
    ([0.71, 0.72, 0.73], "Against Base that is +12.0 ± 0.6 points.", "▲"),
    ([0.50, 0.51, 0.52], "Against Base that is -9.0 ± 0.6 points.", "▼"),
    ([0.62, 0.62, 0.66], "Against Base that is +3.3 ± 1.3 points, from too few seeds to tell.", "?"),
    ([0.58, 0.62, 0.61], "Against Base that is +0.3 ± 1.2 points, no clear difference.", "≈"),
    ([0.7], "Against Base that is +10.0 points, from one seed.", "?"),
    ([0.6, 0.6, 0.6], f"It is {narrative.SAME_RUN.format('Base')}.", "="),
])  # fmt: skip
def test_a_method_is_compared_with_the_baseline(ours, text, sign):
    base, one = method("Base", 0.6, 0.6, 0.6), method("Ours", *ours)
    both = summary(base, one, baseline="Base")
    assert narrative.sentence(both, one).endswith(text)
    assert methods_table(both).rows[1][2].startswith(sign)
    assert "Against" not in narrative.sentence(both, base)


@pytest.mark.parametrize(("accuracies", "diverged", "text"), [
    ([math.nan, 0.9, 0.9], [1.0, 0.0, 0.0], "A has no accuracy at the end in 1 of 3 runs."),
    ([math.nan] * 3, [2.0, 1.0, 0.0], "A has no accuracy at the end in 3 of 3 runs."),
    ([math.nan] * 3, [0.0] * 3, "A was never judged."),
])  # fmt: skip
def test_a_method_without_a_mean_says_in_which_of_its_runs_the_end_is_missing(accuracies, diverged, text):
    one = method("A", *accuracies)
    one.measures["diverged"] = Measure.of(diverged)
    assert narrative.sentence(summary(one), one) == text


# -- headlines ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shifted", "steady", "text"), [
    (method("A", 0.8), method("Steady", 0.9), "The shift costs A 10.0 points of accuracy on average, from one seed."),
    (method("A", 0.8, worst_point=0.6, swing=0.2), method("Steady", 0.9, worst_point=0.85, swing=0.0),
     "The shift costs A 10.0 points of accuracy on average, from one seed; at the worst moment it is 60.0 % instead of "
     "85.0 %."),
])  # fmt: skip
def test_the_headline_is_the_cost_of_the_shift_if_a_method_runs_without_it(shifted, steady, text):
    assert narrative.headline(record(A, STEADY), summary(shifted, steady)) == text


def test_the_difference_is_over_the_seeds_of_both():
    shifted = MethodSummary("A", "fedavg", [0, 1, 2], 0, {"accuracy": Measure(0.5, 0.1, [0.8, 0.1, 0.6])})
    steady = MethodSummary("Steady", "fedavg", [2, 0], 1, {"accuracy": Measure(0.9, 0.1, [0.8, 0.9])})
    assert narrative.headline(record(A, STEADY), summary(shifted, steady)).startswith(
        "So far, 1 run is not finished and not counted. The shift costs A 15.0 ± 5.0 points"
    )


@pytest.mark.parametrize("other", [
    {"loss": "wsm"}, {"transforms": ["pooled"]}, {"init_from": "weights.safetensors"}, {"decide_per": "sample"},
])  # fmt: skip
def test_methods_that_differ_by_more_than_the_shift_tell_no_cost_of_it(other):
    for steady, costs in ((STEADY, False), ({**STEADY, **other}, True)):
        toy = record({**A, **other}, steady)
        both = summary(*(method(m.name, value) for m, value in zip(toy.methods, (0.8, 0.9), strict=True)))
        assert narrative.headline(toy, both).startswith("The shift costs A") is costs


def test_a_cost_of_the_shift_that_no_seed_tells_is_not_in_the_headline():
    """Each method has a seed that the other has not."""
    steady = replace(method("Steady", 0.9), seeds=[1])
    text = narrative.headline(record(A, STEADY), summary(method("A", 0.8), steady))
    assert "shift" not in text
    assert "Steady has the highest mean" in text


@pytest.mark.parametrize(("methods", "text"), [
    ([method("B", 0.90, 0.92, 0.91), method("A", 0.80, 0.81, 0.81)],
     "B leads with 91.0 ± 0.6 % over the last 64 rounds: 10.3 ± 0.3 points more than A."),
    ([method("B", 0.90), method("A", 0.80)],
     "With 1 seed no method can be said to lead: B has the highest mean, 90.0 % over the last 64 rounds."),
    ([method("B", 0.90, 0.91), method("A", 0.80, 0.81)],
     "With 2 seeds no method can be said to lead: B has the highest mean, 90.5 ± 0.5 % over the last 64 rounds."),
    ([method("B", 0.90, 0.92, 0.91, tree=0.89), method("A", 0.80, 0.81, 0.81)],
     "Too few seeds to tell a lead over a boosted tree: B has the highest mean, 91.0 ± 0.6 % over the last 64 rounds."),
    ([method("B", 0.90, 0.92, 0.91, tree=0.905), method("A", 0.80, 0.81, 0.81)],
     "No method clearly beats a boosted tree (90.5 %): B has the highest mean, 91.0 ± 0.6 % over the last 64 rounds."),
    ([method("B", 0.90, 0.92, 0.91, tree=0.95, commonest_class=0.5), method("A", 0.80, 0.81, 0.81)],
     "No method beats a boosted tree (95.0 %): B has the highest mean, 91.0 ± 0.6 % over the last 64 rounds."),
    ([replace(method("B", 0.90, 0.92, 0.91), unfinished=1), method("A", 0.80, 0.81, 0.81)],
     "Before all rounds are played no method can be said to lead: B has the highest mean, 91.0 ± 0.6 % over the last "
     "64 rounds."),
    ([method("B", 0.90, 0.92, 0.91), method("A", 0.80, 0.93, 0.92)],
     "No clear lead over A: B has the highest mean, 91.0 ± 0.6 % over the last 64 rounds."),
    ([method("B", 0.75, 0.5), method("A", 0.5, 0.75), method("C", 0.25, 0.5)],
     "With 2 seeds no method can be said to lead: B and A have the same mean, 62.5 % over the last 64 rounds."),
    ([method("B", 0.8, 0.9, 0.85), method("A", 0.8, 0.9, 0.85)],
     "B and A, whose predictions are equal, have an accuracy of 85.0 ± 2.9 % over the last 64 rounds."),
    ([method("A", 0.5, 0.5, 0.5, commonest_class=0.5), method("B", 0.4, 0.4, 0.4, commonest_class=0.5)],
     "No method beats always answering the commonest class (50.0 %): A has the highest mean, 50.0 % over the last 64 "
     "rounds."),
    ([method("A", 0.8, 0.8, 0.8, yesterday=0.75, last_week=0.8)],
     "No method beats the value of a week ago (80.0 %): A has the highest mean, 80.0 % over the last 64 rounds."),
    ([replace(method("Top", 0.9), algorithm="oracle"), method("A", 0.8)],
     "A has an accuracy of 80.0 % over the last 64 rounds. Top, which knows the true groups, has 90.0 %."),
    ([method("Refused", 0.9, answered=0.0, refused=30.0), method("Good", 0.8, answered=290.0, refused=10.0)],
     "Good has an accuracy of 80.0 % over the last 64 rounds."),
    ([], ""),
    ([MethodSummary("A", "fedavg", [0], 0, {"accuracy": UNKNOWN})], ""),
])  # fmt: skip
def test_otherwise_the_headline_is_the_best_method(methods, text):
    """Also if another method differs by more than the shift."""
    other = {**A, "name": "B", "local": {"lr": 0.5}, "shift": {"who": "always"}}
    headline = narrative.headline(record(A, other), summary(*methods))
    assert headline.endswith(text) if text else headline == ""


def test_unfinished_runs_of_all_methods_are_counted_once_and_methods_without_a_finished_run_are_named():
    toy = record(A, {**A, "name": "B"}, {**A, "name": "C"})
    second, third = (replace(m, unfinished=2) for m in toy.methods[1:])
    other = replace(third, method=third.method.named("mixture"))
    scores = method("A", 0.9, 0.9, 0.9), method("A, mixture", 0.8, 0.8, 0.8)
    both = summary(replace(scores[0], unfinished=1), replace(scores[1], unfinished=1, federation="A"))
    text = narrative.headline(replace(toy, methods=[toy.methods[0], second, third, other]), both)
    assert text.startswith("So far, 5 runs are not finished and not counted. B and C have no finished run. Before all ")


# -- answers without training ------------------------------------------------------------------------------------------


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
def test_which_methods_are_no_better_than_the_commonest_class(values, no_better):
    assert method("A", *values, commonest_class=0.5).no_better is no_better
    assert not method("A", *values).no_better


@pytest.mark.parametrize(("held_out", "untrained"), [
    ({"clients": 2}, True), ({"clients": 2, "labeled": 0.5}, False), ({"clients": 0}, False),
])  # fmt: skip
def test_clients_without_a_model_are_not_compared_with_the_commonest_class(tmp_path, held_out, untrained):
    local = {"name": "Local", "algorithm": "local", "solver": {"lr": 1e-6, "batch_size": 4}}
    data = {**raw()["data"], "held_out_clients": held_out}
    result = read_experiment(finished(tmp_path / "run", study(A, local, rounds=1, seeds=[0], data=data)))[0]
    assert [m.untrained for m in summarize(result).methods] == [False, untrained]
    bad = replace(method("Local", 0.5, 0.5, 0.5, commonest_class=0.5), untrained=untrained)
    text = narrative.sentence(summary(bad), bad)
    assert ("New clients have no model of their own, so this is an untrained one." in text) is untrained
    assert ("no better than always answering" in text) is bad.no_better is not untrained


# -- alarms ------------------------------------------------------------------------------------------------------------


def test_refused_answers_and_predictions_that_are_no_numbers_are_alarms():
    refused, diverged = method("Refused", 0.9, answered=0.0, refused=30.0), method("Diverged", 0.9, diverged=2.0)
    assert [line.partition(":")[0] for line in alarms(summary(refused, diverged, method("Good", 0.8)))] == [
        "Refused", "Diverged",
    ]  # fmt: skip


def test_evaluations_without_some_of_the_real_clients_are_told():
    line = "A: evaluations are of 38 to 83 rows, because clients were away: points of its curve are of other rows"
    assert alarms(summary(replace(method("A", 0.9), rows_judged=(83, 38, 83)))) == [line]
    assert alarms(summary(replace(method("A", 0.9), rows_judged=(83, 83)))) == []


def test_refusals_of_real_clients_are_told_by_their_reasons():
    refusals = {"not finite": 2, "refused: too late": 27, "refused: its owner does not reveal 'pi'": 1}
    one = replace(method("A", 0.9, answered=70.0, refused=30.0), refusals=refusals)
    assert alarms(summary(one)) == [
        "A: 2 of 100 answers of clients were refused, because they were not finite, or with [wire] too large for "
        "fixed point; try a smaller learning rate",
        "A: 28 of 100 answers of clients were refused, as the table of nodes says: too late (27), its owner does not "
        "reveal 'pi' (1)",
    ]
    assert not broken(one)


@pytest.mark.parametrize(("count", "words"), [(1.0, "1 evaluation its"), (2.0, "2 evaluations its")])
def test_evaluations_without_numbers_are_counted(count, words):
    one = MethodSummary("A", "fedavg", [0], 0, {"diverged": Measure.of([count])})
    assert alarms(summary(one)) == [f"A: at {words} predictions were NaN, so it has no accuracy"]


def test_a_study_without_judged_rows_is_an_alarm():
    never = MethodSummary("A", "fedavg", [0], 0, {})
    assert alarms(summary(never)) == [
        "nothing was judged: no client has test rows (data.split.test), and no client is held out"
    ]
    assert not alarms(summary(never, method("B", 0.8, 0.9)))
    assert not alarms(summary(MethodSummary("A", "fedavg", [], 1, {})))  # nothing is finished


@pytest.mark.parametrize(("losses", "exploded"), [
    ((1.4, 2.0), False), ((0.01, 9.0), False), ((175.0, 1.8e6), True), ((2.3, 101.0), True), ((50.0, 400.0), False),
])  # fmt: skip
def test_a_loss_that_exploded_is_an_alarm(losses, exploded):
    first, peak = losses
    bad = method("A", 0.5, commonest_class=0.5, first_loss=first, peak_loss=peak)
    lines = alarms(summary(bad))
    assert len(lines) == exploded == broken(bad)
    assert all(f"the training loss rose from {first:,.4g} to {peak:,.4g}, and in the end" in line for line in lines)
    assert not broken(method("A", 0.9, commonest_class=0.5, first_loss=first, peak_loss=peak))


@pytest.mark.parametrize(("clusters", "silhouette", "warned"), [
    (4.0, 0.09, True), (4.0, 0.3, False), (1.0, 0.09, False), (4.0, math.nan, False),
])  # fmt: skip
def test_clusters_without_groups_are_an_alarm_and_break_nothing(clusters, silhouette, warned):
    one = method("A", 0.9, clusters=clusters, silhouette=silhouette)
    assert ["hardly have clusters" in line for line in alarms(summary(one))] == [True] * warned
    assert not broken(one)


def test_the_first_and_the_highest_loss_are_those_of_the_record(tmp_path):
    root = finished(tmp_path / "run", study({**A, "local": {"lr": 1e4, "batch_size": 4}}, rounds=3, seeds=[0]))
    losses = [line["client_loss"]["q50"] for line in lines_of(root / "a" / "0")]
    measures = summarize(read_experiment(root)[0]).method("A").measures
    assert (measures["first_loss"].mean, measures["peak_loss"].mean) == (losses[0], max(losses))


# -- setting -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("methods", "seeds", "whose"), [
    ([A], [4], ""),
    ([{**A, "transforms": [{"kind": "personalized", "others": ["fine-tuned"]}]}, {**A, "name": "B"}], [4],
     " (A, seed 4)"),
    ([A], [4, 5], " (A, seed 4)"),
])  # fmt: skip
def test_a_rollback_is_told_once_with_its_run_if_there_are_several(tmp_path, methods, seeds, whose):
    root = finished(tmp_path / "run", study(*methods, rounds=3, seeds=seeds))
    lines = lines_of(root / "a" / "4")
    lines[2]["rolled_back_to"] = 1
    (root / "a" / "4" / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = narrative.setting(read_experiment(root)[0])
    assert f" Round 3 began with the model after round 1{whose}. " in text
    assert text.count("began with") == 1
