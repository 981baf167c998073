"""Results of a run folder in a notebook: headline, table and curve of its report."""

from pathlib import Path
from typing import Any

from markupsafe import Markup

from fedtide.draw.html import render
from fedtide.draw.tables import Table
from fedtide.report import narrative
from fedtide.report.accuracy import about_methods, accuracy_of_simulation, accuracy_over_rounds, methods_table
from fedtide.report.page import sweep_table
from fedtide.report.run_records import NANO
from fedtide.report.summary import Study


def render_study(study: Study, page: Path) -> str:
    """Return HTML: of a sweep its table, else headline, methods and accuracy; `page` is the path of the report."""
    record, summary, single = study.records[0], study.summaries[0], not study.swept
    return render(
        "notebook.html",
        title=summary.title,
        nano=NANO if study.nano else "",
        alarms=narrative.alarms(summary) if single else [],
        headline=narrative.headline(record, summary) if single else "",
        content=methods_table(summary) if single else sweep_table(study),
        caption=about_methods(record, summary) if single else "",
        picture=Markup(accuracy_over_rounds(record)) if single else None,
        page=page,
    )


def render_table(title: str, content: Table, page: Path) -> str:
    """Return HTML of a title and a table; `page` is the path of the report."""
    return render("notebook.html", title=title, content=content, page=page)


def render_simulation(result: Any) -> str:
    """Return HTML of a simulation: its line and its curve."""
    picture = Markup(accuracy_of_simulation(result.rounds, result.accuracy)) if result.rounds else None
    return render("simulated.html", text=repr(result), picture=picture)
