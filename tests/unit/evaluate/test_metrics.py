"""Metrics by hand and by law (ALGORITHMS, section 9)."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedtide.core.base import Scores
from fedtide.evaluate.metrics import (
    METRICS,
    Measure,
    client_accuracies,
    mean_of_last,
    summarized,
    swing,
    time_to_accuracy,
    worst_point,
)
from helpers.examples import examples

law = examples(100)
shares = st.integers(0, 20).map(lambda n: n / 20)
curves = st.lists(shares, min_size=1, max_size=30)
INF = math.inf


def scores(rows: list[float], correct: list[float], loss: list[float] | None = None) -> Scores:
    numbers = [torch.tensor(v, dtype=torch.float64) for v in (rows, correct, loss or [0.0] * len(rows))]
    return Scores(torch.arange(len(rows)), *numbers)


def distribution(accuracies) -> dict[str, float]:
    """Every metric of clients with one row each."""
    found = scores([1.0] * len(accuracies), list(accuracies))
    return {metric.name: metric.of(found) for metric in METRICS}


# -- clients -----------------------------------------------------------------------------------------------------------


@law
@given(st.lists(shares, min_size=1, max_size=40))
def test_the_spread_over_clients_by_definition(accuracies):
    got = distribution(np.array(accuracies))
    n = len(accuracies)
    lowest = sorted(accuracies)[: math.ceil(0.1 * n)]
    mean = sum(accuracies) / n
    assert got["client_mean"] == pytest.approx(mean)
    assert got["client_variance"] == pytest.approx(sum((a - mean) ** 2 for a in accuracies) / n)
    assert got["worst_decile"] == pytest.approx(sum(lowest) / len(lowest))
    assert got["q10"] <= got["q50"] <= got["q90"]
    assert got["q50"] == pytest.approx(np.median(accuracies))
    assert min(accuracies) <= got["worst_decile"] <= got["client_mean"] + 1e-12


@pytest.mark.parametrize(("accuracies", "q10", "q50", "q90"), [
    ([0.0, 0.2, 0.4, 1.0], 0.06, 0.3, 0.82),  # places 0.3, 1.5 and 2.7 of 3
    ([1.0, 0.0], 0.1, 0.5, 0.9),
    ([0.5], 0.5, 0.5, 0.5),
    ([n / 10 for n in range(11)], 0.1, 0.5, 0.9),
])  # fmt: skip
def test_quantiles_lie_between_the_clients_as_numpy_has_them(accuracies, q10, q50, q90):
    got = distribution(np.array(accuracies))
    assert [got["q10"], got["q50"], got["q90"]] == pytest.approx([q10, q50, q90])
    assert [got["q10"], got["q90"]] == [np.quantile(accuracies, 0.1), np.quantile(accuracies, 0.9)]


@pytest.mark.parametrize(("clients", "worst"), [(1, 1), (9, 1), (10, 1), (11, 2), (20, 2), (21, 3), (100, 10)])
def test_the_worst_tenth_is_rounded_up(clients, worst):
    accuracies = np.arange(clients) / clients
    assert distribution(accuracies)["worst_decile"] == pytest.approx(np.mean(accuracies[:worst]))


def test_clients_without_rows_have_no_accuracy():
    assert client_accuracies(scores([4, 0, 2], [1, 0, 2])).tolist() == [0.25, 1.0]


def test_a_row_of_which_a_model_says_nan_is_wrong():
    """A client whose loss is NaN is among the worst, and the mean of clients with as many rows each is that of rows."""
    judged = replace(scores([4] * 10, [4] * 9 + [0]), loss=torch.tensor([1.0] * 9 + [math.nan], dtype=torch.float64))
    got = summarized(judged, torch.zeros(10, dtype=torch.int64), ["all"])
    assert (got["worst_decile"], got["client_mean"], got["accuracy"]) == (0.0, 0.9, 0.9)
    silent = replace(judged, loss=torch.full((10,), math.nan, dtype=torch.float64))
    assert np.isnan(client_accuracies(silent)).all()


def test_a_scoring_is_kept_pooled_per_group_and_over_clients():
    """Day clients 1 of 4 and 0 of 2 rows, night client 6 of 6: pooled 7 of 12, mean over clients 5/12."""
    kept = summarized(scores([4, 2, 6], [1, 0, 6], [3, 3, 0]), torch.tensor([0, 0, 1]), ("day", "night", "dusk"))
    assert kept["accuracy"] == pytest.approx(7 / 12)
    assert kept["client_mean"] == pytest.approx((0.25 + 0 + 1) / 3)
    assert kept["loss"] == 0.5
    assert kept["rows"] == 12
    assert kept["groups"] == {"day": pytest.approx(1 / 6), "night": 1.0}


def test_one_group_is_not_told_apart():
    assert "groups" not in summarized(scores([1], [1]), torch.tensor([0]), ("all",))


def test_without_rows_there_is_nothing_to_keep():
    assert summarized(scores([0, 0], [0, 0]), torch.tensor([0, 1]), ("day", "night")) == {}


def test_mean_weights_are_over_rows_and_apart_for_each_group():
    """Three clients with 4, 2 and 2 rows; experts have (3, 1), (1, 1) and (0.5, 1.5) in all: 4.5 and 3.5 of 8."""
    weights = torch.tensor([[3.0, 1.0], [1.0, 1.0], [0.5, 1.5]], dtype=torch.float64)
    found = replace(scores([4, 2, 2], [4, 1, 0]), weights=weights)
    groups = torch.tensor([0, 0, 1])
    line = summarized(found, groups, ["day", "night", "nobody"], own_expert=True)
    assert line["weights"] == {
        "own": 4.5 / 8, "shared": [3.5 / 8],
        "groups": {"day": {"own": 4 / 6, "shared": [2 / 6]}, "night": {"own": 0.25, "shared": [0.75]}},
    }  # fmt: skip
    assert summarized(found, groups, ["all"])["weights"] == {"shared": [4.5 / 8, 3.5 / 8]}
    assert "weights" not in summarized(scores([4], [4]), groups[:1], ["all"])


def test_other_ways_to_predict_and_densities_are_means_over_rows():
    """Of 8 rows the other way gets 5; day clients have 6 rows and a density of -9 in all, the night client 2 and -8."""
    columns = [torch.tensor(v, dtype=torch.float64) for v in ([3, 1, 1], [-6, -3, -8])]
    found = replace(scores([4, 2, 2], [4, 1, 0]), others={"global": columns[0]}, density=columns[1])
    line = summarized(found, torch.tensor([0, 0, 1]), ["day", "night", "nobody"])
    assert line["others"] == {"global": 5 / 8}
    assert line["density"] == -17 / 8
    assert line["densities"] == {"day": -1.5, "night": -4.0}
    alone = summarized(found, torch.tensor([0, 0, 0]), ["all"])
    assert (alone["density"], "densities" in alone) == (-17 / 8, False)
    assert not {"others", "density", "densities"} & set(summarized(scores([4], [4]), torch.tensor([0]), ["all"]))


# -- curves ------------------------------------------------------------------------------------------------------------


def test_the_mean_of_the_last_rounds_is_over_the_evaluations_within_them():
    rounds, values = [10, 20, 30, 40], [0.0, 0.2, 0.4, 0.9]
    assert mean_of_last(rounds, values, 1) == 0.9
    assert mean_of_last(rounds, values, 10) == 0.9
    assert mean_of_last(rounds, values, 11) == pytest.approx(0.65)
    assert mean_of_last(rounds, values, 20) == pytest.approx(0.65)
    assert mean_of_last(rounds, values, 1000) == pytest.approx(0.375)


def test_the_worst_point_is_within_the_last_rounds():
    assert worst_point([10, 20, 30, 40], [0.0, 0.5, 0.4, 0.9], 20) == 0.4
    assert worst_point([10, 20, 30, 40], [0.0, 0.5, 0.4, 0.9], 10) == 0.9
    assert worst_point([10, 20, 30, 40], [0.0, 0.5, 0.4, 0.9], 40) == 0.0


@law
@given(curves, st.integers(1, 40))
def test_mean_worst_and_window_agree(values, window):
    rounds = list(range(1, len(values) + 1))
    late = values[-window:]
    assert mean_of_last(rounds, values, window) == pytest.approx(sum(late) / len(late))
    assert worst_point(rounds, values, window) == min(late)


def test_a_swing_is_highest_minus_lowest_within_a_period_averaged_over_periods():
    rounds = list(range(1, 13))
    values = [9, 9, 9, 9, 0, 1, 2, 5, 3, 3, 4, 3]  # periods of 4: the last two swing by 5 and by 1
    assert swing(rounds, values, period=4, window=8) == 3.0
    assert swing(rounds, values, period=4, window=4) == 1.0
    assert swing(rounds, values, period=4, window=11) == 3.0  # two whole periods in eleven rounds
    assert swing(rounds, values, period=4, window=12) == 2.0
    assert swing(rounds, values, period=4, window=2) == 1.0  # a window shorter than a period is one period
    assert swing(rounds, values, period=2.5, window=5) == 1.5  # 8, 9 and 10, 11, 12


def test_a_swing_over_sparse_evaluations_uses_those_there_are():
    assert swing([4, 8, 12, 16], [0.1, 0.5, 0.2, 0.9], period=8, window=16) == pytest.approx((0.4 + 0.7) / 2)
    assert math.isnan(swing([4, 8, 12, 16], [0.1, 0.5, 0.2, 0.9], period=4, window=16))  # once a period: unknown


@law
@given(st.lists(shares, min_size=12, max_size=40), st.floats(2, 10), st.floats(1, 12), shares)
def test_a_swing_is_not_negative_and_lifting_the_curve_does_not_change_it(values, period, window, lift):
    rounds = list(range(1, len(values) + 1))
    found = swing(rounds, values, period, window)
    assert found >= 0
    assert swing(rounds, [v + lift for v in values], period, window) == pytest.approx(found, abs=1e-12)
    assert swing(rounds, [lift] * len(values), period, window) == 0


# -- time to accuracy --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("values", "reached"), [
    ([0.1, 0.6, 0.4, 0.6, 0.7], 4.0),  # crosses, falls, crosses: the second crossing
    ([0.1, 0.6, 0.7, 0.8, 0.9], 2.0),
    ([0.9, 0.9, 0.9, 0.9, 0.9], 1.0),
    ([0.1, 0.5, 0.5, 0.5, 0.5], 2.0),  # at the target is enough
    ([0.9, 0.9, 0.9, 0.9, 0.4], INF),
    ([0.1, 0.1, 0.1, 0.1, 0.1], INF),
    ([0.1, 0.1, 0.1, 0.1, 0.9], 5.0),
])  # fmt: skip
def test_the_time_to_an_accuracy_is_when_the_curve_stays_above_it(values, reached):
    assert time_to_accuracy([1, 2, 3, 4, 5], values, 0.5) == reached


@law
@given(curves, shares)
def test_from_that_time_on_and_not_before_the_curve_stays_at_the_target(values, target):
    times = [3.0 * i for i in range(len(values))]
    reached = time_to_accuracy(times, values, target)
    after = [v for t, v in zip(times, values, strict=True) if t >= reached]
    before = [v for t, v in zip(times, values, strict=True) if t < reached]
    assert all(v >= target for v in after)
    assert bool(after) == (reached < INF)
    assert not before or before[-1] < target


def test_an_empty_curve_reaches_nothing():
    assert time_to_accuracy([], [], 0.5) == INF


def test_without_a_target_there_is_no_time_to_it():
    """There is no target where there is no baseline."""
    assert not math.isfinite(time_to_accuracy([1, 2], [0.5, 0.9], math.nan))


# -- seeds -------------------------------------------------------------------------------------------------------------


@law
@given(st.lists(st.floats(-10, 10), min_size=2, max_size=8))
def test_the_standard_error_is_s_over_root_n(values):
    measure = Measure.of(values)
    n = len(values)
    s = math.sqrt(sum((v - sum(values) / n) ** 2 for v in values) / (n - 1))
    assert measure.mean == pytest.approx(sum(values) / n, abs=1e-9)
    assert measure.error == pytest.approx(s / math.sqrt(n), abs=1e-9)


def test_the_error_of_one_value_is_unknown_and_of_none_the_mean_too():
    assert Measure.of([0.25]) == Measure(0.25, None, [0.25])
    assert Measure.of([]) == Measure(None, None, [])
