"""Which laws run over which algorithms.

A law that asks for `name` or `lawful` runs over every registered algorithm, the variants whose types differ, and the
sketch that stands in for one to come; marked `every`, over all other variants too. Marked `engine` it is a law of
fleets and not of algorithms, and runs over six that differ in all that a fleet sees.
"""

from __future__ import annotations

import pytest

from fedtide.algorithms import REGISTRY, Entry
from helpers import sketches
from helpers.toys import VARIANTS

SKETCHES = {"helpers.sketches:fielding": Entry(sketches.fielding, "")}
ENTRIES = {**REGISTRY, **{name: REGISTRY[base] for name, (base, _) in VARIANTS.items()}, **SKETCHES}

ENGINE = ("fedavg", "scaffold", "ifca hidden", "fielding", "fedbuff", "pfedem")
"""Sums; memory; hidden slots; several questions and rows; answers of older rounds; something before round 0."""

DIFFERENT = (
    "aem mixture", "fedavg oort", "fedbuff late", "feddrift window", "fedtem sample", "fedtem wsm", "fielding combined",
    "ifca head", "ifca hidden", "pfedem public", "pfedem shares", "scaffold one wsm",
)  # fmt: skip
"""Variants with types that no registered algorithm has as it is: what they send, keep, reveal or are given."""

MAIN = (*REGISTRY, *DIFFERENT, *SKETCHES)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    own = [mark for mark in metafunc.definition.iter_markers("parametrize") if mark.args[0] == "name"]
    if "name" not in metafunc.fixturenames or own:
        return
    marked = metafunc.definition.get_closest_marker
    names = ENGINE if marked("engine") else ENTRIES if marked("every") else MAIN
    of_ray = "actors" in metafunc.fixturenames
    together = [pytest.mark.xdist_group("ray" if of_ray else name) for name in names]
    metafunc.parametrize("name", [pytest.param(name, marks=mark) for name, mark in zip(names, together, strict=True)])


@pytest.fixture
def cases(name: str) -> int | None:
    """How many cases of a law are tried: all, or one for a variant that is much like others."""
    return None if name in MAIN else 1


@pytest.fixture
def lawful(request: pytest.FixtureRequest, name: str) -> str:
    """The algorithm's name; skips a law that its registry line declares it exempt from."""
    law = request.node.originalname.removeprefix("test_").partition("__")[0]
    reason = ENTRIES[name].exempt.get(law)
    if reason:
        pytest.skip(f"{name} is exempt from {law}: {reason}")
    return name
