"""Rows of real clients: read from a node's files, joined to a population for a replay, or made up.

Content decides whether a row is for training, validation or test. So a row keeps its part if others are added, and
equal rows are never in two parts.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import ClassVar, cast
from zipfile import is_zipfile

import numpy as np
import torch
from torch import Tensor

from fedtide.config import Experiment
from fedtide.core.base import PARTS, Algorithm, Moment, Shard
from fedtide.core.errors import FedtideError, Words, nearest, refused
from fedtide.core.memory import MemoryStore
from fedtide.data.partition import Split
from fedtide.data.population import Population
from fedtide.data.ragged import Ragged
from fedtide.data.rows import Rows
from fedtide.data.sources import NPZ, Texts
from fedtide.data.sources.arrays import open_arrays
from fedtide.data.sources.cells import read_cells
from fedtide.data.sources.table_files import Spelling, read_names
from fedtide.data.sources.tabular import CSV
from fedtide.data.sources.text import read_objects
from fedtide.data.sources.texts import JSON_LINES
from fedtide.data.transforms import Prepare, apply_transforms, features
from fedtide.fleets.engines import Host
from fedtide.learn.target import CLASSES, Target
from fedtide.runs.build import algorithm_of, host_of, task_of
from fedtide.runs.export import read_features
from fedtide.site.tickets import RowsAbout
from fedtide.wire.answer_schema import made_up


class Disagreement(FedtideError):
    """The error of a file whose rows are not those of the study; the server is told of it as of one of a count."""


def read_rows(path: Path, about: RowsAbout, base: Path | None = None) -> Rows:
    """Read the rows of one client, with classes numbered as in the whole study; texts by the tokenizer of a base.

    Raises:
        FedtideError: there is no such file.
        Disagreement: it is damaged, or its rows are not those of the study.
    """
    if not path.exists():
        raise FedtideError(f"{path}: no such file")
    try:
        return _read_rows(path, about, base)
    except FedtideError as error:
        raise Disagreement(str(error)) from None


def _read_rows(path: Path, about: RowsAbout, base: Path | None) -> Rows:
    source = about.source_at(path.absolute(), base)
    if isinstance(source, NPZ) and path.is_file() and not is_zipfile(path):
        raise FedtideError(f"{path}: is no NPZ file; this study's rows are NPZ, with x and y: numpy.savez makes them")
    try:
        if not isinstance(source, NPZ) and not path.is_dir():
            header, columns = _names_in(path, source), [*about.columns, *_taken(source)]
            if lacking := [column for column in columns if column not in header]:
                raise FedtideError(f"{path}: no column '{lacking[0]}'; the study reads: {', '.join(columns)}")
            if isinstance(source, Texts) and source.domain not in header:  # all texts are of one
                source = replace(source, domain=None)
        rows = source.load(None, 0)
    except FedtideError as error:  # keys of the study mean nothing at a node
        raise FedtideError(re.sub(r"; data\.source\.[^;]*", "", str(error))) from None
    if rows.shape != about.shape:
        raise refused(f"{path}: shape of a row", rows.shape, f"{about.shape}, as in the study")
    if about.dtype == "float32" and rows.x.dtype == torch.int64:  # columns of this file alone are all integers
        rows = replace(rows, x=rows.x.float())
    if str(rows.x.dtype) != f"torch.{about.dtype}":
        raise refused(f"{path}: type of features", str(rows.x.dtype), f"torch.{about.dtype}, as in the study")
    if about.labels:
        numbers = {name: number for number, name in enumerate(about.labels)}
        names = rows.label_names or tuple(str(number) for number in range(rows.classes))
        for number in rows.y.unique().tolist():
            if names[number] not in numbers:
                where = f"{path}: {_first_row(path, about, names[number])}label"
                raise FedtideError(f"{where}: found '{names[number]}', {nearest(names[number], about.labels)}")
        renumbered = torch.tensor([numbers.get(name, -1) for name in names])
        rows = replace(rows, y=renumbered[rows.y], classes=about.classes, label_names=about.labels)
    elif rows.label_names:
        raise refused(f"{path}: label", rows.label_names[0], f"numbers from 0 to {about.classes - 1}, as in the study")
    elif rows.classes > about.classes:
        raise refused(f"{path}: label", int(rows.y.max()), f"0 to {about.classes - 1}, as in the study")
    return replace(rows, classes=about.classes, domain=None, client=None, client_names=(), domain_names=("all",))


def has_labels(path: Path, about: RowsAbout) -> bool:
    """Tell whether a file of the study's rows has labels."""
    source = about.source_at(path.absolute())
    if path.is_dir() or about.predicts_next:
        return True
    if isinstance(source, NPZ):
        with open_arrays(path) as arrays:
            return "y" in arrays.names
    return source.label in _names_in(path, source)


def read_inputs(path: Path, about: RowsAbout, base: Path | None = None) -> tuple[Tensor, int]:
    """Read the features (rows, ...) of a file without looking at its labels; and how many texts were cut.

    Raises:
        FedtideError: there is no such file, it has no rows, or others than the study's.
    """
    source = about.source_at(path, base)
    if isinstance(source, Texts):
        return source.texts_of(path, None)
    if isinstance(source, CSV) and source.learned is not None:
        return source.encoded(path, None), 0
    spelling = source.spelling if isinstance(source, CSV) else Spelling()
    return read_features(path, about.shape, about.columns, spelling), 0


def _names_in(path: Path, source: CSV | Texts) -> list[str]:
    """Return the columns of a file; of JSON lines the keys of the first one."""
    if isinstance(source, CSV):
        return read_names(path, source.spelling)
    if any(ending in path.suffixes for ending in JSON_LINES):
        return [*next((record for _, record in read_objects(path, [])), {})]
    return read_names(path)


def _taken(source: CSV | Texts) -> list[str]:
    """Return the columns that a file must have beside those of features."""
    columns = source.taken if isinstance(source, CSV) else [source.prompt, source.text, source.label, source.time]
    return [column for column in columns if column is not None]


def _first_row(path: Path, about: RowsAbout, label: str) -> str:
    """Name the first row of a table that has a label."""
    source = about.source_at(path.absolute())
    if not isinstance(source, CSV):
        return ""
    column = str(source.label)
    cells = read_cells(path, [column], source.spelling)
    where = cells.where(cells.texts(column).index(label))
    return where.removeprefix(f"{path}: ") + ": "


def describe_columns(path: Path, about: RowsAbout) -> str | None:
    """Name the columns of a file that are read, and those that are not; None if rows have no columns."""
    source = about.source_at(path.absolute())
    if isinstance(source, NPZ) or path.is_dir():
        return None
    header = _names_in(path, source)
    columns = [*_taken(source), *about.columns]
    columns += [source.domain] if isinstance(source, Texts) and source.domain in header else []
    others = [column for column in header if column not in columns]
    is_encoded = isinstance(source, CSV) and source.learned is not None
    encoded = "; scales, fills and encodes them as the ticket says" if is_encoded else ""
    return f"reads {', '.join(columns)}; leaves alone {', '.join(others) or 'nothing'}{encoded}"


def divide_rows(rows: Rows, split: Split) -> tuple[Tensor, dict[str, Tensor]]:
    """Return ids of rows by their content, and positions of the rows of each part, sorted by id.

    The k-th of equal rows has an id of its own, and is in the same part as the others.
    """
    mask = rows.mask(rows.y)
    x, y = rows.x.contiguous().numpy(), (rows.y if mask is None else rows.y.masked_fill(~mask, -1)).numpy()
    own_test = None if split.merge else rows.held_out
    held_out = torch.zeros(len(rows), dtype=torch.bool) if own_test is None else own_test
    test_share = split.test if split.test is not None else 0.0 if own_test is not None else 0.2
    seen, ids, shares = Counter[bytes](), np.empty(len(rows), np.int64), np.empty(len(rows))
    for row in range(len(rows)):
        content = x[row].tobytes() + y[row].tobytes()
        digest = hashlib.blake2b(content, digest_size=16).digest()
        shares[row] = int.from_bytes(digest[:8]) / 2**64
        id_ = hashlib.blake2b(digest + seen[digest].to_bytes(8), digest_size=8).digest()
        ids[row] = int.from_bytes(id_) >> 1
        seen[digest] += 1
    share = torch.from_numpy(shares)
    test = held_out | (share < test_share)
    val = ~test & (share < test_share + (1 - test_share) * split.val)
    order = torch.from_numpy(np.argsort(ids, kind="stable"))
    masks = {"train": ~test & ~val, "val": val, "test": test}
    return torch.from_numpy(ids), {part: order[mask[order]] for part, mask in masks.items()}


@dataclass(frozen=True)
class FileRows:
    """Rows of a node's clients (`fedtide.fleets.scoring.ClientRows`).

    Args:
        people: the clients as a population, in the order of their ids.
        ids: of all rows, by their content.
        places: by client, its number in the population.
        val: whether the study sets validation rows aside.
        decides_by: returns the rows by which a client decides, in place of its validation rows; None changes nothing.
    """

    people: Population
    ids: Tensor
    places: Mapping[int, int]
    val: bool = False
    decides_by: Callable[[int, Moment], Shard] | None = field(default=None, repr=False, compare=False)
    target: ClassVar[Target] = CLASSES
    apart: ClassVar[bool] = False

    @staticmethod
    def read(
        paths: Sequence[Path],
        clients: Sequence[int],
        about: RowsAbout,
        split: Split,
        transforms: tuple[Prepare, ...] = (),
        of: str = "ticket",
        base: Path | None = None,
    ) -> "FileRows":
        """Read a file for each client, in the order of their ids; `of` names what lists the clients.

        Texts become tokens by the tokenizer of `base`.

        Raises:
            FedtideError: a file is missing or does not fit the study, or leaves no row for training.
        """
        if len(paths) != len(clients):
            allowed = f"{len(clients)}, one for each client of the {of}, in order"
            raise refused("--data", f"{len(paths)} files", allowed)
        files = dict(sorted(zip(clients, paths, strict=True)))
        rows = {client: read_rows(path, about, base) for client, path in files.items()}
        dealt = FileRows.of(rows, split, transforms)
        for client, path in files.items():
            if not dealt.count(client, "train"):
                many = len(rows[client])
                raise FedtideError(f"{path}: none of its {many} rows is left for training, allowed: more rows")
        return dealt

    @staticmethod
    def of(rows: Mapping[int, Rows], split: Split, transforms: tuple[Prepare, ...] = ()) -> "FileRows":
        """Return the rows of clients, from those of each by its id, in order."""
        parts: dict[str, list[list[int]]] = {part: [] for part in PARTS}
        sorted_rows, sorted_ids, first = list[Rows](), list[Tensor](), 0
        for of_client in _padded_alike([*rows.values()]):
            ids, positions = divide_rows(of_client, split)
            order = ids.argsort(stable=True)
            place = order.argsort()
            for part in PARTS:
                parts[part].append((place[positions[part]] + first).tolist())
            sorted_rows.append(of_client.pick(order))
            sorted_ids.append(ids[order])
            first += len(order)
        times = [rows.time for rows in sorted_rows if rows.time is not None]
        joined = replace(
            sorted_rows[0],
            x=torch.cat([rows.x for rows in sorted_rows]),
            y=torch.cat([rows.y for rows in sorted_rows]),
            time=torch.cat(times) if len(times) == len(sorted_rows) else None,
            held_out=None,
            cut=sum(rows.cut for rows in sorted_rows),
        )
        people = _population(joined, parts, len(sorted_rows), transforms)
        places = {client: place for place, client in enumerate(rows)}
        return FileRows(people, torch.cat(sorted_ids), places, split.val > 0)

    def count(self, client: int, part: str) -> int:
        """Return the number of rows of a client in a part."""
        return int(self.people.counts(self._local(torch.tensor([client])), part))

    def shard(self, client: int, moment: Moment, part: str = "train") -> Shard:
        """Return the rows of one client; its validation rows are fetched when they are used."""
        shard = self.people.shard(self.places[client], moment, part)
        shard = replace(shard, ids=self.ids[shard.ids.long()], fetch_val=None)
        if part == "train" and self.decides_by is not None:
            return replace(shard, fetch_val=partial(self.decides_by, client, moment))
        if part == "train" and self.val:
            return replace(shard, fetch_val=partial(self.shard, client, moment, "val"))
        return shard

    def sizes(self, clients: Tensor, part: str, moment: Moment) -> Tensor:
        """Count the rows of a part of each of `clients`, or all steps of its sequences."""
        return self.people.sizes(self._local(clients), part)

    def counts(self, clients: Tensor, part: str, moment: Moment | None = None) -> Tensor:
        """Count the rows of a part of each of `clients`."""
        return self.people.counts(self._local(clients), part)

    def pool(self, clients: Tensor, moment: Moment, part: str) -> tuple[Shard, Tensor]:
        """Return the rows of several clients, and for each row its owner's position in `clients`."""
        shard, owner = self.people.pool(self._local(clients), moment, part)
        return replace(shard, ids=self.ids[shard.ids.long()]), owner

    def _local(self, clients: Tensor) -> Tensor:
        return torch.tensor([self.places[client] for client in clients.tolist()], dtype=torch.int64)


def _padded_alike(files: list[Rows]) -> list[Rows]:
    """Return the rows of files whose steps that do not count have one label: one that no step has that counts."""
    if len({rows.padding for rows in files}) == 1:
        return files
    masks = [cast(Tensor, rows.mask(rows.y)) for rows in files]
    labels = {label for rows, mask in zip(files, masks, strict=True) for label in rows.y[mask].unique().tolist()}
    padding = next((label for label in range(files[0].classes) if label not in labels), -1)
    if padding < 0:
        but = "what pads rows needs a token that no text has"
        raise refused("--data: tokens of the texts", Words("all of the vocabulary"), "one fewer", but)
    return [
        replace(rows, y=rows.y.masked_fill(~mask, padding), padding=padding)
        for rows, mask in zip(files, masks, strict=True)
    ]


def _population(
    rows: Rows, parts: Mapping[str, list[list[int]]], clients: int, transforms: tuple[Prepare, ...]
) -> Population:
    """Return clients that hold the same rows at all times."""
    lists = {part: Ragged.of(positions) for part, positions in parts.items()}
    group = torch.zeros(clients, dtype=torch.int64)
    return Population(rows, lists, group, ("all",), clients, transforms=transforms)


def host_without_rows(experiment: Experiment, about: RowsAbout, clients: int, store: MemoryStore) -> Host:
    """Return the host of real clients, each of which has the same made-up rows, because nobody here has theirs.

    Args:
        experiment: the study, with one method and one seed.
        about: the description of rows.
        store: the memory of clients.
    """
    like, data = zero_rows(about), experiment.data
    shard = made_up(Shard(like.x, like.y, torch.zeros(1, dtype=torch.int64)), about.classes)
    positions = {part: list(range(len(shard))) for part in PARTS if part != "val" or data.split.val}
    parts = {part: [positions.get(part, [])] * clients for part in PARTS}
    population = _population(replace(like, x=shard.x, y=shard.y), parts, clients, data.transforms)
    return host_of(experiment, experiment.method[0], experiment.seeds[0], store, population)


def algorithm_without_rows(experiment: Experiment, about: RowsAbout) -> Algorithm:
    """Return the algorithm of a study at a node or at a server of real clients, which have no rows of all clients."""
    method = experiment.method[0]
    return algorithm_of(method, task_of(experiment, method, zero_rows(about)), experiment.data.folder)


def zero_row(about: RowsAbout, transforms: tuple[Prepare, ...]) -> Shard:
    """Return a row of zeros as the model sees it."""
    rows = zero_rows(about)
    x = apply_transforms(transforms, features(rows.x))
    return Shard(x, rows.y, torch.zeros(1, dtype=torch.int64), mask=rows.mask(rows.y))


def zero_rows(about: RowsAbout) -> Rows:
    """Return a row of zeros as it is in a file; a row of tokens has another id if zero is padding."""
    token = int(about.padding == 0)
    x = torch.full((1, *about.shape), token, dtype=getattr(torch, about.dtype))
    if about.predicts_next:
        return Rows("rows", x, x, about.classes, padding=about.padding)
    return Rows("rows", x, torch.zeros(1, dtype=torch.int64), about.classes)
