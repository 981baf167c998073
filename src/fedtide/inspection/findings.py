"""An inspection of a table: its findings, a page of six pictures, and a study that can be run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedtide.core.atomic import check_new, making
from fedtide.inspection.answers import QUESTIONS, Answers, answer
from fedtide.inspection.study import ROWS, methods, study, text_of
from fedtide.inspection.table import Table

PAGE, STUDY = "inspection.html", "study.toml"


class Findings(Answers):
    """The answers to the eight questions about a table: printed they are lines, in a notebook a table.

    Its property `short` has the shift in a sentence or two. `notes` are on rows that were drawn, on a feature that is
    the label, and on doubtful times or zones.

    Args:
        table: the table.
        answers: by question, in order; `findings["drift"]` is one of them.
        rows: the rows that were looked at.
        clients: differences between clients; None without a column of clients.
        cycles: changes over days, weeks and years; empty without a column of times.
        drift: differences between stretches of time; None without a column of times.
    """

    def write(self, folder: str | Path) -> Path:
        """Write a folder with a page of six pictures and a study, all of it or nothing, and return the page.

        Args:
            folder: it must not exist.
        """
        folder = Path(folder)
        check_new(folder)
        values = study(self, folder)
        text = None if values is None else text_of(self, values)
        page = _page(self, text)
        with making(folder) as temporary:
            (temporary / PAGE).write_text(page, encoding="utf-8")
            if text is not None:
                (temporary / STUDY).write_text(text, encoding="utf-8")
                if not self.table.source:
                    _save_rows(self.table, temporary / ROWS)
        return folder / PAGE

    def _repr_html_(self) -> str:
        from fedtide.draw.html import render

        lines = (self.short, *self.table.said, *self.notes)
        return render("findings.html", said=lines, answers=_titled(self))


def inspect_table(table: Table, seed: int = 0) -> Findings:
    """Answer the eight questions about a table.

    Raises:
        FedtideError: all labels are the same.
    """
    return Findings(**vars(answer(table, seed)))


def _titled(answers: Answers) -> list[tuple[str, Any]]:
    return [(QUESTIONS[answer.question], answer) for answer in answers]


def _page(answers: Answers, text: str | None) -> str:
    from fedtide.draw.html import render, to_pictures  # they draw: answers alone do not wait for it
    from fedtide.inspection.finding_pictures import pictures

    return render(
        "inspection.html",
        title=f"{answers.table.name}: which shift is it?",
        about="",
        short=answers.short,
        said=(*answers.table.said, *answers.notes),
        answers=_titled(answers),
        pictures=to_pictures(pictures(answers)),
        methods=methods(answers) if text else [],
        ready=text,
        environments=[],
    )


def _save_rows(table: Table, path: Path) -> None:
    """Save the rows of data that were in memory in the format of a study's source."""
    label = table.label if table.measured else table.label.astype(str)
    columns: dict[str, Any] = {"x": np.asarray(table.features, np.float32), "y": label}
    columns |= {name: column for name, column in (("client", table.client), ("time", table.time)) if column is not None}
    np.savez(path, **columns)
