"""Changes with time: who takes part, which rows a client holds, and what they mean.

>>> import fedtide as ft
>>> ft.Shift(who=ft.shift.Periodic(period=8), how=ft.shift.Rotation(angles=(0, 90))).period
8.0
"""

from fedtide.data.shift import Shift
from fedtide.data.shift.availability import Availability
from fedtide.data.shift.how import How, Identity, LabelSwaps, Permutation, Rotation
from fedtide.data.shift.own import AwakeBy, HeldBy, ReadBy
from fedtide.data.shift.python import Python
from fedtide.data.shift.what import ChangePoints, ClusterDrift, DomainMixture, Static, Stream, What
from fedtide.data.shift.who import Always, Periodic, Who

__all__ = [
    "Always", "Availability", "AwakeBy", "ChangePoints", "ClusterDrift", "DomainMixture", "HeldBy", "How", "Identity",
    "LabelSwaps", "Periodic", "Permutation", "Python", "ReadBy", "Rotation", "Shift", "Static", "Stream", "What", "Who",
]  # fmt: skip
