"""Local training on one client (tasks, trainers, losses, terms of the gradient), and server optimizers.

>>> import fedtide as ft
>>> ft.LocalTrainer(augment=(ft.learn.Flip(),)).augment
(Flip(p=0.5, kind='flip'),)
"""

from fedtide.learn.augment import Augment, Flip, RandomCrop
from fedtide.learn.local import Fitted, LocalTrainer, Term
from fedtide.learn.server import KERAS, SGD, Server, step_server
from fedtide.learn.steps import Losses, Steps, Stepwise, Train
from fedtide.learn.task import Task
from fedtide.learn.terms import Correction, Proximal
from fedtide.learn.training import Training, Weighting, client_weight

__all__ = [
    "KERAS", "SGD", "Augment", "Correction", "Fitted", "Flip", "LocalTrainer", "Losses", "Proximal", "RandomCrop",
    "Server", "Steps", "Stepwise", "Task", "Term", "Train", "Training", "Weighting", "client_weight", "step_server",
]  # fmt: skip
