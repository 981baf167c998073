"""Interfaces of settings and transforms that give the rows of every client their meaning over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from fedtide.core.errors import FedtideError
from fedtide.data.shift.what.plan import PopulationView


class Reading(Protocol):
    """Settings of the meaning of rows, which make a transform once for a population."""

    @property
    def drifts(self) -> bool:
        """Tell whether labels change at events, so that the clients that drifted are known."""

    def check(self, groups: int, shape: tuple[int, ...], classes: int | None = None) -> None:
        """Raise if the settings do not fit the groups or the rows; `classes` is None for sequences."""

    def plan(self, view: PopulationView) -> RowTransform:
        """Build the transform of a population's rows."""

    def words(self, groups: Sequence[str], unit: str) -> str:
        """Describe the settings in sentences for a report, each followed by a space."""


class RowTransform(Protocol):
    """Meaning of the rows of every client over time."""

    def apply(self, x: Tensor, y: Tensor, client: Tensor, time: float) -> tuple[Tensor, Tensor]:
        """Return the rows with their meaning at `time`; `client` (rows,) holds them."""

    def group(self, time: float) -> Tensor | None:
        """Return the true concept of each client (clients,); None if the groups are those of the population."""

    def changed(self, time: float, before: float) -> Tensor:
        """Return the registered clients for which the meaning of some label differs from that at `before`, sorted."""

    def events(self, time: float, before: float) -> tuple[str, ...]:
        """Return the fixed names of the events since `before`."""


@dataclass(frozen=True)
class ByGroup:
    """A transform by the client's group that is constant over time."""

    how: Any
    view: PopulationView

    def apply(self, x: Tensor, y: Tensor, client: Tensor, time: float) -> tuple[Tensor, Tensor]:
        """Return the rows with their meaning."""
        turned: tuple[Tensor, Tensor] = self.how.apply(x, y, self.view.group[client], time)
        return turned

    def group(self, time: float) -> Tensor | None:
        """Return None: the groups are those of the population."""
        return None

    def changed(self, time: float, before: float) -> Tensor:
        """Return no clients."""
        return self.view.everyone[:0]

    def events(self, time: float, before: float) -> tuple[str, ...]:
        """Return no events."""
        return ()


def exchangeable(kind: str, classes: int | None) -> int:
    """Return the number of labels; raise for sequences, and for fewer than two labels."""
    if classes is None or classes < 2:
        found = "rows are sequences" if classes is None else "there is one label"
        raise FedtideError(f"shift.how: '{kind}' exchanges labels, but {found}; allowed: kind = 'identity'")
    return classes
