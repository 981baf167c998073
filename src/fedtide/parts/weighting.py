"""Weighting: what a client counts for in a mean over clients."""

from __future__ import annotations

from typing import Literal

from fedtide.core.types import Shard

Weighting = Literal["samples", "uniform"]
"""By its rows, or all alike."""


def client_weight(shard: Shard, weighting: Weighting) -> float:
    """What a client that has trained counts for in the mean."""
    return float(len(shard)) if weighting == "samples" else 1.0
