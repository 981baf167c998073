"""The text that ships with the package: roles of comedies by day, of tragedies and histories by night."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import as_file, files
from pathlib import Path
from typing import Literal

from fedtide.core.config_types import Count, ingredient
from fedtide.data.rows import Rows
from fedtide.data.sources.text import Text


@ingredient
class PlayRoles:
    """Next-word prediction on what 248 roles of Shakespeare's plays say: a role is a natural client, a row a sentence.

    Domain "day" has 125 roles of eleven comedies, domain "night" 123 roles of six tragedies and five histories: of each
    its first speeches, up to 4,000 characters. The latest fifth of a role's speeches is for testing. Words, numbers
    and what is scored are as in `kind = "text"`.

    A thousand words leave out a fifth of what is said. As one class that would be by far the most frequent, and a small
    model would long predict nothing else, which is never right; so these words share several numbers.

    Args:
        vocabulary: how many words are known, the most frequent of the training sentences.
        length: steps of a row.
        oov_buckets: how many numbers words that are not in the vocabulary share.
        max_samples: at most so many training sentences of each role, its first.

    >>> rows = PlayRoles(vocabulary=100, length=10, max_samples=5).load(None, 0)
    >>> rows.shape, rows.classes, rows.domain_names, len(rows.client_names)
    ((10,), 123, ('day', 'night'), 248)
    """

    vocabulary: Count = 1000
    length: Count = 20
    oov_buckets: Count = 20
    max_samples: Count | None = None
    kind: Literal["play-roles"] = "play-roles"

    def load(self, directory: Path | None, seed: int) -> Rows:
        """Read the speeches."""
        with as_file(files("fedtide.data").joinpath("bundled/plays.jsonl.gz")) as path:
            text = Text(
                (str(path),), text="speeches", client=("play", "role"), domain="domain", domains=("day", "night"),
                vocabulary=self.vocabulary, length=self.length, oov_buckets=self.oov_buckets,
                max_samples=self.max_samples,
            )  # fmt: skip
            return replace(text.load(None, seed), name=self.kind)
