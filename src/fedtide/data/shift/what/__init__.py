"""Rows that each client holds over time.

Each kind is a settings class, whose `plan` computes the rows of a population's clients over time.
"""

from typing import Annotated

from pydantic import Field

from fedtide.data.shift.what.calendar import Calendar
from fedtide.data.shift.what.change_points import ChangePoints
from fedtide.data.shift.what.cluster_drift import ClusterDrift
from fedtide.data.shift.what.holding import Dated, Holding, Plan, PopulationView, Python, Rhythm, Window
from fedtide.data.shift.what.mixture import DomainMixture, Static
from fedtide.data.shift.what.stream import Stream

What = Annotated[
    Static | DomainMixture | Stream | Calendar | ClusterDrift | ChangePoints | Python, Field(discriminator="kind")
]

__all__ = [
    "Calendar", "ChangePoints", "ClusterDrift", "Dated", "DomainMixture", "Holding", "Plan", "PopulationView", "Rhythm",
    "Static", "Stream", "What", "Window",
]  # fmt: skip
