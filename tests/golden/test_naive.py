"""An independent naive FedAvg, and its FedOpt kin, in plain torch and float64: same weights over 12 rounds to 1e-9.

It shares no code with the package but the population (who is there, who holds what) and the shuffles, which it draws
from the same keys: everything else is written out with modules, optimizers and state dicts.
"""

import pytest
import torch
from torch import nn

from fedtide.core.base import Moment
from fedtide.core.rng import Rng
from helpers.toys import network_of, played, toy, trained_plainly

ROUNDS = 12
DATA = {"partition": {"kind": "dirichlet-class", "clients": 8, "alpha": 1.0, "min_samples": 5}}


def naive(population, model: nn.Module, rounds: int, cohort: int, update) -> dict[str, torch.Tensor]:
    """Deep copies, SGD and weighted state dicts; `update(old, mean, memo)` is the server's step."""
    memo = {}
    for r in range(rounds):
        moment = Moment(r, rounds, float(r))
        mean, total = {name: torch.zeros_like(p) for name, p in model.state_dict().items()}, 0
        for client in population.arrivals(cohort, moment).tolist():
            shard = population.shard(client, moment)
            own = trained_plainly(model, shard, Rng(0).at(r, client, "train"))
            for name, value in own.state_dict().items():
                mean[name] += len(shard) * (value - model.state_dict()[name])
            total += len(shard)
        new = {}
        for name, value in model.state_dict().items():
            new[name] = update(name, value, mean[name] / total, memo, r + 1)
        model.load_state_dict(new)
    return model.state_dict()


def plain(name, old, d, memo, t):
    return old + d


def keras(name, old, d, memo, t):
    m, v = memo.get(name, (0.0, 0.0))
    m, v = 0.9 * m + 0.1 * d, 0.999 * v + 0.001 * d**2
    memo[name] = (m, v)
    return old + 0.05 * (1 - 0.999**t) ** 0.5 / (1 - 0.9**t) * m / (v.sqrt() + 1e-4)


def momentum(name, old, d, memo, t):
    memo[name] = 0.5 * memo.get(name, 0.0) + d
    return old + 0.7 * memo[name]


def reddi(name, old, d, memo, t):
    m, v = memo.get(name, (0.0, 1e-3**2))
    m, v = 0.9 * m + 0.1 * d, 0.99 * v + 0.01 * d**2
    memo[name] = (m, v)
    return old + 0.02 * m / (v**0.5 + 1e-3)


def adagrad(name, old, d, memo, t):
    m, v = memo.get(name, (0.0, 1e-2**2))
    m, v = 0.5 * m + 0.5 * d, v + d**2
    memo[name] = (m, v)
    return old + 0.05 * m / (v**0.5 + 1e-2)


def yogi(name, old, d, memo, t):
    """v moves by 0.01 d^2 towards d^2: up where it is smaller, down where it is larger."""
    m, v = memo.get(name, (0.0, 1e-3**2))
    m, v = 0.9 * m + 0.1 * d, torch.where(d**2 > v, v + 0.01 * d**2, v - 0.01 * d**2)
    memo[name] = (m, v)
    return old + 0.02 * m / (v**0.5 + 1e-3)


@pytest.mark.parametrize(
    ("algorithm", "options", "update"),
    [
        ("fedavg", {}, plain),
        ("fedavgm", {"server": {"lr": 0.7, "momentum": 0.5}}, momentum),
        ("fedavg", {"server": {"kind": "keras-adam", "lr": 0.05, "eps": 1e-4}}, keras),
        ("fedadam", {"server": {"lr": 0.02}}, reddi),
        ("fedadagrad", {"server": {"lr": 0.05, "eps": 1e-2, "beta1": 0.5}}, adagrad),
        ("fedyogi", {"server": {"lr": 0.02}}, yogi),
    ],
    ids=["fedavg", "fedavgm", "keras-adam", "fedadam", "fedadagrad", "fedyogi"],
)
def test_a_naive_implementation_agrees_to_1e_9(algorithm, options, update):
    local = {"lr": 0.1, "batch_size": 4, "epochs": 2}
    experiment = toy(algorithm, {"local": local, **options}, rounds=ROUNDS, precision="fp64", data=DATA)
    run = played(experiment)
    model = network_of(run.steps[0].received.weights)
    expected = naive(run.host.population, model, ROUNDS, 4, update)
    for name, value in run.state.weights.params.items():
        assert value.dtype == torch.float64
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-9)
