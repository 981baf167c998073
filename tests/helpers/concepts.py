"""Two concepts of two rows, at 1 and -1, whose labels B swaps; a model that turns to either in a round."""

from __future__ import annotations

import torch
from torch import nn

from fedtide.learn.local import LocalTrainer
from fedtide.learn.task import Task
from helpers.stages import holding


def zero() -> nn.Module:
    """Both weights 0, whatever the key."""
    module = nn.Linear(1, 2, bias=False)
    nn.init.zeros_(module.weight)
    return module


TASK = Task(zero, dtype=torch.float64)
TURN = LocalTrainer(lr=4.0, epochs=10, batch_size=0)
X = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
A, B = torch.tensor([1, 0]), torch.tensor([0, 1])


def concepts(names: str, before: int = 0):
    """A client for each letter: A, B, or a dot for one without rows."""
    held = [(X[:0], A[:0]) if name == "." else (X, A if name == "A" else B) for name in names]
    return holding(held, classes=2, before=before)
