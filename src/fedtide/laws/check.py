"""Checks of a person's own algorithm: every law on a toy federation, and the broken ones in words."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from fedtide.algorithms import REGISTRY
from fedtide.core.errors import FedtideError
from fedtide.fleets.pool import Pool
from fedtide.laws.case import Broken, Case, NotApplicable, toy
from fedtide.laws.every import LAWS, Law

PACKAGE = Path(__file__).parents[1]
"""Folder of this package."""


@dataclass(frozen=True)
class Verdict:
    """The result of a law.

    Args:
        law: the law.
        broken: the reason if it does not hold; None if it holds.
        silent: reason why it does not apply to the algorithm, or is not checked; None if it was checked.
    """

    law: Law
    broken: str | None = None
    silent: str | None = None


def check(algorithm: str, sets: Sequence[str] = ()) -> Iterator[Verdict]:
    """Check every law on an algorithm, one after the other.

    A law is left out if the registry declares an exemption. If the algorithm cannot be played, nothing else is
    checked.

    Args:
        algorithm: `module:function`, `python:module:function`, or a registered name.
        sets: overrides `key=value` of the toy experiment, "method.mu=0.1" for an option.

    Raises:
        FedtideError: there is no such algorithm, or it does not take the options.
    """
    name = algorithm.removeprefix("python:")
    make = partial(toy, name, sets=sets)
    make()
    entry = REGISTRY.get(name)
    with ExitStack() as stack:
        case = Case(make, cache(lambda: stack.enter_context(Pool(3, joined=True))))
        for law in LAWS:
            why = None if entry is None else entry.exempt.get(law.name)
            verdict = Verdict(law, silent=why) if why else _verdict(law, case)
            yield verdict
            if law is LAWS[0] and verdict.broken is not None:
                return


def _verdict(law: Law, case: Case) -> Verdict:
    try:
        law.check(case)
    except NotApplicable as why:
        return Verdict(law, silent=str(why))
    except Broken as why:
        return Verdict(law, broken=str(why))
    except Exception as error:  # of the person's code
        return Verdict(law, broken=described(error))
    return Verdict(law)


def described(error: Exception) -> str:
    """Describe an error in one line, with the last line of the person's own code in its traceback."""
    line = f"{type(error).__name__}: {error}" if not isinstance(error, FedtideError) else str(error)
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    frames = [(Path(frame.filename), frame) for frame in traceback.extract_tb(error.__traceback__)]
    places = [
        f" ({path.name}, line {frame.lineno}, in {frame.name})"
        for path, frame in frames
        if path.suffix == ".py" and PACKAGE not in path.parents and "/lib/python" not in str(path)
    ]
    where = places[-1] if places else ""
    return " ".join(f"{line}{notes}{where}".split())[:400]
