"""Gaussian noise on a sum: its size for each number, its draws at a real server, and its release with the ledger.

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

import json
import math
import secrets
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedtide.core.atomic import append
from fedtide.core.errors import FedtideError
from fedtide.core.record import LEDGER, read_lines
from fedtide.core.rng import Rng
from fedtide.wire.accounting import Vector, coefficients, correlated, inverse
from fedtide.wire.clip import HALF, WHOLE, WITHIN, Clip, adapted, bound_of, with_bounds
from fedtide.wire.keys import key_stream
from fedtide.wire.ledger import Ledger, Line, Place, Safe, digest
from fedtide.wire.pipeline import Opening, Wire
from fedtide.wire.scores import BOUNDS
from fedtide.wire.vector import BITS, ROOM, Form

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


def score_deviation(z: float) -> float:
    """Return the deviation of the noise on each of the two numbers of scores in a sum: z / 2 * sqrt(2).

    >>> round(score_deviation(2.0), 6)
    1.414214
    """
    return deviations({name: Group(1, bound) for name, bound in BOUNDS.items()}, z)["score.accuracy"]


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
    stream = key_stream(seed)
    for start in range(0, size, PIECE):
        bits = np.frombuffer(stream.update(bytes(8 * 4 * PIECE)), np.uint64).reshape(PIECE, 4)
        uniform = ((bits >> np.uint64(11)) + 1) * 2.0**-53  # in (0, 1]
        length, angle = np.sqrt(-2 * np.log(uniform[:, 0::2])), 2 * np.pi * uniform[:, 1::2]
        piece = (length[:, 0] * np.cos(angle[:, 0]) + length[:, 1] * np.sin(angle[:, 1])) / math.sqrt(2)
        numbers[start : start + PIECE] = piece[: size - start]
    return torch.from_numpy(numbers)


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
        lines = [] if self.seeds is None else read_lines(self.seeds.parent, self.seeds.name)
        try:
            self._seeds_by_draw = {(str(stream), int(at)): bytes.fromhex(seed) for stream, at, seed in lines}
        except (ValueError, TypeError):
            raise FedtideError(f"{self.seeds}: damaged") from None

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


SMALLEST = 1e-6
"""The smallest bound to which one adapts: fixed point has room for less, and none is of use."""

Draw = Callable[[str, int, int], Tensor]
"""Fresh standard normal numbers for (stream, round, how many), if noise has bands the same whenever asked for."""


def simulated_noise(seed: int) -> Draw:
    """Return the noise of a simulation, which follows from its seed: all who have the configuration know it."""

    def draw(stream: str, number: int, size: int) -> Tensor:
        return torch.from_numpy(Rng(seed).at("noise", stream, number).numpy().standard_normal(size))

    return draw


def with_noise(wire: Wire, ledger: Ledger, draw: Draw, safe: Safe | None = None) -> Wire:
    """Return a private wire as the server knows it: what clients clip, the server noises."""
    assert wire.clip is not None
    return replace(wire, server=Release(wire.clip, ledger, draw, safe))


def stream_of(question: str, ask: int, slot: int | None) -> str:
    """Return the name of the noise of a question, which is correlated over rounds if it has bands."""
    return f"{question}/{ask}/{slot}"


@dataclass(eq=False)
class Release:
    """The server's step in place of the clients' `Clip`: noise on an opened sum, once.

    Args:
        clip: the clients' step.
        ledger: of the run, with its plan and noise multiplier.
        draw: fresh noise.
        safe: keeps released sums until a checkpoint counts on them. None if a round that is played once more comes to
            the same sum, as in a simulation.
    """

    clip: Clip
    ledger: Ledger
    draw: Draw
    safe: Safe | None = None
    _past: dict[str, tuple[int, deque[Vector]]] = field(default_factory=dict, init=False, repr=False)
    _drawn: dict[Place, Tensor] = field(default_factory=dict, init=False, repr=False)

    def add_bounds(self, form: Form, number: int) -> Form:
        """Return a form with the bounds of a round that adapt: what was released before decides them."""
        if not self.clip.adaptive:
            return form
        most = ROOM / max(form.people, 1) / 2
        names = [leaf.name or WHOLE for leaf in form.leaves if (leaf.name or WHOLE) in self.clip.adaptive]
        return with_bounds(form, {name: min(self._bound(name, number), most) for name in names})

    def _bound(self, name: str, number: int) -> float:
        """Return the bound of a leaf in a round, from the last round before it in which clients sent one."""
        before = [line for line in self.ledger.lines if line.round < number and name in line.within]
        if not before:
            return self.clip.bounds[name]
        last = max(line.round for line in before)
        lines = [line for line in before if line.round == last]
        counts = [max(len(line.clients), 1) for line in lines]
        share = sum(line.within[name] * count for line, count in zip(lines, counts, strict=True)) / sum(counts)
        how = self.clip.adaptive[name]
        return max(adapted(lines[-1].bounds[name], share, how.quantile, how.rate), SMALLEST)

    def find_readable(self, counts: Tensor, opening: Opening) -> Tensor:
        """Return the mask (units,) of the slots whose weight has three deviations of its noise, or more.

        The release of the sum has the same noise. Else two sums of the same weights would tell more than one.
        """
        form = opening.form
        weights = torch.zeros(form.end, dtype=torch.float64)
        for unit, count in zip(form.units, counts.tolist(), strict=True):
            weights[unit.stop - 1] = count
        number, ask = opening.version
        place = number, ask, opening.slot
        if place not in self._drawn:  # else the same clients try to open the sum again
            before = {other: noise for other, noise in self._drawn.items() if other[0] == number}
            self._drawn = {**before, place: self._noise(opening, number, form.end)}
        noise, z = self._drawn[place], self.ledger.part(opening.question).z
        released = noised(weights, form, self.clip.bounds_of(form), z, noise)
        return torch.tensor([bool(released[unit].any()) for unit in form.units])

    def release(self, total: Tensor, opening: Opening) -> Tensor:
        """Return a sum with noise; its line is on the disk by then.

        Raises:
            FedtideError: the release is not in the budget.
        """
        number, ask = opening.version
        if number < 0:
            raise FedtideError(f"wire.privacy: '{opening.question}' is asked before round 0, allowed: rounds from 0 on")
        noise = self._drawn.pop((number, ask, opening.slot), None)
        noise = self._noise(opening, number, len(total)) if noise is None else noise
        bounds, z = self.clip.bounds_of(opening.form), self.ledger.part(opening.question).z
        released = noised(total, opening.form, bounds, z, noise)
        tables = opening.form.tables(released)
        line = Line(
            round=number,
            ask=ask,
            question=opening.question,
            slot=opening.slot,
            z=z,
            bounds={name: bound for name, bound in bounds.items() if not name.endswith(WITHIN)},
            clients=opening.clients,
            sha256=digest(released),
            within={
                name.removesuffix(WITHIN) or WHOLE: float(table[0, 0] / table[0, 1]) + HALF
                for name, table in tables.items()
                if name.endswith(WITHIN)
            },
        )
        if self.safe is not None and all(other.place != line.place for other in self.ledger.of(number)):
            self.safe.keep(line, released)
        self.ledger.add(line)
        if self.safe is not None:
            self.safe.count(len(self.ledger.lines))
        return released

    def _noise(self, opening: Opening, number: int, size: int) -> Tensor:
        """Return n_t; what it needs of the rounds before is kept in this process, or made again.

        No two sums have the same noise, or their difference would have none.
        """
        stream = stream_of(opening.question, opening.version[1], opening.slot)
        bands = self.ledger.part(opening.question).plan.bands
        if bands == 1:
            return self.draw(stream, number, size)
        reached, past = self._past.get(stream, (0, deque(maxlen=bands)))
        if reached > number:
            reached, past = 0, deque(maxlen=bands)
        if past and len(past[0]) != size:
            changed = f"sums of '{opening.question}' changed their form in round {number}, which bands cannot follow"
            raise FedtideError(f'wire.privacy.noise: {changed}; allowed: "plain"')
        for t in range(reached, number + 1):
            noise = correlated(self.draw(stream, t, size).numpy(), past, coefficients(bands))
            past.appendleft(noise)
        self._past[stream] = number + 1, past
        return torch.from_numpy(past[0].copy())


LIKELY = 6.0
"""Standard errors by which the deviation of true noise is off at most; more is seen once in half a billion times."""


@dataclass(frozen=True)
class Noise:
    """The difference between a released sum and the sum of its clients' answers.

    Args:
        round: when it was released.
        question: what was asked.
        deviation: root mean square of its numbers, each in deviations of the noise that the ledger says.
        numbers: how many.
    """

    round: int
    question: str
    deviation: float
    numbers: int

    @property
    def likely(self) -> bool:
        """Tell whether noise of the ledger's size would be so.

        >>> [Noise(0, "train", deviation, 200).likely for deviation in (0.0, 1.1, 1.3)]
        [False, True, False]
        """
        return abs(self.deviation**2 - 1) <= LIKELY * math.sqrt(2 / self.numbers)


@dataclass(eq=False)
class Recorded:
    """The server's step in a replay of a private run.

    Args:
        step: the step as it was, with all lines of its ledger.
        sums: has what was released.
        noise: the noise of each release so far; it has a meaning if clients have the rows that they had.
    """

    step: Release
    sums: Safe
    noise: list[Noise] = field(default_factory=list, init=False)
    ledger: ClassVar[None] = None
    safe: ClassVar[None] = None

    def add_bounds(self, form: Form, number: int) -> Form:
        """Return the form of a sum of a round, as it was asked for."""
        return self.step.add_bounds(form, number)

    def find_readable(self, counts: Tensor, opening: Opening) -> Tensor:
        """Return the mask (units,) of all slots: a replay reads what was released."""
        return counts.isfinite()

    def release(self, total: Tensor, opening: Opening) -> Tensor:
        """Return the sum that was released.

        Raises:
            FedtideError: there is no such release, of these clients, or its sum is gone.
        """
        place, ledger = (*opening.version, opening.slot), self.step.ledger
        line = next((other for other in ledger.of(opening.version[0]) if other.place == place), None)
        if line is None or (line.question, line.clients) != (opening.question, opening.clients):
            found_release = "nothing" if line is None else f"'{line.question}' of clients {line.clients}"
            raise FedtideError(
                f"{LEDGER}: round {place[0]}, question {place[1]}: found {found_release}, "
                f"allowed: '{opening.question}' of clients {opening.clients}, who answered it"
            )
        released = self.sums.read_sum(line)
        if released is None or len(released) != len(total):
            but = "without it no round after it can be played again"
            raise FedtideError(f"{self.sums.record}: the sum released in round {line.round} is gone or damaged; {but}")
        self._look(line, released, total, opening)
        return released

    def _look(self, line: Line, released: Tensor, total: Tensor, opening: Opening) -> None:
        """Note the noise of a release, of all values that can be read."""
        form, bands = opening.form, self.step.ledger.part(line.question).plan.bands
        scale = deviations(groups_of(form, self.step.clip.bounds_of(form)), line.z)
        banded = math.sqrt(float((inverse(bands, line.round + 1) ** 2).sum()))
        noise = _noise(form.tables(released), form.tables(total), scale)
        if len(noise):
            deviation = float(noise.square().mean().sqrt()) / banded
            self.noise.append(Noise(line.round, line.question, deviation, len(noise)))


def _noise(released: Mapping[str, Tensor], sums: Mapping[str, Tensor], scale: Mapping[str, float]) -> Tensor:
    """Return the noise of all values, each in deviations; slots that could not be read have none."""
    parts = [torch.empty(0, dtype=torch.float64)]
    for name, table in released.items():
        read = (table != 0).any(1)
        if table.shape[1] > 1:
            parts.append(((table - sums[name])[read, :-1] / scale[name]).flatten())
    return torch.cat(parts)
