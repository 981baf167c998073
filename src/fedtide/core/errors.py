"""The one exception for what a person can cause."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class FedtideError(Exception):
    """A mistake a person can mend: one clear line naming the file, key or row, what was found and what is allowed.

    The command line prints the line and exits with status 2; nothing is half-written when it is raised.

    >>> raise FedtideError("demo.toml: rounds: found 0, allowed: an integer of 1 or more")
    Traceback (most recent call last):
        ...
    fedtide.core.errors.FedtideError: demo.toml: rounds: found 0, allowed: an integer of 1 or more
    """

    def __init__(self, line: str) -> None:
        words = (word if len(word) <= 400 else f"{word[:100]}..." for word in line.split())
        shown = printable(" ".join(words))
        super().__init__(shown if len(shown) <= 900 else f"{shown[:500]} ... {shown[-390:]}")


UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Errors of reading content that another program may have written."""


def printable(text: object) -> str:
    r"""Return a text, such as the name of a folder, without what a terminal would obey.

    >>> print(printable("runs/a\x1b[2J"))
    runs/a\x1b[2J
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text))


def refused(key: str, value: Any, allowed: str, but: str = "") -> FedtideError:
    """The error of a value that is not allowed.

    Args:
        key: its key, as the person wrote it.
        value: the value; shown as Python writes it, cut at 60 characters.
        allowed: what would do, in words.
        but: why it will not do, if the range does not say it.

    >>> raise refused("clusters", 0, "an integer of 1 or more")
    Traceback (most recent call last):
        ...
    fedtide.core.errors.FedtideError: clusters: found 0, allowed: an integer of 1 or more
    >>> raise refused("shift.what.by", "time", "labels, order", "rows have no time")
    Traceback (most recent call last):
        ...
    fedtide.core.errors.FedtideError: shift.what.by: found 'time', but rows have no time; allowed: labels, order
    """
    reason = f", but {but};" if but else ","
    return FedtideError(f"{key}: found {shown(value)}{reason} allowed: {allowed}")


def unknown(key: str, name: str, choices: Sequence[str]) -> FedtideError:
    """The error of a name that is none of some choices, with the nearest of them.

    >>> raise unknown("kind", "perod", ["period", "phase"])
    Traceback (most recent call last):
        ...
    fedtide.core.errors.FedtideError: kind: found 'perod', allowed: period, phase; did you mean 'period'?
    """
    return FedtideError(f"{key}: found {shown(name)}, {nearest(name, choices)}")


@contextmanager
def within(key: str) -> Iterator[None]:
    """Put a key in front of the lines of errors that do not begin with it.

    >>> with within("personal"):
    ...     raise FedtideError("model.kind: found 'cnn', allowed: mlp")
    Traceback (most recent call last):
        ...
    fedtide.core.errors.FedtideError: personal: model.kind: found 'cnn', allowed: mlp
    """
    try:
        yield
    except FedtideError as error:
        raise FedtideError(f"{key}: {str(error).removeprefix(f'{key}: ')}") from None


def shown(value: Any) -> str:
    """Format a value that was found for an error line: at most 60 characters.

    >>> shown("x" * 100)
    "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx..."
    """
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def nearest(word: str, allowed: Sequence[str], meant: Sequence[str] = ()) -> str:
    """The tail of an error line: the allowed spellings, and the nearest one if there is one.

    Args:
        word: the word that was found.
        allowed: the allowed spellings.
        meant: allowed spellings that mean the same as the word (`fedtide.fields.vocabulary.synonyms`).

    >>> nearest("perod", ["period", "phase"])
    "allowed: period, phase; did you mean 'period'?"
    >>> nearest("x", ["period", "phase"])
    'allowed: period, phase'
    >>> nearest("IFCA", ["fedavg", "ifca"])
    "allowed: fedavg, ifca; did you mean 'ifca'?"
    """
    import difflib

    spellings = {folded(name): name for name in allowed}
    close = [spellings[folded(word)]] if folded(word) in spellings else list(meant)
    close += [spellings[name] for name in difflib.get_close_matches(folded(word), spellings, n=1, cutoff=0.65)]
    tail = f"; did you mean '{close[0]}'?" if close else ""
    return f"allowed: {', '.join(allowed)}{tail}"


def bare_word(name: str) -> str:
    """A name of Python without case and underscores.

    >>> bare_word("FedAvg"), bare_word("fed_avg")
    ('fedavg', 'fedavg')
    """
    return name.casefold().replace("_", "")


def folded(word: str) -> str:
    """A word without case, and with one way to divide it.

    >>> folded("Q-FedAvg "), folded("q_fedavg")
    ('q_fedavg', 'q_fedavg')
    """
    return word.strip().casefold().replace("-", "_").replace(" ", "_")
