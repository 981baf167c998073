"""Initial weights of a network's layers that torch does not draw, and an LSTM with one bias vector, as in Keras."""

from __future__ import annotations

from typing import Annotated, Literal

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

Init = Annotated[
    Literal["torch", "glorot", "he"],
    Field(
        description='initial weights: "torch" as torch draws them; "glorot", uniform, as in Keras; "he", uniform, for '
        "ReLU. The last two begin with biases of 0."
    ),
]


def initialize(module: nn.Module, init: Init) -> None:
    """Draw the weights of all linear, convolutional and LSTM layers anew, from torch's global generator.

    As in Keras, the recurrent weights of an LSTM are orthogonal and its forget gate begins with a bias of 1. Norms and
    embeddings are left as they are.

    >>> layer = nn.Linear(300, 500)
    >>> initialize(layer, "glorot")
    >>> bound = (6 / (300 + 500)) ** 0.5
    >>> bool(layer.bias.any()), bool(0.99 * bound < layer.weight.abs().max() < 1.01 * bound)
    (False, True)
    """
    if init == "torch":
        return
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.modules.conv._ConvNd):
            _draw(layer.weight.detach(), init)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        elif isinstance(layer, OneBiasLSTM):
            cell = dict(layer.cell.named_parameters())
            received, hidden = cell["weight_ih_l0"].detach(), layer.cell.hidden_size
            _draw(received[:, :-1], init)
            received[:, -1] = 0.0
            received[hidden : 2 * hidden, -1] = 1.0
            nn.init.orthogonal_(cell["weight_hh_l0"])


def _draw(weight: Tensor, init: Init) -> None:
    if init == "glorot":
        nn.init.xavier_uniform_(weight)
    else:
        nn.init.kaiming_uniform_(weight, nonlinearity="relu")


class OneBiasLSTM(nn.Module):
    """An LSTM with one bias vector, the weights of a last input that is always 1."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.cell = nn.LSTM(width + 1, hidden, bias=False, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, steps, width) to (rows, steps, hidden)."""
        return self.cell(F.pad(x, (0, 1), value=1.0))[0]
