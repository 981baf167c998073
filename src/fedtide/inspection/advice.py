"""Advice: for which methods speaks what was found. The registry says what each is for (`Entry.helps`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fedtide.algorithms import REGISTRY
from fedtide.algorithms.entry import Trait
from fedtide.inspection.findings import Findings, Question

LOSSES: Mapping[str, tuple[Trait, ...]] = {"wsm": ("labels", "holdings")}
"""What losses help with, whatever the algorithm: the re-weighted softmax where a client lacks labels, if for a time."""


def _level(*questions: Question) -> Callable[[Findings], int]:
    """Return how strongly any of some questions is answered: 2, 1 or 0."""
    strength = {"strong": 2, "mild": 1}
    return lambda found: max(strength.get(found[question].level, 0) for question in questions)


def _others(found: Findings) -> int:
    """Return how strongly other clients are there at other hours."""
    mix = _level("mix")(found) if "others" in found["mix"].why else 0
    return max(mix, _level("presence")(found))


def _same(found: Findings) -> int:
    """Return how strongly what the same clients hold changes."""
    questions: tuple[Question, ...] = ("mix", "drift")
    return max((_level(name)(found) for name in questions if "same" in found[name].why), default=0)


def _nothing(found: Findings) -> int:
    """Return 1 where clients are alike and stay so."""
    return int(not any(answer.found for answer in found))


TRAITS: Mapping[Trait, Mapping[str, Callable[[Findings], int]]] = {
    "labels": {"labels differ between clients": _level("labels")},
    "groups": {"there are groups of clients": _level("groups"), "features differ between clients": _level("features")},
    "meaning": {"features mean other things to other clients": _level("meaning")},
    "hours": {"other clients are there at other hours": _others},
    "drift": {"it drifts": _level("drift", "matter")},
    "holdings": {"the same clients hold other things at other times": _same},
    "nothing": {"nothing differs, where several models that are averaged help a little": _nothing},
}
"""What may be found of each trait, in words, and how strongly it is."""


def helps(algorithm: str, loss: str) -> tuple[Trait, ...]:
    """Return what an algorithm with a loss, both by name, is for.

    >>> helps("scaffold", "cross-entropy"), helps("fedavg", "wsm")
    (('labels',), ('labels', 'holdings'))
    """
    entry = REGISTRY.get(algorithm)
    both = (*(entry.helps if entry else ()), *LOSSES.get(loss, ()))
    return tuple(trait for trait in TRAITS if trait in both)


def reasons(found: Findings, algorithm: str, loss: str) -> dict[str, int]:
    """Return what was found that speaks for an algorithm with a loss, in words, and how strongly each: 2 or 1."""
    told = [way for trait in helps(algorithm, loss) for way in TRAITS[trait].items()]
    return {words: level for words, strength in told if (level := strength(found))}
