"""Assumptions about the rhythm by which groups take turns: `prior` of FedTEM and FedTKM.

>>> import fedtide as ft
>>> ft.priors.Cosine(period=8).kind
'cosine'
"""

from fedtide.parts.prior import Block, Cosine, EMOnly, Learned, Linear, Measured, Prior, Soft, Uniform

__all__ = ["Block", "Cosine", "EMOnly", "Learned", "Linear", "Measured", "Prior", "Soft", "Uniform"]
