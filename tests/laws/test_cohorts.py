"""Every algorithm takes every kind of cohort."""

from typing import get_args

import pytest

from fedtide.algorithms import REGISTRY
from fedtide.cohorts import Cohort
from fedtide.core import codec
from helpers.toys import ALIKE, VARIANTS, played, toy

KINDS = [member.kind for member in get_args(get_args(Cohort)[0]) if member.kind != "python"]


def param(name: str) -> object:
    """An algorithm; those that are much like another choose their clients where the other does."""
    return pytest.param(name, marks=[pytest.mark.thorough] if name in ALIKE else [])


NAMES = [name for name, entry in REGISTRY.items() if entry.family != "baseline"]


@pytest.mark.parametrize("name", [param(name) for name in NAMES])
def test_every_kind_plays_and_what_the_server_sees_is_declared(name, thorough):
    """Those that ask or see more with each algorithm, and every other one of the others; with `--thorough` all."""
    algorithm, options = VARIANTS.get(name, (name, {}))
    for place, kind in enumerate(KINDS, start=NAMES.index(name)):
        if place % 2 and kind not in ("oort", "power-of-choice") and not thorough:
            continue
        cohort = {"kind": kind} if kind == "everyone" else {"kind": kind, "clients_per_round": 3}
        run = played(toy(algorithm, {**options, "cohort": cohort}), rounds=2)
        trained = [query.ask for query in run.fleet.queries if query.ask.question == "train"]
        assert trained, kind
        if kind not in ("everyone", "poisson"):
            assert all(len(asked.clients) <= 3 for asked in trained), kind
        made = run.host.algorithm
        assert {"utility"} <= set(made.traits.reveals) if kind == "oort" else "utility" not in made.traits.reveals
        assert ("loss" in made.works) == (kind == "power-of-choice")
        codec.to_bytes(run.state)
