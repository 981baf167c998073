"""FedRC: FedEM whose components are concepts, because each sample is judged by how usual its label is for a component.

Guo, Tang, Lin: *FedRC: Tackling Diverse Distribution Shifts Challenge in Federated Learning by Robust Clustering*, ICML
2024, Algorithm 1. With default options it follows Algorithm 1 with the means of FedEM.

| symbol | meaning |
| --- | --- |
| `omega_i` | client i's mixture of the K components (K,), kept on the client |
| `gamma_k(s)` | posterior of component k for sample s with the label y_s |
| `C_k,y` | share of label y among the samples of component k, over the clients |

    gamma_k(s) = softmax_k( log omega_ik - loss_k(s) - log C_k,y_s )
    omega_ik   = mean_s gamma_k(s)
    minimize (1/B) sum_{s in batch} sum_k gamma_k(s) * loss_k(s)
    C_k,y      = sum_{s: y_s = y} gamma_k(s) / sum_s gamma_k(s)            over all samples of the clients that answered

A component that is good at a label because it has seen little else gains nothing by that label. So a difference in
labels alone does not separate clients. Samples with the same features and different labels go to different components.

When to use it: the meaning of labels differs between clients or changes, and so do labels and features. If labels alone
differ, its K components learn the same, for K times the work of FedAvg.

Choices:
    - ours: C is of the participants of the last round; the paper's is of all clients.
    - ours: of each label a component has at least 1e-8 of all samples; in the released code it has at least 1e-8
      samples. A component without samples has no effect. A label without samples leans to the largest component,
      because its share there is the smallest.
    - ours: C begins equal, so the first round is FedEM's. C is sent and kept times the number of labels.
    - ours: for sequences log C is the mean over the steps that count.
    - released code: `omega` weights the probabilities of the components at inference, as in FedEM.
    - ours: a client adapts `omega` before evaluation by `e_steps` on its training samples.
    - ours: batches, weights and repeated layers are as in FedEM.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedtide.algorithms.entry import Entry
from fedtide.cohorts import Arrivals, Cohort, play_rounds
from fedtide.core.base import Algorithm, Answer, Facts, Fleet, Moment, Reply, Shard, Weighted, Weights, mean
from fedtide.core.rng import Rng
from fedtide.fields.types import ModelCount, StepCount
from fedtide.learn import SGD, LocalTrainer, Server, Steps, Stepwise, Task, Weighting
from fedtide.learn.task import classes_of
from fedtide.mixtures.em import Components
from fedtide.models.branched import WHOLE

LEAST_SHARE = 1e-8
"""Smallest share of a label in a component."""


@dataclass(frozen=True)
class State:
    """The network, the optimizer's memo, and the shares of labels times their number in each component (K, classes)."""

    weights: Weights
    server: Any
    labels: Tensor
    cohort: Any = None


@dataclass(frozen=True)
class Sent:
    """Payload of participants: the network, and the shares of labels times their number (K, classes)."""

    weights: Weights
    labels: Tensor


def fedrc(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    components: ModelCount = 3,
    component_layer: str = WHOLE,
    e_steps: StepCount = 5,
    server: Server = SGD(),
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "samples",
) -> Algorithm[State]:
    """Robust clustering: FedEM with posteriors that count for how usual a label is.

    Sends the network and shares of labels down, and the sums of both up.

    Args:
        task: model and loss, which must be defined per label; components are weighted by plain cross-entropy.
        components: number of components, K.
        component_layer: the layer to repeat; "*" repeats the whole network, as in the paper.
        e_steps: E-steps of a client before evaluation.

    Raises:
        FedtideError: the loss has only a mean.
    """
    em, classes = Components("FedRC", task, local, components, component_layer, e_steps, weighting), classes_of(task)

    def init(fleet: Fleet, rng: Rng) -> State:
        weights, labels = em.init(rng), torch.ones(components, classes, dtype=torch.float64)
        return State(weights, server.init(weights), labels, cohort.init(fleet))

    def penalty(payload: Sent, shard: Shard) -> Tensor:
        """Return log C_k,y of each row (rows, K)."""
        return row_labels(shard, classes) @ payload.labels.log().T

    @Stepwise
    def train(payload: Sent, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Steps[Answer | None]:
        if not len(shard):
            return None
        joints, gamma = yield from em.posteriors(payload.weights, memory, shard, penalty(payload, shard))
        labels = Weighted(gamma.T @ row_labels(shard, classes) / len(shard), len(shard))
        return (yield from em.train(payload.weights, joints, gamma, shard, moment, rng, labels=labels))

    def step(state: State, reply: Reply, moment: Moment, rng: Rng) -> tuple[State, Facts]:
        got = mean(reply.total)
        state, facts = em.step(state, server, got)
        shares = F.normalize(got["labels"].clamp(min=LEAST_SHARE), p=1, dim=1)  # C_k,y
        return replace(state, labels=shares * classes), facts

    def adapt(payload: Sent, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        return em.adapt(payload.weights, memory, shard, penalty(payload, shard))

    def predict(payload: Sent, *rows: Any) -> Any:
        return em.predict(payload.weights, *rows)

    round, serve = play_rounds(cohort, step, lambda state: Sent(state.weights, state.labels))
    return em.build(Algorithm("fedrc", init, {"train": train}, round, serve, predict, adapt), cohort, sends=(Sent,))


def row_labels(shard: Shard, classes: int) -> Tensor:
    """Return the share of each class among the labels of each row (rows, classes) float64; of sequences among the steps
    that count.

    >>> row_labels(Shard(torch.zeros(2, 1), torch.tensor([2, 0]), torch.arange(2)), 3).tolist()
    [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    """
    y = shard.y if shard.bins is None else shard.bins
    y = y if y.dim() > 1 else y[:, None]
    counted = torch.ones_like(y, dtype=torch.float64) if shard.mask is None else shard.mask.double()
    shares = torch.zeros(len(shard), classes, dtype=torch.float64)
    shares.scatter_add_(1, y.where(counted > 0, 0), counted)
    return shares / counted.sum(1, keepdim=True).clamp(min=1)


ENTRY = Entry(
    "fedrc", fedrc, "K models and shares of labels down, sums of both up", "mixture", keeps="its mixture",
    helps=("meaning", "drift"),
)  # fmt: skip
