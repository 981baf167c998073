"""Statistics of an inspection, by hand."""

import numpy as np
import pytest

from fedtide.core.rng import Rng
from fedtide.inspection import shares
from fedtide.inspection.linear import Parts, explain, find_groups, judge_ahead, moments, ridge


def test_total_variation_to_the_pooled_shares():
    """Client 0 has (3, 1), client 1 (0, 4): pooled 3/8 and 5/8; distances 3/8 and 3/8, of four rows each."""
    assert shares.total_variation(np.array([[3.0, 1.0], [0.0, 4.0]])) == pytest.approx(3 / 8)
    """With 12 more rows of client 1, (0, 16): pooled 3/20; distances 12/20 and 3/20, weights 4/20 and 16/20."""
    assert shares.total_variation(np.array([[3.0, 1.0], [0.0, 16.0]])) == pytest.approx(0.6 * 0.2 + 0.15 * 0.8)


def test_dirichlet_alpha_by_moments():
    """Ten rows each, (10, 0), (0, 10), (5, 5): q = (1/2, 1/2), 1 - sum q^2 = 1/2, sums of squares over it 1, 1, 0.

    Less chance, (s - 1/10) / (9/10): 1, 1, -1/9; mean r = 17/27. A = (1 - r) / r = 10/17 for two classes, so 5/17 each.
    """
    counts = np.array([[10.0, 0.0], [0.0, 10.0], [5.0, 5.0]])
    assert shares.dirichlet_alpha(counts) == pytest.approx(5 / 17)
    assert shares.dirichlet_alpha(np.full((3, 2), 50.0)) == float("inf")
    assert np.isnan(shares.dirichlet_alpha(counts[:2]))


@pytest.mark.parametrize("alpha", [0.1, 1.0, 10.0])
def test_dirichlet_alpha_finds_the_alpha_that_rows_are_drawn_with(alpha):
    draw = np.random.default_rng(0)
    counts = np.stack([draw.multinomial(60, p) for p in draw.dirichlet([alpha] * 5, 4000)]).astype(float)
    assert shares.dirichlet_alpha(counts) == pytest.approx(alpha, rel=0.06)


def test_a_mix_changes_as_others_are_there_or_as_the_same_hold_other_things():
    """Client 0 is there in slot 0 with label 0, client 1 in slot 1 with label 1: all by other clients."""
    slot = np.array([0, 1])
    assert shares.change(slot, np.array([0, 1]), np.array([0, 1]), (2, 2, 2)) == pytest.approx((0.5, 0.0))
    """Both are there in both, with label 0 in slot 0 and 1 in slot 1: each one's own mix is the pooled one."""
    slot, client = np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1])
    assert shares.change(slot, client, slot, (2, 2, 2)) == pytest.approx((0.0, 0.5))


def test_a_mix_that_changes_by_who_is_there_alone():
    """Client 0 has label 0 twice in slot 0 and once in slot 1, client 1 labels 0 and 1 in slot 1.

    Pooled (4/5, 1/5). Slot 0, two rows: (1, 0), 1/5 away. Slot 1, three rows: (2/3, 1/3), 2/15 away; composed of 1/3
    of client 0's (1, 0) and 2/3 of client 1's (1/2, 1/2), which is the same. 2/5 of 1/5 and 3/5 of 2/15 are 0.16.
    """
    slot, client, label = np.array([0, 0, 1, 1, 1]), np.array([0, 0, 0, 1, 1]), np.array([0, 0, 0, 0, 1])
    assert shares.change(slot, client, label, (2, 2, 2)) == pytest.approx((0.16, 0.0))


def test_course_of_a_line_and_of_a_step():
    """Places -3, -1, 1, 3: all on a line. Steps of two or more blocks on either side: means -2 and 2, 4 * 4 of 20."""
    line, step, at = shares.course(np.array([[-3.0], [-1.0], [1.0], [3.0]]))
    assert (line, step, at) == pytest.approx((1.0, 16 / 20, 2))
    assert shares.course(np.array([[0.0], [0.0], [0.0], [2.0], [2.0]]))[1:] == pytest.approx((1.0, 3))


def test_several_steps():
    """Places 0, 0, 3, 3, 0, 0: mean 1, variance 12 in all; all of it between three segments.

    The best single step, 0, 0 and 3, 3, 0, 0: 2 * 1^2 + 4 * (1/2)^2 = 3, a quarter.
    """
    up_and_down = np.array([[0.0], [0.0], [3.0], [3.0], [0.0], [0.0]])
    assert shares.course(up_and_down)[1] == pytest.approx(1 / 4)
    assert shares.steps(up_and_down) == ((2, 4), pytest.approx(1.0))
    """Eight places in a row: 42 in all. Three steps leave 4 * 1/2 of it; two, after 3 and 5, 4.5 (0.893)."""
    at, share = shares.steps(np.arange(8.0)[:, None])
    assert (at, share) == ((2, 4, 6), pytest.approx(40 / 42))
    assert shares.steps(np.random.default_rng(0).normal(size=(20, 3)))[0] == ()
    assert shares.steps(np.zeros((3, 1))) == ((), 0.0)


def test_two_heaps():
    """Places 0, 1, 5 with equal weights: mean 2, variance 14 in all; heaps 0, 1 and 5: 2 (3/2)^2 + 3^2 = 27/2."""
    share, upper = shares.two_heaps(np.array([0.0, 5.0, 1.0]), np.ones(3))
    assert share == pytest.approx(13.5 / 14)
    assert upper.tolist() == [False, True, False]
    """A normal distribution has 2/pi of its variance between its halves, a uniform one three quarters."""
    normal = np.random.default_rng(0).normal(size=20_000)
    assert shares.two_heaps(normal, np.ones(20_000))[0] == pytest.approx(2 / np.pi, abs=0.01)
    assert shares.two_heaps(np.arange(1000.0), np.ones(1000))[0] == pytest.approx(0.75, abs=0.01)


def test_errors_of_sums_are_those_of_rows():
    draw = np.random.default_rng(0)
    z, t, member = draw.normal(size=(30, 3)), draw.normal(size=(30, 2)), draw.integers(0, 4, 30)
    z[:, -1] = 1
    sums, weights = moments(z, t, member, 5), draw.normal(size=(6, 3, 2))
    wanted = [[((z[member == c] @ w - t[member == c]) ** 2).sum() for w in weights] for c in range(5)]
    np.testing.assert_allclose(sums.errors(weights), wanted, atol=1e-10)
    np.testing.assert_allclose(sums.single_errors(weights[:5]), np.diagonal(wanted), atol=1e-10)
    np.testing.assert_allclose(sums.rows, np.bincount(member, minlength=5))


def test_two_groups_of_clients():
    """One feature, 1. Clients 0 and 1 have 15 targets 1 each, clients 2 and 3 15 targets -1: 30 / (30 + 10) = 3/4."""
    member = np.repeat([0, 1, 2, 3], 15)
    t = np.where(member < 2, 1.0, -1.0)[:, None]
    fit = moments(np.ones((60, 1)), t, member, 4)
    one = ridge(fit.a.sum(0), fit.b.sum(0))
    group, weights = find_groups(fit, 2, one, Rng(0))
    assert one.tolist() == [[0.0]]
    assert group[0] == group[1] != group[2] == group[3]
    assert weights[group[0]].tolist() == [[0.75]]
    assert weights[group[2]].tolist() == [[-0.75]]


def test_what_groups_explain_and_what_features_tell_of_them():
    """Targets as above, of two labels. One model explains nothing, models of groups 1 - (1/4)^2."""
    member = np.tile(np.repeat([0, 1, 2, 3], 15), 2)
    label = (member < 2).astype(int)
    t, z = np.where(member < 2, 1.0, -1.0)[:, None], np.stack([np.tile([1.0, -1.0], 60), np.ones(120)], 1)
    fitted, judged = np.arange(60), np.arange(60, 120)
    found = explain(z, t, label, member, 4, Parts(fitted, judged, judged), Rng(0), (1, 2))
    assert (found.one, found.grouped, found.count) == pytest.approx((0.0, 15 / 16, 2), abs=1e-3)
    assert found.gain == pytest.approx(15 / 16, abs=1e-3)


def test_the_next_block_from_the_past_and_from_the_last():
    """Ten targets in each of four blocks, 0, 1, 1, 1, and one feature, 1; a penalty of ten rows.

    Block 2: from the past 10 / (20 + 10) = 1/3, from the last block 10 / (10 + 10) = 1/2; the past's mean is 1/2.
    Shares explained: 1 - (2/3)^2 / (1/2)^2 = -7/9, and 0. Block 3: 20 / 40 = 1/2, and 1/2, with a mean of 2/3: 1 - 9/4.
    """
    block = np.repeat(np.arange(4), 10)
    found = judge_ahead(np.ones((40, 1)), (block > 0).astype(float)[:, None], block, 4, Rng(0), last=1)
    np.testing.assert_allclose(found.blocks[1:, :2], [[-7 / 9, 0.0], [-5 / 4, -5 / 4]])
    assert (found.blocks[1:, 2] > found.blocks[1:, 0]).all()  # half of the block itself helps


def test_shuffles_keep_what_they_should():
    draw = np.random.default_rng(0)
    client, label, cycle = draw.integers(0, 5, 200), draw.integers(0, 3, 200), draw.integers(0, 9, 200)
    other = shares.within(client, label)(draw)
    sizes = (5, 3)
    np.testing.assert_array_equal(shares.count_by(other, label, sizes), shares.count_by(client, label, sizes))
    assert (other != client).any()
    slot = draw.integers(0, 24, 200)
    turned = shares.rotated(slot, cycle, 24)(draw)
    assert all(len(set((turned - slot)[cycle == number] % 24)) == 1 for number in range(9))
    given = shares.between_blocks(client, cycle)(draw)
    for pair in set(zip(client, cycle, strict=True)):
        assert len(set(given[(client == pair[0]) & (cycle == pair[1])])) == 1
