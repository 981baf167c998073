"""Whether a tournament within a tenth of the cost names the best method: the ten worlds of `never-worse`, as kept.

python bench/recommend.py [--worlds "groups,day or night"] [--share 0.1] [--seed 300] [--out FILE]
python bench/recommend.py --keep FILE

In each world all methods of the recipe whose results are kept are candidates. What is best is known from these: means
of five seeds on test rows. The tournament plays other seeds. Named is the one that leads; it is right where its kept
accuracy is within a point of the best. The budget is a share of what the recipe costs, five seeds of every method, in
seconds of CPU, as the machine may have other work: estimated from FedAvg before, and told as it was after, from what
each took.
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

RATIO = 2.4
"""Cost of a round of the recipe's methods in rounds of FedAvg, on average."""
ROUNDS = 4
"""Rounds of FedAvg that are measured."""
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
    options.add_argument("--seed", type=int, default=300, help="first seed of the tournaments")
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
        line = {"world": name, "seed": given.seed, **played(point.experiment, kept[name], given.share, given.seed)}
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
    command = f"for seed in {' '.join(map(str, seeds))}; do python bench/recommend.py --seed $seed --out FILE; done"
    about = {"command": command, "minutes": sum(line["spent"] for line in lines) / 60}
    results = {"header": header, "rows": rows}
    keep(
        "recommend", {**about, "claims": {"header": ["claim", "found", "verdict"], "rows": claims}, "results": results}
    )


def on_processor_time() -> None:
    """Count seconds of this process's CPU for wall clock: everything is played in it."""
    for module, name in ((runner, "time"), (tournament, "time"), (entering, "time"), (api, "clock")):
        setattr(module, name, SimpleNamespace(time=time.process_time, perf_counter=time.process_time))


def played(experiment, truth, share: float, seed: int) -> dict[str, object]:
    """Play a tournament in a world, and compare what it names with what is known."""
    known = tuple(method for method in experiment.method if method.name in truth)
    experiment = experiment.model_copy(update={"seeds": (seed - 1,), "method": known, "claim": ()})
    whole = experiment.rounds * SEEDS * len(experiment.method)
    budget = share * whole * RATIO * of_fedavg(experiment, seed)
    with tempfile.TemporaryDirectory() as folder:
        request = Request(str(Path(folder) / "t"), workers=1)
        root = api.begin_recommendation(experiment, request, f"{max(budget, 1):.3f}s")
        api.recommendation_shown(root, 1, Output(quiet=True))
        made = tournament.read_tournament(root)
    rounds = {entry: cost.round for entry, cost in made.costs.items()}
    cost = experiment.rounds * SEEDS * fmean(rounds.values()) * len(experiment.method)
    best = max(truth, key=truth.get)
    left = made.survivors
    return {
        "named": left[0], "behind": round(100 * (truth[best] - truth[left[0]]), 2), "best": best,
        "survivors": len(left), "best of survivors behind": round(100 * (truth[best] - max(truth[s] for s in left)), 2),
        "entered": len(made.entered), "candidates": len(made.candidates), "rungs": made.rungs, "of": experiment.rounds,
        "seeds": len(made.reached[-1].seeds), "spent": round(made.spent, 1), "share": round(made.spent / cost, 3),
        "ended": made.ended,
    }  # fmt: skip


def of_fedavg(experiment, seed: int) -> float:
    """Return the seconds of a round of the plain method, evaluations included."""
    playing = tournament.played_by(experiment)
    judge = judge_of(playing, playing.method[0], seed, MemoryStore(None))
    began = 0.0
    for step, scored in runner.evaluated(judge, rounds=playing.rounds, seed=seed, every=2):
        list(scored or ())
        done = step.moment.round + 1
        began = time.process_time() if done == 2 else began
        if done == 2 + ROUNDS:
            break
    return (time.process_time() - began) / ROUNDS


if __name__ == "__main__":
    main()
