"""Configurations with one wrong value: a line that names the key, or a configuration that is one."""

import copy
import random
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from fedtide.config import read
from fedtide.core.errors import FedtideError
from fedtide.runs import job

from .conftest import BATCH, limited

NAMES = [path.stem for path in job.recipes()]

WRONG: list[Any] = [
    0, -1, 1, 2.5, 1e300, 1e-300, -1e300, float("nan"), float("inf"), 10**12, 10**30, True, False, "", "x", "mnist",
    "python:os:system", "builtins:dict", "../../etc/passwd", "/", "\0", "a" * 10_000, "[/b]", "{{7*7}}", "é\u202e", [],
    [[]], [0, 0], ["a", 1], {}, {"kind": "x"}, {"kind": ["a"]}, {"a": {"b": {"c": 1}}},
]  # fmt: skip


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield where every value of a configuration stands, tables and lists among them."""
    if at:
        yield at
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from places(child, (*at, key))


def put(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    made = copy.deepcopy(value)
    inside = made
    for key in at[:-1]:
        inside = inside[key]
    inside[at[-1]] = new
    return made


def refusal(path: Path, scale: str | None) -> str:
    """Return the line with which a configuration is refused; "" if it is taken."""
    try:
        with limited(60):
            read(path, scale=scale)
    except FedtideError as error:
        return str(error)
    return ""


def test_one_wrong_value_is_named_or_taken(seed, tmp_path, tried: Counter[str]):
    draw = random.Random(seed)
    path = tmp_path / "study.toml"
    for _ in range(BATCH):
        name = draw.choice(NAMES)
        content = tomllib.loads(job.recipe(name).read_text(encoding="utf-8"))
        at = draw.choice(list(places(content)))
        new = draw.choice(WRONG)
        path.write_text(tomli_w.dumps(put(content, at, new)), encoding="utf-8")
        scale = draw.choice([None, *content.get("scale", {})])
        tried["configurations"] += 1
        try:
            said = refusal(path, scale)
        except Exception as error:
            pytest.fail(f"{name}, scale {scale}: {at} = {str(new)[:40]!r}: {type(error).__name__}: {error}")
        assert "\n" not in said
        assert len(said) < 1000, f"{name}: {at} = {str(new)[:40]}: a line of {len(said)} characters"
        tried["configurations: named in one line"] += bool(said)


def test_text_that_is_no_configuration(seed, tmp_path, tried: Counter[str]):
    """Bytes cut, flipped, doubled and nested."""
    draw = random.Random(seed)
    path = tmp_path / "study.toml"
    for _ in range(BATCH):
        data = job.recipe(draw.choice(NAMES)).read_bytes()
        place = draw.randrange(len(data))
        data = draw.choice([
            data[:place], data[:place] + draw.randbytes(3) + data[place:], data[:place] + data[place // 2 :],
            b"a = " + b"[" * 4000, b"a = " + b"{b=" * 4000, b"x." * 4000 + b"y = 1", b"\xff\xfe" + data, b"", b"\0",
            b"rounds = " + b"9" * 5000, b"rounds = 0x" + b"f" * 5000,
            data.replace(b"lr = 0.1", b"lr = 0x" + b"f" * 5000),
        ])  # fmt: skip
        path.write_bytes(data)
        tried["texts that are no configuration"] += 1
        assert "\n" not in refusal(path, None)
