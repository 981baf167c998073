"""Rows that are made when they are asked for: the same whoever asks, and nothing that grows with the population."""

from __future__ import annotations

import math
import tracemalloc

import pytest
import torch

from fedtide.core.base import Moment
from fedtide.core.errors import FedtideError
from fedtide.data.groups import ByLabels, HeldOutClients, Split
from fedtide.data.partition import IID, Natural
from fedtide.data.population_builder import build
from fedtide.data.ragged import Ragged, Spans
from fedtide.data.rows import Rows
from fedtide.data.saved import save
from fedtide.data.shift import Shift, how
from fedtide.data.shift.what import DomainMixture, Stream
from fedtide.data.sources import Generated

MOMENT = Moment(3, 20)


def people(seed: int = 0, **settings):
    return build(Generated(clients=6, samples=10, dims=3, classes=4).load(None, seed), Natural(), seed=seed, **settings)


def test_spans_are_the_lists_that_they_stand_for():
    lists = Ragged.of([[2, 3, 4], [12, 13, 14], [22, 23, 24]])
    spans = Spans(clients=3, each=10, first=2, count=3)
    assert [spans[c].tolist() for c in range(3)] == [lists[c].tolist() for c in range(3)]
    assert (len(spans), spans.total) == (len(lists), lists.total)
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


def test_classes_lie_where_they_lie_for_everyone():
    rows = Generated(clients=500, samples=40, dims=5, classes=3, spread=0.0, noise=0.1).load(None, 0)
    x, y = rows.take(torch.arange(len(rows)))
    centers = torch.stack([x[y == c].mean(0) for c in range(3)])
    assert (x - centers[y]).abs().max() < 0.1 * math.sqrt(2 * math.log(len(x) * 5)) * 1.5
    assert (centers[0] - centers[1]).abs().max() > 0.3


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


def test_parts_are_as_large_as_those_of_rows_that_are_dealt():
    dealt = build(dealt_alike(), Natural(), split=Split(val=0.3, test=0.3))
    made = people(split=Split(val=0.3, test=0.3))
    for part in ("train", "val", "test"):
        assert torch.equal(made.counts(made.clients, part), dealt.counts(dealt.clients, part))


def dealt_alike() -> Rows:
    return Rows("dealt", torch.zeros(60, 3), torch.zeros(60, dtype=torch.int64), 4, client=torch.arange(60) // 10)


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
