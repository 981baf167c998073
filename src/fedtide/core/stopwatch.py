"""A stopwatch for parts of a round. Its seconds go to `timings.jsonl` alone, because no number may depend on them."""

import time
from dataclasses import dataclass, field
from typing import Self


@dataclass
class Stopwatch:
    """Wall-clock seconds spent within `with` blocks, all together.

    >>> watch = Stopwatch()
    >>> with watch:
    ...     total = sum(range(1000))
    >>> watch.seconds > 0
    True
    """

    seconds: float = field(default=0.0, init=False)
    _began: float = field(default=0.0, init=False, repr=False)

    def __enter__(self) -> Self:
        """Start."""
        self._began = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop."""
        self.seconds += time.perf_counter() - self._began
