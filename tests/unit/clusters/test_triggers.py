"""Triggers and what new clusters take over, by hand."""

import math

import pytest
import torch

from fedtide.clusters.distance import Joint, between, distances_within, heterogeneity, is_wider, lengths, means
from fedtide.clusters.triggers import Adaptive, Event, FixedFraction, Gain, Learned, Width, event_of, theta
from fedtide.core.errors import FedtideError

f64 = torch.float64


def corners(each: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Three groups of clients with labels of their own, and who is in which."""
    x = torch.eye(3, dtype=f64).repeat_interleave(each, 0)
    return x, torch.arange(3).repeat_interleave(each)


def unasked() -> torch.Tensor:
    """What would cluster anew, for triggers that do not ask."""
    raise AssertionError("clustered anew")


def event(x: torch.Tensor, label: torch.Tensor, moved: torch.Tensor, drifted: torch.Tensor) -> Event:
    """Clients report, move, and centers follow; the centers before are those of the labels and rows given."""
    before, filled = means(x, label, 3, x[:3]), label.bincount(minlength=3) > 0
    anew, label = x.clone(), label.clone()
    anew[drifted] = moved
    label[drifted] = filled.nonzero()[:, 0][between(anew[drifted], before[filled], "l1").argmin(1)]
    return event_of(before, means(anew, label, 3, before), label.bincount(minlength=3) > 0, anew, label, "l1", unasked)


# -- theta and shifts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["l1", "l2", "sq-l2", Joint(("l1", "sq-l2"), (2, 1), (2.0, 9.0))])
@pytest.mark.parametrize("part", [1 / 6, 1 / 3, 1 / 2])
def test_a_center_that_went_a_part_of_the_way_to_the_other_moved_by_that_part_of_theta(kind, part):
    before = torch.tensor([[1.0, 0.0, 3.0], [0.0, 1.0, 9.0]], dtype=f64)
    after = before.clone()
    after[0] += part * (before[1] - before[0])
    both = torch.ones(2, dtype=torch.bool)
    assert lengths(before, after, kind).tolist() == pytest.approx([part * theta(before, both, kind), 0.0])


# -- the trigger of Algorithm 2 ---------------------------------------------------------------------------------------


def test_a_whole_cluster_with_a_new_profile_that_a_center_absorbs_triggers():
    # All of the first group go to (0, .6, .4), nearest to the second center, which goes to (0, .8, .2): .4 of theta,
    # which is 1.6 between the two clusters that are left.
    x, label = corners(10)
    its = event(x, label, torch.tensor([[0.0, 0.6, 0.4]], dtype=f64), torch.arange(10))
    assert its.filled.tolist() == [False, True, True]
    assert lengths(its.before, its.after, "l1").tolist() == pytest.approx([0, 0.4, 0])
    assert theta(its.after, its.filled, "l1") == pytest.approx(1.6)
    assert FixedFraction(tau=0.24).fires(None, its)
    assert not FixedFraction(tau=0.26).fires(None, its)
    # Where they are twice as many the center goes to (0, .7333, .2667): .5333 of 1.4667 is more than a third.
    x = torch.cat([x, x[:10]])
    its = event(
        x,
        torch.cat([label, label[:10]]),
        torch.tensor([[0.0, 0.6, 0.4]], dtype=f64),
        torch.cat([torch.arange(10), torch.arange(30, 40)]),
    )
    assert FixedFraction().fires(None, its)


def test_a_whole_cluster_that_moves_onto_a_center_only_empties_its_own():
    x, label = corners(10)
    its = event(x, label, x[10:11], torch.arange(10))
    assert its.filled.tolist() == [False, True, True]
    assert lengths(its.before, its.after, "l1").tolist() == [0, 0, 0]
    assert not FixedFraction(tau=0.01).fires(None, its)


def test_one_cluster_triggers_at_every_drift_but_where_nothing_ever_does():
    x = torch.tensor([[0.5, 0.5], [0.4, 0.6], [0.6, 0.4], [0.5, 0.5]], dtype=f64)
    moved = x.clone()
    moved[0] = torch.tensor([0.52, 0.48])
    label, filled = torch.zeros(4, dtype=torch.int64), torch.tensor([True])
    its = event_of(x.mean(0)[None], moved.mean(0)[None], filled, moved, label, "l1", unasked)
    assert FixedFraction().fires(None, its)
    assert not FixedFraction(float("inf")).fires(None, its)


def test_a_third_of_the_way_is_a_third_by_every_distance():
    """Centers 0 and 9 on a line; the first goes to 3.1, so theta is 5.9: .525 of it, and .276 by squares."""
    label = torch.tensor([0, 1])
    for kind in ("l1", "l2", "sq-l2"):
        before, after = torch.tensor([[0.0], [9.0]], dtype=f64), torch.tensor([[3.1], [9.0]], dtype=f64)
        its = event_of(before, after, label >= 0, after, label, kind, unasked)
        assert FixedFraction().fires(None, its)
        assert FixedFraction(0.52).fires(None, its)
        assert not FixedFraction(0.53).fires(None, its)


# -- the trigger by gain ----------------------------------------------------------------------------------------------


def regrouped(label: list[int], anew: list[int], kind: str = "l1") -> Event:
    """Clients at 0, 1, 8 and 9, in these clusters; and what clustering them anew gives."""
    x = torch.tensor([[0.0], [1.0], [8.0], [9.0]], dtype=f64)
    return event_of(x[:2], x[:2], torch.ones(2).bool(), x, torch.tensor(label), kind, lambda: torch.tensor(anew))


def test_clusters_are_made_anew_if_they_get_a_tenth_tighter():
    """(0, 1, 8), (9): means of 0 and 1, 8 are 4.5, of 1 4, of 8 7.5, of 9 0: 4. Anew all have 1: a quarter."""
    its = regrouped([0, 0, 0, 1], [0, 0, 1, 1])
    assert Gain().fires(None, its)
    assert Gain(0.74).fires(None, its)
    assert not Gain(0.75).fires(None, its)
    assert not Gain().fires(None, regrouped([0, 0, 1, 1], [1, 1, 0, 0]))
    assert not Gain(0.0).fires(None, regrouped([0, 0, 1, 1], [0, 0, 1, 1]))
    assert not Gain().fires(None, regrouped([0, 1, 2, 3], [0, 0, 1, 1]))  # each alone: nothing is tighter


def test_its_threshold_has_no_unit():
    """By squares (0 + 1 + 64)/2, (1 + 49)/2, (64 + 49)/2 and 0: mean 28.5, anew 1: 1 - 1/28.5 is .965 less."""
    its = regrouped([0, 0, 0, 1], [0, 0, 1, 1], "sq-l2")
    assert Gain(0.96).fires(None, its)
    assert not Gain(0.966).fires(None, its)


# -- the adaptive one of F.2 ------------------------------------------------------------------------------------------


def test_the_adaptive_trigger_looks_at_pairs_in_one_cluster():
    x = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]], dtype=f64)
    its = event_of(x[:2], x[:2], torch.tensor([True, True]), x, torch.tensor([0, 0, 1]), "l1", unasked)
    assert Adaptive().fires(Width(0.19), its)
    assert not Adaptive().fires(Width(0.21), its)


@pytest.mark.parametrize("kind", ["l1", "l2", "sq-l2", "cosine", "js"])
@pytest.mark.parametrize("cells", [1 << 20, 20])
def test_the_widest_pair_decides(kind, cells, monkeypatch):
    monkeypatch.setattr("fedtide.clusters.distance.CELLS", cells)
    x = torch.rand(40, 3, dtype=f64, generator=torch.Generator().manual_seed(2))
    x, label = x / x.sum(1, keepdim=True), torch.arange(40) % 3
    far = between(x, x, kind)
    widest = far[label[:, None] == label].max().item()
    assert is_wider(x, label, 0.999 * widest, kind)
    assert not is_wider(x, label, 1.001 * widest, kind)


# -- the learned threshold of F.1 -------------------------------------------------------------------------------------


def played(trigger: Learned, accuracies: list[list[float]]) -> list[float]:
    """The thresholds of events, after each of which so many accuracies are noted."""
    kept, out = trigger.record(trigger.start(), 0.99), []
    for each in accuracies:
        out.append(trigger.threshold(kept))
        kept = trigger.after(kept, True)
        for one in each:
            kept = trigger.record(kept, one)
    return out


def test_thresholds_take_turns_and_the_best_stays():
    trigger = Learned(explore=4, tried=(0.0, 1 / 3, 2 / 3))
    # The first: .5 and .6 and .9, mean .667. The second: .8, .7. The third: .6.
    noted = [[0.5, 0.6], [0.8, 0.7], [0.6], [0.9], [0.0], [0.0], [0.0]]
    assert played(trigger, noted) == pytest.approx([0, 1 / 3, 2 / 3, 0, 1 / 3, 1 / 3, 1 / 3])


def test_accuracies_after_the_trials_are_not_noted():
    trigger = Learned(explore=2, tried=(0.1, 0.2))
    memo = trigger.start()
    for accuracy in (0.1, 0.9):
        memo = trigger.record(trigger.after(memo, True), accuracy)
    memo = trigger.after(memo, True)
    assert memo.best == 1
    assert trigger.record(memo, 0.9) == memo


def test_it_is_learned_again_and_old_scores_are_forgotten():
    trigger = Learned(explore=2, every=4, tried=(0.1, 0.2))
    noted = [[0.9], [0.1], [0.5], [0.5], [0.1], [0.2], [0.0], [0.0]]
    assert played(trigger, noted) == pytest.approx([0.1, 0.2, 0.1, 0.1, 0.1, 0.2, 0.2, 0.2])


def test_without_accuracies_the_papers_threshold_is_kept():
    assert played(Learned(explore=1, tried=(0.5,)), [[], [], [0.9], []]) == pytest.approx([0.5, 1 / 3, 1 / 3, 1 / 3])
    assert played(Learned(explore=2, tried=(0.1, 0.2)), [[math.nan], [0.4], []]) == pytest.approx([0.1, 0.2, 0.2])


@pytest.mark.parametrize("every", [1, 3, 4])
def test_trying_that_never_ends_is_refused(every):
    with pytest.raises(FedtideError, match=f"found every {every} and explore 4; allowed: every of more than explore"):
        Learned(explore=4, every=every, tried=(0.0, 0.5))
    assert Learned(explore=4, every=5, tried=(0.0, 0.5)).every == 5


def test_a_threshold_whose_turn_never_comes_is_refused():
    with pytest.raises(FedtideError, match="found explore 2 and 5 thresholds; allowed: an event or more for each"):
        Learned(explore=2)
    assert Learned(explore=5).explore == 5


def test_a_learned_threshold_is_one_of_algorithm_2():
    x, label = corners(10)
    its = event(x, label, torch.tensor([[0.0, 0.6, 0.4]], dtype=f64), torch.arange(10))
    for tau in (0.0, 0.24, 0.26):
        trigger = Learned(tried=(tau,))
        assert trigger.fires(trigger.start(), its) == FixedFraction(tau=tau).fires(None, its)


# -- what is taken over, and heterogeneity ----------------------------------------------------------------------------


def test_heterogeneity_of_label_shares_by_hand():
    """Distances of the first three: 1 (0 and 1), 2 (0 and 2), 1 (1 and 2); the fourth is alone.

    Client 0 is (1 + 2) / 2 away from the others, client 1 (1 + 1) / 2, client 2 (2 + 1) / 2: their sum is 4, of four.
    """
    shares = torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.0, 1.0], [1.0, 0.0]], dtype=f64)
    assert heterogeneity(shares, torch.tensor([7, 7, 7, 2]), "l1") == 1.0
    # In one cluster client 3 is 0, 1 and 2 away: client 0 has (1 + 2 + 0) / 3, 1 has 1, 2 has 5 / 3, 3 has 1.
    one = torch.zeros(4, dtype=torch.int64)
    assert heterogeneity(shares, one, "l1") == pytest.approx((1 + 1 + 5 / 3 + 1) / 4)
    assert heterogeneity(shares, torch.arange(4), "l1") == 0.0
    assert distances_within(shares[:0], one[:0], "l1").mean().isnan()  # as a record says it of nobody
