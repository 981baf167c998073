"""Base class of the tables of an experiment."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """Frozen, and no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")
