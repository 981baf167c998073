"""Halving a set of clients: single linkage is as good as trying all ways."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedtide.algorithms.cfl import bipartition as halves
from fedtide.clusters.distance import cosines
from helpers.examples import examples


def rows_of(seed: int, rows: int, dims: int) -> np.ndarray:
    return cosines(torch.from_numpy(np.random.default_rng(seed).normal(size=(rows, dims)))).numpy()


def cross(similarity: np.ndarray, second: np.ndarray) -> float:
    return float(similarity[~second][:, second].max())


@given(seed=st.integers(0, 10**6), rows=st.integers(2, 8), dims=st.integers(1, 4))
@examples(60)
def test_single_linkage_gives_the_least_similarity_across_that_there_can_be(seed, rows, dims):
    similarity = rows_of(seed, rows, dims)
    best = min(
        cross(similarity, np.array([False, *sides])) for sides in product([False, True], repeat=rows - 1) if any(sides)
    )
    assert cross(similarity, halves(similarity)) == pytest.approx(best)


@given(seed=st.integers(0, 10**6), rows=st.integers(2, 30), linkage=st.sampled_from(["single", "complete"]))
@examples(60)
def test_neither_half_is_empty_and_the_first_row_is_in_the_first(seed, rows, linkage):
    second = halves(rows_of(seed, rows, 3), linkage)
    assert not second[0]
    assert second.any()


@pytest.mark.parametrize("linkage", ["single", "complete"])
def test_equal_rows_are_halved_too(linkage):
    assert 1 <= halves(np.ones((5, 5)), linkage).sum() <= 4
