"""Shifts that are known: each is found, and nothing else."""

from __future__ import annotations

import tomllib

import pytest

from fedtide.goals.planted import expected, planted, words
from fedtide.inspection.findings import found_in
from fedtide.runs.request import recipe

SEEDS = 10
WORLDS = tomllib.loads(recipe("inspect-planted").read_text(encoding="utf-8"))["goal"]["worlds"]


def check(name: str, seed: int) -> None:
    must, may = expected(name)
    seen = words(found_in(planted(name, seed)))
    assert must <= seen <= may, f"{name}, seed {seed}: {sorted(seen)}"


@pytest.mark.parametrize(("seed", "name"), list(enumerate(WORLDS[:9])))
def test_a_planted_shift_is_found_and_nothing_else(seed, name):
    check(name, seed)


@pytest.mark.thorough
@pytest.mark.parametrize("name", WORLDS)
def test_planted_shifts_and_mixtures_over_ten_seeds(name):
    for seed in range(SEEDS):
        check(name, seed)
