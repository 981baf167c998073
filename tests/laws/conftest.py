"""Which laws run over which algorithms.

Laws of `fedtide.laws.every` run over every registered algorithm, the variants whose types differ, and a sketch that
stands in for an algorithm to come; those in `EVERY` over all other variants too. A test marked `engine` is a law of
fleets and not of algorithms, and runs over six that differ in all that a fleet sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
from _pytest.mark import ParameterSet

from fedtide.algorithms import REGISTRY, Entry
from fedtide.laws import every
from helpers import sketches
from helpers.toys import VARIANTS

SKETCHES = {"helpers.sketches:fielding": Entry(sketches.fielding, "", "clustered")}
ENTRIES = {**REGISTRY, **{name: REGISTRY[base] for name, (base, _) in VARIANTS.items()}, **SKETCHES}

ENGINE = ("fedavg", "scaffold", "ifca hidden", "fielding", "fedbuff", "pfedem")
"""Sums; memory; hidden slots; several questions and rows; answers of older rounds; something before round 0."""

DIFFERENT = (
    "aem mixture", "fedavg oort", "fedbuff late", "feddrift window", "fedtem sample", "fedtem wsm", "fielding combined",
    "ifca head", "ifca hidden", "pfedem public", "pfedem shares", "scaffold one wsm",
)  # fmt: skip
"""Variants with types that no registered algorithm has as it is: what they send, keep, reveal or are given."""

MAIN = (*REGISTRY, *DIFFERENT, *SKETCHES)


EVERY = (every.same_seed, every.pure_works, every.dropouts, every.degenerate, every.stops, every.wire)
"""Laws that run over all variants."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "law" in metafunc.fixturenames:
        metafunc.parametrize(("law", "name"), list(laws()))
    elif metafunc.definition.get_closest_marker("engine"):
        own = [mark for mark in metafunc.definition.iter_markers("parametrize") if mark.args[0] == "name"]
        group = "ray" if "actors" in metafunc.fixturenames else None
        if not own:
            marked = [pytest.param(name, marks=pytest.mark.xdist_group(group or name)) for name in ENGINE]
            metafunc.parametrize("name", marked)


def laws() -> Iterator[ParameterSet]:
    """Each law with each algorithm that it runs over; skipped where the registry declares an exemption."""
    for law in every.LAWS:
        for name in ENTRIES if law.check in EVERY else MAIN:
            exempt = ENTRIES[name].exempt.get(law.name)
            skip = [pytest.mark.skip(reason=f"{name} is exempt from {law.name}: {exempt}")] if exempt else []
            marks = [pytest.mark.xdist_group(name), *skip]
            # A variant that is much like others is tried with one kind of odd rows.
            short = law.check is every.degenerate and name not in MAIN
            given = replace(law, check=partial(every.degenerate, odd=every.ODD[:1])) if short else law
            yield pytest.param(given, name, marks=marks, id=f"{law.name}-{law.check.__name__}-{name}")
