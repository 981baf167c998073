"""Shared by tests of commands: an empty folder to work in, and reports without pictures, which take the longest."""

from pathlib import Path

import pytest


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDTIDE_DATA", raising=False)
    return tmp_path
