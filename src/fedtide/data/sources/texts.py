"""Texts as rows of tokens of a pretrained model: with a class, as blocks of next tokens, or as answers to prompts.

Choices:
    - ours: a prompt and its answer are joined by the end of a line, without the template of a chat. A template is a
      program that comes with a model, and other models have others.
    - lm-evaluation-harness: if a pair is too long, the beginning of its prompt is cut first. Ours: one token of the
      prompt stays, and then the end of the answer is cut.
    - ours: a pair begins with a mark if the tokenizer begins every text with one. Blocks have marks of ends alone.
    - ours: prompt and answer are cut into tokens apart, so that `fedtide predict` begins with the same tokens.
    - ours: a pair is a row of its own. So no answer sees another pair, and a client weighs as many rows as it has
      pairs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedtide.core.errors import FedtideError, refused
from fedtide.data.rows import Rows
from fedtide.data.sources.arrays import from_arrays
from fedtide.data.sources.cells import Cells, cells_of, in_full, number, read_cells
from fedtide.data.sources.files import Loading, find, opened, reading
from fedtide.data.sources.table_files import find_places
from fedtide.data.sources.tabular import labels_of, names_of
from fedtide.data.sources.text import Listed, list_texts, read_objects, read_records
from fedtide.fields.types import Count, ingredient
from fedtide.models.model_files import NOWHERE, ModelPath, find_model
from fedtide.models.tokenizing import encode, load_tokenizer, padding_of

JSON_LINES = ".jsonl", ".ndjson"
"""Endings of files of JSON lines."""
POSTS = ".xml"
"""Ending of the posts of a Stack Exchange dump."""
PLAIN = ".txt"
"""Ending of the files of a folder that are texts."""
NAMED = "file", "folder", "above"
"""Columns of the files of a folder: the name of the file, of its folder, and of the folder above that one."""
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

    With `prompt` a row is a pair: the prompt, the end of a line, the text that answers it, and the mark of its end.
    Tokens of the answer are predicted. Those of the prompt are given: they have no loss, no bytes, and no part in any
    measure. If a pair is too long, the beginning of the prompt is cut first.

    A folder has a text in each file that ends in `.txt`, in UTF-8, also below folders. Its columns are names: `file`
    without the ending, `folder` of the folder that has the file, and `above` of the folder above that one. So
    `label = "folder"` reads `CLASS/FILE.txt`, and `client = "folder"` reads `CLIENT/FILE.txt`. That label with
    `client = "above"` reads `CLIENT/CLASS/FILE.txt`. As in folders of images, `train` and `test` may stand above all
    of that: what is below `test` is for testing.

    Rows are padded at their end. Padding does not count. If a tokenizer has no padding of its own, marks of the end
    stand for it. Then they do not count, but at the end of an answer.

    Args:
        path: the file, below the data directory or absolute; or several files. They are CSV, Parquet, or JSON lines,
            packed or not. An `.xml` file has the posts of a Stack Exchange dump, as in `kind = "text"`. Or a folder of
            texts, or several.
        tokenizer: the folder or GGUF file of the model.
        package: an installed package that has the model, in place of `tokenizer`.
        text: column of the text. In JSON lines it may be a list of texts.
        label: column of the class, a number from 0 or a name; None predicts the next token.
        prompt: column of what is given before the text, in place of a class.
        client: columns that together name the natural client.
        domain: column of the domain (day or night, which site).
        time: column of the time: seconds since 1970, or dates.
        context: number of tokens of a row. Longer texts with a label and longer pairs are cut, and a run first says
            how many.
    """

    path: Annotated[Listed, Field(min_length=1)]
    tokenizer: ModelPath | None = None
    package: str | None = None
    text: str = "text"
    label: str | None = None
    prompt: str | None = None
    client: Listed = ()
    domain: str | None = None
    time: str | None = None
    context: Count = 128
    kind: Literal["texts"] = "texts"

    def __post_init__(self) -> None:
        if (self.tokenizer is None) == (self.package is None):
            few = "found no tokenizer and no package; allowed: one, that of the model"
            raise ValueError("found tokenizer and package; allowed: one" if self.tokenizer else few)
        if self.prompt is not None and self.label is not None:
            raise ValueError("found prompt and label; allowed: one, because a prompt has an answer and no class")

    def folder(self, directory: Path | None) -> Path:
        """Return the folder of the tokenizer."""
        if self.tokenizer is None:
            return find_model(None, self.package, "data.source.package")
        key = "data.source.tokenizer"
        return find_model(str(find(self.tokenizer, directory, key, hint=NOWHERE)), None, key)

    def load(self, directory: Path | None, seed: int) -> Rows:
        """Read the files."""
        name = ", ".join(Path(path).name for path in self.path)
        paths = [find(path, directory) for path in self.path]
        part = PART if any(path.is_dir() for path in paths) else None
        return self.rows(name, self._read(paths, name, [*self.columns, *([part] if part else [])]), directory, part)

    @property
    def columns(self) -> list[str]:
        """The columns that it reads."""
        named = (self.text, self.label, self.prompt, *self.client, self.domain, self.time)
        return [*dict.fromkeys(column for column in named if column is not None)]

    def rows(self, name: str, cells: Cells, directory: Path | None, part: str | None = None) -> Rows:
        """Return the rows of a table, some of them for testing if a column of "train" and "test" says the part."""
        tokenizer = self._tokenizer(directory)
        columns: dict[str, Any] = {}
        if self.client:
            names = (names_of(column, cells, column) for column in self.client)
            columns["client"] = ["/".join(parts) for parts in zip(*names, strict=True)]
        if self.domain:
            columns["domain"] = names_of(self.domain, cells, self.domain)
        if self.time:
            columns["time"], _ = cells.times([self.time])
        if part is not None:
            held_out = np.array(cells.texts(part)) == "test"
            if held_out.all():
                raise refused(f"{name}: texts to train on", 0, "1 or more")
            columns |= {"held_out": held_out} if held_out.any() else {}
        texts = _texts_in(cells, self.text)
        if self.prompt is not None:
            prompts = self.encode_prompts(tokenizer, _texts_in(cells, self.prompt))
            return self._pairs(name, prompts, self.encode_answers(tokenizer, texts), tokenizer, columns)
        if self.label is None:
            return self._blocks(name, encode(tokenizer, texts, None), tokenizer, columns)
        x, cut = self._rows(tokenizer, texts)
        return replace(from_arrays(name, x, labels_of(cells, self.label), **columns), cut=cut)

    def texts_of(self, path: Path, directory: Path | None) -> tuple[Tensor, int]:
        """Return the texts of another file as rows of tokens (rows, context), and how many were cut.

        Of its columns that of the text alone is read.
        """
        cells = self._read([path], path.name, [self.text])
        x, cut = self._rows(self._tokenizer(directory), _texts_in(cells, self.text))
        return torch.from_numpy(x), cut

    @property
    def given(self) -> str:
        """Column of what stands before a text that is predicted: of the prompt, else of the text itself."""
        return self.text if self.prompt is None else self.prompt

    def prompts_of(self, path: Path) -> list[str]:
        """Return the prompts of another file, or its texts if rows have no prompts; no other column is read."""
        read = replace(self, text=self.given, prompt=None)
        return _texts_in(read._read([path], path.name, [read.text]), read.text)

    def questions_of(self, path: Path, choices: Sequence[str], right: str | None) -> "Questions":
        """Return the questions of another file.

        Args:
            path: of CSV, Parquet or JSON lines.
            choices: columns of the possible answers, each a text or a list of texts.
            right: column of the number of the right one, from 0; None if it is not known.

        Raises:
            FedtideError: a question has fewer than two answers, or no such right one.
        """
        names = [*dict.fromkeys([self.given, *choices, *([] if right is None else [right])])]
        prompts, answers, numbers = [], [], []
        for where, record in _records(path, names):
            read = []
            for column in (self.given, *choices):
                read.append([in_full(text.strip()) for text in list_texts(where, column, record[column])])
                if "" in read[-1]:
                    raise FedtideError(f"{where}: {column} is empty")
            prompt, every = read[0], [*chain.from_iterable(read[1:])]
            if len(prompt) != 1:
                raise refused(f"{where}: {self.given}", prompt, "a text")
            if len(every) < 2:
                raise refused(f"{where}: {', '.join(choices)}", f"{len(every)} choices", "2 or more")
            if right is not None:
                place = number(where, right, record[right])
                if place not in range(len(every)):
                    raise refused(f"{where}: {right}", record[right], f"0 to {len(every) - 1}, the number of a choice")
                numbers.append(int(place))
            prompts += prompt
            answers.append(every)
        return Questions(prompts, answers, None if right is None else numbers)

    def encode_prompts(self, tokenizer: Any, prompts: Sequence[str]) -> list[list[int]]:
        """Return the tokens with which rows begin that have these prompts."""
        if self.prompt is None:
            return [row for row, _ in encode(tokenizer, prompts, None)]
        begin = beginning_of(tokenizer)
        return [[*begin, *row] for row, _ in encode(tokenizer, [f"{prompt}\n" for prompt in prompts], None)]

    def encode_answers(self, tokenizer: Any, answers: Sequence[str]) -> list[list[int]]:
        """Return the tokens of answers that follow a prompt; without prompts a space is between."""
        spaced = [f" {text}" for text in answers] if self.prompt is None else answers
        return [row for row, _ in encode(tokenizer, spaced, None)]

    def _tokenizer(self, directory: Path | None) -> Any:
        return load_tokenizer(self.folder(directory), "data.source.tokenizer")

    def _rows(self, tokenizer: Any, texts: Sequence[str]) -> tuple[np.ndarray, int]:
        """Return a padded row for each text, and how many were cut."""
        if self.context <= (marks := tokenizer.num_special_tokens_to_add(pair=False)):
            but = f"the tokenizer puts marks around a text, {marks} in number"
            raise refused("data.source.context", self.context, f"{marks + 1} or more", but)
        tokens = encode(tokenizer, texts, self.context)
        x = padded([row for row, _ in tokens], self.context, padding_of(tokenizer))
        return x, sum(was_cut for _, was_cut in tokens)

    def _read(self, paths: Sequence[Path], name: str, names: list[str]) -> Cells:
        if not any(path.is_dir() or _is_json_lines(path) or POSTS in path.suffixes for path in paths):
            return read_cells(paths, names)
        columns: dict[str, list[Any]] = {column: [] for column in names}
        places: list[str] = []
        others = [column for column in names if column != self.text]
        for path in paths:
            in_folder = path.is_dir()
            records = read_folder(path, self.text, names) if in_folder else read_records(path, self.text, others)
            for where, record in records:
                for text in list_texts(where, self.text, record[self.text]):
                    places.append(where)
                    for column in names:
                        columns[column].append(in_full(text if column == self.text else record[column]))
        return replace(cells_of(columns, name), where=places.__getitem__)

    def _pairs(self, name: str, prompts: Any, answers: Any, tokenizer: Any, columns: dict[str, Any]) -> Rows:
        """Return a row for each prompt with its answer."""
        padding, longest = padding_of(tokenizer), self.context + 1
        ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        whole = [(prompt, [*answer, *ends]) for prompt, answer in zip(prompts, answers, strict=True)]
        pairs = [cut_pair(*pair, longest) for pair in whole]
        both = padded([row for row, _ in pairs], longest, padding)
        begin, end = np.array([(begin, len(row)) for row, begin in pairs]).T[..., None]
        counted = (np.arange(longest) >= begin) & (np.arange(longest) < end)
        # The mark of the end may be the padding. A label that no answer has stands for the tokens that do not count.
        labels = {*both[counted].tolist()}
        ids = chain([padding], tokenizer.all_special_ids, range(len(tokenizer)))
        ignored = next((token for token in ids if token not in labels), padding)
        rows = from_arrays(name, both[:, :-1], np.zeros(len(both), np.int64), **columns)
        y = torch.from_numpy(np.where(counted, both, ignored)[:, 1:].copy())
        cut = sum(len(prompt) + len(answer) > longest for prompt, answer in whole)
        return replace(rows, y=y, classes=max(len(tokenizer), int(both.max()) + 1), padding=ignored, cut=cut)

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


@dataclass(frozen=True)
class Questions:
    """Prompts with several answers of which one is right.

    prompts: of each question. choices: its answers. right: number of the right one; None if that is not known.
    """

    prompts: list[str]
    choices: list[list[str]]
    right: list[int] | None


def _records(path: Path, names: list[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the rows of a file, with their places for messages; cells are texts, or lists in columns of lists."""
    if _is_json_lines(path):
        yield from read_objects(path, names)
        return
    cells = read_cells([path], names)
    columns = {name: cells.columns[name].raw.to_pylist() if cells.columns[name].other else cells.texts(name)
               for name in names}  # fmt: skip
    for row in range(len(cells)):
        yield cells.where(row), {name: column[row] for name, column in columns.items()}


def texts(
    data: Any,
    *,
    tokenizer: str | None = None,
    package: str | None = None,
    text: str = "text",
    label: str | None = None,
    prompt: str | None = None,
    client: str | Sequence[str] = (),
    domain: str | None = None,
    time: str | None = None,
    context: int = 128,
) -> Rows:
    """Return the rows of texts: the same as of `kind = "texts"` with a file of the same table.

    Args:
        data: a data frame (pandas, polars, pyarrow), a mapping of columns, or a file or folder, or several.
        tokenizer: the folder or GGUF file of the model.
        package: an installed package that has the model, in place of `tokenizer`.
        text: column of the text.
        label: column of the class; None predicts the next token.
        prompt: column of what is given before the text, in place of a class.
        client: column of the natural client, or columns that together name the client.
        domain: column of the domain.
        time: column of the time.
        context: number of tokens of a row.
    """
    files = [data] if isinstance(data, str | Path) else data
    in_files = isinstance(files, Sequence) and files and all(isinstance(file, str | Path) for file in files)
    path = tuple(map(str, files)) if in_files else ("table",)
    columns = (client,) if isinstance(client, str) else tuple(client)
    source = Texts(path, tokenizer, package, text, label, prompt, columns, domain, time, context)
    if in_files:
        return source.load(None, 0)
    cells = cells_of(data, "table")
    find_places("table", [*cells.columns], source.columns)
    return source.rows("table", cells, None)


def _is_json_lines(path: Path) -> bool:
    return any(ending in path.suffixes for ending in JSON_LINES)


def _texts_in(cells: Cells, column: str) -> list[str]:
    """Return a column of texts; raise for an empty one, or if it is of other things."""
    if other := cells.columns[column].other:
        raise refused(f"{cells.where(0)}: {column}", other, "texts")
    return names_of(column, cells, column)


def read_folder(folder: Path, text: str, columns: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the texts below a folder, in the order of their paths, with their places for messages.

    Args:
        text: name of the column of the text.
        columns: names that each text must have.

    Raises:
        FedtideError: the folder has no file of a text, or a file is not in UTF-8 or lacks a column.
    """
    for file, names in _files_below(folder):
        with reading(file, "a text in UTF-8"), opened(file) as content:
            read = content.read().decode("utf-8-sig")
        record = {**names, text: read}
        find_places(file, sorted(record), columns)
        yield str(file), record


def _files_below(folder: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """Yield the files of texts below a folder, in the order of their paths, with the columns of their names."""
    files = [file for file in sorted(folder.rglob("*")) if file.suffix.lower() == PLAIN and file.is_file()]
    if not files:
        raise refused(f"{folder}: files of texts", 0, f"1 or more that end in {PLAIN}, also below its folders")
    for file in files:
        *folders, name = map(in_full, file.relative_to(folder).parts)
        part = folders.pop(0) if folders and folders[0] in PARTS else PARTS[0]
        above = dict(zip(NAMED, (name[: -len(PLAIN)], *reversed(folders)), strict=False))
        yield file, {**above, PART: part}


def names_of_files(path: Path) -> dict[str, list[str]]:
    """Return the columns that name the texts of a folder, in their order; none if the path is a file.

    A text that has no such folder has an empty cell.
    """
    names = [names for _, names in _files_below(path)] if path.is_dir() else []
    return {column: [one.get(column, "") for one in names] for column in NAMED if any(column in one for one in names)}


def cut_blocks(texts: Sequence[tuple[int, Sequence[int]]], context: int, end: int | None) -> Iterator[tuple[Any, int]]:
    """Yield blocks of `context` + 1 tokens of joined texts, and the number of the text of their last token.

    The last token of a block is the first one of the next.

    >>> [(block, last) for block, last in cut_blocks([(0, [5, 6]), (1, [7, 8])], 2, 9)]
    [([5, 6, 9], 0), ([9, 7, 8], 1), ([8, 9], 1)]
    """
    ends = () if end is None else (end,)
    joined = [*chain.from_iterable([*tokens, *ends] for _, tokens in texts)]
    text_of = [*chain.from_iterable([text] * (len(tokens) + len(ends)) for text, tokens in texts)]
    for first in range(0, max(len(joined) - 1, 0), context):
        block = joined[first : first + context + 1]
        yield block, text_of[first + len(block) - 1]


def beginning_of(tokenizer: Any) -> list[int]:
    """Return the mark with which a tokenizer begins every text; nothing if it has none."""
    mark = tokenizer.bos_token_id
    return [mark] if mark is not None and tokenizer("a")["input_ids"][:1] == [mark] else []


def cut_pair(prompt: list[int], answer: list[int], longest: int) -> tuple[list[int], int]:
    """Return tokens of a prompt and its answer, cut to a length, and how many of them are the prompt's.

    >>> cut_pair([1, 2, 3], [7, 8], 4), cut_pair([1, 2, 3], [7, 8, 9], 3)
    (([2, 3, 7, 8], 2), ([3, 7, 8], 1))
    """
    prompt = prompt[-max(longest - len(answer), 1) :]
    return [*prompt, *answer][:longest], len(prompt)


def padded(rows: Sequence[Sequence[int]], steps: int, padding: int) -> np.ndarray:
    """Return rows (rows, steps) of equal length.

    >>> padded([[3], [4, 5]], 2, 0).tolist()
    [[3, 0], [4, 5]]
    """
    x = np.full((len(rows), steps), padding, np.int64)
    for into, tokens in zip(x, rows, strict=True):
        into[: len(tokens)] = tokens
    return x
