"""Robust sums and liars, by hand.

The loss of a client is (w - y)^2 / 2, and w begins at 0. With a step of 1/2 client y sends the update y / 2. So clients
with y = 0, 2, 4, 8, 40 send 0, 1, 2, 4, 20.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

import fedtide as ft
from fedtide.cohorts import Everyone, PickedBy
from fedtide.core.base import Cost, Moment, Reply, Shard, Sum, Weights
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.trees import same
from fedtide.fleets.liars import (
    Absent,
    Backdoor,
    InnerProduct,
    LabelFlip,
    Liars,
    LittleIsEnough,
    Scaling,
    SignFlip,
    with_liars,
)
from fedtide.laws import every
from fedtide.laws.case import Case, near
from fedtide.learn import LocalTrainer
from fedtide.transforms import Robust, Trusted, apply
from fedtide.transforms.robust import Centered, Clipped, Krum, Median, Trimmed, combine, deal_buckets
from fedtide.transforms.trusted import certainty, remember
from helpers import quadratics
from helpers.toys import played, toy

TARGETS = [[0], [2], [4], [8], [40]]
FEDAVG = ft.algorithms.fedavg(quadratics.TASK, LocalTrainer(lr=0.5, batch_size=0), cohort=Everyone())


def after(algorithm, targets=None, w=0.0, rounds=1) -> float:
    state = replace(algorithm.init(quadratics.fleet_of(algorithm, targets), Rng(0)), weights=quadratics.at(w))
    return quadratics.value(quadratics.after(algorithm, state, rounds, targets))


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Median(), 2),
        (Trimmed(0.2), 7 / 3),  # of 1, 2, 4
        (Trimmed(0.4), 2),
        (Clipped(), 7 / 5),  # of 0, 1, 2, 2, 2
        # Bounds are 2, 1.8 and 1.72 around 2, 2.2 and 2.28, and steps 1/5, 0.4/5 and 0.16/5.
        (Centered(), 2.312),
        # To the two nearest: 1 + 4, 1 + 1, 1 + 4, 4 + 9, 256 + 324. So 20 is left out.
        (Krum(0.2), 7 / 4),
        (Krum(0.4), 1),
    ],
)
def test_rules_by_hand(rule, expected):
    assert after(apply(FEDAVG, Robust(rule, bucket=1)), TARGETS) == pytest.approx(expected, abs=1e-12)


def test_values_that_some_buckets_leave_out_are_of_the_others():
    totals = [{"n": Sum(2.0, 1.0)}, {"n": Sum(8.0, 2.0), "anchor": Sum(3.0, 1.0)}, {"n": Sum(9.0, 3.0)}]
    assert combine(totals, Median()) == {"n": Sum(18.0, 6.0), "anchor": Sum(3.0, 1.0)}


def test_buckets_without_weight_are_left_out():
    """Means 6 and 8 of weight 1 each: 7 of weight 2. A mean of 0 besides would make it 6 of weight 3."""
    assert combine([{"n": Sum(6.0, 1.0)}, {"n": Sum(0.0, 0.0)}, {"n": Sum(8.0, 1.0)}], Median()) == {
        "n": Sum(14.0, 2.0)
    }


@pytest.mark.parametrize(("share", "buckets", "few"), [(0.28, 25, 7), (0.07, 100, 7), (0.14, 50, 7), (0.1, 11, 2)])
def test_a_share_of_the_buckets_is_rounded_up_and_not_by_an_error_of_floats(share, buckets, few):
    x = torch.arange(float(buckets))[:, None] ** 2
    assert Trimmed(share=share)(x) == pytest.approx(float(x[few : buckets - few].mean()))
    ranks = torch.cdist(x, x).square().sort(1).values[:, 1 : buckets - few - 1].sum(1)
    assert Krum(share=share)(x) == pytest.approx(float(x[ranks.argsort(stable=True)[: buckets - few]].mean()))


def test_buckets_are_summed_by_weight_and_count_equally():
    """Of two clients in one bucket, with one row of 0 and three of 4, the mean is 3/2: as without buckets."""
    assert after(apply(FEDAVG, Robust(bucket=2))) == after(FEDAVG) == 1.5


def test_a_bucket_is_of_one_slot_and_has_at_least_its_size():
    clients, slot = torch.randperm(31), torch.arange(31) % 3
    bucket, slot_of = deal_buckets(clients, slot, 4, Rng(0))
    assert bucket.bincount().min() >= 4
    assert len(slot_of) == 2 + 2 + 2
    assert all(slot_of[b] == k for b, k in zip(bucket.tolist(), slot.tolist(), strict=True))
    order = torch.randperm(31)
    assert same(deal_buckets(clients[order], slot[order], 4, Rng(0))[0], bucket[order])


def test_who_is_asked_twice_in_a_round_is_dealt_anew():
    dealt, none = [], torch.empty(0, dtype=torch.int64)

    class Asked:
        def ask(self, question, clients, payload, *, slot, slots):
            dealt.append(slot.tolist())
            return Reply(None, {}, none, none.double(), Cost())

    def twice(state, fleet, rng):
        return state, {"asked": [fleet.ask("train", torch.arange(9), None) for _ in range(2)]}

    apply(replace(FEDAVG, round=twice), Robust()).round(None, Asked(), Rng(0))
    assert len(dealt) == 2
    assert dealt[0] != dealt[1]


def test_the_weight_of_a_sum_follows_the_median_bucket_and_no_claim():
    """Client 4 says that it has a thousand rows. With medians of single clients it has one voice."""
    many = [[0], [2], [4], [8], [40] * 1000]
    assert after(apply(FEDAVG, Robust(Median(), bucket=1)), many) == after(
        apply(FEDAVG, Robust(Median(), bucket=1)), TARGETS
    )


def test_krum_tells_near_vectors_apart_far_from_zero():
    """Thirty vectors with a common mean of 1e4, which they are as near to as 1e-4."""
    x = torch.randn(30, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 1e-4
    assert torch.allclose(Krum(0.2)(x + 1e4) - 1e4, Krum(0.2)(x), atol=1e-9)


def test_masks_refuse_buckets_that_they_do_not_open():
    secure = {"wire": {"secure": True, "fewest": 3}}
    with pytest.raises(
        FedtideError, match=r"wire.secure: found True, but .*: its server sees of each client its update"
    ):
        played(toy("fedavg", {"transforms": [{"kind": "robust", "bucket": 1}]}, **secure), rounds=1)
    with pytest.raises(FedtideError, match=r"fewest: found 2, .*allowed: 3 or more"):
        played(toy("fedavg", {"transforms": [{"kind": "robust", "bucket": 2}]}, **secure), rounds=1)
    run = played(toy("fedavg", {"transforms": ["robust"], "cohort": "everyone"}, **secure), rounds=2)
    assert len(run.fleet.queries[0].answered) == 8


# -- trust over rounds -------------------------------------------------------------------------------------------------


def test_liars_are_left_out_from_the_third_round_on():
    """Of ten clients with y = 4, m lie with the other sign. All updates are equally long, and cosines are 1 and -1.

    t of a liar is -1, then -0.9 - 1 = -1.9, and q is 1, then 0.81 + 1. So t is -1 and -1.41 standard deviations: it is
    left out of the third sum. Until then the sum is 1 - 2m/10 of an honest one.
    """
    targets = [[4]] * 10
    lying, m = with_liars(apply(FEDAVG, Trusted()), Liars(0.3, SignFlip()), torch.arange(10), 0), 3
    fleet = quadratics.fleet_of(lying, targets)
    state = lying.init(fleet, Rng(0))
    w, less = float(state.inner.weights.params["weight"]), 1 - 2 * m / 10
    for factor, (after_round, facts) in zip((less, less, 1), quadratics.played(lying, fleet, state, 3), strict=True):
        w += factor * (4 - w) / 2
        assert float(after_round.inner.weights.params["weight"]) == pytest.approx(w, abs=1e-6)
        assert facts["left_out"] == (m if factor == 1 else 0)


def test_one_observation_proves_nothing():
    """It is one standard deviation of itself off, whatever the last bit of a root says."""
    seen = torch.rand(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).sub(0.5).tolist()
    trust = remember(torch.zeros(1000, 2), [torch.tensor([client]) for client in range(1000)], seen)
    assert certainty(trust).tolist() == [1.0 if one > 0 else -1.0 for one in seen]


def test_a_liar_alone_steps_no_further_than_the_others_did():
    """From w = 0 the others send 2, which is the median. Alone, the liar sends 1999 and steps by 2."""
    alone = PickedBy(lambda among, m, moment, rng: among[-1:] if moment.round else among, clients_per_round=10)
    algorithm = apply(
        ft.algorithms.fedavg(quadratics.TASK, LocalTrainer(lr=0.5, batch_size=0), cohort=alone), Trusted()
    )
    targets = [[4]] * 9 + [[4000]]
    fleet = quadratics.fleet_of(algorithm, targets)
    state = algorithm.init(fleet, Rng(0))
    state = replace(state, inner=replace(state.inner, weights=quadratics.at(0.0)))
    steps = [float(after.inner.weights.params["weight"]) for after, _ in quadratics.played(algorithm, fleet, state, 3)]
    assert steps == pytest.approx([2, 4, 6], abs=1e-6)


def test_liars_come_to_share_buckets():
    """Ranked by trust, the liars of nine clients are in one bucket of three."""
    rank = torch.tensor([1.0, -2, 0.5, -3, 0, 2, 0, -1, 1])
    bucket, _ = deal_buckets(torch.arange(9), None, 3, Rng(0), rank)
    assert bucket[[1, 3, 7]].tolist() == [0, 0, 0]


# -- liars -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attack", "expected"),
    [
        # From w = 1 updates are -1/2, of one row, and 3/2, of three: mean 1, mean square 7/4, deviation sqrt(3/4).
        (SignFlip(), 0),
        (SignFlip(3.0), -2),
        (Scaling(10.0), 11),
        (InnerProduct(0.5), 0.5),
        (LittleIsEnough(1.5), 2 - 1.5 * 0.75**0.5),
    ],
)
def test_attacks_by_hand(attack, expected):
    assert after(with_liars(FEDAVG, Liars(1.0, attack), torch.arange(2), 0), w=1.0) == pytest.approx(
        expected, abs=1e-12
    )


@pytest.mark.parametrize("rule", [Median(), Centered()])
@pytest.mark.parametrize(("attack", "expected"), [(InnerProduct(0.5), 0.5), (LittleIsEnough(1.5), 2 - 1.5 * 0.75**0.5)])
def test_liars_know_each_other_in_buckets_of_one_client(rule, attack, expected):
    """Both send the same as above, and a robust sum of equal updates is that update."""
    lying = with_liars(apply(FEDAVG, Robust(rule, bucket=1)), Liars(1.0, attack), torch.arange(2), 0)
    assert after(lying, w=1.0) == pytest.approx(expected, abs=1e-12)


def test_one_liar_alone_has_no_deviation_and_sends_its_update():
    run = played(toy("fedavg"), rounds=1)
    one = Liars(0.125, LittleIsEnough(1e3))
    host = replace(run.host, algorithm=with_liars(run.host.algorithm, one, torch.arange(8), 0))
    near(run.state, played(toy("fedavg"), host=host, rounds=1).state, "a deviation that is zero is none", 1e-5, 1e-5)


@pytest.mark.parametrize("name", ["fesem", "cfl", "feroma"])
def test_liars_also_lie_where_the_server_sees_each_update(name):
    run = played(toy(name), rounds=1)
    algorithm, shard = run.host.algorithm, run.fleet.population.shard(0, Moment(0, 1))
    lying = with_liars(algorithm, Liars(1.0, SignFlip(3.0)), torch.arange(8), 0)
    received = algorithm.options["task"].init(Rng(0)), None, shard, Moment(0, 1), Rng(0).at(0, 0, "train")
    ours, theirs = (one.works["train"](*received).rows for one in (algorithm, lying))
    assert torch.equal(theirs["update"], -3.0 * ours["update"])
    assert theirs["weight"] == ours["weight"]


def test_liars_who_know_each_other_send_one_update_where_each_is_seen():
    """All lie, so all models of FeSEM's first round are one: that of the opposite step."""
    run = played(toy("fesem"), rounds=1)
    liars = with_liars(run.host.algorithm, Liars(1.0, InnerProduct(1.0)), torch.arange(8), 0)
    one, other = played(toy("fesem"), host=replace(run.host, algorithm=liars), rounds=1).state.weights
    before = run.steps[0].received.weights[0]
    used = [model for model in (one, other) if not same(model, before)]
    assert used
    assert all(same(model, used[0]) for model in used)
    assert not same(used[0], run.state.weights[0])


def test_a_liar_flips_labels_and_nothing_else():
    case = toy("fedavg")
    run = played(case, rounds=1)
    algorithm, fleet = run.host.algorithm, run.fleet
    shard, key = fleet.population.shard(0, Moment(0, 1)), Rng(0).at(0, 0, "train")
    weights = run.steps[0].received.weights
    lying = with_liars(algorithm, Liars(1.0, LabelFlip()), torch.arange(8), 0).works["train"](
        weights, None, shard, Moment(0, 1), key
    )
    flipped = algorithm.works["train"](weights, None, replace(shard, y=2 - shard.y), Moment(0, 1), key)
    assert same(lying.total, flipped.total)


def test_a_backdoor_marks_some_rows_as_one_class():
    """Half of six rows have the mark and class 2, the others are as they were; the update is twice as long."""
    shard = Shard(torch.zeros(6, 4), torch.tensor([0, 1, 0, 1, 0, 1]), torch.arange(6))
    poisoned = Backdoor(target=2).poison(shard, 3, Rng(0))
    marked = poisoned.x.sum(1) == 3
    assert marked.sum() == 3
    assert torch.equal(poisoned.x[marked], torch.tensor([[0.0, 1.0, 1.0, 1.0]] * 3))
    assert torch.equal(poisoned.y, torch.where(marked, 2, shard.y))
    assert not shard.x.any()
    assert Backdoor(factor=2.0).lie(Weights({"w": torch.ones(1)})).params["w"] == 2


def test_marked_rows_are_predicted_beside_the_others():
    """A model of one number says class 1 if the last number is above a half. So the mark makes it say 1."""

    weight = torch.zeros(2, 4)
    weight[1, 3] = 2.0
    served = Weights({"weight": weight, "bias": torch.tensor([1.0, 0.0])})
    algorithm = with_liars(
        ft.algorithms.fedavg(ft.Task(lambda: nn.Linear(4, 2), example=torch.zeros(1, 4))),
        Liars(0.2, Backdoor()),
        torch.arange(5),
        0,
    )
    prediction = algorithm.predict(served, [None], torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64))
    assert prediction.told.argmax(1).tolist() == [0, 0]
    assert prediction.others["marked"].tolist() == [1, 1]


def test_a_backdoor_aims_at_a_class_of_rows_of_numbers():
    with pytest.raises(FedtideError, match=r"liars.attack.target: found 3, allowed: a class, 0 to 2"):
        played(toy("fedavg", liars={"attack": {"kind": "backdoor", "target": 3}}), rounds=1)


def test_liars_are_the_same_in_every_round_and_as_many_as_asked():
    """Of 40 clients of equal updates 8 lie with the other sign, so w moves by 1 - 16/40 of an honest step."""
    lying = with_liars(FEDAVG, Liars(0.2, SignFlip()), torch.arange(40), 7)
    assert after(lying, [[2]] * 40) == pytest.approx(0.6, abs=1e-12)
    assert after(lying, [[2]] * 40, rounds=2) == pytest.approx(0.6 + 0.6 * (2 - 0.6) / 2, abs=1e-12)


def test_who_is_absent_is_not_in_the_sum():
    """Whoever stays away, the mean of the others is the step of all. If everybody does, nothing moves."""
    for share, expected in ((0.2, 1), (1.0, 0)):
        assert after(with_liars(FEDAVG, Liars(share, Absent()), torch.arange(40), 0), [[2]] * 40) == expected


def test_numbers_have_no_labels_to_flip():
    changes = {"data": {"target": "number"}, "shift": {"how": {"kind": "identity"}}}
    with pytest.raises(FedtideError, match=r"liars.attack: found 'label-flip', .* it trains on other classes"):
        played(toy("fedavg", liars={"attack": "label-flip"}, **changes), rounds=1)


@pytest.mark.parametrize("attack", ["sign-flip", "label-flip", "backdoor", "little-is-enough"])
@pytest.mark.parametrize("name", ["fedavg", "ifca", "fedem", "fielding", "scaffold"])
def test_laws_hold_with_liars(name, attack):
    """A law raises if it is broken: stops, drop-outs, bytes, and clients that are stacked."""
    case = Case(lambda given=None, **changes: toy(name, given, liars={"share": 0.5, "attack": attack}, **changes), None)
    laws = every.plays, every.dropouts, every.stops, every.wire, every.stacks
    assert [law(case) for law in laws] == [None] * len(laws)


@pytest.mark.parametrize("attack", ["sign-flip", "backdoor", "absent"])
def test_liars_are_in_sums_of_a_wire(attack):
    """In fixed point sums are those of floating point."""
    liars = {"share": 0.5, "attack": attack}
    case = Case(lambda given=None, **changes: toy("fedavg", given, liars=liars, **changes), None)
    assert every.fixed_point(case) is None


def test_liars_who_talk_are_not_in_the_sums_of_a_wire():
    with pytest.raises(FedtideError, match=r"liars.attack: found 'inner-product', but liars .* in its sums"):
        played(toy("fedavg", liars={"attack": "inner-product"}, wire={"secure": True}), rounds=1)
