"""Client memory: values that stay on a client between rounds, as rows versioned by (round, ask).

The newest row strictly before now is read, and a replay overwrites rows: a server that dies in mid-round and plays the
round again gets the same bits. Small rows live in RAM and travel with the checkpoint; large ones are files.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedtide.core import codec
from fedtide.core.atomic import check_sha256, flush, sha256
from fedtide.core.errors import UNREADABLE, FedtideError
from fedtide.core.trees import Tree, detached, size_in_bytes

Version = tuple[int, int]
"""(round, how many asks came before in it)."""

SMALL = 16 * 1024
"""Bytes up to which a row is kept in RAM."""

OWN = re.compile(rf"\d+\.\d+\.\d+\.safetensors|staged-\w*-\d+-\d+|{codec.UNFINISHED}")
"""Names of the files that a store writes: the only ones it removes."""


@dataclass(frozen=True)
class Stored:
    """A row that lies in a file of the store, with the file's digest."""

    file: str
    sha256: str


class MemoryStore:
    """The memory of every client of one run.

    Args:
        directory: where large rows go; None keeps every row in RAM.
        small: bytes up to which a row stays in RAM.
        name: of this process, if several put rows aside in the directory.

    >>> store = MemoryStore(None)
    >>> store.stage(7, {"count": 1})
    >>> store.commit((0, 0), [7])
    >>> store.read(7, (0, 0)), store.read(7, (1, 0))
    (None, {'count': 1})
    """

    def __init__(self, directory: Path | None, small: int = SMALL, name: str = "") -> None:
        self.directory = directory
        self.small = small
        self.name = name
        self._rows: dict[int, list[tuple[Version, Tree | Stored]]] = {}
        self._aside: dict[int, Tree | Stored] = {}
        self._settled: Version = (-2, 0)
        self._held: Version | None = None
        self._staged = 0
        self._kept: Mapping[Path, frozenset[str]] = {}

    # -- one row ------------------------------------------------------------------------------------------------------

    def _newest(self, client: int, now: Version) -> tuple[Version, Tree | Stored] | None:
        """The client's newest row before `now`, with its version."""
        for entry in reversed(self._rows.get(client, [])):
            if entry[0] < now:
                return entry
        return None

    def read(self, client: int, now: Version) -> Tree:
        """The client's newest row before `now`; None if there is none."""
        entry = self._newest(client, now)
        return None if entry is None else self.load(entry[1])

    def settled(self, client: int) -> Tree:
        """The client's newest row that the last checkpoint holds; None if there is none."""
        return self.read(client, self._settled)

    def load(self, row: Tree | Stored) -> Tree:
        """Return a row, read from its file if it lies in one.

        Raises:
            FedtideError: the file is missing, or not what was written.
        """
        if not isinstance(row, Stored):
            return row
        check_sha256(self._path(row.file), row.sha256)
        return codec.from_file(self._path(row.file))

    def stage(self, client: int, row: Tree | Stored) -> None:
        """Put a new row aside, until it is committed; one that another process put into a file stays there."""
        if self.directory is not None and not isinstance(row, Stored) and size_in_bytes(row) > self.small:
            self._staged += 1
            self.directory.mkdir(parents=True, exist_ok=True)
            name = f"staged-{self.name}-{self._staged}-{client}"
            codec.to_file(self._path(name), row)
            row = Stored(name, sha256(self._path(name)))
        self._aside[client] = row if isinstance(row, Stored) else detached(row)

    def discard(self, clients: Iterable[int]) -> None:
        """Forget what was put aside for some clients."""
        for row in map(self._aside.pop, clients):
            if isinstance(row, Stored):
                self._path(row.file).unlink(missing_ok=True)

    def commit(self, version: Version, clients: Iterable[int]) -> None:
        """Make what was put aside for some clients their newest rows: the ask of that version is over."""
        for client in clients:
            row = self._aside.pop(client)
            if isinstance(row, Stored):
                name = _name(client, version)
                self._path(row.file).replace(self._path(name))
                row = Stored(name, row.sha256)
            before = [(v, r) for v, r in self._rows.get(client, []) if v < version]
            # Only two versions can ever be asked for again: the newest, and the newest that the last checkpoint holds;
            # and while a round is held, whatever its questions were put to.
            settled = sum(v < self._settled for v, _ in before) - 1
            since = len(before) if self._held is None else sum(v < self._held for v, _ in before) - 1
            needed = [entry for place, entry in enumerate(before) if place == settled or place >= since]
            self._discard(before, needed)
            self._rows[client] = [*needed, (version, row)]

    # -- processes beside this one ------------------------------------------------------------------------------------

    def lend(self, clients: Iterable[int], now: Version, *, whole: bool) -> dict[int, tuple[Version, Tree | Stored]]:
        """Return the rows of some clients as of `now`, for another process; `whole` reads rows from their files."""
        lent = {client: self._newest(client, now) for client in clients}
        return {
            client: (entry[0], self.load(entry[1]) if whole else entry[1])
            for client, entry in lent.items()
            if entry is not None
        }

    def borrow(self, rows: Mapping[int, tuple[Version, Tree | Stored]]) -> None:
        """Hold what another process lends, and nothing else."""
        self._rows = {client: [entry] for client, entry in rows.items()}

    def hand_over(self) -> dict[int, Tree | Stored]:
        """Return all that was put aside, for another process to `stage`."""
        aside, self._aside = self._aside, {}
        return aside

    def hold(self, now: Version | None) -> None:
        """Keep the clients' rows as of `now`, and all later ones: a question may be put again.

        None ends this. Rows that only a repeated question could have read are removed with the client's next row, or
        with the next checkpoint.
        """
        self._held = now

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save(self, file: Path, now: Version) -> None:
        """Write the small rows and the digests of the large ones, as of `now`."""
        groups: dict[str, list[tuple[int, Version, dict[str, torch.Tensor]]]] = {}
        stacks: dict[str, Tree] = {}
        files: list[list[int | str]] = []
        for client, entries in sorted(self._rows.items()):
            past = [entry for entry in entries if entry[0] < now]
            if not past:
                continue
            version, row = past[-1]
            if isinstance(row, Stored):
                files.append([client, *version, row.sha256])
                if version >= self._settled:
                    flush(self._path(row.file))
                continue
            arrays, skeleton = codec.encode(row)
            shapes = {name: [str(array.dtype), *array.shape] for name, array in arrays.items()}
            groups.setdefault(json.dumps([skeleton, shapes]), []).append((client, version, arrays))
        for key, rows in groups.items():
            clients, versions, arrays_of_rows = zip(*rows, strict=True)
            arrays = {name: torch.stack([arrays[name] for arrays in arrays_of_rows]) for name in arrays_of_rows[0]}
            stacks[key] = {"clients": torch.tensor(clients), "versions": torch.tensor(versions), "arrays": arrays}
        codec.to_file(file, {"groups": stacks, "files": files})

    def settle(self, now: Version, keep: Iterable[Path] = ()) -> None:
        """A checkpoint as of `now` is safely written: older versions are not needed any more.

        Files named by an index in `keep` stay. `save` wrote these indexes for earlier checkpoints.
        """
        self._settled = now
        self._keep(keep)
        for client, entries in self._rows.items():
            self._rows[client] = [e for e in entries if e[0] < now][-1:] + [e for e in entries if e[0] >= now]
        aside = [row for row in self._aside.values() if isinstance(row, Stored)]
        self._remove_all_but({row.file for row in (*self.files(), *aside)})  # also what a killed worker put aside

    def restore(self, file: Path, now: Version, keep: Iterable[Path] = ()) -> None:
        """Become the store that `save` wrote; files of later rounds are removed, but for those of indexes `keep`.

        Raises:
            FedtideError: the directory is a link.
        """
        self.read_index(file)
        self._settled = now
        self._keep(keep)
        self._remove_all_but({row.file for row in self.files()})

    def read_index(self, file: Path) -> None:
        """Hold what `save` wrote, and change no file.

        Raises:
            FedtideError: the index is not one that `save` writes.
        """
        saved: Any = codec.from_file(file)
        rows: dict[int, list[tuple[Version, Tree | Stored]]] = {}
        try:
            for key, stack in saved["groups"].items():
                skeleton, _ = json.loads(key)
                entries = zip(stack["clients"].tolist(), stack["versions"].tolist(), strict=True)
                for i, (client, version) in enumerate(entries):
                    arrays = {name: array[i].clone() for name, array in stack["arrays"].items()}
                    rows[client] = [((version[0], version[1]), codec.decode(arrays, skeleton))]
            for client, when, asked, digest in saved["files"]:
                at = (int(when), int(asked))
                rows[int(client)] = [(at, Stored(_name(int(client), at), str(digest)))]
        except (RuntimeError, *UNREADABLE) as error:
            raise FedtideError(f"{file}: damaged ({type(error).__name__}: {error})") from None
        self._rows = rows

    def check_files(self) -> None:
        """Raise a FedtideError if a row's file is missing, or is not what was written."""
        for row in self.files():
            check_sha256(self._path(row.file), row.sha256)

    def files(self) -> list[Stored]:
        """Return the rows that lie in files."""
        return [row for entries in self._rows.values() for _, row in entries if isinstance(row, Stored)]

    def clear(self) -> None:
        """Forget everything, files included: the start of a run."""
        self._rows, self._aside, self._kept = {}, {}, {}
        self._settled, self._held = (-2, 0), None
        self._remove_all_but(set())

    # -- files --------------------------------------------------------------------------------------------------------

    def _path(self, name: str) -> Path:
        assert self.directory is not None
        return self.directory / name

    def _keep(self, indexes: Iterable[Path]) -> None:
        """Note the files that earlier checkpoints count on; an index is read once."""
        self._kept = {} if self.directory is None else {
            index: self._kept[index] if index in self._kept else _files_in(index) for index in indexes
        }  # fmt: skip

    def _discard(self, entries: Iterable[tuple[Version, Tree]], needed: Iterable[tuple[Version, Tree]]) -> None:
        wanted = {row.file for _, row in needed if isinstance(row, Stored)}.union(*self._kept.values())
        for _, row in entries:
            if isinstance(row, Stored) and row.file not in wanted:
                self._path(row.file).unlink(missing_ok=True)

    def _remove_all_but(self, wanted: set[str]) -> None:
        if self.directory is None or not self.directory.is_dir():
            return
        if self.directory.is_symlink():
            raise FedtideError(f"{self.directory}: is a link, allowed: a folder of this run alone")
        stay = wanted.union(*self._kept.values())
        for path in self.directory.iterdir():
            if OWN.fullmatch(path.name) and path.name not in stay and (path.is_symlink() or path.is_file()):
                path.unlink()


def _files_in(index: Path) -> frozenset[str]:
    store = MemoryStore(None)
    store.read_index(index)
    return frozenset(row.file for row in store.files())


def _name(client: int, version: Version) -> str:
    return f"{client}.{version[0]}.{version[1]}.safetensors"
