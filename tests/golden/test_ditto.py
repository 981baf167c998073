"""Ditto by pencil and paper, a naive implementation, and what it becomes without its pull.

The two quadratics of quadratics.py: gradients w and w - 4, all rows at once, two steps of 1/2; the model starts at 1.

Round 0. The global part is FedAvg: client 0 goes 1 -> 1/2 -> 1/4, client 1 goes 1 -> 5/2 -> 13/4. By rows 1 and 3 the
mean update is (-3/4 + 3 * 9/4) / 4 = 3/2, so w = 5/2. The personal models start at w = 1, with lambda 1/2. Client 0:
1 -> 1 - 1/2 (1 + 0) = 1/2 -> 1/2 - 1/2 (1/2 + 1/2 (1/2 - 1)) = 3/8. Client 1: 1 -> 1 - 1/2 (-3) = 5/2 ->
5/2 - 1/2 (-3/2 + 1/2 (3/2)) = 23/8.

Round 1, pulled towards w = 5/2. Client 0: 3/8 - 1/2 (3/8 + 1/2 (3/8 - 20/8)) = 3/8 - 1/2 (6/16 - 17/16) = 23/32, then
23/32 - 1/2 (23/32 + 1/2 (23/32 - 80/32)) = 103/128. Client 1: 23/8 - 1/2 (-9/8 + 1/2 * 3/8) = 107/32, then 107/32 -
1/2 (-21/32 + 1/2 * 27/32) = 443/128.
"""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fedtide.algorithms.ditto import ditto
from fedtide.algorithms.fedavg import fedavg
from fedtide.cohorts import Everyone, OneModel
from fedtide.core.base import Moment, Weights
from fedtide.core.rng import Rng
from fedtide.core.trees import same
from fedtide.learn.local import LocalTrainer
from helpers import quadratics
from helpers.quadratics import TASK, at, fleet_of, value
from helpers.toys import network_of, played, toy

TWO = LocalTrainer(lr=0.5, batch_size=0, epochs=2)


def kept(fleet, client: int) -> Weights:
    return fleet.engine.memory.read(client, (99, 0))["own"]


def test_clients_have_equal_weights_as_in_the_paper():
    """Updates of -3/4 and 9/4: 1 + 3/4."""
    assert value(quadratics.after(ditto(TASK, TWO, cohort=Everyone()), OneModel(at(1.0), None))) == 1.75


def test_two_rounds_by_hand():
    algorithm = ditto(TASK, TWO, lam=0.5, cohort=Everyone(), weighting="samples")
    fleet = fleet_of(algorithm)
    rounds = quadratics.played(algorithm, fleet, OneModel(at(1.0), None), 2)
    state, _ = next(rounds)
    assert value(state) == 2.5
    assert [float(kept(fleet, k).params["weight"]) for k in (0, 1)] == [3 / 8, 23 / 8]
    next(rounds)
    assert [float(kept(fleet, k).params["weight"]) for k in (0, 1)] == [103 / 128, 443 / 128]


def test_clients_judge_by_their_own_model_and_newcomers_by_the_global_one():
    predict = ditto(TASK).predict
    x, owner = torch.ones(4, 1, dtype=torch.float64), torch.tensor([0, 1, 2, 1])
    told = predict(at(1.0), [{"own": at(2.0)}, None, {"own": at(3.0)}], x, owner).told
    served, *own = (TASK.predict_rows(at(w), x[:1])[0] for w in (1.0, 2.0, 3.0))
    assert torch.equal(told, torch.stack([own[0], served, own[1], served]))
    assert torch.equal(predict(at(1.0), [None], x[:0], owner[:0]).told, TASK.predict_rows(at(1.0), x[:0]))


def test_a_step_of_its_own_trainer():
    """One step of 1/4 in place of two of 1/2: 1 - 1/4 = 3/4 and 1 + 3/4; FedAvg's part stays 5/2."""
    one = LocalTrainer(lr=0.25, batch_size=0)
    algorithm = ditto(TASK, TWO, one, cohort=Everyone(), weighting="samples")
    fleet = fleet_of(algorithm)
    state, _ = next(quadratics.played(algorithm, fleet, OneModel(at(1.0), None), 1))
    assert value(state) == 2.5
    assert [float(kept(fleet, k).params["weight"]) for k in (0, 1)] == [0.75, 1.75]


def test_the_personal_part_costs_its_steps():
    rows = torch.tensor([30])
    cost = ditto(TASK, TWO, LocalTrainer(epochs=5)).traits.compute_cost
    assert cost("train", rows).tolist() == [7 * 30]


LOCAL = {"lr": 0.1, "batch_size": 4, "epochs": 2}
DATA = {"partition": {"kind": "dirichlet-class", "clients": 8, "alpha": 1.0, "min_samples": 5}}
ROUNDS = 5


def naive(population, model, lam):
    """Yield the global network and each client's own after each round: deep copies and loops, in float64."""
    own = {}
    for r in range(ROUNDS):
        moment, received = Moment(r, ROUNDS, float(r)), copy.deepcopy(model)
        mean, total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}, 0
        for client in population.arrivals(4, moment).tolist():
            shard, key = population.shard(client, moment), Rng(0).at(r, client, "train")
            update = trained(copy.deepcopy(received), received, shard, key, 0.0)
            own[client] = trained(copy.deepcopy(own.get(client, received)), received, shard, key.at("own"), lam)
            for name, p in update.named_parameters():
                mean[name] += len(shard) * (p.detach() - received.get_parameter(name).detach())
            total += len(shard)
        for name, p in model.named_parameters():
            p.data += mean[name] / total
        yield copy.deepcopy(model), own


def trained(net, towards, shard, key, lam):
    shuffle = key.at("shuffle").torch()
    for _ in range(2):
        for batch in torch.randperm(len(shard.y), generator=shuffle).split(4):
            net.zero_grad()
            loss = F.cross_entropy(net(shard.x.double()[batch]), shard.y[batch])
            pairs = zip(net.parameters(), towards.parameters(), strict=True)
            (loss + lam / 2 * sum((p - q.detach()).square().sum() for p, q in pairs)).backward()
            with torch.no_grad():
                for p in net.parameters():
                    p -= 0.1 * p.grad
    return net


@pytest.mark.parametrize("lam", [0.0, 0.7])
def test_a_naive_implementation_agrees_to_1e_10(lam):
    run = played(
        toy("ditto", {"local": LOCAL, "lam": lam, "weighting": "samples"}, rounds=ROUNDS, precision="fp64", data=DATA)
    )
    model = network_of(run.steps[0].received.weights)
    for step, (expected, last) in zip(run.steps, naive(run.host.population, model, lam), strict=True):
        for name, p in expected.named_parameters():
            torch.testing.assert_close(step.state.weights.params[name], p.detach(), rtol=1e-10, atol=1e-10)
        own = last
    assert len(own) == 8
    for client, net in own.items():
        for name, p in net.named_parameters():
            found = kept(run.fleet, client).params[name]
            torch.testing.assert_close(found, p.detach(), rtol=1e-10, atol=1e-10)


def test_without_a_pull_the_personal_part_is_local_training_alone():
    """To the bit: `LocalTrainer` from the initial weights, called once a round, with everyone in every round."""
    options = {"local": LOCAL, "lam": 0.0, "cohort": "everyone"}
    run = played(toy("ditto", options, shift={"who": "always"}, data=DATA), rounds=4)
    task, population = run.host.algorithm.task, run.host.population
    for client in (0, 5):
        weights = run.steps[0].received.weights
        for r in range(4):
            moment = Moment(r, 6, float(r))
            key = Rng(0).at(r, client, "train", "own")
            fitted = LocalTrainer(**LOCAL)(task, task.loss, weights, population.shard(client, moment), moment, key)
            weights = copy.deepcopy(fitted.weights)
        assert same(kept(run.fleet, client), weights)


def test_a_client_whose_own_model_breaks_keeps_the_last_one_and_is_counted():
    algorithm = ditto(TASK, TWO, LocalTrainer(lr=1e38, batch_size=0, epochs=20), cohort=Everyone(), weighting="samples")
    plain = fedavg(TASK, TWO, cohort=Everyone())
    fleet = fleet_of(algorithm)
    state, _ = next(quadratics.played(algorithm, fleet, OneModel(at(1.0), None), 1))
    expected, _ = next(quadratics.played(plain, fleet_of(plain), OneModel(at(1.0), None), 1))
    assert value(state) == value(expected)
    assert fleet.engine.memory.read(0, (99, 0)) is None


def test_the_pull_of_fedprox_is_on_the_sent_model_alone():
    """Where lambda is 0, the model of a client's own is that of the client alone, whatever `local.proximal` is."""
    models = []
    for local in (TWO, replace(TWO, proximal=2.0)):
        algorithm = ditto(TASK, local, lam=0.0, cohort=Everyone())
        fleet = fleet_of(algorithm)
        rounds = quadratics.played(algorithm, fleet, OneModel(at(1.0), None), 2)
        next(rounds), next(rounds)
        models.append([float(kept(fleet, k).params["weight"]) for k in (0, 1)])
    assert models[0] == models[1]
