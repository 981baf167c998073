"""Shifts that are known: each is found, and nothing else."""

import pytest

from fedtide.inspection.findings import inspect_table
from helpers.planted import WORLDS, expected, planted, positive

SEEDS = 10


def check(name: str, seed: int) -> None:
    must, may = expected(name)
    answers = positive(inspect_table(planted(name, seed)))
    assert must <= answers <= may, f"{name}, seed {seed}: {sorted(answers)}"


@pytest.mark.parametrize(("seed", "name"), list(enumerate(WORLDS[:9])))
def test_a_planted_shift_is_found_and_nothing_else(seed, name):
    check(name, seed)


@pytest.mark.thorough
@pytest.mark.parametrize("name", WORLDS)
def test_planted_shifts_and_mixtures_over_ten_seeds(name):
    for seed in range(SEEDS):
        check(name, seed)
