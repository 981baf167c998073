"""HTML pages from templates, each a file that opens offline, and the parts of pages."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import matplotlib
from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

from fedtide.core.atomic import check_free, replacing, write_text
from fedtide.core.errors import FedtideError
from fedtide.draw.figures import STYLE, Drawn, Look, save_figure
from fedtide.draw.prose import slug
from fedtide.draw.tables import Table

MARK = b"made by Fedtide"
"""Bytes at the beginning of pages, of pictures and of tables in LaTeX: files with this mark may be replaced."""

NUMBER = re.compile(r"(?<=[\d±]) (?=±|%|\d|(?:points?|rounds?|seeds?|simulated|s|min|[kMGT]?B)\b)")
"""Spaces inside a number with its error and unit, at which no line may break."""

TEMPLATES = Environment(
    autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    loader=DictLoader({
        file.name: file.read_text(encoding="utf-8")
        for file in files("fedtide.draw").iterdir()
        if file.name.endswith(".html")
    }),
)  # fmt: skip
"""Templates, read with this module: at the end of a long run the files may be of another version."""


@dataclass(frozen=True)
class Picture:
    """A figure with its title and caption; `anchor` is its name on the page and among saved files."""

    title: str
    caption: str
    svg: Markup
    anchor: str
    drawn: Drawn = field(repr=False)

    @property
    def link(self) -> str:
        """`data:` address of the figure on white paper."""
        return _link("image/svg+xml", self.file)

    @property
    def file(self) -> str:
        """Content of the SVG file."""
        drawn = str(self.drawn).replace("<svg", '<svg style="background: #fff"', 1)
        return f"<!-- {MARK.decode()} -->\n{drawn}"

    @property
    def narrow(self) -> bool:
        """True if the figure is narrower than the page."""
        return bool(self.drawn.figure.get_figwidth() < 7)


@dataclass(frozen=True)
class Part:
    """A table with its title and caption; `anchor` is its name on the page and among saved files.

    swatches: marks before the names of its rows.
    """

    title: str
    table: Table
    caption: str = ""
    anchor: str = ""
    swatches: Sequence[Markup] = ()

    @property
    def links(self) -> dict[str, str]:
        """`data:` addresses of the table, by file extension."""
        kinds = {"csv": "text/csv", "tex": "text/plain"}
        return {end: _link(kind, self.files[end]) for end, kind in kinds.items()}

    @property
    def files(self) -> dict[str, str]:
        """Contents of the files, by extension: first the one whose mark tells that both are ours."""
        return {"tex": f"% {MARK.decode()}\n{self.table.latex()}", "csv": self.table.csv()}


Pictured = tuple[str, str, Drawn | None]
"""Title of a picture, its caption, and the figure; None without one."""


def to_pictures(pictures: Iterable[Pictured], place: str = "") -> list[Picture]:
    """Return pictures from titles, captions and figures, without missing figures; `place` begins their anchors."""
    return [Picture(title, caption, Markup(svg), anchor(title, place), svg) for title, caption, svg in pictures if svg]


def anchor(title: str, place: str = "") -> str:
    """Return the anchor of a part of a page.

    >>> anchor("Accuracy over rounds"), anchor("Clusters", "lr 0.1")
    ('accuracy-over-rounds', 'lr-0.1-clusters')
    """
    return slug(f"{place} {title}")


def _link(kind: str, text: str) -> str:
    """Return a `data:` address of a text."""
    for character in '%"#<>\n':
        text = text.replace(character, f"%{ord(character):02X}")
    return f"data:{kind};charset=utf-8,{text}"


def check_saved(parts: Iterable[Picture | Part], directory: Path) -> None:
    """Raise if a picture or table would take the place of a file that is not ours."""
    if directory.exists() and not directory.is_dir():
        raise FedtideError(f"{directory}: is a file, allowed: a folder")
    for part in parts if directory.exists() else ():
        ends = ("svg", "pdf") if isinstance(part, Picture) else ("tex", "csv")
        for end in ends:
            check_free(directory / f"{part.anchor}.{end}", MARK, directory / f"{part.anchor}.{ends[0]}")


def save_pictures(pictures: Iterable[Picture], directory: Path) -> None:
    """Write every picture as SVG and as PDF."""
    directory.mkdir(parents=True, exist_ok=True)
    for picture in pictures:
        write_text(directory / f"{picture.anchor}.svg", picture.file)
        with replacing(directory / f"{picture.anchor}.pdf") as temporary, matplotlib.rc_context(STYLE):
            save_figure(picture.drawn.figure, temporary, format="pdf", metadata={"CreationDate": None})


def save_tables(parts: Iterable[Part], directory: Path) -> None:
    """Write every table as CSV and as LaTeX."""
    directory.mkdir(parents=True, exist_ok=True)
    for part in parts:
        for end, text in part.files.items():
            write_text(directory / f"{part.anchor}.{end}", text)


POINTS = {
    "o": "M15 6a3 3 0 1 0 6 0a3 3 0 1 0-6 0z", "s": "M15 3h6v6h-6z", "^": "M18 2l4 7h-8z", "D": "M18 2l4 4-4 4-4-4z",
    "v": "M18 10l4-7h-8z", "X": "M15 3l6 6M21 3l-6 6", "P": "M18 2v8M14 6h8",
}  # fmt: skip
"""Markers of matplotlib as paths, in a swatch of 36 by 12."""


def swatch(style: Look) -> Markup:
    """Return a piece of a method's line, with its color, dashes and marker."""
    color = style.color.lower()  # as in the style sheet
    gaps = "" if style.dashes == "-" else f' stroke-dasharray="{" ".join(f"{2 * part:g}" for part in style.dashes[1])}"'
    point = f'<path d="{POINTS[style.marker]}" fill="{color}" stroke-width="2"/>' if style.marker else ""
    return Markup(
        f'<svg class="swatch" viewBox="0 0 36 12" width="36" height="12" aria-hidden="true" style="stroke: {color}">'
        f'<path d="M0 6h36" stroke-width="3" fill="none"{gaps}/>{point}</svg>'
    )


def unbreakable(text: str) -> str:
    """Return a text whose numbers do not break across lines.

    >>> unbreakable("It has 91.5 ± 0.2 % over 6 rounds.")
    'It has 91.5\\xa0±\\xa00.2\\xa0% over 6\\xa0rounds.'
    """
    return NUMBER.sub("\u00a0", text)


TEMPLATES.filters["whole"] = unbreakable


def render(name: str, **values: Any) -> str:
    """Render the template `name` with values; text that is not `Markup` is escaped."""
    return TEMPLATES.get_template(name).render(**values)
