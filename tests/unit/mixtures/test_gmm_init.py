"""Where Gaussians begin: federated k-means++ finds the blobs that clients hold between them."""

import numpy as np
import pytest
import torch

from fedtide.core.base import Cost, Moment, Reply, Shard
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.learn.task import Task
from fedtide.mixtures.feature_gaussians import (
    NOTHING,
    Collected,
    GaussianSetup,
    KMeansPlusPlus,
    Public,
    Random,
    collect_question,
    fit_centers,
)


def identity(first, x):
    return x.double()


class Identity:
    """Rows as their own features."""

    moves = False

    def of(self, task):
        return identity


def blob(center: float, n: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(center, 0.5, (n, 2)))


def collected(*clients: torch.Tensor, count: int = 2) -> Collected:
    work, found = collect_question(identity, count), NOTHING
    for client, x in enumerate(clients):
        shard = Shard(x, torch.zeros(len(x), dtype=torch.int64), torch.arange(len(x)))
        answer = work({}, None, shard, Moment(-1, 1), Rng(client))
        rows = {name: value[None] for name, value in answer.rows.items()}
        found = found.plus(Reply(answer.total, rows, torch.tensor([client]), torch.zeros(1), Cost()))
    return found


def test_two_blobs_are_found_though_no_client_holds_both():
    mu, var = fit_centers(collected(blob(0, 40, 0), blob(9, 60, 1)), 2, Rng(0))
    order = mu[:, 0].argsort()
    torch.testing.assert_close(mu[order], torch.tensor([[0.0, 0.0], [9.0, 9.0]], dtype=torch.float64), atol=0.3, rtol=0)
    torch.testing.assert_close(var[order], torch.full((2, 2), 0.25, dtype=torch.float64), atol=0.1, rtol=0)


def test_variances_are_those_of_all_rows_of_a_component_by_hand():
    """Client A holds 0 and 2 (mean 1, variance 1), B holds 4 (variance 0), C 100; K = 2, one center from each."""
    a, b, c = torch.tensor([[0.0], [2.0]]), torch.tensor([[4.0]]), torch.tensor([[100.0]])
    mu, var = fit_centers(collected(a, b, c, count=1), 2, Rng(0))
    low = int(mu[:, 0].argmin())
    assert mu[low].item() == pytest.approx(2.0)  # (0 + 2 + 4) / 3
    assert var[low].item() == pytest.approx(8 / 3)  # (4 + 0 + 4) / 3
    assert (mu[1 - low].item(), var[1 - low].item()) == (100.0, 0.0)


def test_rows_that_are_not_finite_are_left_out_and_empty_clients_say_nothing():
    x = torch.tensor([[0.0, 1.0], [float("nan"), 0.0], [float("inf"), 0.0]])
    found = collected(x)
    assert found.counts.tolist() == [1.0]
    work = collect_question(identity, 2)
    empty = Shard(x[:0], torch.zeros(0, dtype=torch.int64), torch.arange(0))
    assert work({}, None, empty, Moment(-1, 1), Rng(0)) is None
    bad = Shard(x[1:], torch.zeros(2, dtype=torch.int64), torch.arange(2))
    assert work({}, None, bad, Moment(-1, 1), Rng(0)) is None


def test_without_answers_or_by_choice_the_means_are_drawn():
    task = Task(lambda: torch.nn.Linear(2, 2), example=torch.zeros(1, 2))
    for how in (Random(), KMeansPlusPlus(rounds=4)):
        opening = GaussianSetup(how, task, Identity(), 30)
        mu, var = opening.initial(None, Rng(0))
        assert mu.shape == var.shape == (30, 2)
        assert 0.05 < float(mu.std()) < 0.15
        assert bool((var == 1).all())
        assert opening.before == (0 if how == Random() else 4)


def test_public_rows_may_tell():
    public = torch.cat([blob(0, 30, 0), blob(9, 30, 1)])
    task = Task(lambda: torch.nn.Linear(2, 2), example=public[:1], public=public)
    mu, _ = GaussianSetup(Public(), task, Identity(), 2).initial(None, Rng(0))
    assert sorted(round(m) for m in mu[:, 0].tolist()) == [0, 9]
    none = Task(lambda: torch.nn.Linear(2, 2))
    with pytest.raises(FedtideError, match="found 'public', but the task has"):
        GaussianSetup(Public(), none, Identity(), 3)
