"""The one rule of who leads: reports, headlines and tournaments say it by this rule alone."""

from collections.abc import Mapping

from fedtide.draw.prose import counted
from fedtide.evaluate.metrics import Measure
from fedtide.report.formats import percent

ENOUGH = 3
"""Seeds from which the spread of a difference is known."""

BySeed = Mapping[int, float]
"""The score of a method at each seed."""


def gap(ours: BySeed, theirs: BySeed) -> Measure:
    """Return the difference of two scores over the seeds of both."""
    return Measure.of([ours[seed] - theirs[seed] for seed in ours if seed in theirs])


def find_level(ours: BySeed, references: Mapping[str, BySeed]) -> str:
    """Return which references are as good as a method, or not clearly worse, as the beginning of a sentence, or "".

    >>> find_level({0: 0.76, 1: 0.77}, {"always 'no'": {0: 0.8, 1: 0.8}})
    "No method beats always 'no' (80.0 %)"
    """
    gaps = {name: gap(ours, theirs) for name, theirs in references.items()}
    below = [name for name, ahead in gaps.items() if ahead.mean is not None and ahead.mean <= 0]
    level = below or [name for name, ahead in gaps.items() if ahead.level]
    bars = [f"{name} ({percent(Measure.of([*references[name].values()]))})" for name in level]
    return f"No method {'beats' if below else 'clearly beats'} {' or '.join(bars)}" if level else ""


def find_doubt(ours: BySeed, others: Mapping[str, BySeed], references: Mapping[str, BySeed], *, complete: bool) -> str:
    """Return the reason why a method does not lead, as the beginning of a sentence; "" if it leads.

    It leads after all rounds with three seeds or more, if it is clearly above all other methods and all references: the
    95 % confidence intervals of the differences lie above 0.

    Args:
        ours: of the method with the highest mean.
        others: of the other methods, by name.
        references: of answers without a federation, by their words.
        complete: whether all rounds of all runs are played.

    >>> find_doubt({0: 0.9}, {"B": {0: 0.8}}, {}, complete=True)
    'With 1 seed no method can be said to lead'
    >>> find_doubt({0: 0.9, 1: 0.91, 2: 0.9}, {"B": {0: 0.8, 1: 0.8, 2: 0.8}}, {}, complete=True)
    ''
    """
    if level := find_level(ours, references):
        return level
    if len(ours) < ENOUGH:
        return f"With {counted(len(ours), 'seed')} no method can be said to lead"
    if not complete:
        return "Before all rounds are played no method can be said to lead"
    for name, theirs in {**references, **others}.items():
        ahead = gap(ours, theirs)
        if ahead.mean is not None and ahead.side() <= 0:
            unclear = ahead.level or ahead.clarity(ahead.mean) == "unclear"
            return f"{'No clear lead' if unclear else 'Too few seeds to tell a lead'} over {name}"
    return ""
