"""Interfaces of settings and transforms that give the rows of every client their meaning over time."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from fedtide.core.errors import refused
from fedtide.data.shift.what.plan import PopulationView


class Reading(Protocol):
    """Settings of the meaning of rows, which make a transform once for a population."""

    drifts: ClassVar[bool] = False
    """Tell whether labels change at events, so that the clients that drifted are known."""
    exact: ClassVar[bool] = False
    """Tell whether its transform's `changed` names every client whose rows mean something else, inputs or labels."""

    def check(self, groups: int, shape: tuple[int, ...], classes: int | None = None) -> None:
        """Raise if the settings do not fit the groups or the rows; `classes` is None for sequences."""
        return

    def plan(self, view: PopulationView) -> RowTransform:
        """Build the transform of a population's rows: `apply` with the group of each row's client, at all times."""
        return ByGroup(self, view)

    def apply(self, x: Tensor, y: Tensor, group: Tensor, time: float) -> tuple[Tensor, Tensor]:
        """Return the rows with their meaning at `time`; `group` (rows,) is that of each row's client."""
        return x, y

    def words(self, groups: Sequence[str], unit: str) -> str:
        """Describe the settings in sentences for a report, each followed by a space."""
        return ""


class RowTransform(Protocol):
    """Meaning of the rows of every client over time."""

    view: PopulationView

    @abstractmethod
    def apply(self, x: Tensor, y: Tensor, client: Tensor, time: float) -> tuple[Tensor, Tensor]:
        """Return the rows with their meaning at `time`; `client` (rows,) holds them."""

    def group(self, time: float) -> Tensor | None:
        """Return the true concept of each client (clients,); None if the groups are those of the population."""
        return None

    def changed(self, time: float, before: float) -> Tensor:
        """Return the registered clients for which the meaning of some label differs from that at `before`, sorted."""
        return self.view.everyone[:0]

    def events(self, time: float, before: float) -> tuple[str, ...]:
        """Return the fixed names of the events since `before`."""
        return ()


@dataclass(frozen=True)
class ByGroup(RowTransform):
    """A transform by the client's group."""

    how: Reading
    view: PopulationView

    def apply(self, x: Tensor, y: Tensor, client: Tensor, time: float) -> tuple[Tensor, Tensor]:
        """Return the rows with their meaning."""
        return self.how.apply(x, y, self.view.group[client], time)


def check_exchangeable(kind: str, classes: int | None) -> int:
    """Return the number of labels; raise for sequences, and for fewer than two labels."""
    if classes is None or classes < 2:
        but = f"it exchanges labels, and {'rows are sequences' if classes is None else 'there is one label'}"
        raise refused("shift.how.kind", kind, "'identity'", but)
    return classes
