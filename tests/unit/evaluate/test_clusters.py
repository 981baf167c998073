"""Agreement of clusters with groups, against another library and by its laws."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fedtide.evaluate.clusters import ari, churn, contingency, evenness, nmi, purity

labels = st.integers(2, 30).flatmap(
    lambda n: st.tuples(*[arrays.arrays(np.int64, n, elements=st.integers(0, 4)) for _ in range(2)])
)


@given(labels)
def test_ari_and_nmi_are_those_of_another_library(pair):
    metrics = pytest.importorskip("sklearn.metrics")
    table = contingency(*pair)
    assert ari(table) == pytest.approx(metrics.adjusted_rand_score(*pair), abs=1e-12)
    assert nmi(table) == pytest.approx(metrics.normalized_mutual_info_score(*pair), abs=1e-9)


@given(labels, st.permutations(range(5)))
def test_names_of_clusters_do_not_matter(pair, order):
    groups, clusters = pair
    renamed = np.array(order)[clusters]
    for measure in (ari, nmi, purity):
        assert measure(contingency(groups, renamed)) == pytest.approx(measure(contingency(groups, clusters)), abs=1e-12)


@given(labels)
def test_a_labeling_agrees_with_itself(pair):
    table = contingency(pair[0], pair[0])
    assert (ari(table), purity(table)) == (1.0, 1.0)
    assert nmi(table) == pytest.approx(1.0)


@pytest.mark.parametrize("groups", [[3, 3, 3, 3], [0, 1, 2, 3]], ids=["one cluster", "all alone"])
def test_labellings_that_say_nothing_agree_by_definition(groups):
    assert ari(contingency(np.array(groups), np.array(groups[::-1]))) == 1.0


def test_random_clusters_have_an_ari_near_zero():
    draw = np.random.default_rng(0)
    found = [ari(contingency(draw.integers(0, 3, 60), draw.integers(0, 3, 60))) for _ in range(200)]
    assert abs(np.mean(found)) < 0.01


def test_purity_of_one_cluster_is_the_share_of_the_largest_group():
    assert purity(np.array([[6], [2]])) == 0.75


@pytest.mark.parametrize(("sizes", "expected"), [([5], 0.0), ([4, 4, 4], 1.0), ([2, 2, 0], math.log(2) / math.log(3))])
def test_evenness_is_a_share_of_its_largest(sizes, expected):
    assert evenness(np.array(sizes)) == pytest.approx(expected)


def test_churn_counts_those_who_were_there_before():
    assert math.isnan(churn({}, {1: 0}))
    assert churn({1: 0, 2: 1}, {1: 1, 2: 1, 3: 0}) == 0.5


def test_churn_does_not_count_clusters_that_got_another_number():
    """Client 5 moves from the second cluster to the first, and all numbers change."""
    before = dict(enumerate([0, 0, 0, 1, 1, 1, 2, 2]))
    after = dict(enumerate([2, 2, 2, 0, 0, 2, 1, 1]))
    assert churn(before, after) == 1 / 8
    assert churn(before, {client: 9 - cluster for client, cluster in before.items()}) == 0


def test_a_cluster_that_splits_is_still_one_of_its_halves():
    """Of six the larger part of four is what was there; two have a new cluster. Two that merge lose the smaller one."""
    whole, halves = dict.fromkeys(range(6), 4), dict(enumerate([3, 3, 0, 0, 0, 0]))
    assert churn(whole, halves) == churn(halves, whole) == 2 / 6
