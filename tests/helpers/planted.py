"""Tables with shifts that are known, one or several at once, and what they should be found to have."""

import numpy as np

from fedtide.inspection.findings import Findings
from fedtide.inspection.table import Table

CLASSES, DIMS, CLIENTS, DAYS = 4, 4, 24, 12

# "who" stands with "features" among the nine: without it nothing tells who comes when. All pairs but that one and
# "features + meaning": as the rows of a group then lie where those of no other group do, one rule reads the labels of
# all, and nothing tells that features mean something else.
WORLDS = (
    "nothing", "labels 0.3", "labels 1", "features", "meaning", "features + who", "same", "sudden", "gradual",
    "labels 0.3 + features", "labels 0.3 + meaning", "labels 1 + who", "labels 1 + same", "labels 0.3 + sudden",
    "labels 1 + gradual", "features + same", "features + sudden", "features + gradual", "meaning + who",
    "meaning + same", "meaning + sudden", "meaning + gradual", "who + same", "who + sudden", "who + gradual",
    "same + sudden", "same + gradual", "sudden + gradual",
)  # fmt: skip
"""Shifts, one or several joined by " + "."""

FOUND = {
    "nothing": set(),
    "labels 0.3": {"labels"},
    "labels 1": {"labels"},
    "features": {"features", "groups"},
    "meaning": {"meaning", "groups"},
    "who": {"presence"},
    "same": {"mix: same"},
    "sudden": {"drift", "matter"},
    "gradual": {"drift"},
}
"""Shifts, and what each is found by. `who` alone: half of the clients are there by day, half by night."""

MAY = {"gradual": {"matter"}}
"""What a shift may be found by as well."""


def planted(name: str, seed: int, rows: int = 2400, clients: int = CLIENTS) -> Table:
    """Draw rows with the shifts that a name lists."""
    shifts, draw = name.split(" + "), np.random.default_rng(seed)
    client = draw.integers(0, clients, rows)
    group = client % 2
    day, hour = draw.integers(0, DAYS, rows), 24 * draw.random(rows)
    if "who" in shifts:  # the first group around midnight, the second around noon
        lean = 12 * np.sqrt(draw.random(rows)) * draw.choice([-1, 1], rows)  # triangular around 12
        hour = np.where(group == 0, 12 - lean, lean) % 24
    part = (day + hour / 24) / DAYS
    chances = np.ones((rows, CLASSES))
    for alpha in (float(shift.split()[1]) for shift in shifts if shift.startswith("labels")):
        chances *= draw.dirichlet([alpha] * CLASSES, clients)[client] + 1e-3
    upper = np.arange(CLASSES) >= CLASSES // 2
    if "same" in shifts:
        share = np.abs(2 * hour / 24 - 1)[:, None]
        chances *= np.where(upper, share, 1 - share)
    if "gradual" in shifts:
        chances *= np.where(upper, part[:, None], 1 - part[:, None])
    edges = np.cumsum(chances / chances.sum(1, keepdims=True), 1)
    shown = np.minimum((draw.random((rows, 1)) > edges).sum(1), CLASSES - 1)
    features = 2.4 * np.eye(DIMS)[shown] + 0.6 * draw.normal(size=(rows, DIMS))
    if "features" in shifts:
        features = np.where(group[:, None] == 1, -features, features)
    label = shown
    if "meaning" in shifts:
        label = np.where(group == 1, (label + 2) % CLASSES, label)
    if "sudden" in shifts:
        label = np.where(part > 0.6, (label + 1) % CLASSES, label)
    names = np.array([f"client {number}" for number in range(clients)])
    return Table(name, np.array(list("abcd"))[label], features, names[client], 86400 * (day + hour / 24))


def expected(name: str) -> tuple[set[str], set[str]]:
    """Return what an inspection has to find in the shifts that a name lists, and what it may find."""
    shifts = name.split(" + ")
    must = set().union(*(FOUND[shift] for shift in shifts))
    may = set().union(*(MAY.get(shift, set()) for shift in shifts))
    if "who" in shifts and ({"features", "meaning"} & set(shifts)):
        must |= {"mix: others"}
    mixed = any(shift.startswith("labels") for shift in shifts)
    if "who" in shifts and mixed:
        may |= {"mix: others"}
    if mixed and {"meaning", "sudden"} & set(shifts):  # what a client has seen are the labels of before
        may |= {"features"}
    if {"who", "same"} <= set(shifts):  # whoever comes by day has the labels of the day
        may |= {"labels", "groups", "mix: others"}
    return must, may | must


def positive(findings: Findings) -> set[str]:
    """Return the questions with a positive answer, the mix of the hour with its reasons."""
    reasons = {f"mix: {why}" for why in findings["mix"].why}
    return reasons | {answer.question for answer in findings if answer.found and answer.question != "mix"}
