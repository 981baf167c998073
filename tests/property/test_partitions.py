"""Laws of partitions: how rows are dealt, whatever the labels, the clients and the seed."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.data.partition import (
    CIFAR_100,
    IID,
    Dirichlet,
    DirichletClass,
    LabelShards,
    LabelsInOrder,
    Majority,
    Pachinko,
    Resample,
    Rotation,
    allocate,
    follow,
)
from fedtide.data.ragged import Ragged
from helpers.examples import examples

law = examples(30)

DEALS = {
    "iid": IID(),
    "iid-rows": IID(samples=4),
    "dirichlet-class": DirichletClass(alpha=0.3, min_samples=2),
    "dirichlet": Dirichlet(alpha=0.3),
    "dirichlet-rows": Dirichlet(alpha=0.3, samples=4),
    "dirichlet-base": DirichletClass(alpha=0.3, min_samples=2, base=1, limited=False),
    "shards": LabelShards(),
    "in-order": LabelsInOrder(),
    "majority": Majority(p=0.6),
    "pachinko": Pachinko(alpha=0.3, beta=1.0),
    "pachinko-rows": Pachinko(samples=4),
    "rotation": Rotation(),
    "resample": Resample(samples=30),
}
DISJOINT = [name for name in DEALS if name != "resample"]
COMPLETE = ["iid", "dirichlet-class", "dirichlet-base", "shards", "rotation"]


@st.composite
def labeled(draw):
    """Labels of 80 to 300 rows in 3 to 8 classes of unequal sizes, none of them empty, and 2 to 10 clients."""
    classes = draw(st.integers(3, 8))
    sizes = draw(st.lists(st.integers(20, 40), min_size=classes, max_size=classes))
    y = np.repeat(np.arange(classes), sizes)
    order = np.random.default_rng(draw(st.integers(0, 2**16))).permutation(len(y))
    return y[order], classes, draw(st.integers(2, 10))


seeds = st.integers(0, 2**32)


def dealt(partition, y, classes, clients, seed=0) -> Ragged:
    if isinstance(partition, Pachinko) and partition.groups == "cifar-100":
        partition = replace(partition, groups=tuple(tuple(range(classes))[i : i + 3] for i in range(0, classes, 3)))
    return replace(partition, clients=clients).deal(y, classes, clients, Rng(seed))


def lists(ragged: Ragged) -> list[list[int]]:
    return [ragged[client].tolist() for client in range(len(ragged))]


def classes_held(ragged: Ragged, y: np.ndarray, classes: int) -> np.ndarray:
    """(clients, classes) how many rows of each class each client holds."""
    return np.stack([np.bincount(y[ragged[i].numpy()], minlength=classes) for i in range(len(ragged))])


def balanced(classes: int, each: int) -> np.ndarray:
    return np.arange(classes * each) % classes


# -- every partition --------------------------------------------------------------------------------------------------


EQUAL = {"dirichlet": None, "pachinko": None, "resample": 30, "iid-rows": 4, "dirichlet-rows": 4, "pachinko-rows": 4}
"""Rows of every client; None: an equal share of all."""


@pytest.mark.parametrize("name", DEALS)
@law
@given(labeled(), seeds)
def test_every_partition_deals_sorted_rows_once_and_evenly_where_it_says_so(name, data, seed):
    y, _, clients = data
    ragged = dealt(DEALS[name], *data, seed)
    rows, counts, share = ragged.rows, ragged.counts.tolist(), len(y) // clients
    assert len(ragged) == clients
    assert all(own == sorted(own) for own in lists(ragged))
    assert rows.min() >= 0
    assert rows.max() < len(y)
    assert name not in DISJOINT or len(rows.unique()) == len(rows)
    assert name not in COMPLETE or len(rows) == len(y)
    if name in ("iid", "rotation"):
        assert counts == [share + (i < len(y) % clients) for i in range(clients)]
    assert name not in EQUAL or set(counts) == {EQUAL[name] or share}


@pytest.mark.parametrize("name", DEALS)
@law
@given(labeled(), seeds)
def test_a_partition_follows_its_seed(name, data, seed):
    once, again = (lists(dealt(DEALS[name], *data, seed)) for _ in range(2))
    assert once == again
    if name != "in-order" or data[2] > data[1] / 2:  # else a class has one taker, and nothing is drawn
        assert once != lists(dealt(DEALS[name], *data, seed + 1))


@pytest.mark.parametrize("name", DISJOINT)
def test_asking_for_more_rows_than_there_are_is_one_line(name):
    with pytest.raises(FedtideError, match=r"found 7, but they need \d+ rows and there are 6"):
        dealt(DEALS[name], balanced(3, 2), 3, 7)
    if name.endswith("-rows"):
        with pytest.raises(FedtideError, match="found 5, but they need 20 rows and there are 18"):
            dealt(DEALS[name], balanced(3, 6), 3, 5)


@pytest.mark.parametrize("kind", [DirichletClass, Dirichlet])
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


def test_a_small_alpha_leaves_two_classes_or_fewer_to_most_clients():
    y = balanced(10, 600)
    for seed in range(3):
        held = classes_held(dealt(Dirichlet(alpha=0.01), y, 10, 100, seed), y, 10)
        assert np.median((held > 0).sum(1)) <= 2


def test_heterogeneity_falls_with_alpha():
    y = balanced(10, 600)
    spread = [distance_from_uniform(dealt(Dirichlet(alpha=a), y, 10, 60), y, 10) for a in (0.05, 0.5, 5.0)]
    assert spread == sorted(spread, reverse=True)


@law
@given(labeled(), seeds, st.sampled_from([1e-3, 0.1, 1.0]), st.sampled_from([1, 3, 100]))
def test_dirichlet_by_class_gives_everyone_the_least_number_of_rows(data, seed, alpha, tries):
    y, _, clients = data
    for least in (1, len(y) // clients):
        ragged = dealt(DirichletClass(alpha=alpha, min_samples=least, tries=tries), *data, seed)
        assert ragged.counts.min() >= least
        assert ragged.rows.sort().values.tolist() == list(range(len(y)))


def test_dirichlet_by_class_gives_nothing_more_to_whoever_has_an_equal_part():
    y = balanced(10, 40)
    for seed in range(20):
        held = classes_held(dealt(DirichletClass(min_samples=0), y, 10, 5, seed), y, 10)
        full = held.cumsum(1) - held >= len(y) / 5  # before the class was dealt
        assert full.any()
        assert not (held * full)[:-1].any()
        assert (held * full)[-1].max() <= 1  # the last client takes what rounding leaves


def test_rows_that_are_moved_to_a_poor_client_are_drawn_at_random():
    """One class, and one client draws all of it: the other's rows were moved."""
    y, moved = np.zeros(400, int), []
    for seed in range(8):
        ragged = dealt(DirichletClass(alpha=1e-3, min_samples=20, tries=1), y, 1, 2, seed)
        assert sorted(ragged.counts.tolist()) == [20, 380]
        moved.append(ragged[int(ragged.counts.argmin())].tolist())
    assert 150 < np.mean(moved) < 250
    assert len(set(map(tuple, moved))) == 8


@law
@given(st.integers(0, 100))
def test_a_class_drawn_dry_leaves_every_distribution(seed):
    # Two rare classes: the clients that would like them get others, and everyone has as many rows.
    y = np.repeat(np.arange(4), [3, 3, 97, 97])
    held = classes_held(dealt(Dirichlet(alpha=0.05), y, 4, 10, seed), y, 4)
    assert (held.sum(1) == 20).all()
    assert held.sum(0).tolist() == [3, 3, 97, 97]


# -- Pachinko ---------------------------------------------------------------------------------------------------------

NAMES = """
aquatic mammals: beaver, dolphin, otter, seal, whale
fish: aquarium fish, flatfish, ray, shark, trout
flowers: orchid, poppy, rose, sunflower, tulip
food containers: bottle, bowl, can, cup, plate
fruit and vegetables: apple, mushroom, orange, pear, sweet pepper
household electrical devices: clock, keyboard, lamp, telephone, television
household furniture: bed, chair, couch, table, wardrobe
insects: bee, beetle, butterfly, caterpillar, cockroach
large carnivores: bear, leopard, lion, tiger, wolf
large man-made outdoor things: bridge, castle, house, road, skyscraper
large natural outdoor scenes: cloud, forest, mountain, plain, sea
large omnivores and herbivores: camel, cattle, chimpanzee, elephant, kangaroo
medium-sized mammals: fox, porcupine, possum, raccoon, skunk
non-insect invertebrates: crab, lobster, snail, spider, worm
people: baby, boy, girl, man, woman
reptiles: crocodile, dinosaur, lizard, snake, turtle
small mammals: hamster, mouse, rabbit, shrew, squirrel
trees: maple tree, oak tree, palm tree, pine tree, willow tree
vehicles 1: bicycle, bus, motorcycle, pickup truck, train
vehicles 2: lawn mower, rocket, streetcar, tank, tractor
"""
"""The super-classes of CIFAR-100 and their classes, as its page lists them."""


def test_super_classes_of_cifar_100_are_the_published_ones():
    """Both are numbered in the order of the alphabet."""
    named = [line.split(": ")[1].split(", ") for line in NAMES.split("\n") if line]
    number = {name: k for k, name in enumerate(sorted(name for names in named for name in names))}
    assert len(number) == 100
    assert [sorted(number[name] for name in names) for names in named] == [list(labels) for labels in CIFAR_100]


def test_a_used_up_label_leaves_its_share_to_its_super_class():
    """Labels 0 and 1 are one super-class, 2 the other, all shares 1/2; there are two rows of label 0.

    A super-class is drawn first, so that half of the 40 rows are of the first however soon label 0 is used up. If its
    share went to all other labels, 1 would have no more than 2 has: label 2 would be drawn more than twice as often.
    """
    root, fine = np.array([[0.5, 0.5]]), [np.array([[0.5, 0.5]]), np.array([[1.0]])]
    supers = [np.array([0, 1]), np.array([2])]
    drawn = np.array([
        allocate(root, fine, supers, 40, np.array([2, 500, 500]), Rng(seed).numpy())[0] for seed in range(400)
    ])  # fmt: skip
    assert (drawn.sum(1) == 40).all()
    assert (drawn[:, 0] <= 2).all()
    assert drawn[:, 2].mean() == pytest.approx(20, abs=4 * np.sqrt(40 / 4 / 400))


def test_a_used_up_super_class_leaves_its_share_to_the_others():
    root, fine = np.array([[0.8, 0.1, 0.1]]), [np.ones((1, 1))] * 3
    drawn = np.array([
        allocate(root, fine, [np.array([k]) for k in range(3)], 50, np.array([10, 500, 500]), Rng(seed).numpy())[0]
        for seed in range(400)
    ])  # fmt: skip
    assert (drawn[:, 0] == 10).all()
    assert drawn[:, 1].mean() == pytest.approx(20, abs=4 * np.sqrt(40 / 4 / 400))


def test_what_is_dealt_is_taken_from_what_is_left():
    root, fine = np.full((3, 2), 0.5), [np.full((3, 2), 0.5), np.ones((3, 1))]
    left = np.array([3, 20, 10])
    drawn = allocate(root, fine, [np.array([0, 2]), np.array([1])], 11, left, Rng(0).numpy())
    assert (drawn.sum(1) == 11).all()
    assert left.tolist() == (np.array([3, 20, 10]) - drawn.sum(0)).tolist()
    assert left.sum() == 0


def test_a_client_has_few_super_classes_and_most_labels_of_each():
    """As for CIFAR-100: alpha 0.1 and beta 10, 20 super-classes of five labels, 100 rows.

    The share p of a super-class is Beta(0.1, 1.9), and E (1 - p)^100 = B(0.1, 101.9) / B(0.1, 1.9) = 0.6547, so that a
    client has 20 * (1 - 0.6547) = 6.9 of them, where none is used up.
    """
    y = balanced(100, 1000)
    held = classes_held(dealt(Pachinko(groups=CIFAR_100, samples=100), y, 100, 200), y, 100)
    coarse = np.stack([held[:, list(labels)].sum(1) for labels in CIFAR_100], 1)
    main, number = coarse.argmax(1), (coarse > 0).sum(1)
    assert number.mean() == pytest.approx(6.906, abs=4 * number.std() / np.sqrt(200))
    inside = np.stack([held[i, list(CIFAR_100[k])] for i, k in enumerate(main)])
    assert np.median((inside > 0).sum(1)) == 5


def test_the_two_concentrations_are_of_the_two_levels():
    y, groups = balanced(12, 200), ((0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11))

    def held(alpha: float, beta: float) -> tuple[float, float]:
        ragged = dealt(Pachinko(groups=groups, alpha=alpha, beta=beta, samples=60), y, 12, 20)
        counts = classes_held(ragged, y, 12).reshape(20, 4, 3)
        coarse = counts.sum(2)
        return float((coarse.max(1) / 60).mean()), float(counts.max(2)[coarse > 9].sum() / coarse[coarse > 9].sum())

    even, few, lone = held(1e3, 1e3), held(0.05, 1e3), held(1e3, 0.05)
    assert even[0] < 0.4 < 0.7 < few[0]
    assert lone[0] < 0.4
    assert max(even[1], few[1]) < 0.5 < 0.7 < lone[1]


@pytest.mark.parametrize(("partition", "classes", "said"), [
    (Pachinko(groups=((0, 1), (2,))), 4, r"data.partition.groups: label 3 is in none of them; allowed: every label"),
    (Pachinko(groups=((0, 1), (2, 3, 4))), 4, r"data.partition.groups: found 4, allowed: labels from 0 to 3"),
    (Pachinko(groups=CIFAR_100), 10, r"data.partition.groups: found 30, allowed: labels from 0 to 9"),
])  # fmt: skip
def test_super_classes_that_do_not_fit_the_labels_are_one_line(partition, classes, said):
    with pytest.raises(FedtideError, match=said):
        dealt(partition, balanced(classes, 20), classes, 2)


@pytest.mark.parametrize(("groups", "said"), [
    (((0, 1), (1, 2)), "label 1 stands twice in groups"),
    (((0, 1), ()), "allowed: 'cifar-100', or lists of labels"), ((), "allowed: 'cifar-100', or lists of labels"),
])  # fmt: skip
def test_super_classes_that_cannot_be(groups, said):
    with pytest.raises(FedtideError, match=said):
        Pachinko(groups=groups)


# -- shards -----------------------------------------------------------------------------------------------------------


@law
@given(st.integers(1, 4), st.integers(1, 4), st.integers(2, 6), seeds)
def test_a_client_of_shards_holds_at_most_a_class_per_shard(per_client, shards_per_class, classes, seed):
    clients = classes * shards_per_class
    y = balanced(classes, 12 * per_client * shards_per_class)
    ragged = dealt(LabelShards(per_client=per_client), y, classes, clients, seed)
    assert ((classes_held(ragged, y, classes) > 0).sum(1) <= per_client).all()
    assert set(ragged.counts.tolist()) == {12 * per_client}


# -- classes in order -------------------------------------------------------------------------------------------------


def test_two_classes_for_each_of_twenty_clients_in_order():
    """PFLlib with ten classes of 7,000: each class has four takers, 20 / 10 * 2; clients 0 to 3 lack two, and so on.

    An even share is 1,750, of which three take from 175 to 1,749, and the last one takes the rest.
    """
    y = balanced(10, 7000)
    ragged = dealt(LabelsInOrder(), y, 10, 20)
    held = classes_held(ragged, y, 10)
    for client in range(20):
        first = client // 4 * 2
        assert np.flatnonzero(held[client]).tolist() == [first, first + 1]
        for label in (first, first + 1):
            assert 175 <= held[client, label] <= (1749 if client % 4 < 3 else 7000 - 3 * 175)
    assert held.sum() == 70_000
    assert len(set(held[:, ::2].max(1).tolist())) > 15
    assert ragged[0].tolist() != sorted(np.flatnonzero(y == 0)[: held[0, 0]].tolist())[: len(ragged[0])]


def test_a_client_takes_a_tenth_of_an_even_share_or_more():
    """Four classes of 200 rows, each with two takers: an even share is 100."""
    y = balanced(4, 200)
    taken = [classes_held(dealt(LabelsInOrder(), y, 4, 4, seed), y, 4)[0, 0] for seed in range(60)]
    assert 10 <= min(taken) < 20
    assert 80 < max(taken) < 100


@law
@given(labeled(), seeds, st.integers(1, 3))
def test_a_client_has_the_next_classes_that_it_lacks(data, seed, per_client):
    """By the listing: a class has so many takers, the first clients that lack one; without takers it is unused."""
    y, classes, clients = data
    held = classes_held(dealt(LabelsInOrder(per_client=per_client), *data, seed), y, classes)
    lacking, takers = [per_client] * clients, -(-clients * per_client // classes)
    for c in range(classes):
        chosen = [client for client in range(clients) if lacking[client]][:takers]
        assert np.flatnonzero(held[:, c]).tolist() == chosen
        assert held[:, c].sum() == ((y == c).sum() if chosen else 0)
        for client in chosen:
            lacking[client] -= 1
        even = (y == c).sum() / max(len(chosen), 1)
        assert all(max(even // 10, 1) <= held[client, c] <= max(even - 1, 1) for client in chosen[:-1])


@pytest.mark.parametrize(("y", "said"), [
    (np.repeat([0, 1, 2], [1, 20, 20]), "clients: found 3, but label 0 has 1 rows for 2 of them; allowed: fewer"),
    (np.zeros(20, int), "per_client: found 2, allowed: at most 1, the number of labels"),
])  # fmt: skip
def test_classes_in_order_that_cannot_be_dealt_are_one_line(y, said):
    with pytest.raises(FedtideError, match=said):
        dealt(LabelsInOrder(), y, 3, 3)


# -- a base of each class ---------------------------------------------------------------------------------------------


@law
@given(labeled(), seeds, st.integers(0, 2), st.sampled_from([1e-3, 0.1, 1.0]))
def test_each_client_gets_the_base_of_each_class(data, seed, base, alpha):
    y, classes, _ = data
    partition = DirichletClass(alpha=alpha, min_samples=0, base=base, limited=False)
    ragged = dealt(partition, *data, seed)
    assert (classes_held(ragged, y, classes) >= base).all()
    assert ragged.rows.sort().values.tolist() == list(range(len(y)))


def test_a_base_leaves_the_rest_to_the_draw_whoever_holds_an_equal_part():
    """With a tiny alpha one client draws a whole class: of 40 rows 5 clients have a base of 2, and one has 30 more.

    Shares are rounded down but that of the last client, which may have one of them.
    """
    y = balanced(10, 40)
    partition, most = DirichletClass(alpha=1e-6, min_samples=0, base=2, limited=False), []
    for seed in range(10):
        held = classes_held(dealt(partition, y, 10, 5, seed), y, 10)
        assert held.min() == 2
        assert set(held.max(0).tolist()) <= {31, 32}
        most.append(held.sum(1).max())
    assert max(most) >= 20 + 4 * 29  # four classes, though two are an equal part of all rows


def test_too_large_a_base_is_one_line():
    with pytest.raises(FedtideError, match=r"base: found 5, but label 0 has 8 rows for 2 clients; allowed: at most 4"):
        dealt(DirichletClass(base=5), balanced(3, 8), 3, 2)


# -- majority ---------------------------------------------------------------------------------------------------------


def half_of(p: float, each: int) -> int:
    return int(round(p * each / 2, 9))


def pairs_of(seed: int) -> np.ndarray:
    """The two majority classes of 20 clients: what they hold where nothing else is."""
    y = balanced(10, 200)
    held = classes_held(dealt(Majority(p=1.0, samples=10), y, 10, 20, seed), y, 10)
    return np.stack([np.flatnonzero(row) for row in held])


@pytest.mark.parametrize("rows", [50, 51, None])
@pytest.mark.parametrize("p", [0.2, 0.5, 0.7, 0.8, 0.95])
def test_majority_classes_have_exactly_their_share(p, rows):
    y = balanced(10, 300)
    for seed in range(8):
        held = classes_held(dealt(Majority(p=p, samples=rows), y, 10, 20, seed), y, 10)
        each = int(held[0].sum())
        assert each == rows or rows is None
        assert (held.sum(1) == each).all()
        assert (np.take_along_axis(held, pairs_of(seed), axis=1) == half_of(p, each)).all()


@pytest.mark.parametrize("p", [0.0, 0.2, 0.29, 0.58, 1.0])
def test_product_pairs_have_exactly_their_share(p):
    y, each = balanced(10, 400), 50
    held = classes_held(dealt(Majority(p=p, samples=each, pairs="product"), y, 10, 23), y, 10)
    for i, row in enumerate(held):
        first, second = i // 10, i % 10
        if first == second:  # as released: the pair (0, 0) asks for both halves from one class
            assert row[first] == 2 * half_of(p, each)
        else:
            assert row[first] == row[second] == half_of(p, each)
        assert row.sum() == each


@law
@given(seeds)
def test_majority_names_the_rows_that_are_allowed(seed):
    # Six clients ask for two of ten classes each, so that two of them share one.
    y = balanced(10, 60)
    with pytest.raises(FedtideError, match=r"data.partition.samples: found 100, but too few of") as caught:
        dealt(Majority(p=0.8, samples=100), y, 10, 6, seed)
    allowed = int(str(caught.value).split("at most ")[1])
    assert set(dealt(Majority(p=0.8, samples=allowed), y, 10, 6, seed).counts.tolist()) == {allowed}


def test_majority_needs_three_classes():
    with pytest.raises(FedtideError, match=r"found .majority., but the rows have 2 classes; allowed: rows of 3"):
        dealt(Majority(), balanced(2, 50), 2, 5)


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
    "dirichlet": Dirichlet(alpha=0.1, samples=20),
    "dirichlet-class": DirichletClass(alpha=0.3, min_samples=1),
    "dirichlet-class-redrawn": DirichletClass(alpha=0.1, min_samples=10),
    "shards": LabelShards(),
    "pachinko": Pachinko(samples=20),
    "majority": Majority(p=0.8, samples=20),
    "majority-product": Majority(p=0.8, samples=20, pairs="product"),
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
    y, partition = balanced(10, 200), Majority(p=1.0, samples=20)
    train = classes_held(dealt(partition, y, 10, 20, seed), y, 10)
    test = classes_held(follow(y, train, Rng(seed)), y, 10)
    assert ((train > 0) == (test > 0)).all()


@pytest.mark.parametrize("rows", [5, 9, 40])
@pytest.mark.parametrize("block", [1, 7, 10_000])
def test_shared_rows_are_those_of_one_table_whatever_is_sorted_at_a_time(rows, block, monkeypatch):
    monkeypatch.setattr("fedtide.data.partition.BLOCK", block)
    draw = Rng(3).at("rows").numpy()
    table = np.sort(draw.integers(0, rows, (50, 2), dtype=np.int32), axis=1)
    while len(at := np.flatnonzero(table[:, 0] == table[:, 1])):
        table[at, 0] = draw.integers(0, rows, len(at), dtype=np.int32)
        table = np.sort(table, axis=1)
    found = Resample(clients=50, samples=2).deal(np.zeros(rows, dtype=np.int64), 1, 50, Rng(3))
    assert found.rows.tolist() == table.flatten().tolist()
