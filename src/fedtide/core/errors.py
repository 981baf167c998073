"""The one exception for what a person can cause."""

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
        super().__init__(" ".join(line.split()))


def shown(value: Any) -> str:
    """What was found, as an error line shows it: at most 60 characters.

    >>> shown("x" * 100)
    "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx..."
    """
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def nearest(word: str, allowed: "list[str] | tuple[str, ...]") -> str:
    """The tail of an error line: the allowed spellings, and the nearest one when there is one.

    >>> nearest("perod", ["period", "phase"])
    "allowed: period, phase; did you mean 'period'?"
    >>> nearest("x", ["period", "phase"])
    'allowed: period, phase'
    """
    import difflib

    close = difflib.get_close_matches(word, allowed, n=1, cutoff=0.6)
    tail = f"; did you mean '{close[0]}'?" if close else ""
    return f"allowed: {', '.join(allowed)}{tail}"
