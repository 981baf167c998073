"""Tiny texts whose numbers are known, and a tiny network that reads them."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedtide.data.rows import Rows
from fedtide.data.sources import Text

TINY = [
    {"client": "bob", "text": "The cat sat on the mat, they say."},
    {"client": "ann", "text": "The cat sat. The cat ran!"},
    {"client": "ann", "text": "A dog?"},
]
"""Sentences of at most four words: the cat sat | the cat ran | a dog (ann); the cat sat on (bob)."""


def written(path: Path, lines: list[dict[str, Any]]) -> str:
    """JSON lines in a file, and its name."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(path)


def tiny(folder: Path, **options: Any) -> Rows:
    """The tiny texts as rows of four steps, with a vocabulary of four words and nothing held out."""
    path = written(folder / "tiny.jsonl", TINY)
    return Text((path,), **{"length": 4, "vocabulary": 4, "test": 0.0, **options}).load(None, 0)


def chatter(path: Path, clients: int = 6, each: int = 9) -> str:
    """Texts of several clients, each with a favourite word, half of the clients about tea and half about rain."""
    lines = [
        {
            "client": f"c{i}",
            "topic": "tea" if i < clients // 2 else "rain",
            "text": f"I like w{i} {'and tea' * (k % 2)} a lot. " + ("Rain is wet!" if i >= clients // 2 else "Tea?"),
        }
        for i in range(clients)
        for k in range(each)
    ]
    return written(path, lines)


class Network(nn.Module):
    """The next word from the last one alone."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, 6, padding_idx=0)
        self.head = nn.Linear(6, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits (rows, steps, classes)."""
        return self.head(self.embedding(x))
