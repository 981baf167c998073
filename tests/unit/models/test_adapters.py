"""Adapters and pretrained transformers: what is held once, what is a weight, what is refused."""

import copy
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from fedtide.config import from_dict
from fedtide.core.base import Moment, Shard, Weights
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.trees import same
from fedtide.learn.fast.stacks import FuncStack
from fedtide.learn.local import LocalTrainer
from fedtide.learn.losses import CrossEntropy
from fedtide.learn.task import Task, logits_and_features, with_branches
from fedtide.models import LoRA, Python, Transformer, save_adapters
from fedtide.models import transformer as files
from fedtide.models.adapters import load_adapters
from fedtide.models.base import BaseParameter
from fedtide.models.lower import FeatureCache, Lower
from fedtide.models.networks import Model
from fedtide.models.transformer import save_merged
from fedtide.runs.build import rows_of, task_of
from fedtide.runs.digest import digest_of
from fedtide.runs.preflight import preflight
from helpers.language import ADAPTERS, STEPS, TOKENS, WORDS, adapted, classifier, llama, save, tokens
from helpers.toys import TOY

pytest.importorskip("peft")
pytest.importorskip("transformers")

X = torch.from_numpy(tokens(1)[0])
MODEL = Python(classifier, adapters=ADAPTERS)


def task_for(model: Model = MODEL, **how) -> Task:
    return Task(lambda: model.build((STEPS,), 3), example=X[:1], **how)


def places(module: nn.Module) -> set[int]:
    return {param.data_ptr() for param in module.parameters() if isinstance(param, BaseParameter)}


# -- the base ----------------------------------------------------------------------------------------------------------


def test_all_modules_of_a_process_share_one_base_branches_included():
    task = task_for()
    base = places(task.scratch.module)
    assert len(base) == 21
    for other in (
        task.rebuild(), task.module(task.init(Rng(1))), with_branches(task, "*", 3).scratch.module,
        with_branches(task, "head", 2).scratch.module, copy.deepcopy(task.scratch.module),
    ):  # fmt: skip
        assert places(other) == base


def test_branches_of_whole_models_share_the_embeddings_of_a_row_as_features():
    task = with_branches(task_for(), "*", 2)
    module, x = task.module(task.init(Rng(0))), torch.tensor([[3, 5, 0], [3, 5, 5]])
    base = module.model.copies[1].base
    of = base.get_input_embeddings().weight
    with torch.no_grad():
        _, features = module(x)
    torch.testing.assert_close(features, torch.stack([(of[3] + of[5]) / 2, (of[3] + 2 * of[5]) / 3]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(base), "forward", None)  # no layer is run for them
        assert torch.equal(task.features(task.init(Rng(0)), x), features)


def test_a_base_of_another_type_is_made_once():
    one, two = (task_for(dtype=torch.float64).scratch.module for _ in range(2))
    assert places(one) == places(two) != places(task_for().scratch.module)
    assert {param.dtype for param in one.parameters()} == {torch.float64}


def test_copies_in_a_stack_read_the_base_in_the_module():
    task = task_for()
    stack = FuncStack(task.scratch, CrossEntropy())
    params, others = stack.load(stack.starts([task.init(Rng(k)) for k in range(3)]))
    assert [len(param) for param in params] == [3] * 6
    assert others == []


def test_weights_are_drawn_by_the_key_and_the_base_is_not():
    task = task_for()
    one, two = task.init(Rng(1)), task.init(Rng(2))
    assert list(one.params) == [
        *(f"base.encoder.layer.0.attention.self.{of}.lora_{which}.default.weight"
          for of in ("query", "value") for which in "AB"),
        "head.weight", "head.bias",
    ]  # fmt: skip
    for name in one.params:
        assert same(one.params[name], two.params[name]) == ("lora_B" in name)
    assert not torch.equal(task.logits(one, X), task.logits(two, X))


def test_branches_of_adapters_begin_at_the_base_and_differ():
    task = with_branches(task_for(), "*", 2)
    params = task.init(Rng(0)).params
    for name, value in params.items():
        other = params[name.replace("copies.0", "copies.1")]
        if "lora_B" in name:
            assert not value.any()
        elif "copies.0" in name:
            assert not torch.equal(value, other)


def test_training_leaves_the_base_as_it_is():
    task = task_for()
    before = {name: value.clone() for name, value in task.scratch.module.named_parameters() if "lora" not in name}
    shard = Shard(X[:8], torch.arange(8) % 3, torch.arange(8))
    trained = LocalTrainer(lr=0.5)(task, CrossEntropy(), task.init(Rng(1)), shard, Moment(0, 1), Rng(0)).weights
    assert all(value.any() for name, value in trained.params.items() if "lora_B" in name)
    for name, value in task.scratch.module.named_parameters():
        if isinstance(value, BaseParameter):
            assert torch.equal(value, before[name])
            assert not value.requires_grad


class Normed(nn.Module):
    """A base with running statistics, an infinite mask and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.norm, self.head = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)
        self.register_buffer("mask", torch.tensor([0.0, 0.0, 0.0, -torch.inf]))
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, x):
        return self.head((self.norm(self.dense(x)) * self.scale).softmax(-1) + (self.mask == 0))


def test_buffers_of_a_base_are_constants_and_statistics_of_normalization_travel():
    model = Python(Normed, adapters=LoRA(rank=1, targets=("dense",)))
    task = Task(lambda: model.build((4,), 3))
    weights = task.init(Rng(0))
    assert list(weights.params) == ["dense.lora_A.default.weight", "dense.lora_B.default.weight", *HEAD]
    assert list(weights.buffers) == ["norm.running_mean", "norm.running_var"]
    assert task.logits(weights, torch.zeros(2, 4)).isfinite().all()
    task.scratch.module.scale.add_(1.0)
    with pytest.raises(FedtideError, match=r"^model: buffer 'scale' of the frozen base changes, allowed: one that"):
        task.scratch.check_constants()
    task.scratch.load(weights, train=False)
    task.scratch.check_constants()


def test_adapters_on_a_base_with_statistics_are_not_exported(tmp_path):
    module = Python(Normed, adapters=LoRA(rank=1, targets=("dense",))).build((4,), 3)
    with pytest.raises(FedtideError, match=r"^model: found 'norm\.num_.*, but PEFT's folder holds no statistics"):
        save_adapters(module, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


HEAD = ["head.weight", "head.bias"]


def test_padding_changes_no_answer():
    task = task_for()
    weights = task.init(Rng(1))
    row = torch.tensor([[3, 4, 5, 0, 0, 0]])
    short = Task(lambda: MODEL.build((STEPS,), 3)).logits(weights, row[:, :3])
    torch.testing.assert_close(task.logits(weights, row), short)


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def causal(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("llama"), "llama")


def test_a_model_of_a_folder_with_each_head(folder, causal):
    lora = LoRA(rank=1)  # the layers are those that PEFT proposes
    whole = Transformer(path=str(folder)).build((STEPS,), 3)
    assert all(param.requires_grad for param in whole.parameters())
    for path, width in ((folder, 8), (causal, 8)):
        features = Transformer(path=str(path), head="embedding", adapters=lora).build((STEPS,), 3)
        assert features(X[:2]).shape == (2, width)
        assert Transformer(path=str(path), adapters=lora).build((STEPS,), 3)(X[:2]).shape == (2, 3)
    words = Transformer(path=str(causal), head="next-token", adapters=lora).build((STEPS,), TOKENS)
    assert words(X[:2]).shape == (2, STEPS, TOKENS)
    assert words.counted(X[:1]).tolist() == [[bool(token) for token in X[0]]]


def test_a_model_of_a_package_is_found_and_not_run(tmp_path, monkeypatch):
    package = tmp_path / "site" / "tiny_model"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('run')")
    save(package / "model")
    monkeypatch.syspath_prepend(package.parent)
    model = Transformer(package="tiny_model", adapters=LoRA(rank=1))
    assert model.build((STEPS,), 3)(X[:2]).shape == (2, 3)
    assert "tiny_model" not in sys.modules


def test_a_base_is_loaded_once(folder, monkeypatch):
    model = Transformer(path=str(folder), adapters=LoRA(rank=1))
    first = model.build((STEPS,), 3)
    monkeypatch.setattr(files, "library", None)
    assert places(model.build((STEPS,), 5)) == places(first)


def test_weights_of_the_file_are_part_of_the_digest(tmp_path):
    where = save(tmp_path / "model")
    experiment = adapted("fedavg").model_copy(update={"model": Transformer(path=str(where), adapters=LoRA(rank=1))})
    before = digest_of(experiment, experiment.method[0], 0)
    assert digest_of(experiment, experiment.method[0], 0) == before
    torch.manual_seed(1)
    from helpers.language import bert

    bert().save_pretrained(where)
    assert digest_of(experiment, experiment.method[0], 0) != before


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_adapters_on_the_last_layers_alone(kind, tmp_path):
    where = save(tmp_path / "model", kind, layers=3)
    model = Transformer(path=str(where), adapters=LoRA(rank=1, last_layers=2))
    task = task_for(model)
    names = [name for name in task.init(Rng(0)).params if "lora_B" in name]
    assert len(names) == 4
    assert not any(".0." in name for name in names)
    save_adapters(task.scratch.module, tmp_path / "exported")
    settings = json.loads((tmp_path / "exported" / "adapter_config.json").read_text())
    assert settings["layers_to_transform"] == [1, 2]


# -- layers below the adapters ---------------------------------------------------------------------------------------


@pytest.fixture
def passes(monkeypatch) -> list[int]:
    """The rows of each pass through lower layers."""
    rows, below = [], Lower._below
    count = lambda self, base, tokens, run: rows.append(len(tokens)) or below(self, base, tokens, run)  # noqa: E731
    monkeypatch.setattr(Lower, "_below", count)
    return rows


def divided(tmp_path: Path, layers: int = 3, **options) -> Task:
    where = save(tmp_path / "model", layers=layers)
    return task_for(Transformer(path=str(where), **{"adapters": LoRA(rank=2, last_layers=1), **options}))


def test_rows_that_come_again_are_not_computed_again(tmp_path, passes):
    task = divided(tmp_path)
    assert task.scratch.module.lower.count == 2
    weights, some = task.init(Rng(0)), X[:3].repeat(2, 1)
    logits = task.logits(weights, some)
    passes.clear()
    assert torch.equal(task.logits(weights, some.flip(0)), logits.flip(0))
    shard = Shard(some, torch.zeros(6, dtype=torch.int64), torch.arange(6))
    task.gradient(weights, shard)
    joined = with_branches(task, "*", 2)
    logits_and_features(joined, joined.init(Rng(1)), some)
    assert passes == []


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_features_of_a_row_have_the_same_bits_in_any_company(tmp_path):
    module = divided(tmp_path, cache_mb=0).scratch.module
    with torch.no_grad():
        together = features_of(module, X)
        assert torch.equal(torch.cat([features_of(module, row) for row in X.split(1)]), together)
        assert torch.equal(features_of(module, X.flip(0)), together.flip(0))
        stacked = torch.vmap(lambda rows: features_of(module, rows))(X.unflatten(0, (4, -1)))
    assert torch.equal(stacked.flatten(0, 1), together)
    assert not module.lower.cache.features


def test_features_of_a_pass_without_gradients_are_trained_on_later(tmp_path):
    module = divided(tmp_path).scratch.module
    with torch.inference_mode():
        module(X[:3])
    module(X[:3]).sum().backward()
    assert module.head.weight.grad.any()


def features_of(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return what the layers with adapters are given."""
    given = []
    with module.base.encoder.layer[2].register_forward_pre_hook(lambda layer, inputs: given.append(inputs[0])):
        module(x)
    return given[-1]  # at first they are computed


def test_bytes_of_features_are_bounded():
    kept = FeatureCache()
    for number in range(10):
        kept.keep(number, torch.zeros(3, dtype=torch.float64), most=100)
    assert len(kept.features) == 4
    kept.keep("large", torch.zeros(13, dtype=torch.float64), most=100)
    assert "large" not in kept.features


@pytest.mark.parametrize(
    ("layers", "options"),
    [
        (1, {}),
        (3, {"adapters": LoRA(rank=1, targets=("query",))}),
        (3, {"adapters": LoRA(rank=1, targets=("word_embeddings", "encoder.layer.2.attention.self.query"))}),
        (3, {"adapters": None}),
    ],
)
def test_a_base_without_layers_below_its_adapters_is_run_as_a_whole(layers, options, tmp_path):
    assert divided(tmp_path, layers, **options).scratch.module.lower is None


def test_a_base_whose_layers_are_not_a_chain_is_run_as_a_whole(tmp_path, monkeypatch):
    """As of an architecture whose later layers read what earlier ones leave."""
    monkeypatch.setattr(Lower, "_below", lambda self, base, tokens, run: torch.zeros(*tokens.shape, 8))
    module = divided(tmp_path).scratch.module
    assert module.lower is None
    assert module(X[:2]).shape == (2, 3)


def test_the_size_of_the_cache_is_no_part_of_the_digest(tmp_path):
    where = save(tmp_path / "model")
    models = [Transformer(path=str(where), adapters=LoRA(rank=1), cache_mb=size) for size in (0, 9)]
    experiments = [adapted("fedavg").model_copy(update={"model": model}) for model in models]
    one, two = (digest_of(experiment, experiment.method[0], 0) for experiment in experiments)
    assert one == two


# -- one line ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("targets", "line"),
    [
        (
            ("qery",),
            r"^model\.adapters\.targets: 'qery' is no layer of the base; did you mean 'query'\? Allowed: word_",
        ),
        (("head",), r"^model\.adapters\.targets: 'head' is no layer of the base"),
        (("LayerNorm",), r"^model\.adapters\.targets: 'LayerNorm' is no layer of the base"),
        ((), r"^model\.adapters\.targets: found \[\], but PEFT proposes none for .*: names of layers, such as word_"),
    ],
)
def test_targets_that_match_nothing(targets, line):
    with pytest.raises(FedtideError, match=line) as refusal:
        Python(classifier, adapters=LoRA(targets=targets)).build((STEPS,), 3)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("model", "options", "line"),
    [
        (classifier, {"last_layers": 0}, r"^LoRA\.last_layers: found 0, allowed: 1 or more"),
        (classifier, {"last_layers": 2}, r"^model\.adapters\.last_layers: found 2, allowed: 1 to 1, the layers of the"),
        (Normed, {"last_layers": 1}, r"^model\.adapters\.last_layers: found 1, allowed: none, because the base has no"),
        (
            classifier,
            {"last_layers": 1, "targets": ("base.encoder.layer.0.attention.self.query",)},
            r"^model\.adapters\.targets: found 'base\.enc.*', allowed: the last part of names of layers",
        ),
    ],
)
def test_layers_that_a_base_does_not_have(model, options, line):
    targets = ("dense",) if model is Normed else ("query",)
    with pytest.raises(FedtideError, match=line):
        Python(model, adapters=LoRA(**{"targets": targets, **options})).build((STEPS,), 3)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({}, "found no path and no package; allowed: one"),
        ({"path": "a", "package": "b"}, "found path and package"),
        ({"path": "a", "head": "embedding"}, "found head 'embedding' without adapters"),
    ],
)
def test_keys_that_do_not_go_together(options, line):
    with pytest.raises(FedtideError, match=line):
        Transformer(**options)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"path": "nowhere"},
            r"^model\.path: no such file or folder: nowhere; nothing is downloaded: allowed: a folder",
        ),
        (
            {"package": "no_such_model"},
            r"^model\.package: found 'no_such_model', but nothing is downloaded .*: an installed package",
        ),
        ({"path": "{empty}"}, r"^model\.path: .*: found no model; nothing is downloaded"),
        ({"path": "{damaged}"}, r"^model: .*: damaged or not a model that transformers reads"),
        ({"path": "empty.gguf"}, r"^model\.path: .*empty\.gguf: damaged or not a GGUF file that transformers reads"),
        ({"path": "two"}, r"^model\.path: two: found '2 models', allowed: one, such as path = 'two/a'"),
        ({"path": "{bert}", "head": "next-token"}, r"has no weights 'cls\..*' for the logits of the next token"),
    ],
)
def test_a_model_that_is_not_there(options, line, tmp_path, folder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("FEDTIDE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "empty.gguf").write_bytes(b"GGUF")
    for name in "ab":
        save(tmp_path / "two" / name)
    save(tmp_path / "damaged")
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"no weights")
    options = {key: value.format(empty="empty", damaged="damaged", bert=folder) for key, value in options.items()}
    with pytest.raises(FedtideError, match=line) as refusal:
        Transformer(**options).build((STEPS,), 3)
    assert "\n" not in str(refusal.value)
    assert not any((tmp_path / "cache").rglob("*.json"))  # nothing half-written


def test_rows_longer_than_the_context(folder):
    line = r"^model: tokens of a row: found 7, allowed: at most 6, the context of the model"
    with pytest.raises(FedtideError, match=line):
        Transformer(path=str(folder)).build((STEPS + 1,), 3)


def texts(tmp_path: Path, tokenizer: Path, model: Path, context: int = STEPS):
    file = tmp_path / "texts.csv"
    lines = [f"{'sun' if k % 2 else 'moon'} is up good day good day,{'ab'[k % 2]},c{k % 4}\n" for k in range(48)]
    file.write_text("text,topic,who\n" + "".join(lines))
    source = {"kind": "texts", "path": str(file), "tokenizer": str(tokenizer), "label": "topic", "client": "who"}
    experiment = adapted("fedavg", data={
        "source": source | {"context": context}, "partition": "natural", "groups": "none",
        "held_out_clients": {"clients": 0},
    }, shift={"who": "always"})  # fmt: skip
    return experiment.model_copy(update={"model": Transformer(path=str(model), adapters=LoRA(rank=1))})


def test_a_tokenizer_of_another_model(tmp_path, folder):
    other = save(tmp_path / "other", words=(*WORDS[:4], *reversed(WORDS[4:])))
    line = r"^data\.source\.tokenizer: found '.*, but its tokens have other numbers; allowed: that of the model, "
    with pytest.raises(FedtideError, match=line):
        rows_of(texts(tmp_path, other, folder), 0)


def test_labels_and_next_tokens_want_heads_of_their_own(tmp_path, folder):
    experiment = texts(tmp_path, folder, folder)
    model = replace(experiment.model, head="next-token")
    with pytest.raises(FedtideError, match=r"^model\.head: found 'next-token', but .* a label; allowed: 'class"):
        rows_of(experiment.model_copy(update={"model": model}), 0)
    source = replace(experiment.data.source, label=None)
    data = experiment.data.model_copy(update={"source": source})
    with pytest.raises(FedtideError, match=r"^model\.head: found 'classification', but .* no label; allowed: 'next"):
        rows_of(experiment.model_copy(update={"data": data}), 0)


def test_rows_that_are_cut_are_counted_before_a_run(tmp_path, folder):
    experiment = texts(tmp_path, folder, folder, context=5)
    lines = [line for line in preflight(experiment).notes if "cut" in line]
    assert lines == ["texts.csv: 48 of 48 rows are cut to 5 tokens (context)"]


def test_texts_train_a_transformer_of_a_folder(tmp_path, folder):
    from fedtide.laws.case import played

    run = played(texts(tmp_path, folder, folder), rounds=2)
    assert all(value.isfinite().all() for value in run.state.weights.params.values())
    assert isinstance(run.state.weights, Weights)


def test_weights_of_adapters_of_another_rank_are_refused(tmp_path):
    from safetensors.torch import save_file

    experiment = adapted("fedavg", {"init_from": str(tmp_path / "adapters.safetensors")})
    other = task_for(replace(MODEL, adapters=replace(ADAPTERS, rank=3))).init(Rng(0))
    save_file(other.params, tmp_path / "adapters.safetensors")
    line = r"init_from: .*: shape of 'base\..*lora_A\.default\.weight': found \(3, 8\), allowed: \(2, 8\)"
    with pytest.raises(FedtideError, match=line):
        task_of(experiment, experiment.method[0], rows_of(experiment, 0))


@pytest.mark.parametrize(
    ("own", "line"),
    [
        (True, r"^model: found 'Pooled', but a base of one's own has no files; allowed: kind 'transformer'$"),
        (False, r"^model: found 'no adapters', allowed: a model with adapters$"),
    ],
)
def test_models_that_cannot_be_merged(own, line, folder, tmp_path):
    module = (MODEL if own else Transformer(path=str(folder))).build((STEPS,), 3)
    with pytest.raises(FedtideError, match=line):
        save_merged(module, tmp_path)
    assert not list(tmp_path.iterdir())


# -- a folder of PEFT to begin with ----------------------------------------------------------------------------------


def begun(folder: Path, model: Model = MODEL) -> Weights:
    """The first weights of a run that begins with a folder."""
    experiment = adapted("fedavg", {"init_from": str(folder)}).model_copy(update={"model": model})
    begin = task_of(experiment, experiment.method[0], rows_of(experiment, 0)).begin
    assert begin is not None
    return begin


@pytest.fixture
def exported(tmp_path) -> Path:
    """A folder of adapters, whose numbers are not those that a run begins with."""
    task = task_for()
    weights = task.init(Rng(5))
    for value in weights.params.values():
        value.add_(0.1)
    save_adapters(task.module(weights), tmp_path / "exported")
    return tmp_path / "exported"


def test_a_run_begins_with_adapters_of_a_folder(exported):
    weights = task_for().init(Rng(5))
    begin = begun(exported)
    assert list(begin.params) == list(weights.params)
    for name, value in weights.params.items():
        assert torch.equal(begin.params[name], value + 0.1)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # of PEFT itself
def test_a_run_begins_with_a_folder_of_plain_peft(tmp_path, causal):
    import peft

    lora = LoRA(rank=2, alpha=4.0, targets=("q_proj",))
    model = Transformer(path=str(causal), head="next-token", adapters=lora)
    settings = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"], init_lora_weights=False)
    plain = peft.get_peft_model(llama(), settings)
    plain.save_pretrained(tmp_path / "plain")
    task = task_for(model)
    like = task.init(Rng(0))
    begin = load_adapters(tmp_path / "plain", task.scratch.module, like, "init_from")
    ours = {name.removeprefix("base_model.model."): p for name, p in plain.named_parameters() if p.requires_grad}
    assert {f"base.{name}" for name in ours} == {*begin.params}
    for name, value in ours.items():
        assert torch.equal(begin.params[f"base.{name}"], value)


def test_without_a_head_in_the_folder_one_is_drawn(exported):
    (exported / "head.safetensors").unlink()
    begin = begun(exported)
    assert torch.equal(begin.params["head.weight"], task_for().init(Rng(0)).params["head.weight"])


def test_files_of_adapters_are_part_of_the_digest(exported):
    experiment = adapted("fedavg", {"init_from": str(exported)})
    before = digest_of(experiment, experiment.method[0], 0)
    assert digest_of(experiment, experiment.method[0], 0) == before
    (exported / "head.safetensors").unlink()
    assert digest_of(experiment, experiment.method[0], 0) != before


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"r": 4}, r"adapter_config\.json: rank: found 4, allowed: 2, as model\.adapters has$"),
        ({"lora_alpha": 8}, r"adapter_config\.json: alpha: found 8, allowed: 4\.0, as model\.adapters has$"),
        ({"use_dora": True}, r"adapter_config\.json: use_dora: found True, allowed: False, as"),
        ({"peft_type": "IA3"}, r"adapter_config\.json: peft_type: found 'IA3', allowed: LORA, as"),
        ({"bias": "all"}, r"adapter_config\.json: bias: found 'all', allowed: none, as"),
    ],
)
def test_adapters_of_another_kind_are_refused(changes, line, exported):
    file = exported / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(FedtideError, match=r"^method 'toy'\.init_from: .*" + line):
        begun(exported)


@pytest.mark.parametrize(
    ("file", "content", "line"),
    [
        ("adapter_config.json", b"[]", r"adapter_config\.json: not the settings of adapters"),
        ("adapter_config.json", b"[" * 100_000, r"adapter_config\.json: not the settings of adapters"),
        ("adapter_model.safetensors", b"x", r"adapter_model\.safetensors: not a file of safetensors"),
        ("adapter_model.safetensors", None, r"adapter_model\.safetensors: no such file"),
        ("adapter_model.safetensors", bytes(30_000_000), r"adapter_model\.safetensors: bytes: found 'more than 2"),
        ("head.safetensors", b"x", r"head\.safetensors: not a file of safetensors"),
    ],
)
def test_damaged_files_of_adapters_are_refused(file, content, line, exported):
    (exported / file).unlink() if content is None else (exported / file).write_bytes(content)
    with pytest.raises(FedtideError, match=r"^method 'toy'\.init_from: .*" + line) as refusal:
        begun(exported)
    assert "\n" not in str(refusal.value)


def test_adapters_of_other_layers_or_numbers_are_refused(exported):
    from safetensors.torch import load_file, save_file

    with pytest.raises(FedtideError, match=r"init_from: .*: found 'base\..*value\.lora_[AB]\.weight', allowed: base\."):
        begun(exported, replace(MODEL, adapters=replace(ADAPTERS, targets=("query",))))
    with pytest.raises(FedtideError, match=r"init_from: .*: shape of 'base\..*key.*': found None, allowed: \(2, 8\)"):
        begun(exported, replace(MODEL, adapters=replace(ADAPTERS, targets=("query", "key", "value"))))
    with pytest.raises(FedtideError, match=r"init_from: .*: found 'no adapters', allowed: a model with adapters"):
        begun(exported, replace(MODEL, adapters=None))
    state = load_file(exported / "adapter_model.safetensors")
    first = min(state)
    save_file(state | {first: state[first] * torch.nan}, exported / "adapter_model.safetensors")
    with pytest.raises(FedtideError, match=r"safetensors: 'base_model.*': found 'a number that is NaN or infinite'"):
        begun(exported)


def test_adapters_of_a_file_and_their_short_form():
    model = {"kind": "transformer", "package": "a_model"}
    for adapters in ("lora", {"kind": "lora"}):
        values = TOY | {"model": model | {"adapters": adapters}, "method": [{"algorithm": "fedavg"}]}
        assert from_dict(values).model == Transformer(package="a_model", adapters=LoRA())


def test_a_missing_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(FedtideError, match=r'^model\.adapters: needs peft \(.*\); pip install "fedtide\[language\]"$'):
        MODEL.build((STEPS,), 3)
