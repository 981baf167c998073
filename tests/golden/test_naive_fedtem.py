"""An independent naive FedTEM in numpy float64, with its gradients by hand: every state over 13 rounds to 1e-8.

It shares no code with the package but the population (who is there, who holds what) and the keys of the shuffles.
"""

import math
from itertools import product

import numpy as np
import pytest

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
    weighted_mean,
)

ROUNDS = 13
LAM, EPS, BETA, A0, PERIOD = 0.25, 0.5, 0.9, 0.3, 6
DATA = {"partition": {"kind": "dirichlet-class", "clients": 8, "alpha": 1.0, "min_samples": 5}}


def gamma_of(z, mu, var, pi):
    """Posteriors (rows, K) and log joints, one number at a time where that is bearable."""
    components = len(mu)
    share = np.clip(pi, 1e-6, 1 - 1e-6)
    share = share / share.sum()
    joint = np.empty((len(z), components))
    for b in range(len(z)):
        for k in range(components):
            log_n = 0.0
            for j in range(z.shape[1]):
                log_n += (z[b, j] - mu[k, j]) ** 2 / var[k, j] + math.log(var[k, j]) + math.log(2 * math.pi)
            joint[b, k] = -0.5 * log_n + math.log(share[k])
    top = joint.max(1, keepdims=True)
    gamma = np.exp(joint - top)
    return gamma / gamma.sum(1, keepdims=True), joint, share


def expected_share(kind, t, before, now):
    """q_1(t), by the formulas of the specification; None where there is no prior."""
    s = t % PERIOD
    if kind == "linear":
        return abs(2 * s / PERIOD - 1)
    if kind == "cosine":
        return (math.cos(2 * math.pi * s / PERIOD) + 1) / 2
    if kind == "uniform":
        return 0.5
    if kind == "em-only":
        return None
    assert kind == "soft"
    if s == 0:
        return 1.0
    if s < PERIOD // 2:
        return min(before, now)
    return 0.0 if s == PERIOD // 2 else max(before, now)


def expected_shares(kind, t, before, now, components):
    """q(t) of each component; None where there is no prior."""
    if components == 2:
        q1 = expected_share(kind, t, before, now)
        return None if q1 is None else [q1, 1 - q1]
    if kind == "em-only":
        return None
    hats = linear_shares(t, PERIOD, components)
    return hats if kind == "linear" else [(1 - math.cos(math.pi * hat)) / 2 for hat in hats]


def placed(stats, q):
    """The mode of each participant: sorted for two, for more the best of all placements that have the right counts."""
    m, components = len(stats), len(q)
    if components == 2:
        n1 = math.floor(q[0] * m + 0.5 + 1e-9)
        order = sorted(stats, key=lambda s: (-s[1][0], s[2][1] - s[2][0], s[0]))
        return {s[0]: 0 if place < n1 else 1 for place, s in enumerate(order)}
    room = [math.floor(share * m + 1e-9) for share in q]
    left = sorted(range(components), key=lambda k: (-round(q[k] * m - room[k], 9), k))
    for k in left[: m - sum(room)]:
        room[k] += 1
    best, value = None, None
    for modes in product(range(components), repeat=m):
        if [modes.count(k) for k in range(components)] == room:
            likely = sum(math.log(max(s[1][k], 1e-12)) for s, k in zip(stats, modes, strict=True))
            joint = sum(s[2][k] for s, k in zip(stats, modes, strict=True))
            if best is None or (likely > value[0] + 1e-9) or (abs(likely - value[0]) <= 1e-9 and joint > value[1]):
                best, value = modes, (likely, joint)
    return {s[0]: k for s, k in zip(stats, best, strict=True)}


def naive(
    population,
    net,
    mu,
    *,
    prior,
    update,
    selection="greedy",
    branches=2,
    var_floor=1e-3,
    consistent_only=True,
    optimizer,
):
    """Yield (network, mu, var, pi, choices, statistics, sizes of modes) after each round."""
    components = branches
    assert mu.shape[0] == net.branches == branches
    var, pi = np.ones_like(mu), np.full(components, 1 / components)
    started, before = [False] * components, None
    for t in range(ROUNDS):
        v = np.maximum(var, max(1e-6, var_floor * var.mean()))
        updates, choices, stats, likelier, rows_seen = [], {}, [], 0, 0
        for client, x, y, key in sorted(participants(population, t, ROUNDS), key=lambda one: one[0]):
            gamma, joint, share = gamma_of(net.features(x), mu, v, pi)
            score = gamma.mean(0)
            if selection == "bayes":
                score = joint.sum(0) - (len(y) - 1) * np.log(share)
            k = int(np.argmax(score))
            choices[client] = k
            own = net.train(x, y, k, LAM, EPS, key)
            z = own.features(x)
            gamma, joint, _ = gamma_of(z, mu, v, pi)
            center = z.mean(0)
            odds = joint.mean(0) - joint.mean(0)[0]
            stats.append((client, gamma.mean(0), odds, center, ((z - center) ** 2).mean(0), len(y)))
            updates.append((own, len(y)))
            likelier += int((gamma[:, 0] > gamma[:, 1]).sum())
            rows_seen += len(y)
        net = optimizer.step(net, weighted_mean(updates, net))
        q = expected_shares(prior, t, before, likelier / rows_seen, components)
        before = None if q is None else q[0]
        member = {i: int(np.argmax(pt)) for i, pt, *_ in stats} if q is None else placed(stats, q)
        mass = [sum(s[5] for s in stats if member[s[0]] == k) for k in range(components)]
        mu, var = mu.copy(), var.copy()
        for k in range(components):
            if not mass[k]:
                continue
            inside = [s for s in stats if member[s[0]] == k]
            if consistent_only:
                inside = [s for s in inside if int(np.argmax(s[1])) == k] or inside
            kept = sum(s[5] for s in inside)
            center = sum(s[5] * s[3] for s in inside) / kept
            spread = sum(s[5] * s[4] for s in inside) / kept
            a = 1.0
            if update == "certainty":
                if prior in ("em-only", "uniform"):
                    a = A0 * mass[k] / sum(mass)
                else:
                    a = A0 * max(0.0, (components * q[k] - 1) / (components - 1))
                if a == 0:
                    continue
                if not started[k]:
                    a = 1.0
                started[k] = True
            mu[k] += a * (center - mu[k])
            var[k] += a * (spread - var[k])
        pi = BETA * pi + (1 - BETA) * np.array(mass) / sum(mass)
        pi = pi / pi.sum()
        yield net, mu, var, pi, choices, stats, np.bincount(list(member.values()), minlength=components)


CASES = [
    {"prior": "cosine", "update": "certainty"},
    {"prior": "cosine", "update": "overwrite", "selection": "bayes"},
    {"prior": "linear", "update": "overwrite", "var_floor": 0.7},
    {"prior": "soft", "update": "certainty"},
    {"prior": "uniform", "update": "certainty"},
    {"prior": "linear", "update": "overwrite", "consistent_only": False},
    {"prior": "em-only", "update": "certainty"},
    {"prior": "linear", "update": "certainty", "branches": 3},
    {"prior": "em-only", "update": "overwrite", "branches": 3},
]
ALIKE = [
    {"prior": "linear", "update": "overwrite"},
    {"prior": "linear", "update": "certainty"},
    {"prior": "cosine", "update": "certainty", "consistent_only": False},
    {"prior": "soft", "update": "overwrite"},
    {"prior": "em-only", "update": "overwrite"},
    {"prior": "cosine", "update": "overwrite", "branches": 3},
]
"""Of priors, updates and branches that others have, in other pairs."""


@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.thorough) for case in ALIKE)],
    ids=lambda case: " ".join(map(str, case.values())),
)
def test_a_naive_implementation_agrees_to_1e_8(case):
    """A period of 6 has no round in which the first of two shares is one half."""
    kind = case["prior"]
    prior = {"kind": kind} | ({} if kind in ("uniform", "em-only") else {"period": PERIOD})
    options = {
        **TRAINING,
        **case,
        "prior": prior,
        "consistent_only": case.get("consistent_only", True),
        "update": {"kind": "certainty", "a0": A0} if case["update"] == "certainty" else "overwrite",
        "lam": LAM,
        "eps": EPS,
        "beta": BETA,
    }
    shift = {"who": {"kind": "periodic", "period": PERIOD}}
    run, noted = noted_run("fedtem", options, rounds=ROUNDS, data=DATA, shift=shift)
    start = run.steps[0].received
    net = Net(as_numpy(start.weights.params))
    optimizer = KerasAdam(net)
    rounds = naive(run.host.population, net, start.mu.numpy(), optimizer=optimizer, **case)
    seen = set()
    for t, (step, branches, ours) in enumerate(zip(run.steps, noted.branches, rounds, strict=True)):
        net, mu, var, pi, choices, stats, assigned = ours
        assert branches == choices, f"round {t}"
        assert step.facts["assigned"].tolist() == assigned.tolist(), f"round {t}"
        for column, name in enumerate(("pi", "odds", "mu", "var", "n"), start=1):
            close(noted.rows[t][name], np.array([s[column] for s in stats]), f"{name} of clients in round {t}")
        close_params(step.state.weights.params, net.p, f"after round {t}")
        close(step.state.mu, mu, f"mu after round {t}")
        close(step.state.var, var, f"var after round {t}")
        close(step.state.pi, pi, f"pi after round {t}")
        seen |= set(choices.values())
    if kind not in ("em-only", "uniform", "soft"):
        assert seen == set(range(case.get("branches", 2)))
