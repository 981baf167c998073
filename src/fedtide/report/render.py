"""HTML pages from templates, each a file that opens offline, and the parts of pages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from fedtide.core.errors import FedtideError
from fedtide.report.tables import Table


@dataclass(frozen=True)
class Picture:
    """A figure with its title and caption."""

    title: str
    caption: str
    svg: Markup

    @property
    def narrow(self) -> bool:
        """True if the figure is narrower than the page."""
        return (found := re.search(r'viewBox="0 0 ([0-9.]+)', self.svg[:500])) is not None and float(found[1]) < 500


@dataclass(frozen=True)
class Part:
    """A table with its title, if any, and its caption."""

    title: str
    table: Table
    caption: str = ""


def drawn(pictures: Iterable[tuple[str, str, str | None]]) -> list[Picture]:
    """Return pictures from titles, captions and figures, without missing figures."""
    return [Picture(title, caption, Markup(svg)) for title, caption, svg in pictures if svg]


def rendered(name: str, **values: Any) -> str:
    """Render the template `name` of this package with values; text not marked as markup is escaped."""
    page = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        loader=FunctionLoader(_template),
    )  # fmt: skip
    return page.get_template(name).render(**values)


def _template(name: str) -> str:
    return files("fedtide.report").joinpath(name).read_text(encoding="utf-8")


def environment_line(root: Path, name: str) -> str:
    """Describe time, machine and packages with which a folder was made; "" where unknown."""
    path = root / "environment.json"
    if not path.is_file():
        return ""
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        packages = ", ".join(f"{name} {number}" for name, number in about["packages"].items() if number)
        machine = f"Python {about['python']}, {about['processor']}, {about['cores']} cores"
        return f"{name}: {about['made']}, {machine}; {packages}"
    except (ValueError, LookupError, TypeError, AttributeError):
        raise FedtideError(
            f"{path}: damaged; it is needed for the report's last line only and may be removed"
        ) from None
