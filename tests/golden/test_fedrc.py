"""FedRC: derived by hand on two rows, and against a naive implementation in numpy float64."""

import math

import numpy as np
import pytest
import torch

from fedtide.algorithms.fedrc import row_labels
from fedtide.core.base import Shard
from fedtide.core.memory import MemoryStore
from fedtide.mixtures.em import e_step
from helpers import naive_em as em
from helpers.branchnet import close, close_params
from helpers.naive_runs import clients_of, copies_of
from helpers.toys import played, toy

ROUNDS = 12
DATA = {
    "source": {"kind": "gaussians", "samples": 160, "dims": 4, "classes": 3, "domains": 3},
    "partition": {"kind": "dirichlet-class", "clients": 9, "alpha": 1.0, "min_samples": 5},
}
SHIFT = {"who": {"kind": "periodic", "period": 7}}


def test_a_step_by_hand():
    """Two components that say 3/4 and 1/2 of a row of class 0, 1/4 and 1/2 of a row of class 1, omega = (1/2, 1/2).

    With equal C the posteriors are those of FedEM: (3/5, 2/5) and (1/3, 2/3). Their sums by class give
    C_1 = (3/5, 1/3) / (14/15) = (9/14, 5/14) and C_2 = (2/5, 2/3) / (16/15) = (3/8, 5/8).
    So next, class 0: 3/4 / (9/14) = 7/6 and 1/2 / (3/8) = 4/3, of which the shares are 7/15 and 8/15;
    class 1: 1/4 / (5/14) = 7/10 and 1/2 / (5/8) = 4/5: again 7/15 and 8/15. What labels say is gone.
    """
    losses = -torch.tensor([[3 / 4, 1 / 4], [1 / 2, 1 / 2]], dtype=torch.float64).log()
    rows = row_labels(Shard(torch.zeros(2, 1), torch.tensor([0, 1]), torch.arange(2)), 2)
    even = torch.full((2,), 0.5, dtype=torch.float64)
    _, gamma = e_step(losses, even)
    close(gamma.numpy(), np.array([[3 / 5, 2 / 5], [1 / 3, 2 / 3]]), "posteriors of FedEM")
    shares = gamma.T @ rows
    shares /= shares.sum(1, keepdim=True)
    close(shares.numpy(), np.array([[9 / 14, 5 / 14], [3 / 8, 5 / 8]]), "C")
    joints, gamma = e_step(losses, even, rows @ shares.log().T)
    close(gamma.numpy(), np.array([[7 / 15, 8 / 15]] * 2), "posteriors")
    close(joints.numpy(), (0.5 * torch.exp(-losses.T)).log().numpy(), "log-joints")


def test_labels_of_sequences_are_shares_of_the_steps_that_count():
    y, mask = torch.tensor([[1, 2, 2], [0, -1, -1]]), torch.tensor([[True, True, True], [True, False, False]])
    shard = Shard(torch.zeros(2, 3), y, torch.arange(2), mask=mask)
    close(row_labels(shard, 3).numpy(), np.array([[0, 1 / 3, 2 / 3], [1, 0, 0]]), "shares")
    assert row_labels(shard.pick(slice(0, 0)), 3).shape == (0, 3)


def fedrc_round(models, blends, labels, clients, **local):
    """Row by row, as printed; `labels` is C (K, classes)."""
    count, blends = len(models), dict(blends)
    updates, seen = [[] for _ in models], np.zeros_like(labels)
    for client, (x, y, shuffle) in clients.items():
        losses, omega = em.cross_entropies(models, x, y), blends.get(client, np.full(count, 1 / count))
        gamma = np.zeros((len(y), count))
        for s, c in enumerate(y):
            weight = [omega[k] * math.exp(-losses[s, k]) / labels[k, c] for k in range(count)]
            gamma[s] = np.array(weight) / sum(weight)
            seen[:, c] += gamma[s]
        blends[client] = gamma.mean(0)
        for k, w in enumerate(models):
            updates[k].append((em.sgd(w, x, y, gamma[:, k], shuffle(k), **local), len(y)))
    total = sum(n for _, n in updates[0])
    models = [em.aggregated(w, mine, total) for w, mine in zip(models, updates, strict=True)]
    return models, blends, seen / seen.sum(1, keepdims=True)


@pytest.mark.parametrize("model", ["linear", {"kind": "mlp", "hidden": [5]}], ids=["linear", "hidden"])
def test_a_naive_implementation_agrees_to_1e_8(model):
    local = {"lr": 0.1, "batch_size": 4, "epochs": 2}
    options = {"components": 3, "component_layer": "*", "local": local}
    memory = MemoryStore(None)
    experiment = toy("fedrc", options, rounds=ROUNDS, precision="fp64", data=DATA, model=model, shift=SHIFT)
    run = played(experiment, memory=memory)
    models, blends, labels = copies_of(run.steps[0].received.weights), {}, np.ones((3, 3)) / 3
    for t, step in enumerate(run.steps):
        models, blends, labels = fedrc_round(
            models, blends, labels, clients_of(run.host.population, t, ROUNDS), **local
        )
        for k, (ours, theirs) in enumerate(zip(copies_of(step.state.weights), models, strict=True)):
            close_params(ours, theirs, f"of model {k} after round {t}")
        close(step.state.labels.numpy() / 3, labels, f"C after round {t}")
    for client, blend in blends.items():
        close(memory.read(client, (ROUNDS, 0))["pi"].numpy(), blend, f"blend of client {client}")
    assert abs(labels - labels.mean(0)).max() > 0.02


def test_the_first_round_is_that_of_fedem_bit_for_bit():
    """C is equal then."""
    options = {"components": 2, "component_layer": "head"}
    one, other = (played(toy(name, options, rounds=1)).state.weights.params for name in ("fedrc", "fedem"))
    assert all(torch.equal(one[name], other[name]) for name in one)
