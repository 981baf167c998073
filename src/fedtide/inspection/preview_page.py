"""The page of a preview, and what a notebook shows of it."""

from __future__ import annotations

from pathlib import Path

from fedtide.core.atomic import write_text
from fedtide.core.errors import FedtideError
from fedtide.inspection.preview import Shown
from fedtide.inspection.preview_pictures import pictures
from fedtide.report.render import anchor, render, to_pictures


def write(shown: Shown, path: Path) -> Path:
    """Write the page.

    Raises:
        FedtideError: it is not called .html.
    """
    if path.suffix != ".html":
        raise FedtideError(f"{path}: not the name of a page; allowed: one that ends in .html")
    sections = [
        (each.title, anchor(each.title) if each.title else "", each.lines(), to_pictures(pictures(each), each.title))
        for each in shown.previews
    ]
    write_text(path, render("preview.html", title=shown.name, about="", sections=sections, environments=[]))
    return path


def shown(found: Shown) -> str:
    """Return lines and pictures as a notebook shows them."""
    sections = [(each.title, "", each.lines(), to_pictures(pictures(each))) for each in found.previews]
    return render("shown.html", sections=sections)
