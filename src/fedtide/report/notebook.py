"""What a run folder found, as a notebook shows it: headline, table and curve of its report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from markupsafe import Markup

from fedtide.report import figures, narrative, tables
from fedtide.report.alarms import alarms
from fedtide.report.environment import NANO
from fedtide.report.render import render
from fedtide.report.summary import Study


def shown(study: Study, page: Path) -> str:
    """Return HTML: of a sweep its table, else headline, methods and accuracy; `page` is where the report is."""
    record, summary, alone = study.records[0], study.summaries[0], not study.swept
    return render(
        "notebook.html",
        title=summary.title,
        nano=study.nano,
        warning=NANO,
        alarms=alarms(summary) if alone else [],
        headline=narrative.headline(record, summary) if alone else "",
        found=tables.methods_table(summary) if alone else tables.sweep_table(study.summaries, study.chosen),
        picture=Markup(figures.accuracy_over_rounds(record, summary.at_floor)) if alone else None,
        page=page,
    )


def tuned(title: str, found: tables.Table, page: Path) -> str:
    """Return HTML of what a tuning found."""
    empty = {"nano": False, "warning": "", "alarms": [], "headline": "", "picture": None}
    return render("notebook.html", title=title, found=found, page=page, **empty)


def simulated(result: Any) -> str:
    """Return HTML of what a simulation found: its line and its curve."""
    picture = Markup(figures.accuracy_of_simulation(result.rounds, result.accuracy)) if result.rounds else None
    return render("simulated.html", said=repr(result), picture=picture)
