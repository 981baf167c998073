"""Adaptive expert models: exploration, early stopping per model, what is sent, and which models clients get."""

from dataclasses import replace
from importlib import import_module

import pytest
import torch
from torch import nn

import fedtide
from fedtide.algorithms.aem import ByClusters, Constant, Inverse, Power
from fedtide.clusters.rounds import Served
from fedtide.config import from_dict
from fedtide.core.base import Moment, Prediction
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.trees import same
from fedtide.report.run_records import read_experiment
from fedtide.report.study import summarize
from fedtide.runs import folder
from fedtide.runs.experiment import execute
from fedtide.runs.preflight import preflight
from fedtide.transforms.personalized import renumber
from helpers.studies import raw
from helpers.toys import played, toy

FEW = {"lr": 0.05, "epochs": 3, "batch_size": 4, "optimizer": "adamw"}
MIX = {"gating": FEW, "solver": FEW}
ANCHORED = {"transforms": ["choice", "anchored"]}
CHOICE = {"transforms": ["choice"]}


@pytest.mark.parametrize(("kind", "round", "expected"), [
    (Constant(0.3), 7, 0.3), (Constant(0.0), 7, 0.0), (Inverse(), 0, 1.0), (Inverse(), 4, 0.2), (Power(0.3), 0, 1.0),
    (Power(0.3), 10, 0.3), (ByClusters(), 0, 1.0), (ByClusters(), 7, 1 / 2),
])  # fmt: skip
def test_exploration_falls_as_its_kind_says(kind, round, expected):
    """With six clusters (t+1)^(-1/3); "power" is eps where t is an eighth of the rounds, plus one."""
    assert kind.probability(6, Moment(round, 80)) == pytest.approx(expected)


@pytest.mark.parametrize("active", [[False, True, False], [True, False, True]])
@pytest.mark.parametrize("epsilon", [0.0, 1.0])
def test_only_models_that_are_still_trained_are_explored_or_chosen(active, epsilon):
    """One: always it. Two, explored: all alike, by chi-square of 30 rounds of eight (99.9 %, one degree of freedom)."""
    options = {"clusters": 3, "exploration": {"epsilon": epsilon}, "cohort": "everyone"}
    run = played(toy("aem", {**options}, shift={"who": {"kind": "always"}}), rounds=1)
    now, algorithm = replace(run.state, active=torch.tensor(active)), run.host.algorithm
    counts = torch.zeros(3, dtype=torch.float64)
    drawn = bool(epsilon) and sum(active) == 2
    rounds = 30 if drawn else 8
    for number in range(rounds):
        run.fleet.begin(Moment(number, 30, float(number)))
        counts += algorithm.round(now, run.fleet, Rng(0).at(number, "server"))[1]["members"]
    assert not counts[~torch.tensor(active)].any()
    assert float(counts.sum()) == 8 * rounds
    if drawn:
        assert float(((counts[active] - 120) ** 2 / 120).sum()) < 10.8


def test_frozen_models_stay_in_use_though_nobody_can_choose_them(monkeypatch):
    """Two models freeze at once, and the third goes on for longer than a model stays in use that nobody chooses."""
    monkeypatch.setattr(import_module("fedtide.algorithms.aem"), "IN_USE", 3)
    options = {"clusters": 3, "exploration": {"epsilon": 0.5}, "freeze": {"patience": 1, "check_every": 1}}
    options |= {"cohort": "everyone", "local": {"lr": 0.3, "batch_size": 4, "epochs": 1}}
    run = played(toy("aem", options, shift={"who": {"kind": "always"}}, rounds=8))
    chosen = [step.state.chosen for step in run.steps]
    alone = next(t for t, step in enumerate(run.steps) if step.state.active.sum() == 1)
    assert alone + 3 < len(run.steps)
    assert not (chosen[-1] - chosen[alone])[~run.state.active].any()
    payload, _ = run.host.algorithm.serve(run.state, run.host.population.clients)
    assert payload.numbers.tolist() == [0, 1, 2]


def test_models_that_nobody_chose_are_left_out_of_what_clients_get():
    run = played(toy("aem", {"clusters": 3, "exploration": {"epsilon": 0.0}, "drop_unused": True}), rounds=3)
    used = (run.state.chosen > 0).nonzero().flatten().tolist()
    payload, _ = run.host.algorithm.serve(run.state, run.host.population.clients)
    assert payload.numbers.tolist() == used
    assert used[int(payload.usual)] == int(run.state.chosen.argmax())
    # After ten rounds without it a model is out of use, however often it was chosen before.
    state = replace(run.state, chosen=torch.tensor([50.0, 3, 9]), last=torch.tensor([10.0, 11, 20]))
    payload, _ = run.host.algorithm.serve(state, run.host.population.clients)
    assert (payload.numbers.tolist(), int(payload.usual)) == ([1, 2], 1)
    every = played(toy("aem", {"clusters": 3, "exploration": {"epsilon": 0.0}}), rounds=3)
    payload, _ = every.host.algorithm.serve(every.state, every.host.population.clients)
    assert payload.numbers.tolist() == [0, 1, 2]


def test_experts_are_called_by_their_models_though_some_were_not_sent():
    """Of four models 1 and 3 were sent: the gate's experts 0, 1, 2 are the own one, model 1 and model 3."""
    numbers, logp = torch.tensor([1, 3]), torch.zeros(2, 5)
    gate = torch.tensor([[0.7, 0.1, 0.2], [0.1, 0.3, 0.6]], dtype=torch.float64)
    made = renumber(Prediction(logp, gate.argmax(1), gate), numbers, 4, with_own=True)
    assert made.choice.tolist() == [0, 4]
    assert made.weights.tolist() == [[0.7, 0, 0.1, 0, 0.2], [0.1, 0, 0.3, 0, 0.6]]
    made = renumber(Prediction(logp, torch.tensor([1, 1])), numbers, 4, with_own=False)
    assert (made.choice.tolist(), made.weights) == ([3, 3], None)


def test_a_client_without_a_gate_leaves_its_rows_to_the_usual_model():
    run = played(toy("aem", {"clusters": 3, "mixture": MIX}), rounds=1)
    payload = Served(run.state.weights[1:], torch.tensor([1, 2]), torch.tensor(1))
    made = run.host.algorithm.predict(payload, [None], torch.randn(2, 4), torch.tensor([0, 0]))
    assert made.choice.tolist() == [3, 3]
    assert made.weights.tolist() == [[0, 0, 0, 1]] * 2


def test_a_way_that_is_none_and_a_network_that_does_not_fit_are_refused_before_anything_runs():
    with pytest.raises(FedtideError, match=r"way: found 'domain-mixture', did you mean 'mixture'"):
        fedtide.transforms.Personalized(fedtide.data.shift.DomainMixture())
    for way in ("alone", "ensemble", "mixture"):
        with pytest.raises(FedtideError, match="lenet5"):
            preflight(toy("aem", {"transforms": [{"kind": way, "model": "lenet5"}]}))
        with pytest.raises(FedtideError, match="does not fit rows"):
            preflight(toy("aem", {"transforms": [{"kind": way, "model": "python:unit.algorithms.test_aem:narrow"}]}))


def narrow(shape, classes) -> nn.Module:
    """A network for other rows."""
    return nn.Linear(shape[0] + 1, classes)


def test_no_client_is_trained_to_tell_a_loss():
    """It tells that of the model that it would choose, whatever it makes for itself afterwards."""
    runs = [played(toy("aem", {"cohort": "power-of-choice", **own})) for own in ({"mixture": MIX}, CHOICE)]
    assert same(*(run.state for run in runs))


@pytest.mark.parametrize(("options", "said"), [
    ({"exploration": {"epsilon": 1.5}}, "epsilon"), ({"exploration": {"epsilon": -0.1}}, "epsilon"),
    ({"exploration": {"kind": "power", "epsilon": 0.0}}, "epsilon"), ({"freeze": {"patience": 0}}, "patience"),
    ({"exploration": {"kind": "inverse", "epsilon": 0.1}}, "epsilon"), ({"clusters": 0}, "clusters"),
    ({"epsilon": 0.1}, "did you mean 'exploration'"), ({"patience": 1}, "did you mean 'freeze'"),
    ({"clusters": 9}, "at most 8"), ({"transforms": ["magic"]}, "magic"),
    ({"mixture": {"held": 1.0}}, "held"),
])  # fmt: skip
def test_what_makes_no_sense_is_one_clear_line(options, said):
    with pytest.raises(FedtideError, match=said) as raised:
        preflight(toy("aem", {**options}))
    assert "\n" not in str(raised.value)


def test_a_choice_with_an_anchor_needs_validation_samples_to_weigh_it():
    with pytest.raises(FedtideError, match=r"'anchored' is not allowed without validation samples"):
        preflight(toy("aem", ANCHORED, data={"split": {"val": 0.0}}))


def played_in(experiment, root) -> None:
    folder.create(experiment, root)
    assert execute(experiment, root, workers=1)


def test_further_personalizations_of_the_same_models_are_as_if_each_had_a_federation_of_its_own(tmp_path):
    few = {"lr": 0.05, "epochs": 2, "batch_size": 4, "optimizer": "adamw"}
    ways = {
        "choice": {"kind": "choice"},
        "stacking": {"kind": "stacking", "solver": few, "tuning": few},
        "mixture": {"kind": "mixture", "solver": few, "gating": few},
        "mixture tune true": {"kind": "mixture", "solver": few, "gating": few, "tune": True},
    }
    shared = {key: value for key, value in raw().items() if key in ("data", "model")} | {"rounds": 2, "seeds": [1]}
    one = {"name": "AEM", "algorithm": "aem", "cohort": 4}
    claim = {"text": "stacking is as good", "method": "AEM, stacking", "versus": "AEM (choice)", "bound": -1.0}
    others = [ways[name] for name in list(ways)[1:]]
    listed = {**one, "transforms": [{"kind": "personalized", "way": "choice", "others": others}]}
    experiment = from_dict({**shared, "method": [listed], "claim": [claim], "baseline": "AEM (choice)"})
    played_in(experiment, tmp_path / "listed")
    apart = from_dict({**shared, "method": [{**one, "name": name, "transforms": [way]} for name, way in ways.items()]})
    played_in(apart, tmp_path / "apart")
    (ours,), (theirs,) = read_experiment(tmp_path / "listed"), read_experiment(tmp_path / "apart")
    assert [method.name for method in ours.methods] == ["AEM (choice)", *(f"AEM, {name}" for name in list(ways)[1:])]
    for mine, other in zip(ours.methods, theirs.methods, strict=True):
        assert len(mine.runs) == len(other.runs) == 1
        for left, right in zip(mine.runs, other.runs, strict=True):
            assert [line["scores"] for line in left.judged] == [line["scores"] for line in right.judged]
            values = [each.clients("train_clients")["accuracy"].to_pylist() for each in (left, right)]
            assert values[0]
            assert values[0] == values[1]
    summary = summarize(ours)
    assert [method.name for method in summary.methods] == [method.name for method in ours.methods]
    assert "own_weight" in summary.method("AEM, stacking").measures
    with pytest.raises(FedtideError, match=r"claim .*: method: found .AEM, alone"):
        from_dict({**shared, "method": [listed], "claim": [{**claim, "method": "AEM, alone"}]})
