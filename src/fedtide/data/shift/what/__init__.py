"""What a client holds: which of its rows are there at a moment.

Each kind is settings; `plan` makes of them, once for a population, what says who holds which rows when.
"""

from typing import Annotated

from pydantic import Field

from fedtide.core.user_code import Python
from fedtide.data.shift.what.change_points import ChangePoints
from fedtide.data.shift.what.cluster_drift import ClusterDrift
from fedtide.data.shift.what.mixture import DomainMixture, Static
from fedtide.data.shift.what.plan import Holding, Plan, PopulationView, Rhythm
from fedtide.data.shift.what.stream import Stream

What = Annotated[Static | DomainMixture | Stream | ClusterDrift | ChangePoints | Python, Field(discriminator="kind")]

__all__ = [
    "ChangePoints",
    "ClusterDrift",
    "DomainMixture",
    "Holding",
    "Plan",
    "PopulationView",
    "Rhythm",
    "Static",
    "Stream",
    "What",
]
