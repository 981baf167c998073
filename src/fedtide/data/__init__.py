"""Where rows come from, which client holds which, and how that changes with time.

>>> import fedtide as ft, torch
>>> x, y = torch.randn(100, 3), torch.arange(100) % 4
>>> people = ft.population(x, y, ft.data.DirichletEqual(clients=5, alpha=0.3), split=ft.data.Split(test=0.5))
>>> people.registered
5
"""

from fedtide.data.groups import ByLabels, ByPool, Groups, OneGroup, Split, Unseen
from fedtide.data.partition import (
    IID,
    ByGroup,
    DirichletClass,
    DirichletEqual,
    Majority,
    Natural,
    Pachinko,
    Partition,
    Resample,
    Rotation,
    Shards,
)
from fedtide.data.population import Population
from fedtide.data.prepare import CentreCrop, Normalise, Prepare, Shrink, Standardise
from fedtide.data.rows import Rows
from fedtide.data.sources import (
    CIFAR,
    CSV,
    IDX,
    LEAF,
    NPZ,
    DayNightCharacters,
    GasSensors,
    Gaussians,
    Generated,
    Images,
    Manifest,
    PlayRoles,
    Pools,
    Source,
    Text,
)

__all__ = [
    "CIFAR", "CSV", "IDX", "IID", "LEAF", "NPZ", "ByGroup", "ByLabels", "ByPool", "CentreCrop",
    "DayNightCharacters", "DirichletClass", "DirichletEqual", "GasSensors", "Gaussians", "Generated", "Groups",
    "Images", "Majority", "Manifest", "Natural", "Normalise", "OneGroup", "Pachinko", "Partition", "PlayRoles",
    "Pools", "Population", "Prepare", "Resample", "Rotation", "Rows", "Shards", "Shrink", "Source", "Split",
    "Standardise", "Text", "Unseen",
]  # fmt: skip


def __dir__() -> list[str]:
    return __all__
