"""MOON: FedAvg whose clients learn features like those of the received model, and unlike those of their last own one.

Li, He, Song: *Model-Contrastive Federated Learning*, CVPR 2021, Algorithm 1. With default options it follows Algorithm
1 with mu = 1 and tau = 0.5.

| symbol | meaning |
| --- | --- |
| `z` | features of a sample: the inputs of `layer` |
| `z_glob`, `z_prev` | by the received model, and by the client's last own model |
| `mu`, `tau` | weight and temperature of the contrast |

    l_con = -log( e^(cos(z, z_glob)/tau) / (e^(cos(z, z_glob)/tau) + e^(cos(z, z_prev)/tau)) )
    minimize  loss + mu * l_con

When to use it: clients differ in labels, and participate often enough that their last own model means something. A
client takes two more passes without gradients over its samples, and keeps a model.

Choices:
    - released code: mu is 1. The paper tunes it among 0.1, 1, 5 and 10; its best are 5, 1 and 1.
    - paper: features are the inputs of the output layer, after a projection head. A model without such a head contrasts
      the inputs of its last layer (ours).
    - ours: before it has a model of its own, a client takes the received one, and the term is constant. The released
      code has no negative in the first round, and contrasts a late joiner with its untrained network.
    - ours: `z_glob` and `z_prev` are computed once a round, in evaluation mode and on samples without augmentation.
    - ours: features that are no vectors are flattened; of sequences they are means over the steps that count.
    - paper: clients are weighted by their samples, as in FedAvg. With mu = 0 it is FedAvg.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedtide.algorithms.entry import Entry
from fedtide.cohorts import Arrivals, Cohort, OneModel, build_method
from fedtide.core.base import Algorithm, Answer, Moment, Shard, Weights
from fedtide.core.errors import refused
from fedtide.core.rng import Rng
from fedtide.core.weights import add
from fedtide.fields.types import NonNegative, Positive
from fedtide.learn import SGD, LocalTrainer, Server, Steps, Stepwise, Summed, Task, Train, Weighting, answer_update
from fedtide.learn.layers import HEAD, check_trunk, resolve_layer
from fedtide.learn.losses import Columns
from fedtide.learn.task import join_models, split_models, with_branches
from fedtide.learn.terms import divide_by_length, require_features
from fedtide.models.branched import WHOLE


def moon(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    mu: NonNegative = 1.0,
    tau: Positive = 0.5,
    layer: str = "head",
    server: Server = SGD(),
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "samples",
) -> Algorithm[OneModel]:
    """FedAvg with a model-contrastive term in the local loss.

    Sends the weights down and the update up, as a weighted sum; a client keeps its last own model.

    Args:
        mu: weight of the contrast.
        tau: temperature.
        layer: the layer whose inputs are the features; "head" is the last one.

    Raises:
        FedtideError: the model has no such layer, or none below it.
    """
    if layer == WHOLE:
        raise refused("layer", layer, "a layer of the model, such as 'head'")
    if layer == HEAD:
        check_trunk(task, "moon")  # constant features would make the term a constant, too
    layer = resolve_layer(task, layer)
    one = with_branches(task, layer, 1, key="layer")  # a network that also returns its features

    @Stepwise
    def train(w: Weights, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Steps[Answer | None]:
        received, previous = (join_models([model], layer) for model in (w, w if memory is None else memory["own"]))
        loss = Summed.of(task.loss, [Contrastive(mu, tau, previous)], one, received)
        fitted = yield Train(one, local, received, shard, moment, rng, loss=loss)
        if not fitted.steps:
            return None
        (delta,) = split_models(fitted.delta, w, layer, 1)
        return answer_update(delta, fitted.loss, shard, weighting, {"own": add(w, delta)})

    return build_method("moon", task, local, server, cohort, train, forward={"train": 2}, keeps=1)


@dataclass(frozen=True, eq=False)
class Contrastive:
    """Model-contrastive loss: features go towards those of the received model, away from the client's last own ones.

    Equation 3: `-mu * log( e^(s_g / tau) / (e^(s_g / tau) + e^(s_p / tau)) )`, with `s_g` and `s_p` the cosines of a
    row's features with those of the two models.

    Args:
        mu: weight in the loss.
        tau: temperature.
        previous: the client's last own model.

    >>> z, glob, own = (torch.tensor([v]) for v in ([1.0, 0.0], [2.0, 0.0], [0.0, 1.0]))
    >>> away = Contrastive.turn(glob, own)
    >>> round(Contrastive(1.0, 1.0, Weights({})).each(z, z, torch.tensor([0]), (away,)).item(), 4)  # log(1 + 1/e)
    0.3133
    """

    mu: float
    tau: float
    previous: Weights
    columns: ClassVar[int] = 1
    passes: ClassVar[int] = 2
    reads_features: ClassVar[bool] = True

    @property
    def alike(self) -> Hashable:
        """Terms of several clients are of one kind if this is equal."""
        return self.mu, self.tau

    def prepare(self, task: Task, received: Weights, shard: Shard) -> Columns:
        """Return `turn` of the features by the received and by the last own model, unaugmented, in evaluation mode."""
        models = received, self.previous
        return (self.turn(*(task.features(weights, shard.x) for weights in models)),)

    @staticmethod
    def turn(near: Tensor, far: Tensor) -> Tensor:
        """Return the difference (rows, d) of unit vectors, whose product with a unit vector is `s_p - s_g`."""
        return divide_by_length(far.flatten(1))[0] - divide_by_length(near.flatten(1))[0]

    def each(self, logits: Tensor, features: Tensor | None, y: Tensor, columns: Columns) -> Tensor:
        """Return the loss of every row."""
        z, _ = divide_by_length(require_features(features).flatten(1))
        return self.mu * F.softplus((z * columns[0]).sum(1) / self.tau)

    def graded(self, logits: Tensor, features: Any, y: Tensor, columns: Columns) -> tuple[Tensor, Tensor]:
        """Return the loss of every row, and its gradient by the features."""
        (away,), (z, length) = columns, divide_by_length(features)
        gap = (z * away).sum(-1, keepdim=True)
        slope = torch.addcmul(away, gap, z, value=-1).div_(length)  # the gradient of the gap
        gap = gap[..., 0] / self.tau
        return self.mu * F.softplus(gap), slope.mul_((gap.sigmoid() * (self.mu / self.tau))[..., None])


ENTRY = Entry("moon", moon, "weights down, update up", "global", keeps="its last own model", helps=("labels",))
