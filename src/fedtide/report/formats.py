"""Formats of measures as text."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from fedtide.evaluate.measure import Measure
from fedtide.evaluate.metrics import Unit

Written = Callable[[Measure], str]
"""Format of a measure; "-" for an unknown value."""


def percent(measure: Measure, digits: int = 1) -> str:
    """Format a share as percent with its standard error.

    >>> percent(Measure(0.915, 0.002, [0.913, 0.917]))
    '91.5 ± 0.2 %'
    """
    return _with_error(measure, digits, "%", 100.0)


def points(measure: Measure, digits: int = 1, *, signed: bool = False) -> str:
    """Format a difference of shares as percentage points with its standard error.

    >>> points(Measure(-0.017, 0.002, [-0.015, -0.019]), signed=True)
    '-1.7 ± 0.2 points'
    """
    return _with_error(measure, digits, "points", 100.0, signed=signed)


def _with_error(
    measure: Measure, digits: int | None = None, unit: str = "", scale: float = 1.0, *, signed: bool = False
) -> str:
    """Format a mean with its unit and with its standard error, if the error is known and above 0.

    Without `digits` the error has two significant digits, or the mean three.
    """
    if measure.mean is None:
        return "-"
    mean, error = scale * measure.mean, scale * (measure.error or 0.0)
    error = error if error > 1e-9 else 0.0
    if digits is None:
        leading = error or abs(mean) / 10 or 0.1
        digits = min(max(1 - math.floor(math.log10(leading)), 0), 4)
    mean = round(mean, digits) + 0.0  # no minus before a zero
    text = f"{mean:{'+' if signed else ''}.{digits}f}" + (f" ± {error:.{digits}f}" if error else "")
    return f"{text} {unit}".rstrip()


def signed_points(measure: Measure) -> str:
    """Format a difference of shares as percentage points with its sign."""
    return points(measure, signed=True)


def number(measure: Measure) -> str:
    """Format a plain number with its standard error.

    >>> number(Measure(1.0, 0.0, [1.0, 1.0])), number(Measure(-0.0984, 0.0321, [])), number(Measure(0.01234, None, []))
    ('1.00', '-0.098 ± 0.032', '0.0123')
    """
    return _with_error(measure)


def nats(measure: Measure) -> str:
    """Format a mean log-density with its standard error.

    >>> nats(Measure(-12.345, 0.678, []))
    '-12.35 ± 0.68'
    """
    return _with_error(measure, 2)


def size(measure: Measure) -> str:
    """Format a number of bytes in a suitable unit."""
    if measure.mean is None:
        return "-"
    left, unit = measure.mean, "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if abs(left) < 1000:
            break
        left, unit = left / 1000, larger
    return f"{left:.3g} {unit}" if abs(left) < 1000 else f"{left:.0f} {unit}"


def bytes_of(count: int) -> str:
    """Format a number of bytes.

    >>> bytes_of(1_234_567)
    '1.23 MB'
    """
    return size(Measure(float(count), None, []))


def seconds(measure: Measure, *, signed: bool = False) -> str:
    """Format a time in seconds, or from ten minutes on in minutes, with its standard error.

    >>> seconds(Measure(12.5, 0.5, [12.0, 13.0])), seconds(Measure(1230.0, None, [1230.0]))
    ('12.5 ± 0.5 s', '20.5 min')
    """
    long = measure.mean is not None and abs(measure.mean) >= 600
    return _with_error(measure, 1, "min" if long else "s", 1 / 60 if long else 1.0, signed=signed)


def rounds(measure: Measure, *, signed: bool = False) -> str:
    """Format a number of rounds with its standard error.

    >>> rounds(Measure(12.5, 0.5, [12.0, 13.0])), rounds(Measure(-2.0, 0.0, [-2.0, -2.0]), signed=True)
    ('12.5 ± 0.5 rounds', '-2 rounds')
    """
    if measure.mean is None:
        return "-"
    whole = not measure.error and measure.mean.is_integer()
    unit = "round" if whole and abs(measure.mean) == 1 else "rounds"
    return _with_error(measure, 0 if whole else 1, unit, signed=signed)


def arrival(time: Measure, reached: Measure, written: Written) -> str:
    """Format a time until a target; if some seeds never arrive, the time is a lower bound.

    >>> arrival(Measure(7.5, None, [5.0, 10.0]), Measure(0.5, None, [1.0, 0.0]), rounds)
    '≥ 7.5 rounds (1 of 2 seeds)'
    """
    if time.mean is None:
        return "-"
    arrived, seeds = int(sum(reached.values)), len(reached.values)
    if arrived == seeds:
        return written(time)
    return f"≥ {written(time)} ({arrived} of {seeds} seeds)" if arrived else "not reached"


def count(measure: Measure) -> str:
    """Format a mean count."""
    return "-" if measure.mean is None else f"{measure.mean:.4g}"


def rounds_count(measure: Measure) -> str:
    """Format a mean count of rounds, whose differences are written with the unit."""
    return count(measure)


FORMATS: dict[Unit, Written] = {
    "share": percent, "points": points, "number": number, "count": count, "seconds": seconds, "rounds": rounds,
    "bytes": size,
}  # fmt: skip
"""Format of each unit."""


@dataclass(frozen=True)
class Number:
    """A number of every run, in `summary.json`, in tables and in claims.

    Args:
        name: name in `summary.json` and in claims.
        written: format.
        title: header of its column in the table of its topic; "" for a number without a column.
        word: noun after the number in claims, if the format has no unit.
        by_group: true if every group of clients has one, too, such as `accuracy_day`.
        reached: of a time until a target, the name of the number that is 1 if the seed arrives, else 0.
    """

    name: str
    written: Written = number
    title: str = ""
    word: str = ""
    by_group: bool = False
    reached: str = ""


def difference(measure: Measure, written: Written) -> str:
    """Format a difference of two measures of this format, signed but for sizes.

    >>> difference(Measure(0.017, 0.002, []), percent), difference(Measure(-2e6, None, []), size)
    ('+1.7 ± 0.2 points', '-2 MB')
    >>> difference(Measure(-2.5, 0.5, []), rounds_count)
    '-2.5 ± 0.5 rounds'
    """
    if written in (rounds, rounds_count):
        return rounds(measure, signed=True)
    if written is seconds:
        return seconds(measure, signed=True)
    if written is number:
        return _with_error(measure, signed=True)
    return signed_points(measure) if written in (percent, points, signed_points) else written(measure)
