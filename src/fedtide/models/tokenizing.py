"""Tokenizers of pretrained models: texts as ids of tokens."""

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedtide.core.atomic import sha256
from fedtide.core.errors import FedtideError, refused
from fedtide.models.adapters import library
from fedtide.models.model_files import CONFIG, LOCAL, quiet, stamps_of

TOKENIZER = "tokenizer.json"


def load_tokenizer(folder: Path, key: str) -> Any:
    """Return the tokenizer in a folder, which nobody may change: the same at each call until the files change.

    Raises:
        FedtideError: `transformers` is not installed, or the folder has no tokenizer.
    """
    transformers = library("transformers", key)
    if not (folder / TOKENIZER).is_file():
        raise FedtideError(f"{key}: {folder}: no {TOKENIZER}, allowed: the folder of a model with its tokenizer")
    try:
        return _load_tokenizer(transformers, folder, stamps_of(folder))
    except Exception as error:  # whatever the library raises for a file that is no tokenizer
        raise FedtideError(f"{key}: {folder}: damaged or not a tokenizer ({error})") from None


@lru_cache(maxsize=4)
def _load_tokenizer(transformers: Any, folder: Path, stamps: Any) -> Any:
    del stamps
    with quiet(transformers):
        return transformers.AutoTokenizer.from_pretrained(str(folder), **LOCAL)


def encode(tokenizer: Any, texts: Sequence[str], longest: int | None) -> list[tuple[list[int], bool]]:
    """Return the tokens of each text, and whether they were cut.

    Args:
        tokenizer: of `load_tokenizer`.
        texts: one or more.
        longest: number of tokens to which texts are cut, with the marks of the tokenizer around them; None cuts nothing
            and adds no marks.
    """
    with quiet(library("transformers", "data.source.tokenizer")):
        marks = longest is not None
        rows = tokenizer(list(texts), add_special_tokens=marks, return_attention_mask=False)["input_ids"]
        if longest is None:
            return [(row, False) for row in rows]
        long = [text for text, row in zip(texts, rows, strict=True) if len(row) > longest]
        cut = iter(tokenizer(long, truncation=True, max_length=longest)["input_ids"] if long else [])
        return [(next(cut), True) if len(row) > longest else (row, False) for row in rows]


def padding_of(tokenizer: Any) -> int:
    """Return the id of padding of a tokenizer: its own, else that of the end of a text."""
    ids = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(number for number in ids if number is not None)


@lru_cache(maxsize=1)  # a large vocabulary takes seconds
def bytes_of_tokens(tokenizer: Any) -> Tensor:
    """Return the number of bytes in UTF-8 of each token's text (tokens,); marks have none.

    Tokens of pieces of characters are counted as they are: a token of half a letter has half of its bytes. A token of a
    word counts with the space that stands before it within a text.
    """
    ids = range(len(tokenizer))
    names = tokenizer.convert_ids_to_tokens([*ids])
    added = tokenizer.added_tokens_decoder  # they stand in a vocabulary as they are in the text
    decoder = json.loads(tokenizer.backend_tokenizer.to_str())["decoder"] or {}
    is_bytes = decoder.get("type") == "ByteLevel"  # with a letter for each byte

    def size(number: int, name: str | None) -> int:
        if name is None or number in tokenizer.all_special_ids:
            return 0
        if number in added or not is_bytes:
            if re.fullmatch("<0x[0-9A-F]{2}>", name):
                return 1
            once, twice = (tokenizer.decode([number] * k, clean_up_tokenization_spaces=False) for k in (1, 2))
            return len(twice.encode()) - len(once.encode())
        return len(name)

    return torch.tensor([size(number, name) for number, name in zip(ids, names, strict=True)], dtype=torch.float64)


def padding_in(folder: Path) -> int:
    """Return the id of padding of the model in a folder."""
    if (folder / TOKENIZER).is_file():
        return padding_of(load_tokenizer(folder, "model"))
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    ids = [config.get("pad_token_id"), config.get("eos_token_id"), 0]
    return next(number for number in ids if isinstance(number, int))


def check_tokenizer(folder: Path, model: Path) -> None:
    """Raise if rows were made by the tokenizer of another model.

    Args:
        folder: of the tokenizer.
        model: folder of the model.
    """
    files = [where / TOKENIZER for where in (folder, model)]
    if folder != model and all(file.is_file() for file in files) and len({sha256(file) for file in files}) > 1:
        allowed = f"that of the model, {model}"
        raise refused("data.source.tokenizer", str(folder), allowed, "its tokens have other numbers")
