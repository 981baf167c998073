"""FLUX-like by pencil and paper, on the quadratics of FEROMA's golden test, and against plain loops, to 1e-6.

A client whose rows are x = 1, y = 0 sends w / 2, and one whose rows are x = 2, y = 4 sends 4 - w. Their scaled profiles
are (0, 0, 1, 1) and (1, 0, 0, 0) if both are there.
"""

from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn

from fedtide.algorithms.flux_like import density_groups, elbow, flux_like
from fedtide.cohorts import Everyone
from fedtide.core.base import Moment
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.learn.local import LocalTrainer
from fedtide.learn.task import Task
from helpers.handmade import By
from helpers.naive_profiles import naive_profile, scaled_by_group
from helpers.quadratics import Half
from helpers.stages import holding, rounds
from helpers.toys import network_of, played, toy, trained_plainly

HALF = LocalTrainer(lr=0.5, batch_size=0)


def one() -> nn.Module:
    """A weight of 1, whatever the key."""
    head = nn.Linear(1, 1, bias=False)
    nn.init.ones_(head.weight)
    return nn.Sequential(OrderedDict(head=head))


TASK = Task(one, Half(), torch.float64, example=torch.ones(1, 1, dtype=torch.float64))
LOW, HIGH, NONE = ([1, 1], [0, 0]), ([2, 2], [4, 4]), ([], [])


def people(*held):
    rows = [(torch.tensor(x, dtype=torch.float64)[:, None], torch.tensor(y, dtype=torch.int64)) for x, y in held]
    return holding(rows, classes=5)


def states(*stages, **options):
    algorithm = flux_like(TASK, HALF, **{"warmup": 1, "cohort": Everyone(), **options})
    return algorithm, [state for state, _, _ in rounds(algorithm, [people(*stage) for stage in stages])]


def models(state):
    return [float(weights.params["head.weight"]) for weights in state.weights]


def test_two_kinds_of_clients_make_two_models():
    """Warm-up: 1 becomes 1/2 and 3, twice each, so g = 7/4. Each nearest profile is at distance 0, so eps = 0.

    From 7/4: 7/8 and 9/4; then 7/16 and 7/4. Clusters are in the order of clients.
    """
    stage = (HIGH, LOW, LOW, HIGH)
    _, (warm, first, second) = states(stage, stage, stage)
    assert models(warm) == [7 / 4]
    assert warm.cluster.tolist() == [-1] * 4
    assert first.cluster.tolist() == second.cluster.tolist() == [0, 1, 1, 0]
    assert (models(first), models(second)) == ([9 / 4, 7 / 8], [7 / 4, 7 / 16])
    assert float(second.places.extractor.params["head.weight"]) == 7 / 4
    wanted = torch.tensor([[1.0, 0, 0, 0], [0, 0, 1, 1]], dtype=torch.float64)
    torch.testing.assert_close(second.places.profiles, wanted, rtol=0, atol=1e-12)


def test_clients_stay_in_their_clusters_whatever_their_rows_become():
    """After the clusters are made all clients hold HIGH: both models go to 4 - w."""
    _, (*_, first, last) = states((LOW, HIGH, LOW), (LOW, HIGH, LOW), (HIGH, HIGH, HIGH))
    assert last.cluster.tolist() == [0, 1, 0]
    assert models(last) == [4 - w for w in models(first)]


def test_newcomers_join_the_nearest_mean_profile_and_those_without_rows_train_nothing():
    """Client 3 has no rows when profiles are asked, and client 4 never has any."""
    stage, later = (LOW, HIGH, LOW, NONE, NONE), (LOW, HIGH, LOW, HIGH, NONE)
    algorithm, (_, first, last) = states(stage, stage, later)
    assert first.cluster.tolist() == [0, 1, 0, -1, -1]
    assert last.cluster.tolist() == [0, 1, 0, 1, -1]
    payload, slot = algorithm.serve(last, torch.tensor([0, 3, 4, 9]))
    assert slot.tolist() == [0, 1, 2, 2]
    x = torch.tensor([1.0, 2.0, 1.0, 2.0]).double()[:, None]
    assert algorithm.predict(payload[2], [None] * 2, x, torch.tensor([0, 1, 0, 1])).choice.tolist() == [0, 1, 0, 1]
    assert algorithm.predict(payload[1], [None] * 2, x, torch.tensor([0, 1, 0, 1])).choice.tolist() == [1, 1, 1, 1]


def test_nobody_answers_when_clusters_are_due():
    by = By(lambda rng, fleet: torch.tensor([0]))
    _, (_, first, second) = states((LOW, HIGH, LOW), (NONE, NONE, NONE), (LOW, HIGH, LOW), cohort=by)
    assert (len(first.weights), len(second.weights)) == (1, 2)


@pytest.mark.parametrize("seed", range(8))
def test_clusters_by_density_at_the_elbow_are_those_of_scikit_learn(seed):
    sklearn = pytest.importorskip("sklearn.cluster")
    draw = np.random.default_rng(seed)
    x = np.concatenate([draw.normal(center, 0.2, (6, 3)) for center in (0.0, 2.0, 9.0)] + [draw.uniform(-9, 9, (3, 3))])
    far = np.linalg.norm(x[:, None] - x[None], axis=-1)
    nearest = np.sort((far + np.diag([np.inf] * len(x))).min(1))
    below = [nearest[0] + (nearest[-1] - nearest[0]) * i / (len(x) - 1) - d for i, d in enumerate(nearest)]
    theirs = sklearn.DBSCAN(eps=nearest[np.argmax(below)] + 1e-12, min_samples=2).fit_predict(x)
    ours = density_groups(torch.from_numpy(x), 1.0)
    theirs[theirs < 0] = np.arange((theirs < 0).sum()) + theirs.max() + 1
    assert ours.tolist() == theirs.tolist()


def test_the_elbow_is_the_farthest_below_the_line_between_the_ends():
    """0, 1, 2, 9 against 0, 3, 6, 9: 2 is the farthest below. A line has no elbow but its end."""
    assert elbow(torch.tensor([9.0, 2.0, 0.0, 1.0])) == 2.0
    assert elbow(torch.tensor([2.0, 2.0, 2.0])) == 2.0
    assert elbow(torch.tensor([1.0, 3.0])) == 3.0
    assert elbow(torch.tensor([7.0])) == 7.0


def test_two_clients_are_one_cluster_however_far_apart():
    """Each is the other's nearest, and both are within the only distance."""
    assert density_groups(torch.tensor([[0.0], [9.0]]), 1.0).tolist() == [0, 0]


def test_one_client_is_one_cluster():
    assert density_groups(torch.ones(1, 4), 1.0).tolist() == [0]


def test_a_layer_that_the_model_lacks_is_refused():
    with pytest.raises(FedtideError, match=r"^flux-like\.layer: found 'tail', allowed: head"):
        flux_like(TASK, HALF, layer="tail")


# -- against plain loops -----------------------------------------------------------------------------------------------


def naive(population, model, count, warm, cohort):
    """The models of clusters, and the cluster of each client."""
    cluster, models, centers = {}, [model.state_dict()], None
    for r in range(count):
        moment = Moment(r, count, float(r))
        shards = {i: population.shard(i, moment) for i in population.arrivals(cohort, moment).tolist()}
        if r >= warm and centers is None:
            frozen = with_state(model, models[0])
            who = population.reachable(moment).tolist()
            profiles = {i: profile_of(population, frozen, i, moment) for i in who}
            scaled, scales = scaled_by_group(profiles)
            label = density_groups(torch.from_numpy(np.stack([*scaled.values()])), 1.0).tolist()
            cluster = dict(zip(scaled, label, strict=True))
            k = max(cluster.values()) + 1
            models = [models[0]] * k
            centers = [np.mean([scaled[i] for i in scaled if cluster[i] == j], axis=0) for j in range(k)]
        if centers is not None:
            for i in shards:
                if i not in cluster:
                    (own,) = scaled_by_group({i: profile_of(population, frozen, i, moment)}, scales)[0].values()
                    cluster[i] = int(np.argmin([np.linalg.norm(own - center) for center in centers]))
        new = []
        for j, old in enumerate(models):
            members = [i for i in shards if cluster.get(i, 0) == j]
            rows = sum(len(shards[i]) for i in members)
            own = [trained_plainly(with_state(model, old), shards[i], Rng(0).at(r, i, "train")) for i in members]
            mean = {
                name: sum(len(shards[i]) / rows * w.state_dict()[name] for i, w in zip(members, own, strict=True))
                for name in old
            }
            new.append(mean if members else old)
        models = new
    return models, cluster


def with_state(model, state):
    model.load_state_dict(state)
    return network_of(type("W", (), {"params": {name: value.clone() for name, value in state.items()}}))


def profile_of(population, frozen, client, moment):
    shard = population.shard(client, moment)
    rows = shard.val if shard.val is not None and len(shard.val) else shard
    return naive_profile(frozen, rows.x, rows.y, None, 0)


@pytest.mark.parametrize("warm", [0, 2])
def test_it_is_the_plain_loop(warm):
    data = {"partition": {"kind": "dirichlet-class", "clients": 8, "alpha": 1.0, "min_samples": 5}}
    options = {"warmup": warm, "cohort": 4, "local": {"lr": 0.1, "batch_size": 4, "epochs": 2}}
    run = played(toy("flux-like", options, rounds=6, data=data, precision="fp64"))
    start = network_of(run.steps[0].received.weights[0])
    expected, cluster = naive(run.host.population, start, 6, warm, 4)
    ours = {i: k for i, k in enumerate(run.state.cluster.tolist()) if k >= 0}
    assert ours == cluster
    assert len(expected) >= 2
    for weights, wanted in zip(run.state.weights, expected, strict=True):
        for name, value in wanted.items():
            torch.testing.assert_close(weights.params[name], value, rtol=0, atol=1e-6)
