"""The folder of an inspection: a page, a ready study, and rows that were in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedtide.core.atomic import check_new, making
from fedtide.inspection.findings import QUESTIONS, Findings
from fedtide.inspection.pictures import pictures
from fedtide.inspection.study import ROWS, methods, study
from fedtide.report.render import render, to_pictures

PAGE, STUDY = "inspection.html", "study.toml"


def write(found: Findings, folder: Path) -> Path:
    """Write the folder, all of it or nothing, and return the page.

    Raises:
        FedtideError: the folder exists.
    """
    check_new(folder)
    ready = study(found, folder)
    text = page(found, ready)
    with making(folder) as temporary:
        (temporary / PAGE).write_text(text, encoding="utf-8")
        if ready is not None:
            (temporary / STUDY).write_text(ready, encoding="utf-8")
            if not found.table.source:
                _save_rows(found, temporary / ROWS)
    return folder / PAGE


def _save_rows(found: Findings, path: Path) -> None:
    """Save the rows of data that were in memory, as a study reads them."""
    table = found.table
    label = table.label if table.measured else table.label.astype(str)
    columns: dict[str, Any] = {"x": np.asarray(table.features, np.float32), "y": label}
    columns |= {name: column for name, column in (("client", table.client), ("time", table.time)) if column is not None}
    np.savez(path, **columns)


def shown(found: Findings) -> str:
    """Return the answers as a notebook shows them."""
    said = (found.short, *found.table.said, *found.notes)
    return render("findings.html", said=said, answers=[(QUESTIONS[answer.question], answer) for answer in found])


def page(found: Findings, ready: str | None) -> str:
    """Return the page."""
    return render(
        "inspection.html",
        title=f"{found.table.name}: which shift is it?",
        about="",
        short=found.short,
        said=(*found.table.said, *found.notes),
        answers=[(QUESTIONS[answer.question], answer) for answer in found],
        pictures=to_pictures(pictures(found)),
        methods=methods(found) if ready else [],
        ready=ready,
        environments=[],
    )
