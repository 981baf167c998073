"""Sources of Rows: frozen dataclasses with `load(directory, seed)`."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedtide.core.errors import FedtideError, refused
from fedtide.core.rng import Rng
from fedtide.data.rows import Fit, Rows, make_rows
from fedtide.data.sources.arrays import NPZ, Python
from fedtide.data.sources.files import Loading
from fedtide.data.sources.images import Images, Manifest
from fedtide.data.sources.published import CIFAR, IDX, LEAF, DayNightCharacters, GasSensors
from fedtide.data.sources.series import Series
from fedtide.data.sources.synthetic import Gaussians, Generated
from fedtide.data.sources.tabular import CSV
from fedtide.data.sources.text import PlayRoles, Text
from fedtide.data.sources.texts import Texts
from fedtide.fields.types import Spelled, allowing, ingredient

OneSource = DayNightCharacters | IDX | CIFAR | Images | Manifest | LEAF | NPZ | CSV | Texts | Python | Gaussians
"""Sources of which several may stand side by side."""

LABELS = allowing("'disjoint', 'shared', or a list of a word for each source")


@ingredient
class Domains(Loading):
    """Several sources, each of which becomes a domain.

    Args:
        names: names of the domains, in order.
        sources: one source per domain.
        labels: "disjoint" numbers the labels of each source after those of the previous ones; "shared" keeps them. A
            list has a word for each source. Sources with the same word share their labels, and each new word starts
            after the labels of the previous words. Next tokens are "shared".

    >>> Domains(("a", "b", "c"), (Gaussians(classes=2),) * 3, ("x", "x", "y")).load(None, 0).classes
    4
    """

    names: tuple[str, ...]
    sources: tuple[Annotated[OneSource, Field(discriminator="kind"), Spelled], ...]
    labels: Annotated[Literal["disjoint", "shared"] | tuple[str, ...], LABELS] = "disjoint"
    kind: Literal["domains"] = "domains"

    def __post_init__(self) -> None:
        if len(set(self.names)) < len(self.names):
            raise ValueError(f"found names {list(self.names)}, allowed: a name of its own for each domain")
        if len(self.names) != len(self.sources) or len(self.names) < 2:
            raise ValueError(f"{len(self.names)} names for {len(self.sources)} sources; give two or more of each")
        if isinstance(self.labels, tuple) and len(self.labels) != len(self.sources):
            allowed = f"a word for each of {len(self.sources)} sources"
            raise ValueError(f"found {len(self.labels)} labels, allowed: {allowed}")

    @property
    def drawn(self) -> bool:
        """Tell whether the rows depend on the seed."""
        return any(source.drawn for source in self.sources)

    def uncached(self) -> Any:
        """Return the source with all of its sources uncached."""
        return replace(self, sources=tuple(source.uncached() for source in self.sources))

    def load(self, directory: Path | None, seed: int) -> Rows:
        """Read all sources, each with its own seed."""
        for name, source in zip(self.names, self.sources, strict=True):
            if getattr(source, "categories", ()):
                but = "a feature would be another category in each source"
                raise FedtideError(f"data.source.sources: '{name}' has categories, allowed: none, because {but}")
        key = Rng(seed).at("pools")
        parts = [source.load(directory, key.at(k).number) for k, source in enumerate(self.sources)]
        if any(part.steps is not None for part in parts):
            if self.labels != "shared":
                raise refused("data.source.labels", self.labels, "'shared'", "sources give sequences")
            kinds = {(part.steps, part.padding, part.unscored) for part in parts}
            if len(kinds) > 1:
                raise refused(
                    "data.source.sources: steps, padding and marks", sorted(kinds, key=str), "the same of all"
                )
        shapes = {part.shape for part in parts}
        if len(shapes) > 1:
            raise refused("data.source.sources: shapes of rows", sorted(shapes), "a single one")
        parts = self._with_common_names(parts)
        first, classes = self._numbered([part.classes for part in parts])
        held_out = [torch.zeros(len(p), dtype=torch.bool) if p.held_out is None else p.held_out for p in parts]
        client, client_names = _clients(parts, self.names)
        times = [part.time for part in parts if part.time is not None]
        columns: dict[str, Any] = {
            "y": torch.cat([part.y + number for part, number in zip(parts, first, strict=True)]),
            "domain": torch.repeat_interleave(torch.arange(len(parts)), torch.tensor([len(part) for part in parts])),
            "time": torch.cat(times) if len(times) == len(parts) else None,
            "held_out": torch.cat(held_out),
        }
        columns |= {"client": client, "client_names": client_names, "domain_names": self.names}
        columns |= {"padding": parts[0].padding, "unscored": parts[0].unscored, "cut": sum(part.cut for part in parts)}
        names = parts[0].label_names if len(set(self._words)) == 1 else ()
        columns |= {"label_names": names if len(names) == classes else ()}
        moments = [part.learned for part in parts if part.learned is not None]
        rows = make_rows(" + ".join(self.names), classes, x=_features(parts), **columns)
        return replace(rows, fit=_fit(parts, rows.x), learned=max(moments, default=None))

    @property
    def _words(self) -> Sequence[Any]:
        """Return a word for each source; those with the same word have the same labels."""
        if isinstance(self.labels, str):
            return range(len(self.sources)) if self.labels == "disjoint" else [self.labels] * len(self.sources)
        return self.labels

    def _with_common_names(self, parts: list[Rows]) -> list[Rows]:
        """Return the sources with one number for each name of a label, if they have the same labels and names.

        Raises:
            FedtideError: one of them has names, and another numbers.
        """
        for word in dict.fromkeys(self._words):
            places = [place for place, other in enumerate(self._words) if other == word]
            numbers = {place: tuple(map(str, range(parts[place].classes))) for place in places}
            named = [place for place in places if parts[place].label_names not in ((), numbers[place])]
            if not named or len({parts[place].label_names for place in places}) == 1:
                continue
            if len(named) < len(places):
                other = self.names[next(place for place in places if place not in named)]
                allowed = f"names, as in '{self.names[named[0]]}', or labels of its own"
                raise FedtideError(f"data.source.labels: '{other}' has numbers, allowed: {allowed}")
            names = tuple(sorted({name for place in places for name in parts[place].label_names}))
            for place in places:
                part = parts[place]
                number = torch.tensor([names.index(name) for name in part.label_names])
                parts[place] = replace(part, y=number[part.y], classes=len(names), label_names=names)
        return parts

    def _numbered(self, classes: list[int]) -> tuple[list[int], int]:
        """Return the first label of each source, given the number of classes of each, and the number of labels."""
        sizes: dict[Any, int] = {}
        for word, count in zip(self._words, classes, strict=True):
            sizes[word] = max(sizes.get(word, 0), count)
        first = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
        return [first[word] for word in self._words], sum(sizes.values())


def _fit(parts: list[Rows], x: Tensor) -> Fit | None:
    """Return how features follow from the rows that decide: in each source from its own; None if no rows decide."""
    if all(part.fit is None for part in parts):
        return None
    ends = [*accumulate(map(len, parts))]

    def make(positions: Tensor) -> Tensor:
        features = []
        for part, end in zip(parts, ends, strict=True):
            rows = positions[(positions >= end - len(part)) & (positions < end)] - (end - len(part))
            features.append(part if part.fit is None or not len(rows) else replace(part, x=part.fit.make(rows)))
        return _features(features)

    return Fit(make, x, torch.arange(len(x)))


def _features(parts: list[Rows]) -> Tensor:
    """Concatenate the features; images beside other numbers are scaled to 0..1."""
    if len({part.x.dtype for part in parts}) == 1:
        return torch.cat([part.x for part in parts])
    return torch.cat([part.x / 255 if part.x.dtype == torch.uint8 else part.x.float() for part in parts])


def _clients(parts: list[Rows], names: tuple[str, ...]) -> tuple[Tensor | None, tuple[str, ...]]:
    """Return the natural clients of all domains, all distinct, if every domain names its clients."""
    columns = [part.client for part in parts if part.client is not None]
    if len(columns) < len(parts):
        return None, ()
    offsets = accumulate((int(column.max()) + 1 for column in columns), initial=0)
    shifted = [column + offset for column, offset in zip(columns, offsets, strict=False)]
    spelled = tuple(f"{name}/{client}" for name, part in zip(names, parts, strict=True) for client in part.client_names)
    return torch.cat(shifted), spelled


Source = Annotated[
    OneSource | PlayRoles | Series | GasSensors | Text | Generated | Domains, Field(discriminator="kind")
]
