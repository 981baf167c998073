"""Keep what a finished run of a recipe found, for the documentation: `pages/results/RECIPE.json`.

    python pages/keep_results.py RUN_FOLDER RECIPE MINUTES [NOTE]

MINUTES is how long the command took by the clock, on this machine with nothing else running. NOTE is one sentence for
the page, for example if a claim needs an explanation. `docs/recipes.md` shows the tables.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from fedtide.core.record import plain
from fedtide.report.accuracy import brief_table
from fedtide.report.claims import claims_table
from fedtide.report.run_records import ExperimentRecord
from fedtide.report.study import read_study
from fedtide.report.summary import Judged
from recipes import RESULTS

MEASURES = ("worst_decile", "best", "down", "up", "seconds", "samples", "mean_over_rounds")
DIGITS = 5
WIDTH = 119
"""Letters of a line of JSON, beside a comma."""
COMMIT = ("git", "rev-parse", "--short", "HEAD")


def main(run_folder: str, recipe: str, minutes: str, note: str = "") -> None:
    """Write the file."""
    write(RESULTS / f"{recipe}.json", collect(run_folder, recipe, float(minutes), note))


def write(path: Path, result: dict[str, Any]) -> None:
    """Write what is kept as JSON, in which a value stands on one line if that is short."""
    path.write_text(as_json(result) + "\n", encoding="utf-8")


def as_json(value: Any, indent: int = 0, key: str = "") -> str:
    """Spell a value behind its key and an indent."""
    line = key + json.dumps(value, ensure_ascii=False)
    if indent + len(line) <= WIDTH or not isinstance(value, dict | list):
        return " " * indent + line
    if isinstance(value, dict):
        begin, end = "{}"
        inner = [as_json(child, indent + 1, f"{json.dumps(k, ensure_ascii=False)}: ") for k, child in value.items()]
    else:
        begin, end = "[]"
        inner = [as_json(child, indent + 1) for child in value]
    return "\n".join([" " * indent + key + begin, ",\n".join(inner), " " * indent + end])


def collect(run_folder: str, recipe: str, minutes: float, note: str) -> dict[str, Any]:
    """Collect what is kept of a run folder."""
    if not (Path(run_folder) / "environment.json").is_file():
        raise SystemExit(f"{run_folder}: no run folder (there is no environment.json)")
    environment = json.loads((Path(run_folder) / "environment.json").read_text(encoding="utf-8"))
    study = read_study(Path(run_folder))
    result = {
        "recipe": recipe,
        "options": options(environment["command"]),
        "minutes": round(minutes, 1),
        "processor": environment["processor"],
        "cores": environment["cores"],
        "made": environment["made"][:10],
        "commit": subprocess.run(COMMIT, capture_output=True, text=True, check=False).stdout.strip(),
        "seeds": max(len(method.seeds) for method in study.summaries[0].methods),
        "rounds": study.summaries[0].rounds,
        "note": note,
        "score": study.summaries[0].methods[0].score,
        "points": [
            {
                "point": summary.point,
                "accuracy": {m.name: m.measures[m.score].mean for m in summary.methods},
                "error": {m.name: m.measures[m.score].error for m in summary.methods},
                "values": {m.name: dict(zip(m.seeds, m.measures[m.score].values, strict=True))
                           for m in summary.methods},
                "moments": {name: {key: {m.name: vars(m.measures[name])[part] for m in summary.methods}
                                   for key, part in (("accuracy", "mean"), ("error", "error"))}
                            for name in ("best", "at_best_val") if name in summary.methods[0].measures},
                "measures": {m.name: {name: m.measures[name].mean for name in MEASURES if name in m.measures}
                             for m in summary.methods},
                "curves": curves(record),
                "results": vars(brief_table(summary)),
                "claims": claims(summary.claims),
            }
            for record, summary in zip(study.records, study.summaries, strict=True)
        ],
        "chosen": {method: summary.point for method, summary in study.chosen.items()},
        "claims": claims(study.claims),
    }  # fmt: skip
    out: dict[str, Any] = plain(result)
    return out


def claims(judged: list[Judged]) -> dict[str, Any]:
    """The table of claims, with the number of every seed, so that verdicts can be judged anew without a run."""
    return {**vars(claims_table(judged)), "values": [claim.number.values for claim in judged]}


def curves(record: ExperimentRecord) -> dict[str, Any]:
    """The mean curve of each method over its seeds, as far as all of them came: rounds done, and the score at each."""
    out = {}
    for number, runs in record.accuracies.items():
        most = min(len(rounds) for rounds, _ in runs)
        mean = [round(float(value), DIGITS) for value in np.mean([values[:most] for _, values in runs], axis=0)]
        out[record.methods[number].name] = {"rounds": runs[0][0][:most].tolist(), "score": mean}
    return out


def options(command: list[str]) -> list[str]:
    """Return the options that `fedtide run recipe:NAME` needs: neither those of the run folder nor of the display."""
    needed, rest = [], iter(command[3:])
    for word in rest:
        if word == "--out":
            next(rest)
        elif word != "--quiet":
            needed.append(word)
    return needed


if __name__ == "__main__":
    main(*sys.argv[1:])
