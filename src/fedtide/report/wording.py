"""What reports say of rows that have no classes: their headline is a skill, and the rival says always the same."""

from __future__ import annotations

import re
from collections.abc import Mapping

from fedtide.learn.target import SKILLED

SKILL = {
    "an accuracy": "a skill", "accuracies": "skills", "Accuracies": "Skills", "accuracy": "skill",
    "Accuracy": "Skill", "always answering the commonest class": "always saying the same number",
}  # fmt: skip
LABELS = {"always answering the commonest class": "always answering each label as it is most often"}

WORDS: Mapping[str, Mapping[str, str]] = {**dict.fromkeys(SKILLED, SKILL), "labels": LABELS}
"""Words by kind of target."""

SKILL_IS = (
    " Skill is 1 - error / error of always saying the same number, the best one, on the same rows: 100 % is without "
    "any error, 0 % is no better than that."
)
"""What a skill is, for a caption."""


def worded(text: str, target: str) -> str:
    """Return a text about a kind of target, given one about classes.

    >>> worded("It has an accuracy of 5 %", "number"), worded("an accuracy", "classes")
    ('It has a skill of 5 %', 'an accuracy')
    """
    words = WORDS.get(target)
    if not words:
        return text
    return re.sub("|".join(map(re.escape, words)), lambda found: words[found[0]], text)


FLOORS = {
    "classes": "commonest class, without training",
    "labels": "commonest answer for each label, without training",
}

BASELINES = {"yesterday": "the value of a day ago", "last_week": "the value of a week ago"}
"""What baselines of time series say, by their measures."""


def floor_of(target: str) -> str:
    """Return the name of the line that every method should be above."""
    return FLOORS.get(target, "always the same number, without training")
