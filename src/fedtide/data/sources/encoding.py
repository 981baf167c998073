"""Features made of the columns of a table: missing numbers filled, numbers standardized, categories one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedtide.core.errors import FedtideError, refused
from fedtide.data.sources.arrays import center_and_spread
from fedtide.data.sources.cells import lacks

MOST_CATEGORIES = 100
"""Categories that a column may have: each becomes a feature."""


@dataclass(frozen=True)
class Encoder:
    """What columns become features by, as found in the rows that are known when training begins.

    names: of the columns, in the order of their features. means: of the columns of numbers, for missing ones.
    categories: of the columns of texts, in the order of their features. center, spread: by which numbers are
    standardized, None where they are left as they are.
    """

    names: tuple[str, ...]
    means: np.ndarray
    categories: Mapping[str, tuple[str, ...]]
    center: np.ndarray | None = None
    spread: np.ndarray | None = None

    @staticmethod
    def of(
        name: str, names: Sequence[str], numbers: np.ndarray, texts: Mapping[str, Sequence[str]], known: np.ndarray
    ) -> Encoder:
        """Find means and categories in the known rows.

        Raises:
            FedtideError: a column has nothing there, or too many categories.
        """
        means, categories = np.zeros(numbers.shape[1]), {}
        measures = [column for column in names if column not in texts]
        for place, column in enumerate(measures):
            there = numbers[known, place]
            there = there[~np.isnan(there)]
            if not len(there):
                raise FedtideError(f"{name}: {column}: no number in the {len(known)} rows known when training begins")
            means[place] = there.mean()
        for column, cells in texts.items():
            categories[column] = tuple(sorted({cell for cell in map(cells.__getitem__, known) if not lacks(cell)}))
            if not categories[column]:
                raise FedtideError(f"{name}: {column}: no category in the {len(known)} rows known when training begins")
            if (found := len(categories[column])) > MOST_CATEGORIES:
                allowed = f"{MOST_CATEGORIES} at most, as each becomes a feature"
                raise refused(f"{name}: {column}", f"{found} categories", allowed)
        return Encoder(tuple(names), means, categories)

    def standardizing(self, numbers: np.ndarray, known: np.ndarray) -> Encoder:
        """Return the encoder that standardizes numbers by their known rows, too."""
        there = self._filled(numbers)[known].astype(np.float64)
        center, spread = center_and_spread(there)
        return replace(self, center=center, spread=spread)

    def __call__(self, numbers: np.ndarray, texts: Mapping[str, Sequence[str]]) -> np.ndarray:
        """Return features (rows, width); a category that is missing or unknown is none of those there are."""
        x = self._filled(numbers)
        if self.center is not None:
            x = ((x - self.center) / self.spread).astype(np.float32)
        if not self.categories:
            return x
        parts, measures = [], iter(x.T)
        for name in self.names:
            if name not in self.categories:
                parts.append(next(measures)[:, None])
                continue
            place = {text: at for at, text in enumerate(self.categories[name])}
            at = np.array([place.get(text, -1) for text in texts[name]])
            parts.append((at[:, None] == np.arange(len(place))).astype(np.float32))
        return np.concatenate(parts, 1)

    def _filled(self, numbers: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):  # numbers that are too large become infinite, and are refused later
            return np.where(np.isnan(numbers), self.means, numbers).astype(np.float32)
