"""What changes with time: who takes part, which rows a client holds, and what they mean.

>>> import fedtide as ft
>>> ft.Shift(who=ft.shift.Periodic(period=8), how=ft.shift.Rotation(angles=(0, 90))).period
8.0
"""

from fedtide.data.shift import Shift
from fedtide.data.shift.awake import Availability
from fedtide.data.shift.how import How, Identity, Permuted, Rotation, Swaps
from fedtide.data.shift.what import All, Changes, Drift, Mixture, Stream, What
from fedtide.data.shift.who import Always, Periodic, Who

__all__ = [
    "All", "Always", "Availability", "Changes", "Drift", "How", "Identity", "Mixture", "Periodic", "Permuted",
    "Rotation", "Shift", "Stream", "Swaps", "What", "Who",
]  # fmt: skip
