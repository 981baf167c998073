"""Whether `inspect`, `recommend` and `watch` find what is right in worlds whose answers are known.

python bench/planted.py inspect [--seeds 10] [--keep]
python bench/planted.py recommend [--seeds 5] [--out runs/planted] [--keep]
python bench/planted.py watch [--seeds 10] [--keep]

`inspect`: shifts that are planted in tables have to be found, and nothing else. `recommend`: the recipe never-worse is
played whole, so the best method of each of its worlds is known on test rows; tournaments with other seeds get a tenth
of the seconds that the methods take there, and have to name the best method or one near it. A tournament that was
played is not played again. `watch`: drift that begins in a known window has to be told, nothing else may be, and the
accuracy that is estimated without labels has to be that of the world. `--keep` writes
pages/results/planted/COMMAND.json, which the documentation shows.
"""

import argparse
import json
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from river import drift
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
from fedtide.transforms.windows import KINDS, Group, Layout, look
from fedtide.tuning.tournament import read_tournament
from helpers import watched
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
REFERENCE, QUIET, BEGINS, CHANGED = 10, 200, 50, 25
"""Windows of the reference of a phase, of a world in which nothing changes, and before and after a change."""
FIRST_WORLD = 200
"""First seed of watched worlds; the limit of alarms was chosen by others, below it."""
IN_TIME, OFF, FALSE = 2, 0.02, 1 / 500
"""Windows within which drift has to be told, how far off an estimate may be, and false alarms of a window."""
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
        ["Names the best method, or one within a point, in nine of ten of these cases", *right],
        [f"With {100 * BUDGET:g} % of the full cost", spent, verdict(max(shares) < 1.05 * BUDGET)],
    ]
    worlds = dict.fromkeys(line["world"] for line in lines)
    rows = [world_row(world, [line for line in lines if line["world"] == world]) for world in worlds]
    header = ["world", "named, times", "best", "points behind, mean, most", "near", "entered", "of the full cost"]
    return claim_table(claims), Table(header, rows)


@dataclass
class Told:
    """What windows of a world with a seed have told.

    Args:
        quiet: windows in which nothing has changed.
        false: alarms in them.
        beside: kinds of alarms after the change that cannot tell of it.
        after: windows until the first alarm after the change; None without any.
        by: the kinds of that alarm.
        off: how far estimates are from the accuracy of the world, before the change and after it.
        sure: of those after it, whether the window says that the estimate is sure.
        scores: by kind.
    """

    quiet: int = 0
    false: int = 0
    beside: list[str] = field(default_factory=list)
    after: int | None = None
    by: list[str] = field(default_factory=list)
    off: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    sure: list[bool] = field(default_factory=list)
    scores: dict[str, list[float]] = field(default_factory=dict)


def watch_world(world: watched.World, seed: int) -> Told:
    """Look at all windows of a world."""
    layout, learns = Layout(watched.CLASSES, watched.COLUMNS), REFERENCE * world.period
    begin, last = (BEGINS, BEGINS + CHANGED) if world.what else (QUIET, QUIET)
    group, told = Group.begin(layout, world.period, REFERENCE), Told()
    played = watched.windows(world, seed, learns + begin, learns + last, learns)
    for number, (window, exact) in enumerate(played, start=-learns):
        phase = number % world.period
        group, line = look(group, window, phase, layout, streams=len(KINDS), trains=world.trains)
        if number < 0:
            continue
        is_changed = number >= begin
        for kind, far in line["far"].items():
            told.scores.setdefault(kind, []).append(far["score"])
        if line["estimate"] is not None:
            told.off[is_changed].append(abs(line["estimate"] - exact))
            told.sure += [not line["unknown"]] * is_changed
        if not is_changed:
            told.quiet, told.false = told.quiet + 1, told.false + len(line["alarms"])
        elif line["alarms"]:
            told.beside += sorted(set(line["alarms"]) - set(world.told))
            if told.after is None:
                told.after, told.by = number - begin + 1, line["alarms"]
    return told


RIVALS = {"ADWIN": lambda: drift.ADWIN(), "KSWIN": lambda: drift.KSWIN(window_size=40, stat_size=10, seed=0)}
"""Other detectors of river. KSWIN's default of 100 windows leaves none of the time before the change."""


def tell_otherwise(name: str, world: watched.World, told: Told) -> Counter[str]:
    """Count false alarms of another detector, and 1 if it tells of drift in time."""
    counts: Counter[str] = Counter()
    for kind, scores in told.scores.items():
        found = RIVALS[name]()
        for number, score in enumerate([0.0] * REFERENCE + scores, start=-REFERENCE):
            found.update(score)
            if not found.drift_detected:
                continue
            if not world.what or number < BEGINS:
                counts["false"] += 1
            elif not world.over and kind in world.told and number < BEGINS + IN_TIME:
                counts["in time"] = 1
    return counts


def try_watch(seeds: int, folder: Path) -> tuple[Table, Table]:
    """Look at the windows of each world and seed; return the claims and the results."""
    rows, quiet, false, late, sudden, before = [], 0, 0, 0, 0, list[float]()
    others = {name: Counter[str]() for name in RIVALS}
    for name, world in watched.WORLDS.items():
        played = [watch_world(world, seed) for seed in range(FIRST_WORLD, FIRST_WORLD + seeds)]
        false += sum(one.false for one in played)
        if not world.what and not world.trains:  # windows of the other worlds before the change are the same ones
            quiet += sum(one.quiet for one in played)
        old, new = ([off for one in played for off in one.off[k]] for k in (0, 1))
        before += old
        times = [one.after for one in played]
        for one in played:
            for rival, counts in others.items():
                counts.update(tell_otherwise(rival, world, one))
        if world.told and not world.over:
            sudden += seeds
            late += sum(after is None or after > IN_TIME for after in times)
        sure = [is_sure for one in played for is_sure in one.sure]
        by = Counter(kind for one in played for kind in one.by)
        rows.append([
            name,
            f"{sum(one.false for one in played)} of {sum(one.quiet for one in played)}",
            "-" if not world.what else f"{sum(after is not None for after in times)} of {seeds}",
            "-" if not any(times) else f"{fmean(filter(None, times)):.1f}, {max(filter(None, times))}",
            ", ".join(f"{kind} ({count})" for kind, count in by.most_common()) or "-",
            f"{100 * fmean(old):.1f}, {100 * max(old):.1f}",
            "-" if not new else f"{100 * fmean(new):.1f}",
            "-" if not sure else f"{100 * fmean(sure):.0f} %",
        ])  # fmt: skip
    upper = binomtest(false, quiet).proportion_ci().high
    within = fmean(off <= OFF for off in before)
    claims = [
        [f"Drift at once is told within {IN_TIME} windows, if anything can tell", f"{sudden - late} of {sudden}",
         verdict(not late)],
        ["At most one false alarm in 500 windows", f"{false} in {quiet} different windows, the interval ends at one in "
         f"{1 / upper:.0f}", verdict(upper <= FALSE)],
        ["If confidence can be calibrated, the estimate is within 2 points", f"{100 * within:.1f} % of {len(before)}; "
         f"{100 * fmean(before):.1f} points in the mean", verdict(within >= RIGHT)],
    ]  # fmt: skip
    claims += [
        [f"River's {name} does it too, on the same scores", f"{counts['in time']} of {sudden}, "
         f"{counts['false']} false alarms", verdict(counts["in time"] == sudden and counts["false"] <= FALSE * quiet)]
        for name, counts in others.items()
    ]  # fmt: skip
    header = ["world", "false alarms of windows", "told", "after windows, mean, most", "first by",
              "points off, mean, most", "after the change", "then sure"]  # fmt: skip
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


COMMANDS = {"inspect": (try_inspect, 10), "recommend": (try_recommend, 5), "watch": (try_watch, 10)}
"""What is played, and with how many seeds."""


def main() -> None:
    """Play one of them and print its claims and results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=[*COMMANDS])
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--out", type=Path, default=Path("runs/planted"))
    parser.add_argument("--keep", action="store_true")
    given = parser.parse_args()
    play, seeds = COMMANDS[given.command]
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
        path = ROOT / "pages" / "results" / "planted" / f"{given.command}.json"
        path.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
