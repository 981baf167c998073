"""Commands that list: recipes, algorithms, keys and models."""

from __future__ import annotations

import sys
import tomllib
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from fedtide.core.errors import FedtideError, refused, unknown
from fedtide.fields.vocabulary import Family, nearest
from fedtide.report.terminal import console
from fedtide.runs.job import recipe, recipes

if TYPE_CHECKING:
    from fedtide.config.keys import Key


def list_recipes(name: str | None = None, /) -> int:
    """List the recipes that ship with the package, or print one as TOML.

    Args:
        name: print this one.
    """
    if name is not None:
        sys.stdout.write(recipe(name).read_text(encoding="utf-8"))
        return 0
    table = Table("recipe", "scales", "what it shows", box=None, pad_edge=False)
    for path in recipes():
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        table.add_row(path.stem, " ".join(content.get("scale", {})) or "-", content.get("description", ""))
    console().print(table)
    return 0


def algorithms(name: str | None = None, /, *, family: Family | None = None) -> int:
    """List the algorithms, with their papers and what the server sees of a client; or describe one.

    Args:
        name: describe this one: its paper, its messages, its keys, and the laws from which it is exempt.
        family: list only these: one model (global), another server step (server-optimizer), branches of a network,
            components (mixture), a model for each cluster (clustered), or no federation (baseline).
    """
    from fedtide.algorithms import REGISTRY
    from fedtide.config.keys import source

    screen = console()
    if name is not None:
        if family is not None:
            raise refused("--family", family, "without the name of an algorithm")
        _describe(name, screen)
        return 0
    heads = ("algorithm", "family", "what it is", "paper", "the server sees, and what its cohort asks")
    table = Table(*heads, box=None, pad_edge=False)
    for algorithm, entry in REGISTRY.items():
        if family in (None, entry.family):
            about = source(algorithm)
            paper = f"{about.paper}, {about.year}" if about.paper else ""
            table.add_row(algorithm, entry.family, f"{about.title}: {about.summary}", paper, entry.sees)
    screen.print(table)
    return 0


def _describe(name: str, screen: Console) -> None:
    """Print the description of one algorithm."""
    from fedtide.algorithms import REGISTRY
    from fedtide.config.keys import about, keys_of, options, safe_form, tables_in

    if name not in REGISTRY:
        raise unknown("algorithms", name, list(REGISTRY))
    entry = REGISTRY[name]
    laws = [f"It is exempt from the law of {law}: {why}." for law, why in entry.exempt.items()]
    lines = (
        f"Family: {entry.family}.",
        f"Sends: {entry.sends}.",
        f"The server sees: {entry.sees}, and what its cohort asks.",
        f"Clients keep: {entry.keeps}.",
        f"safe = true: {safe_form(name).replace('`', '') or 'it has no other form'}.",
    )
    for line in (*about(name), *lines, *laws):
        screen.print(line)
    screen.print()
    _print_keys(keys_of(name), screen)
    tables = [f"fedtide keys method.{key}" for key, (kind, _) in options(name).items() if tables_in(kind)]
    if tables:
        screen.print(f"\nKeys of the tables: {', '.join(tables)}")


def keys(key: str = "", /) -> int:
    """List the keys of an experiment file, or of one of its tables: allowed values, defaults and meaning.

    Args:
        key: dotted, such as data.partition (every kind), data.partition.dirichlet (one kind), data.partition.alpha (one
            key) or method.local; without it the top of the file.
    """
    from fedtide.config.keys import sections

    screen = console()
    for number, section in enumerate(sections(key)):
        if number:
            screen.print()
        screen.print(section.title, style="bold")
        screen.print(section.about)
        if section.keys:
            _print_keys(section.keys, screen)
    if key in ("", "method"):
        screen.print("\nOf a table: fedtide keys TABLE. Of an algorithm: fedtide algorithms NAME.")
    return 0


def models(name: str | None = None, /) -> int:
    """List the models, or the keys of one.

    Args:
        name: list the keys of this one.
    """
    from fedtide.config.keys import sections, tables_in
    from fedtide.fields.shapes import tags
    from fedtide.models import Model

    if name is not None:
        names = [tags(model)[0] for model in tables_in(Model)]
        if name not in names:
            raise FedtideError(f"models: found '{name}', {nearest(name, names)}")
        return keys(f"model.{name}")
    table = Table("model", "what it is", "keys", box=None, pad_edge=False)
    for section, model in zip(sections("model"), tables_in(Model), strict=True):
        table.add_row(tags(model)[0], section.about, ", ".join(key.name for key in section.keys) or "-")
    console().print(table)
    return 0


def _print_keys(rows: list[Key], screen: Console) -> None:
    table = Table("key", "allowed", "default", "what it is", box=None, pad_edge=False)
    for key in rows:
        table.add_row(key.name, key.allowed, key.default, key.meaning)
    screen.print(table)
