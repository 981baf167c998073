"""A population saved with its run: who holds what and who arrived when, as plain arrays, to be replayed exactly."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import ConfigDict
from torch import Tensor

from fedtide.core import codec
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.types import Moment
from fedtide.core.values import OpenFraction

LARGEST = 20_000_000
"""Index entries up to which who holds what is saved; beyond, the configuration and the seed have to do."""


def save(population: Any, path: Path, *, rounds: int, cohort: int) -> None:
    """Write what was drawn for a population.

    Args:
        population: a `fedtide.data.population.Population`.
        path: the file; written under another name first.
        rounds: for how many rounds arrivals are written.
        cohort: how many arrivals of each round.
    """
    moments = [Moment(r, rounds, 0.0) for r in range(rounds)] if population.shift.clock == "rounds" else []
    arrivals = [population.arrivals_in_order(cohort, moment) for moment in moments]
    table = torch.full((len(moments), cohort), -1, dtype=torch.int64)
    for row, came in zip(table, arrivals, strict=True):
        row[: len(came)] = came
    small = sum(len(part.rows) for part in population.parts.values()) <= LARGEST
    tree = {
        "registered": population.registered,
        "group": population.group,
        "group_names": list(population.group_names),
        "expected": torch.tensor(np.array([population.expected(m) for m in moments])),
        "arrivals": table,
        "parts": {name: {"start": p.start, "rows": p.rows} for name, p in population.parts.items()} if small else None,
        "rows": {"name": population.rows.name, "count": len(population.rows)},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    codec.to_file(temporary, tree)
    temporary.replace(path)


@dataclass(frozen=True)
class Replay:
    """The arrivals of another run, round by round, as its folder's `shift/<seed>.safetensors` has them.

    Args:
        path: that file.
        dropout: share of the asked clients that never answer.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")
    path: str
    dropout: OpenFraction = 0.0
    kind: Literal["replay"] = "replay"

    @cached_property
    def saved(self) -> dict[str, Any]:
        """The file's content."""
        return codec.from_file(Path(self.path))

    def _round(self, time: float) -> int:
        number, rounds = int(time), len(self.saved["arrivals"])
        if number >= rounds:
            raise FedtideError(
                f"shift.who.path: {self.path} ends after {rounds} rounds; allowed: rounds up to {rounds}"
            )
        return max(number, 0)

    def shares(self, time: float, sizes: np.ndarray) -> np.ndarray:
        """The expected share of each group among the arrivals (groups,)."""
        return self.saved["expected"][self._round(time)].numpy()

    def arrivals(self, m: int, groups: list[Tensor], time: float, rng: Rng) -> Tensor:
        """The first `m` that arrived then."""
        came = self.saved["arrivals"][self._round(time)]
        came = came[came >= 0]
        registered = sum(len(group) for group in groups)
        if len(came) < min(m, registered) or (len(came) and int(came.max()) >= registered):
            raise FedtideError(
                f"shift.who.path: {self.path} has {len(came)} arrivals a round among "
                f"{self.saved['registered']} clients; {m} among {registered} are asked for"
            )
        return came[:m]

    def awake(self, groups: list[Tensor], time: float, rng: Rng) -> Tensor:
        """Those that arrived then."""
        came = self.saved["arrivals"][self._round(time)]
        return came[came >= 0].sort().values


@dataclass(frozen=True)
class Saved:
    """Who holds what as in another run: the parts, groups and unseen clients of its `shift/<seed>.safetensors`.

    Args:
        path: that file.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")
    path: str
    kind: Literal["saved"] = "saved"

    @cached_property
    def saved(self) -> dict[str, Any]:
        """The file's content."""
        content = codec.from_file(Path(self.path))
        if content["parts"] is None:
            raise FedtideError(f"data.partition.path: {self.path} was too large to hold who has what")
        return content

    def fitting(self, rows: int, name: str) -> dict[str, Any]:
        """The file's content, if it was made from as many rows."""
        made = self.saved["rows"]
        if made["count"] != rows:
            raise FedtideError(
                f"data.partition.path: {self.path} deals {made['count']} rows of {made['name']}, {name} has {rows}"
            )
        return self.saved
