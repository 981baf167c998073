"""Plain local training: the work of every method whose clients train the received weights and send the update."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedtide.core.base import Answer, Memory, Moment, Shard, Sum, Weighted, Weights
from fedtide.core.rng import Rng
from fedtide.core.sums import replace_divisor
from fedtide.core.trees import Tree, map_leaves
from fedtide.core.weights import squared_lengths
from fedtide.learn.device import CPU, to_cpu
from fedtide.learn.local import LocalTrainer
from fedtide.learn.stack import Fit
from fedtide.learn.steps import Steps, Train, run_steps, utility
from fedtide.learn.task import Task

Weighting = Annotated[
    Literal["samples", "uniform"],
    Field(description='weight of a client: "samples" its number of samples, "uniform" 1.'),
]


def client_weight(shard: Shard, weighting: Weighting) -> float:
    """Return the weight of a client that has trained."""
    return float(len(shard)) if weighting == "samples" else 1.0


def answer_update(
    delta: Weights, loss: float, shard: Shard, weighting: Weighting, memory: Memory = None, **more: Any
) -> Answer:
    """Build the answer of a client that has trained: its update and its training loss.

    Args:
        delta: new minus received weights.
        loss: mean training loss.
        shard: the client's samples.
        weighting: weight of the client in the mean.
        memory: what it keeps from now on.
        more: further sums.

    >>> answer_update(Weights({}), 0.5, Shard(*torch.zeros(3, 4)), "uniform").total["loss"]
    Weighted(value=0.5, weight=4)
    """
    total = {"delta": Weighted(delta, client_weight(shard, weighting)), "loss": Weighted(loss, len(shard))}
    return Answer(total | more, memory=memory, update=delta)


@dataclass(frozen=True)
class Training:
    """Train the received weights and send the update as a weighted sum; a work.

    The clients of a question with this work may be trained at once (`fedtide.fleets.stacked_engine`), unless they
    compute losses before training (`forward_passes`).

    Args:
        task: model and loss.
        local: local training.
        weighting: weight of a client in the mean.
        utility: also reveal "utility", which Oort asks for.
        squares: also sum the squared length of each layer of the update, and the squared weight, for partial pooling.

    >>> train = Training(Task(lambda: torch.nn.Linear(3, 2)), LocalTrainer(), "samples")
    >>> rows = Shard(torch.zeros(4, 3), torch.tensor([0, 1, 0, 1]), torch.arange(4))
    >>> answer = train(train.task.init(Rng(0)), None, rows, Moment(0, 1), Rng(0))
    >>> {name: leaf.weight for name, leaf in answer.total.items()}
    {'delta': 4.0, 'loss': 4}
    """

    task: Task
    local: LocalTrainer
    weighting: Weighting
    utility: bool = False
    squares: bool = False

    @property
    def forward_passes(self) -> int:
        """Number of passes without gradients over a client's samples before training."""
        return int(self.utility)

    def __call__(self, payload: Weights, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        """Train one client; None without a step."""
        return run_steps(self.start(payload, memory, shard, moment, rng))

    def request(self, payload: Weights, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Train:
        """Return the training that a client asks for."""
        return Train(self.task, self.local, payload, shard, moment, rng)

    def start(self, payload: Weights, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Steps[Answer | None]:
        """Begin to train one client, in steps."""
        seen = {"utility": self._utility(payload, shard)} if self.utility else {}
        fitted = yield self.request(payload, memory, shard, moment, rng)
        if not fitted.steps:
            return None  # no samples, or a single one with BatchNorm: "no step" must not pull the mean to zero
        delta = fitted.delta
        total = sum_update(delta, client_weight(shard, self.weighting), squares=self.squares)
        return Answer(total | {"loss": Weighted(fitted.loss, len(shard))}, seen, update=delta)

    def sum_of(self, fit: Fit, shards: Sequence[Shard]) -> Tree:
        """Return the sum of the totals of clients that were trained at once, without squares."""
        rows = torch.tensor([len(shard) for shard in shards], dtype=torch.float64)
        weight = torch.tensor([client_weight(shard, self.weighting) for shard in shards], dtype=torch.float64)

        def add(leaf: Tensor) -> Tensor:
            kind = leaf.dtype if leaf.device.type == CPU else torch.float64  # costs a GPU little beside its training
            shares = weight.to(leaf.device, kind)
            return to_cpu((shares @ leaf.reshape(len(leaf), -1).to(kind)).reshape(leaf.shape[1:]).double())

        delta = Sum(map_leaves(add, fit.delta), float(weight.sum()))
        return {"delta": delta, "loss": Sum(float(fit.loss @ rows), float(rows.sum()))}

    def _utility(self, received: Weights, shard: Shard) -> Tensor:
        return utility(self.task.losses(received, shard), int(self.local.distinct(torch.tensor(len(shard)))))


SMALLEST = 1e-10
"""Constant added to a loss before taking powers, as in the released code."""


@dataclass(frozen=True)
class FairTraining(Training):
    """Training whose update is weighted by a power of the loss before it.

    Args:
        q: fairness.
    """

    q: float = 1.0

    @property
    def forward_passes(self) -> int:
        """Number of passes without gradients over a client's samples before training."""
        return super().forward_passes + 1

    def start(self, payload: Weights, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Steps[Answer | None]:
        """Begin to train one client, in steps."""
        # A power that overflows is infinite in torch's float64, and the answer is refused; in Python it would raise.
        loss = torch.tensor(self.task.objective(payload, shard) + SMALLEST, dtype=torch.float64)
        answer = yield from super().start(payload, memory, shard, moment, rng)
        if answer is None:
            return None
        delta, lipschitz = answer.total["delta"], 1.0 / self.local.lr
        # ||dw_i||^2 = L^2 * ||w_i - w||^2
        norm2 = lipschitz**2 * sum(float(d.double().square().sum()) for d in delta.value.params.values())
        power = float(loss**self.q)
        steep = self.q * float(loss ** (self.q - 1)) * norm2 if self.q > 0 else 0.0
        fair = {
            # minus delta_i, as value and weight: -delta_i = L * F_i^q * (w_i - w)
            "delta": Weighted(delta.value, delta.weight * lipschitz * power),
            "h": Weighted(steep + lipschitz * power, delta.weight),
        }
        return replace(answer, total=answer.total | fair)


def fair_totals(total: Any) -> Any:
    """Set the weight of "delta" in q-FedAvg totals to sum_i h_i, so that its mean is q-FedAvg's step.

    Running statistics keep the mean with weights L * F_i^q. None stays None.

    >>> from fedtide.core.base import mean
    >>> delta = Sum(Weights({"w": torch.tensor([6.0])}, {"mean": torch.tensor([6.0])}), 2.0)
    >>> made = mean(fair_totals({"delta": delta, "h": Sum(3.0, 1.0)}))["delta"]
    >>> made.params["w"].item(), made.buffers["mean"].item()
    (2.0, 3.0)
    """
    if total is None:
        return None
    step, h = total["delta"], total["h"].value
    if not h or not step.weight:
        return {**total, "delta": replace(step, weight=0.0)}
    return {**total, "delta": replace_divisor(step, h)}


def sum_update(delta: Weights, weight: float, *, squares: bool) -> dict[str, Any]:
    """Return the sums that a client sends of its update.

    Args:
        delta: new minus old.
        weight: weight of the client in the mean.
        squares: also send what partial pooling needs (`fedtide.transforms.pooled`).
    """
    total: dict[str, Any] = {"delta": Weighted(delta, weight)}
    if squares:
        total |= {"squares": Weighted(squared_lengths(delta), weight), "weight": Weighted(weight, weight)}
    return total


def training_loss(answer: Answer) -> Tensor | None:
    """Return a client's mean training loss for the record: by convention the leaf "loss" of its answer, else None.

    >>> training_loss(Answer({"loss": Weighted(0.5, 3.0)})), training_loss(Answer({}))
    (tensor(0.5000, dtype=torch.float64), None)
    """
    leaf = answer.total.get("loss") if isinstance(answer.total, dict) else None
    if not isinstance(leaf, Weighted) or not isinstance(leaf.value, int | float | Tensor):
        return None
    value = torch.as_tensor(leaf.value, dtype=torch.float64)
    return None if value.dim() else value
