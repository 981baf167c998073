"""Page of a tournament: who leads, who cannot be told apart, how far each came and why it was nominated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedtide.config import slug, to_toml
from fedtide.core.atomic import write_text
from fedtide.core.errors import FedtideError
from fedtide.data.targets import TARGET_WORDS, TargetWords
from fedtide.draw.prose import listed
from fedtide.evaluate.measure import Measure
from fedtide.report.environment import environment_line
from fedtide.report.figures import STYLE, Drawn, label, legend_above, look, svg
from fedtide.report.measures import percent, seconds, signed_points
from fedtide.report.render import Part, render, swatch, to_pictures
from fedtide.report.tables import Table
from fedtide.tuning.ladder import ENOUGH, Standing, standings
from fedtide.tuning.tournament import STUDY, Rung, Tournament, curve_of, played_by, played_entries, read_tournament

EARLIER = " Entries that were dropped earlier have scores of fewer rounds, which may lie above those of more."
MOST_CURVES = 12
"""Entries whose curves are drawn: those that came farthest."""


def write_recommendation(root: Path, out: Path | None = None) -> Path:
    """Write the page about the folder of a tournament.

    Args:
        root: the folder.
        out: path of the page; by default `report.html` in the folder.

    Raises:
        FedtideError: the folder is not that of a tournament, or no rung of it was reached.
    """
    made = read_tournament(root, imports=False)
    words = TARGET_WORDS[made.study.data.target.kind]
    if not made.survivors:
        raise FedtideError(f"{root}: no rung is reached yet; go on with: fedtide resume {root}")
    ready, entries = root / STUDY, [each.entry for each in played_entries(made)]
    pictures = [
        (f"{words.score.capitalize()} on validation rows over rounds",
         "A line is the mean over the seeds that an entry played, as far as all of them go; where it ends the entry "
         "was dropped. Dotted lines are rungs.", curves(root, made, entries[:MOST_CURVES])),
        ("Difference to the leader",
         "Of the entries of the last rung, paired over seeds, with 95 % intervals (Student's t): an entry whose "
         "interval reaches 0 cannot be told apart. With fewer than three seeds there is no interval.",
         differences(made)),
    ]  # fmt: skip
    left = left_out(made)
    text = render(
        "recommendation.html",
        title=f"Recommendation: {made.study.title or root.resolve().name}",
        about=made.study.description,
        headline=headline(made),
        setting=setting(made),
        parts=[
            Part("How they stand", standings_table(made), flatters(words) + earlier(made), "how-they-stand",
                 [swatch(look(number)) if number < MOST_CURVES else Markup("") for number in range(len(entries))]),
            *([Part("Not entered", left, "", "not-entered")] if left.rows else []),
        ],
        pictures=to_pictures(pictures),
        said=made.said,
        inspection=(root / "inspection").is_dir(),
        ready=ready.read_text(encoding="utf-8") if ready.is_file() else "not finished yet",
        config=to_toml(made.study),
        environments=[environment_line(root, root.resolve().name)],
    )  # fmt: skip
    path = out or root / "report.html"
    write_text(path, text)
    return path


# -- words and tables --------------------------------------------------------------------------------------------------


def flatters(words: TargetWords) -> str:
    """Say what the scores of a tournament about a kind of target are."""
    return (
        f"Scores are {words.scores} on validation rows, by which methods were chosen: they flatter, the leader's most. "
        f"What the {words.score} is a run of the study tells, on test rows and seeds that the tournament did not see."
        f" A ± is one standard error over seeds.{words.explained}"
    )


def earlier(made: Tournament) -> str:
    """Say that not all scores are of the same rounds; "" where they are."""
    rounds = {rung.rounds for rung in made.reached for entry in rung.values if made.last_rung(entry) is rung}
    return EARLIER if len(rounds) > 1 else ""


def headline(made: Tournament) -> str:
    """Say who leads, and who cannot be told apart from it."""
    if not made.reached:
        return "No rung is reached yet."
    rung, (first, *others) = made.reached[-1], made.survivors
    seeds = f"{len(rung.seeds)} seed{'s' * (len(rung.seeds) != 1)}"
    after = f"After {rung.rounds} of {made.study.rounds} rounds with {seeds}"
    if not others:
        said = f"{after} {first} leads clearly among those that came so far."
    else:
        said = f"{after} {first} leads, and cannot be told apart from {listed(others)}."
    why = f" With fewer than {ENOUGH} seeds no two can be told apart." if len(rung.seeds) < ENOUGH and others else ""
    entered = {each.method for each in made.candidates if each.entry in made.played}
    out = [name for name in dict.fromkeys(each.method for each in made.candidates) if name not in entered]
    left = f" Not entered, as the budget was too short: {listed(out)}." if out else ""
    return f"{said}{why}{left} Next is a run of the study, on fresh seeds and test rows."


def setting(made: Tournament) -> str:
    """Describe the tournament."""
    study, seeds = made.study, played_by(made.study).seeds
    rungs = " and ".join(map(str, made.rungs))
    whole = "" if not made.rungs or made.rungs[-1] == study.rounds else (
        f" The budget did not pay for all {study.rounds} rounds: who is slow to learn may be better than it seems."
    )  # fmt: skip
    return (
        f"{len(made.candidates)} candidates, {len(made.entered)} entered; rungs after {rungs or 'no'} rounds; seeds "
        f"from {seeds[0]} on, which the study does not play. {_seconds(made.spent)} of a budget of "
        f"{_seconds(made.budget)} were spent{f'; {made.ended}' if made.ended else ' so far'}.{whole}"
    )


def _seconds(number: float) -> str:
    return seconds(Measure(number, None, []))


def standings_table(made: Tournament) -> Table:
    """Build the table of the entries that were played, those that came farthest first."""
    rows, last = [], made.reached[-1] if made.reached else None
    for each in played_entries(made):
        rung = made.last_rung(each.entry)
        assert rung is not None
        stand = next(found for found in standings(rung.values) if found.entry == each.entry)
        rows.append(
            [
                each.entry,
                verdict(stand, rung, last, made),
                f"{rung.rounds} of {made.study.rounds}",
                str(len(rung.values[each.entry])),
                percent(stand.score),
                "" if stand.verdict == "leads" else signed_points(stand.difference),
                each.why,
            ]
        )
    rows += [[entry, f"failed: {why}", "", "", "", "", ""] for entry, why in made.failed.items()]
    header = ["entry", "standing", "rounds", "seeds", "score on validation rows", "to who led then", "nominated as"]
    return Table(header, rows)


def verdict(stand: Standing, rung: Rung, last: Rung | None, made: Tournament) -> str:
    """Say how an entry stands, or where it was dropped."""
    if rung is last and stand.entry in rung.kept:
        return stand.verdict
    if stand.verdict == "behind" and rung.rounds == made.rungs[-1]:
        return "behind"
    return f"dropped after {rung.rounds} round{'s' * (rung.rounds != 1)}"


def left_out(made: Tournament) -> Table:
    """Build the table of the candidates that the budget did not reach."""
    rows = [[each.entry, each.why or "nothing that was found speaks for it"] for each in made.candidates
            if each.entry not in made.played]  # fmt: skip
    return Table(["candidate", "nominated as"], rows)


# -- pictures ----------------------------------------------------------------------------------------------------------


def curves(root: Path, made: Tournament, entries: Sequence[str]) -> Drawn:
    """Draw the accuracy of entries on validation rows over rounds."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 4.2))
        axes = figure.subplots()
        for number, entry in enumerate(entries):
            rung = made.last_rung(entry)
            seeds = rung.values[entry] if rung else ()
            found = [curve_of(root / slug(entry) / str(seed)) for seed in seeds]
            known = [dict(zip(done, values, strict=True)) for done, values, _ in found]
            shared = sorted(set.intersection(*map(set, known))) if known else []
            shown = look(number)
            mean = [100 * float(np.mean([each[done] for each in known])) for done in shared]
            marker = shown.marker or "."  # one evaluation alone is seen, too
            axes.plot(shared, mean, color=shown.color, ls=shown.dashes, marker=marker, ms=4, label=label(entry))
        for at in {rung.rounds for rung in made.reached}:
            axes.axvline(at, color="#777777", lw=1, ls=":")
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("rounds")
        axes.set_ylabel(f"{made.study.score} on validation rows, %")
        legend_above(axes)
        return svg(figure, f"{made.study.score} on validation rows over rounds")


def differences(made: Tournament) -> Drawn | None:
    """Draw the differences of the entries of the last rung to the leader; None where it is alone."""
    found = made.standings[1:]
    if not found:
        return None
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 1.4 + 0.32 * len(found)))
        axes = figure.subplots()
        for place, each in enumerate(found):
            far = each.verdict == "behind"
            mean, margin = 100 * (each.difference.mean or 0.0), 100 * (each.difference.margin or 0.0)
            axes.errorbar(
                mean, place, xerr=margin or None, marker="s" if far else "o", mfc="none" if far else "#0072B2",
                color="#0072B2", capsize=3, ms=6,
            )  # fmt: skip
        axes.axvline(0.0, color="#777777", lw=1)
        axes.set_yticks(range(len(found)), [label(each.entry) for each in found])
        axes.invert_yaxis()
        axes.set_xlabel(f"score less that of {label(made.standings[0].entry)}, points")
        return svg(figure, "difference to the leader")
