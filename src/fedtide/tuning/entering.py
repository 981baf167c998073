"""The folder of a tournament that is not played yet: the candidates for data of a person's own, or those of a study."""

from __future__ import annotations

import json
import shutil
import time
import tomllib
from pathlib import Path

from fedtide.config import Experiment, from_dict, to_toml
from fedtide.core.atomic import write_text
from fedtide.core.errors import FedtideError, refused
from fedtide.fields.types import changed
from fedtide.inspection.findings import Findings
from fedtide.inspection.study import methods
from fedtide.personal.client_networks import ALONE as TRAINING_ALONE
from fedtide.runs import folder
from fedtide.runs.preflight import preflight
from fedtide.runs.private import check_needed
from fedtide.tuning.nominate import ALONE, found_in_world, nominated
from fedtide.tuning.tournament import LADDER, Candidate, TooShort, first_line, played_by, too_short

RATES = 0.5, 2.0
"""Learning rates with which methods are entered that are nominated for data, in those of the inspection's study."""
VALIDATED = 0.2
"""Share of the training rows of such data by which methods are judged."""


def begin_with_data(root: Path, found: Findings, budget: float, began: float) -> None:
    """Make the folder of a tournament about data, with the inspection and its study in it.

    Args:
        root: the folder, which must not exist or be empty.
        found: what an inspection found.
        budget: seconds.
        began: when the inspection began, in seconds since 1970.

    Raises:
        FedtideError: there are no features, methods cannot be judged by the data, or half of the budget is gone.
    """
    if found.table.features is None:
        raise FedtideError(f"{found.table.name}: no columns of features, without which there is no model")
    _check_left(found.table.name, budget, began)
    made_here = not root.exists()
    try:
        page = found.write(root / "inspection")
        study, candidates = _entered(found, page.parent / "study.toml")
        check_judged(study, found.table.name)
        _check_left(found.table.name, budget, began)
        write_text(root / "config.toml", to_toml(study))
        write_text(root / "environment.json", json.dumps(folder.environment(), indent=1) + "\n")
        write_text(root / LADDER, first_line(budget, candidates, str(found).splitlines(), time.time() - began))
    except FedtideError:
        shutil.rmtree(root if made_here else root / "inspection", ignore_errors=True)
        raise


def begin_with_study(
    root: Path, study: Experiment, where: str, budget: float, began: float, scale: str | None = None
) -> None:
    """Make the folder of a tournament among the methods of a study, whose world is inspected.

    Args:
        root: the folder, which must not exist or be empty.
        study: the study.
        where: its name in messages.
        budget: seconds.
        began: when its reading began, in seconds since 1970.
        scale: that of a recipe that is played, if any.

    Raises:
        FedtideError: the study has a sweep, one method alone, or no validation rows, could not be run, or half of the
            budget is gone.
    """
    if study.sweep:
        raise refused(f"{where}: sweep", next(iter(study.sweep)), "none: a tournament is about one point of it")
    check_judged(study, where)
    found = found_in_world(study, played_by(study).seeds[0])
    _check_left(where, budget, began)
    candidates = [Candidate(method.name, method.name, why) for method, why in nominated(found, study.method)]
    said = [] if found is None else [answer.line for answer in found]
    line = first_line(budget, candidates, said, time.time() - began)
    folder.made(root, {"config.toml": to_toml(study), LADDER: line}, scale)


def _check_left(name: str, budget: float, began: float) -> None:
    """Raise where half of a budget is gone before the tournament: its processes load the data anew, to begin with."""
    spent = time.time() - began
    if spent > budget / 2:
        raise TooShort(too_short(name, budget, spent, "reading and looking"))


def check_judged(study: Experiment, where: str) -> None:
    """Raise where a study cannot be played, has one method alone, or no validation rows."""
    if len(study.method) < 2:
        raise refused(f"{where}: method", len(study.method), "two methods or more, which are compared")
    if study.fleet.kind == "ray":
        raise refused(f"{where}: fleet.kind", "ray", "local, workers, stacked or auto in a tournament, of one machine")
    if not study.data.split.val:
        raise refused(f"{where}: data.split.val", 0, "a share of the rows, by which methods are judged, such as 0.2")
    playing = played_by(study)
    check_needed(playing, preflight(playing, where).forms, where)


def _entered(found: Findings, path: Path) -> tuple[Experiment, list[Candidate]]:
    """Return the study of an inspection with every nominated method at every rate, and the candidates."""
    values = tomllib.loads(path.read_text(encoding="utf-8"))
    values["data"]["split"] = {"val": VALIDATED}
    del values["baseline"]
    values["method"], trained, usual = [], [], values["defaults"]["local"]
    for name, algorithm, options, why in sorted(methods(found), key=lambda method: method.algorithm == ALONE):
        key = "solver" if algorithm == ALONE else "local"
        trainings = {name: options.get(key, usual)}
        if algorithm == ALONE and key not in options:
            # A budget may not pay for that of the study.
            trainings = {f"{name}, in short": usual, name: changed(TRAINING_ALONE)}
        for method, own in trainings.items():
            for share in RATES:
                rate = share * own["lr"]
                entry = f"{method}, lr {rate:g}"
                values["method"].append({"name": entry, "algorithm": algorithm, **options, key: {**own, "lr": rate}})
                trained.append((method, why))
    made = from_dict(values, where=str(path))
    entered = zip(made.method, trained, strict=True)
    return made, [Candidate(entry.name, f"{method}{entry.form}", why) for entry, (method, why) in entered]
