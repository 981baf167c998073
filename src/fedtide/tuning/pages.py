"""Pages of a tuning and of a tournament: their words, tables and pictures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedtide.config import Experiment, slug, to_toml
from fedtide.core.atomic import check_free, write_text
from fedtide.core.errors import FedtideError, in_shell, quote
from fedtide.data.targets import target_words
from fedtide.draw.figures import Drawn, bands, figure_legend, grid, label, leftmost, legend_above, look, styled, svg
from fedtide.draw.html import MARK, Part, render, swatch, to_pictures
from fedtide.draw.prose import counted
from fedtide.draw.tables import Table, format_value
from fedtide.evaluate.metrics import Measure
from fedtide.evaluate.references import MISSING, reference_words
from fedtide.fields.types import rounded_up
from fedtide.report.formats import percent, signed_points
from fedtide.report.lead import gap
from fedtide.report.run_records import NANO, averaged_over, environment_line, is_nano, span_of
from fedtide.tuning.ladder import describe_others, standings
from fedtide.tuning.tournament import STUDY, Tournament, curve_of, played_entries, read_tournament
from fedtide.tuning.tune import READY, Parameter, Trial, Tuned, at_edge, read_tuning

STATES: dict[str, dict[str, Any]] = {
    "finished": {"marker": "o", "color": look(0).color, "ms": 5},
    "pruned": {"marker": "s", "color": "#777777", "mfc": "none", "ms": 5},
    "failed": {"marker": "x", "color": "#B00020", "ms": 6},
    "best": {"marker": "*", "color": look(1).color, "mec": "black", "mew": 0.6, "ms": 15},
}
"""Marks of trials; no two states differ by color alone."""
SAFE_FORM = " (safe)"
SAFE = "(safe) marks the form of a method that keeps one model for all as a fallback."
MOST_CURVES = 12
"""Entries whose curves are drawn: those that came farthest."""
FEW = 3
"""Values at an edge that a headline names."""


def _write(root: Path, out: Path | None, kind: str, experiment: Experiment, ready: str, **parts: Any) -> Path:
    """Write a page about a folder, by default `report.html` in the folder; `ready` is the file for a proper run."""
    file, path = root / ready, out or root / "report.html"
    if out is not None:
        check_free(out, MARK)
    text = render(
        f"{kind.lower()}.html",
        title=f"{kind}: {experiment.title or root.resolve().name}",
        about=experiment.description,
        ready=file.read_text(encoding="utf-8") if file.is_file() else "not finished yet",
        config=to_toml(experiment),
        environments=[environment_line(root, root.resolve().name)],
        warning=f"nano: {NANO}" if is_nano(root) else "",
        **parts,
    )
    write_text(path, text)
    return path


# -- a tuning ----------------------------------------------------------------------------------------------------------


def write_tuning(root: Path, out: Path | None = None) -> Path:
    """Write the page about a tune folder.

    Args:
        root: the tune folder.
        out: path of the page; by default `report.html` in the folder.

    Raises:
        FedtideError: the folder is not that of a tuning, or no trial of it is finished.
    """
    experiment, stages = read_tuning(root)
    methods = [tuned for stage in stages for tuned in stage]
    if not any(tuned.best for tuned in methods):
        raise FedtideError(f"{root}: no trial is finished yet; go on with: fedtide resume {in_shell(root)}")
    span = span_of(experiment.late, experiment.rounds)
    averaged = averaged_over(experiment.late, span)
    flatters = (
        f"{experiment.score.capitalize()} on validation rows, {averaged}; test rows were never looked at. It is the "
        "best of several trials, so it flatters: run the tuned experiment and read its test rows."
    )
    caption = (
        f"{experiment.score.capitalize()} on validation rows of each trial, or at its last evaluation, in their order "
        "and against each value; failed trials without one stand at 0. Dashed lines are the ends of a range: a star "
        "at an end says that the range should be wider."
    )
    pictures = [
        (f"{tuned.search.title}: trials", caption, draw_trials(tuned, experiment.score))
        for tuned in methods
        if tuned.trials
    ]
    return _write(
        root,
        out,
        "Tuning",
        experiment,
        READY,
        headline=tuning_headline(stages),
        parts=[
            Part("What was found", best_table(stages, experiment.score), flatters, "what-was-found"),
            Part("Budgets", budget_table(stages), "", "budgets"),
        ],
        pictures=to_pictures(pictures),
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
    which = "; ".join(edges) if len(edges) <= FEW else "the table marks them"
    return f"{len(edges)} {many}, and better ones may lie beyond: {which}."


def best_table(stages: Sequence[Sequence[Tuned]], score: str) -> Table:
    """Build the table of best values, a row per value."""
    rows = []
    for tuned in (tuned for stage in stages for tuned in stage):
        best = tuned.best
        for parameter in tuned.search.parameters:
            edge = None if best is None else at_edge(parameter.range, best.values[parameter.key])
            rows.append(
                [
                    tuned.search.title,
                    parameter.name,
                    "-" if best is None else format_value(best.values[parameter.key]),
                    range_of(parameter),
                    f"at the {edge} edge of its range: widen it" if edge else "",
                    "-" if best is None or best.accuracy is None else f"{100 * best.accuracy:.1f} %",
                ]
            )
    return Table(["method", "value", "found", "searched", "edge", f"validation {score}"], rows)


def budget_table(stages: Sequence[Sequence[Tuned]]) -> Table:
    """Build the table of the number of trials of each method, by outcome."""
    rows = []
    for tuned in (tuned for stage in stages for tuned in stage):
        states = [trial.state for trial in tuned.trials]
        counts = [str(states.count(state)) for state in ("finished", "pruned", "failed")]
        reason = next((trial.reason for trial in tuned.trials if trial.state == "failed"), "")
        rows.append([tuned.search.title, f"{len(states)} of {tuned.search.trials}", *counts, reason])
    return Table(["method", "trials", "finished", "pruned", "failed", "first failure"], rows)


def range_of(parameter: Parameter) -> str:
    """Describe a range in words."""
    range_ = parameter.range
    if range_.choices is not None:
        return "among " + ", ".join(map(format_value, range_.choices))
    marks = [" (log)"] if range_.log else []
    marks += [f" in steps of {range_.step:g}"] if range_.step else []
    return f"{range_.low:g} to {range_.high:g}{''.join(marks)}"


@styled
def draw_trials(tuned: Tuned, score: str) -> Drawn:
    """Draw the accuracy of each trial over their number, and against each value."""
    figure, panels = grid(1 + len(tuned.search.parameters), high=3.0)
    panels[0].set_xlabel("trial")
    panels[0].xaxis.set_major_locator(MaxNLocator(integer=True))
    _draw_points(panels[0], tuned, None)
    for axes, parameter in zip(panels[1:], tuned.search.parameters, strict=True):
        _set_range(axes, parameter)
        _draw_points(axes, tuned, parameter)
    for axes in filter(leftmost, panels):
        axes.set_ylabel(f"{score} on\nvalidation rows, %")
    figure_legend(figure, panels)
    return svg(figure, f"{score} of trials")


def _set_range(axes: Axes, parameter: Parameter) -> None:
    """Set the axis to a range, with a line at each end."""
    range_ = parameter.range
    axes.set_xlabel(label(parameter.name))
    if range_.choices is not None:
        axes.set_xticks(range(len(range_.choices)), [label(format_value(value)) for value in range_.choices])
        axes.margins(x=0.15)
        return
    low, high = range_.edges()
    if range_.log:
        axes.set_xscale("log")
        axes.set_xlim(low / 1.2, high * 1.2)
    else:
        room = 0.06 * (high - low) or 0.5
        axes.set_xlim(low - room, high + room)
        axes.xaxis.set_major_locator(MaxNLocator(integer=range_.whole))
    for end in (low, high):
        axes.axvline(end, color="#999999", lw=1, ls=(0, (4, 3)))


def _draw_points(axes: Axes, tuned: Tuned, parameter: Parameter | None) -> None:
    """Draw each trial with a mark for its state, at its number or at the value of a parameter."""

    def place(trial: Trial) -> float:
        if parameter is None:
            return trial.number + 1
        value, choices = trial.values[parameter.key], parameter.range.choices
        return float(value if choices is None else choices.index(value))

    for state, style in STATES.items():
        trials = [trial for trial in tuned.trials if trial.state == state]
        if state == "best" and tuned.best is not None:
            trials = [tuned.best]
        if trials:
            heights = [100 * (trial.shown or 0.0) for trial in trials]
            axes.plot([*map(place, trials)], heights, ls="", label=state, **style)


# -- a tournament ------------------------------------------------------------------------------------------------------


def write_recommendation(root: Path, out: Path | None = None) -> Path:
    """Write the page about the folder of a tournament.

    Args:
        out: path of the page; by default `report.html` in the folder.

    Raises:
        FedtideError: the folder is not that of a tournament, or no rung of it was reached.
    """
    record = read_tournament(root, imports=False)
    words = target_words(record.study.data.target)
    if not record.survivors:
        raise FedtideError(f"{root}: no rung is reached yet; go on with: fedtide resume {in_shell(root)}")
    entries = [candidate.entry for candidate in played_entries(record)]
    curves = (
        f"{words.score.capitalize()} on validation rows over rounds",
        "A line is the mean over the seeds that an entry played, as far as all of them go, with a band of one standard "
        "error; where it ends the entry was dropped. Dotted lines are rungs.",
        draw_curves(root, record, entries[:MOST_CURVES]),
    )
    flatters = (
        f"Scores are {words.scores} on validation rows, by which methods were chosen: they flatter, the highest most. "
        f"A run of the study tells the {words.score}, on test rows and seeds that the tournament did not see."
        f" A ± is one standard error over seeds.{words.explained}"
    )
    table = standings_table(record)
    swatches = [swatch(look(number)) for number in range(min(len(entries), MOST_CURVES))]
    swatches += [Markup("")] * (len(table.rows) - len(swatches))
    return _write(
        root,
        out,
        "Recommendation",
        record.study,
        STUDY,
        headline=f"{standings_headline(record)} {next_line(root / STUDY)}",
        setting=f"{record.spent:.0f} s of a budget of {record.budget:g} s were spent; {record.ended or 'it goes on'}. "
        f"{scale_line(record)}",
        parts=[Part("How they stand", table, flatters, "how-they-stand", swatches)],
        pictures=to_pictures([curves]),
        said=record.said,
        inspection=(root / "inspection").is_dir(),
    )


def standings_headline(record: Tournament) -> str:
    """Say which entry leads, or has the highest score, and which cannot be told apart from it."""
    rung, first, score = record.reached[-1], record.survivors[0], percent(record.standings[0].score)
    rounds = f"after {rung.rounds} of {record.study.rounds} rounds"
    start = f"{rounds.capitalize()} with {counted(len(rung.seeds), 'seed')}"
    result = f"{f'{record.doubt}: {rounds}' if record.doubt else start} {first} {record.stands}, {score}"
    others = describe_others(record.standings)
    entered = {candidate.method for candidate in record.candidates if candidate.entry in record.played}
    absent = dict.fromkeys(candidate.method for candidate in record.candidates if candidate.method not in entered)
    left = f"Not entered, because the budget was too short: {quote(list(absent))}." if absent else ""
    enough = f"A budget of about {rounded_up(record.enough)} would pay for all." if absent and record.enough else ""
    safe = SAFE if any(SAFE_FORM in entry for entry in record.played) else ""
    return " ".join(filter(None, [f"{result}.", others, left, enough, safe]))


def next_line(study: Path) -> str:
    """Say how the study that a tournament wrote is played."""
    return f"Next: fedtide run {in_shell(study)}, which uses fresh seeds and test rows."


def standings_table(record: Tournament) -> Table:
    """Build the table of the entries that were played, those that came farthest first."""
    rows = []
    for candidate in played_entries(record):
        rung = record.last_rung(candidate.entry)
        stand = next(standing for standing in standings(rung.values) if standing.entry == candidate.entry)
        in_last = rung is record.reached[-1] and candidate.entry in rung.kept
        rows.append(
            [
                candidate.entry,
                (record.stands if stand.verdict == "highest" else stand.verdict)
                if in_last
                else f"dropped after {counted(rung.rounds, 'round')}",
                f"{rung.rounds} of {record.study.rounds}",
                str(len(rung.values[candidate.entry])),
                percent(stand.score),
                "" if stand.verdict == "highest" else signed_points(stand.difference),
                candidate.why,
            ]
        )
    rows += [[entry, f"failed: {why}", "", "", "", "", ""] for entry, why in record.failed.items()]
    top, first = record.reached[-1], record.standings[0].entry
    for words, by_seed in top.references.items():
        cells = [percent(Measure.of([*by_seed.values()])), signed_points(gap(by_seed, top.values[first]))]
        rows.append([words, "reference", "", str(len(by_seed)), *cells, "no federation, on the same rows"])
    named = {name: reference_words(name, target_words(record.study.data.target)) for name in record.study.references}
    lacking = [name for name, words in named.items() if words not in top.references]
    rows += [[named[name], "reference", "", "", "-", "", MISSING[name]] for name in lacking]
    difference = "difference to the highest score at that time"
    return Table(["entry", "standing", "rounds", "seeds", "score on validation rows", difference, "nominated as"], rows)


def scale_line(record: Tournament) -> str:
    """Say by what methods are judged."""
    words = target_words(record.study.data.target)
    return f"Judged by {words.score} on validation rows: {words.scale}."


@styled
def draw_curves(root: Path, record: Tournament, entries: Sequence[str]) -> Drawn:
    """Draw the accuracy of entries on validation rows over rounds."""
    figure = Figure(figsize=(9.6, 4.2))
    axes = figure.subplots()
    curves = {
        number: [curve_of(root / slug(entry) / str(seed))[1] for seed in record.last_rung(entry).values[entry]]
        for number, entry in enumerate(entries)
    }
    bands(axes, curves, entries, f"{record.study.score} on validation rows, %")
    for at in {rung.rounds for rung in record.reached}:
        axes.axvline(at, color="#777777", lw=1, ls=":")
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("rounds")
    legend_above(axes)
    return svg(figure, f"{record.study.score} on validation rows over rounds")
