"""Gradients of a layer for many clients from one pass: those that each client has by itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedtide.core.base import Shard
from fedtide.core.rng import Rng
from fedtide.learn import shared_passes as gradients
from fedtide.learn.losses import WSM
from fedtide.learn.shared_passes import layer_gradients
from fedtide.learn.target import NumberTarget
from fedtide.learn.task import ROWS, Task

SIZES = (5, 1, 9, 2)
"""Rows of the clients; the second has one, and the last one class."""


def dense():
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(), nn.Linear(4, 3))


def plain():
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1, bias=False))


class Words(nn.Module):
    """A class for every step of a sequence, from layers that share no weights."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5)

    def forward(self, x):
        return self.head(self.embed(x))


class Tied(Words):
    """The same, whose last layer is the embedding."""

    def __init__(self):
        super().__init__()
        self.head.weight = self.embed.weight


class Twice(nn.Module):
    """A layer that is used twice."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 6)

    def forward(self, x):
        return self.head(self.head(x.flatten(1)).relu())


def pictures(sizes=SIZES):
    draw = torch.Generator().manual_seed(0)
    made = [
        Shard(torch.randn(n, 2, 3, generator=draw), torch.randint(3, (n,), generator=draw), torch.arange(n))
        for n in sizes
    ]
    made[-1].y.fill_(1)
    return made


def sequences():
    draw, made = torch.Generator().manual_seed(0), []
    for n in SIZES:
        x, y = (torch.randint(1, 5, (n, 4), generator=draw) for _ in range(2))
        mask = torch.arange(4) < torch.randint(1, 5, (n, 1), generator=draw)
        made.append(Shard(x, y.masked_fill(~mask, 0), torch.arange(n), mask=mask))
    return made


def numbers():
    return [Shard(one.x, one.y.float(), one.ids) for one in pictures()]


HEAD = ("5.weight", "5.bias")
CASES = {
    "rows": (Task(dense), pictures, HEAD, True),
    "float64": (Task(dense, dtype=torch.float64), pictures, HEAD, True),
    "a loss that looks at all of a client's labels": (Task(dense, loss=WSM()), pictures, HEAD, True),
    "a loss of one's own": (Task(dense, loss=nn.CrossEntropyLoss(label_smoothing=0.1)), pictures, HEAD, True),
    "numbers": (Task(plain, target=NumberTarget(0.5, 1.0, 1.0)), numbers, ("3.weight",), True),
    "sequences": (Task(Words), sequences, ("head.weight", "head.bias"), True),
    "weights that are used elsewhere": (Task(Tied), sequences, ("embed.weight",), False),
    "a layer that is used twice": (Task(Twice), pictures, ("head.weight", "head.bias"), False),
    "all layers": (Task(dense), pictures, ("1.weight", "1.bias", *HEAD), False),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_of_several_clients_are_those_of_each(case, monkeypatch):
    task, shards, names, together = CASES[case]
    weights, shards = task.init(Rng(0)), shards()
    alone = [task.gradient(weights, shard, train=False, names=names)[0] for shard in shards]
    asked = []
    whole = Task.gradient
    monkeypatch.setattr(Task, "gradient", lambda *given, **more: asked.append(1) or whole(*given, **more))
    found = layer_gradients(task, weights, shards, names)
    assert len(asked) == (0 if together else len(shards))
    for ours, theirs in zip(found, alone, strict=True):
        assert list(ours) == list(names)
        for name in names:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-6)
            assert ours[name].dtype == task.dtype
            assert not ours[name].requires_grad


def test_a_client_that_fills_a_pass_goes_alone():
    task, shards = Task(dense), pictures((3, ROWS + 1, 4))
    weights = task.init(Rng(0))
    assert [len(some) for some in gradients._passes(shards)] == [1, 1, 1]
    for ours, shard in zip(layer_gradients(task, weights, shards, HEAD), shards, strict=True):
        alone = task.gradient(weights, shard, train=False, names=HEAD)[0]
        torch.testing.assert_close(ours, alone, rtol=1e-5, atol=1e-6)
