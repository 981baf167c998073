"""FlexCFL, FedDrift and Auxo: what is refused, what it costs, running statistics, sequences, who is judged how."""

import math

import pytest
import torch
from torch import nn

from fedtide.algorithms.feddrift import model_losses
from fedtide.core.base import Cost, Shard, Weights
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.trees import all_finite, size_in_bytes
from fedtide.learn.task import Task
from fedtide.runs.preflight import preflight
from helpers.toys import played, toy

ALWAYS = {"who": "always"}


@pytest.mark.parametrize(("algorithm", "key", "value"), [
    ("flexcfl", "clusters", 0), ("flexcfl", "alpha", 0), ("flexcfl", "pretrain", 0), ("flexcfl", "migrate", -0.1),
    ("flexcfl", "eta_g", -1.0), ("flexcfl", "group_init", "zero"), ("flexcfl", "local", {"proximal": -1.0}),
    ("flexcfl", "clusters", "all"), ("flexcfl", "clusters", 9),
    ("feddrift", "delta", -0.1), ("feddrift", "rounds_per_step", 0), ("feddrift", "max_clusters", 0),
    ("window", "window", 0), ("feddrift", "criterion", "f1"), ("feddrift", "init_new_from", "new"),
    ("feddrift", "variant", {"kind": "isolate", "merge": -0.1}), ("feddrift", "variant", "lazy"),
    ("auxo", "split", {"kind": "evidence", "min_fraction": 1.5}), ("auxo", "min_participants", 0),
    ("auxo", "max_clusters", 0), ("auxo", "epsilon", 2.0),
    ("auxo", "split", {"kind": "rounds", "rounds": [-1]}), ("auxo", "update_fraction", -0.1),
])  # fmt: skip
def test_bad_values_are_one_line(algorithm, key, value):
    with pytest.raises(FedtideError, match=rf"{key}.*: found") as raised:
        preflight(toy(algorithm, {key: value}))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("seed", range(3))
def test_the_silhouette_makes_as_many_groups_as_fielding_begins_with(seed):
    """Eight clients of two labels each; both look at the same label shares, and draw by the same key."""
    partition = {"kind": "label-shards", "clients": 8, "per_client": 2}
    skewed = {"data": {"partition": partition, "groups": {"by": "none"}}, "shift": ALWAYS}
    silhouette = {"clusters": "silhouette", "pretrain": 2, "alpha": 8}
    flexcfl, fielding = (
        played(toy(name, more, **skewed), rounds=1, seed=seed)
        for name, more in (("flexcfl", silhouette), ("fielding", {}))
    )
    assert len(flexcfl.state.weights) == len(flexcfl.state.directions) == len(fielding.state.weights) > 1
    assert set(flexcfl.state.group.tolist()) <= set(range(len(flexcfl.state.weights)))


def test_label_shares_for_the_silhouette_are_paid_for():
    """Three shares of eight bytes from each of eight clients."""
    options = {"cohort": 4, "pretrain": 2}
    more, less = (
        sum(
            played(toy("flexcfl", {**options, "clusters": count}, shift=ALWAYS), rounds=1).fleet.spent_on.values(),
            Cost(),
        )
        for count in ("silhouette", 2)
    )
    assert more - less == Cost(down=0, up=8 * 3 * 8)


def test_what_judging_all_models_costs():
    """A round that begins a step sends the one model to all eight clients too; each says how badly it does."""
    runs = [played(toy(name, {"cohort": 4, **more}, shift=ALWAYS), rounds=2)
            for name, more in (("feddrift", {"rounds_per_step": 3}), ("fedavg", {}))]  # fmt: skip
    feddrift, fedavg = (run.fleet for run in runs)
    model = size_in_bytes(runs[1].state.weights)
    assert [query.ask.question for query in feddrift.queries] == ["train"]
    assert feddrift.queries[0].cost.down == fedavg.queries[0].cost.down
    # And up: how badly it does, and on how many rows.
    spent = [sum(fleet.spent_on.values(), Cost()) for fleet in (feddrift, fedavg)]
    assert spent[0] - spent[1] == Cost(down=8 * model, up=8 * (8 + 8))


@pytest.mark.parametrize("name", ["flexcfl", "flexcfl few", "feddrift", "auxo"])
def test_running_statistics_follow(name):
    run = played(toy(name, model="python:helpers.toys:normed", shift=ALWAYS))
    assert all_finite(run.state)
    buffers = [weights.buffers["1.running_mean"] for weights in run.state.weights]
    assert any(float(buffer.abs().sum()) > 0 for buffer in buffers)


def test_errors_of_sequences_are_those_of_the_steps_that_count():
    """Logits are the one-hot of the input: right where the label is the input."""
    task = Task(lambda: nn.Embedding.from_pretrained(torch.eye(3), freeze=False))
    x, y = torch.tensor([[0, 1, 2], [2, 2, 2]]), torch.tensor([[0, 0, 2], [2, 1, 1]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    shard = Shard(x, y, torch.arange(2), mask=mask)
    weights = task.init(Rng(0))
    assert model_losses(task, [weights], shard, "error").tolist() == pytest.approx([3 / 5])
    # log(e + 2) at each step, less the logit 1 where it is right: at half of the first sequence, a third of the second.
    loss = pytest.approx(math.log(math.e + 2) - (1 / 2 + 1 / 3) / 2)
    assert model_losses(task, [weights, weights], shard, "loss").tolist() == [loss, loss]


def test_a_loss_that_is_not_finite_is_large_and_the_client_is_heard():
    task = Task(lambda: nn.Linear(1, 2))
    broken = Weights({name: torch.full_like(p, torch.nan) for name, p in task.init(Rng(0)).params.items()})
    shard = Shard(torch.ones(1, 1), torch.tensor([1]), torch.arange(1))
    assert model_losses(task, [broken], shard, "loss").tolist() == [1e6]


@pytest.mark.parametrize("name", ["flexcfl", "feddrift loss", "auxo"])
def test_unseen_clients_are_judged_by_what_they_find_on_labeled_rows(name):
    data = {"held_out_clients": {"clients": 2, "labeled": 0.5}}
    run = played(toy(name, data=data, shift=ALWAYS))
    population, algorithm = run.host.population, run.host.algorithm
    payload, slot = algorithm.serve(run.state, population.held_out_clients)
    assert slot.tolist() == [len(payload) - 1] * 2
    scores = run.fleet.score(payload, population.held_out_clients, slot=slot)
    assert scores.choice.sum(1).equal(scores.rows)
    assert (scores.choice > 0).sum(1).tolist() == [1, 1]
