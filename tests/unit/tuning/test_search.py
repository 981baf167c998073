"""What is asked next: inside the ranges, and from the seed and the trials before alone."""

import sys
from dataclasses import replace

import pytest

from fedtide.core.errors import FedtideError
from fedtide.tuning.tune import Curve, Trial, asked, stages
from helpers.studies import RATE, tuning

EVERYTHING = {
    "method.local.lr": RATE,
    "method.local.epochs": {"low": 1, "high": 5, "whole": True},
    "method.local.batch_size": {"low": 4, "high": 12, "step": 4, "whole": True},
    "method.local.weight_decay": {"low": 0.0, "high": 0.3, "step": 0.1},
    "method.server": {"choices": [{"kind": "sgd"}, {"kind": "adam", "lr": 0.01}]},
    "method.local.max_grad_norm": {"low": 2.0, "high": 2.0},
    "method.cohort.clients_per_round": {"low": 1, "high": 8, "whole": True, "log": True},
}


def search_of(ranges, **tune):
    experiment = tuning(tune={"ranges": ranges, **tune})
    return stages(experiment)[0][0], experiment.tune


def trial(number, values, accuracy=None, state="finished", seen=(0.5,)):
    curve = Curve(0, tuple(range(1, len(seen) + 1)), tuple(seen))
    return Trial("", "A", number, values, state, (curve,), () if accuracy is None else (accuracy,), accuracy, "", "")


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_values_lie_in_their_ranges_and_are_of_their_kind(sampler):
    search, tune = search_of(EVERYTHING, sampler=sampler, startup_trials=3)
    before = []
    for _ in range(6):
        for values in asked(search, before, tune, 3):
            assert list(values) == list(EVERYTHING)
            assert 0.01 <= values["method.local.lr"] <= 1.0
            assert values["method.local.epochs"] in range(1, 6)
            assert values["method.local.batch_size"] in (4, 8, 12)
            assert values["method.local.weight_decay"] in (0.0, 0.1, 0.2, 0.3)
            assert values["method.server"] in ({"kind": "sgd"}, {"kind": "adam", "lr": 0.01})
            assert values["method.local.max_grad_norm"] == 2.0
            assert type(values["method.local.epochs"]) is type(values["method.cohort.clients_per_round"]) is int
            assert values["method.local.lr"] == float(f"{values['method.local.lr']:.4g}")
            before.append(trial(len(before), values, values["method.local.lr"]))
    assert len({tuple(map(str, each.values.values())) for each in before}) > 12


def test_steps_of_many_digits_are_known_again_and_narrow_ranges_have_many_values():
    fine, narrow = "method.local.momentum", "method.local.lr"
    ranges = {fine: {"low": 0.0, "high": 0.96875, "step": 0.03125}, narrow: {"low": 1000.1, "high": 1000.2}}
    search, tune = search_of(ranges)
    before = []
    for _ in range(3):
        before += [trial(len(before) + i, values, 0.5) for i, values in enumerate(asked(search, before, tune, 4))]
    assert all((each.values[fine] / 0.03125).is_integer() for each in before)
    assert len({each.values[narrow] for each in before}) == len(before)


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_the_same_trials_before_lead_to_the_same_values(sampler):
    search, tune = search_of(EVERYTHING, sampler=sampler, startup_trials=2)
    before = [trial(i, values, 0.1 * i) for i, values in enumerate(asked(search, [], tune, 5))]
    again = asked(search, before, tune, 4)
    assert again == asked(search, before, tune, 4)
    assert again != asked(search, before, tune.model_copy(update={"seed": 1}), 4)
    assert again != asked(replace(search, method="B"), before, tune, 4)
    assert again[:2] == asked(search, before, tune, 2)


def test_a_grid_plays_each_combination_once(tmp_path):
    ranges = {"method.A.local.lr": {"choices": [0.1, 0.2, 0.4]}, "method.A.local.epochs": {"choices": [1, 2]}}
    search, tune = search_of(ranges, sampler="grid", trials=6)
    before = []
    for number in range(6):
        (values,) = asked(search, before, tune, 1)
        before.append(Trial("", "A", number, values, "finished", accuracy=0.5))
    assert len({tuple(trial.values.values()) for trial in before}) == 6
    assert search_of(ranges, sampler="grid")[0].trials == 6
    with pytest.raises(FedtideError, match="trials: found 7, but 'A' has no more combinations; allowed: 1 to 6"):
        search_of(ranges, sampler="grid", trials=7)
    with pytest.raises(FedtideError, match=r"allowed: choices = \[...\], because .*sampler is 'grid'"):
        search_of({"method.A.local.lr": {"low": 0.1, "high": 0.2}}, sampler="grid", trials=1)


def test_tpe_goes_where_it_was_good_and_keeps_away_from_where_it_failed():
    search, tune = search_of({"method.local.lr": {"low": 0.0, "high": 1.0}}, startup_trials=4)
    values = [{"method.local.lr": i / 20} for i in range(21)]
    good = [trial(i, v, 1 - abs(v["method.local.lr"] - 0.8)) for i, v in enumerate(values)]
    near = [v["method.local.lr"] for v in asked(search, good, tune, 8)]
    assert sum(0.6 < rate < 1.0 for rate in near) >= 6
    failed = [
        t if v["method.local.lr"] < 0.5 else trial(t.number, v, None, "failed", ())
        for t, v in zip(good, values, strict=True)
    ]
    away = [v["method.local.lr"] for v in asked(search, failed, tune, 8)]
    assert sum(rate < 0.55 for rate in away) >= 6


def test_without_optuna_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    search, tune = search_of({"method.local.lr": RATE})
    with pytest.raises(FedtideError) as raised:
        asked(search, [], tune, 1)
    assert str(raised.value) == 'fedtide tune: the search needs Optuna; pip install "fedtide[tune]"'
