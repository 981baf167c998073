"""Rows: the result of every source, checked once."""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedtide.core.errors import FedtideError, refused
from fedtide.core.trees import raw
from fedtide.data.targets import TARGET_WORDS, Labels, Setting, recenter
from fedtide.data.transforms import Prepare, apply_transforms, features
from fedtide.fields.types import HIDDEN, LARGEST, OBEYED
from fedtide.learn.device import CPU, resident
from fedtide.learn.target import CLASSES, Classes, Measured, Target


class Baseline(NamedTuple):
    """Baseline of time series: how many seconds ago the value is from that it says, and what that is called."""

    seconds: int
    words: str


BASELINES = {
    "yesterday": Baseline(86_400, "the value of a day ago"),
    "last_week": Baseline(7 * 86_400, "the value of a week ago"),
}
"""By the names of their measures."""

NUMBERS = 2**24
"""Number of pixels that are transformed at a time."""

COLUMNS = ("y", "domain", "client", "time", "held_out", "value")
"""Columns of rows beside their features."""


@dataclass(frozen=True)
class Fit:
    """Features that follow from some of the rows, which decide scales, means for gaps and categories.

    make: function from positions of deciding rows to the features (rows, ...) of all rows. x: features of these rows.
    of: (rows,) positions of these rows among the rows of `make`. digest: digest of the rows as they were read; "" if
    these are the rows that were read.
    """

    make: Callable[[Tensor], Tensor]
    x: Tensor
    of: Tensor
    digest: str = ""


@dataclass(frozen=True, repr=False)
class Rows:
    """Samples before they are dealt to clients.

    Args:
        name: name of the source, for messages.
        x: (rows, ...) features; uint8 images (rows, channels, height, width) are scaled to 0..1, others stay as they
            are.
        y: (rows,) labels 0..classes-1; (rows, steps) for sequences. Of values that are no classes it is their bin, for
            whatever reads labels.
        classes: number of classes, or of bins.
        domain: (rows,) the data set or mode of each row; None means one.
        domain_names: names of the domains.
        client: (rows,) the natural client of a row (writer, user, station); None if the source has none.
        client_names: names of the natural clients, in order.
        time: (rows,) seconds; None if rows have no time.
        held_out: (rows,) mask of the source's own test set; None if it has none.
        padding: the label of steps that do not count, for sequences; None if all steps count.
        unscored: labels that are trained on and left out when predictions are scored (ends, unknown words).
        label_names: names of the classes, in order; () if labels were numbers.
        said: which column of a table is what, for people.
        value: (rows,) numbers, or (rows, labels) of several labels at once; None if rows have classes.
        target: what rows are labeled with.
        learned: time until which rows have decided scales, categories or bins that all share; None if none did.
        fit: how features follow from the rows that decide scales, means and categories. The population chooses these
            rows. None if no rows decide, or the earliest.
        cut: number of rows that were longer than a row may be, of which only the beginning is there.

    >>> Rows("toy", torch.zeros(3, 2), torch.tensor([0, 1, 1]), classes=2).x.shape
    torch.Size([3, 2])
    """

    name: str
    x: Tensor
    y: Tensor
    classes: int
    domain: Tensor | None = None
    domain_names: tuple[str, ...] = ("all",)
    client: Tensor | None = None
    client_names: tuple[str, ...] = ()
    time: Tensor | None = None
    held_out: Tensor | None = None
    padding: int | None = None
    unscored: tuple[int, ...] = ()
    label_names: tuple[str, ...] = ()
    said: tuple[str, ...] = ()
    value: Tensor | None = None
    target: Target = CLASSES
    learned: float | None = None
    fit: Fit | None = None
    cut: int = 0
    _transformed: dict[tuple[Prepare, ...], "Rows"] = field(default_factory=dict, init=False, compare=False)
    _asked: Counter[tuple[Prepare, ...]] = field(default_factory=Counter, init=False, compare=False)
    _x_by_device: dict[str, Tensor] = field(default_factory=dict, init=False, compare=False)

    def __repr__(self) -> str:
        clients = "" if self.client is None else f", {len(self.client_names)} clients"
        about = f"Rows({self.name}: {len(self)} rows of shape {self.shape}, {self.labeled}{clients})"
        return "\n".join([about, *self.said[1:]])

    def __post_init__(self) -> None:
        n = len(self.x)
        for name in COLUMNS:
            column = getattr(self, name)
            if column is not None and len(column) != n:
                raise refused(f"{self.name}: rows of {name}", len(column), f"{n}, as in x")
            if column is not None and name not in ("y", "value") and column.dim() != 1:
                raise refused(f"{self.name}: shape of {name}", tuple(column.shape), "(rows,)")
        if n == 0:
            raise FedtideError(f"{self.name}: no rows")
        _check_labels(self.name, self.y, self.classes)
        _check_steps(self.name, self.y, self.padding)
        _check_features(self.name, self.x)
        check_names(f"{self.name}: name of a domain or client", (*self.domain_names, *self.client_names))
        if self.steps is None:  # else they are words of texts
            check_names(f"{self.name}: name of a class", map(str, self.label_names), OBEYED)
        time = torch.empty(0) if self.time is None else self.time
        for row in _first(~torch.isfinite(time)):
            raise refused(f"{self.name}: row {row}: time", float(time[row]), "a finite number")
        if self.value is not None:
            _check_values(self.name, self.value)

    @cached_property
    def digest(self) -> str:
        """Short hash of features and labels, to detect other rows: as they were read, so the same for all seeds."""
        if self._fit is not None and self._fit.digest:
            return self._fit.digest
        digest = hashlib.blake2b(b"" if self.fit is None and self.value is None else b"fitted", digest_size=8)
        for values in (self.x, self.y) if self.value is None else (self.x, self.y, self.value):
            digest.update(str((values.dtype, tuple(values.shape))).encode())
            flat = raw(values)
            # Very large arrays are hashed in part: enough to notice another file, not a proof.
            digest.update(flat[:: max(len(flat) // 2**28, 1)].contiguous().numpy().data)
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self.x)

    @cached_property
    def in_floats(self) -> "Rows":
        """The same rows with features in float32."""
        return replace(self, x=self.x.float())

    def transformed(self, transforms: tuple[Prepare, ...], asked: int) -> "Rows | None":
        """Return the same rows after transforms of their pictures, or None while that does not pay.

        All are transformed once the rows that were asked for, repeats included, are as many as there are.

        Args:
            transforms: the transforms, in order.
            asked: number of rows that are asked for now.
        """
        if transforms in self._transformed:
            return self._transformed[transforms]
        self._asked[transforms] += asked
        if self._asked[transforms] < len(self):
            return None
        blocks = self.x.split(max(NUMBERS // math.prod(self.shape), 1))
        x = torch.cat([apply_transforms(transforms, features(block)) for block in blocks])
        self._transformed.clear()  # of earlier transforms
        return self._transformed.setdefault(transforms, replace(self, x=x))

    @cached_property
    def extremes(self) -> Tensor:
        """Positions of a row with the smallest label, and of rows with the smallest and the largest token."""
        ends = [self.y.argmin() // self.y[0].numel()]
        if self.x.dtype == torch.int64:
            ends += [place // self.x[0].numel() for place in (self.x.argmin(), self.x.argmax())]
        return torch.stack(ends)

    @property
    def labeled(self) -> str:
        """The kind of labels, in words."""
        value, rows = self.value, TARGET_WORDS[self.target.kind].rows
        if value is not None and value.dim() == 1:
            return "numbers" if self.target == CLASSES else rows  # which no target reads yet
        return f"{self.classes if value is None else value.shape[1]} {rows}"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one row's features."""
        return tuple(self.x.shape[1:])

    @property
    def steps(self) -> int | None:
        """Number of steps of a sequence; None if a row has one label."""
        return None if self.y.dim() == 1 else self.y.shape[1]

    def place(self, row: int) -> str:
        """Say which row it is, for messages.

        >>> Rows("a", torch.zeros(2, 1), torch.tensor([0, 1]), 2).place(1)
        'a: row 1'
        """
        of = "" if self.client is None else f", of client '{self.client_names[int(self.client[row])]}'"
        return f"{self.name}: row {row}{of}"

    def take(self, rows: Tensor, device: str = CPU) -> tuple[Tensor, Tensor]:
        """Return x and y of some rows, by position; x is gathered on a device if all rows fit on it."""
        if device not in self._x_by_device:
            self._x_by_device[device] = resident(self.x, device)
        x = self._x_by_device[device]
        return torch.index_select(x, 0, rows.to(x.device)), torch.index_select(self.y, 0, rows)

    def labels(self, rows: Tensor) -> Tensor:
        """Return y of some rows, by position."""
        return torch.index_select(self.y, 0, rows)

    @cached_property
    def earlier(self) -> dict[str, Tensor]:
        """Positions of the rows of the same client a day and a week before each row (rows,); -1 if there is none.

        The row nearest to that time, not more than half of the usual time between rows away: clocks are a little off.

        Of the same domain, too, if rows of several domains have the same time. Empty if rows have no time, or two
        rows of a client and a domain have the same.
        """
        if self.time is None:
            return {}
        nobody = torch.zeros(len(self), dtype=torch.int64)
        client = nobody if self.client is None else self.client.long()
        domain = nobody if self.domain is None else self.domain.long()
        since = (self.time - self.time.min()).round().long()
        span = int(since.max()) + 1
        for series in (client, client * len(self.domain_names) + domain):
            keys, order = (series * span + since).sort()
            gaps = keys.diff()
            if not bool((gaps == 0).any()):
                usual = gaps[keys[1:] // span == keys[:-1] // span]
                half = float(usual.double().median()) / 2 if len(usual) else 0.0
                return {name: _before(series, since - base.seconds, span, min(half, base.seconds / 2), keys, order)
                        for name, base in BASELINES.items()}  # fmt: skip
        return {}

    def targets(self, rows: Tensor, y: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the targets of some rows with labels `y`, by position, and their bins if targets are no classes."""
        return (y, None) if self.value is None else (torch.index_select(self.value, 0, rows), y)

    def mask(self, y: Tensor) -> Tensor | None:
        """Return the mask (rows, steps) of the steps that count; None if a row has one label."""
        if self.steps is None:
            return None
        return torch.ones_like(y, dtype=torch.bool) if self.padding is None else y != self.padding

    def scored(self, y: Tensor) -> Tensor | None:
        """Return the mask of the scored labels, in the shape of `y`; None if all are, with one label per row."""
        mask = self.mask(y)
        if not self.unscored:
            return mask
        scored = ~torch.isin(y, torch.tensor(self.unscored))
        return scored if mask is None else scored & mask

    def pick(self, where: Tensor) -> "Rows":
        """Return some of the rows, by mask or by position."""
        columns = {name: getattr(self, name) for name in ("x", *COLUMNS)}
        picked: dict[str, Any] = {name: None if c is None else c[where] for name, c in columns.items()}
        fit = None if self._fit is None else Fit(self._fit.make, picked["x"], self._fit.of[where])
        return replace(self, **picked, fit=fit)

    def fitted(self, positions: Tensor) -> "Rows":
        """Return rows whose scales, means and categories are those of the known ones alone, if rows have no time.

        Args:
            positions: positions, in any order; one that comes again counts once. Without any, rows stay as they are.

        Raises:
            FedtideError: known rows have no number, or no category, in some column.
        """
        if self.time is not None or not len(positions) or (self._fit is None and self.value is None):
            return self
        rows, positions = self, positions.long().unique()
        if self._fit is not None:
            x = self._fit.make(self._fit.of[positions])[self._fit.of]
            rows = replace(rows, x=x, fit=replace(self._fit, x=x, digest=self.digest))
        if self.value is not None and isinstance(self.target, Measured):
            rows = replace(rows, target=recenter(self.target, self.value[positions]))
        return rows

    @property
    def _fit(self) -> Fit | None:
        """How features are made, if they are still those: what was put in their place stays."""
        return self.fit if self.fit is not None and self.fit.x is self.x else None


def make_rows(name: str, classes: int, **columns: Any) -> Rows:
    """Return rows of arrays; a test set without rows is None."""
    if columns.get("held_out") is not None and not columns["held_out"].any():
        columns["held_out"] = None
    arrays = {name: torch.from_numpy(value) for name, value in columns.items() if isinstance(value, np.ndarray)}
    return Rows(name, classes=classes, **(columns | arrays))


def _before(series: Tensor, then: Tensor, span: int, reach: float, keys: Tensor, order: Tensor) -> Tensor:
    """Return positions of the rows nearest to times `then` of their series, -1 for none within `reach` seconds.

    Args:
        series: (rows,) number of each row's series.
        then: (rows,) seconds since the first row of all; of two rows that are as near, the earlier one is taken.
        span: seconds of all rows; a time belongs to a key series * span + seconds.
        reach: how far from `then` a row may be.
        keys: (rows,) of all rows, sorted.
        order: (rows,) positions of the keys' rows.
    """
    place = torch.searchsorted(keys, series * span + then)
    near = torch.stack([place - 1, place]).clamp(0, len(keys) - 1)
    off = (keys[near] % span - then).abs().masked_fill(keys[near] // span != series, span + reach)
    best, off = torch.where(off[1] < off[0], near[1], near[0]), off.amin(0)
    return torch.where(off <= reach, order[best], -1)


def find_known_rows(rows: Rows) -> Tensor:
    """Return positions of the rows by which values are standardized: no test rows; of times the earliest tenth."""
    check_held_out(rows)
    positions = torch.arange(len(rows)) if rows.held_out is None else (~rows.held_out).nonzero().flatten()
    return positions if rows.time is None else positions[find_earliest(rows.time[positions])]


def find_earliest(time: Tensor) -> Tensor:
    """Return positions of the earliest tenth.

    >>> find_earliest(torch.tensor([3.0, 1.0, 2.0]))
    tensor([1])
    """
    return time.argsort(stable=True)[: math.ceil(len(time) / 10)]


def with_target(rows: Rows, setting: Setting) -> Rows:
    """Return rows whose values are read as a setting says, with a bin for each.

    Raises:
        FedtideError: the values are not of that kind.
    """
    if isinstance(setting, Classes) or rows.value is None:
        return rows
    if (rows.value.dim() == 2) != isinstance(setting, Labels):
        wanted = "(rows, labels)" if isinstance(setting, Labels) else "(rows,)"
        raise refused(f"{rows.name}: shape of y", tuple(rows.value.shape), f"{wanted} with target '{setting.kind}'")
    seen = torch.arange(len(rows)) if rows.held_out is None else (~rows.held_out).nonzero().flatten()
    positions = find_known_rows(rows)
    target, bins = setting.fitted(rows.value, positions, seen, rows.place)
    result = replace(rows, y=bins, classes=max(target.bins, 1), target=target)
    return result if isinstance(setting, Labels) else with_learned(result, positions)


def with_learned(rows: Rows, positions: Tensor) -> Rows:
    """Return rows that note the latest time of those that decided scales, categories or bins."""
    if rows.time is None:
        return rows
    latest = float(rows.time[positions].max())
    return replace(rows, learned=latest if rows.learned is None else max(rows.learned, latest))


def with_fit(rows: Rows, make: Callable[[Tensor], Tensor]) -> Rows:
    """Return rows with the features that a function makes by the known rows; with a time they stay the known ones."""
    positions = find_known_rows(rows)
    x = make(positions)
    fit = Fit(make, x, torch.arange(len(x))) if rows.time is None else None
    return with_learned(replace(rows, x=x, fit=fit), positions)


def check_held_out(rows: Rows) -> None:
    """Raise if every row is for testing."""
    if rows.held_out is not None and bool(rows.held_out.all()):
        raise refused(f"{rows.name}: held_out", "true for all rows", "false for some, which are for training")


def check_classes(rows: Rows) -> None:
    """Raise if every row has the same label or is for testing, as there is nothing to learn."""
    check_held_out(rows)
    labels = rows.y if rows.value is None else rows.value
    if (rows.steps is None or rows.value is not None) and bool((labels == labels[0]).all()):
        named = rows.label_names and rows.value is None
        shown = rows.label_names[int(labels[0])] if named else labels[0].tolist()
        raise refused(f"{rows.name}: labels", shown, "two or more", "that is the label of every row")


def _first(wrong: Tensor) -> list[int]:
    """Return the first row in which something is wrong (rows, ...); [] if nothing is."""
    return wrong.nonzero()[:1, 0].tolist()


def _check_labels(name: str, y: Tensor, classes: int) -> None:
    if y.dtype != torch.int64:
        raise refused(f"{name}: type of labels", y.dtype, "torch.int64")
    wrong = (y < 0) | (y >= classes)
    for row in _first(wrong):
        raise refused(f"{name}: row {row}: label", int(y[wrong][0]), f"0 to {classes - 1}")


def _check_values(name: str, value: Tensor) -> None:
    if not value.is_floating_point() or value.dim() not in (1, 2) or not value.shape[1:].numel():
        raise refused(f"{name}: y", f"{value.dtype} of shape {tuple(value.shape)}", "numbers (rows,) or (rows, labels)")
    for row in _first(~(value.abs() <= LARGEST)):
        raise refused(f"{name}: row {row}: label", value[row].tolist(), "a finite number")


def _check_steps(name: str, y: Tensor, padding: int | None) -> None:
    if y.dim() > 2 or not y.shape[1:].numel():
        raise refused(f"{name}: shape of labels", tuple(y.shape), "(rows,), of sequences (rows, steps)")
    if padding is not None and y.dim() == 1:
        raise refused(f"{name}: padding", padding, "None, because a row has one label")
    for row in [] if padding is None else _first((y == padding).all(1)):
        raise FedtideError(f"{name}: row {row}: every step is padding; leave such rows out")


def check_names(key: str, names: Iterable[str], wrong: re.Pattern[str] = HIDDEN) -> None:
    """Raise for names with characters that are wrong; `key` begins the error."""
    for name in filter(wrong.search, names):
        raise refused(key, name, "names without control characters")


def _check_features(name: str, x: Tensor) -> None:
    if not x[0].numel():
        raise refused(f"{name}: shape of x", tuple(x.shape), "one number or more in a row")
    if not x.is_floating_point() or (x.dtype == torch.float32 and torch.isfinite(x.sum())):
        return
    for row in _first(~(x.abs() <= LARGEST)):
        line = f"a feature is NaN or beyond {LARGEST:.3g}; drop or fill such rows"
        raise FedtideError(f"{name}: row {row}, counted from 0: {line}")


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
    cut = 0
    target = CLASSES

    @property
    def labeled(self) -> str:
        """The kind of labels, in words."""
        return f"{self.classes} classes"

    def targets(self, rows: Tensor, y: Tensor) -> tuple[Tensor, None]:
        """Return the targets of some rows, which are classes."""
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
        digest = hashlib.blake2b(str((self.clients, self.each, self.classes)).encode(), digest_size=8)
        for client in (0, self.clients - 1):
            for values in self.make(client):
                digest.update(values.numpy().tobytes())
        return digest.hexdigest()
