"""The `[wire]` table: how sums pass from clients to the server."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fedtide.core.config_types import Count, Flag
from fedtide.core.strict import Strict
from fedtide.wire.steps import FEWEST, Wire


class WireSettings(Strict):
    """How sums pass from clients to the server: added in fixed point, exactly, whatever the order.

    Args:
        secure: real clients mask what they send, so that the server can open sums alone; a simulation adds the same
            numbers.
        fewest: clients below which no sum is opened; those in a smaller one count as not having answered.
    """

    secure: Flag = True
    fewest: Annotated[Count, Field(le=100_000)] = FEWEST

    def build(self) -> Wire:
        """Build the wire of a run."""
        return Wire(self.secure, self.fewest)
