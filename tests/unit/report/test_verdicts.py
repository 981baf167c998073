"""Verdicts by hand: Student's t for the number of seeds, in claims, signs and headlines alike."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedtide.config import Claim, from_dict
from fedtide.evaluate.measure import Measure
from fedtide.report import narrative
from fedtide.report.accuracy import methods_table
from fedtide.report.claims import judge
from fedtide.report.run_records import ExperimentRecord, MethodRecord
from fedtide.report.summary import MethodSummary, Paired, Summary
from helpers.studies import A, raw


def method(name: str, values, measure: str = "accuracy", **others) -> MethodSummary:
    values = [float(value) for value in values]
    measures = {measure: Measure.of(values), **{key: Measure.of(list(each)) for key, each in others.items()}}
    return MethodSummary(name, "fedavg", list(range(len(values))), 0, measures)


def verdict(ours, theirs=None, measure: str = "accuracy", **said) -> str:
    methods = [method("ours", ours, measure)] + ([] if theirs is None else [method("theirs", theirs, measure)])
    than = None if theirs is None else "theirs"
    return judge(methods, Claim(text="x", method="ours", versus=than, measure=measure, **said)).verdict


def summary(*methods: MethodSummary) -> Summary:
    first, *others = methods
    paired = [Paired(m.name, first.name, m.against(first, "accuracy"), m.same_run(first)) for m in others]
    return Summary("", "", 100, "held_out_clients", 64, None, [], list(methods), paired)


# -- by hand -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seeds", "t"), [(2, 12.706), (3, 4.303), (4, 3.182), (5, 2.776), (10, 2.262), (30, 2.045)])
def test_the_margin_is_students_t_of_a_printed_table_times_the_standard_error(seeds, t):
    """The 97.5 % quantile of t with one degree of freedom less than there are seeds."""
    values = [float(value) for value in range(seeds)]
    error = np.std(values, ddof=1) / math.sqrt(seeds)
    assert Measure.of(values).margin == pytest.approx(t * error, rel=3e-4)  # printed to three digits


@pytest.mark.parametrize(
    ("bound", "expected"),
    [
        (-0.049, "holds"),
        (-0.048, "too few seeds"),
        (0.084, "too few seeds"),
        (0.085, "not seen"),
        (0.2, "not seen"),
        (0.315, "not seen"),
        (0.316, "too few seeds"),
        (0.448, "too few seeds"),
        (0.449, "does not hold"),
    ],
)
def test_three_seeds_by_hand(bound, expected):
    """Differences 0.1, 0.2, 0.3: mean 0.2, standard error 0.1/sqrt(3) = 0.0577, times 4.303 = 0.2484.

    Two standard errors, which many seeds would need, are 0.1155.
    """
    ours, theirs = [0.6, 0.9, 0.8], [0.5, 0.7, 0.5]
    assert verdict(ours, theirs, bound=bound) == expected
    assert verdict(theirs, ours, bound=-bound, less=True) == expected


@pytest.mark.parametrize(
    ("within", "expected"),
    [(0.45, "holds"), (0.44, "too few seeds"), (0.31, "not seen"), (0.09, "not seen"), (0.08, "too few seeds")],
)
def test_about_equal_by_hand(within, expected):
    """The whole interval, 0.2 less and more 0.2484, has to be within the bound."""
    ours, theirs = [0.6, 0.9, 0.8], [0.5, 0.7, 0.5]
    assert verdict(ours, theirs, within=within) == expected
    assert verdict(theirs, ours, within=within) == expected


def test_five_seeds_by_hand():
    """Mean 0.03, standard deviation sqrt(0.001/4) = 0.0158, standard error 0.00707, times 2.776 = 0.0196."""
    differences = [0.01, 0.02, 0.03, 0.04, 0.05]
    theirs = [0.5, 0.6, 0.7, 0.6, 0.5]
    ours = [their + difference for their, difference in zip(theirs, differences, strict=True)]
    assert verdict(ours, theirs, bound=0.010) == "holds"
    assert verdict(ours, theirs, bound=0.011) == "too few seeds"
    assert verdict(ours, theirs, bound=0.016) == "not seen"
    assert verdict(ours, theirs, bound=0.050) == "does not hold"


def test_two_seeds_say_little_and_one_says_nothing():
    """Differences 0.10 and 0.11: mean 0.105, error 0.005, times 12.706 = 0.0635. 0.10 and 0.14: 0.12 and 0.254."""
    assert verdict([0.60, 0.81], [0.50, 0.70]) == "holds"
    assert verdict([0.60, 0.84], [0.50, 0.70]) == "too few seeds"
    assert verdict([0.60, 0.60], [0.50, 0.70]) == "too few seeds"
    assert verdict([0.9]) == verdict([0.9], [0.1]) == "too few seeds"


def test_values_that_do_not_vary_need_three_seeds():
    """Two differences that are equal may be so by chance, on few rows; their spread tells nothing."""
    assert verdict([0.5, 0.6], [0.4, 0.5]) == "too few seeds"
    assert verdict([0.5, 0.6, 0.7], [0.4, 0.5, 0.6]) == "holds"
    assert verdict([2.0] * 3, [3.0] * 3, measure="reclusterings", less=True) == "holds"
    assert verdict([0.5] * 3, bound=0.5) == "not seen"


# -- where there is nothing --------------------------------------------------------------------------------------------


def rates(seeds: int, step: float = 0.0, trials: int = 2000) -> tuple[float, float]:
    """How often a claim about two equal methods holds, and does not hold; accuracies are multiples of `step`."""
    rng = np.random.default_rng(18)
    claim, found = Claim(text="x", method="ours", versus="theirs", measure="accuracy"), []
    for _ in range(trials):
        hard = rng.normal(0.7, 0.05, seeds)
        pair = [hard + rng.normal(0, 0.01, seeds) for _ in range(2)]
        ours, theirs = ([round(v / step) * step for v in each] if step else list(each) for each in pair)
        found.append(judge([method("ours", ours), method("theirs", theirs)], claim).verdict)
    return found.count("holds") / trials, found.count("does not hold") / trials


@pytest.mark.parametrize("seeds", [2, 3, 5])
@pytest.mark.parametrize("step", [0.0, 0.005])
def test_of_methods_that_are_equal_at_most_one_in_twenty_is_called_clearly_better_or_worse(seeds, step):
    """2.5 % on either side; three standard deviations of 2,000 trials are 1 %."""
    holds, fails = rates(seeds, step)
    assert holds <= 0.035
    assert fails <= 0.035
    if not step:
        assert holds >= 0.015  # the rule is no stricter than it says


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_of_two_equal_methods_the_headline_names_a_first_in_one_of_twenty(seeds):
    rng = np.random.default_rng(18)
    trials, firsts, marks = 1000, 0, 0
    experiment = from_dict(raw({**A, "name": "one"}, {**A, "name": "other", "algorithm": "fedavgm"}))
    record = ExperimentRecord("", experiment, [MethodRecord(m, experiment, [], 0) for m in experiment.method])
    for _ in range(trials):
        made = summary(*(method(name, rng.normal(0.7, 0.01, seeds)) for name in ("one", "other")))
        firsts += "came out first" in narrative.headline(record, made)
        marks += methods_table(made).rows[1][2][0] in "▲▼"
    assert firsts == marks
    assert firsts / trials <= 0.07


# -- the same run ------------------------------------------------------------------------------------------------------


def test_methods_that_are_equal_to_the_last_digit_are_the_same_run():
    values = [0.61, 0.62, 0.66]
    assert verdict(values, values) == verdict(values, values, less=True) == "the same run"
    assert verdict(values[:1], values[:1]) == "the same run"
    assert verdict(values, values, bound=0.01) == "the same run"
    # A claim that nothing is lost does hold.
    assert verdict(values, values, bound=-0.01) == "holds"
    assert verdict(values, values, within=0.01) == "holds"


def test_a_measure_that_agrees_by_chance_is_not_the_same_run():
    ours = method("ours", [0.7, 0.8, 0.9], refused=[0.0] * 3, std_over_rounds=[0.1, 0.1, 0.1])
    theirs = method("theirs", [0.7, 0.8, 0.8], refused=[0.0] * 3, std_over_rounds=[0.1, 0.1, 0.1])
    claim = Claim(text="x", method="ours", versus="theirs", measure="refused", less=True)
    assert judge([ours, theirs], claim).verdict == "not seen"
    steadier = method("theirs", [0.7, 0.8, 0.9], refused=[0.0] * 3, std_over_rounds=[0.1, 0.1, 0.2])
    assert judge([ours, steadier], claim).verdict == "not seen"
    twin = method("theirs", [0.7, 0.8, 0.9], refused=[0.0] * 3, std_over_rounds=[0.1, 0.1, 0.1])
    assert judge([ours, twin], claim).verdict == "the same run"
