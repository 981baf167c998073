"""Records of runs that are written by hand."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fedtide.report.run_records import RunRecord

LINE = {"seconds": 1.0, "down": 0, "up": 0, "refused": 0, "participants": {}}
"""What a report needs in every line of `rounds.jsonl`, without the round."""


def run_of_lines(folder: Path, *lines: dict[str, Any]) -> RunRecord:
    """A run with these lines, one a round."""
    text = "".join(json.dumps({"round": number, **LINE, **line}) + "\n" for number, line in enumerate(lines))
    (folder / "rounds.jsonl").write_text(text)
    return RunRecord(0, folder, len(lines))


def record_like(**settings: Any) -> Any:
    """A record of an experiment that has these settings alone."""
    return SimpleNamespace(**{"view": "train_clients", "groups": [], **settings})


def change_lines(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change every line of a file in place."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        change(line)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
