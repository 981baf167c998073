"""Adaptive expert models: exploration, early stopping per model, what is sent, and which models clients get."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from torch import nn

import fedtide
from fedtide.algorithms.aem import ByClusters, Constant, Inverse, Power, State, aem, freeze_stale
from fedtide.clusters.served import Served
from fedtide.config import from_dict
from fedtide.core.base import Moment, Prediction, Weights
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.trees import same
from fedtide.learn.task import Task
from fedtide.report.reading import read_experiment
from fedtide.report.summary import summarize
from fedtide.runs import folder
from fedtide.runs.build import task_in
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


def test_explorers_take_every_model_alike():
    """Chi-square of 40 rounds of eight clients over three models, 99.9 % quantile at two degrees of freedom."""
    options = {"clusters": 3, "exploration": {"epsilon": 1.0}, "cohort": "everyone"}
    run = played(toy("aem", {**options}, shift={"who": {"kind": "always"}}, rounds=40))
    counts = sum((step.facts["members"] for step in run.steps), torch.zeros(3))
    expected = counts.sum() / 3
    assert float(((counts - expected) ** 2 / expected).sum()) < 13.8
    assert float(run.state.chosen.sum()) == 0  # nobody has chosen


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


def test_one_model_and_a_gate_that_trusts_it_are_as_good_as_fedavg():
    """J = 1, eps = 0, gate frozen at the global model: the same log-probabilities, so the same accuracy."""
    local = {"lr": 0.1, "batch_size": 4, "epochs": 2}
    ours = played(
        toy(
            "aem",
            {"local": local, "clusters": 1, "exploration": {"epsilon": 0.0}, "mixture": MIX | {"gate": "linear"}},
            precision="fp64",
        )
    )
    theirs = played(toy("fedavg", {"local": local}, precision="fp64"))
    population, moment = ours.host.population, ours.fleet.moment
    payload, _ = ours.host.algorithm.serve(ours.state, population.clients)
    plain, _ = theirs.host.algorithm.serve(theirs.state, population.clients)
    judged = 0
    for client in population.clients.tolist():
        kept = ours.host.algorithm.adapt(payload, None, population.shard(client, moment), moment, Rng(client)).memory
        gate = kept["gate"].params
        gate["head.weight"].zero_()
        gate["head.bias"].copy_(torch.tensor([-1e9, 0.0]))
        rows, owner = population.pooled(torch.tensor([client]), moment, "test")
        x, y = population.fetch(rows, torch.full_like(owner, client), moment)
        found = ours.host.algorithm.predict(payload, [kept], x, owner).told
        expected = theirs.host.algorithm.predict(plain, [None], x, owner).told
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        judged += int((found.argmax(1) == y).sum())
    assert judged == int(theirs.fleet.score(plain, population.clients).correct.sum())


def state(**changes) -> State:
    model = Weights({"w": torch.zeros(1)})
    none = torch.zeros(3, dtype=torch.float64)
    values = {
        "weights": (model,) * 3, "server": (None,) * 3, "chosen": none, "last": none, "active": none == 0,
        "best": (model,) * 3,
        "least": torch.full((3,), 1e9, dtype=torch.float64), "stale": none, "losses": torch.zeros(3, 2).double(),
    }  # fmt: skip
    return State(**{**values, **changes})


def at(value: float) -> Weights:
    return Weights({"w": torch.tensor([value])})


def test_a_model_that_gains_nothing_is_frozen_at_its_best():
    """Model 0 gains (0.4 after 0.5), model 1 does not, model 2 had no members. Patience is two checks."""
    before = state(weights=(at(1), at(2), at(3)))
    after = state(
        weights=(at(10), at(20), at(30)), best=(at(-1), at(-2), at(-3)),
        least=torch.tensor([0.5, 0.5, 0.5], dtype=torch.float64), stale=torch.tensor([1.0, 1.0, 1.0]).double(),
        losses=torch.tensor([[4.0, 10.0], [6.0, 10.0], [0.0, 0.0]]).double(),
    )  # fmt: skip
    found = freeze_stale(before, after, patience=2)
    assert found.active.tolist() == [True, False, True]
    assert [float(w.params["w"]) for w in found.weights] == [10, -2, 30]
    assert [float(w.params["w"]) for w in found.best] == [1, -2, -3]
    assert found.least.tolist() == [0.4, 0.5, 0.5]
    assert found.stale.tolist() == [0, 2, 1]
    assert not found.losses.any()


def test_frozen_models_are_not_sent_and_do_not_move():
    options = {
        "clusters": 3,
        "exploration": {"epsilon": 1.0},
        "freeze": {"patience": 1, "check_every": 1},
        "cohort": "everyone",
    }
    local = {"lr": 2.0, "batch_size": 4, "epochs": 3}
    run = played(toy("aem", {**options, "local": local}, shift={"who": {"kind": "always"}}, rounds=12))
    active = [int(step.facts["active"]) for step in run.steps]
    assert active == sorted(active, reverse=True)
    assert active[0] == 3
    assert active[-1] < 3
    gone = next(step.state for step in run.steps if not step.state.active.all())
    for k in range(3):
        if not gone.active[k]:
            assert torch.equal(*(s.weights[k].params["head.bias"] for s in (gone, run.state)))


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


def test_early_stopping_costs_fewer_bytes():
    options = {
        "clusters": 3,
        "exploration": {"epsilon": 1.0},
        "cohort": "everyone",
        "local": {"lr": 2.0, "batch_size": 4, "epochs": 3},
    }
    stops = {**options, "freeze": {"patience": 1, "check_every": 1}}
    sent = []
    for each in (options, stops):
        run = played(toy("aem", {**each}, shift={"who": {"kind": "always"}}, rounds=12))
        sent.append(run.fleet.queries[-1].cost.down if run.fleet.queries else 0)
    assert sent[1] < sent[0]


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


def test_every_client_is_predicted_in_its_own_way():
    """Rows of clients that kept something and of one that did not, in any order, are as if predicted alone."""
    run = played(toy("aem", {"mixture": MIX}), rounds=2)
    algorithm, population = run.host.algorithm, run.host.population
    payload, _ = algorithm.serve(run.state, population.clients)
    kept = [
        algorithm.adapt(payload, None, population.shard(c, Moment(2, 6, 2.0)), Moment(2, 6, 2.0), Rng(c)).memory
        for c in (0, 5)
    ]
    memories = [kept[0], None, kept[1]]
    x, owner = torch.randn(7, 4), torch.tensor([2, 0, 1, 0, 2, 1, 0])
    whole = algorithm.predict(payload, memories, x, owner)
    one = torch.tensor([0])
    alone = [algorithm.predict(payload, [memories[o]], x[i : i + 1], one) for i, o in enumerate(owner.tolist())]
    torch.testing.assert_close(whole.told, torch.cat([each.told for each in alone]))
    assert whole.choice.tolist() == [int(each.choice[0]) for each in alone]
    assert Counter(owner.tolist()) == {0: 3, 1: 2, 2: 2}
    assert math.isclose(float(whole.told.exp().sum(1)[0]), 1.0, rel_tol=1e-9)


def test_experts_are_called_by_their_models_though_some_were_not_sent():
    """Of four models 1 and 3 were sent: the gate's experts 0, 1, 2 are the own one, model 1 and model 3."""
    numbers, logp = torch.tensor([1, 3]), torch.zeros(2, 5)
    gate = torch.tensor([[0.7, 0.1, 0.2], [0.1, 0.3, 0.6]], dtype=torch.float64)
    made = renumber(Prediction(logp, gate.argmax(1), gate), numbers, 4, own=True)
    assert made.choice.tolist() == [0, 4]
    assert made.weights.tolist() == [[0.7, 0, 0.1, 0, 0.2], [0.1, 0, 0.3, 0, 0.6]]
    made = renumber(Prediction(logp, torch.tensor([1, 1])), numbers, 4, own=False)
    assert (made.choice.tolist(), made.weights) == ([3, 3], None)


def test_a_client_without_a_gate_leaves_its_rows_to_the_usual_model():
    run = played(
        toy("aem", {"clusters": 3, "mixture": MIX}),
        rounds=1,
    )
    payload = Served(run.state.weights[1:], torch.tensor([1, 2]), torch.tensor(1))
    made = run.host.algorithm.predict(payload, [None], torch.randn(2, 4), torch.tensor([0, 0]))
    assert made.choice.tolist() == [3, 3]
    assert made.weights.tolist() == [[0, 0, 0, 1]] * 2


def test_a_way_that_is_none_and_a_network_that_does_not_fit_are_refused_before_anything_runs():
    with pytest.raises(FedtideError, match=r"way: found 'domain-mixture', allowed: choice, fine-tuned"):
        fedtide.transforms.personalized(
            aem(Task(lambda: nn.Linear(4, 3), example=torch.zeros(1, 4))), fedtide.data.shift.DomainMixture()
        )
    for way in ("alone", "ensemble", "mixture"):
        with pytest.raises(FedtideError, match="lenet5"):
            preflight(toy("aem", {"transforms": [{"kind": way, "model": "lenet5"}]}))
        with pytest.raises(FedtideError, match="does not fit rows"):
            preflight(toy("aem", {"transforms": [{"kind": way, "model": "python:unit.algorithms.test_aem:narrow"}]}))


def test_a_solver_that_does_not_suit_its_network_is_refused_before_anything_runs():
    way = {"kind": "alone", "model": "python:helpers.toys:normed", "solver": {"batch_size": 1}}
    with pytest.raises(FedtideError, match=r"\.solver\.batch_size: found 1"):
        preflight(toy("aem", {"transforms": [way]}))
    with pytest.raises(FedtideError, match=r"'toy'\.mixture: model\.kind: 'lenet5' needs pictures"):
        preflight(toy("aem", {"mixture": {"gate": "lenet5"}}))


def narrow(shape, classes) -> nn.Module:
    """A network for other rows."""
    return nn.Linear(shape[0] + 1, classes)


def test_no_client_is_trained_to_tell_a_loss():
    """It tells that of the model that it would choose, whatever it makes for itself afterwards."""
    runs = [played(toy("aem", {"cohort": "power-of-choice", **own})) for own in ({"mixture": MIX}, CHOICE)]
    assert same(*(run.state for run in runs))


@pytest.mark.parametrize("personal", ["choice", "ensemble", "alone"])
def test_only_a_mixture_weighs_an_expert_of_the_clients_own(personal):
    solver = {} if personal == "choice" else {"solver": FEW}
    run = played(toy("aem", {"transforms": [{"kind": personal, **solver}]}), rounds=1)
    clients = run.host.population.clients
    payload, _ = run.host.algorithm.serve(run.state, clients)
    assert run.host.algorithm.traits.own_expert is False
    assert run.fleet.score(payload, clients).weights is None


@pytest.mark.parametrize("tune", [True, False])
def test_weights_of_a_mixture_sum_to_the_rows_of_each_client(tune):
    options = {"clusters": 3, "mixture": MIX | {"tune": tune}}
    run = played(toy("aem", {**options}), rounds=2)
    clients = torch.cat([run.host.population.clients, run.host.population.held_out_clients])
    payload, _ = run.host.algorithm.serve(run.state, clients)
    scores = run.fleet.score(payload, clients)
    assert run.host.algorithm.traits.own_expert
    assert scores.weights.shape == (len(clients), 4)
    torch.testing.assert_close(scores.weights.sum(1), scores.rows)
    # Held-out clients have no labeled rows, and so neither expert nor gate.
    assert scores.weights[len(run.host.population.clients) :, 0].tolist() == [0.0, 0.0]
    assert bool((scores.weights[: len(run.host.population.clients), 0] > 0).all())


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


def test_the_anchor_is_fedavgs_model_bit_for_bit_and_nobody_chooses_it_in_training():
    local = {"lr": 0.1, "batch_size": 4, "epochs": 2}
    ours = played(toy("aem", {"local": local, "clusters": 3, **ANCHORED}), rounds=4)
    plain = played(toy("aem", {"local": local, "clusters": 3}), rounds=4)
    theirs = played(toy("fedavg", {"local": local}), rounds=4)
    for name, value in theirs.state.weights.params.items():
        assert torch.equal(ours.state.own.weights.params[name], value)
    assert all(
        torch.equal(*(s.weights[k].params["head.bias"] for s in (ours.state.inner, plain.state))) for k in range(3)
    )
    payload, _ = ours.host.algorithm.serve(ours.state, ours.host.population.clients)
    assert payload.anchor is ours.state.own.weights
    assert payload.method.numbers.max() < 3


def test_without_exploration_it_is_ifca_with_its_anchor_and_the_weight_of_that():
    """Clients of both weigh the anchor beside the model that they train."""
    options = {"local": {"lr": 0.1, "batch_size": 4, "epochs": 2}, "clusters": 3}
    ours = played(toy("aem", {**options, **ANCHORED, "exploration": {"epsilon": 0.0}}), rounds=4)
    theirs = played(toy("ifca", {**options, "weighting": "samples", "transforms": ["anchored"]}), rounds=4)
    assert same(ours.state.inner.weights, theirs.state.inner.weights)
    assert same(ours.state.own.weights, theirs.state.own.weights)
    assert ours.state.own.share == theirs.state.own.share
    assert torch.equal(ours.state.own.likelihoods, theirs.state.own.likelihoods)
    assert ours.state.own.likelihoods.any()
    scores = [run.steps[-1].facts["anchor"] for run in (ours, theirs)]
    assert scores[0] == scores[1]


def test_a_choice_with_an_anchor_needs_validation_samples_to_weigh_it():
    with pytest.raises(FedtideError, match=r"'anchored' is not allowed without validation samples"):
        preflight(toy("aem", ANCHORED, data={"split": {"val": 0.0}}))


def test_a_client_that_explores_does_not_weigh_the_anchor():
    ours = played(toy("aem", {"clusters": 3, "exploration": {"epsilon": 1.0}, **ANCHORED}), rounds=2)
    assert ours.state.own.share == 0.5
    assert not ours.state.own.likelihoods.any()


def test_beside_a_choice_the_anchor_is_mixed_in_and_for_other_ways_it_is_one_of_the_models():
    others = {"kind": "personalized", "way": "choice", "others": [{"kind": "fine-tuned", "solver": FEW}]}
    ways = {"transforms": [others, "anchored"]}
    experiment = toy("aem", {"clusters": 2, **ways})
    run = played(experiment, rounds=1)
    algorithm, x, owner = run.host.algorithm, torch.randn(4, 4), torch.zeros(4, dtype=torch.int64)
    payload, _ = algorithm.serve(run.state, run.host.population.clients)
    payload = replace(payload, share=0.25)
    task = task_in(experiment, experiment.method[0], run.host.population)
    anchor, second = (
        task.predict_rows(each, x, double=True) for each in (run.state.own.weights, run.state.inner.weights[1])
    )
    chosen = algorithm.predict(payload, [{"model": torch.tensor(1)}], x, owner)
    torch.testing.assert_close(chosen.told.exp(), 0.25 * anchor.exp() + 0.75 * second.exp())
    other = algorithm.others["fine-tuned"].predict(payload, [None], x, owner)
    torch.testing.assert_close(other.told, anchor)
    assert other.choice.tolist() == [2] * 4


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
            assert [*left.client_rows("train_clients")]
            values = [[row["accuracy"] for row in each.client_rows("train_clients")] for each in (left, right)]
            assert values[0] == values[1]
    summary = summarize(ours)
    assert [method.name for method in summary.methods] == [method.name for method in ours.methods]
    assert "own_weight" in summary.method("AEM, stacking").measures
    with pytest.raises(FedtideError, match=r"claim .*: method: found .AEM, alone"):
        from_dict({**shared, "method": [listed], "claim": [{**claim, "method": "AEM, alone"}]})
