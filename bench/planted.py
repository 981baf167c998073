"""Whether `inspect` and `recommend` find what is right in worlds whose answers are known.

python bench/planted.py inspect [--seeds 10] [--keep]
python bench/planted.py recommend [--seeds 5] [--out runs/planted] [--keep]

`inspect`: shifts that are planted in tables have to be found, and nothing else. `recommend`: the recipe never-worse is
played whole, so the best method of each of its worlds is known on test rows; tournaments with other seeds get a tenth
of the seconds that the methods take there, and have to name the best method or one near it. A tournament that was
played is not played again. `--keep` writes docs/results/planted/COMMAND.json, which the documentation shows.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from scipy.stats import binomtest

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import fedtide as ft
from fedtide.config import Experiment, points, read
from fedtide.core.memory import MemoryStore
from fedtide.draw.tables import Table
from fedtide.inspection.answers import QUESTIONS
from fedtide.inspection.findings import inspect_table
from fedtide.report.study import read_study
from fedtide.report.terminal import print_table
from fedtide.runs.job import recipe
from fedtide.runs.runner import evaluated, judge_of
from fedtide.tuning.tournament import read_tournament
from helpers.planted import WORLDS, expected, planted, positive
from machine import machine

ROOT = Path(__file__).parents[1]

ANSWERS = {*QUESTIONS, "mix: others", "mix: same"} - {"mix"}
ALARMS = 0.05
"""Share of what is not there that may be found."""
RIGHT = 0.9
"""Share of the seeds in which a world has to be right."""
STUDY, BUDGET, NEAR = "never-worse", 0.1, 0.01
"""The study, the share of its seconds that a tournament may spend, and how far from the best a method may be."""
FIRST_SEED, SEED_STEP = 700, 10
"""Seeds of the tournaments in each world; the study plays others."""
WARM_UP = 2
"""Rounds of a method that are not timed with the others."""


def try_inspect(seeds: int, folder: Path) -> tuple[Table, Table]:
    """Inspect a table of each world and seed; return the claims and the results."""
    rows, shares, missing, wrong, absent = [], [], 0, 0, 0
    planted_in_all = 0
    for world in WORLDS:
        must, may = expected(world)
        answers = [positive(inspect_table(planted(world, seed))) for seed in range(seeds)]
        missed = Counter(question for answer in answers for question in sorted(must - answer))
        beside = Counter(question for answer in answers for question in sorted(answer - may))
        right = sum(must <= answer <= may for answer in answers)
        counts = [", ".join(f"{name} ({count})" for name, count in counter.items()) for counter in (missed, beside)]
        rows.append([world, f"{right} of {seeds}", *counts])
        shares.append(right / seeds)
        planted_in_all += seeds * len(must)
        absent += seeds * len(ANSWERS - may)
        missing, wrong = missing + missed.total(), wrong + beside.total()
    upper = binomtest(wrong, absent).proportion_ci().high  # exact (Clopper-Pearson), 95 %
    share = f"{100 * min(shares):.0f} % in the worst world"
    claims = [
        [
            "What was planted is found, and nothing else, in nine of ten seeds of every world",
            f"{share}; {planted_in_all - missing} of {planted_in_all} findings in all",
            verdict(min(shares) >= RIGHT),
        ],
        [
            "False alarms are below 5 %",
            f"{wrong} of {absent}, the interval ends at {100 * upper:.1f} %",
            verdict(upper < ALARMS),
        ],
    ]
    return claim_table(claims), Table(["planted", "all of it, and nothing else", "missed", "beside it"], rows)


def try_recommend(seeds: int, folder: Path) -> tuple[Table, Table]:
    """Play the study and tournaments in each of its worlds; return the claims and the results."""
    known, file = folder / "known", folder / "tournaments.jsonl"
    finished = ft.resume(known) if known.exists() else ft.run(f"recipe:{STUDY}", known, scale="cpu")
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    for point in points(read(recipe(STUDY), scale="cpu"), STUDY):
        summary = next(summary for summary in read_study(finished.folder).summaries if summary.point == point.name)
        scores = {method.name: method.measures[method.score].mean or 0.0 for method in summary.methods}
        cost = next((line["cost"] for line in lines if line["world"] == point.name), None) or cost_of(point.experiment)
        for seed in range(FIRST_SEED, FIRST_SEED + SEED_STEP * seeds, SEED_STEP):
            if any((line["world"], line["seed"]) == (point.name, seed) for line in lines):
                continue
            shutil.rmtree(folder / "tournament", ignore_errors=True)
            # The seeds of a tournament begin after the largest one of its study.
            study = point.experiment.model_copy(update={"seeds": (seed - 1,), "claim": ()})
            ft.recommend(study, folder / "tournament", budget=f"{BUDGET * cost:.3f}s", workers=1)
            tournament = read_tournament(folder / "tournament")
            best, named = max(scores, key=scores.__getitem__), tournament.survivors[0]
            line = {
                "world": point.name, "seed": seed, "named": named, "best": best, "behind": scores[best] - scores[named],
                "entered": len(tournament.entered), "candidates": len(tournament.candidates), "cost": cost,
                "share": tournament.spent / cost,
            }  # fmt: skip
            lines.append(line)
            with open(file, "a", encoding="utf-8") as opened:
                opened.write(json.dumps(line) + "\n")
    near, shares = sum(line["behind"] <= NEAR for line in lines), [line["share"] for line in lines]
    spent = f"{100 * fmean(shares):.0f} % in the mean, at most {100 * max(shares):.0f} %"
    right = f"{near} of {len(lines)}", verdict(near >= RIGHT * len(lines))
    claims = [
        ["Names the best method, or one within a point, in nine of ten cases", *right],
        [f"With {100 * BUDGET:g} % of the full cost", spent, verdict(max(shares) < 1.05 * BUDGET)],
    ]
    worlds = dict.fromkeys(line["world"] for line in lines)
    rows = [world_row(world, [line for line in lines if line["world"] == world]) for world in worlds]
    header = ["world", "named, times", "best", "points behind, mean, most", "near", "entered", "of the full cost"]
    return claim_table(claims), Table(header, rows)


def world_row(world: str, lines: Sequence[dict[str, Any]]) -> list[str]:
    """Return the row of a world: which methods were named, how far behind the best, and at which cost."""
    behind = [100 * line["behind"] for line in lines]
    return [
        world,
        ", ".join(f"{name} {count}" for name, count in Counter(line["named"] for line in lines).most_common()),
        lines[0]["best"],
        f"{fmean(behind):.1f}, {max(behind):.1f}",
        f"{sum(line['behind'] <= NEAR for line in lines)} of {len(lines)}",
        f"{fmean(line['entered'] for line in lines):.0f} of {lines[0]['candidates']}",
        f"{100 * fmean(line['share'] for line in lines):.0f} %",
    ]


def cost_of(experiment: Experiment) -> float:
    """Return the seconds that all methods and seeds take in one process, from the first rounds of each method."""
    seconds = 0.0
    for method in experiment.method:
        seed, rounds = experiment.seeds[0], experiment.rounds
        first = began = time.perf_counter()
        judge = judge_of(experiment, method, seed, MemoryStore(None))
        warm = min(WARM_UP, rounds - 1)
        timed = min(rounds - warm, experiment.eval_every)  # so many that one evaluation is among them
        for step, scores in evaluated(judge, rounds=rounds, seed=seed, every=experiment.eval_every):
            list(scores or ())
            done = step.moment.round + 1
            first = time.perf_counter() if done == warm else first
            if done >= warm + timed:
                break
        per_round = (time.perf_counter() - first) / timed
        seconds += len(experiment.seeds) * (first - began + (rounds - warm) * per_round)
    return seconds


def claim_table(claims: list[list[str]]) -> Table:
    """Return the table of claims."""
    return Table(["claim", "found", "verdict"], claims)


def verdict(holds: bool) -> str:
    """Return whether a claim holds, in words."""
    return "holds" if holds else "does not hold"


def main() -> None:
    """Play one of the two and print its claims and results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["inspect", "recommend"])
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--out", type=Path, default=Path("runs/planted"))
    parser.add_argument("--keep", action="store_true")
    given = parser.parse_args()
    play, seeds = (try_inspect, 10) if given.command == "inspect" else (try_recommend, 5)
    began = time.perf_counter()
    claims, results = play(given.seeds or seeds, given.out)
    print_table(results, Console())
    print_table(claims, Console())
    if given.keep:
        about = machine()
        kept = {
            "minutes": round((time.perf_counter() - began) / 60, 1), "made": time.strftime("%Y-%m-%d"), "note": "",
            "processor": about["processor"], "cores": about["cores"], "claims": vars(claims), "results": vars(results),
        }  # fmt: skip
        path = ROOT / "docs" / "results" / "planted" / f"{given.command}.json"
        path.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
