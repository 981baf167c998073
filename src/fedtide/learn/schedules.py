"""Learning-rate schedules over the rounds."""

import math
from typing import Annotated, Literal

from pydantic import Field

from fedtide.core.base import Moment
from fedtide.fields.types import Fraction, Positive, ingredient

__all__ = [
    "Constant", "Cosine", "Exponential", "Schedule", "Steps",
]  # fmt: skip


@ingredient
class Constant:
    """A constant learning rate."""

    kind: Literal["constant"] = "constant"

    def __call__(self, moment: Moment) -> float:
        """Return the factor at `moment`."""
        return 1.0


@ingredient
class Exponential:
    """Exponential decay, `factor ** round`.

    Args:
        factor: decay per round.

    >>> Exponential(factor=0.5)(Moment(2, 10))
    0.25
    """

    factor: Positive = 0.99
    kind: Literal["exponential"] = "exponential"

    def __call__(self, moment: Moment) -> float:
        """Return the factor at `moment`."""
        return self.factor ** max(moment.round, 0)


@ingredient
class Steps:
    """Step decay: multiply by `factor` at each point of `at`.

    Args:
        at: fractions of the planned rounds, 0 to 1.
        factor: factor at each of these points.

    >>> [Steps(at=(0.5, 0.75), factor=0.1)(Moment(r, 8)) for r in (3, 4)]
    [1.0, 0.1]
    """

    at: tuple[Fraction, ...] = (0.5, 0.75)
    factor: Positive = 0.1
    kind: Literal["steps"] = "steps"

    def __call__(self, moment: Moment) -> float:
        """Return the factor at `moment`."""
        return float(self.factor ** sum(moment.progress >= at for at in self.at))


@ingredient
class Cosine:
    """Cosine decay from 1 to `floor`, which would be reached after the last round.

    Args:
        floor: the final factor.

    >>> Cosine()(Moment(0, 10)), round(Cosine()(Moment(5, 10)), 3)
    (1.0, 0.5)
    """

    floor: Fraction = 0.0
    kind: Literal["cosine"] = "cosine"

    def __call__(self, moment: Moment) -> float:
        """Return the factor at `moment`."""
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * moment.progress))


Schedule = Annotated[Constant | Exponential | Steps | Cosine, Field(discriminator="kind")]
