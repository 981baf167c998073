"""The codec: any tree as arrays and a JSON skeleton, and back, bit for bit.

As bytes, which travel, the arrays of a type lie one after the other, in the order in which they stand in the tree. In
files, which are kept, they are safetensors with names. The skeleton holds structure and plain values. Nothing is ever
unpickled, and no code is loaded for data. A dataclass is rebuilt only if it belongs to this package or its module is
already loaded. `decode_message` and `parse` read what strangers wrote, within bounds and with one kind of error.
"""

import contextlib
import dataclasses
import importlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedtide.core.base import Slotted, Weighted, Weights
from fedtide.core.bounds import DEEPEST
from fedtide.core.errors import UNREADABLE, FedtideError, refused
from fedtide.core.trees import Tree, children, is_node, unshare

DTYPES: dict[str, tuple[torch.dtype, Any]] = {
    "F64": (torch.float64, np.float64), "I64": (torch.int64, np.int64), "F32": (torch.float32, np.float32),
    "I32": (torch.int32, np.int32), "F16": (torch.float16, np.float16), "BF16": (torch.bfloat16, np.int16),
    "I16": (torch.int16, np.int16), "I8": (torch.int8, np.int8), "U8": (torch.uint8, np.uint8),
    "BOOL": (torch.bool, np.bool_),
}  # fmt: skip
"""Types of numbers that travel, wide ones first, so that all are aligned; and as what NumPy cuts them, which takes a
third of the time that torch does, and knows no bfloat16."""

NAMES = {dtype: name for name, (dtype, _) in DTYPES.items()}

FLOATS = {repr(value): value for value in (math.inf, -math.inf, math.nan)}
"""Plain numbers that JSON has no spelling for."""

LONGEST = 2**40
"""Largest dimension of a shape, which matters only if another one is zero."""

CLASSES: tuple[type, ...] = (Weighted, Slotted, Weights)
"""What an answer is made of, beside tensors, containers and plain values."""

HEADER = 8 * 2**20
"""Bytes that the header of a stranger's message may have. Parsed it takes up to 40 times as many."""

UNFINISHED = r"\.tmp[A-Za-z0-9]{6}"
"""Pattern of the names of files that safetensors has not finished, as those of a process that was killed."""


# -- skeletons --------------------------------------------------------------------------------------------------------


def encode(tree: Tree) -> tuple[dict[str, Tensor], Any]:
    """A tree as (arrays by name, skeleton that `json.dumps` takes).

    >>> arrays, skeleton = encode({"w": torch.ones(2), "n": 3})
    >>> sorted(arrays), skeleton
    (['w'], {'dict': [['w', {'array': 'w'}], ['n', 3]]})
    """
    arrays: dict[str, Tensor] = {}

    def name(array: Tensor, path: str) -> Any:
        arrays[path or "."] = array.detach()
        return {"array": path or "."}

    return arrays, _skeleton_of(tree, "", name)


def decode(arrays: Mapping[str, Tensor], skeleton: Any) -> Tree:
    """The tree that `encode` was given."""
    return _tree_of(skeleton, lambda _, name: arrays[name])


def _skeleton_of(tree: Tree, path: str, place: Callable[[Tensor, str], Any]) -> Any:
    """Return the skeleton of a tree; `place` takes an array and returns what stands in its place."""
    if isinstance(tree, Tensor):
        return place(tree, path)
    if tree is None or isinstance(tree, bool | int | str):
        return tree
    if isinstance(tree, float):
        return tree if math.isfinite(tree) else {"float": repr(tree)}
    if not is_node(tree):
        raise TypeError(f"{path or 'the tree'}: {type(tree).__name__} cannot travel; use tensors and plain values")
    parts = [[key, _skeleton_of(child, _below(path, key), place)] for key, child in children(tree)]
    if isinstance(tree, dict):
        return {"dict": parts}
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


def _tree_of(
    skeleton: Any, take: Callable[[str, Any], Tensor], classes: Mapping[str, type] | None = None, deep: int = 0
) -> Tree:
    """Return the tree of a skeleton.

    Args:
        skeleton: as `_skeleton_of` makes it.
        take: returns an array, by what stands in its place.
        classes: allowed classes by name, for a skeleton of a stranger; None trusts it.
        deep: how deep this part of it lies.
    """
    if not isinstance(skeleton, dict):
        if classes is not None and not _is_plain(skeleton):
            raise refused("message tree", skeleton, "a plain value, or an object that says what it is")
        return skeleton
    if classes is not None and deep == DEEPEST:
        raise FedtideError(f"message tree: nested deeper than allowed: {DEEPEST}")
    if len(skeleton) != (2 if "class" in skeleton else 1):
        raise refused("message tree", list(skeleton), "one word that says what it is")
    tag, value = next(iter(skeleton.items()))
    deep += 1
    if tag == "dict":
        tree = {key: _tree_of(part, take, classes, deep) for key, part in value}
        if len(tree) != len(value) or not all(type(key) in (str, int) for key in tree):
            raise refused("message tree", [key for key, _ in value], "different keys, words or whole numbers")
        return tree
    if tag == "class":
        kind, fields = _dataclass_named(value, classes), skeleton["fields"]
        names = list(fields) if classes is None else [field.name for field in dataclasses.fields(kind) if field.init]
        if list(fields) != names:
            raise refused(f"message tree: {kind.__name__}", list(fields), ", ".join(names))
        return kind(**{name: _tree_of(fields[name], take, classes, deep) for name in names})
    if tag in ("list", "tuple"):
        if not isinstance(value, list):
            raise refused("message tree", value, "a list")
        parts = [_tree_of(part, take, classes, deep) for part in value]
        return parts if tag == "list" else tuple(parts)
    return FLOATS[value] if tag == "float" else take(tag, value)


def _is_plain(value: Any) -> bool:
    """Tell whether a value is a word, a truth, a finite number, a whole number of 64 bits, or None."""
    if isinstance(value, int):
        return -(2**63) <= value < 2**63
    return math.isfinite(value) if isinstance(value, float) else value is None or isinstance(value, str)


def _dataclass_named(name: str, classes: Mapping[str, type] | None) -> Any:
    """The dataclass `module:qualname`: one of some, or of this package, or of a module that is already loaded."""
    if classes is not None:
        if name not in classes:
            raise refused("message tree", name, ", ".join(kind.__name__ for kind in classes.values()))
        return classes[name]
    module, _, qualname = name.partition(":")
    if module.startswith("fedtide."):
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise FedtideError(f"{name}: {module} cannot be imported ({error})") from None
    target: Any = sys.modules.get(module)
    for part in qualname.split("."):
        target = getattr(target, part, None)
    if not isinstance(target, type) or not dataclasses.is_dataclass(target):
        raise FedtideError(
            f"{name}: not a dataclass of a loaded module; a state's classes stand at the top level of their module"
        )
    return target


# -- bytes ------------------------------------------------------------------------------------------------------------


def to_bytes(tree: Tree) -> bytes:
    """A tree as bytes: the length of a header, the header as JSON, and the arrays, type by type.

    >>> from_bytes(to_bytes({"w": torch.ones(2), "n": (3, None, float("inf"))}))
    {'w': tensor([1., 1.]), 'n': (3, None, inf)}
    """
    return b"".join(pieces(tree))


def pieces(tree: Tree) -> list[Any]:
    """Return the parts of a tree's bytes, in order, without a copy of its arrays."""
    counts: dict[str, int] = {}
    blocks: dict[str, list[Any]] = {name: [] for name in DTYPES}

    def add_array(array: Tensor, path: str) -> Any:
        name = NAMES.get(array.dtype)
        if name is None:
            raise TypeError(f"{path or 'the tree'}: {array.dtype} cannot travel")
        flat = array.detach().contiguous()
        blocks[name].append((flat.view(torch.int16) if name == "BF16" else flat).numpy())
        counts[name] = counts.get(name, 0) + flat.numel()
        return {name: list(flat.shape)}

    skeleton = _skeleton_of(tree, "", add_array)
    header = json.dumps({"arrays": counts, "tree": skeleton}, separators=(",", ":")).encode()
    return [len(header).to_bytes(8, "little"), header, *(piece for block in blocks.values() for piece in block)]


def from_bytes(data: bytes | memoryview, classes: Mapping[str, type] | None = None) -> Tree:
    """The tree that `to_bytes` was given.

    Args:
        classes: allowed dataclasses by "module:qualname", for bytes of a stranger; None for bytes of this program.
    """
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(bytes(data[8:start]))
    with memoryview(data)[start:] as numbers:
        arrays = _Arrays(header["arrays"], numbers)
    tree = _tree_of(header["tree"], arrays.take, classes)
    arrays.check_taken()
    return tree


class _Arrays:
    """The arrays of a message, handed out in the order in which they lie, as parts of one copy of it.

    Args:
        counts: how many numbers there are of each type.
        data: all of them.
    """

    def __init__(self, counts: Any, data: memoryview) -> None:
        if not all(type(count) is int and 0 <= count <= len(data) for count in counts.values()):
            raise refused("message: arrays", counts, "a whole number of each type, of which there are bytes")
        kinds = {name: np.dtype(kind) for name, (_, kind) in DTYPES.items() if name in counts}
        size = sum(kind.itemsize * counts[name] for name, kind in kinds.items())
        if len(kinds) < len(counts) or size != len(data):
            raise refused("message: arrays", f"{len(data)} bytes", f"the {size} that its header names")
        copy, at = bytearray(data), 0
        self._flat, self._at = dict[str, Any](), dict.fromkeys(kinds, 0)
        for name, kind in kinds.items():
            flat = np.ndarray((counts[name],), kind, copy, at)
            if name == "BOOL" and flat.view(np.uint8).max(initial=0) > 1:
                raise refused("message: truths", int(flat.view(np.uint8).max()), "0 and 1")
            self._flat[name] = flat
            at += flat.nbytes

    def take(self, name: str, shape: Any) -> Tensor:
        """Return the next array of a type."""
        start, flat = self._at[name], self._flat[name]
        # A product of what are not sizes, or of many, may be larger than this machine.
        sizes = type(shape) is list and len(shape) <= DEEPEST
        sizes = sizes and all(type(size) is int and 0 <= size <= LONGEST for size in shape)
        if not sizes or (end := start + math.prod(shape)) > len(flat):
            raise refused("message: shape", shape, f"that of {len(flat) - start} numbers at most")
        self._at[name] = end
        array = torch.from_numpy(flat[start:end].reshape(shape))
        return array.view(torch.bfloat16) if name == "BF16" else array

    def check_taken(self) -> None:
        """Raise if the tree has not all of them."""
        for name, flat in self._flat.items():
            if self._at[name] != len(flat):
                raise refused("message", f"{len(flat) - self._at[name]} numbers ({name}) in no tree", "none")


def sealed(tree: Tree) -> Tensor:
    """A tree as one array of bytes, to be opened later: a receiver may first have to load the classes in it."""
    return torch.frombuffer(bytearray(to_bytes(tree)), dtype=torch.uint8)


def opened(seal: Tensor) -> Tree:
    """The tree that `sealed` was given.

    >>> opened(sealed({"a": 1}))
    {'a': 1}
    """
    return from_bytes(seal.numpy().data)


# -- messages of strangers ---------------------------------------------------------------------------------------------


def decode_message(data: bytes, classes: Sequence[type] = CLASSES) -> Tree:
    """Return the tree that `to_bytes` was given, of bytes that anyone may have written.

    Only classes of a short list are built, and a message takes at most a small multiple of its bytes.

    Args:
        classes: dataclasses that may be in the tree.

    Raises:
        FedtideError: they are not such bytes. Nothing else is raised.

    >>> decode_message(to_bytes({"w": [1.5, None], "n": (3, float("inf"))}))
    {'w': [1.5, None], 'n': (3, inf)}
    >>> decode_message(b"nonsense")
    Traceback (most recent call last):
        ...
    fedtide.core.errors.FedtideError: message: found a header of 7310308002159816558 bytes, allowed: at most 0
    """
    length, most = int.from_bytes(data[:8], "little"), min(max(len(data) - 8, 0), HEADER)
    if len(data) < 8 or length > most:
        raise FedtideError(f"message: found a header of {length} bytes, allowed: at most {most}")
    try:
        return from_bytes(data, {f"{kind.__module__}:{kind.__qualname__}": kind for kind in classes})
    except (RuntimeError, *UNREADABLE) as error:
        raise FedtideError(f"message: not one of this program ({type(error).__name__}: {error})") from None


def parse(text: str | bytes, most: int, name: str) -> Any:
    """Return a JSON value that anyone may have written, nested within bounds.

    Numbers are finite and whole ones have 64 bits; no key stands twice.

    Args:
        text: the JSON.
        most: bytes that it may have.
        name: of the text, for messages.

    Raises:
        FedtideError: it is not such JSON. Nothing else is raised.

    >>> parse('{"round": 3}', 100, "header")
    {'round': 3}
    >>> parse('{"round": NaN}', 100, "header")
    Traceback (most recent call last):
        ...
    fedtide.core.errors.FedtideError: header: not JSON that is allowed (NaN is no number)
    """
    if not isinstance(text, str | bytes) or len(text) > most:
        size = f"{len(text)} bytes" if isinstance(text, str | bytes) else type(text).__name__
        raise FedtideError(f"{name}: found {size}, allowed: JSON of at most {most} bytes")
    try:
        value = json.loads(
            text, object_pairs_hook=_object, parse_constant=_no_number, parse_int=_whole, parse_float=_finite
        )
        if _depth(value) > DEEPEST:
            raise ValueError(f"nested deeper than allowed: {DEEPEST}")
    except (ValueError, RecursionError) as error:
        raise FedtideError(f"{name}: not JSON that is allowed ({error})") from None
    return value


def _depth(value: Any) -> int:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inside is None else 1 + max(map(_depth, inside), default=0)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key stands twice")
    return table


def _whole(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= int(digits) < 2**63:
        raise ValueError("a whole number has more than 64 bits")
    return int(digits)


def _finite(digits: str) -> float:
    if not math.isfinite(value := float(digits)):
        raise ValueError("a number is too large")
    return value


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is no number")


# -- files ------------------------------------------------------------------------------------------------------------


def to_file(path: Path, tree: Tree) -> None:
    """Write a tree to a safetensors file."""
    arrays, skeleton = encode(tree)
    separate = {name: array.contiguous() for name, array in zip(arrays, unshare(arrays.values()), strict=True)}
    try:
        save_file(separate, path, metadata={"tree": json.dumps(skeleton)})
    except SafetensorError as error:
        raise FedtideError(f"{path}: cannot be written ({error})") from None


def from_file(path: Path) -> Tree:
    """Read a tree from a safetensors file; a damaged one is named."""
    with _named(path):
        return decode(load_file(path), _skeleton(path))


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
