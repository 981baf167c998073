"""Looking for a rhythm: what is found, when it is believed, and that nothing is found where there is nothing."""

import numpy as np
import pytest

from fedtide.mixtures.rhythm import best_period, look, read_shares, weights_of
from helpers.rhythms import linear, world


def looked(shares, seed: int, **of):
    series, _ = world(shares, seed, **of)
    return look(np.arange(float(len(series))), series, np.random.default_rng(seed))


# -- what there is ----------------------------------------------------------------------------------------------------

SHAPES = {
    "linear": lambda n, period: linear(n, period),
    "phase": lambda n, period: linear(n, period, peak=5),
    "exponent 4": lambda n, period: linear(n, period, 4.0),
    "exponent 1/4": lambda n, period: linear(n, period, 0.25),
    "cosine": lambda n, period: (1 + np.cos(2 * np.pi * np.arange(n) / period)) / 2,
    "block": lambda n, period: (np.arange(n) % period < period / 2) * 1.0,
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("period", [16, 32])
def test_a_period_is_believed_after_some_cycles(shape, period):
    """Three of 32 rounds, five of 16; where the night is rare one more."""
    heard = 96 if shape != "exponent 1/4" else 128
    for seed in range(3):
        found = looked(SHAPES[shape](heard if period == 32 else heard - 16, period), seed)
        assert found.moves
        assert found.periods
        assert found.periods[0] == pytest.approx(period, rel=0.05)


@pytest.mark.parametrize(("period", "heard"), [(32, 66), (100, 202)])
def test_two_cycles_are_enough_and_less_is_not(period, heard):
    """A believed period has come at least twice: with one and a half nothing is said, not even half of it."""
    for seed in range(3):
        assert looked(linear(heard, period), seed).periods[0] == pytest.approx(period, rel=0.05)
        for less in (int(1.5 * period), int(1.75 * period)):
            assert looked(linear(less, period), seed).periods == ()


@pytest.mark.parametrize("weekend", [0.8, 1.0, 1.5])
def test_a_day_is_found_beside_a_week_that_is_stronger(weekend):
    """The weekend's step is that many times the day's swing; the day comes again in each week, as corners would."""
    rounds = np.arange(512)
    day = (1 - np.cos(2 * np.pi * rounds / 24)) / 2
    shares = (day + weekend * (rounds // 24 % 7 >= 5)) / (1 + weekend)
    for seed in range(2):
        assert sorted(looked(shares, seed).periods) == pytest.approx([24, 168], rel=0.05)


# -- what there is not ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [16, 32, 64, 128])
def test_nothing_is_found_where_nobody_takes_turns(n):
    """Chance has its best try in 19 shuffles of the rounds, and what is believed is far above: no alarm in 80 looks."""
    found = [looked(np.full(n, 0.5), seed) for seed in range(20)]
    assert not any(each.moves or each.periods for each in found)


def walk(n: int, draw: np.random.Generator) -> np.ndarray:
    steps = np.cumsum(draw.normal(size=n))
    return (steps - steps.min()) / np.ptp(steps)


DRIFTS = {
    "step": lambda n, draw: (np.arange(n) < n / 4) * 0.7 + 0.15,
    "step in the middle": lambda n, draw: (np.arange(n) < n / 2) * 1.0,
    "two steps": lambda n, draw: 0.1 + 0.4 * (np.arange(n) < n / 3) + 0.4 * (np.arange(n) < 2 * n / 3),
    "line": lambda n, draw: np.linspace(1, 0.15, n),
    "walk": walk,
}


@pytest.mark.parametrize("drift", DRIFTS)
def test_a_drift_moves_but_has_no_period(drift):
    for seed in range(5):
        for n in (96, 192):
            found = looked(DRIFTS[drift](n, np.random.default_rng(seed)), seed)
            assert found.moves
            assert found.periods == ()


# -- what is read -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["linear", "block", "cosine"])
def test_shares_are_read_as_they_came(shape):
    """Noise of ten clients is 0.06 of the distance of two groups; extremes that are never quite reached add to it."""
    for seed in range(3):
        series, came = world(SHAPES[shape](96, 32), seed)
        shares = read_shares(series, 2, came)
        assert np.sqrt(((shares - came) ** 2).mean()) < 0.12
        assert np.corrcoef(shares[:, 0], came[:, 0])[0, 1] > 0.94


# -- rounds of few and of many -----------------------------------------------------------------------------------------


def unequal(n: int, seed: int, few: int, many: int) -> np.ndarray:
    return np.random.default_rng(1000 + seed).choice([few, many], n)


@pytest.mark.parametrize(("few", "many"), [(1, 19), (3, 100)])
def test_a_round_of_one_does_not_stretch_the_extremes(few, many):
    """A round of one is off by a fifth of the distance of two groups; taken for their own, all others are pressed."""
    off = []
    for seed in range(8):
        came = unequal(192, seed, few, many)
        series, shares = world(linear(192, 32), seed, m=came)
        for weights in (1.0, weights_of(came)):
            read = read_shares(series, 2, shares, weights)
            off.append(np.sqrt(((read - shares)[came == many] ** 2).mean()))
    alike, weighed = np.mean(np.reshape(off, (8, 2)), 0)
    assert weighed < 0.11 < alike if many == 19 else weighed < alike < 0.08


def test_a_period_is_believed_where_few_rounds_have_many():
    """Groups nearer to each other than clients are: rounds of one are chance alone."""
    believed = []
    for seed in range(6):
        came = unequal(128, seed, 1, 19)
        series, _ = world(linear(128, 32), seed, m=came, apart=1.5)
        for weights in (1.0, weights_of(came)):
            believed.append(look(np.arange(128.0), series, np.random.default_rng(seed), weights).periods != ())
    assert np.sum(np.reshape(believed, (6, 2)), 0).tolist() == [0, 5]


# -- what does not matter ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_neither_sign_nor_scale_nor_origin_nor_axes_matter(seed):
    draw = np.random.default_rng(seed)
    series, came = world(linear(64, 32), seed, d=8)
    plain = look(np.arange(64.0), series, np.random.default_rng(0))
    shares = read_shares(series, 2, came)
    for changed in (
        -series,
        100 * series,
        series + draw.normal(size=8),
        series[:, ::-1],
        series * draw.choice([-1, 1], 8),
    ):
        found = look(np.arange(64.0), changed, np.random.default_rng(0))
        assert (found.moves, found.periods) == (plain.moves, pytest.approx(plain.periods))
        np.testing.assert_allclose([found.gain, found.chance], [plain.gain, plain.chance], rtol=1e-6)
        np.testing.assert_allclose(read_shares(changed, 2, came), shares, atol=1e-7)
    scaled = series * draw.uniform(0.01, 100, size=8)  # each number in its own unit
    np.testing.assert_allclose(read_shares(scaled, 2, came), shares, atol=1e-7)


@pytest.mark.parametrize(("begin", "step"), [(0.0, 1.0), (1000.0, 1.0), (-3.0, 1.0), (0.0, 900.0)])
def test_time_has_no_origin_and_a_period_its_unit(begin, step):
    times = np.arange(96.0)
    wave = np.cos(2 * np.pi * times / 11.3) + 0.1 * np.random.default_rng(0).normal(size=96)
    assert best_period(begin + step * times, wave)[0] == pytest.approx(step * best_period(times, wave)[0], rel=1e-6)
