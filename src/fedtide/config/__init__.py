"""Configuration: an experiment as typed, frozen values, read from TOML or made in Python."""

from fedtide.config.reading import Point, from_dict, matching, points, read, resolved, slug, to_toml
from fedtide.config.schema import (
    Claim,
    Data,
    Experiment,
    FleetSettings,
    Forgetting,
    Method,
    Range,
    Tune,
    TuneStage,
    maker,
    options_model,
)

__all__ = [
    "Claim",
    "Data", "Experiment", "FleetSettings", "Forgetting", "Method", "Point", "Range", "Tune", "TuneStage", "from_dict",
    "maker", "matching", "options_model", "points", "read", "resolved", "slug", "to_toml",
]  # fmt: skip
