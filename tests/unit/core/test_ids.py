"""Fields with an entry for each client grow where clients join, wherever in a state they stand."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedtide.cohorts.sampling import no_reports
from fedtide.core.base import Weights
from fedtide.core.trees import grown, per_client, same


@dataclass(frozen=True)
class State:
    weights: tuple[Weights, ...]
    cluster: Tensor = field(metadata=per_client(new=lambda state: int(state.cluster.max())))
    reports: Tensor = field(metadata=per_client(new=0.5))
    cohort: Any = None


def state(clients: int) -> State:
    return State(
        (Weights({"w": torch.ones(2)}),), torch.arange(clients), torch.zeros(clients, 3), no_reports(clients, 1)
    )


def test_all_fields_and_the_cohorts_memo_grow():
    more = grown(state(4), 6)
    assert more.cluster.tolist() == [0, 1, 2, 3, 3, 3]
    assert more.reports.tolist() == [[0.0] * 3] * 4 + [[0.5] * 3] * 2
    assert more.cohort.heard.tolist() == [False] * 6
    assert more.cohort.of.shape == (6, 1)
    assert same(more.weights, state(4).weights)


def test_a_state_with_room_stays_what_it_is():
    before = state(4)
    assert grown(before, 4) is grown(before, 3) is before
    assert grown(None, 4) is None
    assert grown((1, 2), 4) == (1, 2)
