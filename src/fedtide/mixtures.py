"""Gaussians of mixtures: where they begin (`gaussian_init`) and how far they move in a round (`update`).

>>> import fedtide as ft
>>> ft.mixtures.KMeansPlusPlus(rounds=6).kind, ft.mixtures.Certainty(a0=0.3).kind
('k-means++', 'certainty')
"""

from fedtide.multi.gmm_init import GaussianInit, KMeansPlusPlus, Public, Random
from fedtide.parts.step_size import Certainty, Overwrite, Share, Update

__all__ = ["Certainty", "GaussianInit", "KMeansPlusPlus", "Overwrite", "Public", "Random", "Share", "Update"]
