"""Arrivals of another run, replayed."""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.data.saved import content_of
from fedtide.data.shift.arriving import Arriving
from fedtide.fields.types import DataFile, OpenFraction, ingredient


@ingredient
class Replay(Arriving):
    """Arrivals of another run, round by round, from `shift/<seed>.safetensors` in its folder.

    Args:
        path: the file.
        dropout_rate: share of the asked clients that never answer.
    """

    path: DataFile
    dropout_rate: OpenFraction = 0.0
    kind: Literal["replay"] = "replay"
    recorded: ClassVar[bool] = True

    @cached_property
    def saved(self) -> dict[str, Any]:
        """Content of the file."""
        return content_of(self.path, "shift.who.path", "arrivals")

    def _round(self, time: float) -> int:
        number, rounds = int(time), len(self.saved["arrivals"])
        if not rounds:
            allowed = "a run with clock = 'rounds' or steady devices, in which they are known in advance"
            raise FedtideError(f"shift.who.path: {self.path} has no arrivals; allowed: {allowed}")
        if number >= rounds:
            raise FedtideError(f"shift.who.path: {self.path} ends after {rounds} rounds; allowed: at most {rounds}")
        return max(number, 0)

    def shares(self, time: float, sizes: np.ndarray) -> np.ndarray:
        """Return the expected share of each group among the arrivals (groups,)."""
        return self.saved["expected"][self._round(time)].numpy()

    def arrivals(self, m: int, groups: list[Tensor], time: float, rng: Rng) -> Tensor:
        """Return the first `m` recorded arrivals."""
        came = self.saved["arrivals"][self._round(time)]
        came = came[came >= 0]
        registered = sum(len(group) for group in groups)
        # A round may have fewer arrivals if all clients arrived, provided that there are as many clients here.
        short = len(came) == len(self.saved["arrivals"][0]) or registered != self.saved["registered"]
        if (short and len(came) < min(m, registered)) or (len(came) and int(came.max()) >= registered):
            there = f"{len(came)} arrivals a round among {self.saved['registered']} clients"
            raise FedtideError(f"shift.who.path: {self.path} has {there}; {m} among {registered} are asked for")
        return came[:m]

    def substituted(self, m: int, groups: list[Tensor], time: float, rng: Rng) -> int:
        """Count the recorded arrivals that replace clients of an exhausted group."""
        return int(self.saved["substituted"][self._round(time)])

    def reachable(self, groups: list[Tensor], time: float, rng: Rng) -> Tensor:
        """Return the recorded reachable clients."""
        if self.saved["awake"] is None:
            return torch.cat(groups).sort().values
        bits = np.unpackbits(self.saved["awake"][self._round(time)].numpy(), count=sum(len(group) for group in groups))
        return torch.from_numpy(np.flatnonzero(bits))
