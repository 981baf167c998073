"""Texts of tables as rows of tokens: what is cut, padded, joined and refused."""

import csv
import json
import random
from pathlib import Path

import numpy as np
import pandas
import pyarrow
import pytest
from pyarrow import parquet

from fedtide.core.errors import FedtideError
from fedtide.data import Domains, Rows, Texts, texts
from fedtide.data.rows import COLUMNS
from fedtide.data.sources.texts import Questions, names_of_files, read_folder
from helpers.language import WORDS, save

pytest.importorskip("transformers")

PAD, UNK, CLS, SEP, SUN, MOON, DAY, NIGHT, IS, UP, GOOD, BYE, A, B = range(14)
TABLE = """text,topic,who,part,when
sun is up,light,ann,day,2024-01-01
moon is up,dark,ann,night,2024-01-03
good day good day good day,light,bob,day,2024-01-02
bye,dark,ann,day,2024-01-02
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("model"))


@pytest.fixture
def table(tmp_path) -> str:
    file = tmp_path / "texts.csv"
    file.write_text(TABLE)
    return str(file)


def test_a_text_with_a_class_is_a_padded_row_and_a_long_one_is_cut_and_counted(table, model):
    rows = Texts((table,), tokenizer=str(model), label="topic", client="who", domain="part", context=6).load(None, 0)
    assert rows.x.tolist() == [
        [CLS, SUN, IS, UP, SEP, PAD],
        [CLS, MOON, IS, UP, SEP, PAD],
        [CLS, GOOD, DAY, GOOD, DAY, SEP],  # with its mark at the end
        [CLS, BYE, SEP, PAD, PAD, PAD],
    ]
    assert (rows.label_names, rows.y.tolist(), rows.cut) == (("dark", "light"), [1, 0, 1, 0], 1)
    assert rows.client_names == ("ann", "bob")
    assert rows.domain_names == ("day", "night")


def test_blocks_join_the_texts_of_a_client_and_a_domain_in_the_order_of_time(table, model):
    source = Texts((table,), tokenizer=str(model), client="who", domain="part", time="when", context=3)
    rows = source.load(None, 0)
    assert rows.x.tolist() == [[SUN, IS, UP], [SEP, BYE, SEP], [MOON, IS, UP], [GOOD, DAY, GOOD], [DAY, GOOD, DAY]]
    assert rows.y.tolist() == [[IS, UP, SEP], [BYE, SEP, PAD], [IS, UP, SEP], [DAY, GOOD, DAY], [GOOD, DAY, SEP]]
    assert (rows.padding, rows.classes, rows.steps) == (PAD, len(WORDS), 3)
    days = ((rows.time - rows.time.min()) / 86_400).tolist()
    assert days == [0, 1, 2, 1, 1]  # of the last token: a block is not known before


def test_a_next_token_after_the_last_block_is_not_lost(table, model):
    """Every token but the first of a client and a domain is predicted once."""
    rows = Texts((table,), tokenizer=str(model), client="who", domain="part", context=2).load(None, 0)
    assert int((rows.y != rows.padding).sum()) == 5 + 3 + 6


def test_json_lines_with_lists_of_texts_and_clients_of_two_columns(tmp_path, model):
    file = tmp_path / "said.jsonl"
    file.write_text('{"said": ["sun up", "bye"], "play": "a", "role": 1}\n{"said": ["moon"], "play": "a", "role": 2}\n')
    source = Texts((str(file),), tokenizer=str(model), text="said", client=("play", "role"), context=5)
    rows = source.load(None, 0)
    assert rows.client_names == ("a/1", "a/2")
    assert rows.x.tolist() == [[SUN, UP, SEP, BYE, SEP], [MOON, SEP, PAD, PAD, PAD]]


POSTS = """<posts>
<row OwnerUserId="7" Body="&lt;p&gt;sun &lt;b&gt;is&lt;/b&gt; up&lt;/p&gt;&lt;pre&gt;moon&lt;/pre&gt;&lt;p&gt;bye" />
<row OwnerUserId="7" Body="&lt;pre&gt;no words of its own&lt;/pre&gt;" />
<row Body="moon" />
</posts>
"""


def test_posts_are_plain_texts_and_those_without_a_word_or_an_author_are_left_out(tmp_path, model):
    for site in ("sun", "moon"):
        (tmp_path / f"{site}_Posts.xml").write_text(POSTS)
    paths = tuple(str(tmp_path / f"{site}_Posts.xml") for site in ("sun", "moon"))
    source = Texts(paths, tokenizer=str(model), text="Body", label="file", client=("file", "OwnerUserId"), context=8)
    rows = source.load(None, 0)
    assert rows.x.tolist() == [[CLS, SUN, IS, UP, BYE, SEP, PAD, PAD]] * 2
    assert (rows.label_names, rows.y.tolist()) == (("moon_Posts", "sun_Posts"), [1, 0])
    assert rows.client_names == ("moon_Posts/7", "sun_Posts/7")


def test_texts_of_two_files_with_columns_of_their_own_are_two_domains(table, tmp_path, model):
    (tmp_path / "moon.csv").write_text("said,by\nmoon is up,eve\n")
    keys = {"tokenizer": str(model), "context": 3}
    day = Texts((table,), client="who", **keys)
    night = Texts((str(tmp_path / "moon.csv"),), text="said", client="by", **keys)
    rows = Domains(("day", "night"), (day, night), "shared").load(None, 0)
    parts = [source.load(None, 0) for source in (day, night)]
    assert rows.x.tolist() == [row for part in parts for row in part.x.tolist()]
    assert rows.y.tolist() == [row for part in parts for row in part.y.tolist()]
    assert (rows.padding, rows.classes, rows.steps) == (PAD, len(WORDS), 3)
    assert rows.client_names == ("day/ann", "day/bob", "night/eve")
    with pytest.raises(FedtideError, match=r"labels: found 'disjoint', but sources give sequences; allowed: 'shared'"):
        Domains(("day", "night"), (day, night)).load(None, 0)


@pytest.mark.parametrize("kind", ["file", "lists", "arrays", "objects", "pandas"])
def test_half_a_character_is_replaced(kind, tmp_path, model):
    (tmp_path / "texts.jsonl").write_text('{"text": "a \\ud800 b", "who": "\\ud800"}\n{"text": "b", "who": "ann"}\n')
    columns = {"text": ["a \ud800 b", "b"], "who": ["\ud800", "ann"]}
    data = {
        "file": str(tmp_path / "texts.jsonl"),
        "lists": columns,
        "arrays": {name: np.array(column) for name, column in columns.items()},
        "objects": columns | {"who": np.array(["\ud800", "ann"], object), "other": ["\ud800", 7]},
        "pandas": pandas.DataFrame(columns, dtype=object),
    }[kind]
    rows = texts(data, tokenizer=str(model), client="who", context=4)
    assert rows.client_names == ("?", "ann")
    assert rows.x[0].tolist() == [A, UNK, B, SEP]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"text": "tekst"}, r"no column 'tekst'; did you mean 'text'\?"),
        ({"tokenizer": "nowhere"}, r"^data\.source\.tokenizer: no such file or folder: .*nothing is downloaded"),
        ({"tokenizer": None, "package": "no_such"}, r"^data\.source\.package: found 'no_such'"),
        ({"label": "when"}, r"allowed: two or more"),
        ({"context": 1}, r"^data\.source\.context: found 1, but the tokenizer .*; allowed: \d or more"),
    ],
)
def test_what_is_wrong_is_one_line(changes, line, table, model, monkeypatch):
    monkeypatch.delenv("FEDTIDE_DATA", raising=False)
    keys = {"tokenizer": str(model), "label": "topic"} | changes
    if keys["label"] == "when":
        Path(table).write_text("text,when\nsun,x\nmoon,x\n")
    with pytest.raises(FedtideError, match=line) as refusal:
        check(Texts((table,), **keys))
    assert "\n" not in str(refusal.value)


def check(source: Texts) -> None:
    from fedtide.data.rows import check_classes

    check_classes(source.load(None, 0))


def test_an_empty_text_is_named(tmp_path, model):
    file = tmp_path / "texts.csv"
    file.write_text("text,topic\nsun,a\n  ,b\n")
    with pytest.raises(FedtideError, match=r"row 3: text is empty"):
        Texts((str(file),), tokenizer=str(model), label="topic").load(None, 0)


def test_a_table_may_have_one_column_of_texts(tmp_path, model):
    """Words of a text are not cells, though all texts have as many."""
    for texts_of in (["sun is up", "moon is up"], ["sun up", "moon up", "bye"]):
        (tmp_path / "one.csv").write_text("\n".join(["text", *texts_of]))
        rows = Texts((str(tmp_path / "one.csv"),), tokenizer=str(model), context=9).load(None, 0)
        assert int((rows.y != rows.padding).sum()) == len(" ".join(texts_of).split()) + len(texts_of) - 1


def test_a_folder_without_a_tokenizer_is_named(table, model, tmp_path):
    save(tmp_path / "bare")
    (tmp_path / "bare" / "tokenizer.json").unlink()
    with pytest.raises(FedtideError, match=r"no tokenizer\.json, allowed: the folder of a model with its tokenizer"):
        Texts((table,), tokenizer=str(tmp_path / "bare")).load(None, 0)


def folder_of(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_folders_of_texts_name_class_and_client(tmp_path, model):
    files = {"ann/light/1.txt": "sun is up\n", "ann/dark/1.txt": "moon", "bob/light/2.TXT": "day", "bob/note.md": "a"}
    folder = folder_of(tmp_path / "texts", files)
    source = Texts((str(folder),), tokenizer=str(model), label="folder", client="above", domain="file", context=5)
    rows = source.load(None, 0)
    assert rows.x.tolist() == [  # sorted by path
        [CLS, MOON, SEP, PAD, PAD],
        [CLS, SUN, IS, UP, SEP],
        [CLS, DAY, SEP, PAD, PAD],
    ]
    assert (rows.label_names, rows.y.tolist()) == (("dark", "light"), [0, 1, 1])
    assert (rows.client_names, rows.client.tolist()) == (("ann", "bob"), [0, 0, 1])
    assert (rows.domain_names, rows.held_out) == (("1", "2"), None)


def test_files_of_a_client_are_joined_and_those_below_test_are_apart(tmp_path, model):
    files = {
        "train/ann/1.txt": "sun up",
        "train/ann/2.txt": "bye",
        "test/ann/1.txt": "moon up",
        "test/bob/1.txt": "a b",
    }
    folder = folder_of(tmp_path / "texts", files)
    rows = Texts((str(folder),), tokenizer=str(model), client="folder", context=4).load(None, 0)
    assert rows.x.tolist() == [[SUN, UP, SEP, BYE], [MOON, UP, SEP, PAD], [A, B, SEP, PAD]]
    assert (rows.held_out.tolist(), rows.client.tolist()) == ([False, True, True], [0, 0, 1])


def test_texts_of_a_folder_have_the_columns_of_its_names(tmp_path):
    files = {"x/ann/light/1.txt": "sun", "ann/2.txt": "a", "test/3.TXT": "b", "a.md": ""}
    folder = folder_of(tmp_path / "texts", files)
    assert names_of_files(folder) == {
        "file": ["2", "3", "1"], "folder": ["ann", "", "light"], "above": ["", "", "ann"],
    }  # fmt: skip
    assert [record["file"] for _, record in read_folder(folder, "text", ["text"])] == ["2", "3", "1"]
    assert names_of_files(folder_of(tmp_path / "one", {"1.txt": "sun"})) == {"file": ["1"]}
    assert names_of_files(folder / "ann" / "2.txt") == {}


def test_a_folder_has_the_rows_of_a_table(tmp_path, model):
    (tmp_path / "table.csv").write_text("text,class\nmoon is up,dark\nsun is up,light\nday,light\n")
    files = {"dark/1.txt": "moon is up", "light/1.txt": "sun is up", "light/2.txt": "day"}
    folder = folder_of(tmp_path / "texts", files)
    table = Texts((str(tmp_path / "table.csv"),), tokenizer=str(model), label="class", context=5).load(None, 0)
    assert Texts((str(folder),), tokenizer=str(model), label="folder", context=5).load(None, 0).digest == table.digest


@pytest.mark.parametrize(
    ("files", "keys", "line"),
    [
        ({"a.md": "sun"}, {}, r"texts: files of texts: found 0, allowed: 1 or more that end in \.txt"),
        ({"a.txt": " \n"}, {}, r"a\.txt: text is empty"),
        ({"a.txt": "\udcff"}, {}, r"a\.txt: damaged or not a text in UTF-8"),
        ({"x/a.txt": "sun", "b.txt": "sun"}, {"client": "folder"}, r"b\.txt: no column 'folder'; allowed: file, "),
        ({"test/a.txt": "sun"}, {}, r"texts: texts to train on: found 0"),
    ],
)
def test_what_is_wrong_in_a_folder_is_one_line(files, keys, line, tmp_path, model):
    for name, text in files.items():
        folder_of(tmp_path / "texts", {name: ""})
        (tmp_path / "texts" / name).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(FedtideError, match=line) as refusal:
        Texts((str(tmp_path / "texts"),), tokenizer=str(model), **keys).load(None, 0)
    assert "\n" not in str(refusal.value)


# -- frames -----------------------------------------------------------------------------------------------------------

KEYS = {
    "classes": {"label": "topic", "client": "who", "domain": "part", "time": "when"},
    "blocks": {"client": ["who", "part"], "domain": "part", "time": "when"},
    "pairs": {"prompt": "topic", "client": "who"},
    "nobody": {},
}


@pytest.mark.parametrize("library", ["pandas", "polars", "pyarrow", ""])
@pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS)
def test_a_frame_has_the_bits_of_a_file_with_the_same_rows(keys, library, tmp_path, model):
    draw = random.Random(0)
    said = ["sun is up", ' moon, "day" ', "good\nbye", "Z\u00fcrich a", "007", "NA", "good " * 9, "12.5", "\u2014 b"]
    columns = {
        "text": [draw.choice(said) for _ in range(60)],
        "topic": [draw.choice(["light", "dark", "no"]) for _ in range(60)],
        "who": [draw.randrange(7) for _ in range(60)],
        "part": [draw.choice(["day", "night"]) for _ in range(60)],
        "when": [f"2024-01-{draw.randrange(1, 28):02d}T0{draw.randrange(10)}:00" for _ in range(60)],
    }
    file = tmp_path / "table.csv"
    with file.open("w", newline="") as out:
        csv.writer(out).writerows([[*columns], *zip(*columns.values(), strict=True)])
    source = Texts((str(file),), tokenizer=str(model), context=6, **keys).load(None, 0)
    module = pytest.importorskip(library) if library else None
    frame = dict if module is None else getattr(module, "DataFrame", getattr(module, "table", None))
    for data in (str(file), frame(columns)):
        assert bits(texts(data, tokenizer=str(model), context=6, **keys)) == bits(source)


def bits(rows: Rows) -> list[object]:
    tensors = (getattr(rows, name) for name in ("x", *COLUMNS))
    names = rows.client_names, rows.domain_names, rows.label_names, rows.padding, rows.classes, rows.cut
    return [*names, *(None if tensor is None else (tensor.dtype, tensor.tolist()) for tensor in tensors)]


@pytest.mark.parametrize(
    ("columns", "keys", "line"),
    [
        ({"text": ["sun"]}, {"label": "topic"}, r"^table: no column 'topic'; allowed: text$"),
        ({"text": ["sun", ""]}, {}, r"^table: row 1: text is empty$"),
        ({"text": pyarrow.array([["sun"], ["a"]])}, {}, r"^table: row 0: text: found 'lists', allowed: texts$"),
        ({"text": [{"a": ["\ud800"]}]}, {}, r"^table: row 0: text: found '.*', allowed: texts$"),
        ({"text": [["\ud800"]]}, {}, r"^table: shape of column 'text': found \(1, 1\), allowed: \(rows,\)$"),
        ({"text": ["sun"]}, {"context": 0}, r"context: found 0, allowed: "),
        ({"text": []}, {}, r"^table: no rows$"),
    ],
)
def test_what_is_wrong_in_a_frame_is_one_line(columns, keys, line, model):
    with pytest.raises(FedtideError, match=line) as refusal:
        texts(columns, tokenizer=str(model), **keys)
    assert "\n" not in str(refusal.value)


def test_questions_of_each_kind_of_file_are_the_same(tmp_path, model):
    prompts, answers, right = ["sun", "moon is"], [["up", "a b"], ["day", "bye"]], [1, 0]
    source = Texts(("x.csv",), tokenizer=str(model))
    columns = {"text": prompts, "choices": answers, "right": right}
    parquet.write_table(pyarrow.table(columns), tmp_path / "asked.parquet")
    with (tmp_path / "asked.jsonl").open("w") as file:
        file.writelines(
            json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in zip(*columns.values(), strict=True)
        )
    for kind in ("parquet", "jsonl"):
        assert source.questions_of(tmp_path / f"asked.{kind}", ["choices"], "right") == Questions(
            prompts, answers, right
        )
    assert source.questions_of(tmp_path / "asked.parquet", ["choices"], None).right is None
    (tmp_path / "asked.csv").write_text("text,one,two,right\nsun,up,a b,1\nmoon is,day,bye,0\n")
    assert source.questions_of(tmp_path / "asked.csv", ["one", "two"], "right") == Questions(prompts, answers, right)
