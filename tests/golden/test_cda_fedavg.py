"""CDA-FedAvg: its detector and its memory by hand, and against a naive implementation in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedtide.algorithms.cda_fedavg import cda_fedavg, largest_score, pick_evenly
from fedtide.core.base import Moment, Shard
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.learn.local import LocalTrainer
from fedtide.learn.task import Task
from helpers.toys import network_of, played, toy, trained_plainly

ROUNDS = 12
DATA = {
    "source": {"kind": "gaussians", "samples": 240, "dims": 4, "classes": 3, "domains": 2},
    "partition": {"kind": "dirichlet-class", "clients": 9, "alpha": 1.0, "min_samples": 8},
    "groups": {"by": "none"},
}
SHIFT = {"who": "always", "what": {"kind": "domain-mixture", "curve": "linear", "cycles": 2, "samples": 12}}
TASK = Task(lambda: nn.Linear(1, 2, bias=False), dtype=torch.float64)


def window(*q: float) -> torch.Tensor:
    return torch.tensor(q, dtype=torch.float64)


def test_the_score_by_hand():
    """Before: 0.9 and 0.7, mean 0.8 and variance 0.01, so 0.16 / 0.01 - 1 = 15: Beta(12, 3), 1092 q^11 (1 - q)^2.

    After: 0.5 +- sqrt 0.05, so 0.25 / 0.05 - 1 = 4: Beta(2, 2), 6 q (1 - q). The two have the product 0.2, and so have
    their complements: the density after is 1.2 at both, and the logarithms of the other add up to
    2 log 1092 + 13 log 0.2.
    """
    root = math.sqrt(0.05)
    found = largest_score(window(0.9, 0.7, 0.5 + root, 0.5 - root), 0.05, 2)
    assert found == pytest.approx(2 * math.log(1.2 / 1092) - 13 * math.log(0.2), abs=1e-9)


def test_only_a_fall_is_a_change_and_both_parts_need_enough_confidences():
    high, low = (0.9, 0.8, 0.9), (0.5, 0.4, 0.5)
    assert largest_score(window(*high, *low), 0.05, 3) > 3
    assert largest_score(window(*low, *high), 0.05, 3) == -math.inf
    assert largest_score(window(*high, *low), 0.05, 4) == -math.inf
    assert largest_score(window(*high, *low), 0.5, 3) == -math.inf  # it falls by less than a half
    assert largest_score(window(*[1.0] * 3, *[0.0] * 3), 0.05, 3) > 3  # without a variance, and certain


def rows(x: float, ids: int, *y: int) -> Shard:
    count = len(y)
    return Shard(torch.full((count, 1), x, dtype=torch.float64), torch.tensor(y), torch.arange(ids, ids + count))


def test_rows_of_the_concept_before_are_remembered():
    """The model says 1 / (1 + e^-4x): rows at 1 are sure and rows at 0.1 are not, in the second round."""
    algorithm = cda_fedavg(TASK, LocalTrainer(lr=0.1), sensitivity=0.2, part=4, window=12, remembered=3)
    work, weights = algorithm.works["train"], TASK.init(Rng(0))
    weights.params["weight"].copy_(torch.tensor([[4.0], [0.0]]))
    first, second = rows(1.0, 0, 0, 0, 0, 1), rows(0.1, 10, 0, 0, 1, 1)
    answers, memory = [], None
    for number, shard in enumerate((first, first, second, second)):
        answers.append(work(weights, memory, shard, Moment(number, 9), Rng(number)))
        memory = answers[-1].memory
    assert [answer.total["changes"].value for answer in answers] == [0, 0, 1, 0]
    assert [len(answer.memory["q"]) for answer in answers] == [4, 8, 0, 4]
    assert [answer.total["loss"].weight for answer in answers] == [4, 4, 7, 7]
    assert [old.ids.tolist() for old in memory["past"]] == [[0, 1, 3]]
    assert memory["concept"].ids.tolist() == [10, 11, 12]
    again = work(weights, memory, first, Moment(9, 9), Rng(9))
    assert again.total["loss"].weight == 4  # rows that it holds again count once


def test_a_window_keeps_no_more_confidences_than_it_says():
    """Three rows and three rows are six: four are left."""
    algorithm = cda_fedavg(TASK, LocalTrainer(lr=0.1), part=2, window=4)
    weights, memory = TASK.init(Rng(0)), None
    for number in range(2):
        answer = algorithm.works["train"](weights, memory, rows(1.0, 0, 0, 0, 1), Moment(number, 9), Rng(0))
        memory = answer.memory
    assert (answer.total["changes"].value, len(memory["q"])) == (0, 4)


def test_rows_are_picked_evenly():
    shard = rows(0.0, 0, 1, 1, 1, 1, 0, 1, 0)
    assert pick_evenly(shard, 5).ids.tolist() == [0, 1, 2, 4, 6]
    assert pick_evenly(shard, 9).ids.tolist() == list(range(7))


def test_a_window_that_no_change_fits_is_refused():
    with pytest.raises(FedtideError, match="window: found 100, allowed: at least 200, twice `part`"):
        cda_fedavg(TASK, window=100)


def beta(q: list[float]):
    m = sum(q) / len(q)
    v = max(sum((a - m) ** 2 for a in q) / len(q), 1e-8)
    common = m * (1 - m) / v - 1
    a, b = m * common, (1 - m) * common
    norm = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    return lambda x: norm + (a - 1) * math.log(x) + (b - 1) * math.log(1 - x)


def changes(q: list[float], lam: float, delta: int) -> bool:
    """Algorithm 5, place by place."""
    scores = [0.0]
    for k in range(delta, len(q) - delta + 1):
        before, after = q[:k], q[k:]
        if sum(after) / len(after) <= (1 - lam) * sum(before) / len(before):
            f_b, f_a = beta(before), beta(after)
            scores.append(sum(f_a(x) - f_b(x) for x in after))
    return max(scores) > -math.log(lam)


def naive(population, model: nn.Module) -> tuple[nn.Module, list[int]]:
    windows, concepts, past, found, longest = {}, {}, {}, [], 0
    for number in range(ROUNDS):
        moment, count = Moment(number, ROUNDS, float(number)), 0
        total = {name: torch.zeros_like(p) for name, p in model.state_dict().items()}
        weight = 0
        for client in population.arrivals(4, moment).tolist():
            shard = population.shard(client, moment)
            with torch.no_grad():
                sure = F.softmax(model(shard.x.double()), 1).max(1).values.tolist()
            windows[client] = (windows.get(client, []) + sure)[-16:]
            concepts.setdefault(client, shard)
            if changes(windows[client], 0.02, 3):
                past.setdefault(client, []).append(concepts[client])
                concepts[client], windows[client], count = shard, [], count + 1
            x, y, ids = shard.x, shard.y, shard.ids.tolist()
            for old in reversed(past.get(client, [])):
                new = [row for row, name in enumerate(old.ids.tolist()) if name not in ids]
                x, y = torch.cat([x, old.x[new]]), torch.cat([y, old.y[new]])
                ids += [old.ids.tolist()[row] for row in new]
            longest = max(longest, len(ids))
            rows = Shard(x, y, torch.tensor(ids))
            trained = trained_plainly(model, rows, Rng(0).at(number, client, "train"))
            for name, p in trained.state_dict().items():
                total[name] += len(ids) * (p - model.state_dict()[name])
            weight += len(ids)
        found.append(count)
        model.load_state_dict({name: p + total[name] / weight for name, p in model.state_dict().items()})
    assert longest > 12  # some remembered rows that they hold no more
    return model, found


def test_a_naive_implementation_agrees_to_1e_9():
    local = {"lr": 0.1, "batch_size": 4, "epochs": 2}
    options = {"local": local, "sensitivity": 0.02, "part": 3, "window": 16, "remembered": 1400}
    run = played(toy("cda-fedavg", options, rounds=ROUNDS, precision="fp64", data=DATA, shift=SHIFT))
    expected, found = naive(run.host.population, network_of(run.steps[0].received.weights))
    assert sum(found) > 2
    assert [int(step.facts["changes"]) for step in run.steps] == found
    for name, value in run.state.weights.params.items():
        torch.testing.assert_close(value, expected.state_dict()[name], rtol=1e-9, atol=1e-9)
