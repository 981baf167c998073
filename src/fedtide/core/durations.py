"""Durations as people write them, and time zones."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Annotated
from zoneinfo import ZoneInfo

from pydantic import AfterValidator

from fedtide.core.errors import shown

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
LONGEST = 366 * UNITS["d"]


def seconds_of(duration: str | float) -> float:
    """Return the seconds of a duration: a number and one of s, m, h, d, or from Python a number of seconds.

    >>> seconds_of("90s"), seconds_of("1.5h"), seconds_of(60)
    (90.0, 5400.0, 60.0)
    """
    if isinstance(duration, int | float) and not isinstance(duration, bool):
        seconds = float(duration)
    elif found := re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)([smhd])", str(duration)):
        seconds = float(found[1]) * UNITS[found[2]]
    else:
        raise ValueError(f"found {shown(duration)}, allowed: a number and s, m, h or d, such as '90s' or '1h'")
    if not 1 <= seconds <= LONGEST:
        raise ValueError(f"found {shown(duration)}, allowed: 1s to {LONGEST // UNITS['d']}d")
    return seconds


def rounded_up(seconds: float) -> str:
    """Return a duration that is at least so many seconds, in tens of them or in minutes.

    >>> rounded_up(34.0), rounded_up(130.0)
    ('40s', '3m')
    """
    return f"{max(math.ceil(seconds / 10), 1)}0s" if seconds <= 90 else f"{math.ceil(seconds / 60)}m"


def zone_of(name: str) -> ZoneInfo:
    """Return a time zone.

    >>> zone_of("Europe/Berlin").key
    'Europe/Berlin'
    """
    try:
        return ZoneInfo(name)
    except (OSError, ValueError, LookupError):
        raise ValueError(f"found {shown(name)}, allowed: a time zone, such as 'Europe/Berlin'") from None


def kept_if(check: Callable[[str], object]) -> AfterValidator:
    """Return a validator of values that a function takes; they are kept as they are."""

    def keep(value: str) -> str:
        check(value)
        return value

    return AfterValidator(keep)


Duration = Annotated[str, kept_if(seconds_of)]
Zone = Annotated[str, kept_if(zone_of)]
