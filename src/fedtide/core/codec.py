"""The wire codec: any tree as flat named arrays and a JSON skeleton, and back, bit for bit.

Arrays travel as safetensors; the skeleton holds structure and plain values. Nothing is ever unpickled and no code is
loaded for data: a dataclass is rebuilt only if it is this package's own or its module is already loaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import math
import sys
from collections.abc import Iterator
from functools import lru_cache
from json.encoder import encode_basestring_ascii
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, load_file, save_file
from torch import Tensor

from fedtide.core.errors import FedtideError
from fedtide.core.trees import Tree, children, is_node, raw, unshare

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""Types of numbers that travel, by their names in safetensors."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}

UNFINISHED = r"\.tmp[A-Za-z0-9]{6}"
"""Pattern of the names of files that safetensors has not finished, as those of a process that was killed."""


def encode(tree: Tree) -> tuple[dict[str, Tensor], Any]:
    """A tree as (arrays by name, skeleton that `json.dumps` takes).

    >>> arrays, skeleton = encode({"w": torch.ones(2), "n": 3})
    >>> sorted(arrays), skeleton
    (['w'], {'dict': [['w', {'array': 'w'}], ['n', 3]]})
    """
    arrays: dict[str, Tensor] = {}
    return arrays, _encode(tree, "", arrays)


def _encode(tree: Tree, path: str, arrays: dict[str, Tensor]) -> Any:
    if isinstance(tree, Tensor):
        name = path or "."
        arrays[name] = tree.detach()
        return {"array": name}
    if tree is None or isinstance(tree, bool | int | str):
        return tree
    if isinstance(tree, float):
        return tree if math.isfinite(tree) else {"float": repr(tree)}
    if not is_node(tree):
        raise TypeError(f"{path or 'the tree'}: {type(tree).__name__} cannot travel; use tensors and plain values")
    parts = [(key, _encode(child, _below(path, key), arrays)) for key, child in children(tree)]
    if isinstance(tree, dict):
        return {"dict": [[key, part] for key, part in parts]}
    if isinstance(tree, list | tuple):
        return {"list" if isinstance(tree, list) else "tuple": [part for _, part in parts]}
    return {"class": f"{type(tree).__module__}:{type(tree).__qualname__}", "fields": dict(parts)}


def _below(path: str, key: str | int) -> str:
    return f"{path}/{_part(key)}" if path else _part(key)


@lru_cache(maxsize=4096, typed=True)
def _part(key: str | int) -> str:
    """Spell a key in the name of an array."""
    if isinstance(key, int):  # an int key and its spelling as a string may stand side by side in one dict
        return f"#{key}"
    part = key.replace("%", "%25").replace("/", "%2F").replace("#", "%23").replace(".", "%2E" if key == "." else ".")
    return part or "%"


def decode(arrays: dict[str, Tensor], skeleton: Any) -> Tree:
    """The tree that `encode` was given."""
    if not isinstance(skeleton, dict):
        return skeleton
    (tag, value), *_ = skeleton.items()
    if tag == "array":
        return arrays[value]
    if tag == "float":
        return float(value)
    if tag == "dict":
        return {key: decode(arrays, part) for key, part in value}
    if tag == "list":
        return [decode(arrays, part) for part in value]
    if tag == "tuple":
        return tuple(decode(arrays, part) for part in value)
    return _dataclass_named(value)(**{key: decode(arrays, part) for key, part in skeleton["fields"].items()})


def _dataclass_named(name: str) -> type:
    """The dataclass `module:qualname` of this package, or of a module that the configuration has already loaded."""
    module, _, qualname = name.partition(":")
    if module.startswith("fedtide."):
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type) or not dataclasses.is_dataclass(found):
        raise FedtideError(
            f"{name}: not a dataclass of a loaded module; a state's classes stand at the top level of their module"
        )
    return found


def _separate(arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """The arrays contiguous and without shared storage, as safetensors wants them."""
    return {
        name: array.contiguous()
        if array.untyped_storage().nbytes() == array.numel() * array.element_size() and array.is_contiguous()
        else array.clone(memory_format=torch.contiguous_format)
        for name, array in zip(arrays, unshare(arrays.values()), strict=True)
    }


def to_bytes(tree: Tree) -> bytes:
    """A tree as bytes: safetensors with the skeleton in its header.

    >>> from_bytes(to_bytes({"w": torch.ones(2), "n": (3, None, float("inf"))}))
    {'w': tensor([1., 1.]), 'n': (3, None, inf)}
    """
    arrays, skeleton = encode(tree)
    entries, parts, end = [f'{{"__metadata__": {{"tree": {json.dumps(json.dumps(skeleton))}}}'], [], 0
    for name, array in sorted(arrays.items(), key=lambda item: -item[1].itemsize):  # so that all are aligned
        parts.append((raw(array) if array.dtype == torch.bfloat16 else array.contiguous()).numpy().data)
        start, end = end, end + array.nbytes
        entries.append(
            f'{encode_basestring_ascii(name)}: {{"dtype": "{NAMES[array.dtype]}", "shape": {list(array.shape)}, '
            f'"data_offsets": [{start}, {end}]}}'
        )
    text = f"{', '.join(entries)}}}".encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])  # a third of the time that safetensors takes


def from_bytes(data: bytes) -> Tree:
    """The tree that `to_bytes` was given."""
    length = int.from_bytes(data[:8], "little")
    skeleton = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["tree"])
    return decode(load(data), skeleton)


def sealed(tree: Tree) -> Tensor:
    """A tree as one array of bytes, to be opened later: a receiver may first have to load the classes in it."""
    return torch.frombuffer(bytearray(to_bytes(tree)), dtype=torch.uint8)


def opened(seal: Tensor) -> Tree:
    """The tree that `sealed` was given.

    >>> opened(sealed({"a": 1}))
    {'a': 1}
    """
    return from_bytes(seal.numpy().tobytes())


def to_file(path: Path, tree: Tree) -> None:
    """Write a tree to a safetensors file."""
    arrays, skeleton = encode(tree)
    try:
        save_file(_separate(arrays), path, metadata={"tree": json.dumps(skeleton)})
    except SafetensorError as error:
        raise FedtideError(f"{path}: cannot be written ({error})") from None


def from_file(path: Path) -> Tree:
    """Read a tree from a safetensors file; a damaged one is named."""
    with _named(path):
        return decode(load_file(path), _skeleton(path))


def piece(path: Path, key: str) -> Tree:
    """Return the value of one key of a dict in a safetensors file, without reading the rest; None if it is missing."""
    with _named(path):
        parts = dict(_skeleton(path)["dict"])
        with safe_open(path, "pt") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys() if name.startswith(_below("", key))}  # noqa: SIM118
        return decode(arrays, parts.get(key))


def _skeleton(path: Path) -> Any:
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError("its header is longer than the file")
        return json.loads(json.loads(file.read(length))["__metadata__"]["tree"])


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Turn any problem with a file into one line that names it."""
    try:
        yield
    except FedtideError:
        raise
    except FileNotFoundError:
        raise FedtideError(f"{path}: no such file") from None
    except Exception as error:
        raise FedtideError(f"{path}: damaged or not a file of this program ({error})") from error
