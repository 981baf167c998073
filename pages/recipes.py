"""The page of recipes: what each shows, how long it takes, and what it found (pages/keep_results.py keeps that)."""

import json
import math
import tomllib
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

from claims import claims_of, join_seeds, reasons, verdict_of
from fedtide.config import Claim, has_choice
from fedtide.draw.prose import counted

ROOT = Path(__file__).parents[1]
RESULTS, RECIPES = ROOT / "pages" / "results", ROOT / "src" / "fedtide" / "recipes"


def recipes() -> str:
    """Every recipe: what it shows, how long it takes, and what it found when it was last run."""
    return "\n\n".join(recipe(path) for path in sorted(RECIPES.glob("*.toml")))


def planted(command: str) -> str:
    """Results of `bench/planted.py`: its command, its claims, and the table of its worlds."""
    result = json.loads((RESULTS / "planted" / f"{command}.json").read_text(encoding="utf-8"))
    cores = f"{result['cores']} core{'s' * (result['cores'] > 1)}"
    taken = f"{minutes(result['minutes'])} on {cores} ({result['processor']}), {result['made']}. {result['note']}"
    parts = [f"```console\npython bench/planted.py {command}\n```", taken.strip(), _claims(result["claims"])]
    return "\n\n".join([*parts, as_markdown(**result["results"])])


def minutes(taken: float) -> str:
    """How long something took, in words.

    >>> minutes(0.4), minutes(1.2), minutes(14.0)
    ('Less than a minute', '1 minute', '14 minutes')
    """
    whole = round(taken)
    return "Less than a minute" if taken < 1 else f"{whole} minute{'s' * (whole > 1)}"


def command_and_cost(result: dict[str, Any]) -> list[str]:
    """The command that played a recipe, and what that took."""
    command = " ".join(["fedtide run", f"recipe:{result['recipe']}", *result["options"]])
    taken = (
        f"{minutes(result['minutes'])} on {result['cores']} cores ({result['processor']}); {result['rounds']} rounds, "
        f"{counted(result['seeds'], 'seed')}, {result['made']}. {result['note']}"
    )
    return [f"```console\n{command}\n```", taken.strip()]


def recipe(path: Path) -> str:
    """One recipe, with the results that pages/keep_results.py has kept of it."""
    content, result = read_recipe(path.stem), read_result(path.stem)
    scales = ", ".join(f"`{scale}`" for scale in content.get("scale", {}))
    parts = [f"## {path.stem}", f"**{content['title']}.** {content['description']}", f"Scales: {scales}."]
    if result is None:
        verb = "tune" if "tune" in content else "run"
        return "\n\n".join([*parts, f"```console\nfedtide {verb} recipe:{path.stem}\n```"])
    parts += command_and_cost(result)
    points, claims = result["points"], claims_of(content, result)
    parts += fresh_line(result)
    if len(points) == 1:
        parts += [
            as_markdown(**points[0]["results"]),
            _claims(points[0]["claims"], result, claims),
            _why(path.stem, result),
        ]
        return "\n\n".join(part for part in parts if part)
    methods, chosen = list(points[0]["accuracy"]), result["chosen"] if has_choice(content.get("sweep", ())) else {}
    rows = [[name, *(_cell(point, name, chosen) for point in points)] for name in methods]
    parts.append(as_markdown([result.get("score", "accuracy"), *(point["point"] for point in points)], rows))
    texts = [row[0] for row in points[0]["claims"]["rows"]]
    verdicts = [[text, *(_verdict(p["claims"], i, result, claims) for p in points)]
                for i, text in enumerate(texts)]  # fmt: skip
    parts.append(as_markdown(["claim", *(point["point"] for point in points)], verdicts))
    parts += [_claims(result["claims"], result, claims), _why(path.stem, result)]
    parts += beside_published(path.stem, points)
    for point in points:
        table = as_markdown(**point["results"])
        parts.append(f'<details markdown="1">\n<summary>More about {point["point"]}</summary>\n\n{table}\n\n</details>')
    return "\n\n".join(part for part in parts if part)


def beside_published(recipe: str, points: list[dict[str, Any]]) -> list[str]:
    """Published numbers (pages/published.toml) beside those of a recipe: a table for each point."""
    published = tomllib.loads((ROOT / "pages" / "published.toml").read_text(encoding="utf-8")).get(recipe)
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
Key = tuple[str, str]
"""A claim: its point, "" for the whole sweep, and its text."""
Row = list[str]
"""The row of a claim: its text, its number and its verdict."""


def read_recipe(name: str) -> dict[str, Any]:
    """Read a recipe as it is written."""
    return tomllib.loads((RECIPES / f"{name}.toml").read_text(encoding="utf-8"))


def read_result(recipe: str) -> dict[str, Any] | None:
    """Read what is kept of a recipe, None if nothing is. Fresh seeds and those that were added count (replay.py)."""
    at, *others = (RESULTS / folder / f"{recipe}.json" for folder in ("", "fresh", "added"))
    if not at.is_file():
        return None
    result: dict[str, Any] = json.loads(at.read_text(encoding="utf-8"))
    content = read_recipe(recipe)
    played = [json.loads(other.read_text(encoding="utf-8")) for other in others if other.is_file()]
    if not played or is_old(result, content):
        return result
    seeds = {"fresh": played[0]["seeds"], "others": sum(other["seeds"] for other in played)}
    return {**join_seeds(result, played, claims_of(content, result)), **seeds}


def is_old(result: dict[str, Any], recipe: dict[str, Any]) -> bool:
    """Tell whether kept results have other claims, methods, rounds or points than a recipe has by now.

    One model with more steps, of which nothing is claimed, may be missing: it changes no number of the others.
    """
    small = recipe["scale"].get("cpu", {})
    claims = {text for _, text in rows_of(result)}
    methods = {method["name"] for method in recipe["method"]}
    claimed = json.dumps(recipe.get("claim", []))
    longer = {name for name in methods if name.endswith(" steps") and json.dumps(name) not in claimed}
    played = {name for point in result["points"] for name in point["accuracy"]}
    forms = {name.partition(" (")[0] for name in played}
    strange = {name for name in played if not any(f"{name}, ".startswith((f"{m}, ", f"{m} (")) for m in methods)}
    points = math.prod(len(values) for values in small.get("sweep", recipe.get("sweep", {})).values())
    swept = "rounds" in str([*small.get("sweep", recipe.get("sweep", {}))])
    return bool(
        claims != {claim["text"] for claim in recipe.get("claim", [])}
        or strange
        or not methods <= played | forms | longer
        or len(result["points"]) != points
        or (not swept and result["rounds"] != small.get("rounds", recipe.get("rounds")))
    )


def rows_of(result: dict[str, Any]) -> dict[Key, Row]:
    """The rows of all claims of a result, those of a sweep among them."""
    return {(where, row[0]): row for where, table in _tables(result) for row in table["rows"]}


def pairs_of(result: dict[str, Any]) -> dict[Key, tuple[Row, Row]]:
    """The rows of first and of fresh seeds, of all claims that both judged."""
    pairs = ((where, pair) for where, table in _tables(result) for pair in table.get("pairs", []))
    return {(where, pair[0][0]): pair for where, pair in pairs if pair is not None}


def _tables(result: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    points = [(point["point"], point["claims"]) for point in result["points"]]
    return [*points, ("", result.get("claims", {"rows": []}))]


def seeds_of(result: dict[str, Any], claims: Container[Key]) -> str:
    """How many seeds these claims were judged by, and how many verdicts fresh seeds give alike.

    >>> seeds_of({"seeds": 1, "points": []}, ())
    '1 seed'
    """
    pairs = [pair for key, pair in pairs_of(result).items() if key in claims]
    seeds = counted(result["seeds"], "seed")
    if not pairs:
        return seeds
    alike = f"{_count_alike(pairs)} of {len(pairs)} alike on"
    if not any(_joined(result)):
        return f"{seeds}; {alike} {result['fresh']} fresh ones"
    added = result["others"] - result["fresh"]
    if added:
        return f"{seeds}, {result['fresh']} fresh ones and {added} added; {alike} the first and the fresh"
    return f"{seeds} and {result['fresh']} fresh ones; {alike} both"


def fresh_line(result: dict[str, Any]) -> list[str]:
    """Sentences on what fresh seeds gave."""
    pairs, joined = pairs_of(result).values(), _joined(result)
    if not pairs:
        return []
    which = "All" if all(joined) else f"{sum(joined)} of {len(joined)}"
    judged = (
        f"{which} verdicts are those of all seeds"
        if any(joined)
        else "Verdicts below are of the first seeds alone, because their values by seed were not kept"
    )
    added = result["others"] - result["fresh"]
    more = f" {counted(added, 'seed')} more {'were' if added > 1 else 'was'} added to decide open claims." * (added > 0)
    return [
        f"{result['fresh']} fresh seeds, at which nobody had looked, were played later. On these alone "
        f"{_count_alike(pairs)} of {counted(len(pairs), 'verdict')} are the same as on the first ones.{more} {judged}."
    ]


def _count_alike(pairs: Iterable[tuple[Row, Row]]) -> int:
    return sum(first[-1] == fresh[-1] for first, fresh in pairs)


def _joined(result: dict[str, Any]) -> list[bool]:
    """Whether claims are judged by all seeds."""
    return [flag for _, table in _tables(result) for flag in table.get("joined", [False] * len(table["rows"]))]


def _why(recipe: str, result: dict[str, Any]) -> str:
    """A table of the claims that do not hold, with the reason of each."""
    wrong = {row[0] for row in rows_of(result).values() if row[-1] == WRONG}
    return as_markdown(
        ["does not hold", "why"], [[text, why] for text, why in reasons(recipe).items() if text in wrong]
    )


def _verdict(table: dict[str, Any], number: int, result: dict[str, Any], claims: dict[str, Claim]) -> str:
    """A verdict with its number, and those of first and fresh seeds if they differ."""
    row = table["rows"][number]
    tail = f"; {both}" if (both := _tell_apart(table, number)) else ""
    return " ".join([verdict_of(row, claims, _seeds(table, number, result)), *row[-2:0:-1]]) + tail


def _claims(table: dict[str, Any], result: dict[str, Any] | None = None, claims: dict[str, Claim] | None = None) -> str:
    """The table of the claims about a point, or about a whole sweep."""
    rows = table["rows"]
    if result is not None:
        rows = [[*row[:-1], verdict_of(row, claims or {}, _seeds(table, i, result))] for i, row in enumerate(rows)]
    cells = [_tell_apart(table, i) for i in range(len(rows))]
    if not any(cells):
        return as_markdown(table["header"], rows)
    return as_markdown(
        [*table["header"], "first and fresh seeds, if they differ"],
        [[*row, cell] for row, cell in zip(rows, cells, strict=True)],
    )


def _seeds(table: dict[str, Any], number: int, result: dict[str, Any]) -> int:
    """How many seeds the number of a claim is of."""
    return int(result["seeds"] + (result["others"] if "joined" in table and table["joined"][number] else 0))


def _tell_apart(table: dict[str, Any], number: int) -> str:
    """The numbers and verdicts of first and fresh seeds, if their verdicts differ."""
    pair = table["pairs"][number] if "pairs" in table else None
    if pair is None or pair[0][-1] == pair[1][-1]:
        return ""
    first, fresh = (" ".join(row[:0:-1]) for row in pair)
    return f"first seeds: {first}; fresh seeds: {fresh}"


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
