"""Pictures in files by class: folders and archives, their order, the cache, and what is damaged."""

from __future__ import annotations

import io
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedtide.config import from_dict
from fedtide.core.errors import FedtideError
from fedtide.data.sources import Images
from fedtide.runs.digest import digest_of
from helpers.idx_files import idx_bytes
from helpers.images import count_decoded

Pixels = dict[str, np.ndarray]


def drawn(*names: str, side: tuple[int, int] = (6, 5)) -> Pixels:
    """Pictures (height, width, 3) by name; lossless as PNG."""
    draw = np.random.default_rng(len(names))
    return {name: draw.integers(0, 256, (*side, 3), dtype=np.uint8) for name in names}


def encoded(pixels: np.ndarray, ending: str = "png", mode: str = "RGB") -> bytes:
    held = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(held, {"png": "PNG", "jpg": "JPEG"}[ending])
    return held.getvalue()


def folder(root: Path, pixels: Pixels) -> Path:
    for name, picture in pixels.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(encoded(picture, name.rsplit(".", 1)[1]))
    return root


def archive(path: Path, pixels: Pixels, mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as tar:
        for name, picture in pixels.items():
            data = encoded(picture, name.rsplit(".", 1)[1])
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def load(path: Path, **options):
    return Images(path.name, **options).load(path.parent, 0)


def planes(*pixels: np.ndarray) -> np.ndarray:
    return np.stack([picture.transpose(2, 0, 1) for picture in pixels])


NAMES = ("train/dog/b.png", "train/cat/2.png", "train/cat/1.png", "test/dog/a.png", "test/cat/9.png", "train/dog/c.png")
SORTED = [
    "train/cat/1.png",
    "train/cat/2.png",
    "train/dog/b.png",
    "train/dog/c.png",
    "test/cat/9.png",
    "test/dog/a.png",
]


# -- what comes back ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["folder", "w", "w:gz", "w:bz2", "below"])
def test_pictures_come_back_by_class_and_name_training_rows_first(tmp_path, kind):
    pixels = drawn(*NAMES)
    if kind == "folder":
        path = folder(tmp_path / "pets", pixels)
        (path / "train" / "README.txt").write_text("not a picture")
    elif kind == "below":
        path = archive(tmp_path / "pets", {f"pets-main/{name}": p for name, p in pixels.items()})
    else:
        path = archive(tmp_path / "pets", pixels, kind)
    rows = load(path)
    assert rows.x.dtype == torch.uint8
    assert np.array_equal(rows.x.numpy(), planes(*(pixels[name] for name in SORTED)))
    assert rows.y.tolist() == [0, 0, 1, 1, 0, 1]
    assert rows.held_out.tolist() == [False] * 4 + [True] * 2
    assert (rows.classes, rows.shape, rows.name) == (2, (3, 6, 5), "pets")


def test_pictures_become_gray_or_colored(tmp_path):
    pixels = drawn("cat/1.png", "dog/1.png")
    path = folder(tmp_path / "pets", pixels)
    gray = load(path, channels=1)
    assert gray.shape == (1, 6, 5)
    expected = [np.asarray(Image.fromarray(p).convert("L")) for p in pixels.values()]
    assert np.array_equal(gray.x.numpy()[:, 0], np.stack(expected))
    (path / "cat" / "1.png").write_bytes(encoded(pixels["cat/1.png"], mode="L"))
    mixed = load(path)
    assert mixed.shape == (3, 6, 5)
    assert torch.equal(mixed.x[0, 0], mixed.x[0, 2])


# -- another order -----------------------------------------------------------------------------------------------------


def ordered(root: Path, train: list[int], test: list[int]) -> tuple[str, str]:
    for name, labels in (("train", train), ("test", test)):
        (root / f"{name}.idx").write_bytes(idx_bytes(np.array(labels, dtype=np.uint8)))
    return "train.idx", "test.idx"


def test_the_order_of_labels_is_given_back(tmp_path):
    pixels = drawn(*NAMES)
    path = archive(tmp_path / "pets", pixels)
    order = ordered(tmp_path, [1, 0, 0, 1], [1, 0])
    rows = load(path, order=order)
    names = [
        "train/dog/b.png",
        "train/cat/1.png",
        "train/cat/2.png",
        "train/dog/c.png",
        "test/dog/a.png",
        "test/cat/9.png",
    ]
    assert rows.y.tolist() == [1, 0, 0, 1, 1, 0]
    assert np.array_equal(rows.x.numpy(), planes(*(pixels[name] for name in names)))
    assert rows.held_out.tolist() == [False] * 4 + [True] * 2


@pytest.mark.parametrize(("train", "test", "part"), [([0, 0, 1], [0, 1], "train"), ([0, 0, 1, 1], [1, 1], "test")])
def test_an_order_with_other_labels_is_one_line(tmp_path, train, test, part):
    path = archive(tmp_path / "pets", drawn(*NAMES))
    order = ordered(tmp_path, train, test)
    line = f"{part}.idx: found other labels, allowed: as many labels of each class as {path} has pictures to {part}$"
    with pytest.raises(FedtideError, match=line):
        load(path, order=order)


# -- the cache ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["folder", "archive"])
def test_a_cache_is_made_once_and_anew_if_the_pictures_are_others(tmp_path, kind, monkeypatch):
    pixels, cache = drawn(*NAMES), tmp_path / "kept" / "pets.npz"

    def written(pictures: Pixels) -> Path:
        return folder(tmp_path / "pets", pictures) if kind == "folder" else archive(tmp_path / "pets", pictures)

    plain = load(written(pixels))
    assert not (tmp_path / "kept").exists()
    first = load(tmp_path / "pets", cache=str(cache))
    read = count_decoded(monkeypatch)
    second = load(tmp_path / "pets", cache=str(cache))
    assert read == []
    for rows in (first, second):
        assert torch.equal(rows.x, plain.x)
        assert torch.equal(rows.y, plain.y)
        assert torch.equal(rows.held_out, plain.held_out)
    more = written(drawn(*NAMES, "train/cow/1.png"))
    assert (len(load(more, cache=str(cache))), load(more, cache=str(cache)).classes, len(read)) == (7, 3, 7)
    assert (load(more, cache=str(cache), channels=1).shape, len(read)) == ((1, 6, 5), 14)
    assert [p.name for p in cache.parent.iterdir()] == ["pets.npz"]


@pytest.mark.parametrize("content", [b"", b"not an npz", None], ids=["empty", "other", "another npz"])
def test_a_damaged_cache_is_one_line(tmp_path, content):
    path, cache = archive(tmp_path / "pets", drawn(*NAMES)), tmp_path / "pets.npz"
    if content is None:
        np.savez(cache, x=np.zeros(3))
    else:
        cache.write_bytes(content)
    with pytest.raises(FedtideError, match=rf"^data.source.cache: {cache}: damaged or not a cache: delete it"):
        load(path, cache=str(cache))


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path):
    path = archive(tmp_path / "pets", drawn(*NAMES))
    (tmp_path / "file").touch()
    with pytest.raises(FedtideError, match=r"^data.source.cache: cannot write .*file/pets.npz"):
        load(path, cache=str(tmp_path / "file" / "pets.npz"))


def test_where_a_cache_lies_is_no_part_of_what_numbers_depend_on():
    def digest(source):
        data = {"source": source, "partition": {"kind": "iid", "clients": 2}}
        experiment = from_dict({"data": data, "method": [{"algorithm": "fedavg"}]})
        return digest_of(experiment, experiment.method[0], 0)

    def domains(**named):
        one = {"kind": "images", "path": "pets", **named}
        return {"kind": "domains", "names": ["a", "b"], "sources": [one, "idx:mnist"]}

    plain = {"kind": "images", "path": "pets"}
    assert digest(plain) == digest({**plain, "cache": "somewhere.npz"})
    assert digest(plain) != digest({**plain, "channels": 1})
    assert digest(domains()) == digest(domains(cache="somewhere.npz")) != digest(domains(channels=1))


# -- what is wrong -----------------------------------------------------------------------------------------------------


def test_without_pillow_the_error_names_the_extra(tmp_path, monkeypatch):
    path = archive(tmp_path / "pets", drawn(*NAMES))
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(FedtideError) as raised:
        load(path)
    assert str(raised.value) == "data.source.kind: 'images' needs Pillow; pip install \"fedtide[data]\""


def outcome(path: Path) -> int | str:
    """How many pictures there are, or the line that says what is wrong."""
    try:
        return len(load(path))
    except FedtideError as error:
        return str(error)


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_an_archive_cut_anywhere_is_one_line(tmp_path, mode):
    path = archive(tmp_path / "pets", drawn(*NAMES), mode)
    whole = path.read_bytes()
    needed = len(whole.rstrip(b"\0")) if mode == "w" else len(whole) - 97
    for length in [*range(0, needed, 97), needed - 1]:
        path.write_bytes(whole[:length])
        came = outcome(path)
        assert isinstance(came, str), f"{length} of {len(whole)} bytes"
        assert came.startswith(f"{path}: ")
        assert "\n" not in came


def test_a_damaged_header_in_the_middle_of_an_archive_is_one_line(tmp_path):
    path = archive(tmp_path / "pets", drawn(*NAMES), "w")
    whole = bytearray(path.read_bytes())
    whole[whole.index(b"test/dog/a.png") + 3] ^= 1
    path.write_bytes(whole)
    assert outcome(path) == f"{path}: damaged or not a tar archive (it has no end)"


def test_a_picture_cut_anywhere_is_one_line_that_names_it(tmp_path):
    path = folder(tmp_path / "pets", drawn("cat/1.jpg", "dog/1.png"))
    for name in ("cat/1.jpg", "dog/1.png"):
        whole = (path / name).read_bytes()
        for length in range(0, len(whole) - 20, 7):
            (path / name).write_bytes(whole[:length])
            with pytest.raises(FedtideError, match=rf"^{path}: {name}: damaged or not a picture \("):
                load(path)
        (path / name).write_bytes(whole)


def test_pictures_of_several_sizes_are_one_line(tmp_path):
    path = folder(tmp_path / "pets", drawn("cat/1.png", "cat/2.png"))
    folder(path, drawn("dog/1.png", side=(4, 4)))
    with pytest.raises(FedtideError, match=r"dog/1.png: pixels: found '4 x 4', allowed: 5 x 6, as the first picture$"):
        load(path)


def test_nothing_to_read_is_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_bytes(b"no archive")
    for path, line in (
        (tmp_path / "empty", "pictures to train on: found 0, allowed: one or more"),
        (folder(tmp_path / "only", drawn("test/cat/1.png")), "pictures to train on: found 0, allowed: one or more"),
        (archive(tmp_path / "none.tar", {}), "pictures to train on: found 0, allowed: one or more"),
        (archive(tmp_path / "bare.tar", drawn("1.png")), "picture: found '1.png', allowed: <class>/<picture>"),
        (tmp_path / "file", "damaged or not a tar archive"),
    ):
        with pytest.raises(FedtideError, match=f"^{path}: .*{line}|^{path}: {line}"):
            load(path)
    with pytest.raises(FedtideError, match="no such file or folder"):
        load(tmp_path / "gone")
