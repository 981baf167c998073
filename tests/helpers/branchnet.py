"""A network of one ReLU layer and K linear heads in numpy, with gradients by hand; nothing here is the package's."""

import math

import numpy as np
import torch

from fedtide.core.base import Moment
from fedtide.core.rng import Rng
from helpers.toys import Played, played, toy

RATE, BATCH, EPOCHS = 0.1, 4, 2
TRAINING = {
    "local": {"lr": RATE, "batch_size": BATCH, "epochs": EPOCHS},
    "server": {"kind": "keras-adam", "lr": 0.05, "eps": 1e-4},
}
"""Options of the runs that naive networks are compared with."""


class Net:
    """One hidden layer `dense1`, then `head` repeated: parameters as a dict of float64 arrays, named as the product's.

    The names are the only thing it has in common with the package.
    """

    def __init__(self, params: dict[str, np.ndarray]) -> None:
        self.p = {name: np.array(value, dtype=np.float64) for name, value in params.items()}
        self.branches = sum(".copies." in name for name in self.p) // 2

    def copy(self) -> "Net":
        return Net(self.p)

    def features(self, x: np.ndarray) -> np.ndarray:
        z = x @ self.p["model.dense1.weight"].T + self.p["model.dense1.bias"]
        return np.where(z > 0, z, 0.0)

    def logits(self, h: np.ndarray, k: int) -> np.ndarray:
        return h @ self.p[f"model.head.copies.{k}.weight"].T + self.p[f"model.head.copies.{k}.bias"]

    def errors(self, h: np.ndarray, y: np.ndarray, k: int, eps: float = 0.0) -> np.ndarray:
        """p - ((1 - eps) onehot + eps/C) of each row at branch k: its gradient of cross-entropy by the logits."""
        p = softmax(self.logits(h, k))
        classes = p.shape[1]
        return p - ((1 - eps) * np.eye(classes)[y] + eps / classes)

    def gradient(self, x: np.ndarray, y: np.ndarray, chosen: int, lam: float, eps: float) -> dict[str, np.ndarray]:
        """Of CE(logits_chosen, y) + lam * mean over the others of CE(logits, (1 - eps) onehot + eps/C)."""
        h = self.features(x)
        errors = [
            self.errors(h, y, k) if k == chosen else lam / (self.branches - 1) * self.errors(h, y, k, eps)
            for k in range(self.branches)
        ]
        return self.back(x, h, [error / len(x) for error in errors])

    def back(self, x: np.ndarray, h: np.ndarray, errors: list[np.ndarray]) -> dict[str, np.ndarray]:
        """The gradient by the parameters, from those by the logits of each branch."""
        back = np.zeros_like(h)
        out = {}
        for k, error in enumerate(errors):
            out[f"model.head.copies.{k}.weight"] = error.T @ h
            out[f"model.head.copies.{k}.bias"] = error.sum(0)
            back += error @ self.p[f"model.head.copies.{k}.weight"]
        back[h <= 0] = 0.0
        out["model.dense1.weight"] = back.T @ x
        out["model.dense1.bias"] = back.sum(0)
        return out

    def train(self, x, y, chosen: int, lam: float, eps: float, key: Rng) -> "Net":
        """Train on the rows as they are shuffled by `key`."""
        return self.sgd(len(y), lambda net, rows: net.gradient(x[rows], y[rows], chosen, lam, eps), key)

    def sgd(self, count: int, gradient, key: Rng) -> "Net":
        """Some epochs of plain SGD from here along `gradient(net, rows)`."""
        own = self.copy()
        shuffle = key.torch()
        for _ in range(EPOCHS):
            order = torch.randperm(count, generator=shuffle).numpy()
            for i in range(0, count, BATCH):
                for name, g in gradient(own, order[i : i + BATCH]).items():
                    own.p[name] -= RATE * g
        return own


def softmax(logits: np.ndarray) -> np.ndarray:
    """Of each row."""
    p = np.exp(logits - logits.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True)


class KerasAdam:
    """FedAdam as Keras does it: bias correction in the step size, eps outside it; every parameter counts its steps."""

    def __init__(self, net: Net, rate: float = 0.05, eps: float = 1e-4, b1: float = 0.9, b2: float = 0.999) -> None:
        self.lr, self.eps, self.b1, self.b2 = rate, eps, b1, b2
        self.t = dict.fromkeys(net.p, 0)
        self.m = {name: np.zeros_like(p) for name, p in net.p.items()}
        self.v = {name: np.zeros_like(p) for name, p in net.p.items()}

    def step(self, net: Net, d: dict[str, np.ndarray]) -> Net:
        """What `d` leaves out stays as it is."""
        new = net.copy()
        for name in d:
            self.t[name] += 1
            alpha = self.lr * math.sqrt(1 - self.b2 ** self.t[name]) / (1 - self.b1 ** self.t[name])
            self.m[name] = self.b1 * self.m[name] + (1 - self.b1) * d[name]
            self.v[name] = self.b2 * self.v[name] + (1 - self.b2) * d[name] ** 2
            new.p[name] = net.p[name] + alpha * self.m[name] / (np.sqrt(self.v[name]) + self.eps)
        return new


def shard_of(population, client: int, moment) -> tuple[np.ndarray, np.ndarray]:
    """A client's rows as float64."""
    shard = population.shard(client, moment)
    return shard.x.double().numpy(), shard.y.numpy()


def participants(population, t: int, rounds: int):
    """The four participants of a round with their rows, and the keys of their shuffles."""
    moment = Moment(t, rounds, float(t))
    for client in population.arrivals(4, moment).tolist():
        yield client, *shard_of(population, client, moment), Rng(0).at(t, client, "train", "shuffle")


def linear_shares(t: int, period: int, components: int) -> list[float]:
    """The share of each component, linear in its distance from its peak."""
    s = t % period
    if components == 2:
        q = abs(2 * s / period - 1)
        return [q, 1 - q]
    away = [abs(s - k * period / components) for k in range(components)]
    return [max(0.0, 1 - components * min(d, period - d) / period) for d in away]


def weighted_mean(updates: list[tuple[Net, int]], start: Net) -> dict[str, np.ndarray]:
    """sum n_i (w_i - w) / sum n_i, from the clients' networks and their rows."""
    total = sum(n for _, n in updates)
    return {name: sum(n * (net.p[name] - start.p[name]) for net, n in updates) / total for name in start.p}


def as_numpy(params: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in params.items()}


def close(ours, theirs, what: str) -> None:
    """To 1e-8."""
    np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-8, atol=1e-8, err_msg=what)


def close_params(ours, theirs, when: str) -> None:
    """Compare all parameters that the package has."""
    for name, value in ours.items():
        close(value, theirs[name], f"{name} {when}")


def noted_run(algorithm: str, options, *, memory=None, **changes) -> tuple[Played, "Noted"]:
    """The package's run in float64, and what its fleet noted."""
    noted: list[Noted] = []
    experiment = toy(algorithm, options, precision="fp64", **changes)
    return played(experiment, fleet=lambda fleet: noted.append(Noted(fleet)) or noted[0], memory=memory), noted[0]


class Noted:
    """A fleet that keeps, of each round, the branch that each client trained and what clients revealed."""

    def __init__(self, fleet) -> None:
        self.fleet, self.branches, self.rows = fleet, [], []

    def __getattr__(self, name: str):
        return getattr(self.fleet, name)

    def ask(self, *args, **named):
        reply = self.fleet.ask(*args, **named)
        notes = self.fleet.queries[-1].notes
        self.branches.append({client: int(note.branch) for client, note in notes.items() if note.branch is not None})
        self.rows.append(reply.rows)
        return reply
