"""Bounds on the distance by which one client can move a sum, leaf by leaf.

Sources:
    McMahan, Ramage, Talwar, Zhang: *Learning Differentially Private Recurrent Language Models*, ICLR 2018.

    McMahan, Andrew, et al.: *A General Approach to Adding Differential Privacy to Iterative Training Procedures*, 2018:
    leaves as groups.

    Andrew, Thakkar, McMahan, Ramaswamy: *Differentially Private Learning with Adaptive Clipping*, NeurIPS 2021.

| symbol | meaning |
| --- | --- |
| `v_k`, `w_k` | value and weight of a leaf, in slot k if it has slots |
| `p_k` | share of slot k in the client's weights, `w_k / sum w`; 1 without slots |
| `C` | bound of the leaf |

A client sends `f p_k v_k` and the weight `p_k`, with `f = min(1, C / |(p_k v_k)_k|)`. So it adds at most the length C
to the values of a leaf, over all slots together. It adds at most the length 1 to the weights, which are positive and
add up to 1.

Choices:
    - Every client counts once, whatever its number of samples. Then the sum of weights of a leaf without slots is the
      number of clients that answered. It is no secret, needs no noise, and is a good divisor.
    - A client that has nothing to say, or no finite numbers, sends zeros and counts.
    - Buffers are part of their leaf.
    - The bounds are reduced by the rounding of fixed point.
    - A share with noise counts as 0 to 1. So a bound changes by at most e^rate from round to round, and a client knows
      its largest possible value.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedtide.core.base import Algorithm
from fedtide.core.errors import FedtideError, Words, refused
from fedtide.fields.types import Fraction, Positive, ingredient
from fedtide.wire.vector import BITS, ROOM, Form, Leaf

ROUNDED = 2.0 ** -(BITS + 1)
"""How far fixed point moves a number at most."""

INSIDE = 1 - 2.0**-30
"""Sum of a client's weights in slots: of 1000 rounded ones, too, the length is at most 1."""

SLACK = 1e-9
"""By which share a length may be off in float64."""

WITHIN = "?"
"""End of the name of the leaf that says whether a client was within a bound that adapts."""

HALF = 0.5
"""What it says is half, and minus half if not. Zeros are within, so one client moves it by twice as much."""


@ingredient
class Adaptive:
    """Adaptation of a bound to the lengths of what clients send, by a count with noise of those within the bound.

    Args:
        quantile: of the lengths, which the bound approaches: 0.5 is their median.
        rate: from one round to the next the bound changes by a factor of up to about e^rate.
    """

    quantile: Fraction = 0.5
    rate: Positive = 0.2


@dataclass(frozen=True)
class Clip:
    """The step of the wire that bounds what a client sends.

    Args:
        bounds: C of each leaf, by its name; that of a total which is a single leaf is "total".
        adaptive: how a bound adapts, of leaves whose bound is only the first of several.
        owner_bounds: by leaf, the largest length that the client's owner allows, whatever the study says.
    """

    bounds: Mapping[str, float]
    adaptive: Mapping[str, Adaptive] = field(default_factory=dict)
    owner_bounds: Mapping[str, float] = field(default_factory=dict)

    def apply(self, vector: Tensor, form: Form) -> Tensor:
        """Return a client's vector with every leaf within its bounds, and weights that add up to 1.

        Raises:
            FedtideError: a leaf has no bound or too large a one, or a weight is negative.

        >>> form = Form((Leaf("delta", 2), Leaf("models", 1, slots=2)), people=3)
        >>> vector = torch.tensor([30.0, 40.0, 10.0, 6.0, 3.0, 2.0, 1.0])  # (3, 4) weighs 10; 2 and 2 weigh 3 and 1
        >>> Clip({"delta": 2.5, "models": 9.0}).apply(vector, form)
        tensor([1.5000, 2.0000, 1.0000, 1.5000, 0.7500, 0.5000, 0.2500])
        """
        clipped = vector.clone() if bool(vector.isfinite().all()) else torch.zeros_like(vector)
        bounds, within = self.bounds_of(form), dict[str, bool]()
        for name, table in form.tables(clipped).items():
            values, weights = table[:, :-1], table[:, -1]
            if name.endswith(WITHIN) and name in bounds:  # behind the leaf that it is of
                table[0, 0], table[0, 1] = HALF if within[name.removesuffix(WITHIN)] else -HALF, 1.0
                continue
            weight = float(weights.sum())
            if bool((weights < 0).any()):
                raise FedtideError(
                    f"{name or WHOLE}: found a negative weight, allowed: 0 or more, because the sum is private"
                )
            if weight > 0:
                table *= (INSIDE if len(table) > 1 else 1.0) / weight
            else:
                values.zero_()
            if not bool(table.isfinite().all()):  # the inverse of so small a weight is not
                table.zero_()
            if len(table) == 1:
                weights.fill_(1.0)
            most, length = _largest_length(name, values.numel(), form.people, bounds), float(values.norm())
            within[name] = length <= most
            most = min(most, self.owner_bounds.get(name or WHOLE, math.inf))
            if length > most:
                values *= most / length
        return clipped

    def fault(self, total: Tensor, form: Form, members: int) -> str | None:
        """Return the reason why so many clients cannot have sent the sum (size,); None if they can."""
        bounds = self.bounds_of(form)
        for name, table in form.tables(total).items():
            is_share = name.endswith(WITHIN) and name in bounds
            most, length = members * (HALF if is_share else bound_of(name, bounds)), float(table[:, :-1].norm())
            if length > most * (1 + SLACK):
                return f"{name or WHOLE}: found length {length:g}, allowed: at most {most:g}"
            weight = float(table[:, -1].sum())
            if len(table) == 1 and weight != members:
                return f"{name or WHOLE}: found weight {weight:g}, allowed: {members}, one of each client"
            if weight > members * (1 + len(table) * ROUNDED):
                return f"{name or WHOLE}: found weights {weight:g} in all, allowed: at most {members}"
        return None

    def bounds_of(self, form: Form) -> dict[str, float]:
        """Return the bounds of all leaves of a form, which says those that adapt."""
        adapted = {
            leaf.name: leaf.bound for leaf in form.leaves if leaf.bound and (leaf.name or WHOLE) in self.adaptive
        }
        current = {name or WHOLE: bound for name, bound in adapted.items()}
        return {**self.bounds, **current, **{f"{name}{WITHIN}": 2 * HALF for name in adapted}}

    def largest_cut(self, name: str, number: int) -> float:
        """Return the largest length to which a leaf can be cut in a round."""
        return min(self.largest_bound(name, number), self.owner_bounds.get(name, math.inf))

    def largest_bound(self, name: str, number: int) -> float:
        """Return the largest bound that a leaf can have in a round.

        >>> round(Clip({"delta": 2.0}, {"delta": Adaptive(0.5, math.log(4))}).largest_bound("delta", 3), 6)
        16.0
        """
        bound, how = bound_of(name, self.bounds), self.adaptive.get(name)
        return bound if how is None else bound * math.exp(min(how.rate * how.quantile * number, 700))


def with_bounds(form: Form, bounds: Mapping[str, float]) -> Form:
    """Return a form that says some bounds, and asks of each whether a client was within."""
    leaves = tuple(replace(leaf, bound=bounds.get(leaf.name or WHOLE)) for leaf in form.leaves)
    return replace(
        form, leaves=leaves + tuple(Leaf(leaf.name + WITHIN, 1) for leaf in leaves if leaf.bound is not None)
    )


def check_form(form: Form, bounds: Mapping[str, float]) -> None:
    """Raise unless each leaf of a form has a bound that will do."""
    if missing := [leaf.name or WHOLE for leaf in form.leaves if (leaf.name or WHOLE) not in bounds]:
        raise _without(", ".join(f"'{name}'" for name in missing), bounds)
    for leaf in form.leaves:
        _largest_length(leaf.name, leaf.slots * leaf.size, form.people, bounds)


def _largest_length(name: str, numbers: int, people: int, bounds: Mapping[str, float]) -> float:
    """Return how long the values of a leaf may be: its bound, less what fixed point rounds."""
    bound = bound_of(name, bounds)
    key = f"wire.privacy.clip.{name or WHOLE}"
    if bound * people >= ROOM:
        raise refused(key, bound, f"below {ROOM / people:.3g}, the room of each in a sum of {people}")
    most = bound - ROUNDED * math.sqrt(numbers)
    if most <= 0:
        raise refused(key, bound, "more than fixed point rounds off")
    return most


def adapted(bound: float, share: float, quantile: float, rate: float) -> float:
    """Return the next bound: C <- C * exp(-rate * (share - quantile)), Andrew et al. 2021, section 2.

    Noise can put the share below 0 or above 1; it counts as that then.

    Args:
        bound: C.
        share: share of the clients that were within it, with its noise.
        quantile: of the lengths, which the bound approaches.
        rate: how fast.

    >>> adapted(2.0, share=0.5, quantile=0.5, rate=0.2), adapted(1.0, share=1.0, quantile=0.0, rate=math.log(2))
    (2.0, 0.5)
    """
    return bound * math.exp(-rate * (min(max(share, 0.0), 1.0) - quantile))


WHOLE = "total"
"""Name, among bounds, of a total that is a single leaf."""


def bound_of(name: str, bounds: Mapping[str, float]) -> float:
    """Return the bound of a leaf.

    Raises:
        FedtideError: it has none.
    """
    key = name or WHOLE
    if key not in bounds:
        raise _without(f"'{key}'", bounds)
    return bounds[key]


def _without(missing: str, bounds: Mapping[str, float]) -> FedtideError:
    names = ", ".join(bounds)
    return FedtideError(f"wire.privacy.clip: no bound of {missing}, which clients send too; there are: {names}")


def check_private(clip: Clip, algorithm: Algorithm, buffers: bool, where: str) -> None:
    """Raise if sums with noise would not make a run private, or if the method would not be itself.

    Args:
        clip: the bounds, of `wire.privacy.clip`.
        buffers: whether its model carries running statistics or frozen parameters.
        where: of the method, for messages.
    """
    seen = ", ".join(algorithm.traits.reveals)
    if why := algorithm.traits.unprivate or (f"it reveals of each client: {seen}" if seen else ""):
        raise refused(
            "wire.privacy", Words("a table"), "a method, with a cohort, that shows noised sums alone", f"{where}: {why}"
        )
    for name, longest in algorithm.traits.kept_as_sent.items():
        why = f"clients keep what they send as '{name}', and would keep what wire.privacy.clip cuts off"
        if name in clip.adaptive:
            raise refused("wire.privacy.adapt", name, "values that no client keeps", f"{where}: {why}")
        if longest > clip.bounds.get(name, math.inf):
            bound = None if math.isinf(longest) else longest
            raise refused(f"{where}.max_{name}_norm", bound, f"at most {clip.bounds[name]:g}", why)
    for name, longest in algorithm.traits.whole.items():
        why = "a value that is cut off would be read as another size"
        if name in clip.adaptive:
            raise refused("wire.privacy.adapt", name, "no such value", f"{where}: {why}")
        if longest > clip.bounds.get(name, longest):
            raise refused(f"wire.privacy.clip.{name}", clip.bounds[name], f"{longest:g} or more", f"{where}: {why}")
    if buffers:
        why = "noise would change them, and they would take of the bound"
        carried = "running statistics or frozen parameters"
        raise refused("model", carried, "a model without, such as with group norm", why)
