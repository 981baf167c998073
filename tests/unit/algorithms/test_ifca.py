"""IFCA: how it begins, who chooses what, on which rows, and what cannot be asked of it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from fedtide.core.base import Moment, Shard, Weights
from fedtide.core.errors import FedtideError
from fedtide.core.memory import MemoryStore
from fedtide.core.rng import Rng
from fedtide.core.trees import same, size_in_bytes
from fedtide.evaluate.judge import Judge
from fedtide.fleets.local_engine import LocalEngine
from fedtide.fleets.simulated import SimulatedFleet
from fedtide.learn.shared_passes import mean_losses
from fedtide.runs.build import host_of, task_of
from fedtide.runs.preflight import preflight
from fedtide.runs.runner import run_rounds
from helpers.toys import played, toy

LOCAL = {"lr": 0.2, "batch_size": 4}


def test_models_begin_independent_or_near_the_first():
    apart, near = (
        played(toy("ifca", {"clusters": 3, **more}), rounds=1).steps[0].received for more in ({}, {"init_noise": 0.01})
    )
    for k in (1, 2):
        assert not same(apart.weights[0], apart.weights[k])
        distance = [(near.weights[0].params[n] - near.weights[k].params[n]).abs().max() for n in near.weights[0].params]
        assert 0 < max(distance) < 0.06
    assert same(apart.weights[0], near.weights[0])


def test_of_several_tries_the_one_that_fits_best_is_taken():
    """The least mean, over rows, of each client's least loss; with one try that is the first set, whatever it loses."""
    losses = []
    for starts in (1, 6):
        experiment = toy("ifca", {"n_init": starts, "cohort": "everyone"}, shift={"who": "always"})
        run = played(experiment, rounds=1)
        task = task_of(experiment, experiment.method[0], run.host.population.rows)
        shards = [run.host.population.shard(client, Moment(0, 6, 0.0)) for client in range(8)]
        models = run.steps[0].received.weights
        losses.append(sum(float(mean_losses(task, models, shard).min()) * len(shard) for shard in shards))
    assert losses[1] < losses[0]


def test_a_client_chooses_on_its_validation_rows_and_falls_back_to_the_model_that_most_have_trained():
    run = played(toy("ifca"), rounds=3)
    algorithm, population = run.host.algorithm, run.host.population
    payload, slot = algorithm.serve(run.state, population.clients)
    assert slot is None
    assert int(payload.usual) == int(run.state.members.argmax())
    shard = population.shard(0, Moment(3, 6, 3.0))
    chosen = algorithm.adapt(payload, None, shard, Moment(3, 6, 3.0), Rng(0)).memory["found"]
    experiment = toy("ifca")
    task = task_of(experiment, experiment.method[0], population.rows)
    assert int(chosen) == int(mean_losses(task, run.state.weights, shard.val).argmin())
    none = Shard(shard.x[:0], shard.y[:0], shard.ids[:0])
    assert algorithm.adapt(payload, None, none, Moment(3, 6, 3.0), Rng(0)) is None
    x = shard.x
    guessed = algorithm.predict(payload, [None], x, torch.zeros(len(x), dtype=torch.int64))
    assert guessed.choice.unique().tolist() == [int(payload.usual)]


def test_rows_of_many_clients_are_predicted_by_the_model_of_each():
    run = played(toy("ifca"), rounds=2)
    algorithm = run.host.algorithm
    payload, _ = algorithm.serve(run.state, run.host.population.clients)
    x, owner = torch.randn(6, 4), torch.tensor([0, 1, 0, 2, 1, 2])
    memories = [{"found": torch.tensor(1)}, {"found": torch.tensor(0)}, None]
    found = algorithm.predict(payload, memories, x, owner)
    usual = int(payload.usual)
    assert found.choice.tolist() == [1, 0, 1, usual, 0, usual]
    alone = [
        algorithm.predict(payload, [memories[int(o)]], x[i : i + 1], torch.tensor([0])).told
        for i, o in enumerate(owner)
    ]
    torch.testing.assert_close(found.told, torch.cat(alone))


@pytest.mark.parametrize(("options", "said"), [
    ({"clusters": 0}, "clusters"), ({"near": 0.0}, "near"), ({"n_init": 0}, "n_init"), ({"variant": "mean"}, "variant"),
    ({"choose_on": "test"}, "choose_on"),
])  # fmt: skip
def test_what_makes_no_sense_is_one_clear_line(options, said):
    with pytest.raises(FedtideError, match=said) as raised:
        preflight(toy("ifca", options))
    assert "\n" not in str(raised.value)


def test_more_clusters_than_clients_are_one_clear_line():
    with pytest.raises(FedtideError, match=r"method 'toy'.clusters: found 9, allowed: at most 8,"):
        preflight(toy("ifca", {"clusters": 9}))


def test_clusters_may_share_all_but_one_layer():
    """From one state, IFCA with a shared trunk and Min Loss with two heads, of members, do the same steps."""
    local = {"lr": 0.2, "batch_size": 4, "epochs": 2}
    ifca_run = played(toy("ifca", {"local": local, "transforms": ["shared"]}, precision="fp64"), rounds=3)
    options = {"local": local, "lam": 0.0, "normalize_by": "members", "server": "sgd"}
    heads_run = played(toy("min-loss", options, precision="fp64"), rounds=1)
    first = ifca_run.steps[0].received.inner
    shared, other = first.weights
    assert same({n: p for n, p in shared.params.items() if "head" not in n}, without_head(other))
    weights = heads_run.steps[0].received.weights
    names = {name: name.removeprefix("model.") for name in weights.params}
    params = {
        name: (other if "copies.1." in name else shared).params[re.sub(r"\.copies\.\d", "", plain)]
        for name, plain in names.items()
    }
    state = replace(heads_run.steps[0].received, weights=Weights(params, weights.buffers))
    for number, step in enumerate(ifca_run.steps):
        heads_run.fleet.begin(Moment(number, 6, float(number)))
        state, _ = heads_run.host.algorithm.round(state, heads_run.fleet, Rng(0).at(number, "server"))
        for name, plain in names.items():
            k = int("copies.1." in name)
            made = step.state.inner.weights[k].params[re.sub(r"\.copies\.\d", "", plain)]
            torch.testing.assert_close(made, state.weights.params[name], rtol=0, atol=1e-12)
    down = ifca_run.fleet.queries[0].cost.down // len(ifca_run.fleet.queries[0].ask.clients)
    assert down == size_in_bytes(shared) + size_in_bytes(other) - size_in_bytes(without_head(other))


def without_head(weights: Weights) -> dict:
    return {name: p for name, p in weights.params.items() if "head" not in name}


def test_a_layer_that_is_not_there_is_one_line():
    with pytest.raises(FedtideError, match=r"layers: found 'heads', .*did you mean 'head'"):
        preflight(toy("ifca", {"transforms": [{"kind": "shared", "layers": "heads"}]}))


def test_gradients_of_a_network_with_running_statistics():
    run = played(
        toy("ifca", {"variant": "gradient", "local": {"lr": 0.1, "batch_size": 0}}, model="python:helpers.toys:normed")
    )
    assert all(bool(buffer.isfinite().all()) for w in run.state.weights for buffer in w.buffers.values())
    assert any(float(w.buffers["1.running_mean"].abs().sum()) > 0 for w in run.state.weights)


def test_where_no_model_has_a_finite_loss_the_first_is_taken():
    task = task_of(toy("ifca"), toy("ifca").method[0], played(toy("ifca"), rounds=1).host.population.rows)
    broken = Weights({name: torch.full_like(p, torch.nan) for name, p in task.init(Rng(0)).params.items()})
    rows = Shard(torch.ones(2, 4), torch.tensor([0, 1]), torch.arange(2))
    losses = mean_losses(task, [broken, broken], rows)
    assert losses.isinf().all()
    assert int(losses.argmin()) == 0


def test_several_starts_are_paid_for():
    """All sets of models go to a cohort of four before round 0; the first line of the record says so."""
    down = []
    for starts in (1, 5):
        experiment = toy("ifca", {"n_init": starts})
        host = host_of(experiment, experiment.method[0], 0, MemoryStore(None))
        fleet = SimulatedFleet(host.population, LocalEngine(host))
        judge = Judge(host.algorithm, fleet, [])
        down.append([told.line["down"] for told in run_rounds(judge, rounds=2, seed=0, every=1)])
    models = down[0][0] // 4
    assert down[1][0] - down[0][0] == 5 * models * 4
    assert down[1][1] == down[0][1]
