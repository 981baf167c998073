"""The data that ship with the package: characters, and roles of plays."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import as_file, files
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from fedtide.data.rows import Rows
from fedtide.data.sources.files import Loading
from fedtide.data.sources.text import Text
from fedtide.fields.types import Count, ingredient


@ingredient
class DayNightCharacters(Loading):
    """18,480 images of handwriting, 28 x 28: digits (domain "day") from MNIST, letters (domain "night") from EMNIST.

    Args:
        labels: "shared" gives letters A to J the labels 0-9 of the digits, so that one label has two meanings; there
            are 7,000 images of each domain. "disjoint" gives digits the labels 0-9 and letters A to Z 10-35.
        domain: "day" or "night" gives only the rows of that domain, with letters labeled from 0, for use with other
            sources in "domains". The rows are equal to those in "both".
    """

    labels: Literal["shared", "disjoint"] = "shared"
    domain: Literal["both", "day", "night"] = "both"
    kind: Literal["day-night-characters"] = "day-night-characters"

    def load(self, directory: Path | None, seed: int) -> Rows:
        """Read the images."""
        both, number = self._both(), {"day": 0, "night": 1}.get(self.domain)
        if number is None or both.domain is None:
            return both
        one = both.pick(both.domain == number)
        y = one.y - one.y.min()
        return Rows(self.kind, one.x, y, int(y.max()) + 1, held_out=one.held_out)

    def _both(self) -> Rows:
        with files("fedtide.data").joinpath("bundled/characters.npz").open("rb") as file, np.load(file) as arrays:
            x, label, held_out = (torch.from_numpy(arrays[name]) for name in ("images", "labels", "test"))
        label = label.long()
        domain = (label >= 10).long()
        rows = Rows(self.kind, x.unsqueeze(1), label, 36, domain, ("day", "night"), held_out=held_out)
        if self.labels == "shared":
            shared = rows.pick(label < 20)
            return Rows(
                self.kind, shared.x, shared.y % 10, 10, shared.domain, ("day", "night"), held_out=shared.held_out
            )
        # As many of each letter: the rarest have 240 training and 40 test rows.
        place = torch.zeros_like(label)
        for value in label.unique():
            for part in (True, False):
                mine = (label == value) & (held_out == part)
                place[mine] = torch.arange(int(mine.sum()))
        return rows.pick((domain == 0) | (place < torch.where(held_out, 40, 240)))


@ingredient
class PlayRoles(Loading):
    """Next-word prediction on 248 roles of Shakespeare's plays, where a role is a natural client and a row a sentence.

    Domain "day" has 125 roles of eleven comedies, domain "night" 123 roles of six tragedies and five histories. Each
    role has its first speeches up to 4,000 characters. The latest fifth of a role's speeches is for testing. Words,
    numbers and scoring are as in `kind = "text"`.

    A vocabulary of a thousand words leaves out a fifth of all words. A single class of them would be by far the most
    frequent. A small model would long predict only this class, which is never scored as right, so they share several
    numbers.

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
