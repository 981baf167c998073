"""A population saved with its run, as plain arrays of the clients' rows and arrivals, for exact replay."""

from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from fedtide.core import codec
from fedtide.core.atomic import replacing
from fedtide.core.base import PARTS, Moment
from fedtide.core.errors import UNREADABLE, FedtideError
from fedtide.data.ragged import Ragged
from fedtide.fields.types import DataFile, ingredient

DRAWN, CLASSES = 60, 1000
"""Number of clients whose labels are counted for the report, and maximum number of classes for it."""

KINDS: dict[str, tuple[Any, ...]] = {
    "registered": (int,), "group": (torch.int64,), "group_names": (list, tuple), "names": (list, tuple),
    "expected": (torch.float64,), "arrivals": (torch.int64,), "substituted": (torch.int64, torch.float32),
    "awake": (torch.uint8, type(None)), "parts": (dict, type(None)), "public": (torch.int64, type(None)),
    "rows": (dict,),
}  # fmt: skip
"""Types of what a file holds, or of the numbers in it."""

LARGEST = 20_000_000
"""Maximum number of index entries that are saved; larger populations are rebuilt from configuration and seed."""


def save(population: Any, path: Path, *, rounds: int, cohort: int, seconds: float | None = 1.0) -> None:
    """Write the random draws of a population.

    Args:
        population: a `fedtide.data.population.Population`.
        path: the file, which is replaced atomically.
        rounds: number of rounds whose arrivals are written.
        cohort: number of arrivals of each round.
        seconds: seconds per round; None if they are not known in advance and decide the arrivals, which are then not
            written.
    """
    moments = [] if seconds is None else [Moment(r, rounds, r * seconds) for r in range(rounds)]
    table = torch.full((len(moments), cohort), -1, dtype=torch.int64)
    for row, moment in zip(table, moments, strict=True):
        arrivals = population.arrivals_in_order(cohort, moment)
        row[: len(arrivals)] = arrivals
    dealt = [part for part in population.parts.values() if isinstance(part, Ragged)]
    small = bool(dealt) and sum(len(part.rows) for part in dealt) <= LARGEST
    tree = {
        "registered": population.registered,
        "group": population.group,
        "group_names": list(population.group_names),
        "names": list(population.names),
        "domain_names": list(population.rows.domain_names),
        "expected": torch.tensor(np.array([population.expected(m) for m in moments])),
        "arrivals": table,
        "substituted": torch.tensor([population.substituted(cohort, moment) for moment in moments]),
        "awake": _awake(population, moments),
        "parts": {name: {"start": p.start, "rows": p.rows} for name, p in population.parts.items()} if small else None,
        "public": population.public,
        "labels": labels(population),
        "rows": {"name": population.rows.name, "count": len(population.rows), "digest": population.rows.digest},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        codec.to_file(temporary, tree)


def labels(population: Any) -> dict[str, Any]:
    """Count the training rows of each class for some registered clients, for the report's figure of the partition.

    Clients are taken at equal distances, as ids go group by group. "counts" (clients, classes) is None for sequences,
    and if there are too many classes for a figure. "names" are the names of the classes, empty if labels are numbers.
    """
    clients = torch.linspace(0, population.registered - 1, min(DRAWN, population.registered)).round().long()
    clients = clients[population.remains(clients)]
    rows, train = population.rows, population.parts["train"]
    counts = None
    if rows.steps is None and rows.classes <= CLASSES:
        labels_by_client = [rows.labels(train[client].long()) for client in clients.tolist()]
        counts = torch.stack([torch.bincount(y, minlength=rows.classes) for y in labels_by_client])
    names = list(getattr(rows, "label_names", ()))
    about = {"classes": rows.classes, "of": population.registered, "names": names}
    return {"clients": clients, "counts": counts, **about}


def _awake(population: Any, moments: list[Moment]) -> Tensor | None:
    """Return the reachable clients of each round, a bit per client; None if all are, or if the array is too large."""
    everyone = not population.shift.who.changes and all(population.there(moment) is None for moment in moments)
    if everyone or population.registered * len(moments) > 8 * LARGEST:
        return None
    bits = np.zeros((len(moments), population.registered), dtype=bool)
    for row, moment in zip(bits, moments, strict=True):
        row[population.reachable(moment).numpy()] = True
    return torch.from_numpy(np.packbits(bits, axis=1))


def check(population: Any, path: Path) -> None:
    """Raise if the data are not those with which a run began.

    Raises:
        FedtideError: the data differ, or the file is damaged.
    """
    about = content_of(str(path), "shift", "rows")["rows"]
    if about.get("digest") != population.rows.digest:
        changed = f"{population.rows.name}: the data have changed since {path} was written"
        raise FedtideError(f"{changed}; allowed: the data as they were, or a new run")


def labels_of(path: Path) -> dict[str, Any] | None:
    """Return the label counts that `save` wrote, without reading the rows; None without any."""
    counts = content_of(str(path), "shift", "registered").get("labels")
    if counts is None:
        return None
    if not isinstance(counts, dict) or not isinstance(counts.get("counts"), Tensor | None):
        raise FedtideError(f"{path}: damaged: 'labels' is of another kind")
    return {**counts, "names": _words(path, "labels", counts.get("names"))}


def usual_class(labels: dict[str, Any] | None) -> str:
    """Return the name of the class that more than half of the counted rows have (`labels`); "" without one."""
    if labels is None or labels["counts"] is None or not labels["names"]:
        return ""
    counts = labels["counts"].sum(0)
    return str(labels["names"][int(counts.argmax())]) if 2 * int(counts.max()) > int(counts.sum()) else ""


def names_of(path: Path, key: Literal["group_names", "domain_names"]) -> list[str]:
    """Return the names of the groups of a saved population, or of the domains of its source."""
    return _words(path, key, content_of(str(path), "shift", "registered").get(key))


def _words(path: Path, key: str, words: Any) -> list[str]:
    if not isinstance(words, list | tuple | None) or not all(isinstance(name, str) for name in words or ()):
        raise FedtideError(f"{path}: damaged: '{key}' is of another kind")
    return list(words or ())


def content_of(path: str, key: str, *needed: str) -> dict[str, Any]:
    """Return the content that `save` wrote to a file; raise if it is not of the kinds of `save`."""
    content = codec.from_file(Path(path))
    if not isinstance(content, dict) or not content.keys() >= {"registered", *needed}:
        allowed = "shift/<seed>.safetensors of a run folder"
        raise FedtideError(f"{key}: {path} is not a saved population; allowed: {allowed}")
    for name, kinds in KINDS.items():
        value = content.get(name)
        if name in content and (value.dtype if isinstance(value, Tensor) else type(value)) not in kinds:
            raise FedtideError(f"{key}: {path}: damaged: '{name}' is of another kind")
    return content


@ingredient
class Saved:
    """Parts, groups and held-out clients of another run, from `shift/<seed>.safetensors` in its folder.

    Public rows, if `data.public_samples` asks for them, are those of that run too.

    Args:
        path: the file.
    """

    path: DataFile
    kind: Literal["saved"] = "saved"
    shares_rows: ClassVar[bool] = False

    @cached_property
    def saved(self) -> dict[str, Any]:
        """Content of the file."""
        content = content_of(
            self.path, "data.partition.path", "parts", "rows", "group", "group_names", "names", "public"
        )
        if content["parts"] is None:
            raise FedtideError(f"data.partition.path: {self.path} was too large to hold who has what")
        return content

    def fitting(self, rows: int, name: str) -> dict[str, Any]:
        """Return the file's content; raise if it was made from another number of rows."""
        about = self.saved["rows"]
        if about.get("count") != rows:
            line = f"{self.path} deals {about.get('count')} rows of {about.get('name')}, {name} has {rows}"
            raise FedtideError(f"data.partition.path: {line}")
        try:
            clients, registered, parts = len(self.saved["group"]), self.saved["registered"], self.saved["parts"]
            whole = type(registered) is int and 0 < registered <= clients
            whole = whole and all(_is_whole(parts[name]["start"], parts[name]["rows"], clients, rows) for name in PARTS)
        except UNREADABLE:
            whole = False
        if not whole:
            raise FedtideError(f"data.partition.path: {self.path}: damaged: its parts are not those of its clients")
        return self.saved


def _is_whole(start: Tensor, places: Tensor, clients: int, rows: int) -> bool:
    """Tell whether lists of row numbers are those of so many clients and rows."""
    if start.dtype != torch.int64 or places.dtype not in (torch.int32, torch.int64):
        return False
    ends = [0, len(places)] == start[[0, -1]].tolist() and len(start) == clients + 1
    return ends and bool((start.diff() >= 0).all()) and bool(((places >= 0) & (places < rows)).all())
