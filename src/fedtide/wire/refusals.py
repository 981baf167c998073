"""What masks cannot hide, said before anything starts."""

from __future__ import annotations

import math

from fedtide.core.base import Algorithm
from fedtide.core.errors import refused
from fedtide.core.reveals import SHOWN
from fedtide.wire.clip import Clip
from fedtide.wire.steps import Wire


def why_not(algorithm: Algorithm) -> str:
    """Return why masks would hide nothing of an algorithm; "" where they do."""
    seen = [SHOWN[name].words for name in algorithm.traits.reveals if name in SHOWN and SHOWN[name].kind == "update"]
    return algorithm.traits.unmaskable or (f"its server sees of each client {seen[0]}" if seen else "")


def check(wire: Wire, algorithm: Algorithm, cohort: int, where: str) -> None:
    """Raise unless sums of an algorithm can pass over a wire.

    Args:
        wire: how sums pass.
        algorithm: the algorithm.
        cohort: how many clients it asks in a round.
        where: of the method, for messages.

    Raises:
        FedtideError: masks would hide nothing, or no sum would ever be opened.
    """
    if why := wire.secure and why_not(algorithm):
        raise refused("wire.secure", True, "a method whose server sees sums alone", f"{where}: {why}")
    if algorithm.works and cohort < wire.fewest:
        allowed = f"at most {cohort}, the clients that {where} asks in a round"
        raise refused("wire.fewest", wire.fewest, allowed, "no sum would ever be opened")


def check_private(clip: Clip, algorithm: Algorithm, buffers: bool, where: str) -> None:
    """Raise where sums with noise would not make a run private, or where the method would not be itself.

    Args:
        clip: the bounds, of `wire.privacy.clip`.
        algorithm: the algorithm.
        buffers: whether its model carries running statistics or frozen parameters.
        where: of the method, for messages.
    """
    seen = ", ".join(algorithm.traits.reveals)
    if why := algorithm.traits.unprivate or (f"it reveals of each client: {seen}" if seen else ""):
        raise refused(
            "wire.privacy", "a table", "a method, with a cohort, that shows noised sums alone", f"{where}: {why}"
        )
    for name, longest in algorithm.traits.kept_as_sent.items():
        why = f"clients keep what they send as '{name}', and would keep what wire.privacy.clip cuts off"
        if name in clip.adaptive:
            raise refused("wire.privacy.adapt", name, "values that no client keeps", f"{where}: {why}")
        if longest > clip.bounds.get(name, math.inf):
            found = None if math.isinf(longest) else longest
            raise refused(f"{where}.max_{name}_norm", found, f"at most {clip.bounds[name]:g}", why)
    if buffers:
        why = "noise would change them, and they would take of the bound"
        carried = "running statistics or frozen parameters"
        raise refused("model", carried, "a model without, such as with group norm", why)
