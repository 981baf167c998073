"""Diagonal Gaussians: numbers that were worked out by hand, other people's code, and where floats end."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch.distributions import Independent, MultivariateNormal, Normal

from fedtide.mixtures.gaussian import clip_shares, floor_variances, log_densities, moments, posteriors

f64 = torch.float64


def mixture(K: int, d: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Means, variances and shares of some mixture."""
    g = torch.Generator().manual_seed(seed)
    mu, var = torch.randn(K, d, generator=g, dtype=f64), torch.rand(K, d, generator=g, dtype=f64) + 0.2
    return mu, var, torch.rand(K, generator=g, dtype=f64).softmax(0)


def rows(n: int, d: int, seed: int = 1) -> torch.Tensor:
    return 2 * torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=f64)


# -- worked out by hand -----------------------------------------------------------------------------------------------


def test_posteriors_by_hand():
    """Components N((0, 0), diag(1, 1)) and N((2, 0), diag(1, 4)).

    At z = (1, 0) both are 1 away in the first dimension and at the mean in the second, so the densities differ by the
    second normalization alone, sqrt(4) = 2: odds 2 : 1. At z = (1, 2): the second dimension adds 4/1 and 4/4, so the
    log-odds are log 2 - (4 - 1)/2. With shares 1 : 2 the odds at (1, 0) are even. The log-joint of component 1 at
    (1, 0) with an even share is -1/2 - log 2 pi - log 2.
    """
    mu, var = torch.tensor([[0.0, 0.0], [2.0, 0.0]]), torch.tensor([[1.0, 1.0], [1.0, 4.0]])
    z = torch.tensor([[1.0, 0.0], [1.0, 2.0]])
    gamma, joint = posteriors(z, mu, var, torch.tensor([0.5, 0.5]))
    odds = 2 * math.exp(-1.5)
    torch.testing.assert_close(gamma, torch.tensor([[2 / 3, 1 / 3], [odds / (1 + odds), 1 / (1 + odds)]], dtype=f64))
    assert float(joint[0, 0]) == pytest.approx(-0.5 - math.log(2 * math.pi) - math.log(2), abs=1e-14)
    assert float(joint[0, 0] - joint[0, 1]) == pytest.approx(math.log(2), abs=1e-14)
    even, _ = posteriors(z[:1], mu, var, torch.tensor([1.0, 2.0], dtype=f64) / 3)
    torch.testing.assert_close(even, torch.full((1, 2), 0.5, dtype=f64))


def test_three_components_by_hand():
    """Unit variances, means 0, 1 and 3, z = 1: squared distances 1, 0, 4, so e^-1/2 : 1 : e^-2."""
    gamma, _ = posteriors(torch.ones(1, 1), torch.tensor([[0.0], [1.0], [3.0]]), torch.ones(3, 1), torch.ones(3) / 3)
    parts = [math.exp(-0.5), 1.0, math.exp(-2)]
    assert gamma[0].tolist() == pytest.approx([p / sum(parts) for p in parts], abs=1e-7)


def test_moments_by_hand():
    """Column 1: 1, 3, 5 has mean 3 and squares 4, 0, 4; column 2 is constant."""
    mean, var = moments(torch.tensor([[1.0, 7.0], [3.0, 7.0], [5.0, 7.0]]))
    assert mean.tolist() == [3.0, 7.0]
    assert var.tolist() == pytest.approx([8 / 3, 0.0], abs=1e-15)
    assert mean.dtype == var.dtype == f64


def test_one_row_has_no_variance():
    mean, var = moments(torch.tensor([[1.5, -2.0]]))
    assert mean.tolist() == [1.5, -2.0]
    assert var.tolist() == [0.0, 0.0]


# -- other people's code ----------------------------------------------------------------------------------------------


def test_agrees_with_full_covariances_that_are_diagonal():
    (mu, var, pi), z = mixture(3, 5), rows(40, 5)
    full = torch.stack(
        [MultivariateNormal(m, torch.diag(v), validate_args=False).log_prob(z) for m, v in zip(mu, var, strict=True)], 1
    )
    torch.testing.assert_close(log_densities(z, mu, var), full, rtol=1e-12, atol=1e-12)
    likelihood = full.exp() * pi
    gamma, joint = posteriors(z, mu, var, pi)
    torch.testing.assert_close(gamma, likelihood / likelihood.sum(1, keepdim=True), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(joint, full + pi.log(), rtol=1e-12, atol=1e-12)


def test_agrees_with_independent_normals():
    (mu, var, _), z = mixture(2, 128), rows(10, 128)
    theirs = Independent(Normal(mu, var.sqrt(), validate_args=False), 1, validate_args=False).log_prob(z[:, None])
    torch.testing.assert_close(log_densities(z, mu, var), theirs, rtol=1e-12, atol=1e-10)


def test_agrees_with_scipy():
    from scipy.stats import norm  # here, as it takes a second to import

    (mu, var, _), z = mixture(3, 6), rows(20, 6)
    theirs = norm.logpdf(z.numpy()[:, None], mu.numpy(), var.sqrt().numpy()).sum(2)
    np.testing.assert_allclose(log_densities(z, mu, var).numpy(), theirs, rtol=1e-12)


def sklearn_mixture(mu: torch.Tensor, var: torch.Tensor, pi: torch.Tensor):
    """scikit-learn's mixture with these parameters, not fitted."""
    made = pytest.importorskip("sklearn.mixture").GaussianMixture(len(mu), covariance_type="diag")
    made.means_, made.covariances_, made.weights_ = mu.numpy(), var.numpy(), pi.numpy()
    made.precisions_cholesky_ = (1 / var.sqrt()).numpy()
    return made


@pytest.mark.parametrize(("K", "d"), [(1, 1), (2, 1), (3, 6), (5, 32)])
def test_posteriors_agree_with_sklearn(K, d):
    (mu, var, pi), z = mixture(K, d), rows(50, d)
    theirs = sklearn_mixture(mu, var, pi)
    gamma, joint = posteriors(z, mu, var, pi)
    np.testing.assert_allclose(gamma.numpy(), theirs.predict_proba(z.numpy()), rtol=1e-9, atol=1e-12)
    np.testing.assert_array_equal(gamma.argmax(1).numpy(), theirs.predict(z.numpy()))
    np.testing.assert_allclose(joint.logsumexp(1).numpy(), theirs.score_samples(z.numpy()), rtol=1e-10)


@pytest.mark.parametrize(("K", "d"), [(2, 1), (3, 6), (2, 128)])
@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e2])
def test_densities_agree_with_sklearn(K, d, scale):
    """A mixture of one component alone is that component."""
    (mu, var, _), z = mixture(K, d), scale * rows(20, d)
    mu, var = scale * mu, scale**2 * var
    alone = [sklearn_mixture(mu[k : k + 1], var[k : k + 1], torch.ones(1)) for k in range(K)]
    theirs = np.stack([one.score_samples(z.numpy()) for one in alone], 1)
    np.testing.assert_allclose(log_densities(z, mu, var).numpy(), theirs, rtol=1e-9, atol=1e-9)


# -- where floats end -------------------------------------------------------------------------------------------------


def exactly(z: torch.Tensor, mu: torch.Tensor, var: torch.Tensor) -> list[list[float]]:
    """The log-densities with squared distances as exact fractions."""
    out = []
    for row in z.tolist():
        out.append([])
        for m, v in zip(mu.tolist(), var.tolist(), strict=True):
            distance = sum((Fraction(a) - Fraction(b)) ** 2 / Fraction(c) for a, b, c in zip(row, m, v, strict=True))
            out[-1].append(-0.5 * math.fsum([float(distance), *map(math.log, v), len(v) * math.log(2 * math.pi)]))
    return out


@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize("offset", [0.0, 1e4, 1e6])
def test_densities_are_accurate_where_features_are_large(scale, offset):
    """Features far from zero with a small spread: the form z^2 - 2 z mu + mu^2 would lose all its digits here."""
    mu, var, _ = mixture(2, 64)
    z, mu, var = scale * (rows(8, 64) + offset), scale * (mu + offset), scale**2 * var
    ours = log_densities(z, mu, var).tolist()
    for one, other in zip(ours, exactly(z, mu, var), strict=True):
        assert one == pytest.approx(other, rel=1e-12)


@pytest.mark.parametrize("d", [1, 128, 512])
def test_rows_of_gamma_sum_to_one_with_features_scaled_by_ten_thousand(d):
    mu, var, pi = mixture(3, d)
    for z, center in ((1e4 * rows(50, d), mu), (1e4 * rows(50, d), 1e4 * mu)):
        gamma, joint = posteriors(z.float(), center, var, pi)
        assert gamma.isfinite().all()
        assert joint.isfinite().all()
        torch.testing.assert_close(gamma.sum(1), torch.ones(50, dtype=f64), rtol=0, atol=1e-6)
        assert (gamma >= 0).all()


def test_one_component_takes_every_row():
    mu, var, _ = mixture(1, 4)
    gamma, joint = posteriors(1e4 * rows(20, 4), mu, var, torch.ones(1))
    assert (gamma == 1).all()
    assert torch.equal(joint, log_densities(1e4 * rows(20, 4), mu, var))


@pytest.mark.parametrize("pi", [[0.5, 0.5], [0.1, 0.9], [0.2, 0.3, 0.5]])
def test_equal_components_leave_the_shares(pi):
    mu, var, _ = mixture(1, 8)
    K, shares = len(pi), torch.tensor(pi, dtype=f64)
    gamma, _ = posteriors(rows(10, 8), mu.repeat(K, 1), var.repeat(K, 1), shares)
    torch.testing.assert_close(gamma, shares.expand(10, K), rtol=1e-12, atol=1e-12)


def test_saturated_posteriors_keep_their_log_odds():
    mu, var = torch.tensor([[0.0], [10.0]]), torch.full((2, 1), 1e-2)
    gamma, joint = posteriors(torch.tensor([[0.0], [-1.0]]), mu, var, torch.tensor([0.5, 0.5]))
    assert gamma[:, 0].tolist() == [1.0, 1.0]
    odds = joint[:, 0] - joint[:, 1]
    assert float(odds[1]) > float(odds[0]) > 1000


def test_shares_of_zero_and_one_are_kept_off():
    assert clip_shares(torch.tensor([0.0, 1.0])).tolist() == pytest.approx([1e-6, 1 - 1e-6], abs=1e-15)
    assert clip_shares(torch.tensor([1.0])).tolist() == [1.0]
    assert clip_shares(torch.zeros(3)).tolist() == pytest.approx([1 / 3] * 3)
    mu, var = torch.tensor([[0.0], [9.0]]), torch.ones(2, 1)
    gamma, joint = posteriors(torch.tensor([[9.0]]), mu, var, torch.tensor([1.0, 0.0]))
    assert joint.isfinite().all()
    assert float(gamma[0, 1]) > 0.99  # a component that was lost can come back


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e200])
def test_a_row_that_says_nothing_leaves_the_shares(bad):
    mu, var, pi = mixture(3, 2)
    z = rows(3, 2)
    z[1, 0] = bad
    gamma, _ = posteriors(z, mu, var, pi)
    assert gamma.isfinite().all()
    torch.testing.assert_close(gamma[1], pi)
    torch.testing.assert_close(gamma[[0, 2]], posteriors(z[[0, 2]], mu, var, pi)[0])


def test_no_rows():
    mu, var, pi = mixture(3, 2)
    gamma, joint = posteriors(torch.empty(0, 2), mu, var, pi)
    assert gamma.shape == joint.shape == (0, 3)


def test_arguments_are_left_alone():
    (mu, var, pi), z = mixture(2, 3), rows(4, 3)
    before = [t.clone() for t in (z, mu, var, pi)]
    posteriors(z, mu, var, pi)
    floor_variances(var, 0.9)
    moments(z)
    assert all(torch.equal(one, other) for one, other in zip(before, (z, mu, var, pi), strict=True))


# -- the floor of variances -------------------------------------------------------------------------------------------


def test_the_floor_is_a_share_of_the_mean_over_everything():
    var = torch.tensor([[8.0, 0.0], [0.0, 0.0]], dtype=f64)
    assert floor_variances(var).tolist() == [[8.0, 0.002], [0.002, 0.002]]
    assert floor_variances(var, 0.5).tolist() == [[8.0, 1.0], [1.0, 1.0]]
    assert floor_variances(var, 0.0).tolist() == [[8.0, 1e-6], [1e-6, 1e-6]]


def test_variances_are_never_zero():
    assert floor_variances(torch.zeros(2, 3)).tolist() == [[1e-6] * 3] * 2


def test_a_client_with_constant_features_yields_finite_parameters():
    mean, var = moments(torch.full((7, 4), 3.0))
    gamma, joint = posteriors(
        rows(5, 4), mean.repeat(2, 1), floor_variances(var.repeat(2, 1)), torch.tensor([0.5, 0.5])
    )
    assert joint.isfinite().all()
    assert gamma.tolist() == [[0.5, 0.5]] * 5
