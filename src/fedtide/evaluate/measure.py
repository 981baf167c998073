"""A quantity over seeds: mean, standard error, confidence interval."""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

CONFIDENCE = 0.95
"""Confidence of intervals in reports: without any difference, one in twenty intervals excludes zero."""

Clarity = Literal["clear", "unclear", "too few seeds"]
"""Clarity of a number against a bound, over seeds."""


@dataclass(frozen=True)
class Measure:
    """A quantity over seeds: mean, standard error (None for one seed), and the value of each seed."""

    mean: float | None
    error: float | None
    values: list[float]

    @staticmethod
    def of(values: list[float]) -> "Measure":
        """Compute a measure from the value of each seed; the error is s / sqrt(n), s with n - 1."""
        array = np.array(values, dtype=np.float64)
        known = len(array) > 0 and np.isfinite(array).all()
        error = array.std(ddof=1) / math.sqrt(len(array)) if known and len(array) > 1 else math.nan
        return Measure(float(array.mean()) if known else None, float(error) if math.isfinite(error) else None, values)

    @property
    def margin(self) -> float | None:
        """Half the width of the confidence interval of the mean, by Student's t; None if there are too few seeds.

        Two equal values may be equal by chance: only from three on do equal values have a margin, of 0.

        >>> round(Measure.of([0.1, 0.2, 0.3]).margin, 3), Measure.of([0.2]).margin, Measure.of([0.2, 0.2]).margin
        (0.248, None, None)
        """
        seeds = len(self.values)
        if self.mean is None or self.error is None or seeds < 2:
            return None
        if self.error <= self._rounding:
            return 0.0 if seeds > 2 else None
        from scipy.special import stdtrit  # here, as every process that plays runs would wait for it

        return float(stdtrit(seeds - 1, (1 + CONFIDENCE) / 2)) * self.error

    @property
    def _rounding(self) -> float:
        return 1e-12 * max(1.0, abs(self.mean or 0.0))

    def clarity(self, gap: float) -> Clarity:
        """Tell whether a mean that is `gap` away from a bound is clearly so: the interval does not reach the bound.

        Seeds are too few if there are fewer than three. They are also too few if many seeds of the same mean and spread
        would be clear, at two standard errors.
        """
        if self.mean is None:
            return "unclear"
        away = abs(gap) if abs(gap) > self._rounding else 0.0
        if self.margin is not None and away and away >= self.margin:
            return "clear"
        few = len(self.values) < 3 or self.error is None or (away and away >= 2 * self.error)
        return "too few seeds" if few else "unclear"

    def side(self, bound: float = 0.0) -> int:
        """Return 1 for a mean clearly above the bound, -1 for one clearly below, else 0.

        >>> [Measure(mean, 0.1, [0.0] * 5).side(1.0) for mean in (1.3, 1.1, 0.7)], Measure(2.0, None, [2.0]).side(1.0)
        ([1, 0, -1], 0)
        """
        gap = (self.mean or 0.0) - bound
        return int(math.copysign(1, gap)) if self.clarity(gap) == "clear" else 0


UNKNOWN = Measure(None, None, [])
"""A quantity that was not measured."""
