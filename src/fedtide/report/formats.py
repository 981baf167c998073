"""Formats of measures as text."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from fedtide.evaluate.metrics import Measure, Unit

Written = Callable[..., str]
"""Format of a measure, with a sign if `signed`; "-" for an unknown value."""


@dataclass(frozen=True)
class Format:
    """Format of a mean with its unit and with its standard error, if the error is known and above 0.

    Without `digits` the error has two significant digits, or the mean three.

    >>> percent(Measure(0.915, 0.002, [])), points(Measure(-0.017, 0.002, []), signed=True)
    ('91.5 ± 0.2 %', '-1.7 ± 0.2 points')
    >>> number(Measure(1.0, 0.0, [])), number(Measure(-0.0984, 0.0321, [])), number(Measure(0.01234, None, []))
    ('1.00', '-0.098 ± 0.032', '0.0123')
    """

    unit: str = ""
    scale: float = 1.0
    digits: int | None = None
    signed: bool = False

    def __call__(self, measure: Measure, *, signed: bool = False) -> str:
        """Format a measure."""
        if measure.mean is None:
            return "-"
        mean, error, digits = self.scale * measure.mean, self.scale * (measure.error or 0.0), self.digits
        error = error if error > 1e-9 else 0.0
        if digits is None:
            leading = error or abs(mean) / 10 or 0.1
            digits = min(max(1 - math.floor(math.log10(leading)), 0), 4)
        mean = round(mean, digits) + 0.0  # no minus before a zero
        text = f"{mean:{'+' if signed or self.signed else ''}.{digits}f}" + (f" ± {error:.{digits}f}" if error else "")
        return f"{text} {self.unit}".rstrip()


percent, points, number, brief_seconds = Format("%", 100.0, 1), Format("points", 100.0, 1), Format(), Format("s")
"""Formats of a share, of a difference of shares in percentage points, of a plain number, and of a short time."""


signed_points = Format("points", 100.0, 1, signed=True)
"""Format of a difference of shares in percentage points, with its sign."""


def size(measure: Measure, *, signed: bool = False) -> str:
    """Format a number of bytes in a suitable unit."""
    if measure.mean is None:
        return "-"
    left, unit = measure.mean, "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if abs(left) < 1000:
            break
        left, unit = left / 1000, larger
    sign = "+" if signed else ""
    return f"{left:{sign}.3g} {unit}" if abs(left) < 1000 else f"{left:{sign}.0f} {unit}"


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
    written = Format("min", 1 / 60, 1) if long else Format("s", 1.0, 1)
    return written(measure, signed=signed)


def rounds(measure: Measure, *, signed: bool = False) -> str:
    """Format a number of rounds with its standard error.

    >>> rounds(Measure(12.5, 0.5, [12.0, 13.0])), rounds(Measure(-2.0, 0.0, [-2.0, -2.0]), signed=True)
    ('12.5 ± 0.5 rounds', '-2 rounds')
    """
    whole = not measure.error and measure.mean is not None and measure.mean.is_integer()
    unit = "round" if whole and abs(measure.mean or 0.0) == 1 else "rounds"
    return Format(unit, 1.0, 0 if whole else 1)(measure, signed=signed)


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


def count(measure: Measure, *, signed: bool = False) -> str:
    """Format a mean count."""
    return "-" if measure.mean is None else f"{measure.mean:{'+' if signed else ''}.4g}"


def rounds_count(measure: Measure, *, signed: bool = False) -> str:
    """Format a mean count of rounds, whose differences are written with the unit."""
    return rounds(measure, signed=True) if signed else count(measure)


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
        single: true if it may be the number of a single client, which is left out if the study is private.
    """

    name: str
    written: Written = number
    title: str = ""
    word: str = ""
    by_group: bool = False
    reached: str = ""
    single: bool = False


def difference(measure: Measure, written: Written) -> str:
    """Format a difference of two measures of this format with its sign.

    >>> difference(Measure(0.017, 0.002, []), percent), difference(Measure(-2e6, None, []), size)
    ('+1.7 ± 0.2 points', '-2 MB')
    """
    return points(measure, signed=True) if written is percent else written(measure, signed=True)
