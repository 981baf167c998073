"""Rows that a node's clients hold now: files that other programs write, for a study that is watched.

The same rows are counted in one window at most, because windows of equal rows would look alike. They wait for a
later window if none was opened, as too few clients had new rows.

Training and evaluation go on with the rows of the node's start, so what they compute does not depend on these files.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from fedtide.core.atomic import write_text
from fedtide.core.base import Moment, Payload, Shard
from fedtide.core.errors import UNREADABLE, FedtideError, refused
from fedtide.data.partition import Split
from fedtide.draw.prose import counted
from fedtide.remote.policy import Policy
from fedtide.runs.export import prepared
from fedtide.site.client_rows import FileRows, has_labels, read_inputs, read_rows
from fedtide.site.tickets import RowsAbout

WHOLE = Split(test=0.0, val=0.0, merge=True)
"""All rows of a file are in one part."""
COUNTED = "counted.json"
"""File in a node's folder with the digest of each client's last rows, and the round in which they were counted."""


@dataclass(frozen=True)
class LiveRows:
    """Rows that clients hold now.

    Args:
        own: the rows of the node's start.
        files: of each client.
        about: the description of rows.
        home: the node's folder.
        base: the folder or GGUF file of the study's pretrained base at this node; None if it has none.
        policy: returns the rules of the node's owner as they are now.
    """

    own: FileRows
    files: Mapping[int, Path]
    about: RowsAbout
    home: Path
    base: Path | None = None
    policy: Callable[[], Policy] = Policy
    _digests: dict[int, str] = field(default_factory=dict, init=False, repr=False, compare=False)

    def new_rows(self, client: int, received: Payload) -> FileRows | None:
        """Read a client's file; return its rows as validation rows beside its own; None if they were counted.

        Args:
            received: what it is asked with.

        Raises:
            FedtideError: there is no such file, its rows are not those of the study, or too few for the node's owner.
                Or the window counts labels, and there are none.
        """
        path = self.files[client]
        rows, is_labeled = self._read(client, labels=received["labels"])
        if received["labels"] and not is_labeled:
            raise FedtideError(f"{path}: no labels, and this window counts them; allowed: a file with labels")
        if len(rows) < (least := self.policy().rows_at_least):
            raise refused(f"{path}: rows", len(rows), f"{least} or more, as rows_at_least of the policy says")
        digest = digest_of(rows.x)
        before, round = self._counted().get(str(client), (None, -1))
        if before == digest and round <= received["counted"]:
            return None
        self._digests[client] = digest
        return replace(self.own, decides_by=lambda client, moment: rows)

    def note(self, client: int, moment: Moment) -> None:
        """Write down that a client has answered with its rows of now."""
        last = {**self._counted(), str(client): (self._digests[client], moment.round)}
        write_text(self.home / COUNTED, json.dumps(last))

    def _counted(self) -> dict[str, tuple[str, int]]:
        try:
            read = json.loads((self.home / COUNTED).read_text(encoding="utf-8"))
            return {str(client): (str(digest), int(round)) for client, (digest, round) in read.items()}
        except (OSError, *UNREADABLE):  # rows are counted once more
            return {}

    def _read(self, client: int, *, labels: bool) -> tuple[Shard, bool]:
        """Return the rows in a client's file, and whether they have labels; if not wanted, labels are not looked at."""
        path, transforms = self.files[client], self.own.people.transforms
        if self.about.predicts_next or (labels and has_labels(path, self.about)):
            rows = FileRows.of({client: read_rows(path, self.about, self.base)}, WHOLE, transforms)
            return rows.shard(client, Moment(0, 0, 0.0)), True
        x, _ = read_inputs(path, self.about, self.base)
        seen = prepared(x, getattr(torch, self.about.dtype), transforms)
        return Shard(seen, torch.zeros(len(x), dtype=torch.int64), torch.arange(len(x))), False

    def describe(self, *, labels: bool) -> Iterator[str]:
        """Say in lines what the files hold now.

        Args:
            labels: whether windows may count labels.

        Raises:
            FedtideError: there is no such file, or its rows are not those of the study.
        """
        for client, path in self.files.items():
            rows, is_labeled = self._read(client, labels=labels)
            yield f"watch: {path}: {counted(len(rows), 'row')} {'with' if is_labeled else 'without'} labels now"
            if labels and not is_labeled:
                yield f"warning: {path}: no labels, so this node stays out of windows that count them"


def digest_of(x: Tensor) -> str:
    """Return a digest of rows (rows, ...) in whatever order they are.

    >>> digest_of(torch.tensor([[1.0], [2.0]])) == digest_of(torch.tensor([[2.0], [1.0]]))
    True
    """
    return hashlib.sha256(b"".join(sorted(row.tobytes() for row in x.contiguous().numpy()))).hexdigest()
