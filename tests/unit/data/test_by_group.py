"""A partition of its own for each group of clients."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from fedtide.config import from_dict, read, to_toml
from fedtide.core.errors import FedtideError
from fedtide.data.build import build
from fedtide.data.groups import ByDomain, ByLabels, HeldOutClients, OneGroup, Split
from fedtide.data.partition import (
    IID,
    ByGroup,
    Dirichlet,
    LabelShards,
    Majority,
    Pachinko,
    Partition,
)
from fedtide.data.rows import Rows
from fedtide.runs.preflight import preflight
from helpers.examples import examples
from helpers.toys import PARTS

WHOLE = Split(val=0.0, test=0.0)


def rows(day: int = 120, night: int = 300, test: int = 0) -> Rows:
    """Rows of six labels in two domains of different size, the last `test` of each a test set."""
    sizes = (day, night)
    domain = torch.repeat_interleave(torch.arange(2), torch.tensor(sizes))
    place = torch.cat([torch.arange(size) for size in sizes])
    held_out = place >= torch.tensor(sizes)[domain] - test if test else None
    return Rows("toy", torch.arange(day + night).float()[:, None], place % 6, 6, domain, ("day", "night"),
                held_out=held_out)  # fmt: skip


def two(day=IID(clients=3), night=Dirichlet(clients=10, alpha=0.1)) -> ByGroup:
    return ByGroup(of={"day": day, "night": night})


def held(population, client: int, *parts: str) -> np.ndarray:
    mine = torch.cat([population.parts[part][client] for part in parts or PARTS])
    return np.bincount(population.rows.y[mine].numpy(), minlength=6)


def test_every_group_has_its_own_number_of_clients_and_its_own_partition():
    population = build(rows(), two(), ByDomain(), WHOLE)
    assert population.group.tolist() == [0] * 3 + [1] * 10
    assert population.counts(population.clients, "train").tolist() == [40] * 3 + [30] * 10
    for client in range(13):
        assert set(population.rows.domain[population.parts["train"][client]].tolist()) == {int(client >= 3)}
    # Six labels of twenty rows each, dealt at random: every day client has all of them, a night client one or two.
    assert all((held(population, client) > 0).sum() == 6 for client in range(3))
    assert np.median([(held(population, client) > 0).sum() for client in range(3, 13)]) <= 3


@examples(25)
@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 4), st.integers(0, 2**32))
def test_no_row_is_held_twice_or_by_a_client_of_another_group(day, night, unseen, seed):
    partition = two(Dirichlet(clients=day, alpha=0.3), IID(clients=night))
    population = build(rows(), partition, ByDomain(), held_out_clients=HeldOutClients(2 * unseen), seed=seed)
    assert torch.bincount(population.group).tolist() == [day + unseen, night + unseen]
    every = torch.cat([population.parts[part].rows for part in PARTS])
    assert len(every.unique()) == len(every)
    for part in PARTS:
        own = population.group[population.parts[part].owner]
        assert torch.equal(population.rows.domain[population.parts[part].rows], own)


def test_the_same_partition_for_each_group_is_the_same_population():
    """Where groups are to be equal anyway, saying it twice changes nothing."""
    for partition in (IID(clients=4), Dirichlet(clients=4, alpha=0.3), LabelShards(clients=4)):
        plain = build(rows(), replace(partition, clients=8), ByDomain(), held_out_clients=HeldOutClients(2))
        twice = build(rows(), two(partition, partition), ByDomain(), held_out_clients=HeldOutClients(2))
        assert plain.group.tolist() == twice.group.tolist()
        for part in PARTS:
            assert torch.equal(plain.parts[part].rows, twice.parts[part].rows)
            assert torch.equal(plain.parts[part].start, twice.parts[part].start)


def test_unseen_clients_are_divided_equally_and_dealt_as_their_group():
    population = build(rows(test=30), two(), ByDomain(), held_out_clients=HeldOutClients(clients=4, samples=10))
    assert population.group[population.held_out_clients].tolist() == [0, 0, 1, 1]
    assert population.counts(population.held_out_clients, "test").tolist() == [10] * 4
    assert population.rows.held_out[population.parts["test"].rows].all()


def test_a_test_set_is_dealt_within_its_group():
    population = build(rows(test=30), two(), ByDomain(), Split(val=0.0))
    for client in range(13):
        mine = population.parts["test"][client]
        assert set(population.rows.domain[mine].tolist()) <= {int(client >= 3)}
    assert population.counts(population.clients, "test").sum() == 60


@pytest.mark.parametrize(("partition", "groups", "said"), [
    (two(), OneGroup(), "data.partition.of: found .'day', 'night'., allowed: one for each group, all"),
    (ByGroup(of={"day": IID(2)}), ByDomain(), "data.partition.of: found .'day'., allowed: one for each group, day"),
    (ByGroup(of={"day": IID(2), "nigth": IID(2)}), ByDomain(), "data.partition.of: found .'day', 'nigth'., allowed"),
    (ByGroup(of={}), ByDomain(), "data.partition.of: found .., allowed: one for each group, day, night"),
    (two(night=IID(400)), ByDomain(), "data.partition.of.night.clients: found 400, but they need 400 rows and there"),
    (two(day=Majority(2, samples=90)), ByDomain(), "data.partition.of.day.clients: found 2, but they need 180 rows"),
    (two(day=Pachinko(2, groups=((0,), (1,)))), ByDomain(), "data.partition.of.day.groups: label 2 is in none"),
    (two(), ByLabels(labels=((0, 1, 2, 3, 4, 5), ()), names=("day", "night")), "'night' gets no rows"),
])  # fmt: skip
def test_what_does_not_fit_is_one_line(partition, groups, said):
    with pytest.raises(FedtideError, match=said) as caught:
        build(rows(), partition, groups)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["natural", "resample", "rotation", "saved", "by-group"])
def test_only_what_deals_the_rows_of_a_group_can_be_one_of_several(kind):
    with pytest.raises(ValidationError):
        TypeAdapter(Partition).validate_python({"kind": "by-group", "of": {"day": {"kind": kind}, "night": "iid"}})


FILE = {
    "rounds": 2,
    "data": {
        "source": {"kind": "gaussians", "samples": 60, "domains": 2},
        "partition": {"kind": "by-group", "of": {"day": "iid", "night": {"kind": "dirichlet", "alpha": 0.3}}},
        "groups": {"by": "domain"},
    },
    "model": "linear",
    "method": [{"algorithm": "fedavg", "cohort": 2}],
}
SETS = ("data.partition.of.day.clients=2", "data.partition.of.night.clients=5")


def test_a_file_names_them_and_single_keys_can_be_overridden(tmp_path):
    experiment = from_dict(FILE, sets=SETS)
    preflight(experiment)
    assert experiment.data.partition == two(IID(clients=2), Dirichlet(clients=5, alpha=0.3))
    (tmp_path / "again.toml").write_text(to_toml(experiment))
    assert read(tmp_path / "again.toml") == experiment


@pytest.mark.parametrize(("key", "said"), [
    ("day.clients=0", "data.partition.of.day.clients: found 0, allowed: 1 or more"),
    ("night.alhpa=1", "data.partition.of.night.alhpa: unknown key; .*did you mean 'alpha'"),
    ("day=idi", "data.partition.of.day: found 'idi', allowed: iid, .*did you mean 'iid'"),
])  # fmt: skip
def test_mistakes_in_a_file_name_the_group(key, said):
    with pytest.raises(FedtideError, match=said):
        from_dict(FILE, sets=(f"data.partition.of.{key}",))
