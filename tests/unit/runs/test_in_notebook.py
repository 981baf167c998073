"""The bar of a notebook, in a display that remembers what it was told."""

from __future__ import annotations

import sys
from types import SimpleNamespace

from fedtide.runs import display
from fedtide.runs.display import InNotebook
from fedtide.runs.runner import Progress


def planned(title):
    return SimpleNamespace(title=title, experiment=SimpleNamespace(rounds=4, score="accuracy"))


def test_a_bar_of_all_rounds_says_what_is_played(monkeypatch):
    shown = []
    cell = SimpleNamespace(update=shown.append)
    told = SimpleNamespace(HTML=str, display=lambda html, display_id: shown.append(html) or cell)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(display=told))
    monkeypatch.setitem(sys.modules, "IPython.display", told)
    monkeypatch.setattr(display, "PACE", 0.0)
    bar = InNotebook()
    bar.begin([planned("A · seed 0"), planned("<B>")], finished=1)
    assert 'max="8" value="0"' in shown[-1]
    assert "1 of 3 runs done" in shown[-1]
    bar.progress(0, Progress(2, 4, 0.5, 1.0))
    bar.progress(1, Progress(1, 4, None, 1.0))
    assert 'value="3"' in shown[-1]
    assert "A · seed 0: round 2, accuracy  50.0 % · &lt;B&gt;: round 1</span>" in shown[-1]
    assert " left · " in shown[-1]
    bar.progress(0, Progress(4, 4, 0.75, 1.0))
    bar.progress(1, Progress(4, 4, 0.75, 1.0))
    bar.end()
    assert 'value="8"' in shown[-1]
    assert shown[-1].endswith("3 of 3 runs done</span>")
