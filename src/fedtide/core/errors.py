"""The one exception for what a person can cause."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

SYNONYMS = {
    "rate": ("lr", "dropout_rate"),
    "learning_rate": ("lr",),
    "batch": ("batch_size", "parallel_trials"),
    "n_jobs": ("parallel_trials",),
    "optimiser": ("optimizer",),
    "steps": ("local_steps",),
    "schedule": ("lr_schedule",),
    "clip_norm": ("max_grad_norm",),
    "clip": ("max_grad_norm",),
    "size": ("clients_per_round",),
    "over": ("over_selection",),
    "select": ("cohort",),
    "rows": ("samples",),
    "pool": ("domain",),
    "valid": ("val",),
    "validation": ("val",),
    "unseen": ("held_out_clients",),
    "public": ("public_samples",),
    "prepare": ("transforms",),
    "dropout": ("dropout_rate",),
    "evaluate_every": ("eval_every",),
    "window": ("average_last",),
    "grouping": ("decide_per",),
    "weights": ("init_from",),
    "about": ("description",),
    "than": ("versus",),
    "by": ("bound",),
}
"""Words that people write for a key, and the key that they mean: from earlier versions and from other libraries."""


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
        # What a terminal would obey is shown as Python writes it.
        shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(words))
        super().__init__(shown if len(shown) <= 900 else f"{shown[:500]} ... {shown[-390:]}")


def refused(key: str, found: Any, allowed: str, but: str = "") -> FedtideError:
    """The error of a value that is not allowed.

    Args:
        key: where it stands, as the person wrote it.
        found: the value; shown as Python writes it, cut at 60 characters.
        allowed: what would do, in words.
        but: why it will not do, where the range does not say so.

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
    return FedtideError(f"{key}: found {shown(found)}{reason} allowed: {allowed}")


def unknown(key: str, found: str, choices: Sequence[str]) -> FedtideError:
    """The error of a name that is none of some choices, with the nearest of them.

    >>> raise unknown("kind", "perod", ["period", "phase"])
    Traceback (most recent call last):
        ...
    fedtide.core.errors.FedtideError: kind: found 'perod', allowed: period, phase; did you mean 'period'?
    """
    return FedtideError(f"{key}: found {shown(found)}, {nearest(found, choices)}")


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


def nearest(word: str, allowed: Sequence[str]) -> str:
    """The tail of an error line: the allowed spellings, and the nearest one when there is one.

    >>> nearest("perod", ["period", "phase"])
    "allowed: period, phase; did you mean 'period'?"
    >>> nearest("x", ["period", "phase"])
    'allowed: period, phase'
    >>> nearest("learning_rate", ["lr", "momentum"])
    "allowed: lr, momentum; did you mean 'lr'?"
    """
    import difflib

    meant = [key for key in SYNONYMS.get(word, ()) if key in allowed]
    close = meant or difflib.get_close_matches(word, allowed, n=1, cutoff=0.6)
    tail = f"; did you mean '{close[0]}'?" if close else ""
    return f"allowed: {', '.join(allowed)}{tail}"
