"""Text for next-word prediction, from JSON lines or the posts of a Stack Exchange dump."""

import html
import json
import re
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple
from xml.parsers import expat

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedtide.core.errors import FedtideError, refused, unknown
from fedtide.data.ragged import rank_rows
from fedtide.data.rows import Rows, find_earliest, make_rows
from fedtide.data.sources.cells import parse_time
from fedtide.data.sources.files import Loading, find, opened, reading
from fedtide.data.sources.table_files import find_places
from fedtide.fields.types import Count, OpenFraction, Unbracketed, allowing, ingredient

PADDING, BEGINNING, END, UNKNOWN = range(4)
"""First token ids; UNKNOWN may have several, and the words of the vocabulary follow."""

WORD = re.compile(r"[^\W_]+(?:['-][^\W_]+)*")
SENTENCE = re.compile(r"""(?<=[.!?])["')\]]*\s+|\n\s*\n""")
CODE = re.compile(r"(?s)<pre\b.*?(?:</pre>|\Z)")
INLINE = re.compile(r"</?(?:a|b|code|del|em|i|kbd|s|span|strike|strong|sub|sup)\b[^<>]*>")
TAG = re.compile(r"<[^<>]*>")
BLANK = re.compile(r"\n\s*\n")
HELD_OUT = {"true": True, "1": True, "test": True, "false": False, "0": False, "train": False}

Listed = Annotated[tuple[str, ...], Unbracketed]
"""Several names, or a single one without brackets."""

TEST = allowing("a share, 0 or more and less than 1, or a column")


class _Record(NamedTuple):
    """A text with its author, domain, time and whether it is for testing."""

    client: str
    domain: str
    time: float
    held_out: bool
    text: str


class _Cut(NamedTuple):
    """Texts cut into sentences.

    words: the distinct words. flat: position in `words` of every word, sentence by sentence. lengths: (rows,) number of
    words of each sentence. text: (rows,) number of the text of each sentence.
    """

    words: list[str]
    flat: np.ndarray
    lengths: np.ndarray
    text: np.ndarray


@ingredient
class Text(Loading):
    """Next-word prediction: a row is a sentence, with its words as features and the next words as labels.

    A text is lower-cased and cut into sentences at `.`, `!`, `?` and blank lines. Words are letters and digits with
    apostrophes and hyphens between them. Words beyond `length` are cut off. Words are numbers: 0 is padding, 1 the
    beginning of a sentence, 2 its end (if nothing was cut off), 3 a word outside the vocabulary. The words of the
    vocabulary follow, the most frequent first. Predictions are scored without ends and without words outside the
    vocabulary.

    Args:
        path: the files, below the data directory or absolute, packed or not. Lines are JSON objects with the columns
            named here. An `.xml` file has the posts of a Stack Exchange dump: texts are HTML, and posts without one of
            the columns are left out.
        text: column of the text, or of a list of texts. Texts without a word are left out.
        client: columns that together name the natural client, a single one without brackets; `[]` for none. The column
            "file" is the file's name without its extensions.
        domain: column of the domain (day or night, which site).
        domains: values of that column to keep, in this order; by default all.
        domain_names: other names for the domains.
        time: column of the time: seconds, or ISO 8601 (UTC without a time zone).
        test: texts for testing. A number is the share of each client's latest texts, at least one of two. A name is the
            column that marks them: true and false, or "test" and "train". 0 leaves the split to `data.split`. The
            vocabulary is then from all sentences, with `time` from the earliest tenth, because later sentences are not
            known.
        vocabulary: number of known words, the most frequent of the training sentences.
        length: number of steps of a row.
        oov_buckets: number of token ids shared by words outside the vocabulary.
        max_samples: maximum number of training sentences of each client, which are its first. The vocabulary is from
            all of them, whatever the maximum.
    """

    path: Annotated[Listed, Field(min_length=1)]
    text: str = "text"
    client: Listed = ("client",)
    domain: str | None = None
    domains: tuple[str, ...] = ()
    domain_names: tuple[str, ...] = ()
    time: str | None = None
    test: Annotated[OpenFraction | str, TEST] = 0.2
    vocabulary: Count = 10_000
    length: Count = 20
    oov_buckets: Count = 1
    max_samples: Count | None = None
    kind: Literal["text"] = "text"

    def __post_init__(self) -> None:
        if self.domains and self.domain is None:
            raise ValueError("domains are values of a column; name it with domain")
        if self.domain_names and len(self.domain_names) != len(self.domains):
            counts = f"{len(self.domain_names)} domain_names for {len(self.domains)} domains"
            raise ValueError(f"{counts}; give as many of each")

    def load(self, directory: Path | None, seed: int) -> Rows:
        """Read the files."""
        # Clients one by one, each from its first text to its latest; without times in the order of the files.
        records = sorted(self._records(directory), key=lambda text: (text.client, text.time))
        names = sorted({text.client for text in records})
        domains = self.domains or sorted({text.domain for text in records})
        number = {name: k for k, name in enumerate(names)}
        client = np.array([number[text.client] for text in records])
        held_out = self._held_out(records, client)
        cut = self._cut(records)
        trained = ~held_out[cut.text]
        if self.time and not self.test:
            when = torch.tensor([records[number].time for number in cut.text], dtype=torch.float64)
            trained = np.isin(np.arange(len(trained)), find_earliest(when).numpy())
        numbers, classes = self._number(cut, trained)
        cut = self._limited(cut, client, held_out)
        tokens = self._tokens(cut, numbers)
        columns: dict[str, Any] = {"held_out": held_out}
        if self.domain:
            columns["domain"] = np.array([domains.index(text.domain) for text in records])
            columns["domain_names"] = self.domain_names or tuple(domains)
        if self.client:
            columns |= {"client": client, "client_names": tuple(names)}
        if self.time:
            columns["time"] = np.array([text.time for text in records])
        columns = {name: of[cut.text] if isinstance(of, np.ndarray) else of for name, of in columns.items()}
        columns |= {"x": tokens[:, :-1], "y": tokens[:, 1:]}  # the same memory, one step later
        unscored = tuple(range(END, UNKNOWN + self.oov_buckets))
        name = ", ".join(Path(path).name for path in self.path)
        return make_rows(name, classes, padding=PADDING, unscored=unscored, **columns)

    def _records(self, directory: Path | None) -> list[_Record]:
        """Read all texts of all files in the selected domains."""
        records = [text for path in self.path for text in self._read(find(path, directory))]
        if not records:
            raise FedtideError(f"{', '.join(self.path)}: no text with a word in it")
        values = sorted({text.domain for text in records})
        for value in self.domains:
            if value not in values:
                raise unknown("data.source.domains", value, values)
        return [text for text in records if text.domain in self.domains] if self.domains else records

    def _read(self, path: Path) -> Iterator[_Record]:
        others = [column for column in (self.domain, self.time, self.test) if isinstance(column, str)]
        for where, record in read_records(path, self.text, [*self.client, *others]):
            client = "/".join(_name(where, column, record[column]) for column in self.client)
            domain = "" if self.domain is None else _name(where, self.domain, record[self.domain])
            time = 0.0
            if self.time is not None:
                time = parse_time(where, str(record[self.time]))
            held_out = isinstance(self.test, str) and _flag(where, self.test, record[self.test])
            for text in list_texts(where, self.text, record[self.text]):
                if WORD.search(text):
                    yield _Record(client, domain, time, held_out, text)

    def _held_out(self, records: list[_Record], client: np.ndarray) -> np.ndarray:
        """Return the mask of texts for testing: by a column, otherwise the latest of each client."""
        if isinstance(self.test, str):
            return np.array([text.held_out for text in records])
        count = np.bincount(client)
        tested = np.minimum(np.maximum((count * self.test).round(), 1), count - 1) if self.test else 0 * count
        return rank_rows(client) >= (count - tested)[client]

    def _cut(self, records: list[_Record]) -> _Cut:
        vocabulary: dict[str, int] = {}
        flat, lengths, texts = array("i"), array("i"), array("i")
        for number, text in enumerate(records):
            for words in sentences(text.text):
                words = words[: self.length]
                flat.extend([vocabulary.setdefault(word, len(vocabulary)) for word in words])
                lengths.append(len(words))
                texts.append(number)
        return _Cut(list(vocabulary), np.array(flat), np.array(lengths), np.array(texts))

    def _number(self, cut: _Cut, train: np.ndarray) -> tuple[np.ndarray, int]:
        """Return the token id of every word, and the number of token ids; `train` has the sentences that count."""
        counts = np.bincount(cut.flat[np.repeat(train, cut.lengths)], minlength=len(cut.words))
        frequent = sorted(np.flatnonzero(counts).tolist(), key=lambda word: (-counts[word], cut.words[word]))
        frequent, first = frequent[: self.vocabulary], UNKNOWN + self.oov_buckets
        number = np.array([UNKNOWN + zlib.crc32(word.encode()) % self.oov_buckets for word in cut.words])
        number[frequent] = np.arange(first, first + len(frequent))
        return number, first + len(frequent)

    def _limited(self, cut: _Cut, client: np.ndarray, held_out: np.ndarray) -> _Cut:
        """Leave out training sentences of a client beyond the maximum."""
        if self.max_samples is None:
            return cut
        mask = held_out[cut.text]
        train = np.flatnonzero(~mask)
        mask[train] = rank_rows(client[cut.text[train]]) < self.max_samples
        return _Cut(cut.words, cut.flat[np.repeat(mask, cut.lengths)], cut.lengths[mask], cut.text[mask])

    def _tokens(self, cut: _Cut, number: np.ndarray) -> Tensor:
        """Return token ids (rows, length + 1) from the beginning to padding."""
        row = np.repeat(np.arange(len(cut.lengths)), cut.lengths)
        step = np.arange(len(row)) - (cut.lengths.cumsum() - cut.lengths)[row]
        tokens = np.full((len(cut.lengths), self.length + 1), PADDING, dtype=np.int64)
        tokens[:, 0] = BEGINNING
        tokens[row, step + 1] = number[cut.flat]
        short = np.flatnonzero(cut.lengths < self.length)
        tokens[short, cut.lengths[short] + 1] = END
        return torch.from_numpy(tokens)


@ingredient
class PlayRoles(Loading):
    """Next-word prediction on 248 roles of Shakespeare's plays, where a role is a natural client and a row a sentence.

    Domain "day" has 125 roles of eleven comedies, domain "night" 123 roles of six tragedies and five histories. Each
    role has its first speeches up to 4,000 characters. The latest fifth of a role's speeches is for testing. Words,
    numbers and scoring are as in `kind = "text"`.

    A vocabulary of a thousand words leaves out a fifth of all words. A single class of them would be by far the most
    frequent. A small model would long predict only this class, which is never scored as right, so they share several
    numbers.

    Args:
        vocabulary: number of known words, the most frequent of the training sentences.
        length: number of steps of a row.
        oov_buckets: number of token ids shared by words outside the vocabulary.
        max_samples: maximum number of training sentences of each role, which are its first, as in `kind = "text"`.

    >>> rows = PlayRoles(vocabulary=100, length=10, max_samples=5).load(None, 0)
    >>> rows.shape, rows.classes, rows.domain_names, len(rows.client_names)
    ((10,), 123, ('day', 'night'), 248)
    """

    vocabulary: Count = 1000
    length: Count = 20
    oov_buckets: Count = 20
    max_samples: Count | None = None
    kind: Literal["play-roles"] = "play-roles"

    def load(self, directory: Path | None, seed: int) -> Rows:
        """Read the speeches."""
        with as_file(files("fedtide.data").joinpath("bundled/plays.jsonl.gz")) as path:
            text = Text(
                (str(path),), text="speeches", client=("play", "role"), domain="domain", domains=("day", "night"),
                vocabulary=self.vocabulary, length=self.length, oov_buckets=self.oov_buckets,
                max_samples=self.max_samples,
            )  # fmt: skip
            return replace(text.load(None, seed), name=self.kind)


def sentences(text: str) -> Iterator[list[str]]:
    """Yield the words of each sentence of a text.

    >>> list(sentences("To be, or not to be? 'Tis a well-known question.  That's it"))
    [['to', 'be', 'or', 'not', 'to', 'be'], ['tis', 'a', 'well-known', 'question'], ["that's", 'it']]
    """
    for sentence in SENTENCE.split(text.lower().replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")):
        if words := WORD.findall(sentence):
            yield words


def _plain(text: str) -> str:
    """Return the text of a post without blocks of code; a blank line ends a block element."""
    return BLANK.sub("\n\n", html.unescape(TAG.sub("\n\n", INLINE.sub("", CODE.sub("\n\n", text))))).strip()


def read_records(path: Path, text: str, others: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects or posts of a file, with their places for messages; texts of posts are plain.

    Args:
        path: a file of JSON lines, or `.xml` with the posts of a Stack Exchange dump.
        text: column of the text.
        others: columns that must be there. Posts without one of the columns, or without a word, are left out.
    """
    if ".xml" not in path.suffixes:
        yield from read_objects(path, [text, *others], file=path.name.partition(".")[0])
        return
    for where, post in _posts(path, [text, *others]):
        if WORD.search(plain := _plain(post[text])):
            yield where, post | {text: plain}


def read_objects(path: Path, columns: list[str], **more: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a file of JSON lines, which have some columns, with their places for messages.

    `more` has columns of the file, for objects that have none of the name.
    """
    with reading(path, "a file of JSON lines"), opened(path) as file:
        for place, line in enumerate(file, start=1):
            where = f"{path}: line {place}"
            if not line.strip():
                continue
            with reading(where, "JSON in UTF-8"):
                content = json.loads(line.decode("utf-8-sig"))
            if not isinstance(content, dict):
                raise refused(where, content, f"an object with {', '.join(columns)}")
            record = {**more, **content}
            find_places(where, sorted(record), columns)
            yield where, record


def _posts(path: Path, columns: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return the posts of a Stack Exchange dump that have all columns, with their places for messages."""
    posts: list[tuple[str, dict[str, Any]]] = []
    carried = {"file": path.name.partition(".")[0]}
    parser = expat.ParserCreate()

    def start(tag: str, attributes: dict[str, str]) -> None:
        if tag == "row":
            record = {"file": carried["file"], **attributes}
            carried.update(record)
            if all(record.get(column) for column in columns):
                posts.append((f"{path}: line {parser.CurrentLineNumber}", {c: record[c] for c in columns}))

    parser.StartElementHandler = start
    with reading(path, "XML"), opened(path) as file:
        parser.ParseFile(file)
    find_places(path, sorted(carried), columns)
    return iter(posts)


def list_texts(where: str, column: str, value: Any) -> list[str]:
    """Return the texts of a value, which is a text or a list of texts; `where` and `column` begin the error."""
    texts = [value] if isinstance(value, str) else value
    if not (isinstance(texts, list) and all(isinstance(text, str) for text in texts)):
        raise refused(f"{where}: {column}", value, "a text, or a list of texts")
    return texts


def _name(where: str, column: str, value: Any) -> str:
    name = str(value).strip().encode(errors="replace").decode() if isinstance(value, str | int) else ""
    if not name:
        raise refused(f"{where}: {column}", value, "a name or a whole number")
    return name


def _flag(where: str, column: str, value: Any) -> bool:
    if (word := str(value).lower()) not in HELD_OUT:
        raise refused(f"{where}: {column}", value, "true, false, 'test', 'train'")
    return HELD_OUT[word]
