"""Models that clients make for themselves from those that they receive.

>>> import fedtide as ft
>>> ft.personal.Choice().kind
'choice'
"""

from fedtide.personal.neighbors import Neighbors
from fedtide.personal.own_models import OWN_MODELS, by_own_mean, by_own_weights, predict_by_memory
from fedtide.personal.ways import Alone, Choice, Ensemble, FineTuned, Mixture, Personal, Stacking

__all__ = [
    "OWN_MODELS", "Alone", "Choice", "Ensemble", "FineTuned", "Mixture", "Neighbors", "Personal", "Stacking",
    "by_own_mean", "by_own_weights", "predict_by_memory",
]  # fmt: skip
