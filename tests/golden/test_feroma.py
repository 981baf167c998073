"""FEROMA by pencil and paper, on quadratics, and against plain loops in torch and numpy: float64, to 1e-6.

The model is one number w, the loss of a row (w x - y)^2 / 2, the rate 1/2, a batch all rows. So a client whose rows are
x = 1, y = 0 sends w / 2, and one whose rows are x = 2, y = 4 sends w - (2 (2 w - 4)) / 2 = 4 - w. The feature of a row
is x. There is one class, 0, and one component, which is x less the mean c of the random points.

A profile is (mean - c, deviation, mean of label 0 - c, deviation of label 0), the last two -1 if there are fewer than
two such rows. The first client has (1 - c, 0, 1 - c, 0), the second (2 - c, 0, -1, -1). Scaled by group these are
(0, 0, 1, 1) and (1, 0, 0, 0), whatever c is, because 1 - c > -1: the least number is 0, the range 1.
"""

import copy
from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedtide.algorithms.feroma import feroma
from fedtide.clusters.profile import Profiler, mean_and_deviation, predict_by_profile
from fedtide.cohorts import Everyone
from fedtide.core.base import Moment
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.trees import same
from fedtide.learn.local import LocalTrainer
from fedtide.learn.task import Task
from helpers.naive_profiles import naive_profile, scaled_by_group
from helpers.quadratics import Half
from helpers.stages import holding, rounds
from helpers.toys import network_of, played, toy, trained_plainly

LOCAL = {"lr": 0.1, "batch_size": 4, "epochs": 2}
HALF = LocalTrainer(lr=0.5, batch_size=0)


def one() -> nn.Module:
    """A weight of 1, whatever the key."""
    head = nn.Linear(1, 1, bias=False)
    nn.init.ones_(head.weight)
    return nn.Sequential(OrderedDict(head=head))


TASK = Task(one, Half(), torch.float64, example=torch.ones(1, 1, dtype=torch.float64))
LOW, HIGH, BOTH = ([1, 1], [0, 0]), ([2, 2], [4, 4]), ([1, 2], [0, 4])


def people(*held):
    rows = [(torch.tensor(x, dtype=torch.float64)[:, None], torch.tensor(y, dtype=torch.int64)) for x, y in held]
    return holding(rows, classes=5)


def states(stages, **options):
    algorithm = feroma(TASK, HALF, **{"warmup": 1, "halves": 0, "cohort": Everyone(), **options})
    return algorithm, [state for state, _, _ in rounds(algorithm, [people(*stage) for stage in stages])]


def trained(state):
    return state.trained.models.flatten().tolist()


def test_two_clients_that_swap_their_rows_take_each_others_models():
    """Warm-up: w = 1 becomes 1/2 and 3, so g = 7/4. Both train it: 7/8, 9/4. Their profiles are sqrt(3) apart.

    Then they swap rows: the first client is at distance 0 from the second of before. It receives 9/4 + 1e-8 of the
    distance to 7/8 at most, and sends 4 - 9/4 = 7/4. The second receives 7/8 and sends 7/16.

    Then the first holds a row of each: x = 1, 2, so its profile is (3/2 - c, 1/2, -1, -1), scaled (1/2, 1/2, 0, 0). It
    is sqrt(1/2) from the first and sqrt(5/2) from the second client of before, with 7/4 and 7/16. Its step is
    w - (w + 2 (2 w - 4)) / 4 = 2 - w / 4.
    """
    _, (warm, first, second, third) = states([(LOW, HIGH), (LOW, HIGH), (HIGH, LOW), (BOTH, LOW)])
    assert float(warm.weights.params["head.weight"]) == 7 / 4
    assert trained(warm) == []
    assert same(first.weights, warm.weights)
    assert trained(first) == [7 / 8, 9 / 4]
    assert trained(second) == pytest.approx([7 / 4, 7 / 16], abs=1e-8)
    near, far = (1 / 2) ** -0.5, (5 / 2) ** -0.5
    mixed = (near * 7 / 4 + far * 7 / 16) / (near + far)
    assert trained(third) == pytest.approx([2 - mixed / 4, 7 / 32], abs=1e-8)


def test_rows_weigh_clients():
    """If all profiles are equal, 7/8 with three rows and 9/4 with two mix as 3 to 2, and LOW halves the mixture."""
    algorithm, (_, state) = states([(LOW, HIGH)] * 2)
    state = replace(state, trained=replace(state.trained, weight=torch.tensor([3.0, 2.0]).double()))
    state = replace(state, profiles=state.profiles[[0, 0]])
    *_, fleet = next(rounds(algorithm, [people(LOW, LOW)]))
    fleet.begin(Moment(2, 3, 0.0))
    state, _ = algorithm.round(state, fleet, Rng(0))
    assert trained(state) == pytest.approx([(3 * 7 / 8 + 2 * 9 / 4) / 5 / 2] * 2, rel=1e-12)


def test_a_newcomer_finds_a_model_without_labels():
    """Rows x = 1, 1 are at the profile of LOW, x = 2, 2 at that of HIGH, and decide together: x = 1, 2, 2 is HIGH.

    Their mean is 5/3 - c, scaled 2/3, and their deviation sqrt(2) / 3: nearer to 1 than to 0.
    """
    algorithm, (_, state) = states([(LOW, HIGH)] * 2)
    payload, slot = algorithm.serve(state, torch.tensor([7, 1]))
    assert slot.tolist() == [2, 1]
    models = [float(model.params["head.weight"]) for model in payload[2].models]
    assert models == [7 / 8, 9 / 4, (7 / 8 + 9 / 4) / 2]
    assert payload[2].usual == 2
    assert [float(part.models[0].params["head.weight"]) for part in payload[:2]] == models[:2]
    x, owner = torch.tensor([1.0, 2, 2, 1, 2, 1, 2]).double()[:, None], torch.tensor([0, 1, 2, 0, 1, 2, 2])
    assert predict_by_profile(Profiler(TASK))(payload[2], [None] * 4, x, owner).choice.tolist() == [0, 1, 1, 0, 1, 1, 1]
    assert algorithm.predict(payload[2], [None] * 4, x, owner).choice is None
    assert algorithm.adapt is None
    payload, slot = feroma(TASK, HALF, cohort=Everyone(), judged_by="profile").serve(state, torch.tensor([7, 1]))
    assert (len(payload), slot.tolist()) == (1, [0, 0])
    assert algorithm.predict(payload[0], [None] * 2, x[:4], torch.tensor([0, 1, 1, 0])).told is not None


def test_in_the_warm_up_everyone_is_served_one_model():
    algorithm, (state,) = states([(LOW, HIGH)])
    payload, slot = algorithm.serve(state, torch.tensor([0, 9]))
    assert (len(payload), slot.tolist()) == (1, [0, 0])


def test_a_layer_that_the_model_lacks_is_refused():
    with pytest.raises(FedtideError, match=r"^feroma\.layer: found 'tail', allowed: head"):
        feroma(TASK, HALF, layer="tail")


# -- against plain loops -----------------------------------------------------------------------------------------------


def naive(population, model, count, warm, cohort, halves):
    """Trained models, by client, of the last round."""
    frozen, last, scales = model, {}, None
    for r in range(count):
        moment = Moment(r, count, float(r))
        clients = population.arrivals(cohort, moment).tolist()
        shards = {i: population.shard(i, moment) for i in clients}
        shards = {i: shard for i, shard in shards.items() if len(shard)}
        if r < warm:
            own = {i: trained_plainly(frozen, shard, Rng(0).at(r, i, "train")) for i, shard in shards.items()}
            frozen = mixed(own, {i: len(shard) for i, shard in shards.items()}, frozen)
            continue
        profiles = {}
        for i, shard in shards.items():
            rows = shard.val if shard.val is not None and len(shard.val) else shard
            profiles[i] = naive_profile(frozen, rows.x, rows.y, Rng(0).at(r, i, "profile"), halves)
        scaled, scales = scaled_by_group(profiles, scales)
        now = {}
        for i, shard in shards.items():
            start = frozen
            if last:
                parts = {j: n / (np.linalg.norm(scaled[i] - q) + 1e-8) for j, (_, q, n) in last.items()}
                start = mixed({j: own for j, (own, _, _) in last.items()}, parts, frozen)
            now[i] = trained_plainly(start, shard, Rng(0).at(r, i, "train")), scaled[i], len(shard)
        last = now
    return {i: own for i, (own, _, _) in last.items()}


def mixed(models, parts, like):
    new, total = copy.deepcopy(like), sum(parts.values())
    with torch.no_grad():
        for name, value in new.state_dict().items():
            value.copy_(sum(parts[i] / total * model.state_dict()[name] for i, model in models.items()))
    return new


@pytest.mark.parametrize(("halves", "warm"), [(3, 2), (0, 0)])
def test_it_is_the_plain_loop(halves, warm):
    data = {"partition": {"kind": "dirichlet-class", "clients": 8, "alpha": 1.0, "min_samples": 5}}
    shift = {"who": {"kind": "periodic", "period": 4}, "how": {"kind": "label-swaps", "every": 2, "fraction": 0.5}}
    options = {"warmup": warm, "halves": halves, "local": LOCAL, "cohort": 5}
    run = played(toy("feroma", options, rounds=7, data=data, shift=shift, precision="fp64"))
    start = network_of(run.steps[0].received.weights)
    expected = naive(run.host.population, start, 7, warm, 5, halves)
    assert run.state.trained.clients.tolist() == sorted(expected)
    assert len(expected) >= 3
    for row, client in zip(run.state.trained.models, sorted(expected), strict=True):
        wanted = torch.cat([value.flatten() for value in expected[client].state_dict().values()])
        torch.testing.assert_close(row, wanted, rtol=0, atol=1e-6)


def test_profiles_are_means_and_deviations_and_then_those_of_each_label():
    run = played(toy("feroma", {}, precision="fp64"), rounds=1)
    shard, weights = run.host.population.shard(1, Moment(0, 1)), run.steps[0].received.weights
    for halves in (0, 3):
        ours = Profiler(run.host.algorithm.task, halves=halves)(weights, shard, Rng(7))
        theirs = naive_profile(network_of(weights), shard.x, shard.y, Rng(7), halves)
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=0, atol=1e-6)
        z = Profiler(run.host.algorithm.task).features(weights, shard.x)
        assert halves or same(mean_and_deviation(z).flatten(), ours[:6])


# -- reductions --------------------------------------------------------------------------------------------------------


def reduced(name, options, profiles=None, count=6):
    """Play on steady clients, with profiles replaced before each round."""
    options = {"cohort": "everyone", "local": LOCAL, **options}
    run = played(toy(name, options, shift={"who": "always"}, precision="fp64"), rounds=1)
    algorithm, fleet, state = run.host.algorithm, run.fleet, run.steps[0].received
    for number in range(count):
        fleet.begin(Moment(number, count, float(number)))
        state, _ = algorithm.round(state, fleet, Rng(0).at(number, "server"))
        yield state


def test_with_equal_profiles_it_is_fedavg_for_each_client(monkeypatch):
    """The mean of what clients trained in a round is then FedAvg's model, to rounding."""
    monkeypatch.setattr(Profiler, "__call__", lambda self, model, shard, rng: torch.zeros(24, dtype=torch.float64))
    ours, theirs = reduced("feroma", {"warmup": 2}), reduced("fedavg", {})
    for number, (state, plain) in enumerate(zip(ours, theirs, strict=True)):
        if number < 2:
            assert same(state.weights, plain.weights)
            continue
        part = state.trained.weight / state.trained.weight.sum()
        wanted = torch.cat([value.flatten() for value in plain.weights.params.values()])
        torch.testing.assert_close(part @ state.trained.models, wanted, rtol=0, atol=1e-12)


def test_with_profiles_far_apart_each_client_trains_alone(monkeypatch):
    """Each goes on from its own model, as if it were the only client of FedAvg after the warm-up."""

    def profile(self, model, shard, rng):
        return torch.full((24,), float(shard.ids.min()), dtype=torch.float64)

    monkeypatch.setattr(Profiler, "__call__", profile)
    before, last = list(reduced("feroma", {"warmup": 1}))[-2:]
    run = played(toy("feroma", {"cohort": "everyone"}, shift={"who": "always"}, precision="fp64"), rounds=1)
    for client, row, start in zip(
        last.trained.clients.tolist(), last.trained.models, before.trained.models, strict=True
    ):
        model = network_of(last.weights)
        with torch.no_grad():
            sizes = [value.numel() for value in model.state_dict().values()]
            for value, part in zip(model.state_dict().values(), start.split(sizes), strict=True):
                value.copy_(part.view_as(value))
        shard = run.host.population.shard(client, Moment(5, 6, 5.0))
        own = trained_plainly(model, shard, Rng(0).at(5, client, "train"))
        wanted = torch.cat([value.flatten() for value in own.state_dict().values()])
        torch.testing.assert_close(row, wanted, rtol=0, atol=1e-5)


def test_sequences_are_refused_because_a_profile_is_of_the_rows_of_each_label():
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.squeeze, self.head = nn.Embedding(5, 4), nn.Linear(12, 6), nn.Linear(2, 5)

        def forward(self, x):
            return self.head(self.squeeze(self.embedding(x).flatten(1)).unflatten(1, (3, 2)))

    task = Task(Reader, example=torch.zeros(1, 3, dtype=torch.int64))
    with pytest.raises(FedtideError, match="feroma: found rows that are sequences, allowed: rows with"):
        feroma(task, HALF, layer="squeeze")
