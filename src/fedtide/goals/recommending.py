"""Whether `fedtide recommend` names the best method, or one near it, with a part of what it costs to try them all.

A study is played whole first: what is best in each of its worlds is known then, on test rows. Tournaments of other
seeds have a share of the seconds which that takes. They are told from first rounds of every method, before the first
tournament in a world: the machine may have had other work while the study was played.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from fedtide.config import Experiment, Point, points, read
from fedtide.core.errors import refused
from fedtide.core.memory import MemoryStore
from fedtide.fields.strict import Strict
from fedtide.fields.types import Positive
from fedtide.goals.inspecting import verdict
from fedtide.report.summary import read_study
from fedtide.report.tables import Table
from fedtide.runs.request import Output, Request, Scale, recipe
from fedtide.runs.runner import evaluated, judge_of
from fedtide.tuning import tournament
from fedtide.tuning.entering import check_judged

KNOWN = "known"
"""The folder of the study."""
WARM_UP = 2
"""Rounds of a method that are not timed with the others."""
RIGHT = 0.9
"""Share of the cases in which what is named has to be the best, or near it."""


class Recommend(Strict):
    """Worlds of a study, in each of which a tournament has to name the best method or one near it.

    Args:
        study: a recipe, with a sweep of worlds.
        scale: of the recipe.
        share: of what the study costs in a world, which a tournament may spend.
        near: how far from the best a method may be, in the study's score.
    """

    study: str
    scale: Scale = "cpu"
    share: Positive = 0.1
    near: Positive = 0.01
    kind: Literal["recommend"] = "recommend"

    @cached_property
    def _points(self) -> list[Point]:
        return points(read(recipe(self.study), scale=self.scale), self.study)

    @property
    def worlds(self) -> tuple[str, ...]:
        """Names of the study's points."""
        return tuple(point.name for point in self._points)

    def check(self, where: str, seeds: Sequence[int]) -> None:
        """Raise where no tournament can be played in a world of the study, or with a seed that the study plays."""
        for point in self._points:
            check_judged(point.experiment, f"{where}: goal.study: {self.study}")
        most = max(seed for point in self._points for seed in point.experiment.seeds)
        if min(seeds) <= most:
            raise refused(f"{where}: seeds", min(seeds), f"more than {most}, the last one that {self.study} plays")

    def prepare(self, root: Path, play: Callable[[str, Scale, Path], Any]) -> bool:
        """Play the study; False if a person stopped it."""
        return play(self.study, self.scale, root / KNOWN) is not None

    def found(self, root: Path, world: str, seed: int, before: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        """Play a tournament in a world, and compare what it names with what is known; None if a person stopped it."""
        from fedtide import api

        point = next(point for point in self._points if point.name == world)
        truth = next(each for each in read_study(root / KNOWN).summaries if each.point == world)
        # Of a method that failed nothing is right.
        known = {method.name: method.measures[method.score].mean or 0.0 for method in truth.methods}
        cost = next((line["cost"] for line in before if line["world"] == world), None) or cost_of(point.experiment)
        folder = root / "tournament"
        shutil.rmtree(folder, ignore_errors=True)  # of one that was killed
        # A tournament's seeds begin after the largest of its study's.
        experiment = point.experiment.model_copy(update={"seeds": (seed - 1,), "claim": ()})
        begun = api.begin_recommendation(experiment, Request(folder, workers=1), f"{self.share * cost:.3f}s")
        if api.recommendation_shown(begun, 1, Output(quiet=True)) is None:
            return None
        made = tournament.read_tournament(begun)
        shutil.rmtree(folder)
        best = max(known, key=known.__getitem__)
        named = made.survivors[0]
        return {
            "named": named, "best": best, "behind": known[best] - known[named], "survivors": made.survivors,
            "entered": len(made.entered), "candidates": len(made.candidates), "cost": cost, "share": made.spent / cost,
        }  # fmt: skip

    def results(self, lines: Sequence[dict[str, Any]]) -> Table:
        """Tell of each world what was named, how far behind the best it is, and what that cost."""
        rows = []
        for world in self.worlds:
            each = [line for line in lines if line["world"] == world]
            named = Counter(line["named"] for line in each).most_common()
            behind = [100 * line["behind"] for line in each]
            rows.append([
                world, ", ".join(f"{name} {count}" for name, count in named), each[0]["best"],
                f"{fmean(behind):.1f}, {max(behind):.1f}", f"{self._right(each)} of {len(each)}",
                f"{fmean(line['entered'] for line in each):.0f} of {each[0]['candidates']}",
                f"{100 * fmean(line['share'] for line in each):.0f} %",
            ])  # fmt: skip
        header = ["world", "named, times", "best", "points behind, mean, most", "near", "entered", "of the full cost"]
        return Table(header, rows)

    def claims(self, lines: Sequence[dict[str, Any]]) -> Table:
        """Judge what is claimed of all worlds and seeds."""
        right, shares = self._right(lines), [line["share"] for line in lines]
        near = "a point" if self.near == 0.01 else f"{100 * self.near:g} points"
        spent = f"{100 * fmean(shares):.0f} % in the mean, at most {100 * max(shares):.0f} %"
        return Table(
            ["claim", "found", "verdict"],
            [
                [
                    f"Names the best method, or one within {near}, in nine of ten cases",
                    f"{right} of {len(lines)}",
                    verdict(right >= RIGHT * len(lines)),
                ],
                [f"With {100 * self.share:g} % of the full cost", spent, verdict(max(shares) < 1.05 * self.share)],
            ],
        )

    def _right(self, lines: Sequence[dict[str, Any]]) -> int:
        return sum(line["behind"] <= self.near for line in lines)


def cost_of(experiment: Experiment) -> float:
    """Return the seconds that all methods with all seeds take in one process, from the first rounds of each method."""
    seconds = 0.0
    for method in experiment.method:
        seed, rounds = experiment.seeds[0], experiment.rounds
        began = time.perf_counter()
        judge, first = judge_of(experiment, method, seed, MemoryStore(None)), began
        warm = min(WARM_UP, rounds - 1)
        timed = min(rounds - warm, experiment.eval_every)  # so many that it is judged once
        for step, scored in evaluated(judge, rounds=rounds, seed=seed, every=experiment.eval_every):
            list(scored or ())
            done = step.moment.round + 1
            first = time.perf_counter() if done == warm else first
            if done >= warm + timed:
                break
        each = (time.perf_counter() - first) / timed
        seconds += len(experiment.seeds) * (first - began + (rounds - warm) * each)
    return seconds
