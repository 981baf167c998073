"""Transforms: what is ours, or a way to personalize, as a function `Algorithm -> Algorithm`; a file each.

With default options a method follows its paper. A transform is named beside it at each number:
"IFCA (anchored)".

>>> import fedtide as ft
>>> task = ft.Task(lambda: ft.models.Linear().build((3,), 2))
>>> both = ft.transforms.apply(ft.algorithms.flexcfl(task), ft.transforms.Anchored(), ft.transforms.Pooled())
>>> [transform.kind for transform in both.transforms]
['pooled', 'anchored']
"""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from fedtide.core.errors import nearest
from fedtide.fields.shapes import tags_of
from fedtide.fields.types import by_kind
from fedtide.personal.ways import WAYS
from fedtide.transforms.anchored import Anchored
from fedtide.transforms.at_home import AtHome
from fedtide.transforms.on_need import OnNeed
from fedtide.transforms.personalized import Personalized
from fedtide.transforms.pooled import Pooled
from fedtide.transforms.robust import Robust
from fedtide.transforms.shared import Shared
from fedtide.transforms.transform import apply
from fedtide.transforms.trusted import Trusted
from fedtide.transforms.watch import Watch

__all__ = [
    "Anchored", "AnyTransform", "AtHome", "OnNeed", "Personalized", "Pooled", "Robust", "Shared", "Trusted", "Watch",
    "apply",
]  # fmt: skip


Whole = Annotated[
    Anchored | AtHome | OnNeed | Pooled | Robust | Shared | Trusted | Watch | Personalized, Field(discriminator="kind")
]
KINDS = tuple(tags_of(Whole))


def _spelled(value: Any) -> Any:
    """Read `"anchored"` as `{kind = "anchored"}`, and a way to personalize, such as "fine-tuned", as that."""
    table = by_kind(value)
    kind = table.get("kind") if isinstance(table, dict) else None
    if kind in WAYS:
        return {"kind": "personalized", "way": table}
    if isinstance(kind, str) and kind not in KINDS:
        raise ValueError(f"found {kind!r}, {nearest(kind, [*KINDS, *WAYS])}")
    return table


AnyTransform = Annotated[Whole, BeforeValidator(_spelled)]
"""One of the transforms."""
