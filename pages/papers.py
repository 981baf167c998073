"""The page of papers: the command for every table and figure, and what was found (pages/papers.toml, pages/results)."""

import shlex
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedtide.config import Experiment, read
from hours import hours
from recipes import RECIPES, as_markdown, is_old, read_recipe, read_result, rows_of, seeds_of

HERE = Path(__file__).parent
YEAR = 365.25 * 24
"""Hours of a year."""


def contents() -> list[dict[str, Any]]:
    """The papers, with their rows."""
    papers: list[dict[str, Any]] = tomllib.loads((HERE / "papers.toml").read_text(encoding="utf-8"))["paper"]
    return papers


def papers() -> str:
    """A section for each paper."""
    return "\n\n".join(part for paper in contents() for part in section(paper))


def section(paper: dict[str, Any]) -> Iterator[str]:
    """The table of a paper, and its commands."""
    yield f"## {paper['title']}"
    yield paper["text"]
    header = ["in the paper", "coverage", "verdict", "hours, small", "hours, paper"]
    yield as_markdown(header, [line(row) for row in paper["rows"]])
    yield '<details markdown="1">\n<summary>Commands</summary>'
    for row in paper["rows"]:
        wholes = [command(row, "paper"), command(row, "cpu")]
        if "larger_sets" in row:
            wholes.insert(1, [*wholes[0], *row["larger_sets"]])
        commands = [shlex.join(whole) for whole in wholes if whole]
        yield f"{row['item']}:"
        yield "```console\n" + "\n".join(commands) + "\n```"
    yield "</details>"


def line(row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    verdict = row.get("found", True) if command(row, "cpu") else False
    more = "; at the paper's size alone" if row.get("cpu") is False else "" if verdict else "; no small run is kept"
    result = result_of(row) if verdict is True else None
    verdict = verdicts_of(row) if verdict is True else verdict or "-"
    verdict += f". At the paper's size: {row['larger']}" if "larger" in row else ""
    small = "-" if result is None else in_words(spent_hours(result))
    large = in_words(hours(experiment_of(row))) if command(row, "paper") else "-"
    return [row["item"], row["covers"] + more, verdict, small, large]


def in_words(hours: float) -> str:
    """Return hours with two digits that count; beyond a year also years.

    >>> in_words(0.034), in_words(14.6), in_words(2345.0), in_words(123456.0)
    ('0.034', '15', '2,300', '120,000 (14 years)')
    """
    if hours < 10:
        return f"{hours:.2g}"
    years = f" ({float(f'{hours / YEAR:.2g}'):,.0f} years)" if hours > 2 * YEAR else ""
    return f"{float(f'{hours:.2g}'):,.0f}{years}"


def spent_hours(result: dict[str, Any]) -> float:
    """Compute the processor hours of a kept run: its minutes, with each of its workers, by default one on each core."""
    options = result["options"]
    workers = int(options[options.index("--workers") + 1]) if "--workers" in options else result["cores"]
    return float(result["minutes"] * workers / 60)


def command(row: dict[str, Any], scale: str) -> list[str]:
    """The command of a row at a scale, as arguments; nothing where there is none."""
    options = row.get(scale, [])
    if options is False:
        return []
    recipe = row.get(f"{scale}_recipe", row["recipe"])
    return ["fedtide", row.get("verb", "run"), f"recipe:{recipe}", "--scale", scale, *options]


def experiment_of(row: dict[str, Any]) -> Experiment:
    """Read the experiment of a row's command at the paper's size."""
    recipe = row.get("paper_recipe", row["recipe"])
    return read(RECIPES / f"{recipe}.toml", scale="paper", sets=row.get("paper", [])[1::2])


def result_of(row: dict[str, Any]) -> dict[str, Any] | None:
    """Read the kept result of the small recipe of a row, if there is one."""
    return read_result(row.get("cpu_recipe", row["recipe"]))


def verdicts_of(row: dict[str, Any]) -> str:
    """How many claims of a recipe, over all points of its sweep, came out how; with a link to them.

    Claims about forms of ours say nothing of a paper, so they count in rows of our own alone.
    """
    recipe, result = row.get("cpu_recipe", row["recipe"]), result_of(row)
    if result is None:
        return "not run whole since it last changed"
    ours = row["item"].startswith("Ours")
    claims = {key: line for key, line in rows_of(result).items() if ours or "(our " not in key[1]}
    verdicts = Counter(line[-1] for line in claims.values())
    counts = ", ".join(f"{verdict}: {number}" for verdict, number in verdicts.most_common())
    form = ", of an earlier form of the recipe" * is_old(result, read_recipe(recipe))
    return f"[{counts or 'tables'}](recipes.md#{recipe}), {seeds_of(result, claims)}{form}"
