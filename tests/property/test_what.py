"""Laws of what a client holds and how it reads: mixtures of domains, and turned pictures."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedtide.core.base import Moment
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.data.partition import IID, ByLabels, Split
from fedtide.data.population import Population
from fedtide.data.population_builder import build
from fedtide.data.rows import Rows
from fedtide.data.shift import DomainMixture, Shift
from fedtide.data.shift.how import Rotation
from helpers.examples import examples

law = examples(40)
curves = st.sampled_from(["linear", "cosine"])
seeds = st.integers(0, 2**32)


def two_domains(n: int = 60) -> tuple[torch.Tensor, torch.Tensor]:
    """Row numbers 100..., and the domain of each."""
    return torch.arange(100, 100 + n), torch.arange(n) % 2


def seconds(mixture: DomainMixture, r: int, rounds: int, key: Rng = Rng(0), part: str = "train") -> int:
    """How many rows of the second domain are held."""
    rows, domain = two_domains()
    return int(domain[mixture.hold(rows, domain, 2, part, Moment(r, rounds), key) - 100].sum())


def second(mixture: DomainMixture, r: int, rounds: int) -> float:
    """The share of the second of two domains."""
    return mixture.shares(Moment(r, rounds), 2).tolist()[1]


# -- mixture ----------------------------------------------------------------------------------------------------------


def ring(curve: str, s: float, period: float, domains: int) -> list[float]:
    """Shares as their formula says it, with distances on the ring."""
    found = []
    for k in range(domains):
        d = abs(s - k * period / domains)
        d = min(d, period - d)
        linear = max(0.0, 1 - domains * d / period)
        cosine = (1 + math.cos(math.pi * domains * d / period)) / 2 if d <= period / domains else 0.0
        found.append(linear if curve == "linear" else cosine)
    return found


@law
@given(curves, st.integers(2, 7), st.integers(1, 8), st.integers(2, 200), st.integers(-300, 3000), st.floats(-9, 9))
def test_domains_on_a_ring_follow_their_formula_and_sum_to_one(curve, domains, cycles, period, r, phase):
    shares = DomainMixture(curve, cycles).shares(Moment(r, cycles * period), domains, phase)
    assert shares.dtype == np.float64
    assert shares.shape == (domains,)
    assert np.allclose(shares, ring(curve, (r + phase) % period, period, domains), atol=1e-9)
    assert math.isclose(shares.sum(), 1, abs_tol=1e-9)
    assert (shares >= 0).all()
    if domains == 2:  # the formula of the paper
        s = (r + phase) % period
        rho = 1 - abs(2 * s / period - 1) if curve == "linear" else (1 - math.cos(2 * math.pi * s / period)) / 2
        assert math.isclose(shares[1], rho, abs_tol=1e-9)


@law
@given(curves, st.integers(2, 5), st.integers(1, 60), st.integers(1, 4))
def test_rounds_before_round_0_are_the_end_of_a_cycle(curve, domains, period, cycles):
    mixture, rounds = DomainMixture(curve, cycles), cycles * period
    seen, span = mixture.seen(rounds, domains), period / 2 if domains == 2 else period
    assert seen - 1 < span <= seen
    for r in range(-seen, 0):
        before, after = (mixture.shares(Moment(at, rounds), domains) for at in (r, r + period))
        assert np.allclose(before, after, atol=1e-9)


@law
@given(curves, st.integers(2, 6), st.integers(1, 200), st.integers(-40, 40), st.integers(1, 40), seeds)
def test_a_mixture_of_domains_holds_differences_of_rounded_sums(curve, domains, n, r, rounds, seed):
    mixture, rows = DomainMixture(curve, samples=n), torch.arange(20 * domains)
    held = mixture.hold(rows, rows % domains, domains, "train", Moment(r, rounds), Rng(seed))
    shares = mixture.shares(Moment(r, rounds), domains)
    sums = [round(shares[k:][::-1].cumsum()[-1] * n) if k else n for k in range(domains)] + [0]
    counts = torch.bincount(held % domains, minlength=domains)
    assert counts.tolist() == [sums[k] - sums[k + 1] for k in range(domains)]
    assert np.abs(counts.numpy() - n * shares).max() <= 1 + 1e-6
    # Where it rounds depends on no domain alone: balanced test rows differ by one at most.
    balanced = torch.bincount(
        mixture.hold(rows, rows % domains, domains, "test", Moment(r, rounds), Rng(seed)) % domains
    )
    assert balanced.max() - balanced.min() <= 1
    assert balanced.sum() == n


@law
@given(curves, st.integers(2, 5), st.data(), st.integers(1, 60), st.integers(0, 30), seeds)
def test_a_client_without_rows_of_some_domains_fills_up_from_the_others(curve, domains, data, n, r, seed):
    there = data.draw(st.sets(st.integers(0, domains - 1), min_size=1))
    rows = torch.arange(40)
    domain = torch.tensor(sorted(there))[rows % len(there)]
    mixture, moment = DomainMixture(curve, samples=n, test="mixture"), Moment(r, 30)
    held = mixture.hold(rows, domain, domains, "val", moment, Rng(seed))
    shares = mixture.shares(moment, domains) * [k in there for k in range(domains)]
    shares = shares / shares.sum() if shares.any() else np.array([k in there for k in range(domains)]) / len(there)
    assert len(held) == n
    assert np.abs(torch.bincount(domain[held], minlength=domains).numpy() - n * shares).max() <= 1 + 1e-6


@law
@given(curves, st.integers(1, 120), st.integers(0, 60), st.integers(1, 60), seeds)
def test_two_domains_are_drawn_one_after_the_other(curve, n, r, rounds, seed):
    mixture, (rows, domain) = DomainMixture(curve, samples=n), two_domains()
    draw, wanted = Rng(seed).at("hold", "train", r).numpy(), round(second(mixture, r, rounds) * n)
    first = rows[domain == 0][torch.from_numpy(draw.integers(0, 30, n - wanted))]
    then = rows[domain == 1][torch.from_numpy(draw.integers(0, 30, wanted))]
    held = mixture.hold(rows, domain, 2, "train", Moment(r, rounds), Rng(seed))
    assert held.tolist() == sorted(first.tolist() + then.tolist())


@pytest.mark.parametrize("part", ["val", "test"])
@pytest.mark.parametrize("test", ["mixture", "balanced", "all"])
def test_rows_that_judge_follow_their_own_mode(test, part):
    mixture, (rows, domain) = DomainMixture(samples=40, test=test), two_domains()
    for r in (0, 5, 10, 13):
        held = mixture.hold(rows, domain, 2, part, Moment(r, 20), Rng(0))
        night = int(domain[held - 100].sum())
        if test == "all":
            assert held.tolist() == rows.tolist()
        else:
            assert (len(held), night) == (40, seconds(mixture, r, 20) if test == "mixture" else 20)


@law
@given(seeds, st.integers(0, 9), st.integers(0, 59), st.sampled_from([0, 5]))
def test_balanced_test_rows_stay_the_same_and_training_rows_do_not(seed, client, r, jitter):
    mixture, (rows, domain) = DomainMixture(samples=40, jitter=jitter), two_domains()

    def held(part, r):
        return mixture.hold(rows, domain, 2, part, Moment(r, 60), Rng(seed).at("what", client)).tolist()

    assert held("test", r) == held("test", 0)
    assert sum(domain[row - 100].item() for row in held("test", r)) == 20
    assert held("train", r) != held("train", (r + 7) % 60)
    assert held("test", r) != held("train", r)


def test_rows_to_train_on_and_to_decide_by_follow_the_mixture_in_every_mode():
    """By what they are judged is another thing, of validation rows as of test rows: above."""
    rows = Rows(
        "toy", torch.randn(80, 2), torch.arange(80) % 2, 2, domain=torch.arange(80) % 2, domain_names=("a", "b")
    )
    for test in ("mixture", "balanced", "all"):
        mixture = DomainMixture(samples=40, test=test)
        assert [seconds(mixture, r, 20) for r in (0, 5)] == [0, 20]
        people = build(rows, IID(clients=1), split=Split(val=0.5, test=0.0), shift=Shift(what=mixture))
        for r, night in ((0, 0), (5, 20)):
            decides = people.shard(0, Moment(r, 20)).val.ids
            judges = people.pool(people.clients, Moment(r, 20), "val")[0].ids
            assert int(rows.domain[decides].sum()) == night
            if test == "all":
                assert judges.tolist() == people.parts["val"][0].tolist()
            else:
                assert int(rows.domain[judges].sum()) == (20 if test == "balanced" else night)


@law
@given(st.integers(1, 6), st.integers(0, 80), seeds)
def test_jitter_moves_a_client_by_no_more_than_its_bound(jitter, r, seed):
    n, rounds = 1000, 80
    held = seconds(DomainMixture(samples=n, jitter=jitter), r, rounds, Rng(seed))
    rho = second(DomainMixture(), r, rounds)
    assert abs(held / n - rho) <= 2 * jitter / rounds + 0.5 / n + 1e-9


@examples(5)
@given(seeds)
def test_jitter_is_drawn_once_per_client(seed):
    # On the way up a linear share grows by 2/T a round: the same lead or lag in every round.
    n, rounds, mixture = 1000, 80, DomainMixture(samples=1000, jitter=5)
    leads = [seconds(mixture, r, rounds, Rng(seed)) / n - 2 * r / rounds for r in (8, 15, 31)]
    assert max(leads) - min(leads) <= 1.01 / n
    phases = {seconds(mixture, 20, rounds, Rng(seed).at(client)) for client in range(8)}
    assert len(phases) > 4


@law
@given(seeds, st.integers(0, 50), st.integers(0, 9))
def test_a_mixture_depends_on_seed_round_client_and_part_alone(seed, r, client):
    rows, domain = two_domains()

    def held(seed, r, client, part="train", rounds=60):
        return (
            DomainMixture(samples=50)
            .hold(rows, domain, 2, part, Moment(r, rounds), Rng(seed).at("what", client))
            .tolist()
        )

    here = held(seed, r, client)
    assert here == held(seed, r, client)
    assert here != held(seed + 1, r, client)
    assert here != held(seed, r, client + 1)
    assert here != held(seed, r, client, "val")
    # Rounds that are mirror images in the period hold the same share, but other rows.
    assert held(seed, 10, client) != held(seed, 50, client)


# -- rotation ---------------------------------------------------------------------------------------------------------


def pictures(n: int, side: int = 3, channels: int = 1) -> torch.Tensor:
    return torch.arange(n * channels * side * side).reshape(n, channels, side, side)


def test_turning_is_counter_clockwise():
    x = torch.tensor([[[[1, 2], [3, 4]]]])
    turned = Rotation((90,)).apply(x, torch.tensor([0]), torch.tensor([0]), 0.0)[0]
    assert turned.tolist() == [[[[2, 4], [1, 3]]]]


@law
@given(st.lists(st.integers(0, 3), max_size=12))
def test_every_group_is_turned_by_its_own_angle(groups):
    n = len(groups)
    x, y, group = pictures(n), torch.arange(n), torch.tensor(groups, dtype=torch.int64)
    before = x.clone()
    turned, labels = Rotation((0, 90, 180, 270)).apply(x, y, group, 0.0)
    assert torch.equal(x, before)
    assert torch.equal(labels, y)
    for i, k in enumerate(groups):
        assert torch.equal(turned[i], torch.rot90(x[i], k, (-2, -1)))


@pytest.mark.parametrize(
    ("angles", "shape", "line"),
    [
        ((0, 90), (1, 4, 5), r"rows have shape \(1, 4, 5\); allowed: \(square\) images"),
        ((0, 180), (20,), r"rows have shape \(20,\)"),
        ((0, 90, 180), (1, 4, 4), r"found \(0, 90, 180\), allowed: one per group, 2"),
        ((180,), (1, 4, 4), r"found \(180,\), allowed: one per group, 2"),
    ],
)
def test_a_rotation_that_does_not_fit_is_one_line(angles, shape, line):
    rows = Rows("toy", torch.zeros(40, *shape), torch.arange(40) % 4, 4)
    with pytest.raises(FedtideError, match=line):
        build(rows, IID(clients=4), ByLabels(labels=((0, 1), (2, 3))), shift=Shift(how=Rotation(angles)))


# -- pooled and client by client --------------------------------------------------------------------------------------


def shifted(what: DomainMixture | None, turned: bool, dtype: torch.dtype) -> Population:
    i = torch.arange(240)
    x = torch.arange(240 * 9).reshape(240, 1, 3, 3).remainder(256).to(dtype)
    rows = Rows("toy", x, i % 4, 4, domain=i % 2, domain_names=("day", "night"))
    kinds = {"what": what} if what else {}
    how = {"how": Rotation((90, 270))} if turned else {}
    groups = ByLabels(labels=((0, 1), (2, 3)))
    return build(rows, IID(clients=6), groups, split=Split(test=0.3), shift=Shift(**kinds, **how))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("turned", [False, True], ids=["identity", "rotation"])
@pytest.mark.parametrize("what", [None, DomainMixture(samples=7, jitter=3, test="mixture")], ids=["all", "mixture"])
@pytest.mark.parametrize("part", ["train", "test"])
def test_pooled_rows_are_those_of_each_client(part, what, turned, dtype):
    population, moment = shifted(what, turned, dtype), Moment(3, 10)
    clients = torch.tensor([4, 0, 5, 2])
    rows, owner = population.pooled(clients, moment, part)
    x, y = population.fetch(rows, clients[owner], moment)
    shards = [population.shard(client, moment, part) for client in clients.tolist()]
    assert torch.equal(rows, torch.cat([shard.ids for shard in shards]))
    assert torch.equal(x, torch.cat([shard.x for shard in shards]))
    assert torch.equal(y, torch.cat([shard.y for shard in shards]))
    assert owner.tolist() == [k for k, shard in enumerate(shards) for _ in range(len(shard))]
