"""Every law runs over every registered algorithm, and over the sketch that stands in for one to come."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedtide.algorithms import BLENDS, REGISTRY, Entry
from helpers import sketches
from helpers.toys import VARIANTS


def _picked(order, values):
    return tuple(values[k] for k in order)


SKETCHES = {
    "helpers.sketches:fielding": Entry(
        sketches.fielding, "", relabel=lambda s, order: sketches.Clustered(
            _picked(order, s.weights), s.vectors, torch.tensor(order).argsort()[s.cluster], s.centers[list(order)]
        ),
    ),
}  # fmt: skip
OWN_SHARES = replace(REGISTRY["pfedem"], exempt=BLENDS)
ENTRIES = {
    **REGISTRY, **{name: REGISTRY[base] for name, (base, _) in VARIANTS.items()}, **SKETCHES,
    "pfedem shares": OWN_SHARES,
}  # fmt: skip


@pytest.fixture(params=list(ENTRIES))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def entry(name: str) -> Entry:
    return ENTRIES[name]


@pytest.fixture
def lawful(request: pytest.FixtureRequest, name: str) -> str:
    """The algorithm's name; skips a law that its registry line declares it exempt from."""
    law = request.node.originalname.removeprefix("test_").partition("__")[0]
    reason = ENTRIES[name].exempt.get(law)
    if reason:
        pytest.skip(f"{name} is exempt from {law}: {reason}")
    return name
