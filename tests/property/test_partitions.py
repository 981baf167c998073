"""Laws of partitions: how rows are dealt, whatever the labels, the clients and the seed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.data.partition import (
    IID,
    DirichletClass,
    DirichletEqual,
    Majority,
    Resample,
    Rotation,
    Shards,
    follow,
)
from fedtide.data.ragged import Ragged

law = settings(max_examples=30, deadline=None, derandomize=True)

DEALS = {
    "iid": IID(),
    "iid-rows": IID(rows=4),
    "dirichlet-class": DirichletClass(alpha=0.3, min_rows=2),
    "dirichlet": DirichletEqual(alpha=0.3),
    "dirichlet-rows": DirichletEqual(alpha=0.3, rows=4),
    "shards": Shards(),
    "majority": Majority(p=0.6),
    "rotation": Rotation(),
    "resample": Resample(rows=30),
}
DISJOINT = [name for name in DEALS if name != "resample"]
COMPLETE = ["iid", "dirichlet-class", "shards", "rotation"]


@st.composite
def labelled(draw):
    """Labels of 80 to 300 rows in 3 to 8 classes of unequal sizes, none of them empty, and 2 to 10 clients."""
    classes = draw(st.integers(3, 8))
    sizes = draw(st.lists(st.integers(20, 40), min_size=classes, max_size=classes))
    y = np.repeat(np.arange(classes), sizes)
    order = np.random.default_rng(draw(st.integers(0, 2**16))).permutation(len(y))
    return y[order], classes, draw(st.integers(2, 10))


seeds = st.integers(0, 2**32)


def dealt(partition, y, classes, clients, seed=0) -> Ragged:
    return replace(partition, clients=clients).deal(y, classes, clients, Rng(seed))


def lists(ragged: Ragged) -> list[list[int]]:
    return [ragged[client].tolist() for client in range(len(ragged))]


def classes_held(ragged: Ragged, y: np.ndarray, classes: int) -> np.ndarray:
    """(clients, classes) how many rows of each class each client holds."""
    return np.stack([np.bincount(y[ragged[i].numpy()], minlength=classes) for i in range(len(ragged))])


def balanced(classes: int, each: int) -> np.ndarray:
    return np.arange(classes * each) % classes


# -- every partition --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DISJOINT)
@law
@given(labelled(), seeds)
def test_every_partition_is_disjoint(name, data, seed):
    rows = dealt(DEALS[name], *data, seed).rows
    assert len(rows.unique()) == len(rows)
    assert rows.min() >= 0
    assert rows.max() < len(data[0])


@pytest.mark.parametrize("name", COMPLETE)
@law
@given(labelled(), seeds)
def test_every_partition_without_a_size_is_complete(name, data, seed):
    assert dealt(DEALS[name], *data, seed).rows.sort().values.tolist() == list(range(len(data[0])))


@pytest.mark.parametrize("name", ["dirichlet", "iid", "rotation", "iid-rows", "dirichlet-rows", "resample"])
@law
@given(labelled(), seeds)
def test_equal_partitions_give_everyone_as_many(name, data, seed):
    y, _, clients = data
    counts = dealt(DEALS[name], *data, seed).counts
    share = len(y) // clients
    if name in ("iid", "rotation"):
        assert counts.tolist() == [share + (i < len(y) % clients) for i in range(clients)]
    else:
        assert set(counts.tolist()) == {{"dirichlet": share, "resample": 30}.get(name, 4)}


@pytest.mark.parametrize("name", DEALS)
@law
@given(labelled(), seeds)
def test_rows_of_a_client_are_sorted(name, data, seed):
    ragged = dealt(DEALS[name], *data, seed)
    assert len(ragged) == data[2]
    assert all(rows == sorted(rows) for rows in lists(ragged))


@pytest.mark.parametrize("name", DEALS)
@law
@given(labelled(), seeds)
def test_a_partition_follows_its_seed(name, data, seed):
    once, again = (lists(dealt(DEALS[name], *data, seed)) for _ in range(2))
    assert once == again
    assert once != lists(dealt(DEALS[name], *data, seed + 1))


@pytest.mark.parametrize("name", DISJOINT)
def test_more_clients_than_rows_is_one_line(name):
    with pytest.raises(FedtideError, match=r"7 clients need \d+ rows and there are 6"):
        dealt(DEALS[name], balanced(3, 2), 3, 7)


@pytest.mark.parametrize("name", DEALS)
def test_dealing_no_rows_is_one_line(name):
    with pytest.raises(FedtideError):
        dealt(DEALS[name], np.empty(0, np.int64), 3, 2)


@pytest.mark.parametrize("name", ["iid-rows", "dirichlet-rows"])
def test_asking_for_more_rows_than_there_are_is_one_line(name):
    with pytest.raises(FedtideError, match="5 clients need 20 rows and there are 18"):
        dealt(DEALS[name], balanced(3, 6), 3, 5)


@pytest.mark.parametrize("kind", [DirichletClass, DirichletEqual])
@pytest.mark.parametrize("alpha", [1e-300, 1e-3, 1e6, 1e300])
def test_extreme_concentrations_terminate(kind, alpha):
    y = balanced(10, 40)
    counts = dealt(kind(alpha=alpha), y, 10, 20).counts
    assert counts.sum() == len(y)
    assert counts.min() >= 10


# -- Dirichlet --------------------------------------------------------------------------------------------------------


def distance_from_uniform(ragged: Ragged, y: np.ndarray, classes: int) -> float:
    """The mean total variation between a client's class distribution and the uniform one."""
    held = classes_held(ragged, y, classes)
    return float(np.abs(held / held.sum(1, keepdims=True) - 1 / classes).sum(1).mean() / 2)


def test_a_large_alpha_is_as_uniform_as_iid():
    y = balanced(10, 1000)
    even = distance_from_uniform(dealt(IID(rows=400), y, 10, 20), y, 10)
    assert distance_from_uniform(dealt(DirichletEqual(alpha=1e6, rows=400), y, 10, 20), y, 10) < 1.3 * even
    by_class = dealt(DirichletClass(alpha=1e6), y, 10, 20)
    assert distance_from_uniform(by_class, y, 10) < 0.02
    assert (by_class.counts - 500).abs().max() <= 20


def test_a_small_alpha_leaves_two_classes_or_fewer_to_most_clients():
    y = balanced(10, 600)
    for seed in range(3):
        held = classes_held(dealt(DirichletEqual(alpha=0.01), y, 10, 100, seed), y, 10)
        assert np.median((held > 0).sum(1)) <= 2


def test_heterogeneity_falls_with_alpha():
    y = balanced(10, 600)
    spread = [distance_from_uniform(dealt(DirichletEqual(alpha=a), y, 10, 60), y, 10) for a in (0.05, 0.5, 5.0)]
    assert spread == sorted(spread, reverse=True)


@law
@given(labelled(), seeds, st.sampled_from([1e-3, 0.1, 1.0]), st.sampled_from([1, 3, 100]))
def test_dirichlet_by_class_gives_everyone_the_least_number_of_rows(data, seed, alpha, tries):
    y, _, clients = data
    for least in (1, len(y) // clients):
        ragged = dealt(DirichletClass(alpha=alpha, min_rows=least, tries=tries), *data, seed)
        assert ragged.counts.min() >= least
        assert ragged.rows.sort().values.tolist() == list(range(len(y)))


def test_dirichlet_by_class_gives_nothing_more_to_whoever_has_an_equal_part():
    y = balanced(10, 40)
    for seed in range(20):
        held = classes_held(dealt(DirichletClass(min_rows=0), y, 10, 5, seed), y, 10)
        full = held.cumsum(1) - held >= len(y) / 5  # before the class was dealt
        assert full.any()
        assert not (held * full)[:-1].any()
        assert (held * full)[-1].max() <= 1  # the last client takes what rounding leaves


def test_rows_that_are_moved_to_a_poor_client_are_drawn_at_random():
    """One class, and one client draws all of it: the other's rows were moved."""
    y, moved = np.zeros(400, int), []
    for seed in range(8):
        ragged = dealt(DirichletClass(alpha=1e-3, min_rows=20, tries=1), y, 1, 2, seed)
        assert sorted(ragged.counts.tolist()) == [20, 380]
        moved.append(ragged[int(ragged.counts.argmin())].tolist())
    assert 150 < np.mean(moved) < 250
    assert len(set(map(tuple, moved))) == 8


def test_dirichlet_by_class_without_enough_rows_for_its_least_number_is_one_line():
    with pytest.raises(FedtideError, match="5 clients need 50 rows and there are 48"):
        dealt(DirichletClass(min_rows=10), balanced(3, 16), 3, 5)


@law
@given(st.integers(0, 100))
def test_a_class_drawn_dry_leaves_every_distribution(seed):
    # Two rare classes: the clients that would like them get others, and everyone has as many rows.
    y = np.repeat(np.arange(4), [3, 3, 97, 97])
    held = classes_held(dealt(DirichletEqual(alpha=0.05), y, 4, 10, seed), y, 4)
    assert (held.sum(1) == 20).all()
    assert held.sum(0).tolist() == [3, 3, 97, 97]


# -- shards -----------------------------------------------------------------------------------------------------------


@law
@given(st.integers(1, 4), st.integers(1, 4), st.integers(2, 6), seeds)
def test_a_client_of_shards_holds_at_most_a_class_per_shard(per_client, shards_per_class, classes, seed):
    clients = classes * shards_per_class
    y = balanced(classes, 12 * per_client * shards_per_class)
    ragged = dealt(Shards(per_client=per_client), y, classes, clients, seed)
    assert ((classes_held(ragged, y, classes) > 0).sum(1) <= per_client).all()
    assert set(ragged.counts.tolist()) == {12 * per_client}


# -- majority ---------------------------------------------------------------------------------------------------------


def half_of(p: float, each: int) -> int:
    return int(round(p * each / 2, 9))


def pairs_of(seed: int) -> np.ndarray:
    """The two majority classes of 20 clients: what they hold where nothing else is."""
    y = balanced(10, 200)
    held = classes_held(dealt(Majority(p=1.0, rows=10), y, 10, 20, seed), y, 10)
    return np.stack([np.flatnonzero(row) for row in held])


@pytest.mark.parametrize("rows", [50, 51, None])
@pytest.mark.parametrize("p", [0.2, 0.5, 0.7, 0.8, 0.95])
def test_majority_classes_have_exactly_their_share(p, rows):
    y = balanced(10, 300)
    for seed in range(8):
        held = classes_held(dealt(Majority(p=p, rows=rows), y, 10, 20, seed), y, 10)
        each = int(held[0].sum())
        assert each == rows or rows is None
        assert (held.sum(1) == each).all()
        assert (np.take_along_axis(held, pairs_of(seed), axis=1) == half_of(p, each)).all()


@pytest.mark.parametrize("p", [0.0, 0.2, 0.29, 0.58, 1.0])
def test_product_pairs_have_exactly_their_share(p):
    y, each = balanced(10, 400), 50
    held = classes_held(dealt(Majority(p=p, rows=each, pairs="product"), y, 10, 23), y, 10)
    for i, row in enumerate(held):
        first, second = i // 10, i % 10
        if first == second:  # as released: the pair (0, 0) asks for both halves from one class
            assert row[first] == 2 * half_of(p, each)
        else:
            assert row[first] == row[second] == half_of(p, each)
        assert row.sum() == each


@pytest.mark.parametrize("rows", [50, None])
def test_all_majority_means_two_classes_each(rows):
    y = balanced(10, 200)
    for seed in range(5):
        held = classes_held(dealt(Majority(p=1.0, rows=rows), y, 10, 20, seed), y, 10)
        assert ((held > 0).sum(1) == 2).all()


def test_a_fifth_in_ten_classes_is_nearly_iid():
    y = balanced(10, 1000)
    even = distance_from_uniform(dealt(IID(rows=200), y, 10, 20), y, 10)
    assert distance_from_uniform(dealt(Majority(p=0.2, rows=200), y, 10, 20), y, 10) < 1.3 * even


def test_random_pairs_are_two_classes_and_differ_between_clients():
    y = balanced(10, 200)
    held = classes_held(dealt(Majority(p=1.0, rows=40), y, 10, 20), y, 10)
    pairs = {tuple(np.flatnonzero(row).tolist()) for row in held}
    assert all(len(pair) == 2 for pair in pairs)
    assert len(pairs) > 5


@law
@given(seeds)
def test_majority_names_the_class_that_is_too_small_and_the_rows_that_are_allowed(seed):
    # Six clients ask for two of ten classes each, so that two of them share one.
    y = balanced(10, 60)
    with pytest.raises(FedtideError, match=r"data.partition.rows: found 100, .*class \d ") as caught:
        dealt(Majority(p=0.8, rows=100), y, 10, 6, seed)
    allowed = int(str(caught.value).split("at most ")[1])
    assert set(dealt(Majority(p=0.8, rows=allowed), y, 10, 6, seed).counts.tolist()) == {allowed}


def test_majority_needs_three_classes():
    with pytest.raises(FedtideError, match="needs 3 classes or more, found 2"):
        dealt(Majority(), balanced(2, 50), 2, 5)


def test_majority_with_too_few_rows_for_anybody_is_one_line():
    """Ten clients ask for a class of which there is one row: nobody could have any."""
    with pytest.raises(FedtideError, match=r"kind 'majority' finds no rows for 10 clients among \[1, 1, 100\] rows"):
        dealt(Majority(p=1.0), np.repeat(np.arange(3), [1, 1, 100]), 3, 10)


def test_majority_chooses_among_the_classes_that_are_there():
    # A group of clients by labels (day: 0-4, night: 5-9) has half of the classes.
    y = balanced(5, 200)
    held = classes_held(dealt(Majority(p=0.8), y, 10, 10), y, 10)
    assert (held.sum(1) > 50).all()
    assert (np.sort(held, axis=1)[:, -2:] == half_of(0.8, int(held[0].sum()))).all()


# -- a test set follows the same profiles -----------------------------------------------------------------------------


def distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """(clients, clients) total variation between the class distributions in `a` and those in `b`."""
    p, q = (held / np.maximum(held.sum(1, keepdims=True), 1) for held in (a, b))
    return np.abs(p[:, None] - q[None]).sum(-1) / 2


PROFILED = {
    "dirichlet": DirichletEqual(alpha=0.1, rows=20),
    "dirichlet-class": DirichletClass(alpha=0.3, min_rows=1),
    "dirichlet-class-redrawn": DirichletClass(alpha=0.1, min_rows=10),
    "shards": Shards(),
    "majority": Majority(p=0.8, rows=20),
    "majority-product": Majority(p=0.8, rows=20, pairs="product"),
}


@pytest.mark.parametrize("name", PROFILED)
def test_a_test_set_follows_the_same_profiles(name):
    partition = PROFILED[name]
    train, test = balanced(10, 400), balanced(10, 100)
    for seed in range(4):
        a = classes_held(dealt(partition, train, 10, 20, seed), train, 10)
        followed = follow(test, a, Rng(seed))
        assert len(followed.rows.unique()) == len(followed.rows)
        between = distances(a, classes_held(followed, test, 10))
        own = np.diag(between)
        others = between[~np.eye(20, dtype=bool)]
        assert np.median(own) < 0.5 * np.median(others)


@law
@given(seeds)
def test_majority_pairs_are_the_same_for_test_rows(seed):
    y, partition = balanced(10, 200), Majority(p=1.0, rows=20)
    train = classes_held(dealt(partition, y, 10, 20, seed), y, 10)
    test = classes_held(follow(y, train, Rng(seed)), y, 10)
    assert ((train > 0) == (test > 0)).all()
