"""What a plan of meanings answers: what the rows of every client mean at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from fedtide.core.errors import FedtideError
from fedtide.data.shift.what.plan import PopulationView


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
