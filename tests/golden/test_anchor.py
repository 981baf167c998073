"""The anchor of methods with several models: FedAvg's model, and its weight by hand from validation rows."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from fedtide.core.base import Shard, Sum, Weights
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.trees import same
from fedtide.laws.case import toy as as_it_is
from fedtide.learn.server import SGD
from fedtide.runs.preflight import preflight
from fedtide.transforms.anchored import DECAY, WEIGHTS, Anchor, likelihoods_of, mix
from helpers.toys import TOY, Played, played, toy

ANCHORED = {"transforms": ["anchored"]}
LOCAL = {"lr": 0.1, "batch_size": 4, "epochs": 2}
OPTIONS = {"features": "frozen", "gaussian_init": "random", "local": LOCAL, "cohort": "everyone"}


def test_the_weight_of_highest_likelihood_by_hand():
    """Labels with .9 and .1 of the mixture, .3 and .7 of the anchor: (.9 - .6 w)(.1 + .6 w) is largest at w = 2/3."""
    ours, theirs = (torch.tensor([[p, 1 - p], [q, 1 - q]]).double().log() for p, q in ((0.9, 0.1), (0.3, 0.7)))
    val = Shard(torch.zeros(2, 1), torch.tensor([0, 0]), torch.arange(2))
    told = likelihoods_of(ours, theirs, val)
    w = WEIGHTS
    torch.testing.assert_close(told.value, ((0.9 - 0.6 * w) * (0.1 + 0.6 * w)).log() / 2)
    assert told.weight == 2
    assert float(w[int(told.value.argmax())]) == pytest.approx(0.7)


def test_steps_that_do_not_count_say_nothing_and_a_client_of_which_none_counts_changes_no_weight():
    logp = torch.tensor([[[0.5, 0.5], [0.9, 0.1]]]).double().log()
    some, none = (
        likelihoods_of(logp, logp, Shard(torch.zeros(1, 2), torch.tensor([[0, 0]]), torch.arange(1), mask=mask))
        for mask in (torch.tensor([[True, False]]), torch.zeros(1, 2, dtype=torch.bool))
    )
    assert (some.weight, none.weight) == (1, 0)
    torch.testing.assert_close(some.value, torch.full((11,), 0.5).double().log())
    assert bool(none.value.isfinite().all())
    weights = Weights({"w": torch.zeros(1)})
    anchor = Anchor(weights, SGD().init(weights), 0.3)
    assert anchor.step(SGD(), Sum(weights, 1.0), Sum(none.value, 0.0)).share == 0.3


def test_earlier_rounds_count_less_with_each_round():
    """Of three weights: 0.9 (0.9 (-5, -1, -3) + (0, -2, -4)) + (-1, -4, 0) = (-5.05, -6.61, -6.03), and 0 leads."""
    weights = Weights({"w": torch.zeros(1)})
    anchor = Anchor(weights, SGD().init(weights))
    shares = []
    for told in ([-5.0, -1.0, -3.0], [0.0, -2.0, -4.0], [-1.0, -4.0, 0.0]):
        sums = torch.full((11,), -100.0).double()
        sums[[0, 4, 10]] = torch.tensor(told).double()
        anchor = anchor.step(SGD(), Sum(weights, 1.0), Sum(sums, 3.0))
        shares.append(anchor.share)
    assert shares == pytest.approx([0.4, 0.4, 0.0])
    assert anchor.likelihoods[[0, 4, 10]].tolist() == pytest.approx([-5.05, -6.61, -6.03])


def test_all_of_one_model_is_that_model_bit_for_bit():
    one, two = torch.randn(3, 4).log_softmax(1), torch.randn(3, 4).log_softmax(1)
    assert torch.equal(mix(one, two, 0.0), one)
    assert torch.equal(mix(one, two, 1.0), two)


@cache
def fedavg_of(**local) -> Played:
    return played(toy("fedavg", {"local": local, "cohort": "everyone"}), rounds=4)


BESIDE = {
    "fedtem": {"prior": {"kind": "linear", "period": 4}, "server": "sgd"},
    "fedtkm": {"prior": {"kind": "linear", "period": 4}, "server": "sgd", "max_update_norm": 0.1},
    "fedgmm": {"features": "network", "components": 2, "gaussians": 2, "gaussian_init": "random"},
    "ifca": {"clusters": 3},
    "min-loss": {"server": "sgd"},
    "feddrift": {"rounds_per_step": 2, "delta": 0.0, "local": {"lr": 2.0, "batch_size": 4}},  # so that one leaves
}


COMPONENTS = [("fedem", {"components": 2, "component_layer": layer}) for layer in ("*", "head")]


@pytest.mark.parametrize(("name", "more"), [("pfedem", OPTIONS), *COMPONENTS, *BESIDE.items()])
def test_the_anchor_is_fedavgs_model_and_leaves_the_others_alone(name, more):
    options = {"local": LOCAL, "cohort": "everyone", **more}
    ours, plain = (played(toy(name, options | own), rounds=4) for own in (ANCHORED, {}))
    theirs = fedavg_of(**options["local"])
    assert same(ours.state.own.weights, theirs.state.weights)
    assert same(ours.state.inner, plain.state)


INFERENCES = [("pfedem", {**OPTIONS, "inference": inference}) for inference in ("posterior", "uniform", "global")]


@pytest.mark.parametrize(("name", "more"), [*BESIDE.items(), ("fedem", {"components": 2}), *INFERENCES])
def test_its_weight_is_that_of_highest_likelihood_on_all_validation_rows(name, more):
    """With the weights sent, what is predicted and what the server adds up are the same.

    In FedEM each client's mixture is what it kept of its training, by the posteriors of its training rows; in IFCA its
    model is the one that it trained.
    """
    options = {"local": LOCAL, "cohort": "everyone", **ANCHORED, **more}
    run = played(toy(name, options, shift={"who": {"kind": "always"}}), rounds=4)
    algorithm, population, moment = run.host.algorithm, run.host.population, run.steps[3].moment
    served, slot = algorithm.serve(run.steps[2].state, population.clients)
    assert name != "feddrift" or len(run.steps[2].state.inner.model.unique()) > 1
    sums = DECAY * run.steps[2].state.own.likelihoods
    assert float(sums.abs().min()) > 0
    for client in population.clients.tolist():
        payload = served if slot is None else served[int(slot[client])]
        val = population.shard(client, moment, "val")
        owner, places = torch.zeros(len(val), dtype=torch.int64), torch.arange(len(val))
        memory = run.fleet.engine.memory.read(client, (9, 0))
        if memory is None and slot is None and algorithm.adapt is not None:  # IFCA's choice, here on training rows
            rows = population.shard(client, moment, "train")
            memory = algorithm.adapt(payload, None, rows, moment, Rng(0)).memory
        told = [algorithm.predict(replace(payload, share=share), [memory], val.x, owner) for share in (0.0, 1.0, 0.4)]
        p, q, mixed = (each.told.exp()[places, val.y] for each in told)
        torch.testing.assert_close(mixed, 0.6 * p + 0.4 * q, check_dtype=False)
        sums += torch.stack([((1 - w) * p + w * q).log().sum() for w in WEIGHTS])
    assert run.steps[3].state.own.share == pytest.approx(float(WEIGHTS[int(sums.argmax())]))


def test_what_it_predicts_is_the_mixture_with_its_weight_and_both_are_told_beside():
    run = played(toy("pfedem", {**OPTIONS, **ANCHORED}), rounds=2)
    state = replace(run.state, own=replace(run.state.own, share=0.3))
    clients = run.host.population.clients
    payload, _ = run.host.algorithm.serve(state, clients)
    x, owner = torch.randn(6, 4), torch.zeros(6, dtype=torch.int64)
    found = run.host.algorithm.predict(payload, [None], x, owner)
    apart = [run.host.algorithm.predict(replace(payload, share=share), [None], x, owner) for share in (0.0, 1.0)]
    torch.testing.assert_close(found.told.exp(), 0.7 * apart[0].told.exp() + 0.3 * apart[1].told.exp())
    assert found.weights.shape == (6, 3)
    torch.testing.assert_close(found.weights.sum(1), torch.ones(6).double())
    assert found.weights[:, 2].tolist() == pytest.approx([0.3] * 6)
    assert torch.equal(found.others["components"], apart[0].told.argmax(1))
    assert torch.equal(found.others["anchor"], apart[1].told.argmax(1))


MIXTURES = {"pfedem": {"features": "frozen", "gaussian_init": "random"}, "fedem": {}}


@pytest.mark.parametrize(("name", "options"), [*MIXTURES.items(), *BESIDE.items()])
def test_without_validation_rows_it_is_refused_before_anything_runs(name, options):
    split = {"split": {"val": 0.0, "test": 0.25}}
    said = r"'anchored' is not allowed without validation samples, because they choose its weight; [^\n]*$"
    with pytest.raises(FedtideError, match=said):
        preflight(as_it_is(name, {**options, **ANCHORED}, data={**TOY["data"], **split}))
    preflight(as_it_is(name, options, data={**TOY["data"], **split}))


def test_that_of_ifca_is_trained_as_its_own_models_are():
    """Paper's gradients: the anchor is FedSGD's model; with a pull that of FedProx."""
    gradient = {"variant": "gradient", "weighting": "uniform"}
    pairs = [({**gradient}, "fedsgd", {"weighting": "uniform"}), ({}, "fedavg", {})]
    for (own, name, other), proximal in zip(pairs, (0.0, 0.5), strict=True):
        every = {"local": {"lr": 0.1, "batch_size": 0, "proximal": proximal}, "cohort": "everyone"}
        ours = played(toy("ifca", {**every, "clusters": 3, **ANCHORED, **own}), rounds=3)
        theirs = played(toy(name, {**every, **other}), rounds=3)
        assert same(ours.state.own.weights, theirs.state.weights)
