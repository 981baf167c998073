"""Play every recipe with kept results once more on today's code, and tell what changed.

    python pages/replay.py FOLDER [--recipes NAME,NAME] [--seeds 300-304] [--fleet stacked] [--minutes 60]
                             [--workers 2] [--keep] [--added]

Each recipe is played with the options that pages/results has for it, the shortest first, in FOLDER/RECIPE. A run that
was stopped is resumed, and a finished one is only compared. `--seeds` plays other seeds than the kept ones: then
verdicts of claims are compared, and accuracies are not. `--fleet` plays with another fleet, whose numbers differ by
rounding alone. With `--minutes` no run begins after so long. `--keep` writes what was played into pages/results, or
with other seeds into pages/results/fresh; with `--added`, for seeds that are to decide open claims, into
pages/results/added. FOLDER/changes.md tells the changes.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, get_args

from fedtide.runs.job import FleetKind
from keep_results import collect, write
from recipes import RESULTS, rows_of

DIVERGED = re.compile(
    r"(fedtide: )?method .*: no answer has counted for \d+ rounds: not finite \(\d+\)(, often.*)?|.* \.\.\. .*"
    r"|a report of what .*"
)
"""What is said of a run whose numbers are finite no more, as an attack makes them; a long line lacks its middle."""

NOTABLE = 2.0
"""Standard errors by which a mean has to differ to be told."""


def main() -> int:
    """Play, compare, write."""
    asked = read_arguments()
    results = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.glob("*.json")}
    names = asked.recipes.split(",") if asked.recipes else sorted(results, key=lambda name: results[name]["minutes"])
    for name in names:
        if name not in results:
            print(f"{name}: no kept results; allowed: {', '.join(sorted(results))}", file=sys.stderr)
            return 2
    asked.folder.mkdir(parents=True, exist_ok=True)
    began, failed, lines = time.monotonic(), [], []
    for name in names:
        if asked.minutes is not None and time.monotonic() - began > 60 * asked.minutes:
            print(f"{name}: left for another time")
            continue
        taken, status = play(name, results[name], asked)
        if status:
            failed.append(name)
            continue
        new = collect(str(asked.folder / name), name, taken, results[name]["note"])
        changes = compare(results[name], new, same_seeds=asked.seeds is None)
        lines.append(f"## {name}\n\n{describe(results[name])}, then {describe(new)}.\n")
        lines += [*(f"- {change}" for change in changes or ["nothing of note changed"]), ""]
        (asked.folder / "changes.md").write_text("\n".join(lines), encoding="utf-8")
        print(f"{name}: {len(changes)} changes")
        if asked.keep:
            place = RESULTS if asked.seeds is None else RESULTS / ("added" if asked.added else "fresh")
            place.mkdir(exist_ok=True)
            write(place / f"{name}.json", new if asked.seeds is None else brief(new))
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def read_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--recipes")
    parser.add_argument("--seeds")
    parser.add_argument("--fleet", choices=get_args(FleetKind))
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--workers", default="2")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--added", action="store_true")
    return parser.parse_args()


def play(name: str, result: dict[str, Any], asked: argparse.Namespace) -> tuple[float, int]:
    """Play a recipe, or go on with it: minutes in all, and the exit status of the command."""
    root, clock = asked.folder / name, asked.folder / f"{name}.minutes"
    program = [sys.executable, "-m", "fedtide"]
    shared = ["--workers", asked.workers, "--quiet"]
    if (root / "config.toml").is_file():
        command = [*program, "resume", str(root), *shared]
    else:
        options = without(result["options"], "--workers")
        if asked.seeds is not None:
            options = [*without(options, "--seeds"), "--seeds", asked.seeds]
        if asked.fleet is not None:
            options = [*without(options, "--fleet"), "--fleet", asked.fleet]
        command = [*program, "run", f"recipe:{name}", *options, "--out", str(root), *shared]
    before = float(clock.read_text()) if clock.is_file() else 0.0
    began = time.monotonic()
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    print(done.stderr, end="", file=sys.stderr)
    failures = done.stderr.strip().split("; ")
    # That an attack stops a method is a result.
    status = 0 if all(map(DIVERGED.fullmatch, failures)) else done.returncode
    taken = before + (time.monotonic() - began) / 60
    clock.write_text(f"{taken:.3f}")
    return taken, status


def without(options: list[str], name: str) -> list[str]:
    """Options without the one of this name and its value."""
    if name not in options:
        return list(options)
    at = options.index(name)
    return [*options[:at], *options[at + 2 :]]


def brief(result: dict[str, Any]) -> dict[str, Any]:
    """Return a result of other seeds without curves, and with no tables but those of claims."""
    parts = ("point", "accuracy", "error", "claims")
    return {**result, "points": [{key: point[key] for key in parts} for point in result["points"]]}


def compare(old: dict[str, Any], new: dict[str, Any], *, same_seeds: bool) -> list[str]:
    """Differences of note: claims with another verdict, and means that differ by more than their errors."""
    out = []
    before, after = verdicts(old), verdicts(new)
    for claim in dict.fromkeys([*before, *after]):
        was, now = before.get(claim, "no such claim"), after.get(claim, "no such claim")
        if was != now:
            out.append(f"{claim}: {was}, now {now}")
    points = {point["point"]: point for point in old["points"]}
    for point in new["points"] if same_seeds else ():
        if (old_point := points.get(point["point"])) is None:
            out.append(f"{point['point']}: a new point")
            continue
        for name, mean in point["accuracy"].items():
            earlier, error = (
                old_point["accuracy"].get(name),
                max(old_point["error"].get(name) or 0, point["error"][name] or 0),
            )
            if name not in old_point["accuracy"]:
                out.append(f"{point['point']} {name}: a new method".strip())
            elif earlier is None or mean is None:
                change = "it stops now" if mean is None else "it stops no more"
                out += [f"{point['point']} {name}: {change}".strip()] if earlier != mean else []
            elif abs(mean - earlier) > NOTABLE * error and abs(mean - earlier) > 1e-4:
                out.append(f"{point['point']} {name}: {100 * earlier:.2f}, now {100 * mean:.2f}".strip())
    return out


def verdicts(result: dict[str, Any]) -> dict[str, str]:
    """Verdict of each claim, by its text and point."""
    return {f"{where} {text}".strip(): row[-1] for (where, text), row in rows_of(result).items()}


def describe(result: dict[str, Any]) -> str:
    """When, where and with which code something was played."""
    commit = f", commit {result['commit']}" if result.get("commit") else ""
    return f"{result['made']} on {result['processor']}{commit}, {result['minutes']:.0f} minutes"


if __name__ == "__main__":
    sys.exit(main())
