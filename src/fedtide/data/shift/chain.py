"""A chain of states, computed event by event, of which only a few are stored."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from fedtide.core.errors import FedtideError

T = TypeVar("T")

MOST = 100_000
"""Maximum number of events of a run, since each is drawn in turn for all clients."""

KEPT = 8
"""Number of stored states; a round needs its own and the previous one."""


@dataclass(frozen=True)
class Chain(Generic[T]):
    """States after any number of events, in constant memory.

    Args:
        start: the function that makes the state before the first event.
        after: the function from a state and an event number, from 1, to the next state, without changes in place.
        key: the configuration key of the time between events, for messages.

    >>> chain = Chain(lambda: 0, lambda state, number: state + number, "shift.what.every")
    >>> chain[4], chain[2]
    (10, 3)
    """

    start: Callable[[], T]
    after: Callable[[T, int], T]
    key: str
    _kept: dict[int, T] = field(default_factory=dict, repr=False, compare=False)

    def __getitem__(self, number: int) -> T:
        """Return the state after `number` events.

        Raises:
            FedtideError: there are too many events.
        """
        check_events(number, self.key)
        if number not in self._kept:
            nearest = max((at for at in self._kept if at < number), default=-1)
            state = self.start() if nearest < 0 else self._kept[nearest]
            for event in range(max(nearest, 0) + 1, number + 1):
                state = self.after(state, event)
            self._kept[number] = state
        self._kept[number] = self._kept.pop(number)  # most recently used
        while len(self._kept) > KEPT:
            del self._kept[next(iter(self._kept))]
        return self._kept[number]


def check_events(number: float, key: str) -> None:
    """Raise if there are more events than can be drawn.

    Args:
        number: number of events.
        key: the configuration key of the time between events.
    """
    if not number <= MOST:
        count = f"{number:.6g}" if math.isfinite(number) else "too many"
        raise FedtideError(f"{key}: it makes {count} events, allowed: at most {MOST}; make it longer")
