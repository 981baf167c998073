"""Numbers as people write them: decimal commas, thousands, currencies, percent, units, typographic signs."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as arrow
from pyarrow import compute

Decimal = Literal[".", ","]

MARKS = frozenset((
    "", "na", "nan", "null", "n/a", "#n/a", "<na>", "#null!", "#div/0!", "#value!", "#ref!", "#name?", "#num!",
))  # fmt: skip
"""Cells in which something is missing, in lower case."""
SPACES = r"[ \x{00a0}\x{202f}\x{2009}'\x{2019}]"
"""Thousands are also divided by these."""
SIGN = r"[-+\x{2212}\x{2013}]"
CURRENCY = r"[A-Z]{0,3}[$\x{00a3}\x{00a5}\x{20a0}-\x{20cf}]|[A-Z]{3}"
LETTER = r"[^\x00-#%-@[-`{-\x7f]"
"""Letters of all scripts and currencies; a class of Unicode itself takes long to compile."""
UNIT = rf"%|\x{{2030}}|{LETTER}(?:{LETTER}|/){{0,7}}"
"""A unit behind a number, or a currency on either side."""
NUMBER = (
    rf"^(?P<open>\()?(?P<sign>{SIGN}?) ?(?P<before>{CURRENCY})? ?(?P<inner>{SIGN}?)"
    rf"(?P<digits>[0-9](?:[0-9.,]|{SPACES}[0-9])*|[.,][0-9]+)(?P<power>[eE][-+]?[0-9]+)?"
    rf"{SPACES}?(?P<unit>{UNIT})?(?P<behind>{SIGN})?(?P<close>\))?$"
)
WHOLE = r"^[-+]?(?:0|[1-9][0-9]{0,18})$"


@dataclass(frozen=True)
class Numbers:
    """The numbers of a column.

    values: (rows,) whole numbers if every cell is one, else with NaN for cells that are missing or wrong. wrong:
    (rows,) mask of cells that are no numbers. unit: it stands beside every number, such as "%"; "" without one. If
    numbers have several units, none is a number, and `unit` names them.
    """

    values: np.ndarray
    wrong: np.ndarray
    unit: str = ""


def find_missing(texts: Any, marks: Iterable[str] = MARKS) -> np.ndarray:
    """Return the mask of cells in which something is missing.

    >>> find_missing(arrow.array(["1", "NaN", ""]))
    array([False,  True,  True])
    """
    return np.asarray(compute.is_in(compute.utf8_lower(texts), arrow.array(sorted(marks))))


def find_decimal(columns: Iterable[Any], default: Decimal = ".") -> Decimal:
    """Return the decimal mark of a file: the one that more columns prove.

    "1,5" proves a comma, "1,234.5" and "0.123" prove a point; "1,234" proves nothing.

    >>> find_decimal([arrow.array(["1,5", "2"]), arrow.array(["1.234"])]), find_decimal([arrow.array(["1,234"])])
    (',', '.')
    """
    proofs = dict.fromkeys(".,", 0)
    for texts in columns:
        numbers = texts.filter(compute.match_substring_regex(texts, NUMBER))
        if 2 * len(numbers) > len(texts):
            for mark, other in (".,", ",."):
                proofs[mark] += bool(compute.any(compute.match_substring_regex(numbers, _proof(mark, other))).as_py())
    point, comma = proofs.values()
    return default if point == comma else "." if point > comma else ","


def _proof(mark: str, other: str) -> str:
    """Return the pattern of a number in which `mark` cannot divide thousands, or `other` must."""
    mark, other = re.escape(mark), re.escape(other)
    end = r"(?:[^0-9.,]|$)"
    single = rf"(?:^|[^0-9.,])[0-9]*{mark}"
    return "|".join(
        (
            rf"{single}(?:[0-9]{{1,2}}|[0-9]{{4,}}){end}",  # 1.5, 1.2345
            rf"(?:^|[^0-9.,])(?:0?|[0-9]{{4,}}){mark}[0-9]+{end}",  # 0.123, 1234.567
            rf"[0-9]{other}[0-9]{{3}}{mark}[0-9]",  # 1,234.5
            rf"[0-9]{other}[0-9]{{3}}{other}[0-9]{{3}}",  # 1,234,567
        )
    )


def read_numbers(texts: Any, decimal: Decimal = ".", marks: Iterable[str] = MARKS, unit: str | None = None) -> Numbers:
    """Read a column of texts as numbers.

    A code is no number: 007 keeps its zeros. A column has one unit at most: with two its cells are wrong.

    Args:
        texts: (rows,) an arrow array of texts without space around them.
        decimal: the mark before decimals; the other mark divides thousands.
        marks: cells in which something is missing, in lower case.
        unit: the unit of the column, if it is known: cells with another one are wrong.

    >>> read_numbers(arrow.array(["$1,234.5", "($2)", "NA"])).values
    array([1234.5,   -2. ,    nan])
    >>> read_numbers(arrow.array(["+5", "-3"])).values
    array([ 5, -3])
    >>> read_numbers(arrow.array(["1.234,5 kg", "7 g"]), ",").wrong
    array([ True,  True])
    >>> read_numbers(arrow.array(["1.5 kg", "2", "7 g"]), unit="kg").wrong
    array([False, False,  True])
    """
    missing = find_missing(texts, marks)
    whole = compute.match_substring_regex(texts, WHOLE)
    if not missing.any() and compute.all(whole).as_py():
        try:
            digits = compute.utf8_ltrim(texts, "+")
            return Numbers(digits.cast(arrow.int64()).to_numpy(zero_copy_only=False), missing)
        except arrow.ArrowInvalid:  # more digits than a number of 64 bits holds
            return Numbers(np.full(len(texts), np.nan), ~missing)
    code = compute.match_substring_regex(texts, r"^0[0-9]+$")
    plain = not compute.any(code).as_py() and (
        decimal == "." or not compute.any(compute.match_substring(texts, ".")).as_py()
    )
    if plain:
        try:
            values = compute.if_else(missing, None, texts).cast(arrow.float64()).to_numpy(zero_copy_only=False)
        except arrow.ArrowInvalid:
            pass
        else:
            wrong = ~np.isfinite(values) & ~missing
            return Numbers(np.where(wrong, np.nan, values), wrong)
    parts = compute.extract_regex(texts, NUMBER)
    part = {name: compute.struct_field(parts, name) for name in ("digits", "power", "sign", "inner", "behind", "open")}
    digits = compute.replace_substring_regex(part["digits"], SPACES, "")
    thousands = "." if decimal == "," else ","
    mark, point = re.escape(thousands), re.escape(decimal)
    grouped = rf"^[0-9]{{1,3}}(?:{mark}(?:[0-9]{{2,3}}{mark})*[0-9]{{3}})?(?:{point}[0-9]*)?$"
    simple = rf"^[0-9]*(?:{point}[0-9]*)?$"
    right = compute.or_(compute.match_substring_regex(digits, grouped), compute.match_substring_regex(digits, simple))
    digits = compute.replace_substring(digits, thousands, "")
    digits = compute.replace_substring(digits, decimal, ".")
    right = compute.and_(compute.fill_null(right, False), compute.invert(code))
    written = compute.binary_join_element_wise(digits, part["power"], "")
    numbers = compute.if_else(right, written, None).cast(arrow.float64()).to_numpy(zero_copy_only=False)
    minus = np.zeros(len(texts), bool)
    for name in ("sign", "inner", "behind"):
        minus ^= np.asarray(compute.fill_null(compute.match_substring_regex(part[name], r"^[^+]"), False))
    minus ^= np.asarray(compute.equal(compute.fill_null(part["open"], ""), "("))
    values = np.where(minus, -numbers, numbers)
    signs = [compute.fill_null(compute.struct_field(parts, name), "") for name in ("before", "unit")]
    units = compute.binary_join_element_wise(*signs, "")
    if unit is not None:
        values[~np.asarray(compute.is_in(units, arrow.array(["", unit])))] = np.nan
    units = units.filter(arrow.array(np.isfinite(values)))
    kinds, wrong = units.unique().to_pylist(), ~np.isfinite(values) & ~missing
    if unit is None and len(kinds) > 1 and not _may_lack(kinds):
        several = "" if wrong.any() or len(kinds) > 3 else " and ".join(sorted(kind or "no unit" for kind in kinds))
        return Numbers(np.full(len(texts), np.nan), ~missing, several)
    return Numbers(np.where(wrong, np.nan, values), wrong, max(kinds, default=""))


def _may_lack(units: list[str]) -> bool:
    """Tell whether units are one currency, which some cells lack; 5 and 5 % are two units."""
    one, *others = sorted(units)
    return not one and len(others) == 1 and others[0] not in ("%", "\u2030") and not others[0][-1:].isalpha()
