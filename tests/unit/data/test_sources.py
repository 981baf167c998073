"""Sources that are drawn, written in Python, bundled, packed or put together, and where files are looked for."""

import bz2
import gzip
import io
import json
import lzma
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace

import numpy as np
import pyarrow as arrow
import pytest
import torch
from pyarrow import parquet
from pydantic import TypeAdapter, ValidationError

from fedtide.core.errors import FedtideError
from fedtide.data.rows import Rows
from fedtide.data.sources import (
    CIFAR,
    CSV,
    IDX,
    NPZ,
    DayNightCharacters,
    Domains,
    Gaussians,
    Images,
    Python,
    Source,
    Text,
    files,
)
from fedtide.data.sources.arrays import from_arrays
from fedtide.runs.export import read_features

# -- files ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """An empty current folder, and no data directory in the environment."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.delenv("FEDTIDE_DATA", raising=False)
    return tmp_path


def one_row(path, label: int) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"a,label\n1,{label}\n")


@pytest.mark.parametrize("source", [IDX("gone"), CIFAR("gone"), NPZ("gone.npz"), CSV("gone.csv")])
def test_a_missing_file_is_one_line_that_says_where_it_was_looked_for(elsewhere, source, monkeypatch):
    monkeypatch.setenv("FEDTIDE_DATA", str(elsewhere / "by-environment"))
    with pytest.raises(FedtideError, match="no such file or folder") as caught:
        source.load(elsewhere / "by-setting", 0)
    line = str(caught.value)
    for place in ("by-setting", "by-environment"):
        assert str(elsewhere / place / source.path) in line
    assert "set data.directory or FEDTIDE_DATA" in line
    with pytest.raises(FedtideError, match=f"no such file or folder: {elsewhere}/gone$"):  # no folder changes that
        replace(source, path=str(elsewhere / "gone")).load(elsewhere / "by-setting", 0)


def test_a_misspelt_file_is_offered_as_it_is_spelled(tmp_path):
    one_row(tmp_path / "rows.csv", 0)
    with pytest.raises(FedtideError, match=f"no such file or folder: .*; did you mean '{tmp_path}/rows.csv'"):
        CSV("rosw.csv").load(tmp_path, 0)


def test_the_data_directory_comes_before_the_environment_and_the_current_folder(elsewhere, monkeypatch):
    monkeypatch.setenv("FEDTIDE_DATA", str(elsewhere / "b"))
    for label, folder in ((2, elsewhere / "here"), (1, elsewhere / "b"), (0, elsewhere / "a")):
        one_row(folder / "data.csv", label)
        assert CSV("data.csv").load(elsewhere / "a", 0).y.tolist() == [label]


def test_a_folder_called_in_the_environment_is_honored(elsewhere, monkeypatch):
    one_row(elsewhere / "b" / "data.csv", 1)
    with pytest.raises(FedtideError, match="FEDTIDE_DATA"):
        CSV("data.csv").load(None, 0)
    monkeypatch.setenv("FEDTIDE_DATA", str(elsewhere / "b"))
    assert CSV("data.csv").load(None, 0).y.tolist() == [1]


# -- arrays and functions ---------------------------------------------------------------------------------------------

MODULE = """
import numpy as np
import torch
from fedtide.data.rows import Rows

X = np.arange(12.0).reshape(4, 3)

def rows(): return Rows("mine", torch.zeros(2, 3), torch.tensor([0, 1]), 2)
def pair(): return X, [0, 1, 1, 0]
def mapping(n=4): return {"x": X[:n], "y": ["b", "a", "a", "b"][:n], "client": [7, 7, 9, 9][:n]}
def tensors(): return torch.ones(2, 3), torch.tensor([0, 1])
def misspelt(): return {"x": X, "y": [0, 1, 1, 0], "clients": [7, 7, 9, 9]}
def unlabeled(): return {"x": X}
def short(): return X, [0, 1]
def words(): return [["a"], ["b"]], [0, 1]
def number(): return 5
"""


@pytest.fixture
def mine(elsewhere, monkeypatch):
    """A module of the user's own, in the current folder."""
    (elsewhere / "here" / "my_rows_for_tests.py").write_text(MODULE)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield lambda name, **options: Python(f"my_rows_for_tests:{name}", options).load(None, 0)
    sys.modules.pop("my_rows_for_tests", None)


def test_a_function_may_return_rows_a_mapping_or_a_pair(mine):
    assert mine("rows").name == "mine"
    assert mine("pair").y.tolist() == [0, 1, 1, 0]
    assert mine("tensors").x.tolist() == [[1.0] * 3] * 2
    rows = mine("mapping")
    assert (rows.y.tolist(), rows.classes) == ([1, 0, 0, 1], 2)
    assert (rows.client.tolist(), rows.client_names) == ([0, 0, 1, 1], ("7", "9"))


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("misspelt", "my_rows_for_tests:misspelt: found 'clients', did you mean 'client'"),
        ("unlabeled", "my_rows_for_tests:unlabeled: .*y"),
        ("short", "my_rows_for_tests:short: rows of y: found 2, allowed: 4, as in x"),
        ("words", "my_rows_for_tests:words: x: not an array of numbers"),
        ("number", r"my_rows_for_tests:number: found .*, allowed: a function that returns Rows, such as .*, a mapping"),
        ("absent", "data.source.function: cannot import 'my_rows_for_tests:absent'"),
    ],
)
def test_a_function_that_returns_something_else_is_one_line(mine, name, line):
    with pytest.raises(FedtideError, match=line):
        mine(name)


CATS = ["cat", "dog", "cat"]


@pytest.mark.parametrize(
    ("y", "numbers"),
    [
        *((y, [0, 1, 0]) for y in (CATS, np.array(CATS, dtype=object), np.array(CATS))),
        *((y, [0, 2, 1]) for y in ([0, 2, 1], [0.0, 2.0, 1.0], torch.tensor([0, 2, 1]), np.array([0, 2, 1], np.uint8))),
    ],
)
def test_labels_may_be_names_or_whole_numbers_of_any_type(y, numbers):
    rows = from_arrays("toy", np.zeros((3, 2)), y)
    assert (rows.y.tolist(), rows.y.dtype, rows.classes) == (numbers, torch.int64, max(numbers) + 1)


def test_names_may_be_bytes():
    rows = from_arrays("toy", np.zeros((2, 1)), [0, 1], client=np.array(["ä".encode(), b"b"]))
    assert rows.client_names == ("b", "ä")
    with pytest.raises(FedtideError, match="client"):
        from_arrays("toy", np.zeros((2, 1)), [0, 1], client=np.array([b"\xff", b"b"]))


@pytest.mark.parametrize("column", ["x", "y", "time", "held_out"])
@pytest.mark.parametrize("kind", ["V4", "m8[s]", "c16"])
def test_a_column_of_a_type_that_nothing_reads_is_named(column, kind):
    columns = {"x": np.zeros((2, 1)), "y": [0, 1], column: np.zeros(2, kind)}
    with pytest.raises(FedtideError, match=f"toy: .*{column}"):
        from_arrays("toy", **columns)


# -- Gaussians --------------------------------------------------------------------------------------------------------


def test_gaussians_follow_their_seed():
    once, again, other = (Gaussians(samples=40).load(None, seed) for seed in (3, 3, 4))
    assert torch.equal(once.x, again.x)
    assert torch.equal(once.y, again.y)
    assert not torch.equal(once.x, other.x)


@pytest.mark.parametrize(
    ("domains", "names"), [(1, ("domain 0",)), (2, ("day", "night")), (3, ("domain 0", "domain 1", "domain 2"))]
)
def test_gaussians_have_the_sizes_that_are_asked_for(domains, names):
    rows = Gaussians(samples=30, test_samples=12, classes=3, dims=5, domains=domains).load(None, 0)
    assert rows.domain_names == names
    assert rows.x.shape == (42 * domains, 5)
    for domain in range(domains):
        for held_out, n in ((False, 10), (True, 4)):
            mine = (rows.domain == domain) & (rows.held_out == held_out)
            assert torch.bincount(rows.y[mine]).tolist() == [n] * 3


def test_gaussian_centers_spread_as_they_are_told():
    rows = Gaussians(samples=400, classes=200, dims=50, domains=2, separation=2.0, offset=0.0, noise=1e-3).load(None, 0)
    assert abs(float(rows.x[rows.domain == 0].std()) - 2.0) < 0.1
    shifted = Gaussians(samples=400, dims=2000, domains=2, separation=0.0, offset=3.0, noise=1e-3).load(None, 0)
    assert abs(float(shifted.x[0].std()) - 3.0) < 0.2


# -- bundled pictures -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared_characters() -> Rows:
    return DayNightCharacters().load(None, 0)


def test_bundled_digits_and_letters_share_ten_labels(shared_characters):
    rows = shared_characters
    assert (rows.x.dtype, rows.shape, rows.classes) == (torch.uint8, (1, 28, 28), 10)
    assert rows.domain_names == ("day", "night")
    for domain in (0, 1):
        for held_out, n in ((False, 600), (True, 100)):
            mine = (rows.domain == domain) & (rows.held_out == held_out)
            assert torch.bincount(rows.y[mine]).tolist() == [n] * 10


def test_bundled_digits_and_letters_have_labels_of_their_own(shared_characters):
    rows = DayNightCharacters("disjoint").load(None, 0)
    assert (len(rows), rows.classes, rows.domain_names) == (14_280, 36, ("day", "night"))
    assert torch.equal(rows.domain, (rows.y >= 10).long())
    for held_out, digits, letters in ((False, 600, 240), (True, 100, 40)):
        assert torch.bincount(rows.y[rows.held_out == held_out]).tolist() == [digits] * 10 + [letters] * 26
    digits = rows.x[rows.domain == 0]
    assert torch.equal(digits, shared_characters.x[shared_characters.domain == 0])


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [
    {"kind": "domains", "names": ["a"], "sources": ["gaussians"]}, {"kind": "gaussians", "samples": 0},
    {"kind": "domains", "names": ["a", "b"], "sources": ["gaussians", {"kind": "domains"}]},
    {"kind": "cifar", "path": "here", "classes": 20}, {"kind": "npz", "path": "here", "names": {"label": "y"}},
    {"kind": "csv"}, {"kind": "mnist"},
], ids=str)  # fmt: skip
def test_settings_out_of_range_are_refused(value):
    with pytest.raises(ValidationError):
        TypeAdapter(Source).validate_python(value)


def two(labels, **night) -> Rows:
    day = Gaussians(samples=9, test_samples=3, classes=3, domains=1)
    return Domains(
        ("sun", "moon"), (day, Gaussians(**{"samples": 8, "classes": 4, "domains": 1, **night})), labels
    ).load(None, 0)


def test_domains_are_the_sources_one_after_the_other():
    rows = two("shared")
    assert (rows.domain_names, rows.domain.tolist()) == (("sun", "moon"), [0] * 12 + [1] * 8)
    assert (len(rows), rows.shape) == (20, (8,))
    assert rows.held_out.tolist() == [False] * 9 + [True] * 3 + [False] * 8


def test_shared_labels_stay_and_disjoint_labels_follow_one_another():
    shared, disjoint = two("shared"), two("disjoint")
    assert (shared.classes, disjoint.classes) == (4, 7)
    assert sorted(set(shared.y[shared.domain == 1].tolist())) == [0, 1, 2, 3]
    assert sorted(set(disjoint.y[disjoint.domain == 1].tolist())) == [3, 4, 5, 6]
    assert torch.equal(shared.y[:12], disjoint.y[:12])


def words(*labels: str) -> Rows:
    sizes = (3, 4, 2, 5)[: len(labels)]
    sources = tuple(Gaussians(samples=4 * size, classes=size, domains=1) for size in sizes)
    return Domains(tuple("abcd"[: len(labels)]), sources, labels).load(None, 0)


@pytest.mark.parametrize(
    ("labels", "first", "classes"),
    [
        (("x", "x", "y"), (0, 0, 4), 6),
        (("x", "y", "x"), (0, 3, 0), 7),
        (("x", "y", "x", "y"), (0, 3, 0, 3), 8),
        (("x", "y", "z", "x"), (0, 5, 9, 0), 11),
        (("disjoint", "shared"), (0, 3), 7),
        (("x", "x", "x"), (0, 0, 0), 4),
    ],
)
def test_sources_with_the_same_word_share_their_labels(labels, first, classes):
    rows = words(*labels)
    assert rows.classes == classes
    assert tuple(int(rows.y[rows.domain == k].min()) for k in range(len(labels))) == first
    assert [int(rows.y[rows.domain == k].max()) - first[k] + 1 for k in range(len(labels))] == [3, 4, 2, 5][
        : len(labels)
    ]


@pytest.mark.parametrize(
    ("labels", "line"),
    [
        (("x",), "found 1 labels, allowed: a word for each of 2 sources"),
        (("x", "y", "z"), "found 3 labels, allowed: a word for each of 2 sources"),
        ("both", "found 'both', allowed: 'disjoint', 'shared', or a list of a word for each source"),
        ((1, 2), "found .1, 2., allowed: 'disjoint'"),
        (3, "found 3, allowed: 'disjoint'"),
    ],
)
def test_labels_that_cannot_be_are_one_line(labels, line):
    with pytest.raises(FedtideError, match=line):
        two(labels)


@pytest.mark.parametrize(("labels", "classes"), [("shared", (10, 10)), ("disjoint", (10, 26))])
def test_one_domain_of_the_characters_is_the_same_rows_as_of_both(labels, classes):
    both = DayNightCharacters(labels).load(None, 0)
    for k, (name, count) in enumerate(zip(("day", "night"), classes, strict=True)):
        one, same = DayNightCharacters(labels, name).load(None, 0), both.pick(both.domain == k)
        assert (one.domain, one.domain_names, one.classes) == (None, ("all",), count)
        assert torch.equal(one.x, same.x)
        assert torch.equal(one.held_out, same.held_out)
        assert torch.equal(one.y, same.y - (10 if k and labels == "disjoint" else 0))
        assert one.y.unique().tolist() == list(range(count))


def test_domains_of_other_shapes_are_one_line():
    with pytest.raises(FedtideError, match=r"shapes of rows: found .\(5,\), \(8,\)., allowed: a single one"):
        two("shared", dims=5)


def test_domains_of_pictures_and_numbers_keep_their_scale(tmp_path):
    # uint8 pictures are read as 0..1; beside float pictures they must not become 0..255.
    for name, x in (("bytes", np.full((2, 1, 3, 3), 255, np.uint8)), ("floats", np.ones((2, 1, 3, 3), np.float32))):
        np.savez(tmp_path / f"{name}.npz", x=x, y=[0, 1])
    rows = Domains(("day", "night"), (NPZ("bytes.npz"), NPZ("floats.npz"))).load(tmp_path, 0)
    assert rows.x.float().mean((1, 2, 3)).tolist() == [1.0] * 4


def test_domains_of_one_source_with_the_same_settings_are_other_rows():
    plain = Gaussians(samples=10, domains=1)
    rows = Domains(("day", "night"), (plain, plain)).load(None, 0)
    assert not torch.equal(rows.x[:10], rows.x[10:])


PACK = {"gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress}


@pytest.fixture
def small(monkeypatch):
    """A bound of a hundred thousand bytes in place of 256 MiB, so that tests need no such files."""
    monkeypatch.setattr(files, "UNPACKED", 100_000)


def archive(members: dict[str, bytes]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return made.getvalue()


def npz(x: np.ndarray) -> bytes:
    made = io.BytesIO()
    np.savez_compressed(made, x=x, y=np.arange(len(x)) % 2)
    return made.getvalue()


BOMBS = {
    "rows": (b"label,x\n" + b"0,0.0\n" * 200_000, lambda path: CSV(path)),
    "one endless cell": (b"label,x\n" + b"0" * 1_000_000, lambda path: CSV(path)),
    "one endless line": (b'{"text": "' + b" " * 1_000_000, lambda path: Text((path,), client=())),
    "pictures": (archive({"a/1.png": bytes(1_000_000)}), lambda path: Images(path)),
    "no pictures": (archive({"a/readme": bytes(1_000_000)}), lambda path: Images(path)),
}


@pytest.mark.parametrize("name", BOMBS)
@pytest.mark.parametrize("kind", PACK)
def test_a_small_file_that_unpacks_to_much_is_refused(tmp_path, small, name, kind):
    content, source = BOMBS[name]
    path = tmp_path / "data.gz"
    path.write_bytes(PACK[kind](content))
    with pytest.raises(FedtideError) as error:
        source(str(path)).load(None, 0)
    said = str(error.value)
    assert said.startswith(f"{path}: unpacked bytes: found ")
    assert said.endswith("allowed: at most 100,000 or 200 times the size of the file; honest data need less")


def test_arrays_that_unpack_to_much_are_refused_before_they_are_read(tmp_path, small):
    path = tmp_path / "data.npz"
    path.write_bytes(npz(np.zeros((100, 10_000))))
    with pytest.raises(FedtideError, match="unpacked bytes: found 8001"):
        NPZ(str(path)).load(None, 0)


LIMITED = """
import json, resource, sys
from pathlib import Path
from fedtide.core.errors import FedtideError
from fedtide.data.sources import CIFAR, IDX, NPZ, Images
from fedtide.runs.export import read_features

READ = {
    "npz": lambda path: NPZ(path).load(None, 0),
    "features": lambda path: read_features(Path(path), (2,)),
    "idx": lambda path: IDX(path).load(None, 0),
    "cifar": lambda path: CIFAR(path).load(None, 0),
    "pictures": lambda path: Images(path).load(None, 0),
}
status = dict(line.split(":") for line in open("/proc/self/status"))
limit = int(status["VmSize"].split()[0]) * 1024 + 400 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
said = {}
for name, kind, path in json.load(sys.stdin):
    try:
        READ[kind](path)
    except FedtideError as error:
        said[name] = str(error)
print(json.dumps(said))
"""
"""Reads files in 400 MiB beside those of the libraries."""


def stored(**members: bytes) -> bytes:
    """A zip file with these arrays as they lie in it."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return made.getvalue()


def header(shape: tuple[int, ...], kind: str = "|i1") -> bytes:
    made = io.BytesIO()
    np.lib.format.write_array_header_1_0(made, {"descr": kind, "fortran_order": False, "shape": shape})
    return made.getvalue()


@pytest.mark.parametrize(
    "text", [b"{'descr': (", b"'''", b"(" * 200, b"-" * 9000, b"\xff", b"{'descr': '|i1', 'shape': (-3, -2)}"]
)
def test_arrays_with_a_damaged_header_are_one_line(tmp_path, text):
    start = b"\x93NUMPY\x01\x00" + (len(text) + 1).to_bytes(2, "little")
    (tmp_path / "a.npz").write_bytes(stored(x=start + text + b"\n", y=header((3,)) + bytes(3)))
    with pytest.raises(FedtideError, match=r"a\.npz: damaged or not an npz file"):
        NPZ(str(tmp_path / "a.npz")).load(None, 0)


def test_other_members_of_a_zip_file_are_left_alone(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((3, 2)), y=[0, 1, 1], about=np.array([{"a": 1}], dtype=object))
    with zipfile.ZipFile(tmp_path / "a.npz", "a") as archive:
        archive.writestr("readme.txt", "three rows")
    assert len(NPZ(str(tmp_path / "a.npz")).load(None, 0)) == 3


def test_no_small_file_takes_much_memory(tmp_path):
    """A process with little memory refuses each of them because of what is in it, and not for want of memory."""
    image = pytest.importorskip("PIL.Image")
    few = header((3, 2)) + bytes(6)
    many = 40_000_000
    arrays = {
        "bytes become floats": stored(
            x=header((many // 2, 2)) + bytes(many), y=header((many // 2,)) + bytes(many // 2)
        ),
        "labels of other rows": stored(x=few, y=header((many // 2,)) + bytes(many // 2)),
        "a lie about the shape": stored(x=header((10**12, 2)) + bytes(6), y=few),
        "values without bytes": stored(x=few, y=header((10**15,), "|S0")),
    }
    cases, contents = [], {f"{name}.npz": content for name, content in arrays.items()}
    cases += [(name, "npz", f"{name}.npz") for name in arrays]
    cases.append(("features", "features", "bytes become floats.npz"))
    cases.append(("another shape", "features", "wide.npz"))
    contents["wide.npz"] = stored(x=header((2, 20_000_000)) + bytes(40_000_000))
    pixels = 300_000_000
    contents["idx/train-images.gz"] = gzip.compress(
        bytes([0, 0, 8, 3, *(pixels // 784).to_bytes(4), 0, 0, 0, 28, 0, 0, 0, 28]) + bytes(pixels // 784 * 784)
    )
    contents["idx/train-labels.gz"] = gzip.compress(bytes([0, 0, 8, 1, 0, 0, 0, 1, 0]))
    cases.append(("idx", "idx", "idx"))
    contents["memo/data_batch_1"] = b"\x80\x02}r" + (2**31).to_bytes(4, "little") + b"."
    laughs = b"".join(b"](h%ch%ceq%c0" % (k, k, k + 1) for k in range(60))
    contents["laughs/data_batch_1"] = b"\x80\x02]q\x000" + laughs + b"}(C\x06labelsh\x3cC\x04datah\x3cu."
    contents["deep/data_batch_1"] = b"\x80\x02}K\x01" + b"\x85" * 1_000_000 + b"K\x01s."
    cases += [(name, "cifar", name) for name in ("memo", "laughs", "deep")]
    made = io.BytesIO()
    image.new("1", (9000, 9000)).save(made, "png")
    contents["pictures/a/1.png"] = contents["pictures/b/1.png"] = made.getvalue()
    cases.append(("pictures", "pictures", "pictures"))
    for name, content in contents.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        assert len(content) < 2_000_000
    lines = json.dumps([(name, kind, str(tmp_path / path)) for name, kind, path in cases])
    run = subprocess.run([sys.executable, "-c", LIMITED], input=lines, capture_output=True, text=True, check=False)
    assert not run.returncode, run.stderr
    said = json.loads(run.stdout)
    assert said.keys() == {name for name, _, _ in cases}
    for name in ("bytes become floats", "features", "idx", "pictures", "labels of other rows"):
        assert "unpacked bytes: found" in said[name] or "rows of y: found" in said[name]
    for name, line in said.items():
        assert not line.endswith("()"), (name, line)  # as of MemoryError
        assert "Unable to allocate" not in line, (name, line)


def test_a_parquet_file_that_unpacks_to_much_is_refused_before_it_is_read(tmp_path, small):
    path = tmp_path / "data.parquet"
    parquet.write_table(arrow.table({"x": np.zeros(1_000_000), "label": np.zeros(1_000_000)}), path)
    with pytest.raises(FedtideError, match="unpacked bytes: found 16000000, allowed"):
        CSV(str(path)).load(None, 0)


def test_a_sparse_picture_is_as_large_as_it_says(tmp_path, small):
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as tar:
        member = tarfile.TarInfo("a/1.png")
        member.pax_headers = {
            "GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "1000000000000",
            "GNU.sparse.name": "a/1.png",
        }  # fmt: skip
        member.size = 512
        tar.addfile(member, io.BytesIO(b"1\n0\n0\n".ljust(512, b"\0")))
    path = tmp_path / "pictures.tar"
    path.write_bytes(made.getvalue())
    assert path.stat().st_size < 20_000
    with pytest.raises(FedtideError, match="unpacked bytes: found 1000000000000, allowed"):
        Images(str(path)).load(None, 0)


@pytest.mark.parametrize("kind", [*PACK, "not packed"])
def test_honest_files_are_read_however_they_are_packed(tmp_path, kind):
    pack = PACK.get(kind, bytes)
    table, lines = tmp_path / "table.csv", tmp_path / "lines.jsonl"
    table.write_bytes(pack(b"label,x\n0,1.5\n1,2.5\n"))
    lines.write_bytes(pack(json.dumps({"text": "to be or not to be"}).encode()))
    assert CSV(str(table)).load(None, 0).x.tolist() == [[1.5], [2.5]]
    assert len(Text((str(lines),), client=()).load(None, 0)) == 1


def test_a_text_that_begins_like_a_packed_file_is_a_text(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("BZh9,label\n1.5,0\n2.5,1\n")
    assert CSV(str(path)).load(None, 0).x.tolist() == [[1.5], [2.5]]


def test_pictures_of_one_channel_may_come_without_it(tmp_path):
    np.savez(tmp_path / "rows.npz", x=np.arange(32, dtype=np.uint8).reshape(2, 4, 4))
    x = read_features(tmp_path / "rows.npz", (1, 4, 4))
    assert (x.shape, x.dtype, x[1, 0, 0].tolist()) == ((2, 1, 4, 4), torch.uint8, [16, 17, 18, 19])
