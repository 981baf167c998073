"""An LSTM with a single bias vector, as in Keras."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class OneBiasLSTM(nn.Module):
    """An LSTM with one bias vector, the weights of a last input that is always 1."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.cell = nn.LSTM(width + 1, hidden, bias=False, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, steps, width) to (rows, steps, hidden)."""
        return self.cell(F.pad(x, (0, 1), value=1.0))[0]
