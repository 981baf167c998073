"""Laws of streams and drift: windows, groups, change points, swapped labels, and who is said to have drifted."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from fedtide.core.base import Moment
from fedtide.core.rng import Rng
from fedtide.data.partition import IID, ByDomain, Dirichlet, HeldOutClients, Resample, Split
from fedtide.data.population import Population
from fedtide.data.population_builder import build
from fedtide.data.rows import Rows
from fedtide.data.shift import (
    ChangePoints,
    ClusterDrift,
    ConceptDrift,
    Cycle,
    DomainMixture,
    Drawn,
    DrawnConcepts,
    Shift,
    Stream,
)
from fedtide.data.shift.arrival import StreamPlan
from fedtide.data.shift.concept_drift import ClusterDriftPlan, cut_across
from fedtide.data.shift.how import LabelSwaps, Permutation
from fedtide.data.shift.who import Periodic
from helpers.examples import examples
from helpers.toys import PARTS

law = examples(25)
seeds = st.integers(0, 2**32)


def toy(n: int = 600, classes: int = 6) -> Rows:
    """Rows whose only feature is their number, in two domains, a second apart."""
    i = torch.arange(n)
    x = i.float()[:, None]
    return Rows("toy", x, i % classes, classes, domain=i // classes % 2, domain_names=("a", "b"), time=i.double())


def people(what=None, how=None, rows: Rows | None = None, clients: int = 6, seed: int = 0, **settings) -> Population:
    kinds = {**({"what": what} if what else {}), **({"how": how} if how else {})}
    settings = {
        "partition": IID(clients),
        "held_out_clients": HeldOutClients(2),
        "split": Split(val=0.1, test=0.2),
        **settings,
    }
    kinds |= settings.pop("shift", {})
    return build(rows or toy(), shift=Shift(**kinds), seed=seed, **settings)


def everyone(population: Population) -> range:
    return range(len(population.group))


def shown(population: Population, r: int, parts=("train",), clients: int = 6) -> list:
    """Ids and labels of each client's rows in each part."""
    shards = [[population.shard(client, Moment(r, 100), part) for part in parts] for client in range(clients)]
    return [[(shard.ids.tolist(), shard.y.tolist()) for shard in of] for of in shards]


def held(population: Population, client: int, r: int, part: str = "train") -> list[int]:
    return population.held(client, Moment(r, 1000, float(r)), part).tolist()


# -- windows ----------------------------------------------------------------------------------------------------------

streams = st.builds(
    lambda gap, longer, intervals, by: Stream(
        by=by, gap=gap, retention=gap + longer, intervals=intervals, empty="wait"
    ),
    st.integers(1, 40), st.integers(0, 90), st.integers(1, 8), st.sampled_from(["labels", "order", "time"]),
)  # fmt: skip


@law
@given(streams)
def test_at_the_start_there_is_what_arrived_by_then(stream):
    for j, live in enumerate(stream.live(0.0)):
        assert live == (stream.gap * (j + 1) - stream.retention <= 0)


@law
@given(streams, st.integers(0, 3))
def test_every_row_comes_once_stays_for_the_retention_and_never_returns(stream, seed):
    population = people(stream, seed=seed)
    last = math.ceil(stream.gap * stream.intervals)
    for client in everyone(population):
        for part in PARTS:
            when: dict[int, list[int]] = {row: [] for row in population.parts[part][client].tolist()}
            for r in range(last + 2):
                for row in held(population, client, r, part):
                    when[row].append(r)
            for rounds in when.values():
                assert len(rounds) <= stream.retention
                assert not rounds or rounds == list(range(rounds[0], rounds[-1] + 1))
                # Only what arrived before round 0 is there for less than the retention.
                assert not rounds or rounds[0] == 0 or len(rounds) == stream.retention


@law
@given(streams, st.integers(0, 3), st.integers(0, 330))
def test_who_drifted_is_who_holds_other_rows(stream, seed, r):
    population = people(stream, seed=seed)
    moment, before = Moment(r, 1000), Moment(r - 1, 1000)
    truth = [
        client
        for client in population.clients.tolist()
        if any(held(population, client, r, part) != held(population, client, r - 1, part) for part in PARTS)
    ]
    assert population.changed(moment).tolist() == truth
    assert population.changed(moment, before).tolist() == truth
    if truth:
        assert population.events(moment)


@law
@given(streams, st.sampled_from([0, "half", 1, 2]), st.integers(0, 200))
def test_counts_are_those_of_what_is_held(stream, shared, r):
    population = people(replace(stream, shared=shared))
    clients = torch.arange(len(population.group))
    for part in PARTS:
        counted = population.counts(clients, part, Moment(r, 1000)).tolist()
        assert counted == [len(held(population, client, r, part)) for client in clients.tolist()]


@law
@given(streams, st.integers(0, 200))
def test_who_holds_nothing_waits(stream, r):
    population = people(stream, partition=Dirichlet(clients=6, alpha=0.05))
    moment = Moment(r, 1000)
    there = [client for client in population.clients.tolist() if held(population, client, r)]
    assert population.reachable(moment).tolist() == there
    assert population.arrivals(6, moment).tolist() == there
    assert len(population.arrivals(2, moment)) == min(2, len(there))
    tested = [client for client in there if held(population, client, r, "test")]
    assert population.judged(population.clients, "test", moment).tolist() == tested
    assert set(population.judged(population.held_out_clients, "test", moment).tolist()) == {
        client for client in population.held_out_clients.tolist() if held(population, client, r, "test")
    }


def test_a_stream_and_the_hours_of_the_day_compose():
    stream = Stream(by="labels", gap=4, retention=4, intervals=6, empty="wait")
    population = people(stream, groups=ByDomain(), shift={"who": Periodic(period=8)}, held_out_clients=HeldOutClients())
    for r in range(24):
        moment = Moment(r, 24)
        there = population.there(moment)
        arrived = population.arrivals(3, moment)
        assert there[arrived].all()
        assert set(population.reachable(moment).tolist()) <= set(there.nonzero().flatten().tolist())
        if r % 8 == 0 and int((there & (population.group == 0)).sum()) >= 3:
            assert (population.group[arrived] == 0).all()


# -- what an interval is ----------------------------------------------------------------------------------------------


def intervals(population: Population, part: str = "train") -> list[list[int]]:
    """The interval of each row of each client."""
    plan = population.plan
    assert isinstance(plan, StreamPlan)
    cut = population.parts[part].counts.tolist()
    return [numbers.tolist() for numbers in plan.interval[part].split(cut)]


@law
@given(st.integers(1, 8), seeds)
def test_a_bucket_holds_all_rows_of_its_labels_and_buckets_are_dealt_in_turn(wide, seed):
    population = people(Stream(intervals=wide), seed=seed)
    for client in population.clients.tolist():
        bucket: dict[int, set[int]] = {}
        for part in PARTS:
            numbers = intervals(population, part)[client]
            for row, number in zip(population.parts[part][client].tolist(), numbers, strict=True):
                bucket.setdefault(int(population.rows.y[row]), set()).add(number)
        assert all(len(numbers) == 1 for numbers in bucket.values())
        sizes = np.bincount([number for numbers in bucket.values() for number in numbers], minlength=wide)
        assert sizes.max() - sizes.min() <= 1
        assert (np.diff(sizes) <= 0).all()


def test_clients_shuffle_their_labels_each_on_its_own():
    population = people(Stream(intervals=3), rows=toy(1200, 12))
    assert len({tuple(numbers) for numbers in intervals(population)}) > 4
    assert intervals(people(Stream(intervals=3), seed=1)) != intervals(people(Stream(intervals=3)))


def test_unseen_clients_change_nothing_for_the_others():
    rows = replace(toy(), held_out=torch.arange(600) >= 400)
    few, many = (people(Stream(intervals=3, shared=1), rows=rows, held_out_clients=HeldOutClients(n)) for n in (1, 5))
    assert intervals(few)[:6] == intervals(many)[:6]
    drifts = [
        people(ClusterDrift(groups=2, labels=3, every=2), rows=rows, held_out_clients=HeldOutClients(n)) for n in (1, 5)
    ]
    for r in (0, 6):
        assert len({tuple(p.group_at(Moment(r, 10))[:6].tolist()) for p in drifts}) == 1


@law
@given(st.integers(1, 12), st.booleans())
def test_chunks_follow_the_order_of_the_rows(wide, own_test):
    rows = replace(toy(), held_out=torch.arange(600) >= 480) if own_test else toy()
    split = Split(test=None if own_test else 0.2)
    population = people(Stream(by="order", intervals=wide), rows=rows, held_out_clients=HeldOutClients(), split=split)
    for client in population.clients.tolist():
        parts = {part: population.parts[part][client].tolist() for part in PARTS}
        numbers = {part: intervals(population, part)[client] for part in PARTS}
        together = [["train", "val"], ["test"]] if own_test else [list(PARTS)]
        for names in together:
            pairs = sorted((row, n) for name in names for row, n in zip(parts[name], numbers[name], strict=True))
            order = [n for _, n in pairs]
            assert order == [i * wide // len(order) for i in range(len(order))]


@law
@given(st.integers(1, 12), st.sampled_from(["equal", "quantiles"]))
def test_intervals_of_time_are_the_same_for_all_and_in_order(wide, spans):
    rows = replace(toy(), time=torch.arange(600).double() ** 2)
    population = people(Stream(by={"kind": "time", "spans": spans}, intervals=wide), rows=rows)
    found = {}
    for part in PARTS:
        for client, numbers in enumerate(intervals(population, part)):
            found |= dict(zip(population.parts[part][client].tolist(), numbers, strict=True))
    order = [found[row] for row in sorted(found)]
    assert order == sorted(order)
    assert (order[0], order[-1]) == (0, wide - 1)
    if spans == "quantiles":
        sizes = np.bincount(order, minlength=wide)
        assert sizes.max() - sizes.min() <= 1
    else:
        edges = rows.time.max() * torch.arange(1, wide) / wide
        assert order == torch.bucketize(rows.time[sorted(found)], edges, right=True).tolist()


# -- the heterogeneity knob -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shared", "each"), [("half", 1), (1, 1), (2, 2)])
def test_everyone_holds_the_shared_rows_at_all_times(shared, each):
    i = torch.arange(600)
    rows = replace(toy(), y=torch.where(i % 4 == 0, i // 4 % 6, i % 2))  # labels 0 and 1 have most rows
    population = people(Stream(by="order", gap=10, retention=20, shared=shared), rows=rows)
    common = population.plan.shared
    labels = torch.bincount(rows.y[common], minlength=6).tolist()
    assert sorted(labels) == ([0] * 3 + [1] * 3 if shared == "half" else [each] * 6)
    assert shared != "half" or labels[:2] == [0, 0]
    for client in population.clients.tolist():
        for r in (0, 20, 55, 79):
            mine = held(population, client, r)
            assert set(common.tolist()) <= set(mine)
            assert len(set(mine)) == len(mine)
            assert mine == sorted(mine)
            assert not set(held(population, client, r, "test")) & set(common.tolist())


# -- who may hold something else --------------------------------------------------------------------------------------


OTHERS = {
    "still": {},
    "mixture": {"what": DomainMixture(samples=20, cycles=2)},
    "both": {"what": Stream(by="order", gap=10, retention=20), "how": LabelSwaps(every=7)},
    "permuted": {"how": Permutation(), "groups": ByDomain()},
}


@pytest.mark.parametrize("kind", ["stream", "drift", "changes", "swaps", "concepts", *OTHERS])
def test_who_holds_other_samples_is_among_those_who_may(kind):
    population = people(**(KINDS | OTHERS)[kind])
    quiet = 0
    for r, before in [(0, -1), (5, 4), (10, 9), (11, 10), (25, 24), (30, 20), (21, 7), (9, 30)]:
        now, then = Moment(r, 100), Moment(before, 100)
        may = population.may_differ(now, then).tolist()
        quiet += not may
        for client in set(population.clients.tolist()) - set(may):
            a, b = (population.shard(client, at) for at in (now, then))
            assert torch.equal(a.x, b.x)
            assert torch.equal(a.y, b.y)
    assert quiet or kind == "mixture"


# -- the clock --------------------------------------------------------------------------------------------------------

KINDS = {
    "stream": {"what": Stream(by="order", gap=10, retention=20)},
    "drift": {"what": ClusterDrift(groups=2, labels=3, every=10, samples=20, events=(25,))},
    "changes": {"what": ChangePoints(when={"kind": "drawn", "every": 10})},
    "swaps": {"how": LabelSwaps(every=10)},
    "concepts": {"how": LabelSwaps(every=10, concepts=3)},
    "dealt": {"how": LabelSwaps(every=10, concepts=3, begin="dealt")},
    "own": {"what": ChangePoints(concepts={"kind": "label-banks", "banks": 3}, when=Drawn(every=10, together=False))},
    "unseen": {"how": ConceptDrift(drawn=DrawnConcepts(exchanged=4), when=Drawn(every=10), test="unseen")},
    "cycle": {"how": ConceptDrift(drawn=DrawnConcepts(exchanged=4), when=Cycle(every=10, present=1), test="first")},
}


@pytest.mark.parametrize("kind", KINDS)
def test_seconds_drive_it_all_where_the_clock_says_so(kind):
    rounds, seconds = (people(shift={"clock": clock}, **KINDS[kind]) for clock in ("rounds", "seconds"))
    for r in (0, 10, 37, 55):
        here, there = Moment(r, 100, 0.0), Moment(1, 100, float(r))
        for client in everyone(rounds):
            for part in PARTS:
                a, b = rounds.shard(client, here, part), seconds.shard(client, there, part)
                assert torch.equal(a.ids, b.ids)
                assert torch.equal(a.y, b.y)
        assert torch.equal(rounds.group_at(here), seconds.group_at(there))
        earlier = Moment(0, 100, float(r - 1))
        assert torch.equal(rounds.changed(here), seconds.changed(there, earlier))
        assert rounds.events(here) == seconds.events(there, earlier)
    with pytest.raises(ValueError, match="say since when"):
        seconds.changed(Moment(3, 100, 3.0))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_played_before_round_0_meets_what_there_is_at_0(kind):
    population = people(**KINDS[kind])
    assert shown(population, -3, clients=8) == shown(population, 0, clients=8)
    assert not len(population.changed(Moment(0, 100)))
    assert population.events(Moment(0, 100)) == ()


@pytest.mark.parametrize("kind", KINDS)
def test_moments_may_be_asked_for_in_any_order(kind):
    """What is cached between moments shows nowhere."""

    def told(rounds):
        population = people(**KINDS[kind])
        return {r: shown(population, r) for r in rounds}

    rounds = [0, 9, 10, 11, 25, 40, 60, 79]
    assert told(rounds) == told(rounds[::-1]) == told([40, 0, 79, 10, 9, 60, 25, 11])


@pytest.mark.parametrize("kind", KINDS)
def test_who_drifted_is_who_has_other_rows_or_labels(kind):
    population = people(**KINDS[kind])
    total, now = 0, shown(population, -1, PARTS)
    for r in range(60):
        then, now = now, shown(population, r, PARTS)
        truth = [client for client, (one, other) in enumerate(zip(then, now, strict=True)) if one != other]
        assert population.changed(Moment(r, 100)).tolist() == truth
        assert bool(truth) <= bool(population.events(Moment(r, 100)))
        total += len(truth)
    assert total > 4


# -- grouped drift ----------------------------------------------------------------------------------------------------


def drifting(**settings) -> Population:
    """Forty clients in four groups of three of twelve labels."""
    what = ClusterDrift(**{"groups": 4, "labels": 3, "samples": 30, "val_samples": 4, "test_samples": 10, **settings})
    return people(what, rows=toy(2400, 12), clients=40, held_out_clients=HeldOutClients())


@law
@given(seeds, st.integers(0, 60), st.booleans())
def test_rows_are_drawn_by_the_labels_of_the_group(seed, r, own):
    population = people(
        ClusterDrift(groups=2, labels=3, samples=25, test_samples=9, own_samples_only=own, events=(30,)),
        seed=seed,
        held_out_clients=HeldOutClients(),
    )
    plan, moment = population.plan, Moment(r, 100)
    assert isinstance(plan, ClusterDriftPlan)
    for client in population.clients.tolist():
        labels, shares = plan.shares(client, plan.state(plan.view.time(moment)))
        assert math.isclose(shares.sum(), 1)
        for part, size in (("train", 25), ("val", 10), ("test", 9)):
            rows = population.held(client, moment, part)
            assert len(rows) == size
            assert rows.tolist() == sorted(rows.tolist())
            assert set(population.rows.y[rows].tolist()) <= set(labels)
            assert set(rows.tolist()) <= set(population.parts[part].rows.tolist())
            mine = population.parts[part][client]
            theirs = rows[~torch.isin(rows, mine)]
            assert not own or not set(population.rows.y[theirs].tolist()) & set(population.rows.y[mine].tolist())


def test_training_rows_of_one_are_never_test_rows_of_another():
    rows = replace(toy(2400, 12), held_out=None)
    for partition in (IID(clients=10), Resample(clients=10, samples=300)):
        population = people(
            ClusterDrift(groups=4, labels=3), rows=rows, partition=partition, held_out_clients=HeldOutClients()
        )
        trained, checked, tested = (
            {row for client in range(10) for r in (0, 10, 20) for row in held(population, client, r, part)}
            for part in PARTS
        )
        assert not trained & tested
        assert not checked & tested
        assert not trained & checked


def test_a_small_drift_moves_and_redraws_so_many():
    population = drifting(migrate_fraction=0.1, resample_fraction=0.25)
    for event in range(1, 8):
        now, then = Moment(10 * event, 100), Moment(10 * event - 1, 100)
        assert len(population.changed(now)) == 4 + 10
        assert int((population.group_at(now) != population.group_at(then)).sum()) == 4
        assert population.events(now) == ("drift",)
        assert not len(population.changed(then))
        assert population.events(then) == ()


def test_a_mass_event_deals_a_share_to_new_groups_that_cut_across():
    population = drifting(migrate_fraction=0.0, resample_fraction=0.0, events=(5, 12))
    plan = population.plan
    assert population.group_at(Moment(0, 20)).bincount().tolist() == [10] * 4
    five, twelve = population.group_at(Moment(5, 20)), population.group_at(Moment(12, 20))
    assert five.bincount(minlength=8)[4:].tolist() == [5] * 4
    assert twelve.bincount(minlength=12)[8:].tolist() == [5] * 4
    assert population.events(Moment(5, 20)) == ("mass",)
    assert population.events(Moment(10, 20)) == ("drift",)
    labels = plan.state(12).labels
    assert len(labels) == 12
    for newer, older in ((labels[4:8], labels[:4]), (labels[8:], labels[4:8])):
        assert sorted(sum(newer, ())) == sorted(sum(older, ()))
        for group in newer:
            assert len([1 for old in older if set(old) & set(group)]) == 3
    assert (
        population.changed(Moment(5, 20)).tolist()
        == (five != population.group_at(Moment(4, 20))).nonzero()[:, 0].tolist()
    )


def test_the_small_drift_comes_before_a_mass_event_at_the_same_time():
    both, only = (
        drifting(migrate_fraction=1.0, resample_fraction=0.0, events={"at": (10,), "fraction": mass})
        for mass in (0.5, 0.0)
    )
    now = Moment(10, 20)
    assert both.events(now) == ("drift", "mass")
    stayed = both.group_at(now) < 4
    assert int(stayed.sum()) == 20
    assert torch.equal(both.group_at(now)[stayed], only.group_at(now)[stayed])
    # One event and not two: there is one state for it.
    assert both.plan.number(10) == 1


@law
@given(seeds, st.lists(st.integers(1, 5), min_size=2, max_size=5))
def test_crossed_groups_have_the_same_labels_and_sizes(seed, sizes):
    ends = np.cumsum(sizes).tolist()
    groups = tuple(tuple(range(end - n, end)) for end, n in zip(ends, sizes, strict=True))
    new = cut_across(groups, Rng(seed))
    assert [len(group) for group in new] == sizes
    assert sorted(sum(new, ())) == sorted(sum(groups, ()))
    if len(set(sizes)) == 1:
        for group in new:
            shares = [len(set(old) & set(group)) for old in groups]
            assert max(shares) <= math.ceil(sizes[0] / len(sizes))


def test_concentration_sets_how_far_clients_of_a_group_are_apart():
    def apart(concentration):
        population = drifting(concentration=concentration, migrate_fraction=0.0, resample_fraction=0.0)
        plan, group = population.plan, population.group_at(Moment(0, 20))
        shares = torch.tensor(np.array([plan.shares(c, plan.state(0.0))[1] for c in range(40)]))
        return np.mean([float(torch.cdist(s, s, 1).mean()) for k in range(4) for s in [shares[group == k]]])

    assert apart(0.1) > apart(3.0) > apart(300.0)


# -- change points ----------------------------------------------------------------------------------------------------


@law
@given(seeds, st.integers(1, 30), st.floats(0, 1))
def test_a_client_holds_its_rows_of_the_concept_that_it_is_in(seed, every, share):
    population = people(ChangePoints(when={"kind": "drawn", "every": every, "fraction": share}), seed=seed)
    for r in (0, 7, 31, 64):
        concept = population.group_at(Moment(r, 100))
        for client in everyone(population):
            for part in PARTS:
                own = population.parts[part][client]
                mine = own[population.rows.domain[own] == concept[client]].tolist()
                assert held(population, client, r, part) == mine
                counted = population.counts(torch.tensor([client]), part, Moment(r, 100))
                assert counted.tolist() == [len(mine)]
    moved = population.changed(Moment(every, 100))
    assert len(moved) == round(share * 6)


@law
@given(seeds, st.integers(1, 20))
def test_change_points_that_were_written_are_read_again(tmp_path_factory, seed, every):
    path = tmp_path_factory.mktemp("changes") / "changes.csv"
    drawn = people(ChangePoints(when={"kind": "drawn", "every": every}), seed=seed)
    drawn.plan.write(path, 60)
    read = people(ChangePoints(when=f"file:{path}"), seed=seed + 1)
    for r in (0, every, 33, 60):
        assert torch.equal(drawn.group_at(Moment(r, 100)), read.group_at(Moment(r, 100)))
    assert read.plan.trace.table(60) == drawn.plan.trace.table(60)


# -- swapped labels ---------------------------------------------------------------------------------------------------


def readings(population: Population, r: int) -> torch.Tensor:
    """What every client reads each label as (clients, classes)."""
    classes, n = population.rows.classes, len(population.group)
    y, client = torch.arange(classes).repeat(n), torch.arange(n).repeat_interleave(classes)
    return population.row_transform.apply(y, y, client, float(r))[1].reshape(n, classes)


swaps = st.builds(
    LabelSwaps,
    every=st.integers(1, 9),
    fraction=st.floats(0, 1),
    concepts=st.integers(2, 5),
    begin=st.sampled_from(["source", "dealt"]),
) | st.builds(LabelSwaps, every=st.integers(1, 9), fraction=st.floats(0, 1))


@law
@given(swaps, seeds, st.integers(0, 40))
def test_labels_are_permuted_and_who_is_not_chosen_stays(how, seed, r):
    population = people(how=how, seed=seed)
    now, then = readings(population, r), readings(population, r - 1)
    assert torch.equal(now.sort(1).values, torch.arange(6).expand_as(now))
    assert int((now != then).any(1)[:6].sum()) <= round(how.fraction * 6)
    if r == 0 or r % how.every:
        assert torch.equal(now, then)
    elif how.concepts is None:
        assert set((now != then).sum(1).tolist()) <= {0, 2}
        assert int((now != then).any(1)[:6].sum()) == round(how.fraction * 6)


@law
@given(seeds, st.integers(1, 60))
def test_swaps_are_of_labels_that_the_client_has_and_touch_all_its_parts(seed, r):
    one = Dirichlet(clients=6, alpha=0.1)
    population = people(
        how=LabelSwaps(every=3, fraction=1.0), seed=seed, partition=one, held_out_clients=HeldOutClients()
    )
    table = readings(population, r)
    for client in population.clients.tolist():
        own = set(population.rows.y[population.parts["train"][client].long()].tolist())
        moved = (table[client] != torch.arange(6)).nonzero().flatten().tolist()
        assert set(moved) <= own
        assert set(population.shard(client, Moment(r, 100)).y.tolist()) == own
        for part in PARTS:
            shard = population.shard(client, Moment(r, 100), part)
            assert torch.equal(shard.y, table[client][population.rows.y[shard.ids]])
            assert shard.x[:, 0].tolist() == shard.ids.tolist()


def test_the_same_swap_twice_is_none():
    i = torch.arange(80)
    rows = Rows("toy", i.float()[:, None], i % 2, 2)
    population = people(how=LabelSwaps(every=5, fraction=1.0), rows=rows, clients=4, held_out_clients=HeldOutClients())
    for r in range(30):
        assert torch.equal(readings(population, r), torch.tensor([[0, 1], [1, 0]])[r // 5 % 2].expand(4, 2))


@law
@given(seeds, st.integers(2, 6), st.integers(2, 12))
def test_shared_concepts_are_few_and_the_first_is_as_it_is(seed, concepts, classes):
    assume(concepts <= 1 + math.prod(range(classes - 1, 0, -2)))
    population = people(
        how=LabelSwaps(every=2, fraction=0.7, concepts=concepts), rows=toy(60 * classes, classes), seed=seed
    )
    assert torch.equal(readings(population, 0)[0], torch.arange(classes))
    found = {}
    for r in range(0, 24):
        concept, table = population.group_at(Moment(r, 100)), readings(population, r)
        for client in everyone(population):
            found.setdefault(int(concept[client]), set()).add(tuple(table[client].tolist()))
    assert all(len(tables) == 1 for tables in found.values())
    assert len({table for tables in found.values() for table in tables}) == len(found) <= concepts
    for tables in found.values():
        (table,) = tables
        assert [table[c] for c in table] == list(range(classes))


@law
@given(seeds, st.integers(2, 6), st.integers(2, 20))
def test_dealt_clients_are_evenly_in_all_concepts_before_the_first_event(seed, concepts, clients):
    def made(**begin):
        return people(how=LabelSwaps(every=5, fraction=0.5, concepts=concepts, **begin), seed=seed, clients=clients)

    population = made(begin="dealt")
    for who in (population.clients, torch.arange(len(population.clients), len(population.group))):
        count = torch.bincount(population.group_at(Moment(0, 100))[who], minlength=concepts)
        assert count.max() - count.min() <= 1
    before, after = (population.group_at(Moment(r, 100)) for r in (4, 5))
    assert torch.equal(before, population.group_at(Moment(0, 100)))
    assert not population.events(Moment(4, 100))
    assert not made().group_at(Moment(4, 100)).any()  # the default: as the source has it
    # Events choose the same clients and move them as far; they only start elsewhere.
    assert torch.equal((after - before) % concepts, made().group_at(Moment(5, 100)))


def test_labels_are_permuted_by_group():
    given = Permutation(permutations=((0, 1, 2, 3, 4, 5), (5, 4, 3, 2, 1, 0)))
    population = people(how=given, groups=ByDomain())
    drawn = people(how=Permutation(), groups=ByDomain())
    for client in everyone(population):
        shard = population.shard(client, Moment(3, 10))
        y = population.rows.y[shard.ids]
        assert torch.equal(shard.y, y if population.group[client] == 0 else 5 - y)
        table = readings(drawn, 3)[client]
        assert torch.equal(table.sort().values, torch.arange(6))
        assert torch.equal(table, torch.arange(6)) == (population.group[client] == 0)
    assert not len(population.changed(Moment(3, 10)))
