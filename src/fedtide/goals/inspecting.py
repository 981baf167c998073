"""Whether `fedtide inspect` finds what was planted, and nothing else: one shift or two in tables, over seeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from scipy.stats import binomtest

from fedtide.core.errors import nearest, refused
from fedtide.fields.strict import Strict
from fedtide.fields.types import Count, Distinct
from fedtide.goals.planted import FOUND, expected, planted, words
from fedtide.inspection.findings import QUESTIONS, found_in
from fedtide.report.tables import Table

ALL = {*QUESTIONS, "mix: others", "mix: same"} - {"mix"}
"""Whatever may be found."""
ALARMS = 0.05
"""Share of what is not there that may be found."""
WHOLE = 0.9
"""Share of the seeds in which all of a world has to be found, and nothing else."""


class Inspect(Strict):
    """Shifts that are planted in tables, each of which an inspection has to find.

    Args:
        worlds: what is planted in each, one shift or several joined by " + " (`fedtide.goals.planted.FOUND`).
        rows: of each table.
    """

    worlds: Annotated[tuple[str, ...], Distinct]
    rows: Count = 2400
    kind: Literal["inspect"] = "inspect"

    def check(self, where: str, seeds: Sequence[int]) -> None:
        """Raise for a shift that cannot be planted."""
        for shift in (shift for world in self.worlds for shift in world.split(" + ")):
            if shift not in FOUND:
                raise refused(f"{where}: goal.worlds", shift, nearest(shift, list(FOUND)).removeprefix("allowed: "))

    def prepare(self, root: Path, play: Callable[..., Any]) -> bool:
        """Make what is needed before anything is tried: nothing."""
        return True

    def found(self, root: Path, world: str, seed: int, before: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        """Inspect one table; what was missed, and what was found beside it."""
        must, may = expected(world)
        seen = words(found_in(planted(world, seed, self.rows)))
        return {"missed": sorted(must - seen), "beside": sorted(seen - may)}

    def results(self, lines: Sequence[dict[str, Any]]) -> Table:
        """Tell of each world in how many seeds all was found and nothing else, what was missed and found beside it."""
        rows = []
        for world in self.worlds:
            here = [line for line in lines if line["world"] == world]
            whole = sum(not (line["missed"] or line["beside"]) for line in here)
            counts = [Counter(what for line in here for what in line[key]) for key in ("missed", "beside")]
            said = [", ".join(f"{what} ({count})" for what, count in each.items()) for each in counts]
            rows.append([world, f"{whole} of {len(here)}", *said])
        return Table(["planted", "all of it, and nothing else", "missed", "beside it"], rows)

    def claims(self, lines: Sequence[dict[str, Any]]) -> Table:
        """Judge what is claimed of all worlds, with exact (Clopper-Pearson) 95 % intervals of shares."""
        known = {world: expected(world) for world in self.worlds}
        there = sum(len(known[line["world"]][0]) for line in lines)
        missed, beside = (sum(len(line[key]) for line in lines) for key in ("missed", "beside"))
        empty = sum(len(ALL - known[line["world"]][1]) for line in lines)
        shares = []
        for world in self.worlds:
            right = [not (line["missed"] or line["beside"]) for line in lines if line["world"] == world]
            shares.append(sum(right) / len(right))
        upper = binomtest(beside, empty).proportion_ci().high
        return Table(
            ["claim", "found", "verdict"],
            [
                [
                    "What was planted is found, and nothing else, in nine of ten seeds of every world",
                    f"{100 * min(shares):.0f} % in the worst world; {there - missed} of {there} findings in all",
                    verdict(min(shares) >= WHOLE),
                ],
                [
                    "False alarms are below 5 %",
                    f"{beside} of {empty}, the interval ends at {100 * upper:.1f} %",
                    verdict(upper < ALARMS),
                ],
            ],
        )


def verdict(holds: bool) -> str:
    """Say whether a claim holds."""
    return "holds" if holds else "does not hold"
