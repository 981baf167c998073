"""Gaussian noise on a sum: its size for each number, and its draws at a real server.

Source: McMahan, Andrew, et al.: *A General Approach to Adding Differential Privacy to Iterative Training Procedures*,
2018.

| symbol | meaning |
| --- | --- |
| `g` | a group of numbers: the values of a leaf in all slots, or its weights if it has several slots |
| `C_g` | distance by which one client moves them: the leaf's bound, or 1 (`fedtide.wire.clip`) |
| `d_g` | number of values |
| `s_g` | deviation of the noise on each of them |
| `z` | noise multiplier of the whole sum |

If every number is divided by its `s_g`, noise has deviation 1. Then one client moves all numbers by at most
sqrt(sum C_g^2 / s_g^2). So with `s_g = z C_g / sqrt(a_g)` and sum a_g = 1 a release is the Gaussian mechanism of
multiplier z, for any parts `a_g`. One deviation for all numbers, `z sqrt(sum C_h^2)`, is one choice of parts. It is bad
if leaves have different units: a loss of up to 5 would drown an update of length 1.

Choices:
    - Parts follow the cube root of sizes, a_g = d_g^(1/3) / sum d_h^(1/3). They make the sum of relative errors least,
      `sum s_g sqrt(d_g) / C_g`.
    - Empty slots get noise, too. The weight of a leaf without slots counts answers, and gets none.
    - A slot whose weight is below three deviations of its noise has no mean. It counts as a slot without answers.
    - Noise is rounded to the grid of sums, because the last bits of floating-point noise tell the sum. Source: Mironov:
      *On Significance of the Least Significant Bits for Differential Privacy*, CCS 2012.
    - Each normal number is the sum of two Box-Muller numbers of 53 bits, because single ones have gaps that tell. It is
      no exact sampler of a discrete distribution. Source: Holohan, Braghin: *Secure Random Sampling in Differential
      Privacy*, ESORICS 2021.

A real server draws a fresh seed of 256 bits from the system for every draw. ChaCha20 stretches the seed (RFC 8439, by
`cryptography`). Fresh noise needs its draw once, and its seed is never written. Banded noise is made of the draws of
earlier rounds. Their seeds lie in a private file until the run is over, and are on the disk before they are used. If
that file is older than its sums a repeated draw gets another seed. Two sums with the same noise would have a difference
without noise.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtide.core.errors import FedtideError
from fedtide.wire.clip import bound_of
from fedtide.wire.ledger import append, whole_lines
from fedtide.wire.masks import library
from fedtide.wire.vector import BITS, Form

LEAST = 3.0
"""How many deviations of its noise a slot's weight has to have."""


@dataclass(frozen=True)
class Group:
    """Numbers that one client moves together.

    Args:
        size: d_g.
        bound: C_g.
    """

    size: int
    bound: float


def deviations(groups: Mapping[str, Group], z: float) -> dict[str, float]:
    """Return s_g of each group: z C_g / sqrt(a_g).

    >>> made = deviations({"one": Group(8, 3.0), "other": Group(64, 1.0)}, 1.0)  # parts 1/3 and 2/3
    >>> {name: round(deviation, 6) for name, deviation in made.items()}
    {'one': 5.196152, 'other': 1.224745}
    """
    whole = sum(group.size ** (1 / 3) for group in groups.values())
    return {name: z * g.bound * math.sqrt(whole / g.size ** (1 / 3)) for name, g in groups.items()}


def groups_of(form: Form, bounds: Mapping[str, float]) -> dict[str, Group]:
    """Return the groups of a form; the weights of the leaf "models" are "models#".

    >>> from fedtide.wire.vector import Leaf
    >>> list(groups_of(Form((Leaf("delta", 2), Leaf("models", 1, slots=2)), 3), {"delta": 1.0, "models": 1.0}))
    ['delta', 'models', 'models#']
    """
    groups: dict[str, Group] = {}
    for leaf in form.leaves:
        if leaf.size:
            groups[leaf.name] = Group(leaf.slots * leaf.size, bound_of(leaf.name, bounds))
        if leaf.slots > 1:
            groups[f"{leaf.name}#"] = Group(leaf.slots, 1.0)
    return groups


def noised(total: Tensor, form: Form, bounds: Mapping[str, float], z: float, noise: Tensor) -> Tensor:
    """Return a sum of clipped vectors with noise, and zeros in the slots that cannot be read.

    Args:
        total: the sum (size,), float64.
        form: of the vectors.
        bounds: C of each leaf.
        z: noise multiplier.
        noise: (size,) standard normal, or correlated over rounds.
    """
    scale, released = deviations(groups_of(form, bounds), z), total.clone()
    drawn = form.tables(noise)
    for name, table in form.tables(released).items():
        if table.shape[1] > 1:
            table[:, :-1] += _on_grid(scale[name] * drawn[name][:, :-1])
        if len(table) > 1:
            deviation = scale[f"{name}#"]
            table[:, -1] += _on_grid(deviation * drawn[name][:, -1])
            table[table[:, -1] < LEAST * deviation] = 0.0
    return released


def _on_grid(noise: Tensor) -> Tensor:
    """Round noise to the grid of sums in fixed point: sum + round(noise) = round(sum + noise)."""
    return (noise * 2.0**BITS).round() * 2.0**-BITS


SEED = 32
"""Bytes of a seed."""

PIECE = 2**16
"""Numbers that are made at a time."""


def normal(seed: bytes, size: int) -> Tensor:
    """Return standard normal numbers (size,) that follow from a seed, and from nothing else."""
    numbers = np.empty(size)
    stream = _stream(seed)
    for start in range(0, size, PIECE):
        bits = np.frombuffer(stream.update(bytes(8 * 4 * PIECE)), np.uint64).reshape(PIECE, 4)
        uniform = ((bits >> np.uint64(11)) + 1) * 2.0**-53  # in (0, 1]
        length, angle = np.sqrt(-2 * np.log(uniform[:, 0::2])), 2 * np.pi * uniform[:, 1::2]
        piece = (length[:, 0] * np.cos(angle[:, 0]) + length[:, 1] * np.sin(angle[:, 1])) / math.sqrt(2)
        numbers[start : start + PIECE] = piece[: size - start]
    return torch.from_numpy(numbers)


def _stream(seed: bytes) -> Any:
    ciphers = library().hazmat.primitives.ciphers
    return ciphers.Cipher(ciphers.algorithms.ChaCha20(seed, bytes(16)), mode=None).encryptor()


@dataclass
class SystemNoise:
    """Fresh standard normal numbers for (stream, round, how many).

    Args:
        seeds: private file of the seeds of all draws, for noise that is made of earlier draws. None keeps none, and a
            draw that is asked for twice is two draws.

    Raises:
        FedtideError: the file is not what this program writes.
    """

    seeds: Path | None = None
    _seeds_by_draw: dict[tuple[str, int], bytes] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        for number, line in enumerate([] if self.seeds is None else whole_lines(self.seeds), start=1):
            try:
                stream, at, seed = json.loads(line)
                self._seeds_by_draw[str(stream), int(at)] = bytes.fromhex(seed)
            except (ValueError, TypeError):
                raise FedtideError(f"{self.seeds}: line {number}: damaged") from None

    def forget(self, drop: Callable[[str, int], bool]) -> None:
        """Forget the seeds of some draws (stream, round), so that these are drawn anew."""
        self._seeds_by_draw = {key: seed for key, seed in self._seeds_by_draw.items() if not drop(*key)}

    def __call__(self, stream: str, number: int, size: int) -> Tensor:
        """Return the numbers of a draw (size,)."""
        if self.seeds is None:
            return normal(secrets.token_bytes(SEED), size)
        key = stream, number
        if key not in self._seeds_by_draw:
            seed = secrets.token_bytes(SEED)
            self.seeds.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            append(self.seeds, json.dumps([stream, number, seed.hex()]), mode=0o600)
            self._seeds_by_draw[key] = seed
        return normal(self._seeds_by_draw[key], size)
