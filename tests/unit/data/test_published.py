"""IDX, CIFAR and LEAF files: data come back as written, and a damaged file is one line."""

import contextlib
import gzip
import hashlib
import json
import math
import pickle
import random
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedtide.core.errors import FedtideError
from fedtide.data.sources import CIFAR, IDX, LEAF
from fedtide.data.sources.published import PUBLISHED, TYPES, read_idx
from helpers.examples import examples
from helpers.image_files import idx_bytes


def pictures(n: int, side: int = 4) -> np.ndarray:
    return np.random.default_rng(n).integers(0, 256, (n, side, side), dtype=np.uint8)


def write_idx_folder(folder: Path, train: int = 12, test: int = 5, zipped: bool = True, first: int = 0) -> Path:
    """A folder like MNIST's, with labels first, first + 1, first + 2, first, ..."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, n in (("train", train), ("t10k", test)):
        if not n:
            continue
        labels = (np.arange(n) % 3 + first).astype(np.uint8)
        for what, array in (("images-idx3", pictures(n)), ("labels-idx1", labels)):
            data = idx_bytes(array)
            file = folder / f"{name}-{what}-ubyte{'.gz' if zipped else ''}"
            file.write_bytes(gzip.compress(data, mtime=0) if zipped else data)
    return folder


def load(folder: Path, **options):
    return IDX(folder.name, **options).load(folder.parent, 0)


# -- IDX --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zipped", [True, False], ids=["gz", "raw"])
def test_idx_files_come_back_as_written(tmp_path, zipped):
    rows = load(write_idx_folder(tmp_path / "toys", zipped=zipped))
    assert rows.x.dtype == torch.uint8
    assert np.array_equal(rows.x.numpy(), np.concatenate([pictures(12), pictures(5)])[:, None])
    assert rows.y.tolist() == [*(i % 3 for i in range(12)), *(i % 3 for i in range(5))]
    assert rows.held_out.tolist() == [False] * 12 + [True] * 5
    assert rows.classes == 3


def test_labels_that_count_from_one_are_counted_from_zero(tmp_path):
    rows = load(write_idx_folder(tmp_path / "emnist-letters", first=1))
    assert sorted(set(rows.y.tolist())) == [0, 1, 2]
    assert sorted(set(load(write_idx_folder(tmp_path / "halves", first=5)).y.tolist())) == [5, 6, 7]


def test_emnist_pictures_are_turned_upright(tmp_path):
    raw = np.concatenate([pictures(12), pictures(5)])
    for name, turned in (("emnist-letters", True), ("EMNIST", True), ("toys", False)):
        rows = load(write_idx_folder(tmp_path / name))
        assert np.array_equal(rows.x[:, 0].numpy(), raw.transpose(0, 2, 1) if turned else raw)


@examples(40)
@given(
    st.sampled_from(sorted(TYPES)),
    st.lists(st.integers(0, 4), min_size=1, max_size=4),
    st.booleans(),
    st.integers(0, 99),
)
def test_every_idx_type_and_shape_comes_back(tmp_path_factory, code, shape, zipped, seed):
    kind = np.dtype(TYPES[code]).newbyteorder("=")
    array = np.random.default_rng(seed).integers(0, 100, shape).astype(kind)
    path = tmp_path_factory.mktemp("idx") / "array"
    path.write_bytes(gzip.compress(idx_bytes(array)) if zipped else idx_bytes(array))
    back = read_idx(path)
    assert back.dtype == kind
    assert np.array_equal(back, array)


def test_a_zipped_idx_file_is_not_unpacked_beyond_its_header(tmp_path):
    header, zeros = idx_bytes(pictures(3))[:16], bytes(2**20)
    with gzip.open(tmp_path / "bomb", "wb") as file:
        file.write(header)
        for _ in range(64):
            file.write(zeros)
    tracemalloc.start()
    try:
        with pytest.raises(FedtideError, match="bytes: found 'others', allowed: 64, as its header announces"):
            read_idx(tmp_path / "bomb")
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def rewritten(folder: Path, name: str, array: np.ndarray) -> Path:
    """A folder with one file replaced."""
    folder = write_idx_folder(folder, test=0, zipped=False)
    (folder / f"train-{name}-ubyte").write_bytes(idx_bytes(array))
    return folder


def test_idx_files_that_are_no_pictures_or_no_labels_are_one_line(tmp_path):
    labels, nan = np.zeros(12, np.uint8), np.full(12, np.nan, np.float32)
    for number, (name, array, line) in enumerate([
        ("images-idx3", labels, r"images-idx3-ubyte: number of dimensions: found 1, allowed: 3, pictures"),
        ("labels-idx1", pictures(12), r"labels-idx1-ubyte: number of dimensions: found 3, allowed: 1, a label"),
        ("labels-idx1", nan, r"labels-idx1-ubyte: row 0: label: found nan, allowed: whole numbers from 0"),
        ("labels-idx1", labels.astype(np.int32) + 10**9, "row 0: label: found 1000000000, but 12 rows are too few"),
        ("images-idx3", pictures(12)[:, :0], r"shape of x: found \(12, 1, 0, 4\), allowed: one number or more"),
    ]):  # fmt: skip
        with pytest.raises(FedtideError, match=line):
            load(rewritten(tmp_path / str(number), name, array))


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"\0\0\x07\x01", "magic number: found .00000701., allowed: 0000tt0n"),
        (b"PNG\r", "magic number: found .504e470d."),
        (b"\0", "magic number: found .00."),
        (idx_bytes(pictures(3)) + b"\0\0", "bytes: found 66, allowed: 64, as its header announces"),
        (idx_bytes(pictures(3))[:-2], "bytes: found"),
    ],
)
def test_another_file_is_one_line(tmp_path, content, line):
    (tmp_path / "other").write_bytes(content)
    with pytest.raises(FedtideError, match=line):
        read_idx(tmp_path / "other")


def test_as_many_labels_as_pictures_are_needed(tmp_path):
    folder = write_idx_folder(tmp_path / "toys")
    (folder / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx_bytes(np.zeros(11, np.uint8))))
    with pytest.raises(FedtideError, match=r"train-labels-idx1-ubyte.gz: 11 labels for 12 pictures in train-images"):
        load(folder)


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (IDX("empty"), r"no IDX files called \*train\*images\*"),
        (CIFAR("empty"), r"no file called data_batch_\*.bin"),
        (CIFAR("empty", classes=100), "no file called train.bin"),
        (IDX("file"), "file: found a file, allowed: a folder, such as "),
        (CIFAR("file"), "file: found a file, allowed: a folder, such as "),
    ],
)
def test_a_folder_without_its_files_is_one_line(tmp_path, source, line):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(FedtideError, match=line):
        source.load(tmp_path, 0)


@pytest.mark.parametrize("name", ["mnist", "MNIST", "fashion-mnist"])
def test_a_file_that_is_not_the_published_one_is_one_line(tmp_path, name):
    folder = write_idx_folder(tmp_path / name)
    found = hashlib.md5((folder / "train-images-idx3-ubyte.gz").read_bytes(), usedforsecurity=False).hexdigest()
    published = PUBLISHED[f"{name.lower()}/train-images-idx3-ubyte.gz"]
    with pytest.raises(FedtideError, match=f"train-images-idx3-ubyte.gz: md5 {found}, published {published}"):
        load(folder)
    assert len(load(folder, verify=False)) == 17
    assert len(load(folder.rename(tmp_path / "mnist-like"))) == 17


# -- CIFAR ------------------------------------------------------------------------------------------------------------


def cifar_records(labels: list[int], coarse: int | None = None) -> tuple[bytes, np.ndarray]:
    x = np.random.default_rng(len(labels)).integers(0, 256, (len(labels), 3, 32, 32), dtype=np.uint8)
    first = b"" if coarse is None else bytes([coarse])
    return b"".join(first + bytes([label]) + picture.tobytes() for label, picture in zip(labels, x, strict=True)), x


def test_cifar_10_comes_back_as_written(tmp_path):
    parts = {"data_batch_1.bin": [3, 1, 4], "data_batch_2.first2.bin": [9, 0], "test_batch.bin": [5]}
    written = {name: cifar_records(labels) for name, labels in parts.items()}
    for name, (data, _) in written.items():
        (tmp_path / name).write_bytes(data)
    rows = CIFAR(str(tmp_path)).load(None, 0)
    assert rows.y.tolist() == [3, 1, 4, 9, 0, 5]
    assert rows.held_out.tolist() == [False] * 5 + [True]
    assert np.array_equal(rows.x.numpy(), np.concatenate([x for _, x in written.values()]))
    assert rows.classes == 10


def test_cifar_100_reads_the_fine_labels(tmp_path):
    data, x = cifar_records([99, 17], coarse=5)
    (tmp_path / "train.bin").write_bytes(data)
    rows = CIFAR(str(tmp_path), classes=100).load(None, 0)
    assert rows.y.tolist() == [99, 17]
    assert np.array_equal(rows.x.numpy(), x)
    assert rows.held_out is None
    assert rows.classes == 100


@pytest.mark.parametrize(
    ("classes", "names", "key"),
    [(10, ["data_batch_1", "data_batch_2", "test_batch"], b"labels"), (100, ["train", "test"], b"fine_labels")],
)
def test_cifar_for_python_comes_back_as_written(tmp_path, classes, names, key):
    """Two pictures in each file: those to train on come first, whose first label is the file's number."""
    x = np.random.default_rng(0).integers(0, 256, (2 * len(names), 3072), dtype=np.uint8)
    for k, name in enumerate(names):
        made = {b"batch_label": b"?", key: [k, 9], b"data": x[2 * k : 2 * k + 2], b"filenames": [b"a.png", b"b.png"]}
        (tmp_path / name).write_bytes(pickle.dumps(made, protocol=3))
    (tmp_path / "batches.meta").write_bytes(b"not looked at")
    rows = CIFAR(str(tmp_path), classes=classes).load(None, 0)
    assert np.array_equal(rows.x.numpy().reshape(-1, 3072), x)
    assert rows.y.tolist() == [label for k in range(len(names)) for label in (k, 9)]
    assert rows.held_out.tolist() == [False] * (2 * len(names) - 2) + [True] * 2


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({b"labels": [1], b"data": len}, "(it calls builtins.len)"),
        ({b"labels": [1], b"data": np.zeros((1, 3072))}, "(it has an array of 'f8')"),
        ({b"labels": [[1]], b"data": np.zeros((1, 3072), np.uint8)}, "(labels is no list of numbers)"),
        ({b"labels": [1], b"data": [1]}, "(labels (1,) and data list)"),
        ({b"labels": [1], b"data": np.zeros((1, 9), np.uint8)}, "(labels (1,) and data (1, 9))"),
        ({b"labels": [10], b"data": np.zeros((1, 3072), np.uint8)}, "label: found 10, allowed: 0 to 9"),
        ({b"fine_labels": [1]}, "damaged or not CIFAR for Python (b'labels')"),
    ],
)
def test_another_pickle_is_one_line_and_runs_nothing(tmp_path, content, said):
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps(content, protocol=3))
    with pytest.raises(FedtideError) as caught:
        CIFAR(str(tmp_path)).load(None, 0)
    assert said in str(caught.value)
    assert "data_batch_1" in str(caught.value)


class Built:
    """An array whose type has a state of its own, which a pickle gives to NumPy."""

    def __init__(self, *state: object) -> None:
        self.state = state

    def __reduce__(self):
        return np.zeros(0, np.uint8).__reduce__()[0], (np.ndarray, (0,), b"b"), (1, (1, 3072), Type(*self.state), *LAST)


class Type(Built):
    def __reduce__(self):
        return np.dtype, ("u1", False, True), *self.state


LAST = False, bytes(3072)
SOUND = 3, "|", None, None, None, -1, -1


@pytest.mark.parametrize("flags", [1, 2, 3, 8, 64, 127, 255])
def test_the_state_of_a_type_in_a_pickle_reaches_no_numpy(tmp_path, flags):
    made = pickle.dumps({b"labels": [1], b"data": Built((*SOUND, flags))}, protocol=3)
    (tmp_path / "data_batch_1").write_bytes(made)
    with pytest.raises(FedtideError, match="data_batch_1: damaged or not CIFAR for Python"):
        CIFAR(str(tmp_path)).load(None, 0)
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps({b"labels": [1], b"data": Built((*SOUND, 0))}, protocol=3))
    assert CIFAR(str(tmp_path)).load(None, 0).y.tolist() == [1]


class Made:
    """An object that is pickled as a call of a function and the state that it is given."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __reduce__(self) -> Any:
        return self.parts


RECONSTRUCT = np.zeros(0).__reduce__()[0]
PARTS = {
    "name": "u1", "flags": (False, True), "dtype": (3, "|", None, None, None, -1, -1, 0),
    "array": (1, (1, 3072), "type", False, bytes(3072)), "labels": [7],
}  # fmt: skip
ODD: list[Any] = [
    None, -1, 0, 1, 2**40, 127, "", "f8", "O", b"u1", (), (1,), (3072,), (-1, -3072), [], [object], {}, True, "<"
]  # fmt: skip


def made_pickle(name: Any, flags: Any, dtype: Any, array: Any, labels: Any) -> bytes:
    """A file of CIFAR for Python, of parts that no NumPy may have written."""
    kind = Made(np.dtype, (name, *flags), dtype)
    state = tuple(kind if part == "type" else part for part in array) if isinstance(array, tuple) else array
    data = Made(RECONSTRUCT, (np.ndarray, (0,), b"b"), state)
    return pickle.dumps({b"labels": labels, b"data": data}, protocol=3)


@pytest.mark.parametrize("seed", range(100))
def test_arrays_that_no_numpy_wrote_are_read_as_bytes_or_refused_in_a_line(tmp_path, seed):
    draw = random.Random(seed)
    parts = dict(PARTS)
    for _ in range(draw.randint(0, 2)):
        key = draw.choice([*parts])
        value: Any = parts[key]
        if isinstance(value, tuple | list) and value and draw.random() < 0.8:
            items = [*value]
            items[draw.randrange(len(items))] = draw.choice(ODD)
            parts[key] = type(value)(items[: draw.choice([len(items), len(items), draw.randint(0, 9)])])
        else:
            parts[key] = draw.choice(ODD) if key != "flags" else (draw.choice(ODD),)
    (tmp_path / "data_batch_1").write_bytes(made_pickle(**parts))
    with contextlib.suppress(FedtideError):
        rows = CIFAR(str(tmp_path)).load(None, 0)
        assert rows.x.dtype == torch.uint8
        assert rows.x.shape == (1, 3, 32, 32)
        assert int(rows.x.sum()) == 0


def test_a_cifar_label_out_of_range_names_the_row(tmp_path):
    (tmp_path / "data_batch_1.bin").write_bytes(cifar_records([1, 10])[0])
    with pytest.raises(FedtideError, match="row 1: label: found 10, allowed: 0 to 9"):
        CIFAR(str(tmp_path)).load(None, 0)


ANN, BOB = {"x": [[0.0, 0.5, 1.0, 0.25], [1.0, 1.0, 1.0, 1.0]], "y": [2, 0]}, {"x": [[0.0, 0.0, 0.5, 0.5]], "y": [1]}


def leaf(data: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The content of a file."""
    sizes = changes.pop("num_samples", None) or [len(user["y"]) for user in data.values()]
    return {"users": list(data), "num_samples": sizes, "user_data": data, **changes}


def write(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def load_leaf(path: Path, **options: Any):
    return LEAF(path.name, **options).load(path.parent, 0)


# -- what comes back ---------------------------------------------------------------------------------------------------


def test_a_file_comes_back_as_written(tmp_path):
    rows = load_leaf(write(tmp_path / "all.json", leaf({"ann": ANN, "bob": BOB})))
    assert rows.x.dtype == torch.float32
    assert rows.x.tolist() == [*ANN["x"], *BOB["x"]]
    assert rows.y.tolist() == [2, 0, 1]
    assert (rows.client.tolist(), rows.client_names) == ([0, 0, 1], ("ann", "bob"))
    assert (rows.classes, rows.held_out, rows.name) == (3, None, "all.json")


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("train.json", "test.json"),
        ("train/all_data_0.json", "test/all_data_0.json"),
        ("a_train_9.json", "a_test_9.json"),
    ],
)
def test_a_folder_has_a_part_to_train_on_and_one_to_test(tmp_path, train, test):
    write(tmp_path / "femnist" / train, leaf({"ann": ANN, "bob": BOB}))
    write(tmp_path / "femnist" / test, leaf({"bob": ANN, "cat": BOB}))
    rows = load_leaf(tmp_path / "femnist")
    assert rows.held_out.tolist() == [False] * 3 + [True] * 3
    assert (rows.client.tolist(), rows.client_names) == ([0, 0, 1, 1, 1, 2], ("ann", "bob", "cat"))


def test_files_called_test_in_a_folder_called_train_are_to_train_on(tmp_path):
    """As LEAF's names are: all_data_niid_05_keep_0_test_9.json lies in `test`, and a folder decides."""
    write(tmp_path / "set" / "train" / "contest.json", leaf({"ann": ANN}))
    assert load_leaf(tmp_path / "set").held_out is None


def test_rows_may_have_a_shape_and_classes_that_nobody_holds(tmp_path):
    path = write(tmp_path / "all.json", leaf({"ann": ANN}, hierarchies=["x"]))
    rows = load_leaf(path, shape=(1, 2, 2), classes=62)
    assert (rows.shape, rows.classes) == ((1, 2, 2), 62)
    assert rows.x[0].tolist() == [[[0.0, 0.5], [1.0, 0.25]]]


# -- what is wrong -----------------------------------------------------------------------------------------------------


def one_line(path: Path, **options: Any) -> str:
    with pytest.raises(FedtideError) as raised:
        load_leaf(path, **options)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ([1, 2], "no 'users'; allowed: a file of LEAF, with users, num_samples and user_data"),
        ({"users": [], "user_data": {}}, "no 'num_samples'"),
        ({"users": [], "num_samples": [], "user_data": []}, "no 'user_data'"),
        (leaf({"ann": ANN}, users=["ann", "bob"]), "number of num_samples: found 1, allowed: 2, the number of users"),
        (leaf({"ann": ANN}, users=["bob"]), "user 'bob': no lists x and y in user_data"),
        (leaf({"ann": ANN}, users=[["ann"]]), "users: found ['ann'], allowed: names"),
        (leaf({"ann": {"x": ANN["x"], "y": 1}}, num_samples=[1], users=["ann"]), "user 'ann': no lists x and y"),
        (leaf({"ann": ANN}, num_samples=[3]), "user 'ann': rows in x and y: found (2, 2), allowed: 3, as"),
        (leaf({"ann": {**ANN, "x": ANN["x"][:1]}}), "user 'ann': rows in x and y: found (1, 2), allowed: 2"),
        (leaf({"ann": {**ANN, "x": [[1.0], [1.0, 2.0]]}}), "user 'ann': allowed: in x lists of equally many numbers"),
        (leaf({"ann": {**ANN, "x": [1.0, 2.0]}}), "user 'ann': shapes of x and y: found ((2,), (2,)), allowed"),
        (leaf({"ann": {**ANN, "y": [[1], [2]]}}), "user 'ann': shapes of x and y: found ((2, 4), (2, 1)), allowed"),
        (leaf({"ann": {**ANN, "y": [0, 0.5]}}), "user 'ann': row 1: label: found 0.5, allowed: whole numbers from 0"),
        (leaf({"ann": {**ANN, "y": [0, 1e30]}}), "user 'ann': row 1: label: found 1e+30, allowed: whole numbers"),
        (leaf({"ann": {**ANN, "y": [0, 1_000_000]}}), "user 'ann', row 1: label: found 1000000, but 2 rows"),
        (leaf({"ann": {**ANN, "x": [[0.0] * 4, [math.nan] * 4]}}), "user 'ann', row 1: a feature is NaN or infinite"),
        (
            leaf({"ann": ANN, "bob": {"x": [[1.0]], "y": [0]}}),
            "user 'bob': number of features: found 1, allowed: 4, as in the first",
        ),
    ],
    ids=lambda v: v[:40] if isinstance(v, str) else "",
)
def test_a_damaged_file_is_one_line_that_names_the_user(tmp_path, content, line):
    path = write(tmp_path / "damaged.json", content)
    assert line in one_line(path)
    assert one_line(path).startswith(f"{path}: ")


def test_options_that_do_not_fit_are_one_line(tmp_path):
    path = write(tmp_path / "all.json", leaf({"ann": ANN}))
    line = f"{path}: user 'ann', row 0: label: found 2, allowed: 0 to 1 (data.source.classes)"
    assert one_line(path, classes=2) == line
    line = f"data.source.shape: found [1, 28, 28], allowed: 4 numbers, as in rows of {path}"
    assert one_line(path, shape=(1, 28, 28)) == line


def test_nothing_to_read_is_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    assert "no file called *.json to train on, here or in a folder called train" in one_line(tmp_path / "empty")
    write(tmp_path / "only" / "test.json", leaf({"ann": ANN}))
    assert "no file called *.json to train on" in one_line(tmp_path / "only")
    assert one_line(write(tmp_path / "none.json", leaf({}))) == f"{tmp_path / 'none.json'}: no rows"
    assert "no such file or folder" in one_line(tmp_path / "gone.json")
