"""Accounting against closed forms, integration by numbers, dp-accounting and known tables."""

import math

import pytest

from fedtide.wire.accounting import Plan, Sampling, Spent, delta_of, epsilon_of, sampled_epsilon, total_epsilon


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


@pytest.mark.parametrize(
    ("clients", "drawn", "rounds", "z", "delta", "poisson", "replaced"),
    [
        pytest.param(1000, 10, 100, 1.0, 1e-5, 0.72, 5.1, marks=pytest.mark.thorough),
        pytest.param(10_000, 50, 500, 0.8, 1e-6, 1.68, 12.4, marks=pytest.mark.thorough),
        (200, 10, 50, 2.0, 1e-4, 0.63, 1.4),
        pytest.param(4000, 200, 64, 1.0, 1e-5, 2.9, 9.8, marks=pytest.mark.thorough),
    ],
)
def test_draws_against_a_distribution_of_losses_of_our_own(clients, drawn, rounds, z, delta, poisson, replaced):
    """Poisson draws to a percent; draws without replacement are never below what is spent, nor twice as much."""
    pytest.importorskip("dp_accounting")
    rate, coins = drawn / clients, Sampling(drawn, clients, poisson=True)
    ours = sampled_epsilon(z, coins, rounds, delta)
    assert ours == pytest.approx(poisson, rel=0.02)
    pairs = [((0.0, 1.0), (0.0, 0.0)), ((0.0, 0.0), (0.0, 1.0))]
    low, high = (max(spent(pair, rate, z, rounds, delta, up) for pair in pairs) for up in (False, True))
    assert low <= ours <= high * 1.01
    assert high == pytest.approx(low, rel=0.2)
    # A client that is drawn moves the sum by one, and takes another's place, which moves it by one, too.
    pairs = [((0.0, 2.0), (0.0, 1.0)), ((0.0, 1.0), (0.0, 2.0)), ((0.0, 1.0), (0.0, 0.0)), ((0.0, 0.0), (0.0, 1.0))]
    low = max(spent(pair, rate, z, rounds, delta, False) for pair in pairs)
    ours = sampled_epsilon(z, Sampling(drawn, clients), rounds, delta)
    assert low == pytest.approx(replaced, rel=0.1)
    assert low <= ours < 2 * low


def spent(pair, rate, z, rounds, delta, up):
    """Epsilon of releases of two mixtures, (1 - rate) N(first, z^2) + rate N(second, z^2), by losses on a grid.

    Losses of the cells of a fine grid of outputs are rounded up or down, and composed by a Fourier transform.
    """
    import numpy as np
    from scipy.special import logsumexp, ndtr

    x = np.linspace(-12 * z, 12 * z + 2, 400_001)

    def logs(means):
        parts = [-((x - mean) ** 2) / (2 * z * z) for mean in means]
        return logsumexp(parts, axis=0, b=np.array([[1 - rate], [rate]]))

    def masses(means):
        return np.diff((1 - rate) * ndtr((x - means[0]) / z) + rate * ndtr((x - means[1]) / z))

    ends = logs(pair[0]) - logs(pair[1])
    losses = np.maximum(ends[1:], ends[:-1]) if up else np.minimum(ends[1:], ends[:-1])
    step, size = 5e-4, 2**19
    places = (np.ceil if up else np.floor)(losses / step).astype(int)
    pmf = np.bincount(places % size, masses(pair[0]), minlength=size)
    whole = np.fft.irfft(np.fft.rfft(pmf) ** rounds, size)
    values = step * np.where(np.arange(size) < size // 2, np.arange(size), np.arange(size) - size)
    order = np.argsort(values)
    values, whole = values[order], np.maximum(whole[order], 0.0)
    epsilons = np.linspace(0, 60, 6001)
    above = [float((whole * -np.expm1(np.minimum(e - values, 0.0))).sum()) for e in epsilons[::50]]
    first = max(next(k for k, value in enumerate(above) if value <= delta) - 1, 0) * 50
    for e in epsilons[first:]:
        if float((whole * -np.expm1(np.minimum(e - values, 0.0))).sum()) <= delta:
            return float(e if up else max(e - 0.01, 0.0))
    raise AssertionError("no epsilon")


def test_runs_add_up():
    """As one Gaussian mechanism, or as so many more rounds of draws."""
    pytest.importorskip("dp_accounting")
    assert total_epsilon([], 1e-5) == total_epsilon([Spent(0.0)], 1e-5) == 0.0
    for mus in ([2.0], [3.0, 4.0], [0.5] * 9):
        whole = total_epsilon([Spent(epsilon_of(mu, 1e-5)) for mu in mus], 1e-5)
        assert whole == pytest.approx(epsilon_of(math.hypot(*mus), 1e-5), rel=1e-6)
        assert whole >= epsilon_of(math.hypot(*mus), 1e-5)
    coins = Sampling(10, 1000, poisson=True)
    once = Spent(sampled_epsilon(1.0, coins, 50, 1e-5), 1.0, coins, 50)
    assert total_epsilon([once] * 3, 1e-5) == pytest.approx(sampled_epsilon(1.0, coins, 150, 1e-5), rel=1e-4)
    both = total_epsilon([once, Spent(epsilon_of(1.0, 1e-5))], 1e-5)
    assert max(once.epsilon, epsilon_of(1.0, 1e-5)) < both < once.epsilon + epsilon_of(1.0, 1e-5)
    few = Sampling(9, 10)  # who is drawn nearly always gains nothing by it
    always = Spent(min(sampled_epsilon(1.0, few, 4, 1e-5), epsilon_of(2.0, 1e-5)), 1.0, few, 4)
    assert total_epsilon([always], 1e-5) == pytest.approx(epsilon_of(2.0, 1e-5))


def test_all_questions_of_a_round_ask_one_draw():
    pytest.importorskip("dp_accounting")
    sampling = Sampling(5, 1000)
    assert Plan(300, 300, releases=4, sampling=sampling).epsilon(3.0, 1e-5) == sampled_epsilon(1.5, sampling, 300, 1e-5)


def test_without_the_library_the_extra_is_named(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(Exception, match=r'needs dp-accounting; pip install "fedtide\[privacy\]"'):
        sampled_epsilon(1.0, Sampling(1, 10), 1, 1e-5)
