"""Configuration: an experiment as typed, frozen values, read from TOML or made in Python.

>>> import fedtide as ft
>>> ft.config.from_dict({"rounds": 2, "method": [{"algorithm": "fedavg"}]}).rounds
2
"""

from fedtide.config.reading import from_dict, read
from fedtide.config.schema import (
    Claim,
    Data,
    Experiment,
    Forgetting,
    Keep,
    Method,
    StopAt,
    is_own,
    maker,
    options_model,
)
from fedtide.config.settings import Auto, FleetSettings, Local, Range, Ray, Stacked, Tune, TuneStage, Workers
from fedtide.config.sweep import Point, axes, has_choice, matching, points
from fedtide.config.writing import brief, resolved, to_toml
from fedtide.draw.prose import slug

__all__ = [
    "Auto", "Claim", "Data", "Experiment", "FleetSettings", "Forgetting", "Keep", "Local", "Method", "Point", "Range",
    "Ray", "Stacked", "StopAt", "Tune", "TuneStage", "Workers", "axes", "brief", "from_dict", "has_choice", "is_own",
    "maker", "matching", "options_model", "points", "read", "resolved", "slug", "to_toml",
]  # fmt: skip


def __dir__() -> list[str]:
    return __all__
