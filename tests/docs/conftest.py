"""Programs that make the documentation, which are no package."""

import sys
from importlib import import_module
from pathlib import Path

import pytest

PAGES = Path(__file__).resolve().parents[2] / "pages"


@pytest.fixture
def of_pages(monkeypatch):
    """Import one of these programs; what it brought is forgotten afterwards."""
    monkeypatch.syspath_prepend(str(PAGES))
    before = set(sys.modules)
    yield import_module
    for name in sys.modules.keys() - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "").parent == PAGES:
            del sys.modules[name]
