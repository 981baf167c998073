"""The generated parts of the documentation stand in the repository and are what the code says."""

import re
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from fedtide.config import points, read

ROOT = Path(__file__).resolve().parents[2]
DOCS, PAGES = ROOT / "docs", ROOT / "pages"


@pytest.fixture
def generate(of_pages):
    return of_pages("generate")


def test_pages_are_up_to_date(generate):
    wanted = generate.pages()
    del wanted[generate.RECIPES_PAGE]
    late = [path.relative_to(generate.ROOT).as_posix() for path in generate.outdated(wanted)]
    assert not late, "run: python pages/generate.py"


def test_pages_do_not_depend_on_the_order_in_which_they_are_made(generate):
    text, places = generate.configuration()
    anchors = set(re.findall('<a id="([^"]*)">', text))
    for name in reversed(generate.REGISTRY):
        page = generate.algorithm_page(name, places)
        assert page == (DOCS / "algorithms" / f"{name}.md").read_text("utf-8")
        assert set(re.findall(r"configuration\.md#([\w-]+)", page)) <= anchors
    assert generate.configuration() == (text, places)


def test_only_generated_parts_are_replaced(generate):
    page = "# Laws\n\n<!-- generated: laws (do not edit) -->\nmine\n<!-- end of generated -->\n\nafter\n"
    text = generate.filled(page, {"laws": "| law |"})
    assert text == "# Laws\n\n<!-- generated: laws (do not edit) -->\n\n| law |\n\n<!-- end of generated -->\n\nafter\n"
    assert generate.filled(text, {"laws": "| law |"}) == text


def test_pages_name_files_that_are_there():
    for page in [*DOCS.glob("*.md"), *PAGES.glob("parts/*.md"), *ROOT.glob("*.md")]:
        named = re.findall(
            r"\b((?:src|tests|docs|pages|bench|scripts|deploy)/[\w./-]+\.(?:py|md|toml))", page.read_text("utf-8")
        )
        lost = {path for path in named if not any((ROOT / parent / path).is_file() for parent in ("", "tests"))}
        assert {path for path in lost if "NAME" not in path} == set(), page.name


def test_published_numbers_stand_beside_points_and_methods_of_recipes(generate):
    recipes = import_module("recipes")
    published = tomllib.loads((PAGES / "published.toml").read_text("utf-8"))
    for recipe, known in published.items():
        swept = {point.name: point for point in points(read(ROOT / f"src/fedtide/recipes/{recipe}.toml"))}
        named = {name: set(cells) for name, cells in known.items() if name not in ("text", "network")}
        assert named
        assert named.keys() <= swept.keys()
        assert all(cells <= {m.name for m in swept[name].experiment.method} for name, cells in named.items())
        (name, cells), measure = next(iter(named.items())), {"accuracy": {"Alone": 0.99}, "error": {"Alone": 0.001}}
        measure = {"accuracy": {**dict.fromkeys(cells), **measure["accuracy"]}, "error": measure["error"]}
        point = {"point": name, **measure, "moments": {"best": measure, "at_best_val": measure}}
        text, table = recipes.beside_published(recipe, [point])
        assert text == known["text"]
        assert table.splitlines()[-1] == "| Alone | - | 99.15 | 99.00 ± 0.10 | 99.00 ± 0.10 | 99.00 ± 0.10 |"
        assert "| FedAvg | 80.41 ± 0.08 | 84.48 | - | - | - |" in table
    assert recipes.beside_published("demo", []) == []
