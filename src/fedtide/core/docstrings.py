"""Docstrings in Google style, read for the command line and the documentation."""

import inspect
import re
from dataclasses import dataclass
from textwrap import dedent


@dataclass(frozen=True)
class Doc:
    """A docstring: its prose as Markdown, and the description of each name in its Args section."""

    prose: str
    args: dict[str, str]


def docstring(text: str | None) -> Doc:
    """Read a docstring; of its sections only `Args:` is kept.

    >>> docstring("Train.\\n\\nArgs:\\n    rate: of learning,\\n        above 0.\\n    batch: rows.")
    Doc(prose='Train.', args={'rate': 'of learning, above 0.', 'batch': 'rows.'})
    """
    prose: list[str] = []
    args: dict[str, str] = {}
    for block in re.split(r"\n\s*\n", inspect.cleandoc(text or "")):
        first, _, rest = block.partition("\n")
        if first == "Args:":
            pairs = (line.partition(":") for line in re.split(r"\n(?! )", dedent(rest)) if line)
            args |= {name: " ".join(meaning.split()) for name, _, meaning in pairs}
        elif first not in ("Returns:", "Raises:") and not first.startswith(">>>"):
            prose.append(block)
    return Doc("\n\n".join(prose), args)
