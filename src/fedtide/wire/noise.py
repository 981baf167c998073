"""Gaussian noise on a sum, once: how much each of its numbers gets, and which slots can be read then.

McMahan, Andrew, et al.: *A General Approach to Adding Differential Privacy to Iterative Training Procedures*, 2018.

| symbol | meaning |
| --- | --- |
| `g` | a group of numbers: the values of a leaf in all slots, or its weights where it has several slots |
| `C_g` | how far one client moves them: the leaf's bound, or 1 (`fedtide.wire.clip`) |
| `d_g` | how many they are |
| `s_g` | deviation of the noise on each of them |
| `z` | noise multiplier of the whole sum |

With every number divided by its `s_g`, noise has deviation 1, and one client moves all by at most
sqrt(sum C_g^2 / s_g^2). So with `s_g = z C_g / sqrt(a_g)` and sum a_g = 1 a release is the Gaussian mechanism of
multiplier z, however the parts `a_g` are dealt. One deviation for all numbers, `z sqrt(sum C_h^2)`, is among them, and
bad where leaves have different units: a loss that may be 5 would drown an update of length 1.

Choices:
    Parts follow the cube root of sizes: `sum s_g sqrt(d_g) / C_g`, the sum of relative errors, is least where
    a_g = d_g^(1/3) / sum d_h^(1/3). Empty slots get noise, too. The weight of a leaf without slots counts answers, and
    stays. A slot whose weight is below three deviations of its noise has no mean, as noise would be divided by noise:
    it is as if no client had answered in it. Noise is rounded to the grid on which sums lie, as the last bits of
    floating-point noise tell what it was added to (Mironov: *On Significance of the Least Significant Bits for
    Differential Privacy*, CCS 2012).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fedtide.wire.clip import bound_of
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
    found: dict[str, Group] = {}
    for leaf in form.leaves:
        if leaf.size:
            found[leaf.name] = Group(leaf.slots * leaf.size, bound_of(leaf.name, bounds))
        if leaf.slots > 1:
            found[f"{leaf.name}#"] = Group(leaf.slots, 1.0)
    return found


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
