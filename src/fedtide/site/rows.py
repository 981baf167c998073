"""The rows of a node: a file for each of its clients, read as the ticket says.

Each row is given to training, validation or test by what is in it, so that it stays where it is when others are added,
and equal rows are never on both sides.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedtide.core.base import PARTS, Moment, Shard
from fedtide.core.errors import FedtideError, nearest, refused
from fedtide.data.groups import Split
from fedtide.data.population import features
from fedtide.data.rows import Rows
from fedtide.data.sources.cells import read_cells, read_names
from fedtide.data.sources.table import CSV
from fedtide.data.transforms import Prepare, apply_transforms
from fedtide.learn.target import CLASSES, Target
from fedtide.site.tickets import RowsAbout


def read_rows(path: Path, about: RowsAbout) -> Rows:
    """Read the rows of one client, with classes numbered as in the whole study.

    Raises:
        FedtideError: the file is damaged, or its rows are not those of the study.
    """
    if not path.exists():
        raise FedtideError(f"{path}: no such file")
    try:
        rows = about.source_at(path.absolute()).load(None, 0)
    except FedtideError as error:  # what it says of keys of the study would help at the server alone
        raise FedtideError(re.sub(r"; data\.source\.[^;]*", "", str(error))) from None
    if rows.shape != about.shape:
        raise refused(f"{path}: shape of a row", rows.shape, f"{about.shape}, as in the study")
    if str(rows.x.dtype) != f"torch.{about.dtype}":
        raise refused(f"{path}: type of features", str(rows.x.dtype), f"torch.{about.dtype}, as in the study")
    if about.labels:
        known = {name: number for number, name in enumerate(about.labels)}
        names = rows.label_names or tuple(str(number) for number in range(rows.classes))
        used = rows.y.unique().tolist()
        for number in used:
            if names[number] not in known:
                where = f"{path}: {_first_row(path, about, names[number])}label"
                raise FedtideError(f"{where}: found '{names[number]}', {nearest(names[number], about.labels)}")
        numbers = torch.tensor([known.get(name, -1) for name in names])
        rows = replace(rows, y=numbers[rows.y], classes=about.classes, label_names=about.labels)
    elif rows.label_names:
        raise refused(f"{path}: label", rows.label_names[0], f"numbers from 0 to {about.classes - 1}, as in the study")
    elif rows.classes > about.classes:
        raise refused(f"{path}: label", int(rows.y.max()), f"0 to {about.classes - 1}, as in the study")
    return replace(rows, classes=about.classes, domain=None, client=None, client_names=(), domain_names=("all",))


def _first_row(path: Path, about: RowsAbout, label: str) -> str:
    """Say in which row of a table a label stands first."""
    source = about.source_at(path.absolute())
    if not isinstance(source, CSV):
        return ""
    column = str(source.label)
    cells = read_cells(path, [], [column])
    where = cells.where(cells.texts[column].index(label))
    return where.removeprefix(f"{path}: ") + ": "


def columns_in_words(path: Path, about: RowsAbout) -> str | None:
    """Say which columns of a file are read and which are left alone; None where rows have no columns."""
    source = about.source_at(path.absolute())
    if not isinstance(source, CSV):
        return None
    header = read_names(path)
    read = source.named(header)
    rest = [column for column in header if column not in read]
    return f"reads {', '.join(read)}; leaves alone {', '.join(rest) or 'nothing'}"


def divided(rows: Rows, split: Split) -> tuple[Tensor, dict[str, Tensor]]:
    """Return ids of rows by their content, and positions of the rows of each part, sorted by id.

    The k-th of equal rows has an id of its own and is in the part of all of them.
    """
    x, y = rows.x.contiguous().numpy(), rows.y.numpy()
    held_out = torch.zeros(len(rows), dtype=torch.bool) if rows.held_out is None else rows.held_out
    test = split.test if split.test is not None else 0.0 if rows.held_out is not None else 0.2
    seen, ids, shares = Counter[bytes](), np.empty(len(rows), np.int64), np.empty(len(rows))
    for row in range(len(rows)):
        content = x[row].tobytes() + y[row].tobytes()
        found = hashlib.blake2b(content, digest_size=16).digest()
        shares[row] = int.from_bytes(found[:8]) / 2**64
        own = hashlib.blake2b(found + seen[found].to_bytes(8), digest_size=8).digest()
        ids[row] = int.from_bytes(own) >> 1
        seen[found] += 1
    share = torch.from_numpy(shares)
    judged = held_out | (share < test)
    checked = ~judged & (share < test + (1 - test) * split.val)
    order = torch.from_numpy(np.argsort(ids, kind="stable"))
    masks = {"train": ~judged & ~checked, "val": checked, "test": judged}
    return torch.from_numpy(ids), {part: order[mask[order]] for part, mask in masks.items()}


@dataclass(frozen=True)
class Held:
    """Rows of one client: all of them, their ids, and the positions of each part."""

    rows: Rows
    ids: Tensor
    parts: Mapping[str, Tensor]


@dataclass(frozen=True)
class FileRows:
    """Rows of a node's clients (`fedtide.fleets.client.ClientRows`).

    Args:
        held: by client.
        transforms: what is done to images before the model sees them.
        val: whether the study sets validation rows aside.
    """

    held: Mapping[int, Held]
    transforms: tuple[Prepare, ...] = ()
    val: bool = False
    target: ClassVar[Target] = CLASSES
    apart: ClassVar[bool] = False

    @staticmethod
    def read(
        paths: Sequence[Path],
        clients: Sequence[int],
        about: RowsAbout,
        split: Split,
        transforms: tuple[Prepare, ...] = (),
    ) -> FileRows:
        """Read a file for each client, in the order of their ids.

        Raises:
            FedtideError: a file is missing or is not what the study wants, or leaves nothing to train on.
        """
        if len(paths) != len(clients):
            raise refused(
                "--data", f"{len(paths)} files", f"{len(clients)}, one for each client of the ticket, in order"
            )
        held = {}
        for path, client in zip(paths, clients, strict=True):
            rows = read_rows(path, about)
            ids, parts = divided(rows, split)
            if not len(parts["train"]):
                raise FedtideError(f"{path}: none of its {len(rows)} rows is left for training, allowed: more rows")
            held[client] = Held(rows, ids, parts)
        return FileRows(held, transforms, split.val > 0)

    def counts(self, client: int) -> dict[str, int]:
        """Return the number of rows of a client in each part."""
        return {part: len(self.held[client].parts[part]) for part in PARTS}

    def shard(self, client: int, moment: Moment, part: str = "train") -> Shard:
        """Return the rows of one client; its validation rows are fetched when they are used."""
        own = self.held[client]
        where = own.parts[part]
        x, y = own.rows.take(where)
        time = None if own.rows.time is None else own.rows.time[where]
        fetch_val = None
        if part == "train" and self.val:
            fetch_val = partial(self.shard, client, moment, "val")
        return Shard(
            apply_transforms(self.transforms, features(x)), y, own.ids[where], time, own.rows.mask(y), fetch_val
        )

    def sizes(self, clients: Tensor, part: str, moment: Moment) -> Tensor:
        """Count the rows of a part of each of `clients`."""
        return torch.tensor([len(self.held[client].parts[part]) for client in clients.tolist()], dtype=torch.int64)

    def pool(self, clients: Tensor, moment: Moment, part: str) -> tuple[Shard, Tensor]:
        """Return the rows of several clients, and for each row its owner's position in `clients`."""
        some = [self.shard(client, moment, part) for client in clients.tolist()]
        owner = torch.repeat_interleave(torch.arange(len(some)), torch.tensor([len(each) for each in some]))
        x, y, ids = (torch.cat([getattr(each, name) for each in some]) for name in ("x", "y", "ids"))
        return Shard(x, y, ids), owner
