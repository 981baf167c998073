"""Shifts that are known: each is found, and nothing else."""

from __future__ import annotations

import pytest

from fedtide.inspection.findings import Findings, found_in
from helpers.planted import NINE, PAIRS, expected, planted

SEEDS = 10


def words(found: Findings) -> set[str]:
    """What was found, the mix of the hour with its reasons."""
    reasons = {f"mix: {why}" for why in found["mix"].why}
    return reasons | {answer.question for answer in found if answer.found and answer.question != "mix"}


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
