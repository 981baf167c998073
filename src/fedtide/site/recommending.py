"""The studies that follow from a site: a tournament after an inspection, the best methods after a tournament."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedtide.config import Experiment, brief, from_dict, resolved
from fedtide.core.errors import FedtideError, in_shell, refused
from fedtide.draw.prose import counted, listed
from fedtide.draw.tables import Table
from fedtide.inspection.findings import BATCH, STEPS, methods
from fedtide.runs.build import algorithm_of, task_of
from fedtide.site.client_rows import zero_rows
from fedtide.site.inspecting import inspected, last_state
from fedtide.site.site import Site
from fedtide.tuning.between_clients import JUDGED, Difference, kinds_of, methods_of, rung_ends, standings, why_unfit
from fedtide.tuning.ladder import half
from fedtide.tuning.tournament import VALIDATED, at_rates

LEAST_ROUNDS = 4
"""Rounds below which a tournament says nothing."""
DROPPED = "deploy", "claim", "baseline", "references", "keep", "stop_at"
"""Keys of the study of a site that are of that site alone, or of its one method."""


@dataclass(frozen=True)
class Recommended:
    """A study that follows from a site, with lines for people.

    Args:
        study: the study.
        comment: the first lines of its file.
        said: lines for people; those before the table.
        table: how entries stand; None before they have played.
        verdict: a sentence about the table; "" without it.
        next: the command that comes next.
    """

    study: Experiment
    comment: tuple[str, ...]
    said: tuple[str, ...]
    table: Table | None
    verdict: str
    next: str

    @property
    def text(self) -> str:
        """The file of the study."""
        return "".join(f"# {line}\n" for line in self.comment) + brief(self.study)


def recommended(root: Path, rounds: int | None, out: Path) -> Recommended:
    """Return the study that follows from a site: a tournament after an inspection, its best methods after a tournament.

    Args:
        root: the site.
        rounds: budget of a tournament; None at a site that has played one.
        out: where the study will be written, for the next command.

    Raises:
        FedtideError: the site is another one or has not played enough, or the rounds are too few.
    """
    site = Site.read(root, imports=False)
    if site.method.algorithm == "tournament":
        if rounds is not None:
            raise refused("--rounds", rounds, "none with a site that has played its tournament", "its study says them")
        return _after_tournament(site, out)
    if site.method.algorithm != "inspection":
        where = f"{root / 'study.toml'}: method '{site.method.name}'.algorithm"
        raise refused(where, site.method.algorithm, "'inspection' or 'tournament', in a site made for it")
    return _after_inspection(site, rounds, out)


def _values_of(site: Site) -> dict[str, Any]:
    """Return the study of a site without what is of that site alone."""
    return {key: value for key, value in resolved(site.experiment).items() if key not in DROPPED}


def _next(site: Site, out: Path, more: str = "") -> str:
    nodes = [node for node in site.roster.node if not node.left]
    names = ",".join(node.name if len(node.clients) == 1 else f"{node.name}:{len(node.clients)}" for node in nodes)
    return f"fedtide deploy {in_shell(out)}{more} --nodes {names} --out {in_shell(f'{site.root}-next')}"


def _after_inspection(site: Site, rounds: int | None, out: Path) -> Recommended:
    if rounds is None:
        raise FedtideError(f"--rounds: no value given; type --rounds 40, the rounds that nodes of {site.root} may play")
    if rounds < LEAST_ROUNDS:
        raise refused("--rounds", rounds, f"{LEAST_ROUNDS} or more")
    answers, (_, state) = inspected(site.root), last_state(site)
    first = state.sums["first"]
    is_large = float(first["labels"].sum()) > float(first["who"]) * STEPS * BATCH / 2
    training = {"lr": 0.1, **({"local_steps": STEPS} if is_large else {"epochs": 2})}
    wire, clients = site.experiment.wire, site.roster.clients
    cohort = min(max(min(10, clients // 2), 1 if wire is None else wire.fewest), clients)
    proposed = list(at_rates(methods(answers), training))
    whys = {method: why for _, method, why in proposed}
    values = _values_of(site) | {
        "title": f"A tournament at {site.root.name}",
        "rounds": rounds,
        "eval_every": max(rounds // JUDGED, 1),
        "model": {"kind": "mlp"},
        "defaults": {"cohort": cohort, "local": training},
        "method": [table for table, _, _ in proposed],
    }
    values["data"] |= {"split": {"val": VALIDATED}}
    entered = from_dict(values, where=str(out), timed=False, imports=False)
    secure, rows = entered.wire is not None and entered.wire.secure, zero_rows(site.about.rows)
    unfit = {
        method: why
        for entry, (_, method, _) in zip(entered.method, proposed, strict=True)
        if (why := why_unfit(algorithm_of(entry, task_of(entered, entry, rows)), secure))
    }
    pairs = list(zip(resolved(entered)["method"], entered.method, proposed, strict=True))
    tables = [{**table, "name": entry.name} for table, entry, (_, method, _) in pairs if method not in unfit]
    values = {key: value for key, value in values.items() if key != "defaults"}
    values["method"] = [{"name": "tournament", "algorithm": "tournament", "entries": tables}]
    study = from_dict(values, where=str(out), timed=False, imports=False)
    entering = [method for method in whys if method not in unfit]
    lower = rung_ends(rounds, len(entering))[0]
    plan = f"{counted(len(entering), 'method')} make {len(tables)} entries: all play {counted(lower, 'round')}"
    if lower < rounds:
        plan += f", {half(len(entering))} of the methods all {rounds}"
    questions = len(tables) * lower + half(len(entering)) * (rounds - lower)
    lines = (
        *(answer.line for answer in answers),
        *(f"{method}: {whys[method]}" for method in entering),
        *(f"not entered: {method}, because {why}" for method, why in unfit.items()),
        f"{plan}. In {rounds} rounds {cohort} of {clients} clients train {questions} times for it.",
    )
    comment = ("Written by fedtide recommend: a tournament of what the inspection of a site speaks for.",)
    return Recommended(study, comment, lines, None, "", _next(site, out))


def _after_tournament(site: Site, out: Path) -> Recommended:
    tables, (played, state) = site.method.options["entries"], last_state(site)
    rounds, names = site.experiment.rounds, [method.name for method in methods_of(tables)]
    if state is None or not state.rungs:
        first = rung_ends(rounds, len(set(kinds_of(tables))))[0]
        but = f"the first decision follows round {first}: fedtide serve {in_shell(site.root)}"
        raise FedtideError(f"{site.root}: {played} of {rounds} rounds were played; {but}")
    stands = standings(state, names)
    best, near = stands[0], [stand for stand in stands[1:] if stand.verdict == "cannot be told apart"]
    words = [stand.name for stand in near]
    verdict = f"{best.name} has the highest score after {best.rounds} of {rounds} rounds"
    verdict += f"; {listed(words)} cannot be told apart from it." if near else " and leads."
    if best.rounds < rounds:
        verdict += " Half of the rounds are to come."
    chosen = {best.number, *(stand.number for stand in near)}
    plain = next((n for n, table in enumerate(tables) if table["algorithm"] == "fedavg"), best.number)
    order = [best.number, *(stand.number for stand in near), *([] if plain in chosen else [plain])]
    values = _values_of(site) | {"title": f"The best of {site.root.name}", "method": [_bare(tables, n) for n in order]}
    study = from_dict(values, where=str(out), timed=False, imports=False)
    header = ["entry", "standing", "rounds", "score on validation rows", "difference to the highest"]
    rows = [
        [one.name, one.verdict, f"{one.rounds} of {rounds}", _percent(one.score), _points(one.difference)]
        for one in stands
    ]
    lines = ("Scores are means over clients, each of which counts once; errors are over clients, with one seed.",)
    comment = ("Written by fedtide recommend: the methods of a tournament between clients that may be the best.",)
    command = _next(site, out, f" --method {shlex.quote(best.name)}")
    return Recommended(study, comment, lines, Table(header, rows), verdict, command)


def _bare(tables: Sequence[dict[str, Any]], number: int) -> dict[str, Any]:
    """Return the table of an entry, whose name has no form: a study adds the form."""
    entry = methods_of([tables[number]])[0]
    return {**tables[number], "name": entry.bare}


def _percent(score: Difference) -> str:
    return f"{100 * score.mean:.1f} ± {100 * score.error:.1f} %"


def _points(difference: Difference | None) -> str:
    return "" if difference is None else f"{100 * difference.mean:+.1f} ± {100 * difference.error:.1f} points"
