"""Laws of posteriors and of assignments: shifts of the origin, scales, orders and names change nothing else."""

import math
from fractions import Fraction

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedtide.algorithms.fedtem import mean_and_variance
from fedtide.mixtures.assign import assign, assign_by_cost, assign_by_rank, capacities
from fedtide.mixtures.feature_gaussians import clip_shares, floor_variances, log_densities, posteriors
from helpers.examples import examples

law = examples(40)

seeds = st.integers(0, 2**32)
simplex = st.lists(st.floats(0, 1), min_size=1, max_size=5).filter(lambda w: sum(w) > 0.01)


def mixture(seed: int, rows: int, K: int, d: int) -> tuple[torch.Tensor, ...]:
    """Features, means, variances and shares, with dead dimensions."""
    rng = np.random.default_rng(seed)
    z = np.maximum(0, rng.normal(size=(rows, d)) * 3)
    mu, var = rng.normal(size=(K, d)), rng.exponential(size=(K, d)) * (rng.random((K, d)) > 0.2)
    return tuple(map(torch.from_numpy, (z, mu, var, rng.dirichlet(np.ones(K)))))


def cohort(seed: int, m: int, K: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Posteriors and log-joints without ties, and room for everyone."""
    rng = np.random.default_rng(seed)
    joint = torch.from_numpy(3 * rng.normal(size=(m, K)))
    room = torch.from_numpy(np.bincount(rng.integers(K, size=m), minlength=K))
    return joint.softmax(1), joint, room


# -- posteriors -------------------------------------------------------------------------------------------------------


@law
@given(seeds, st.integers(0, 12), st.integers(1, 4), st.integers(1, 40))
def test_posteriors_are_on_the_simplex(seed, rows, K, d):
    z, mu, var, pi = mixture(seed, rows, K, d)
    for scale in (1.0, 1e4):
        gamma, joint = posteriors(scale * z, mu, floor_variances(var), pi)
        assert gamma.shape == joint.shape == (rows, K)
        assert (gamma >= 0).all()
        torch.testing.assert_close(gamma.sum(1), torch.ones(rows, dtype=torch.float64), rtol=0, atol=1e-6)


@law
@given(seeds, st.integers(1, 4), st.integers(1, 40), st.floats(-1e4, 1e4))
def test_a_common_shift_changes_nothing(seed, K, d, by):
    z, mu, var, pi = mixture(seed, 8, K, d)
    var = floor_variances(var, 0.1)
    shift = by * torch.linspace(-1, 1, d, dtype=torch.float64)
    one, other = posteriors(z, mu, var, pi), posteriors(z + shift, mu + shift, var, pi)
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    (mean, spread), (there, spread_there) = mean_and_variance(z), mean_and_variance(z + shift)
    torch.testing.assert_close(mean + shift, there, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(spread, spread_there, rtol=1e-6, atol=1e-7)


@law
@given(seeds, st.integers(1, 4), st.integers(1, 40), st.sampled_from([2.0**-10, 2.0**14, 1e4]))
def test_other_units_change_no_posterior(seed, K, d, scale):
    z, mu, var, pi = mixture(seed, 8, K, d)
    var = floor_variances(var, 0.1)
    one, other = posteriors(z, mu, var, pi), posteriors(scale * z, scale * mu, scale**2 * var, pi)
    torch.testing.assert_close(one[0], other[0], rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(one[1], other[1] + d * math.log(scale), rtol=1e-9, atol=1e-7)


@law
@given(seeds, st.integers(2, 5), st.integers(1, 20))
def test_other_names_of_components_rename_the_posteriors(seed, K, d):
    z, mu, var, pi = mixture(seed, 8, K, d)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(K))
    one, other = (
        posteriors(z, mu, floor_variances(var), pi),
        posteriors(z, mu[order], floor_variances(var[order]), pi[order]),
    )
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a[:, order], b, rtol=1e-9, atol=1e-12)


@law
@given(seeds, st.integers(1, 4), st.integers(1, 300))
def test_a_row_has_the_same_density_alone_and_among_others(seed, K, d):
    z, mu, var, _ = mixture(seed, 9, K, d)
    together = log_densities(z, mu, floor_variances(var))
    assert torch.equal(together, torch.cat([log_densities(row[None], mu, floor_variances(var)) for row in z]))


@law
@given(simplex)
def test_clipped_shares_are_shares(weights):
    pi = clip_shares(torch.tensor(weights, dtype=torch.float64) / sum(weights))
    assert math.isclose(float(pi.sum()), 1, abs_tol=1e-12)
    assert (pi > 0.9e-6).all()
    torch.testing.assert_close(pi, torch.tensor(weights, dtype=torch.float64) / sum(weights), rtol=0, atol=1e-5)


# -- capacities -------------------------------------------------------------------------------------------------------


@law
@given(simplex, st.integers(0, 10_000))
def test_capacities_are_the_shares_to_the_nearest_participant(weights, m):
    q = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    counts = capacities(q, m)
    assert counts.dtype == torch.int64
    assert int(counts.sum()) == m
    assert (counts >= 0).all()
    assert ((counts - q * m).abs() < 1 + 1e-6).all()


@law
@given(st.integers(0, 1000), st.integers(1, 1000), st.integers(0, 500))
def test_two_capacities_round_half_up_exactly(part, whole, m):
    part = min(part, whole)
    counts = capacities(torch.tensor([part, whole - part], dtype=torch.float64) / whole, m)
    assert counts.tolist()[0] == (2 * part * m + whole) // (2 * whole)


@law
@given(st.lists(st.integers(0, 30), min_size=3, max_size=5).filter(any), st.integers(0, 500))
def test_the_largest_remainders_exactly(weights, m):
    wanted = [Fraction(w * m, sum(weights)) for w in weights]
    counts = [int(q) for q in wanted]
    order = sorted(range(len(weights)), key=lambda k: (counts[k] - wanted[k], k))
    for k in order[: m - sum(counts)]:
        counts[k] += 1
    assert capacities(torch.tensor(weights, dtype=torch.float64) / sum(weights), m).tolist() == counts


# -- assignments ------------------------------------------------------------------------------------------------------


@law
@given(seeds, st.integers(0, 30), st.integers(1, 5))
def test_assignments_fill_the_room(seed, m, K):
    posterior, joint, room = cohort(seed, m, K)
    assert torch.equal(torch.bincount(assign(posterior, joint, room), minlength=K), room)


@law
@given(seeds, st.integers(1, 30), st.integers(1, 5))
def test_other_orders_of_participants_and_of_components_only_rename_the_assignment(seed, m, K):
    posterior, joint, room = cohort(seed, m, K)
    chosen, draw = assign(posterior, joint, room), np.random.default_rng(seed)
    people, order = torch.from_numpy(draw.permutation(m)), torch.from_numpy(draw.permutation(K))
    assert torch.equal(chosen[people], assign(posterior[people], joint[people], room))
    assert torch.equal(chosen, order[assign(posterior[:, order], joint[:, order], room[order])])


@law
@given(seeds, st.integers(1, 20), st.floats(0, 1))
def test_a_mirrored_prior_mirrors_the_assignment(seed, m, q):
    if abs((q * m + 0.5) - round(q * m + 0.5)) < 1e-6:
        return  # half a participant goes to the first component either way
    posterior, joint, _ = cohort(seed, m, 2)
    shares = torch.tensor([q, 1 - q], dtype=torch.float64)
    one = assign(posterior, joint, capacities(shares, m))
    other = assign(posterior.flip(1), joint.flip(1), capacities(shares.flip(0), m))
    assert torch.equal(one, 1 - other)


posteriors_with_ties = st.sampled_from([0.0, 1e-9, 0.1, 0.25, 0.5, 0.7, 1 - 1e-9, 1.0])
odds_with_ties = st.integers(-3, 3).map(float)


@law
@given(st.lists(st.tuples(posteriors_with_ties, odds_with_ties, odds_with_ties), max_size=40), st.floats(0, 1))
def test_the_general_solver_reproduces_the_sort(people, q):
    first = torch.tensor([p for p, _, _ in people], dtype=torch.float64)
    joint = torch.tensor([odds for _, *odds in people], dtype=torch.float64).reshape(-1, 2)
    posterior, room = torch.stack([first, 1 - first], 1), capacities(torch.tensor([q, 1 - q]), len(people))
    assert torch.equal(assign_by_rank(posterior, joint, room), assign_by_cost(posterior, joint, room))


@law
@given(seeds, st.integers(0, 60), st.sampled_from([1.0, 10.0]))
def test_the_general_solver_reproduces_the_sort_without_ties(seed, m, spread):
    _, joint, room = cohort(seed, m, 2)
    first = (spread * (joint[:, 0] - joint[:, 1])).sigmoid().clamp(1e-12, 1)
    posterior = torch.stack([first, 1 - first], 1)
    assert torch.equal(assign_by_rank(posterior, joint, room), assign_by_cost(posterior, joint, room))


@law
@given(seeds, st.integers(1, 30), st.integers(2, 5))
def test_what_is_added_to_all_log_joints_of_a_participant_changes_nothing(seed, m, K):
    posterior, joint, room = cohort(seed, m, K)
    saturated = torch.nn.functional.one_hot(posterior.argmax(1), K).double()
    added = torch.from_numpy(np.random.default_rng(seed).integers(-64, 64, size=(m, 1)))
    assert torch.equal(assign(saturated, joint, room), assign(saturated, joint + added, room))
