"""Data sources, partitions over clients, and changes of both over time.

>>> import fedtide as ft, torch
>>> x, y = torch.randn(100, 3), torch.arange(100) % 4
>>> people = ft.population(x, y, ft.data.Dirichlet(clients=5, alpha=0.3), split=ft.data.Split(test=0.5))
>>> people.registered
5
"""

from fedtide.data.partition import (
    IID,
    ByDomain,
    ByGroup,
    ByLabels,
    DealtBy,
    Dirichlet,
    DirichletClass,
    Groups,
    HeldOutClients,
    LabelShards,
    LabelsInOrder,
    Majority,
    Natural,
    OneGroup,
    Pachinko,
    Partition,
    Resample,
    Rotation,
    Split,
)
from fedtide.data.population import Population
from fedtide.data.rows import Rows
from fedtide.data.sources import (
    CIFAR,
    CSV,
    IDX,
    LEAF,
    NPZ,
    DayNightCharacters,
    Domains,
    GasSensors,
    Gaussians,
    Generated,
    Images,
    Manifest,
    PlayRoles,
    Series,
    Source,
    Text,
    Texts,
)
from fedtide.data.sources.frames import stack, table
from fedtide.data.sources.texts import texts
from fedtide.data.targets import Counts, Labels, Number, Quantiles
from fedtide.data.transforms import CenterCrop, Downscale, Normalize, Prepare, Standardize

__all__ = [
    "CIFAR", "CSV", "IDX", "IID", "LEAF", "NPZ", "ByDomain", "ByGroup", "ByLabels", "CenterCrop", "Counts",
    "DayNightCharacters", "DealtBy", "Dirichlet", "DirichletClass", "Domains", "Downscale", "GasSensors", "Gaussians",
    "Generated", "Groups", "HeldOutClients", "Images", "LabelShards", "Labels", "LabelsInOrder", "Majority",
    "Manifest", "Natural", "Normalize", "Number", "OneGroup", "Pachinko", "Partition", "PlayRoles", "Population",
    "Prepare", "Quantiles", "Resample", "Rotation", "Rows", "Series", "Source", "Split", "Standardize", "Text",
    "Texts", "stack", "table", "texts",
]  # fmt: skip
