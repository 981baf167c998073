"""Anchor: a global model beside K others, and its weight in their mixture, found on clients' validation samples.

Clients sum the log-likelihood of their validation samples at eleven weights, and the server takes the best: it learns
eleven sums and nothing of a single client.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedtide.core.errors import refused
from fedtide.core.rng import Rng
from fedtide.core.sums import mean
from fedtide.core.trees import detached
from fedtide.core.types import Holdings, Moment, Prediction, Shard, Sum, Weighted, Weights
from fedtide.learn.local import LocalTrainer
from fedtide.learn.server import Server
from fedtide.learn.task import Task, row_losses

WEIGHTS = torch.linspace(0, 1, 11, dtype=torch.float64)
"""Weights of the anchor that are tried."""

LEAST = -1e6
"""Log-likelihood of a sample at least."""

S = TypeVar("S", bound=Any)
"""State of a method: a dataclass with its `anchor`, or None."""


@dataclass(frozen=True)
class Anchor:
    """State of an anchor: its weights, the server optimizer's memo, and its weight in the mixture."""

    weights: Weights
    memo: Any
    share: float = 0.5

    def step(self, server: Server, delta: Sum, likelihoods: Sum | None) -> Anchor:
        """Return the anchor after a server step, with the share of highest likelihood; without any as it was."""
        weights, memo = server.step(self.weights, self.memo, mean(delta))
        best = self.share
        if likelihoods is not None and likelihoods.weight:
            best = float(WEIGHTS[int(likelihoods.value.argmax())])
        return Anchor(weights, memo, best)

    @classmethod
    def start(cls, weights: Weights, server: Server) -> Anchor:
        """Return the anchor before any training."""
        return cls(weights, server.init(weights))

    @property
    def payload(self) -> dict[str, Any]:
        """What clients receive."""
        return {"weights": self.weights, "share": self.share}


def train_anchor(
    task: Task,
    local: LocalTrainer,
    sent: dict[str, Any],
    shard: Shard,
    moment: Moment,
    rng: Rng,
    weight: float,
    logp_of: Callable[[Tensor], Tensor],
) -> dict[str, Any]:
    """Train the anchor on a client's samples, and weigh it on its validation samples.

    Args:
        task: the task of a single model.
        local: local training.
        sent: the anchor's payload.
        shard: the client's samples.
        moment: the round.
        rng: the client's key.
        weight: weight of the client.
        logp_of: inputs -> log-probabilities of the method's own prediction, by the models that were received.

    Returns:
        Parts of the client's sums. What was trained before in the task's memory must have been copied.
    """
    fitted = local(task, task.loss, sent["weights"], shard, moment, rng)
    total = {"anchor": Weighted(detached(fitted.delta), weight)}
    if shard.val is not None and len(shard.val):
        other = log_probabilities(task, sent["weights"], shard.val.x)
        total["likelihoods"] = likelihoods_of(logp_of(shard.val.x), other, shard.val)
    return total


def step_anchor(state: S, server: Server, total: dict[str, Any]) -> tuple[S, dict[str, Any]]:
    """Take the server's step of the anchor, and weigh it anew; return the state, and the weight as a fact."""
    if state.anchor is None:
        return state, {}
    beside = state.anchor.step(server, total["anchor"], total.get("likelihoods"))
    return replace(state, anchor=beside), {"anchor": beside.share}


def mix_in(found: Prediction, task: Task, sent: dict[str, Any], x: Tensor) -> Prediction:
    """Mix the anchor into a prediction; what both predict alone is told beside."""
    other = log_probabilities(task, sent["weights"], x)
    labels = {**found.others, "components": found.logp.argmax(-1), "anchor": other.argmax(-1)}
    return replace(found, logp=mix(found.logp.double(), other, sent["share"]), others=labels)


def log_probabilities(task: Task, weights: Weights, x: Tensor) -> Tensor:
    """Return the log-probabilities (rows, ..., classes) of a model, in float64."""
    return F.log_softmax(task.logits(weights, x).double(), -1)


def mix(logp: Tensor, anchor: Tensor, share: float) -> Tensor:
    """Return log((1 - share) p + share p_anchor); with share 0 or 1 one of both as it is.

    >>> mix(torch.tensor([0.2]).log(), torch.tensor([0.6]).log(), 0.5).exp()
    tensor([0.4000])
    """
    if share in (0.0, 1.0):
        return anchor if share else logp
    parts = torch.stack([logp, anchor])
    return (parts + torch.tensor([1 - share, share]).log().to(parts).reshape(-1, *[1] * logp.dim())).logsumexp(0)


def likelihoods_of(logp: Tensor, anchor: Tensor, val: Shard) -> Weighted:
    """Return the mean log-likelihood (11,) of a client's validation labels at each of `WEIGHTS`.

    Args:
        logp: log-probabilities of the mixture without the anchor (rows, ..., classes).
        anchor: those of the anchor.
        val: the samples.
    """
    told = [-row_losses(each, val.y).double() for each in (logp, anchor)]
    ours, theirs = (each if val.mask is None else each[val.mask] for each in told)
    found = torch.stack([mix(ours.flatten(), theirs.flatten(), share) for share in WEIGHTS.tolist()])
    rows = found.shape[1]
    return Weighted(found.nan_to_num(nan=LEAST).clamp(min=LEAST).sum(1) / max(rows, 1), rows)


def with_trained(local: LocalTrainer, anchor: bool) -> Callable[[Tensor], Tensor] | None:
    """Return the samples that "train" trains on, for the clock, of a method that trains one model beside the anchor."""
    return (lambda rows: 2 * local.samples(rows)) if anchor else None


def needs_val(held: Holdings) -> None:
    """Refuse an anchor where no client has validation samples to weigh it by."""
    if not held.has_val:
        raise refused("anchor", True, "false without validation samples (data.split.val)")
