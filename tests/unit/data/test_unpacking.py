"""Packed files are unpacked as they are read, and no further than honest data go."""

import bz2
import gzip
import io
import json
import lzma
import tarfile

import numpy as np
import pytest

from fedtide.core.errors import FedtideError
from fedtide.data.sources import CSV, NPZ, Images, Text, files

PACK = {"gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress}


@pytest.fixture
def small(monkeypatch):
    """A bound of a hundred thousand bytes in place of a gibibyte, so that tests need no gibibytes."""
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
    assert said.endswith("allowed: at most 100,000, or 200 times the size of the file, which no honest data need")


def test_arrays_that_unpack_to_much_are_refused_before_they_are_read(tmp_path, small):
    path = tmp_path / "data.npz"
    path.write_bytes(npz(np.zeros((100, 10_000))))
    with pytest.raises(FedtideError, match="unpacked bytes: found 8001"):
        NPZ(str(path)).load(None, 0)


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
