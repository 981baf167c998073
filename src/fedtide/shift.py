"""Changes with time: who takes part, which rows a client holds, and what they mean.

>>> import fedtide as ft
>>> ft.Shift(who=ft.shift.Periodic(period=8), how=ft.shift.Rotation(angles=(0, 90))).period
8.0
"""

from fedtide.data.shift.availability import Availability
from fedtide.data.shift.how import How, Identity, LabelSwaps, Permutation, Rotation
from fedtide.data.shift.own import AwakeBy, HeldBy, ReadBy
from fedtide.data.shift.python import Python
from fedtide.data.shift.replay import Replay
from fedtide.data.shift.what import Calendar, ChangePoints, ClusterDrift, DomainMixture, Static, Stream, What
from fedtide.data.shift.what.change_points import Domains, Drawn, File, LabelShares
from fedtide.data.shift.what.cluster_drift import MassEvents
from fedtide.data.shift.what.stream import Labels, Order, Time
from fedtide.data.shift.who import Always, BlockCyclic, Data, Periodic, Who

__all__ = [
    "Always", "Availability", "AwakeBy", "BlockCyclic", "Calendar", "ChangePoints", "ClusterDrift", "Data",
    "DomainMixture", "Domains", "Drawn", "File", "HeldBy", "How", "Identity", "LabelShares", "LabelSwaps", "Labels",
    "MassEvents", "Order", "Periodic", "Permutation", "Python", "ReadBy", "Replay", "Rotation", "Static", "Stream",
    "Time", "What", "Who",
]  # fmt: skip
