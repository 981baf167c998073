"""Scores of clients as sums of bounded numbers: names of such questions, parts of clients, and how they are read.

A client says two numbers of an evaluation, of length 1/2 at most: its accuracy minus 1/2, and 1/2. One without rows to
be judged on says 0 and minus 1/2. Every client counts once. The second sum and half of all clients is the number of
clients that have rows. The first sum by that number, and 1/2, is their mean accuracy. Numbers around 0 need half the
noise that numbers from 0 to 1 would need.
"""

from collections.abc import Sequence
from typing import cast

from fedtide.core.base import Grouping, SummedScores, Weighted
from fedtide.core.trees import Tree

SCORE = "score"
"""Name of the questions that judge what was sent on the clients' own rows."""

HALF = 0.5
"""Largest length of each number."""

BOUNDS = {"score.accuracy": HALF, "score.judged": HALF}
"""Bounds of what a client says, by leaf."""

LEAST = 3.0
"""How many deviations of its noise the number of clients has to have, or there is no accuracy."""


def question_of(part: str, grouping: str, other: str = "") -> str:
    """Name the question that judges clients on a part of their rows.

    Args:
        part: of their rows.
        grouping: which rows decide together.
        other: name of another use of the state.

    >>> question_of("val", "client"), question_of("test", "batch", "frozen")
    ('score val client', 'score test batch frozen')
    """
    return f"{SCORE} {part} {grouping} {other}".rstrip()


def parts_of(question: str) -> tuple[str, Grouping, str]:
    """Return part, grouping and other use of the name of a question.

    >>> parts_of("score val client"), parts_of("score test batch frozen")
    (('val', 'client', ''), ('test', 'batch', 'frozen'))
    """
    _, part, grouping, *other = question.split(" ", 3)
    return part, cast("Grouping", grouping), "".join(other)


def is_spelled(question: str) -> bool:
    """Tell whether the name of a question is the only one that it has.

    >>> is_spelled("score val client"), is_spelled("score val client "), is_spelled("score val")
    (True, False, False)
    """
    return question.count(" ") > 1 and question_of(*parts_of(question)) == question


def listed(question: str) -> str:
    """Return the name under which clients are in one list: scores are the same whatever rows decide together.

    >>> listed("score test batch frozen"), listed("train")
    ('score test frozen', 'train')
    """
    if not is_score(question):
        return question
    part, _, other = parts_of(question)
    return f"{SCORE} {part} {other}".rstrip()


def is_score(question: str) -> bool:
    """Tell whether a question judges clients."""
    return question.startswith(f"{SCORE} ")


def total_of(accuracy: float | None) -> Tree:
    """Return the part of a client in a sum, by its accuracy; None if it has no rows.

    >>> total_of(0.75)["score"]["accuracy"], total_of(None)["score"]["judged"]
    (Weighted(value=0.25, weight=1.0), Weighted(value=-0.5, weight=1.0))
    """
    value, judged = (0.0, -HALF) if accuracy is None else (accuracy - HALF, HALF)
    return {SCORE: {"accuracy": Weighted(value, 1.0), "judged": Weighted(judged, 1.0)}}


def read_sums(sums: Sequence[Tree], deviation: float) -> SummedScores | None:
    """Return the evaluation that sums tell, of which there may be one for each slot; None if noise drowns them.

    Args:
        sums: as a server reads them, each of other clients.
        deviation: of the noise on each number.

    >>> from fedtide.core.base import Sum
    >>> four = {"accuracy": Sum(1.0, 4.0), "judged": Sum(2.0, 4.0)}  # clients of accuracy 0.75
    >>> read_sums([{"score": four}], 0.0)
    SummedScores(accuracy=0.75, noise=0.0, clients=4.0)
    """
    accuracy, judged = (sum(float(total[SCORE][name].value) for total in sums) for name in ("accuracy", "judged"))
    clients = judged + HALF * sum(total[SCORE]["judged"].weight for total in sums)
    deviation *= len(sums) ** 0.5
    if clients <= LEAST * deviation:
        return None
    above = accuracy / clients
    # To first order: what is above 1/2 is a sum by another, whose noises are independent.
    return SummedScores(HALF + above, deviation * (1 + above**2) ** 0.5 / clients, clients)
