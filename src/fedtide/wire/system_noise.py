"""Noise of a real server: normal numbers from the system's generator.

Every draw has a fresh seed of 256 bits from the system, which ChaCha20 stretches (RFC 8439, by `cryptography`). Fresh
noise needs its draw once, and its seed is never written. Banded noise is made of the draws of earlier rounds, so their
seeds lie in a private file, on the disk before they are used, until the run is over.

Choices:
    Two Box-Muller numbers of 53 bits each are added up for each normal number: the floating-point numbers that a single
    one can be have gaps, and gaps tell (Holohan, Braghin: *Secure Random Sampling in Differential Privacy*, ESORICS
    2021). Noise is then rounded to the grid of sums (`fedtide.wire.noise`). It is no exact sampler of a discrete
    distribution. A draw that is asked for once more, by a file that is older than its sums, gets another seed: of
    two sums with the same noise the difference would have none.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtide.core.errors import FedtideError
from fedtide.wire.ledger import append, whole_lines
from fedtide.wire.masks import library

SEED = 32
"""Bytes of a seed."""

PIECE = 2**16
"""Numbers that are made at a time."""


def normal(seed: bytes, size: int) -> Tensor:
    """Return standard normal numbers (size,) that follow from a seed, and from nothing else."""
    made = np.empty(size)
    stream = _stream(seed)
    for start in range(0, size, PIECE):
        bits = np.frombuffer(stream.update(bytes(8 * 4 * PIECE)), np.uint64).reshape(PIECE, 4)
        uniform = ((bits >> np.uint64(11)) + 1) * 2.0**-53  # in (0, 1]
        length, angle = np.sqrt(-2 * np.log(uniform[:, 0::2])), 2 * np.pi * uniform[:, 1::2]
        piece = (length[:, 0] * np.cos(angle[:, 0]) + length[:, 1] * np.sin(angle[:, 1])) / math.sqrt(2)
        made[start : start + PIECE] = piece[: size - start]
    return torch.from_numpy(made)


def _stream(seed: bytes) -> Any:
    ciphers = library().hazmat.primitives.ciphers
    return ciphers.Cipher(ciphers.algorithms.ChaCha20(seed, bytes(16)), mode=None).encryptor()


@dataclass
class SystemNoise:
    """Fresh standard normal numbers for (stream, round, how many).

    Args:
        seeds: private file of the seeds of all draws, for noise that is made of earlier ones; None keeps none, and a
            draw that is asked for twice is two draws.

    Raises:
        FedtideError: the file is not what this program writes.
    """

    seeds: Path | None = None
    _known: dict[tuple[str, int], bytes] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        for number, line in enumerate([] if self.seeds is None else whole_lines(self.seeds), start=1):
            try:
                stream, at, seed = json.loads(line)
                self._known[str(stream), int(at)] = bytes.fromhex(seed)
            except (ValueError, TypeError):
                raise FedtideError(f"{self.seeds}: line {number}: damaged") from None

    def forget(self, drop: Callable[[str, int], bool]) -> None:
        """Forget the seeds of some draws (stream, round), so that these are drawn anew."""
        self._known = {key: seed for key, seed in self._known.items() if not drop(*key)}

    def __call__(self, stream: str, number: int, size: int) -> Tensor:
        """Return the numbers of a draw (size,)."""
        if self.seeds is None:
            return normal(secrets.token_bytes(SEED), size)
        key = stream, number
        if key not in self._known:
            seed = secrets.token_bytes(SEED)
            self.seeds.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            append(self.seeds, json.dumps([stream, number, seed.hex()]), mode=0o600)
            self._known[key] = seed
        return normal(self._known[key], size)
