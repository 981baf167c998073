"""Local training on one client (tasks, trainers, losses, terms of the gradient), and server optimizers.

>>> import fedtide as ft
>>> ft.LocalTrainer(augment=(ft.learn.Flip(),)).augment
(Flip(p=0.5, kind='flip'),)
"""

from fedtide.learn.by_batch import ModelByBatch, mean_loss
from fedtide.learn.local import Augment, Fitted, Flip, LocalTrainer, LocalUpdate, RandomCrop, training_cost
from fedtide.learn.server import KERAS, SGD, Server, step_server
from fedtide.learn.steps import Losses, Steps, Stepwise, Train, local_update, mean_losses
from fedtide.learn.task import Task, refuse_without_likelihood
from fedtide.learn.terms import Correction, Curvature, Distill, Proximal, Summed, Term, Terms
from fedtide.learn.training import FairTraining, Training, Weighting, answer_update, client_weight, fair_totals

__all__ = [
    "KERAS", "SGD", "Augment", "Correction", "Curvature", "Distill", "FairTraining", "Fitted", "Flip", "LocalTrainer",
    "LocalUpdate", "Losses", "ModelByBatch", "Proximal", "RandomCrop", "Server", "Steps", "Stepwise", "Summed",
    "Task", "Term", "Terms", "Train", "Training", "Weighting", "answer_update", "client_weight", "fair_totals",
    "local_update", "mean_loss", "mean_losses", "refuse_without_likelihood", "step_server", "training_cost",
]  # fmt: skip
