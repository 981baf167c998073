"""Modules of the documentation, which are no package."""

import sys
from importlib import import_module
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture
def of_docs(monkeypatch):
    """Import a module of docs; what it brought is forgotten afterwards."""
    monkeypatch.syspath_prepend(str(DOCS))
    before = set(sys.modules)
    yield import_module
    for name in {"league", "papers", "kept", "telling", "work"} - before:
        sys.modules.pop(name, None)
