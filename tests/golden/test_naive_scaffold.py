"""Independent naive SCAFFOLD and FedAvg in numpy float64, with cross-entropy and with softmaxes by counts of labels.

Gradients by hand, explicit loops; weights, control variates and losses of 12 rounds to 1e-8. It shares no code with the
package but the population (who is there, who holds what) and the keys of the shuffles.
"""

import math

import numpy as np
import pytest
import torch

from fedtide.core.base import Moment
from fedtide.core.rng import Rng
from helpers.branchnet import as_numpy, close, close_params, shard_of
from helpers.toys import played, toy

ROUNDS, RATE, BATCH, EPOCHS, CLASSES = 12, 0.1, 4, 2, 3
DATA = {
    "partition": {"kind": "dirichlet-class", "clients": 8, "alpha": 0.3, "min_samples": 5},
    "split": {"val": 0.3, "test": 0.25},
}


def fractions(y, beside, blend: float) -> list[float]:
    """The weight of each class: its share of the labels, those beside included."""
    labels = [*y.tolist(), *beside.tolist()]
    return [(1 - blend) * labels.count(c) / len(labels) + blend / CLASSES for c in range(CLASSES)]


def gradient(net, x, y, a) -> tuple[dict[str, np.ndarray], float]:
    """Of the mean over rows of -log( a_y e^z_y / sum_c a_c e^z_c ), and that mean; one hidden ReLU layer.

    A class with the weight None has the logit zero, whatever the network says.
    """
    out = {name: np.zeros_like(p) for name, p in net.items()}
    total = 0.0
    for i in range(len(y)):
        before = net["dense1.weight"] @ x[i] + net["dense1.bias"]
        h = np.maximum(before, 0.0)
        z = net["head.weight"] @ h + net["head.bias"]
        held = [c for c in range(CLASSES) if a[c] is not None and a[c] > 0]
        top = max(z[c] for c in held)
        mass = sum(a[c] * math.exp(z[c] - top) for c in held) + sum(math.exp(-top) for w in a if w is None)
        p = [a[c] * math.exp(z[c] - top) / mass if c in held else 0.0 for c in range(CLASSES)]
        total -= math.log(p[y[i]])
        back = np.zeros_like(h)
        for c in range(CLASSES):
            error = (p[c] - (1.0 if c == y[i] else 0.0)) / len(y)
            out["head.weight"][c] += error * h
            out["head.bias"][c] += error
            back += error * net["head.weight"][c]
        back = np.where(before > 0, back, 0.0)
        out["dense1.weight"] += np.outer(back, x[i])
        out["dense1.bias"] += back
    return out, total / len(y)


def naive(population, net, *, controlled, variant, weighting, eta_g, decay, a_of):
    """Yield (weights, c, every c_i, mean training loss) after each round."""
    n = len(population.clients)
    c = {name: np.zeros_like(p) for name, p in net.items()}
    kept = {}
    for t in range(ROUNDS):
        moment = Moment(t, ROUNDS, float(t))
        updates, moved, losses = [], [], []
        for client in sorted(population.arrivals(4, moment).tolist()):
            x, y = shard_of(population, client, moment)
            a = a_of(y, population.shard(client, moment, "val").y)
            c_i = kept.get(client, {name: np.zeros_like(p) for name, p in net.items()})
            own = {name: p.copy() for name, p in net.items()}
            shuffle = Rng(0).at(t, client, "train", "shuffle").torch()
            steps, seen = 0, 0.0
            for _ in range(EPOCHS):
                order = torch.randperm(len(y), generator=shuffle).numpy()
                for first in range(0, len(y), BATCH):
                    rows = order[first : first + BATCH]
                    g, loss = gradient(own, x[rows], y[rows], a)
                    for name in own:
                        push = g[name] + decay * own[name]
                        if controlled:
                            push = push - c_i[name] + c[name]
                        own[name] = own[name] - RATE * push
                    seen += loss * len(rows)
                    steps += 1
            losses.append((seen / (EPOCHS * len(y)), len(y)))
            updates.append(({name: own[name] - net[name] for name in net}, len(y) if weighting == "samples" else 1))
            if variant == "I":
                g, _ = gradient(net, x, y, a)
                new = {name: g[name] + decay * net[name] for name in net}
            else:
                new = {name: c_i[name] - c[name] + (net[name] - own[name]) / (steps * RATE) for name in net}
            moved.append({name: new[name] - c_i[name] for name in net})
            kept[client] = new
        mass = sum(weight for _, weight in updates)
        net = {name: net[name] + eta_g * sum(w * d[name] for d, w in updates) / mass for name in net}
        c = {name: c[name] + sum(d[name] for d in moved) / n for name in net}
        yield net, c, kept, sum(loss * rows for loss, rows in losses) / sum(rows for _, rows in losses)


def wsm(blend: float = 0.0, val: bool = False):
    """The fractions of a client from its training labels, and those for validation."""
    return lambda y, beside: fractions(y, beside if val else beside[:0], blend)


def calibrated(tau: float):
    """FedLC lowers the logit of class c by tau n_c^(-1/4): the weight e^(-tau / n_c^(1/4)), and 0 without samples."""

    def weights(y, beside):
        counts = [y.tolist().count(c) for c in range(CLASSES)]
        return [math.exp(-tau / math.sqrt(math.sqrt(n))) if n else 0.0 for n in counts]

    return weights


def masked(y, beside):
    """Absent classes have the logit zero, and all others are as they are."""
    return [1.0 if c in y else None for c in range(CLASSES)]


def even(y, beside):
    """Cross-entropy is the re-weighted softmax with equal weights."""
    return [1.0] * CLASSES


THESIS = {"kind": "wsm", "blend": 0.0}
# algorithm | its own settings | settings of local training | loss | the class weights of the loss
CASES = [
    ("scaffold", {"variant": "II"}, {}, "cross-entropy", even),
    ("scaffold", {"variant": "I"}, {}, "cross-entropy", even),
    ("scaffold", {"variant": "II", "weighting": "samples"}, {"weight_decay": 0.05}, "cross-entropy", even),
    ("scaffold", {"variant": "I"}, {"weight_decay": 0.05}, THESIS, wsm()),
    ("scaffold", {"variant": "II", "server": {"kind": "sgd", "lr": 0.7}}, {}, THESIS, wsm()),
    ("fedavg", {}, {}, THESIS, wsm()),
    ("fedavg", {"weighting": "uniform"}, {"weight_decay": 0.05}, {**THESIS, "val": True}, wsm(val=True)),
    ("fedavg", {}, {}, "wsm", wsm()),
    ("fedavg", {}, {}, {"kind": "wsm", "blend": 0.3}, wsm(0.3)),
    ("fedavg", {}, {}, "fedlc", calibrated(1.0)),
    ("scaffold", {"variant": "I"}, {}, {"kind": "fedlc", "tau": 2.5}, calibrated(2.5)),
    ("fedavg", {}, {}, "masked", masked),
]


@pytest.mark.parametrize(
    ("algorithm", "options", "local", "loss", "a_of"),
    CASES,
    ids=[" ".join(map(str, (a, *o.values(), *lo.values(), ls))) for a, o, lo, ls, _ in CASES],
)
def test_a_naive_implementation_agrees_to_1e_8(algorithm, options, local, loss, a_of):
    settings = {"lr": RATE, "batch_size": BATCH, "epochs": EPOCHS, **local}
    experiment = toy(
        algorithm, {"local": settings, "loss": loss, **options}, rounds=ROUNDS, precision="fp64", data=DATA
    )
    run = played(experiment)
    population = run.host.population
    held = [set(population.rows.y[population.parts["train"][i].long()].tolist()) for i in range(8)]
    assert any(len(labels) < CLASSES for labels in held), "some client must lack a class"
    rounds = naive(
        population,
        as_numpy(run.steps[0].received.weights.params),
        controlled=algorithm == "scaffold",
        variant=options.get("variant", "II"),
        weighting=options.get("weighting", "uniform" if algorithm == "scaffold" else "samples"),
        eta_g=options.get("server", {"lr": 1.0})["lr"],
        decay=local.get("weight_decay", 0.0),
        a_of=a_of,
    )
    for t, (step, (net, c, kept, mean_loss)) in enumerate(zip(run.steps, rounds, strict=True)):
        close_params(step.state.weights.params, net, f"after round {t}")
        close(step.facts["loss"], mean_loss, f"loss of round {t}")
        if algorithm != "scaffold":
            continue
        close_params(step.state.control, c, f"of c after round {t}")
        if t == ROUNDS - 1:
            for client, row in kept.items():
                found = run.fleet.engine.memory.read(client, (ROUNDS, 0))["control"]
                assert found.keys() == row.keys()
                close_params(found, row, f"of c_{client}")
            everyone = [kept.get(client, dict.fromkeys(net, 0.0)) for client in range(8)]
            for name in net:
                close(c[name], sum(row[name] for row in everyone) / 8 + np.zeros_like(c[name]), "c is the mean of c_i")
