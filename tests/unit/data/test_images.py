"""Image files by class or listed by a table: order, clients, caches, damage, and the scripts of the page."""

import csv
import gzip
import io
import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedtide.config import from_dict
from fedtide.core.errors import FedtideError
from fedtide.data.sources import Images, Manifest
from fedtide.runs.digest import digest_of
from helpers.image_files import count_decoded, idx_bytes

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
    line = f"{part}.idx.*: found other labels, allowed: as many labels of each class as there are pictures"
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


PAGE = Path(__file__).parents[3] / "docs" / "fielding-data.md"


def picture(number: int, height: int = 6, width: int = 5) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)


def saved(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def table(root: Path, header: str, *rows: str, name: str = "manifest.csv", pictures: bool = True) -> Path:
    """A table, and a picture for every path of it, the k-th drawn from k."""
    root.mkdir(parents=True, exist_ok=True)
    (root / name).write_text("\n".join([header, *rows]) + "\n")
    for k, row in enumerate(rows):
        if pictures:
            saved(root / row.split(",")[0], picture(k))
    return root / name


def load_table(path: Path, **options):
    return Manifest(path.name, **options).load(path.parent, 0)


HEADER = "path,label,client,time,domain,split"
ROWS = (
    "a/1.png,zoo,north,2026-03-01T09:15:00,day,train",
    "a/2.png,dam,south,2026-03-01T09:15:00.5,night,test",
    "b/1.png,dam,north,2026-02-01 00:01,day,train",
)

# -- what comes back ---------------------------------------------------------------------------------------------------


def test_every_column_comes_back_in_the_order_of_the_table(tmp_path):
    rows = load_table(table(tmp_path, HEADER, *ROWS))
    assert rows.x.dtype == torch.uint8
    assert np.array_equal(rows.x.numpy(), planes(picture(0), picture(1), picture(2)))
    assert (rows.y.tolist(), rows.classes) == ([1, 0, 0], 2)
    assert (rows.client.tolist(), rows.client_names) == ([0, 1, 0], ("north", "south"))
    assert (rows.domain.tolist(), rows.domain_names) == ([0, 1, 0], ("day", "night"))
    assert rows.time.tolist() == [1772356500.0, 1772356500.5, 1769904060.0]
    assert rows.held_out.tolist() == [False, True, False]
    assert rows.name == "manifest.csv"


def test_a_table_may_be_gzipped_and_paths_absolute(tmp_path):
    saved(tmp_path / "far" / "x.png", picture(0))
    path = tmp_path / "near" / "manifest.csv.gz"
    path.parent.mkdir()
    path.write_bytes(gzip.compress(f"path,label\n{tmp_path / 'far' / 'x.png'},cat\n../far/x.png,dog\n".encode()))
    rows = load_table(path)
    assert np.array_equal(rows.x.numpy(), planes(picture(0), picture(0)))


def test_pictures_of_all_shapes_are_resized(tmp_path):
    path = table(tmp_path, "path,label", "x.png,0", "y.png,1", "z.png,1", pictures=False)
    sides = [(6, 5), (20, 30), (8, 8)]
    for name, side in zip("xyz", sides, strict=True):
        saved(tmp_path / f"{name}.png", picture(side[0], *side))
    rows = load_table(path, size=8)
    assert rows.shape == (3, 8, 8)
    expected = [Image.fromarray(picture(h, h, w)).resize((8, 8), Image.Resampling.BILINEAR) for h, w in sides]
    assert np.array_equal(rows.x.numpy(), planes(*map(np.asarray, expected)))
    assert np.array_equal(rows.x.numpy()[2], picture(8, 8, 8).transpose(2, 0, 1))


# -- the cache ---------------------------------------------------------------------------------------------------------


def test_a_cache_is_made_once_and_anew_if_something_is_another(tmp_path, monkeypatch):
    read = count_decoded(monkeypatch)
    cache = tmp_path / "kept" / "pixels.npz"
    path = table(tmp_path, HEADER, *ROWS)
    plain = load_table(path)
    assert not cache.exists()
    first = load_table(path, cache=str(cache))
    read.clear()
    second = load_table(path, cache=str(cache))
    assert read == []
    for rows in (first, second):
        for column in ("x", "y", "client", "time", "domain", "held_out"):
            assert torch.equal(getattr(rows, column), getattr(plain, column))
    assert (load_table(path, cache=str(cache), size=4).shape, len(read)) == ((3, 4, 4), 3)
    assert (load_table(path, cache=str(cache), size=4, channels=1).shape, len(read)) == ((1, 4, 4), 6)
    saved(tmp_path / "a" / "1.png", picture(9, 30, 30))
    assert (load_table(path, cache=str(cache), size=4).shape, len(read)) == ((3, 4, 4), 9)
    table(tmp_path, HEADER, *ROWS[:2])
    assert (len(load_table(path, cache=str(cache), size=4)), len(read)) == (2, 11)
    assert [p.name for p in cache.parent.iterdir()] == ["pixels.npz"]


# -- what is wrong -----------------------------------------------------------------------------------------------------

# header, rows, what the line says after the table's path
WRONG = [
    (
        "path,label,lable",
        ("x.png,0,1",),
        "row 1: found 'lable', did you mean 'label'? Allowed: path, label, client, time, domain, split",
    ),
    ("path,client", ("x.png,0",), "no column 'label'; allowed: path, client"),
    ("path,label", ("x.png,0", "y.png,-1"), "row 3: label: found '-1', allowed: whole numbers from 0, or names"),
    ("path,label", ("x.png,0", "y.png,"), "row 3: label is empty"),
    ("path,label,client", ("x.png,0,",), "row 2: client is empty"),
    ("path,label,time", ("x.png,0,noon",), "row 2: time: found 'noon', allowed: seconds, or a date such as"),
    ("path,label,split", ("x.png,0,train", "y.png,0,val"), "row 3: split: found 'val', allowed: train, test"),
    ("path,label,split", ("x.png,0,test",), "no pictures to train on: every split is 'test'"),
]


@pytest.mark.parametrize(("header", "rows", "line"), WRONG, ids=lambda v: str(v)[:40])
def test_a_wrong_table_is_one_line_that_names_the_row(tmp_path, header, rows, line):
    path = table(tmp_path, header, *rows, pictures=False)
    with pytest.raises(FedtideError) as raised:
        load_table(path)
    assert str(raised.value).startswith(f"{path}: {line}")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["gone.png", "folder", "x" * 300 + ".png", "x.png/y.png"])
def test_a_missing_picture_is_one_line_that_names_the_row(tmp_path, name):
    path = table(tmp_path, "path,label", "x.png,0")
    (tmp_path / "folder").mkdir()
    table(tmp_path, "path,label", "x.png,0", f"{name},1", pictures=False)
    for options in ({}, {"cache": str(tmp_path / "pixels.npz")}):
        with pytest.raises(FedtideError) as raised:
            load_table(path, **options)
        assert str(raised.value).startswith(f"{path}: row 3: {name}: no such picture file; paths are relative to")


def test_a_damaged_picture_is_one_line_that_names_the_row(tmp_path):
    path = table(tmp_path, "path,label", "x.png,0", "y.jpg,1")
    whole = (tmp_path / "y.jpg").read_bytes()
    for length in range(0, len(whole) - 20, 31):
        (tmp_path / "y.jpg").write_bytes(whole[:length])
        with pytest.raises(FedtideError, match=rf"^{path}: row 3: y.jpg: damaged or not a picture \("):
            load_table(path, size=4)


def test_pictures_of_several_sizes_need_a_size(tmp_path):
    path = table(tmp_path, "path,label", "x.png,0", "y.png,1")
    saved(tmp_path / "y.png", picture(1, 4, 4))
    line = rf"^{path}: row 3: y.png: pixels: found '4 x 4', allowed: 5 x 6, as the first picture$"
    with pytest.raises(FedtideError, match=line):
        load_table(path)


# -- the scripts of the page -------------------------------------------------------------------------------------------


def run(script: str, tmp_path: Path, *given: object) -> None:
    """Run a script as it stands on the page."""
    block = re.search(rf'^```python title="{script}"\n(.*?)^```$', PAGE.read_text(encoding="utf-8"), re.M | re.S)
    (tmp_path / script).write_text(block[1], encoding="utf-8")
    subprocess.run([sys.executable, str(tmp_path / script), *map(str, given)], check=True)


def written(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_the_script_for_fmow(tmp_path):
    root = tmp_path / "fmow"
    for k, (part, kind, zone, when) in enumerate(
        [
            ("train", "dam", "39R", "2016-07-04T15:44:48Z"),
            ("train", "dam", "39R", "2014-12-31T23:59:59Z"),
            ("train", "zoo", "18T", "2015-01-01T00:00:00Z"),
            ("val", "zoo", "39R", "2017-01-01T10:00:00Z"),
            ("test", "zoo", "39R", "2017-01-01T10:00:00Z"),
        ]
    ):
        place = root / part / kind / f"{kind}_{k}" / f"{kind}_{k}_0_rgb.jpg"
        saved(place, picture(k, 10 + k, 12))
        about = {"utm": zone, "timestamp": when, "bounding_boxes": [{"ID": 1, "category": kind, "box": [0, 0, 1, 1]}]}
        place.with_suffix(".json").write_text(json.dumps(about))
    run("fmow_manifest.py", tmp_path, root)
    rows = load_table(root / "manifest.csv", size=8)
    assert (rows.y.tolist(), rows.client.tolist(), rows.client_names) == ([0, 1, 1], [1, 0, 1], ("18T", "39R"))
    assert rows.time.tolist() == [1467647088.0, 1420070400.0, 1483264800.0]


def test_the_script_for_cityscapes(tmp_path):
    root, made = tmp_path / "cityscapes", tmp_path / "objects"
    box = [[0, 0], [60, 0], [60, 55], [0, 55]]
    things = [{"label": "car", "polygon": box}, {"label": "sky", "polygon": box}]
    things += [{"label": "person", "polygon": [[0, 0], [50, 80], [3, 3]]}, {"label": "bus", "polygon": box}]
    for part, city, count in (("train", "ulm", 60), ("val", "munster", 1), ("test", "bonn", 1)):
        for frame in range(count):
            name = f"{city}_{frame // 10:06d}_{frame % 10:06d}"
            saved(root / "leftImg8bit" / part / city / f"{name}_leftImg8bit.png", picture(frame, 80, 80))
            labels = root / "gtFine" / part / city / f"{name}_gtFine_polygons.json"
            labels.parent.mkdir(parents=True, exist_ok=True)
            labels.write_text(json.dumps({"objects": things}))
    run("cityscapes_manifest.py", tmp_path, root, made)
    rows = load_table(made / "manifest.csv", size=16)
    assert rows.client_names == ("munster 000", "ulm 000", "ulm 001")
    assert rows.client.bincount().tolist() == [2, 100, 20]
    assert rows.time.tolist() == [k // 2 for k in range(120)] + [0, 0]
    assert rows.classes == 2
    cut = np.asarray(Image.fromarray(picture(7, 80, 80)[:55, :60]))
    assert np.array_equal(np.asarray(Image.open(made / written(made / "manifest.csv")[14]["path"])), cut)


def test_the_script_for_waymo(tmp_path):
    root, lists = tmp_path / "waymo", tmp_path / "waymo" / "sample_lists" / "citywise"
    lists.mkdir(parents=True)
    header = "idx,image name,class,timestamp,segment,camera name\n"
    for k, (segment, camera) in enumerate([("s1", "FRONT"), ("s1", "SIDE_LEFT"), ("s2", "FRONT")]):
        saved(root / segment / camera / "0000_a.jpg", picture(k))
        row = f"{k},0000_a.jpg,{k % 2},{1_500_000_000_500_000 + k},{segment},{camera}\n"
        city = "sf" if segment == "s2" else "phx"
        with open(lists / f"{city}_labels.csv", "a") as file:
            file.write(row if camera == "SIDE_LEFT" else header + row)
    lists.joinpath("phx_000_009_labels.csv").write_text(lists.joinpath("phx_labels.csv").read_text())
    run("waymo_manifest.py", tmp_path, root)
    rows = load_table(root / "manifest.csv")
    assert (rows.client_names, rows.y.tolist()) == (("s1 FRONT", "s1 SIDE_LEFT", "s2 FRONT"), [0, 1, 0])
    assert rows.time[0] == 1_500_000_000.5
    run("waymo_manifest.py", tmp_path, root, "sf")
    assert load_table(root / "manifest.csv").client_names == ("s2 FRONT",)


def test_the_script_for_open_images(tmp_path):
    """Client a has ten of the 100 most frequent classes, b nine of them and a rare one."""
    root = tmp_path / "openImage"
    lines = [("a", f"kind {k}") for k in range(10)] + [("b", f"kind {k}") for k in range(9)] + [("b", "rare")]
    lines += [("c", f"kind {k}") for k in (*range(100), *range(9, 100))]
    (root / "client_data_mapping").mkdir(parents=True)
    with open(root / "client_data_mapping" / "train.csv", "w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["client_id", "sample_path", "label_name", "label_id"])
        for k, (client, label) in enumerate(lines):
            saved(root / "train" / f"{k}.png", picture(k, 2, 2))
            out.writerow([client, f"{k}.png", label, k])
    run("openimages_manifest.py", tmp_path, root)
    rows = load_table(root / "manifest.csv")
    assert (rows.client_names, rows.classes) == (("a", "c"), 100)
    assert rows.client.bincount().tolist() == [10, 191]
