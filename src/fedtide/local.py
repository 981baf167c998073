"""Parts of a client's training: schedules of its learning rate, augmentation, gradient terms.

>>> import fedtide as ft
>>> ft.LocalTrainer(augment=(ft.local.Flip(),)).augment
(Flip(p=0.5, kind='flip'),)
"""

from fedtide.learn.augment import Augment, Flip, RandomCrop
from fedtide.learn.local import Fitted, Term
from fedtide.learn.schedule import Constant, Cosine, Exponential, Schedule, Steps
from fedtide.learn.terms import Correction, Proximal

__all__ = [
    "Augment", "Constant", "Correction", "Cosine", "Exponential", "Fitted", "Flip", "Proximal", "RandomCrop",
    "Schedule", "Steps", "Term",
]  # fmt: skip
