"""Losses, which training minimizes: the `loss` of a task or a method. Modules and functions of torch will do, too.

>>> import fedtide as ft, torch
>>> task = ft.Task(lambda: torch.nn.Linear(3, 2), loss=ft.losses.WSM())
>>> smooth = ft.Task(lambda: torch.nn.Linear(3, 2), loss=torch.nn.CrossEntropyLoss(label_smoothing=0.1))
>>> task.loss.kind
'wsm'
"""

from fedtide.learn.loss import CrossEntropy, Loss
from fedtide.learn.wsm import WSM

__all__ = ["WSM", "CrossEntropy", "Loss"]
