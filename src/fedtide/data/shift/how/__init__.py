"""How rows are to be read: a transform of (x, y) that depends on the client, its group and the moment.

Each kind is settings; `plan` makes of them, once for a population, what turns the rows of its clients.
"""

from typing import Annotated

from pydantic import Field

from fedtide.data.shift.how.fixed import Identity, Permuted, Rotation
from fedtide.data.shift.how.meaning import Meaning
from fedtide.data.shift.how.swaps import Swaps

How = Annotated[Identity | Rotation | Permuted | Swaps, Field(discriminator="kind")]

__all__ = ["How", "Identity", "Meaning", "Permuted", "Rotation", "Swaps"]
