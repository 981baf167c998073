"""FedTKM: what its specification says, one statement after the other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedtide.algorithms.fedtkm import Sent, fedtkm
from fedtide.cohorts import Arrivals
from fedtide.core.base import Moment, Shard, Sum
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.trees import same
from fedtide.learn.branched_task import logits_and_features, with_branches
from fedtide.learn.local import LocalTrainer
from fedtide.learn.server import SGD
from fedtide.mixtures.priors import Block, Cosine, EMOnly, Linear, Uniform
from fedtide.mixtures.step_size import Integral, PerPeriod
from helpers.answering import DIMS, WIDTH, Answering, begun, identity, moving, still, task


def server(prior, **options):
    """The algorithm with plain SGD on the server, and its first state."""
    algorithm = fedtkm(task(), prior=prior, server=SGD(), cohort=Arrivals(4), **options)
    return algorithm, begun(algorithm)


def after(algorithm, state, nearest, rows=(1.0, 1.0, 1.0, 1.0), features=None, round=0):
    """The state and facts after a round in which participant i was nearest to mode nearest[i]."""
    r = torch.nn.functional.one_hot(torch.tensor(nearest), len(state.log_alpha)).double()
    n = torch.tensor(rows, dtype=torch.float64)
    z = torch.ones(len(nearest), state.centers.shape[1], dtype=torch.float64) if features is None else features
    total = {
        "delta": Sum(still(state.weights), 1.0),
        "loss": Sum(1.0, 1.0),
        "modes": Sum(r.sum(0), float(len(r))),
        "branches": Sum(r.sum(0), float(len(r))),
        "features": [Sum((n * mine) @ z, float(n @ mine)) if mine.any() else None for mine in r.T],
    }
    return algorithm.round(state, Answering(total, round=round), Rng(0))


def client(points, log_alpha=(0.0, 0.0), count=7, seed=2, local=None, **options):
    """Run one client's work and return its answer; also its rows and what it received."""
    options = {"prior": Linear(256), **options}
    algorithm = fedtkm(task(), local or LocalTrainer(0.01, batch_size=0), **options)
    state = begun(algorithm)
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, DIMS, generator=draw, dtype=torch.float64)
    shard = Shard(x, torch.randint(3, (count,), generator=draw), torch.arange(count))
    payload = Sent(
        state.weights, torch.as_tensor(points, dtype=torch.float64), torch.tensor(log_alpha, dtype=torch.float64)
    )
    return algorithm.works["train"](payload, None, shard, Moment(0, 10), Rng(0).at(0, 3, "train")), shard, payload


# -- alpha -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nearest", "bound"), [(1, 5.0), (0, -5.0)])
def test_alpha_stays_positive_and_bounded(nearest, bound):
    prior = Block(1000) if nearest else Block(1000, phase=500)
    algorithm, state = server(prior, alpha=Integral(0.7))
    for _ in range(20):
        state, facts = after(algorithm, state, [nearest] * 4)
        assert (facts["alpha"] > 0).all()
    assert state.log_alpha.tolist() == [0.0, bound]


@pytest.mark.parametrize("prior", [EMOnly(), Uniform(), Linear("1d")])
def test_steps_for_a_period_need_one_in_rounds(prior):
    with pytest.raises(FedtideError) as error:
        server(prior, alpha=PerPeriod())
    allowed = f"'leaky' or 'integral': prior = '{prior.kind}' has no period in rounds"
    assert str(error.value) == f"alpha: found 'per-period', allowed: {allowed}"


# -- who is nearest ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("distance", ["mean", "vote"])
@pytest.mark.parametrize("count", [1, 7, 24, 30, 200])
def test_with_both_centers_alike_everyone_goes_to_the_second_branch(distance, count):
    """Branch 1 needs a strictly smaller distance, for the choice and for what is sent; more rows than 25 too."""
    for seed in range(4):
        answer, _, _ = client([[0.3] * WIDTH] * 2, count=count, seed=seed, distance=distance)
        assert int(answer.notes.branch) == 1
        assert answer.total["modes"].value.tolist() == [0.0, 1.0]
        assert list(answer.total["features"].parts) == [1]


def test_distances_are_means_of_norms_and_votes_count_rows():
    """Three rows near the second center and one far off: the mean says 1, the vote says 2."""
    centers = torch.tensor([[0.0, 4.0], [0.0, 0.0]], dtype=torch.float64)
    x = torch.tensor([[0.0, 1.9], [0.0, 1.9], [0.0, 1.9], [0.0, 9.0]], dtype=torch.float64)
    shard = Shard(x, torch.tensor([0, 1, 0, 1]), torch.arange(4))
    for distance, expected in (("mean", 0), ("vote", 1)):
        algorithm = fedtkm(identity(), LocalTrainer(1e-9, batch_size=0), Linear(256), distance=distance)
        state = begun(algorithm)
        payload = Sent(state.weights, centers, torch.zeros(2, dtype=torch.float64))
        answer = algorithm.works["train"](payload, None, shard, Moment(0, 10), Rng(0))
        assert int(answer.notes.branch) == expected, distance
    # Not squared: distances 3, 3 from the first, 0.5 and 5.4 from the second are nearer to the second in the mean only.
    x = torch.tensor([[0.0, 3.0], [0.0, -3.0]], dtype=torch.float64)
    centers = torch.tensor([[0.0, 0.0], [0.0, 2.5]], dtype=torch.float64)
    shard = Shard(x, torch.tensor([0, 1]), torch.arange(2))
    algorithm = fedtkm(identity(), LocalTrainer(1e-9, batch_size=0), Linear(256))
    payload = Sent(begun(algorithm).weights, centers, torch.tensor([0.0, 0.05], dtype=torch.float64))
    answer = algorithm.works["train"](payload, None, shard, Moment(0, 10), Rng(0))
    means = (3 + 3) / 2, 1.0512710963760241 * (0.5 + 5.5) / 2
    assert int(answer.notes.branch) == (0 if means[0] < means[1] else 1) == 0


def test_half_of_the_votes_are_not_enough_for_the_first_branch():
    centers = torch.tensor([[0.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    x = torch.tensor([[0.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    algorithm = fedtkm(identity(), LocalTrainer(1e-9, batch_size=0), Linear(256), distance="vote")
    payload = Sent(begun(algorithm).weights, centers, torch.zeros(2).double())
    for rows, expected in ((x, 1), (torch.cat([x, x[:1]]), 0), (torch.cat([x, x[1:]]), 1)):
        shard = Shard(rows, torch.arange(len(rows)) % 2, torch.arange(len(rows)))
        answer = algorithm.works["train"](payload, None, shard, Moment(0, 10), Rng(0))
        assert int(answer.notes.branch) == expected


# -- centers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("update", ["overwrite", "certainty"])
@pytest.mark.parametrize("empty", [0, 1])
def test_an_empty_cluster_keeps_its_center(update, empty):
    algorithm, state = server(Block(1000, phase=500 * (1 - empty)), update=moving(update))
    new, _ = after(algorithm, state, [1 - empty] * 4)
    assert torch.equal(new.centers[empty], state.centers[empty])
    assert new.centers[1 - empty].tolist() == pytest.approx([1.0] * WIDTH)
    assert new.started.tolist() == [empty == 1, empty == 0]


# -- what travels ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("largest", [1e-3, 0.05, 1e6])
def test_clipping_bounds_the_norm_and_keeps_the_direction(largest):
    free, _, _ = client([[0.0] * WIDTH, [1.0] * WIDTH], local=LocalTrainer(0.5, batch_size=2, epochs=3))
    bounded, _, _ = client(
        [[0.0] * WIDTH, [1.0] * WIDTH], local=LocalTrainer(0.5, batch_size=2, epochs=3), max_update_norm=largest
    )
    ours, theirs = (
        torch.cat([p.flatten() for p in answer.total["delta"].value.params.values()]) for answer in (bounded, free)
    )
    norm = float(theirs.norm())
    assert float(ours.norm()) == pytest.approx(min(norm, largest), rel=1e-12)
    torch.testing.assert_close(ours, theirs * min(1.0, largest / norm), rtol=1e-12, atol=0)
    # Features are those of the network as it was trained, clipped or not.
    assert same(bounded.total["features"], free.total["features"])


# -- one branch, inference ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rescale", [False, True])
@pytest.mark.parametrize("distance", ["mean", "vote"])
def test_at_inference_owners_choose_by_distance_and_alpha_only_where_it_is_wanted(rescale, distance):
    algorithm, state = server(Cosine(8), rescale=rescale, distance=distance)
    levels = torch.tensor([[0.1], [0.35]], dtype=torch.float64).expand(2, WIDTH)
    log_alpha = torch.tensor([0.0, 0.03], dtype=torch.float64)
    state = replace(state, centers=levels, log_alpha=log_alpha)
    payload, slot = algorithm.serve(state, torch.arange(3))
    assert slot is None
    draw = torch.Generator().manual_seed(0)
    x = 1.5 * torch.randn(40, DIMS, generator=draw, dtype=torch.float64)
    owner = torch.arange(40) // 4
    made = algorithm.predict(payload, [None] * 10, x, owner)
    logits, z = logits_and_features(with_branches(task(), "head", 2), state.weights, x)
    far = (z[:, None] - levels).norm(dim=2) * (log_alpha.exp() if rescale else 1.0)
    for i in range(10):
        mine = far[owner == i]
        if distance == "mean":
            k = 0 if mine[:, 0].mean() < mine[:, 1].mean() else 1
        else:
            k = 0 if (mine[:, 0] < mine[:, 1]).sum() > 2 else 1
        assert made.choice[owner == i].unique().tolist() == [k]
        torch.testing.assert_close(made.told[owner == i], logits[k, owner == i].log_softmax(-1))
    assert len(made.choice.unique()) == 2
