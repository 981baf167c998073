"""What the Gaussians of a mixture see of a row: `features` of FedGMM and pFedEM.

>>> import fedtide as ft
>>> ft.features.Principal(width=4).width
4
"""

from fedtide.multi.features import Features, Frozen, Network, Principal

__all__ = ["Features", "Frozen", "Network", "Principal"]
