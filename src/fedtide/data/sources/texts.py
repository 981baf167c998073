"""Texts as rows of tokens of a pretrained model: a text with its class, or blocks whose next tokens are predicted."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, groupby
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedtide.core.errors import refused
from fedtide.data.rows import Rows
from fedtide.data.sources.arrays import from_arrays
from fedtide.data.sources.cells import Cells, cells_of, read_cells
from fedtide.data.sources.files import Loading, find, opened, reading
from fedtide.data.sources.table_files import find_places
from fedtide.data.sources.tabular import labels_of, names_of
from fedtide.data.sources.text import Listed, list_texts, read_records
from fedtide.fields.types import Count, ingredient
from fedtide.models.transformer import NOWHERE, ModelPath, encode, find_model, load_tokenizer, padding_of

RECORDS = ".jsonl", ".ndjson", ".xml"
"""Endings of files of JSON lines, and of posts of a Stack Exchange dump."""
PLAIN = ".txt"
"""Ending of the files of a folder that are texts."""
PARTS = "train", "test"
"""Names of the first folders below a folder of texts that divide its files."""
PART = "split"
"""Column of the files of a folder: one of these names."""


@ingredient
class Texts(Loading):
    """Texts of a table as tokens of a pretrained model: `model.kind = "transformer"` reads them.

    With `label` a row is a text, and its class is to be found. Without `label` the texts of a client are joined, each
    with the mark of its end. They are cut into blocks of `context` tokens, and a row is a block with the next token of
    each. Texts come in the order of their time, else of the file. Texts of two domains are not joined. A block has the
    time of its last token.

    A folder has a text in each file that ends in `.txt`, in UTF-8, also below folders. Its columns are names: `file`
    without the ending, `folder` of the folder that has the file, and `above` of the folder above that one. So
    `label = "folder"` reads `CLASS/FILE.txt`, and `client = "folder"` reads `CLIENT/FILE.txt`. That label with
    `client = "above"` reads `CLIENT/CLASS/FILE.txt`. As in folders of images, `train` and `test` may stand above all
    of that: what is below `test` is for testing.

    Rows are padded at their end. Padding does not count. If a tokenizer has no padding of its own, marks of the end
    stand for it, and do not count.

    Args:
        path: the file, below the data directory or absolute; or several files. They are CSV, Parquet, or JSON lines,
            packed or not. An `.xml` file has the posts of a Stack Exchange dump, as in `kind = "text"`. Or a folder of
            texts, or several.
        tokenizer: the folder or GGUF file of the model.
        package: an installed package that has the model, in place of `tokenizer`.
        text: column of the text. In JSON lines it may be a list of texts.
        label: column of the class, a number from 0 or a name; None predicts the next token.
        client: columns that together name the natural client.
        domain: column of the domain (day or night, which site).
        time: column of the time: seconds since 1970, or dates.
        context: number of tokens of a row. Longer texts with a label are cut, and a run first says how many.
    """

    path: Annotated[Listed, Field(min_length=1)]
    tokenizer: ModelPath | None = None
    package: str | None = None
    text: str = "text"
    label: str | None = None
    client: Listed = ()
    domain: str | None = None
    time: str | None = None
    context: Count = 128
    kind: Literal["texts"] = "texts"

    def __post_init__(self) -> None:
        if (self.tokenizer is None) == (self.package is None):
            few = "found no tokenizer and no package; allowed: one, that of the model"
            raise ValueError("found tokenizer and package; allowed: one" if self.tokenizer else few)

    def folder(self, directory: Path | None) -> Path:
        """Return the folder of the tokenizer."""
        key = "data.source.tokenizer"
        path = None if self.tokenizer is None else str(find(self.tokenizer, directory, key, hint=NOWHERE))
        return find_model(path, self.package, key)

    def load(self, directory: Path | None, seed: int) -> Rows:
        """Read the files."""
        name = ", ".join(Path(path).name for path in self.path)
        paths = [find(path, directory) for path in self.path]
        part = PART if any(path.is_dir() for path in paths) else None
        others = [column for column in (self.label, *self.client, self.domain, self.time, part) if column is not None]
        return self.rows(name, self._read(paths, name, others), directory, part)

    def rows(self, name: str, cells: Cells, directory: Path | None, part: str | None = None) -> Rows:
        """Return the rows of a table, some of them for testing if a column of "train" and "test" says the part."""
        tokenizer = self._tokenizer(directory)
        columns: dict[str, Any] = {}
        if self.client:
            names = (self._names(cells, column) for column in self.client)
            columns["client"] = ["/".join(parts) for parts in zip(*names, strict=True)]
        if self.domain:
            columns["domain"] = self._names(cells, self.domain)
        if self.time:
            columns["time"], _ = cells.times([self.time])
        if part is not None:
            held_out = np.array(cells.texts(part)) == "test"
            if held_out.all():
                raise refused(f"{name}: texts to train on", 0, "1 or more")
            columns |= {"held_out": held_out} if held_out.any() else {}
        texts = names_of("text", cells, self.text)
        if self.label is None:
            return self._blocks(name, encode(tokenizer, texts, None), tokenizer, columns)
        x, cut = self._rows(tokenizer, texts)
        return replace(from_arrays(name, x, labels_of(cells, self.label), **columns), cut=cut)

    def texts_of(self, path: Path, directory: Path | None) -> tuple[Tensor, int]:
        """Return the texts of another file as rows of tokens (rows, context), and how many were cut.

        Of its columns that of the text alone is read.
        """
        cells = self._read([path], path.name, ())
        x, cut = self._rows(self._tokenizer(directory), names_of("text", cells, self.text))
        return torch.from_numpy(x), cut

    def _tokenizer(self, directory: Path | None) -> Any:
        return load_tokenizer(self.folder(directory), "data.source.tokenizer")

    def _rows(self, tokenizer: Any, texts: Sequence[str]) -> tuple[np.ndarray, int]:
        """Return a padded row for each text, and how many were cut."""
        tokens = encode(tokenizer, texts, self.context)
        x = padded([row for row, _ in tokens], self.context, padding_of(tokenizer))
        return x, sum(was_cut for _, was_cut in tokens)

    def _names(self, cells: Cells, column: str) -> list[str]:
        return names_of(column, cells, column)

    def _read(self, paths: Sequence[Path], name: str, others: Sequence[str]) -> Cells:
        names = [*dict.fromkeys([self.text, *others])]
        if not any(path.is_dir() or any(ending in path.suffixes for ending in RECORDS) for path in paths):
            return read_cells(paths, names)
        columns: dict[str, list[Any]] = {column: [] for column in names}
        places: list[str] = []
        for path in paths:
            records = read_folder(path, self.text, names) if path.is_dir() else read_records(path, self.text, names[1:])
            for where, record in records:
                for text in list_texts(where, self.text, record[self.text]):
                    places.append(where)
                    for column in names:
                        columns[column].append(text if column == self.text else record[column])
        return replace(cells_of(columns, name), where=places.__getitem__)

    def _blocks(self, name: str, tokens: Any, tokenizer: Any, columns: dict[str, Any]) -> Rows:
        """Return the blocks of the texts of each client and domain, in the order of time."""
        ids = [row for row, _ in tokens]
        time = columns.get("time", np.arange(len(ids)))
        owners = (columns.get(key, [0] * len(ids)) for key in ("client", "domain", "held_out"))
        owner = [*zip(*owners, strict=True)]
        order = sorted(range(len(ids)), key=lambda text: (owner[text], time[text], text))
        blocks: list[list[int]] = []
        of: list[int] = []  # the text of the last token of each block
        for _, group in groupby(order, key=owner.__getitem__):
            for block, last in cut_blocks([(text, ids[text]) for text in group], self.context, tokenizer.eos_token_id):
                blocks.append(block)
                of.append(last)
        padding = padding_of(tokenizer)
        both = padded(blocks, self.context + 1, padding)
        counted = (both[:, 1:] != padding).any(1)
        if not counted.any():
            raise refused(f"{name}: tokens of all texts", sum(map(len, ids)), "two or more in the texts of a client")
        both, last = both[counted], np.array(of)[counted]
        picked = {key: np.asarray(values)[last] for key, values in columns.items()}
        rows = from_arrays(name, both[:, :-1], np.zeros(len(both), np.int64), **picked)
        y = torch.from_numpy(both[:, 1:].copy())
        return replace(rows, y=y, classes=max(len(tokenizer), int(both.max()) + 1), padding=padding)


def read_folder(folder: Path, text: str, columns: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the texts below a folder, in the order of their paths, with their places for messages.

    Args:
        folder: the folder.
        text: name of the column of the text.
        columns: names that each text must have.

    Raises:
        FedtideError: the folder has no file of a text, or a file is not in UTF-8 or lacks a column.
    """
    files = [file for file in sorted(folder.rglob("*")) if file.suffix.lower() == PLAIN and file.is_file()]
    if not files:
        raise refused(f"{folder}: files of texts", 0, f"1 or more that end in {PLAIN}, also below its folders")
    for file in files:
        # Half of a character of two is none that could be written to a record.
        *folders, name = (part.encode(errors="replace").decode() for part in file.relative_to(folder).parts)
        part = folders.pop(0) if folders and folders[0] in PARTS else PARTS[0]
        above = dict(zip(("folder", "above"), reversed(folders), strict=False))
        with reading(file, "a text in UTF-8"), opened(file) as content:
            read = content.read().decode("utf-8-sig")
        record = {"file": name[: -len(PLAIN)], PART: part, **above, text: read}
        find_places(file, sorted(record), columns)
        yield str(file), record


def cut_blocks(texts: Sequence[tuple[int, Sequence[int]]], context: int, end: int | None) -> Iterator[tuple[Any, int]]:
    """Yield blocks of `context` + 1 tokens of joined texts, and the number of the text of their last token.

    The last token of a block is the first one of the next.

    >>> [(block, last) for block, last in cut_blocks([(0, [5, 6]), (1, [7, 8])], 2, 9)]
    [([5, 6, 9], 0), ([9, 7, 8], 1), ([8, 9], 1)]
    """
    ends = () if end is None else (end,)
    joined = [*chain.from_iterable([*tokens, *ends] for _, tokens in texts)]
    number = [*chain.from_iterable([text] * (len(tokens) + len(ends)) for text, tokens in texts)]
    for first in range(0, max(len(joined) - 1, 0), context):
        block = joined[first : first + context + 1]
        yield block, number[first + len(block) - 1]


def padded(rows: Sequence[Sequence[int]], steps: int, padding: int) -> np.ndarray:
    """Return rows (rows, steps) of equal length.

    >>> padded([[3], [4, 5]], 2, 0).tolist()
    [[3, 0], [4, 5]]
    """
    x = np.full((len(rows), steps), padding, np.int64)
    for into, tokens in zip(x, rows, strict=True):
        into[: len(tokens)] = tokens
    return x
