"""Banded noise against dense matrices, enumeration, published numbers and the best there is."""

import itertools
import math

import numpy as np
import pytest
from scipy.linalg import toeplitz

from fedtide.core.errors import FedtideError
from fedtide.wire.accounting import coefficients, correlated, inverse, sensitivity


def dense(bands, rounds):
    """C by binomials, entry by entry."""
    return np.array(
        [[math.comb(2 * (i - j), i - j) / 4 ** (i - j) if 0 <= i - j < bands else 0.0 for j in range(rounds)]
         for i in range(rounds)]
    )  # fmt: skip


def lower(rounds):
    return np.tril(np.ones((rounds, rounds)))


def patterns(rounds, times, distance):
    """All sets of at most `times` rounds that are `distance` apart."""
    for count in range(times + 1):
        for picked in itertools.combinations(range(rounds), count):
            if all(b - a >= distance for a, b in itertools.pairwise(picked)):
                yield picked


def test_all_coefficients_make_the_root_of_sums():
    root = dense(12, 12)
    np.testing.assert_allclose(root @ root, lower(12), atol=1e-12)
    np.testing.assert_allclose(coefficients(12), root[:, 0])


@pytest.mark.parametrize("bands", [1, 2, 5, 9])
def test_the_recursion_solves_c_n_is_z(bands):
    fresh = np.random.default_rng(0).standard_normal((9, 3))
    made = []
    for z in fresh:
        made.append(correlated(z, made[::-1][: bands - 1], coefficients(bands)))
    np.testing.assert_allclose(dense(bands, 9) @ np.array(made), fresh, atol=1e-12)


def test_the_third_round_by_hand():
    """n_0 = 2; n_1 = 1 - 2/2 = 0; n_2 = 4 - 0/2 - 2 * 3/8 = 3.25, and with two bands 4."""
    two, zero = np.array([2.0]), np.array([0.0])
    assert correlated(np.array([4.0]), [zero, two], coefficients(3)).tolist() == [3.25]
    assert correlated(np.array([4.0]), [zero], coefficients(2)).tolist() == [4.0]


@pytest.mark.parametrize(("bands", "times", "distance"), [(1, 3, 1), (2, 2, 3), (3, 3, 3), (3, 2, 4), (4, 4, 4)])
def test_sensitivity_by_enumeration(bands, times, distance):
    """Over all patterns and all signs: a client's rows of x are vectors of norm 1 in any direction."""
    rounds, c = 10, dense(bands, 10)
    worst = max(
        np.linalg.norm(c[:, list(picked)] @ np.array(signs))
        for picked in patterns(rounds, times, distance)
        for signs in itertools.product([-1.0, 1.0], repeat=len(picked))
    )
    assert sensitivity(bands, rounds, times, distance) == pytest.approx(worst, rel=1e-12)


def error(bands, rounds, times, distance):
    """The root mean square error of the model over rounds, `sensitivity * |A C^-1| / sqrt(T)`, by the first column."""
    column = np.cumsum(inverse(bands, rounds))
    norm = math.sqrt((np.arange(rounds, 0, -1) * column**2).sum())
    return sensitivity(bands, rounds, times, distance) * norm / math.sqrt(rounds)


@pytest.mark.parametrize("bands", [1, 2, 4, 7])
def test_error_by_dense_matrices(bands):
    rounds, times, distance = 20, 2, 7
    noise = lower(rounds) @ np.linalg.inv(dense(bands, rounds))
    expected = sensitivity(bands, rounds, times, distance) * np.sqrt(np.mean(np.sum(noise**2, axis=1)))
    assert error(bands, rounds, times, distance) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize(
    ("distance", "times", "known"),
    [
        (32, 8, {1: 32.1, 4: 18.1, 8: 13.9, 16: 10.9, 32: 9.0}),
        (100, 3, {1: 19.6, 4: 11.1, 8: 8.5, 16: 6.7, 32: 5.5, 64: 4.8}),
    ],
)
def test_errors_of_256_rounds(distance, times, known):
    """Measured once with another program."""
    assert {bands: round(error(bands, 256, times, distance), 1) for bands in known} == known


@pytest.mark.parametrize("rounds", [2, 16, 256, 1000])
def test_the_largest_error_of_one_pass_is_landaus_constant(rounds):
    """|C|^2, and the largest row of A C^-1 = C: bounds of Brutman 1982, 1 to 1.0663 + ln(T) / pi."""
    squared = sensitivity(rounds, rounds, 1, rounds) ** 2
    assert 1 <= squared - math.log(rounds) / math.pi <= 1.0663


def test_bands_beyond_the_distance_are_refused():
    with pytest.raises(FedtideError, match=r"bands: found 9, allowed: 1 to 8"):
        sensitivity(9, 100, 2, 8)


def test_what_is_released_has_the_covariance_of_the_mechanism():
    """Noise of the model over rounds: A C^-1 C^-T A^T, within four standard errors of 4000 draws."""
    rounds, bands, draws = 5, 3, 4000
    rng, made = np.random.default_rng(1), []
    for _ in range(rounds):
        made.append(correlated(rng.standard_normal(draws), made[::-1][: bands - 1], coefficients(bands)))
    found = np.cov(np.cumsum(made, axis=0))
    noise = lower(rounds) @ np.linalg.inv(toeplitz(np.r_[coefficients(bands), 0, 0], np.r_[1, np.zeros(4)]))
    expected = noise @ noise.T
    scale = np.sqrt(np.diag(expected)[:, None] * np.diag(expected)[None, :])
    assert np.abs(found - expected).max() < 4 * scale.max() * math.sqrt(2 / draws)
