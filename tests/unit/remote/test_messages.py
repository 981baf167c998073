"""Headers between server and nodes: what is not of the right type, range and key is refused in one line."""

import contextlib
import json
import random
from typing import Any

import pytest

from fedtide.core.bounds import HEADER
from fedtide.core.errors import FedtideError
from fedtide.remote.messages import AnswerHeader, WorkHeader, from_json, read, read_question

ASK: dict[str, Any] = {
    "kind": "ask", "protocol": 1, "run": "0123abcd", "question": "train", "purpose": "train#1",
    "moment": {"round": -2, "rounds": 10, "seconds": 3.5}, "version": [-2, 1], "reveal": ["pi"], "clients": [1, 4],
    "members": 7, "slot": {"1": 0, "4": 2}, "counted": {"1": [1, 0], "4": None}, "settled": {"1": None, "4": None},
    "deadline": 600,
}  # fmt: skip


def test_a_question_is_read_as_it_is():
    assert read_question(ASK).model_dump(exclude_unset=True) == ASK


def set_at(header: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    made = json.loads(json.dumps(header))
    *above, last = key.split(".")
    table = made
    for part in above:
        table = table[part]
    table[last] = value
    return made


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kind", "tell"), ("kind", ["ask"]), ("kind", None), ("protocol", True), ("protocol", 1.0), ("protocol", "1"),
        ("protocol", -1), ("protocol", 2**63), ("run", 3), ("run", "x" * 201), ("moment.round", 1.5),
        ("moment.round", True),
        ("moment.seconds", float("nan")), ("moment.seconds", "1"), ("moment.part", 1), ("moment", [1, 2, 3]),
        ("version", [1]), ("version", [1, 2, 3]), ("version", [1, True]), ("version", {"0": 1}), ("reveal", "pi"),
        ("reveal", [1]), ("reveal", ["x"] * 101), ("clients", [1, 1]), ("clients", [-1, 4]), ("clients", [1, 2**40]),
        ("clients", ["1", "4"]), ("clients", [1]), ("slot", {"1": 0}), ("slot", {"1": 0, "4": 10**9}), ("slot", [0, 2]),
        ("slot", {"1": 0, "04": 2}), ("counted", {"1": None, "5": None}), ("counted", {"1": None, "4": "x"}),
        ("settled", None), ("deadline", float("inf")), ("deadline", -1), ("deadline", None), ("more", 1),
        ("part", "all"),
        ("personal", 1), ("grouping", "house"), ("other", None), ("members", -1),
    ],
    ids=str,
)  # fmt: skip
def test_a_wrong_value_is_named(key, value):
    with pytest.raises(FedtideError) as caught:
        read_question(set_at(ASK, key, value))
    line = str(caught.value)
    assert line.startswith(f"question.{key}") or key in ("kind", "clients")
    assert "allowed: " in line
    assert "\n" not in line


@pytest.mark.parametrize("key", ASK)
def test_a_key_that_lacks_is_named(key):
    header = {name: value for name, value in ASK.items() if name != key}
    if key == "kind":
        with pytest.raises(FedtideError, match=r"^question.kind: found None, allowed: ask, score, keys, deal, unmask$"):
            read_question(header)
        return
    if key in ("members", "slot"):
        read_question(header)
        return
    with pytest.raises(FedtideError, match=rf"^question\.{key}: .*field required"):
        read_question(header)


@pytest.mark.parametrize("header", [None, [], 3, "ask", {}, {1: 2}])
def test_what_is_no_header_is_refused(header):
    for kind in (AnswerHeader, WorkHeader):
        if (kind, header) != (AnswerHeader, {}):
            with pytest.raises(FedtideError, match=r"^header"):
                read(kind, header)
    with pytest.raises(FedtideError, match=r"^question"):
        read_question(header)


@pytest.mark.parametrize(
    "told",
    [{"clients": {"-1": "x"}}, {"clients": {"1": 3}}, {"clients": {"1": "x" * 2001}}, {"kept": [1.0]},
     {"seconds": 1e300}, {"clients": {"\ud800": "x"}}, {"clients": {"1\n": "x"}}, {"failed": True}, {"\x1b[2J\n": 1}],
)  # fmt: skip
def test_what_a_node_says_is_bounded(told):
    with pytest.raises(FedtideError) as caught:
        read(AnswerHeader, told, "berlin")
    assert str(caught.value).startswith("berlin.")
    assert "\x1b" not in str(caught.value)


def test_json_is_an_object_within_bounds():
    assert from_json(json.dumps(ASK)) == ASK
    for text in ("[1]", "3", '{"a": NaN}', '{"a":' * 40 + "1" + "}" * 40, json.dumps({"a": "x" * HEADER}), b"\xff"):
        with pytest.raises(FedtideError, match=r"^header: "):
            from_json(text)


def test_no_value_makes_another_error():
    draw = random.Random(0)
    odd = [None, True, -1, 2**70, 1e400, float("nan"), "", "x" * 3000, [], {}, [[]], {"1": {}}, [None], b"x", {1: 1}]
    for _ in range(2000):
        header = json.loads(json.dumps(ASK))
        for _ in range(draw.choice([1, 2])):
            header[draw.choice([*ASK, "part", "more"])] = draw.choice(odd)
        with contextlib.suppress(FedtideError):
            read_question(header)
