"""Sources of Rows: frozen dataclasses with `load(directory, seed)`."""

from typing import Annotated

from pydantic import Field

from fedtide.data.sources.arrays import NPZ, Python, from_arrays
from fedtide.data.sources.bundled import DayNightCharacters, PlayRoles
from fedtide.data.sources.domains import Domains
from fedtide.data.sources.images import Images, Manifest
from fedtide.data.sources.published import CIFAR, IDX, LEAF, GasSensors
from fedtide.data.sources.series import Series
from fedtide.data.sources.synthetic import Gaussians, Generated
from fedtide.data.sources.tabular import CSV
from fedtide.data.sources.text import Text

Source = Annotated[
    DayNightCharacters
    | PlayRoles
    | IDX
    | CIFAR
    | Images
    | Manifest
    | LEAF
    | NPZ
    | CSV
    | Series
    | GasSensors
    | Text
    | Python
    | Gaussians
    | Generated
    | Domains,
    Field(discriminator="kind"),
]  # fmt: skip


__all__ = [
    "CIFAR", "CSV", "IDX", "LEAF", "NPZ", "DayNightCharacters", "Domains", "GasSensors", "Gaussians", "Generated",
    "Images", "Manifest", "PlayRoles", "Python", "Series", "Source", "Text", "from_arrays",
]  # fmt: skip
