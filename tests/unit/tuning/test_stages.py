"""Ranges, stages, and the experiment with values put in."""

import re

import pytest

from fedtide.config import Range, from_dict
from fedtide.core.errors import FedtideError
from fedtide.runs.digest import digest_of
from fedtide.tuning.tune import at_edge, base_of, ends, stages, with_values
from helpers.studies import PROX, RATE, RATES, A, tunable, tuning

STEADY = {**A, "name": "b.2"}


def searched(*methods, **changes):
    return [
        [(s.method, [p.place for p in s.parameters]) for s in stage] for stage in stages(tuning(*methods, **changes))
    ]


# -- ranges ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("range_", "said"), [
    ({"low": 2, "high": 1}, "found low = 2 and high = 1, allowed: low at most high"),
    ({"low": 0, "high": 1, "log": True}, "found low = 0 with log = true, allowed: low greater than 0"),
    ({"low": 0.5, "high": 3, "whole": True}, "found whole = true, allowed with it: whole numbers"),
    ({"low": 0, "high": 1, "step": 0.3}, "found step = 0.3, allowed: one that leads from 0 to 1"),
    ({"low": 0}, "`low` or `high` is missing, allowed: both of them, or `choices`"),
    ({"choices": [1], "low": 0}, "found `choices` and `low`, allowed: one of them"),
    ({"choices": [0, 1, 0.0]}, "choices: found 0.0 twice, allowed: each once"),
    ({"choices": [True, 1]}, "choices: found 1 twice, allowed: each once"),
])  # fmt: skip
def test_a_range_that_cannot_be(range_, said):
    with pytest.raises(FedtideError, match=rf"^experiment: tune.ranges.method.local.lr[.:] ?{said}"):
        tuning(tune={"ranges": {"method.local.lr": range_}})


@pytest.mark.parametrize(("tune", "said"), [
    ({"ranges": {}}, "tune: found neither, allowed: a table `ranges` or"),
    ({"stage": [{"name": "x", "ranges": RATES}], "ranges": RATES}, "tune: found both, allowed"),
    ({"stage": [{"name": "x", "ranges": RATES}] * 2}, "tune: stage 'x' stands twice"),
])  # fmt: skip
def test_a_table_that_cannot_be(tune, said):
    with pytest.raises(FedtideError, match=f"^experiment: {said}"):
        tuning(tune=tune)


@pytest.mark.parametrize(
    ("range_", "value", "edge"),
    [
        (Range(low=0, high=1), 0.5, None),
        (Range(low=0, high=1), 0.04, "low"),
        (Range(low=0, high=1), 0.97, "high"),
        (Range(low=0.01, high=1, log=True), 0.04, None),
        (Range(low=0.01, high=1, log=True), 0.011, "low"),
        (Range(low=1, high=50, whole=True), 49, None),
        (Range(low=1, high=50, whole=True), 50, "high"),
        (Range(low=1, high=50, whole=True), 1, None),
        (Range(low=1, high=50), 1, "low"),
        (Range(choices=(1, 2, 5)), 1, None),
        (Range(choices=(0.1, 0.3, 1)), 1, "high"),
        (Range(low=0, high=1, step=0.02), 0.02, None),
        (Range(low=2, high=2), 2, None),
        (Range(choices=(1, 2)), 2, "high"),
        (Range(choices=(0.3, 0.1, 1.0)), 0.3, None),
        (Range(choices=({"kind": "sgd"}, True, 2)), True, None),
    ],
)
def test_the_edge_of_a_range(range_, value, edge):
    assert at_edge(range_, value) == edge


# -- keys --------------------------------------------------------------------------------------------------------------


def test_a_key_is_about_every_method_or_about_one_by_name_even_with_a_dot_or_by_number():
    ranges = {
        "method.local.lr": RATE,
        "method.prox.local.proximal": RATE,
        "method.b.2.cohort.clients_per_round": RATE,
        "method.0.server.lr": RATE,
    }
    assert searched(A, PROX, STEADY, tune={"ranges": ranges}) == [
        [
            ("A", [("method", "A", "local", "lr"), ("method", "A", "server", "lr")]),
            ("prox", [("method", "prox", "local", "lr"), ("method", "prox", "local", "proximal")]),
            ("b.2", [("method", "b.2", "local", "lr"), ("method", "b.2", "cohort", "clients_per_round")]),
        ]
    ]  # fmt: skip


@pytest.mark.parametrize(
    "key", ["data.partition.clients", "rounds", "method", "method.", "method..x", "shift.who.period"]
)
def test_only_keys_of_methods_are_searched(key):
    with pytest.raises(FedtideError, match=re.escape(f"experiment: tune.ranges.{key}: allowed: keys of methods")):
        stages(tuning(tune={"ranges": {key: RATE}}))


@pytest.mark.parametrize(
    "key", ["method.shift.who.period", "method.A.shift.who", "method.name", "method.A.algorithm", "method.A"]
)
def test_what_a_method_meets_is_not_searched(key):
    with pytest.raises(
        FedtideError, match=r"allowed: (a key of the method other than name, algorithm, shift|keys of methods)"
    ):
        list(ends(tuning(tune={"ranges": {key: {"choices": ["x"]}}})))


def test_the_network_is_searched_with_one_method_and_its_sizes_one_by_one():
    ranges = {"model.hidden.0": {"choices": [4, 6]}, "method.prox.local.lr": RATE}
    sizes = {"name": "sizes", "methods": ["prox"], "ranges": ranges}
    experiment = tuning(A, PROX, model={"kind": "mlp", "hidden": [3, 5]}, tune={"stage": [sizes]})
    ((search,),) = stages(experiment)
    assert [p.place for p in search.parameters] == [("model", "hidden", "0"), ("method", "prox", "local", "lr")]
    assert [p.name for p in search.parameters] == ["model.hidden.0", "local.lr"]
    found = from_dict(with_values(experiment, search.assigned({"model.hidden.0": 6, "method.prox.local.lr": 0.2})))
    assert found.model.hidden == (6, 5)
    by_end = [[method.name for method in at.method] for _, at in ends(experiment)]
    assert by_end == [["A", "prox"]] * 2 + [["prox"]] * 2  # all methods get the network


def test_a_network_of_another_size_is_another_digest():
    experiment = tuning(A, tune={"ranges": {"model.hidden.0": {"choices": [4, 6]}}})
    small, large = (at for _, at in ends(experiment))
    assert digest_of(small, small.method[0], 0) != digest_of(large, large.method[0], 0)


@pytest.mark.parametrize(("methods", "key", "said"), [
    ((A, PROX), "model.hidden.0", "experiment: tune.ranges.model.hidden.0: allowed: one method, in `methods`"),
    ((A,), "model.hidden.7", "experiment: tune.ranges: model.hidden.7: 'model.hidden' is a list of values; set"),
    ((A,), "model.hidden.x", "experiment: tune.ranges: model.hidden.x: 'model.hidden' is a list of values; set"),
    ((A,), "model.depth", "experiment: tune.ranges.model.depth = 4: model.depth: unknown key"),
    ((A,), "model.", "experiment: tune.ranges.model. = 4: model.: unknown key"),
    ((A,), "models.hidden", "experiment: tune.ranges.models.hidden: allowed: keys of methods"),
])  # fmt: skip
def test_a_network_that_cannot_be_searched(methods, key, said):
    with pytest.raises(FedtideError) as raised:
        list(ends(tuning(*methods, tune={"ranges": {key: {"choices": [4, 6]}}})))
    assert str(raised.value).startswith(said)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("key", ["model", "model.hidden"])
def test_over_a_sweep_of_networks_no_trial_sets_their_sizes(key):
    swept = [[4], [6]] if key.endswith("hidden") else [{"kind": "mlp", "hidden": [width]} for width in (4, 6)]
    experiment = tuning(
        A, sweep={key: swept}, tune={"over_sweep": True, "ranges": {"model.hidden.0": {"choices": [4, 6]}}}
    )
    with pytest.raises(FedtideError, match=f"the sweep sets '{key}', too"):
        stages(experiment)


# -- stages ------------------------------------------------------------------------------------------------------------


def test_stages_are_played_in_their_order_and_each_method_gets_the_same_number_of_trials():
    both = {"name": "first", "ranges": RATES}
    one = {"name": "second", "ranges": {"method.prox.local.proximal": RATE}, "trials": 3}
    found = stages(tuning(A, PROX, tune={"stage": [both, one]}))
    assert [[(s.stage, s.method, s.trials) for s in stage] for stage in found] == [
        [("first", "A", 6), ("first", "prox", 6)],
        [("second", "prox", 3)],
    ]


def staged(**stage):
    return tuning(A, PROX, tune={"stage": [{"name": "s", "ranges": RATES, **stage}]})


PULL = {"method.prox.local.proximal": RATE}


@pytest.mark.parametrize(("stage", "said"), [
    ({"methods": ["B"]}, "tune.stage 's'.methods: found 'B', allowed: 'A', 'prox'"),
    ({"methods": ["A"], "ranges": PULL}, "ranges.method.prox.local.proximal: found 'prox', allowed: 'A'"),
    ({"methods": ["A", "prox"], "ranges": PULL}, "tune.stage 's'.methods: found 'A', allowed: methods that"),
    ({"ranges": {"method.local.proximal": RATE, **PULL}}, "two ranges are about 'method.prox.local.proximal'"),
    ({"ranges": {"method.local.lr": {**RATE, "also": list(PULL)}}}, "lr.also: allowed with a range about one method"),
    ({"ranges": {"method.A.local.lr": {**RATE, "also": ["rounds"]}}}, "found 'rounds': allowed: keys of methods"),
])  # fmt: skip
def test_a_stage_that_cannot_be(stage, said):
    with pytest.raises(FedtideError) as raised:
        stages(staged(**stage))
    assert said in str(raised.value)


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranges", "said"), [
    ({"method.nu": RATE}, "ranges.method.nu = 0.01: method 'A'.nu: unknown key"),
    ({"method.local.lr": {"low": -1, "high": 1}}, "lr = -1.0: method 'A'.local.lr: found -1.0, allowed: greater"),
    ({"method.local.optimizer": {"choices": ["sgd", "adm"]}}, "optimizer = adm: method 'A'.local.optimizer: found"),
    ({"method.A.local.lr": {**RATE, "also": ["method.prox.local.lrr"]}},
     "ranges.method.A.local.lr = 0.01: method 'prox'.local.lrr: unknown key"),
])  # fmt: skip
def test_a_key_or_an_end_that_cannot_be_is_found_before_anything_is_played(ranges, said):
    with pytest.raises(
        FedtideError, match=rf"^experiment: tune\.{said}|^experiment: tune\.ranges\.method\.local\.{said}"
    ):
        list(ends(tuning(A, PROX, tune={"ranges": ranges})))


def test_a_found_value_goes_to_the_other_keys_too():
    range_ = {**RATE, "also": ["method.prox.local.lr", "method.prox.local.proximal"]}
    experiment = tuning(A, PROX, tune={"ranges": {"method.A.local.lr": range_}})
    ((search,),) = stages(experiment)
    values = from_dict(with_values(experiment, search.assigned({"method.A.local.lr": 0.25})))
    first, second = values.method
    assert (first.options["local"]["lr"], second.options["local"]["lr"], second.options["local"]["proximal"]) == (
        0.25,
    ) * 3


def test_sweep_and_search_are_left_out_and_so_are_claims_about_points():
    claims = [{"text": "a", "method": "A", "at": "rounds 2"}, {"text": "b", "method": "A", "at": "chosen"}]
    values = base_of(tuning(sweep={"rounds": [2, 4]}, claim=claims))
    assert "tune" not in values
    assert "sweep" not in values
    assert [claim["text"] for claim in values["claim"]] == ["b"]


def test_what_follows_from_the_rhythm_follows_it_with_each_value():
    """A block of three groups lasts a third of the period: a prior that was not given peaks in the middle of it."""
    fedtem = {"name": "T", "algorithm": "fedtem", "cohort": 4, "prior": "linear"}
    shift = {"who": {"kind": "block-cyclic", "period": 12}}
    ranges = {"method.branches": {"low": 2, "high": 3, "whole": True}}
    experiment = tuning(fedtem, shift=shift, tune={"ranges": ranges})

    def peak(branches):
        values = with_values(experiment, [(("method", "T", "branches"), branches)])
        return from_dict(values).method[0].options["prior"]

    assert peak(2) != peak(3)
    assert peak(2) == from_dict(tunable({**fedtem, "branches": 2}, shift=shift)).method[0].options["prior"]


@pytest.mark.parametrize("key", ["method.local.lr", "method.A.local.lr", "method.A.local"])
def test_over_a_sweep_no_trial_sets_what_the_sweep_sets(key):
    values = [0.1, 0.2] if key.endswith("lr") else [{"lr": 0.1}, {"lr": 0.2}]
    experiment = tuning(sweep={key: values}, tune={"over_sweep": True, "ranges": {"method.local.lr": RATE}})
    with pytest.raises(FedtideError, match=rf"ranges.method.local.lr: the sweep sets '{key}', too; allowed: one of"):
        stages(experiment)
    stages(tuning(sweep={key: values}, tune={"ranges": {"method.local.lr": RATE}}))


def test_a_method_that_is_not_there_is_named():
    with pytest.raises(FedtideError, match=r"tune.ranges: method.AA.local.lr: no method is called 'AA'; .*'A'"):
        stages(tuning(tune={"ranges": {"method.AA.local.lr": RATE}}))
