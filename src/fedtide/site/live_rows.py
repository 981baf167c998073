"""Rows that a node's clients hold now: files that are read again after each change, for a study that is watched.

A file is counted once. Its rows would look like more of the same, if later windows counted them again.

Training and evaluation go on with the rows of the node's start, so what they compute does not depend on these files.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedtide.core.atomic import write_text
from fedtide.core.base import Moment, Shard
from fedtide.core.errors import UNREADABLE, FedtideError
from fedtide.data.partition import Split
from fedtide.data.transforms import Prepare
from fedtide.draw.prose import counted
from fedtide.runs.export import prepared
from fedtide.site.client_rows import FileRows, has_labels, read_inputs, read_rows
from fedtide.site.tickets import RowsAbout
from fedtide.transforms.watch import UNKNOWN

WHOLE = Split(test=0.0, val=0.0)
"""All rows of a file are in one part."""

COUNTED = "watched.json"
"""File in a node's folder with the last file of each client that was counted, and in which round."""


@dataclass(frozen=True)
class LiveRows:
    """Rows that clients hold now.

    Args:
        files: of each client; other programs write them.
        about: the description of rows.
        home: the node's folder.
        transforms: of the study's rows.
        base: the folder or GGUF file of the study's pretrained base at this node; None if it has none.
    """

    files: Mapping[int, Path]
    about: RowsAbout
    home: Path
    transforms: tuple[Prepare, ...] = ()
    base: Path | None = None

    def read(self, client: int, moment: Moment) -> Shard | None:
        """Return the rows in a client's file as it is now; None if they were counted in an earlier round.

        In a file without labels each label is `UNKNOWN`.

        Raises:
            FedtideError: there is no such file, it has no rows, or others than the study's.
        """
        path, counted = self.files[client], self._counted()
        try:
            about = path.stat()
        except OSError:
            raise FedtideError(f"{path}: no such file") from None
        stamp = [about.st_mtime_ns, about.st_size, about.st_ino]
        if counted.get(str(client), [None])[0] == stamp and counted[str(client)][1] != moment.round:
            return None
        rows = self._read(path, client, moment)
        write_text(self.home / COUNTED, json.dumps(counted | {str(client): [stamp, moment.round]}))
        return rows

    def _counted(self) -> dict[str, Any]:
        try:
            return dict(json.loads((self.home / COUNTED).read_text(encoding="utf-8")))
        except (OSError, *UNREADABLE):  # rows are counted once more
            return {}

    def _read(self, path: Path, client: int, moment: Moment) -> Shard:
        if has_labels(path, self.about):
            rows = FileRows.of({client: read_rows(path, self.about, self.base)}, WHOLE, self.transforms)
            return rows.shard(client, moment)
        x, _ = read_inputs(path, self.about, self.base)
        seen = prepared(x, getattr(torch, self.about.dtype), self.transforms)
        return Shard(seen, torch.full((len(x),), UNKNOWN), torch.arange(len(x)))

    def describe(self) -> Iterator[str]:
        """Say in lines what the files hold now.

        Raises:
            FedtideError: see `read`.
        """
        for client, path in self.files.items():
            rows = self._read(path, client, Moment(0, 0, 0.0))
            labels = "with labels" if has_labels(path, self.about) else "without labels"
            yield f"watch: {path}: {counted(len(rows), 'row')} {labels} now; it is read again when it changes"
