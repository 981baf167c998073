"""What a plan of meanings answers: what the rows of every client mean at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from fedtide.core.errors import FedtideError
from fedtide.data.shift.what.plan import PopulationView


class Reading(Protocol):
    """How rows are to be read: settings, of which a transform is made once for a population."""

    @property
    def drifts(self) -> bool:
        """Whether it changes at events, so that it can be said which clients drifted."""

    def check(self, groups: int, shape: tuple[int, ...], classes: int | None = None) -> None:
        """Raise where it does not fit the groups or the rows; `classes` is None for sequences."""

    def plan(self, view: PopulationView) -> RowTransform:
        """What the rows of every client mean at every time."""

    def words(self, groups: Sequence[str], unit: str) -> str:
        """Sentences for a report, each with a space behind it."""


class RowTransform(Protocol):
    """What the rows of every client mean at every time."""

    def apply(self, x: Tensor, y: Tensor, client: Tensor, time: float) -> tuple[Tensor, Tensor]:
        """The rows as they mean at `time`; `client` (rows,) holds them."""

    def group(self, time: float) -> Tensor | None:
        """The true concept of each client (clients,); None where it has none but its group."""

    def changed(self, time: float, before: float) -> Tensor:
        """The registered clients for whom some label means something else than at `before`, sorted."""

    def events(self, time: float, before: float) -> tuple[str, ...]:
        """What happened since `before`, in words that stay the same."""


@dataclass(frozen=True)
class ByGroup:
    """The meaning of a `how` that looks at the client's group and is always the same."""

    how: Any
    view: PopulationView

    def apply(self, x: Tensor, y: Tensor, client: Tensor, time: float) -> tuple[Tensor, Tensor]:
        """The rows as they mean."""
        turned: tuple[Tensor, Tensor] = self.how.apply(x, y, self.view.group[client], time)
        return turned

    def group(self, time: float) -> Tensor | None:
        """The population's."""
        return None

    def changed(self, time: float, before: float) -> Tensor:
        """Nobody."""
        return self.view.everyone[:0]

    def events(self, time: float, before: float) -> tuple[str, ...]:
        """Nothing."""
        return ()


def exchangeable(kind: str, classes: int | None) -> int:
    """How many labels there are; raises for sequences, and where there is nothing to exchange."""
    if classes is None or classes < 2:
        found = "rows are sequences" if classes is None else "there is one label"
        raise FedtideError(f"shift.how: '{kind}' exchanges labels, but {found}; allowed: kind = 'identity'")
    return classes
