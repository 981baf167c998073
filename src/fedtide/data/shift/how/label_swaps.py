"""Concept drift by swapped labels: *Fielding: Clustered Federated Learning with Data Drift*, appendix E."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedtide.core.config_types import Flag, Fraction, Positive, ingredient
from fedtide.core.errors import FedtideError
from fedtide.core.prose import share_of
from fedtide.core.rng import Rng
from fedtide.data.shift.chain import Chain, check_events
from fedtide.data.shift.how.row_transform import RowTransform, exchangeable
from fedtide.data.shift.what.plan import PopulationView


@ingredient
class LabelSwaps:
    """Concept drift: at every event a share of the clients exchanges labels, in all of its rows, test rows included.

    Everything means what the source says until the first event, at `every`; the events follow one another at that
    distance, in rounds, or seconds, as `shift.clock` says. Every client chosen picks two labels, and its rows with one
    get the other. Swaps add up: the next is of the labels as they are by then. Held-out clients drift too.

    With `concepts` nobody swaps for itself. There are so many concepts: the labels as they are, and others in each of
    which all labels are swapped in pairs (of an odd number one stays). A client that is chosen goes to another of them,
    in which it stays until it is chosen again.

    Args:
        every: time from one event to the next.
        fraction: of the clients that each of them chooses.
        concepts: how many there are; none lets clients swap privately.
        local_labels_only: private swaps are of labels that the client has training rows of; else of any.
    """

    every: Positive = 30
    fraction: Fraction = 0.5
    concepts: Annotated[int, Field(strict=True, ge=2)] | None = None
    local_labels_only: Flag = True
    kind: Literal["label-swaps"] = "label-swaps"
    drifts: ClassVar[bool] = True

    def words(self, groups: Sequence[str], unit: str) -> str:
        """How often labels come to mean something else, and to how many."""
        when = f"every {self.every:g} {unit} {share_of(self.fraction)} of the clients"
        if self.concepts is None:
            return f"Labels change their meaning: {when} each swap two labels, in all of their rows. "
        return f"There are {self.concepts} ways to read the labels, and {when} go to another one. "

    def __post_init__(self) -> None:
        if self.concepts is not None and not self.local_labels_only:
            raise ValueError(
                f"found local_labels_only false and concepts {self.concepts}, which say all that is swapped; allowed: "
                "one of the two"
            )

    def check(self, groups: int, shape: tuple[int, ...], classes: int | None = None) -> None:
        """Raise where the transform does not fit the data; `classes` is None for sequences."""
        classes = exchangeable(self.kind, classes)
        pairs = classes // 2
        most = 1 + math.factorial(classes) // (2**pairs * math.factorial(pairs))
        if self.concepts is not None and self.concepts > most:
            raise FedtideError(
                f"shift.how.concepts: found {self.concepts}, allowed: at most {most}, as there are {classes} labels"
            )

    def plan(self, view: PopulationView) -> RowTransform:
        """What the rows of every client mean when."""
        return Private(self, view) if self.concepts is None else Shared(self, view, self.concepts)

    def number(self, time: float) -> int:
        """How many events there have been."""
        number = max(time, 0.0) // self.every
        check_events(number, "shift.how.every")
        return int(number)

    def events(self, time: float, before: float) -> tuple[str, ...]:
        """ "swap" where there was an event since `before`."""
        return ("swap",) if self.number(time) != self.number(before) else ()

    def chosen(self, view: PopulationView, event: int) -> Iterator[tuple[Rng, np.ndarray]]:
        """The clients that an event chooses, training and held-out apart, each with a key."""
        for who, first, last in view.populated():
            key = view.rng.at("swaps", event, who)
            order = key.numpy().permutation(last - first)
            yield key.at("labels"), first + order[: round(self.fraction * len(order))]


@dataclass(frozen=True)
class Private:
    """A permutation of the labels for each client, to which every event adds swaps."""

    swaps: LabelSwaps
    view: PopulationView

    @cached_property
    def present(self) -> np.ndarray:
        """Which labels each client has training rows of (clients, classes) bool."""
        rows, train = self.view.rows, self.view.parts["train"]
        found = np.zeros((len(train), rows.classes), dtype=bool)
        found[train.owner.numpy(), rows.y[train.rows.long()].numpy()] = True
        return found

    def table(self, event: int) -> Tensor:
        """What each label of each client is read as after so many events (clients, classes)."""
        return self._tables[event]

    @cached_property
    def _tables(self) -> Chain[Tensor]:
        classes = self.view.rows.classes
        start = torch.arange(classes, dtype=torch.int32).expand(len(self.view.group), classes)
        return Chain(lambda: start, self._swapped, "shift.how.every")

    def _swapped(self, table: Tensor, event: int) -> Tensor:
        """The table with the swaps of an event; who has fewer than two labels has nothing to swap."""
        table = table.clone()
        for key, clients in self.swaps.chosen(self.view, event):
            draw = key.numpy()
            for client in clients.tolist():
                labels = (
                    np.flatnonzero(self.present[client]) if self.swaps.local_labels_only else np.arange(table.shape[1])
                )
                if len(labels) < 2:
                    continue
                # What labels are swapped, in the words of the source: their present readings are exchanged.
                a, b = draw.choice(labels, 2, replace=False).tolist()
                table[client, [a, b]] = table[client, [b, a]]
        return table

    def apply(self, x: Tensor, y: Tensor, client: Tensor, time: float) -> tuple[Tensor, Tensor]:
        """The rows as they mean at `time`."""
        return x, self.table(self.swaps.number(time))[client, y].to(y.dtype)

    def group(self, time: float) -> Tensor | None:
        """The population's: what clients swap is their own."""
        return None

    def changed(self, time: float, before: float) -> Tensor:
        """The registered clients some of whose labels are read as others than at `before`."""
        now, then = self.swaps.number(time), self.swaps.number(before)
        if now == then:
            return self.view.everyone[:0]
        differ = self.table(min(now, then)) != self.table(max(now, then))
        return differ.any(1)[: self.view.registered].nonzero()[:, 0]

    def events(self, time: float, before: float) -> tuple[str, ...]:
        """ "swap"."""
        return self.swaps.events(time, before)


@dataclass(frozen=True)
class Shared:
    """Which of a few permutations of the labels each client is in after each event."""

    swaps: LabelSwaps
    view: PopulationView
    concepts: int

    @cached_property
    def tables(self) -> Tensor:
        """What each label is read as in each concept (concepts, classes); in the first as it is."""
        classes, draw = self.view.rows.classes, self.view.rng.at("concepts").numpy()
        found = [np.arange(classes)]
        while len(found) < self.concepts:
            order = draw.permutation(classes)
            pairs = order[: classes // 2 * 2].reshape(-1, 2)
            table = np.arange(classes)
            table[pairs[:, 0]], table[pairs[:, 1]] = pairs[:, 1], pairs[:, 0]
            if not any((table == known).all() for known in found):
                found.append(table)
        return torch.from_numpy(np.stack(found))

    def concept(self, event: int) -> Tensor:
        """The concept of each client after so many events (clients,)."""
        return self._groups[event]

    @cached_property
    def _groups(self) -> Chain[Tensor]:
        first = torch.zeros(len(self.view.group), dtype=torch.int64)
        return Chain(lambda: first, self._after, "shift.how.every")

    def _after(self, concept: Tensor, event: int) -> Tensor:
        """Where everyone is after an event, given where they were before it."""
        concept = concept.clone()
        for key, clients in self.swaps.chosen(self.view, event):
            step = torch.from_numpy(key.numpy().integers(1, self.concepts, len(clients)))
            concept[clients] = (concept[clients] + step) % self.concepts
        return concept

    def apply(self, x: Tensor, y: Tensor, client: Tensor, time: float) -> tuple[Tensor, Tensor]:
        """The rows as they mean at `time`."""
        return x, self.tables[self.concept(self.swaps.number(time))[client], y]

    def group(self, time: float) -> Tensor | None:
        """The concept of each client."""
        return self.concept(self.swaps.number(time))

    def changed(self, time: float, before: float) -> Tensor:
        """The registered clients that are in another concept than at `before`."""
        now, then = (self.concept(self.swaps.number(at)) for at in (time, before))
        return (now != then)[: self.view.registered].nonzero()[:, 0]

    def events(self, time: float, before: float) -> tuple[str, ...]:
        """ "swap"."""
        return self.swaps.events(time, before)
