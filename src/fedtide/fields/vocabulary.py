"""Words for methods, keys and choices: synonyms, families of methods, values that a server may be shown of a client.

Masks hide what is summed, and not a value that is shown. If that value is made of the update, they hide nothing.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from fedtide.core import errors
from fedtide.core.errors import folded


@cache
def names_by_synonym() -> dict[str, list[str]]:
    """Return the keys and choices that a word means, by the word (`synonyms.toml`)."""
    names: dict[str, list[str]] = {}
    table = tomllib.loads(Path(__file__).with_name("synonyms.toml").read_text(encoding="utf-8"))
    for name, words in table.items():
        for word in words.split():
            names.setdefault(word, []).append(name)
    return names


def synonyms(word: str, allowed: Sequence[str]) -> list[str]:
    """Return the allowed names that a word means in other libraries; of "kind:path" the kind has to be allowed.

    >>> synonyms("Learning-Rate", ["lr", "momentum"]), synonyms("mnist", ["csv", "idx"])
    (['lr'], ['idx:mnist'])
    """
    return [name for name in names_by_synonym().get(folded(word), ()) if name.partition(":")[0] in allowed]


def meant(word: str, names: Sequence[str]) -> list[str]:
    """Return the names that a word means: itself in another spelling, and its synonyms.

    >>> meant("Weight-Decay", ["lr", "weight_decay"]), meant("learning_rate", ["lr"])
    (['weight_decay'], ['lr'])
    """
    return [*(name for name in names if folded(name) == folded(word)), *synonyms(word, names)]


def nearest(word: str, allowed: Sequence[str], *, quoted: bool = False) -> str:
    """Return the tail of an error line, as `fedtide.core.errors.nearest`, for a key or a choice.

    >>> nearest("learning_rate", ["lr", "momentum"])
    "did you mean 'lr'? Allowed: lr, momentum"
    """
    return errors.nearest(word, allowed, synonyms(word, allowed), quoted=quoted)


Family = Literal["global", "server-optimizer", "branches", "mixture", "clustered", "personal", "baseline"]
"""What a method trains: one model, one model with another step of the server, a network with a branch for each mode,
components that clients are mixtures of, a model for each cluster of clients, a model for each client beside a shared
one, or as a baseline without a federation."""


Range = Literal["any", "positive", "size", "weight"]
"""Which numbers a server takes: any, none below 0, of these the first up to the largest weight of a client, or all."""


@dataclass(frozen=True)
class Shown:
    """A value that a server may be shown of a client.

    Args:
        words: what it is, of "its" rows.
        kind: a "statistic" of its rows, its "update" or a part of that, or the "truth", which only a simulation
            knows.
        range: which numbers it has.
    """

    words: str
    kind: Literal["statistic", "update", "truth"] = "statistic"
    range: Range = "any"


SHOWN: Mapping[str, Shown] = {
    # asked by cohorts
    "count": Shown("how many rows it has", range="size"),
    "labels": Shown("the shares of its labels"),
    "loss": Shown("the loss of the current model on its rows"),
    "utility": Shown("the root mean square of its losses, times its rows", range="positive"),
    # asked by algorithms
    "n": Shown("how many rows it trained on", range="weight"),
    "rows": Shown("how many rows it has", range="weight"),
    "weight": Shown("what its update counts for", range="weight"),
    "pi": Shown("its mean posterior"),
    "odds": Shown("its log-odds"),
    "mu": Shown("its feature mean"),
    "var": Shown("its feature variance", range="positive"),
    "centers": Shown("centers of its rows, at the start"),
    "counts": Shown("how many rows these are of", range="weight"),
    "spreads": Shown("how far its rows are from these", range="positive"),
    "profile": Shown("its profile: means and deviations of its features, over all rows and by label"),
    "representation": Shown("its representation, whenever it drifts"),
    "shifted": Shown("how far its labels moved"),
    "bad": Shown("how badly each model does on its rows"),
    "anchors": Shown("the mean features of its rows by class"),
    "classes": Shown("which classes it has"),
    "moments": Shown("the mean features of its rows by class, times the shares of its classes"),
    "variance": Shown("the variance of its features, by its rows"),
    "head": Shown("its head", "update"),
    "balanced": Shown("its head after training on equally many rows of each class", "update"),
    "update": Shown("its update", "update"),
    "sketch": Shown("a sketch of its update", "update"),
    "true_groups": Shown("its true group: a bound, as a server cannot know it", "truth"),
    "all_rows": Shown("all of its rows: a bound, as these would have to leave it", "truth"),
}
"""Every value that a registered algorithm or a cohort may show, by name."""


def in_words(names: tuple[str, ...]) -> str:
    """Describe what names stand for.

    >>> in_words(("mu", "var"))
    'its feature mean, its feature variance'
    """
    return ", ".join(SHOWN[name].words if name in SHOWN else f"'{name}'" for name in names)
