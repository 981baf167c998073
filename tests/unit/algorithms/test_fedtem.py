"""FedTEM: what its specification says, one statement after the other."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fedtide.algorithms.fedtem import Sent, fedtem, mean_and_variance
from fedtide.algorithms.fedtkm import fedtkm
from fedtide.cohorts import Arrivals
from fedtide.core.base import Moment, Shard
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.trees import all_finite, same
from fedtide.learn.local import LocalTrainer
from fedtide.learn.server import SGD
from fedtide.learn.task import Task, logits_and_features, with_branches
from fedtide.mixtures.feature_gaussians import floor_variances, posteriors
from fedtide.mixtures.priors import Linear, Soft
from fedtide.models.networks import MLP
from fedtide.runs.build import host_of
from helpers.answering import DIMS, WIDTH, begun, task
from helpers.toys import played, toy


def server(prior, **options):
    """The algorithm with plain SGD on the server, and its first state."""
    algorithm = fedtem(task(), prior=prior, server=SGD(), cohort=Arrivals(4), **options)
    return algorithm, begun(algorithm)


# -- 8. degenerate features --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("update", ["overwrite", "certainty"])
@pytest.mark.parametrize("level", [0.0, -1.0, 3.0, 1e4])
def test_constant_features_leave_everything_finite(update, level):
    """Every row the same, so that all variances are 0, with ReLU units that may be dead."""
    local = {"lr": 1e-3, "batch_size": 4, "max_grad_norm": 1.0}
    experiment = toy("fedtem", {"update": update, "local": local}, rounds=8)
    host = host_of(experiment, experiment.method[0], 0)
    rows = replace(host.population.rows, x=torch.full_like(host.population.rows.x, level))
    run = played(experiment, host=replace(host, population=replace(host.population, rows=rows)))
    for step in run.steps:
        assert all_finite([step.state, step.facts])
        assert len(step.facts["assigned"]) == 2
        assert int(step.facts["assigned"].sum()) == 4
    payload, _ = run.host.algorithm.serve(run.state, host.population.clients)
    assert (payload.mixture[1] >= 1e-6).all()
    assert not run.state.var.all()
    made = run.host.algorithm.predict(payload, [None], rows.x[:7], torch.zeros(7, dtype=torch.int64))
    assert all_finite(made.told)


def test_clients_that_say_they_have_no_rows_leave_the_shares():
    experiment = toy("fedtem")
    host = host_of(experiment, experiment.method[0], 0)

    def train(*inputs):
        answer = host.algorithm.works["train"](*inputs)
        return answer and replace(answer, rows={**answer.rows, "n": torch.zeros_like(answer.rows["n"])})

    lying = replace(host.algorithm, works={**host.algorithm.works, "train": train})
    run = played(experiment, host=replace(host, algorithm=lying))
    assert run.state.pi.tolist() == [0.5, 0.5]


# -- 10. a drawn branch ------------------------------------------------------------------------------------------------


def client(pi, mu=((0.0,) * WIDTH, (0.3,) * WIDTH), selection="sample", rows=7):
    """The work of one client and what it receives."""
    algorithm = fedtem(task(), LocalTrainer(0.01, batch_size=0), Linear(256), selection=selection)
    state = begun(algorithm)
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(rows, DIMS, generator=draw, dtype=torch.float64)
    shard = Shard(x, torch.randint(3, (rows,), generator=draw), torch.arange(rows))
    payload = Sent(
        state.weights,
        (
            torch.tensor(mu, dtype=torch.float64),
            torch.full((2, WIDTH), 0.3, dtype=torch.float64),
            torch.tensor(pi, dtype=torch.float64),
        ),
    )
    _, z = logits_and_features(with_branches(task(), "head", 2), state.weights, x)
    own = posteriors(z, *payload.mixture)[0].mean(0)
    return algorithm.works["train"], payload, shard, z, own


def branch_at(work, payload, shard, key) -> int:
    return int(work(payload, None, shard, Moment(0, 10), key).notes.branch)


def test_a_drawn_branch_is_the_same_for_the_same_key_and_as_frequent_as_its_posterior():
    for given in ([0.5, 0.5], [0.2, 0.8]):
        work, payload, shard, _, own = client(given)
        assert 0.05 < float(own[0]) < 0.95
        keys = [Rng(0).at(t, 3, "train") for t in range(200)]
        drawn = [branch_at(work, payload, shard, key) for key in keys]
        assert drawn[:20] == [branch_at(work, payload, shard, key) for key in keys[:20]]
        deviation = (float(own[0] * own[1]) / 200) ** 0.5
        assert sum(drawn) / 200 == pytest.approx(float(own[1]), abs=4 * deviation)


@pytest.mark.parametrize("far", [1e9, 2.0**53])
def test_log_odds_fit_however_far_away_a_component_is(far):
    work, payload, shard, _, _ = client([0.5, 0.5], mu=((0.0,) * WIDTH, (far,) * WIDTH), selection="greedy")
    rows = work(payload, None, shard, Moment(0, 10), Rng(0)).rows
    assert rows["odds"].tolist() == [0.0, -(2.0**53)]


def test_the_lowest_of_equals():
    for selection in ("greedy", "bayes"):
        work, payload, shard, _, _ = client([0.5, 0.5], mu=((0.0,) * WIDTH,) * 2, selection=selection)
        assert branch_at(work, payload, shard, Rng(0)) == 0


# -- moments of features -----------------------------------------------------------------------------------------------


def test_moments_by_hand():
    """Column 1: 1, 3, 5 has mean 3 and squares 4, 0, 4; column 2 is constant."""
    mean, var = mean_and_variance(torch.tensor([[1.0, 7.0], [3.0, 7.0], [5.0, 7.0]]))
    assert mean.tolist() == [3.0, 7.0]
    assert var.tolist() == pytest.approx([8 / 3, 0.0], abs=1e-15)
    assert mean.dtype == var.dtype == torch.float64


# -- what travels ------------------------------------------------------------------------------------------------------


def test_statistics_are_taken_without_dropout():
    """Twice the same client with the same key, and features that are those of the network in evaluation mode."""

    def build() -> nn.Module:
        net = nn.Sequential(nn.Linear(DIMS, WIDTH), nn.ReLU(), nn.Dropout(0.5))
        net.add_module("head", nn.Linear(WIDTH, 3))
        return net

    dropping = Task(build, dtype=torch.float64, example=torch.zeros(1, DIMS))
    algorithm = fedtem(dropping, LocalTrainer(0.1, batch_size=0), Linear(256))
    state = begun(algorithm)
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(7, DIMS, generator=draw, dtype=torch.float64)
    shard = Shard(x, torch.randint(3, (7,), generator=draw), torch.arange(7))
    payload = Sent(state.weights, (state.mu, state.var, state.pi))
    answer = algorithm.works["train"](payload, None, shard, Moment(0, 10), Rng(0))
    params = state.weights.params
    trained = {name: p + answer.total["delta"].value.params[name] for name, p in params.items()}
    z = (x @ trained["model.0.weight"].T + trained["model.0.bias"]).clamp(min=0)
    torch.testing.assert_close(answer.rows["mu"], z.mean(0), rtol=1e-10, atol=1e-12)
    gamma = posteriors(
        (x @ params["model.0.weight"].T + params["model.0.bias"]).clamp(min=0), state.mu, state.var, state.pi
    )[0]
    assert int(answer.notes.branch) == int(gamma.mean(0).argmax())


# -- inference ---------------------------------------------------------------------------------------------------------


def test_all_rows_of_an_owner_choose_together_with_uniform_shares():
    algorithm, state = server(Linear(8))
    levels = torch.tensor([[0.5], [1.5]], dtype=torch.float64).expand(2, WIDTH)
    state = replace(state, pi=torch.tensor([0.999, 0.001], dtype=torch.float64), mu=levels)
    payload, slot = algorithm.serve(state, torch.arange(3))
    assert slot is None
    assert payload.mixture[2].tolist() == [0.5, 0.5]
    draw = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(30, DIMS, generator=draw, dtype=torch.float64)
    owner = torch.randint(6, (30,), generator=draw)
    made = algorithm.predict(payload, [None] * 6, x, owner)
    logits, z = logits_and_features(with_branches(task(), "head", 2), state.weights, x)
    gamma, _ = posteriors(z, state.mu, floor_variances(state.var), torch.tensor([0.5, 0.5]))
    for i in range(6):
        k = int(gamma[owner == i].mean(0).argmax())
        assert made.choice[owner == i].unique().tolist() == [k]
        torch.testing.assert_close(made.told[owner == i], logits[k, owner == i].log_softmax(-1))
    alone = algorithm.predict(payload, [None] * 30, x, torch.arange(30))
    assert torch.equal(alone.choice, gamma.argmax(1))
    assert len(alone.choice.unique()) == 2


# -- what cannot be ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [fedtem, fedtkm])
def test_a_soft_prior_over_three_groups_is_refused_when_the_algorithm_is_made(make):
    with pytest.raises(FedtideError, match="soft"):
        make(task(), prior=Soft(4), branches=3)


# -- where it begins ---------------------------------------------------------------------------------------------------


def test_the_first_components_are_small_random_means_and_the_first_centers_alike():
    """mu and c ~ N(0, 0.1^2), var = 1, pi uniform, alpha = 1; drawn by the key alone."""
    wide = Task(lambda: MLP(hidden=(2000,)).build((DIMS,), 3), example=torch.zeros(1, DIMS))
    for make, name in ((fedtem, "mu"), (fedtkm, "centers")):
        state = begun(make(wide, prior=Linear(8)))
        means = getattr(state, name)
        assert means.shape == (2, 2000)
        assert means.dtype == torch.float64
        assert float(means.mean()) == pytest.approx(0.0, abs=0.01)
        assert float(means.std()) == pytest.approx(0.1, abs=0.005)
        assert same(begun(make(wide, prior=Linear(8))), state)
        assert not state.started.any()
    state = begun(fedtem(wide, prior=Linear(8), branches=3))
    assert (state.var == 1).all()
    assert state.pi.tolist() == pytest.approx([1 / 3] * 3)
    assert state.prior is None
    assert begun(fedtkm(wide, prior=Linear(8))).log_alpha.tolist() == [0.0, 0.0]
