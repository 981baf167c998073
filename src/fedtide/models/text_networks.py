"""Networks for text, which map rows of token ids to logits for the next token at every step."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from fedtide.core.errors import refused
from fedtide.fields.types import Count, ingredient
from fedtide.models.init import Init, OneBiasLSTM

PADDING = 0
"""Token that pads a row at its end."""


@ingredient
class LSTM:
    """The next-word network of the periodic-shift paper (4.1 M parameters with 10,004 words).

    At every step: embedding, LSTM, a dense `projection` back to the width of the embedding, a dense `vocabulary` with
    one logit per word. Rows are token ids (steps,) and classes are words; the token 0 is padding and stands at the end.
    `projection` is the layer for branches: it is 15 times smaller than `vocabulary`, which stays shared.

    The LSTM has one bias vector, as in Keras, which the paper uses; torch's own LSTM adds up two.

    `embedding = 16, hidden = 64` gives a small network for a CPU.

    Args:
        embedding: width of a word's embedding, and of the projection.
        hidden: width of the LSTM, whose output is the feature.

    >>> sum(p.numel() for p in LSTM().build((20,), 10_004).parameters())
    4050748
    >>> sum(p.numel() for p in LSTM(embedding=16, hidden=64).build((20,), 1_000).parameters())
    54776
    """

    embedding: Count = 96
    hidden: Count = 670
    init: Init = "torch"
    kind: Literal["lstm"] = "lstm"

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Return a module with fresh initial weights."""
        if len(shape) != 1:
            raise refused("model.kind: 'lstm': shape of rows", shape, "(steps,), with the id of a token at each")
        return NextWord(classes, self.embedding, self.hidden)


class NextWord(nn.Module):
    """A network that predicts the next word at every step."""

    def __init__(self, words: int, embedding: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, embedding, padding_idx=PADDING)
        self.lstm = OneBiasLSTM(embedding, hidden)
        self.projection = nn.Linear(hidden, embedding)
        self.vocabulary = nn.Linear(embedding, words)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (rows, steps) to logits (rows, steps, words)."""
        if tokens.is_floating_point():
            raise refused("model.kind: 'lstm': type of rows", tokens.dtype, "integers, ids of tokens")
        return self.vocabulary(self.projection(self.lstm(self.embedding(tokens.long()))))

    def counted(self, tokens: Tensor) -> Tensor:
        """Return the mask (rows, steps) of the steps that are not padding."""
        return tokens != PADDING
