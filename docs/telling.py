"""Seeds that would decide an open claim, and why another one does not hold (docs/why.toml)."""

from __future__ import annotations

import math
import re
import tomllib
from pathlib import Path
from typing import Any

from scipy.special import stdtrit

from fedtide.config import Claim
from fedtide.evaluate.metrics import CONFIDENCE

DOCS = Path(__file__).parent
NUMBER = re.compile(r"([+-]?[\d.]+) ± ([\d.]+) ?(points|%|)(?:$|[ ;])")
"""A mean and its standard error, with their unit."""
MOST = 100
"""More seeds than anybody would play."""
OPEN = "not seen", "too few seeds"
"""Verdicts that more seeds may change."""


def seeds_that_tell(claim: Claim, number: str, seeds: int) -> int | None:
    """Compute how many seeds of this mean and spread would decide an open claim, as the report does; None if unknown.

    The 95 % confidence interval by Student's t has to leave out the bound. Numbers are rounded, so this is about right.

    >>> claim = Claim(text="A is better", method="A", versus="B")
    >>> seeds_that_tell(claim, "+1.2 ± 0.6 points", 5), seeds_that_tell(claim, "+0.1 ± 0.6 points", 5)
    (8, 101)
    """
    match = NUMBER.match(number)
    if match is None:
        return None
    scale = 100.0 if match[3] else 1.0
    gap, spread = abs(claim.gap(float(match[1]) / scale)), float(match[2]) / scale * math.sqrt(seeds)
    if not spread:  # rounded away
        return None
    enough = (
        n for n in range(seeds + 1, MOST + 1) if stdtrit(n - 1, (1 + CONFIDENCE) / 2) * spread <= gap * math.sqrt(n)
    )
    return next(enough, MOST + 1)


def verdict_of(row: list[str], claims: dict[str, Claim], seeds: int) -> str:
    """Return the verdict of a claim's row, with the number of seeds that would tell if it is open."""
    verdict = row[-1]
    if verdict not in OPEN or row[0] not in claims:
        return verdict
    needed = seeds_that_tell(claims[row[0]], row[1], seeds)
    if needed is None:
        return verdict
    return f"{verdict} ({needed if needed <= MOST else f'more than {MOST}'} seeds would tell)"


def claims_of(recipe: dict[str, Any]) -> dict[str, Claim]:
    """Return the claims of a recipe's file by their text."""
    return {claim["text"]: Claim(**claim) for claim in recipe.get("claim", [])}


def reasons(recipe: str) -> dict[str, str]:
    """Return why claims of a recipe do not hold, by their text."""
    sentences: dict[str, dict[str, str]] = tomllib.loads((DOCS / "why.toml").read_text(encoding="utf-8"))
    return sentences.get(recipe, {})
