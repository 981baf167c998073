"""Accounting against closed forms, integration by numbers, dp-accounting and known tables."""

from __future__ import annotations

import math

import pytest

from fedtide.wire.accounting import Plan, Sampling, delta_of, sampled_epsilon


@pytest.mark.parametrize(("mu", "epsilon"), [(0.3, 0.1), (1.0, 1.0), (2.0, 4.0), (4.0, 0.5)])
def test_delta_is_the_integral_of_the_excess(mu, epsilon):
    """Delta is the integral of max(p - e^epsilon q, 0), with p = N(mu, 1) and q = N(0, 1)."""
    from scipy.integrate import quad  # here, as it takes long to import

    def normal(x, mean=0.0):
        return math.exp(-((x - mean) ** 2) / 2) / math.sqrt(2 * math.pi)

    excess, error = quad(lambda x: max(normal(x, mu) - math.exp(epsilon) * normal(x), 0.0), -12, 20, limit=400)
    assert delta_of(mu, epsilon) == pytest.approx(excess, abs=max(10 * error, 1e-10))


def test_epsilon_of_many_releases():
    """A table of 200 rounds at delta 1e-4, by the privacy loss distributions of dp-accounting."""
    known = {(1, 40): 42.7, (2, 40): 16.1, (4, 40): 6.6, (1, 200): 152, (2, 200): 50.5, (4, 200): 18.7}
    for (z, times), epsilon in known.items():
        assert Plan(200, times).epsilon(z, 1e-4) == pytest.approx(epsilon, rel=0.01)


@pytest.mark.parametrize("plan", [Plan(50, 50), Plan(256, 8, 32, 16), Plan(100, 3, 30, 5, releases=2)])
@pytest.mark.parametrize("epsilon", [0.5, 2.0, 8.0])
def test_noise_and_epsilon_are_inverse_and_rounded_to_the_safe_side(plan, epsilon):
    z = plan.noise(epsilon, 1e-5)
    assert plan.epsilon(z, 1e-5) == pytest.approx(epsilon, rel=1e-6)
    assert delta_of(plan.moved / z, epsilon) <= 1e-5
    assert delta_of(plan.moved / (z * 0.999), epsilon) > 1e-5


def test_more_rounds_more_releases_and_less_noise_tell_more():
    assert Plan(10, 2).epsilon(1.0, 1e-5) < Plan(10, 3).epsilon(1.0, 1e-5)
    assert Plan(10, 2).epsilon(1.0, 1e-5) < Plan(10, 2, releases=2).epsilon(1.0, 1e-5)
    assert Plan(10, 2, releases=2).epsilon(1.0, 1e-5) == Plan(10, 4).epsilon(1.0, 1e-5)
    assert Plan(10, 2).epsilon(2.0, 1e-5) < Plan(10, 2).epsilon(1.0, 1e-5)


def test_epsilon_as_dp_accounting_says_it():
    dp_accounting = pytest.importorskip("dp_accounting")
    from dp_accounting.pld import PLDAccountant

    for z, times in ((2.0, 40), (5.0, 100)):
        accountant = PLDAccountant()
        accountant.compose(dp_accounting.GaussianDpEvent(z), times)
        assert Plan(200, times).epsilon(z, 1e-5) == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-3)


def test_uniform_draws_tell_less():
    pytest.importorskip("dp_accounting")
    few, all_of_them = (sampled_epsilon(4.0, Sampling(drawn, 1000), 100, 1e-5) for drawn in (10, 1000))
    assert few < all_of_them
    # Drawn or not, all of them are replaced by twice the length.
    assert all_of_them >= Plan(100, 100).epsilon(2.0, 1e-5)
    plan = Plan(100, 100, sampling=Sampling(10, 1000))
    z = plan.noise(2.0, 1e-5)
    assert plan.epsilon(z, 1e-5) <= 2.0 < plan.epsilon(z * 0.99, 1e-5)
    assert z < Plan(100, 100).noise(2.0, 1e-5)


def test_all_questions_of_a_round_ask_one_draw():
    pytest.importorskip("dp_accounting")
    sampling = Sampling(5, 1000)
    assert Plan(300, 300, releases=4, sampling=sampling).epsilon(3.0, 1e-5) == sampled_epsilon(1.5, sampling, 300, 1e-5)


def test_without_the_library_the_extra_is_named(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(Exception, match=r"dp-accounting, which is not installed; pip install 'fedtide\[privacy\]'"):
        sampled_epsilon(1.0, Sampling(1, 10), 1, 1e-5)
