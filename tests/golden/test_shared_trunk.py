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

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import fedtide as ft
from fedtide.algorithms.cfl import State as CFLState
from fedtide.clusters.rounds import mean_of_all
from fedtide.core.base import Answer, Moment, Sum, Weights
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.trees import same
from fedtide.learn.server import SGD
from fedtide.runs.preflight import preflight
from fedtide.transforms.shared import receive_models, send_models
from fedtide.transforms.transform import shares_of
from helpers.toys import played, toy

MOMENTUM = SGD(momentum=0.5)


def in_trunk(name: str) -> bool:
    return not name.startswith("head")


def model(trunk: float, head: float) -> Weights:
    params = {"trunk.w": torch.full((2,), trunk), "head.w": torch.full((1,), head)}
    return Weights(params, {"trunk.mean": torch.tensor(trunk), "head.mean": torch.tensor(head)})


def test_a_participant_stands_for_the_members_of_its_cluster():
    """So the trunk moves by 2, and in the next round with its momentum by 5."""
    sums = [Sum(model(1.0, 2.0), 1.0), Sum(model(5.0, -4.0), 1.0)]
    reply, both = SimpleNamespace(clients=torch.tensor([0, 3])), torch.tensor([0, 3])
    slots = {"slot": torch.tensor([0, 1]), "sizes": torch.tensor([3, 1])}
    share = shares_of(sums, reply, both, slots)
    trunk, memo = MOMENTUM.step(model(0.0, 0.0), MOMENTUM.init(model(0.0, 0.0)), mean_of_all(sums, share))
    assert float(trunk.params["trunk.w"][0]) == 2.0
    one = [None, Sum(model(4.0, 2.0), 1.0)]
    share = shares_of(
        one, SimpleNamespace(clients=torch.tensor([3])), torch.tensor([3]), slots | {"slot": torch.tensor([1])}
    )
    trunk, _ = MOMENTUM.step(trunk, memo, mean_of_all(one, share))
    assert float(trunk.params["trunk.w"][0]) == 7.0


def test_clients_that_weigh_more_count_for_more_members():
    """A: rows 10 and 30 of four members, so 80 in all, mean (10 * 1 + 30 * 3) / 40 = 2.5; B: rows 40 of one member, -1.

    Trunk: (80 * 2.5 - 40) / 120 = 4/3.
    """
    sums = [Sum(model(100.0, 0.0), 40.0), Sum(model(-40.0, 0.0), 40.0)]
    reply, clients = SimpleNamespace(clients=torch.arange(3)), torch.arange(3)
    share = shares_of(sums, reply, clients, {"slot": torch.tensor([0, 0, 1]), "sizes": torch.tensor([4, 1])})
    assert float(mean_of_all(sums, share).params["trunk.w"][0]) == pytest.approx(4 / 3)


def test_layers_that_are_shared_are_sent_once_with_their_running_statistics():
    models = [model(1.0, 2.0), model(1.0, 5.0)]
    sent = send_models(models, in_trunk)
    assert (list(sent[1].params), list(sent[1].buffers)) == (["head.w"], ["head.mean"])
    assert same(receive_models(sent), models)


SHARED = {"transforms": ["shared"], "cohort": "everyone", "local": {"lr": 0.5, "batch_size": 0}}
CLUSTERED = {
    "fielding": {
        **SHARED,
        "cohort": {"kind": "uniform", "clients_per_round": 5},
        "reporters": "once",
        "clustering": {"kind": "k-means", "k_min": 3, "k_max": 3},
    },
    "oracle": SHARED,
    "ifca": SHARED,
    "flexcfl": {**SHARED, "clusters": 3, "pretrain": 5, "migrate": 2.0},
    "auxo": {**SHARED, "split": {"kind": "rounds", "rounds": [1, 2]}, "min_participants": 2, "epsilon": 0.3},
    "cfl": {**SHARED, "split_after": 1, "eps1": 1e9, "eps2": 0.0, "gamma": 0.0},
    "feddrift": {**SHARED, "rounds_per_step": 3, "delta": 0.0, "local": {"lr": 4.0, "batch_size": 0}},
}


def trunk_of(weights: Weights) -> dict:
    return {name: value for name, value in weights.params.items() if in_trunk(name)}


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
    several, population, whole = 0, run.host.population, run.state
    for now in range(1, 6):
        run.fleet.begin(Moment(now, 6, float(now)))
        received, (whole, _) = whole.inner, run.host.algorithm.round(whole, run.fleet, Rng(0).at(now, "server"))
        state = whole.inner
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
        assert all(same(trunk_of(each), trunk_of(state.weights[0])) for each in state.weights)
    assert several


@pytest.mark.parametrize("name", CLUSTERED)
def test_a_layer_that_is_not_there_is_one_line_with_those_that_are(name):
    with pytest.raises(FedtideError, match=r"layers: found 'fc', allowed: head, trunk, all, dense1"):
        preflight(toy(name, {"transforms": [{"kind": "shared", "layers": "fc"}]}))


def test_a_model_of_one_layer_has_no_trunk_to_share():
    algorithm = ft.algorithms.ifca(ft.Task(lambda: torch.nn.Linear(4, 3)))
    with pytest.raises(FedtideError, match="found 'no layer', allowed: some of them, because nothing would be shared"):
        ft.transforms.apply(algorithm, ft.transforms.Shared())


def test_what_an_answer_keeps_is_what_its_prediction_is_made_with():
    """As without a shared trunk: the client's memory after the question, not the one before it."""
    task = ft.Task(lambda: ft.models.MLP((4,)).build((3,), 2))
    shared = ft.transforms.apply(ft.algorithms.fedsoft(task), ft.transforms.Shared())
    before, after = {"u": torch.tensor([0.9, 0.1])}, {"u": torch.tensor([0.2, 0.8])}
    assert shared.as_served({}, before, Answer({}, memory=after))[1] is after
    assert shared.as_served({}, before, Answer({}))[1] is before
