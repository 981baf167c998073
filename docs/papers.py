"""The page of papers: the command for every table and figure, and what was found (docs/papers.toml, docs/results)."""

from __future__ import annotations

import json
import shlex
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kept import as_markdown

DOCS = Path(__file__).parent
LONGEST = 2
"""Options of a command that stands in a table; longer ones stand below it."""


def contents() -> list[dict[str, Any]]:
    """The papers, with their rows."""
    papers: list[dict[str, Any]] = tomllib.loads((DOCS / "papers.toml").read_text(encoding="utf-8"))["paper"]
    return papers


def papers() -> str:
    """A section for each paper."""
    return "\n\n".join(part for paper in contents() for part in section(paper))


def section(paper: dict[str, Any]) -> Iterator[str]:
    """The table of a paper, and the commands that are too long for it."""
    yield f"## {paper['title']}"
    yield paper["text"]
    header = ["in the paper", "the paper's size", "small", "found with the small one", "state"]
    yield as_markdown(header, [line(row) for row in paper["rows"]])
    long = [row for row in paper["rows"] if len(row.get("paper", [])) > LONGEST]
    for row in long:
        yield f"{row['item']}:"
        yield f"```console\n{shlex.join(command(row, 'paper'))}\n```"


def line(row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    whole = command(row, "paper")
    big = "below" if len(row.get("paper", [])) > LONGEST else f"`{shlex.join(whole)}`" if whole else "-"
    small = command(row, "cpu")
    there = row.get("found", True) and small
    return [row["item"], big, f"`{shlex.join(small)}`" if small else "-", found(row) if there else "-", row["state"]]


def command(row: dict[str, Any], scale: str) -> list[str]:
    """The command of a row at a scale, as arguments; nothing where there is none."""
    options = row.get(scale, [])
    if options is False:
        return []
    recipe = row.get(f"{scale}_recipe", row["recipe"])
    return ["fedtide", row.get("verb", "run"), f"recipe:{recipe}", "--scale", scale, *options]


def found(row: dict[str, Any]) -> str:
    """How many claims of a recipe, over all points of its sweep, came out how; with a link to them."""
    recipe = row.get("cpu_recipe", row["recipe"])
    kept_at = DOCS / "results" / f"{recipe}.json"
    if not kept_at.is_file():
        return "not run whole since it last changed"
    kept = json.loads(kept_at.read_text(encoding="utf-8"))
    tables = [*(point["claims"] for point in kept["points"]), kept.get("claims", {"rows": []})]
    verdicts = Counter(verdict for table in tables for *_, verdict in table["rows"])
    said = ", ".join(f"{verdict}: {number}" for verdict, number in verdicts.most_common())
    seeds = f"{kept['seeds']} seed{'s' * (kept['seeds'] > 1)}"
    return f"[{said or 'tables'}](recipes.md#{recipe}), {seeds}"
