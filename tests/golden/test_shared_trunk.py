"""Clusters that share all layers but one, by hand and against a plain gradient step of all clients.

Two clusters, A of three clients and B of one, each sends one participant: trunk 0 in both, heads 0.

| | trunk of its update | head of its update |
| --- | --- | --- |
| A | 1 | 2 |
| B | 5 | -4 |

Each participant stands for the members of its cluster, so the trunk moves by (3 * 1 + 1 * 5) / 4 = 2 (and not by 3,
the mean of the two), and heads by 2 and -4. In the next round, with momentum 0.5, only B sends, trunk 4 and head 2: the
trunk moves by 0.5 * 2 + 4 = 5 to 7 in both models, B's head by 0.5 * -4 + 2 = 0; A's head and its momentum stay.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fedtide.algorithms.cfl import State as CFLState
from fedtide.algorithms.feddrift import State as DriftState
from fedtide.algorithms.feddrift import merge_models, with_new
from fedtide.algorithms.fielding import State as FieldingState
from fedtide.algorithms.fielding import adopt
from fedtide.algorithms.oracle import State, regroup
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.sums import add as add_answer
from fedtide.core.sums import finish
from fedtide.core.trees import same
from fedtide.core.types import Moment, Slotted, Weighted, Weights
from fedtide.learn.server import SGD, Adam
from fedtide.multi.clusters import receive_models, send_models, share_layers, step_models
from fedtide.parts.clusterer import Clustering
from fedtide.runs.preflight import preflight
from helpers.toys import played, toy

MOMENTUM = SGD(momentum=0.5)


def model(trunk: float, head: float) -> Weights:
    return Weights({"trunk.w": torch.full((2,), trunk), "head.w": torch.full((1,), head)})


def sums(*answers: tuple[int, Weights, float], models: int = 2):
    """Sums of updates for each model, as a fleet adds them."""
    total = None
    for k, delta, weight in answers:
        total = add_answer(total, {"delta": Slotted({k: Weighted(delta, weight)}, models)})
    return finish(total)["delta"]


def values(models) -> list[list[float]]:
    return [[float(each.params[name][0]) for name in ("trunk.w", "head.w")] for each in models]


def begin(server=MOMENTUM, *models: Weights) -> State:
    models = models or (model(0.0, 0.0), model(0.0, 0.0))
    return State(models, tuple(map(server.init, models)), torch.tensor([0, 0, 0, 1]))


def test_a_participant_stands_for_the_members_of_its_cluster():
    first = sums((0, model(1.0, 2.0), 1.0), (1, model(5.0, -4.0), 1.0))
    made = step_models(begin(), MOMENTUM, first, own_layer="head", each=torch.tensor([3.0, 1.0]))
    assert values(made.weights) == [[2.0, 2.0], [2.0, -4.0]]
    assert values(step_models(begin(), MOMENTUM, first, own_layer="head").weights) == [[3.0, 2.0], [3.0, -4.0]]
    assert values(step_models(begin(), MOMENTUM, first).weights) == [[1.0, 2.0], [5.0, -4.0]]


def test_of_a_cluster_without_participants_the_head_and_its_momentum_stay():
    first = sums((0, model(1.0, 2.0), 1.0), (1, model(5.0, -4.0), 1.0))
    made = step_models(begin(), MOMENTUM, first, own_layer="head", each=torch.tensor([3.0, 1.0]))
    made = step_models(made, MOMENTUM, sums((1, model(4.0, 2.0), 1.0)), own_layer="head", each=torch.tensor([3.0, 1.0]))
    assert values(made.weights) == [[7.0, 2.0], [7.0, -4.0]]
    assert [[float(memo[name][0]) for name in ("trunk.w", "head.w")] for memo in made.server] == [[5, 2], [5, 0]]


def test_clients_that_weigh_more_count_for_more_members():
    """A: rows 10 and 30 of four members, so 80 in all, mean (10 * 1 + 30 * 3) / 40 = 2.5; B: rows 40 of one member, -1.

    Trunk: (80 * 2.5 - 40) / 120 = 4/3.
    """
    first = sums((0, model(1.0, 0.0), 10.0), (0, model(3.0, 0.0), 30.0), (1, model(-1.0, 0.0), 40.0))
    made = step_models(begin(), SGD(), first, own_layer="head", each=torch.tensor([4 / 2, 1.0]))
    assert [trunk for trunk, _ in values(made.weights)] == pytest.approx([4 / 3, 4 / 3])


def test_running_statistics_are_shared_where_their_layer_is():
    def with_statistics(trunk: float, head: float) -> Weights:
        params = model(0.0, 0.0).params
        return Weights(params, {"trunk.mean": torch.tensor(trunk), "head.mean": torch.tensor(head)})

    state = begin(SGD(), with_statistics(0.0, 0.0), with_statistics(0.0, 9.0))
    changes = sums((0, with_statistics(1.0, 2.0), 1.0), (1, with_statistics(5.0, -4.0), 1.0))
    made = step_models(state, SGD(), changes, own_layer="head", each=torch.tensor([3.0, 1.0]))
    found = [[float(held.buffers[name]) for name in ("trunk.mean", "head.mean")] for held in made.weights]
    assert found == [[2.0, 2.0], [2.0, 5.0]]
    made = step_models(state, SGD(), sums((0, with_statistics(1.0, 2.0), 1.0)), own_layer="head")
    found = [[float(held.buffers[name]) for name in ("trunk.mean", "head.mean")] for held in made.weights]
    assert found == [[1.0, 2.0], [1.0, 9.0]]
    sent = send_models(made.weights, "head")
    assert list(sent[1].params) == ["head.w"]
    assert list(sent[1].buffers) == ["head.mean"]
    assert same(tuple(receive_models(sent)), made.weights)


def test_a_step_that_one_head_cannot_take_leaves_one_trunk():
    """The square of A's head overflows, so Adam does not step A; the trunk is the first model's, in both."""
    server = Adam(0.1)
    huge = Weights({"trunk.w": torch.ones(2), "head.w": torch.full((1,), 1e30)})
    for k in (0, 1):
        made = step_models(begin(server), server, sums((k, huge, 1.0), (1 - k, model(1.0, 1.0), 1.0)), own_layer="head")
        one, two = made.weights
        assert torch.equal(one.params["trunk.w"], two.params["trunk.w"])
        assert float(made.weights[k].params["head.w"]) == 0.0


def test_new_clusters_mix_heads_alone():
    """Heads 0, 3 of clusters {0, 1, 2}, {3} become those of {0, 1}, {2, 3}: 0 and 1.5; the trunk stays."""
    held, x = (model(0.1, 0.0), model(0.1, 3.0)), torch.arange(4.0)[:, None]
    memos = (model(0.7, 1.0).params, model(0.7, 4.0).params)
    state = FieldingState(held, memos, x, torch.tensor([0, 0, 0, 1]), x[:2], x[:2], "l1")
    found = Clustering(torch.tensor([0, 0, 1, 1]), x[:2], "l1", {}, 2)
    made = adopt(state, found, "head")
    assert values(made.weights) == [[pytest.approx(0.1), 0.0], [pytest.approx(0.1), 1.5]]
    assert [float(memo["head.w"][0]) for memo in made.server] == [1.0, 2.5]
    assert all(torch.equal(memo["trunk.w"], memos[0]["trunk.w"]) for memo in made.server)


def test_a_new_group_of_the_oracle_has_the_trunk_and_its_momentum():
    state = State((model(7.0, 1.0),), (model(3.0, 2.0).params,), torch.tensor([0, 0]))
    made = regroup(state, torch.tensor([0, 1]), MOMENTUM, 2, "head")
    assert values(made.weights) == [[7.0, 1.0], [7.0, 1.0]]
    assert [[float(memo[name][0]) for name in memo] for memo in made.server] == [[3.0, 2.0], [3.0, 0.0]]


def drifting(*heads: float) -> DriftState:
    """Three clients with a model each; the run began with trunk 0 and head -1."""
    weights = tuple(model(7.0, head) for head in heads)
    n, clients = len(heads), torch.arange(3)
    return DriftState(
        weights, tuple(model(3.0, 2.0).params for _ in heads), model(0.0, -1.0), 4, clients.clamp(max=n - 1),
        clients >= 0, clients.double(), torch.tensor([True, True, False]), torch.tensor([4, 4, 0]),
        torch.tensor([1.0, 3.0, 0.0]), torch.arange(n), torch.arange(n),
    )  # fmt: skip


def test_a_new_model_of_feddrift_keeps_the_trunk():
    state = drifting(1.0, 5.0, 9.0)
    state = DriftState(**{**vars(state), "model": torch.tensor([0, 1, 1])})
    made = with_new(state, torch.tensor([2]), "start", MOMENTUM, "head")
    assert values(made.weights) == [[7.0, 1.0], [7.0, 5.0], [7.0, -1.0]]
    assert [float(value[0]) for value in made.server[2].values()] == [3.0, 0.0]
    made = with_new(state, torch.tensor([2]), "previous", MOMENTUM, "head")
    assert values(made.weights)[2] == [7.0, 5.0]


def test_merged_models_of_feddrift_keep_the_trunk():
    """Heads 1 and 5 with 1 and 3 pairs: 4; the free place has the head of the run's start."""
    made = merge_models(drifting(1.0, 5.0, 9.0), [0, 1], MOMENTUM, "head")
    assert values(made.weights) == [[7.0, 4.0], [7.0, -1.0], [7.0, 9.0]]
    assert [[float(value[0]) for value in memo.values()] for memo in made.server] == [[3, 0], [3, 0], [3, 2]]


SHARED = {"cluster_layer": "head", "cohort": "everyone", "local": {"lr": 0.5, "batch_size": 0}}
CLUSTERED = {
    "fielding": {
        **SHARED,
        "cohort": {"kind": "uniform", "clients_per_round": 5},
        "reporters": "once",
        "pooling": False,
        "clustering": {"kind": "k-means", "k_min": 3, "k_max": 3},
    },
    "oracle": SHARED,
    "ifca": SHARED,
    "flexcfl": {**SHARED, "clusters": 3, "pretrain": 5, "migrate": None},
    "auxo": {
        **SHARED,
        "pooling": False,
        "split": {"kind": "rounds", "rounds": [1, 2]},
        "min_participants": 2,
        "epsilon": 0.3,
    },
    "cfl": {**SHARED, "split_after": 1, "eps1": 1e9, "eps2": 0.0, "gamma": 0.0},
    "feddrift": {**SHARED, "rounds_per_step": 3, "delta": 0.0, "local": {"lr": 4.0, "batch_size": 0}},
}


def gradients(weights: Weights, x, y):
    """Return minus the gradient of the mean loss of a network with one hidden layer, by its formula."""
    params = {name: p.detach().clone().requires_grad_() for name, p in weights.params.items()}
    hidden = torch.relu(x @ params["dense1.weight"].T + params["dense1.bias"])
    F.cross_entropy(hidden @ params["head.weight"].T + params["head.bias"], y).backward()
    return {name: -p.grad for name, p in params.items()}


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize("name", CLUSTERED)
def test_a_round_is_a_step_of_one_trunk_and_of_each_head(name, weighting):
    """Everybody takes one step on all of its rows: the trunk is that of plain gradient descent, whoever is in what.

    Of Fielding five of eight do, drawn in each cluster, so each of them stands for several.
    """
    options = {**CLUSTERED[name], "weighting": weighting}
    experiment = toy(name, options, precision="fp64", shift={"who": "always"}, rounds=6)
    run = played(experiment, rounds=1)
    several, population, state = 0, run.host.population, run.state
    for now in range(1, 6):
        run.fleet.begin(Moment(now, 6, float(now)))
        received, (state, _) = state, run.host.algorithm.round(state, run.fleet, Rng(0).at(now, "server"))
        if name == "feddrift" and now % 3 == 0:
            continue  # models change before they are trained
        asked = [query for query in run.fleet.queries if query.ask.question == "train"][-1]
        slot, lr = asked.ask.slot, options["local"]["lr"]
        if slot is None:  # clients choose
            slot = torch.tensor([int(asked.notes[c].branch) for c in asked.ask.clients.tolist()])
        found: dict[str, list] = {}
        for client, k in zip(asked.ask.clients.tolist(), slot.tolist(), strict=True):
            shard = population.shard(client, Moment(now, 6, float(now)))
            weight = 1.0 if weighting == "uniform" else len(shard)
            weight *= float((state.cluster == k).sum() / (slot == k).sum()) if name == "fielding" else 1.0
            to = int(state.model[client]) if isinstance(state, CFLState) else k
            moves = gradients(received.weights[k], shard.x.double(), shard.y)
            for layer, change in moves.items():
                at = f"{to} {layer}" if layer.startswith("head") else layer
                found.setdefault(at, []).append((weight, change))
        several += len(set(slot.tolist())) > 1
        for k, made in enumerate(state.weights[: len(received.weights)]):
            for layer, value in made.params.items():
                every = found.get(f"{k} {layer}" if layer.startswith("head") else layer, [(1.0, 0.0)])
                mean = sum(weight * change for weight, change in every) / sum(weight for weight, _ in every)
                torch.testing.assert_close(value, received.weights[k].params[layer] + lr * mean)
        assert same(share_layers(state.weights, "head"), state.weights)
    assert several


@pytest.mark.parametrize("name", CLUSTERED)
def test_a_layer_that_is_not_there_is_one_line_with_those_that_are(name):
    with pytest.raises(FedtideError, match=r"cluster_layer: found 'fc', allowed: \*, dense1, head"):
        preflight(toy(name, {"cluster_layer": "fc"}))
