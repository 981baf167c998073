"""The pretrained base of a study: each node has it, its files are those of the ticket, and its texts become tokens."""

import json
import shutil
import sys
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pytest
import torch
from pyarrow import parquet

pytest.importorskip("cryptography")
pytest.importorskip("peft")
pytest.importorskip("transformers")

from fedtide.cli.commands import main
from fedtide.config import from_dict, read
from fedtide.core.base import Moment
from fedtide.core.errors import FedtideError
from fedtide.core.record import read_lines
from fedtide.data.partition import Split
from fedtide.data.rows import Rows
from fedtide.models.transformer import load_base
from fedtide.runs.build import rows_of
from fedtide.site import bases
from fedtide.site.bases import Base, describe_base, find_base
from fedtide.site.client_rows import FileRows, read_rows
from fedtide.site.deploying import choose, describe_rows, make_site
from fedtide.site.parity import replay
from fedtide.site.seat import RECORD, Seat, WatchedNode, check_size, node_of
from fedtide.site.site import Roster, Site
from fedtide.site.tickets import Ticket
from helpers.language import WORDS, save
from helpers.near_sites import serve_near
from helpers.offices import NAMES, offices, site_of
from helpers.shell import done, refused

FILES = {"berlin": "berlin.csv", "lyon": "lyon.jsonl", "oslo": "oslo.csv"}
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # of PEFT itself


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a site of FedAvg, its base and the files of its nodes."""
    place = tmp_path_factory.mktemp("offices")
    site_of(place)
    return place


@pytest.fixture(scope="module")
def wanted(place) -> Base:
    base = Site.read(place / "site").about.base
    assert base is not None
    return base


def seat_of(place: Path, name: str, home: Path, base: str | None = None) -> Seat:
    ticket = place / "site" / "tickets" / f"{name}.ticket"
    return Seat.read(Ticket.read(ticket), [place / FILES[name]], None, home, base or str(place / "model"))


def nodes_of(place: Path) -> dict[str, Any]:
    nodes = {}
    for name in NAMES:
        seat = seat_of(place, name, place / name)
        seat.settle()
        (seat.home / "run").mkdir(exist_ok=True)
        (seat.home / "run" / "worker.json").write_text(json.dumps(seat.settings))
        nodes[name] = WatchedNode(node_of(seat.settings), datetime.now(UTC), seat.home / RECORD)
    return nodes


# -- rounds ------------------------------------------------------------------------------------------------------------

MASKED = {"wire": {"secure": True, "fewest": 3, "sum_scores": False}}


@pytest.mark.parametrize(
    ("played", "head", "changes"),
    [
        ("FedAvg", "classification", {}),
        ("FedAvg", "next-token", MASKED | {"metrics": ["perplexity"]}),
        ("FedTEM", "classification", MASKED),
        ("FedTEM", "next-token", {}),
    ],
)
def test_nodes_with_bases_of_their_own_have_the_bits_of_the_simulation(tmp_path, played, head, changes):
    """A node dies after the first round, and comes back with what its folder has."""
    site = site_of(tmp_path, played, head, **changes)
    moved = tmp_path / "elsewhere"
    serve_near(site, nodes_of(tmp_path), 1, judged=True)
    shutil.copytree(tmp_path / "model", moved)
    again = nodes_of(tmp_path)
    seat = seat_of(tmp_path, "oslo", tmp_path / "oslo", str(moved))
    again["oslo"] = WatchedNode(node_of(seat.settings), datetime.now(UTC), seat.home / RECORD)
    serve_near(site, again, 3, judged=True)
    result = replay(site.run, [tmp_path / FILES[name] for name in NAMES])
    assert (result.rounds, result.equal, result.differs) == (3, True, None)
    scores = read_lines(site.record)[-1]["scores"]["train_clients"]
    assert scores["rows"] > 10
    assert ("perplexity" in scores) == ("metrics" in changes)
    sent = max(line["sent"] for line in map(json.loads, (tmp_path / "oslo" / RECORD).read_text().splitlines()))
    assert 0 < sent < (tmp_path / "model" / "model.safetensors").stat().st_size, "the base is not among what is sent"


def test_a_node_predicts_texts_of_its_own_and_exports_its_adapters(tmp_path, capsys, monkeypatch):
    site = site_of(tmp_path)
    serve_near(site, nodes_of(tmp_path), 2, judged=True)
    monkeypatch.chdir(tmp_path)
    for node, file in (("lyon", "lyon.jsonl"), ("oslo", "oslo.csv")):
        assert done("predict", tmp_path / node, file, "--out", f"{node}.out") == 0
        assert len((tmp_path / f"{node}.out").read_text().splitlines()) == 25
    assert done("predict", site.run, "oslo.csv", "--out", "server.out") == 0
    assert (tmp_path / "server.out").read_bytes() == (tmp_path / "oslo.out").read_bytes()
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "a.txt").write_text("sun is up")
    assert done("predict", tmp_path / "oslo", "new", "--out", "new.out") == 0
    assert Path("new.out").read_text().startswith("file,class,")
    assert done("export", tmp_path / "oslo", "--format", "peft", "--out", "adapters") == 0
    assert (tmp_path / "adapters" / "adapter_config.json").is_file()
    capsys.readouterr()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert "config.json is another file" in refused(capsys, tmp_path, "predict", tmp_path / "oslo", "oslo.csv")


def test_next_tokens_have_no_class_to_be_predicted(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    serve_near(site_of(tmp_path, head="next-token", rounds=1), nodes_of(tmp_path), 1, judged=True)
    line = refused(capsys, tmp_path, "predict", tmp_path / "oslo", "oslo.csv")
    assert line == "the study: rows: found 'sequences', allowed: rows with one label each"


# -- which base a node takes -------------------------------------------------------------------------------------------


def test_a_ticket_names_no_place_and_its_base_is_that_of_the_run(place, wanted, tmp_path):
    text = (place / "site" / "tickets" / "berlin.ticket").read_text()
    assert str(place) not in text
    ticket = Ticket.read(place / "site" / "tickets" / "berlin.ticket")
    assert ticket.base == wanted
    with pytest.raises(FedtideError, match="no such file or folder: /dev/null/base"):
        ticket.experiment.model.build((6,), 3)
    lines = list(seat_of(place, "lyon", tmp_path / "home").describe())
    read_only = f"digest {wanted.digest} as in the study; it is only read, and never sent"
    assert f"base: {place / 'model'}, {read_only}" in lines
    assert f"columns: {place / 'lyon.jsonl'}: reads text, topic, shift; leaves alone nothing" in lines


def test_without_a_base_the_node_says_what_it_needs(wanted):
    with pytest.raises(FedtideError) as said:
        find_base(wanted, None)
    needs = (
        f"--base: no value given, and the study needs the base 'model' with digest {wanted.digest}; allowed: a folder"
    )
    assert str(said.value).startswith(needs)
    with pytest.raises(FedtideError, match=r"--base: no such file or folder: /nowhere; nothing is downloaded"):
        find_base(wanted, "/nowhere")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"])
def test_a_base_with_another_byte_is_refused_by_the_name_of_its_file(place, wanted, tmp_path, name):
    base = shutil.copytree(place / "model", tmp_path / "model")
    content = bytearray((base / name).read_bytes())
    content[len(content) // 2] ^= 1
    (base / name).write_bytes(content)
    with pytest.raises(FedtideError, match=rf"the base 'model' with digest {wanted.digest}: {name} is another file"):
        find_base(wanted, str(base))


@pytest.mark.parametrize("name", ["adapter_config.json", "special_tokens_map.json", "model-2.safetensors"])
def test_a_base_with_one_more_file_that_decides_numbers_is_refused(place, wanted, tmp_path, name):
    base = shutil.copytree(place / "model", tmp_path / "model")
    (base / "README.md").write_text("of no meaning")
    assert find_base(wanted, str(base)) == base
    (base / name).write_text("{}")
    line = rf"--base: .*: found '{name}', allowed: a model without" if "adapter" in name else f"{name} is one file too"
    with pytest.raises(FedtideError, match=line):
        find_base(wanted, str(base))


def test_the_tokenizer_of_another_model_is_refused_at_the_node_and_at_the_site(place, wanted, tmp_path):
    other = save(tmp_path / "other", words=(*WORDS[:-2], "b", "a"))
    with pytest.raises(FedtideError, match=r"tokenizer.json is another file"):
        find_base(wanted, str(other))
    study = read(place / "study.toml", sets=[f"data.source.tokenizer={other}"])
    with pytest.raises(FedtideError, match=r"data\.source\.tokenizer: found '.*, but its tokens have other numbers"):
        choose_site(study, tmp_path)
    shutil.copytree(place / "model", tmp_path / "alike")
    choose_site(read(place / "study.toml", sets=[f"data.source.tokenizer={tmp_path / 'alike'}"]), tmp_path / "a")
    (tmp_path / "alike" / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "TokenizersBackend"}))
    with pytest.raises(FedtideError, match="but its files are others, and a node has one base; allowed: that of the"):
        choose_site(read(place / "study.toml", sets=[f"data.source.tokenizer={tmp_path / 'alike'}"]), tmp_path / "b")


def choose_site(study: Any, folder: Path) -> Site:
    return make_site(study, "FedAvg", Roster.of("a,b,c"), folder / "site", None, "study.toml")


def package(folder: Path, name: str, model: Path, monkeypatch) -> None:
    """A package with a model, which must not be run."""
    shutil.copytree(model, folder / name / "model")
    (folder / name / "__init__.py").write_text("raise SystemExit('the package was run')")
    monkeypatch.syspath_prepend(str(folder))


def test_a_package_of_the_ticket_is_looked_at_if_it_is_known_and_never_run(place, wanted, tmp_path, monkeypatch):
    package(tmp_path, "llm_mine", place / "model", monkeypatch)
    base = wanted.model_copy(update={"package": "llm_mine"})
    with pytest.raises(FedtideError, match="--base: no value given"):
        find_base(base, None)
    assert find_base(base, "llm_mine") == tmp_path / "llm_mine" / "model"
    monkeypatch.setattr(bases, "KNOWN", {"llm_mine": "llm-mine", "llm_none": "llm-none"})
    assert find_base(base, None) == tmp_path / "llm_mine" / "model"
    assert "llm_mine" not in sys.modules
    gone = "found no model in an installed package 'llm_none', allowed: pip install llm-none, or --base with your own"
    with pytest.raises(FedtideError, match=gone):
        find_base(wanted.model_copy(update={"package": "llm_none"}), None)
    with pytest.raises(FedtideError, match="found no model in an installed package 'json'"):
        find_base(base, "json")


def test_code_in_the_folder_of_a_base_is_not_run(place, tmp_path):
    base = shutil.copytree(place / "model", tmp_path / "model")
    ran = tmp_path / "ran"
    (base / "mine.py").write_text(f"open({str(ran)!r}, 'w')\nclass Mine: ...\n")
    names = {"AutoConfig": "mine.Mine", "AutoModel": "mine.Mine", "AutoTokenizer": ["mine.Mine", "mine.Mine"]}
    for file, model in (("config.json", "strange"), ("config.json", "bert"), ("tokenizer_config.json", None)):
        values = json.loads((base / file).read_text()) | {"auto_map": names}
        values |= {} if model is None else {"model_type": model}
        (base / file).write_text(json.dumps(values))
        with pytest.raises(FedtideError, match="damaged or not a") if model == "strange" else nullcontext():
            load_base(base, False)
        assert not ran.exists()


def test_a_gguf_file_has_the_digest_of_its_bytes_under_any_name(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.gguf").write_bytes(b"GGUF" + bytes(100))
    one, two = (
        describe_base(
            from_dict({"model": {"kind": "transformer", "path": str(path)}, "method": [{"algorithm": "fedavg"}]})
        )
        for path in (tmp_path / "one" / "one.gguf", tmp_path / "two")
    )
    assert one is not None
    assert two is not None
    assert one.files == two.files
    assert (one.name, two.name) == ("one.gguf", "two.gguf")
    assert find_base(one, str(tmp_path / "two")) == tmp_path / "two" / "two.gguf"
    (tmp_path / "two" / "two.gguf").write_bytes(b"GGUF" + bytes(99) + b"1")
    with pytest.raises(FedtideError, match="GGUF is another file"):
        find_base(one, str(tmp_path / "two"))


def test_a_network_that_no_machine_holds_is_refused_before_it_is_made(place, tmp_path):
    seat = seat_of(place, "berlin", tmp_path / "home")
    tables = {**seat.ticket.study, "model": {**seat.ticket.study["model"], "adapters": {"rank": 100_000_000}}}
    ticket = seat.ticket.model_copy(update={"study": tables})
    # 166 rows and columns of matrices, whichever get adapters, and a head of 3 classes
    with pytest.raises(FedtideError, match="numbers of its model: found '16,600,000,024', allowed: at most 1,000,000,"):
        check_size(bases.at_base(ticket.experiment, seat.base), seat.ticket.rows)
    longer = seat.ticket.rows.model_copy(update={"shape": (7,), "source": {**seat.ticket.rows.source, "context": 7}})
    with pytest.raises(FedtideError, match="tokens of a row: found 7, allowed: at most 6, the context of the model"):
        check_size(seat.study, longer)


def test_a_site_whose_base_was_changed_names_it(place, tmp_path, capsys):
    shutil.copytree(place, tmp_path / "copy")
    study = (tmp_path / "copy" / "site" / "study.toml").read_text().replace(str(place), str(tmp_path / "copy"))
    assert str(tmp_path) in study
    content = (place / "model" / "config.json").read_text()
    try:
        (place / "model" / "config.json").write_text(content + "\n")
        line = refused(capsys, place, "serve", place / "site", "--dry")
    finally:
        (place / "model" / "config.json").write_text(content)
    assert line.startswith("model: model: found '")
    assert "(config.json is another file); allowed: the files of then, or another site" in line


def test_a_base_is_refused_for_an_app_of_flower_and_for_a_study_without_one(place, tmp_path, capsys):
    words = ["deploy", place / "study.toml", "--method", "FedAvg", "--flower", tmp_path / "app"]
    assert "model.kind: found 'transformer', but nodes of 'fedtide join' have" in refused(capsys, tmp_path, *words)
    ticket = Ticket.read(place / "site" / "tickets" / "berlin.ticket")
    plain = ticket.model_copy(update={"base": None})
    with pytest.raises(
        FedtideError, match="--base: found 'x', allowed: none, because the study has no pretrained base"
    ):
        Seat.read(plain, [place / "berlin.csv"], base="x")


# -- rows --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("a.csv", "body,topic\nsun,sky\n", r"a\.csv: no column 'text'; the study reads: text, topic$"),
        ("a.jsonl", '{"body": "sun", "topic": "sky"}\n', r"a\.jsonl: no column 'text'; the study reads: text, topic$"),
        ("a.jsonl", '{"text": "sun", "topic": "sky"}\n{"text": "sun"}\n', r"line 2: no column 'topic'"),
        ("a.csv", 'text,topic\nsun,sky\n"",sky\n', r"a\.csv: row 3: text is empty"),
        ("a.jsonl", '{"text": "", "topic": "sky"}\n', "text is empty"),
        ("a.jsonl", '{"text": 5, "topic": "sky"}\n', "line 1: text: found 5, allowed: a text"),
        ("a.csv", "text,topic\n", "no rows below the header"),
        ("a.jsonl", "", "no column 'text'"),
        ("a.jsonl", "{", "line 1: damaged or not JSON"),
        ("a.csv", "text,topic\nsun,rain\n", r"label: found 'rain', allowed: sky, talk, time"),
    ],
)
def test_a_file_of_texts_that_does_not_fit_is_refused_in_a_line(place, tmp_path, file, content, said):
    (tmp_path / file).write_text(content)
    about = Site.read(place / "site").about.rows
    with pytest.raises(FedtideError, match=said) as error:
        read_rows(tmp_path / file, about, place / "model")
    assert "data.source" not in str(error.value)


@pytest.mark.parametrize("head", ["classification", "next-token"])
def test_a_file_of_texts_is_the_same_rows_whatever_its_kind(tmp_path, head):
    """Texts come in the order of their time, which each kind writes in its own way."""
    offices(tmp_path, head)
    label = [] if head == "next-token" else ["data.source.label=topic"]
    lines = [json.loads(line) for line in (tmp_path / "berlin.jsonl").read_text().splitlines()]
    lines = [line | {"when": f"2024-01-{31 - day:02d}"} for day, line in enumerate(lines)]
    (tmp_path / "pilot.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    sets = [f"data.source.path={tmp_path / 'pilot.jsonl'}", "data.source.time=when", "data.source.client=shift", *label]
    study = choose(read(tmp_path / "study.toml", sets=sets), "FedAvg", 3, None, "study")
    about = describe_rows(study, rows_of(study, 0), None)
    parquet.write_table(arrow.Table.from_pylist(lines), tmp_path / "a.parquet")
    columns = ",".join(lines[0])
    (tmp_path / "a.csv").write_text("\n".join([columns, *(",".join(line.values()) for line in lines)]) + "\n")
    files = [tmp_path / name for name in ("pilot.jsonl", "a.parquet", "a.csv")]
    first, *others = (read_rows(file, about, tmp_path / "model") for file in files)
    for rows in others:
        for name in ("x", "y", "time"):
            assert getattr(rows, name).equal(getattr(first, name))
    (tmp_path / "late.csv").write_text("text,topic\nsun,sky\n")
    with pytest.raises(FedtideError, match=r"no column 'when'; the study reads: text, (topic, )?when"):
        read_rows(tmp_path / "late.csv", about, tmp_path / "model")


def test_texts_that_are_cut_are_counted_for_their_owner(place, tmp_path):
    lines = "".join(f"{'sun ' * (k % 2 * 9 + 1)},sky\n" for k in range(20))
    (tmp_path / "long.csv").write_text(f"text,topic\n{lines}")
    ticket = place / "site" / "tickets" / "berlin.ticket"
    seat = Seat.read(Ticket.read(ticket), [tmp_path / "long.csv"], None, tmp_path / "home", str(place / "model"))
    assert "rows: 10 of 20 texts are cut to 6 tokens" in list(seat.describe())


def test_blocks_of_two_domains_are_apart_at_a_node_that_has_the_column(tmp_path):
    site = site_of(tmp_path, head="next-token")
    about, base = site.about.rows, tmp_path / "model"
    texts = ["sun is up", "moon a", "day b", "night is up good"]
    for name, domains in (("both", "abab"), ("one", "aaaa")):
        rows = "".join(f"{text},{domain}\n" for text, domain in zip(texts, domains, strict=True))
        (tmp_path / f"{name}.csv").write_text(f"text,shift\n{rows}")
    (tmp_path / "none.csv").write_text("text,b\n" + "".join(f"{text},1\n" for text in texts))
    both, one, none = (read_rows(tmp_path / f"{name}.csv", about, base) for name in ("both", "one", "none"))
    assert one.x.equal(none.x)
    assert one.y.equal(none.y)
    assert not (len(both) == len(one) and both.x.equal(one.x))
    assert (both.padding, both.domain) == (0, None)


def test_files_whose_paddings_differ_are_joined_with_one_that_no_label_has(tmp_path, monkeypatch):
    """By hand: 2 and 3 mark what does not count, and 0 is the first id that no label has."""
    about = site_of(tmp_path, head="next-token").about.rows
    y = {2: [[1, 3, 2, 2, 2, 2]], 3: [[1, 4, 2, 3, 3, 3]]}
    files = {
        str(padding): Rows("a", torch.tensor([[1, 4, 5, 6, 7, padding]]), torch.tensor(y[padding]), 14, padding=padding)
        for padding in y
    }
    monkeypatch.setattr("fedtide.site.client_rows.read_rows", lambda path, about, base: files[str(path)])
    rows = FileRows.read([Path("2"), Path("3")], (0, 1), about, Split(test=1e-9))
    shards = [rows.shard(client, Moment(0, 3)) for client in (0, 1)]
    assert [shard.y.tolist() for shard in shards] == [[[1, 3, 0, 0, 0, 0]], [[1, 4, 2, 0, 0, 0]]]
    assert [shard.mask.sum().item() for shard in shards] == [2, 3]


def test_rows_at_least_counts_blocks_and_an_evaluation_their_tokens(tmp_path):
    site = site_of(tmp_path, head="next-token")
    files = [tmp_path / FILES[name] for name in NAMES]
    rows = FileRows.read(files, (0, 1, 2), site.about.rows, site.experiment.data.split, base=tmp_path / "model")
    clients, now = torch.arange(3), seat_of(tmp_path, "oslo", tmp_path / "home").rows
    counts = rows.counts(clients, "test")
    assert rows.people.counts(clients, "test").equal(counts)
    assert rows.people.sizes(clients, "test").equal(6 * counts)
    assert now.count(2, "test") == int(counts[2])


def test_rows_of_texts_need_a_transformer(tmp_path):
    file = offices(tmp_path, model={"kind": "mlp"})
    study = choose(read(file), "FedAvg", 3, None, "study")
    with pytest.raises(
        FedtideError, match=r"model\.kind: found 'mlp', but nodes make tokens by the tokenizer of their"
    ):
        describe_rows(study, rows_of(study, 0), None)


def test_questions_about_numbers_are_not_asked_of_texts(tmp_path):
    with pytest.raises(FedtideError, match=r"data\.source\.kind: found 'texts', but its questions are about numbers"):
        site_of(tmp_path, "i", method=[{"name": "i", "algorithm": "inspection"}], rounds=5, **MASKED)


def test_a_node_without_the_extra_says_what_to_install(wanted, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(FedtideError, match=r'^the study\'s base: needs peft .*; pip install "fedtide\[language\]"$'):
        find_base(wanted, None)


def test_deploy_says_that_each_node_needs_the_base(tmp_path, capsys):
    offices(tmp_path)
    with pytest.raises(SystemExit) as left:
        main(
            [
                "deploy",
                str(tmp_path / "study.toml"),
                "--method",
                "FedAvg",
                "--nodes",
                "a,b,c",
                "--out",
                str(tmp_path / "s"),
            ]
        )
    assert left.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "base: each node needs 'model' with digest" in out
