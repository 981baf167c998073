"""Which laws run over which algorithms.

Laws of `fedtide.laws.every` run over every registered algorithm, the variants whose types differ, and a sketch that
stands in for an algorithm to come; those in `BRIEF` over those that are `ALIKE` and all other variants, and with
`--thorough` all over all. A test marked `engine` is a law of fleets and not of algorithms, and runs over six that
differ in all that a fleet sees; so do laws in `FLEETS`. Laws in `TOGETHER` run one by one over those six, and in fewer
plays and rounds over the others.
"""

from collections.abc import Iterator
from functools import partial

import pytest
from _pytest.mark import ParameterSet

from fedtide.algorithms import REGISTRY, Entry
from fedtide.laws import every
from fedtide.laws.every import Law
from helpers import sketches
from helpers.briefly import another_order, carried_on
from helpers.toys import ALIKE, VARIANTS

SKETCHES = {
    "helpers.sketches:fielding": Entry(
        "helpers.sketches:fielding",
        sketches.fielding,
        "",
        "clustered",
        exempt={"newcomers": "centers are also of clients that have said nothing"},
    )
}
ENTRIES = {**REGISTRY, **{name: REGISTRY[base] for name, (base, _) in VARIANTS.items()}, **SKETCHES}

ENGINE = ("fedavg", "scaffold", "ifca safe", "fielding", "fedbuff", "pfedem")
"""Sums; memory; slots and an anchor; several questions and rows; answers of older rounds; something before round 0."""

DIFFERENT = (
    "aem mixture", "fedavg oort", "fedbuff late", "fedtem sample", "fielding combined", "ifca head", "ifca safe",
    "pfedem public", "pfedem shares", "scaffold one wsm",
)  # fmt: skip
"""Variants with types that no registered algorithm has as it is: what they send, keep, reveal or are given."""

MAIN = (*(name for name in REGISTRY if name not in ALIKE), *DIFFERENT, *SKETCHES)

APART = ("scaffold", "fielding")
"""Memory that travels; several questions and rows: other processes take long."""

MASKED = (*ENGINE, "aem", "window", "fedtkm", "fielding-by-sums")
"""One of each kind of sums: plain, in slots, both; of one question, of several, of many. Masks see vectors alone."""

TOGETHER = (
    every.same_seed, every.cohort_order, every.global_randomness, every.declared_reveals, every.block_order,
    every.row_order, every.pure_works, every.whole_update, every.round_again, every.dropouts, every.degenerate,
    every.no_rows, every.clients_join, every.fixed_point,
)  # fmt: skip
"""Laws that `IN_FEW` holds in fewer plays: what differs from the reference, or is not finite, does so there too."""

CARRIED_ON = Law("resume", carried_on)
"""Of one of the six, laws of fleets say it."""

IN_FEW = (
    Law("determinism", another_order),
    Law("dropouts", partial(every.dropouts, seeds=1)),
    CARRIED_ON,
    Law("degenerate", partial(every.degenerate, plays=(every.ODD[:-1], every.ODD[-1:]))),
    Law("degenerate", partial(every.no_rows, rounds=2)),
    Law("join", partial(every.clients_join, rounds=4)),  # two before they join
    Law("fixed point", partial(every.fixed_point, rounds=3)),
)

BRIEF = (
    Law("play", every.plays),
    Law("dropouts", partial(every.dropouts, seeds=1)),
    Law("degenerate", partial(every.degenerate, plays=(every.ODD[:-1],))),
    CARRIED_ON,
)
"""Laws of a variant that is much like others."""

FLEETS = (
    every.workers, every.deployed, every.deployed_again, every.masked_again, every.stops, every.wire, every.join_as_new,
)  # fmt: skip
"""Laws of what plays an algorithm, where its state, its memory and its questions are those that other laws look at."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "law" in metafunc.fixturenames:
        metafunc.parametrize(("law", "name"), list(laws(thorough=metafunc.config.getoption("--thorough"))))
    elif metafunc.definition.get_closest_marker("engine"):
        own = [mark for mark in metafunc.definition.iter_markers("parametrize") if mark.args[0] == "name"]
        processes = [fixture for fixture in ("actors", "pool") if fixture in metafunc.fixturenames]
        if not own:
            names = APART if processes and not metafunc.config.getoption("--thorough") else ENGINE
            marked = [pytest.param(name, marks=pytest.mark.xdist_group((processes or [name])[0])) for name in names]
            metafunc.parametrize("name", marked)


def laws(*, thorough: bool) -> Iterator[ParameterSet]:
    """Each algorithm with each law that runs over it, one after the other as they share what was played; skipped where
    the registry declares an exemption."""
    main = [*(law for law in every.LAWS if law.check not in (*FLEETS, *TOGETHER)), *IN_FEW]
    for name in ENTRIES:
        for law in every.LAWS if thorough or name in ENGINE else main if name in MAIN else BRIEF:
            if law.check is every.masked and not (thorough or name in MASKED):
                continue
            if law.check is another_order and "update" in ENTRIES[name].exempt:
                law = Law(law.name, partial(another_order, updates=False))
            exempt = ENTRIES[name].exempt.get(law.name)
            skip = [pytest.mark.skip(reason=f"{name} is exempt from {law.name}: {exempt}")] if exempt else []
            check = getattr(law.check, "func", law.check).__name__
            marks = [pytest.mark.xdist_group("pool" if law.check is every.workers else name), *skip]
            yield pytest.param(law, name, marks=marks, id=f"{name}-{law.name}-{check}")
