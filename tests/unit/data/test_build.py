"""Building populations: groups, natural clients, partitions of groups, test sets, public rows, and mistakes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from fedtide.config import from_dict, read, to_toml
from fedtide.core import codec
from fedtide.core.base import Moment
from fedtide.core.errors import FedtideError
from fedtide.data.partition import (
    IID,
    ByDomain,
    ByGroup,
    ByLabels,
    Dirichlet,
    DirichletClass,
    Groups,
    HeldOutClients,
    LabelShards,
    LabelsInOrder,
    Majority,
    Natural,
    OneGroup,
    Pachinko,
    Partition,
    Resample,
    Rotation,
    Saved,
    Split,
)
from fedtide.data.population import Population
from fedtide.data.population_builder import build
from fedtide.data.rows import Rows
from fedtide.data.saved import save
from fedtide.data.shift import Calendar, Shift
from fedtide.data.transforms import CenterCrop, Normalize
from fedtide.runs.preflight import preflight
from helpers.examples import examples
from helpers.toys import PARTS

DEALS = (IID, DirichletClass, Dirichlet, LabelShards, LabelsInOrder, Majority, Resample)


def balanced(n: int = 1000, test: int = 0, classes: int = 10, domains: int = 1) -> Rows:
    i = torch.arange(n)
    return Rows(
        "toy",
        torch.zeros(n, 1, 2, 2),
        i % classes,
        classes,
        domain=i // classes % domains if domains > 1 else None,
        domain_names=("all",) if domains == 1 else tuple(f"domain {k}" for k in range(domains)),
        held_out=i >= n - test if test else None,
    )


def written(counts: list[int], test: list[int] | None = None) -> Rows:
    """`counts[c]` rows of writer c, and `test[c]` in the test set."""
    test = test or [0] * len(counts)
    client = torch.repeat_interleave(torch.arange(len(counts)).repeat(2), torch.tensor([*counts, *test]))
    held_out = torch.arange(len(client)) >= sum(counts)
    return Rows(
        "letters", torch.zeros(len(client), 2), client % 2, 2, client=client, held_out=held_out if sum(test) else None
    )


def writers(population: Population, client: int, *parts: str) -> set[int]:
    return {w for part in parts for w in population.rows.client[population.parts[part][client]].tolist()}


# -- parts ------------------------------------------------------------------------------------------------------------


def test_unseen_clients_may_know_some_of_their_labels():
    made = [
        build(
            balanced(1000, test=200),
            IID(clients=10),
            held_out_clients=HeldOutClients(5, labeled=share),
            split=Split(val=0.25),
        )
        for share in (0.0, 0.5)
    ]
    none, half = ([p.counts(p.held_out_clients, part).tolist() for part in ("train", "val", "test")] for p in made)
    assert none == [[0] * 5, [0] * 5, [40] * 5]
    assert half == [[15] * 5, [5] * 5, [20] * 5]
    # What they know and what they are judged on is what they were judged on before, and nobody else's.
    for client in made[0].held_out_clients.tolist():
        parts = [set(made[1].parts[part][client].tolist()) for part in ("train", "val", "test")]
        assert set.union(*parts) == set(made[0].parts["test"][client].tolist())
    for client in made[0].clients.tolist():
        assert torch.equal(*(p.parts["train"][client] for p in made))
    assert set(made[1].arrivals(10, Moment(0, 4)).tolist()) == set(range(10))


def test_a_test_share_beside_a_given_test_set_is_one_line():
    with pytest.raises(FedtideError, match=r"data.split.test: found 0.3, but toy has a test set of its own"):
        build(balanced(test=100), IID(clients=5), split=Split(test=0.3))


def test_a_given_test_set_may_be_dealt_as_all_other_rows():
    """Of 1,000 rows of which 100 are for testing each of five clients has 200, and 50 of these for testing."""
    population = build(balanced(test=100), IID(clients=5), split=Split(val=0.0, test=0.25, merge=True))
    rows = torch.cat([population.parts[part].rows for part in PARTS])
    assert rows.sort().values.tolist() == list(range(1000))
    assert [population.counts(population.clients, part).tolist() for part in PARTS] == [[150] * 5, [0] * 5, [50] * 5]
    own_test = population.parts["test"].rows >= 900
    assert 0 < int(own_test.sum()) < 100
    with pytest.raises(FedtideError, match=r"data.split.merge: found True, but toy has no test set of its own"):
        build(balanced(), IID(clients=5), split=Split(merge=True))


def test_the_dealing_may_have_a_seed_of_its_own():
    def drawn(**seeds):
        population = build(balanced(), IID(clients=20), held_out_clients=HeldOutClients(clients=2), **seeds)
        dealt = [population.parts[part][client].tolist() for part in PARTS for client in range(22)]
        return dealt, [population.arrivals(5, Moment(r, 9)).tolist() for r in range(9)]

    dealt, came = drawn(seed=3, dealing=7)
    assert drawn(seed=4, dealing=7)[0] == dealt
    assert drawn(seed=4, dealing=7)[1] != came
    assert drawn(seed=3, dealing=8)[0] != dealt
    assert drawn(seed=3, dealing=8)[1] == came
    assert drawn(seed=3, dealing=3) == drawn(seed=3)
    assert drawn(seed=3, dealing=0)[0] == drawn(seed=0)[0] != drawn(seed=3)[0]


def test_rows_outside_the_groups_belong_to_nobody():
    population = build(balanced(), IID(clients=4), ByLabels(labels=((0, 1), (7,)), names=("low", "high")))
    held = torch.cat([ragged.rows for ragged in population.parts.values()])
    assert sorted(set(population.rows.y[held].tolist())) == [0, 1, 7]
    assert population.group_names == ("low", "high")


# -- natural clients --------------------------------------------------------------------------------------------------


def test_natural_clients_with_too_few_rows_are_left_out():
    population = build(written([12, 3, 20, 11, 30]), Natural(min_samples=12))
    assert [writers(population, c, "train", "val", "test") for c in range(population.registered)] == [{0}, {2}, {4}]


def test_rows_of_the_test_set_do_not_make_a_natural_client_large_enough():
    population = build(written([12, 3, 20], test=[4, 30, 5]), Natural(min_samples=10))
    assert [writers(population, c, "test") for c in range(population.registered)] == [{0}, {2}]
    assert population.counts(population.clients, "test").tolist() == [4, 5]


def test_of_large_natural_clients_the_first_rows_are_kept():
    population = build(written([12, 3, 20], test=[4, 30, 5]), Natural(min_samples=10, samples=4))
    held = {part: [sorted(rows.tolist()) for rows in population.parts[part]] for part in ("train", "val", "test")}
    assert [sorted(held["train"][c] + held["val"][c]) for c in (0, 1)] == [[0, 1, 2, 3], [15, 16, 17, 18]]
    assert held["test"] == [[35, 36, 37, 38], [69, 70, 71, 72]]


def test_unseen_natural_clients_are_other_people():
    for seed in range(5):
        population = build(
            written([12, 13, 20, 11, 30, 15]), Natural(clients=3), held_out_clients=HeldOutClients(2), seed=seed
        )
        seen = set().union(*(writers(population, c, "train", "val", "test") for c in (0, 1, 2)))
        unseen = set().union(*(writers(population, c, "test") for c in (3, 4)))
        assert (len(seen), len(unseen), seen & unseen) == (3, 2, set())


def test_a_natural_client_belongs_to_the_group_of_most_of_its_rows():
    rows = replace(written([5, 5]), domain=torch.tensor([0, 0, 0, 1, 1, 1, 1, 0, 1, 1]), domain_names=("day", "night"))
    population = build(rows, Natural(), ByDomain())
    assert population.group.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("partition", "unseen", "line"),
    [
        (Natural(clients=6), 0, "found 6, allowed: at most 5, the clients of letters with 1 rows or more"),
        (Natural(clients=4), 2, "found 6, allowed: at most 5, the clients of letters with 1 rows or more"),
        (Natural(min_samples=25, clients=2), 0, "found 2, allowed: at most 1, the clients of letters with 25 rows"),
        (Natural(min_samples=99), 0, "at most 0, the clients of letters with 99 rows or more"),
        (Natural(), 5, "at most 5, the clients of letters with 1 rows or more, of which one at least is not held out"),
    ],
)
def test_too_few_natural_clients_are_one_line(partition, unseen, line):
    with pytest.raises(FedtideError, match=line):
        build(written([12, 3, 20, 11, 30]), partition, held_out_clients=HeldOutClients(unseen))


def test_clients_of_the_source_are_the_default():
    x, y = torch.zeros(6, 2), torch.arange(6) % 2
    named = Rows("toy", x, y, 2, client=torch.tensor([0, 0, 1, 1, 2, 2]))
    assert build(named).registered == 3
    assert build(named, IID(clients=2)).registered == 2
    assert build(Rows("toy", torch.zeros(200, 2), torch.arange(200) % 2, 2)).registered == 100


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "line"),
    [
        (ByDomain(), "found 'domain', but toy has one domain; allowed: none, labels"),
        (ByLabels(labels=((0, 1), (1, 2))), "found 1, allowed: each from 0 to 9 at most once"),
        (ByLabels(labels=((0, 1), (10,))), "found 10, allowed: each from 0 to 9 at most once"),
        (ByLabels(labels=((0,), (1,)), names=("a",)), "data.groups.names: found .'a'., allowed: 2"),
    ],
)
def test_groups_that_do_not_fit_are_one_line(groups, line):
    with pytest.raises(FedtideError, match=line):
        build(balanced(), IID(clients=4), groups)


def test_rotation_makes_its_own_groups():
    with pytest.raises(FedtideError, match="the partition 'rotation' makes the groups itself"):
        build(balanced(domains=2), Rotation(clients=4), ByDomain())


@pytest.mark.parametrize("kind", DEALS)
def test_fewer_clients_than_groups_is_one_line(kind):
    with pytest.raises(FedtideError):
        build(balanced(domains=2), kind(clients=1), ByDomain())


@pytest.mark.parametrize("kind", DEALS)
def test_a_group_without_rows_is_one_line(kind):
    rows = replace(balanced(), classes=12)
    with pytest.raises(FedtideError):
        build(rows, kind(clients=4), ByLabels(labels=((0, 1, 2, 3), (10, 11))))


SETTINGS = {"partition": Partition, "groups": Groups, "split": Split, "held_out_clients": HeldOutClients}


@pytest.mark.parametrize(("setting", "value"), [
    ("partition", {"kind": "iid", "clients": 0}), ("partition", {"kind": "dirichlet", "alpha": 0}),
    ("partition", {"kind": "dirichlet-class", "alpha": float("nan")}), ("partition", {"kind": "majority", "p": 1.1}),
    ("partition", {"kind": "dirichlet-class", "min_samples": -1}), ("partition", {"kind": "rotation", "angles": []}),
    ("partition", {"kind": "rotation", "angles": [0, 45]}), ("partition", {"kind": "natural", "samples": 0}),
    ("partition", {"kind": "dirichlets"}), ("groups", {"by": "labels", "labels": [[-1], [0]]}),
    ("groups", {"by": "labels", "labels": []}), ("split", {"val": 1.0}), ("held_out_clients", {"samples": 0}),
], ids=str)  # fmt: skip
def test_settings_out_of_range_are_refused(setting, value):
    with pytest.raises(ValidationError):
        TypeAdapter(SETTINGS[setting]).validate_python(value)


@pytest.mark.parametrize("rows", [50, 80])
@pytest.mark.parametrize("clients", [10**13, 10**18, 10**20])
def test_more_clients_than_fit_into_memory_are_one_line(clients, rows):
    """Beyond any address space, so that no machine takes them."""
    with pytest.raises(FedtideError, match=rf"^data.partition.clients: found {clients}, but their {rows} rows each"):
        build(balanced(), Resample(clients=clients, samples=rows))


# -- in time -----------------------------------------------------------------------------------------------------------


def logged(times: list[int], clients: list[int] | None = None, **more: object) -> Rows:
    """A row for each time, of classes in turn; without `clients` all are of one."""
    n = len(times)
    client = torch.tensor(clients or [0] * n)
    time = torch.tensor(times).double()
    return Rows("log", torch.zeros(n, 2), torch.arange(n) % 2, 2, client=client, time=time, **more)


def test_the_latest_rows_of_all_clients_are_for_testing_and_those_before_for_validation():
    """Ten rows in any order of times 0 to 9. Test, .2 of ten: times 8 and 9. Validation, .25 of eight: 6 and 7.

    Client 1 has nothing late, so nothing to test on; client 2 nothing else.
    """
    rows = logged([3, 9, 0, 7, 1, 8, 2, 5, 4, 6], [0, 2, 0, 1, 1, 2, 0, 0, 1, 0])
    population = build(rows, Natural(min_samples=1), split=Split(val=0.25, test=0.2, by="time"))
    held = {part: [population.parts[part][client].tolist() for client in range(3)] for part in PARTS}
    assert held == {"train": [[0, 2, 6, 7], [4, 8], []], "val": [[9], [3], []], "test": [[], [], [1, 5]]}


def test_rows_of_one_time_stay_together_and_go_to_the_later_part():
    """.2 of ten is two rows, of times 8 and 9; but two have time 8, so that three are for testing."""
    population = build(logged([0, 1, 2, 3, 4, 5, 6, 8, 8, 9]), Natural(), split=Split(val=0.0, test=0.2, by="time"))
    assert population.parts["test"][0].tolist() == [7, 8, 9]
    assert population.parts["train"][0].tolist() == [*range(7)]


def latest(population: Population, part: str) -> float:
    return float(population.rows.time[population.parts[part].rows.long()].max())


def earliest(population: Population, part: str) -> float:
    return float(population.rows.time[population.parts[part].rows.long()].min())


@pytest.mark.parametrize(
    "partition", [IID(clients=4), Dirichlet(clients=4, alpha=1.0), Resample(clients=4, samples=10)]
)
def test_nobody_trains_on_what_is_later_than_a_row_by_which_a_model_is_judged(partition):
    rows = replace(logged(np.random.default_rng(0).permutation(200).tolist()), client=None)
    held_out = HeldOutClients(clients=0 if partition.shares_rows else 2)
    population = build(rows, partition, split=Split(by="time"), held_out_clients=held_out, public_samples=20)
    assert latest(population, "train") < earliest(population, "val")
    assert latest(population, "val") < 160.0 <= earliest(population, "test")
    assert earliest(population, "val") >= 144.0
    assert float(rows.time[population.public].max()) < 144.0


@pytest.mark.parametrize(("rows", "settings", "line"), [
    (replace(logged([0, 1, 2]), time=None), {},
     "data.split.by: found 'time', but rows of log have no time; allowed: 'random', or a source with a column of time"),
    (logged([0, 1, 2], held_out=torch.tensor([False, False, True])), {},
     "data.split.by: found 'time', but log has a test set of its own; allowed: 'random'"),
    (logged([5, 5, 5]), {},
     "data.split.test: found 0.2, but no row is earlier; allowed: less, or split by 'random'"),
    (logged([0, 1, 2]), {"held_out_clients": HeldOutClients(labeled=0.5)},
     "data.held_out_clients.labeled: found 0.5, allowed: 0 if data.split.by is 'time'"),
    (logged([0, 1, 2]), {"shift": Shift(what=Calendar())},
     "data.split.by: found 'time', but shift.what is 'calendar', which says itself when rows come; allowed: 'random'"),
])  # fmt: skip
def test_what_cannot_be_divided_in_time_is_refused(rows, settings, line):
    with pytest.raises(FedtideError) as error:
        build(rows, Natural(), split=Split(test=0.2, by="time"), **settings)
    assert str(error.value) == line


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


law = examples(60)

PUBLIC = {
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
    st.sampled_from(sorted(PUBLIC)),
    st.integers(1, 60),
    st.integers(0, 2**32),
    st.sampled_from([0, 80]),
    st.sampled_from([0, 2]),
)
def test_nobody_holds_a_public_row(name, public, seed, test, unseen):
    partition, groups = PUBLIC[name]
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


@pytest.mark.parametrize("name", ["iid", "natural", "rotation"])
def test_a_saved_population_keeps_its_public_rows(tmp_path, name):
    partition, groups = PUBLIC[name]
    first = build(toy(), partition, groups, seed=3, public_samples=25)
    save(first, tmp_path / "0.safetensors", rounds=2, cohort=2)
    path = str(tmp_path / "0.safetensors")
    again = build(toy(), Saved(path), seed=4, public_samples=25)
    assert torch.equal(again.public, first.public)
    assert not set(again.public.tolist()) & dealt(again)
    assert len(build(toy(), Saved(path)).public) == 0
    with pytest.raises(FedtideError, match=r"data.public_samples: found 26, allowed: 0, or as many as in .*, 25"):
        build(toy(), Saved(path), public_samples=26)


@pytest.mark.parametrize("damage", [
    lambda saved: saved.update(registered=2**40), lambda saved: saved.update(group=3),
    lambda saved: saved["parts"]["train"]["start"].mul_(2**40), lambda saved: saved["parts"]["val"]["rows"].add_(400),
    lambda saved: saved["parts"].pop("train"), lambda saved: saved["parts"].update(test={}),
])  # fmt: skip
def test_a_saved_population_whose_parts_are_not_of_its_clients_is_one_line(tmp_path, damage):
    path = tmp_path / "0.safetensors"
    save(build(toy(), IID(4), split=Split(val=0.2)), path, rounds=2, cohort=2)
    saved = codec.from_file(path)
    damage(saved)
    codec.to_file(path, saved)
    said = r"damaged: (its parts are not those of its clients|'group' is of another kind)"
    with pytest.raises(FedtideError, match=said):
        build(toy(), Saved(str(path)))
