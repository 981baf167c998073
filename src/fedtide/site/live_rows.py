"""Rows that a node's clients hold now: files that other programs write, for a study that is watched.

A file is counted once, because rows that later windows counted again would look like more of the same. If no window
counted it, as too few clients had new ones, it waits for a later one.

Training and evaluation go on with the rows of the node's start, so what they compute does not depend on these files.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from fedtide.core.atomic import write_text
from fedtide.core.base import Moment, Payload, Shard
from fedtide.core.errors import UNREADABLE, FedtideError
from fedtide.data.partition import Split
from fedtide.draw.prose import counted
from fedtide.remote.policy import Policy
from fedtide.runs.export import prepared
from fedtide.site.client_rows import FileRows, has_labels, read_inputs, read_rows
from fedtide.site.tickets import RowsAbout

WHOLE = Split(test=0.0, val=0.0)
"""All rows of a file are in one part."""
COUNTED = "watched.json"
"""File in a node's folder with the digest of each client's last rows, and the round in which they were counted."""


@dataclass(frozen=True)
class LiveRows:
    """Rows that clients hold now.

    Args:
        own: the rows of the node's start.
        files: of each client.
        about: the description of rows.
        home: the node's folder.
        labels: whether windows may count labels; if not, none is read.
        base: the folder or GGUF file of the study's pretrained base at this node; None if it has none.
        policy: returns the rules of the node's owner as they are now.
    """

    own: FileRows
    files: Mapping[int, Path]
    about: RowsAbout
    home: Path
    labels: bool = True
    base: Path | None = None
    policy: Callable[[], Policy] = Policy
    _now: dict[int, tuple[Shard, str]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def rows(self) -> FileRows:
        """The rows of the node's start, with those of now in place of validation rows."""
        return replace(self.own, fetch_val=lambda client, moment: self._now[client][0])

    def has_news(self, client: int, received: Payload) -> bool:
        """Read a client's file, and tell whether its rows were counted in no window yet.

        Args:
            client: id of the client.
            received: what it is asked with.

        Raises:
            FedtideError: there is no such file, its rows are not those of the study, or too few for the node's owner.
                Or the window counts labels, and there are none.
        """
        path = self.files[client]
        rows, is_labeled = self._read(client)
        if received["labels"] and not is_labeled:
            raise FedtideError(f"{path}: has no labels, and this window counts them")
        if len(rows) < (least := self.policy().rows_at_least):
            raise FedtideError(f"{path}: has {counted(len(rows), 'row')}, and its owner wants {least} or more")
        digest = hashlib.sha256(rows.x.contiguous().numpy().tobytes() + rows.y.numpy().tobytes()).hexdigest()
        self._now[client] = rows, digest
        before, round = self._counted().get(str(client), (None, -1))
        return before != digest or round > received["counted"]

    def note(self, client: int, moment: Moment) -> None:
        """Write down that a client has answered with its rows of now."""
        last = {**self._counted(), str(client): (self._now[client][1], moment.round)}
        write_text(self.home / COUNTED, json.dumps(last))

    def _counted(self) -> dict[str, tuple[str, int]]:
        try:
            read = json.loads((self.home / COUNTED).read_text(encoding="utf-8"))
            return {str(client): (str(digest), int(round)) for client, (digest, round) in read.items()}
        except (OSError, AttributeError, *UNREADABLE):  # rows are counted once more
            return {}

    def _read(self, client: int) -> tuple[Shard, bool]:
        path, transforms = self.files[client], self.own.people.transforms
        if self.labels and has_labels(path, self.about):
            rows = FileRows.of({client: read_rows(path, self.about, self.base)}, WHOLE, transforms)
            return rows.shard(client, Moment(0, 0, 0.0)), True
        x, _ = read_inputs(path, self.about, self.base)
        seen = prepared(x, getattr(torch, self.about.dtype), transforms)
        return Shard(seen, torch.zeros(len(x), dtype=torch.int64), torch.arange(len(x))), False

    def describe(self) -> Iterator[str]:
        """Say in lines what the files hold now.

        Raises:
            FedtideError: see `has_news`.
        """
        for client, path in self.files.items():
            rows, is_labeled = self._read(client)
            labels = "with labels" if is_labeled else "without labels"
            yield f"watch: {path}: {counted(len(rows), 'row')} {labels} now; each new content is counted in a window"
