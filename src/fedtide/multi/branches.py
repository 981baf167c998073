"""Multi-branch networks: one trunk, K branches, of which each client trains one: training, reading, a server step.

The server knows of a branch only how many trained it.

Zhu, Xu, Chen, Konečný, Hard, Goldstein: *Diurnal or Nocturnal?*, ICLR 2022, section 3; the names K, lambda and epsilon
are the paper's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedtide.core.errors import FedtideError
from fedtide.core.types import Facts, Prediction, Shard, Weighted, Weights
from fedtide.learn.local import Fitted
from fedtide.learn.loss import Columns, CrossEntropy, Loss, keep_counted, mask_of
from fedtide.learn.server import Moved, Server
from fedtide.learn.task import Task, joined, parts, row_losses
from fedtide.models.branched import Feature, branch_of, branched
from fedtide.multi.clusters import joint
from fedtide.parts.weighting import Weighting, client_weight

BranchAverage = Literal["participants", "members"]
"""By whose rows a branch's update is divided: those of all participants, or of those who trained it."""

ChoosePer = Literal["row", "client"]
"""Whether each row picks the surer branch, or all rows of a client together."""


def with_branches(
    task: Task,
    layer: str,
    count: int,
    feature: Feature = "shared",
    *,
    vectors: bool = False,
    key: str = "branch_layer",
) -> Task:
    """A task on a network with `layer` repeated `count` times; see `fedtide.models.branched.branched`.

    Where the task says how a model begins, all copies of the layer begin so.

    Args:
        task: on the network without branches.
        layer: the layer that is repeated.
        count: K.
        feature: what the features are.
        vectors: whether features have to be vectors, as those that are clustered.
        key: what the option is called that names the layer, for messages.

    Raises:
        FedtideError: the model has no such layer, or its features are no vectors; said here, before anything runs.
    """
    begin = None if task.begin is None else joint([task.begin] * count, layer)
    made = replace(task, build=lambda: branched(task.build(), layer, count, feature, key), begin=begin)
    scratch = made.scratch
    if all(branch_of(name) is None for name in scratch.names):
        raise FedtideError(
            f"{key}: found '{layer}', which has nothing to train; allowed: a layer with weights, e.g. 'head'"
        )
    if vectors and made.example is not None:
        width(made, scratch.weights, key)
    return made


def width(task: Task, weights: Weights, key: str = "branch_layer") -> int:
    """How wide the features of a branched task are.

    Raises:
        FedtideError: the task has no example row, or its features are no vectors.
    """
    if task.example is None:
        raise FedtideError("this algorithm needs to know how rows look; allowed: Task(..., example=x[:1])")
    found = read(task, weights, task.example)[1].shape[1:]
    if len(found) != 1:
        shape = tuple(found)
        raise FedtideError(f"{key}: found features of shape {shape}, allowed: a layer that takes vectors, e.g. 'head'")
    return found[0]


def read(task: Task, weights: Weights, x: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (K, rows, classes) and features (rows, d) of a branched task, in evaluation mode."""
    features = []

    def logits() -> Iterator[Tensor]:
        for made, z in task.outputs(weights, x):
            features.append(z)
            yield made

    return joined(logits(), len(x), dim=1), torch.cat(features)


@dataclass(frozen=True)
class BranchLoss:
    """The base loss on the chosen branch, and smoothed labels on the others so that they follow the moving trunk.

    `loss(z_k, y) + lam * mean over the others of CE(z_other, (1 - eps) * onehot(y) + eps / C)`; it flows into the trunk
    (no stop-gradient). With K = 1 there are no others. Where the base loss smooths labels in a way of its own, as
    the re-weighted softmax does, that takes the place of CE.

    Args:
        base: what the chosen branch minimizes.
        choice: the branch of the client, or the branch of each row (rows,).
        lam: weight of the other branches.
        eps: smoothing of their labels.
    """

    base: Loss
    choice: int | Tensor
    lam: float = 0.0
    eps: float = 0.0

    def prepare(self, shard: Shard) -> tuple[Any, Columns]:
        """As the base loss; its columns come first, then the choice of each row, then which steps count."""
        shared, columns = self.base.prepare(shard)
        choice = () if isinstance(self.choice, int) else (self.choice,)
        return (shared, len(columns)), (*columns, *choice, *mask_of(shard))

    def value(self, outputs: tuple[Tensor, Tensor], y: Tensor, shared: Any, columns: Columns) -> Tensor:
        """The mean loss of a batch."""
        (logits, _), (shared, count) = outputs, shared
        columns, rest = columns[:count], columns[count:]
        if isinstance(self.choice, int):
            own, others = logits[self.choice], [z for k, z in enumerate(logits) if k != self.choice]
        else:
            k, rest, rows = rest[0], rest[1:], torch.arange(len(y))
            own, *others = (logits[(k + step) % len(logits), rows] for step in range(len(logits)))
        value = self.base.value(own, y, shared, columns)
        if self.lam == 0 or not others:
            return value
        smoothed = getattr(self.base, "smoothed", CrossEntropy().smoothed)
        parts = [smoothed(*keep_counted(z, y, rest), shared, self.eps) for z in others]
        return value + self.lam * torch.stack(parts).mean()


def features(task: Task, weights: Weights, x: Tensor) -> Tensor:
    """As `read`, the features (rows, d) alone: no logits are kept, of which a large vocabulary has many."""
    return torch.cat([z for _, z in task.outputs(weights, x)])


def least_loss(task: Task, weights: Weights, shard: Shard) -> int:
    """The branch with the smallest mean cross-entropy on a client's rows; the first of equals."""
    return int(losses_of(task, weights, shard).mean(1).argmin())


def losses_of(task: Task, weights: Weights, shard: Shard) -> Tensor:
    """Plain cross-entropy (K, rows) of each branch on a client's rows, pass by pass."""
    losses, done = [], 0
    for logits, _ in task.outputs(weights, shard.x):
        rows = slice(done, done + logits.shape[1])
        mask = None if shard.mask is None else shard.mask[rows]
        losses.append(branch_losses(logits, Shard(shard.x[rows], shard.y[rows], shard.ids[rows], mask=mask)))
        done = rows.stop
    return torch.cat(losses, 1)


def blended(
    task: Task, weights: Weights, x: Tensor, pi: Tensor, others: Mapping[str, Tensor] | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """log sum_k pi_k p_k (rows, ..., classes) in float64, and the labels that other shares would predict.

    Pass by pass, so that there is nothing as large beside what is predicted.

    Args:
        task: with branches.
        weights: of the branched network.
        x: rows.
        pi: (rows, K) the shares of each row.
        others: other shares (rows, K), by name.
    """
    ways = {"": pi, **(others or {})}
    labels: dict[str, list[Tensor]] = {name: [] for name in others or {}}

    def mixed() -> Iterator[Tensor]:
        done = 0
        for logits, _ in task.outputs(weights, x):
            made = torch.empty(logits.shape[1:], dtype=torch.float64)
            # float64 of all branches, twice: parts are as much smaller.
            for rows in parts(max(made.shape[0], 1), 4 * len(logits) * made.shape[1:-1].numel()):
                logp = F.log_softmax(logits[:, rows].double(), -1)
                for name, shares in ways.items():
                    share = shares[done : done + len(made)][rows].clamp(min=1e-12).log().T
                    found = torch.logsumexp(logp + share.reshape(*share.shape, *[1] * (made.dim() - 1)), 0)
                    if name:
                        labels[name].append(found.argmax(-1))
                    else:
                        made[rows] = found
            done += len(made)
            yield made

    return joined(mixed(), len(x)), {name: torch.cat(found) for name, found in labels.items()}


def branch_losses(logits: Tensor, shard: Shard) -> Tensor:
    """Plain cross-entropy (K, rows) of each branch, given logits (K, rows, ..., classes)."""
    return torch.stack([row_losses(F.log_softmax(z, -1), shard.y, shard.mask) for z in logits])


def certainty(logits: Tensor) -> Tensor:
    """How far each prediction is from "all classes alike": KL(p || uniform) = log C + sum p log p, (...,).

    >>> [round(c, 6) for c in certainty(torch.tensor([[0.0, 0.0], [100.0, 0.0]])).tolist()]
    [0.0, 0.693147]
    """
    logp = F.log_softmax(logits, -1)
    return math.log(logits.shape[-1]) + logp.exp().mul_(logp).sum(-1)


def counted(task: Task, x: Tensor) -> Tensor | None:
    """Which steps of sequences count (rows, steps): as the model says, else all but token 0; None for rows."""
    says = getattr(getattr(task.scratch.module, "model", None), "counted", None)
    if says is not None:
        return says(x)
    return None if x.is_floating_point() or x.dim() != 2 else x != 0


def by_certainty(logits: Tensor, owner: Tensor, together: bool, mask: Tensor | None = None) -> Tensor:
    """The surer branch (rows,): of each row, or of all rows of an owner together; the first of equals.

    Of sequences it is the mean over the steps that count.
    """
    sure = torch.cat([certainty(logits[:, rows]) for rows in _parts(logits)], 1)
    if sure.dim() == 3:
        counts = torch.ones_like(sure[0]) if mask is None else mask.to(sure.dtype)
        sure = (sure * counts).sum(-1) / counts.sum(-1).clamp(min=1)
    return (mean_by_owner(sure.T, owner)[owner] if together else sure.T).argmax(1)


def mean_by_owner(values: Tensor, owner: Tensor) -> Tensor:
    """The mean of the rows (rows, K) of each owner, (owners, K) in float64; zero for an owner without rows."""
    owners = int(owner.max()) + 1 if len(owner) else 0
    total = torch.zeros(owners, values.shape[1], dtype=torch.float64).index_add_(0, owner, values.double())
    return total / torch.bincount(owner, minlength=owners).clamp(min=1)[:, None]


def chosen(logits: Tensor, choice: Tensor) -> Prediction:
    """What the chosen branch (rows,) of each row predicts."""
    logp, place = torch.empty_like(logits[0]), torch.arange(logits.shape[1])
    for rows in _parts(logits):
        logp[rows] = F.log_softmax(logits[choice[rows], place[rows]], -1)
    return Prediction(logp, choice)


def _parts(logits: Tensor) -> Iterator[slice]:
    """The rows of logits (K, rows, ..., classes) in parts, as a large vocabulary leaves no room for a second copy."""
    return parts(max(logits.shape[1], 1), logits.shape[2:-1].numel())


def step(
    server: Server, weights: Weights, memo: Any, delta: Weights | None, trained: Tensor, shares: Tensor | None = None
) -> tuple[Weights, Any]:
    """A server step that leaves the branches that nobody trained where they are, moments included.

    Args:
        server: the optimizer.
        weights: of the branched network.
        memo: the optimizer's.
        delta: the mean update over all participants; None is no step.
        trained: (K,) bool.
        shares: (K,) the share of the training rows behind each branch, to divide its update by; None does not.
    """
    if delta is None:
        return weights, memo
    params = {}
    for name, change in delta.params.items():
        k = branch_of(name)
        if k is None:
            params[name] = change
        elif trained[k]:
            params[name] = change if shares is None else change / shares[k]
    return server.step(weights, memo, Weights(params, delta.buffers))


def branch_update(
    fitted: Fitted, choice: int | Tensor, count: int, shard: Shard, weighting: Weighting
) -> dict[str, Any]:
    """What a client that has trained branches sends: its update, its loss, and which branches it trained.

    Args:
        fitted: what local training made.
        choice: the branch of the client, or the branch of each row (rows,).
        count: K.
        shard: the client's rows.
        weighting: what the client counts for.
    """
    weight = client_weight(shard, weighting)
    shares = F.one_hot(torch.as_tensor(choice), count).double().reshape(-1, count).mean(0)
    return {
        "delta": Weighted(fitted.delta, weight),
        "loss": Weighted(fitted.loss, len(shard)),
        "branches": Weighted(shares, weight),
    }


def step_branches(
    state: Moved, server: Server, got: Mapping[str, Any] | None, lam: float, average: BranchAverage = "participants"
) -> tuple[Moved, Facts]:
    """The server's step of the trunk and of the branches that an update says something about; none without an update.

    Those are the branches that were trained, and with lam > 0 all.

    Args:
        state: with the branched network's weights.
        server: the optimizer.
        got: the means over participants of what `branch_update` sends.
        lam: weight of the branches that a client does not train.
        average: by whose rows a branch's update is divided.
    """
    if got is None:
        return state, {}
    shares = got["branches"]
    divisor = torch.where(shares > 0, shares, 1.0) if average == "members" else None
    active = (shares > 0) | (lam > 0)
    weights, memo = step(server, state.weights, state.server, got["delta"], active, divisor)
    return replace(state, weights=weights, server=memo), {"loss": got["loss"], "branches": shares}


def by_surer_branch(task: Task, choose_per: ChoosePer) -> Any:
    """The `predict` of methods that know nothing of a row but what the branches say."""

    def predict(payload: Weights, memories: Any, x: Tensor, owner: Tensor) -> Prediction:
        logits, _ = read(task, payload, x)
        return chosen(logits, by_certainty(logits, owner, choose_per == "client", counted(task, x)))

    return predict
