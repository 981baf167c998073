"""An independent naive FedTKM in numpy float64, with its gradients by hand: every state over 17 rounds to 1e-8.

It shares no code with the package but the population (who is there, who holds what) and the keys of the shuffles.
"""

import math

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

ROUNDS = 17
LAM, EPS, A0, PERIOD = 0.5, 0.2, 0.3, 8
DATA = {"partition": {"kind": "dirichlet-class", "clients": 8, "alpha": 1.0, "min_samples": 5}}


def nearest(z, c, alpha, distance) -> int:
    """The mode of a client: by the mean of norms, or by the votes of its rows; of equals the last."""
    modes = len(c)
    far = np.empty((len(z), modes))
    for b in range(len(z)):
        for k in range(modes):
            far[b, k] = alpha[k] * math.sqrt(sum((z[b, j] - c[k, j]) ** 2 for j in range(z.shape[1])))

    def last_least(values) -> int:
        return max(k for k in range(modes) if values[k] == min(values))

    if distance == "mean":
        return last_least(list(far.mean(0)))
    votes = [last_least(list(row)) for row in far]
    return last_least([-votes.count(k) for k in range(modes)])


def naive(population, net, c, *, distance, centers, eta, rho, schedule, clip, branches, optimizer):
    """Yield (network, centers, log alpha, choices) after each round."""
    log_alpha, started = [0.0] * branches, [False] * branches
    for t in range(ROUNDS):
        alpha = [math.exp(a) for a in log_alpha]
        updates, choices = [], {}
        sums, mass, counts = np.zeros_like(c), np.zeros(branches), [0] * branches
        for client, x, y, key in participants(population, t, ROUNDS):
            k = nearest(net.features(x), c, alpha, distance)
            choices[client] = k
            own = net.train(x, y, k, LAM, EPS, key)
            z = own.features(x)
            now = nearest(z, c, alpha, distance)
            counts[now] += 1
            sums[now] += len(y) * z.mean(0)
            mass[now] += len(y)
            if clip is not None:
                d = {name: own.p[name] - net.p[name] for name in net.p}
                norm = math.sqrt(sum(float((part**2).sum()) for part in d.values()))
                factor = min(1.0, clip / norm)
                own = Net({name: net.p[name] + factor * d[name] for name in net.p})
            updates.append((own, len(y)))
        net = optimizer.step(net, weighted_mean(updates, net))
        qbar = [count / sum(counts) for count in counts]
        q = linear_shares(t, PERIOD, branches)
        sure = [max(0.0, (branches * share - 1) / (branches - 1)) for share in q]
        before, c = c, c.copy()
        for k in range(branches):
            a = A0 * sure[k] if centers == "certainty" else 1.0
            if not mass[k] or not a:
                continue
            if not started[k]:
                a, started[k] = 1.0, True
            c[k] += a * (sums[k] / mass[k] - c[k])
        if centers == "carried":
            mean_move = sum(mass[k] * (c[k] - before[k]) for k in range(branches)) / sum(mass)
            for k in range(branches):
                if not mass[k]:
                    c[k] = before[k] + mean_move
        rate = eta if schedule == "constant" else eta * max(sure)
        log_alpha = [(1 - rho) * a for a in log_alpha]
        if branches == 2:  # Eq. 27
            log_alpha[1] += rate * (q[0] - qbar[0])
        else:
            log_alpha = [log_alpha[k] - rate / 2 * (q[k] - qbar[k]) for k in range(branches)]
            log_alpha = [a - log_alpha[0] for a in log_alpha]
        log_alpha = [min(5.0, max(-5.0, a)) for a in log_alpha]
        yield net, c, log_alpha, choices


CASES = [
    pytest.param("mean", "overwrite", 0.1, "zero-mid", None, 2, marks=pytest.mark.thorough),  # in the others' pairs
    pytest.param("mean", "certainty", 0.1, "zero-mid", None, 2, marks=pytest.mark.thorough),
    ("vote", "overwrite", 0.1, "zero-mid", None, 2),
    pytest.param("vote", "certainty", 0.3, "constant", None, 2, marks=pytest.mark.thorough),
    ("mean", "overwrite", 20.0, "zero-mid", None, 2),  # into the bounds of log alpha
    ("mean", "certainty", 0.1, "zero-mid", 0.3, 2),
    ("mean", "certainty", 0.3, "zero-mid", None, 3),
    ("vote", "overwrite", 0.3, "constant", None, 3),
]
RULES = [
    ("mean", "overwrite", {"kind": "leaky"}, 0.02, 0.05, 2),
    ("mean", "overwrite", {"kind": "leaky", "eta": 0.3, "rho": 0.2}, 0.3, 0.2, 3),
    ("mean", "carried", {"kind": "leaky"}, 0.02, 0.05, 3),
    ("vote", "overwrite", {"kind": "per-period", "eta": 2.4}, 2.4 / PERIOD, 0.0, 2),
]


@pytest.mark.parametrize(("distance", "centers", "eta", "schedule", "clip", "branches"), CASES)
def test_a_naive_implementation_agrees_to_1e_8(distance, centers, eta, schedule, clip, branches):
    largest = agree(distance, centers, {"kind": "integral", "eta": eta, "schedule": schedule}, eta, 0.0, clip, branches)
    assert largest == 5.0 if eta > 1 else 0.0 < largest < 5.0


@pytest.mark.parametrize(("distance", "centers", "rule", "eta", "rho", "branches"), RULES)
def test_a_naive_implementation_agrees_with_the_other_rules_for_alpha(distance, centers, rule, eta, rho, branches):
    assert agree(distance, centers, rule, eta, rho, None, branches) > 0


def agree(distance, centers, rule, eta, rho, clip, branches) -> float:
    """Compare all states of a run; return the largest log alpha."""
    schedule = rule.get("schedule", "zero-mid")
    options = {
        **TRAINING,
        "prior": {"kind": "linear", "period": PERIOD},
        "branches": branches,
        "lam": LAM,
        "eps": EPS,
        "distance": distance,
        "update": {"kind": "certainty", "a0": A0} if centers == "certainty" else "overwrite",
        "carry_centers": centers == "carried",
        "alpha": rule,
    } | ({} if clip is None else {"max_update_norm": clip})
    shift = {"who": {"kind": "periodic", "period": PERIOD}}
    run, noted = noted_run("fedtkm", options, rounds=ROUNDS, data=DATA, shift=shift)
    start = run.steps[0].received
    net = Net(as_numpy(start.weights.params))
    rounds = naive(
        run.host.population, net, start.centers.numpy(), distance=distance, centers=centers, eta=eta,
        rho=rho, schedule=schedule, clip=clip, branches=branches,
        optimizer=KerasAdam(net),
    )  # fmt: skip
    largest = 0.0
    for t, (step, branches, ours) in enumerate(zip(run.steps, noted.branches, rounds, strict=True)):
        net, c, log_alpha, choices = ours
        assert branches == choices, f"round {t}"
        close_params(step.state.weights.params, net.p, f"after round {t}")
        close(step.state.centers, c, f"centers after round {t}")
        close(step.state.log_alpha, log_alpha, f"log alpha after round {t}")
        largest = max(largest, *map(abs, log_alpha))
    return largest
