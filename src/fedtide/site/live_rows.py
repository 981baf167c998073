"""Rows that a node's clients hold now: files that are read again after each change, for a study that is watched.

Training and evaluation go on with the rows of the node's start, so what they compute does not depend on these files.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fedtide.core.base import Moment, Shard
from fedtide.core.errors import FedtideError
from fedtide.data.partition import Split
from fedtide.data.transforms import Prepare
from fedtide.draw.prose import counted
from fedtide.runs.export import prepared
from fedtide.site.client_rows import FileRows, has_labels, read_inputs, read_rows
from fedtide.site.tickets import RowsAbout
from fedtide.transforms.watch import UNKNOWN

WHOLE = Split(test=0.0, val=0.0)
"""All rows of a file are in one part."""

Stamp = tuple[int, int, int]


@dataclass(frozen=True)
class LiveRows:
    """Rows that clients hold now.

    Args:
        files: of each client; other programs write them.
        about: the description of rows.
        transforms: of the study's rows.
        base: the folder or GGUF file of the study's pretrained base at this node; None if it has none.
    """

    files: Mapping[int, Path]
    about: RowsAbout
    transforms: tuple[Prepare, ...] = ()
    base: Path | None = None
    _last: dict[int, tuple[Stamp, Shard]] = field(default_factory=dict, repr=False, compare=False)

    def read(self, client: int, moment: Moment) -> Shard:
        """Return the rows in a client's file as it is now; of one without labels each label is `UNKNOWN`.

        Raises:
            FedtideError: there is no such file, it has no rows, or others than the study's.
        """
        path = self.files[client]
        try:
            about = path.stat()
        except OSError:
            raise FedtideError(f"{path}: no such file") from None
        stamp = about.st_mtime_ns, about.st_size, about.st_ino
        before, rows = self._last.get(client, (None, None))
        if rows is None or before != stamp:
            rows = self._read(path, client, moment)
            self._last[client] = stamp, rows
        return rows

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
            rows = self.read(client, Moment(0, 0, 0.0))
            labels = "with labels" if has_labels(path, self.about) else "without labels"
            yield f"watch: {path}: {counted(len(rows), 'row')} {labels} now; it is read again when it changes"
