"""Laws of populations as they are built: parts, groups, held-out clients, test sets of the source's own."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedtide.core.rng import Rng
from fedtide.data.partition import (
    IID,
    ByDomain,
    ByLabels,
    Dirichlet,
    DirichletClass,
    HeldOutClients,
    LabelShards,
    Majority,
    Natural,
    OneGroup,
    Pachinko,
    Resample,
    Rotation,
    Split,
)
from fedtide.data.population import Population
from fedtide.data.population_builder import build, divide
from fedtide.data.ragged import Ragged
from fedtide.data.rows import Rows
from helpers.examples import examples
from helpers.toys import PARTS

law = examples(25)

KINDS = {
    "iid": IID(clients=6),
    "dirichlet-class": DirichletClass(clients=6, min_samples=3),
    "dirichlet": Dirichlet(clients=6),
    "shards": LabelShards(clients=6),
    "majority": Majority(clients=6, p=0.5, samples=20),
    "pachinko": Pachinko(clients=6, groups=((0, 1), (2, 3, 4))),
    "natural": Natural(clients=6),
    "rotation": Rotation(clients=6),
    "resample": Resample(clients=6, samples=20),
}
SHARING = ("rotation", "resample")
"""Partitions in which different clients may hold the same row."""

seeds = st.integers(0, 2**32)
sizes = st.lists(st.integers(0, 60), min_size=1, max_size=8)
shares = st.sampled_from([0.0, 0.001, 0.05, 0.1, 0.2, 0.3, 0.5]) | st.floats(0, 1, exclude_max=True)


def toy(n: int = 400, test: int = 0, classes: int = 5) -> Rows:
    """`n` rows, the last `test` of them a test set, in two domains and nine natural clients."""
    i = torch.arange(n)
    return Rows(
        "toy",
        i.float().reshape(n, 1, 1, 1).expand(n, 1, 2, 2).contiguous(),
        i % classes,
        classes,
        domain=i // classes % 2,
        domain_names=("day", "night"),
        client=i * 7 % 9,
        held_out=i >= n - test if test else None,
    )


def holders(population: Population, clients: torch.Tensor, parts: tuple[str, ...] = PARTS) -> list[int]:
    """Every row that the clients hold in any of the parts, with repetitions."""
    return [row for part in parts for client in clients.tolist() for row in population.parts[part][client].tolist()]


# -- parts of a client ------------------------------------------------------------------------------------------------


@law
@given(sizes, shares, shares, seeds)
def test_train_val_and_test_are_a_partition_of_a_clients_rows(counts, val, test, seed):
    """Ten rows have a validation row, two a test row, and whoever has rows a training row."""
    own = Ragged.from_owner(np.repeat(np.arange(len(counts)), counts), len(counts))
    parts = divide(own, val, test, Rng(seed).numpy())
    for client, n in enumerate(counts):
        lists = [part[client].tolist() for part in parts]
        assert all(rows == sorted(rows) for rows in lists)
        assert sorted(row for rows in lists for row in rows) == own[client].tolist()
        n_train, n_val, n_test = map(len, lists)
        assert (n_train > 0) == (n > 0)
        assert n_val >= 1 or n_train < 10 or val == 0
        assert n_test >= 1 or test == 0 or n < 2
        if max(val, test) <= 0.3:
            assert abs(n_test - test * n) <= 1
            assert abs(n_val - val * (n - n_test)) <= 1


def test_rows_are_shuffled_before_they_are_divided():
    own = Ragged.from_owner(np.zeros(100, np.int64), 1)
    train, val, test = divide(own, 0.1, 0.2, Rng(0).numpy())
    assert [len(part.rows) for part in (train, val, test)] == [72, 8, 20]
    assert test.rows.max() > 50
    assert test.rows.min() < 50


# -- every partition, built -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("held_out", [0, 100], ids=["own-test", "given-test"])
@pytest.mark.parametrize("name", KINDS)
@examples(6)
@given(seed=seeds)
def test_parts_of_a_client_are_disjoint_and_no_row_is_held_twice(name, held_out, seed):
    population = build(toy(test=held_out), KINDS[name], held_out_clients=HeldOutClients(2), seed=seed)
    for client in range(8):
        rows = [set(population.parts[part][client].tolist()) for part in PARTS]
        assert len(set().union(*rows)) == sum(map(len, rows))
    rows = holders(population, torch.arange(8))
    assert name in SHARING or len(rows) == len(set(rows))


@pytest.mark.parametrize("unseen", [0, 2])
@pytest.mark.parametrize("name", KINDS)
@examples(4)
@given(seed=seeds)
def test_nobody_trains_on_the_test_set_of_the_source(name, unseen, seed):
    rows = toy(test=100)
    population = build(rows, KINDS[name], held_out_clients=HeldOutClients(unseen), seed=seed)
    assert not any(row >= 300 for row in holders(population, population.clients, ("train", "val")))
    evaluated = population.held_out_clients if unseen else population.clients
    tested = holders(population, evaluated, ("test",))
    assert tested
    if name != "natural":  # a writer who is never asked is tested on everything it wrote
        assert all(row >= 300 for row in tested)


@pytest.mark.parametrize("unseen", [0, 2])
@pytest.mark.parametrize("name", SHARING)
@law
@given(seed=seeds)
def test_nobody_is_tested_on_a_row_that_anybody_trains_on(name, unseen, seed):
    population = build(toy(), KINDS[name], held_out_clients=HeldOutClients(unseen), seed=seed)
    everyone = torch.arange(6 + unseen)
    tested = set(holders(population, everyone, ("test",)))
    assert tested
    assert not tested & set(holders(population, everyone, ("train", "val")))
    judged = set(holders(population, everyone, ("val",)))
    assert name == "rotation" or not judged & set(holders(population, everyone, ("train",)))


@pytest.mark.parametrize("groups", [OneGroup(), ByDomain()], ids=["one-group", "two-groups"])
@pytest.mark.parametrize("held_out", [0, 100], ids=["own-test", "given-test"])
@pytest.mark.parametrize("name", [name for name in KINDS if name != "rotation"])
def test_unseen_clients_are_never_registered(name, held_out, groups):
    population = build(toy(test=held_out), KINDS[name], groups, held_out_clients=HeldOutClients(2))
    assert population.clients.tolist() == [0, 1, 2, 3, 4, 5]
    assert population.held_out_clients.tolist() == [6, 7]
    assert population.registered == 6
    for part in ("train", "val"):
        assert population.counts(population.held_out_clients, part).tolist() == [0, 0]
    assert (population.counts(population.held_out_clients, "test") > 0).all()
    seen, tested = (set(holders(population, clients)) for clients in (population.clients, population.held_out_clients))
    assert not seen & tested


@pytest.mark.parametrize("held_out", [0, 100], ids=["own-test", "given-test"])
@pytest.mark.parametrize("name", [name for name in KINDS if name != "natural"])
def test_unseen_clients_hold_as_many_rows_as_asked(name, held_out):
    population = build(toy(test=held_out), KINDS[name], held_out_clients=HeldOutClients(clients=2, samples=9))
    assert population.counts(population.held_out_clients, "test").sum() == 18


@pytest.mark.parametrize("name", KINDS)
def test_the_same_seed_builds_the_same_population(name):
    def lists(seed):
        population = build(toy(), KINDS[name], held_out_clients=HeldOutClients(2), seed=seed)
        return [population.parts[part][c].tolist() for part in PARTS for c in range(8)]

    assert lists(3) == lists(3)
    assert lists(3) != lists(4)


@pytest.mark.parametrize("name", KINDS)
def test_building_leaves_global_randomness_alone(name):
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
    build(toy(), KINDS[name], held_out_clients=HeldOutClients(2))
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # noqa: NPY002


# -- groups -----------------------------------------------------------------------------------------------------------


@law
@given(st.integers(2, 12), st.integers(0, 5), seeds)
def test_clients_are_divided_equally_between_groups_and_hold_rows_of_their_own(clients, unseen, seed):
    rows = toy()
    groups = ByLabels(labels=((0, 3), (1, 4)))
    population = build(rows, IID(clients=clients), groups, held_out_clients=HeldOutClients(unseen), seed=seed)
    for ids, n in ((population.clients, clients), (population.held_out_clients, unseen)):
        group = population.group[ids]
        assert group.tolist() == sorted(group.tolist())
        assert torch.bincount(group, minlength=2).tolist() == [n - n // 2, n // 2]
    for client, group in enumerate(population.group.tolist()):
        for part in PARTS:
            assert all(label in groups.labels[group] for label in rows.y[population.parts[part][client]].tolist())


@law
@given(st.sampled_from([(0, 180), (0, 90, 180, 270), (90, 0, 90)]), st.integers(1, 3), seeds)
def test_each_rotation_group_deals_a_full_copy(angles, each, seed):
    partition = Rotation(clients=each * len(angles), angles=angles)
    population = build(toy(120), partition, split=Split(val=0.0, test=0.0), seed=seed)
    assert population.group_names == tuple(f"{angle} degrees" for angle in angles)
    for k in range(len(angles)):
        members = (population.group == k).nonzero().flatten()
        assert len(members) == each
        assert sorted(holders(population, members)) == list(range(120))
