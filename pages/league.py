"""Tables of methods by worlds, from what pages/keep_results.py has kept; `python pages/league.py` draws its pictures.

Ranks are compared by scikit-posthocs, which only the drawing needs.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from scipy.stats import rankdata

from fedtide.algorithms import REGISTRY
from fedtide.config import Method, points, read
from fedtide.config.sweep import Point
from fedtide.evaluate.metrics import Measure
from recipes import RECIPES, as_markdown, command_and_cost, fresh_line, read_recipe, read_result

ROOT = Path(__file__).parents[1]
LEAGUES = ("league-drift", "league-personal")
ONE_MODEL = ("FedAvg", "FedAvg, twice the steps", "FedAvg, three times the steps")
SINGLE = ("FedAvg", "FedProx", "FedAdam")
"""Methods with one model for all, beside which a safe form stands."""
BOUNDS = ("Oracle",)
"""Rows that know the truth: they bound the others, and have no rank."""
SUDDEN = "sudden"
"""The world with one drift."""
FAILED = -1.0
"""Score of a play whose training diverged, in ranks alone."""
PLUS_MINUS = "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}"
"""Of cells, which would else break into two lines."""
INK = "0.25"
"""Color of all methods in a picture, because colors would mean nothing."""
BACK = 0.95
"""A method is back when it has this share of its accuracy before the drift."""


@dataclass(frozen=True)
class League:
    """Kept results of a league: its worlds, methods, and their scores by world and seed."""

    kept: dict[str, Any]

    @property
    def worlds(self) -> list[dict[str, Any]]:
        """Points of the sweep."""
        return list(self.kept["points"])

    @cached_property
    def names(self) -> list[str]:
        """Methods by their mean rank, the best one first; bounds last."""
        return [*sorted(self.ranks, key=self.ranks.__getitem__), *(n for n in BOUNDS if n in self.worlds[0]["values"])]

    @cached_property
    def scores(self) -> np.ndarray:
        """Scores of the ranked methods: (worlds x seeds, methods). A play that failed is the last of its world."""
        ranked = self.ranked
        plays = [(world, seed) for world in self.worlds for seed in world["values"][ranked[0]]]
        return np.array([[world["values"][name].get(seed, FAILED) for name in ranked] for world, seed in plays])

    @property
    def ranked(self) -> list[str]:
        """Methods that have a rank, in the order of the recipe."""
        return [name for name in self.worlds[0]["values"] if name not in BOUNDS]

    @cached_property
    def ranks(self) -> dict[str, float]:
        """Mean rank of each method over all worlds and seeds; 1 is the best."""
        mean = rankdata(-self.scores, axis=1).mean(axis=0)
        return dict(zip(self.ranked, mean.tolist(), strict=True))

    def difference(self, name: str, other: str, world: dict[str, Any]) -> Measure:
        """The difference of two methods over the seeds of a world, in points."""
        of_other = world["values"][other]
        both = [seed for seed in world["values"][name] if seed in of_other]
        return Measure.of([100 * (world["values"][name][seed] - of_other[seed]) for seed in both])

    def is_above(self, name: str, other: str, world: dict[str, Any]) -> bool:
        """Whether a method is above another one in a world: the 95 % interval of their difference is above 0."""
        gap = self.difference(name, other, world)
        return gap.mean is not None and gap.margin is not None and gap.mean > gap.margin


def read_leagues() -> list[League]:
    """The leagues that have results."""
    return [League(result) for recipe in LEAGUES if (result := read_result(recipe))]


def league() -> str:
    """All tables of the page."""
    parts = []
    for results in read_leagues():
        heading = results.kept["recipe"].replace("league-", "").capitalize()
        parts += [f"## {heading}", *section(results)]
    return "\n\n".join(parts)


def beside_one_model(recipe: str) -> str:
    """Points of each method over the best of FedAvg, FedProx and FedAdam in each world, safe forms first and bold."""
    result = read_result(recipe)
    assert result is not None
    results = League(result)
    best = [max(SINGLE, key=world["accuracy"].__getitem__) for world in results.worlds]
    first = [f"{name} {100 * world['accuracy'][name]:.1f}" for name, world in zip(best, results.worlds, strict=True)]
    rows = [["best single model", *first]]
    others = [name for name in results.ranked if name not in SINGLE]
    for name in sorted(others, key=lambda name: ("steps" not in name, "(safe)" not in name)):
        gaps = [results.difference(name, best[number], world) for number, world in enumerate(results.worlds)]
        rows.append([f"**{name}**" if "(safe)" in name else name, *map(in_points, gaps)])
    return as_markdown(["", *(short(world) for world in results.worlds)], rows)


def in_points(gap: Measure) -> str:
    """A difference with its standard error: "=" if it is zero at every seed, "-" if there is no error."""
    if gap.mean is None or gap.error is None:
        return "-"
    return f"{gap.mean:+z.1f}{PLUS_MINUS}{gap.error:.1f}" if any(gap.values) else "="


def section(results: League) -> list[str]:
    """The tables of one league."""
    about, methods = results.kept, methods_of(results)
    parts = [*command_and_cost(about), "### Who wins where", winners(results), accuracy(results)]
    parts += [f"![Mean ranks; bars join methods that cannot be told apart](images/{about['recipe']}-ranks.svg)"]
    parts += ["### At equal work", equal_work(results, methods), "### What it costs", costs(results, methods)]
    if any(world["point"].endswith(SUDDEN) for world in results.worlds):
        parts += ["### After a drift", recovery(results)]
    return [
        *parts,
        "### Claims of the papers",
        *fresh_line(about),
        as_markdown(about["claims"]["header"], about["claims"]["rows"]),
    ]


def winners(results: League) -> str:
    """For each world the best method, and those that cannot be told from it."""
    lines = []
    for world in results.worlds:
        best, *others = order_of(results, world)
        level = [name for name in others if not results.is_above(best, name, world)]
        text = f"- **{short(world)}**: {best} ({score(world, best)})"
        text += f". Not to be told from it: {', '.join(level)}." if level else ", before all others."
        lines.append(text)
    return "\n".join(lines)


def order_of(results: League, world: dict[str, Any]) -> list[str]:
    """Ranked methods that finished all seeds of a world, the best one first."""
    seeds = max(map(len, world["values"].values()))
    finished = [name for name in results.ranked if len(world["values"][name]) == seeds]
    return sorted(finished, key=lambda name: -world["accuracy"][name])


def accuracy(results: League) -> str:
    """Accuracy of each method in each world, with standard errors; best first by the mean rank.

    A star is for the largest rate that was searched: a larger one may be better still.
    """
    edge = edges(results)
    header = ["method", "mean rank", *(short(world) for world in results.worlds)]
    best = [order_of(results, world)[0] for world in results.worlds]
    rows = []
    for name in results.names:
        cells = [
            f"**{score(world, name)}**" if name == best[number] else score(world, name)
            for number, world in enumerate(results.worlds)
        ]
        shown = f"{name}*" if name in edge else name
        rows.append([shown, f"{results.ranks[name]:.1f}" if name in results.ranks else "bound", *cells])
    return as_markdown(header, rows)


def equal_work(results: League, methods: dict[str, Method]) -> str:
    """Each method beside the best single model that trains at least as much, up to three times."""
    header = ["method", "work", "beside", *(short(world) for world in results.worlds)]
    rows, work = [], works_of(results)
    for name in results.names:
        if name in (*ONE_MODEL, *BOUNDS) or name not in methods:
            continue
        other = ONE_MODEL[min(max(math.ceil(work[name] - 0.25), 1), len(ONE_MODEL)) - 1]
        cells = []
        for world in results.worlds:
            gap = results.difference(name, other, world)
            text = in_points(gap)
            cells.append(f"**{text}**" if results.is_above(name, other, world) else text)
        rows.append([name, f"{work[name]:.1f}", other, *cells])
    return as_markdown(header, rows)


def costs(results: League, methods: dict[str, Method]) -> str:
    """Work, bytes, memory, seconds, and accuracy of the worst tenth of clients: means over worlds."""
    header = ["method", "work", "points per million samples", "seconds", "MB to clients", "MB from clients"]
    header += ["clients keep", "the server sees", "worst decile"]
    rows, work = [], works_of(results)
    for name in results.names:
        if name not in methods:
            continue
        mean = {
            key: fmean(w["measures"][name][key] for w in results.worlds) for key in results.worlds[0]["measures"][name]
        }
        entry = REGISTRY[methods[name].algorithm]
        cells = [f"{work[name]:.1f}", f"{100e6 * mean['mean_over_rounds'] / mean['samples']:.0f}"]
        cells += [f"{mean['seconds']:.1f}", f"{mean['down'] / 1e6:.0f}", f"{mean['up'] / 1e6:.0f}"]
        rows.append([name, *cells, entry.keeps, entry.sees, f"{100 * mean['worst_decile']:.1f}"])
    return as_markdown(header, rows)


def recovery(results: League) -> str:
    """The world with one drift: what was lost by it, for how long, and how much of that is due to the data."""
    world = next(world for world in results.worlds if world["point"].endswith(SUDDEN))
    header = ["method", "before", "after", "at the end", "rounds until back", "change", "of the data", "of its own"]
    drift = drift_of(results, world)
    before, _, end, _ = fall(world["curves"]["Oracle"], drift)
    change_of_data = end - before
    rows = []
    for name in results.names:
        before, after, end, back = fall(world["curves"][name], drift)
        levels = [f"{100 * value:.1f}" for value in (before, after, end)]
        changes = [f"{100 * value:+z.1f}" for value in (end - before, change_of_data, end - before - change_of_data)]
        rows.append([name, *levels, "not yet" if back is None else str(back), *changes])
    return as_markdown(header, rows)


def drift_of(results: League, world: dict[str, Any]) -> int:
    """Rounds done before the drift of a world."""
    point = next(p for p in points_of(results) if p.name == world["point"])
    return int(point.experiment.shift.how.when.at[0])


def fall(curve: dict[str, Any], drift: int) -> tuple[float, float, float, int | None]:
    """Score before a drift, just after it, at the end, and the rounds until it is back.

    >>> fall({"rounds": [2, 4, 6, 8], "score": [0.5, 0.8, 0.4, 0.77]}, 4)
    (0.8, 0.4, 0.77, 4)
    """
    pairs = list(zip(curve["rounds"], curve["score"], strict=True))
    before = [score for done, score in pairs if done <= drift][-1]
    later = [(done, score) for done, score in pairs if done > drift]
    back = next((done - drift for done, score in later if score >= BACK * before), None)
    return before, later[0][1], later[-1][1], back


def short(world: dict[str, Any]) -> str:
    """Name of a world."""
    return str(world["point"]).removeprefix("title ")


def score(world: dict[str, Any], name: str) -> str:
    """Accuracy in percent with its standard error."""
    mean, error, finished = world["accuracy"].get(name), world["error"].get(name), len(world["values"].get(name, ()))
    if mean is None:
        return "diverged"
    cell = f"{100 * mean:.1f}" if error is None else f"{100 * mean:.1f}{PLUS_MINUS}{100 * error:.1f}"
    seeds = max(map(len, world["values"].values()))
    return cell if finished == seeds else f"{cell} (diverged with {seeds - finished} of {seeds} seeds)"


def points_of(results: League) -> list[Point]:
    """The points of a recipe."""
    return points(read(RECIPES / f"{results.kept['recipe']}.toml"))


def methods_of(results: League) -> dict[str, Method]:
    """The methods of a recipe by their names."""
    experiment = points_of(results)[0].experiment
    return {method.name: method for method in experiment.method}


def edges(results: League) -> set[str]:
    """Methods of a recipe whose rate is the largest of those that were searched."""
    content = read_recipe(results.kept["recipe"])
    ranges, out = content["tune"]["ranges"], set()
    for (full, _), method in zip(methods_of(results).items(), content["method"], strict=True):
        for table in ("local", "solver"):
            rate, range_ = method.get(table, {}).get("lr"), ranges.get(f"method.{method['name']}.{table}.lr")
            if rate is not None and range_ is not None and rate == max(range_["choices"]):
                out.add(full)
    return out


def works_of(results: League) -> dict[str, float]:
    """Work of clients with each method beside FedAvg, as a mean over worlds: samples times passes."""
    ratios = {name: [w["measures"][name]["samples"] / w["measures"][ONE_MODEL[0]]["samples"] for w in results.worlds]
              for name in results.names}  # fmt: skip
    return {name: fmean(values) for name, values in ratios.items()}


# -- pictures ----------------------------------------------------------------------------------------------------------


def draw() -> None:
    """Draw the critical differences of each league (Demšar, JMLR 2006): Friedman's ranks with Nemenyi's test."""
    import matplotlib.pyplot as plt
    import pandas as pd
    import scikit_posthocs

    for results in read_leagues():
        scores = pd.DataFrame(results.scores, columns=results.ranked)
        different = scikit_posthocs.posthoc_nemenyi_friedman(scores)
        figure, axes = plt.subplots(figsize=(9.0, 1.2 + 0.2 * len(results.ranked) / 2))
        scikit_posthocs.critical_difference_diagram(
            results.ranks,
            different,
            ax=axes,
            label_props={"size": 7},
            elbow_props={"linewidth": 0.8},
            marker_props={"s": 12},
            color_palette=dict.fromkeys(results.ranks, INK),
        )
        axes.set_title("Mean rank over all worlds and seeds; 1 is the best", fontsize=9)
        figure.savefig(ROOT / "docs" / "images" / f"{results.kept['recipe']}-ranks.svg", bbox_inches="tight")
        plt.close(figure)


if __name__ == "__main__":
    draw()
