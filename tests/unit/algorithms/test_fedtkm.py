"""FedTKM: what its specification says, one statement after the other."""

from dataclasses import replace

import pytest
import torch

from fedtide.algorithms.fedtkm import Sent, fedtkm
from fedtide.cohorts import Arrivals
from fedtide.core.base import Moment, Shard
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.learn.local import LocalTrainer
from fedtide.learn.server import SGD
from fedtide.learn.task import logits_and_features, with_branches
from fedtide.mixtures.priors import Cosine, EMOnly, Linear, Uniform
from fedtide.mixtures.step_size import PerPeriod
from helpers.answering import DIMS, WIDTH, begun, task


def server(prior, **options):
    """The algorithm with plain SGD on the server, and its first state."""
    algorithm = fedtkm(task(), prior=prior, server=SGD(), cohort=Arrivals(4), **options)
    return algorithm, begun(algorithm)


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
