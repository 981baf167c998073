"""Partial pooling by hand, and on clusters whose variances are known.

One layer of one number, two clusters of two participants that stand for as many clients:

| | updates | D_k | mean of squares |
| --- | --- | --- | --- |
| A | 1, 3 | 2 | 5 |
| B | 7, 9 | 8 | 65 |

D = 5. s2 = (2 (5 - 4) + 2 (65 - 64)) / 2 = 2, tau2 = ((9 + 9) / 2 - 2 * (1/4 / 2 + 1/4 / 2)) / (1/4 + 1/4) = 17, and
b = 17 / (17 + 2/2) = 17/18, so A steps by 5 - 3 * 17/18, B by 5 + 3 * 17/18.

In the next round one client each sends 2 and 8, which alone says nothing of s2. With what was known, fading by 0.8,
s2 = (0.8 * 4 + 0) / (0.8 * 2 + 0) = 2 and tau2 = (0.8 * 9 + 9 - 2 (0.8 / 4 + 1/2)) / (0.8 / 2 + 1/2) = 14.8 / 0.9, and
b = tau2 / (tau2 + 2). After a new clustering tau2 = (9 - 2 / 2) / (1/2) = 16.
"""

from dataclasses import replace

import pytest
import torch

from fedtide.clusters.rounds import mean_of_all
from fedtide.core.base import Weighted, Weights
from fedtide.core.sums import add, finish
from fedtide.core.weights import squared_lengths
from fedtide.transforms.pooled import pool_updates
from helpers.toys import played, toy


def weights(*values: float) -> Weights:
    return Weights({"layer.w": torch.tensor(values)})


def totals(*answers: tuple[int, Weights, float], clusters: int = 2):
    """Sums of what clients send, for each cluster, as a fleet adds them."""
    found = []
    for k in range(clusters):
        total = None
        for slot, delta, weight in answers:
            if slot == k:
                sent = {"squares": Weighted(squared_lengths(delta), weight), "weight": Weighted(weight, weight)}
                total = add(total, {"delta": Weighted(delta, weight), **sent})
        found.append(finish(total))
    return found


def pooled(found, held=None, each=None):
    share = torch.tensor([0.0 if total is None else total["delta"].weight for total in found], dtype=torch.float64)
    share = share if each is None else share * torch.tensor(each)
    middle = mean_of_all([None if total is None else total["delta"] for total in found], share)
    return pool_updates(found, middle, share, held)


FIRST = totals((0, weights(1.0), 1.0), (0, weights(3.0), 1.0), (1, weights(7.0), 1.0), (1, weights(9.0), 1.0))


def test_updates_are_drawn_together_by_their_noise():
    updates, _, kept = pooled(FIRST)
    assert kept.tolist() == [pytest.approx([17 / 18, 17 / 18])]
    assert [float(each.params["layer.w"]) for each in updates] == pytest.approx([5 - 3 * 17 / 18, 5 + 3 * 17 / 18])


def test_clusters_keep_running_statistics_of_their_own():
    """Means over their participants; a cluster without any has those of all clusters."""
    answers = [
        (slot, replace(weights(1.0), buffers={"mean": torch.tensor(mean)}), 1.0)
        for slot, mean in ((0, 3.0), (0, 5.0), (1, -4.0))
    ]
    updates, _, _ = pooled(totals(*answers, clusters=3))
    assert [float(update.buffers["mean"]) for update in updates] == pytest.approx([4.0, -4.0, 4 / 3])


def test_what_was_known_fades_and_tells_of_single_participants():
    second = totals((0, weights(2.0), 1.0), (1, weights(8.0), 1.0))
    _, held, _ = pooled(FIRST)
    tau2 = 14.8 / 0.9
    assert pooled(second, held)[2].tolist() == [pytest.approx([tau2 / (tau2 + 2)] * 2)]
    assert pooled(second, replace(held, between=torch.zeros_like(held.between)))[2].tolist() == [
        pytest.approx([16 / 18] * 2)
    ]
    assert [float(each.params["layer.w"]) for each in pooled(second)[0]] == [5.0, 5.0]  # nothing is known of s2


def test_clusters_that_are_alike_step_together_and_so_does_one_without_participants():
    """Updates 1, 3 and 3, 1: the means are equal, and less apart than chance would set them."""
    alike = totals(
        (0, weights(1.0), 1.0), (0, weights(3.0), 1.0), (2, weights(3.0), 1.0), (2, weights(1.0), 1.0), clusters=3
    )
    updates, _, kept = pooled(alike)
    assert kept.tolist() == [[0.0, 0.0, 0.0]]
    assert [float(each.params["layer.w"]) for each in updates] == [2.0, 2.0, 2.0]
    assert [float(each.params["layer.w"]) for each in pooled([*FIRST, None])[0]][2] == 5.0


def test_a_client_of_weight_two_is_not_two_clients():
    """Weights 1 and 2 have (1 + 2)^2 / (1 + 4) = 9/5 participants; updates 0 and 3 have mean 2 and mean square 6."""
    found = totals((0, weights(0.0), 1.0), (0, weights(3.0), 2.0), (1, weights(8.0), 3.0))
    _, evidence, _ = pooled(found)
    assert evidence.within.tolist() == [pytest.approx([9 / 5 * (6 - 4) + 0, 9 / 5 - 1 + 0])]


@pytest.mark.parametrize("apart", [0.0, 0.3, 2.0])
def test_variances_that_are_known_are_found(apart):
    """Five clusters of 2 to 6 participants, a layer of 2,000 numbers: b is that of the true variances."""
    draw, numbers = torch.Generator().manual_seed(3), 2_000
    answers = []
    for k in range(5):
        center = apart * torch.randn(numbers, generator=draw)
        for _ in range(2 + k):
            answers.append((k, Weights({"layer.w": 1 + center + torch.randn(numbers, generator=draw)}), 1.0))
    _, _, kept = pooled(totals(*answers, clusters=5), each=[6.0, 5.0, 4.0, 3.0, 2.0])
    true = [apart**2 / (apart**2 + 1 / (2 + k)) for k in range(5)]
    assert kept[0].tolist() == pytest.approx(true, abs=0.08)


def lying(clusters, **leaves):
    return [
        {name: replace(leaf, **leaves.get(name, {})) for name, leaf in total.items()} if k in clusters else total
        for k, total in enumerate(FIRST)
    ]


@pytest.mark.parametrize("weight", [-120.0, -1e-9, 0.0, 1e-300])
def test_lies_about_weights_leave_clusters_apart(weight):
    """With n of 9 for a cluster of which it is unknown, b is at least that of honest ones."""
    share, middle = torch.ones(2, dtype=torch.float64), weights(5.0)
    for clusters in ((0,), (0, 1)):
        found = lying(clusters, weight={"value": weight})
        updates, _, kept = pool_updates(found, middle, share, None, 4)
        assert ((kept >= 0.85) & (kept <= 1)).all()
        assert all(2 <= float(each.params["layer.w"]) <= 8 for each in updates)


def test_squares_below_zero_and_clusters_of_no_weight_are_borne():
    _, evidence, kept = pooled(lying((0,), squares={"value": torch.tensor([-(2.0**53)], dtype=torch.float64)}))
    assert float(evidence.within[0, 0]) == 2 * (0 - 4) + 2 * (65 - 64)
    assert kept.tolist() == [[1.0, 1.0]]
    for leaf in ("weight", "squares"):
        updates, _, kept = pooled(lying((0,), **{leaf: {"weight": 0.0}}))
        assert (float(updates[0].params["layer.w"]), float(kept[0, 0])) == (5.0, 0.0)
        assert [float(each.params["layer.w"]) for each in pooled(lying((0, 1), **{leaf: {"weight": 0.0}}))[0]] == [5, 5]


def test_layers_are_judged_by_themselves():
    def both(trunk: float, head: float) -> Weights:
        return Weights({"trunk.w": torch.tensor([trunk]), "head.w": torch.tensor([head])})

    found = totals((0, both(1, 1), 1.0), (0, both(3, 3), 1.0), (1, both(3, 7), 1.0), (1, both(1, 9), 1.0))
    updates, _, kept = pooled(found)
    assert kept[:, 0].tolist() == pytest.approx([0.0, 17 / 18])
    assert [float(each.params["trunk.w"]) for each in updates] == [2.0, 2.0]


GROUPS = {"kind": "k-means", "k_min": 2, "k_max": 2}


def test_a_run_pools_and_says_how_far():
    run, plain = (
        played(toy("fielding", {"transforms": names, "clustering": GROUPS}, shift={"who": "always"}))
        for names in (["pooled"], [])
    )
    assert all(0 <= step.facts["apart"] <= 1 for step in run.steps)
    model = plain.fleet.queries[-1].cost.up // len(plain.fleet.queries[-1].answered)
    extra = run.fleet.queries[-1].cost.up // len(run.fleet.queries[-1].answered) - model
    assert extra == (2 + 1 + 2) * 8  # two layers, the weight, and what each of the two leaves counts for
