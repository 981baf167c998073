"""Weighting of clients in a mean."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedtide.core.base import Shard

Weighting = Annotated[
    Literal["samples", "uniform"],
    Field(description='weight of a client: "samples" its number of samples, "uniform" 1.'),
]


def client_weight(shard: Shard, weighting: Weighting) -> float:
    """Return the weight of a client that has trained."""
    return float(len(shard)) if weighting == "samples" else 1.0
