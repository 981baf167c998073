"""Dates as people write them: the form of a column by evidence in its cells, and its times."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as arrow
from pyarrow import compute

Form = Literal[
    "year-month-day", "day-month-year", "month-day-year", "month names", "weeks", "digits", "excel", "days", "seconds",
    "milliseconds", "microseconds", "nanoseconds", "seconds or less",
    "days since 1960", "seconds since 1960", "milliseconds since 1960",
]  # fmt: skip
"""Forms of times. weeks: 2024-W05-3. digits: 20240131 and 20240131235959. excel: days since 1899-12-30. days, seconds
and less: since 1970, if nothing else is said; SAS and Stata count from 1960."""
FORMS: tuple[Form, ...] = get_args(Form)

CLOCK = (
    r"(?:(?:[T_: ]|, ?)(?P<hour>[0-9]{1,2})(?:[:hH.](?P<minute>[0-9]{2})(?:[:.m](?P<second>[0-9]{2})"
    r"(?:[.,](?P<fraction>[0-9]{1,9}))?)?)? ?(?P<half>[AaPp]\.?[Mm]\.?)?)?"
    r" ?(?P<zone>[Zz]|UTC|GMT|[+-][0-9]{2}(?::?[0-9]{2})?)?$"
)
LETTER = r"[^\x00-@[-`{-\x7f]"
"""Letters of all scripts; a class of Unicode itself takes long to compile."""
WEEKDAY = rf"^(?:{LETTER}{{2,9}}\.?,? )?"
NUMERIC = (
    rf"{WEEKDAY}(?P<a>[0-9]{{4}}|[0-9]{{1,2}})(?P<mark>[-/. ]{{1,2}})(?P<b>[0-9]{{1,2}})"
    r"(?:[-/. ]{1,2}(?P<c>[0-9]{4}|[0-9]{1,2})\.?)?" + CLOCK
)
NAMED = (
    rf"{WEEKDAY}(?:(?P<first>[0-9]{{4}}|[0-9]{{1,2}})(?:st|nd|rd|th|\.)?[- /]?(?:de )?)?"
    rf"(?P<month>{LETTER}{{3,10}})\.?(?: de)?[- /,]?"
    r"(?: ?(?P<day>[0-9]{1,2})(?:st|nd|rd|th)?(?:, ?|[- /]))?(?P<last>[0-9]{4}|[0-9]{1,2})?" + CLOCK
)
DIGITS = (
    r"^(?P<year>[0-9]{4})(?P<month>[0-9]{2})(?P<day>[0-9]{2})"
    r"(?:[T_ -]?(?P<hour>[0-9]{2})(?P<minute>[0-9]{2})(?P<second>[0-9]{2})?)?(?P<zone>[Zz])?$"
)
WEEKS = r"^(?P<year>[0-9]{4})-?[Ww](?P<week>[0-9]{2})(?:-?(?P<day>[1-7]))?$"
OTHER_ORDERS = (
    (r"\[[A-Za-z]+/[A-Za-z_/]+\]$", ""),
    ("[\u5e74\u6708\ub144\uc6d4]", "-"), ("[\u65e5\uc77c]", ""),
    (r"^([A-Z][a-z]{2}) ([A-Z][a-z]{2}) {1,2}(\d{1,2}) (\d\d:\d\d:\d\d) ?([+-]\d{4}|[A-Z]{3})? (\d{4})$",
     r"\1 \3 \2 \6 \4 \5"),
)  # fmt: skip
"""Zones of Java, characters of Chinese, Japanese and Korean dates, and dates of C, and what is read for them."""
MONTHS = tuple(names.split() for names in (
    "january february march april may june july august september october november december",
    "januar februar m\u00e4rz april mai juni juli august september oktober november dezember",
    "janvier f\u00e9vrier mars avril mai juin juillet ao\u00fbt septembre octobre novembre d\u00e9cembre",
    "enero febrero marzo abril mayo junio julio agosto septiembre octubre noviembre diciembre",
    "gennaio febbraio marzo aprile maggio giugno luglio agosto settembre ottobre novembre dicembre",
    "janeiro fevereiro mar\u00e7o abril maio junho julho agosto setembro outubro novembro dezembro",
    "januari februari maart april mei juni juli augustus september oktober november december",
))  # fmt: skip
"""Names of months, which may be cut to three letters or more."""
EPOCHS: dict[Form, float] = {
    "days": 1 / 86400, "seconds": 1.0, "milliseconds": 1e3, "microseconds": 1e6, "nanoseconds": 1e9,
}  # fmt: skip
SINCE_1960: dict[Form, float] = {
    "days since 1960": 1 / 86400, "seconds since 1960": 1.0, "milliseconds since 1960": 1e3,
}  # fmt: skip
SECONDS_1960 = -315_619_200.0
YEAR_1990, YEAR_2000, YEAR_2036, YEAR_2100 = 631152000.0, 946684800.0, 2082758400.0, 4102444800.0
EXCEL_1970 = 25569
"""Days from 1899-12-30, the day 0 of spreadsheets, to 1970-01-01."""
EXCEL = (29_221, 73_050)
"""Days of spreadsheets from 1980 to 2099; days of SAS since 1960 are fewer until 2040."""
SENTINELS = ("0001-01-01", "1582-10-15", "1753-01-01", "1899-12-30", "1899-12-31", "1900-01-01", "1901-01-01",
             "1970-01-01", "2099-12-31", "2999-12-31", "3000-01-01", "9999-01-01", "9999-12-31")  # fmt: skip
"""Days that stand for no date if they lie far from all others."""


class Unclear(ValueError):
    """Cells are dates, but no cell tells whether the day or the month comes first."""


@dataclass(frozen=True)
class Times:
    """Times of a column.

    at: (rows,) the clock as it is written, "datetime64[us]", NaT if a cell is missing or wrong. wrong: (rows,) mask of
    cells that are no dates of the form. zone: (rows,) seconds by which the clock is ahead of UTC, NaN without a zone.
    form: how the times are written. why: evidence for the form, in words; "" if no other form fits.
    """

    at: np.ndarray
    wrong: np.ndarray
    zone: np.ndarray
    form: Form
    why: str = ""

    @property
    def utc(self) -> np.ndarray:
        """Seconds since 1970, of a clock without a zone as if it were UTC; NaN without a time."""
        seconds = np.where(np.isnat(self.at), np.nan, self.at.astype(np.int64) / 1e6)
        return seconds - np.nan_to_num(self.zone)


FEW = 8
"""Words of a column that are read first."""


def _reorder(words: Any) -> Any:
    """Return words with the dates of other orders written as all others."""
    for pattern, order in OTHER_ORDERS:
        words = compute.replace_substring_regex(words, pattern, order)
    return words


def read_dates(words: Any, rows: np.ndarray, form: str | None = None) -> Times | None:
    """Read a column of texts as dates.

    Day or month come first by evidence: a number above 12, or else the order in which rows are written.

    Args:
        words: (words,) an arrow array of different texts without space around them.
        rows: place of the word of each row in which nothing is missing.
        form: how dates are written, if a person says that.

    Returns:
        The times of the words, which are wrong if no row has them; None if not all cells are dates in one form.

    Raises:
        Unclear: cells are dates, and nothing tells whether the day or the month comes first.

    >>> times = read_dates(arrow.array(["31/1/2024 5:00 PM", "1/2/2024 5:00 AM"]), np.arange(2))
    >>> times.at.astype("datetime64[h]")
    array(['2024-01-31T17', '2024-02-01T05'], dtype='datetime64[h]')
    """
    patterns = [(NUMERIC, _numeric), (NAMED, _named), (WEEKS, _weeks), (DIGITS, _digits)]
    if form is None:  # a few words rule most columns of numbers or names out
        few = _reorder(words.take(rows[:FEW]))
        patterns = [one for one in patterns if compute.extract_regex(few, one[0]).null_count == 0]
    if not patterns:
        return None
    used = np.zeros(len(words), bool)
    used[rows] = True
    words = _reorder(words)
    for pattern, read in patterns:
        parts = compute.extract_regex(words, pattern)
        matched = np.asarray(parts.is_valid()) & used
        if matched.any() and (form is not None or (matched == used).all()):
            times = read(_Parts(parts, matched), rows, form)
            if times is not None and (form is not None or not times.wrong[used].any()):
                return times
    return None


@dataclass(frozen=True)
class _Parts:
    """Parts of different dates, found by a pattern."""

    parts: Any
    matched: np.ndarray

    def numbers(self, name: str, default: int = 0) -> np.ndarray:
        """Return whole numbers (dates,); `default` if the part is missing or was not matched."""
        if name not in [field.name for field in self.parts.type]:
            return np.full(len(self.matched), default)
        texts = compute.struct_field(self.parts, name)
        number = compute.if_else(compute.match_substring_regex(texts, r"^[0-9]+$"), texts, str(default))
        return np.where(self.matched, compute.fill_null(number, str(default)).cast(arrow.int64()).to_numpy(), default)

    def read(self, name: str, function: Callable[[str], Any]) -> np.ndarray:
        """Return the values of a function of the lower-case texts of a part (dates,), which are "" if it is missing."""
        if name not in [field.name for field in self.parts.type]:
            return np.full(len(self.matched), function(""))
        texts = compute.fill_null(compute.utf8_lower(compute.struct_field(self.parts, name)), "").dictionary_encode()
        return np.array([function(text) for text in texts.dictionary.to_pylist()])[texts.indices.to_numpy()]

    def digits(self, name: str) -> np.ndarray:
        """Return the number of characters of a part."""
        return self.read(name, len)

    def times(self, year: np.ndarray, month: np.ndarray, day: np.ndarray, form: Form) -> Times:
        """Return the times of dates, with the clocks of all patterns; those that no calendar has are wrong."""
        hour, minute, second = (self.numbers(name) for name in ("hour", "minute", "second"))
        half = self.digits("half") > 0
        afternoon = self.read("half", lambda text: text[:1] == "p")
        wrong = ~self.matched | (hour > 24) | (minute > 59) | (second > 60)
        wrong |= half & ((hour < 1) | (hour > 12))
        hour = np.where(half, hour % 12 + 12 * afternoon, hour)
        wrong |= (year < 1) | (month < 1) | (month > 12) | (day < 1) | (day > 31)
        months = np.where(wrong, 0, 12 * (year - 1970) + month - 1).astype("datetime64[M]")
        days = months.astype("datetime64[D]") + np.where(wrong, 0, day - 1)
        wrong |= days.astype("datetime64[M]") != months  # no 31st of June
        micro = (hour * 3600 + minute * 60 + second) * 1_000_000
        micro += self.read("fraction", lambda text: int((text + "000000")[:6]))
        at = days.astype("datetime64[us]") + micro.astype("timedelta64[us]")
        at[wrong] = np.datetime64("NaT")
        return Times(at, wrong, self.read("zone", _offset), form)


def _offset(zone: str) -> float:
    """Return the seconds by which a zone is ahead of UTC; NaN without a zone."""
    if not zone:
        return np.nan
    if zone in ("z", "utc", "gmt"):
        return 0.0
    digits = zone[1:].replace(":", "").ljust(4, "0")
    return (1 if zone[0] == "+" else -1) * (3600.0 * int(digits[:2]) + 60 * int(digits[2:]))


def _full_year(year: np.ndarray, digits: np.ndarray) -> np.ndarray:
    """Return years of four digits; those of two are from 1970 to 2069."""
    return np.where(digits > 2, year, np.where(year < 70, year + 2000, year + 1900))


def _numeric(parts: _Parts, rows: np.ndarray, form: str | None) -> Times | None:
    """Read dates of three numbers, or of a year and a month; `rows` are the places of dates in the order of rows."""
    a, b, c = (parts.numbers(name, 1) for name in "abc")
    first, last = parts.digits("a"), parts.digits("c")
    decimals = (last == 0) & parts.read("mark", lambda mark: mark in (".", " "))  # 1013.5 is no month
    leads, ends = (first == 4) & ~decimals, (last > 1) & (first < 4)  # places of the year
    if form == "year-month-day" or (form is None and leads[parts.matched].all()):
        return parts.times(np.where(leads, a, 0), b, c, "year-month-day")
    if form is None and not ends[parts.matched].all():
        return None
    year = np.where(ends, _full_year(c, last), 0)
    forms = {"day-month-year": parts.times(year, b, a, "day-month-year"),
             "month-day-year": parts.times(year, a, b, "month-day-year")}  # fmt: skip
    if form is not None:
        return forms.get(form)
    fits = {name: times for name, times in forms.items() if not times.wrong[parts.matched].any()}
    if len(fits) == 1:
        return replace(next(iter(fits.values())), why="numbers above 12 are days")
    if not fits:
        return None
    rising = [times for times in fits.values() if _rises(times.at[rows])]
    if len(rising) == 1:
        return replace(rising[0], why="rows are then in the order of their times")
    raise Unclear


def _rises(at: np.ndarray) -> bool:
    """Tell whether times rise over the rows, or fall."""
    steps = np.diff(at.astype(np.int64))
    return len(steps) > 1 and bool((steps >= 0).all() or (steps <= 0).all()) and bool((steps != 0).any())


def _named(parts: _Parts, rows: np.ndarray, form: str | None) -> Times | None:
    """Read dates whose month is a word."""
    if form not in (None, "month names"):
        return None
    month = parts.read("month", _month_of)
    first, day, last = (parts.numbers(name) for name in ("first", "day", "last"))
    leads = parts.digits("first") == 4  # 2024 Jan 31
    year = np.where(leads, first, _full_year(last, parts.digits("last")))
    day = np.where(leads, last, np.where(parts.digits("first") > 0, first, np.where(day > 0, day, 1)))
    bare = (parts.digits("first") < 1) & (parts.digits("day") < 1) & (parts.digits("last") < 4)  # "set 3" is no date
    return parts.times(year, np.where(bare, 0, month), day, "month names")


def _month_of(word: str) -> int:
    """Return the number of a month by its name, or the beginning of it; 0 if it is none."""
    months = {number for names in MONTHS for number, name in enumerate(names, start=1) if name.startswith(word)}
    return months.pop() if len(months) == 1 and len(word) > 2 else 0


def _weeks(parts: _Parts, rows: np.ndarray, form: str | None) -> Times | None:
    """Read a year and a week of ISO 8601, with a day or not, which is then Monday."""
    if form not in (None, "weeks"):
        return None
    fourth = (parts.numbers("year", 1970) - 1970).astype("datetime64[Y]").astype("datetime64[D]") + 3
    monday = fourth - (fourth.astype(int) + 3) % 7  # of the week with 4 January
    week, day = parts.numbers("week"), parts.numbers("day", 1)
    days = np.where((week < 1) | (week > 53), np.datetime64("NaT"), monday + 7 * (week - 1) + day - 1)
    return Times(days.astype("datetime64[us]"), ~parts.matched | np.isnat(days), np.full(len(days), np.nan), "weeks")


def _digits(parts: _Parts, rows: np.ndarray, form: str | None) -> Times | None:
    """Read dates of eight digits or more."""
    if form not in (None, "digits"):
        return None
    return parts.times(parts.numbers("year"), parts.numbers("month"), parts.numbers("day"), "digits")


def read_numbers_as_dates(numbers: np.ndarray, form: str | None = None) -> Times | None:
    """Read a column of numbers as dates: 20240131, days of spreadsheets, or seconds and less since 1970 or 1960.

    Args:
        numbers: (rows,) NaN if something is missing.
        form: how dates are written, if a person says that.

    Returns:
        The times; None if the numbers are in no such form.

    >>> read_numbers_as_dates(np.array([43101.25, 43102.5])).at.astype("datetime64[h]")
    array(['2018-01-01T06', '2018-01-02T12'], dtype='datetime64[h]')
    >>> read_numbers_as_dates(np.array([1514764800, 1514764801000])).form
    'seconds or less'
    """
    missing = ~np.isfinite(numbers)
    present = numbers[~missing]
    if not len(present):
        return None
    whole = bool((present % 1 == 0).all())
    if form in (None, "digits") and whole and present.min() >= 1e7 and present.max() < 1e14:
        texts = arrow.array([str(int(number)) for number in np.where(missing, 0, numbers)])
        times = read_dates(texts, np.flatnonzero(~missing), "digits")
        if times is not None and (form == "digits" or _plausible(times, ~missing)):
            return Times(times.at, times.wrong & ~missing, times.zone, times.form)
    if form in (None, "excel") and (form == "excel" or (present.min() >= EXCEL[0] and present.max() <= EXCEL[1])):
        return _since_1970((numbers - EXCEL_1970) * 86400, "excel")
    if form in EPOCHS:
        return _since_1970(numbers / EPOCHS[form], form)
    if form in SINCE_1960:
        return _since_1970(numbers / SINCE_1960[form] + SECONDS_1960, form)
    scales = scale_of(numbers)
    seconds = numbers / scales
    if form is None and not (np.nanmin(seconds) >= YEAR_1990 and np.nanmax(seconds) < YEAR_2100):
        return None
    used = {name: int((scales[~missing] == scale).sum()) for name, scale in EPOCHS.items()}
    used = {name: count for name, count in used.items() if count}
    if len(used) == 1:
        return _since_1970(seconds, next(iter(used)))
    counts = " and ".join(f"{count:,} {name}" for name, count in used.items())
    return replace(_since_1970(seconds, "seconds or less"), why=f"as {counts} since 1970")


def _since_1970(seconds: np.ndarray, form: Form) -> Times:
    """Return times in seconds since 1970, to the millisecond."""
    missing = ~np.isfinite(seconds)
    wrong = ~missing & (np.abs(seconds) > 2.5e11)
    milliseconds = np.where(missing | wrong, 0, np.round(seconds * 1e3)).astype("datetime64[ms]")
    at = milliseconds.astype("datetime64[us]")
    at[missing | wrong] = np.datetime64("NaT")
    return Times(at, wrong, np.full(len(seconds), np.nan), form)


def _plausible(times: Times, rows: np.ndarray) -> bool:
    """Tell whether times of some rows are all dates from 1900 to 2099."""
    years = times.at[rows].astype("datetime64[Y]").astype(int) + 1970
    return not times.wrong[rows].any() and bool((years >= 1900).all() and (years < 2100).all())


def within_2000_to_2035(seconds: np.ndarray) -> np.ndarray:
    """Return the mask of times of these years, in which numbers without a time-like name may be times.

    >>> within_2000_to_2035(np.array([1e8, 1.7e9]))
    array([False,  True])
    """
    return (seconds >= YEAR_2000) & (seconds < YEAR_2036)


def scale_of(numbers: np.ndarray) -> np.ndarray:
    """Return how many of each number's unit make a second, by its size.

    Dates from 1973 to 5138 in seconds, thousandths, millionths and billionths do not overlap.

    >>> scale_of(np.array([1.7e9, 1.7e12])).tolist()
    [1.0, 1000.0]
    """
    sizes = np.abs(numbers)
    return np.select([sizes >= 1e17, sizes >= 1e14, sizes >= 1e11], [1e9, 1e6, 1e3], 1.0)


def read_clocks(words: Any) -> np.ndarray | None:
    """Return seconds since midnight (words,) of times of the day; None if a text is none.

    >>> read_clocks(arrow.array(["18.00.30", "6:15 PM"])).tolist()
    [64830.0, 65700.0]
    """
    points = compute.replace_substring_regex(words, r"^([0-9]{1,2})\.([0-9]{2})\.([0-9]{2})$", r"\1:\2:\3")
    parts = compute.extract_regex(compute.binary_join_element_wise(" ", points, ""), f"^{CLOCK}")
    matched = np.asarray(parts.is_valid())
    one = np.ones(len(words), np.int64)
    times = _Parts(parts, matched).times(1969 + one, one, one, "seconds")
    clocked = np.asarray(compute.match_substring_regex(words, "[:hH.]|[AaPp]"))
    if not len(words) or times.wrong.any() or not clocked.all():
        return None
    return times.at.astype(np.int64) / 1e6


def find_sentinels(at: np.ndarray) -> np.ndarray:
    """Return the mask of times that stand for no date: days such as 1900-01-01 that lie far from all others.

    >>> days = np.array(["2018-01-01", "1900-01-01", "2018-05-01"], "datetime64[us]")
    >>> find_sentinels(days)
    array([False,  True, False])
    """
    days = at.astype("datetime64[D]")
    candidates = np.isin(days, np.array(SENTINELS, "datetime64[D]"))
    rest = days[~candidates & ~np.isnat(days)]
    if not candidates.any() or not len(rest):
        return np.zeros(len(at), bool)
    span = max(rest.max() - rest.min(), np.timedelta64(365, "D"))
    return candidates & ((days < rest.min() - span) | (days > rest.max() + span))
