"""FedTKM: what its specification says, one statement after the other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedtide.algorithms.fedtkm import Sent, fedtkm
from fedtide.cohorts import Arrivals
from fedtide.core.base import Moment, Shard, Sum
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.trees import same
from fedtide.learn.branched_task import logits_and_features, with_branches
from fedtide.learn.local import LocalTrainer
from fedtide.learn.server import SGD
from fedtide.mixtures.priors import Block, Cosine, EMOnly, Linear, Uniform
from fedtide.mixtures.step_size import Certainty, Integral, Leaky, PerPeriod
from helpers.answering import DIMS, WIDTH, Answering, begun, identity, moving, plain_names, still, task
from helpers.toys import played, toy

KERAS = {"kind": "keras-adam", "lr": 0.05, "eps": 1e-4}
DATA = {"partition": {"kind": "dirichlet-class", "clients": 8, "alpha": 1.0, "min_samples": 5}}


def server(prior, **options):
    """The algorithm with plain SGD on the server, and its first state."""
    algorithm = fedtkm(task(), prior=prior, server=SGD(), cohort=Arrivals(4), **options)
    return algorithm, begun(algorithm)


def after(algorithm, state, nearest, rows=(1.0, 1.0, 1.0, 1.0), features=None, round=0):
    """The state and facts after a round in which participant i was nearest to mode nearest[i]."""
    r = torch.nn.functional.one_hot(torch.tensor(nearest), len(state.log_alpha)).double()
    n = torch.tensor(rows, dtype=torch.float64)
    z = torch.ones(len(nearest), state.centers.shape[1], dtype=torch.float64) if features is None else features
    total = {
        "delta": Sum(still(state.weights), 1.0),
        "loss": Sum(1.0, 1.0),
        "modes": Sum(r.sum(0), float(len(r))),
        "branches": Sum(r.sum(0), float(len(r))),
        "features": [Sum((n * mine) @ z, float(n @ mine)) if mine.any() else None for mine in r.T],
    }
    return algorithm.round(state, Answering(total, round=round), Rng(0))


def client(points, log_alpha=(0.0, 0.0), count=7, seed=2, local=None, **options):
    """Run one client's work and return its answer; also its rows and what it received."""
    options = {"prior": Linear(256), **options}
    algorithm = fedtkm(task(), local or LocalTrainer(0.01, batch_size=0), **options)
    state = begun(algorithm)
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, DIMS, generator=draw, dtype=torch.float64)
    shard = Shard(x, torch.randint(3, (count,), generator=draw), torch.arange(count))
    payload = Sent(
        state.weights, torch.as_tensor(points, dtype=torch.float64), torch.tensor(log_alpha, dtype=torch.float64)
    )
    return algorithm.works["train"](payload, None, shard, Moment(0, 10), Rng(0).at(0, 3, "train")), shard, payload


# -- alpha -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("s", range(9))
@pytest.mark.parametrize("schedule", ["zero-mid", "constant"])
def test_as_many_as_expected_leave_alpha(s, schedule):
    """T = 8 and m = 4: q(s) m is whole, so that the share can be met exactly."""
    algorithm, state = server(Linear(8), alpha=Integral(0.5, schedule))
    state = replace(state, log_alpha=torch.tensor([0.0, 0.3], dtype=torch.float64))
    first = round(4 * abs(2 * (s % 8) / 8 - 1))
    new, facts = after(algorithm, state, [0] * first + [1] * (4 - first), round=s)
    assert facts["nearest"].tolist() == [first / 4, 1 - first / 4]
    assert new.log_alpha.tolist() == pytest.approx([0.0, 0.3], abs=1e-15)


@pytest.mark.parametrize("s", [0, 1, 3, 4, 5, 7])
@pytest.mark.parametrize("first", range(5))
def test_alpha_follows_the_prior(s, first):
    """log alpha_2 += eta(t) (q - qbar), so it rises where the prior expects more of the first mode."""
    algorithm, state = server(Linear(8), alpha=Integral(0.1))
    new, facts = after(algorithm, state, [0] * first + [1] * (4 - first), round=s)
    q, qbar = abs(2 * s / 8 - 1), first / 4
    moved = float(new.log_alpha[1])
    assert new.log_alpha[0] == 0.0
    assert moved == pytest.approx(2 * abs(0.5 - q) * 0.1 * (q - qbar), abs=1e-15)
    assert (moved > 0) == (q > qbar)
    assert facts["alpha"].tolist() == pytest.approx([1.0, float(torch.tensor(moved, dtype=torch.float64).exp())])


@pytest.mark.parametrize(("s", "share_of_eta"), [(0, 1.0), (1, 0.5), (2, 0.0), (3, 0.5), (4, 1.0), (6, 0.0)])
def test_the_step_is_eta_at_the_peaks_and_0_in_between(s, share_of_eta):
    """Everyone at the mode that is not expected moves alpha by the largest step."""
    algorithm, state = server(Linear(8), alpha=Integral(0.02))
    q = abs(2 * s / 8 - 1)
    nearest = 1 if q >= 0.5 else 0
    new, _ = after(algorithm, state, [nearest] * 4, round=s)
    gap = q - (1 - nearest)
    assert float(new.log_alpha[1]) == pytest.approx(share_of_eta * 0.02 * gap, abs=1e-15)
    if share_of_eta == 1.0:
        assert abs(float(new.log_alpha[1])) == pytest.approx(0.02, abs=1e-15)


def test_the_constant_schedule_moves_at_half_time_too():
    algorithm, state = server(Linear(8), alpha=Integral(0.1, "constant"))
    new, _ = after(algorithm, state, [0] * 4, round=2)
    assert float(new.log_alpha[1]) == pytest.approx(0.1 * (0.5 - 1.0), abs=1e-15)


@pytest.mark.parametrize(("nearest", "bound"), [(1, 5.0), (0, -5.0)])
def test_alpha_stays_positive_and_bounded(nearest, bound):
    prior = Block(1000) if nearest else Block(1000, phase=500)
    algorithm, state = server(prior, alpha=Integral(0.7))
    for _ in range(20):
        state, facts = after(algorithm, state, [nearest] * 4)
        assert (facts["alpha"] > 0).all()
    assert state.log_alpha.tolist() == [0.0, bound]


@pytest.mark.parametrize("distance", ["mean", "vote"])
def test_a_larger_alpha_sends_more_clients_to_the_first_mode(distance):
    centers = torch.stack([torch.full((WIDTH,), 0.2), torch.full((WIDTH,), 0.4)])
    counts = []
    for log_alpha in (-5.0, *(i / 40 for i in range(-16, 5)), 5.0):
        answers = [client(centers, (0.0, log_alpha), seed=s, distance=distance)[0] for s in range(12)]
        counts.append(sum(int(a.notes.branch) == 0 for a in answers))
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert counts[-1] == 12
    assert len(set(counts)) > 3


def test_three_factors_move_against_their_excess_relative_to_the_first():
    algorithm, state = server(Linear(12), branches=3, alpha=Integral(0.1, "constant"))
    new, facts = after(algorithm, state, [1, 1, 2, 1], round=0)
    q, qbar = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, 0.75, 0.25])
    moved = -0.05 * (q - qbar)
    assert facts["prior"].tolist() == q.tolist()
    assert new.log_alpha.tolist() == pytest.approx((moved - moved[0]).tolist(), abs=1e-8)


@pytest.mark.parametrize("prior", [EMOnly(), Uniform()])
def test_without_a_prior_alpha_stays(prior):
    algorithm, state = server(prior, alpha=Integral(0.5))
    new, _ = after(algorithm, state, [0, 0, 0, 1])
    assert new.log_alpha.tolist() == [0.0, 0.0]


def test_a_leaky_alpha_forgets_a_twentieth_of_its_logarithm_in_each_round():
    algorithm, state = server(Linear(8), alpha=Leaky())
    state = replace(state, log_alpha=torch.tensor([0.0, 0.4], dtype=torch.float64))
    new, _ = after(algorithm, state, [0, 0, 1, 1], round=0)
    assert float(new.log_alpha[1]) == pytest.approx(0.95 * 0.4 + 0.02 * 0.5, abs=1e-15)
    new, _ = after(algorithm, state, [0, 0, 1, 1], round=2)
    assert float(new.log_alpha[1]) == pytest.approx(0.95 * 0.4, abs=1e-15)


def test_steps_for_a_period_are_shorter_in_a_longer_one():
    for period in (8, 64):
        algorithm, state = server(Linear(period), alpha=PerPeriod(0.8))
        new, _ = after(algorithm, state, [1, 1, 1, 1], round=0)
        assert float(new.log_alpha[1]) == pytest.approx(0.8 / period, abs=1e-15)


@pytest.mark.parametrize("prior", [EMOnly(), Uniform(), Linear("1d")])
def test_steps_for_a_period_need_one_in_rounds(prior):
    with pytest.raises(FedtideError) as error:
        server(prior, alpha=PerPeriod())
    allowed = f"'leaky' or 'integral': prior = '{prior.kind}' has no period in rounds"
    assert str(error.value) == f"alpha: found 'per-period', allowed: {allowed}"


@pytest.mark.parametrize("alpha", [Integral(0.5), Leaky(0.5)])
def test_what_the_rule_leaves_is_sent(alpha):
    algorithm, state = server(Linear(8), alpha=alpha)
    new, facts = after(algorithm, state, [1] * 4, round=0)
    assert facts["alpha"].tolist() == pytest.approx(new.log_alpha.exp().tolist())
    assert float(new.log_alpha[1]) == pytest.approx(0.5, abs=1e-15)


# -- who is nearest ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("distance", ["mean", "vote"])
@pytest.mark.parametrize("count", [1, 7, 24, 30, 200])
def test_with_both_centers_alike_everyone_goes_to_the_second_branch(distance, count):
    """Branch 1 needs a strictly smaller distance, for the choice and for what is sent; more rows than 25 too."""
    for seed in range(4):
        answer, _, _ = client([[0.3] * WIDTH] * 2, count=count, seed=seed, distance=distance)
        assert int(answer.notes.branch) == 1
        assert answer.total["modes"].value.tolist() == [0.0, 1.0]
        assert list(answer.total["features"].parts) == [1]


@pytest.mark.parametrize("distance", ["mean", "vote"])
def test_and_so_in_a_whole_federation(distance):
    run = played(toy("fedtkm", {"distance": distance}), rounds=1)
    start = replace(run.steps[0].received, centers=torch.zeros(2, 5, dtype=torch.float64))
    run.fleet.begin(Moment(1, 6, 1.0))
    _, facts = run.host.algorithm.round(start, run.fleet, Rng(0).at(1, "server"))
    assert facts["nearest"].tolist() == [0.0, 1.0]
    assert {int(note.branch) for note in run.fleet.queries[-1].notes.values()} == {1}


def test_distances_are_means_of_norms_and_votes_count_rows():
    """Three rows near the second center and one far off: the mean says 1, the vote says 2."""
    centers = torch.tensor([[0.0, 4.0], [0.0, 0.0]], dtype=torch.float64)
    x = torch.tensor([[0.0, 1.9], [0.0, 1.9], [0.0, 1.9], [0.0, 9.0]], dtype=torch.float64)
    shard = Shard(x, torch.tensor([0, 1, 0, 1]), torch.arange(4))
    for distance, expected in (("mean", 0), ("vote", 1)):
        algorithm = fedtkm(identity(), LocalTrainer(1e-9, batch_size=0), Linear(256), distance=distance)
        state = begun(algorithm)
        payload = Sent(state.weights, centers, torch.zeros(2, dtype=torch.float64))
        answer = algorithm.works["train"](payload, None, shard, Moment(0, 10), Rng(0))
        assert int(answer.notes.branch) == expected, distance
    # Not squared: distances 3, 3 from the first, 0.5 and 5.4 from the second are nearer to the second in the mean only.
    x = torch.tensor([[0.0, 3.0], [0.0, -3.0]], dtype=torch.float64)
    centers = torch.tensor([[0.0, 0.0], [0.0, 2.5]], dtype=torch.float64)
    shard = Shard(x, torch.tensor([0, 1]), torch.arange(2))
    algorithm = fedtkm(identity(), LocalTrainer(1e-9, batch_size=0), Linear(256))
    payload = Sent(begun(algorithm).weights, centers, torch.tensor([0.0, 0.05], dtype=torch.float64))
    answer = algorithm.works["train"](payload, None, shard, Moment(0, 10), Rng(0))
    means = (3 + 3) / 2, 1.0512710963760241 * (0.5 + 5.5) / 2
    assert int(answer.notes.branch) == (0 if means[0] < means[1] else 1) == 0


def test_half_of_the_votes_are_not_enough_for_the_first_branch():
    centers = torch.tensor([[0.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    x = torch.tensor([[0.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    algorithm = fedtkm(identity(), LocalTrainer(1e-9, batch_size=0), Linear(256), distance="vote")
    payload = Sent(begun(algorithm).weights, centers, torch.zeros(2).double())
    for rows, expected in ((x, 1), (torch.cat([x, x[:1]]), 0), (torch.cat([x, x[1:]]), 1)):
        shard = Shard(rows, torch.arange(len(rows)) % 2, torch.arange(len(rows)))
        answer = algorithm.works["train"](payload, None, shard, Moment(0, 10), Rng(0))
        assert int(answer.notes.branch) == expected


@pytest.mark.parametrize("distance", ["mean", "vote"])
@pytest.mark.parametrize("factor", [2.0**-10, 0.3, 1.0, 7.0, 1e4])
def test_scaling_features_and_centers_leaves_who_is_nearest(distance, factor):
    draw = torch.Generator().manual_seed(4)
    centers = torch.tensor([[0.1, 0.0], [1.0, 0.9]], dtype=torch.float64)
    algorithm = fedtkm(identity(), LocalTrainer(1e-12, batch_size=0), Linear(256), distance=distance)
    weights = begun(algorithm).weights
    log_alpha = torch.tensor([0.0, 0.1], dtype=torch.float64)
    branches = []
    for i in range(20):
        x = torch.rand(40, 2, generator=draw, dtype=torch.float64) + 0.05 * i - 0.5
        shard = Shard(factor * x, torch.arange(40) % 2, torch.arange(40))
        payload = Sent(weights, factor * centers, log_alpha)
        answer = algorithm.works["train"](payload, None, shard, Moment(0, 10), Rng(0))
        far = (x[:, None] - centers).square().sum(-1).sqrt() * log_alpha.exp()
        first = far.mean(0) if distance == "mean" else -torch.tensor([(far[:, 0] < far[:, 1]).sum(), 20])
        branches.append(int(answer.notes.branch))
        assert branches[-1] == (0 if first[0] < first[1] else 1)
        assert answer.total["modes"].value.tolist() == [1.0 - branches[-1], float(branches[-1])]
    assert len(set(branches)) == 2


# -- centers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("update", ["overwrite", "certainty"])
@pytest.mark.parametrize("empty", [0, 1])
def test_an_empty_cluster_keeps_its_center(update, empty):
    algorithm, state = server(Block(1000, phase=500 * (1 - empty)), update=moving(update))
    new, _ = after(algorithm, state, [1 - empty] * 4)
    assert torch.equal(new.centers[empty], state.centers[empty])
    assert new.centers[1 - empty].tolist() == pytest.approx([1.0] * WIDTH)
    assert new.started.tolist() == [empty == 1, empty == 0]


def test_centers_are_means_over_the_rows_of_their_members():
    draw = torch.Generator().manual_seed(0)
    z = torch.rand(4, WIDTH, generator=draw, dtype=torch.float64)
    algorithm, state = server(Linear(8))
    new, _ = after(algorithm, state, [0, 1, 0, 1], rows=(1.0, 2.0, 3.0, 5.0), features=z, round=1)
    torch.testing.assert_close(new.centers[0], (z[0] + 3 * z[2]) / 4)
    torch.testing.assert_close(new.centers[1], (2 * z[1] + 5 * z[3]) / 7)


def test_certain_centers_move_only_while_their_mode_is_expected():
    """a_k = a0 max(0, 2 q_k - 1); the first time all the way."""
    algorithm, state = server(Linear(8), update=Certainty(a0=0.4))
    once, _ = after(algorithm, state, [0, 1, 0, 1], round=1)  # q = 3/4
    assert once.centers[0].tolist() == pytest.approx([1.0] * WIDTH)
    assert torch.equal(once.centers[1], state.centers[1])
    twos = torch.full((4, WIDTH), 2.0, dtype=torch.float64)
    twice, _ = after(algorithm, once, [0, 1, 0, 1], features=twos, round=1)
    torch.testing.assert_close(twice.centers[0], torch.full((WIDTH,), 1.2, dtype=torch.float64))
    half, _ = after(algorithm, twice, [0, 1, 0, 1], round=2)
    assert torch.equal(half.centers, twice.centers)
    night, _ = after(algorithm, half, [0, 1, 0, 1], features=twos, round=4)
    assert night.centers[1].tolist() == pytest.approx([2.0] * WIDTH)
    assert torch.equal(night.centers[0], half.centers[0])


def test_certain_centers_move_by_their_share_under_a_uniform_prior():
    algorithm, state = server(Uniform(), update=Certainty(a0=0.4))
    new, _ = after(algorithm, state, [0, 1, 0, 1])
    assert not torch.equal(new.centers, state.centers)


def test_certain_centers_move_by_their_share_without_a_prior():
    algorithm, state = server(EMOnly(), update=Certainty(a0=0.4))
    once, _ = after(algorithm, state, [0, 1, 0, 1])
    twos = torch.full((4, WIDTH), 2.0, dtype=torch.float64)
    twice, _ = after(algorithm, once, [0, 1, 0, 1], features=twos)
    torch.testing.assert_close(twice.centers, torch.full((2, WIDTH), 1.2, dtype=torch.float64))


# -- what travels ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"distance": "vote", "update": Certainty(), "max_update_norm": 0.5}])
def test_it_runs_on_a_fleet_that_refuses_to_reveal(options):
    experiment = toy("fedtkm", options)
    alone = played(experiment, sums_only=True)
    assert alone.host.algorithm.traits.reveals == ()
    assert same(alone.state, played(experiment).state)
    answer, _, _ = client([[0.0] * WIDTH] * 2, **options)
    assert answer.rows == {}
    assert answer.memory is None
    with pytest.raises(FedtideError, match="sums only"):
        played(toy("fedtem"), sums_only=True, rounds=1)


def test_what_is_sent_by_hand():
    answer, shard, payload = client([[0.1] * WIDTH, [2.0] * WIDTH], local=LocalTrainer(0.1, batch_size=3, epochs=2))
    delta = answer.total["delta"].value
    weights = replace(payload.weights, params={n: p + delta.params[n] for n, p in payload.weights.params.items()})
    _, z = logits_and_features(with_branches(task(), "head", 2), weights, shard.x)
    far = torch.stack([(z - c).norm(dim=1).mean() for c in payload.centers])
    r = [1.0, 0.0] if far[0] < far[1] else [0.0, 1.0]
    total = answer.total
    assert (total["modes"].value.tolist(), total["modes"].weight) == (r, 1.0)
    assert list(total["features"].parts) == [0]
    torch.testing.assert_close(total["features"].parts[0].value, z.mean(0))
    assert total["features"].parts[0].weight == 7.0
    assert total["delta"].weight == 7.0
    assert r == [1.0, 0.0]


@pytest.mark.parametrize("largest", [1e-3, 0.05, 1e6])
def test_clipping_bounds_the_norm_and_keeps_the_direction(largest):
    free, _, _ = client([[0.0] * WIDTH, [1.0] * WIDTH], local=LocalTrainer(0.5, batch_size=2, epochs=3))
    bounded, _, _ = client(
        [[0.0] * WIDTH, [1.0] * WIDTH], local=LocalTrainer(0.5, batch_size=2, epochs=3), max_update_norm=largest
    )
    ours, theirs = (
        torch.cat([p.flatten() for p in answer.total["delta"].value.params.values()]) for answer in (bounded, free)
    )
    norm = float(theirs.norm())
    assert float(ours.norm()) == pytest.approx(min(norm, largest), rel=1e-12)
    torch.testing.assert_close(ours, theirs * min(1.0, largest / norm), rtol=1e-12, atol=0)
    # Features are those of the network as it was trained, clipped or not.
    assert same(bounded.total["features"], free.total["features"])


def test_nobody_answered():
    algorithm, state = server(Linear(8))
    assert algorithm.round(state, Answering(None), Rng(0)) == (state, {})


def test_a_client_without_rows_says_nothing():
    algorithm, state = server(Linear(8))
    empty = Shard(torch.zeros(0, DIMS), torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    payload = Sent(state.weights, state.centers, state.log_alpha)
    assert algorithm.works["train"](payload, None, empty, Moment(0, 10), Rng(0)) is None


# -- one branch, inference ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"distance": "vote"}, {"update": "certainty", "rescale": True}])
def test_one_branch_is_fedavg_with_the_same_server_optimizer_bit_for_bit(options):
    ours = played(toy("fedtkm", {"branches": 1, "server": KERAS, **options}, data=DATA))
    theirs = played(toy("fedavg", {"server": KERAS}, data=DATA))
    for mine, other in zip(ours.steps, theirs.steps, strict=True):
        assert same(plain_names(mine.state.weights.params), other.state.weights.params)
        assert mine.facts["loss"] == other.facts["loss"]
        assert mine.state.log_alpha.tolist() == [0.0]


@pytest.mark.parametrize("rescale", [False, True])
@pytest.mark.parametrize("distance", ["mean", "vote"])
def test_at_inference_owners_choose_by_distance_and_alpha_only_where_it_is_wanted(rescale, distance):
    algorithm, state = server(Cosine(8), rescale=rescale, distance=distance)
    levels = torch.tensor([[0.1], [0.35]], dtype=torch.float64).expand(2, WIDTH)
    log_alpha = torch.tensor([0.0, 0.03], dtype=torch.float64)
    state = replace(state, centers=levels, log_alpha=log_alpha)
    payload, slot = algorithm.serve(state, torch.arange(3))
    assert slot is None
    draw = torch.Generator().manual_seed(0)
    x = 1.5 * torch.randn(40, DIMS, generator=draw, dtype=torch.float64)
    owner = torch.arange(40) // 4
    made = algorithm.predict(payload, [None] * 10, x, owner)
    logits, z = logits_and_features(with_branches(task(), "head", 2), state.weights, x)
    far = (z[:, None] - levels).norm(dim=2) * (log_alpha.exp() if rescale else 1.0)
    for i in range(10):
        mine = far[owner == i]
        if distance == "mean":
            k = 0 if mine[:, 0].mean() < mine[:, 1].mean() else 1
        else:
            k = 0 if (mine[:, 0] < mine[:, 1]).sum() > 2 else 1
        assert made.choice[owner == i].unique().tolist() == [k]
        torch.testing.assert_close(made.told[owner == i], logits[k, owner == i].log_softmax(-1))
    assert len(made.choice.unique()) == 2
