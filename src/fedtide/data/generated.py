"""Rows that are generated on request and never stored, for any number of clients."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedtide.learn.device import CPU
from fedtide.learn.target import CLASSES


@dataclass(frozen=True)
class GeneratedRows:
    """Rows as functions of their numbers, with the part of the interface of `Rows` that one client needs.

    Client c has the rows `c * each` to `(c + 1) * each - 1`.

    Args:
        name: name of the source, for messages.
        clients: number of clients.
        each: number of rows of each client.
        shape: shape of one row's features.
        classes: number of classes.
        make: function from a client to its x (each, ...) and y (each,), equal at every call.
    """

    name: str
    clients: int
    each: int
    shape: tuple[int, ...]
    classes: int
    make: Callable[[int], tuple[Tensor, Tensor]]

    # Optional fields of sources with arrays, which generated rows do not have.
    domain = time = steps = padding = held_out = None
    domain_names = ("all",)
    unscored = said = ()
    value = None
    target = CLASSES

    @property
    def labeled(self) -> str:
        """What rows are labeled with, in words."""
        return f"{self.classes} classes"

    def targets(self, rows: Tensor, y: Tensor) -> tuple[Tensor, None]:
        """Return what models learn of some rows, which are classes."""
        return y, None

    def __len__(self) -> int:
        return self.clients * self.each

    def take(self, rows: Tensor, device: str = CPU) -> tuple[Tensor, Tensor]:
        """Return x and y of some rows, made on the CPU for any device; all rows of a client are made together."""
        rows = rows.long()
        owner, place = rows.div(self.each, rounding_mode="floor"), rows % self.each
        x, y = torch.empty(len(rows), *self.shape), torch.empty(len(rows), dtype=torch.int64)
        # Rows mostly come client by client: consecutive rows of one client are made at once.
        at = 0
        clients, lengths = torch.unique_consecutive(owner, return_counts=True)
        for client, length in zip(clients.tolist(), lengths.tolist(), strict=True):
            own_x, own_y = self.make(client)
            picked = place[at : at + length]
            x[at : at + length], y[at : at + length] = own_x[picked], own_y[picked]
            at += length
        return x, y

    def labels(self, rows: Tensor) -> Tensor:
        """Return y of some rows."""
        return self.take(rows)[1]

    def mask(self, y: Tensor) -> None:
        """Return None, since a row has one label, which counts."""

    def scored(self, y: Tensor) -> None:
        """Return None, since a row has one label, which is scored."""

    @property
    def digest(self) -> str:
        """Short hash of the rows of the first and the last client, to detect other rows."""
        found = hashlib.blake2b(str((self.clients, self.each, self.classes)).encode(), digest_size=8)
        for client in (0, self.clients - 1):
            for values in self.make(client):
                found.update(values.numpy().tobytes())
        return found.hexdigest()
