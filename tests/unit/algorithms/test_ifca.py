"""IFCA: how it begins, who chooses what, on which rows, and what cannot be asked of it."""

import pytest
import torch

from fedtide.core.base import Moment, Shard
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.trees import same
from fedtide.evaluate.judge import Judge
from fedtide.fleets.engines import LocalEngine
from fedtide.fleets.simulated import SimulatedFleet
from fedtide.learn.steps import mean_losses
from fedtide.runs.build import host_of, task_of
from fedtide.runs.preflight import preflight
from fedtide.runs.runner import run_rounds
from helpers.toys import played, toy


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


@pytest.mark.parametrize(("options", "said"), [
    ({"clusters": 0}, "clusters"), ({"near": 0.0}, "near"), ({"n_init": 0}, "n_init"), ({"variant": "mean"}, "variant"),
    ({"clusters": 9}, r"method 'toy'.clusters: found 9, allowed: at most 8,"),
])  # fmt: skip
def test_what_makes_no_sense_is_one_clear_line(options, said):
    with pytest.raises(FedtideError, match=said) as raised:
        preflight(toy("ifca", options))
    assert "\n" not in str(raised.value)


def test_a_layer_that_is_not_there_is_one_line():
    with pytest.raises(FedtideError, match=r"layers: found 'heads', .*did you mean 'head'"):
        preflight(toy("ifca", {"transforms": [{"kind": "shared", "layers": "heads"}]}))


def test_several_starts_are_paid_for():
    """All sets of models go to a cohort of four before round 0; the first line of the record says so."""
    down = []
    for starts in (1, 5):
        experiment = toy("ifca", {"n_init": starts})
        host = host_of(experiment, experiment.method[0], 0)
        fleet = SimulatedFleet(host.population, LocalEngine(host))
        judge = Judge(host.algorithm, fleet, [])
        down.append([told.line["down"] for told in run_rounds(judge, rounds=2, seed=0, every=1)])
    models = down[0][0] // 4
    assert down[1][0] - down[0][0] == 5 * models * 4
    assert down[1][1] == down[0][1]
