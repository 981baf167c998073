"""Public rows: shown to everybody, held by nobody."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedtide.core.base import Moment
from fedtide.core.errors import FedtideError
from fedtide.data.groups import ByDomain, ByLabels, HeldOutClients, OneGroup
from fedtide.data.partition import (
    IID,
    ByGroup,
    Dirichlet,
    DirichletClass,
    LabelShards,
    Majority,
    Natural,
    Pachinko,
    Resample,
    Rotation,
    Saved,
)
from fedtide.data.population import Population
from fedtide.data.population_builder import build
from fedtide.data.rows import Rows
from fedtide.data.saved import save
from fedtide.data.transforms import CenterCrop, Normalize
from helpers.examples import examples
from helpers.toys import PARTS

law = examples(60)

DEALS = {
    "iid": (IID(8), OneGroup()),
    "dirichlet": (Dirichlet(8, alpha=0.3), OneGroup()),
    "dirichlet-class": (DirichletClass(4, alpha=1.0), ByDomain()),
    "pachinko": (Pachinko(8, groups=((0, 1), (2, 3))), OneGroup()),
    "shards": (LabelShards(8), OneGroup()),
    "majority": (Majority(8, p=0.5), OneGroup()),
    "natural": (Natural(clients=7), OneGroup()),
    "natural, by domain": (Natural(), ByDomain()),
    "resample": (Resample(9, samples=6), OneGroup()),
    "rotation": (Rotation(8), OneGroup()),
    "by-group": (ByGroup({"day": IID(3), "night": LabelShards(4)}), ByDomain()),
    "by labels": (IID(6), ByLabels(((0, 1), (2,)))),
}


def toy(n: int = 400, domains: int = 2, test: int = 0) -> Rows:
    """Pictures of which each is filled with its number, modulo 256."""
    i = torch.arange(n)
    x = (i % 256).to(torch.uint8)[:, None, None, None].expand(n, 1, 4, 4).contiguous()
    names = ("day", "night", "dusk")[:domains]
    held_out = i >= n - test if test else None
    return Rows("toy", x, i % 4, 4, i // 4 % domains, names, client=i // 3 % 10, held_out=held_out)


def dealt(population: Population) -> set[int]:
    return {row for part in PARTS for row in population.parts[part].rows.tolist()}


@law
@given(
    st.sampled_from(sorted(DEALS)),
    st.integers(1, 60),
    st.integers(0, 2**32),
    st.sampled_from([0, 80]),
    st.sampled_from([0, 2]),
)
def test_nobody_holds_a_public_row(name, public, seed, test, unseen):
    partition, groups = DEALS[name]
    rows = toy(test=test)
    if isinstance(partition, Resample | Rotation) and not test:
        unseen = 0
    population = build(
        rows, partition, groups, held_out_clients=HeldOutClients(unseen), seed=seed, public_samples=public
    )
    shown = population.public.tolist()
    assert len(shown) == public
    assert shown == sorted(set(shown))
    assert not set(shown) & dealt(population)
    if rows.held_out is not None:
        assert not rows.held_out[population.public].any()
    assert (groups.of(rows)[0][shown] >= 0).all()


@law
@given(st.integers(1, 3), st.integers(1, 300), st.integers(0, 99))
def test_public_rows_are_as_evenly_of_all_domains_as_there_are(domains, public, small):
    # All domains but the last are large; of the last there are as many rows as `small` says.
    i = torch.arange(500)
    domain = torch.where(i < small, domains - 1, i % max(domains - 1, 1))
    population = build(
        replace(toy(500), domain=domain, domain_names=tuple("abc"[:domains])), IID(4), public_samples=public
    )
    counts, have = (torch.bincount(p, minlength=domains) for p in (domain[population.public], domain))
    for k in range(domains):
        assert counts[k] == have[k] or counts[k] >= counts.max() - 1


def test_public_rows_follow_the_seed_of_the_dealing_and_more_begin_with_fewer():
    def shown(public=20, **seeds):
        return build(toy(), IID(8), public_samples=public, **seeds).public.tolist()

    assert shown(seed=1) == shown(seed=1)
    assert shown(seed=1) != shown(seed=2)
    assert shown(seed=1, dealing=5) == shown(seed=2, dealing=5)
    assert set(shown(20)) < set(shown(21))


def test_public_features_are_as_a_model_sees_them_before_any_shift():
    steps = (CenterCrop(2), Normalize((0.5,), (0.25,)))
    population = build(toy(), Rotation(4, angles=(90, 180)), public_samples=15, transforms=steps)
    assert population.shift.how.kind == "rotation"
    x = population.public_features()
    assert x.dtype == torch.float32
    assert x.shape == (15, 1, 2, 2)
    bytes_ = (population.public % 256).float()
    assert torch.allclose(x, ((bytes_ / 255 - 0.5) / 0.25)[:, None, None, None].expand(15, 1, 2, 2))
    plain = build(toy(), IID(4), public_samples=15, transforms=steps)
    assert torch.equal(plain.public_features(), plain.fetch(plain.public, 0, Moment(0, 1))[0])


@pytest.mark.parametrize(("public", "most"), [(400, 400), (1000, 400), (-1, 400)])
def test_more_public_rows_than_there_are_is_one_line(public, most):
    line = f"data.public_samples: found {public}, allowed: 0 or more and fewer than {most}, the training rows of toy"
    with pytest.raises(FedtideError, match=line):
        build(toy(), IID(4), public_samples=public)
    with pytest.raises(FedtideError, match="fewer than 320, the training rows"):
        build(toy(test=80), IID(4), public_samples=320)


@pytest.mark.parametrize(
    ("partition", "groups", "line"),
    [
        (IID(8), OneGroup(), "data.partition.clients: found 8, but they need 8 rows and there are 5"),
        (Natural(clients=9, min_samples=2), OneGroup(), "found 9, allowed: at most ., the clients of toy with 2 rows"),
        (ByGroup({"day": IID(2), "night": IID(20)}), ByDomain(), "data.partition.of.night.clients: found 20, but they"),
    ],
)
def test_public_rows_that_clients_would_need_are_named(partition, groups, line):
    with pytest.raises(FedtideError, match=rf"{line}.*\(data.public_samples keeps 395 rows from the clients\)"):
        build(toy(), partition, groups, public_samples=395)


@pytest.mark.parametrize("name", ["iid", "natural", "rotation"])
def test_a_saved_population_keeps_its_public_rows(tmp_path, name):
    partition, groups = DEALS[name]
    first = build(toy(), partition, groups, seed=3, public_samples=25)
    save(first, tmp_path / "0.safetensors", rounds=2, cohort=2)
    path = str(tmp_path / "0.safetensors")
    again = build(toy(), Saved(path), seed=4, public_samples=25)
    assert torch.equal(again.public, first.public)
    assert not set(again.public.tolist()) & dealt(again)
    assert len(build(toy(), Saved(path)).public) == 0
    with pytest.raises(FedtideError, match=r"data.public_samples: found 26, allowed: 0, or as many as in .*, 25"):
        build(toy(), Saved(path), public_samples=26)
