"""What methods have in common whose clients choose a branch on their own: the answer, the server's half, who predicts.

The server knows of a branch only how many trained it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from fedtide.core.types import Answer, Facts, Notes, Prediction, Weighted, Weights
from fedtide.learn.server import Moved, Server
from fedtide.learn.task import Task
from fedtide.multi.branches import by_certainty, chosen, counted, read, step, with_gradient

Heads = Literal["participants", "members"]
"""By whose rows a branch's update is divided: those of all participants, or of those who trained it."""

Sure = Literal["row", "client"]
"""Whether each row picks the surer branch, or all rows of a client together."""


def trained(fitted: Any, branch: Tensor, weight: float, rows: int) -> Answer:
    """The answer of a client that has trained the branches marked in `branch` (K,), as shares."""
    return Answer(
        {
            "delta": Weighted(fitted.delta, weight),
            "loss": Weighted(fitted.loss, rows),
            "branches": Weighted(branch.double(), weight),
        },
        notes=Notes(branch=branch.argmax()),
    )


def stepped(state: Moved, server: Server, got: dict[str, Any] | None, lam: float, heads: Heads) -> tuple[Moved, Facts]:
    """The server's half of a round: a step of the trunk and of the branches that were trained."""
    if got is None or got["delta"] is None:
        return state, {}
    shares = got["branches"]
    divisor = torch.where(shares > 0, shares, 1.0) if heads == "members" else None
    weights, memo = step(server, state.weights, state.server, got["delta"], with_gradient(shares, lam), divisor)
    return replace(state, weights=weights, server=memo), {"loss": got["loss"], "branches": shares}


def by_surer_branch(task: Task, sure: Sure) -> Any:
    """The `predict` of methods that know nothing of a row but what the branches say."""

    def predict(payload: Weights, memories: Any, x: Tensor, owner: Tensor) -> Prediction:
        logits, _ = read(task, payload, x)
        return chosen(logits, by_certainty(logits, owner, sure == "client", counted(task, x)))

    return predict
