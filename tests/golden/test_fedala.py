"""FedALA by pencil and paper, and a naive implementation.

The quadratics of quadratics.py, whose model is one layer; gradient x on the one row of client 0. It keeps v = 3 and
W = 1/2, and receives w = 1: v^ = 3 + (1 - 3) / 2 = 2 with gradient 2. With eta = 1/16 one pass makes W = 1/2 - 1/16 * 2
* (1 - 3) = 3/4, so v^ = 3 - 3/2 = 3/2. A step of 1/2 ends at 3/4: the update is 3/4 - 1 = -1/4.
"""

import numpy as np
import pytest
import torch

from fedtide.algorithms.fedala import fedala
from fedtide.core.base import Moment, Shard
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng, draw_some
from fedtide.laws.case import judged
from fedtide.learn.local import LocalTrainer
from helpers.by_batch import DATA, LOCAL, batches, close, gradient, rounds
from helpers.quadratics import TASK, at
from helpers.toys import network_of, played, toy

NOW = Moment(0, 1)
ROW = Shard(torch.ones(1, 1, dtype=torch.float64), torch.tensor([0]), torch.arange(1))
ONE = LocalTrainer(lr=0.5, batch_size=0)


def number(w: float) -> dict[str, torch.Tensor]:
    return at(w).params


def test_a_round_by_hand_and_the_mix_by_which_a_client_judges():
    algorithm = fedala(TASK, ONE, eta=1 / 16)
    memory = {"own": number(3.0), "mix": number(0.5)}
    answer = algorithm.works["train"](at(1.0), memory, ROW, NOW, Rng(0))
    assert float(answer.update.params["weight"]) == -0.25
    assert float(answer.memory["own"]["weight"]) == 0.75
    assert float(answer.memory["mix"]["weight"]) == 0.75
    adapted = algorithm.adapt(at(1.0), memory, ROW, NOW, Rng(0)).memory
    told = algorithm.predict(at(1.0), [adapted, None], ROW.x.expand(2, 1), torch.tensor([0, 1])).told
    assert torch.equal(told, torch.cat([TASK.predict_rows(at(w), ROW.x) for w in (1.5, 1.0)]))


def test_a_client_that_has_never_trained_starts_from_the_global_model():
    algorithm = fedala(TASK, ONE)
    answer = algorithm.works["train"](at(1.0), None, ROW, NOW, Rng(0))
    assert float(answer.update.params["weight"]) == -0.5
    assert answer.memory["mix"] is None
    assert algorithm.adapt(at(1.0), None, ROW, NOW, Rng(0)).memory is None
    assert algorithm.works["train"](at(1.0), answer.memory, ROW.pick(slice(0, 0)), NOW, Rng(0)) is None


def test_the_first_time_it_is_learned_until_losses_settle():
    """From v = 1 and w = 3 the gradient is v^ = 1 + 2 W, so W falls by (1 + 2 W) / 8 and is 0 after four passes."""
    algorithm = fedala(TASK, ONE, eta=1 / 16)
    adapted = algorithm.adapt(at(3.0), {"own": number(1.0), "mix": None}, ROW, NOW, Rng(0)).memory
    assert float(adapted["mix"]["weight"]) == 0.0
    one = algorithm.adapt(at(3.0), {"own": number(1.0), "mix": number(1.0)}, ROW, NOW, Rng(0)).memory
    assert float(one["mix"]["weight"]) == 1 - 3 / 8


def test_more_layers_than_the_model_has_are_refused():
    with pytest.raises(FedtideError, match="layers: found 2, allowed: 0 to 1, the layers of the model"):
        fedala(TASK, layers=2)


def test_without_layers_clients_judge_as_in_fedavg():
    runs = [
        played(toy(name, {"local": LOCAL, **own}, precision="fp64"))
        for name, own in (("fedala", {"layers": 0}), ("fedavg", {}))
    ]
    ours, theirs = (judged(run)[-1] for run in runs)
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("layers", [1, 2])
def test_a_naive_implementation_agrees_to_1e_10(layers):
    """Two tensors a layer; deviations of ten losses by numpy."""
    options = {"local": LOCAL, "layers": layers, "share": 0.6, "eta": 0.5}
    run = played(toy("fedala", options, precision="fp64", data=DATA, rounds=5))
    model, k = network_of(run.steps[0].received.weights), 4 - 2 * layers
    passes = []

    def cross_entropy(point, x, y):
        hidden = (x.double() @ point[0].T + point[1]).relu()
        logp = (hidden @ point[2].T + point[3]).log_softmax(1)
        return -float(logp[torch.arange(len(y)), y].mean())

    def mixed(w, v, mix):
        return [*w[:k], *(b + (a - b) * c for a, b, c in zip(w[k:], v, mix, strict=True))]

    def learned(w, v, mix, shard, key):
        first, losses = mix is None, []
        mix = [torch.ones_like(a) for a in v] if first else mix
        chosen = draw_some(torch.arange(len(shard)), max(int(0.6 * len(shard)), 1), key.at("rows"))
        while True:
            total = 0.0
            for x, y in batches(shard.pick(chosen), key.at(len(losses)), epochs=1):
                point = mixed(w, v, mix)
                total += cross_entropy(point, x, y) * len(y)
                each = zip(mix, gradient(model, point, x, y)[k:], w[k:], v, strict=True)
                mix = [(c - 0.5 * g * (a - b)).clamp(0, 1) for c, g, a, b in each]
            losses.append(total / len(chosen))
            if not first or (len(losses) > 10 and np.std(losses[-10:]) < 0.1):
                passes.append(len(losses))
                return mix

    def work(w, memory, shard, key):
        v, mix = memory or (None, None)
        if v is None:
            point = w
        else:
            mix = learned(w, v, mix, shard, key.at("mix"))
            point = mixed(w, v, mix)
        for x, y in batches(shard, key):
            point = [p - 0.1 * g for p, g in zip(point, gradient(model, point, x, y), strict=True)]
        return point, (point[k:], mix)

    memories: dict = {}
    for step, w in zip(run.steps, rounds(run.host.population, model, work, memories), strict=True):
        close(step.state.weights, w)
    assert {1, 11} <= set(passes)
    for client, (v, mix) in memories.items():
        found = run.fleet.engine.memory.read(client, (99, 0))
        for one, other in zip(found["own"].values(), v, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
        for one, other in zip((found["mix"] or {}).values(), mix or [], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    assert any(float(leaf.min()) < 1 for _, mix in memories.values() if mix for leaf in mix)
