"""Re-clustering: by hand, against plain Python, and against scikit-learn's silhouette."""

from typing import get_args

import numpy as np
import pytest
import torch

from fedtide.clusters import clusterer
from fedtide.clusters import lloyd as fits
from fedtide.clusters.clusterer import KMeans, dbscan, silhouettes
from fedtide.clusters.distance import Joint, Kind, between, means, set_scales
from fedtide.clusters.lloyd import draw_starts, kmeans_for_each, lloyd
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from helpers import naive_clusters as naive

KINDS = get_args(Kind)


def grouped(rows: int, groups: int, d: int = 12, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Label vectors of clients whose labels are those of their group, and the groups."""
    draw = np.random.default_rng(seed)
    group = np.arange(rows) % groups
    x = np.zeros((rows, d))
    for row, g in zip(x, group, strict=True):
        own = np.arange(g, d, groups)
        row[own] = draw.dirichlet(np.full(len(own), 6.0))
    return torch.from_numpy(x), torch.from_numpy(group)


def loose(rows: int, d: int, seed: int) -> torch.Tensor:
    """Label vectors without groups, in tenths, so that there are ties."""
    counts = np.random.default_rng(seed).multinomial(10, np.full(d, 1 / d), size=rows)
    return torch.from_numpy(counts / 10.0)


# -- against plain Python ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_lloyd_agrees_with_plain_python(kind, seed):
    x = loose(40, 5, seed)
    x += 0.01 * torch.rand(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(seed))
    x = x / (x.norm(dim=1, keepdim=True) if kind == "cosine" else x.sum(1, keepdim=True))
    picked = np.random.default_rng(seed).permuted(np.tile(np.arange(40), (6, 1)), axis=1)[:, :4]
    label, cost = lloyd(x, x[torch.from_numpy(picked)], kind)
    for start, seeds in enumerate(picked):
        expected, its_cost = naive.lloyd(x.tolist(), x[torch.from_numpy(seeds)].tolist(), kind)
        assert label[start].tolist() == expected
        assert cost[start].item() == pytest.approx(its_cost, rel=1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_lloyd_agrees_with_plain_python_on_representations_side_by_side(seed):
    """By a metric whose square is the sum of both distances, and by the sum itself."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.cat([loose(40, 3, seed), torch.randn(40, 2, dtype=torch.float64, generator=draw)], 1)
    kind = set_scales(Joint(("l1", "sq-l2"), (3, 2), (1.0, 1.0)), x)
    picked = np.random.default_rng(seed).permuted(np.tile(np.arange(40), (6, 1)), axis=1)[:, :4]
    label, cost = lloyd(x, x[torch.from_numpy(picked)], kind)
    for start, seeds in enumerate(picked):
        expected, its_cost = naive.lloyd(x.tolist(), x[torch.from_numpy(seeds)].tolist(), kind)
        assert label[start].tolist() == expected
        assert cost[start].item() == pytest.approx(its_cost, rel=1e-9)


def test_only_both_representations_together_tell_four_groups():
    labels = torch.eye(2, dtype=torch.float64)[torch.arange(40) % 2]
    inputs = 1000.0 * torch.eye(2, dtype=torch.float64)[torch.arange(40) // 2 % 2]
    x = torch.cat([labels, inputs], 1) + 0.01 * torch.rand(40, 4, generator=torch.Generator().manual_seed(0))
    assert KMeans().fit(x[:, :2], "l1", Rng(0)).k == KMeans().fit(x[:, 2:], "sq-l2", Rng(0)).k == 2
    found = KMeans().fit(x, set_scales(Joint(("l1", "sq-l2"), (2, 2), (1.0, 1.0)), x), Rng(0))
    assert found.label.tolist() == (torch.arange(40) % 4).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_empty_clusters_are_filled_as_in_plain_python(kind):
    # Two seeds of three are the same row, so the second has nobody; one more is far from everything.
    x = torch.tensor([[0.7, 0.3], [0.6, 0.4], [0.65, 0.35], [0.1, 0.9], [0.2, 0.8], [0.4, 0.6]], dtype=torch.float64)
    x = x / x.norm(dim=1, keepdim=True) if kind == "cosine" else x
    starts = x[torch.tensor([[0, 0, 3, 0], [1, 1, 1, 1], [3, 4, 3, 4]])]
    label, cost = lloyd(x, starts, kind)
    for its_label, its_cost, seeds in zip(label, cost, starts, strict=True):
        expected, price = naive.lloyd(x.tolist(), seeds.tolist(), kind)
        assert its_label.tolist() == expected
        assert sorted(set(expected)) == [0, 1, 2, 3]
        assert its_cost.item() == pytest.approx(price, abs=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_silhouettes_agree_with_plain_python(kind):
    x = loose(30, 4, 1)
    labels = torch.stack([torch.arange(30) % k for k in (1, 2, 5)] + [torch.arange(30).clamp(max=3)])
    found = silhouettes(x, labels, kind)
    for its, label in zip(found, labels.tolist(), strict=True):
        assert its.tolist() == pytest.approx(naive.silhouette(x.tolist(), label, kind), abs=1e-7)


@pytest.mark.parametrize(
    ("kind", "metric"), [("l1", "manhattan"), ("cosine", "cosine"), ("l2", "euclidean"), ("sq-l2", "sqeuclidean")]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_silhouettes_are_those_of_scikit_learn(kind, metric, dtype):
    from sklearn.metrics import silhouette_samples  # here, as it takes seconds to import

    x = loose(60, 6, 2).to(dtype)
    labels = torch.stack([torch.arange(60) % k for k in (2, 3, 7)])
    for label, its in zip(labels, silhouettes(x, labels, kind), strict=True):
        assert its.numpy() == pytest.approx(silhouette_samples(x.numpy(), label.numpy(), metric=metric), abs=1e-5)


def test_bounds_change_no_assignment():
    """The whole is what plain Lloyd does from the same seeds, on rows where few distances can be left out."""
    draw = torch.Generator().manual_seed(3)
    x = torch.rand(400, 8, generator=draw)
    label, _ = lloyd(x, x[torch.randint(400, (3, 5), generator=draw)], "l1")
    for one in label:
        centers = means(x, one, 5, x[:5])
        assert torch.equal(between(x, centers, "l1").argmin(1), one)


# -- which K ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 2, 9])
def test_the_same_rows_and_few_rows_are_one_cluster(kind, rows):
    x = torch.tensor([[0.1, 0.2, 0.7]]).repeat(rows, 1)
    found = KMeans().fit(x, kind, Rng(0))
    assert (found.k, found.silhouette, found.label.tolist()) == (1, {}, [0] * rows)
    assert KMeans().fit(torch.eye(2)[:rows], kind, Rng(0)).k == 1


def test_one_cluster_at_most_asks_for_no_kmeans(monkeypatch):
    monkeypatch.setattr(clusterer, "kmeans_for_each", None)
    found = KMeans(k_max=1).fit(grouped(30, 3)[0], "l1", Rng(0))
    assert (found.k, found.silhouette) == (1, {})


def test_equal_silhouettes_give_the_smaller_k(monkeypatch):
    x, _ = grouped(30, 3)
    monkeypatch.setattr(clusterer, "silhouettes", lambda x, labels, kind: torch.full(labels.shape, 0.25))
    assert KMeans().fit(x, "l1", Rng(0)).k == 2


def test_without_groups_there_is_one_cluster():
    """By hand: rows 0, 1 and 4, 5 on a line have silhouettes of 3.5 / 4.5 and 2.5 / 3.5, 0.746 in the mean."""
    x = torch.tensor([[0.0], [1.0], [4.0], [5.0]])
    assert KMeans(k_max=2, min_silhouette=0.74).fit(x, "l1", Rng(0)).label.tolist() == [0, 0, 1, 1]
    found = KMeans(k_max=2, min_silhouette=0.75).fit(x, "l1", Rng(0))
    assert (found.k, found.label.tolist(), found.centers.tolist()) == (1, [0, 0, 0, 0], [[2.5]])
    assert found.silhouette == {2: pytest.approx((7 / 9 + 5 / 7) / 2)}
    none = torch.from_numpy(np.random.default_rng(0).dirichlet(np.full(26, 5.0), 100))
    assert KMeans().fit(none, "l1", Rng(0)).k > KMeans(min_silhouette=0.15).fit(none, "l1", Rng(0)).k == 1
    assert KMeans(min_silhouette=0.15).fit(grouped(40, 4)[0], "l1", Rng(0)).k == 4


def test_an_empty_range_is_an_error():
    with pytest.raises(FedtideError, match="found k_max 2 and k_min 3; allowed: k_max of k_min or more, or 1"):
        KMeans(k_min=3, k_max=2)


# -- the starts -------------------------------------------------------------------------------------------------------


def test_seeds_are_drawn_in_proportion_to_the_distance():
    x = torch.tensor([[0.0], [1.0], [4.0]])
    seeds, far = draw_starts(x, 2, 6000, "l1", Rng(0))
    from_zero = seeds[seeds[:, 0] == 0][:, 1]
    assert (from_zero == 2).float().mean().item() == pytest.approx(4 / 5, abs=0.03)
    assert seeds[:, 0].bincount().tolist() == pytest.approx([2000] * 3, abs=150)
    squared, _ = draw_starts(x, 2, 6000, "sq-l2", Rng(0))
    assert (squared[squared[:, 0] == 0][:, 1] == 2).float().mean().item() == pytest.approx(16 / 17, abs=0.02)
    assert torch.equal(far, (x[seeds] - x[:, 0]).abs())


def test_a_row_without_direction_is_no_seed_and_in_a_cluster_all_the_same():
    x, group = grouped(60, 3)
    x = torch.cat([x, torch.zeros(3, 12)])
    seeds, _ = draw_starts(x, 5, 200, "cosine", Rng(0))
    assert seeds.max() < 60
    found = KMeans(k_min=3, k_max=3).fit(x, "cosine", Rng(0))
    assert found.label[:60].tolist() == group.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_how_many_starts_are_worked_on_at_a_time_does_not_show(kind, monkeypatch):
    x = loose(60, 6, 7)
    x = x / x.norm(dim=1, keepdim=True) if kind == "cosine" else x
    whole = kmeans_for_each(x, range(2, 6), kind, Rng(0))
    monkeypatch.setattr(fits, "CELLS", 700)
    assert torch.equal(kmeans_for_each(x, range(2, 6), kind, Rng(0)), whole)


# -- k-center ---------------------------------------------------------------------------------------------------------


# -- clusters by density ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("min_samples", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(12))
def test_clusters_by_density_are_those_of_scikit_learn(seed, min_samples):
    """Blobs with stragglers between them, and rows on a grid, of which some are exactly `eps` apart."""
    sklearn = pytest.importorskip("sklearn.cluster")
    draw = np.random.default_rng(seed)
    blobs = np.concatenate([draw.normal(center, 0.3, (12, 2)) for center in ((0, 0), (1, 1), (3, 0))])
    for x in (blobs, draw.integers(0, 6, (30, 2)).astype(float), blobs[:1]):
        far = np.linalg.norm(x[:, None] - x[None], axis=-1)
        for eps in (0.0, 0.2, 0.4, 1.0, 9.0):
            theirs = sklearn.DBSCAN(eps=eps or 1e-300, min_samples=min_samples, metric="precomputed").fit_predict(far)
            assert dbscan(torch.from_numpy(far), eps, min_samples).tolist() == theirs.tolist()
