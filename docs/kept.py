"""The page of recipes: what each shows, how long it takes, and what it found (scripts/keep_results.py keeps that)."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from telling import claims_of, reasons, verdict_of

from fedtide.config import Claim, has_choice

ROOT = Path(__file__).parents[1]


def recipes() -> str:
    """Every recipe: what it shows, how long it takes, and what it found when it was last run."""
    return "\n\n".join(recipe(path) for path in sorted((ROOT / "src" / "fedtide" / "recipes").glob("*.toml")))


def planted(command: str) -> str:
    """Results of `bench/planted.py`: its command, its claims, and the table of its worlds."""
    result = json.loads((ROOT / "docs" / "results" / "planted" / f"{command}.json").read_text(encoding="utf-8"))
    cores = f"{result['cores']} core{'s' * (result['cores'] > 1)}"
    taken = f"{minutes(result['minutes'])} on {cores} ({result['processor']}), {result['made']}. {result['note']}"
    parts = [f"```console\npython bench/planted.py {command}\n```", taken.strip(), _claims(result)]
    return "\n\n".join([*parts, as_markdown(**result["results"])])


def minutes(taken: float) -> str:
    """How long something took, in words.

    >>> minutes(0.4), minutes(1.2), minutes(14.0)
    ('Less than a minute', '1 minute', '14 minutes')
    """
    whole = round(taken)
    return "Less than a minute" if taken < 1 else f"{whole} minute{'s' * (whole > 1)}"


def recipe(path: Path) -> str:
    """One recipe, with the results that scripts/keep_results.py has kept of it."""
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    kept_at = ROOT / "docs" / "results" / f"{path.stem}.json"
    scales = ", ".join(f"`{scale}`" for scale in content.get("scale", {}))
    parts = [f"## {path.stem}", f"**{content['title']}.** {content['description']}", f"Scales: {scales}."]
    if not kept_at.is_file():
        verb = "tune" if "tune" in content else "run"
        return "\n\n".join([*parts, f"```console\nfedtide {verb} recipe:{path.stem}\n```"])
    result = json.loads(kept_at.read_text(encoding="utf-8"))
    command = " ".join(["fedtide run", f"recipe:{path.stem}", *result["options"]])
    parts += [
        f"```console\n{command}\n```",
        f"{minutes(result['minutes'])} on {result['cores']} cores ({result['processor']}); {result['rounds']} rounds, "
        f"{result['seeds']} seed{'s' * (result['seeds'] > 1)}, {result['made']}. {result['note']}".strip(),
    ]
    points, fresh = result["points"], read_fresh(path.stem)
    claims, seeds = claims_of(content), result["seeds"]
    parts += fresh_line(result, fresh)
    if len(points) == 1:
        parts += [
            as_markdown(**points[0]["results"]),
            _claims(points[0], fresh, claims, seeds),
            _why(path.stem, result),
        ]
        return "\n\n".join(part for part in parts if part)
    methods, chosen = list(points[0]["accuracy"]), result["chosen"] if has_choice(content.get("sweep", ())) else {}
    rows = [[name, *(_cell(point, name, chosen) for point in points)] for name in methods]
    parts.append(as_markdown([result.get("score", "accuracy"), *(point["point"] for point in points)], rows))
    texts = [row[0] for row in points[0]["claims"]["rows"]]
    verdicts = [[text, *(_verdict(p["claims"]["rows"][i], p["point"], fresh, claims, seeds) for p in points)]
                for i, text in enumerate(texts)]  # fmt: skip
    parts.append(as_markdown(["claim", *(point["point"] for point in points)], verdicts))
    parts += [_claims({"point": "", **result}, fresh, claims, seeds), _why(path.stem, result)]
    parts += beside_published(path.stem, points)
    for point in points:
        table = as_markdown(**point["results"])
        parts.append(f'<details markdown="1">\n<summary>More about {point["point"]}</summary>\n\n{table}\n\n</details>')
    return "\n\n".join(part for part in parts if part)


def beside_published(recipe: str, points: list[dict[str, Any]]) -> list[str]:
    """Published numbers (docs/published.toml) beside those of a recipe: a table for each point."""
    published = tomllib.loads((ROOT / "docs" / "published.toml").read_text(encoding="utf-8")).get(recipe)
    if published is None:
        return []
    header = ["published", "here, its network", "here, best round", "here, last rounds",
              "here, round that validation samples choose"]  # fmt: skip
    parts = [published["text"]]
    for point in points:
        larger = published["network"].get(point["point"], {})
        measures = [point["moments"]["best"], point, point["moments"]["at_best_val"]]
        rows = [
            [
                name,
                "{:.2f} ± {:.2f}".format(*cell) if cell else "-",
                f"{larger[name]:.2f}" if name in larger else "-",
                *(_number(m, name, 2) for m in measures),
            ]
            for name in point["accuracy"]
            for cell in [published.get(point["point"], {}).get(name)]
        ]
        parts.append(as_markdown([point["point"], *header], rows))
    return parts


WRONG = "does not hold"
Claims = dict[tuple[str, str], list[str]]
"""The row of a claim: its text, its number and its verdict; by its point and its text."""


def rows_of(result: dict[str, Any]) -> Claims:
    """The rows of all claims of a result: of each point, and of the whole sweep, whose point is ""."""
    tables = [
        *((point["point"], point["claims"]) for point in result["points"]),
        ("", result.get("claims", {"rows": []})),
    ]
    return {(where, row[0]): row for where, table in tables for row in table["rows"]}


def read_fresh(recipe: str) -> Claims:
    """Rows of claims on seeds that nobody had looked at, if `scripts/replay.py --seeds ... --keep` played them."""
    kept_at = ROOT / "docs" / "results" / "fresh" / f"{recipe}.json"
    return rows_of(json.loads(kept_at.read_text(encoding="utf-8"))) if kept_at.is_file() else {}


def count_same(claims: Claims, fresh: Claims) -> tuple[int, int]:
    """How many claims have the same verdict on fresh seeds, of how many that were judged there."""
    judged = [(row[-1], fresh[key][-1]) for key, row in claims.items() if key in fresh]
    return sum(verdict == other for verdict, other in judged), len(judged)


def fresh_line(result: dict[str, Any], fresh: Claims) -> list[str]:
    """A sentence on what fresh seeds gave."""
    same, judged = count_same(rows_of(result), fresh)
    if not judged:
        return []
    return [f"On fresh seeds, at which nobody had looked, {same} of {judged} verdicts are the same."]


def _why(recipe: str, result: dict[str, Any]) -> str:
    """A table of the claims that do not hold, with the reason of each."""
    wrong = {row[0] for row in rows_of(result).values() if row[-1] == WRONG}
    return as_markdown(
        ["does not hold", "why"], [[text, why] for text, why in reasons(recipe).items() if text in wrong]
    )


def _verdict(row: list[str], where: str, fresh: Claims, claims: dict[str, Claim], seeds: int) -> str:
    """A verdict with its number, and that of fresh seeds if it differs."""
    other = fresh.get((where, row[0]))
    tail = "" if other is None or other[-1] == row[-1] else f"; fresh seeds: {' '.join(other[:0:-1])}"
    return " ".join([verdict_of(row, claims, seeds), *row[-2:0:-1]]) + tail


def _claims(
    point: dict[str, Any], fresh: Claims | None = None, claims: dict[str, Claim] | None = None, seeds: int = 0
) -> str:
    """The table of the claims about a point, or about a whole sweep."""
    table = point.get("claims", {"header": [], "rows": []})
    where, others = point.get("point", ""), fresh or {}
    changed = {row[0]: other for row in table["rows"]
               if (other := others.get((where, row[0]))) is not None and other[-1] != row[-1]}  # fmt: skip
    rows = [[*row[:-1], verdict_of(row, claims or {}, seeds)] for row in table["rows"]]
    if not changed:
        return as_markdown(table["header"], rows)
    rows = [[*row, " ".join(changed[row[0]][:0:-1]) if row[0] in changed else "the same"] for row in rows]
    return as_markdown([*table["header"], "on fresh seeds"], rows)


def _cell(point: dict[str, Any], name: str, chosen: dict[str, str]) -> str:
    text = _number(point, name)
    return f"**{text}**" if chosen.get(name) == point["point"] else text


def _number(measure: dict[str, Any], name: str, digits: int = 1) -> str:
    mean, error = measure["accuracy"].get(name), measure["error"].get(name)
    tail = "" if error is None else f" ± {100 * error:.{digits}f}"
    return "-" if mean is None else f"{100 * mean:.{digits}f}{tail}"


def as_markdown(header: list[str], rows: list[list[str]]) -> str:
    """A table; nothing without rows."""
    lines = [header, ["---"] * len(header), *rows] if rows else []
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
