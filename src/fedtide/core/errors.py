"""The one exception for what a person can cause."""

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class FedtideError(Exception):
    """A mistake a person can mend: one clear line naming the file, key or row, what was found and what is allowed.

    The command line prints the line and exits with status 2; nothing is half-written when it is raised. A run that ends
    in the middle is kept up to its last checkpoint, and `fedtide resume` goes on with it.

    >>> raise FedtideError("demo.toml: rounds: found 0, allowed: an integer of 1 or more")
    Traceback (most recent call last):
        ...
    fedtide.core.errors.FedtideError: demo.toml: rounds: found 0, allowed: an integer of 1 or more
    """

    def __init__(self, line: str) -> None:
        words = (word if len(word) <= 400 else f"{word[:100]}..." for word in line.split())
        shown = printable(" ".join(words))
        begin, end = shown[:500].rpartition(" ")[0], shown[-390:].partition(" ")[2]  # no word is cut
        super().__init__(shown if len(shown) <= 900 else f"{begin} ... {end}")


class Damaged(FedtideError):
    """A file of a run is missing, or is not what was written."""


UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Errors of reading content that another program may have written."""


def printable(text: object) -> str:
    r"""Return a text, such as the name of a folder, without what a terminal would obey.

    >>> print(printable("runs/a\x1b[2J"))
    runs/a\x1b[2J
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text))


def in_shell(path: object) -> str:
    """Return the name of a file or folder as a shell reads it: as one word that is no option.

    >>> print(in_shell("my runs/a"), in_shell("-a"), in_shell("two\\nlines"))
    'my runs/a' ./-a $'two\\nlines'
    """
    name = f"./{path}" if str(path).startswith("-") else str(path)
    if name.isprintable():
        return shlex.quote(name)
    escaped = name.replace("\\", "\\\\").replace("'", "\\'")
    return f"$'{printable(escaped)}'"  # else the name that is printed is that of another file


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


def uninstalled(need: str, extra: str) -> FedtideError:
    """The error of a library that is not installed, with the command that installs it.

    >>> raise uninstalled("fedtide tune: the search needs Optuna", "tune")
    Traceback (most recent call last):
        ...
    fedtide.core.errors.FedtideError: fedtide tune: the search needs Optuna; pip install "fedtide[tune]"
    """
    return FedtideError(f'{need}; pip install "fedtide[{extra}]"')


def unknown(
    key: str, name: str, choices: Sequence[str], meant: Sequence[str] = (), *, quoted: bool = False
) -> FedtideError:
    """The error of a name that is none of some choices, with the nearest of them; see `nearest`.

    >>> raise unknown("kind", "perod", ["period", "phase"])
    Traceback (most recent call last):
        ...
    fedtide.core.errors.FedtideError: kind: found 'perod', did you mean 'period'? Allowed: period, phase
    """
    return FedtideError(f"{key}: found {shown(name)}, {nearest(name, choices, meant, quoted=quoted)}")


FEW = 8
"""Number of names that a line lists of many."""


def missing(key: str, name: str, names: Sequence[str], unnamed: str = "none") -> FedtideError:
    """The error of a name that is none of perhaps many, with the nearest and some of them; `unnamed` if there are none.

    >>> print(missing("--client", "7", ["01", "07", *map(str, range(10, 20))]))
    --client: found '7', did you mean '07'? Allowed: 01, 07, 10, 11, 12, 13, 14, 15 and 4 more
    """
    more = f" and {len(names) - FEW} more" if len(names) > FEW else ""
    few = f"{spell_names(names[:FEW])}{more}" if names else unnamed
    same = next((other for other in names if other.isdecimal() and other.lstrip("0") == name.lstrip("0")), None)
    close = nearest(name, names).partition(" Allowed")[0]
    hint = f"did you mean '{same}'?" if same else close if close.startswith("did you mean") else ""
    return FedtideError(f"{key}: found {shown(name)}, {f'{hint} Allowed' if hint else 'allowed'}: {few}")


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


class Words(str):
    """Words for what was found; an error line shows them without quotation marks."""

    __repr__ = str.__str__


def shown(value: Any) -> str:
    """Format a value that was found for an error line: at most 60 characters.

    >>> shown("x" * 100)
    "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx..."
    """
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def nearest(word: str, allowed: Sequence[str], meant: Sequence[str] = (), *, quoted: bool = False) -> str:
    """The tail of an error line: the nearest of the allowed spellings, if there is one, and all of them.

    Args:
        word: the word that was found.
        allowed: the allowed spellings.
        meant: allowed spellings that mean the same as the word (`fedtide.fields.vocabulary.synonyms`).
        quoted: whether the spellings are quoted even if none has a comma.

    >>> nearest("perod", ["period", "phase"])
    "did you mean 'period'? Allowed: period, phase"
    >>> nearest("x", ["period", "phase"])
    'allowed: period, phase'
    >>> nearest("IFCA", ["fedavg", "ifca"])
    "did you mean 'ifca'? Allowed: fedavg, ifca"
    >>> nearest("IFCA", ["FedAvg", "IFCA, K = 2"])
    "did you mean 'IFCA, K = 2'? Allowed: 'FedAvg', 'IFCA, K = 2'"
    """
    import difflib

    spellings = {folded(name): name for name in allowed}
    close = [spellings[folded(word)]] if folded(word) in spellings else list(meant)
    close += [spellings[name] for name in difflib.get_close_matches(folded(word), spellings, n=1, cutoff=0.65)]
    begun = [name for spelling, name in spellings.items() if len(word) > 2 and spelling.startswith(folded(word))]
    close += begun if len(begun) == 1 else []
    choices = quote(allowed) if quoted else spell_names(allowed)
    return f"did you mean '{close[0]}'? Allowed: {choices}" if close else f"allowed: {choices}"


def spell_names(names: Sequence[str]) -> str:
    """List names, which are quoted if one has a comma.

    >>> spell_names(["lr", "momentum"]), spell_names(["FedAvg", "IFCA, K = 2"])
    ('lr, momentum', "'FedAvg', 'IFCA, K = 2'")
    """
    return quote(names) if any("," in name for name in names) else ", ".join(names)


def quote(names: Sequence[str]) -> str:
    """List names in quotes.

    >>> quote(["FedAvg", "IFCA"])
    "'FedAvg', 'IFCA'"
    """
    return ", ".join(f"'{name}'" for name in names)


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
