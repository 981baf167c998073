"""The population: rows of clients, arrivals, answers, generated rows, and mistakes."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from fedtide.config import from_dict
from fedtide.core.base import Moment
from fedtide.core.errors import FedtideError
from fedtide.data.partition import (
    IID,
    ByDomain,
    ByLabels,
    Dirichlet,
    HeldOutClients,
    Natural,
    OneGroup,
    Resample,
    Rotation,
    Split,
)
from fedtide.data.population import Population
from fedtide.data.population_builder import build
from fedtide.data.ragged import Ragged, Spans
from fedtide.data.rows import Rows
from fedtide.data.saved import save
from fedtide.data.shift import DomainMixture, Shift, Stream, What, Who, how
from fedtide.data.shift.how import How
from fedtide.data.shift.who import Always, Periodic
from fedtide.data.sources import Generated
from helpers.toys import PARTS

MOMENT = Moment(3, 20)
DAY_NIGHT = Shift(who=Periodic(period=16))
MIXTURE = Shift(what=DomainMixture())


def toy(n: int = 400) -> Rows:
    """Rows whose only feature is their number, in two domains."""
    i = torch.arange(n)
    return Rows("toy", i.float()[:, None], i % 4, 4, domain=i // 4 % 2, domain_names=("day", "night"), client=i % 5)


def three() -> Rows:
    """The same in three domains."""
    return replace(toy(), domain=torch.arange(400) // 4 % 3, domain_names=("morning", "noon", "night"))


def day_night(**settings) -> Population:
    return build(toy(), IID(clients=20), ByDomain(), **{"shift": DAY_NIGHT, **settings})


# -- what clients hold ------------------------------------------------------------------------------------------------

POPULATIONS = {
    "iid": lambda: build(toy(), IID(clients=7), held_out_clients=HeldOutClients(2)),
    "dirichlet": lambda: build(toy(), Dirichlet(clients=7, alpha=0.1), held_out_clients=HeldOutClients(2)),
    "natural": lambda: build(toy(), Natural(clients=3), held_out_clients=HeldOutClients(2)),
    "resample": lambda: build(toy(), Resample(clients=7, samples=9)),
    "rotation": lambda: build(replace(toy(), x=torch.zeros(400, 1, 3, 3)), Rotation(clients=4)),
    "no-validation": lambda: build(toy(), IID(clients=7), split=Split(val=0.0)),
    "mixture": lambda: build(
        toy(), IID(clients=7), shift=Shift(what=DomainMixture(samples=11)), held_out_clients=HeldOutClients(2)
    ),
    "mixture-three": lambda: build(
        three(), IID(clients=7), shift=Shift(what=DomainMixture(samples=11)), held_out_clients=HeldOutClients(2)
    ),
    "mixture-all": lambda: build(toy(), IID(clients=7), shift=Shift(what=DomainMixture(samples=11, test="all"))),
    "mixture-thin": lambda: build(toy(120), IID(clients=8), shift=Shift(what=DomainMixture(samples=11))),
    "mixture-no-validation": lambda: build(
        toy(), IID(clients=7), split=Split(val=0.0), shift=Shift(what=DomainMixture(samples=11))
    ),
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", POPULATIONS)
def test_counts_agree_with_the_rows_that_are_held(name, part):
    population = POPULATIONS[name]()
    clients = torch.cat([population.clients, population.held_out_clients])
    for moment in (Moment(-1, 20), Moment(0, 20), Moment(7, 20)):
        held = [len(population.held(client, moment, part)) for client in clients.tolist()]
        assert population.counts(clients, part).tolist() == held


@pytest.mark.parametrize("name", POPULATIONS)
def test_held_rows_are_sorted_and_the_clients_own(name):
    population = POPULATIONS[name]()
    for client in range(len(population.group)):
        for part in PARTS:
            rows = population.held(client, MOMENT, part).tolist()
            assert rows == sorted(rows)
            assert set(rows) <= set(population.parts[part][client].tolist())


def test_a_shard_is_the_rows_that_are_held():
    population = replace(build(toy(), IID(clients=7)), rows=replace(toy(), time=torch.arange(400).double() * 10))
    for part in PARTS:
        shard = population.shard(2, MOMENT, part)
        assert shard.ids.tolist() == population.held(2, MOMENT, part).tolist()
        assert shard.x[:, 0].tolist() == shard.ids.tolist()
        assert shard.y.tolist() == (shard.ids % 4).tolist()
        assert shard.time.tolist() == (shard.ids * 10).tolist()


def test_validation_rows_come_with_the_training_shard_alone():
    population = build(toy(), IID(clients=7))
    assert population.shard(2, MOMENT).val.ids.tolist() == population.held(2, MOMENT, "val").tolist()
    assert population.shard(2, MOMENT, "test").val is None
    assert build(toy(), IID(clients=7), split=Split(val=0.0)).shard(2, MOMENT).val is None


def test_uint8_pictures_are_read_as_fractions():
    rows = Rows("toy", torch.arange(256, dtype=torch.uint8).reshape(64, 1, 2, 2), torch.arange(64) % 2, 2)
    population = build(rows, IID(clients=2), split=Split(test=0.0, val=0.0))
    x = torch.cat([population.shard(client, MOMENT).x for client in (0, 1)])
    assert x.dtype == torch.float32
    assert sorted(x.flatten().tolist()) == pytest.approx([i / 255 for i in range(256)])


def test_rows_do_not_change_what_the_source_holds():
    population = build(toy(), IID(clients=4))
    population.shard(1, MOMENT).x.zero_()
    assert population.rows.x[:, 0].tolist() == list(range(400))


# -- who --------------------------------------------------------------------------------------------------------------


def test_arrivals_depend_on_seed_and_round_alone():
    def cohorts(population, rounds=40, seconds=0.0):
        return [population.arrivals(6, Moment(r, rounds, seconds)).tolist() for r in range(rounds)]

    first = cohorts(day_night())
    assert first == cohorts(day_night())
    assert first == cohorts(day_night(), seconds=7.0)
    assert first[:20] == cohorts(day_night(), rounds=20)
    assert first == cohorts(day_night(held_out_clients=HeldOutClients(4)))
    assert first == cohorts(replace(day_night(), rows=replace(toy(), y=toy().y.flip(0))))
    assert first != cohorts(day_night(seed=1))
    # The same hour of two days: the same shares, other clients.
    assert first[0:16] != first[16:32]


def test_the_shift_reads_the_clock_it_is_told():
    population = day_night(shift=Shift(who=Periodic(period=16), clock="seconds"))
    assert population.expected(Moment(8, 32, seconds=0.0)).tolist() == [1.0, 0.0]
    assert population.expected(Moment(0, 32, seconds=8.0)).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("who", [Always(dropout_rate=0.3), Periodic(period=16, dropout_rate=0.3)])
def test_the_dropout_share_of_the_asked_never_answers(who):
    population = day_night(shift=Shift(who=who))
    clients = population.clients
    answered = torch.stack([population.answers(clients, Moment(r, 60), ask) for r in range(60) for ask in (0, 1)])
    assert abs(answered.float().mean() - 0.7) < 0.04
    assert not torch.equal(answered[0], answered[1])
    assert not torch.equal(answered[0], answered[2])
    again = population.answers(clients.flip(0), Moment(0, 60), 0)
    assert torch.equal(again.flip(0), answered[0])


def test_a_client_drops_out_once_however_many_rounds_it_is_at_work():
    """Of 50 clients about half answer, and the same in round 3 and in round 4; others, if they began later."""
    population = build(toy(), IID(clients=50), shift=Shift(who=Always(dropout_rate=0.5)))
    began = torch.full((50,), 7.5, dtype=torch.float64)
    first, again, later = (
        population.answers(population.clients, Moment(r, 60), 0, since)
        for r, since in ((3, began), (4, began), (4, began + 1))
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, later)
    assert 15 < int(first.sum()) < 35


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("domains", [2, 3, 4])
@pytest.mark.parametrize("curve", ["linear", "cosine"])
def test_the_rounds_before_round_0_show_all_domains_alike(domains, curve):
    """With 120 rounds and three cycles: the 20 before round 0 for two domains, the 40 for more."""
    mixture, seen = DomainMixture(curve=curve, cycles=3), 20 if domains == 2 else 40
    assert mixture.rhythm(120, domains)["seen"] == seen
    share = np.mean([mixture.shares(Moment(-number, 120), domains) for number in range(1, seen + 1)], axis=0)
    assert share == pytest.approx(1 / domains, abs=0.03)


def test_a_method_with_three_gaussians_collects_over_a_whole_cycle():
    made = from_dict({
        "rounds": 120, "data": {"source": "day-night-characters"},
        "shift": {"what": {"kind": "domain-mixture", "cycles": 3}},
        "defaults": {"gaussian_init": "k-means++"},
        "method": [{"algorithm": "pfedem", "name": f"K = {k}", "components": k} for k in (2, 3)],
    })  # fmt: skip
    assert [method.options["gaussian_init"]["rounds"] for method in made.method] == [20, 40]


ROW = torch.arange(400)
REFUSED = [
    (toy(), IID(4), None, DAY_NIGHT, "found 'periodic', but there is a single group of clients"),
    (replace(toy(), domain=toy().client.clamp(max=0)), Natural(), ByDomain(), DAY_NIGHT, "'night' has no clients"),
    (replace(toy(), domain=None, domain_names=("all",)), IID(4), None, MIXTURE, "but toy has a single domain"),
    (replace(toy(), domain=torch.where(ROW % 5 == 3, 0, ROW // 5 % 2)), Natural(), None, MIXTURE,
     "client 3 has no rows of domain 'night'"),
    (replace(three(), held_out=three().domain == 1), IID(4), None, MIXTURE, "no client has a training row of domain"),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "partition", "groups", "shift", "line"), REFUSED)
def test_a_shift_that_does_not_fit_is_refused(rows, partition, groups, shift, line):
    with pytest.raises(FedtideError, match=line):
        build(rows, partition, groups or OneGroup(), shift=shift)


SETTINGS = {"who": Who, "what": What, "how": How, "shift": Shift}


@pytest.mark.parametrize(("setting", "value"), [
    ("who", {"kind": "periodic", "period": 0}), ("who", {"kind": "periodic", "phase": float("nan")}),
    ("who", {"kind": "periodic", "curve": "sine"}), ("who", {"kind": "periodic", "perod": 8}),
    ("who", {"kind": "periodic", "dropout_rate": 1.0}), ("what", {"kind": "domain-mixture", "jitter": -1}),
    ("how", {"kind": "rotation", "angles": [45]}), ("shift", {"clock": "minutes"}),
], ids=str)  # fmt: skip
def test_settings_out_of_range_are_refused(setting, value):
    with pytest.raises(ValidationError):
        TypeAdapter(SETTINGS[setting]).validate_python(value)


# -- clients as index arrays ------------------------------------------------------------------------------------------


def people(seed: int = 0, **settings):
    return build(Generated(clients=6, samples=10, dims=3, classes=4).load(None, seed), Natural(), seed=seed, **settings)


def test_spans_are_the_lists_that_they_stand_for():
    lists = Ragged.of([[2, 3, 4], [12, 13, 14], [22, 23, 24]])
    spans = Spans(clients=3, each=10, first=2, count=3)
    assert [spans[c].tolist() for c in range(3)] == [lists[c].tolist() for c in range(3)]
    assert len(spans) == len(lists)
    some = torch.tensor([2, 0])
    assert torch.equal(spans.sizes(some), lists.sizes(some))


def test_a_row_is_the_same_whoever_else_is_asked_for():
    rows = Generated(clients=50, samples=4, dims=3).load(None, 7)
    order = torch.tensor([199, 3, 0, 121, 122, 3])
    x, y = rows.take(order)
    for place, row in enumerate(order.tolist()):
        alone_x, alone_y = rows.take(torch.tensor([row]))
        assert torch.equal(alone_x[0], x[place])
        assert torch.equal(alone_y[0], y[place])
    assert torch.equal(rows.labels(order), y)
    again, _ = Generated(clients=50, samples=4, dims=3).load(None, 7).take(order)
    assert torch.equal(x, again)
    assert not torch.equal(x, Generated(clients=50, samples=4, dims=3).load(None, 8).take(order)[0])


def test_more_clients_leave_the_first_ones_as_they_are():
    few, many = (Generated(clients=clients, samples=4).load(None, 0) for clients in (3, 10**12))
    assert torch.equal(few.take(torch.arange(12))[0], many.take(torch.arange(12))[0])
    assert many.take(torch.tensor([4 * 10**12 - 1]))[0].shape == (1, 32)


def test_rows_are_as_spread_out_as_the_settings_say():
    """Per dimension: clients' means differ by spread^2 + (separation^2 + noise^2)/rows, rows of one of them by the
    rest; with all classes at one place, spread 2 and noise 1 that is 4 + 1/50 and 1."""
    rows = Generated(clients=2000, samples=50, dims=4, separation=0.0, spread=2.0, noise=1.0).load(None, 0)
    x, y = rows.take(torch.arange(len(rows)))
    of_client = x.reshape(2000, 50, 4)
    assert of_client.mean(1).var().item() == pytest.approx(4 + 1 / 50, rel=0.05)
    assert of_client.var(1).mean().item() == pytest.approx(1, rel=0.02)
    assert torch.bincount(y, minlength=10).double().div(len(y)).sub(0.1).abs().max() < 0.005


@pytest.mark.parametrize(
    ("split", "sizes"),
    [
        (Split(), {"test": 2, "val": 1, "train": 7}),  # 20 % of 10; 10 % of 8 is 1 row
        (Split(val=0.0, test=0.5), {"test": 5, "val": 0, "train": 5}),
        (Split(val=0.0, test=0.0), {"test": 0, "val": 0, "train": 10}),
        (Split(val=0.5, test=0.01), {"test": 1, "val": 4, "train": 5}),
    ],
)
def test_every_client_has_all_of_its_rows_in_one_part_or_another(split, sizes):
    made = people(split=split)
    for client in range(6):
        held = {part: made.held(client, MOMENT, part).tolist() for part in sizes}
        assert {part: len(rows) for part, rows in held.items()} == sizes
        assert sorted(row for rows in held.values() for row in rows) == list(range(10 * client, 10 * client + 10))
    for part, size in sizes.items():
        assert made.counts(made.clients, part).tolist() == [size] * 6


def test_a_shard_holds_the_rows_of_its_client():
    made = people(split=Split(val=0.2, test=0.2))
    shard = made.shard(4, MOMENT)
    x, y = made.rows.take(torch.arange(40, 50))
    assert torch.equal(shard.x, x[-len(shard) :])
    assert torch.equal(shard.y, y[-len(shard) :])
    assert shard.ids.tolist() == list(range(50 - len(shard), 50))
    assert torch.equal(shard.val.x, x[2:4])
    rows, owner = made.pooled(torch.tensor([1, 5]), MOMENT, "test")
    assert rows.tolist() == [10, 11, 50, 51]
    assert owner.tolist() == [0, 0, 1, 1]
    shares = made.label_shares(torch.tensor([4]), MOMENT)
    assert torch.equal(shares[0], torch.bincount(shard.y, minlength=4).double() / len(shard))


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"partition": IID(clients=3)}, "data.partition.kind: found 'iid'"),
        ({"partition": Natural(clients=3)}, "data.partition.clients: found 3"),
        ({"partition": Natural(min_samples=11)}, "data.partition.min_samples: found 11"),
        ({"groups": ByLabels(((0, 1), (2, 3)))}, "data.groups.by: found 'labels'"),
        ({"held_out_clients": HeldOutClients(clients=2)}, "data.held_out_clients.clients: found 2"),
        ({"public_samples": 5}, "data.public_samples: found 5"),
        ({"shift": Shift(what=DomainMixture())}, "shift.what.kind: found 'domain-mixture'"),
        ({"shift": Shift(what=Stream())}, "shift.what.kind: found 'stream'"),
        ({"shift": Shift(how=how.Permutation())}, "shift.how.kind: found 'permutation'"),
    ],
)
def test_what_would_have_to_see_all_rows_is_refused_in_one_line(settings, key):
    rows = Generated(clients=6, samples=10).load(None, 0)
    with pytest.raises(FedtideError) as told:
        build(rows, **{"partition": Natural(), **settings})
    assert str(told.value).startswith(key)
    assert "allowed: " in str(told.value)
    assert "\n" not in str(told.value)


def test_a_million_clients_are_a_few_numbers(tmp_path):
    """What is kept of a million clients that 1,000 have not: ids of 8 bytes, twice, and nothing of their rows."""

    def held(clients: int) -> int:
        tracemalloc.start()
        made = build(Generated(clients=clients, samples=25).load(None, 0), Natural())
        came = made.arrivals(100, MOMENT)
        for client in came.tolist():
            assert len(made.shard(client, MOMENT)) == 18
        assert made.group.untyped_storage().nbytes() == 8
        now, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return now

    assert held(10**6) - held(10**3) < 10**5
    made = build(Generated(clients=10**6, samples=25).load(None, 0), Natural())
    save(made, tmp_path / "0.safetensors", rounds=3, cohort=1000)
    assert (tmp_path / "0.safetensors").stat().st_size < 9 * 10**6
