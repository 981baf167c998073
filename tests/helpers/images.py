"""Counts of the pictures that are decoded."""

from __future__ import annotations

import pytest

from fedtide.data.sources import images


def count_decoded(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A list to which each picture that is decoded from now on adds an entry."""
    count: list[bool] = []
    decode = images.decode

    def counted(*args):
        for pixels in decode(*args):
            count.append(True)
            yield pixels

    monkeypatch.setattr(images, "decode", counted)
    return count
