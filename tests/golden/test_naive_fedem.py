"""FedEM as published, with K whole models, against naive numpy in float64: models and blends over 20 rounds to 1e-8."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from fedtide.core.base import Moment
from fedtide.core.memory import MemoryStore
from fedtide.core.rng import Rng
from helpers.branchnet import as_numpy, close, shard_of
from helpers.naive_em import Rows, fedem_round
from helpers.toys import played, toy

ROUNDS, K, CLIENTS = 20, 3, 9
DATA = {
    "source": {"kind": "gaussians", "samples": 160, "dims": 4, "classes": 3, "domains": 3},
    "partition": {"kind": "dirichlet-class", "clients": CLIENTS, "alpha": 1.0, "min_samples": 5},
}


def models_of(weights) -> list[dict[str, np.ndarray]]:
    """The K models in the weights of a network that is repeated as a whole."""
    models: list[dict[str, np.ndarray]] = [{} for _ in range(K)]
    for name, value in as_numpy(weights.params).items():
        k, own = re.fullmatch(r"model\.copies\.(\d)\.(.*)", name).groups()
        models[int(k)][own] = value.astype(np.float64)
    return models


def shuffled(key: Rng):
    """The K models of a client are one network, so they see the same order of rows: each starts the same generator."""

    def start(k: int):
        generator = key.torch()
        return lambda count: torch.randperm(count, generator=generator).numpy()

    return start


CASES = {
    "softmax regression": ("linear", {"batch_size": 4, "epochs": 2}),
    "all rows at once": ("linear", {"batch_size": 0, "epochs": 3}),
    "local_steps": ("linear", {"batch_size": 3, "local_steps": 7}),
    "one hidden layer": ({"kind": "mlp", "hidden": [5]}, {"batch_size": 4, "epochs": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_naive_fedem_of_whole_models_agrees_to_1e_8(case):
    model, local = CASES[case]
    options = {
        "components": K,
        "component_layer": "*",
        "local": {"lr": 0.1, **local},
        "server": {"kind": "sgd", "lr": 1.0},
    }
    memory = MemoryStore(None)
    experiment = toy(
        "fedem", options, rounds=ROUNDS, precision="fp64", data=DATA, model=model,
        shift={"who": {"kind": "periodic", "period": 7}},
    )  # fmt: skip
    run = played(experiment, memory=memory)
    population = run.host.population
    models, blends = models_of(run.steps[0].received.weights), {}
    cohorts = []
    for t, step in enumerate(run.steps):
        moment = Moment(t, ROUNDS, float(t))
        cohorts.append(population.arrivals(4, moment).tolist())
        clients = {
            client: Rows(*shard_of(population, client, moment), shuffled(Rng(0).at(t, client, "train", "shuffle")))
            for client in cohorts[-1]
        }
        models, blends, _ = fedem_round(models, blends, clients, lr=0.1, **local)
        for k, (ours, theirs) in enumerate(zip(models_of(step.state.weights), models, strict=True)):
            assert ours.keys() == theirs.keys()
            for name, value in ours.items():
                close(value, theirs[name], f"{name} of model {k} after round {t}")
    for client in range(CLIENTS):
        kept = memory.read(client, (ROUNDS, 0))
        assert (kept is None) == (client not in blends)
        if kept is not None:
            close(kept["pi"], blends[client], f"blend of client {client}")
    assert len({len(rows.y) for rows in clients.values()}) > 1
    assert all(len(cohort) == 4 for cohort in cohorts)
    assert len({tuple(sorted(cohort)) for cohort in cohorts}) > 5
    assert len({int(pi.argmax()) for pi in blends.values()}) > 1
