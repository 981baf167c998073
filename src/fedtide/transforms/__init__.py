"""Transforms: what is ours, or a way to personalize, as a function `Algorithm -> Algorithm`; a file each.

With default options a method follows its paper. A transform is named beside it at each number:
"IFCA (anchored)".

>>> import fedtide as ft
>>> task = ft.Task(lambda: ft.models.Linear().build((3,), 2))
>>> both = ft.transforms.anchored(ft.transforms.pooled(ft.algorithms.flexcfl(task)))
>>> [transform.kind for transform in both.transforms]
['pooled', 'anchored']
"""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from fedtide.core.errors import nearest
from fedtide.fields.types import by_kind, kinds_of
from fedtide.personal.ways import WAYS
from fedtide.transforms.anchored import Anchored, anchored
from fedtide.transforms.at_home import AtHome, at_home
from fedtide.transforms.on_need import OnNeed, on_need
from fedtide.transforms.personalized import Personalized, personalized
from fedtide.transforms.pooled import Pooled, pooled
from fedtide.transforms.robust import Robust, robust
from fedtide.transforms.shared import Shared, shared
from fedtide.transforms.transform import apply
from fedtide.transforms.trusted import Trusted, trusted
from fedtide.transforms.watch import Watch, watch

__all__ = [
    "Anchored", "AnyTransform", "AtHome", "OnNeed", "Personalized", "Pooled", "Robust", "Shared", "Trusted",
    "Watch", "anchored", "apply", "at_home", "on_need", "personalized", "pooled", "robust", "shared", "trusted",
    "watch",
]  # fmt: skip


Whole = Annotated[
    Anchored | AtHome | OnNeed | Pooled | Robust | Shared | Trusted | Watch | Personalized, Field(discriminator="kind")
]
KINDS = kinds_of(Whole)


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
