"""Weighting of clients in a mean."""

from __future__ import annotations

from typing import Literal

from fedtide.core.types import Shard

Weighting = Literal["samples", "uniform"]
"""Weight of a client: its number of samples, or 1."""


def client_weight(shard: Shard, weighting: Weighting) -> float:
    """Return the weight of a client that has trained."""
    return float(len(shard)) if weighting == "samples" else 1.0
