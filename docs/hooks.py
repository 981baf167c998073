"""What only the built site has: source files of the package in place of links to them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def on_page_markdown(markdown: str, **_: object) -> str:
    """Put the file where a line is nothing but a link to it."""
    return re.sub(r"^\[`(src/[\w/]+\.py)`\]\(.*\)$", _shown, markdown, flags=re.MULTILINE)


def _shown(found: re.Match[str]) -> str:
    lines = (ROOT / found[1]).read_text(encoding="utf-8").splitlines()
    return "\n".join([f'??? example "{found[1]}"', *(f"    {line}" for line in ["```python", *lines, "```"])])
