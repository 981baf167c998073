"""States that follow from one another, event by event, of which few are kept at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from fedtide.core.errors import FedtideError

T = TypeVar("T")

MOST = 100_000
"""Events that a run may have: each is drawn for all clients, one after the other."""

KEPT = 8
"""States that were asked for last. A round looks at its own and at the one before."""


@dataclass(frozen=True)
class Chain(Generic[T]):
    """The state after any number of events, however many there are, in memory that does not grow with them.

    Args:
        start: makes the state before the first event.
        after: from a state to the one after event `number`, from 1; it changes nothing in place.
        key: what says how often events come, for messages.

    >>> chain = Chain(lambda: 0, lambda state, number: state + number, "shift.what.every")
    >>> chain[4], chain[2]
    (10, 3)
    """

    start: Callable[[], T]
    after: Callable[[T, int], T]
    key: str
    _kept: dict[int, T] = field(default_factory=dict, repr=False, compare=False)

    def __getitem__(self, number: int) -> T:
        """The state after `number` events.

        Raises:
            FedtideError: there are too many.
        """
        check_events(number, self.key)
        if number not in self._kept:
            known = max((at for at in self._kept if at < number), default=-1)
            state = self.start() if known < 0 else self._kept[known]
            for event in range(max(known, 0) + 1, number + 1):
                state = self.after(state, event)
            self._kept[number] = state
        self._kept[number] = self._kept.pop(number)  # asked for last
        while len(self._kept) > KEPT:
            del self._kept[next(iter(self._kept))]
        return self._kept[number]


def check_events(number: float, key: str) -> None:
    """Raise where there are more events than can be drawn.

    Args:
        number: of events.
        key: what says how often they come.
    """
    if not number <= MOST:
        found = f"{number:.6g}" if math.isfinite(number) else "too many"
        raise FedtideError(f"{key}: it makes {found} events, allowed: at most {MOST}; make it longer")
