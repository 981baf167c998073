"""A run of a pretrained model with adapters, used elsewhere: `fedtide export --format peft` and `fedtide predict`."""

import csv
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from fedtide.config import read
from fedtide.models import LoRA, Transformer
from fedtide.runs.export import token_rows
from fedtide.runs.folder import create, load, plan
from fedtide.runs.language import Speaker
from fedtide.runs.runner import Run
from fedtide.runs.trained import Trained
from helpers.language import llama, save
from helpers.shell import contents, done, refused

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.usefixtures("here"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),  # of PEFT itself
]

TEXTS = ["sun is up", "moon is up bye", "day", "good night moon bye bye bye"]
METHODS = """
[[method]]
name = "A"
algorithm = "fedavg"
cohort = 4
local = { lr = 0.5, batch_size = 8 }

[[method]]
name = "T"
algorithm = "fedtem"
branch_layer = "*"
prior = "uniform"
cohort = 4
local = { lr = 0.5, batch_size = 8 }
"""


def study(folder: Path, head: str = "classification", label: str = 'label = "topic"') -> Path:
    """Write a study of texts, with a tiny model beside it."""
    kind = "llama" if head == "next-token" else "bert"
    metrics = '"perplexity", "bits-per-byte"' if head == "next-token" else ""
    model = save(folder / "model", kind, layers=2)
    lines = [f"{'sun' if k % 2 else 'moon'} is up good day,{'ab'[k % 2]},c{k % 4}\n" for k in range(48)]
    (folder / "texts.csv").write_text("text,topic,who\n" + "".join(lines))
    file = folder / "study.toml"
    file.write_text(f"""
rounds = 2
eval_every = 2
metrics = [{metrics}]
[data]
partition = "natural"
groups = "none"
held_out_clients = {{ clients = 0 }}
[data.source]
kind = "texts"
path = "{folder / "texts.csv"}"
tokenizer = "{model}"
client = "who"
context = 6
{label}
[shift]
who = "always"
[model]
kind = "transformer"
path = "{model}"
head = "{head}"
adapters = {{ kind = "lora", rank = 2, alpha = 4.0, last_layers = 1 }}
{METHODS}""")
    return file


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("language")


@pytest.fixture(scope="module")
def run(root) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedtide.report.page.pictures_of", lambda record: [])
        assert done("run", study(root), "--out", root / "run", "--workers", 1) == 0
    return root / "run"


@pytest.fixture(scope="module")
def next_run(root) -> Path:
    return played(root / "next", "")


@pytest.fixture(scope="module")
def pair_run(root) -> Path:
    return played(root / "pairs", 'prompt = "topic"')


def played(folder: Path, label: str) -> Path:
    """Play a study of next tokens."""
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedtide.report.page.pictures_of", lambda record: [])
        assert done("run", study(folder, "next-token", label), "--out", folder / "run", "--workers", 1) == 0
    return folder / "run"


def features(model: Path, adapters: Path, texts: list[str]) -> torch.Tensor:
    """Mean features (rows, width) of texts by an exported folder, by the libraries alone."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model, local_files_only=True)
    base = transformers.AutoModel.from_pretrained(model, local_files_only=True)
    network = peft.PeftModel.from_pretrained(base, adapters).eval()
    x = tokenizer(texts, truncation=True, max_length=6, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = network(input_ids=x["input_ids"], attention_mask=x["attention_mask"]).last_hidden_state
    counted = x["attention_mask"][..., None]
    return (hidden * counted).sum(1) / counted.sum(1)


def plainly(model: Path, adapters: Path, texts: list[str]) -> torch.Tensor:
    """Probabilities (rows, classes) of an exported folder, by the libraries alone."""
    head = load_file(adapters / "head.safetensors")
    return (features(model, adapters, texts) @ head["head.weight"].T + head["head.bias"]).softmax(-1)


@pytest.mark.parametrize("choice", [("--method", "A"), ("--method", "T", "--cluster", "1")])
def test_predictions_are_those_of_plain_peft_with_the_exported_folder(run, root, choice, capsys):
    Path("new.csv").write_text("text,other\n" + "".join(f"{text},1\n" for text in TEXTS))
    with Path("new.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in TEXTS)
    assert done("export", run, "--format", "peft", *choice, "--out", "adapters") == 0
    assert "adapters and head of 82 numbers" in capsys.readouterr().out
    expected = plainly(root / "model", Path("adapters"), TEXTS)
    for kind in ("csv", "jsonl"):
        assert done("predict", run, f"new.{kind}", *choice, "--out", f"{kind}.out") == 0
        # a text of six words has a mark at its begin and end
        assert f"new.{kind}: 1 of 4 rows are cut to 6 tokens" in capsys.readouterr().err
        with Path(f"{kind}.out").open(newline="") as file:
            rows = list(csv.DictReader(file))
        told = torch.tensor([[float(row[f"p {name}"]) for name in "ab"] for row in rows])
        torch.testing.assert_close(told, expected, rtol=1e-4, atol=1e-5)
        assert [row["class"] for row in rows] == ["ab"[best] for best in expected.argmax(1)]
    Path("new/c").mkdir(parents=True)  # a folder of the same texts
    for number, text in enumerate(TEXTS):
        Path("new", "c" if number else "", f"{number}.txt").write_text(text)
    assert done("predict", run, "new", *choice, "--out", "new.out") == 0
    names = [{"file": str(number), "folder": "c" if number else ""} for number in range(len(TEXTS))]
    assert written("new.out") == [{**name, **row} for name, row in zip(names, written("csv.out"), strict=True)]
    assert [*written("new.out")[0]] == ["file", "folder", "class", "p a", "p b"]
    trained = load_file("adapters/adapter_model.safetensors")
    assert all(value.any() for name, value in trained.items() if "lora_B" in name)  # which begin at 0


@pytest.mark.parametrize("choice", [("--method", "A"), ("--method", "T", "--cluster", "1")])
def test_embeddings_are_those_of_plain_peft(run, root, choice):
    Path("new.csv").write_text("text\n" + "".join(f"{text}\n" for text in TEXTS))
    assert done("export", run, "--format", "peft", *choice, "--out", "adapters") == 0
    assert done("predict", run, "new.csv", *choice, "--embeddings", "--out", "out.csv") == 0
    told = embeddings_in(Path("out.csv"))
    torch.testing.assert_close(told, features(root / "model", Path("adapters"), TEXTS), rtol=1e-4, atol=1e-5)


def embeddings_in(file: Path) -> torch.Tensor:
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert list(rows[0]) == [f"embedding {k}" for k in range(len(rows[0]))]
    return torch.tensor([[*map(float, row.values())] for row in rows])


def test_embeddings_of_next_tokens_are_those_of_single_texts_by_the_branch_of_each(next_run):
    Path("new.csv").write_text("text\n" + "".join(f"{text}\n" for text in TEXTS[:3]))
    assert done("predict", next_run, "new.csv", "--method", "T", "--embeddings", "--out", "out.csv") == 0
    told, trained = embeddings_in(Path("out.csv")), Trained.read(next_run, "T")
    branches = trained.predict(token_rows(trained, Path("new.csv"))).choice
    tokenizer = Speaker(trained).tokenizer
    for text, row, branch in zip(TEXTS, told, branches.tolist(), strict=False):
        network = trained.model(cluster=branch)
        x = torch.tensor([tokenizer(text)["input_ids"][:6]])
        with torch.no_grad():
            hidden = network.base.base_model(input_ids=x).last_hidden_state[0]
        torch.testing.assert_close(row, hidden.mean(0), rtol=1e-4, atol=1e-5)


def test_the_folder_says_what_it_is(run, capsys):
    assert done("export", run, "--format", "peft", "--method", "A") == 0
    assert {file.name for file in Path("a-0.peft").iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "head.safetensors",
    }  # fmt: skip
    with safe_open("a-0.peft/adapter_model.safetensors", "pt") as file:
        assert json.loads(file.metadata()["classes"]) == ["a", "b"]
    assert "is a folder" in refused(capsys, Path.cwd(), "export", run, "--format", "peft", "--method", "A")


def test_adapters_of_next_tokens_in_plain_peft_have_the_logits_of_the_run(next_run, root):
    assert done("export", next_run, "--format", "peft", "--method", "A", "--out", "adapters") == 0
    assert not Path("adapters/head.safetensors").exists()
    base = transformers.AutoModelForCausalLM.from_pretrained(root / "next" / "model", local_files_only=True)
    x = torch.tensor([[4, 8, 9, 3, 5, 8]])
    with torch.no_grad():
        plain = peft.PeftModel.from_pretrained(base, "adapters").eval()(input_ids=x).logits
        ours = Trained.read(next_run, "A").model()(x)
        torch.manual_seed(0)
        assert not torch.allclose(llama(2)(input_ids=x).logits, plain)
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


def test_merged_models_have_the_logits_of_the_run(run, next_run, capsys):
    x = torch.tensor([[4, 8, 9, 3, 5, 8], [5, 8, 9, 3, 0, 0]])
    assert done("export", next_run, "--format", "merged", "--method", "A") == 0
    assert "numbers with adapters merged" in capsys.readouterr().out
    words = transformers.AutoModelForCausalLM.from_pretrained("a-0.merged", local_files_only=True)
    assert done("export", run, "--format", "merged", "--method", "T", "--cluster", "1", "--out", "classes") == 0
    base = transformers.AutoModel.from_pretrained("classes", local_files_only=True)
    head = load_file("classes/head.safetensors")
    counted = (x != 0)[..., None]
    with torch.no_grad():
        mean = (base(input_ids=x, attention_mask=(x != 0).long()).last_hidden_state * counted).sum(1) / counted.sum(1)
        ours = Trained.read(run, "T").model(cluster=1)(x), Trained.read(next_run, "A").model()(x)
        theirs = mean @ head["head.weight"].T + head["head.bias"], words(input_ids=x).logits
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert json.loads(json.loads(Path("classes/fedtide.json").read_text())["classes"]) == ["a", "b"]
    assert {file.name for file in Path("classes").iterdir()} == {
        "config.json", "model.safetensors", "head.safetensors", "fedtide.json",
        "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert transformers.AutoTokenizer.from_pretrained("classes", local_files_only=True)("sun").input_ids == [2, 4, 3]
    assert not any("lora" in name for name in load_file("classes/model.safetensors"))
    again = Transformer(path="classes", head="embedding", adapters=LoRA(rank=1)).build((6,), 2)
    torch.testing.assert_close(again.eval()(x), mean, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("format", ["torch-export", "onnx"])
def test_programs_take_any_number_of_rows_of_tokens(format, run):
    if format == "onnx":
        for library in ("onnx", "onnxscript"):
            pytest.importorskip(library)
        runtime = pytest.importorskip("onnxruntime")
    assert done("export", run, "--format", format, "--method", "A", "--out", "program") == 0
    if format == "onnx":
        session = runtime.InferenceSession("program", providers=["CPUExecutionProvider"])
        program = lambda x: torch.from_numpy(session.run(None, {"rows": x.numpy()})[0])  # noqa: E731
    else:
        program = torch.export.load("program").module()
    x = torch.tensor([[4, 8, 9, 3, 0, 0], [2, 3, 0, 0, 0, 0], [5, 8, 9, 10, 11, 12]])
    with torch.no_grad():
        expected = Trained.read(run, "A").model()(x).log_softmax(-1)
    for rows in (1, 3):
        torch.testing.assert_close(program(x[:rows]), expected[:rows], rtol=0, atol=1e-4)


def test_perplexity_and_bits_per_byte_are_those_of_a_naive_loop(next_run, root):
    """The tokens that count are all of a block but padding; a word has the bytes of its letters and a space."""
    trained = Trained.read(next_run, "A")
    population = trained.host.population
    rows, _ = population.pool(population.clients, trained.moment, "test")
    tokenizer = transformers.AutoTokenizer.from_pretrained(root / "next" / "model", local_files_only=True)
    loss, count, size = 0.0, 0, 0
    network = trained.model()
    for x, y in zip(rows.x, rows.y, strict=True):
        with torch.no_grad():
            logp = network(x[None])[0].log_softmax(-1)
        for step, token in enumerate(y.tolist()):
            if token != tokenizer.pad_token_id:
                loss, count = loss - float(logp[step, token]), count + 1
                size += 0 if token == tokenizer.eos_token_id else len(tokenizer.decode([token])) + 1
    *_, last = map(json.loads, (trained.run.folder / "rounds.jsonl").read_text().splitlines())
    scores = last["scores"]["train_clients"]
    assert scores["rows"] == count
    assert scores["perplexity"] == pytest.approx(math.exp(loss / count), rel=1e-5)
    assert scores["bits-per-byte"] == pytest.approx(loss / math.log(2) / size, rel=1e-5)
    assert "bits-per-byte" in (next_run / "report.html").read_text()


def test_bits_per_byte_of_classes_are_refused(tmp_path, capsys):
    file = study(tmp_path)
    file.write_text(file.read_text().replace("metrics = []", 'metrics = ["bits-per-byte"]'))
    line = refused(capsys, tmp_path, "run", file, "--out", tmp_path / "run")
    assert line.endswith("metrics[0]: found 'bits-per-byte', allowed: data.source.kind = \"texts\" without a label")


def test_what_has_no_classes_or_texts_is_refused_in_a_line(run, capsys):
    Path("new.csv").write_text("text\nsun\n")
    Path("none.csv").write_text("text\n")
    Path("other.csv").write_text("body\nsun\n")
    for flag, value in (("--tokens", 3), ("--choices", "text"), ("--right", "text")):
        assert f"{flag}: found {value!r}, allowed: none, because the run does not predict next tokens" in refused(
            capsys, Path.cwd(), "predict", run, "new.csv", "--method", "A", flag, value
        )
    assert "none.csv" in refused(capsys, Path.cwd(), "predict", run, "none.csv", "--method", "A")
    assert "other.csv" in refused(capsys, Path.cwd(), "predict", run, "other.csv", "--method", "A")
    assert "new.txt: no such file" in refused(capsys, Path.cwd(), "predict", run, "new.txt", "--method", "A")
    assert not Path("predictions.csv").exists()


@pytest.fixture
def changing(tmp_path) -> Path:
    """A model and a run of it that has a round to play."""
    file = study(tmp_path)
    file.write_text(file.read_text().replace(METHODS, METHODS[: METHODS.index("[[method]]", 5)]))
    create(read(file), tmp_path / "run")
    (run,) = plan(load(tmp_path / "run"), tmp_path / "run")
    next(Run(run.experiment, run.method, run.seed, run.folder).play(lambda: True))
    return tmp_path


@pytest.mark.parametrize(("name", "what"), [
    ("model.safetensors", "has changed"), ("config.json", "has changed"),
    ("tokenizer_config.json", "is missing"), ("added_tokens.json", "is new"),
])  # fmt: skip
def test_a_file_of_the_base_that_changed_is_named(changing, name, what, capsys):
    model, run = changing / "model", changing / "run"
    Path("new.csv").write_text("text\nsun\n")
    assert done("verify", run) == 0
    if what == "is missing":
        (model / name).unlink()
    else:
        (model / name).write_bytes((model / name).read_bytes() + b" " if what == "has changed" else b"{}")
    before = contents(run)
    for command in (["predict", run, "new.csv"], ["export", run, "--format", "peft"], ["resume", run], ["report", run]):
        capsys.readouterr()
        line = refused(capsys, Path.cwd(), *command)
        assert line.endswith(f"{model / name}: {what} since {run}/a/0 was played; restore what was there, "
                             "or start a new run folder")  # fmt: skip
    assert done("verify", run) == 1
    assert f"{model / name}: {what}" in capsys.readouterr().out
    assert contents(run) == before
    assert not Path("predictions.csv").exists()


# -- next tokens ------------------------------------------------------------------------------------------------------


def plain(root: Path, run: Path, *choice: object) -> tuple[Any, Any]:
    """Tokenizer and network of an exported folder, by the libraries alone."""
    assert done("export", run, "--format", "peft", *choice, "--out", "plain") == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(root / "model", local_files_only=True)
    base = transformers.AutoModelForCausalLM.from_pretrained(root / "model", local_files_only=True)
    network = peft.PeftModel.from_pretrained(base, "plain").eval()
    shutil.rmtree("plain")
    return tokenizer, network


@torch.no_grad()
def follows(network: Any, tokenizer: Any, ids: list[int], tokens: int) -> str:
    """What a naive loop says next."""
    said: list[int] = []
    while len(said) < tokens and said[-1:] != [tokenizer.eos_token_id]:
        said.append(int(network(input_ids=torch.tensor([[*ids, *said]])).logits[0, -1].argmax()))
    return tokenizer.decode(said, skip_special_tokens=True)


def written(name: str) -> list[dict[str, str]]:
    with Path(name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("choice", [("--method", "A"), ("--method", "T", "--cluster", "1")])
def test_texts_go_on_as_in_a_naive_loop(next_run, root, choice, capsys):
    folder = root / "next"
    tokenizer, network = plain(folder, next_run, *choice)
    Path("new.csv").write_text("text,other\n" + "".join(f"{text},1\n" for text in TEXTS))
    Path("texts").mkdir()
    for number, text in enumerate(TEXTS):
        Path(f"texts/{number}.txt").write_text(text)
    capsys.readouterr()
    for name in ("new.csv", "texts"):  # a folder, too
        assert done("predict", next_run, name, *choice, "--tokens", 3, "--out", f"{name}.out") == 0
        # six positions leave three for a prompt
        said = capsys.readouterr()
        assert f"{name}: 2 of 4 prompts lose their beginning" in said.err
        assert "4 rows predicted" in said.out
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"][-3:] for text in TEXTS]
        expected = [follows(network, tokenizer, prompt, 3) for prompt in ids]
        rows = written(f"{name}.out")
        assert [row["continuation"] for row in rows] == expected
        assert [row.get("file") for row in rows] == (["0", "1", "2", "3"] if name == "texts" else [None] * 4)


def test_branches_are_chosen_by_the_prompts(next_run):
    """Without a choice of a person, texts go on by the branch that predicts all prompts of the file."""
    Path("new.csv").write_text("text\nsun is\nmoon is\n")
    trained = Trained.read(next_run, "T")
    x = torch.tensor([[4, 8, 0, 0, 0, 0], [5, 8, 0, 0, 0, 0]])
    (branch,) = trained.predict(x).choice.unique().tolist()
    names = ["chosen", "0", "1"]
    for name in names:
        words = [] if name == "chosen" else ["--cluster", name]
        assert done("predict", next_run, "new.csv", "--method", "T", "--tokens", 3, *words, "--out", name) == 0
    assert written("chosen") == written(str(branch))
    (parts, again) = trained.parts_of_rows(x)
    assert parts is again
    assert torch.equal(trained.predict_with(parts[0][0], x).told, trained.predict(x).told)


def test_a_prompt_that_decides_alone_has_its_own_branch(next_run):
    trained = replace(Trained.read(next_run, "T"), decide_per="sample")
    x = torch.randint(4, 14, (64, 6), generator=torch.Generator().manual_seed(0))
    predicted = trained.predict(x)
    assert predicted.choice.unique().tolist() == [0, 1]
    for row, parts in enumerate(trained.parts_of_rows(x)):
        ((weights, share),) = parts
        assert share == 1.0
        told = trained.predict_with(weights, x[row : row + 1]).told
        torch.testing.assert_close(told, predicted.told[row : row + 1], rtol=0, atol=1e-6)
    first, second = (trained.predict_with(weights, x).told for weights in trained.networks)
    assert float((first - second).abs().amax((1, 2)).min()) > 1e-4  # else it would not matter


def test_answers_are_chosen_as_by_plain_sums(pair_run, root, capsys):
    """By a naive sum over the tokens of each answer behind the prompt, which here ends in a line."""
    tokenizer, network = plain(root / "pairs", pair_run, "--method", "A")
    asked = [("a", ["sun is up", "moon", "day good"]), ("b", ["moon is", "sun up day", "b"]), ("sun a b", ["up", "is"])]
    with Path("asked.jsonl").open("w") as file:
        for number, (prompt, answers) in enumerate(asked):
            file.write(json.dumps({"topic": prompt, "answers": answers, "right": number % 2}) + "\n")
    Path("asked.csv").write_text("topic,one,two,right\nsun a b,up,is,0\n")
    best, best_by_byte = [], []
    for prompt, answers in asked:
        told = []
        for answer in answers:
            given, ids = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (f"{prompt}\n", answer))
            with torch.no_grad():
                logp = network(input_ids=torch.tensor([given + ids])).logits[0].log_softmax(-1)
            told.append(sum(float(logp[len(given) + k - 1, token]) for k, token in enumerate(ids)))
        best.append(max(range(len(told)), key=told.__getitem__))
        by_byte = [one / len(answer) for one, answer in zip(told, answers, strict=True)]
        best_by_byte.append(max(range(len(told)), key=by_byte.__getitem__))
    capsys.readouterr()
    words = ("--method", "A", "--right", "right")
    assert done("predict", pair_run, "asked.jsonl", *words, "--choices", "answers", "--out", "a.csv") == 0
    shares = [100 * sum(k == n % 2 for n, k in enumerate(some)) / 3 for some in (best, best_by_byte)]
    line = "accuracy: {:.1f} % by log-likelihood, {:.1f} % by log-likelihood of a byte".format(*shares)
    assert line in capsys.readouterr().out
    rows = written("a.csv")
    assert [int(row["choice"]) for row in rows] == best
    assert [int(row["choice by byte"]) for row in rows] == best_by_byte
    assert [row["answer"] for row in rows] == [answers[k] for (_, answers), k in zip(asked, best, strict=True)]
    assert done("predict", pair_run, "asked.csv", *words, "--choices", "one, two", "--out", "b.csv") == 0
    assert written("b.csv") == rows[2:]


def test_measures_of_a_run_are_of_the_answers_alone(pair_run, root):
    trained = Trained.read(pair_run, "A")
    population = trained.host.population
    rows, _ = population.pool(population.clients, trained.moment, "test")
    # `sun is up good day` has five words of 2 to 4 letters, and its mark is cut: six tokens are in a row of a prompt
    assert {*rows.mask.sum(1).tolist()} == {6}
    assert not rows.mask[:, 0].logical_not().any()  # the first word is predicted from the prompt
    *_, last = map(json.loads, (trained.run.folder / "rounds.jsonl").read_text().splitlines())
    scores = last["scores"]["train_clients"]
    assert scores["rows"] == int(rows.mask.sum())
    loss = sum(
        -float(trained.predict(x[None]).told[0, step, y[step]])
        for x, y in zip(rows.x, rows.y, strict=True) for step in range(len(y))
    )  # fmt: skip
    assert scores["perplexity"] == pytest.approx(math.exp(loss / scores["rows"]), rel=1e-5)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["new.csv"], r"--tokens: found 40, but a prompt and its continuation have 6 tokens at most; allowed: 1 to 5"),
        (["new.csv", "--tokens", 0], "--tokens: found 0, allowed: 1 or more"),
        (["new.csv", "--tokens", 2, "--choices", "one,two"], "--tokens: found 2, allowed: none beside --choices"),
        (["new.csv", "--right", "two"], "--right: found 'two', allowed: a column beside --choices"),
        (["new.csv", "--choices", "one"], "new.csv: row 2: one: found '1 choices', allowed: 2 or more"),
        (["new.csv", "--choices", "one,six"], "new.csv: no column 'six'"),
        (["new.csv", "--choices", "one,two", "--right", "right"], "row 2: right: found '2', allowed: 0 to 1"),
        (["long.jsonl", "--choices", "one"], "row 0, counted from 0: found 'an answer that is too long', but"),
        (["empty.jsonl", "--choices", "one"], "empty.jsonl: line 1: one is empty"),
        (["empty.jsonl", "--choices", "two"], "empty.jsonl: line 1: two: found 7, allowed: a text, or a list of texts"),
        (["other.csv", "--tokens", 2], "other.csv: no column 'text'"),
        (["none", "--tokens", 2], "none: files of texts: found 0"),
        (["new.csv", "--embeddings", "--tokens", 2], "--tokens: found 2, allowed: none, because --embeddings asks"),
        (["nowhere", "--tokens", 2], "nowhere: no such file"),
    ],
)
def test_questions_that_do_not_work_are_refused_in_a_line(next_run, words, line, capsys):
    Path("new.csv").write_text("text,one,two,right\nsun,up,is,2\n")
    Path("other.csv").write_text("body\nsun\n")
    Path("long.jsonl").write_text(json.dumps({"text": "sun", "one": ["a", "a b a b a b a"]}))
    Path("empty.jsonl").write_text(json.dumps({"text": "sun", "one": ["a", " "], "two": 7}))
    Path("none").mkdir()
    assert line in refused(capsys, Path.cwd(), "predict", next_run, words[0], "--method", "A", *words[1:])
    assert not Path("predictions.csv").exists()
