"""Files of data sets as they were published: IDX, CIFAR, LEAF, gas sensors."""

import gzip
import hashlib
import io
import json
import math
import os
import pickle
import pickletools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from fedtide.core.errors import FedtideError, refused, shown, unknown
from fedtide.core.files import open_file
from fedtide.data.ragged import rank_rows
from fedtide.data.rows import Rows, make_rows
from fedtide.data.sources.arrays import check_filled, classes_of, from_arrays, standardize, whole_numbers
from fedtide.data.sources.cells import is_number
from fedtide.data.sources.files import Loading, check_unpacked, find, folder_of, reading
from fedtide.fields.types import ClassCount, Count, Flag, ingredient

TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}

DEFLATE = 1032
"""Bytes that one byte of a gzip file unpacks to, at most."""

PUBLISHED = {
    "mnist/train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "mnist/train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "mnist/t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "mnist/t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
    "fashion-mnist/train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "fashion-mnist/train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "fashion-mnist/t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "fashion-mnist/t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}
"""Published md5 sums, by folder and file name."""


@ingredient
class IDX(Loading):
    """A folder with IDX files `*train*images*`, `*train*labels*` and, for its own test set, `*t10k*` or `*test*`.

    Images of a folder with "emnist" in its name are turned upright, and letters of EMNIST are counted from 0.

    Args:
        path: the folder, below the data directory or absolute.
        verify: compare with the published checksum if the folder has the name of a published data set.
        channels: 1, or 3 for three equal copies of each picture, which a shift may color.
    """

    path: str
    verify: Flag = True
    channels: Literal[1, 3] = 1
    kind: Literal["idx"] = "idx"

    def load(self, directory: Path | None, seed: int) -> Rows:
        """Read the files."""
        folder = folder_of(self.path, directory)
        train = self._part(folder, ("train",))
        if train is None:
            raise FedtideError(f"{folder}: no IDX files called *train*images* and *train*labels*")
        test = self._part(folder, ("t10k", "test"))
        if test is not None and train[0].shape[1:] != test[0].shape[1:]:
            raise FedtideError(f"{folder}: pictures of {train[0].shape[1:]} to train and {test[0].shape[1:]} to test")
        x, y = train if test is None else (np.concatenate([a, b]) for a, b in zip(train, test, strict=True))
        if not len(y):
            raise FedtideError(f"{folder}: no rows")
        if "emnist" in folder.name.lower():
            x = np.ascontiguousarray(x.transpose(0, 2, 1))
        letters = int("letters" in folder.name.lower() and y.min() == 1)
        with np.errstate(over="ignore"):  # numbers that are too large become infinite, and are refused
            pictures = (x if x.dtype == np.uint8 else x.astype(np.float32))[:, None]
        pictures = np.repeat(pictures, self.channels, axis=1)
        classes, held_out = classes_of(str(folder), y - letters), np.arange(len(y)) >= len(train[1])
        return make_rows(folder.name, classes, x=pictures, y=y - letters, held_out=held_out)

    def _part(self, folder: Path, names: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray] | None:
        named = sorted(path for path in folder.iterdir() if any(name in path.name for name in names))
        both = [next((path for path in named if what in path.name), None) for what in ("images", "labels")]
        files = [path for path in both if path is not None]
        if len(files) < 2:
            return None
        for path in files if self.verify else ():
            check_published(path)
        x, y = read_idx(files[0]), read_idx(files[1])
        for path, array, dimensions in ((files[0], x, 3), (files[1], y, 1)):
            if array.ndim != dimensions:
                allowed = "3, pictures (rows, height, width)" if dimensions == 3 else "1, a label for each picture"
                raise refused(f"{path}: number of dimensions", array.ndim, allowed)
        if len(x) != len(y):
            raise FedtideError(f"{files[1]}: {len(y)} labels for {len(x)} pictures in {files[0].name}")
        return x, whole_numbers(str(files[1]), y)


def check_published(path: Path) -> None:
    """Compare a file with its published md5 sum, if there is one for its folder and name."""
    wanted = PUBLISHED.get(f"{path.parent.name.lower()}/{path.name}")
    if wanted is None:
        return
    with open_file(path) as file:
        checksum = hashlib.file_digest(file, partial(hashlib.md5, usedforsecurity=False)).hexdigest()
    if checksum != wanted:
        cure = "download it again, or set data.source.verify = false"
        raise FedtideError(f"{path}: md5 {checksum}, published {wanted}: damaged or not the published file; {cure}")


def read_idx(path: Path) -> np.ndarray:
    """Read one IDX file as an array, and never unpack more of it than its header announces.

    Raises:
        FedtideError: its magic number, size or gzip checksum is wrong.
    """
    with reading(path, "a whole IDX file"), open_file(path) as opened:
        packed = opened.read(2) == b"\x1f\x8b"
        size = os.fstat(opened.fileno()).st_size
        opened.seek(0)
        file = gzip.GzipFile(fileobj=opened) if packed else opened
        magic = file.read(4)
        if len(magic) < 4 or magic[:2] != b"\x00\x00" or magic[2] not in TYPES:
            raise refused(f"{path}: magic number", magic.hex(), "0000tt0n, as in an IDX file")
        sizes = file.read(4 * magic[3])
        shape = tuple(int.from_bytes(sizes[i : i + 4], "big") for i in range(0, len(sizes), 4))
        kind = np.dtype(TYPES[magic[2]])
        header, announced = 4 + 4 * magic[3], math.prod(shape) * kind.itemsize
        whole = len(sizes) == 4 * magic[3] and announced <= size * (DEFLATE if packed else 1)
        # Bytes of pictures stay bytes; labels and other numbers become wider.
        check_unpacked(path, math.prod(shape) * (1 if kind == np.uint8 and len(shape) > 1 else 8) if whole else 0)
        data = file.read(announced + 1) if whole else b""
    if not whole or len(data) != announced:
        unpacked = "others" if len(data) in (0, announced + 1) else header + len(data)
        raise refused(f"{path}: bytes", unpacked if packed else size, f"{header + announced}, as its header announces")
    values = np.frombuffer(data, kind)
    with reading(path, "an IDX file"):  # of more dimensions than an array has
        values = values.reshape(shape)
    return values.astype(values.dtype.newbyteorder("="), copy=True)


PIXELS = 3 * 32 * 32
FILES = {
    10: (("data_batch_*.bin", "test_batch*.bin"), ("data_batch_?", "test_batch")),
    100: (("train.bin", "test.bin"), ("train", "test")),
}
"""Names of the files to train on and to test on, by classes: of the binary version, and of that for Python."""


@ingredient
class CIFAR(Loading):
    """A folder with `data_batch_*.bin` and `test_batch*.bin` (CIFAR-10), or `train.bin` and `test.bin` (CIFAR-100).

    A record is one label byte (CIFAR-10) or two, coarse and fine (CIFAR-100), and 3,072 bytes: the red, green and blue
    planes. Files may hold fewer records than published. The version for Python, which torchvision unpacks
    (`cifar-10-batches-py`, `cifar-100-python`), has the same files without `.bin`. Arrays and lists are read from
    these, and no code is run.

    Args:
        path: the folder, below the data directory or absolute.
        classes: 10 for CIFAR-10, 100 for CIFAR-100.
    """

    path: str
    classes: Literal[10, 100] = 10
    kind: Literal["cifar"] = "cifar"

    def load(self, directory: Path | None, seed: int) -> Rows:
        """Read the files."""
        folder = folder_of(self.path, directory)
        versions = [[sorted(folder.glob(name)) for name in names] for names in FILES[self.classes]]
        readers: list[Callable[[Path], tuple[np.ndarray, np.ndarray]]] = [self._binary, self._pickled]
        readable = [(files, read) for files, read in zip(versions, readers, strict=True) if files[0]]
        if not readable:
            names = " or ".join(train for train, _ in FILES[self.classes])
            raise FedtideError(f"{folder}: no file called {names}")
        (train, test), read = readable[0]
        labels, pixels = zip(*map(read, [*train, *test]), strict=True)
        held_out = np.repeat([False] * len(train) + [True] * len(test), [*map(len, labels)])
        x, y = np.concatenate(pixels).reshape(-1, 3, 32, 32), np.concatenate(labels).astype(np.int64)
        return make_rows(folder.name, self.classes, x=x, y=y, held_out=held_out)

    def _binary(self, path: Path) -> tuple[np.ndarray, np.ndarray]:
        size = PIXELS + (1 if self.classes == 10 else 2)
        with open_file(path) as file:
            data = np.fromfile(file, dtype=np.uint8)
        if not len(data) or len(data) % size:
            raise refused(f"{path}: bytes", len(data), f"a multiple of {size}, the size of a record")
        records = data.reshape(-1, size)
        return records[:, self.classes // 100], records[:, -PIXELS:]

    def _pickled(self, path: Path) -> tuple[np.ndarray, np.ndarray]:
        key = b"labels" if self.classes == 10 else b"fine_labels"
        with reading(path, "CIFAR for Python", pickle.UnpicklingError, AttributeError), open_file(path) as file:
            data = file.read()
            _check_operations(data)
            content = _Reader(io.BytesIO(data), encoding="bytes").load()
            labels, pixels = content[key], content[b"data"]
            if not isinstance(labels, list) or not all(type(label) is int for label in labels):
                raise ValueError(f"{key.decode()} is no list of numbers")
            if not isinstance(pixels, _Bytes) or pixels.shape != (len(labels), PIXELS) or not labels:
                shape = pixels.shape if isinstance(pixels, _Bytes) else type(pixels).__name__
                raise ValueError(f"{key.decode()} ({len(labels)},) and data {shape}")
        if wrong := [label for label in labels if not 0 <= label < self.classes]:
            raise refused(f"{path}: label", wrong[0], f"0 to {self.classes - 1}")
        return np.array(labels), np.frombuffer(pixels.values, np.uint8).reshape(pixels.shape)


class _Type:
    """The type of an array of bytes, which is all that it can be."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        version, order, *others = state
        if version != 3 or order not in ("|", b"|") or others != [None, None, None, -1, -1, 0]:
            raise pickle.UnpicklingError("it has an array of another type than bytes")


class _Bytes:
    """An array of bytes."""

    shape: tuple[int, ...] = ()
    values = b""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        version, shape, kind, turned, values = state
        whole = type(shape) is tuple and all(type(size) is int and 0 <= size <= len(values) for size in shape)
        if version != 1 or type(kind) is not _Type or turned or type(values) is not bytes or not whole:
            raise pickle.UnpicklingError("it has no plain array of bytes")
        if math.prod(shape) != len(values):
            raise pickle.UnpicklingError(f"it has an array of shape {shape} with {len(values)} bytes")
        self.shape, self.values = shape, values


def _make_type(name: object, *_: object) -> _Type:
    if name not in (b"u1", "u1"):
        raise pickle.UnpicklingError(f"it has an array of {shown(name)}")
    return _Type()


KNOWN: dict[str, Any] = {"_reconstruct": lambda *_: _Bytes(), "ndarray": "ndarray", "dtype": _make_type}
"""What an array is unpickled with, in place of NumPy's functions of these names."""


class _Reader(pickle.Unpickler):
    """Reads what dicts, lists, texts, numbers and arrays of bytes are pickled to, and calls nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] != "numpy" or name not in KNOWN:
            raise pickle.UnpicklingError(f"it calls {module}.{name}")
        part = KNOWN[name]  # a function of its own each time, because a state may change it
        return (lambda *arguments: part(*arguments)) if callable(part) else part


STORES = {"PUT", "BINPUT", "LONG_BINPUT"}
"""Operations of a pickle that make room for a place and all before it."""
FLAT = {"MARK", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "MEMOIZE"}
"""Operations without a value that add no depth."""
DEPTH = 1000
"""Number of other operations without a value; Python does not survive tuples that are nested very deeply."""


def _check_operations(data: bytes) -> None:
    """Raise for a pickle whose few bytes would take much memory, or nest deeply."""
    depth = 0
    for count, (operation, value, _) in enumerate(pickletools.genops(data)):
        name = operation.name
        if name in STORES and isinstance(value, int) and value > count:
            raise pickle.UnpicklingError(f"it stores at place {value}")
        depth += value is None and name not in FLAT
        if depth > DEPTH:
            raise pickle.UnpicklingError("it is nested")


@ingredient
class LEAF(Loading):
    """JSON files as written by LEAF's scripts: `users`, `num_samples`, and `user_data` with `x` and `y` of each user.

    The path is one file, a folder with the folders `train` and `test`, or a folder with files. Files named `*test*` are
    then the test set. Users are the natural clients; a user in several files has the rows of all. Features are numbers,
    equally many in every row, such as the 784 of a FEMNIST image.

    Args:
        path: the file or folder, below the data directory or absolute.
        shape: shape of a row, such as `[1, 28, 28]` for FEMNIST; by default a row is a list.
        classes: number of classes, such as 62 for FEMNIST; by default the largest label plus 1.
    """

    path: str
    shape: tuple[Count, ...] | None = None
    classes: ClassCount | None = None
    kind: Literal["leaf"] = "leaf"

    def load(self, directory: Path | None, seed: int) -> Rows:
        """Read the files one by one."""
        path = find(self.path, directory)
        train, test = _files(path)
        x: list[np.ndarray] = []
        y: list[np.ndarray] = []
        owner: list[tuple[int, bool]] = []
        users: dict[str, int] = {}
        for file in [*train, *test]:
            for user, features, labels in _users(file):
                if features.shape[1:] != (x[0] if x else features).shape[1:]:
                    where = f"{file}: user '{user}': number of features"
                    raise refused(where, features.shape[1], f"{x[0].shape[1]}, as in the first row")
                for row in np.flatnonzero(labels >= (self.classes or math.inf))[:1]:
                    allowed = f"0 to {(self.classes or 0) - 1} (data.source.classes)"
                    raise refused(f"{file}: user '{user}', row {row}: label", int(labels[row]), allowed)
                x.append(features)
                y.append(labels)
                owner += [(users.setdefault(user, len(users)), file in test)] * len(labels)
        if not owner:
            raise FedtideError(f"{path}: no rows")
        labels, rows = np.concatenate(y), np.concatenate(x)
        shape = self.shape or rows.shape[1:]
        if math.prod(shape) != rows.shape[1]:
            raise refused("data.source.shape", list(shape), f"{rows.shape[1]} numbers, as in rows of {path}")
        if self.classes is None:
            most = int(labels.argmax())
            where = f"{path}: user '{list(users)[owner[most][0]]}', row {most - owner.index(owner[most])}"
            check_filled(where, int(labels[most]), len(labels), "data.source.classes")
        client, held_out = np.array(owner).T
        columns = {"client": client, "client_names": tuple(users), "held_out": held_out.astype(bool)}
        classes = self.classes or int(labels.max()) + 1
        return make_rows(path.name, classes, x=rows.reshape(len(rows), *shape), y=labels, **columns)


def _files(path: Path) -> tuple[list[Path], list[Path]]:
    """Return the training files and the test files."""
    if path.is_file():
        return [path], []
    if (path / "train").is_dir():
        train, test = (sorted((path / part).glob("*.json")) for part in ("train", "test"))
    else:
        files = sorted(path.glob("*.json"))
        test = [file for file in files if "test" in file.name]
        train = [file for file in files if file not in test]
    if not train:
        raise FedtideError(f"{path}: no file called *.json to train on, here or in a folder called train")
    return train, test


def _users(file: Path) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield the name, features (rows, features) and labels (rows,) of each user of a file."""
    with reading(file, "a JSON file"), open_file(file, "utf-8") as opened:
        content = json.load(opened)
    for key, kind in (("users", list), ("num_samples", list), ("user_data", dict)):
        if not isinstance(content, dict) or not isinstance(content.get(key), kind):
            raise FedtideError(f"{file}: no '{key}'; allowed: a file of LEAF, with users, num_samples and user_data")
    users, sizes, data = content["users"], content["num_samples"], content["user_data"]
    if len(users) != len(sizes):
        raise refused(f"{file}: number of num_samples", len(sizes), f"{len(users)}, the number of users")
    for user, size in zip(users, sizes, strict=True):
        if not isinstance(user, str):
            raise refused(f"{file}: users", user, "names")
        # Popped, so that Python numbers, which take much memory, are freed while they are read.
        features, labels = _arrays(f"{file}: user '{user}'", data.pop(user, None))
        if len(labels) != size or len(features) != size:
            where = f"{file}: user '{user}': rows in x and y"
            raise refused(where, (len(features), len(labels)), f"{size}, as num_samples says")
        if size:
            yield user, features, labels


def _arrays(where: str, rows: Any) -> tuple[np.ndarray, np.ndarray]:
    if not isinstance(rows, Mapping) or not isinstance(rows.get("x"), list) or not isinstance(rows.get("y"), list):
        raise FedtideError(f"{where}: no lists x and y in user_data")
    try:
        with np.errstate(over="ignore"):  # numbers that are too large become infinite, and are refused below
            x, y = np.array(rows["x"], dtype=np.float32), np.array(rows["y"], dtype=np.float64)
    except (ValueError, TypeError, OverflowError):
        raise FedtideError(f"{where}: allowed: in x lists of equally many numbers, in y numbers") from None
    if not rows["x"]:
        return x.reshape(0, 1), y.astype(np.int64)
    if x.ndim != 2 or y.ndim != 1:
        raise refused(f"{where}: shapes of x and y", (x.shape, y.shape), "(rows, features), (rows,)")
    for row in np.flatnonzero(~np.isfinite(x).all(1))[:1]:
        raise FedtideError(f"{where}, row {row}: a feature is NaN or infinite")
    return x, whole_numbers(where, y)


GASES = ("ethanol", "ethylene", "ammonia", "acetaldehyde", "acetone", "toluene")
"""Classes in the order of their published numbers 1 to 6."""
LABELS = {name: k for k, name in enumerate(GASES)} | {str(k): k - 1 for k in range(1, len(GASES) + 1)}
FEATURES = 128
PLACES = [f"{place}:" for place in range(1, FEATURES + 1)]
"""Which number a feature has, as published before its value."""


@ingredient
class GasSensors(Loading):
    """A folder with some or all of `batch1.dat`, `batch2.dat`, ...: Gas Sensor Array Drift of the UCI repository.

    A line is a sample. The published form is `gas;concentration 1:number 2:number ...`, in a later version without the
    concentration. Cells may also be separated by commas: `gas,concentration,number,...`. The gas is the label, by name
    or by a number from 1 to 6. The time of a sample is the number of its batch. The batches cover unequal spans of 36
    months.

    Args:
        path: the folder, below the data directory or absolute.
        scaled: standardize each feature by its mean and standard deviation in the first batch present; unscaled
            features differ by a factor of ten thousand.
    """

    path: str
    scaled: Flag = True
    kind: Literal["gas-sensors"] = "gas-sensors"

    def load(self, directory: Path | None, seed: int) -> Rows:
        """Read the batches in the folder, in order."""
        folder = folder_of(self.path, directory)
        files = {int(path.stem[5:]): path for path in folder.glob("batch*.dat") if path.stem[5:].isdecimal()}
        if not files:
            raise FedtideError(f"{folder}: no file called batch1.dat, batch2.dat, ...")
        batches = {number: _batch(files[number]) for number in sorted(files)}
        x = np.concatenate([x for x, _ in batches.values()])
        if self.scaled:
            x = standardize(x, next(iter(batches.values()))[0])
        y = np.concatenate([y for _, y in batches.values()])
        time = np.repeat(np.array(list(batches), np.float64), [len(y) for _, y in batches.values()])
        return replace(from_arrays(folder.name, x.astype(np.float32), y, time=time), classes=len(GASES))


def _batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return features and labels of one file."""
    with reading(path, "a text file"), open_file(path, "utf-8") as file:
        lines = file.read().splitlines()
    samples = [(f"{path}: row {row}", line) for row, line in enumerate(lines, start=1) if line.strip()]
    if not samples:
        raise FedtideError(f"{path}: no rows")
    gases, cells = zip(*(_sample(where, line) for where, line in samples), strict=True)
    texts = [cell for sample in cells for cell in sample]
    try:
        values = np.array(texts, np.float64)
    except ValueError:
        values = np.array([float(text) if is_number(text) else np.nan for text in texts])
    for wrong in np.flatnonzero(~np.isfinite(values))[:1].tolist():
        row, place = divmod(wrong, FEATURES)
        raise refused(f"{samples[row][0]}: feature {place + 1}", cells[row][place], "a finite number")
    return values.reshape(-1, FEATURES), np.array(gases)


def _sample(where: str, line: str) -> tuple[int, list[str]]:
    """Return the label and the cells of a line."""
    if "," in line:
        gas, _, *cells = line.split(",")
    else:
        first, *pairs = line.split()
        gas = first.partition(";")[0]
        cells = [pair.removeprefix(place) for place, pair in zip(PLACES, pairs, strict=False)] + pairs[FEATURES:]
    label = LABELS.get(gas.strip().lower())
    if label is None:
        raise unknown(f"{where}: gas", gas.strip(), [*GASES, f"1 to {len(GASES)}"])
    if len(cells) != FEATURES:
        raise refused(f"{where}: number of features", len(cells), f"{FEATURES}")
    return label, cells


@ingredient
class DayNightCharacters(Loading):
    """14,000 images of handwriting, 28 x 28: digits (domain "day") from MNIST, letters (domain "night") from EMNIST.

    Args:
        labels: "shared" gives letters A to J the labels 0-9 of the digits, so that one label has two meanings; there
            are 7,000 images of each domain. "disjoint" gives digits the labels 0-9 and letters A to Z 10-35, with
            7,000 digits and 280 images of each letter.
        domain: "day" or "night" gives only the rows of that domain, with letters labeled from 0, for use with other
            sources in "domains". The rows are equal to those in "both".
    """

    labels: Literal["shared", "disjoint"] = "shared"
    domain: Literal["both", "day", "night"] = "both"
    kind: Literal["day-night-characters"] = "day-night-characters"

    def load(self, directory: Path | None, seed: int) -> Rows:
        """Read the images."""
        both, number = self._both(), {"day": 0, "night": 1}.get(self.domain)
        if number is None or both.domain is None:
            return both
        one = both.pick(both.domain == number)
        y = one.y - one.y.min()
        return replace(one, y=y, classes=int(y.max()) + 1, domain=None, domain_names=("all",))

    def _both(self) -> Rows:
        with files("fedtide.data").joinpath("bundled/characters.npz").open("rb") as file, np.load(file) as arrays:
            x, label, held_out = (torch.from_numpy(arrays[name]) for name in ("images", "labels", "test"))
        label = label.long()
        domain = (label >= 10).long()
        rows = Rows(self.kind, x.unsqueeze(1), label, 36, domain, ("day", "night"), held_out=held_out)
        if self.labels == "shared":
            shared = rows.pick(label < 20)
            return replace(shared, y=shared.y % 10, classes=10)
        # As many of each letter: the rarest have 240 training and 40 test rows.
        place = torch.from_numpy(rank_rows((2 * label + held_out).numpy()))
        return rows.pick((domain == 0) | (place < torch.where(held_out, 40, 240)))
