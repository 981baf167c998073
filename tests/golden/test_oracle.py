"""The oracle by hand: FedAvg inside each true group, and a model for each group that comes later."""

import pytest
import torch

from fedtide.algorithms.oracle import State, regroup
from fedtide.core.base import Weights
from fedtide.core.errors import FedtideError
from fedtide.evaluate.judge import Judge, views
from fedtide.fleets.engines import LocalEngine
from fedtide.fleets.simulated import SimulatedFleet
from fedtide.learn.server import SGD
from helpers.toys import played, toy

HELD = {
    "drift": {"what": {"kind": "cluster-drift", "groups": 2, "labels": 1, "every": 2, "migrate_fraction": 0.3,
                       "events": [3], "samples": 8, "test_samples": 4}},
    "changes": {"what": {"kind": "change-points", "when": {"kind": "drawn", "every": 2, "fraction": 0.5}}},
    "concepts": {"how": {"kind": "label-swaps", "every": 2, "concepts": 3}},
    "periodic": {"who": {"kind": "periodic", "period": 4}},
}  # fmt: skip


def drifting(kind: str, **options):
    data = {"source": {"kind": "gaussians", "samples": 320, "dims": 4, "classes": 3, "domains": 2}}
    if kind != "periodic":
        data["groups"] = {"by": "none"}
    return toy("oracle", {"cohort": "everyone", **options}, data=data, shift={"who": "always", **HELD[kind]})


def model(value: float) -> Weights:
    return Weights({"w": torch.full((2,), value)})


def test_a_new_group_begins_with_the_mean_of_what_its_clients_had():
    """Clients 0..3 had models 0, 1, 1, 1 and are dealt to groups 2, 2, 2, 3: (1 + 3 + 3)/3 and 3."""
    state = State((model(1.0), model(3.0)), ((), ()), torch.tensor([0, 1, 1, 1]))
    made = regroup(state, torch.tensor([2, 2, 2, 3]), SGD(), 4)
    assert [float(weights.params["w"][0]) for weights in made.weights] == pytest.approx([1.0, 3.0, 7 / 3, 3.0])
    assert made.group.tolist() == [2, 2, 2, 3]
    assert len(made.server) == 4


def test_unseen_clients_have_no_part_in_a_new_group():
    """Client 2 of model 3 is unseen: the new group begins with that of client 0; of 2 alone, with the first."""
    state = State((model(1.0), model(3.0)), ((), ()), torch.tensor([0, 1, 1]))
    assert float(regroup(state, torch.tensor([2, 1, 2]), SGD(), 2).weights[2].params["w"][0]) == 1.0
    made = regroup(state, torch.tensor([0, 1, 2]), SGD(), 2)
    assert float(made.weights[2].params["w"][0]) == 1.0
    assert made.group.tolist() == [0, 1, 2]


def test_the_optimizer_of_a_new_group_begins_anew():
    server = SGD(momentum=0.5)
    state = State((model(1.0),), ({"w": torch.ones(2)},), torch.tensor([0, 0]))
    made = regroup(state, torch.tensor([0, 1]), server, 2)
    assert [memo["w"].tolist() for memo in made.server] == [[1.0, 1.0], [0.0, 0.0]]


@pytest.mark.parametrize("kind", HELD)
def test_clients_are_served_and_trained_by_their_true_group_at_every_moment(kind):
    experiment = drifting(kind)
    run = played(experiment)
    population = run.host.population
    met = set()
    for step in run.steps:
        truth = population.group_at(step.moment)
        met.add(tuple(truth.tolist()))
        assert torch.equal(step.state.group, truth)
        clients = torch.arange(len(truth))
        served, slot = run.host.algorithm.serve(step.state, clients)
        assert torch.equal(slot, truth)
        assert all(served[k].models[0] is step.state.weights[k] for k in truth.tolist())
        if kind != "periodic":  # all take part
            sizes = torch.bincount(truth[: population.registered], minlength=len(step.state.weights))
            assert torch.equal(step.facts["members"], sizes)
    assert len(met) > 1 or kind == "periodic"
    (asked,) = run.fleet.queries
    assert torch.equal(asked.ask.slot, population.group_at(run.fleet.moment)[asked.ask.clients])
    if kind == "drift":
        assert len(run.state.weights) == 4  # two groups, and two that the mass event brought
    judge = Judge(run.host.algorithm, run.fleet, views(population))
    for view, scores, slot in judge.scores(run.state):
        assert torch.equal(slot, population.group_at(run.fleet.moment)[view.clients])
        assert torch.equal(scores.choice.argmax(1), slot)


def test_the_truth_is_for_those_who_say_that_they_look_at_it():
    host = played(toy("fedavg"), rounds=1).host
    fleet = SimulatedFleet(host.population, LocalEngine(host), reveals=host.algorithm.traits.reveals)
    with pytest.raises(FedtideError, match="which only a simulation knows; allowed: sums only"):
        _ = fleet.true_groups
    assert played(toy("oracle"), rounds=1).host.algorithm.traits.reveals == ("true_groups",)
