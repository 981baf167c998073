"""How docstrings are shown by mkdocstrings: doctests as code, paragraphs `field: ... field: ...` as lists."""

from __future__ import annotations

import re
from typing import Any

import griffe

from fedtide.config.keys import inline


class Shown(griffe.Extension):
    """Rewrites docstrings before they are read."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every object, for a class before it has its members."""
        _rewrite(obj, [])

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        """Called for every class."""
        _rewrite(cls, [name for name, member in cls.members.items() if member.is_attribute])
        # Ingredients are dataclasses, which cannot be seen from their source.
        for decorator in cls.decorators:
            if str(decorator.value) == "ingredient":
                cls.module.set_member("dataclass", griffe.Alias("dataclass", "dataclasses.dataclass"))
                decorator.value = griffe.ExprName("dataclass", parent=cls.module)


def _rewrite(obj: griffe.Object, fields: list[str]) -> None:
    if obj.docstring is not None:
        blocks = re.split(r"\n\s*\n", obj.docstring.value)
        obj.docstring.value = "\n\n".join(_shown(block, fields) for block in blocks)


def _shown(block: str, fields: list[str]) -> str:
    if block.startswith(">>>"):
        return f"```pycon\n{block}\n```"
    if said := inline(block, fields):
        return "\n".join(f"- `{name}`: {meaning}" for name, meaning in said.items())
    return block
