"""pFedEM, FedGMM and FedEM with whole models against naive numpy in float64: models and blends to 1e-8."""

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from fedtide.core.memory import MemoryStore
from fedtide.learn.features import principal
from fedtide.runs.build import host_of
from helpers.branchnet import as_numpy, close, close_params
from helpers.naive_em import diagonal_log_density, fedem_round, fedgmm_round, floored, full_log_density, pfedem_round
from helpers.naive_runs import clients_of, copies_of
from helpers.toys import played, toy

ROUNDS = 12
DATA = {
    "source": {"kind": "gaussians", "samples": 240, "dims": 4, "classes": 3, "domains": 2},
    "partition": {"kind": "dirichlet-class", "clients": 9, "alpha": 1.0, "min_samples": 8},
    "groups": {"by": "none"},
    "public_samples": 40,
}
BLEND = {"who": {"kind": "always"}, "what": {"kind": "domain-mixture", "curve": "linear", "cycles": 2, "samples": 12}}


def models_of(weights) -> list[dict[str, np.ndarray]]:
    return [{name: value.astype(np.float64) for name, value in as_numpy(each.params).items()} for each in weights]


def experiment_of(algorithm, options, model):
    """The cohort of four."""
    begin = {"kind": "k-means++", "rounds": 3}
    options = {"features": {"kind": "pca", "width": 3}, "gaussian_init": begin, "components": 2, **options}
    return toy(
        algorithm, options, rounds=ROUNDS, precision="fp64", data=DATA, model=model, shift=BLEND,
    )  # fmt: skip


def run_of(algorithm, options, model, memory):
    """The package's run, and the principal components that it and the naive one share."""
    experiment = experiment_of(algorithm, options, model)
    host = host_of(experiment, experiment.method[0], 0, memory)
    run = played(experiment, memory=memory, host=host)
    center, components = (part.numpy() for part in principal(host.population.public_features().flatten(1).double(), 3))
    return run, {"center": center, "components": components}


def agree(step, models, **others):
    """Compare all models and other arrays of the state."""
    when = f"after round {step.moment.round}"
    for k, ours in enumerate(models_of(step.state.weights)):
        close_params(ours, models[k], f"of model {k} {when}")
    for name, theirs in others.items():
        close(getattr(step.state, name).numpy(), theirs, f"{name} {when}")


MODELS = ["linear", {"kind": "mlp", "hidden": [5]}]


@pytest.mark.parametrize(
    ("divide", "update", "model"),
    [
        pytest.param(divide, update, model, marks=marks, id=f"{divide}-{update}-{name}")
        for d, divide in enumerate(("members", "participants"))
        for u, update in enumerate(("certainty", "overwrite"))
        for m, (name, model) in enumerate(zip(("linear", "hidden"), MODELS, strict=True))
        for marks in [() if (d + u + m) % 2 else pytest.mark.thorough]  # of each pair of values one, or two
    ],
)
def test_a_naive_pfedem_agrees_to_1e_8(model, update, divide):
    local = {"lr": 0.1, "batch_size": 4, "local_steps": 5}
    a0 = {"a0": 0.3} if update == "certainty" else {}
    run, space = run_of(
        "pfedem", {"local": local, "update": {"kind": update, **a0}, "normalize_by": divide}, model, MemoryStore(None)
    )
    first = next(step for step in run.steps if step.moment.round == 0).received
    models, mu, var, pi = models_of(first.weights), first.mu.numpy(), first.spread.numpy(), first.pi.numpy()
    splits = set()
    for step in run.steps:
        t = step.moment.round
        clients = clients_of(run.host.population, t, ROUNDS)
        made = pfedem_round(models, mu, var, pi, clients, **local, **space, weights=divide, update=update)
        models, mu, var, pi = made.models, made.mu, made.var, made.pi
        agree(step, models, mu=mu, spread=var, pi=pi)
        splits |= {tuple(counts > 0) for counts in made.counts.values()}
    assert (True, True) in splits  # some clients had rows of both
    assert {(True, False), (False, True)} & splits  # and some of one alone


@pytest.mark.parametrize(
    ("em_steps", "model"),
    [
        pytest.param(1, MODELS[0], id="1-linear"),
        pytest.param(2, MODELS[1], id="2-hidden"),
        pytest.param(1, MODELS[1], id="1-hidden", marks=pytest.mark.thorough),
        pytest.param(2, MODELS[0], id="2-linear", marks=pytest.mark.thorough),
    ],
)
def test_a_naive_fedgmm_agrees_to_1e_8(model, em_steps):
    local = {"lr": 0.1, "batch_size": 4, "epochs": 2}
    memory = MemoryStore(None)
    options = {"local": local, "gaussians": 3, "em_steps": em_steps}
    run, space = run_of("fedgmm", options, model, memory)
    first = next(step for step in run.steps if step.moment.round == 0).received
    models, mu, cov, blends = models_of(first.weights), first.mu.numpy(), first.spread.numpy(), {}
    for step in run.steps:
        t = step.moment.round
        clients = clients_of(run.host.population, t, ROUNDS)
        made = fedgmm_round(models, mu, cov, blends, clients, **local, **space, em_steps=em_steps, train="last")
        models, mu, cov, blends = made.models, made.mu, made.cov, made.blends
        agree(step, models, mu=mu, spread=cov)
    assert len(blends) > 4
    for client, blend in blends.items():
        close(memory.read(client, (ROUNDS, 0))["pi"].numpy(), blend, f"blend of client {client}")


def probabilities(model, row):
    """Softmax regression of one row."""
    z = model["head.weight"] @ row + model["head.bias"]
    e = np.exp(z - z.max())
    return e / e.sum()


def predicted(run, rows, blends):
    """What the package predicts for rows of client 0, which has a memory, and of client 1, which has none."""
    owner = torch.arange(len(rows)) % 2
    payload, _ = run.host.algorithm.serve(run.state, torch.tensor([0, 1]))
    return run.host.algorithm.predict(payload, [{"pi": blends}, None], rows, owner), owner.tolist()


@cache
def pfedem_run():
    local = {"lr": 0.1, "batch_size": 4, "local_steps": 5}
    return run_of("pfedem", {"local": local}, "linear", MemoryStore(None))


@pytest.mark.parametrize("inference", ["posterior", "uniform", "client", "global"])
def test_naive_predictions_of_pfedem_agree(inference):
    run, space = pfedem_run()
    infers = experiment_of("pfedem", {"inference": inference}, "linear")
    run = replace(run, host=host_of(infers, infers.method[0], 0))
    state, rows = run.state, run.host.population.rows.x[:12].double()
    mine = torch.tensor([0.2, 0.8], dtype=torch.float64)
    found, owner = predicted(run, rows, mine)
    mu, var, pi = state.mu.numpy(), floored(state.spread.numpy(), 1e-3), state.pi.numpy()
    assert abs(pi[0] - pi[1]) > 0.05
    models = models_of(state.weights)
    for s, row in enumerate(rows.numpy()):
        z = (row - space["center"]) @ space["components"]
        density = [math.exp(diagonal_log_density(z, mu[k], var[k])) for k in range(2)]
        weights = {
            "posterior": np.array([pi[k] * density[k] for k in range(2)]) / sum(pi[k] * density[k] for k in range(2)),
            "uniform": np.array(density) / sum(density),
            "client": mine.numpy() if owner[s] == 0 else pi,
            "global": pi,
        }
        ways = {name: sum(w[k] * probabilities(models[k], row) for k in range(2)) for name, w in weights.items()}
        close(found.told[s].exp().numpy(), ways[inference], f"row {s}")
        close(found.weights[s].numpy(), weights[inference], f"weights of row {s}")
        assert {name: int(found.others[name][s]) for name in found.others} == {
            name: int(p.argmax()) for name, p in ways.items() if name != inference
        }
        close(found.density[s].exp().numpy(), sum(pi[k] * density[k] for k in range(2)), f"density of row {s}")


def test_naive_predictions_of_fedgmm_agree():
    run, space = run_of("fedgmm", {"gaussians": 2}, "linear", MemoryStore(None))
    state, rows = run.state, run.host.population.rows.x[:12].double()
    mine = torch.tensor([[0.1, 0.2], [0.3, 0.4]], dtype=torch.float64)
    found, owner = predicted(run, rows, mine)
    assert len(rows) == 12
    models, mu, cov = models_of(state.weights), state.mu.numpy(), state.spread.numpy()
    for s, row in enumerate(rows.numpy()):
        z = (row - space["center"]) @ space["components"]
        pi = mine.numpy() if owner[s] == 0 else np.full((2, 2), 0.25)
        joint = np.array(
            [[pi[a, b] * math.exp(full_log_density(z, mu[a], cov[a])) for b in range(2)] for a in range(2)]
        )
        weights = joint.sum(0) / joint.sum()
        close(found.weights[s].numpy(), weights, f"weights of row {s}")
        close(
            found.told[s].exp().numpy(), sum(weights[k] * probabilities(models[k], row) for k in range(2)), f"row {s}"
        )
        close(found.density[s].exp().numpy(), joint.sum(), f"density of row {s}")


# -- FedEM as published, with K whole models ---------------------------------------------------------------------------


CASES = {
    "softmax regression": ("linear", {"batch_size": 4, "epochs": 2}),
    "all rows at once": ("linear", {"batch_size": 0, "epochs": 3}),
    "local_steps": ("linear", {"batch_size": 3, "local_steps": 7}),
    "one hidden layer": ({"kind": "mlp", "hidden": [5]}, {"batch_size": 4, "epochs": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_naive_fedem_of_whole_models_agrees_to_1e_8(case):
    model, local = CASES[case]
    options = {"components": 3, "component_layer": "*", "local": {"lr": 0.1, **local}, "server": {"kind": "sgd"}}
    data = {
        "source": {"kind": "gaussians", "samples": 160, "dims": 4, "classes": 3, "domains": 3},
        "partition": {"kind": "dirichlet-class", "clients": 9, "alpha": 1.0, "min_samples": 5},
    }
    memory, shift = MemoryStore(None), {"who": {"kind": "periodic", "period": 7}}
    run = played(toy("fedem", options, rounds=20, precision="fp64", data=data, model=model, shift=shift), memory=memory)
    models, blends, cohorts = copies_of(run.steps[0].received.weights), {}, []
    for t, step in enumerate(run.steps):
        clients = clients_of(run.host.population, t, 20)
        cohorts.append(list(clients))
        models, blends, _ = fedem_round(models, blends, clients, lr=0.1, **local)
        for k, (ours, theirs) in enumerate(zip(copies_of(step.state.weights), models, strict=True)):
            assert ours.keys() == theirs.keys()
            close_params(ours, theirs, f"of model {k} after round {t}")
    for client in range(9):
        kept = memory.read(client, (20, 0))
        assert (kept is None) == (client not in blends)
        if kept is not None:
            close(kept["pi"], blends[client], f"blend of client {client}")
    assert len({len(rows.y) for rows in clients.values()}) > 1
    assert all(len(cohort) == 4 for cohort in cohorts)
    assert len({tuple(sorted(cohort)) for cohort in cohorts}) > 5
    assert len({int(pi.argmax()) for pi in blends.values()}) > 1
