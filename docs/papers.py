"""The page of papers: the command for every table and figure, and what was found (docs/papers.toml, docs/results)."""

from __future__ import annotations

import json
import math
import shlex
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kept import as_markdown

DOCS = Path(__file__).parent
RECIPES = DOCS.parent / "src" / "fedtide" / "recipes"
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
    header = ["in the paper", "the paper's size", "small", "found with the small one", "coverage"]
    yield as_markdown(header, [line(row) for row in paper["rows"]])
    for row in paper["rows"]:
        long = [shlex.join(command(row, scale)) for scale in ("paper", "cpu") if is_long(row, scale)]
        if long:
            yield f"{row['item']}:"
            yield "```console\n" + "\n".join(long) + "\n```"


def line(row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    big, small = (shown(row, scale) for scale in ("paper", "cpu"))
    verdict = row.get("found", True) if command(row, "cpu") else False
    more = "; at the paper's size alone" if row.get("cpu") is False else "" if verdict else "; no small run is kept"
    verdict = verdicts_of(row) if verdict is True else verdict or "-"
    return [row["item"], big, small, verdict, row["covers"] + more]


def is_long(row: dict[str, Any], scale: str) -> bool:
    """Tell whether a command is too long for the table."""
    options = row.get(scale, [])
    return bool(options) and len(options) > LONGEST


def shown(row: dict[str, Any], scale: str) -> str:
    """The cell of a command."""
    whole = command(row, scale)
    return "below" if is_long(row, scale) else f"`{shlex.join(whole)}`" if whole else "-"


def command(row: dict[str, Any], scale: str) -> list[str]:
    """The command of a row at a scale, as arguments; nothing where there is none."""
    options = row.get(scale, [])
    if options is False:
        return []
    recipe = row.get(f"{scale}_recipe", row["recipe"])
    return ["fedtide", row.get("verb", "run"), f"recipe:{recipe}", "--scale", scale, *options]


def verdicts_of(row: dict[str, Any]) -> str:
    """How many claims of a recipe, over all points of its sweep, came out how; with a link to them.

    Claims about forms of ours say nothing of a paper, so they count in rows of our own alone.
    """
    recipe = row.get("cpu_recipe", row["recipe"])
    kept_at = DOCS / "results" / f"{recipe}.json"
    if not kept_at.is_file():
        return "not run whole since it last changed"
    result = json.loads(kept_at.read_text(encoding="utf-8"))
    tables = [*(point["claims"] for point in result["points"]), result.get("claims", {"rows": []})]
    ours = row["item"].startswith("Ours")
    verdicts = Counter(counts[-1] for table in tables for counts in table["rows"] if ours or "(our " not in counts[0])
    counts = ", ".join(f"{verdict}: {number}" for verdict, number in verdicts.most_common())
    seeds = f"{result['seeds']} seed{'s' * (result['seeds'] > 1)}"
    old = is_old(result, tomllib.loads((RECIPES / f"{recipe}.toml").read_text(encoding="utf-8")))
    return f"[{counts or 'tables'}](recipes.md#{recipe}), {seeds}{', of an earlier form of the recipe' * old}"


def is_old(result: dict[str, Any], recipe: dict[str, Any]) -> bool:
    """Tell whether kept results have other claims, methods, rounds or points than a recipe has by now."""
    small = recipe["scale"].get("cpu", {})
    tables = [*(point["claims"] for point in result["points"]), result.get("claims", {"rows": []})]
    claims = {line[0] for table in tables for line in table["rows"]}
    methods = {method["name"] for method in recipe["method"]}
    played = {name for point in result["points"] for name in point["accuracy"]}
    uses = {
        name for name in played if any(name.startswith(f"{method}, ") for method in methods)
    }  # of a method's models
    points = math.prod(len(values) for values in small.get("sweep", recipe.get("sweep", {})).values())
    swept = "rounds" in str([*small.get("sweep", recipe.get("sweep", {}))])
    return (
        claims != {claim["text"] for claim in recipe.get("claim", [])}
        or not methods <= played <= methods | uses
        or len(result["points"]) != points
        or (not swept and result["rounds"] != small.get("rounds", recipe.get("rounds")))
    )
