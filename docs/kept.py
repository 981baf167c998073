"""The page of recipes: what each shows, how long it takes, and what it found (scripts/keep_results.py keeps that)."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from fedtide.config import has_choice

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
    points = result["points"]
    if len(points) == 1:
        parts += [as_markdown(**points[0]["results"]), _claims(points[0])]
        return "\n\n".join(part for part in parts if part)
    methods, chosen = list(points[0]["accuracy"]), result["chosen"] if has_choice(content.get("sweep", ())) else {}
    rows = [[name, *(_cell(point, name, chosen) for point in points)] for name in methods]
    parts.append(as_markdown([result.get("score", "accuracy"), *(point["point"] for point in points)], rows))
    claims = [row[0] for row in points[0]["claims"]["rows"]]
    verdicts = [[claim, *(" ".join(p["claims"]["rows"][i][:0:-1]) for p in points)] for i, claim in enumerate(claims)]
    parts.append(as_markdown(["claim", *(point["point"] for point in points)], verdicts))
    parts.append(_claims(result))
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


def _claims(point: dict[str, Any]) -> str:
    """The table of the claims about a point, or about a whole sweep."""
    claims = point.get("claims", {"header": [], "rows": []})
    return as_markdown(claims["header"], claims["rows"])


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
