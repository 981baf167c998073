"""Texts from models of next tokens: how a prompt goes on, and which of several answers follows it.

Choices:
    - ours: the networks of a method are chosen by the prompts, as for rows with classes, and stay while a text grows.
      They are rows as in training then, and decide together by five hundred tokens, because each has as many logits
      as the vocabulary has tokens.
    - lm-evaluation-harness: the answer with the highest log-likelihood is chosen, of all of its tokens together
      (`acc`), or of a byte (`acc_norm`, which counts letters there). The mark of the end is no part of an answer.
    - lm-evaluation-harness: if a prompt is too long, its beginning is cut.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedtide.core.errors import refused
from fedtide.data.sources.texts import Questions, Texts, padded
from fedtide.learn.task import parts
from fedtide.models.adapters import library
from fedtide.models.tokenizing import load_tokenizer, padding_of
from fedtide.models.transformer import NextToken, Tokens
from fedtide.runs.job import Asked
from fedtide.runs.trained import Trained, module_of

TOKENS = 40
"""Tokens of a continuation."""


@dataclass(frozen=True)
class Said:
    """Columns of texts and of numbers, by name, with an entry for each row of a file; and lines for people."""

    texts: dict[str, list[str]]
    numbers: dict[str, Tensor] = field(default_factory=dict)
    lines: tuple[str, ...] = ()


def predicts_tokens(trained: Trained) -> bool:
    """Tell whether a run predicts the next tokens of texts."""
    source = trained.run.experiment.data.source
    return isinstance(source, Texts) and source.label is None


@dataclass(frozen=True)
class Speaker:
    """A run that predicts next tokens.

    trained: the run. client: as whom it speaks; None for a new client. cluster: the network of the server's state that
    speaks alone; None for those of the client.
    """

    trained: Trained
    client: int | None = None
    cluster: int | None = None

    @cached_property
    def source(self) -> Any:
        """The source of its texts."""
        return self.trained.run.experiment.data.source

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of its model."""
        folder = self.source.folder(self.trained.run.experiment.data.folder)
        return load_tokenizer(folder, "data.source.tokenizer")

    @cached_property
    def longest(self) -> int:
        """Tokens of a text: as many as the model takes, because a text may be longer than the rows of training."""
        modules = self.trained.task.scratch.module.modules()
        return next((module.about.steps for module in modules if isinstance(module, Tokens)), self.source.context)

    def say(self, path: Path, asked: Asked) -> Said:
        """Continue the texts of a file, or choose among the answers to each.

        Args:
            path: a file with the column of the prompt, or of the text if rows have no prompts; to continue texts also
                a folder of texts.
            asked: what to do.

        Raises:
            FedtideError: the file has no such texts or answers, or which network predicts cannot be told.
        """
        asked.check()
        if asked.choices is not None:
            columns = [column.strip() for column in asked.choices.split(",")]
            return self._choose(path, self.source.questions_of(path, columns, asked.right))
        return self._continue(path, TOKENS if asked.tokens is None else asked.tokens)

    def _continue(self, path: Path, tokens: int) -> Said:
        if tokens >= self.longest:
            but = f"a prompt and its continuation have {self.longest} tokens at most"
            raise refused("--tokens", tokens, f"1 to {self.longest - 1}", but)
        prompts = self.source.encode_prompts(self.tokenizer, self.source.prompts_of(path))
        prompts = cut_beginnings(path, prompts, [self.longest - tokens] * len(prompts))
        spoken = [
            continue_greedily(network, prompt, tokens, self.tokenizer)
            for prompt, network in zip(prompts, self._networks(prompts), strict=True)
        ]
        return Said({"continuation": [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in spoken]})

    def _choose(self, path: Path, questions: Questions) -> Said:
        answers = [self.source.encode_answers(self.tokenizer, choices) for choices in questions.choices]
        prompts = self.source.encode_prompts(self.tokenizer, questions.prompts)
        prompts = cut_beginnings(path, prompts, [self.longest - max(map(len, choices)) for choices in answers])
        likely = [
            log_likelihoods(network, prompt, choices, padding_of(self.tokenizer))
            for prompt, choices, network in zip(prompts, answers, self._networks(prompts), strict=True)
        ]
        sizes = [torch.tensor([len(text.encode()) for text in choices]) for choices in questions.choices]
        whole = torch.stack([values.argmax() for values in likely])
        by_byte = torch.stack([(values / size).argmax() for values, size in zip(likely, sizes, strict=True)])
        best = torch.stack([values.max() for values in likely])
        texts = [choices[place] for choices, place in zip(questions.choices, whole.tolist(), strict=True)]
        lines: tuple[str, ...] = ()
        if questions.right is not None:
            right = torch.tensor(questions.right)
            first, second = (float((places == right).double().mean()) for places in (whole, by_byte))
            lines = (
                f"accuracy: {100 * first:.1f} % by log-likelihood, {100 * second:.1f} % by log-likelihood of a byte",
            )
        return Said({"answer": texts}, {"choice": whole, "choice by byte": by_byte, "log-likelihood": best}, lines)

    def _networks(self, prompts: list[list[int]]) -> Iterator[nn.Module]:
        """Yield the network that predicts each prompt, as a row of the run's own."""
        steps = self.source.context
        rows = torch.from_numpy(padded([prompt[-steps:] for prompt in prompts], steps, padding_of(self.tokenizer)))
        return networks_of(self.trained, rows, self.client, self.cluster)


def networks_of(trained: Trained, rows: Tensor, client: int | None, cluster: int | None) -> Iterator[nn.Module]:
    """Yield the network that predicts each row of tokens (rows, steps); neighbors may share it."""
    before: Any = None
    for rows_at in parts(len(rows), 4 * rows.shape[1]):
        for networks in trained.parts_of_rows(rows[rows_at], client, cluster):
            if networks is not before:
                module, before = module_of(trained.task, networks), networks
                for part in module.modules():
                    if isinstance(part, Tokens):
                        part.lower = None  # no row of theirs comes again
            yield module


@torch.no_grad()
def embed(trained: Trained, rows: Tensor, client: int | None, cluster: int | None) -> dict[str, Tensor]:
    """Return the mean of the features of each row's tokens, by the network that predicts it: columns by name.

    Args:
        trained: a run of texts.
        rows: tokens (rows, steps), as the model sees them.
        client: as this client; None for a new one.
        cluster: with this network of the server's state alone.

    Raises:
        FedtideError: the networks are no pretrained transformers, or several predict together.
    """
    features = []
    networks = networks_of(trained, rows, client, cluster)
    for network, group in groupby(zip(networks, rows, strict=True), key=lambda pair: pair[0]):
        if not isinstance(network, Tokens):
            raise refused("--embeddings", type(network).__name__, 'one network of model.kind "transformer"')
        x = torch.stack([row for _, row in group])
        features += [network.features(x[at]) for at in parts(len(x), 4 * x.shape[1])]
    return {f"embedding {k}": column for k, column in enumerate(torch.cat(features).T)}


def cut_beginnings(path: Path, prompts: list[list[int]], rooms: Sequence[int]) -> list[list[int]]:
    """Return the last tokens of prompts for which there is room, and tell the person how many are cut.

    Raises:
        FedtideError: a prompt has no token, or there is no room for one.
    """
    for row, (prompt, room) in enumerate(zip(prompts, rooms, strict=True)):
        if not prompt or room < 1:
            where = f"{path}: row {row}, counted from 0"
            if not prompt:
                raise refused(where, "a prompt without a token", "a text")
            but = "the model takes no token before it"
            raise refused(where, "an answer that is too long", "shorter ones", but)
    cut = sum(len(prompt) > room for prompt, room in zip(prompts, rooms, strict=True))
    if cut:
        print(f"fedtide: {path}: {cut} of {len(prompts)} prompts lose their beginning", file=sys.stderr)
    return [prompt[-room:] for prompt, room in zip(prompts, rooms, strict=True)]


@torch.no_grad()
def continue_greedily(network: nn.Module, prompt: list[int], tokens: int, tokenizer: Any) -> list[int]:
    """Return the tokens that follow a prompt, each the most likely one; the mark of an end is the last."""
    if isinstance(network, NextToken):  # the library keeps what it computed of earlier tokens
        base: Any = network.base
        settings = library("transformers", "model").GenerationConfig
        # In place of settings in the model's folder, such as a penalty on words that come again.
        base.generation_config = settings(
            max_new_tokens=tokens, do_sample=False, eos_token_id=tokenizer.eos_token_id,
            pad_token_id=padding_of(tokenizer),
        )  # fmt: skip
        x = torch.tensor([prompt])
        return base.generate(x, attention_mask=torch.ones_like(x))[0, len(prompt) :].tolist()
    ids: list[int] = []
    while len(ids) < tokens and (not ids or ids[-1] != tokenizer.eos_token_id):
        ids.append(int(network(torch.tensor([[*prompt, *ids]]))[0, -1].argmax()))
    return ids


@torch.no_grad()
def log_likelihoods(network: nn.Module, prompt: list[int], answers: list[list[int]], padding: int) -> Tensor:
    """Return the log-likelihood (answers,) of all tokens of each answer after a prompt, in float64."""
    rows = [[*prompt, *answer] for answer in answers]
    both = torch.from_numpy(padded(rows, max(map(len, rows)), padding))
    x, y, steps = both[:, :-1], both[:, 1:], torch.arange(both.shape[1])[1:]
    counted = (steps >= len(prompt)) & (steps < torch.tensor([*map(len, rows)])[:, None])
    logp = network(x).log_softmax(-1).gather(-1, y[..., None])[..., 0].double()
    # An answer of no token would be certain.
    return logp.masked_fill(~counted, 0.0).sum(1).masked_fill(~counted.any(1), -torch.inf)
