"""A tiny random transformer, rows of tokens for it, and toys of methods on its adapters."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedtide.config import Experiment
from fedtide.data.rows import Rows
from fedtide.models import LoRA, Transformer
from fedtide.models.transformer import About, NextToken, Pooled
from helpers.toys import toy

TOKENS, STEPS, WIDTH = 14, 6, 8
ADAPTERS = LoRA(rank=2, alpha=4.0, targets=("query", "value"))


def bert(layers: int = 1) -> nn.Module:
    """An encoder of few layers, drawn from torch's generator."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=TOKENS, hidden_size=WIDTH, intermediate_size=12, num_hidden_layers=layers, num_attention_heads=2,
        max_position_embeddings=STEPS, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertModel(config, add_pooling_layer=False)


def llama(layers: int = 1) -> nn.Module:
    """A decoder of few layers whose logits share the weights of its embedding."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=TOKENS, hidden_size=WIDTH, intermediate_size=12, num_hidden_layers=layers, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=STEPS, tie_word_embeddings=True, pad_token_id=0,
        )
    )  # fmt: skip


def classifier(shape: tuple[int, ...], classes: int, layers: int = 1) -> nn.Module:
    return Pooled(bert(layers), About(WIDTH, STEPS, TOKENS, 0, causal=False), classes)


def predictor(layers: int = 1) -> nn.Module:
    return NextToken(llama(layers), About(WIDTH, STEPS, TOKENS, 0, causal=True))


def tokens(seed: int, rows: int = 128) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of tokens of three classes in two domains, padded with 0 at their end: (rows, steps), labels, domains."""
    draw = np.random.default_rng(seed)
    y, domain = draw.integers(0, 3, rows), np.arange(rows) % 2
    x = draw.integers(1, 4, (rows, STEPS)) + 3 * y[:, None] + 2 * domain[:, None]
    x[np.arange(STEPS) >= draw.integers(1, STEPS + 1, rows)[:, None]] = 0
    return x, y, domain


def rows() -> dict[str, Any]:
    x, y, domain = tokens(0)
    return {"x": x, "y": y, "domain": [f"d{number}" for number in domain]}


def sequences() -> Rows:
    """The same tokens, whose next ones are to be predicted."""
    x, _, domain = (torch.from_numpy(column) for column in tokens(0, 64))
    y = torch.cat([x[:, 1:], torch.zeros(len(x), 1, dtype=x.dtype)], 1)
    some = (y != 0).any(1)
    return Rows("tokens", x[some], y[some], TOKENS, domain[some], ("d0", "d1"), padding=0)


def adapted(algorithm: str, options: dict[str, Any] | None = None, **changes: Any) -> Experiment:
    """The toy of a method on a tiny encoder with adapters."""
    data = {"source": {"kind": "python", "function": "helpers.language:rows"}}
    experiment = toy(algorithm, options, **{"model": "python:helpers.language:classifier", "data": data, **changes})
    return experiment.model_copy(update={"model": replace(experiment.model, adapters=ADAPTERS)})


def predicting(algorithm: str, options: dict[str, Any] | None = None, **changes: Any) -> Experiment:
    """The toy of a method on a tiny decoder with adapters, which predicts the next token."""
    changes = {"data": {"source": {"kind": "python", "function": "helpers.language:sequences"}}, **changes}
    experiment = adapted(algorithm, options, model="python:helpers.language:predictor", **changes)
    adapters = replace(ADAPTERS, targets=("q_proj", "v_proj"))
    return experiment.model_copy(update={"model": replace(experiment.model, adapters=adapters)})


def divided(folder: Path, algorithm: str, options: dict[str, Any] | None = None, **changes: Any) -> Experiment:
    """The toy of a method on a saved model of three layers, of which the last has adapters."""
    experiment = adapted(algorithm, options, **changes)
    model = Transformer(path=str(folder), adapters=LoRA(rank=2, alpha=4.0, last_layers=1))
    return experiment.model_copy(update={"model": model})


QUICK = {"lr": 0.05, "epochs": 4, "batch_size": 4, "optimizer": "adamw"}
GATED = {"mixture": {"gate": "python:helpers.language:classifier", "gating": QUICK, "solver": QUICK}}
"""Options of AEM for rows of tokens: the gate is a network for tokens, too."""


WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "sun", "moon", "day", "night", "is", "up", "good", "bye", "a", "b")
"""The tokens of the tiny models, in the order of their ids."""


def save(folder: Path, kind: str = "bert", words: tuple[str, ...] = WORDS, layers: int = 1) -> Path:
    """Write a tiny model with a tokenizer of words into a folder, as `save_pretrained` does."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words_of = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "[UNK]"))
    words_of.pre_tokenizer = pre_tokenizers.Whitespace()
    words_of.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", words.index("[CLS]")), ("[SEP]", words.index("[SEP]"))]
    )
    marks = {"pad_token": "[PAD]", "unk_token": "[UNK]", "eos_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=words_of, **marks).save_pretrained(folder)
    torch.manual_seed(0)
    (bert if kind == "bert" else llama)(layers).save_pretrained(folder)
    return folder
