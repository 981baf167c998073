"""Local optimizers: the steps of torch's, and none of its compiler."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from fedtide.core.trees import same
from fedtide.learn.local import LocalOptimizer, LocalTrainer

SETTINGS = {
    "sgd": (LocalTrainer(weight_decay=0.1), lambda p: torch.optim.SGD(p, lr=0.3, weight_decay=0.1)),
    "momentum": (
        LocalTrainer(momentum=0.9, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9, weight_decay=0.1),
    ),
    "adam": (
        LocalTrainer(optimizer="adam", weight_decay=0.1),
        lambda p: torch.optim.Adam(p, lr=0.3, weight_decay=0.1),
    ),
    "adamw": (
        LocalTrainer(optimizer="adamw", weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.3, weight_decay=0.1),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SETTINGS)
def test_steps_are_those_of_torch_to_the_bit(name, dtype):
    local, made = SETTINGS[name]
    generator = torch.Generator().manual_seed(0)
    begin = [torch.randn(shape, generator=generator, dtype=dtype) for shape in [(), (5,), (3, 40, 7)]]
    ours, theirs = [p.clone() for p in begin], [nn.Parameter(p.clone()) for p in begin]
    step, optimizer = LocalOptimizer(local, 0.3, ours), made(theirs)
    for number in range(30):
        gradient = [torch.randn(p.shape, generator=generator, dtype=dtype) for p in begin]
        for param, part in zip(theirs, gradient, strict=True):
            param.grad = part.clone()
        optimizer.step()
        step(ours, gradient, number)
        assert same(ours, [p.detach() for p in theirs])


TRAINED = """
import sys, torch
import fedtide as ft
from fedtide.core.base import Moment, Shard
from fedtide.core.rng import Rng
task = ft.Task(lambda: torch.nn.Linear(3, 2))
shard = Shard(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64), torch.arange(4))
for local in (ft.LocalTrainer(momentum=0.9), ft.LocalTrainer(optimizer="adamw")):
    local(task, task.loss, task.init(Rng(0)), shard, Moment(0, 1, 0.0), Rng(0))
print("torch._dynamo" in sys.modules)
"""


def test_training_does_not_wait_for_a_compiler():
    made = subprocess.run([sys.executable, "-c", TRAINED], capture_output=True, text=True, check=True)
    assert made.stdout.split() == ["False"]
