"""Features of a row that the Gaussians of a mixture see: `features` of FedGMM and pFedEM.

>>> import fedtide as ft
>>> ft.features.PCA(width=4).width
4
"""

from fedtide.multi.features import PCA, Features, Frozen, Network

__all__ = ["PCA", "Features", "Frozen", "Network"]
