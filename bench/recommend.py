"""Whether a tournament within a tenth of the cost names the best method: the ten worlds of `never-worse`, as kept.

python bench/recommend.py [--worlds "groups,day or night"] [--share 0.1] [--seeds 600,610,620,630,640] [--out FILE]
python bench/recommend.py --keep FILE

In each world all methods of the recipe whose results are kept are candidates. What is best is known from these: means
of five seeds on test rows. The tournament plays other seeds. Named is the one that leads; it is right where its kept
accuracy is within a point of the best. The budget is a share of what the recipe costs, five seeds of every method, in
seconds of CPU, as the machine may have other work: some rounds of each method are timed first, evaluations as the
recipe has them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

from fedtide import api
from fedtide.config import points, read
from fedtide.core.memory import MemoryStore
from fedtide.request import Output, Request, recipe
from fedtide.runs import runner
from fedtide.runs.runner import judge_of
from fedtide.tuning import entering, tournament
from machine import keep

WARM_UP = 2
"""Rounds of a method that are played before some are timed, until it is judged as often as the recipe says."""
SEEDS = 5
SHARE = 0.1
"""Of the full cost."""
NEAR = 0.01
"""How far from the best a method may be."""
KEPT = Path(__file__).resolve().parents[1] / "docs" / "results" / "never-worse.json"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--worlds", default="")
    options.add_argument("--share", type=float, default=SHARE)
    options.add_argument("--seeds", default="600,610,620,630,640", help="first seed of each tournament")
    options.add_argument("--out", type=Path, default=None, help="a line of JSON for each world is appended")
    options.add_argument(
        "--keep", type=Path, default=None, help="keep these lines for the documentation, and play none"
    )
    given = options.parse_args()
    if given.keep is not None:
        kept_of([json.loads(line) for line in given.keep.read_text(encoding="utf-8").splitlines()])
        return
    on_processor_time()
    kept = {point["point"]: point["accuracy"] for point in json.loads(KEPT.read_text())["points"]}
    for point in points(read(recipe("never-worse"), scale="cpu"), "never-worse"):
        name = point.name
        if given.worlds and name not in given.worlds.split(","):
            continue
        truth = kept[name]
        known = tuple(method for method in point.experiment.method if method.name in truth)
        experiment = point.experiment.model_copy(update={"method": known, "claim": ()})
        cost = SEEDS * sum(cost_of(experiment, method) for method in known)
        for seed in map(int, given.seeds.split(",")):
            line = {"world": name, "seed": seed, **played(experiment, truth, given.share * cost, cost, seed)}
            print(json.dumps(line), flush=True)
            if given.out is not None:
                with open(given.out, "a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")


def kept_of(lines: list[dict]) -> None:
    """Keep the lines of all worlds and seeds for the documentation."""
    shares = [line["share"] for line in lines]
    right = sum(line["behind"] <= 100 * NEAR for line in lines)
    worlds: dict[str, list[dict]] = {}
    for line in lines:
        worlds.setdefault(line["world"], []).append(line)
    rows = []
    for world, each in worlds.items():
        behind = [line["behind"] for line in each]
        named = Counter(line["named"] for line in each).most_common()
        rows.append([
            world, ", ".join(f"{name} {count}" for name, count in named), each[0]["best"],
            f"{fmean(behind):.1f}, {max(behind):.1f}", f"{sum(one <= 100 * NEAR for one in behind)} of {len(each)}",
            f"{fmean(line['entered'] for line in each):.0f} of {each[0]['candidates']}",
            f"{100 * fmean(line['share'] for line in each):.0f} %",
        ])  # fmt: skip
    header = [
        "world", "named, times", "best", "points behind, mean, most", "within a point", "entered", "of the full cost",
    ]  # fmt: skip
    claims = [
        [
            "Names the best method, or one within a point, in nine of ten cases", f"{right} of {len(lines)}",
            "holds" if right >= 0.9 * len(lines) else "does not hold",
        ],
        [
            "With a tenth of the full cost",
            f"{100 * fmean(shares):.0f} % in the mean, at most {100 * max(shares):.0f} %",
            "holds" if max(shares) < 1.05 * SHARE else "does not hold",
        ],
    ]  # fmt: skip
    seeds = sorted({line["seed"] for line in lines})
    command = f"python bench/recommend.py --seeds {','.join(map(str, seeds))} --out FILE"
    about = {"command": command, "minutes": sum(line["spent"] for line in lines) / 60}
    results = {"header": header, "rows": rows}
    keep(
        "recommend", {**about, "claims": {"header": ["claim", "found", "verdict"], "rows": claims}, "results": results}
    )


def on_processor_time() -> None:
    """Count seconds of this process's CPU for wall clock: everything is played in it."""
    for module, name in ((runner, "time"), (tournament, "time"), (entering, "time"), (api, "clock")):
        setattr(module, name, SimpleNamespace(time=time.process_time, perf_counter=time.process_time))


def played(experiment, truth, budget: float, cost: float, seed: int) -> dict[str, object]:
    """Play a tournament in a world, and compare what it names with what is known."""
    experiment = experiment.model_copy(update={"seeds": (seed - 1,)})
    with tempfile.TemporaryDirectory() as folder:
        request = Request(str(Path(folder) / "t"), workers=1)
        root = api.begin_recommendation(experiment, request, f"{max(budget, 1):.3f}s")
        api.recommendation_shown(root, 1, Output(quiet=True))
        made = tournament.read_tournament(root)
    best = max(truth, key=truth.get)
    left = made.survivors
    return {
        "named": left[0], "behind": round(100 * (truth[best] - truth[left[0]]), 2), "best": best,
        "survivors": len(left), "best of survivors behind": round(100 * (truth[best] - max(truth[s] for s in left)), 2),
        "entered": len(made.entered), "candidates": len(made.candidates), "rungs": made.rungs, "of": experiment.rounds,
        "seeds": len(made.reached[-1].seeds), "spent": round(made.spent, 1), "share": round(made.spent / cost, 3),
        "ended": made.ended,
    }  # fmt: skip


def cost_of(experiment, method) -> float:
    """Return the seconds of a run of a method, from those of its first rounds."""
    judge = judge_of(experiment, method, experiment.seeds[0], MemoryStore(None))
    timed = min(experiment.rounds - WARM_UP, experiment.eval_every)
    began = time.process_time()
    first = began
    for step, scored in runner.evaluated(judge, rounds=experiment.rounds, seed=0, every=experiment.eval_every):
        list(scored or ())
        done = step.moment.round + 1
        first = time.process_time() if done == WARM_UP else first
        if done == WARM_UP + timed:
            break
    each = (time.process_time() - first) / timed
    return first - began + (experiment.rounds - WARM_UP) * each


if __name__ == "__main__":
    main()
