"""Adapters beside plain transformers and PEFT: a round of FedAvg, the logits of what is exported, ignored labels."""

import copy
import math

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fedtide.core.base import Moment, Shard
from fedtide.core.rng import Rng
from fedtide.learn.task import Task
from fedtide.mixtures.priors import Learned, sketching
from fedtide.models import LoRA, Python, Transformer, save_adapters
from helpers.language import ADAPTERS, WIDTH, adapted, bert, classifier, llama, predictor, save, tokens
from helpers.toys import played, trained_plainly

peft = pytest.importorskip("peft")
pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # of PEFT itself

SETTINGS = {"r": 2, "lora_alpha": 4.0, "target_modules": ["query", "value"], "lora_dropout": 0.0}


class Plain(nn.Module):
    """An encoder of the library with adapters of PEFT, and a head on the mean over what is no padding."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.base, self.head = encoder, nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = x.long()
        here = (x != 0).double()
        hidden = self.base(input_ids=x, attention_mask=here.long()).last_hidden_state.double()
        return self.head((hidden * here[:, :, None]).sum(1) / here.sum(1, keepdim=True))


def plain_base() -> nn.Module:
    torch.manual_seed(0)  # which draws every base
    return bert()


def named(plain: Plain) -> dict[str, nn.Parameter]:
    """What is trained, by our names."""
    return {
        name.replace("base.base_model.model.", "base."): param
        for name, param in plain.named_parameters()
        if param.requires_grad
    }


def test_a_round_of_fedavg_is_a_naive_loop_over_plain_transformers_and_peft():
    local = {"lr": 0.1, "batch_size": 4, "epochs": 2}
    run = played(adapted("fedavg", {"local": local}, precision="fp64"), rounds=1)
    task, population = run.host.algorithm.options["task"], run.host.population
    begin = task.init(Rng(0).at(-1, "server"))
    plain = Plain(peft.get_peft_model(plain_base(), peft.LoraConfig(**SETTINGS))).double()
    assert {*named(plain)} == {*begin.params}
    for name, param in named(plain).items():
        param.data.copy_(begin.params[name])
    mean, total = {name: torch.zeros_like(param) for name, param in named(plain).items()}, 0
    moment = Moment(0, 6, 0.0)
    for client in population.arrivals(4, moment).tolist():
        shard = population.shard(client, moment)
        trained = trained_plainly(plain, shard, Rng(0).at(0, client, "train"))
        for name, param in named(trained).items():
            mean[name] += len(shard) * param.detach()
        total += len(shard)
    for name, value in run.state.weights.params.items():
        torch.testing.assert_close(value, mean[name] / total, rtol=1e-9, atol=1e-12)
        assert not torch.equal(value, begin.params[name])


def test_logits_of_exported_adapters_in_plain_peft_are_ours(tmp_path):
    from transformers import AutoModel

    model = Transformer(path=str(save(tmp_path / "model")), adapters=LoRA(rank=2, alpha=4.0))
    task = Task(lambda: model.build((6,), 3))
    weights = task.init(Rng(0))
    for value in weights.params.values():
        value.add_(0.1)  # the second matrix begins at 0
    save_adapters(task.module(weights), tmp_path / "exported")
    assert {file.name for file in (tmp_path / "exported").iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "head.safetensors",
    }  # fmt: skip
    base = AutoModel.from_pretrained(tmp_path / "model", local_files_only=True)
    plain = Plain(peft.PeftModel.from_pretrained(base, tmp_path / "exported"))
    head = load_file(tmp_path / "exported" / "head.safetensors")
    plain.head.load_state_dict({name.removeprefix("head."): value for name, value in head.items()})
    x = torch.from_numpy(tokens(1)[0])
    with torch.no_grad():
        theirs = plain.double().eval()(x)
    torch.testing.assert_close(task.logits(weights, x).double(), theirs, rtol=1e-5, atol=1e-6)


def test_adapters_of_a_module_of_ones_own_are_exported_with_its_head(tmp_path):
    task = Task(lambda: Python(classifier, adapters=ADAPTERS).build((6,), 3))
    weights = task.init(Rng(0))
    for value in weights.params.values():
        value.add_(0.1)  # the second matrix begins at 0
    count = save_adapters(task.module(weights), tmp_path / "exported")
    assert count == sum(value.numel() for value in weights.params.values())
    torch.manual_seed(0)  # which draws every base
    plain = peft.PeftModel.from_pretrained(classifier((6,), 3), tmp_path / "exported").eval()
    head = load_file(tmp_path / "exported" / "head.safetensors")
    plain.base_model.model.load_state_dict(head, strict=False)
    x = torch.from_numpy(tokens(1)[0])
    with torch.no_grad():
        torch.testing.assert_close(task.logits(weights, x), plain(x), rtol=1e-5, atol=1e-6)


def test_loss_and_gradient_of_next_tokens_are_those_of_the_library_with_ignored_labels():
    task = Task(lambda: Python(predictor, adapters=LoRA(rank=2, alpha=4.0, targets=("q_proj",))).build((6,), 14))
    weights = task.init(Rng(3))
    for value in weights.params.values():
        value.add_(0.1)  # the second matrix begins at 0
    x = torch.from_numpy(tokens(1)[0])
    y = torch.cat([x[:, 1:], torch.zeros(len(x), 1, dtype=x.dtype)], 1)
    shard = Shard(x, y, torch.arange(len(x)), mask=y != 0).pick((y != 0).any(1))
    torch.manual_seed(0)
    settings = {**SETTINGS, "target_modules": ["q_proj"]}
    plain = peft.get_peft_model(llama(), peft.LoraConfig(**settings)).eval()
    params = {f"base.{name.removeprefix('base_model.model.')}": p for name, p in plain.named_parameters()}
    for name, value in weights.params.items():
        params[name].data.copy_(value)
    labels = shard.x.masked_fill(shard.x == 0, -100)
    loss = plain(input_ids=shard.x, attention_mask=(shard.x != 0).long(), labels=labels).loss
    gradient, value = task.gradient(weights, shard)
    assert value == pytest.approx(loss.item(), rel=1e-5)
    wanted = torch.autograd.grad(loss, [params[name] for name in gradient])
    for ours, theirs in zip(gradient.values(), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_tied_weights_stay_tied_and_are_held_once():
    module = Python(predictor, adapters=LoRA(targets=("q_proj",))).build((6,), 14)
    assert module.base.lm_head.weight is module.base.model.embed_tokens.weight
    again = copy.deepcopy(module)
    assert again.base.lm_head.weight is again.base.model.embed_tokens.weight
    assert again.base.lm_head.weight.data_ptr() == module.base.lm_head.weight.data_ptr()


class Three(nn.Module):
    """Logits of three tokens from the token before: those of the last two tokens are 0."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle, self.out = nn.Embedding(3, 1), nn.Linear(1, 3, bias=False), nn.Linear(3, 3, bias=False)
        with torch.no_grad():
            self.embed.weight.copy_(torch.tensor([[math.log(2)], [-math.log(2)], [0.0]]))
            self.middle.weight.copy_(torch.tensor([[0.0], [0.0], [1.0]]))
            self.out.weight.copy_(torch.eye(3).flip(0))  # so the first token has what the embedding says

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.middle(self.embed(x)))


def test_the_sketch_of_a_learned_prior_is_the_gradient_of_the_last_adapter_if_the_base_makes_the_logits():
    """The model is h = (W + 2 B A) e(x) with B = 0, and its logits are (h3, h2, h1). So the gradient for B is
    2 A e(x) (p - label), in turned order, in the mean over steps that count.

    Token 0 has e = ln 2, so p = (1/2, 1/4, 1/4). With label 1 it gives (1/2, -3/4, 1/4) ln 2. Token 1 has e = -ln 2, so
    p = (1/5, 2/5, 2/5). With label 2 it gives (1/5, 2/5, -3/5) (-ln 2). Their sum is (0.3, -1.15, 0.85) ln 2. Token 0
    comes once more, with a step that does not count. A is one drawn number, so its sign alone matters to a direction.
    """
    settings = LoRA(rank=1, alpha=2.0, targets=("middle",))
    task = Task(lambda: Python(lambda shape, classes: Three(), adapters=settings).build((3,), 3))
    shard = Shard(
        torch.tensor([[0, 1, 0]]), torch.tensor([[1, 2, 0]]), torch.arange(1), mask=torch.tensor([[True, True, False]])
    )
    (name,) = (name for name in task.scratch.names if "lora_A" in name)
    sign = task.init_random(Rng(0).at("gradients")).params[name].sign().item()
    (term,) = sketching(Learned(), task)(shard).values()
    wanted = torch.tensor([0.85, -1.15, 0.3], dtype=torch.float64)
    torch.testing.assert_close(term.value, sign * wanted / wanted.norm(), rtol=1e-6, atol=1e-6)
    assert term.weight == 1
