"""Tables of picture files: what comes back, natural clients and times, the cache, mistakes, the scripts of the page."""

from __future__ import annotations

import csv
import gzip
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedtide.config import from_dict
from fedtide.core.base import Moment
from fedtide.core.errors import FedtideError
from fedtide.data.build import build
from fedtide.data.sources import Manifest, images
from helpers.images import count_decoded

PAGE = Path(__file__).parents[3] / "docs" / "fielding-data.md"


def drawn(number: int, height: int = 6, width: int = 5) -> np.ndarray:
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
            saved(root / row.split(",")[0], drawn(k))
    return root / name


def load(path: Path, **options):
    return Manifest(path.name, **options).load(path.parent, 0)


def planes(*pixels: np.ndarray) -> np.ndarray:
    return np.stack([picture.transpose(2, 0, 1) for picture in pixels])


HEADER = "path,label,client,time,domain,split"
ROWS = (
    "a/1.png,zoo,north,2026-03-01T09:15:00,day,train",
    "a/2.png,dam,south,1772356500.5,night,test",
    "b/1.png,dam,north,60,day,train",
)

# -- what comes back ---------------------------------------------------------------------------------------------------


def test_every_column_comes_back_in_the_order_of_the_table(tmp_path):
    rows = load(table(tmp_path, HEADER, *ROWS))
    assert rows.x.dtype == torch.uint8
    assert np.array_equal(rows.x.numpy(), planes(drawn(0), drawn(1), drawn(2)))
    assert (rows.y.tolist(), rows.classes) == ([1, 0, 0], 2)
    assert (rows.client.tolist(), rows.client_names) == ([0, 1, 0], ("north", "south"))
    assert (rows.domain.tolist(), rows.domain_names) == ([0, 1, 0], ("day", "night"))
    assert rows.time.tolist() == [1772356500.0, 1772356500.5, 60.0]
    assert rows.held_out.tolist() == [False, True, False]
    assert rows.name == "manifest.csv"


def test_a_table_may_be_gzipped_and_paths_absolute(tmp_path):
    saved(tmp_path / "far" / "x.png", drawn(0))
    path = tmp_path / "near" / "manifest.csv.gz"
    path.parent.mkdir()
    path.write_bytes(gzip.compress(f"path,label\n{tmp_path / 'far' / 'x.png'},cat\n../far/x.png,dog\n".encode()))
    rows = load(path)
    assert np.array_equal(rows.x.numpy(), planes(drawn(0), drawn(0)))


def test_pictures_of_all_shapes_are_resized(tmp_path):
    path = table(tmp_path, "path,label", "x.png,0", "y.png,1", "z.png,1", pictures=False)
    sides = [(6, 5), (20, 30), (8, 8)]
    for name, side in zip("xyz", sides, strict=True):
        saved(tmp_path / f"{name}.png", drawn(side[0], *side))
    rows = load(path, size=8)
    assert rows.shape == (3, 8, 8)
    expected = [Image.fromarray(drawn(h, h, w)).resize((8, 8), Image.Resampling.BILINEAR) for h, w in sides]
    assert np.array_equal(rows.x.numpy(), planes(*map(np.asarray, expected)))
    assert np.array_equal(rows.x.numpy()[2], drawn(8, 8, 8).transpose(2, 0, 1))


# -- clients and times -------------------------------------------------------------------------------------------------


def population(path: Path, **data):
    raw = {"data": {"source": {"kind": "manifest", "path": str(path)}, **data}, "method": [{"algorithm": "fedavg"}]}
    made = from_dict(raw)
    dealt = (made.data.partition, made.data.groups, made.data.split, made.data.held_out_clients)
    return build(made.data.source.load(None, 0), *dealt, made.shift, seed=0)


def test_natural_clients_hold_their_pictures_and_times(tmp_path):
    lines = [f"{k}.png,{k % 2},zone {k % 3},{1000 - k}" for k in range(12)]
    path = table(tmp_path, "path,label,client,time", *lines)
    people = population(path, partition="natural", split={"val": 0.0, "test": 0.0})
    assert people.registered == 3
    for client in range(3):
        shard = people.shard(client, Moment(0, 1))
        assert sorted(shard.time.tolist()) == [1000.0 - k for k in range(11, -1, -1) if k % 3 == client]
        for x, y, time in zip(shard.x, shard.y, shard.time, strict=True):
            k = 1000 - int(time)
            assert int(y) == k % 2
            torch.testing.assert_close(x, torch.from_numpy(planes(drawn(k))[0]) / 255)


# -- the cache ---------------------------------------------------------------------------------------------------------


def test_a_cache_is_made_once_and_anew_if_something_is_another(tmp_path, monkeypatch):
    read = count_decoded(monkeypatch)
    cache = tmp_path / "kept" / "pixels.npz"
    path = table(tmp_path, HEADER, *ROWS)
    plain = load(path)
    assert not cache.exists()
    first = load(path, cache=str(cache))
    read.clear()
    second = load(path, cache=str(cache))
    assert read == []
    for rows in (first, second):
        for column in ("x", "y", "client", "time", "domain", "held_out"):
            assert torch.equal(getattr(rows, column), getattr(plain, column))
    assert (load(path, cache=str(cache), size=4).shape, len(read)) == ((3, 4, 4), 3)
    assert (load(path, cache=str(cache), size=4, channels=1).shape, len(read)) == ((1, 4, 4), 6)
    saved(tmp_path / "a" / "1.png", drawn(9, 30, 30))
    assert (load(path, cache=str(cache), size=4).shape, len(read)) == ((3, 4, 4), 9)
    table(tmp_path, HEADER, *ROWS[:2])
    assert (len(load(path, cache=str(cache), size=4)), len(read)) == (2, 11)
    assert [p.name for p in cache.parent.iterdir()] == ["pixels.npz"]


# -- what is wrong -----------------------------------------------------------------------------------------------------

# header, rows, what the line says after the table's path
WRONG = [
    (
        "path,label,lable",
        ("x.png,0,1",),
        "row 1: found 'lable', allowed: path, label, client, time, domain, split; did",
    ),
    ("path,client", ("x.png,0",), "no column 'label'; allowed: path, client"),
    ("label,client", ("0,0",), "no column 'path'; allowed: label, client"),
    ("path,label,label", ("x.png,0,1",), "two columns are called 'label'"),
    ("path,label", (), "no rows below the header"),
    ("path,label", ("x.png,0", "y.png"), "row 3: number of cells: found 1, allowed: 2, as in the header"),
    ("path,label", ("x.png,0", "y.png,-1"), "row 3: label: found '-1', allowed: whole numbers from 0, or names"),
    ("path,label", ("x.png,0", "y.png,1.5"), "row 3: label: found '1.5', allowed: whole numbers from 0, or names"),
    ("path,label", ("x.png,0", "y.png,"), "row 3: label is empty"),
    ("path,label,client", ("x.png,0,",), "row 2: client is empty"),
    ("path,label,time", ("x.png,0,noon",), "row 2: time: found 'noon', allowed: seconds or ISO 8601"),
    ("path,label,split", ("x.png,0,train", "y.png,0,val"), "row 3: split: found 'val', allowed: train, test"),
    ("path,label,split", ("x.png,0,test",), "no pictures to train on: every split is 'test'"),
]


@pytest.mark.parametrize(("header", "rows", "line"), WRONG, ids=lambda v: str(v)[:40])
def test_a_wrong_table_is_one_line_that_names_the_row(tmp_path, header, rows, line):
    path = table(tmp_path, header, *rows, pictures=False)
    with pytest.raises(FedtideError) as raised:
        load(path)
    assert str(raised.value).startswith(f"{path}: {line}")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["gone.png", "folder", "x" * 300 + ".png", "x.png/y.png"])
def test_a_missing_picture_is_one_line_that_names_the_row(tmp_path, name):
    path = table(tmp_path, "path,label", "x.png,0")
    (tmp_path / "folder").mkdir()
    table(tmp_path, "path,label", "x.png,0", f"{name},1", pictures=False)
    for options in ({}, {"cache": str(tmp_path / "pixels.npz")}):
        with pytest.raises(FedtideError) as raised:
            load(path, **options)
        assert str(raised.value).startswith(f"{path}: row 3: {name}: no such picture file; paths are relative to")


def test_a_damaged_picture_is_one_line_that_names_the_row(tmp_path):
    path = table(tmp_path, "path,label", "x.png,0", "y.jpg,1")
    whole = (tmp_path / "y.jpg").read_bytes()
    for length in range(0, len(whole) - 20, 31):
        (tmp_path / "y.jpg").write_bytes(whole[:length])
        with pytest.raises(FedtideError, match=rf"^{path}: row 3: y.jpg: damaged or not a picture \("):
            load(path, size=4)


def test_pictures_of_several_sizes_need_a_size(tmp_path):
    path = table(tmp_path, "path,label", "x.png,0", "y.png,1")
    saved(tmp_path / "y.png", drawn(1, 4, 4))
    line = rf"^{path}: row 3: y.png: pixels: found '4 x 4', allowed: 5 x 6, as the first picture$"
    with pytest.raises(FedtideError, match=line):
        load(path)


def test_pictures_that_do_not_fit_into_memory_are_one_line(monkeypatch, tmp_path):
    empty = np.empty

    def full(shape, kind=float):
        if kind is np.uint8:
            raise MemoryError
        return empty(shape, kind)

    path = table(tmp_path, "path,label", "x.png,0", "y.png,1")
    monkeypatch.setattr(images.np, "empty", full)
    line = r"^data.source.size: 2 pictures of 5 x 6 take 0 GiB, more than there is; allowed: a smaller size$"
    with pytest.raises(FedtideError, match=line):
        load(path)


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
        saved(place, drawn(k, 10 + k, 12))
        about = {"utm": zone, "timestamp": when, "bounding_boxes": [{"ID": 1, "category": kind, "box": [0, 0, 1, 1]}]}
        place.with_suffix(".json").write_text(json.dumps(about))
    run("fmow_manifest.py", tmp_path, root)
    rows = load(root / "manifest.csv", size=8)
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
            saved(root / "leftImg8bit" / part / city / f"{name}_leftImg8bit.png", drawn(frame, 80, 80))
            labels = root / "gtFine" / part / city / f"{name}_gtFine_polygons.json"
            labels.parent.mkdir(parents=True, exist_ok=True)
            labels.write_text(json.dumps({"objects": things}))
    run("cityscapes_manifest.py", tmp_path, root, made)
    rows = load(made / "manifest.csv", size=16)
    assert rows.client_names == ("munster 000", "ulm 000", "ulm 001")
    assert rows.client.bincount().tolist() == [2, 100, 20]
    assert rows.time.tolist() == [k // 2 for k in range(120)] + [0, 0]
    assert rows.classes == 2
    cut = np.asarray(Image.fromarray(drawn(7, 80, 80)[:55, :60]))
    assert np.array_equal(np.asarray(Image.open(made / written(made / "manifest.csv")[14]["path"])), cut)


def test_the_script_for_waymo(tmp_path):
    root, lists = tmp_path / "waymo", tmp_path / "waymo" / "sample_lists" / "citywise"
    lists.mkdir(parents=True)
    header = "idx,image name,class,timestamp,segment,camera name\n"
    for k, (segment, camera) in enumerate([("s1", "FRONT"), ("s1", "SIDE_LEFT"), ("s2", "FRONT")]):
        saved(root / segment / camera / "0000_a.jpg", drawn(k))
        row = f"{k},0000_a.jpg,{k % 2},{1_500_000_000_500_000 + k},{segment},{camera}\n"
        city = "sf" if segment == "s2" else "phx"
        with open(lists / f"{city}_labels.csv", "a") as file:
            file.write(row if camera == "SIDE_LEFT" else header + row)
    lists.joinpath("phx_000_009_labels.csv").write_text(lists.joinpath("phx_labels.csv").read_text())
    run("waymo_manifest.py", tmp_path, root)
    rows = load(root / "manifest.csv")
    assert (rows.client_names, rows.y.tolist()) == (("s1 FRONT", "s1 SIDE_LEFT", "s2 FRONT"), [0, 1, 0])
    assert rows.time[0] == 1_500_000_000.5
    run("waymo_manifest.py", tmp_path, root, "sf")
    assert load(root / "manifest.csv").client_names == ("s2 FRONT",)


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
            saved(root / "train" / f"{k}.png", drawn(k, 2, 2))
            out.writerow([client, f"{k}.png", label, k])
    run("openimages_manifest.py", tmp_path, root)
    rows = load(root / "manifest.csv")
    assert (rows.client_names, rows.classes) == (("a", "c"), 100)
    assert rows.client.bincount().tolist() == [10, 191]
