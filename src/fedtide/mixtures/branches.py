"""Multi-branch networks (one trunk, K branches, each client trains one branch): training, evaluation, server step.

Of each branch the server learns only the summed weight of the clients that trained it.

Zhu, Xu, Chen, Konečný, Hard, Goldstein: *Diurnal or Nocturnal?*, ICLR 2022, section 3; the names K, lambda and epsilon
are the paper's.
"""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedtide.core.base import Answer, Facts, Moment, Notes, Prediction, Reply, Shard, Weighted, Weights, Work, mean
from fedtide.core.rng import Rng
from fedtide.learn import Fitted, LocalTrainer, Weighting, client_weight
from fedtide.learn.device import to_cpu
from fedtide.learn.losses import Columns, CrossEntropy, Loss, is_stacked, known_part, mask_of, mean_of_each
from fedtide.learn.server import S, Server
from fedtide.learn.steps import Steps, Stepwise, Train, all_rows, same_weights
from fedtide.learn.target import CLASSES, Target
from fedtide.learn.task import Task, concat_passes, logits_and_features, parts, refuse_numbers
from fedtide.models.branched import branch_of

CERTAIN = "it answers by the branch that is more certain of a class"
"""Reason why methods that choose a branch by certainty refuse numbers."""

BranchDivisor = Annotated[
    Literal["participants", "members"],
    Field(description="""divisor of a branch's update: the samples of all "participants", or of its "members"."""),
]

ChoosePer = Annotated[
    Literal["row", "client"],
    Field(description='whether each "row" or each "client" picks the more certain branch at inference.'),
]


@dataclass(frozen=True)
class BranchLoss:
    """The base loss on the chosen branch plus cross-entropy with smoothed labels on the others.

    `loss(z_k, y) + lam * mean over the others of CE(z_other, (1 - eps) * onehot(y) + eps / C)`. So the other branches
    follow the moving trunk. Its gradient reaches the trunk too (no stop-gradient). With K = 1 there are no
    others. A base loss that is defined per label (`StackedLoss`), such as the re-weighted softmax, replaces CE.

    Args:
        base: the loss of the chosen branch.
        choice: the branch of the client, or the branch of each row (rows,).
        lam: weight of the other branches.
        eps: label smoothing of the other branches.
    """

    base: Loss
    choice: int | Tensor
    lam: float = 0.0
    eps: float = 0.0

    def prepare(self, shard: Shard) -> tuple[Any, Columns]:
        """Prepare the base loss; columns are those of the base loss, the choice of each row, and the mask."""
        shared, columns = self.base.prepare(shard)
        choice = () if isinstance(self.choice, int) else (self.choice,)
        return (shared, len(columns), self.choice), (*columns, *choice, *mask_of(shard))

    def value(self, outputs: tuple[Tensor, Tensor], y: Tensor, shared: Any, columns: Columns) -> Tensor:
        """Return the mean loss of a batch."""
        (logits, _), (shared, count, _) = outputs, shared
        columns, rest = columns[:count], columns[count:]
        if isinstance(self.choice, int):
            chosen, others = logits[self.choice], [z for k, z in enumerate(logits) if k != self.choice]
        else:
            k, rest, rows = rest[0], rest[1:], torch.arange(len(y), device=y.device)
            chosen, *others = (logits[(k + step) % len(logits), rows] for step in range(len(logits)))
        value = self.base.value(chosen, y, shared, columns)
        if self.lam == 0 or not others:
            return value
        # Columns of its own beside the mask, which `each` would take one by one, are not there for other branches.
        base: Any = self.base if is_stacked(self.base) and count <= len(rest) else CrossEntropy()
        parts = [mean_of_each(base, z, y, rest, shared, self.eps) for z in others]
        return value + self.lam * torch.stack(parts).mean()

    @property
    def alike(self) -> Hashable:
        """Losses of several clients are of one kind if this is equal, whatever the branches; None: they are not."""
        if not is_stacked(self.base):
            return None
        return id(self.base), self.lam, self.eps, isinstance(self.choice, int)

    def stacked(self, shared: Sequence[Any]) -> Any:
        """Stack the prepared values of several clients' base losses, with the branch of each client (clients,)."""
        prepared, _, choices = zip(*shared, strict=True)
        base: Any = self.base
        losses = base.stacked(prepared)
        return (losses, torch.tensor(choices)) if isinstance(self.choice, int) else losses

    def each(self, outputs: tuple[Tensor, Tensor], y: Tensor, shared: tuple[Any, Tensor]) -> Tensor:
        """Return the loss of every label, in the shape of `y`, of one of several clients."""
        (logits, _), (shared, choice) = outputs, shared
        base: Any = self.base
        k, rows = choice.expand(len(y)), torch.arange(len(y), device=y.device)
        chosen, *others = (logits[(k + step) % len(logits), rows] for step in range(len(logits)))
        value = base.each(chosen, y, shared)
        if self.lam == 0 or not others:
            return value
        return value + self.lam * torch.stack([base.each(z, y, shared, self.eps) for z in others]).mean(0)

    @property
    def graded(self) -> Callable[[Tensor, Tensor, tuple[Any, Tensor]], tuple[Tensor, Tensor]] | None:
        """Return the function for losses (clients, rows), and for gradients by logits (clients, rows, K, classes), if
        any."""
        graded = known_part(self.base, "graded")

        def both(logits: Tensor, y: Tensor, shared: tuple[Any, Tensor]) -> tuple[Tensor, Tensor]:
            (prepared, choice), count = shared, logits.shape[2]
            chosen = choice.reshape(len(y), -1, 1) == torch.arange(count, device=choice.device)
            share = logits.new_full(chosen.shape, self.lam / max(count - 1, 1)).masked_fill_(chosen, 1.0)
            eps = logits.new_full(chosen.shape, self.eps).masked_fill_(chosen, 0.0)
            losses, gradient = graded(logits, y[..., None].expand(*y.shape, count), prepared, eps)
            if self.lam == 0:  # idle branches may have diverged
                losses, gradient = losses.masked_fill_(~chosen, 0.0), gradient.masked_fill_(~chosen[..., None], 0.0)
            return (losses * share).sum(-1), gradient.mul_(share[..., None])

        return None if graded is None else both


@dataclass(frozen=True, eq=False)
class BranchLosses:
    """Plain cross-entropy (K, rows) of each branch on a client's samples, as of `losses_of`; a request."""

    task: Task
    weights: Weights
    shard: Shard

    @property
    def key(self) -> Hashable:
        """The model; samples with a mask and without go apart."""
        return BranchLosses, id(self.task), same_weights([self.weights]), self.shard.mask is None

    def run_single(self) -> Tensor:
        """Compute them for one client."""
        return losses_of(self.task, self.weights, self.shard)

    def run_batched(self, others: "Sequence[BranchLosses]") -> Sequence[Tensor]:
        """Compute them for several clients, from one pass over all of their samples; `others` has this one, too."""
        whole = all_rows([other.shard for other in others])
        return replace(self, shard=whole).run_single().split([len(other.shard) for other in others], 1)


def losses_of(task: Task, weights: Weights, shard: Shard) -> Tensor:
    """Return the plain cross-entropy (K, rows) of each branch on a client's samples, computed pass by pass."""
    losses, done = [], 0
    for logits, _ in task.outputs(weights, shard.x):
        rows = slice(done, done + logits.shape[1])
        mask = None if shard.mask is None else shard.mask[rows]
        batch = Shard(shard.x[rows], shard.y[rows], shard.ids[rows], mask=mask)
        losses.append(branch_losses(logits, batch, task.target))
        done = rows.stop
    return torch.cat(losses, 1)


def blend_branches(
    task: Task, weights: Weights, x: Tensor, pi: Tensor, others: Mapping[str, Tensor] | None = None, density: Any = None
) -> Prediction:
    """Predict log sum_k pi_k p_k (rows, ..., classes) in float64, and the labels under other shares.

    Of other targets predict what a mixture tells of them (`Target.mix`).

    Computed pass by pass, so that no other array is as large as the predictions.

    Args:
        task: a task with branches.
        weights: weights of the branched network.
        x: samples.
        pi: (rows, K) the shares of each row.
        others: other shares (rows, K), by name.
        density: (rows,) log-densities of the samples.
    """
    ways = {"": pi, **(others or {})}
    labels: dict[str, list[Tensor]] = {name: [] for name in others or {}}

    def mixed() -> Iterator[Tensor]:
        done = 0
        for logits, _ in task.outputs(weights, x):
            blended = torch.empty(logits.shape[1:], dtype=torch.float64)
            # float64 copies of all branches, twice: parts are smaller by that factor.
            for rows in parts(max(blended.shape[0], 1), 4 * len(logits) * blended.shape[1:-1].numel()):
                log_probs = task.target.read_outputs(logits[:, rows].double())
                for name, shares in ways.items():
                    share = shares[done : done + len(blended)][rows].clamp(min=1e-12).log().T
                    outputs = task.target.mix(log_probs, share.reshape(*share.shape, *[1] * (blended.dim() - 1)))
                    if name:
                        labels[name].append(task.target.predict_labels(outputs))
                    else:
                        blended[rows] = outputs
            done += len(blended)
            yield blended

    outputs = concat_passes(mixed(), len(x))
    return Prediction(outputs, pi.argmax(1), pi, {name: torch.cat(parts) for name, parts in labels.items()}, density)


def shares_of(memories: Sequence[Any], usual: Tensor) -> Tensor:
    """Return the shares "pi" that each client keeps (clients, ...), or the usual ones without any."""
    return torch.stack([usual if memory is None else memory["pi"] for memory in memories])


def branch_losses(logits: Tensor, shard: Shard, target: Target = CLASSES) -> Tensor:
    """Return the plain loss (K, rows) of each branch, given logits (K, rows, ..., classes)."""
    return torch.stack([target.losses(target.read_outputs(z), shard.y, shard.mask) for z in logits])


def certainty(logits: Tensor) -> Tensor:
    """Return the divergence of predictions from uniform: KL(p || uniform) = log C + sum p log p, (...,).

    >>> [round(c, 6) for c in certainty(torch.tensor([[0.0, 0.0], [100.0, 0.0]])).tolist()]
    [0.0, 0.693147]
    """
    logp = F.log_softmax(logits, -1)
    return math.log(logits.shape[-1]) + logp.exp().mul_(logp).sum(-1)


def counted_steps(task: Task, x: Tensor) -> Tensor | None:
    """Return the mask of steps that count (rows, steps): the model's own, else all but token 0; None for rows."""
    x, says = to_cpu(x), getattr(getattr(task.scratch.module, "model", None), "counted", None)
    if says is not None:
        return says(x)
    return None if x.is_floating_point() or x.dim() != 2 else x != 0


def most_certain(logits: Tensor, owner: Tensor, per_owner: bool, mask: Tensor | None = None) -> Tensor:
    """Return the most certain branch (rows,) of each row, or of all rows of an owner together; ties: the first.

    For sequences certainty is the mean over the steps that count.
    """
    sure = torch.cat([certainty(logits[:, rows]) for rows in _parts(logits)], 1)
    if sure.dim() == 3:
        counts = torch.ones_like(sure[0]) if mask is None else mask.to(sure.dtype)
        sure = (sure * counts).sum(-1) / counts.sum(-1).clamp(min=1)
    return (mean_by_owner(sure.T, owner)[owner] if per_owner else sure.T).argmax(1)


def mean_by_owner(values: Tensor, owner: Tensor) -> Tensor:
    """Return the mean of the rows (rows, K) of each owner, (owners, K) in float64; zero for an owner without rows."""
    owners = int(owner.max()) + 1 if len(owner) else 0
    total = torch.zeros(owners, values.shape[1], dtype=torch.float64).index_add_(0, owner, values.double())
    return total / torch.bincount(owner, minlength=owners).clamp(min=1)[:, None]


def predict_chosen(logits: Tensor, choice: Tensor, target: Target = CLASSES) -> Prediction:
    """Predict each row by its chosen branch (rows,)."""
    log_probs, place = torch.empty_like(logits[0]), torch.arange(logits.shape[1])
    for rows in _parts(logits):
        log_probs[rows] = target.read_outputs(logits[choice[rows], place[rows]])
    return Prediction(log_probs, choice)


def _parts(logits: Tensor) -> Iterator[slice]:
    """Split the rows of logits (K, rows, ..., classes) into parts: large vocabularies leave no room for a copy."""
    return parts(max(logits.shape[1], 1), logits.shape[2:-1].numel())


def step_trained(
    server: Server, weights: Weights, memo: Any, delta: Weights | None, trained: Tensor
) -> tuple[Weights, Any]:
    """Take a server step that leaves untrained branches unchanged, moments included.

    Args:
        weights: weights of the branched network.
        memo: the optimizer's memo.
        delta: the mean update over all participants; None means no step.
        trained: (K,) bool, mask of trained branches.
    """
    if delta is None:
        return weights, memo
    params = {name: change for name, change in delta.params.items() if (k := branch_of(name)) is None or trained[k]}
    return server.step(weights, memo, Weights(params, delta.buffers))


def map_branches(changes: Mapping[str, Tensor], function: Callable[[Tensor, int], Tensor]) -> dict[str, Tensor]:
    """Apply a function of (change, branch) to the changes of branches; those of shared layers stay."""
    return {name: value if (k := branch_of(name)) is None else function(value, k) for name, value in changes.items()}


def divide_branches(changes: Mapping[str, Tensor], shares: Tensor) -> dict[str, Tensor]:
    """Divide the mean change of each branch over all participants by the share (K,) that trained it, if any did.

    >>> change = {"head.copies.1.w": torch.tensor(2.0), "trunk.w": torch.tensor(2.0)}
    >>> divide_branches(change, torch.tensor([0.75, 0.25]))
    {'head.copies.1.w': tensor(8.), 'trunk.w': tensor(2.)}
    """
    divisor = torch.where(shares > 0, shares, 1.0)
    return map_branches(changes, lambda change, k: change / divisor[k])


def keep_chosen(delta: Weights, shares: Tensor) -> Weights:
    """Keep the update of the branches that a client trained if it trained no others.

    Weight decay moves the others, too, and all branches see all rows. So running statistics of a branch count in
    proportion to the share (K,) of the rows that chose it.
    """
    params = map_branches(delta.params, lambda change, k: change if shares[k] else torch.zeros_like(change))
    return Weights(params, map_branches(delta.buffers, lambda change, k: change * float(shares[k])))


def train_branch(
    task: Task,
    local: LocalTrainer,
    branches: int,
    lam: float,
    eps: float,
    choose: Callable[[Any, Shard, Moment], Steps[tuple[Weights, int | Tensor]]],
    weighting: Weighting,
) -> Work:
    """Build the question "train" of methods whose clients choose what they train, and do nothing else.

    Args:
        task: a task with branches.
        branches: number of branches, K.
        lam: weight of the branches that a client does not train.
        eps: label smoothing of these branches.
        choose: (payload, samples, moment) -> received weights, and branch of the client or of each sample; in steps.
        weighting: weight of a client.
    """

    @Stepwise
    def train(payload: Any, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Steps[Answer | None]:
        if not len(shard):
            return None
        weights, k = yield from choose(payload, shard, moment)
        fitted = yield Train(task, local, weights, shard, moment, rng, loss=BranchLoss(task.loss, k, lam, eps))
        return answer_branch(fitted, k, branches, shard, weighting, lam) if fitted.steps else None

    return train


def answer_branch(
    fitted: Fitted, choice: int | Tensor, count: int, shard: Shard, weighting: Weighting, lam: float
) -> Answer:
    """Build the answer of a client that has trained branches: its update, its loss, and the branches it trained.

    Args:
        fitted: result of local training.
        choice: the branch of the client, or the branch of each row (rows,).
        count: K.
        shard: the client's samples.
        weighting: weight of the client.
        lam: weight of the branches that a client does not train.
    """
    weight = client_weight(shard, weighting)
    shares = F.one_hot(torch.as_tensor(choice), count).double().reshape(-1, count).mean(0)
    delta = fitted.delta if lam else keep_chosen(fitted.delta, shares)
    total = {
        "delta": Weighted(delta, weight),
        "loss": Weighted(fitted.loss, len(shard)),
        "branches": Weighted(shares, weight),
    }
    return Answer(total, notes=Notes(branch=shares.argmax()), update=delta)


def step_branches(
    state: S, reply: Reply, *_: Any, server: Server, lam: float, normalize_by: BranchDivisor = "participants"
) -> tuple[S, Facts]:
    """Take the server's step of the trunk and of updated branches.

    Updated branches are those that were trained, and with lam > 0 all.

    Args:
        state: state with the branched network's weights.
        reply: sums over participants of `answer_branch`.
        lam: weight of the branches that a client does not train.
        normalize_by: divisor of a branch's update.
    """
    got = mean({name: reply.total[name] for name in ("delta", "loss", "branches")})
    shares, delta = got["branches"], got["delta"]
    params = divide_branches(delta.params, shares) if normalize_by == "members" else delta.params
    buffers = delta.buffers if lam else divide_branches(delta.buffers, shares)
    # The update of a branch that few clients trained may stay masked (`fedtide.wire.pipeline`), and is zero then.
    changed = {branch_of(name) for name, change in delta.params.items() if change.any()}
    active = (shares > 0) & torch.tensor([k in changed for k in range(len(shares))]) | (lam > 0)
    weights, memo = step_trained(server, state.weights, state.server, Weights(params, buffers), active)
    return replace(state, weights=weights, server=memo), {"loss": got["loss"], "branches": shares}


def predict_by_branch(task: Task, choose: Callable[[Any, Tensor, Tensor, Tensor, Tensor], Tensor]) -> Any:
    """Build the `predict` of methods that choose a branch.

    Args:
        task: a task with branches.
        choose: (payload, logits, features, samples, owner of each) -> branch of each sample.
    """

    def predict(payload: Any, memories: Any, x: Tensor, owner: Tensor) -> Prediction:
        logits, z = logits_and_features(task, getattr(payload, "weights", payload), x)
        return predict_chosen(logits, choose(payload, logits, z, x, owner), task.target)

    return predict


def predict_by_certainty(task: Task, choose_per: ChoosePer) -> Any:
    """Build the `predict` of methods that choose a branch by the certainty of its predictions.

    Raises:
        FedtideError: rows have no classes, of which a branch could be certain.
    """
    refuse_numbers(task, "algorithm", "one that chooses by certainty", CERTAIN)
    by_client = choose_per == "client"
    return predict_by_branch(
        task, lambda payload, logits, z, x, owner: most_certain(logits, owner, by_client, counted_steps(task, x))
    )
