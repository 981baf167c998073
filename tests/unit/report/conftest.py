"""Pictures are laid out where a test is about pages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fedtide.report.figures import STYLE

PAGES = ("test_page", "test_ends")


@pytest.fixture(scope="module", autouse=True)
def _as_they_come(request: pytest.FixtureRequest, thorough: bool) -> Iterator[None]:
    """Elsewhere, but with `--thorough`, panels stay where they are put: a layout measures every text, which takes as
    long as to draw it."""
    with pytest.MonkeyPatch.context() as patch:
        if not thorough and request.path.stem not in PAGES:
            patch.setitem(STYLE, "figure.constrained_layout.use", False)
        yield
