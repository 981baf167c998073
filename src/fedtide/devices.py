"""Times that clients take on the simulated clock: `devices` of a simulation or an experiment.

>>> import fedtide as ft
>>> ft.devices.Steady(seconds=60.0).seconds
60.0
"""

from fedtide.fleets.devices import Devices, LogNormal, Steady, Traces

__all__ = ["Devices", "LogNormal", "Steady", "Traces"]
