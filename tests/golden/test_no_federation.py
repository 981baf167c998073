"""Baselines without a federation: each client alone, and all rows in one place."""

from dataclasses import replace

import pytest
import torch

from fedtide.core.base import Moment
from fedtide.core.rng import Rng
from fedtide.core.trees import same
from fedtide.learn.device import drawn_from
from helpers.toys import played, toy

FEW = {"lr": 0.05, "epochs": 3, "batch_size": 4, "optimizer": "adamw"}
LOCAL = {"lr": 0.1, "batch_size": 0}
STILL = {"who": {"kind": "always"}}


def params(weights):
    return torch.cat([value.double().flatten() for value in weights.params.values()])


def test_a_client_alone_is_the_local_expert_of_adaptive_expert_models():
    """The model is the one that `transforms = ["alone"]` makes with the same key: training is the same."""
    alone = played(toy("local", {"solver": FEW}, shift=STILL), rounds=1)
    aem = played(toy("aem", {"transforms": [{"kind": "alone", "solver": FEW}]}, shift=STILL), rounds=1)
    for client in alone.host.population.clients.tolist():
        shard, now = alone.host.population.shard(client, Moment(0, 6)), Moment(0, 6)
        ours = alone.host.algorithm.works["train"]({}, None, shard, now, Rng(client)).memory["own"]
        payload, _ = aem.host.algorithm.serve(aem.state, torch.tensor([client]))
        theirs = aem.host.algorithm.adapt(payload, None, shard, now, Rng(client)).memory["own"]
        assert torch.equal(params(ours), params(theirs))


def test_a_client_trains_once_and_again_when_its_rows_change():
    still = played(toy("local", {"solver": FEW}, shift=STILL), rounds=4)
    assert [step.facts["trained"] for step in still.steps] == [8, 0, 0, 0]
    assert not any(cost.up for cost in still.fleet.spent_on.values())
    swaps = {**STILL, "how": {"kind": "label-swaps", "every": 2, "fraction": 1.0}}
    drifting = played(toy("local", {"solver": FEW}, shift=swaps), rounds=4)
    trained = [step.facts["trained"] for step in drifting.steps]
    assert trained[0] == 8
    assert trained[1] == trained[3] == 0
    assert trained[2] > 0


@pytest.mark.parametrize("model", ["linear", "python:helpers.toys:dropping", "python:helpers.toys:normed"])
def test_a_client_is_judged_by_what_it_trained_once(model):
    """On test rows by the model that stopped by validation rows, on these by that of a client without any."""
    solver = {**FEW, "lr": 0.5, "epochs": 90}
    run = played(toy("local", {"solver": solver}, shift=STILL, model=model), rounds=1)
    train, adapt, now, stopped = run.host.algorithm.works["train"], run.host.algorithm.adapt, Moment(0, 6), 0
    for client in run.host.population.clients.tolist():
        shard = run.host.population.shard(client, now)
        hidden = replace(shard, fetch_val=None)
        with drawn_from(client):
            kept = train({}, None, shard, now, Rng(client)).memory
        with drawn_from(client):
            whole = train({}, None, hidden, now, Rng(client)).memory["own"]
        assert adapt({}, kept, shard, now, Rng(99)) is None
        assert same(adapt({}, kept, hidden, now, Rng(99)).memory["own"], whole)
        assert "judged" not in train({}, None, replace(shard, apart=True), now, Rng(client)).memory
        stopped += not same(kept["own"], whole)
    assert stopped


def test_one_whose_training_breaks_in_the_end_keeps_the_model_at_which_it_stopped():
    solver = {"lr": 1.0, "weight_decay": 1e3, "epochs": 40}
    run = played(toy("local", {"solver": solver}, shift=STILL), rounds=1)
    for client in run.host.population.clients.tolist():
        assert run.fleet.engine.memory.read(client, (99, 0)).keys() == {"own", "seen"}


def test_one_without_labeled_rows_is_judged_by_a_model_that_nobody_has_trained():
    run = played(toy("local", {"solver": FEW}, shift=STILL), rounds=2)
    held_out = run.host.population.held_out_clients
    payload, _ = run.host.algorithm.serve(run.state, held_out)
    x, owner = torch.randn(4, 4), torch.zeros(4, dtype=torch.int64)
    made = run.host.algorithm.predict(payload, [None], x, owner)
    plain = played(toy("fedavg"), rounds=1).host.algorithm.predict(run.state.weights, [None], x, owner)
    torch.testing.assert_close(made.told, plain.told.double())
    assert made.choice is None


def test_centralized_full_batch_descent_is_that_of_fedsgd_with_everybody():
    """One step on all rows at once is the mean over clients of their gradients, weighted by rows."""
    ours = played(toy("centralized", {"local": LOCAL}, shift=STILL, precision="fp64"))
    theirs = played(toy("fedsgd", {"local": LOCAL, "cohort": "everyone"}, shift=STILL, precision="fp64"))
    torch.testing.assert_close(params(ours.state.weights), params(theirs.state.weights), rtol=1e-9, atol=1e-12)
    assert not any(cost.up or cost.down for cost in ours.fleet.spent_on.values())
    assert all("loss" in step.facts for step in ours.steps)
