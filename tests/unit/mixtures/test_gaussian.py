"""Diagonal Gaussians: numbers that were worked out by hand, other people's code, and where floats end."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from fedtide.mixtures.feature_gaussians import clip_shares, log_densities, posteriors

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


# -- other people's code ----------------------------------------------------------------------------------------------


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
