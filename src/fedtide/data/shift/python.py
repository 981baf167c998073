"""A part of a shift that is the user's own."""

from typing import Any, ClassVar

from fedtide.fields import user_code
from fedtide.fields.types import ingredient


@ingredient
class Python(user_code.Python):
    """Your own kind: what your `module:function`, called with `options`, returns stands in its place."""

    # What can be said of it before it is made: anything may change, in no rhythm that is known.
    drifts: ClassVar[bool] = True
    changes: ClassVar[bool] = True

    def rhythm(self, *_: Any) -> dict[str, float]:
        """Return no rhythm: none is known."""
        return {}

    def words(self, *_: Any) -> str:
        """Name the user's code in words."""
        return f"It follows your own {self.name}, too. "
