"""Independent naive Min Loss, SCSGD, FedEM and Vanilla in numpy float64: every state over 15 rounds to 1e-8.

They share no code with the package but the population (who is there, who holds what) and the keys of the shuffles.
"""

import math

import numpy as np
import pytest

from fedtide.core.memory import MemoryStore
from helpers.branchnet import (
    TRAINING,
    KerasAdam,
    Net,
    as_numpy,
    close,
    close_params,
    linear_shares,
    noted_run,
    participants,
    softmax,
    weighted_mean,
)

ROUNDS, PERIOD = 15, 7
DATA = {
    "source": {"kind": "gaussians", "samples": 64, "dims": 4, "classes": 3, "domains": 3},
    "partition": {"kind": "dirichlet-class", "clients": 9, "alpha": 1.0, "min_samples": 5},
}


def run_of(algorithm, options, memory=None):
    """The package's run, what it noted, and where it began."""
    shift = {"who": {"kind": "periodic", "period": PERIOD}}
    run, noted = noted_run(algorithm, TRAINING | options, rounds=ROUNDS, data=DATA, shift=shift, memory=memory)
    return run, noted.branches


def losses_of(net, x, y) -> np.ndarray:
    """Cross-entropy of each row at each branch (rows, K)."""
    h = net.features(x)
    p = [softmax(net.logits(h, k)) for k in range(net.branches)]
    return np.array([[-math.log(p[k][s, y[s]]) for k in range(net.branches)] for s in range(len(y))])


def clock(rhythm, t, branches) -> int:
    """The branch of the hour, by the formulas of the specification; the first of equals."""
    s = t % PERIOD
    if rhythm == "block":
        return s * branches // PERIOD
    shares = linear_shares(t, PERIOD, branches)
    return shares.index(max(shares))


def naive(population, net, optimizer, *, pick, lam, eps, heads):
    """Yield the network and the choices after each round of a method whose clients train one branch each."""
    for t in range(ROUNDS):
        updates, choices = [], {}
        for client, x, y, key in participants(population, t, ROUNDS):
            k = choices[client] = pick(t, net, x, y)
            updates.append((net.train(x, y, k, lam, eps, key), len(y)))
        d = weighted_mean(updates, net)
        total = sum(n for _, n in updates)
        for k in range(net.branches):
            mine = sum(n for (_, n), chosen in zip(updates, choices.values(), strict=True) if chosen == k)
            for part in ("weight", "bias"):
                name = f"model.head.copies.{k}.{part}"
                if not mine and not lam:
                    del d[name]
                elif mine and heads == "members":
                    d[name] = d[name] * total / mine
        net = optimizer.step(net, d)
        yield net, choices


CASES = [
    ("min-loss", None, 2, 0.25, "participants"),
    ("min-loss", None, 3, 0.0, "members"),
    ("min-loss", None, 3, 0.5, "members"),
    ("scsgd", "linear", 2, 0.25, "participants"),
    ("scsgd", "block", 3, 0.5, "participants"),
    ("scsgd", "block", 2, 0.0, "members"),
]
ALIKE = [
    ("min-loss", None, 3, 0.25, "participants"),
    ("min-loss", None, 3, 0.0, "participants"),
    ("scsgd", "linear", 3, 0.0, "participants"),
]
"""Of branches, shares and divisors that others have, in other pairs."""
TWO_OR_THREE = [pytest.param(2, marks=pytest.mark.thorough), 3]


@pytest.mark.parametrize(
    ("algorithm", "rhythm", "branches", "lam", "heads"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.thorough) for case in ALIKE)],
)
def test_a_naive_method_of_one_branch_per_client_agrees_to_1e_8(algorithm, rhythm, branches, lam, heads):
    options = {"branches": branches, "lam": lam, "eps": 0.5, "normalize_by": heads}
    if rhythm:
        options["prior"] = {"kind": rhythm, "period": PERIOD, "phase": 0}
    run, branches_noted = run_of(algorithm, options)

    def pick(t, net, x, y) -> int:
        return clock(rhythm, t, branches) if rhythm else int(losses_of(net, x, y).mean(0).argmin())

    net = Net(as_numpy(run.steps[0].received.weights.params))
    rounds = naive(run.host.population, net, KerasAdam(net), pick=pick, lam=lam, eps=0.5, heads=heads)
    seen = set()
    for t, (step, noted, (net, choices)) in enumerate(zip(run.steps, branches_noted, rounds, strict=True)):
        assert noted == choices, f"round {t}"
        close_params(step.state.weights.params, net.p, f"after round {t}")
        seen |= set(choices.values())
    assert len(seen) > 1


@pytest.mark.parametrize("branches", TWO_OR_THREE)
def test_a_naive_fedem_agrees_to_1e_8(branches):
    """Networks after every round, and the blends of all clients at the end."""
    memory = MemoryStore(None)
    run, _ = run_of("fedem", {"components": branches}, memory)
    net = Net(as_numpy(run.steps[0].received.weights.params))
    optimizer = KerasAdam(net)
    blends: dict[int, np.ndarray] = {}
    for t, step in enumerate(run.steps):
        updates = []
        for client, x, y, key in participants(run.host.population, t, ROUNDS):
            pi = blends.get(client, np.full(branches, 1 / branches))
            q = softmax(np.log(pi) - losses_of(net, x, y))
            blends[client] = q.mean(0)

            def gradient(own, rows, x=x, y=y, q=q):
                h = own.features(x[rows])
                errors = [q[rows, k, None] * own.errors(h, y[rows], k) / len(rows) for k in range(branches)]
                return own.back(x[rows], h, errors)

            updates.append((net.sgd(len(y), gradient, key), len(y)))
        net = optimizer.step(net, weighted_mean(updates, net))
        close_params(step.state.weights.params, net.p, f"after round {t}")
    for client in range(9):
        kept = memory.read(client, (ROUNDS, 0))
        assert (kept is None) == (client not in blends)
        if kept is not None:
            close(kept["pi"], blends[client], f"blend of client {client}")
    assert len({int(pi.argmax()) for pi in blends.values()}) > 1


@pytest.mark.parametrize("branches", TWO_OR_THREE)
def test_a_naive_vanilla_agrees_to_1e_8(branches):
    """Cross-entropy of the mean of the branches' logits, of which each has its share of the gradient."""
    run, _ = run_of("vanilla", {"branches": branches})
    net = Net({name[6:]: value for name, value in as_numpy(run.steps[0].received.weights.params).items()})
    optimizer = KerasAdam(net)
    for t, step in enumerate(run.steps):
        updates = []
        for _, x, y, key in participants(run.host.population, t, ROUNDS):

            def gradient(own, rows, x=x, y=y):
                h = own.features(x[rows])
                mean = sum(own.logits(h, k) for k in range(branches)) / branches
                error = (softmax(mean) - np.eye(mean.shape[1])[y[rows]]) / len(rows) / branches
                return own.back(x[rows], h, [error] * branches)

            updates.append((net.sgd(len(y), gradient, key), len(y)))
        net = optimizer.step(net, weighted_mean(updates, net))
        for name, value in step.state.weights.params.items():
            close(value.numpy(), net.p[name[6:]], f"{name} after round {t}")
