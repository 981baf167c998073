"""The registry of algorithms: a file each, whose entry says what it sends, what the server sees, and what clients keep.

>>> import fedtide as ft
>>> task = ft.Task(lambda: ft.models.Linear().build((3,), 2))
>>> ft.algorithms.fedprox(task, ft.LocalTrainer(proximal=0.01)).name
'fedprox'
>>> ft.algorithms.ifca(task, safe=True).transforms
(Anchored(kind='anchored'),)
"""

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import get_args

from fedtide.algorithms.entry import Entry, Family, Safe, checked, preset
from fedtide.core.base import Algorithm
from fedtide.core.errors import nearest

__all__ = ["REGISTRY", "Entry", "Safe", "preset"]


def _entries() -> Iterator[Entry]:
    """Find the entries at the end of this package's files."""
    for info in iter_modules(__path__):
        module = import_module(f"{__name__}.{info.name}")
        yield from getattr(module, "ENTRIES", ())
        if hasattr(module, "ENTRY"):
            yield module.ENTRY


REGISTRY: Mapping[str, Entry] = {
    entry.name: entry
    for entry in sorted(_entries(), key=lambda entry: (get_args(Family).index(entry.family), entry.name))
}


# From Python an algorithm has its name in a file, with `_` for `-`, and its arguments are read as from a file.
globals().update(
    {name.replace("-", "_"): checked(entry.name, entry.make, entry.safe) for name, entry in REGISTRY.items()}
)


def __getattr__(name: str) -> Callable[..., Algorithm]:
    raise AttributeError(f"module 'fedtide.algorithms' has no attribute '{name}', {nearest(name, __dir__())}")


def __dir__() -> list[str]:
    return ["REGISTRY", "Entry", "Safe", "preset", *(name.replace("-", "_") for name in REGISTRY)]
