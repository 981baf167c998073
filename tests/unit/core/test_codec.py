"""The codec: every tree comes back bit for bit, nothing is executed, and damage is one clear line."""

import json
import sys
import types
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from fedtide.core import codec
from fedtide.core.base import Answer, Moment, Notes, Reply, Slotted, Sum, Weighted, Weights
from fedtide.core.errors import FedtideError
from fedtide.core.trees import same
from fedtide.fleets.ask import Ask
from helpers.examples import examples

law = examples(150)
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip


@dataclass(frozen=True)
class Held:
    value: Any
    more: Any = None
    derived: int = field(default=0, init=False)


class Outer:
    @dataclass(frozen=True)
    class Inner:
        value: Any


def tensor(dtype: torch.dtype, shape: list[int], seed: int, layout: str) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    size = 1
    for n in shape:
        size *= n
    bits = torch.randint(0, 256, (size * torch.zeros((), dtype=dtype).element_size(),), generator=draw).to(torch.uint8)
    flat = (bits % 2).bool() if dtype == torch.bool else bits.view(dtype) if size else torch.zeros(0, dtype=dtype)
    whole = flat.reshape(shape)
    if layout == "transposed":
        return whole.t() if whole.dim() == 2 else whole.transpose(0, -1) if whole.dim() else whole
    if layout == "strided":
        return whole[..., ::2] if whole.dim() else whole
    return whole


tensors = st.builds(
    tensor, st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3), st.integers(0, 99),
    st.sampled_from(["plain", "transposed", "strided"]),
)  # fmt: skip
plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
keys = st.text(st.characters(codec="utf-8"), max_size=4) | st.integers(-3, 3) | st.sampled_from(["a/b", "#1", "%", "."])
trees = st.recursive(
    plain | tensors,
    lambda below: (
        st.lists(below, max_size=3)
        | st.lists(below, max_size=3).map(tuple)
        | st.dictionaries(keys, below, max_size=3)
        | st.builds(Held, below, below)
        | st.builds(Outer.Inner, below)
    ),
    max_leaves=8,
)


# -- there and back ----------------------------------------------------------------------------------------------------


@law
@given(trees)
def test_a_tree_survives_as_bytes(tree):
    assert same(codec.from_bytes(codec.to_bytes(tree)), tree)


@examples(40)
@given(trees)
def test_a_tree_survives_as_a_file(tmp_path_factory, tree):
    path = tmp_path_factory.getbasetemp() / "tree.safetensors"
    codec.to_file(path, tree)
    assert same(codec.from_file(path), tree)


@examples(60)
@given(trees)
def test_a_sealed_tree_is_bytes_and_opens(tree):
    seal = codec.sealed({"tree": tree})
    assert seal.dtype == torch.uint8
    assert same(codec.opened(codec.from_bytes(codec.to_bytes({"seal": seal}))["seal"]), {"tree": tree})


NASTY = {
    "a key with a slash beside nested keys": {"a/b": torch.zeros(1), "a": {"b": torch.ones(1)}},
    "an int key beside its spelling": {1: torch.zeros(1), "1": torch.ones(1), "#1": torch.full((1,), 2.0)},
    "a percent sign": {"%2F": torch.zeros(1), "/": torch.ones(1)},
    "an empty key beside a dot": {"": torch.zeros(1), ".": torch.ones(1)},
    "an empty key above another": {"": {"a": torch.zeros(1)}, "a": torch.ones(1)},
    "a list beside int keys": {"x": [torch.zeros(1)], "y": {0: torch.ones(1)}},
    "a key that looks like a tag": {"array": torch.zeros(1), "class": "fedtide.core.base:Moment", "dict": []},
    "a word that looks like a float": ["nan", float("nan"), "inf", float("-inf")],
    "big numbers": [2**100, -(2**64), 5e-324, 1.7976931348623157e308, -0.0, 0.1],
    "nothing at all": [{}, [], (), "", None, torch.zeros(0), torch.zeros(0, 3)],
    "deep": [[[[[[[[torch.zeros(1)]]]]]]]],
}


@pytest.mark.parametrize("case", NASTY)
def test_no_two_leaves_are_mixed_up_by(case):
    assert same(codec.from_bytes(codec.to_bytes(NASTY[case])), NASTY[case])


def test_tensors_that_share_their_storage_come_back_apart():
    whole = torch.arange(6.0)
    tree = {"whole": whole, "again": whole, "part": whole[2:4], "turned": whole.view(2, 3).t(), "none": whole[:0]}
    back = codec.from_bytes(codec.to_bytes(tree))
    assert same(back, tree)
    back["whole"].zero_()
    assert same({k: v for k, v in back.items() if k != "whole"}, {k: v for k, v in tree.items() if k != "whole"})


@pytest.mark.parametrize("tree", [
    Moment(3, 10, 2.5),
    Weights({"w": torch.ones(2)}, {"mean": torch.zeros(1)}),
    Answer({"delta": Weighted(torch.ones(1), 3)}, {"pi": torch.ones(2)}, {"c": 1}, Notes(torch.zeros(()))),
    {"delta": Slotted({0: Weighted(1.0, 2.0), 3: Sum(torch.zeros(2), 0.0)}, 4)},
    Reply(None, {}, torch.arange(3), torch.ones(3), None),
    Ask("train", "train#1", Moment(0, 1), torch.arange(2), reveal=("pi",)),
], ids=lambda tree: type(tree).__name__)  # fmt: skip
def test_what_travels_between_processes_survives(tree):
    assert same(codec.from_bytes(codec.to_bytes(tree)), tree)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "leaf", [object(), {1, 2}, b"bytes", 1j, print, torch.float32, torch.zeros(1, dtype=torch.complex64)]
)
def test_only_tensors_and_plain_values_travel(leaf):
    with pytest.raises(TypeError, match="cannot travel"):
        codec.to_bytes({"a": [leaf]})


def crafted(name: str, fields: dict[str, Any] | None = None) -> bytes:
    header = json.dumps({"arrays": {}, "tree": {"class": name, "fields": fields or {}}}).encode()
    return len(header).to_bytes(8, "little") + header


def crafted_file(path: Path, name: str, fields: dict[str, Any] | None = None) -> Path:
    save_file({}, path, metadata={"tree": json.dumps({"class": name, "fields": fields or {}})})
    return path


@pytest.mark.parametrize("name", [
    "antigravity:Sky",  # a module that is not loaded
    "json.tool:main",  # not loaded, and would do something
    "subprocess:Popen",  # loaded, but no dataclass
    "os:system",
    "builtins:eval",
    "fedtide.core.base:Nothing",
    "fedtide.core.base:Moment.__init__",
    "fedtide.core.base:",
    ":Moment",
    "Moment",
])  # fmt: skip
def test_a_class_that_is_no_dataclass_of_a_loaded_module_is_refused(name):
    loaded = set(sys.modules)
    with pytest.raises(FedtideError, match="not a dataclass of a loaded module"):
        codec.from_bytes(crafted(name))
    assert not {"antigravity", "json.tool"} & (set(sys.modules) - loaded)


@pytest.mark.parametrize(("module", "why"), [("nowhere", "No module named"), ("core.loop", "import of .* halted")])
def test_a_module_of_this_package_that_cannot_be_imported_is_named_with_its_error(module, why, monkeypatch):
    """What a module needs may be missing here: then the class is no fault of the message."""
    monkeypatch.setitem(sys.modules, "fedtide.core.loop", None)
    line = rf"^fedtide\.{module}:Start: fedtide\.{module} cannot be imported \({why}[^\n]*\)$"
    with pytest.raises(FedtideError, match=line):
        codec.from_bytes(crafted(f"fedtide.{module}:Start"))


def test_a_class_of_this_package_is_found_although_its_module_is_not_loaded_yet(monkeypatch):
    monkeypatch.delitem(sys.modules, "fedtide.core.loop")
    assert codec.from_bytes(crafted("fedtide.core.loop:Start", {"state": None})).round == 0


def test_a_class_of_the_users_own_module_is_found_once_that_is_loaded(monkeypatch):
    module = types.ModuleType("someones_own")
    module.Mine = make_dataclass("Mine", ["x"], frozen=True)
    with pytest.raises(FedtideError, match="someones_own:Mine"):
        codec.from_bytes(crafted("someones_own:Mine", {"x": 1}))
    monkeypatch.setitem(sys.modules, "someones_own", module)
    assert codec.from_bytes(crafted("someones_own:Mine", {"x": 1})) == module.Mine(1)


def test_reading_a_file_never_starts_a_program(monkeypatch, tmp_path):
    """`fedtide.__main__` is a module of this package, and importing it runs the command line."""
    path = crafted_file(tmp_path / "crafted.safetensors", "fedtide.__main__:main")
    started = []
    monkeypatch.setattr("fedtide.cli.commands.main", lambda: started.append(True))
    monkeypatch.delitem(sys.modules, "fedtide.__main__", raising=False)
    with pytest.raises(FedtideError):
        codec.from_file(path)
    assert not started


def test_a_class_that_has_changed_since_is_one_clear_line(tmp_path):
    fields = {"round": 0, "rounds": 1, "century": 19}
    path = crafted_file(tmp_path / "old.safetensors", "fedtide.core.base:Moment", fields)
    with pytest.raises(FedtideError, match=r"old.safetensors: damaged or not a file of this program \(.*century"):
        codec.from_file(path)


# -- damage ------------------------------------------------------------------------------------------------------------

TREE = {"w": torch.arange(5.0), "n": 3, "m": Moment(1, 2, 3.0), "x": [None, float("nan")]}


def test_a_missing_file_is_one_clear_line(tmp_path):
    with pytest.raises(FedtideError, match=r"nothing.safetensors: no such file$"):
        codec.from_file(tmp_path / "nothing.safetensors")


@pytest.mark.parametrize("content", [b"", b"\0" * 8, b"\xff" * 64, b"PK\x03\x04 not this", b"\x02" + b"\0" * 7 + b"{}"])
def test_another_kind_of_file_is_one_clear_line(tmp_path, content):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(FedtideError, match="damaged or not a file of this program") as error:
        codec.from_file(path)
    assert "\n" not in str(error.value)


def test_a_file_cut_off_anywhere_is_one_clear_line(tmp_path):
    path = tmp_path / "cut.safetensors"
    codec.to_file(path, TREE)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(FedtideError, match=r"cut.safetensors: damaged") as error:
            codec.from_file(path)
        assert "\n" not in str(error.value)


def test_a_file_with_any_bit_flipped_is_read_or_one_clear_line(tmp_path):
    path = tmp_path / "flipped.safetensors"
    codec.to_file(path, TREE)
    whole = path.read_bytes()
    for place in range(len(whole)):
        for bit in (0, 5, 7):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << bit)]) + whole[place + 1 :])
            line = ""
            try:
                codec.from_file(path)
            except FedtideError as error:
                line = str(error)
            assert "\n" not in line
            assert len(line) < 500
