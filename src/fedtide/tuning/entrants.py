"""Entrants of a tournament: an inspection nominates methods for data or a study, and the folder is made."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedtide.config import Experiment, Method, from_dict, to_toml
from fedtide.core.atomic import write_text
from fedtide.core.errors import FedtideError, refused
from fedtide.fields.types import changed
from fedtide.inspection.findings import Findings, inspect_table, reasons
from fedtide.inspection.findings import methods as proposed_methods
from fedtide.inspection.findings import study as proposed_study
from fedtide.inspection.table import of_study
from fedtide.personal.client_networks import ALONE as FULL_TRAINING
from fedtide.runs import folder
from fedtide.runs.preflight import preflight
from fedtide.runs.privacy import check_needed
from fedtide.tuning.tournament import LADDER, Candidate, TooShort, first_line, played_by, too_short

LOCAL = "local"
"""Its clients train from scratch whenever their rows change: it may take longer than all other methods together."""
PLAIN = "one model for all: what the others have to beat"
RATES = 0.5, 2.0
"""Learning rates of methods that are nominated for data, as multiples of those in the inspection's study."""
VALIDATED = 0.2
"""Share of the training rows of such data by which methods are judged."""


def _loss(method: Method) -> str:
    return str(getattr(method.loss, "kind", ""))


def nominated(findings: Findings | None, methods: Sequence[Method]) -> list[tuple[Method, str]]:
    """Return methods in the order in which they are entered, with the reasons.

    Plain FedAvg is the first, the methods without a federation are the last. Of several methods with one algorithm and
    loss the first comes before the others, because a shift concerns algorithms. Then those come first that findings
    support, the strongest first, else as they are given.

    Args:
        findings: of an inspection; None if nothing could be asked.
        methods: the candidates.
    """
    plain = next((m for m in methods if (m.algorithm, _loss(m)) == ("fedavg", "cross-entropy")), None)
    repeats: dict[tuple[str, str], int] = {}
    order = []
    for number, method in enumerate(methods):
        kind = method.algorithm, _loss(method)
        repeats[kind] = repeats.get(kind, -1) + 1
        support = reasons(findings, *kind) if findings is not None else {}
        why = PLAIN if method is plain else "; ".join(support)
        place = (method is not plain) + (method.algorithm == LOCAL)
        order.append(((place, repeats[kind], -max(support.values(), default=0), number), method, why))
    return [(method, why) for _, method, why in sorted(order, key=lambda entry: entry[0])]


def begin_with_data(root: Path, findings: Findings, budget: float, began: float) -> None:
    """Make the folder of a tournament about data, with the inspection and its study in it.

    Args:
        root: the folder, which must not exist or be empty.
        findings: of an inspection.
        budget: seconds.
        began: when the inspection began, in seconds since 1970.

    Raises:
        FedtideError: there are no features, methods cannot be judged by the data, or half of the budget is gone.
    """
    name = findings.table.name
    if findings.table.features is None:
        raise FedtideError(f"{name}: no columns of features, without which there is no model")
    _check_left(name, budget, began)
    try:
        findings.write(root / "inspection")
        study, candidates = _candidates(findings, root / "inspection")
        check_judged(study, name)
        _check_left(name, budget, began)
        write_text(root / "config.toml", to_toml(study))
        write_text(root / "environment.json", json.dumps(folder.environment(), indent=1) + "\n")
        write_text(root / LADDER, first_line(budget, candidates, str(findings).splitlines(), time.time() - began))
    except FedtideError:
        shutil.rmtree(root, ignore_errors=True)
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
    playing, findings = played_by(study), None
    with suppress(FedtideError):  # rows without one label each, or of one label alone, nominate as they are given
        findings = inspect_table(of_study(playing, where), playing.seeds[0])
    _check_left(where, budget, began)
    candidates = [Candidate(method.name, method.name, why) for method, why in nominated(findings, study.method)]
    lines = [answer.line for answer in findings or ()]
    line = first_line(budget, candidates, lines, time.time() - began)
    folder.make_folder(root, {"config.toml": to_toml(study), LADDER: line}, scale)


def _check_left(name: str, budget: float, began: float) -> None:
    """Raise if half of a budget is gone before the tournament, whose processes load the data anew."""
    spent = time.time() - began
    if spent > budget / 2:
        raise TooShort(too_short(name, budget, spent, "reading and looking"))


def check_judged(study: Experiment, where: str) -> None:
    """Raise if a study cannot be played, has one method alone, or no validation rows."""
    if len(study.method) < 2:
        raise refused(f"{where}: method", len(study.method), "two methods or more, which are compared")
    if study.fleet.kind == "ray":
        raise refused(f"{where}: fleet.kind", "ray", "local, workers, stacked or auto in a tournament, of one machine")
    if not study.data.split.val:
        raise refused(f"{where}: data.split.val", 0, "a share of the rows, by which methods are judged, such as 0.2")
    playing = played_by(study)
    check_needed(playing, preflight(playing, where).forms, where)


def _candidates(findings: Findings, place: Path) -> tuple[Experiment, list[Candidate]]:
    """Return the study of an inspection, whose folder is `place`, with each method at each rate, and the candidates."""
    values: dict[str, Any] = proposed_study(findings, place) or {}
    values["data"]["split"] = {"val": VALIDATED}
    del values["baseline"]
    values["method"], variants, usual = [], [], values["defaults"]["local"]
    for name, algorithm, options, why in sorted(proposed_methods(findings), key=lambda m: m.algorithm == LOCAL):
        key = "solver" if algorithm == LOCAL else "local"
        trainings = {name: options.get(key, usual)}
        if algorithm == LOCAL and key not in options:
            # A budget may not pay for the training of the study.
            trainings = {f"{name}, in short": usual, name: changed(FULL_TRAINING)}
        for method, training in trainings.items():
            for rate in (share * training["lr"] for share in RATES):
                entry = {"name": f"{method}, lr {rate:g}", "algorithm": algorithm, **options}
                values["method"].append({**entry, key: {**training, "lr": rate}})
                variants.append((method, why))
    study = from_dict(values, where=str(place / "study.toml"))
    entries = zip(study.method, variants, strict=True)
    return study, [Candidate(entry.name, f"{method}{entry.form}", why) for entry, (method, why) in entries]
