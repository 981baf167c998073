"""Anchor: a global model beside K others, and its weight in their mixture, found on clients' validation samples.

Clients sum the log-likelihood of their validation samples at eleven weights, and the server takes the best: it learns
eleven sums and nothing of a single client. A round's participants are few, so the sums of earlier rounds count as well,
less with each round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from fedtide.core.config_types import Flag
from fedtide.core.errors import refused
from fedtide.core.rng import Rng
from fedtide.core.sums import mean
from fedtide.core.trees import detached
from fedtide.core.types import Algorithm, Holdings, Memory, Moment, Prediction, Shard, Sum, Weighted, Weights
from fedtide.learn.local import LocalTrainer, LocalUpdate, Term
from fedtide.learn.server import Server
from fedtide.learn.steps import Steps, local_update
from fedtide.learn.target import CLASSES, Target
from fedtide.learn.task import Task
from fedtide.parts.weighting import Weighting, client_weight

WEIGHTS = torch.linspace(0, 1, 11, dtype=torch.float64)
"""Weights of the anchor that are tried."""

LEAST = -1e6
"""Log-likelihood of a sample at least."""

DECAY = 0.9
"""What the sums of a round count for in the next one. With 0 the weight follows a round's few participants, and
accuracy was 0.6 ± 0.2 points lower (33 runs of eight methods in four settings); with 1 it follows too late."""

Anchored = Annotated[
    Flag,
    Field(
        description="one more model on all samples, mixed in with a weight that clients' validation samples choose: up "
        'to twice the training. It is in none of the papers; "false" is needed without such samples.'
    ),
]

S = TypeVar("S", bound=Any)
"""State of a method: a dataclass with its `anchor`, or None."""

Predict = Callable[[Any, Any, Tensor, Tensor], Prediction]
"""The `predict` of an algorithm: (payload, memories, inputs, owner of each row) -> prediction."""


@dataclass(frozen=True)
class Anchor:
    """State of an anchor: its weights, the server optimizer's memo, and its share, which is its weight in the mixture.

    likelihoods: (11,) of validation samples at each of `WEIGHTS`, decayed sums over rounds.
    """

    weights: Weights
    memo: Any
    share: float = 0.5
    likelihoods: Tensor = field(default_factory=lambda: torch.zeros_like(WEIGHTS))

    def step(self, server: Server, delta: Sum, likelihoods: Sum | None) -> Anchor:
        """Return the anchor after a server step, with the share of highest likelihood; without any as it was."""
        weights, memo = server.step(self.weights, self.memo, mean(delta))
        if likelihoods is None or not likelihoods.weight:
            return replace(self, weights=weights, memo=memo)
        summed = DECAY * self.likelihoods + likelihoods.value
        return Anchor(weights, memo, float(WEIGHTS[int(summed.argmax())]), summed)


@dataclass(frozen=True)
class Anchoring:
    """What a method does for its anchor, on the server and at clients; nothing if it has none.

    Args:
        on: whether there is an anchor.
        task: the task of a single model.
        local: local training.
        server: the server optimizer.
        weighting: weight of a client.
        variant: kind of local update.
        term: gradient term of local training.
    """

    on: bool
    task: Task
    local: LocalTrainer
    server: Server
    weighting: Weighting
    variant: LocalUpdate = "averaging"
    term: Term | None = None

    def start(self, rng: Rng) -> Anchor | None:
        """Return the anchor before any training, which begins as FedAvg's model does."""
        if not self.on:
            return None
        weights = self.task.init(rng)
        return Anchor(weights, self.server.init(weights))

    def sent(self, state: Any) -> dict[str, Any]:
        """Return what clients receive besides the payload of a method."""
        anchor = state.anchor
        return {} if anchor is None else {"anchor": {"weights": anchor.weights, "share": anchor.share}}

    def train_alone(self, payload: Any, shard: Shard, moment: Moment, rng: Rng) -> Steps[dict[str, Any]]:
        """Train the anchor where the method has nothing else to train, and tell its loss, as a method does of its own.

        For arguments and result see `train`.
        """
        made = yield from self._update(payload, shard, moment, rng)
        return {} if made is None else {"anchor": made[0], "loss": made[1]}

    def _update(self, payload: Any, shard: Shard, moment: Moment, rng: Rng) -> Steps[tuple[Weighted, Weighted] | None]:
        weights = payload["anchor"]["weights"]
        made = yield from local_update(self.task, self.local, self.variant, weights, shard, moment, rng, self.term)
        if made is None:
            return None
        return Weighted(detached(made[0]), client_weight(shard, self.weighting)), Weighted(made[1], len(shard))

    def train(
        self, predict: Predict | None, payload: Any, memory: Memory, shard: Shard, moment: Moment, rng: Rng
    ) -> Steps[dict[str, Any]]:
        """Train the anchor on a client's samples, and weigh it on its validation samples.

        Called before a method trains its own models, which may be in the same memory.

        Args:
            predict: the method's own prediction, for one client; None where there is nothing to weigh the anchor with.
            payload: what the client received, as for inference.
            memory: what the client knows for inference.
            shard: the client's samples.
            moment: the round.
            rng: the client's key.

        Returns:
            Parts of the client's sums.
        """
        if not self.on:
            return {}
        made = yield from self._update(payload, shard, moment, rng)
        if made is None:
            return {}
        total, val = {"anchor": made[0]}, shard.val
        if predict is not None and val is not None and len(val):
            own = predict(payload, [memory], val.x, torch.zeros(len(val), dtype=torch.int64)).told
            anchor = self.task.told(payload["anchor"]["weights"], val.x, double=True)
            total["likelihoods"] = likelihoods_of(own, anchor, val, self.task.target)
        return total

    def step(self, state: S, total: dict[str, Any]) -> tuple[S, dict[str, Any]]:
        """Take the server's step of the anchor, and weigh it anew; return the state, and the weight as a fact."""
        if not self.on or "anchor" not in total:  # no client of the round could train it
            return state, {}
        anchor = state.anchor.step(self.server, total["anchor"], total.get("likelihoods"))
        return replace(state, anchor=anchor), {"anchor": anchor.share}

    def added_to(self, made: Algorithm[S]) -> Algorithm[S]:
        """Mix the anchor into a method's predictions; refused where no client has validation samples to weigh it by."""

        def check(held: Holdings) -> None:
            if made.check is not None:
                made.check(held)
            if self.on and not held.has_val:
                wanted = "false without validation samples (write anchor = false, or give some by data.split.val)"
                raise refused("anchor", True, wanted)

        return replace(made, predict=self.mixed(made.predict), check=check)

    def mixed(self, predict: Predict) -> Predict:
        """Mix the anchor into a method's own prediction; the labels of each alone are among `others`.

        Of a mixture the anchor is one more component.
        """

        def mixing(payload: Any, memories: Any, x: Tensor, owner: Tensor) -> Prediction:
            found, share = predict(payload, memories, x, owner), payload["anchor"]["share"]
            other, says = self.task.told(payload["anchor"]["weights"], x, double=True), self.task.target.says
            choice, weights = found.choice, found.weights
            if weights is not None:
                last = torch.full((len(x), 1), share, dtype=torch.float64)
                weights = torch.cat([weights * (1 - share), last], 1)
                choice = weights.argmax(1)
            labels = {**found.others, "components": says(found.told), "anchor": says(other)}
            told = mix(found.told.double(), other, share, self.task.target)
            return replace(found, told=told, choice=choice, weights=weights, others=labels)

        return mixing if self.on else predict

    def trained(self, own: Callable[[Tensor], Tensor] | None = None) -> Callable[[Tensor], Tensor]:
        """Return samples held -> samples that "train" trains on, for the clock.

        Args:
            own: the same of the method's own models; None for one model like the anchor.
        """
        once = (lambda rows: rows) if self.variant == "gradient" else self.local.samples
        return lambda rows: (own or once)(rows) + self.on * once(rows)


def mix(own: Tensor, anchor: Tensor, share: float, target: Target = CLASSES) -> Tensor:
    """Return log((1 - share) p + share p_anchor), or what a target makes of both; at share 0 or 1 one, unchanged.

    >>> mix(torch.tensor([0.2]).log(), torch.tensor([0.6]).log(), 0.5).exp()
    tensor([0.4000])
    """
    if share in (0.0, 1.0):
        return anchor if share else own
    parts = torch.stack([own, anchor])
    return target.mixed(parts, torch.tensor([1 - share, share]).log().to(parts).reshape(-1, *[1] * own.dim()))


def likelihoods_of(own: Tensor, anchor: Tensor, val: Shard, target: Target = CLASSES) -> Weighted:
    """Return the mean log-likelihood (11,) of a client's validation labels at each of `WEIGHTS`.

    Of other targets it is minus the plain loss of what the mixture tells.

    Args:
        own: what the mixture tells without the anchor: log-probabilities (rows, ..., classes).
        anchor: what the anchor tells.
        val: the samples.
        target: what rows are labeled with.
    """
    if target != CLASSES:
        blends = (mix(own.double(), anchor, share, target) for share in WEIGHTS.tolist())
        found = torch.stack([-target.losses(blend, val.y).double() for blend in blends])
    else:
        each_row = [-target.losses(told, val.y).double() for told in (own, anchor)]
        ours, theirs = (rows if val.mask is None else rows[val.mask] for rows in each_row)
        found = torch.stack([mix(ours.flatten(), theirs.flatten(), share) for share in WEIGHTS.tolist()])
    rows = found.shape[1]
    return Weighted(found.nan_to_num(nan=LEAST).clamp(min=LEAST).sum(1) / max(rows, 1), rows)
