"""Goals as recipes: what their files say, and their folders, which are played, resumed and shown like those of runs.

goal.toml          what is tried
found.jsonl        a line for each world and seed
known/             what had to be played before, if anything
summary.json       claims and results
report.html        the same for people
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tomli_w
from pydantic import Field
from rich.progress import Progress

from fedtide.config import slug
from fedtide.config.overrides import assign, parsed, seed_list
from fedtide.config.reading import read_toml, scaled
from fedtide.core.atomic import write_text
from fedtide.core.errors import FedtideError
from fedtide.core.record import read_rounds, run_lock
from fedtide.fields.strict import Strict, checked
from fedtide.fields.types import Distinct, Text, Whole
from fedtide.goals.inspecting import Inspect
from fedtide.goals.recommending import Recommend
from fedtide.report.environment import environment_line, is_nano
from fedtide.report.render import Part, render
from fedtide.report.tables import Table
from fedtide.runs import folder
from fedtide.runs.request import Output, Request, Scale, recipe

GOAL, FOUND = "goal.toml", "found.jsonl"


class Goal(Strict):
    """Worlds whose answers are known, and what a command has to find in them.

    Args:
        title: of the report.
        description: a sentence under the title.
        seeds: with each of which every world is tried.
        goal: which command is tried, and in which worlds.
    """

    title: Text
    description: Text
    seeds: Annotated[tuple[Whole, ...], Distinct]
    goal: Annotated[Inspect | Recommend, Field(discriminator="kind")]


@dataclass(frozen=True)
class Finished:
    """A goal that was tried: its folder, its claims, what was found in each world, and the report."""

    root: Path
    claims: Table
    results: Table
    report: Path


def is_goal(experiment: str) -> bool:
    """Tell whether a file, or recipe:NAME, is that of a goal; of what cannot be read experiments say why."""
    try:
        return "goal" in read_toml(_path(experiment))
    except FedtideError:
        return False


def is_folder(root: Path) -> bool:
    """Tell whether a folder is that of a goal."""
    return (root / GOAL).is_file()


def begin(experiment: str, request: Request) -> Path:
    """Make the folder of a goal.

    Raises:
        FedtideError: with one line that says what to mend.
    """
    path = _path(experiment)
    values = scaled(read_toml(path), str(path), request.scale)
    more = [f"seeds={seed_list(request.seeds)}"] if request.seeds is not None else []
    for assignment in (*request.sets, *more):
        assign(values, *parsed(assignment))
    made = checked(Goal, values, str(path))
    made.goal.check(str(path), made.seeds)
    root = folder.unused(Path("runs"), slug(path.stem)) if request.out is None else Path(request.out)
    folder.made(root, {GOAL: tomli_w.dumps(made.model_dump(mode="json"))}, request.scale)
    return root


def _path(experiment: str) -> Path:
    return recipe(experiment.removeprefix("recipe:")) if experiment.startswith("recipe:") else Path(experiment)


def load(root: Path) -> Goal:
    """Read what a folder tries."""
    return checked(Goal, read_toml(root / GOAL), str(root / GOAL))


def play(root: Path, workers: int | None, output: Output) -> Finished | None:
    """Try what is left, write the report and print it; None if a person stopped it, and what was tried is saved."""
    from fedtide.report.terminal import console, print_table, say

    screen = console(output)
    say(f"goal folder: {root}", screen)
    with run_lock(root, GOAL), Progress(console=screen, transient=True, disable=output.quiet) as progress:
        finished = _play(root, partial(_play_study, workers=workers, output=output), progress)
    if finished is not None:
        print_table(finished.results, screen)
        print_table(finished.claims, screen)
    return finished


def _play_study(name: str, scale: Scale, root: Path, workers: int | None, output: Output) -> Any:
    """Play what is left of a recipe; None if a person stopped it."""
    from fedtide import api

    if not root.exists():
        made = api.prepare(f"recipe:{name}", Request(root, scale, workers=workers))
        folder.create(made.settings, root, made.where, scale)
    return api.play_shown(folder.load(root), root, workers, output)


def _play(root: Path, play_study: Callable[..., Any], progress: Progress) -> Finished | None:
    made = load(root)
    asked = [(world, seed) for world in made.goal.worlds for seed in made.seeds]
    lines = [line for line in read_rounds(root, FOUND) if (line["world"], line["seed"]) in asked]
    if not made.goal.prepare(root, play_study):
        return None
    done = {(line["world"], line["seed"]) for line in lines}
    left = [case for case in asked if case not in done]
    shown = progress.add_task(made.title, total=len(asked), completed=len(done))
    for world, seed in left:
        found = made.goal.found(root, world, seed, lines)
        if found is None:
            return None
        lines.append({"world": world, "seed": seed, **found})
        write_text(root / FOUND, "".join(json.dumps(line) + "\n" for line in lines))
        progress.advance(shown)
    return _finish(root, made, lines)


def _finish(root: Path, made: Goal, lines: list[dict[str, Any]]) -> Finished:
    """Write the summary and the report."""
    judged = not is_nano(root)
    claims, results = made.goal.claims(lines), made.goal.results(lines)
    if not judged:
        claims = Table(claims.header, [[claim, found, "not judged at nano"] for claim, found, _ in claims.rows])
    about = {"title": made.title, "claims": vars(claims), "results": vars(results)}
    write_text(root / "summary.json", json.dumps(about, indent=1, ensure_ascii=False) + "\n")
    held = sum(verdict == "holds" for *_, verdict in claims.rows)
    text = render(
        "goal.html",
        title=made.title,
        about=made.description,
        headline=f"{held} of {len(claims.rows)} claims hold." if judged else "Claims are not judged at nano scale.",
        parts=[Part("Claims", claims, "", "claims"), Part("Results", results, "", "results")],
        config=(root / GOAL).read_text(encoding="utf-8"),
        environments=[environment_line(root, root.resolve().name)],
    )
    write_text(root / "report.html", text)
    return Finished(root, claims, results, root / "report.html")
