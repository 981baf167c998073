"""Text: the numbers of words by hand, both forms of files, the bundled plays, and mistakes."""

import gzip
import json
import os
from importlib.resources import files
from pathlib import Path

import pytest
import torch

from fedtide.core.base import Moment
from fedtide.core.errors import FedtideError
from fedtide.data.partition import ByDomain, Natural, Split
from fedtide.data.population_builder import build
from fedtide.data.sources import PlayRoles, Text
from fedtide.data.sources.text import sentences
from helpers.texts import tiny, written

NOW = Moment(0, 8)


# -- words and their numbers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "words"), [
    ("To be, or not.", ["to be or not"]),
    ("One! Two? Three...  Four", ["one", "two", "three", "four"]),
    ('He said "stop." Then left', ["he said stop", "then left"]),
    ("a verse\nof a sentence", ["a verse of a sentence"]),
    ("no stop\n\nbut a blank line\n \t\nor two", ["no stop", "but a blank line", "or two"]),
    ("don't -- well-known rock'n'roll, 'tis 3.14", ["don't well-known rock'n'roll tis 3 14"]),
    ("Don\u2019t", ["don't"]),
    ("Zürich, naïve ΩMEGA snake_case", ["zürich naïve ωmega snake case"]),
    ("... !? -- ''", []),
    ("", []),
])  # fmt: skip
def test_a_text_is_cut_into_sentences_and_words(text, words):
    assert [" ".join(sentence) for sentence in sentences(text)] == words


def test_words_are_numbered_by_how_often_they_come(tmp_path):
    """Of the sentences cut to four words: cat 3, the 3, sat 2, a 1, dog 1, on 1, ran 1; ties in the alphabet's order.

    So 4 = cat, 5 = the, 6 = sat, 7 = a, and dog, on and ran are 3.
    """
    rows = tiny(tmp_path)
    assert rows.x.tolist() == [
        [1, 5, 4, 6],  # the cat sat
        [1, 5, 4, 3],  # the cat ran
        [1, 7, 3, 2],  # a dog
        [1, 5, 4, 6],  # the cat sat on, cut off
    ]
    assert rows.y.tolist() == [[5, 4, 6, 2], [5, 4, 3, 2], [7, 3, 2, 0], [5, 4, 6, 3]]
    assert (rows.classes, rows.steps, rows.shape) == (8, 4, (4,))
    assert (rows.padding, rows.unscored) == (0, (2, 3))
    assert (rows.client.tolist(), rows.client_names) == ([0, 0, 0, 1], ("ann", "bob"))
    assert (rows.domain, rows.time, rows.held_out) == (None, None, None)


def test_padding_does_not_count_and_ends_and_unknown_words_are_not_scored(tmp_path):
    rows = tiny(tmp_path)
    assert rows.mask(rows.y).int().tolist() == [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1]]
    assert rows.scored(rows.y).int().tolist() == [[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0]]


def test_unknown_words_may_share_several_numbers(tmp_path):
    rows = tiny(tmp_path, vocabulary=1, oov_buckets=3)
    assert (rows.classes, rows.unscored) == (7, (2, 3, 4, 5))
    assert rows.y[[0, 1, 3], 1].tolist() == [6, 6, 6]  # cat is the only word that is known
    unknown = rows.y[rows.mask(rows.y) & ~torch.isin(rows.y, torch.tensor([2, 6]))]
    assert set(unknown.tolist()) <= {3, 4, 5}
    assert rows.y[0, 0] == rows.y[1, 0] == rows.y[3, 0]  # the
    assert len(set(unknown.tolist())) > 1


# -- what is for testing -----------------------------------------------------------------------------------------------


def days(client: str, *texts: str) -> list[dict]:
    """A text a day, written down with the last first."""
    stamps = [f"2026-03-0{k}T12:00:00" for k in range(1, len(texts) + 1)]
    return [{"client": client, "text": t, "when": when} for t, when in zip(texts, stamps, strict=True)][::-1]


def test_the_latest_texts_of_each_client_are_for_testing_and_teach_no_words(tmp_path):
    lines = [*days("a", "one", "two", "three", "four", "five"), *days("b", "six", "six seven"), *days("c", "eight")]
    rows = Text((written(tmp_path / "t.jsonl", lines),), time="when", length=3).load(None, 0)
    # a: 0.2 of 5 texts is one; b: at least one of two; c has only one.
    assert rows.client.tolist() == [0, 0, 0, 0, 0, 1, 1, 2]
    assert rows.held_out.tolist() == [False] * 4 + [True, False, True, False]
    assert rows.time.diff()[:4].tolist() == [86_400.0] * 4
    # eight, four, one, six, three, two by the alphabet; five and seven are known to nobody.
    assert rows.y[:, 0].tolist() == [6, 9, 8, 5, 3, 7, 7, 4]
    assert rows.y[6].tolist() == [7, 3, 2]
    population = build(rows, Natural(), split=Split(val=0.0))
    assert population.parts["test"].counts.tolist() == [1, 1, 0]
    assert population.parts["train"].counts.tolist() == [4, 1, 1]


@pytest.mark.parametrize(
    "flags", [(False, True, False), (0, 1, 0), ("train", "test", "train"), ("false", "TRUE", "0")], ids=str
)
def test_the_file_may_say_what_is_for_testing(tmp_path, flags):
    lines = [{"client": "a", "text": word, "part": flag} for word, flag in zip("xyz", flags, strict=True)]
    rows = Text((written(tmp_path / "t.jsonl", lines),), test="part").load(None, 0)
    assert rows.held_out.tolist() == [False, True, False]
    assert rows.y[:, 0].tolist() == [4, 3, 5]


def test_a_client_keeps_so_many_sentences_for_training(tmp_path):
    lines = [{"client": c, "text": f"{c}one. {c}two. {c}three."} for c in "ab" for _ in range(2)]
    rows = Text((written(tmp_path / "t.jsonl", lines),), max_samples=2).load(None, 0)
    assert rows.client.tolist() == [0] * 5 + [1] * 5
    assert rows.held_out.tolist() == ([False] * 2 + [True] * 3) * 2
    assert rows.classes == 4 + 6  # what is left out is counted, so the task is the same whatever the maximum
    rows = Text((written(tmp_path / "t.jsonl", lines),), max_samples=4, test=0.0).load(None, 0)
    assert rows.client.tolist() == [0] * 4 + [1] * 4


# -- both forms of files -----------------------------------------------------------------------------------------------


def test_several_columns_may_name_a_client_and_texts_may_be_lists(tmp_path):
    lines = [
        {"play": "hamlet", "role": "GHOST", "speeches": ["Mark me.", "...", "I am thy father's spirit."]},
        {"play": "macbeth", "role": "GHOST", "speeches": ["Blood!"]},
    ]
    path = written(tmp_path / "plays.jsonl", lines)
    rows = Text((path,), text="speeches", client=("play", "role"), test=0.0).load(None, 0)
    assert rows.client_names == ("hamlet/GHOST", "macbeth/GHOST")
    assert rows.client.tolist() == [0, 0, 1]
    assert rows.name == "plays.jsonl"


def test_clients_and_domains_may_be_numbers_and_domains_have_names_and_an_order(tmp_path):
    lines = [{"client": 7, "text": word, "type": kind} for word, kind in zip("abcd", (2, 1, 3, 1), strict=True)]
    path = written(tmp_path / "t.jsonl", lines)
    rows = Text((path,), domain="type").load(None, 0)
    assert (rows.domain.tolist(), rows.domain_names) == ([1, 0, 2, 0], ("1", "2", "3"))
    rows = Text((path,), domain="type", domains=("2", "1"), domain_names=("night", "day")).load(None, 0)
    assert (rows.domain.tolist(), rows.domain_names) == ([0, 1, 1], ("night", "day"))
    assert rows.client_names == ("7",)


def test_several_files_are_read_as_one_and_may_be_domains(tmp_path):
    for name, word in (("tea", "hot"), ("rain", "wet")):
        written(tmp_path / f"{name}.en.jsonl", [{"client": 1, "text": f"{word} {word} and"}])
    source = Text(("tea.en.jsonl", "rain.en.jsonl"), client=("file", "client"), domain="file", domains=("tea", "rain"))
    rows = source.load(tmp_path, 0)
    assert rows.client_names == ("rain/1", "tea/1")
    assert (rows.domain.tolist(), rows.domain_names) == ([1, 0], ("tea", "rain"))
    assert rows.classes == 4 + 3  # one vocabulary
    assert rows.name == "tea.en.jsonl, rain.en.jsonl"


POSTS = """<?xml version="1.0" encoding="utf-8"?>
<posts>
  <row Id="1" PostTypeId="1" CreationDate="1970-01-01T00:00:02.500" OwnerUserId="4"
    Body="&lt;p&gt;Is 1 &amp;lt; &lt;b&gt;2&lt;/b&gt;?&lt;/p&gt;&#xA;&lt;pre class=&quot;c&quot;&gt;&lt;code&gt;no. code&lt;/code&gt;&lt;/pre&gt;&lt;ul&gt;&lt;li&gt;tea&lt;/li&gt;&lt;li&gt;wa&lt;i&gt;t&lt;/i&gt;er&lt;/li&gt;&lt;/ul&gt;" />
  <row Id="2" PostTypeId="2" CreationDate="1970-01-01T00:00:01.000" OwnerUserId="4" Body="&lt;p&gt;Yes&lt;/p&gt;" />
  <row Id="3" PostTypeId="2" CreationDate="1970-01-01T00:00:03.000" Body="&lt;p&gt;by nobody&lt;/p&gt;" />
  <row Id="4" PostTypeId="4" CreationDate="1970-01-01T00:00:03.000" OwnerUserId="-1" Body="" />
</posts>
"""  # noqa: E501


def posts(folder, content: str = POSTS, **options) -> Text:
    (folder / "Posts.xml").write_text(content, encoding="utf-8")
    named = {"text": "Body", "client": ("OwnerUserId",), "time": "CreationDate", "test": 0.0, **options}
    return Text((str(folder / "Posts.xml"),), **named)


def test_posts_are_read_without_tags_and_code(tmp_path):
    # Each word comes once: 1 2 is tea water yes are 4 to 9.
    assert posts(tmp_path, length=3, time=None).load(None, 0).y.tolist() == [[6, 4, 5], [7, 2, 0], [8, 2, 0], [9, 2, 0]]
    rows = posts(tmp_path, length=3).load(None, 0)
    # With times the words of the earliest sentence are known: yes is 4, and 3 stands for all others.
    assert rows.y.tolist() == [[4, 2, 0], [3, 3, 3], [3, 2, 0], [3, 2, 0]]
    assert rows.time.tolist() == [1.0, 2.5, 2.5, 2.5]
    assert rows.client_names == ("4",)


def test_a_user_who_asks_and_answers_may_be_two_clients(tmp_path):
    options = {"client": ("OwnerUserId", "PostTypeId"), "domain": "PostTypeId", "domains": ("1", "2")}
    rows = posts(tmp_path, **options, domain_names=("questions", "answers")).load(None, 0)
    assert rows.client_names == ("4/1", "4/2")
    population = build(rows, Natural(), ByDomain())
    assert population.group_names == ("questions", "answers")
    assert population.group.tolist() == [0, 1]


# -- dealing -----------------------------------------------------------------------------------------------------------


def library(folder, **options) -> Text:
    """Ten clients in two domains, ten sentences each, every word used by all."""
    lines = [{"client": c, "site": "even" if c % 2 == 0 else "odd", "text": f"w{k} w{c}"} for c in range(10) for k in
             range(10)]  # fmt: skip
    return Text((written(folder / "library.jsonl", lines),), length=3, domain="site", **options)


def test_a_shard_has_the_mask_of_its_rows(tmp_path):
    rows = library(tmp_path).load(None, 0)
    population = build(rows, Natural())
    for part in ("train", "val", "test"):
        shard = population.shard(3, NOW, part)
        assert torch.equal(shard.mask, shard.y != 0)
        assert shard.mask.shape == shard.x.shape
        assert torch.equal(shard.x[:, 1:], shard.y[:, :-1])
    assert population.shard(3, NOW).val.mask.shape == (1, 3)
    assert population.sizes(population.clients, "test").tolist() == [6] * 10


# -- what is refused ---------------------------------------------------------------------------------------------------

GOOD = '{"client": "a", "text": "b", "when": 0, "part": true}\n'
WRONG = {
    "no-text": ('{"client": "a", "txt": "b"}\n', {}, "line 1: no column 'text'; did you mean 'txt'"),
    "no-time": (GOOD, {"time": "date"}, "line 1: no column 'date'"),
    "not-json": (GOOD + "\n" + '{"client": "a", "text": b}\n', {}, r"line 3: damaged or not JSON in UTF-8 \(Expect"),
    "too-deep": (GOOD + "[" * 100_000, {}, "line 2: damaged or not JSON"),
    "long-number": (GOOD + '{"client": ' + "9" * 5000 + ', "text": "b"}', {}, "line 2: damaged or not JSON"),
    "list": (GOOD + '["a", "b"]\n', {}, r"line 2: found \['a', 'b'\], allowed: an object with text, client"),
    "number": ('{"client": "a", "text": 3}\n', {}, "line 1: text: found 3, allowed: a text, or a list of texts"),
    "empty-client": (GOOD + '{"client": " ", "text": "b"}\n', {}, "line 2: client: found ' ', allowed: a name"),
    "word-time": (GOOD + '{"client": 1, "text": "b", "when": "noon"}\n', {"time": "when"},
                  "line 2: time: found 'noon', allowed: seconds, or a date such as"),
    "flag": (GOOD + '{"client": 1, "text": "b", "part": "maybe"}\n', {"test": "part"},
             "line 2: part: found 'maybe', allowed: true, false, 'test', 'train'"),
    "domain": (GOOD, {"domain": "client", "domains": ("a", "b")}, "domains: found 'b', allowed: a"),
    "empty": ("", {}, "data.jsonl: no text with a word in it"),
    "no-word": ('{"client": "a", "text": ""}\n{"client": "a", "text": ["...", "-"]}', {}, "no text with a word"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_line_is_one_line(tmp_path, name):
    text, options, line = WRONG[name]
    (tmp_path / "data.jsonl").write_text(text)
    with pytest.raises(FedtideError, match=line) as error:
        Text(("data.jsonl",), **options).load(tmp_path, 0)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


def test_bytes_that_are_no_utf_8_name_the_line(tmp_path):
    (tmp_path / "data.jsonl").write_bytes(GOOD.encode() + b'{"client": "a", "text": "caf\xe9"}\n')
    with pytest.raises(FedtideError, match=r"data.jsonl: line 2: damaged or not JSON in UTF-8 .* invalid cont"):
        Text(("data.jsonl",)).load(tmp_path, 0)


WRONG_POSTS = {
    "unclosed": (POSTS.replace("</posts>", ""), {}, r"Posts.xml: damaged or not XML \(no element found: line 9"),
    "bytes": (POSTS.replace("utf-8", "utf-42"), {}, "damaged or not XML"),
    "no-column": (POSTS, {"text": "body"}, r"Posts.xml: no column 'body'; did you mean 'Body'\? Allowed: Body, "),
    "time": (POSTS.replace("1970-01-01T00:00:01.000", "soon"), {}, "Posts.xml: line 5: time: found 'soon'"),
    "no-row": ("<posts></posts>", {}, "no column 'Body'; allowed: file"),
    "nobody": (POSTS.replace('OwnerUserId="4"', ""), {}, "no text with a word in it"),
}


@pytest.mark.parametrize("name", WRONG_POSTS)
def test_a_wrong_dump_is_one_line(tmp_path, name):
    content, options, line = WRONG_POSTS[name]
    with pytest.raises(FedtideError, match=line) as error:
        posts(tmp_path, content, **options).load(None, 0)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("options", "line"), [
    ({"domains": ("a",)}, "name it with domain"),
    ({"domain": "p", "domains": ("a", "b"), "domain_names": ("x",)}, "1 domain_names for 2 domains"),
    ({"domain": "p", "domain_names": ("x",)}, "1 domain_names for 0 domains"),
    ({"test": ["part"]}, "found \\['part'\\], allowed: a share, 0 or more and less than 1, or a column"),
    ({"path": ()}, "found \\(\\), allowed: 1 or more"),
    ({"vocabulary": 0}, "found 0, allowed: 1 or more"),
    ({"length": 0}, "found 0, allowed: 1 or more"),
    ({"test": 1.0}, "less than 1"),
])  # fmt: skip
def test_options_that_do_not_fit_are_refused(options, line):
    with pytest.raises(FedtideError, match=line):
        Text(**{"path": ("t.jsonl",), **options})


FILE = Path(str(files("fedtide.data").joinpath("bundled/plays.jsonl.gz")))


@pytest.fixture(scope="module")
def lines():
    with gzip.open(FILE, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


@pytest.fixture(scope="module")
def rows():
    return PlayRoles().load(None, 0)


def test_roles_are_clients_and_the_most_frequent_words_come_first(rows):
    assert (rows.name, rows.shape, rows.steps, rows.classes) == ("play-roles", (20,), 20, 1023)
    assert (rows.domain_names, len(rows.client_names), rows.padding) == (("day", "night"), 248, 0)
    assert rows.unscored == (2, *range(3, 23))  # ends, and twenty numbers for words that are not known
    assert "hamlet/HAMLET" in rows.client_names
    for client in range(248):
        assert len(rows.domain[rows.client == client].unique()) == 1
    train = rows.y[~rows.held_out]
    counts = torch.bincount(train.flatten(), minlength=1023)
    assert (counts[23:-1] >= counts[24:]).all()
    known = counts[23:].sum() / (train > 2).sum()
    assert 0.75 < known < 0.9  # a thousand words make most of what is said


@pytest.mark.shared
def test_every_speech_is_a_roles_own_in_the_order_spoken(lines):
    beside = Path(__file__).resolve().parents[4] / "shared" / "data"
    source = Path(os.environ.get("FEDTIDE_DATA") or beside) / "shakespeare" / "mit_shakespeare_roles.jsonl.gz"
    if not source.is_file():
        pytest.skip(f"no file {source}")
    with gzip.open(source, "rt", encoding="utf-8") as file:
        known = {(x["play"], x["role"]): x["speeches"] for x in map(json.loads, file)}
    for x in lines:
        assert known[x["play"], x["role"]][: len(x["speeches"])] == x["speeches"]
