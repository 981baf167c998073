"""What an algorithm is made of: the types in its signatures, and what goes around them.

>>> import fedtide as ft, torch
>>> ft.base.mean({"delta": ft.base.Sum(torch.tensor([6.0]), weight=3.0)})
{'delta': tensor([2.])}
"""

from fedtide.core.rng import Rng
from fedtide.core.sums import mean
from fedtide.core.types import (
    Algorithm,
    Answer,
    Fleet,
    Moment,
    Prediction,
    Reply,
    Shard,
    Slotted,
    Sum,
    Traits,
    Weighted,
    Weights,
    shared_weights,
)
from fedtide.learn.participation import with_cohort
from fedtide.learn.steps import Losses, Steps, Stepwise, Train
from fedtide.learn.training import Training

__all__ = [
    "Algorithm", "Answer", "Fleet", "Losses", "Moment", "Prediction", "Reply", "Rng", "Shard", "Slotted", "Steps",
    "Stepwise", "Sum", "Train", "Training", "Traits", "Weighted", "Weights", "mean", "shared_weights", "with_cohort",
]  # fmt: skip
