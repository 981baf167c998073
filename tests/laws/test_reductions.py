"""Which algorithm becomes which, and how exactly: the reductions of the registry, and others."""

import json
import re
from functools import lru_cache

import pytest
import torch

from fedtide.algorithms import REGISTRY
from fedtide.core.base import Moment, Weights
from fedtide.core.rng import Rng
from fedtide.core.trees import leaves, same
from fedtide.laws.every import with_rows
from fedtide.learn.local import LocalTrainer
from fedtide.runs.build import host_of, task_of
from helpers.toys import Played, played, toy
from helpers.variants import reductions_of

LOCAL = {"lr": 0.1, "batch_size": 4, "epochs": 2}
FULL = {"lr": 0.1, "batch_size": 0, "epochs": 1}

# algorithm, its options | algorithm it reduces to, its options | tolerance (None: bit for bit)
REDUCTIONS = [
    *((name, r.options, r.to, r.its, r.tolerance) for name in REGISTRY for r in reductions_of(name)),
    ("helpers.sketches:fielding", {"clusters": 1}, "fedavg", {}, 1e-6),
    ("fedprox", {"local": {"proximal": 0.0}, "cohort": "uniform"}, "fedavg", {"cohort": "uniform"}, None),
]


def weights_of(state):
    """The weights; those of a network with one branch by the names that they have without branches."""
    found = state.weights
    found = found[0] if isinstance(found, tuple) else found
    plain = {
        re.sub(r"^(model\.)+(copies\.0\.)?|\.copies\.0(?=\.)", "", name): value for name, value in found.params.items()
    }
    return Weights(plain, found.buffers)


@lru_cache(maxsize=8)
def run_of(name: str, options: str, rounds: int) -> Played:
    """Rows per client differ, so that weighting matters. Many become the same other algorithm: it is played once."""
    data = {"partition": {"kind": "dirichlet-class", "clients": 8, "alpha": 1.0, "min_samples": 5}}
    given = json.loads(options)
    local = given.get("local", {})
    return played(toy(name, {**given, "local": local if "lr" in local else LOCAL | local}, data=data), rounds=rounds)


@pytest.mark.parametrize(
    ("left", "options", "right", "others", "tolerance"), REDUCTIONS, ids=[f"{r[0]} is {r[2]}" for r in REDUCTIONS]
)
def test_reduction(left, options, right, others, tolerance, thorough):
    """Over a period of who is there; with `--thorough` over one and a half. The models start from the same key."""
    each = ((left, options), (right, others))
    runs = [run_of(name, json.dumps(given, default=dict), 6 if thorough else 4) for name, given in each]
    ours, theirs = (weights_of(run.state) for run in runs)
    if runs[0].steps[0].received is not None and not same(*(weights_of(run.steps[0].received) for run in runs)):
        pytest.fail("the two start from different weights")
    if tolerance is None:
        assert same(ours, theirs)
    else:
        for a, b in zip(leaves(ours), leaves(theirs), strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_fedsgd_is_fedavg_with_running_statistics_and_clients_of_one_row_too(weighting):
    options = {"local": FULL, "weighting": weighting, "cohort": {"kind": "everyone"}}
    weights = []
    for name in ("fedsgd", "fedavg"):
        experiment = toy(name, options, model="python:helpers.toys:normed", precision="fp64", shift={"who": "always"})
        host = host_of(experiment, experiment.method[0], 0)
        train = host.population.parts["train"]
        short = with_rows(host, (train[i][: 1 if i == 2 else 3 + i] for i in range(len(train))))
        run = played(experiment, host=short)
        assert not same(run.state.weights.buffers, run.steps[0].received.weights.buffers)
        weights.append(run.state.weights)
    assert set(weights[0].buffers) == {"1.running_mean", "1.running_var"}
    for a, b in zip(*map(leaves, weights), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("loss", ["cross-entropy", "wsm"])
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize("variant", ["I", "II"])
def test_scaffold_begins_as_fedavg(variant, weighting, loss):
    """All variates are zero then; its running statistics and its loss are those of FedAvg too."""
    both = {"local": LOCAL, "weighting": weighting, "loss": loss}
    ours = played(toy("scaffold", {**both, "variant": variant}, model="python:helpers.toys:normed"), rounds=1)
    theirs = played(toy("fedavg", both, model="python:helpers.toys:normed"), rounds=1)
    assert same(ours.state.weights, theirs.state.weights)
    assert not same(ours.state.weights.buffers, ours.steps[0].received.weights.buffers)
    assert ours.steps[0].facts == theirs.steps[0].facts


@pytest.mark.parametrize("variant", ["I", "II"])
def test_scaffold_with_one_client_is_fedavg(variant):
    """c and c_i are then the same, and correct nothing."""
    data = {"partition": {"kind": "iid", "clients": 1}, "groups": {"by": "none"}, "held_out_clients": {"clients": 0}}
    common = {"local": LOCAL, "cohort": 1}
    runs = [
        played(toy(name, {**common, **own}, data=data, shift={"who": "always"}, precision="fp64"))
        for name, own in (("scaffold", {"variant": variant}), ("fedavg", {}))
    ]
    for ours, theirs in zip(*(leaves(run.state.weights) for run in runs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def evenly(host):
    """The same population, each client with four rows of each class."""
    y = host.population.rows.y
    own = [(y == c).nonzero().flatten() for c in range(3)]
    return with_rows(
        host,
        (
            torch.tensor(sorted(int(of[(4 * i + k) % len(of)]) for of in own for k in range(4)))
            for i in range(len(host.population.group))
        ),
    )


@pytest.mark.parametrize(
    "algorithm", ["fedavg", "fedsgd", "fedprox", "scaffold", "scaffold one wsm", "q-fedavg", "fedtem", "scsgd", "fedem"]
)
def test_the_re_weighted_softmax_of_even_classes_is_cross_entropy(algorithm):
    """Bit for bit, by what clients train, weigh by and keep; whatever the blend. With uneven ones it is not."""
    states, uneven = [], []
    for loss in ("cross-entropy", "wsm", {"kind": "wsm", "blend": 0.3}):
        experiment = toy(algorithm, {"local": {**LOCAL, "batch_size": 5}, "loss": loss})
        host = host_of(experiment, experiment.method[0], 0)
        states.append(played(experiment, host=evenly(host), rounds=3).state)
        uneven.append(played(experiment, host=host, rounds=1).state)
    assert same(states[0], states[1])
    assert same(states[0], states[2])
    assert not same(uneven[0], uneven[1])
    assert not same(uneven[1], uneven[2])


@pytest.mark.parametrize("options", [{"local": LOCAL}, {"local": {**LOCAL, "proximal": 0.5}, "server": "adam"}])
def test_the_oracle_is_fedavg_on_each_group_alone(options):
    """Bit for bit: a client of the other group that has no rows is as if it had not been asked."""
    experiment = toy("oracle", {**options, "cohort": "everyone"}, shift={"who": "always"})
    ours = played(experiment).state
    assert len(ours.weights) == 2
    one_model = toy("fedavg", {**options, "cohort": "everyone"}, shift={"who": "always"})
    host = host_of(one_model, one_model.method[0], 0)
    train, group = host.population.parts["train"], host.population.group
    for k in range(2):
        alone = with_rows(host, (train[i][: None if int(group[i]) == k else 0] for i in range(len(train))))
        assert same(played(one_model, host=alone).state.weights, ours.weights[k])
    assert not same(ours.weights[0], ours.weights[1])


def test_a_zero_rate_would_be_the_identity():
    """The smallest rate that is allowed moves the weights by next to nothing."""
    run = played(toy("fedavg", {"local": {**LOCAL, "lr": 1e-30}}), rounds=3)
    assert same(run.steps[0].received.weights, run.state.weights)


def test_one_client_is_plain_sgd():
    """FedAvg with one participant moves to what that client made."""
    experiment = toy("fedavg", {"cohort": 1, "local": LOCAL})
    run = played(experiment, rounds=1)
    (asked,) = run.fleet.queries

    population = run.host.population
    client = int(asked.ask.clients[0])
    task = task_of(experiment, experiment.method[0], population.rows)
    start = run.steps[0].received.weights
    moment = Moment(0, experiment.rounds, 0.0)
    fitted = LocalTrainer(**LOCAL)(
        task, task.loss, start, population.shard(client, moment), moment, Rng(0).at(0, client, "train")
    )
    for name, value in fitted.weights.params.items():
        torch.testing.assert_close(run.state.weights.params[name], value, rtol=1e-6, atol=1e-7)


def test_full_batches_of_everyone_are_one_step_on_the_pooled_loss():
    """E = 1, full batch, all clients, weighted by rows: one gradient step on the loss of all rows together."""
    experiment = toy(
        "fedavg", {"cohort": {"kind": "everyone"}, "local": FULL}, precision="fp64", shift={"who": {"kind": "always"}}
    )
    run = played(experiment, rounds=1)
    population = run.host.population
    rows = population.parts["train"].rows

    task = task_of(experiment, experiment.method[0], population.rows)
    start = run.steps[0].received.weights
    module = task.scratch.load(start, train=True)
    loss = torch.nn.functional.cross_entropy(module(population.rows.x[rows].double()), population.rows.y[rows])
    gradient = torch.autograd.grad(loss, task.scratch.params)
    for name, g in zip(task.scratch.names, gradient, strict=True):
        torch.testing.assert_close(run.state.weights.params[name], start.params[name] - 0.1 * g, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_clients_that_hold_the_same_rows_are_centralised_sgd(weighting):
    local = {"lr": 0.1, "batch_size": 0, "epochs": 2}
    experiment = toy("fedavg", {"local": local, "weighting": weighting}, precision="fp64", shift={"who": "always"})
    host = host_of(experiment, experiment.method[0], 0)
    train, data = host.population.parts["train"], host.population.rows
    rows = train[0]
    run = played(experiment, rounds=5, host=with_rows(host, [rows] * len(train)))
    model = experiment.model.build(host.population.rows.shape, host.population.rows.classes).double()
    model.load_state_dict(run.steps[0].received.weights.params)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5 * 2):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(data.x[rows].double()), data.y[rows]).backward()
        optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(run.state.weights.params[name], value, rtol=1e-10, atol=1e-10)
