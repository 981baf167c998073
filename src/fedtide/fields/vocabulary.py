"""Words for methods: what they train, and values that a server may be shown of a single client.

A sum is masked and a shown value is not: masks would hide nothing if the value is made of the update.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Family = Literal["global", "server-optimizer", "branches", "mixture", "clustered", "baseline"]
"""What a method trains: one model, one model with another step of the server, a network with a branch for each mode,
components that clients are mixtures of, a model for each cluster of clients, or as a baseline without a federation."""


@dataclass(frozen=True)
class Shown:
    """A value that a server may be shown of a client.

    Args:
        words: what it is, of "its" samples.
        kind: a "statistic" of its samples, its "update" or a part of that, or the "truth", which only a simulation
            knows.
    """

    words: str
    kind: Literal["statistic", "update", "truth"] = "statistic"


SHOWN: Mapping[str, Shown] = {
    # asked by cohorts
    "count": Shown("how many samples it has"),
    "labels": Shown("the shares of its labels"),
    "loss": Shown("the loss of the current model on its samples"),
    "utility": Shown("the root mean square of its losses, times its samples"),
    # asked by algorithms
    "n": Shown("how many samples it trained on"),
    "rows": Shown("how many samples it has"),
    "weight": Shown("what its update counts for"),
    "pi": Shown("its mean posterior"),
    "odds": Shown("its log-odds"),
    "mu": Shown("its feature mean"),
    "var": Shown("its feature variance"),
    "centers": Shown("centers of its samples, at the start"),
    "counts": Shown("how many samples these are of"),
    "spreads": Shown("how far its samples are from these"),
    "representation": Shown("its representation, whenever it drifts"),
    "shifted": Shown("how far its labels moved"),
    "bad": Shown("how badly each model does on its samples"),
    "update": Shown("its update", "update"),
    "sketch": Shown("a sketch of its update", "update"),
    "true_groups": Shown("its true group: a bound, as a server cannot know it", "truth"),
    "all_rows": Shown("all of its samples: a bound, as these would have to leave it", "truth"),
}
"""Every value that a registered algorithm or a cohort may show, by name."""


def in_words(names: tuple[str, ...]) -> str:
    """Say what some names stand for.

    >>> in_words(("mu", "var"))
    'its feature mean, its feature variance'
    """
    return ", ".join(SHOWN[name].words if name in SHOWN else f"'{name}'" for name in names)
