"""Pages of a tuning and of a tournament: their words, tables and pictures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from fedtide.config import Experiment, Range, slug, to_toml
from fedtide.core.atomic import write_text
from fedtide.core.errors import FedtideError
from fedtide.data.targets import TARGET_WORDS, TargetWords
from fedtide.draw.figures import STYLE, Drawn, grid, label, leftmost, legend_above, look, svg
from fedtide.draw.html import Part, Picture, render, swatch, to_pictures
from fedtide.draw.prose import listed
from fedtide.draw.tables import Table, format_value
from fedtide.evaluate.measure import Measure
from fedtide.report.formats import percent, seconds, signed_points
from fedtide.report.run_records import environment_line, span_of
from fedtide.tuning.ladder import ENOUGH, Standing, standings
from fedtide.tuning.stages import Parameter, at_edge, seeds_of, tune_of
from fedtide.tuning.tournament import (
    STUDY,
    Rung,
    Tournament,
    count_of_seeds,
    curve_of,
    played_by,
    played_entries,
    read_tournament,
)
from fedtide.tuning.trials import READY, Trial, Tuned, read_tuning

PRUNED = "#777777"
FAILED = "#B00020"
EARLIER = " Entries that were dropped earlier have scores of fewer rounds, which may lie above those of more."
MOST_CURVES = 12
"""Entries whose curves are drawn: those that came farthest."""


def _write(root: Path, out: Path | None, kind: str, experiment: Experiment, ready: str, **parts: Any) -> Path:
    """Write a page about a folder, by default `report.html` in the folder; `ready` is the file for a proper run."""
    file, path = root / ready, out or root / "report.html"
    text = render(
        f"{kind.lower()}.html",
        title=f"{kind}: {experiment.title or root.resolve().name}",
        about=experiment.description,
        ready=file.read_text(encoding="utf-8") if file.is_file() else "not finished yet",
        config=to_toml(experiment),
        environments=[environment_line(root, root.resolve().name)],
        **parts,
    )
    write_text(path, text)
    return path


# -- a tuning ----------------------------------------------------------------------------------------------------------


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
    flatters = (
        f"{experiment.score.capitalize()} on validation rows, as a mean over "
        f"{span_of(experiment.late, experiment.rounds)}; test rows were never looked at. It is the best of several "
        "trials, so it flatters: run the tuned experiment and read its test rows."
    )
    return _write(
        root,
        out,
        "Tuning",
        experiment,
        READY,
        headline=tuning_headline(stages),
        setting=tuning_setting(experiment, stages),
        parts=[
            Part("What was found", best_table(stages, experiment.score), flatters, "what-was-found"),
            Part("Budgets", budget_table(stages), "", "budgets"),
        ],
        stages=[_stage(stage, experiment.score) for stage in stages if any(tuned.trials for tuned in stage)],
    )


def tuning_headline(stages: Sequence[Sequence[Tuned]]) -> str:
    """Return the next thing to do: trials to play, or ranges to widen."""
    methods = [tuned for stage in stages for tuned in stage]
    left = sum(tuned.search.trials - len(tuned.trials) for tuned in methods)
    if left:
        return f"So far: {left} trial{'s are' if left > 1 else ' is'} not played yet."
    edges = [
        f"{tuned.search.title}: {parameter.name}"
        for tuned in methods
        if tuned.best is not None
        for parameter in tuned.search.parameters
        if at_edge(parameter.range, tuned.best.values[parameter.key])
    ]
    if not edges:
        return "Every value that was found lies inside its range."
    many = "values lie at an edge of their ranges" if len(edges) > 1 else "value lies at an edge of its range"
    return f"{len(edges)} {many}, and better ones may lie beyond: {'; '.join(edges)}."


def tuning_setting(experiment: Experiment, stages: Sequence[Sequence[Tuned]]) -> str:
    """Describe the search."""
    tune, seeds = tune_of(experiment, "the configuration"), seeds_of(experiment)
    how = (
        f"at random for {tune.startup_trials} trials and then with a tree-structured Parzen estimator (TPE)"
        if tune.sampler == "tpe"
        else "at random"
    )
    pruned = " Trials below the median of earlier ones were pruned." if tune.pruning else ""
    numbers = f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
    equal = "; in a stage every method gets as many" if any(len(stage) > 1 for stage in stages) else ""
    return (
        f"Values were searched {how}, {tune.parallel_trials} at a time. A trial plays {experiment.rounds} rounds with "
        f"{numbers}{equal}.{pruned}"
    )


def best_table(stages: Sequence[Sequence[Tuned]], score: str) -> Table:
    """Build the table of best values, a row per value."""
    staged = any(tuned.search.stage for stage in stages for tuned in stage)
    rows = []
    for tuned in (tuned for stage in stages for tuned in stage):
        best = tuned.best
        for parameter in tuned.search.parameters:
            value = None if best is None else best.values[parameter.key]
            edge = None if best is None else at_edge(parameter.range, value)
            rows.append(
                [
                    tuned.search.method,
                    *([tuned.search.stage] if staged else []),
                    parameter.name,
                    "-" if best is None else format_value(value),
                    range_of(parameter),
                    f"at the {edge} edge of its range: widen it" if edge else "",
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
    ]
    table = Table(["method", "trial", "values", "why"], failed) if failed else None
    return Stage(stage[0].search.stage, to_pictures(pictures, stage[0].search.stage), table)


def over_trials(stage: Sequence[Tuned], score: str) -> Drawn:
    """Draw accuracy over trials with the best so far, a panel per method."""
    with matplotlib.rc_context(STYLE):
        figure, panels = grid(len(stage), high=3.0)
        for number, (axes, tuned) in enumerate(zip(panels, stage, strict=True)):
            _draw_trials(axes, tuned.trials, look(number).color, lambda trial: trial.number + 1)
            done = [trial for trial in tuned.trials if trial.accuracy is not None]
            if done:
                at = [trial.number + 1 for trial in done]
                best = np.maximum.accumulate([100 * (trial.accuracy or 0.0) for trial in done])
                axes.step(
                    [*at, max(len(tuned.trials), at[-1])], [*best, best[-1]], where="post", color=look(number).color
                )
            axes.set_title(label(tuned.search.method), fontsize=10)
            axes.set_xlabel("trial")
            axes.set_xlim(0.5, max(tuned.search.trials, 2) + 0.5)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        failed = Line2D([], [], ls="", marker="x", color=FAILED, ms=6, label="failed")
        _finish(figure, panels, score, failed, Line2D([], [], color="#333333", label="best so far"))
        return svg(figure, f"{score} over trials")


def over_values(tuned: Tuned, score: str) -> Drawn | None:
    """Draw accuracy against each value, a panel per parameter; None if no trial was judged."""
    trials = [trial for trial in tuned.trials if trial.last is not None]
    if not trials:
        return None
    with matplotlib.rc_context(STYLE):
        figure, panels = grid(len(tuned.search.parameters), high=3.0)
        for axes, parameter in zip(panels, tuned.search.parameters, strict=True):
            _draw_values(axes, trials, tuned.best, parameter)
        star = Line2D([], [], ls="", marker="*", color=look(1).color, mec="black", mew=0.6, ms=12, label="best")
        _finish(figure, panels, score, star)
        return svg(figure, f"values and {score}")


def _draw_values(axes: Axes, trials: Sequence[Trial], best: Trial | None, parameter: Parameter) -> None:
    """Draw trials against one value."""
    choices, key = parameter.range.choices, parameter.key

    def place(trial: Trial) -> float:
        value = trial.values[key]
        return float(value if choices is None else choices.index(value))

    if choices is None:
        _axis(axes, parameter.range)
    else:
        axes.set_xticks(range(len(choices)), [label(format_value(value)) for value in choices])
        axes.margins(x=0.15)
    _draw_trials(axes, [trial for trial in trials if trial.state != "failed"], look(0).color, place)
    if best is not None and best.accuracy is not None:
        axes.plot(place(best), 100 * best.accuracy, marker="*", ms=15, color=look(1).color, mec="black", mew=0.6, ls="")
    axes.set_xlabel(label(parameter.name))


def _axis(axes: Axes, range_: Range) -> None:
    """Set the axis to a numeric range, with a line at each end and some room beyond."""
    low, high = float(range_.low or 0.0), float(range_.high or 0.0)
    if range_.log:
        axes.set_xscale("log")
        room = (high / low) ** 0.06 if high > low else 1.1
        axes.set_xlim(low / room, high * room)
    else:
        room = 0.06 * (high - low) or 0.5
        axes.set_xlim(low - room, high + room)
        if range_.whole:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for end in {low, high}:
        axes.axvline(end, color="#999999", lw=1, ls=(0, (4, 3)))


def _draw_trials(axes: Axes, trials: Sequence[Trial], color: str, place: Any) -> None:
    """Draw each trial with a marker for its state; no two states differ by color alone."""
    styles: dict[str, dict[str, Any]] = {
        "finished": {"marker": "o", "color": color, "ms": 5},
        "pruned": {"marker": "s", "color": PRUNED, "mfc": "none", "ms": 5},
    }
    for state, style in styles.items():
        # A trial without a finite loss has no evaluation.
        points = [(place(t), 100 * _height(t)) for t in trials if t.state == state and not math.isnan(_height(t))]
        axes.plot([x for x, _ in points], [y for _, y in points], ls="", **style)
    for trial in trials:
        if trial.state == "failed":
            axes.plot(place(trial), 0.03, marker="x", color=FAILED, ms=6, ls="", transform=axes.get_xaxis_transform())


def _height(trial: Trial) -> float:
    value = trial.accuracy if trial.accuracy is not None else trial.last
    return math.nan if value is None else value


def _finish(figure: Figure, panels: Sequence[Axes], score: str, *more: Line2D) -> None:
    """Add the unit of the axes and the legend of the markers."""
    for axes in filter(leftmost, panels):
        axes.set_ylabel(f"{score} on\nvalidation rows, %")
    handles = [
        Line2D([], [], ls="", marker="o", color="#333333", ms=5, label="finished"),
        Line2D([], [], ls="", marker="s", color=PRUNED, mfc="none", ms=5, label="pruned"),
        *more,
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=len(handles), fontsize=9)


# -- a tournament ------------------------------------------------------------------------------------------------------


def write_recommendation(root: Path, out: Path | None = None) -> Path:
    """Write the page about the folder of a tournament.

    Args:
        root: the folder.
        out: path of the page; by default `report.html` in the folder.

    Raises:
        FedtideError: the folder is not that of a tournament, or no rung of it was reached.
    """
    record = read_tournament(root, imports=False)
    words = TARGET_WORDS[record.study.data.target.kind]
    if not record.survivors:
        raise FedtideError(f"{root}: no rung is reached yet; go on with: fedtide resume {root}")
    entries = [candidate.entry for candidate in played_entries(record)]
    pictures = [
        (f"{words.score.capitalize()} on validation rows over rounds",
         "A line is the mean over the seeds that an entry played, as far as all of them go; where it ends the entry "
         "was dropped. Dotted lines are rungs.", curves(root, record, entries[:MOST_CURVES])),
        ("Difference to the leader",
         "Of the entries of the last rung, paired over seeds, with 95 % intervals (Student's t): an entry whose "
         "interval reaches 0 cannot be told apart. With fewer than three seeds there is no interval.",
         differences(record)),
    ]  # fmt: skip
    swatches = [swatch(look(number)) if number < MOST_CURVES else Markup("") for number in range(len(entries))]
    below = flatters(words) + earlier(record)
    parts = [Part("How they stand", standings_table(record), below, "how-they-stand", swatches)]
    out_of_budget = [
        [candidate.entry, candidate.why or "nothing that was found speaks for it"]
        for candidate in record.candidates
        if candidate.entry not in record.played
    ]
    if out_of_budget:
        parts.append(Part("Not entered", Table(["candidate", "nominated as"], out_of_budget), "", "not-entered"))
    return _write(
        root,
        out,
        "Recommendation",
        record.study,
        STUDY,
        headline=standings_headline(record),
        setting=tournament_setting(record),
        parts=parts,
        pictures=to_pictures(pictures),
        said=record.said,
        inspection=(root / "inspection").is_dir(),
    )


def flatters(words: TargetWords) -> str:
    """Say that the scores of a tournament flatter, in the words of a kind of target."""
    return (
        f"Scores are {words.scores} on validation rows, by which methods were chosen: they flatter, the leader's most. "
        f"A run of the study tells the {words.score}, on test rows and seeds that the tournament did not see."
        f" A ± is one standard error over seeds.{words.explained}"
    )


def earlier(record: Tournament) -> str:
    """Say that not all scores are of the same rounds; "" if they are."""
    rounds = {rung.rounds for rung in record.reached for entry in rung.values if record.last_rung(entry) is rung}
    return EARLIER if len(rounds) > 1 else ""


def standings_headline(record: Tournament) -> str:
    """Say which entry leads, and which cannot be told apart from it."""
    if not record.reached:
        return "No rung is reached yet."
    rung, (first, *others) = record.reached[-1], record.survivors
    after = f"After {rung.rounds} of {record.study.rounds} rounds with {count_of_seeds(rung.seeds)}"
    if not others:
        result = f"{after} {first} leads clearly among those that came so far."
    else:
        result = f"{after} {first} leads, and cannot be told apart from {listed(others)}."
    why = f" With fewer than {ENOUGH} seeds no two can be told apart." if len(rung.seeds) < ENOUGH and others else ""
    entered = {candidate.method for candidate in record.candidates if candidate.entry in record.played}
    methods = dict.fromkeys(candidate.method for candidate in record.candidates)
    absent = [method for method in methods if method not in entered]
    left = f" Not entered, because the budget was too short: {listed(absent)}." if absent else ""
    return f"{result}{why}{left} Next is a run of the study, on fresh seeds and test rows."


def tournament_setting(record: Tournament) -> str:
    """Describe the tournament."""
    study, first_seed = record.study, played_by(record.study).seeds[0]
    rungs = " and ".join(map(str, record.rungs))
    slow = f" The budget did not pay for all {study.rounds} rounds: slow learners may be better than they seem."
    whole = not record.rungs or record.rungs[-1] == study.rounds
    spent, budget = (seconds(Measure(number, None, [])) for number in (record.spent, record.budget))
    return (
        f"{len(record.candidates)} candidates, {len(record.entered)} entered; rungs after {rungs or 'no'} rounds; "
        f"seeds from {first_seed} on, which the study does not play. {spent} of a budget of {budget} were "
        f"spent{f'; {record.ended}' if record.ended else ' so far'}.{'' if whole else slow}"
    )


def standings_table(record: Tournament) -> Table:
    """Build the table of the entries that were played, those that came farthest first."""
    rows = []
    for candidate in played_entries(record):
        rung = record.last_rung(candidate.entry)
        assert rung is not None
        stand = next(standing for standing in standings(rung.values) if standing.entry == candidate.entry)
        rows.append(
            [
                candidate.entry,
                _verdict(stand, rung, record),
                f"{rung.rounds} of {record.study.rounds}",
                str(len(rung.values[candidate.entry])),
                percent(stand.score),
                "" if stand.verdict == "leads" else signed_points(stand.difference),
                candidate.why,
            ]
        )
    rows += [[entry, f"failed: {why}", "", "", "", "", ""] for entry, why in record.failed.items()]
    header = ["entry", "standing", "rounds", "seeds", "score on validation rows", "to the leader then", "nominated as"]
    return Table(header, rows)


def _verdict(stand: Standing, rung: Rung, record: Tournament) -> str:
    """Say how an entry stands, or at which rung it was dropped."""
    if rung is record.reached[-1] and stand.entry in rung.kept:
        return stand.verdict
    if stand.verdict == "behind" and rung.rounds == record.rungs[-1]:
        return "behind"
    return f"dropped after {rung.rounds} round{'s' * (rung.rounds != 1)}"


def curves(root: Path, record: Tournament, entries: Sequence[str]) -> Drawn:
    """Draw the accuracy of entries on validation rows over rounds."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 4.2))
        axes = figure.subplots()
        for number, entry in enumerate(entries):
            rung = record.last_rung(entry)
            runs = [curve_of(root / slug(entry) / str(seed)) for seed in (rung.values[entry] if rung else ())]
            by_round = [dict(zip(rounds, values, strict=True)) for rounds, values, _ in runs]
            shared = sorted(set.intersection(*map(set, by_round))) if by_round else []
            style = look(number)
            mean = [100 * float(np.mean([values[done] for values in by_round])) for done in shared]
            marker = style.marker or "."  # one evaluation alone is seen, too
            axes.plot(shared, mean, color=style.color, ls=style.dashes, marker=marker, ms=4, label=label(entry))
        for at in {rung.rounds for rung in record.reached}:
            axes.axvline(at, color="#777777", lw=1, ls=":")
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("rounds")
        axes.set_ylabel(f"{record.study.score} on validation rows, %")
        legend_above(axes)
        return svg(figure, f"{record.study.score} on validation rows over rounds")


def differences(record: Tournament) -> Drawn | None:
    """Draw the differences of the entries of the last rung to the leader; None if there is only the leader."""
    leader, *others = record.standings
    if not others:
        return None
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 1.4 + 0.32 * len(others)))
        axes = figure.subplots()
        for place, standing in enumerate(others):
            far = standing.verdict == "behind"
            mean, margin = 100 * (standing.difference.mean or 0.0), 100 * (standing.difference.margin or 0.0)
            axes.errorbar(
                mean, place, xerr=margin or None, marker="s" if far else "o", mfc="none" if far else "#0072B2",
                color="#0072B2", capsize=3, ms=6,
            )  # fmt: skip
        axes.axvline(0.0, color="#777777", lw=1)
        axes.set_yticks(range(len(others)), [label(standing.entry) for standing in others])
        axes.invert_yaxis()
        axes.set_xlabel(f"score less that of {label(leader.entry)}, points")
        return svg(figure, "difference to the leader")
