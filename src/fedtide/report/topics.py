"""All topics of the report, in the order of a page, and their numbers and pictures by name."""

from typing import Any

from fedtide.config import Experiment, matching, points
from fedtide.config.schema import units_of
from fedtide.core.errors import refused, unknown
from fedtide.data.targets import TARGET_WORDS
from fedtide.evaluate.metrics import BY_WAY, NO_METRICS, Unit, metrics_for
from fedtide.report import accuracy, clients, clusters, components, costs, forgetting, periods
from fedtide.report.formats import FORMATS, Number, percent
from fedtide.report.topic import Plan

MODULES: tuple[Any, ...] = (accuracy, periods, components, clusters, forgetting, clients, costs)
"""Topics: each has `NUMBERS`, `measure` (the numbers of one run), and plans in the order of a page."""

PLANS = [plan for module in MODULES for plan in vars(module).values() if isinstance(plan, Plan)]

NUMBERS: dict[str, Number] = {number.name: number for module in MODULES for number in module.NUMBERS}
"""Every number of a run; docs/reports.md describes the numbers."""

PICTURES = {plan.name: plan for plan in PLANS if plan.name}
"""Every picture of a run by its name in `ft.plot`."""

TABLES = [plan for plan in PLANS if not plan.name]
"""Every table of a page but the first ones."""


def number_of(name: str, unit: Unit | None = None) -> Number:
    """Return the number of this name, also of a group of clients or of another way to predict.

    Args:
        name: name in `summary.json`; an unknown name has the format of plain numbers.
        unit: unit of a number whose name does not determine it.

    >>> number_of("accuracy_night").written is number_of("accuracy_by_global").written is percent
    True
    """
    plain = find_number(name) or Number(name)
    return Number(name, FORMATS[unit] if unit else plain.written, word=plain.word, reached=plain.reached)


def find_number(name: str) -> Number | None:
    """Return the number of this name; None if there is none."""
    of_group = next((n for n in NUMBERS.values() if n.by_group and name.startswith(f"{n.name}_")), None)
    return NUMBERS.get(name) or of_group or (Number(name, percent) if name.startswith(BY_WAY) else None)


def check_measures(experiment: Experiment, where: str = "experiment") -> None:
    """Reject metrics with a name in use, and claims about an unknown number, before any run starts.

    Raises:
        FedtideError: with the metric, or with the claim and the nearest name.
    """
    names = [metric.name for metric in metrics_for(TARGET_WORDS[experiment.data.target.kind])]
    for place, metric in enumerate(experiment.metrics):
        for name in units_of(metric):
            if name in (*names, *NO_METRICS) or find_number(name):
                raise refused(f"{where}: metrics[{place}].name", name, "a name that no other measure has")
        names += units_of(metric)
    names += experiment.metric_units
    for place, claim in enumerate(experiment.claim):
        key = f"{where}: claim[{place}].measure"
        if claim.measured in {"accuracy", "skill"} - {experiment.score}:
            raise refused(key, claim.measured, f"{experiment.score}, the score of this target")
        if experiment.privacy is not None and (number := find_number(claim.measured)) is not None and number.single:
            but = "the report of a private study leaves numbers of single clients out"
            raise refused(key, claim.measured, "a number of all clients", but)
        at = [] if claim.at is None else _metrics_at(experiment, claim.at, where)
        if not find_number(claim.measured) and claim.measured not in (*names, *at):
            groups = (f"{n.name}_<group>" for n in NUMBERS.values() if n.by_group)
            measures = [*NUMBERS, *names, *at, *groups, f"{BY_WAY}<way to predict>"]
            raise unknown(key, claim.measured, [*dict.fromkeys(measures)])


def _metrics_at(experiment: Experiment, part: str, where: str) -> list[str]:
    """Return the metrics of the targets at a part of a sweep."""
    targets = {point.name: TARGET_WORDS[point.experiment.data.target.kind] for point in points(experiment, where)}
    return [metric.name for name in matching(part, list(targets)) for metric in metrics_for(targets[name])]
