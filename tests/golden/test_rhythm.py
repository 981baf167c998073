"""The rhythm of a population by hand: the slowest direction, the gain of a period, what cycles tell of one another."""

import math

import numpy as np
import pytest

from fedtide.mixtures.rhythm import (
    best_period,
    curve,
    extremes,
    folded,
    gains,
    order_like,
    shares_between,
    slowest,
    told_by_others,
)

TIMES = np.arange(16.0)
WAVE = np.cos(2 * np.pi * TIMES / 8)


def test_the_autocorrelation_of_one_number():
    """x = (1, 1, -1, -1), n = 4, d = 1.

    Its steps are 0, -2, 0: mean -2/3, variance 4/3 - 4/9 = 8/9, so the noise is sqrt(8/9 / 2) = 2/3 and x counts as
    +-3/2. The covariance is 9/4, shrunk by the factor 1 + 0.05 + 0.5 d/n = 1.175. At lag 1 the products are
    9/4 (1, -1, 1) with mean 9/4 / 3, at lag 2 they are 9/4 (-1, -1) with mean -9/4, and their mean is -9/4 / 3.
    So the autocorrelation is -(1/3) / 1.175, and the readings, of variance one where it is not shrunk, are
    +-(3/2) / sqrt(9/4 * 1.175).
    """
    readings, alike = slowest(np.array([[1.0], [1.0], [-1.0], [-1.0]]))
    assert alike[0] == pytest.approx(-1 / 3 / 1.175)
    np.testing.assert_allclose(readings[:, 0] * np.sign(readings[0, 0]), np.array([1, 1, -1, -1]) / math.sqrt(1.175))


def test_the_slowest_direction_against_every_angle():
    """d = 2: a slow wave in one direction and larger noise in another; no angle is slower than the one found."""
    draw = np.random.default_rng(0)
    t = np.arange(40)
    mixed = np.stack([np.sin(2 * np.pi * t / 20), 3 * draw.normal(size=40)], 1) @ np.array([[0.8, 0.6], [-0.6, 0.8]])
    readings, alike = slowest(mixed)

    y = mixed - mixed.mean(0)
    y = y / (np.diff(mixed, axis=0).std(0) / math.sqrt(2))
    covariance = y.T @ y / 40
    shrunk = (0.05 + 0.5 * 2 / 40) * (covariance[0, 0] + covariance[1, 1]) / 2
    best, angle = -np.inf, 0.0
    for a in np.linspace(0, np.pi, 20_001):
        s = y @ np.array([math.cos(a), math.sin(a)])
        one = sum(s[i] * s[i + 1] for i in range(39)) / 39
        two = sum(s[i] * s[i + 2] for i in range(38)) / 38
        ratio = (one + two) / 2 / (float(s @ s) / 40 + shrunk)
        best, angle = max((best, angle), (ratio, a))
    assert alike[0] == pytest.approx(best, rel=1e-6)
    found = y @ np.array([math.cos(angle), math.sin(angle)])
    assert abs(np.corrcoef(found, readings[:, 0])[0, 1]) > 1 - 1e-6
    assert abs(np.corrcoef(np.sin(2 * np.pi * t / 20), readings[:, 0])[0, 1]) > 0.95


def test_the_gain_of_a_period():
    """n = 16, three harmonics, so 7 numbers: gain = 16 log(total / rest) - 7 log 16.

    A wave of period 8 beside an alternation of size 1/2 has mean square 1/2 + 1/4. A period of 8 has the harmonics
    1/8, 2/8, 3/8 and explains 1/2: rest 1/3. A period of 16/3 has 3/16, 6/16, 9/16, which are orthogonal to both: rest
    1. Rests count as a thousandth at least: a period of 8 explains all of the wave alone.
    """
    values = np.stack([WAVE + 0.5 * (-1) ** TIMES, WAVE], 1)
    found = gains(TIMES, values, np.array([1 / 8, 3 / 16]))
    numbers = 7 * math.log(16)
    expected = [[16 * math.log(3) - numbers, 16 * math.log(1000) - numbers], [-numbers, -numbers]]
    np.testing.assert_allclose(found, expected, atol=2e-4)


def test_a_multiple_gives_way_to_the_period():
    """Periods of 16, 24 and 32 explain a wave of period 8 as well, with their second, third and fourth harmonics."""
    times = np.arange(96.0)
    period, gain = best_period(times, np.cos(2 * np.pi * times / 8))
    assert period == pytest.approx(8, rel=0.02)
    assert gain == pytest.approx(96 * math.log(1000) - 7 * math.log(96))


def test_cycles_that_tell_each_other_and_a_step_that_does_not():
    """Two cycles of 8 rounds, each fitted to the other; over a whole cycle waves are orthogonal.

    A wave: its coefficient is 4 / (4 + 0.001 * 8), which leaves (0.008 / 4.008)^2. A step from -1/2 to 1/2: one half
    tells the other to be 1/2 * 8 / (8 + 0.008) of the wrong sign, so the rest is (1 + 8 / 8.008)^2 times the variance.
    """
    assert told_by_others(TIMES, WAVE, 8.0) == pytest.approx(1 - (0.008 / 4.008) ** 2, abs=1e-12)
    step = (TIMES >= 8) - 0.5
    assert told_by_others(TIMES, step, 8.0) == pytest.approx(1 - (1 + 8 / 8.008) ** 2, abs=1e-9)


def test_a_curve_is_the_mean_at_the_same_phase():
    """Period 4: neighbors are a quarter of a period apart, which is 6 widths and counts for nothing."""
    values = np.array([0.0, 1.0, 2.0, 5.0, 0.0, 3.0, 4.0, 5.0])[:, None]
    times = np.arange(8.0)
    np.testing.assert_allclose(folded(times, values, 4.0, np.arange(8.0, 12.0))[:, 0], [0, 2, 3, 5], atol=1e-6)


def test_two_periods_add_up():
    """Each half of the second period tells its level, and is added to the curve of the first: s = wave + level."""
    times = np.arange(96.0)
    level = np.where(times % 48 < 24, 0.5, -0.5)
    values = (np.cos(2 * np.pi * times / 8) + level)[:, None]
    ahead = np.array([96 + 12.0, 96 + 36.0])  # the middles of both halves, by 4 rounds behind a peak and by 4
    np.testing.assert_allclose(curve(times, values, (8.0, 48.0), ahead)[:, 0], [-0.5, -1.5], atol=0.1)
    np.testing.assert_allclose(curve(times, values, (8.0,), ahead)[:, 0], [-1.0, -1.0], atol=0.1)


def test_the_corners_of_a_triangle_and_shares_between_them():
    """K = 3: the mean is (1, 4/5). (0, 4) is farthest from it, then (4, 0) from that, then (0, 0) from their line."""
    points = np.array([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0], [1.0, 0.0], [0.0, 0.0]])
    corners = extremes(points, 3)
    assert corners.tolist() == [[0, 4], [4, 0], [0, 0]]
    np.testing.assert_allclose(
        shares_between(np.array([[1.0, 2.0], [2.0, 2.0], [-1.0, 1.0]]), corners),
        [[0.5, 0.25, 0.25], [0.5, 0.5, 0.0], [0.25 / 1.25, 0.0, 1 / 1.25]],
        atol=1e-12,
    )


def test_groups_keep_their_order():
    known = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.5, 0.5, 0.0]])
    order = order_like(known[:, [2, 0, 1]], known)
    assert known[:, [2, 0, 1]][:, order].tolist() == known.tolist()
