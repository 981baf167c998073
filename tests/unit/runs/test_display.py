"""What is shown while runs are played."""

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from fedtide.runs import display
from fedtide.runs.runner import Progress


@pytest.mark.parametrize(("dated", "shown"), [(False, ["accuracy 100.0 %", "accuracy  50.0 %"]),
                                              (True, ["mean accuracy 100.0 %", "mean accuracy  75.0 %"])])  # fmt: skip
def test_a_window_of_a_calendar_may_have_a_row_so_their_mean_is_shown(monkeypatch, dated, shown):
    monkeypatch.setattr(display, "SECONDS", 0.0)
    out = io.StringIO()
    live, experiment = display.Live(Console(file=out)), SimpleNamespace(rounds=3, score="accuracy", dated=dated)
    run: Any = SimpleNamespace(title="A", experiment=experiment)
    live.begin([run], 0)
    for number, accuracy in enumerate([1.0, 0.5, None], 1):
        live.progress(0, Progress(number, 3, accuracy, 2.0))
    lines = [line.split(", ")[1] for line in out.getvalue().splitlines()[1:]]
    assert lines == [*shown, shown[-1]]
