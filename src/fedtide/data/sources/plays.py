"""The text that ships with the package: roles of comedies by day, of tragedies and histories by night."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import as_file, files
from pathlib import Path
from typing import Literal

from fedtide.data.rows import Rows
from fedtide.data.sources.files import Loading
from fedtide.data.sources.text import Text
from fedtide.fields.types import Count, ingredient


@ingredient
class PlayRoles(Loading):
    """Next-word prediction on 248 roles of Shakespeare's plays, where a role is a natural client and a row a sentence.

    Domain "day" has 125 roles of eleven comedies, domain "night" 123 roles of six tragedies and five histories, each
    with its first speeches up to 4,000 characters. The latest fifth of a role's speeches is for testing. Words, numbers
    and scoring are as in `kind = "text"`.

    A vocabulary of a thousand words leaves out a fifth of all words. In a single class these would be by far the most
    frequent, and a small model would long predict only this class, which is never scored as right; so they share
    several numbers.

    Args:
        vocabulary: number of known words, the most frequent of the training sentences.
        length: number of steps of a row.
        oov_buckets: number of token ids shared by words outside the vocabulary.
        max_samples: maximum number of training sentences of each role, which are its first.

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
