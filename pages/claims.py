"""Claims over all their seeds, seeds that would decide an open one, and why another does not hold (pages/why.toml)."""

import math
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

from scipy.special import stdtrit

from fedtide.config import Claim
from fedtide.evaluate.metrics import CONFIDENCE, Measure
from fedtide.report.claims import format_claim
from fedtide.report.formats import FORMATS
from fedtide.report.summary import Judged

HERE = Path(__file__).parent
NUMBER = re.compile(r"([+-]?[\d.]+) ± ([\d.]+) ?(points|%|)(?:$|[ ;])")
"""A mean and its standard error, with their unit."""
MOST = 100
"""More seeds than anybody would play."""
SAME = "the same run"
OPEN = "not seen", "too few seeds"
"""Verdicts that more seeds may change."""


def join_seeds(result: dict[str, Any], others: list[dict[str, Any]], claims: dict[str, Claim]) -> dict[str, Any]:
    """Judge the claims of a kept result anew, by its seeds and those of other plays of the recipe together.

    Each table of claims gets "pairs": for each row those of the first seeds and of the first of the others, None if
    that one did not judge it. It gets "joined", too: whether a row is that of all seeds. If some seed never arrives at
    a target, methods are one run, or numbers were not kept, a row is that of the first seeds.
    """
    by_point = [{point["point"]: point["claims"] for point in other["points"]} for other in others]
    points = [
        {**point, "claims": _join(point["claims"], [tables.get(point["point"]) for tables in by_point], claims)}
        for point in result["points"]
    ]
    return {**result, "points": points, "claims": _join(result["claims"], [o["claims"] for o in others], claims)}


def _join(table: dict[str, Any], others: list[dict[str, Any] | None], claims: dict[str, Claim]) -> dict[str, Any]:
    if None in others or not table["rows"]:
        return table
    theirs = [_rows_and_values(other) for other in others if other is not None]
    rows, pairs, joined = [], [], []
    for row, values in zip(table["rows"], table.get("values", [[]] * len(table["rows"])), strict=True):
        played = [rows_of[row[0]] for rows_of in theirs if row[0] in rows_of]
        first_only = (
            len(played) < len(theirs)
            or row[0] not in claims
            or any("arrive" in its_row[1] or SAME in (row[-1], its_row[-1]) for its_row, _ in played)
        )
        both = None if first_only else judge_claim(claims[row[0]], row, values, sum((its for _, its in played), values))
        rows.append(both or row)
        pairs.append((row, theirs[0][row[0]][0]) if row[0] in theirs[0] else None)
        joined.append(both is not None)
    return {**table, "rows": rows, "pairs": pairs, "joined": joined}


def _rows_and_values(table: dict[str, Any]) -> dict[str, tuple[list[str], list[float]]]:
    return {row[0]: (row, values) for row, values in zip(table["rows"], table["values"], strict=True)}


def judge_claim(claim: Claim, row: list[str], before: list[float], values: list[float]) -> list[str] | None:
    """Return the row of a claim with these values; None if those from before do not give the row that it has.

    >>> claim = Claim(text="A is better", method="A", versus="B", measure="accuracy")
    >>> row = ["A is better", "+2.0 ± 1.0 points", "too few seeds"]
    >>> judge_claim(claim, row, [0.01, 0.03], [0.01, 0.03, 0.02, 0.02])
    ['A is better', '+2.0 ± 0.4 points', 'holds']
    """
    after, old = Measure.of(values), Measure.of(before)
    forms = (
        Judged(row[0], claim.measured, old, "", paired, unit) for paired in (True, False) for unit in (None, *FORMATS)
    )
    form = next((judged for judged in forms if format_claim(judged) == row[1]), None)
    if form is None or after.mean is None:
        return None
    clarity = after.clarity(claim.gap(after.mean))
    sides = {"clear": "holds" if claim.gap(after.mean) > 0 else "does not hold", "unclear": "not seen"}
    return [row[0], format_claim(replace(form, number=after)), sides.get(clarity, clarity)]


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
    return f"{verdict} ({f'about {needed}' if needed <= MOST else f'more than {MOST}'} seeds would tell)"


def claims_of(recipe: dict[str, Any], result: dict[str, Any]) -> dict[str, Claim]:
    """Return the claims of a recipe's file by their text; those without a measure are about the score of its result."""
    score = {"measure": result.get("score", "accuracy")}
    return {claim["text"]: Claim(**score | claim) for claim in recipe.get("claim", [])}


def reasons(recipe: str) -> dict[str, str]:
    """Return why claims of a recipe do not hold, by their text."""
    sentences: dict[str, dict[str, str]] = tomllib.loads((HERE / "why.toml").read_text(encoding="utf-8"))
    return sentences.get(recipe, {})
