"""Shifts that are known: each is found, and nothing else."""

from __future__ import annotations

import pytest

from fedtide.inspection.findings import found_in
from helpers.planted import NINE, PAIRS, expected, planted, words

SEEDS = 10


def check(name: str, seed: int) -> None:
    must, may = expected(name)
    seen = words(found_in(planted(name, seed)))
    assert must <= seen <= may, f"{name}, seed {seed}: {sorted(seen)}"


@pytest.mark.parametrize(("seed", "name"), list(enumerate(NINE)))
def test_a_planted_shift_is_found_and_nothing_else(seed, name):
    check(name, seed)


@pytest.mark.thorough
@pytest.mark.parametrize("name", [*NINE, *PAIRS])
def test_planted_shifts_and_mixtures_over_ten_seeds(name):
    for seed in range(SEEDS):
        check(name, seed)
