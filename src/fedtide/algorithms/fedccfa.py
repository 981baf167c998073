"""FedCCFA: one trunk, and a head for each client, whose rows are shared class by class by clients of one concept.

Chen, Xue, Wang, Liu, Huang: *Classifier Clustering and Feature Alignment for Federated Learning under Distributed
Concept Drift*, NeurIPS 2024, Algorithm 1. With default options it follows Algorithm 1 with the paper's constants,
except for the choices below.

| symbol | meaning |
| --- | --- |
| `theta`, `phi_i` | trunk of all clients, and head of client i; row c of a head is for class c |
| `b_i` | balanced head of client i, for clustering alone |
| `a_(i,c)` | anchor: mean feature of class c of client i |
| `H_i`, `gamma`, `tau` | entropy of the client's labels, and the scale of the alignment, and its temperature |

    b_i     <- epochs of the received head on equally many samples of each class, with theta fixed
    phi_i   <- an epoch of SGD on f_i(theta, phi_i), with theta fixed
    theta_i <- epochs of SGD on f_i + (H_i / gamma) * cross-entropy(cos(z, a_i) / tau, y), with phi_i fixed
    theta   <- theta + mean of (theta_i - theta)
    for each class c
        d_ij <- mean over z of |cos(b_(i,c), b_(z,c)) - cos(b_(j,c), b_(z,c))|       MADD, z neither i nor j
        clusters by DBSCAN of d, with eps
        phi_(i,c), a_(i,c) <- their means over the cluster of i

When to use it: what a label means differs between clients or changes, for some classes and some clients. The server may
see single heads.

Choices:
    - paper: the trunk is a sum. Heads and anchors of single clients reach the server, because clusters are found there.
    - released code: members of a cluster have equal weights.
    - released code: the alignment begins in round 20 (`align_from`).
    - released code: the balanced head takes at most five samples of a class, and begins as the head of the first round.
    - ours: a client that lacks a class takes no part in the clusters of that class. It keeps its anchor of an earlier
      round. In the released code each client has all classes.
    - ours: in its first round a client trains the received head. The released code goes on from the balanced one.
    - ours: an anchor is the mean over the cluster. The released code adds up in the anchor of the first client, which
      moves it.
    - ours: options of the released code that are not here: known clusters, an L2 penalty, anchors of all clients
      (`clustered_protos`), and weights by counts of samples.
    - ours: a class without an anchor is left out of the alignment.
    - ours: with two clients MADD has no third one to compare with, and nothing is merged.
    - ours: the server sends merged heads and anchors in a second message. A client that misses it keeps its old ones.
    - ours: a client without a head is evaluated with the mean head of the last round.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedtide.algorithms.entry import Entry
from fedtide.clusters.clusterer import dbscan
from fedtide.clusters.distance import cosines
from fedtide.cohorts import Arrivals, Cohort, take_part, with_cohort
from fedtide.core.base import Algorithm, Answer, Facts, Fleet, Moment, Shard, Weighted, Weights, mean
from fedtide.core.rng import Rng
from fedtide.core.weights import sub
from fedtide.fields.types import NonNegative, Positive, StepCount, Whole
from fedtide.learn import SGD, LocalTrainer, Server, Steps, Stepwise, Task, Weighting, client_weight, step_server
from fedtide.learn.layers import pick_layers
from fedtide.learn.losses import Columns, CrossEntropy
from fedtide.learn.task import label_shares
from fedtide.learn.terms import divide_by_length, require_features
from fedtide.personal import by_own_weights
from fedtide.personal.heads import Headed, class_means
from fedtide.transforms.transform import refuse_all

REVEALED = "balanced", "head", "anchors", "classes"
"""Values of single clients that the server sees."""
FEW = 5
"""Rows of a class in the balanced sample, at most."""


@dataclass(frozen=True)
class State:
    """The model with the head of the first round, and the mean head (classes, width) of the last one."""

    weights: Weights
    server: Any
    head: Tensor
    cohort: Any = None


def fedccfa(
    task: Task,
    local: LocalTrainer = LocalTrainer(lr=0.01, epochs=5, batch_size=64, momentum=0.9, weight_decay=1e-5),
    head_epochs: StepCount = 1,
    head_lr: Positive = 0.1,
    balanced_epochs: StepCount = 5,
    eps: NonNegative = 0.1,
    gamma: Positive = 20.0,
    tau: Positive = 0.1,
    align_from: Whole = 20,
    server: Server = SGD(),
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "samples",
) -> Algorithm[State]:
    """One trunk, and heads that are shared class by class.

    Sends the model down, and the trunk's update up in a sum; the server sees the heads and anchors of every client.

    Args:
        task: model and loss; `example` set.
        local: training of the trunk.
        head_epochs: epochs of the head before that.
        head_lr: learning rate of the head.
        balanced_epochs: epochs of the balanced head.
        eps: largest distance of neighbors in a cluster.
        gamma: scale of the alignment; larger is weaker.
        tau: temperature of the alignment.
        align_from: first round with alignment.
    """
    net = Headed(task, "fedccfa")
    heads = replace(local, lr=head_lr, epochs=head_epochs, local_steps=None)
    balancing = replace(heads, epochs=balanced_epochs)

    def init(fleet: Fleet, rng: Rng) -> State:
        weights = task.init(rng)
        return State(weights, server.init(weights), net.head_of(weights), cohort.init(fleet))

    @Stepwise
    def train(w: Weights, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Steps[Answer | None]:
        few = shard.pick(draw_balanced(shard.y, rng.at("sample")))
        balanced = yield from net.train_head(balancing, w, few, moment, rng.at("balanced"))  # b_i
        begin = w if memory is None else net.with_head(w, memory["head"])
        headed = yield from net.train_head(heads, begin, shard, moment, rng.at("head"))  # phi_i
        entropy = float(torch.special.entr(label_shares(shard)).sum())  # H_i
        strength = 0.0 if memory is None or moment.round < align_from else entropy / gamma
        term = Alignment(tau, strength, *net.no_means if memory is None else (memory["anchors"], memory["classes"]))
        after, fitted = yield from net.train_trunk(local, headed, term, shard, moment, rng)  # theta_i
        if not fitted.steps:
            return None
        means, counts = class_means(fitted.features, shard.y, net.classes)  # a_i
        classes = (counts > 0).to(means.dtype)
        old, had = net.no_means if memory is None else (memory["anchors"], memory["classes"])
        shown = {"head": net.head_of(after), "anchors": torch.where(classes[:, None] > 0, means, old)}
        update = sub(after, w)
        delta = Weighted(pick_layers(update, net.is_trunk), client_weight(shard, weighting))
        rows = {"balanced": net.head_of(balanced), **shown, "classes": classes}
        holds = {**shown, "classes": torch.maximum(classes, had.to(classes))}
        return Answer({"delta": delta, "loss": Weighted(fitted.loss, len(shard))}, rows, memory=holds, update=update)

    def keep(merged: Any, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        return None if memory is None else Answer({}, memory={**memory, **merged})

    def round(state: State, fleet: Fleet, rng: Rng) -> tuple[State, Facts]:
        state, reply = take_part(cohort, fleet, state, rng, serve, state.weights, reveal=REVEALED)
        if reply.total is None:
            return state, {}
        got = mean(reply.total)
        state, facts = step_server(state, server, got)  # theta
        balanced, head, anchors, classes = (reply.rows[name] for name in REVEALED)
        head, anchors = merge(balanced, head, anchors, classes, eps)
        merged = [{"head": phi, "anchors": a} for phi, a in zip(head, anchors, strict=True)]
        fleet.ask("keep", reply.clients, merged, slot=torch.arange(len(merged)), slots=len(merged))
        return replace(state, head=head.mean(0)), facts

    def serve(state: State, clients: Tensor) -> tuple[Weights, None]:
        return net.with_head(state.weights, state.head), None

    def trained(rows: Tensor) -> Tensor:
        few = torch.minimum(rows, torch.full_like(rows, FEW * net.classes))
        return local.samples(rows) + heads.samples(rows) + balanced_epochs * few

    predict = by_own_weights(task, lambda w, memory: net.with_head(w, memory["head"]))
    algorithm = Algorithm("fedccfa", init, {"train": train, "keep": keep}, round, serve, predict)
    refuses = refuse_all("each client has a head of its own")
    traits: dict[str, Any] = {"reveals": REVEALED, "refuses": refuses, "keeps": 2}
    return with_cohort(algorithm, cohort, task, local, forward={"train": 1, "keep": 0}, trained=trained, **traits)


def draw_balanced(y: Tensor, rng: Rng) -> Tensor:
    """Draw the positions of equally many rows of each class, at most five, as many as the rarest class has.

    >>> draw_balanced(torch.tensor([1, 0, 1, 1, 2, 2, 0]), Rng(0)).shape
    torch.Size([6])
    """
    draw, sizes = rng.numpy(), y.unique(return_counts=True)[1].tolist()
    rows = np.split(y.argsort(stable=True).numpy(), np.cumsum(sizes)[:-1]) if sizes else []  # of each class
    count = min([FEW, *sizes])
    picked = [of_class[draw.permutation(len(of_class))[:count]] for of_class in rows]
    return torch.from_numpy(np.sort(np.concatenate([*picked, np.empty(0, np.int64)])))


def madd(rows: Tensor) -> Tensor:
    """Return how differently each two of n rows lie to all others (n, n): the mean absolute difference of cosines.

    Infinite for two rows, because there are no others.

    >>> madd(torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]])).tolist()
    [[0.0, 0.0, 1.0], [0.0, 0.0, 1.0], [1.0, 1.0, 0.0]]
    """
    cos = cosines(rows.double())
    itself = cos.diagonal()
    pair = (itself[:, None] - cos).abs() + (itself - cos).abs()  # z = i, and z = j
    far = (torch.cdist(cos, cos, p=1.0) - pair).clamp(min=0) / (len(rows) - 2) if len(rows) > 2 else cos + torch.inf
    return far.fill_diagonal_(0.0)


def merge(balanced: Tensor, head: Tensor, anchors: Tensor, classes: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return heads (n, C, width) and anchors (n, C, d) of n clients after the mean over each cluster of each class.

    Args:
        balanced: (n, C, width) balanced heads.
        head: (n, C, width).
        anchors: (n, C, d).
        classes: (n, C) 1 where a client has the class.
        eps: largest distance of neighbors.
    """
    head, anchors = head.clone(), anchors.clone()
    for c in range(classes.shape[1]):
        holders = classes[:, c].nonzero().flatten()
        if not len(holders):
            continue
        cluster = dbscan(madd(balanced[holders, c]), eps, 1)
        for k in range(int(cluster.max()) + 1):
            members = holders[cluster == k]
            for values in (head, anchors):
                values[members, c] = values[members, c].double().mean(0).to(values.dtype)
    return head, anchors


@dataclass(frozen=True, eq=False)
class Alignment:
    """Contrast of features with the anchors of all classes: towards that of the row's class, away from the others.

    It is the cross-entropy of `cos(z, a_c) / tau`, over the classes that have an anchor.

    Args:
        tau: temperature.
        strength: weight in the loss.
        anchors: (C, d).
        classes: (C,) 1 where there is an anchor.
    """

    tau: float
    strength: float
    anchors: Tensor
    classes: Tensor
    columns: ClassVar[int] = 3
    passes: ClassVar[int] = 0
    reads_features: ClassVar[bool] = True

    @property
    def alike(self) -> float:
        """Terms of several clients are of one kind if this is equal."""
        return self.tau

    def prepare(self, task: Task, received: Weights, shard: Shard) -> Columns:
        """Return anchors of length one, next to minus infinity where there is none, and weights of rows, 0 there."""
        n, least = len(shard), torch.finfo(self.anchors.dtype).min / 4
        weight = self.strength * self.classes[shard.y]
        toward, _ = divide_by_length(self.anchors)
        absent = (self.classes == 0).to(toward.dtype) * least
        return toward.expand(n, *toward.shape), absent.expand(n, len(absent)), weight

    def each(self, logits: Tensor, features: Tensor | None, y: Tensor, columns: Columns) -> Tensor:
        """Return the loss of every row."""
        anchors, absent, weight = columns
        cos = F.cosine_similarity(require_features(features)[:, None], anchors, dim=-1) / self.tau
        return weight * F.cross_entropy(cos + absent, y, reduction="none")

    def graded(self, logits: Tensor, features: Any, y: Tensor, columns: Columns) -> tuple[Tensor, Tensor]:
        """Return the loss of every row, and its gradient by the features."""
        (toward, absent, weight), (z, length) = columns, divide_by_length(features)
        toward = toward[..., 0, :, :]  # all rows of a client have the same anchors
        cos = torch.bmm(z, toward.transpose(1, 2))
        losses, by_cos = CrossEntropy().graded(torch.add(absent, cos, alpha=1 / self.tau), y, None)
        slope = torch.bmm(by_cos, toward).addcmul_((by_cos * cos).sum(-1, keepdim=True), z, value=-1)
        return losses * weight, slope.mul_((weight / self.tau)[..., None] / length)


ENTRY = Entry(
    "fedccfa", fedccfa, "weights down, the trunk's update up, and a head and anchors both ways", "personal",
    reveals=REVEALED, keeps="its head and its anchors", helps=("meaning", "drift"),
    exempt={"numbers": "it cannot predict numbers, because its heads are merged by class"},
)  # fmt: skip
