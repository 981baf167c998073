"""FedPAC: one trunk whose features are pulled to common means by class, and heads that clients share as it helps each.

Xu, Tong, Huang: *Personalized Federated Learning with Feature Alignment and Classifier Collaboration*, ICLR 2023,
Algorithm 1. With default options it follows Algorithm 1 with the constants of the released code, except for the choices
below.

| symbol | meaning |
| --- | --- |
| `phi`, `g_i` | trunk of all clients, and head of client i |
| `c_y` | mean feature of class y over all participants |
| `h_i` | mean features of client i by class, times the share of the class, with the received trunk |
| `V_i` | variance of the client's features around that, by its number of samples |
| `alpha_ij` | share of client j's head in that of client i |

    g_i     <- an epoch of SGD on f_i(phi, g_i), with phi as it was received
    phi_i   <- epochs of SGD on f_i + lambda * mean over coordinates of (z - c_y)^2, with g_i fixed
    phi     <- phi + mean of (phi_i - phi)
    c_y     <- mean of the features of phi_i, by numbers of samples of class y
    alpha_i <- argmin sum_j alpha_j^2 V_j + ||h_i - sum_j alpha_j h_j||^2,  alpha_j >= 0, sum_j alpha_j = 1
    g_i     <- sum_j alpha_ij g_j

When to use it: clients hold few samples, and some of them hold similar ones. The server may see single heads and means.

Choices:
    - paper: the trunk and the means by class are sums. Heads, `h_i` and `V_i` of single clients reach the server,
      because the mixture is found there.
    - released code: the pull begins in the second round. A class that no participant of the last round held pulls to
      the client's own mean, with the received trunk.
    - released code: shares below 0.001 count as zero. Other shares are scaled to a sum of one.
    - ours: the quadratic program is solved exactly, as least squares with shares that are not negative.
    - ours: the server sends mixed heads in a second message. A client that misses it keeps its old head.
    - ours: a client without a head begins with the mean head of the last round, and is evaluated with it.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedtide.algorithms.entry import Entry
from fedtide.cohorts import Arrivals, Cohort, take_part, with_cohort
from fedtide.core.base import Algorithm, Answer, Facts, Fleet, Moment, Shard, Weighted, Weights, mean, shared_weights
from fedtide.core.rng import Rng
from fedtide.core.weights import sub
from fedtide.fields.types import NonNegative, Positive, StepCount
from fedtide.learn import SGD, LocalTrainer, Server, Steps, Stepwise, Task, Weighting, client_weight, step_server
from fedtide.learn.layers import pick_layers
from fedtide.learn.losses import Columns
from fedtide.learn.terms import require_features
from fedtide.personal import by_own_weights
from fedtide.personal.heads import Headed, class_means
from fedtide.transforms.transform import refuse_all

REVEALED = "head", "moments", "variance"
"""Values of single clients that the server sees."""
TINY = 1e-9
"""Less than the mean number of rows of any class that somebody holds."""
LEAST_SHARE = 1e-3
"""Share of a head below which it is zero."""


@dataclass(frozen=True)
class State:
    """The model with the mean head of the last round, and the means by class (classes, d) with their presence."""

    weights: Weights
    server: Any
    means: Tensor
    classes: Tensor
    cohort: Any = None


@dataclass(frozen=True)
class Sent:
    """The model, and means by class with their presence, as clients receive them."""

    weights: Weights
    means: Tensor
    classes: Tensor


def fedpac(
    task: Task,
    local: LocalTrainer = LocalTrainer(lr=0.01, epochs=5, batch_size=50, momentum=0.5, weight_decay=5e-4),
    head_epochs: StepCount = 1,
    head_lr: Positive = 0.1,
    lam: NonNegative = 1.0,
    server: Server = SGD(),
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "samples",
) -> Algorithm[State]:
    """One trunk, and for each client a mixture of heads.

    Sends the model and means by class down, and the trunk's update and the client's means up in sums. The server sees
    the head of every client, and statistics of its features.

    Args:
        task: model and loss; `example` set.
        local: training of the trunk.
        head_epochs: epochs of the head before that.
        head_lr: learning rate of the head.
        lam: strength of the pull of features to the means of their classes.
    """
    net = Headed(task, "fedpac")
    heads = replace(local, lr=head_lr, epochs=head_epochs, local_steps=None)

    def init(fleet: Fleet, rng: Rng) -> State:
        weights = task.init(rng)
        return State(weights, server.init(weights), *net.no_means, cohort.init(fleet))

    @Stepwise
    def train(sent: Sent, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Steps[Answer | None]:
        if not len(shard):
            return None
        w = sent.weights
        begin = w if memory is None else net.with_head(w, memory["head"])
        z = yield net.features_of(begin, shard.x)
        before, counts = class_means(z, shard.y, net.classes)
        moments = before * (counts / len(shard))[:, None].to(z.dtype)  # h_i
        variance = (z.double().square().sum() / len(shard) - moments.double().square().sum()) / len(shard)  # V_i
        headed = yield from net.train_head(heads, begin, shard, moment, rng.at("head"))
        strength = lam if sent.classes.any() else 0.0
        target = torch.where(sent.classes[:, None] > 0, sent.means, before)
        after, fitted = yield from net.train_trunk(local, headed, Pull(strength, target), shard, moment, rng)
        if not fitted.steps:
            return None
        means, _ = class_means(fitted.features, shard.y, net.classes)
        update, head = sub(after, w), net.head_of(after)
        delta = Weighted(pick_layers(update, net.is_trunk), client_weight(shard, weighting))
        sums = {"features": Weighted(means * counts[:, None].to(means.dtype)), "counts": Weighted(counts)}
        total = {"delta": delta, **sums, "loss": Weighted(fitted.loss, len(shard))}
        rows = {"head": head, "moments": moments, "variance": variance.reshape(1)}
        return Answer(total, rows, memory={"head": head}, update=update)

    def keep(mixed: Any, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Answer:
        return Answer({}, memory=mixed)

    def round(state: State, fleet: Fleet, rng: Rng) -> tuple[State, Facts]:
        sent = Sent(state.weights, state.means, state.classes)
        state, reply = take_part(cohort, fleet, state, rng, shared_weights, sent, reveal=REVEALED)
        if reply.total is None:
            return state, {}
        got = mean(reply.total)
        state, facts = step_server(state, server, got)  # phi
        classes = (got["counts"] > 0).to(state.classes.dtype)
        means = (got["features"] / got["counts"].clamp(min=TINY)[:, None]).to(state.means.dtype)  # c_y
        head = reply.rows["head"]  # g_i
        share = mix_shares(reply.rows["moments"], reply.rows["variance"][:, 0]).to(head.dtype)
        mixed = [{"head": g} for g in torch.einsum("ij,jcw->icw", share, head)]
        fleet.ask("keep", reply.clients, mixed, slot=torch.arange(len(mixed)), slots=len(mixed))
        weights = net.with_head(state.weights, head.mean(0))
        return replace(state, weights=weights, means=means, classes=classes), facts

    def trained(rows: Tensor) -> Tensor:
        return local.samples(rows) + heads.samples(rows)

    predict = by_own_weights(task, lambda w, memory: net.with_head(w, memory["head"]))
    algorithm = Algorithm("fedpac", init, {"train": train, "keep": keep}, round, shared_weights, predict)
    refuses = refuse_all("each client has a head of its own")
    traits: dict[str, Any] = {"reveals": REVEALED, "sends": (Sent,), "refuses": refuses, "keeps": 1}
    return with_cohort(algorithm, cohort, task, local, forward={"train": 2, "keep": 0}, trained=trained, **traits)


def mix_shares(moments: Tensor, variance: Tensor) -> Tensor:
    """Return the share (n, n) of each client's head in that of each client, by a quadratic program.

    Row i minimizes `sum_j a_j^2 V_j + ||h_i - sum_j a_j h_j||^2 = ||M a||^2` over shares. Without the sum of one, b
    that minimizes `||M b||^2 + (sum(b) - 1)^2` is a multiple of it: for a given direction both grow with `||M a||^2`.

    Args:
        moments: (n, classes, d) h.
        variance: (n,) V.

    >>> share = mix_shares(torch.tensor([[[0.0]], [[0.0]], [[99.0]]]), torch.tensor([1.0, 3.0, 1.0]))
    >>> [round(a, 6) for a in share[0].tolist()]
    [0.75, 0.25, 0.0]
    """
    from scipy.optimize import nnls  # slow to import

    h, n = moments.double().flatten(1).numpy(), len(moments)
    gram, out = h @ h.T, np.zeros((n, n))
    for i in range(n):
        bias = gram + gram[i, i] - gram[i] - gram[:, [i]]
        size, direction = np.linalg.eigh(bias + np.diag(variance.double().clamp(min=0).numpy()))
        root = np.sqrt(size.clip(0))[:, None] * direction.T
        b, _ = nnls(np.vstack([root, np.ones(n)]), np.append(np.zeros(n), 1.0))
        a = np.where(b / b.sum() >= LEAST_SHARE, b, 0.0)
        out[i] = a / a.sum()
    return torch.from_numpy(out)


@dataclass(frozen=True, eq=False)
class Pull:
    """A pull of features towards the mean of the row's class: the mean over coordinates of (z - c_y)^2.

    Args:
        strength: weight in the loss.
        means: (C, d).
    """

    strength: float
    means: Tensor
    columns: ClassVar[int] = 2
    passes: ClassVar[int] = 0
    reads_features: ClassVar[bool] = True
    alike: ClassVar[bool] = True

    def prepare(self, task: Task, received: Weights, shard: Shard) -> Columns:
        """Return the mean of each row's class, and the strength."""
        return self.means[shard.y], self.means.new_full((len(shard),), self.strength)

    def each(self, logits: Tensor, features: Tensor | None, y: Tensor, columns: Columns) -> Tensor:
        """Return the value of every row."""
        target, strength = columns
        return strength * (require_features(features) - target).square().mean(1)

    def graded(self, logits: Tensor, features: Any, y: Tensor, columns: Columns) -> tuple[Tensor, Tensor]:
        """Return the value of every row, and its gradient by the features."""
        target, strength = columns
        gap = features - target
        return strength * gap.square().mean(-1), gap.mul_((strength * (2 / gap.shape[-1]))[..., None])


ENTRY = Entry(
    "fedpac", fedpac, "weights and means by class down, the trunk's update and such means up, and a head both ways",
    "personal", reveals=REVEALED, keeps="its head", helps=("labels", "groups"),
    exempt={"numbers": "it cannot predict numbers, because it pulls features to the means of classes"},
)  # fmt: skip
