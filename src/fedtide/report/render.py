"""Pages from templates: each is one HTML file that opens offline."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined


def rendered(name: str, **values: Any) -> str:
    """The template `name` of this package with values put in; text that is not marked as markup is escaped."""
    page = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        loader=FunctionLoader(_template),
    )  # fmt: skip
    return page.get_template(name).render(**values)


def _template(name: str) -> str:
    return files("fedtide.report").joinpath(name).read_text(encoding="utf-8")
