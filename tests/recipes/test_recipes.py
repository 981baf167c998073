"""Recipes: every published experiment can be tried in seconds, and every size of it is sound."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from pathlib import Path

import pytest

from cli.shell import done
from fedtide.config import points, read
from fedtide.config.reading import SCALES
from fedtide.runs.assemble import preflight

RECIPES = sorted(Path(str(files("fedtide").joinpath("recipes"))).glob("*.toml"))
EVERY = pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)


def test_there_are_recipes():
    assert "demo" in [path.stem for path in RECIPES]


@EVERY
def test_a_recipe_says_what_it_is(recipe):
    content = tomllib.loads(recipe.read_text(encoding="utf-8"))
    assert content["title"]
    assert len(content["about"]) > 20
    assert "\n" not in content["about"]


@EVERY
def test_a_recipe_has_a_scale_for_seconds_and_one_for_minutes(recipe):
    scales = tomllib.loads(recipe.read_text(encoding="utf-8")).get("scale", {})
    assert {"nano", "cpu"} <= set(scales) <= set(SCALES)


@EVERY
def test_every_scale_of_a_recipe_is_sound(recipe):
    scales = tomllib.loads(recipe.read_text(encoding="utf-8")).get("scale", {})
    for scale in scales:
        for point in (p.experiment for p in points(read(recipe, scale=scale), recipe.name)):
            assert point.title
            assert point.baseline is None or point.baseline in [method.name for method in point.method]
    preflight(read(recipe, scale="nano"), recipe.name)


@EVERY
def test_the_smallest_scale_of_a_recipe_runs_and_leaves_a_report(tmp_path, recipe):
    assert done("run", recipe, "--scale", "nano", "--workers", 1, "--out", tmp_path / "run") == 0
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000
    assert (tmp_path / "run" / "summary.json").is_file()
