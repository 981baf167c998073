"""The keys of an experiment file as tables: types, ranges and defaults from the code, meanings from docstrings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from fedtide.config import Experiment
from fedtide.config.keys import allowed, code, documented, ingredients, spelled, table_fields, within_list
from fedtide.core.docstrings import Doc
from fedtide.fields.shapes import bare, described, is_choice, is_table, tags

PLACES: dict[Any, str] = {}
"""Anchor of the table of each class that stands on the configuration page."""


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


TABLES = {tables_of(kind): name for name, kind in reversed(ingredients().items())}
"""Keys below which the tables of each type stand; other keys of the type link to them."""


def stands_at(path: str, kind: Any) -> bool:
    """Whether the tables of a key are still to be shown, and below it: another key of the same type may have them."""
    tables = tables_of(kind)
    return tables is not None and tables not in PLACES and TABLES.setdefault(tables, path) == path


# -- the configuration page -------------------------------------------------------------------------------------------


def configuration() -> str:
    """Every key of an experiment file."""
    text = [
        heading(2, "The top of the file", "experiment", Experiment),
        keys(Experiment, ""),
        *section(Experiment, "", 2),
        heading(2, "Ingredients of methods", "ingredients"),
        "What else a method may say is up to its algorithm: see its page under [Algorithms](algorithms/index.md). "
        "Most take the same ingredients:",
    ]
    for name, kind in ingredients().items():
        if stands_at(name, kind):
            text += table(name, kind, 3)
    return "\n\n".join(part for part in text if part)


def section(owner: Any, above: str, level: int) -> Iterator[str]:
    """The tables below a table."""
    for name, (kind, _) in table_fields(owner).items():
        path = f"{above}.{name}" if above else name
        if stands_at(path, kind):
            yield from table(path, tables_of(kind), level)


def table(path: str, kind: Any, level: int) -> Iterator[str]:
    """A table of the file, or a choice between several: its heading, its docstring, its keys, the tables below it."""
    kind = bare(kind)
    yield heading(level, "`[[method]]`" if path == "method" else f"`{path}`", anchor(path), kind)
    if is_choice(kind):
        members = [bare(member) for member in get_args(kind)]
        places = [TABLES.setdefault(member, f"{path}-{tags(member)[0]}") for member in members]
        links = [f"[{code(tags(member)[0])}](#{anchor(place)})" for member, place in zip(members, places, strict=True)]
        yield f"Choose with `{'by' if 'by' in table_fields(members[0]) else 'kind'}`: {', '.join(links)}."
        for member, place in zip(members, places, strict=True):
            if place == f"{path}-{tags(member)[0]}":
                yield from _member(path, member, level + 1)
        return
    doc = documented(kind)
    yield doc.prose
    if tags(kind):
        yield f"The only kind is {code(tags(kind)[0])}."
    yield keys(kind, path)
    yield from section(kind, path, level + 1)


def _member(path: str, kind: Any, level: int) -> Iterator[str]:
    first, *others = tags(kind)
    also = f" (also `{'`, `'.join(others)}`)" if others else ""
    yield heading(level, f"`{first}`{also}", f"{anchor(path)}-{first}", kind)
    yield documented(kind).prose
    yield keys(kind, f"{path}")
    yield from section(kind, path, level + 1)


def keys(kind: Any, path: str) -> str:
    """A table of keys, without the one that chooses the table."""
    doc, rows, shown = documented(kind), [], table_fields(kind)
    words = [name for name in ("kind", "by") if name in shown and get_origin(bare(shown[name][0])) is Literal]
    for name, (hint, default) in shown.items():
        if name in words[:1]:
            continue
        rows.append(row(name, hint, default, explained(kind, doc, name, hint), f"{path}.{name}" if path else name))
    return "\n".join(["| key | allowed | default | meaning |", "| --- | --- | --- | --- |", *rows]) if rows else ""


def row(name: str, hint: Any, default: Any, meaning: str, path: str = "", page: str = "") -> str:
    """One key, with a link to its tables, which are on the configuration page."""
    place = TABLES.setdefault(tables_of(hint), path) if path and tables_of(hint) else ""
    shown = f"[`{name}`]({page}#{anchor(place)})" if place else f"`{name}`"
    cells = [shown, allowed(hint), spelled(default), meaning]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def heading(level: int, text: str, place: str, kind: Any = None) -> str:
    """A heading, with an anchor that readers of the Markdown have too."""
    PLACES.setdefault(kind, place)
    return f'<a id="{place}"></a>\n\n{"#" * level} {text}'


def anchor(path: str) -> str:
    """The name of a heading in links."""
    return path.replace(".", "-").replace("_", "-")
