"""Meaning of rows: a transform of (x, y) that depends on the client, its group and the moment.

Each kind is a settings class, whose `plan` makes the transform of a population's rows once.
"""

from typing import Annotated

from pydantic import Field

from fedtide.data.shift.how.fixed import Identity, Permutation, Rotation
from fedtide.data.shift.how.label_swaps import LabelSwaps
from fedtide.data.shift.how.row_transform import Reading, RowTransform
from fedtide.data.shift.python import Python

How = Annotated[Identity | Rotation | Permutation | LabelSwaps | Python, Field(discriminator="kind")]

__all__ = ["How", "Identity", "LabelSwaps", "Permutation", "Reading", "Rotation", "RowTransform"]
