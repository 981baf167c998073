"""Damaged data files: one line that names the file, or rows that are rows; never a traceback, a hang or much memory."""

import gzip
import io
import json
import os
import random
import re
import tarfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedtide.core.errors import FedtideError
from fedtide.data.rows import Rows
from fedtide.data.shift.concept_drift import read_concepts
from fedtide.data.shift.who import read_timetable
from fedtide.data.sources import CIFAR, CSV, IDX, LEAF, NPZ, GasSensors, Images, Manifest, Series, Text
from fedtide.fleets.devices import latencies, speeds
from helpers.image_files import idx_bytes
from helpers.texts import TINY

from .conftest import BATCH, limited

MEMORY = 500 * 2**20
"""Bytes that reading a small file may take."""

Files = dict[str, bytes]
"""The files of a data set, by their names in its folder."""

# -- good files --------------------------------------------------------------------------------------------------------

DRAW = np.random.default_rng(0)
PIXELS = DRAW.integers(0, 256, (8, 6, 5), dtype=np.uint8)
NUMBERS = DRAW.normal(size=(12, 3)).round(3)
LABELS = np.arange(12) % 3


def picture(number: int) -> bytes:
    held = io.BytesIO()
    Image.fromarray(PIXELS[number]).save(held, "JPEG" if number % 4 == 3 else "PNG")
    return held.getvalue()


def table() -> bytes:
    lines = [f"2026-03-{k + 1:02d},c{k % 4},{a},{b},{c},{k % 3}" for k, (a, b, c) in enumerate(NUMBERS)]
    return "\n".join(["when,who,a,b,c,label", *lines, ""]).encode()


def npz(**changes: Any) -> bytes:
    columns = {"x": NUMBERS, "y": LABELS, "client": LABELS.astype(str), "time": LABELS * 60.0, "held_out": LABELS == 2}
    held = io.BytesIO()
    np.savez(held, **(columns | changes))
    return held.getvalue()


def idx() -> Files:
    labels = (np.arange(8) % 3).astype(np.uint8)
    parts = {"train": slice(0, 6), "t10k": slice(6, 8)}
    images = {f"{name}-images": idx_bytes(PIXELS[part]) for name, part in parts.items()}
    return images | {f"{name}-labels": idx_bytes(labels[part]) for name, part in parts.items()}


def leaf() -> bytes:
    data = {f"u{k}": {"x": NUMBERS[k::4].tolist(), "y": LABELS[k::4].tolist()} for k in range(4)}
    return json.dumps({"users": list(data), "num_samples": [3] * 4, "user_data": data}).encode()


def posts() -> bytes:
    rows = "".join(
        f'  <row Id="{k}" OwnerUserId="{k % 3}" Body="&lt;p&gt;It is {k} o\'clock.&lt;/p&gt;" />\n' for k in range(9)
    )
    return f'<?xml version="1.0" encoding="utf-8"?>\n<posts>\n{rows}</posts>\n'.encode()


def tar(files: Files) -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return held.getvalue()


def gas() -> bytes:
    samples = (f"{k % 6 + 1};5.0 " + " ".join(f"{i}:{k * i / 7:.3f}" for i in range(1, 129)) for k in range(6))
    return "".join(f"{sample}\n" for sample in samples).encode()


LINES = "".join(json.dumps({**line, "time": k, "topic": "ab"[k % 2]}) + "\n" for k, line in enumerate(TINY)).encode()
PICTURES = {
    f"{part}/{'cat' if k % 2 else 'dog'}/{k}.png": picture(k) for k, part in enumerate(["train"] * 6 + ["test"] * 2)
}
MANIFEST = "\n".join(
    [
        "path,label,client,time,split",
        *(f"{k}.png,{k % 2},{k % 3},{k}.5,{'test' if k == 7 else 'train'}" for k in range(8)),
    ]
).encode()
SENTENCES = {"client": ("client",), "time": "time", "domain": "topic", "length": 4}

TRACES = {f"c{k}": {"trace_start": 0, "trace_end": 300, "ready_time": [[60 * k, 60 * k + 30.5]]} for k in range(3)}
TRACE = "client,start,end\n" + "".join(f"c{k % 3},{60 * k},{60 * k + 30.5}\n" for k in range(6))
LATENCY = [{"ResNet Latency": 5.5 + k, "Vit Latency": 9 * k} for k in range(4)]
SPEEDS = "case,tcp_speed_kbps\n" + "".join(f"{k % 2},{k}00 {k}20.5\n" for k in range(1, 5))
HOURS = "time,a,b\n" + "".join(f"{60 * k},{k}.5,{'NA' if k == 4 else k * k}\n" for k in range(12))
CONCEPTS = "concept,group,0,1,2\na,x,0.5,0.25,0.25\nb,y,0,0,1\n"

KINDS: dict[str, tuple[Any, Files]] = {
    "csv": (CSV("a.csv", client="who", time="when"), {"a.csv": table()}),
    "csv-gz": (CSV("a.csv.gz", client="who", time="when"), {"a.csv.gz": gzip.compress(table())}),
    "cuts": (CSV(("a.csv", "b.csv"), label="c", cuts=(-0.5, 0.5), features=("a", "b"), missing="drop"), {
        "a.csv": table(), "b.csv": table()
    }),
    "series": (
        lambda folder: Series(str(folder / "s.csv"), lags=("60s",), own_scale=True).load(None, 0, measured=True),
        {"s.csv": HOURS.encode()},
    ),
    "npz": (NPZ("a.npz"), {"a.npz": npz()}),
    "npz-pictures": (NPZ("a.npz"), {"a.npz": npz(x=np.repeat(PIXELS, 2, 0)[:12])}),
    "idx": (IDX("digits"), {f"digits/{name}": data for name, data in idx().items()}),
    "idx-gz": (IDX("digits"), {f"digits/{name}.gz": gzip.compress(data) for name, data in idx().items()}),
    "cifar": (CIFAR("cifar"), {
        f"cifar/{name}.bin": bytes([k]) + DRAW.bytes(3072) for k, name in enumerate(("data_batch_1", "test_batch"))
    }),
    "leaf": (LEAF("all.json"), {"all.json": leaf()}),
    "text": (Text(("a.jsonl",), **SENTENCES), {"a.jsonl": LINES}),
    "text-gz": (Text(("a.jsonl.gz",), **SENTENCES), {"a.jsonl.gz": gzip.compress(LINES)}),
    "posts": (Text(("Posts.xml",), text="Body", client=("OwnerUserId",), time="Id"), {"Posts.xml": posts()}),
    "images": (Images("pictures"), {f"pictures/{name}": data for name, data in PICTURES.items()}),
    "tar": (Images("a.tar"), {"a.tar": tar(PICTURES)}),
    "tar-gz": (Images("a.tar.gz", channels=1), {"a.tar.gz": gzip.compress(tar(PICTURES))}),
    "manifest": (Manifest("m.csv"), {"m.csv": MANIFEST, **{f"{k}.png": picture(k) for k in range(8)}}),
    "gas": (GasSensors("gas"), {"gas/batch1.dat": gas(), "gas/batch2.dat": gas()}),
    # No rows, but who is there when, and how fast.
    "trace": (lambda folder: read_timetable(folder / "t.csv", None), {"t.csv": TRACE.encode()}),
    "trace-json": (lambda folder: read_timetable(folder / "t.json", None), {"t.json": json.dumps(TRACES).encode()}),
    "latency": (lambda folder: latencies(folder / "l.json", "Vit Latency"), {"l.json": json.dumps(LATENCY).encode()}),
    "speeds": (lambda folder: speeds(folder / "s.csv", 1), {"s.csv": SPEEDS.encode()}),
    "concepts": (lambda folder: read_concepts(folder / "c.csv", 3), {"c.csv": CONCEPTS.encode()}),
}  # fmt: skip

# -- damage ------------------------------------------------------------------------------------------------------------

CELLS = [
    "", " ", "nan", "inf", "-1", "1e400", "-1e-400", "5_0", "²", "٣", "9" * 400, "9" * 5000, "900000", "1.5", "cat",
    "0x10", "1,2", '"', "'", "\0", "é", "=1+1", "2026-13-45", "a" * 200_000, "[]", "{", "null", "true", "\u202e", "<a>",
    "&", "../../etc/passwd", "/dev/zero", "\r", "\ufeff", "99999999999999999999-01-01", "0001-01-01T00:00:00+23:00",
]  # fmt: skip

VALUES: list[Any] = [
    None, True, -1, 1.5, 2**53 + 1, 10**30, 10**400, "", "cat", "5", "\ud800", [], [[]], {}, [1, "a"], [[1], [1, 2]],
    float("nan"), float("inf"), 1e300, 900_000, [None], {"x": [], "y": []},
]  # fmt: skip

ARRAYS: list[Any] = [
    NUMBERS.astype(complex), NUMBERS[:0], np.zeros((12, 0)), np.full(12, np.nan), np.full((12, 3), np.inf),
    np.float64(3), LABELS.astype("datetime64[D]"), np.array(["NaT"] * 12, "datetime64[s]"),
    np.full(12, 2**64 - 1, np.uint64), LABELS - 1, np.array([b"\xff"] * 12), np.array(["\ud800"] * 12),
    LABELS.astype("S3"), LABELS.astype(np.float16), LABELS == 0, LABELS[:, None], LABELS + 900_000, np.full(12, 1e300),
    LABELS[:7], np.zeros((12, 2, 2, 2, 2)), LABELS.astype(">i8"), np.zeros(12, [("a", "i4")]),
    np.zeros((12, 4, 4), np.uint8), np.zeros((12, 70_000), np.uint8), LABELS + 0.5,
]  # fmt: skip


def flip(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.randint(1, 3)):
        changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def early(data: bytes, draw: random.Random) -> bytes:
    """Change some of the first bytes, where sizes stand."""
    place = draw.randrange(min(len(data), 40))
    return (
        data[:place]
        + draw.choice([b"\xff", b"\x00", b"\x7f\xff", b"\x00\x00\x00\x00", draw.randbytes(4)])
        + data[place + 1 :]
    )


def cut(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data))]


def double(data: bytes, draw: random.Random) -> bytes:
    begin, end = sorted(draw.randrange(len(data) + 1) for _ in range(2))
    return data[:end] + data[begin:]


def remove(data: bytes, draw: random.Random) -> bytes:
    begin, end = sorted(draw.randrange(len(data) + 1) for _ in range(2))
    return data[:begin] + data[end:]


def digits(data: bytes, draw: random.Random) -> bytes:
    places = [match.start() for match in re.finditer(rb"\d", data)] or [0]
    place = draw.choice(places)
    return data[:place] + str(draw.choice([draw.randrange(10), 10**9])).encode() + data[place + 1 :]


def line(data: bytes, draw: random.Random) -> bytes:
    """Leave out a line, repeat it, or put it somewhere else."""
    lines = data.split(b"\n")
    taken = lines[draw.randrange(len(lines))]
    if draw.random() < 0.5:
        lines.remove(taken)
    if draw.random() < 0.7:
        lines.insert(draw.randrange(len(lines) + 1), taken)
    return b"\n".join(lines)


def cell(data: bytes, draw: random.Random) -> bytes:
    """Put something hostile between two separators."""
    spans = [match.span() for match in re.finditer(rb"[^\s,:;\"<>{}\[\]]+", data)] or [(0, 0)]
    begin, end = draw.choice(spans)
    return data[:begin] + draw.choice(CELLS).encode() + data[end:]


def encoding(data: bytes, draw: random.Random) -> bytes:
    text = data.decode("latin-1")
    other = draw.choice(["utf-16", "utf-16-le", "utf-32", "utf-8-sig", "utf-7", "cp037"])
    changed = draw.choice([text.replace("\n", "\r"), text.replace("\n", "\r\n"), text.replace("a", "é"), text])
    return changed.encode(draw.choice(["latin-1", other]))


def nonsense(data: bytes, draw: random.Random) -> bytes:
    return draw.choice(
        [b"", b"\0", b"\n", b"\n" * 1000, draw.randbytes(100), b"[" * 5000, b'{"a":' * 3000, b"\x1f\x8b", b"PK\x03\x04"]
    )


def value(data: bytes, draw: random.Random) -> bytes:
    """Put something hostile in place of a value of a JSON file, or of one of its lines."""
    lines = data.split(b"\n") if data.count(b"\n") else [data]
    number = draw.randrange(len(lines))
    try:
        content = json.loads(lines[number])
    except ValueError:
        return cell(data, draw)
    at = content
    while isinstance(at, dict | list) and at:
        key = draw.choice(list(at)) if isinstance(at, dict) else draw.randrange(len(at))
        if draw.random() < 0.3 or not isinstance(at[key], dict | list) or not at[key]:
            at[key] = draw.choice(VALUES)
            break
        at = at[key]
    lines[number] = json.dumps(content).encode()
    return b"\n".join(lines)


def array(data: bytes, draw: random.Random) -> bytes:
    return npz(**{draw.choice(["x", "y", "client", "domain", "time", "held_out"]): draw.choice(ARRAYS)})


CHANGES: list[Callable[[bytes, random.Random], bytes]] = [
    flip, flip, early, cut, double, remove, digits, line, cell, cell, encoding, nonsense
]  # fmt: skip
AIMED = {
    "leaf": value,
    "text": value,
    "text-gz": value,
    "npz": array,
    "npz-pictures": array,
    "trace-json": value,
    "latency": value,
}


def damaged(kind: str, files: Files, draw: random.Random) -> tuple[Files, str]:
    """Return the files with one of them changed, and what was done."""
    name = draw.choice(sorted(files))
    way = draw.random()
    if way < 0.03:
        return {other: data for other, data in files.items() if other != name}, f"{name} removed"
    if way < 0.06:
        other = draw.choice(sorted(files))
        return files | {name: files[other]}, f"{name} is {other}"
    how = AIMED[kind] if kind in AIMED and draw.random() < 0.3 else draw.choice(CHANGES)
    packed = name.endswith(".gz") and draw.random() < 0.7  # what has a checksum is damaged under it, too
    data = how(gzip.decompress(files[name]) if packed else files[name], draw)
    return files | {name: gzip.compress(data) if packed else data}, f"{name}: {how.__name__}{' inside' * packed}"


# -- what comes of it --------------------------------------------------------------------------------------------------


def reset_peak() -> bool:
    """Begin to measure the largest memory of this process anew; false where the system cannot."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def memory(what: str) -> int:
    """Bytes of this process: "VmRSS" now, "VmHWM" at most since the last `reset_peak`."""
    found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


def loaded(kind: str, folder: Path) -> Any:
    """Read the files in a folder: their rows, or what else they hold."""
    source = KINDS[kind][0]
    return source(folder) if callable(source) else source.load(folder, 0)


def check(rows: Any, done: str) -> None:
    if not isinstance(rows, Rows):
        values = (
            [rows] if isinstance(rows, torch.Tensor) else [getattr(rows, n, 0) for n in ("start", "length", "period")]
        )
        assert all(np.isfinite(np.asarray(value)).all() for value in values), done
        return
    x = rows.x if rows.x.is_floating_point() else rows.x.double()
    assert torch.isfinite(x).all(), done
    assert len(rows) > 0, done
    assert x[0].numel() > 0, done
    assert int(rows.y.min()) >= 0, done
    assert int(rows.y.max()) < rows.classes, done
    assert rows.classes <= max(1000, 2 * rows.y.numel()), f"{done}: {rows.classes} classes"
    for name in (*rows.client_names, *rows.domain_names):
        name.encode()
    if rows.client is not None:
        assert int(rows.client.max()) < len(rows.client_names), done
    if rows.time is not None:
        assert torch.isfinite(rows.time).all(), done


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_data_file_is_named_or_rows_are_rows(kind, seed, tmp_path, tried: Counter[str]):
    good = KINDS[kind][1]
    for number in range(BATCH):
        files, done = damaged(kind, good, random.Random(f"{kind} {seed} {number}"))
        folder = tmp_path / str(number)
        for name, data in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        folder.mkdir(exist_ok=True)
        tried["damaged data files"] += 1
        measured, before = reset_peak(), memory("VmRSS")
        try:
            with limited(60):
                rows = loaded(kind, folder)
        except FedtideError as error:
            said = str(error)
            assert "\n" not in said, done
            assert len(said) < 1200, f"{done}: a line of {len(said)} characters"
            assert re.search("|".join(re.escape(part) for name in good for part in name.split("/")), said), (
                f"{done}: {said}"
            )
            tried["damaged data files: named in one line"] += 1
        except Exception as error:
            pytest.fail(f"{kind} {seed} {number}, {done}: {type(error).__name__}: {error}")
        else:
            check(rows, done)
        assert not measured or memory("VmHWM") - before < MEMORY, f"{done}: {memory('VmHWM') - before:,} bytes"


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_data_file_is_read(kind, tmp_path):
    for name, data in KINDS[kind][1].items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    check(loaded(kind, tmp_path), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pipe_in_place_of_a_data_file_is_refused_or_left_out(kind, tmp_path):
    """It would wait for a writer for ever."""
    good = KINDS[kind][1]
    for number, pipe in enumerate(good):
        for name, data in good.items():
            path = tmp_path / str(number) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            os.mkfifo(path) if name == pipe else path.write_bytes(data)
        try:
            with limited(5):
                check(loaded(kind, tmp_path / str(number)), f"{pipe} is a pipe")
        except FedtideError as error:
            said = str(error)
            assert "\n" not in said
