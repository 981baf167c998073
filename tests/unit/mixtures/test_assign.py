"""Assignment of participants to components: by hand, and against every assignment there is."""

from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch

from fedtide.mixtures import assign as solver
from fedtide.mixtures.assign import assign, assign_by_cost, assign_by_rank, capacities

f64 = torch.float64


def room(*counts: int) -> torch.Tensor:
    return torch.tensor(counts)


def two(first: list[float]) -> torch.Tensor:
    """Posteriors of two components."""
    p = torch.tensor(first, dtype=f64)
    return torch.stack([p, 1 - p], 1)


# -- two components ---------------------------------------------------------------------------------------------------


def test_ties_go_by_log_odds_then_by_id():
    p = two([1.0, 1.0, 1.0, 0.5])
    joint = torch.tensor([[-3.0, -9.0], [-1.0, -9.0], [-3.0, -9.0], [0.0, -100.0]])
    assert assign(p, joint, room(1, 3)).tolist() == [1, 0, 1, 1]
    assert assign(p, joint, room(2, 2)).tolist() == [0, 0, 1, 1]
    assert assign(p, joint, room(3, 1)).tolist() == [0, 0, 0, 1]


# -- every assignment there is ----------------------------------------------------------------------------------------


def keys(posterior: torch.Tensor, joint: torch.Tensor, place: tuple[int, ...]) -> tuple[Fraction, Fraction, int]:
    """The three keys of a solution, exactly."""
    logp = posterior.double().clamp_min(1e-12).log().tolist()
    likely = sum((Fraction(logp[i][k]) for i, k in enumerate(place)), Fraction(0))
    odds = sum((Fraction(float(joint[i, k])) for i, k in enumerate(place)), Fraction(0))
    return likely, odds, sum(i * k for i, k in enumerate(place))


def best(posterior: torch.Tensor, joint: torch.Tensor, counts: list[int]) -> tuple[Fraction, Fraction, int]:
    m, K = posterior.shape
    fitting = (place for place in product(range(K), repeat=m) if [place.count(k) for k in range(K)] == counts)
    return max(keys(posterior, joint, place) for place in fitting)


def some_counts(m: int, K: int, g: torch.Generator) -> list[int]:
    return torch.bincount(torch.randint(K, (m,), generator=g), minlength=K).tolist()


@pytest.mark.parametrize("K", [1, 2, 3])
@pytest.mark.parametrize("ties", ["many", "saturated", "none"])
def test_no_assignment_is_better(K, ties):
    """Many ties: posteriors n/(sum of n) with small n; saturated: 0, 1 and a half; whole numbers as log-joints."""
    g = torch.Generator().manual_seed(K)
    for m in [m for m in range(8) for _ in range(5)]:
        if ties == "none":
            posterior = torch.rand(m, K, generator=g, dtype=f64).softmax(1)
        else:
            weight = torch.randint(0, 4 if ties == "many" else 2, (m, K), generator=g).double()
            weight[weight.sum(1) == 0] = 1
            posterior = weight / weight.sum(1, keepdim=True)
        joint = torch.randint(-3, 4, (m, K), generator=g).double()
        counts = some_counts(m, K, g)
        place = assign_by_cost(posterior, joint, room(*counts))
        assert torch.bincount(place, minlength=K).tolist() == counts
        found, wanted = keys(posterior, joint, tuple(place.tolist())), best(posterior, joint, counts)
        if ties == "none":
            assert abs(found[0] - wanted[0]) < 1e-14
        else:
            assert found == wanted


def test_a_chain_of_moves_may_be_best():
    """Participants 0 and 1 want the first component, which has room for one, and nobody wants the third. Participant 1
    is far from the third but near the second, and 2 is near both: it costs least when both move. Then, when 2 is far
    from the third, 1 goes there at once."""
    posterior = torch.tensor([[0.90, 0.05, 0.05], [0.50, 0.49, 0.01], [0.02, 0.50, 0.48]])
    assert assign_by_cost(posterior, posterior.log(), room(1, 1, 1)).tolist() == [0, 1, 2]
    posterior = torch.tensor([[0.90, 0.09, 0.01], [0.50, 0.40, 0.10], [0.01, 0.98, 0.01]])
    assert assign_by_cost(posterior, posterior.log(), room(1, 1, 1)).tolist() == [0, 2, 1]


@pytest.mark.parametrize("K", [2, 3, 5])
@pytest.mark.parametrize("ties", ["many", "saturated", "leaning", "none"])
def test_a_large_cohort_is_placed_as_well_as_by_scipy(K, ties):
    """1,200 participants: the sum of log-posteriors is that of the Hungarian method with a column for every place."""
    from scipy.optimize import linear_sum_assignment

    m = 1200
    g = torch.Generator().manual_seed(K)
    joint = torch.randint(-3, 4, (m, K), generator=g).double()
    if ties in ("leaning", "none"):
        joint = 3 * torch.randn(m, K, generator=g, dtype=f64)
        joint[:, 0] += 9 * (ties == "leaning")  # nearly everyone wants the first
        posterior = joint.softmax(1)
    else:
        weight = torch.randint(1, 5 if ties == "many" else 2, (m, K), generator=g).double()
        posterior = weight / weight.sum(1, keepdim=True)
    counts = capacities(torch.arange(1.0, K + 1) / sum(range(1, K + 1)), m)
    place = assign_by_cost(posterior, joint, counts)
    assert torch.equal(torch.bincount(place, minlength=K), counts)
    logs = posterior.clamp(min=solver.LEAST_POSTERIOR).log().numpy()
    rows, columns = linear_sum_assignment(logs[:, np.repeat(np.arange(K), counts.numpy())], maximize=True)
    best = logs[:, np.repeat(np.arange(K), counts.numpy())][rows, columns].sum()
    assert logs[np.arange(m), place.numpy()].sum() == pytest.approx(best, rel=1e-12, abs=1e-9)


# -- edges ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1e-300, 1e-30, 1.0, 1e5, 1e300])
def test_log_joints_of_any_size_decide(scale):
    """Saturated posteriors; what participant i loses by leaving component 0 is 3, 1 and 2, in units of `scale`."""
    posterior = torch.tensor([[1.0, 0.0, 0.0]], dtype=f64).repeat(3, 1)
    joint = scale * torch.tensor([[0.0, -3.0, -3.5], [0.0, -1.0, -1.5], [0.0, -2.0, -2.5]], dtype=f64)
    assert assign_by_cost(posterior, joint, room(2, 1, 0)).tolist() == [0, 1, 0]
    assert assign_by_rank(posterior[:, :2], joint[:, :2], room(2, 1)).tolist() == [0, 1, 0]


def test_posteriors_are_told_apart_down_to_the_floor_and_not_below():
    """What the log-odds say against it counts only where posteriors are equal, or both below 1e-12."""
    odds = torch.tensor([[0.0, -9.0, 0.0], [0.0, -1.0, 0.0]])
    for low, lower, leaves in ((1e-6, 1e-9, 0), (1e-11, 0.9e-11, 0), (1e-13, 1e-20, 1), (0.0, 0.0, 1)):
        posterior = torch.tensor([[1.0, low, 0.0], [1.0, lower, 0.0]], dtype=f64)
        assert assign_by_cost(posterior, odds, room(1, 1, 0)).tolist()[leaves] == 1


def test_log_odds_count_before_ids_in_a_large_cohort():
    """By id the last participant would leave; the log-odds of the first are better by the least that a float tells."""
    posterior = torch.tensor([[1.0, 0.0, 0.0]], dtype=f64).repeat(3000, 1)
    joint = torch.tensor([[0.0, -1.0, -1.0]], dtype=f64).repeat(3000, 1)
    joint[0, 1] += 2.0**-53
    assert assign_by_cost(posterior, joint, room(2999, 1, 0)).tolist() == [1] + [0] * 2999
    joint[0, 1] -= 2.0**-53
    assert assign_by_cost(posterior, joint, room(2999, 1, 0)).tolist() == [0] * 2999 + [1]
