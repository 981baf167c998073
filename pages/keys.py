"""The keys of an experiment file as tables: types, ranges and defaults from the code, meanings from docstrings."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from fedtide.config import Experiment
from fedtide.config.keys import (
    allowed,
    chosen_fields,
    code,
    documented,
    ingredients,
    spelled,
    table_fields,
    within_list,
)
from fedtide.core.docstrings import Doc
from fedtide.fields.shapes import bare, described, is_choice, is_table, tags


@dataclass(frozen=True)
class Places:
    """Where the tables stand on the configuration page, which is written from its top to its end.

    Args:
        tables: the key below which the tables of each type stand; other keys of the type link to them.
        anchors: anchor of the table of each class, as soon as it is written.
    """

    tables: dict[Any, str]
    anchors: dict[Any, str]


# -- docstrings -------------------------------------------------------------------------------------------------------


def explained(owner: Any, doc: Doc, name: str, kind: Any) -> str:
    """The text of a docstring about a key, or else about its type."""
    if text := doc.args.get(name) or described(kind):
        return re.sub(r"(?<!\.)\.$", "", text)
    raise LookupError(f"{owner.__name__}.{name}: no line in the Args section of its docstring ({owner.__module__})")


# -- where tables stand --------------------------------------------------------------------------------------------


def tables_of(kind: Any) -> Any:
    """The table of a type, or the choice between several; None if it is neither."""
    inner = within_list(bare(kind))
    return inner if is_choice(inner) or is_table(inner) else None


def stands_at(places: Places, path: str, kind: Any) -> bool:
    """Whether the tables of a key are still to be shown, and below it: another key of the same type may have them."""
    tables = tables_of(kind)
    return tables is not None and tables not in places.anchors and places.tables.setdefault(tables, path) == path


# -- the configuration page -------------------------------------------------------------------------------------------


def configuration() -> tuple[str, Places]:
    """Every key of an experiment file, and where their tables stand."""
    places = Places({tables_of(kind): name for name, kind in reversed(ingredients().items())}, {})
    text = [
        heading(places, 2, "The top of the file", "experiment", Experiment),
        keys(places, Experiment, ""),
        *section(places, Experiment, "", 2),
        heading(places, 2, "Ingredients of methods", "ingredients"),
        "What else a method may say is up to its algorithm: see its page under [Algorithms](algorithms/index.md). "
        "Most take the same ingredients:",
    ]
    for name, kind in ingredients().items():
        if stands_at(places, name, kind):
            text += table(places, name, kind, 3)
    return "\n\n".join(part for part in text if part), places


def section(places: Places, owner: Any, above: str, level: int) -> Iterator[str]:
    """The tables below a table."""
    for name, (kind, _) in table_fields(owner).items():
        path = f"{above}.{name}" if above else name
        if stands_at(places, path, kind):
            yield from table(places, path, tables_of(kind), level)


def table(places: Places, path: str, kind: Any, level: int) -> Iterator[str]:
    """A table of the file, or a choice between several: its heading, its docstring, its keys, the tables below it."""
    kind = bare(kind)
    yield heading(places, level, "`[[method]]`" if path == "method" else f"`{path}`", anchor(path), kind)
    if is_choice(kind):
        members = [bare(member) for member in get_args(kind)]
        at = [places.tables.setdefault(member, f"{path}-{tags(member)[0]}") for member in members]
        links = [f"[{code(tags(member)[0])}](#{anchor(place)})" for member, place in zip(members, at, strict=True)]
        yield f"Choose with `{'by' if 'by' in table_fields(members[0]) else 'kind'}`: {', '.join(links)}."
        for member, place in zip(members, at, strict=True):
            if place == f"{path}-{tags(member)[0]}":
                yield from _member(places, path, member, level + 1)
        return
    doc = documented(kind)
    yield doc.prose
    if tags(kind):
        yield f"The only kind is {code(tags(kind)[0])}."
    yield keys(places, kind, path)
    yield from section(places, kind, path, level + 1)


def _member(places: Places, path: str, kind: Any, level: int) -> Iterator[str]:
    first = tags(kind)[0]
    yield heading(places, level, f"`{first}`", f"{anchor(path)}-{first}", kind)
    yield documented(kind).prose
    yield keys(places, kind, path)
    yield from section(places, kind, path, level + 1)


def keys(places: Places, kind: Any, path: str) -> str:
    """A table of keys, without the one that chooses the table."""
    doc, rows = documented(kind), []
    for name, (hint, default) in chosen_fields(kind).items():
        if tables_of(hint):
            places.tables.setdefault(tables_of(hint), f"{path}.{name}" if path else name)
        rows.append(row(places, name, hint, default, explained(kind, doc, name, hint)))
    return "\n".join(["| key | allowed | default | meaning |", "| --- | --- | --- | --- |", *rows]) if rows else ""


def row(places: Places, name: str, hint: Any, default: Any, meaning: str, page: str = "") -> str:
    """One key, with a link to its tables, or those of its name, which are on the configuration page."""
    place = places.tables.get(tables_of(hint), name) if tables_of(hint) else ""
    shown = f"[`{name}`]({page}#{anchor(place)})" if place else f"`{name}`"
    cells = [shown, allowed(hint), spelled(default), meaning]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def heading(places: Places, level: int, text: str, place: str, kind: Any = None) -> str:
    """A heading, with an anchor that readers of the Markdown have too."""
    places.anchors.setdefault(kind, place)
    return f'<a id="{place}"></a>\n\n{"#" * level} {text}'


def anchor(path: str) -> str:
    """The name of a heading in links."""
    return path.replace(".", "-").replace("_", "-")
