"""Branches and mixtures: Gaussians, where they begin and how far they move, priors, rhythms and FedTKM's `alpha`.

>>> import fedtide as ft
>>> ft.mixtures.KMeansPlusPlus(rounds=6).kind, ft.mixtures.Certainty(a0=0.3).kind
('k-means++', 'certainty')
"""

from fedtide.mixtures.feature_gaussians import GaussianInit, KMeansPlusPlus, Public, Random
from fedtide.mixtures.step_size import Alpha, Certainty, Integral, Leaky, Overwrite, PerPeriod, Update

__all__ = [
    "Alpha", "Certainty", "GaussianInit", "Integral", "KMeansPlusPlus", "Leaky", "Overwrite", "PerPeriod",
    "Public", "Random", "Update",
]  # fmt: skip
