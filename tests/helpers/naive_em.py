"""Naive rounds of FedEM, pFedEM and FedGMM in numpy float64, row by row; nothing here is the package's.

Marfoq et al. 2021, Algorithm 1; Chen et al., *Adaptive Personalized Federated Learning for Non-IID Data with Continual
Distribution Shift*, section III; Wu et al. 2023 (ALGORITHMS 6.2 to 6.4). Every function takes arrays, gives fresh
arrays and changes none of its arguments.

A model is a dict with `head.weight` (classes, d) and `head.bias`: softmax regression; with `dense1.weight` and
`dense1.bias` there is a layer of ReLU before it. Rows of any shape are flattened.

A client is `Rows(x, y, shuffle)`: `shuffle(k)` is called whenever model k starts training, and gives a function that
makes an order of so many rows each time an epoch starts. Clients are a dict from id to `Rows`, those who take part.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Model = dict[str, np.ndarray]
Order = Callable[[int], np.ndarray]

LEAST_BLEND = 1e-12  # of FedEM and FedGMM, before the logarithm
LEAST_MASS = 1e-8  # posteriors of a component on a client that sum to less say nothing
LEAST_PI = 1e-3  # of pFedEM's components after a round


class Rows(NamedTuple):
    """What a client holds, and how it shuffles."""

    x: np.ndarray
    y: np.ndarray
    shuffle: Callable[[int], Order]


# -- models ------------------------------------------------------------------------------------------------------------


def flat(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, dtype=np.float64).reshape(len(x), -1)


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max())
    return e / e.sum()


def hidden(w: Model, row: np.ndarray) -> np.ndarray:
    """What the head sees of one row."""
    if "dense1.weight" not in w:
        return row
    z = w["dense1.weight"] @ row + w["dense1.bias"]
    return np.where(z > 0, z, 0.0)


def probabilities(w: Model, row: np.ndarray) -> np.ndarray:
    return softmax(w["head.weight"] @ hidden(w, row) + w["head.bias"])


def cross_entropies(models: list[Model], x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """-log p_k(y_s | x_s), (rows, K)."""
    return np.array([[-math.log(probabilities(w, row)[c]) for w in models] for row, c in zip(flat(x), y, strict=True)])


def gradient(w: Model, x: np.ndarray, y: np.ndarray, weight: np.ndarray) -> Model:
    """Of (1/B) sum_s weight_s * CE_s, over the B rows given."""
    out = {name: np.zeros_like(value) for name, value in w.items()}
    for row, c, q in zip(flat(x), y, weight, strict=True):
        h, error = hidden(w, row), probabilities(w, row)
        error[c] -= 1
        error *= q / len(x)
        out["head.weight"] += np.outer(error, h)
        out["head.bias"] += error
        if "dense1.weight" in w:
            back = np.where(h > 0, w["head.weight"].T @ error, 0.0)
            out["dense1.weight"] += np.outer(back, row)
            out["dense1.bias"] += back
    return out


def sgd(
    w: Model, x: np.ndarray, y: np.ndarray, weight: np.ndarray, order: Order,
    *, lr: float, batch_size: int, epochs: int | None = None, local_steps: int | None = None,
) -> Model:  # fmt: skip
    """Plain SGD on `gradient`, for so many epochs or so many steps, in batches of min(batch_size, rows); 0 is all rows.

    The last batch of an epoch has what is left, and the rows are shuffled again after it.
    """
    assert (epochs is None) != (local_steps is None)
    w, size = dict(w), min(batch_size or len(y), len(y))
    per_epoch = -(-len(y) // size)
    todo = epochs * per_epoch if local_steps is None else local_steps
    for i in range(todo):
        if i % per_epoch == 0:
            rows = np.asarray(order(len(y)))
            assert sorted(rows) == list(range(len(y)))
        now = rows[i % per_epoch * size :][:size]
        g = gradient(w, x[now], y[now], weight[now])
        w = {name: w[name] - lr * g[name] for name in w}
    return w


def aggregated(start: Model, updates: list[tuple[Model, float]], total: float) -> Model:
    """w + sum_i weight_i (w_i - w) / total; w where there is nothing to divide by."""
    if total == 0:
        return dict(start)
    return {name: old + sum(n * (own[name] - old) for own, n in updates) / total for name, old in start.items()}


# -- Gaussians ---------------------------------------------------------------------------------------------------------


def projected(x: np.ndarray, center: np.ndarray, components: np.ndarray) -> np.ndarray:
    """Frozen features z = (x - center) @ components, (rows, d)."""
    return (flat(x) - center) @ components


def diagonal_log_density(z: np.ndarray, mu: np.ndarray, var: np.ndarray) -> float:
    """log N(z | mu, diag var) of one row and one component, dimension by dimension."""
    total = 0.0
    for a, m, v in zip(z, mu, var, strict=True):
        total -= 0.5 * ((a - m) ** 2 / v + math.log(v) + math.log(2 * math.pi))
    return total


def full_log_density(z: np.ndarray, mu: np.ndarray, cov: np.ndarray) -> float:
    """log N(z | mu, cov) of one row and one component."""
    sign, log_determinant = np.linalg.slogdet(cov)
    assert sign > 0
    distance = (z - mu) @ np.linalg.inv(cov) @ (z - mu)
    return float(-0.5 * (distance + log_determinant + len(z) * math.log(2 * math.pi)))


def posteriors(
    density: Callable[[np.ndarray, np.ndarray, np.ndarray], float],
    z: np.ndarray, mu: np.ndarray, spread: np.ndarray, pi: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """gamma_k(z) = pi_k N(z | mu_k, spread_k) / sum over the components (Eq. 8), (rows, K)."""
    joint = [[math.log(p) + density(row, m, s) for p, m, s in zip(pi, mu, spread, strict=True)] for row in z]
    return np.array([softmax(np.array(row)) for row in joint]).reshape(len(z), len(pi))


# -- FedEM -------------------------------------------------------------------------------------------------------------


def responsibilities(pi: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """q_k(s) = softmax_k(log pi_k - loss_k(s)), (rows, K)."""
    return np.array([softmax(np.log(np.maximum(pi, LEAST_BLEND)) - each) for each in losses])


def fedem_round(
    models: list[Model], blends: dict[int, np.ndarray], clients: dict[int, Rows],
    **local: Any,
) -> tuple[list[Model], dict[int, np.ndarray], dict[int, np.ndarray]]:  # fmt: skip
    """One round of FedEM with K models that share nothing, and a server that takes the mean over who took part.

    `blends` are pi_i (K,) of clients that took part before, 1/K for the others; a client without rows changes nothing;
    `local` are options of `sgd`. Returns the models, the blends of all clients so far, and the posteriors (rows, K) of
    those who took part.
    """
    K, blends, seen = len(models), dict(blends), {}
    updates: list[list[tuple[Model, float]]] = [[] for _ in models]
    for i, (x, y, shuffle) in clients.items():
        if not len(y):
            continue
        # E-step: once a round, with the models as received.
        q = responsibilities(blends.get(i, np.full(K, 1 / K)), cross_entropies(models, x, y))
        seen[i], blends[i] = q, q.mean(0)
        # M-step: divided by the rows of a batch, not by the sum of its posteriors.
        for k, w in enumerate(models):
            updates[k].append((sgd(w, x, y, q[:, k], shuffle(k), **local), len(y)))
    new = [aggregated(w, mine, sum(n for _, n in mine)) for w, mine in zip(models, updates, strict=True)]
    return new, blends, seen


# -- pFedEM ------------------------------------------------------------------------------------------------------------


class PFedEM(NamedTuple):
    """What the server has after a round, and what clients did.

    `split` are the components of each client's rows, `own` its mu_i, var_i, pi_i, `counts` its |D_ik|.
    """

    models: list[Model]
    mu: np.ndarray
    var: np.ndarray
    pi: np.ndarray
    split: dict[int, np.ndarray]
    own: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]]
    counts: dict[int, np.ndarray]


def floored(var: np.ndarray, floor: float) -> np.ndarray:
    """At least 1e-6 and `floor` times the mean over components and dimensions."""
    return np.maximum(var, max(1e-6, floor * var.mean()))


def clipped(pi: np.ndarray, least: float, most: float = math.inf) -> np.ndarray:
    """In [least, most] and then divided by the sum."""
    pi = np.minimum(np.maximum(pi, least), most)
    return pi / pi.sum()


def m_step(
    z: np.ndarray, gamma: np.ndarray, mu: np.ndarray, var: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """mu_i, var_i, pi_i by Eq. 9 to 11; a component that no row could come from keeps the mean and variance given."""
    mu, var, pi = np.array(mu, dtype=np.float64), np.array(var, dtype=np.float64), np.zeros(len(mu))
    for k in range(len(mu)):
        mass = sum(gamma[n, k] for n in range(len(z)))
        pi[k] = mass / len(z)
        if mass >= LEAST_MASS:
            mu[k] = sum(gamma[n, k] * z[n] for n in range(len(z))) / mass
            var[k] = sum(gamma[n, k] * (z[n] - mu[k]) ** 2 for n in range(len(z))) / mass
    return mu, var, pi


def step_size(update: str, share: float, K: int, slow: float = 0.3) -> float:
    """a_k: how far component k goes towards what the clients found."""
    if update == "overwrite":
        return 1.0
    assert update == "certainty"
    return slow if K == 1 else slow * max(0.0, (K * share - 1) / (K - 1))


def pfedem_round(
    models: list[Model], mu: np.ndarray, var: np.ndarray, pi: np.ndarray, clients: dict[int, Rows],
    *, center: np.ndarray, components: np.ndarray, weights: str = "members", update: str = "certainty",
    floor: float = 1e-3, least_share: float = 1e-6, **local: Any,
) -> PFedEM:  # fmt: skip
    """One round of pFedEM on frozen features.

    Means and variances are (K, d), shares (K,), center (D,) and components (D, d) as in `projected`; `local` is for
    `sgd`. Variances are floored by `floored` where densities are computed, and moved as they are; shares are kept in
    [least_share, 1 - least_share] where posteriors are computed. A client without rows changes nothing.

    Args:
        weights: "participants" is Eq. 5, where a client without rows of a component counts with its n_i; "members"
            weighs by |D_ik|.
        update: of mu and var, "overwrite" (Eq. 12 and 13) or "certainty".
    """
    assert weights in ("participants", "members")
    K = len(models)
    split, own, counts = {}, {}, {}
    updates: list[list[tuple[Model, float]]] = [[] for _ in models]
    everyone = 0
    for i, (x, y, shuffle) in clients.items():
        if not len(y):
            continue
        z = projected(x, center, components)
        pi_now = clipped(pi, least_share, 1 - least_share)
        gamma = posteriors(diagonal_log_density, z, mu, floored(var, floor), pi_now)  # Eq. 8
        own[i] = m_step(z, gamma, mu, var)
        split[i] = np.array([int(np.argmax(each)) for each in gamma])  # the first of equals; gamma is that of Eq. 8
        counts[i] = np.array([sum(split[i] == k) if gamma[:, k].sum() >= LEAST_MASS else 0 for k in range(K)])
        everyone += len(y)
        for k, w in enumerate(models):
            if counts[i][k]:
                mine = np.flatnonzero(split[i] == k)
                ones = np.ones(len(mine))
                fitted = sgd(w, x[mine], y[mine], ones, shuffle(k), **local)
                updates[k].append((fitted, len(y) if weights == "participants" else int(counts[i][k])))
    members = [sum(int(c[k]) for c in counts.values()) for k in range(K)]
    totals = [everyone] * K if weights == "participants" else members
    new = [aggregated(w, mine, total) for w, mine, total in zip(models, updates, totals, strict=True)]  # Eq. 5
    mu, var, pi = (np.array(a, dtype=np.float64) for a in (mu, var, pi))
    if not sum(members):
        return PFedEM(new, mu, var, pi, split, own, counts)
    for k in range(K):
        if members[k]:
            a = step_size(update, members[k] / sum(members), K)
            mu[k] += a * (sum(counts[i][k] * own[i][0][k] for i in own) / members[k] - mu[k])  # Eq. 12
            var[k] += a * (sum(counts[i][k] * own[i][1][k] for i in own) / members[k] - var[k])  # Eq. 13
    pi = clipped(np.array([n / sum(members) for n in members]), LEAST_PI)  # Eq. 14
    return PFedEM(new, mu, var, pi, split, own, counts)


# -- FedGMM ------------------------------------------------------------------------------------------------------------


class FedGMM(NamedTuple):
    """What the server has after a round, the blends (M1, M2) of all clients so far, and each client's mu_i and S_i."""

    models: list[Model]
    mu: np.ndarray
    cov: np.ndarray
    blends: dict[int, np.ndarray]
    own: dict[int, tuple[np.ndarray, np.ndarray]]


def joint_posteriors(z: np.ndarray, mu: np.ndarray, cov: np.ndarray, pi: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """g(s, m1, m2) = softmax over the pairs of log pi(m1, m2) + log N(z_s | mu_m1, S_m1) - loss_m2(s)."""
    g = np.zeros((len(z), *pi.shape))
    for s in range(len(z)):
        for m1 in range(pi.shape[0]):
            density = full_log_density(z[s], mu[m1], cov[m1])
            for m2 in range(pi.shape[1]):
                g[s, m1, m2] = math.log(max(pi[m1, m2], LEAST_BLEND)) + density - losses[s, m2]
        g[s] = softmax(g[s])
    return g


def regularized(z: np.ndarray, r: np.ndarray, more: float = 0.1) -> tuple[np.ndarray, np.ndarray]:
    """mu = sum r z / (sum r + 0.1) and S = sum r (z - mu)(z - mu)^T / (sum r + 0.1) + 0.1 I, from r (rows,)."""
    mass = sum(r) + more
    mu = sum(r[s] * z[s] for s in range(len(z))) / mass
    cov = sum(r[s] * np.outer(z[s] - mu, z[s] - mu) for s in range(len(z))) / mass
    return mu, cov + more * np.eye(z.shape[1])


def fedgmm_round(
    models: list[Model], mu: np.ndarray, cov: np.ndarray, blends: dict[int, np.ndarray], clients: dict[int, Rows],
    *, center: np.ndarray, components: np.ndarray, em_steps: int = 1, train: str = "each", **local: Any,
) -> FedGMM:  # fmt: skip
    """One round of FedGMM on frozen features.

    There are M2 models, means (M1, d), covariances (M1, d, d), and blends pi_i (M1, M2) of clients with earlier rounds,
    uniform for the others; `local` are options of `sgd`. A client without rows changes nothing.

    Args:
        em_steps: how often a client goes through all of it, each time from what it has.
        train: whether the learners are trained in "each" of these or after the "last" alone.
    """
    assert train in ("each", "last")
    M1, M2 = len(mu), len(models)
    blends, own = dict(blends), {}
    gammas: dict[int, np.ndarray] = {}
    fitted: dict[int, list[Model]] = {}
    for i, (x, y, shuffle) in clients.items():
        if not len(y):
            continue
        z = projected(x, center, components)
        pi = blends.get(i, np.full((M1, M2), 1 / (M1 * M2)))
        mu_i, cov_i, mine = np.array(mu, dtype=np.float64), np.array(cov, dtype=np.float64), list(models)
        for e in range(em_steps):
            g = joint_posteriors(z, mu_i, cov_i, pi, cross_entropies(mine, x, y))
            pi = g.mean(0)
            for m1 in range(M1):
                mu_i[m1], cov_i[m1] = regularized(z, g[:, m1].sum(1))
            if train == "each" or e == em_steps - 1:
                mine = [sgd(w, x, y, g[:, :, m2].sum(1), shuffle(m2), **local) for m2, w in enumerate(mine)]
        blends[i], own[i], fitted[i], gammas[i] = pi, (mu_i, cov_i), mine, len(y) * pi
    mu, cov = np.array(mu, dtype=np.float64), np.array(cov, dtype=np.float64)
    for m1 in range(M1):
        total = sum(gamma[m1].sum() for gamma in gammas.values())
        if total:
            mu[m1] = sum(gammas[i][m1].sum() * own[i][0][m1] for i in own) / total
            cov[m1] = sum(gammas[i][m1].sum() * own[i][1][m1] for i in own) / total
    new = []
    for m2, w in enumerate(models):
        each = [(fitted[i][m2], float(gammas[i][:, m2].sum())) for i in fitted]
        new.append(aggregated(w, each, sum(n for _, n in each)))
    return FedGMM(new, mu, cov, blends, own)
