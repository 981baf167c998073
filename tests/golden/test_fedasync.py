"""FedAsync: derived by hand on two quadratics, and against a naive event loop in float64."""

import copy
import math

import pytest
import torch
from torch import nn

from fedtide.algorithms.fedasync import Constant, Hinge, Polynomial, fedasync
from fedtide.cohorts import Everyone
from fedtide.core.base import Moment
from fedtide.core.loop import begin, play
from fedtide.core.rng import Rng
from fedtide.learn.local import LocalTrainer
from helpers.clocks import COMPUTE, clocked, one_unit
from helpers.quadratics import TASK, at, fleet_of, value
from helpers.toys import network_of, played, toy, trained_plainly

ROUNDS = 24
DATA = {"partition": {"kind": "dirichlet-class", "clients": 8, "alpha": 1.0, "min_samples": 5}}


def by_hand(monkeypatch, rounds: int = 4, **options) -> list[float]:
    """Client 0 needs 1 second and client 1 needs 2.5; both are at work all the time, and each answer makes a step."""
    algorithm = fedasync(TASK, LocalTrainer(lr=0.5, batch_size=0), cohort=Everyone(), **options)
    fleet = clocked([1.0, 2.5], one_unit)(fleet_of(algorithm))
    monkeypatch.setattr(type(TASK), "init", lambda task, rng: at(1.0))
    start = begin(algorithm, fleet, seed=0, rounds=rounds)
    return [value(step.state) for step in play(algorithm, fleet, start, seed=0, rounds=rounds)]


@pytest.mark.parametrize(
    ("staleness", "two", "one"),
    [(Constant(), 1, 1), (Polynomial(), 1 / math.sqrt(3), 1 / math.sqrt(2)), (Hinge(a=2.0, b=1.0), 1 / 3, 1)],
)
def test_by_hand(monkeypatch, staleness, two, one):
    """From w = 1 with one step of 0.5: client 0 makes w / 2 of w, client 1 makes 2.5 of 1. alpha = 0.5.

    Client 0 answers at 1 with 0.5: w = 0.75. It answers at 2 with 0.375: w = 0.5625. Client 1 answers at 2.5 with 2.5,
    two steps late. Client 0 answers at 3 with 0.5625 / 2, one step late.
    """
    third = 0.5625 + 0.5 * two * (2.5 - 0.5625)
    fourth = third + 0.5 * one * (0.28125 - third)
    found = by_hand(monkeypatch, alpha=0.5, staleness=staleness)
    assert found == pytest.approx([0.75, 0.5625, third, fourth], abs=1e-12)


def test_an_alpha_of_one_without_staleness_takes_the_model_that_arrives(monkeypatch):
    found = by_hand(monkeypatch, alpha=1.0, staleness=Constant())
    assert found == pytest.approx([0.5, 0.25, 2.5, 0.125], abs=1e-12)


def test_the_hinge_of_the_paper():
    """a = 10, b = 4: the fifth late step has a weight of 1/11."""
    assert [Hinge()(late) for late in (0, 4)] == [1, 1]
    assert Hinge()(5) == pytest.approx(1 / 11)


def naive(population, model: nn.Module, concurrency: int) -> nn.Module:
    """One answer after the other."""
    now, at_work = 0.0, {}
    for r in range(ROUNDS):
        moment = Moment(r, ROUNDS, now)
        fresh = [c for c in population.arrivals(concurrency, moment).tolist() if c not in at_work]
        order = Rng(0).at(r, "server").at("places").numpy().permutation(len(fresh))
        for client in [fresh[i] for i in order][: concurrency - len(at_work)]:
            rows = len(population.shard(client, moment).y)
            at_work[client] = (now + COMPUTE[client] * 2 * rows, r, copy.deepcopy(model))
        client = min(at_work, key=lambda client: at_work[client][0])
        now, began, sent = at_work.pop(client)
        trained = trained_plainly(sent, population.shard(client, moment), Rng(0).at(r, client, "train"))
        share = 0.6 * (1 + r - began) ** -0.5
        states = model.state_dict(), trained.state_dict()
        model.load_state_dict({name: (1 - share) * p + share * states[1][name] for name, p in states[0].items()})
    return model


def test_a_naive_event_loop_agrees_to_1e_9():
    options = {"local": {"lr": 0.1, "batch_size": 4, "epochs": 2, "proximal": 0.0}, "cohort": 5}
    experiment = toy("fedasync", options, rounds=ROUNDS, precision="fp64", data=DATA)
    run = played(experiment, fleet=clocked(COMPUTE, lambda question, rows: 2 * rows))
    expected = naive(run.host.population, network_of(run.steps[0].received.weights), 5)
    assert max(int(step.facts["stalest"]) for step in run.steps) > 3
    for name, found in run.state.weights.params.items():
        torch.testing.assert_close(found, expected.state_dict()[name], rtol=1e-9, atol=1e-9)
