"""Laws of clustering and of what new clusters take over."""

from itertools import product
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedtide.algorithms.cfl import bipartition as halves
from fedtide.algorithms.fielding import mixing_matrix
from fedtide.clusters.clusterer import KMeans, k_center, silhouettes
from fedtide.clusters.distance import Kind, between, cosines, heterogeneity, sum_distances
from fedtide.clusters.lloyd import lloyd
from fedtide.core.rng import Rng
from helpers.examples import examples

law = examples(30)
kinds = st.sampled_from(get_args(Kind))
seeds = st.integers(0, 10**6)


def rows_of(seed: int, rows: int, d: int, kind: str) -> torch.Tensor:
    """Label vectors; unit vectors where directions are compared."""
    x = torch.rand(rows, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) ** 4
    return x / (x.norm(dim=1, keepdim=True) if kind == "cosine" else x.sum(1, keepdim=True))


@law
@given(seeds, st.integers(4, 40), st.integers(2, 6), kinds)
def test_a_permutation_of_the_rows_permutes_the_labels(seed, rows, d, kind):
    x, order = rows_of(seed, rows, d, kind), torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    centers = x[torch.tensor([[0, 1, 2], [1, 2, 3]])]
    label, cost = lloyd(x, centers, kind)
    permuted, its_cost = lloyd(x[order], centers, kind)
    assert torch.equal(permuted, label[:, order])
    torch.testing.assert_close(cost, its_cost)


@law
@given(seeds, st.integers(3, 40), st.integers(2, 6), kinds, st.sampled_from([40, 5]))
def test_clusters_cover_everybody_and_none_is_empty(seed, rows, d, kind, sampled):
    x = rows_of(seed, rows, d, kind).float()
    found = KMeans(k_max=5, n_init=2, fit_samples=sampled).fit(x, kind, Rng(seed))
    assert found.label.unique().tolist() == list(range(found.k))
    assert found.centers.shape == (found.k, d)
    assert all(-1 <= score <= 1 for score in found.silhouette.values())
    firsts = [found.label.tolist().index(k) for k in range(found.k)]
    assert firsts == sorted(firsts)


@law
@given(seeds, st.integers(2, 30), st.integers(1, 6), kinds)
def test_silhouettes_are_between_minus_one_and_one(seed, rows, k, kind):
    x = rows_of(seed, rows, 4, kind)
    labels = torch.randint(k, (3, rows), generator=torch.Generator().manual_seed(seed))
    found = silhouettes(x, labels, kind)
    assert found.abs().max() <= 1
    assert torch.allclose(silhouettes(x.flip(0), labels.flip(1), kind).flip(1), found)


@law
@given(seeds, st.integers(1, 40), st.integers(1, 5), st.integers(1, 5))
def test_what_new_clusters_take_over_sums_to_one(seed, rows, old_k, new_k):
    draw = torch.Generator().manual_seed(seed)
    old, new = torch.randint(old_k, (rows,), generator=draw), torch.randint(new_k, (rows,), generator=draw)
    share = mixing_matrix(old, new, old_k, new_k)
    assert share.shape == (new_k, old_k)
    assert (share >= 0).all()
    torch.testing.assert_close(share.sum(1), torch.ones(new_k, dtype=torch.float64))
    assert torch.equal(
        mixing_matrix(old, old, old_k, old_k)[old.unique()], torch.eye(old_k, dtype=torch.float64)[old.unique()]
    )


@law
@given(seeds, st.integers(2, 30), kinds)
def test_one_cluster_of_all_is_as_heterogeneous_as_pairs_are_apart(seed, rows, kind):
    x = rows_of(seed, rows, 4, kind)
    together = sum_distances(x, torch.ones(rows, 1, dtype=torch.float64), kind).sum() / (rows * (rows - 1))
    assert heterogeneity(x, torch.zeros(rows, dtype=torch.int64), kind) == pytest.approx(float(together))


@law
@given(seeds, st.integers(2, 30), st.integers(1, 6), kinds)
def test_k_center_is_at_most_twice_as_wide_as_its_centers_are_close(seed, rows, k, kind):
    x = rows_of(seed, rows, 4, kind)
    found = k_center(x, k, kind)
    far = between(x, found.centers, kind)
    if found.k > 1:
        apart = between(found.centers, found.centers, kind).fill_diagonal_(torch.inf).min()
        assert far.min(1).values.max() <= apart + 1e-9
    assert torch.allclose(far.gather(1, found.label[:, None])[:, 0], far.min(1).values, atol=1e-7)


# -- halves: single linkage is as good as trying all ways --------------------------------------------------------------


def similarities_of(seed: int, rows: int, dims: int) -> np.ndarray:
    return cosines(torch.from_numpy(np.random.default_rng(seed).normal(size=(rows, dims)))).numpy()


def cross(similarity: np.ndarray, second: np.ndarray) -> float:
    return float(similarity[~second][:, second].max())


@given(seed=st.integers(0, 10**6), rows=st.integers(2, 8), dims=st.integers(1, 4))
@examples(60)
def test_single_linkage_gives_the_least_similarity_across_that_there_can_be(seed, rows, dims):
    similarity = similarities_of(seed, rows, dims)
    best = min(
        cross(similarity, np.array([False, *sides])) for sides in product([False, True], repeat=rows - 1) if any(sides)
    )
    assert cross(similarity, halves(similarity)) == pytest.approx(best)


@given(seed=st.integers(0, 10**6), rows=st.integers(2, 30), linkage=st.sampled_from(["single", "complete"]))
@examples(60)
def test_neither_half_is_empty_and_the_first_row_is_in_the_first(seed, rows, linkage):
    second = halves(similarities_of(seed, rows, 3), linkage)
    assert not second[0]
    assert second.any()


@pytest.mark.parametrize("linkage", ["single", "complete"])
def test_equal_rows_are_halved_too(linkage):
    assert 1 <= halves(np.ones((5, 5)), linkage).sum() <= 4
