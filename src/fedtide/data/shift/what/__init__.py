"""What a client holds: which of its rows are there at a moment.

Each kind is settings; `plan` makes of them, once for a population, what says who holds which rows when.
"""

from typing import Annotated

from pydantic import Field

from fedtide.data.shift.what.changes import Changes
from fedtide.data.shift.what.drift import Drift
from fedtide.data.shift.what.mixture import All, Mixture
from fedtide.data.shift.what.plan import Holders, Plan
from fedtide.data.shift.what.stream import Stream

What = Annotated[All | Mixture | Stream | Drift | Changes, Field(discriminator="kind")]

__all__ = ["All", "Changes", "Drift", "Holders", "Mixture", "Plan", "Stream", "What"]
