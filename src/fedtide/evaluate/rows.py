"""Records of rounds as the rows of a table: numbers and words, without what is nested deeper."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedtide.draw.frames import is_cell

Row = dict[str, Any]
"""Cells by the name of their column."""


def rows_of_rounds(lines: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    """Yield a row for each round: what stands in its line, and the facts that the method told.

    >>> list(rows_of_rounds([{"round": 0, "up": 8, "groups": [1, 2], "facts": {"loss": 0.5}}]))
    [{'round': 0, 'up': 8, 'loss': 0.5}]
    """
    for line in lines:
        yield {name: value for name, value in {**line, **line.get("facts", {}), **line}.items() if is_cell(value)}


def rows_of_scores(lines: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    """Yield a row for each evaluation and view: its scores, and the accuracy of each group of clients.

    >>> line = {"round": 7, "scores": {"val": {"accuracy": 0.5, "groups": {"day": 0.25}}, "train_clients": {}}}
    >>> list(rows_of_scores([line]))
    [{'round': 7, 'view': 'val', 'accuracy': 0.5, 'accuracy_day': 0.25}]
    """
    for line in lines:
        for view, scores in line.get("scores", {}).items():
            if scores:  # real clients may all be away
                told = {name: value for name, value in scores.items() if is_cell(value)}
                score = "skill" if "skill" in scores else "accuracy"
                groups = {f"{score}_{group}": value for group, value in scores.get("groups", {}).items()}
                yield {"round": line["round"], "view": view, **told, **groups}
