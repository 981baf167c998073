"""Mixtures: where Gaussians begin (`gaussian_init`), how far they move in a round (`update`), and FedTKM's `alpha`.

>>> import fedtide as ft
>>> ft.mixtures.KMeansPlusPlus(rounds=6).kind, ft.mixtures.Certainty(a0=0.3).kind
('k-means++', 'certainty')
"""

from fedtide.multi.gmm_init import GaussianInit, KMeansPlusPlus, Public, Random
from fedtide.parts.step_size import Alpha, Certainty, Integral, Leaky, Overwrite, PerPeriod, Share, Update

__all__ = [
    "Alpha", "Certainty", "GaussianInit", "Integral", "KMeansPlusPlus", "Leaky", "Overwrite", "PerPeriod", "Public",
    "Random", "Share", "Update",
]  # fmt: skip
