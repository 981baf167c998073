"""Bytes of strangers: what the codec writes is read, all else is refused in one line, and nothing is loaded for it."""

import json
import struct
import sys
import tracemalloc
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from safetensors.torch import save

from fedtide.core.base import Slotted, Weighted, Weights
from fedtide.core.codec import HEADER, NAMES, decode_message, parse, to_bytes
from fedtide.core.errors import FedtideError
from fedtide.core.files import read_toml
from fedtide.core.trees import same

TREES = [
    None, 3, -0.0, float("nan"), float("-inf"), "é\u2028/#%.", torch.zeros(0, 3), torch.tensor(1.0), [], (), {},
    {"": {".": torch.ones(1), 1: [True, ()], "1": None}},
    {"w": Weights({"a": torch.ones(2, 3)}, {"b": torch.zeros(0)}), "s": Slotted({1: Weighted(torch.ones(3), 2)}, 3)},
    {str(dtype): torch.ones(3).to(dtype) for dtype in NAMES},
]  # fmt: skip


@dataclass(frozen=True)
class Own:
    value: Any


@pytest.mark.parametrize("tree", TREES, ids=repr)
def test_what_the_codec_writes_is_read(tree):
    assert same(decode_message(to_bytes(tree)), tree)


def test_arrays_can_be_written_to():
    assert same(decode_message(to_bytes({"w": torch.ones(3)}))["w"].add_(1), torch.full((3,), 2.0))


def test_messages_with_the_same_header_are_each_what_they_say():
    first, second = ({"w": torch.full((3,), value), "v": torch.zeros(0, 2)} for value in (1.0, 2.0))
    one, other = to_bytes(first), to_bytes(second)
    assert one[:-12] == other[:-12]
    kept = decode_message(one)
    assert same(decode_message(other), second)
    assert same(kept["w"].add_(1), torch.full((3,), 2.0))
    assert same(decode_message(one), first)
    for data in (one[:-1], one + b"\0"):
        with pytest.raises(FedtideError, match="bytes', allowed: the 12 that its header names"):
            decode_message(data)


def message(tree: Any, data: bytes = b"", **counts: Any) -> bytes:
    """Bytes with any header."""
    return raw({"arrays": counts, "tree": tree}, data)


def raw(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


A = {"F32": [1]}
DEEP = json.loads('{"list": [' * 33 + "]}" * 33)

REFUSED = {
    "nothing": b"",
    "short": b"\0" * 7,
    "zeros": b"\0" * 64,
    "long header": struct.pack("<Q", 2**63) + b"{}",
    "header of another file": b"PK\3\4" * 30,
    "not text": raw(b"\xff\xfe{}"),
    "not JSON": raw(b"{" * 100),
    "a list": raw([]),
    "no tree": raw({"arrays": {}}),
    "no arrays": raw({"tree": 1}),
    "arrays that are a list": raw({"arrays": [], "tree": 1}),
    "nested lists": raw(b"[" * 100_000),
    "nested objects": raw(b'{"a":' * 100_000),
    "a nested tree": raw(b'{"arrays":{},"tree":' + b'{"list":[' * 100_000),
    "34 levels": message(DEEP),
    "a key of a tree twice": message({"dict": [["a", 1], ["a", 2]]}),
    "a key that is true": message({"dict": [[True, 1]]}),
    "a key that is a list": message({"dict": [[[1], 1]]}),
    "pairs of three": message({"dict": [["a", 1, 2]]}),
    "pairs that are a number": message({"dict": 7}),
    "a bare list": message([1, 2]),
    "a list that is a word": message({"list": "abc"}),
    "no tag": message({}),
    "two tags": message({"list": [], "dict": []}),
    "an unknown tag": message({"set": []}),
    "a float that is a word": message({"float": "infinity"}),
    "a float that is none": message(float("nan")),
    "a float beyond": raw(b'{"arrays":{},"tree":1e999}'),
    "a huge number": message(10**40),
    "a very huge number": raw(b'{"arrays":{},"tree":' + b"9" * 100_000 + b"}"),
    "an array that is not there": message(A),
    "an array too many": message({"list": [A, A]}, bytes(4), F32=1),
    "an array in no place": message(1, bytes(4), F32=1),
    "an array of another type": message(A, bytes(8), F64=1),
    "an unknown type": message({"C64": [1]}, bytes(8), C64=1),
    "half a number": message(A, bytes(4), F32=1.0),
    "numbers that are true": message(A, bytes(4), F32=True),
    "fewer numbers than none": message({"list": [A, A]}, bytes(4), F32=2, I32=-1),
    "numbers that are a word": message(A, bytes(4), F32="1"),
    "more numbers than bytes": message(A, bytes(4), F32=2**62),
    "a negative shape": message({"F32": [-1]}, bytes(4), F32=1),
    "two negative dimensions": message({"F32": [-1, -1]}, bytes(4), F32=1),
    "a shape of fractions": message({"F32": [1.0]}, bytes(4), F32=1),
    "a shape of lists": message({"F32": [[1]]}, bytes(4), F32=1),
    "a shape of truths": message({"F32": [True]}, bytes(4), F32=1),
    "a shape that is a number": message({"F32": 1}, bytes(4), F32=1),
    "a shape that is a word": message({"F32": ""}, bytes(4), F32=1),
    "a shape that is an object": message({"F32": {}}, bytes(4), F32=1),
    "a huge shape": message({"F32": [2**62, 4]}, bytes(4), F32=1),
    "a huge shape of nothing": message({"F32": [2**62, 0]}, F32=0),
    "a shape that overflows": message({"F32": [2**32, 2**32]}, F32=0),
    "thousands of dimensions": message({"F32": [1] * 5000}, bytes(4), F32=1),
    "too few bytes": message(A, bytes(3), F32=1),
    "too many bytes": message(A, bytes(5), F32=1),
    "true beyond one": message({"BOOL": [1]}, b"\2", BOOL=1),
    "a class of this module": to_bytes(Own(1)),
    "a class without a name": message({"class": None, "fields": {}}),
    "a class that is a list": message({"class": [], "fields": {}}),
    "fields that lack": message({"class": "fedtide.core.base:Weighted", "fields": {"value": 1}}),
    "fields too many": message({"class": "fedtide.core.base:Weighted", "fields": {"value": 1, "weight": 1, "x": 1}}),
    "fields that are a list": message({"class": "fedtide.core.base:Weighted", "fields": ["value", "weight"]}),
    "no fields": message({"class": "fedtide.core.base:Weighted"}),
    "fields by another name": message({"class": "fedtide.core.base:Weighted", "f": {"value": 1, "weight": 1}}),
    "a file": save({"a": torch.ones(1)}),
}


@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED)
def test_what_is_not_the_codecs_is_refused_in_one_line(data):
    with pytest.raises(FedtideError) as caught:
        decode_message(data)
    assert str(caught.value).startswith("message")
    assert "\n" not in str(caught.value)


def test_no_module_is_loaded_on_a_strangers_word():
    sys.modules.pop("fedtide.fleets.ray_pool", None)
    with pytest.raises(FedtideError, match=r"found 'fedtide\.fleets\.ray_pool:RayPool', allowed: Weighted, Slotted, W"):
        decode_message(message({"class": "fedtide.fleets.ray_pool:RayPool", "fields": {}}))
    assert "fedtide.fleets.ray_pool" not in sys.modules


def test_classes_that_are_expected_are_built():
    assert decode_message(to_bytes({"own": Own((1,))}), (Own,)) == {"own": Own((1,))}


@pytest.mark.parametrize(
    "data",
    [
        raw(b'{"arrays":{},"tree":[' + b"[]," * 100_000 + b"[]]}"),
        raw(b'{"arrays":{},"tree":1,"a":[' + b"{}," * 100_000 + b"{}]}"),
        raw(b'{"a":[' + b'{"":0},' * 100_000 + b"{}]}"),
        message({"class": "fedtide.core.base:Slotted", "fields": {"parts": {"dict": []}, "slots": 10**9}}),
        message({"U8": [2**20]}, bytes(2**20), U8=2**20),
        message({"U8": ["a", 2**28]}, bytes(1), U8=1),
        message({"U8": [[0], 2**24]}, bytes(1), U8=1),
        message({"U8": [2**40] * 20_000}, bytes(1), U8=1),
    ],
    ids=["lists", "objects", "small objects", "slots", "an array", "a word", "a list", "a product"],
)
def test_memory_is_a_small_multiple_of_the_bytes(data):
    tracemalloc.start()
    try:
        decode_message(data)
    except FedtideError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 50 * len(data) + 100_000


def test_a_shape_of_many_huge_numbers_is_refused_before_they_are_multiplied(monkeypatch):
    monkeypatch.setattr("fedtide.core.codec.math.prod", None)
    with pytest.raises(FedtideError, match=r"^message: shape"):
        decode_message(message({"U8": [2**40] * 20_000}, bytes(1), U8=1))


def test_a_header_is_bounded():
    with pytest.raises(FedtideError, match=rf"allowed: at most {HEADER}$"):
        decode_message(raw(b" " * (HEADER + 1)))


@pytest.mark.parametrize(
    "text",
    [
        "NaN", "-Infinity", "1e999", "9" * 21, "9" * 5000, str(2**63), '{"a":1,"a":1}', "[" * 33 + "]" * 33, "", "{",
        b"\xff", "[" * 10**5, "x" * 200_000, None, 3,
    ],
    ids=lambda text: str(text)[:12],
)  # fmt: skip
def test_json_is_bounded(text):
    with pytest.raises(FedtideError, match=r"^header: ") as caught:
        parse(text, 150_000, "header")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("value", [{"a": [1, -(2**63), 0.5, None, True, "x"]}, json.loads("[" * 32 + "]" * 32), 3])
def test_plain_json_is_read(value):
    assert parse(json.dumps(value).encode(), 1000, "header") == value


@pytest.mark.parametrize("part", ["a.", '"a b" . ', "'!'.", '"\\"".'])
def test_a_key_of_many_parts_is_refused_before_it_takes_long(part, tmp_path):
    """20,000 parts took ten seconds, and two megabytes a day."""
    (tmp_path / "x.toml").write_text(f"b = 1\n{part * 20_000}a = 1\n")
    with pytest.raises(FedtideError, match=r"x.toml: not valid TOML: a key of more than 30 parts \(at line 2\)"):
        read_toml(tmp_path / "x.toml")
    (tmp_path / "x.toml").write_text(f"{part * 25}a = '{'a.' * 29}'\n")
    assert read_toml(tmp_path / "x.toml")
