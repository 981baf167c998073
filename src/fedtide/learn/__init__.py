"""Local training on one client (tasks, trainers, losses, terms of the gradient), and server optimizers.

>>> import fedtide as ft
>>> ft.LocalTrainer(augment=(ft.learn.Flip(),)).augment
(Flip(p=0.5, kind='flip'),)
"""

from fedtide.learn.augment import Augment, Flip, RandomCrop
from fedtide.learn.local import Fitted, LocalTrainer, Term
from fedtide.learn.steps import Losses, Steps, Stepwise, Train
from fedtide.learn.task import Task
from fedtide.learn.terms import Correction, Proximal
from fedtide.learn.training import Training

__all__ = [
    "Augment", "Correction", "Fitted", "Flip", "LocalTrainer", "Losses", "Proximal", "RandomCrop", "Steps",
    "Stepwise", "Task", "Term", "Train", "Training",
]  # fmt: skip
