"""Arrays from a file or from the user's own Python: NPZ and `module:function`."""

import math
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from fedtide.core.errors import FedtideError, nearest, refused, unknown
from fedtide.core.files import open_file
from fedtide.data.rows import Rows, with_fit
from fedtide.data.sources.cells import seconds_of
from fedtide.data.sources.files import Loading, check_unpacked, find, reading
from fedtide.fields import user_code
from fedtide.fields.types import Flag, ingredient

SPARSE_CLASSES = 1000
"""Classes that rows may have without being as many."""
COLUMNS = ("x", "y", "client", "domain", "time", "held_out")


class Arrays:
    """The arrays of an NPZ file, whose types and shapes are known before any of them is read.

    No object is unpickled. No array is larger than its file says, or than honest data are.

    Args:
        path: the file, for messages.
        file: it, opened.
    """

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._zip = zipfile.ZipFile(file)
        entries = self._zip.infolist()
        check_unpacked(path, sum(entry.file_size for entry in entries))
        self._entries = {entry.filename[:-4]: entry for entry in entries if entry.filename.endswith(".npy")}
        self.names = [*self._entries]
        self.about = {name: self._look(name) for name in self.names}
        # Bytes stay bytes; other numbers become floats or int64.
        size = sum(math.prod(shape) * (kind.itemsize if kind == np.uint8 else max(kind.itemsize, 8))
                   for kind, shape in self.about.values())  # fmt: skip
        check_unpacked(path, size)

    def _look(self, name: str) -> tuple[np.dtype, tuple[int, ...]]:
        """Return type and shape of an array; raise ValueError if it is not as large as its header says."""
        entry = self._entries[name]
        with self._zip.open(entry) as file:
            version = np.lib.format.read_magic(file)
            readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
            if version not in readers:
                raise ValueError(f"'{name}' has format {version}")
            shape, _, kind = readers[version](file)
            if not kind.itemsize:
                raise ValueError(f"'{name}' has values of type {kind}")
            if not kind.hasobject and entry.file_size != file.tell() + math.prod(shape) * kind.itemsize:
                raise ValueError(f"'{name}' is not as long as its header says")
        return kind, shape

    def read(self, name: str) -> np.ndarray:
        """Read an array."""
        with self._zip.open(self._entries[name]) as file:
            return np.lib.format.read_array(file, allow_pickle=False)


@contextmanager
def open_arrays(path: Path, what: str = "an npz file without pickled objects") -> Iterator[Arrays]:
    """Open an NPZ file; a damaged one is one line that says what it should be."""
    # Of an encrypted one zipfile raises RuntimeError.
    with reading(path, what, RuntimeError), open_file(path) as file:
        yield Arrays(path, file)


@ingredient
class NPZ(Loading):
    """An `.npz` file with `x` and `y`, optionally `client`, `domain`, `time`, `held_out` (one entry per row each).

    Images are (rows, height, width) or (rows, channels, height, width) uint8. Integers stay integers for a model that
    embeds them, and float64 stays; other numbers become float32.

    Args:
        path: the file, below the data directory or absolute.
        scaled: standardize each feature by its mean and standard deviation over the training rows. If rows have a time,
            the earliest tenth of the rows outside the file's test set decides, because later rows are not known.
    """

    path: str
    scaled: Flag = False
    kind: Literal["npz"] = "npz"
    measures: ClassVar[bool] = True

    def load(self, directory: Path | None, seed: int, *, measured: bool = False) -> Rows:
        """Read the file; raise for pickled objects in it."""
        path = find(self.path, directory)
        with open_arrays(path) as arrays:
            for column in ("x", "y"):
                if column not in arrays.names:
                    raise FedtideError(f"{path}: no array '{column}'; {nearest(column, arrays.names)}")
            named = [column for column in COLUMNS if column in arrays.names]
            columns = {column: arrays.read(column) for column in named}
        return from_arrays(path.name, **columns, scaled=self.scaled, measured=measured)


@ingredient
class Python(user_code.Python, Loading):
    """The user's own function, `module:function`, called with `options`.

    It returns Rows, or a mapping with `x`, `y` and optionally `client`, `domain`, `time`, `held_out`, or a pair (x, y).
    """

    measures: ClassVar[bool] = True

    def load(self, directory: Path | None, seed: int, *, measured: bool = False) -> Rows:
        """Call the function."""
        result = user_code.call(self.find("data.source"), "data.source.options", **self.options)
        if isinstance(result, Rows):
            if measured and result.value is None:
                allowed = "Rows with `value`, because data.target is not 'classes'"
                raise refused(self.name, "Rows without `value`", allowed)
            return result
        if isinstance(result, tuple) and len(result) == 2:
            result = dict(zip(("x", "y"), result, strict=True))
        if not isinstance(result, Mapping):
            allowed = "a function that returns Rows, such as ft.data.stack(dataset), a mapping, or a pair (x, y)"
            raise refused(self.name, result, allowed)
        if strange := [key for key in result if key not in COLUMNS]:
            raise unknown(self.name, str(strange[0]), COLUMNS)
        if not {"x", "y"} <= result.keys():
            raise refused(self.name, ", ".join(result), "x, y, and others of " + ", ".join(COLUMNS))
        return from_arrays(self.name, **result, measured=measured)


def from_arrays(name: str, x: Any, y: Any, *, scaled: bool = False, measured: bool = False, **columns: Any) -> Rows:
    """Build rows from arrays or tensors.

    Args:
        name: name for messages.
        x: (rows, ...) features; uint8 images (rows, height, width) get a channel. Integers stay integers.
        y: (rows,) whole numbers from 0, or names.
        scaled: standardize each feature over the rows outside the test set, and in a population over its training rows.
            With `time` the earliest tenth of the rows outside the test set decides.
        measured: `y` are numbers (rows,), or several labels at once (rows, labels), and no classes.
        columns: (rows,) each; None stands for no column. `client` and `domain` are numbers or names, `time` is seconds,
            dates, or ISO 8601. `held_out` is true for rows of the test set.

    >>> from_arrays("toy", np.zeros((3, 2)), ["cat", "dog", "cat"]).y.tolist()
    [0, 1, 0]
    """
    exact = features = _tensor(name, "x", x)
    if features.dtype == torch.uint8 and features.dim() == 3:
        features = features.unsqueeze(1)
    elif features.dtype != torch.uint8 or features.dim() != 4:
        whole = not (features.is_floating_point() or features.dtype == torch.bool or scaled)
        features = features.long() if whole else _as_floats(features)
    value = _as_floats(_tensor(name, "y", y)) if measured else None
    labels, label_names = _labels(name, y) if value is None else (torch.zeros(len(value), dtype=torch.int64), ())
    result: dict[str, Any] = {"label_names": label_names, "value": value}
    readers = {"client": encode, "domain": encode, "time": _times, "held_out": _mask}
    for key, values in columns.items():
        if values is not None:
            result[key] = readers[key](name, key, values)
    for key in result.keys() & {"client", "domain"}:
        result[key], result[f"{key}_names"] = result[key]
    classes = len(label_names) or classes_of(name, labels.numpy())
    rows = Rows(name, features, labels, classes, **result)
    if scaled and rows.x.dtype == torch.uint8:
        raise refused(f"{name}: scaled", True, "false", "pictures are read as 0 to 1")
    return with_fit(rows, partial(_standardize_rows, exact, dtype=rows.x.dtype)) if scaled else rows


def _standardize_rows(x: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Return features standardized by the rows at some positions; large whole numbers are rounded only then."""
    return torch.from_numpy(standardize(x.numpy(), x[positions].numpy().astype(np.float64))).to(dtype)


def standardize(x: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return features less their means over the known rows, in units of their standard deviations there.

    >>> standardize(np.array([[1.0, 5.0], [3.0, 5.0]]), np.array([[0.0, 5.0], [2.0, 5.0]])).tolist()
    [[0.0, 0.0], [2.0, 0.0]]
    """
    center, spread = center_and_spread(rows)
    return (x - center) / spread


def center_and_spread(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return means and standard deviations of columns; 1 for a column that is always the same."""
    return rows.mean(0), np.where(np.ptp(rows, 0) > 0, rows.std(0), 1.0)


def _as_floats(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.to(torch.float32)


def _labels(name: str, y: Any) -> tuple[Tensor, tuple[str, ...]]:
    values = _array(name, "y", y)
    if values.ndim != 1:
        raise refused(f"{name}: shape of y", values.shape, "(rows,)")
    if values.dtype.kind in "USO":
        for row in [row for row, value in enumerate(values) if not isinstance(value, str | bytes)][:1]:
            raise refused(f"{name}: row {row}: label", values[row], "names, or whole numbers from 0")
        return encode(name, "label", values)
    return torch.from_numpy(whole_numbers(name, values, ", or names (target = 'number' takes measures)")), ()


def whole_numbers(name: str, labels: np.ndarray, hint: str = "") -> np.ndarray:
    """Return labels as int64; raise for anything but whole numbers from 0, with a hint of what else would do.

    >>> whole_numbers("toy", np.array([0.0, 2.0]))
    array([0, 2])
    """
    if labels.dtype.kind not in "biuf":
        raise refused(f"{name}: type of labels", str(labels.dtype), f"whole numbers from 0{hint}")
    wide = labels.astype(np.float64) if labels.dtype.kind == "f" else labels
    right = wide >= 0
    if labels.dtype.itemsize == 8 or labels.dtype.kind == "f":
        right &= wide <= 2**53
    if labels.dtype.kind == "f":
        right &= wide == np.floor(wide)
    wrong = np.flatnonzero(~right)
    if len(wrong):
        raise refused(f"{name}: row {int(wrong[0])}: label", labels[wrong[0]].item(), f"whole numbers from 0{hint}")
    return labels.astype(np.int64)


def classes_of(name: str, labels: np.ndarray) -> int:
    """Count the classes of labels that are numbers: up to the largest, of which few may have no rows.

    >>> classes_of("toy", np.array([0, 2, 2]))
    3
    """
    if not len(labels):
        return 0
    row = int(labels.argmax())
    check_filled(f"{name}: row {row}", int(labels[row]), len(labels))
    return int(labels[row]) + 1


def check_filled(where: str, label: int, rows: int, cure: str = "names") -> None:
    """Raise for a label that makes many more classes than there are rows."""
    most = max(SPARSE_CLASSES, rows)
    if label >= most:
        but = f"{rows} rows are too few for so many classes"
        raise refused(f"{where}: label", label, f"0 to {most - 1}, or {cure}", but)


def encode(name: str, column: str, values: Any) -> tuple[Tensor, tuple[str, ...]]:
    """Return a number 0..n-1 for each value by the sorted order of distinct values, and the name of each number.

    Args:
        name: name of the rows, for messages.
        column: name of the column, for messages.
        values: numbers or names.

    >>> encode("toy", "client", ["b", "a", "b"])
    (tensor([1, 0, 1]), ('a', 'b'))
    """
    array = _array(name, column, values)
    if array.dtype.kind in "fcO":
        for row, value in enumerate(array.ravel().tolist()):
            if value is None or value != value:
                raise refused(f"{name}: row {row}: {column}", value, "a number or a name")
    if array.dtype.kind in "OSU":  # sorting the names there are, and not those of all rows, is much faster
        with reading(f"{name}: {column}", "names"):
            texts = [value.decode() if isinstance(value, bytes) else str(value) for value in array.ravel().tolist()]
        place = {text: at for at, text in enumerate(sorted(set(texts)))}
        names, numbers = np.array([*place], object), np.array([place[text] for text in texts])
    else:
        names, numbers = np.unique(array, return_inverse=True)
    # Half of a character of two is none that could be written to a record.
    written = tuple(str(name).encode(errors="replace").decode() for name in names)
    return torch.from_numpy(numbers.reshape(-1).astype(np.int64)), written


def _array(name: str, column: str, values: Any) -> np.ndarray:
    """Return an array; texts are objects, because the longest one would decide the size of all."""
    if isinstance(values, list) and {*map(type, values)} == {str}:
        return np.array(values, object)
    try:
        return values.numpy() if isinstance(values, Tensor) else np.asarray(values)
    except (RuntimeError, TypeError, ValueError) as error:
        raise FedtideError(f"{name}: {column}: not an array ({error})") from None


def _tensor(name: str, column: str, values: Any) -> Tensor:
    try:
        # What cannot be written to is copied, as torch wants it.
        array = values if isinstance(values, Tensor) else np.require(np.ascontiguousarray(values), requirements="W")
        tensor = torch.as_tensor(array)
    except (TypeError, ValueError) as error:
        hint = "for a data set use ft.data.stack(dataset)"
        raise FedtideError(f"{name}: {column}: not an array of numbers ({error}); {hint}") from None
    if tensor.is_complex():
        raise refused(f"{name}: type of {column}", str(tensor.dtype), "real numbers")
    if not tensor.dim():
        raise refused(f"{name}: shape of {column}", (), "(rows, ...)")
    return tensor


def _times(name: str, column: str, values: Any) -> Tensor:
    """Return times as seconds; dates count from 1970."""
    times = _array(name, column, values)
    number = times.dtype.kind in "biuf" and bool(np.isfinite(times).all())
    if times.ndim == 1 and (number or times.dtype.kind in "MOU"):
        times = seconds_of(times, lambda row: f"{name}: row {row}")
    return _tensor(name, column, times).double()


def _mask(name: str, column: str, values: Any) -> Tensor:
    mask = _tensor(name, column, values)
    wrong = ((mask != 0) & (mask != 1)).nonzero()
    if len(wrong):
        raise refused(f"{name}: row {int(wrong[0, 0])}: {column}", mask[tuple(wrong[0])].item(), "true, false")
    return mask.bool()
