"""FedDyn and FedNova by pencil and paper on two quadratics (see quadratics.py), and against naive implementations.

Gradients are w for client 0 (one row) and w - 4 for client 1 (three rows).

FedDyn, alpha = 1, two full steps of 1/2, from w = 1. Client 0: gradient 1, to 1/2; there 1/2 + (1/2 - 1) = 0, stays.
Client 1: gradient -3, to 5/2; there -3/2 + 3/2 = 0, stays. Updates -1/2 and 3/2, g = (1/2, -3/2), mean h =
-1/2. w = 1 + 1/2 + 1/2 = 2, the joint optimum with equal weights.
Then client 0: 2 - 1/2 = 3/2, to 5/4; 5/4 - 1/2 - 3/4 = 0. Client 1: -2 + 3/2 = -1/2, to 9/4; -7/4 + 3/2 + 1/4 = 0.
Updates -3/4 and 1/4, g = (5/4, -7/4), h = -1/2 + 1/4 = -1/4; w = 2 - 1/4 + 1/4 = 2: it stays at the optimum.

FedNova, batches of one row, rate 1/2, from w = 1: client 0 takes one step, client 1 three. Client 0: 1/2, update -1/2,
a = 1. Client 1: 5/2, 13/4, 29/8, update 21/8, a = 3. With p = (1/4, 3/4): sum p a = 5/2, sum p update/a =
-1/8 + 21/32 = 17/32, w = 1 + 5/2 * 17/32 = 149/64. Equally: 2 * (-1/4 + 7/16) = 3/8.
"""

import copy

import pytest
import torch
import torch.nn.functional as F

from fedtide.algorithms.feddyn import State, feddyn
from fedtide.algorithms.fednova import fednova, length_of
from fedtide.cohorts import Everyone, OneModel
from fedtide.core.base import Moment
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.learn.local import LocalTrainer
from fedtide.learn.schedules import Exponential
from helpers import quadratics
from helpers.handmade import By
from helpers.quadratics import TASK, after, at, fleet_of, value
from helpers.toys import network_of, played, toy

ROUNDS = 8
DATA = {"partition": {"kind": "dirichlet-class", "clients": 8, "alpha": 1.0, "min_samples": 5}}
TWO = LocalTrainer(lr=0.5, batch_size=0, epochs=2)
ONE_ROW = LocalTrainer(lr=0.5, batch_size=1)
EVERYONE = Everyone()


def rounds_of(algorithm, rounds):
    """The last state, and the gradient that each client keeps."""
    fleet = fleet_of(algorithm)
    *_, (state, _) = quadratics.played(algorithm, fleet, State(at(1.0), at(0.0).params, 2), rounds)
    rows = [fleet.engine.memory.read(client, (99, 0)) for client in (0, 1)]
    return value(state), float(state.h["weight"]), [row and float(row["gradient"]["weight"]) for row in rows]


def test_feddyn():
    algorithm = feddyn(TASK, TWO, alpha=1.0, cohort=EVERYONE)
    assert rounds_of(algorithm, 1) == (2.0, -0.5, [0.5, -1.5])
    assert rounds_of(algorithm, 2) == (2.0, -0.25, [1.25, -1.75])


def test_feddyn_with_a_part_of_the_clients_moves_h_by_their_share_of_all():
    """Client 0 alone: update -1/2, h = 0 + (1/2)(1/2) = 1/4, w = 1 - 1/2 - 1/4 = 1/4."""
    one = By(lambda rng, fleet: fleet.clients[:1])
    assert rounds_of(feddyn(TASK, TWO, alpha=1.0, cohort=one), 1) == (0.25, 0.25, [0.5, None])


def test_clients_that_join_feddyn_bring_the_gradient_zero():
    """h = 1 is the mean of two clients; of four it is 1/2, before anybody trains."""
    nobody = feddyn(TASK, TWO, cohort=By(lambda rng, fleet: fleet.clients[:0]))
    state = after(nobody, State(at(1.0), at(1.0).params, 2), targets=[[0]] * 4)
    assert (float(state.h["weight"]), state.clients) == (0.5, 4)


def test_the_first_step_of_feddyn_is_twice_that_of_fedavg_for_any_alpha():
    """One local step: the mean update is 1/2 (-1/2 + 3/2) = 1/2, and -h / alpha is the same again."""
    one = LocalTrainer(lr=0.5, batch_size=0)
    for alpha in (1e-9, 1.0, 100.0):
        state = after(feddyn(TASK, one, alpha=alpha, cohort=EVERYONE), State(at(1.0), at(0.0).params, 2))
        assert value(state) == pytest.approx(2.0, abs=1e-12)


def test_fednova():
    assert value(after(fednova(TASK, ONE_ROW, cohort=EVERYONE), OneModel(at(1.0), None))) == 149 / 64
    uniform = fednova(TASK, ONE_ROW, cohort=EVERYONE, weighting="uniform")
    assert value(after(uniform, OneModel(at(1.0), None))) == 1 + 3 / 8


def test_lengths_are_by_the_rate_of_the_round():
    """Three steps of 1/4 in round 1, pulled by 1: 1 + (1 - 1/4) + (1 - 7/16) = 37/16."""
    local = LocalTrainer(lr=0.5, batch_size=1, proximal=1.0, lr_schedule=Exponential(0.5))
    algorithm = fednova(TASK, local, cohort=EVERYONE)
    *_, (_, facts) = quadratics.played(algorithm, fleet_of(algorithm, [[4, 4, 4]]), OneModel(at(1.0), None), 2)
    assert facts["length"] == 2.3125


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_lengths_are_those_of_the_paper(steps):
    rho, mu, eta = 0.8, 3.0, 0.1
    momentum = (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
    assert length_of(LocalTrainer(momentum=rho), eta, steps) == pytest.approx(momentum)
    pull = (1 - (1 - eta * mu) ** steps) / (eta * mu)
    assert length_of(LocalTrainer(proximal=mu), eta, steps) == pytest.approx(pull)
    assert length_of(LocalTrainer(), eta, steps) == steps


def test_fednova_counts_steps_of_sgd_alone():
    with pytest.raises(FedtideError, match=r"local.optimizer: found 'adam', allowed: 'sgd', because updates"):
        fednova(TASK, LocalTrainer(optimizer="adam"))


# -- naive implementations ---------------------------------------------------------------------------------------------


def trained(model, shard, key, epochs, rho=0.0, extra=lambda own: 0.0):
    """A copy after SGD with momentum on the cross-entropy and something else; and the number of steps."""
    own, shuffle, steps = copy.deepcopy(model), key.at("shuffle").torch(), 0
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1, momentum=rho)
    for _ in range(epochs):
        for batch in torch.randperm(len(shard.y), generator=shuffle).split(4):
            optimizer.zero_grad()
            (F.cross_entropy(own(shard.x.double()[batch]), shard.y[batch]) + extra(own)).backward()
            optimizer.step()
            steps += 1
    return own, steps


def participants(population, t):
    moment = Moment(t, ROUNDS, float(t))
    for client in population.arrivals(4, moment).tolist():
        yield client, population.shard(client, moment), Rng(0).at(t, client, "train")


def naive_feddyn(population, model, alpha):
    """The objective as it is printed, and the mean of all g_i in place of a running h."""
    kept = {i: [torch.zeros_like(p) for p in model.parameters()] for i in range(8)}
    for t in range(ROUNDS):
        start, ends = [p.detach().clone() for p in model.parameters()], []
        for client, shard, key in participants(population, t):
            g = kept[client]

            def extra(own, g=g, start=start):
                pairs = zip(own.parameters(), g, start, strict=True)
                return sum(-(gi * v).sum() + alpha / 2 * (v - w).square().sum() for v, gi, w in pairs)

            own, _ = trained(model, shard, key, 2, extra=extra)
            ends.append([p.detach() for p in own.parameters()])
            kept[client] = [gi - alpha * (v - w) for gi, v, w in zip(g, ends[-1], start, strict=True)]
        for k, p in enumerate(model.parameters()):
            mean_g = sum(g[k] for g in kept.values()) / 8
            p.data = sum(end[k] for end in ends) / len(ends) - mean_g / alpha
    return model.state_dict()


def naive_fednova(population, model, rho):
    for t in range(ROUNDS):
        start, parts = model.state_dict(), []
        for _, shard, key in participants(population, t):
            own, tau = trained(model, shard, key, 1, rho)
            a = sum((1 - rho ** (tau - j)) / (1 - rho) for j in range(tau))  # each gradient's weight in the update
            parts.append((len(shard), a, own.state_dict()))
        n = sum(rows for rows, *_ in parts)
        effective = sum(rows / n * a for rows, a, _ in parts)
        model.load_state_dict({
            name: w + effective * sum(rows / n * (own[name] - w) / a for rows, a, own in parts)
            for name, w in start.items()
        })  # fmt: skip
    return model.state_dict()


@pytest.mark.parametrize(
    ("algorithm", "options", "local", "naive"),
    [
        ("feddyn", {"alpha": 0.1}, {"epochs": 2}, lambda *given: naive_feddyn(*given, 0.1)),
        ("feddyn", {}, {"epochs": 2}, lambda *given: naive_feddyn(*given, 0.01)),
        ("fednova", {}, {}, lambda *given: naive_fednova(*given, 0.0)),
        ("fednova", {}, {"momentum": 0.7}, lambda *given: naive_fednova(*given, 0.7)),
    ],
    ids=["feddyn", "feddyn as it is", "fednova", "fednova momentum"],
)
def test_a_naive_implementation_agrees_to_1e_9(algorithm, options, local, naive):
    options = {**options, "local": {"lr": 0.1, "batch_size": 4, **local}}
    run = played(toy(algorithm, options, rounds=ROUNDS, precision="fp64", data=DATA))
    expected = naive(run.host.population, network_of(run.steps[0].received.weights))
    for name, param in run.state.weights.params.items():
        torch.testing.assert_close(param, expected[name], rtol=1e-9, atol=1e-9)
