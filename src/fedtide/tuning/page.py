"""Report of a tuning: trials, best values, and ranges that were too narrow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedtide.config import Experiment, to_toml
from fedtide.core.atomic import write_text
from fedtide.core.errors import FedtideError
from fedtide.report.environment import environment_line
from fedtide.report.reading import span_of
from fedtide.report.render import Part, Picture, render, to_pictures
from fedtide.report.tables import Table, format_value
from fedtide.tuning.folder import READY, Tuned, read_tuning
from fedtide.tuning.plan import Parameter, at_edge, seeds_of, tune_of
from fedtide.tuning.trial_pictures import over_trials, over_values


@dataclass(frozen=True)
class Stage:
    """Section of a stage on the page."""

    heading: str
    pictures: list[Picture]
    failed: Table | None


def write_tuning(root: Path, out: Path | None = None) -> Path:
    """Write the page about a tune folder.

    Args:
        root: the tune folder.
        out: path of the page; by default `report.html` in the folder.

    Raises:
        FedtideError: the folder is not that of a tuning, or no trial of it is finished.
    """
    experiment, stages = read_tuning(root)
    if not any(tuned.best for stage in stages for tuned in stage):
        raise FedtideError(f"{root}: no trial is finished yet; go on with: fedtide resume {root}")
    ready = root / READY
    flatters = (
        f"{experiment.score.capitalize()} on validation rows, as a mean over "
        f"{span_of(experiment.late, experiment.rounds)}; test rows were never looked at. It is the best of several "
        "trials, so it flatters: run the tuned experiment and read its test rows."
    )
    path = out or root / "report.html"
    text = render(
        "tuning.html",
        title=f"Tuning: {experiment.title or root.resolve().name}",
        about=experiment.description,
        headline=headline(stages),
        setting=setting(experiment, stages),
        parts=[
            Part("What was found", found_table(stages, experiment.score), flatters, "what-was-found"),
            Part("Budgets", budget_table(stages), "", "budgets"),
        ],
        stages=[_stage(stage, experiment.score) for stage in stages if any(tuned.trials for tuned in stage)],
        ready=ready.read_text(encoding="utf-8") if ready.is_file() else "not finished yet",
        config=to_toml(experiment),
        environments=[environment_line(root, root.resolve().name)],
    )
    write_text(path, text)
    return path


# -- words and tables --------------------------------------------------------------------------------------------------


def headline(stages: Sequence[Sequence[Tuned]]) -> str:
    """Return the next thing to do: trials to play, or ranges to widen."""
    tuned = [each for stage in stages for each in stage]
    left = sum(each.search.trials - len(each.trials) for each in tuned)
    if left:
        return f"So far: {left} trial{'s are' if left > 1 else ' is'} not played yet."
    edges = [
        f"{each.search.title}: {parameter.name}"
        for each in tuned
        if each.best is not None
        for parameter in each.search.parameters
        if at_edge(parameter.range, each.best.values[parameter.key])
    ]
    if not edges:
        return "Every value that was found lies inside its range."
    many = "values lie at an edge of their ranges" if len(edges) > 1 else "value lies at an edge of its range"
    return f"{len(edges)} {many}, and better ones may lie beyond: {'; '.join(edges)}."


def setting(experiment: Experiment, stages: Sequence[Sequence[Tuned]]) -> str:
    """Describe the search."""
    tune, seeds = tune_of(experiment, "the configuration"), seeds_of(experiment)
    how = (
        f"at random for {tune.startup_trials} trials and then with a tree-structured Parzen estimator (TPE)"
        if tune.sampler == "tpe"
        else "at random"
    )
    pruned = " Trials below the median of earlier ones were pruned." if tune.pruning else ""
    each = f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
    equal = "; in a stage every method gets as many" if any(len(stage) > 1 for stage in stages) else ""
    return (
        f"Values were searched {how}, {tune.parallel_trials} at a time. A trial plays {experiment.rounds} rounds with "
        f"{each}{equal}.{pruned}"
    )


def found_table(stages: Sequence[Sequence[Tuned]], score: str) -> Table:
    """Build the table of best values, a row per value."""
    staged = any(tuned.search.stage for stage in stages for tuned in stage)
    rows = []
    for tuned in (tuned for stage in stages for tuned in stage):
        best = tuned.best
        for parameter in tuned.search.parameters:
            value = None if best is None else best.values[parameter.key]
            rows.append(
                [
                    tuned.search.method,
                    *([tuned.search.stage] if staged else []),
                    parameter.name,
                    "-" if best is None else format_value(value),
                    range_of(parameter),
                    "" if best is None else advice(parameter, value),
                    "-" if best is None or best.accuracy is None else f"{100 * best.accuracy:.1f} %",
                ]
            )
    header = ["method", *(["stage"] if staged else []), "value", "found", "searched", "edge", f"validation {score}"]
    return Table(header, rows)


def budget_table(stages: Sequence[Sequence[Tuned]]) -> Table:
    """Build the table of the number of trials of each method, by outcome."""
    rows = []
    for tuned in (tuned for stage in stages for tuned in stage):
        states = [trial.state for trial in tuned.trials]
        counts = [str(states.count(state)) for state in ("finished", "pruned", "failed")]
        rows.append([tuned.search.title, f"{len(states)} of {tuned.search.trials}", *counts])
    return Table(["method", "trials", "finished", "pruned", "failed"], rows)


def advice(parameter: Parameter, value: Any) -> str:
    """Return the advice to widen a range whose edge has the best value, or ""."""
    edge = at_edge(parameter.range, value)
    return f"at the {edge} edge of its range: widen it" if edge else ""


def range_of(parameter: Parameter) -> str:
    """Describe a range in words."""
    range_ = parameter.range
    if range_.choices is not None:
        return "among " + ", ".join(map(format_value, range_.choices))
    marks = [" (log)"] if range_.log else []
    marks += [f" in steps of {range_.step:g}"] if range_.step else []
    return f"{range_.low:g} to {range_.high:g}{''.join(marks)}"


def _stage(stage: Sequence[Tuned], score: str) -> Stage:
    pictures = [
        ("Trial after trial",
         f"{score.capitalize()} on validation rows of each trial, and the best so far. Hollow squares were pruned and "
         "stand at their last evaluation; crosses failed.",
         over_trials(stage, score)),
        *((f"{tuned.search.method}: each value against {score}",
           "A dot is a trial, the star the best one; hollow squares were pruned. Dashed lines are the ends of the "
           "range: a star beside one says that the range should be wider.",
           over_values(tuned, score)) for tuned in stage),
    ]  # fmt: skip
    failed = [
        [tuned.search.method, str(trial.number + 1), format_value(dict(trial.values)), trial.reason]
        for tuned in stage
        for trial in tuned.trials
        if trial.state == "failed"
    ]  # fmt: skip
    table = Table(["method", "trial", "values", "why"], failed) if failed else None
    return Stage(stage[0].search.stage, to_pictures(pictures, stage[0].search.stage), table)
