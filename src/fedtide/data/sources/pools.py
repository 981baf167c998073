"""Several sources side by side, as pools: one by day, another by night."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import ConfigDict, Field

from fedtide.core.errors import FedtideError
from fedtide.core.values import Spelled
from fedtide.data.rows import Rows
from fedtide.data.sources.arrays import NPZ, Python
from fedtide.data.sources.characters import DayNightCharacters
from fedtide.data.sources.cifar import CIFAR
from fedtide.data.sources.gaussians import Gaussians
from fedtide.data.sources.idx import IDX
from fedtide.data.sources.table import CSV

OneSource = Annotated[DayNightCharacters | IDX | CIFAR | NPZ | CSV | Python | Gaussians, Field(discriminator="kind")]


@dataclass(frozen=True)
class Pools:
    """Sources put together; each becomes a pool.

    Args:
        names: of the pools, in order.
        sources: one source per pool.
        labels: "disjoint" shifts the labels of each source behind those of the ones before; "shared" keeps them.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")
    names: tuple[str, ...]
    sources: tuple[Annotated[OneSource, Spelled], ...]
    labels: Literal["disjoint", "shared"] = "disjoint"
    kind: Literal["pools"] = "pools"

    def __post_init__(self) -> None:
        if len(self.names) != len(self.sources) or len(self.names) < 2:
            raise ValueError(f"{len(self.names)} names for {len(self.sources)} sources; give two or more of each")

    def load(self, directory: Path | None, seed: int) -> Rows:
        """Read all of them."""
        parts = [source.load(directory, seed) for source in self.sources]
        shapes = {part.shape for part in parts}
        if len(shapes) > 1:
            raise FedtideError(f"data.source.sources: rows of different shapes: {', '.join(map(str, sorted(shapes)))}")
        first = [0]
        for part in parts:
            first.append(first[-1] + part.classes)
        shared = self.labels == "shared"
        held_out = [torch.zeros(len(p), dtype=torch.bool) if p.held_out is None else p.held_out for p in parts]
        return Rows(
            " + ".join(self.names),
            torch.cat([part.x for part in parts]),
            torch.cat([part.y + (0 if shared else first[k]) for k, part in enumerate(parts)]),
            max(part.classes for part in parts) if shared else first[-1],
            torch.repeat_interleave(torch.arange(len(parts)), torch.tensor([len(part) for part in parts])),
            self.names,
            held_out=torch.cat(held_out) if any(part.held_out is not None for part in parts) else None,
        )
