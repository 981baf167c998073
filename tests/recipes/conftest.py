"""Data in the published formats, for the recipes that want them."""

import json

import numpy as np
import pytest

from fedtide.data.partition import CIFAR_100
from helpers.image_files import write_idx


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A data directory with a little of everything, in the published formats."""
    monkeypatch.setenv("FEDTIDE_DATA", str(tmp_path))
    draw = np.random.default_rng(0)
    for part, each in (("train", 6), ("test", 2)):
        labels = np.tile(np.arange(62, dtype=np.uint8), each)
        images = draw.integers(0, 256, (len(labels), 28, 28), dtype=np.uint8)
        write_idx(tmp_path / "emnist-byclass", f"emnist-byclass-{part}", images, labels)
    for name, classes, each, files in (
        ("cifar-10-batches-bin", 10, 20, ("data_batch_1.bin", "test_batch.bin")),
        ("cifar-100-binary", 100, 4, ("train.bin", "test.bin")),
    ):
        (tmp_path / name).mkdir()
        for file in files:
            labels = np.tile(np.arange(classes, dtype=np.uint8), each)
            coarse = [np.array([next(k for k, g in enumerate(CIFAR_100) if y in g) for y in labels], np.uint8)]
            columns = [*(coarse if classes == 100 else []), labels]
            pixels = draw.integers(0, 256, (len(labels), 3072), dtype=np.uint8)
            (tmp_path / name / file).write_bytes(np.column_stack([*columns, pixels]).tobytes())
    (tmp_path / "femnist").mkdir()
    for part in ("train", "test"):
        users = {
            f"u{k}": {"x": draw.random((31, 784)).round(2).tolist(), "y": list(range(2 * k, 62, 2))} for k in (0, 1)
        }
        for user in users.values():
            user["x"] = user["x"][: len(user["y"])]
        counts = [len(user["y"]) for user in users.values()]
        content = {"users": list(users), "num_samples": counts, "user_data": users}
        (tmp_path / "femnist" / f"{part}.json").write_text(json.dumps(content))
    posts = [
        {
            "user": str(user),
            "type": kind,
            "time": f"2008-09-01T0{k}:00:00",
            "text": f"Is w{user} a word? It is, of {k}.",
        }
        for user in range(4)
        for kind in ("question", "answer")
        for k in range(5)
    ]
    (tmp_path / "stackoverflow.jsonl").write_text("".join(json.dumps(post) + "\n" for post in posts))
    return tmp_path
