"""The generated parts of the documentation stand in the repository and are what the code says."""

import re
import sys
from importlib import import_module
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture
def generate(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    before = set(sys.modules)
    yield import_module("generate")
    for name in {"generate", "keys", "kept", "papers"} - before:
        sys.modules.pop(name, None)


def test_pages_are_up_to_date(generate):
    wanted = generate.pages()
    del wanted[generate.RECIPES]
    late = [path.relative_to(generate.ROOT).as_posix() for path in generate.outdated(wanted)]
    assert not late, "run: python docs/generate.py"


def test_only_generated_parts_are_replaced(generate):
    page = "# Laws\n\n<!-- generated: laws (do not edit) -->\nmine\n<!-- end of generated -->\n\nafter\n"
    text = generate.filled(page, {"laws": "| law |"})
    assert text == "# Laws\n\n<!-- generated: laws (do not edit) -->\n\n| law |\n\n<!-- end of generated -->\n\nafter\n"
    assert generate.filled(text, {"laws": "| law |"}) == text


def test_pages_name_files_that_are_there():
    root = DOCS.parent
    for page in [*DOCS.glob("*.md"), *DOCS.glob("parts/*.md"), *root.glob("*.md")]:
        named = re.findall(
            r"\b((?:src|tests|docs|bench|scripts|deploy)/[\w./-]+\.(?:py|md|toml))", page.read_text("utf-8")
        )
        lost = {path for path in named if not any((root / parent / path).is_file() for parent in ("", "tests"))}
        assert {path for path in lost if "NAME" not in path} == set(), page.name
