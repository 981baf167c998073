"""FedRoD: one network for all with a balanced loss, and beside its head a second one that each client keeps.

Chen, Chao: *On Bridging Generic and Personalized Federated Learning for Image Classification*, ICLR 2022, with the
linear personalized head. With nothing but its name it plays the paper's balanced softmax.

| symbol | meaning |
| --- | --- |
| `theta` | the trunk, with features z = f(x; theta) |
| `psi`, `phi_m` | generic head G of all clients, and personalized head P of client m |
| `n_(m,c)` | number of samples of class c of client m |

    theta, psi <- a step on  -log softmax_y(G(z) + log n_m)                 sent, and averaged as in FedAvg
    phi_m      <- a step on  -log softmax_y(G(z) + P(z))                    kept; no gradient for theta and psi

When to use it: clients hold few of the classes. One model for all and one for each client come of the same training.

Choices:
    - paper: both steps are taken on the same batches with the same optimizer. The recorded loss is the sum of both.
    - ours: P begins at zero; in PFLlib it begins with a copy of G. A client that never trained is served by G alone.
    - paper: G alone is judged beside the personalized predictions, as "generic head".
    - paper: P has the form of the last layer of the network.
    - ours: the loss of P is that of the method, cross-entropy by default.
    - paper: a class that a client does not hold gets no gradient in G. A client of one class changes only its P.
    - paper: clients are weighted by their samples.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedtide.algorithms.entry import Entry
from fedtide.cohorts import Arrivals, Cohort, OneModel, build_method
from fedtide.core.base import Algorithm, Answer, Moment, Prediction, Shard, Weighted, Weights
from fedtide.core.errors import refused
from fedtide.core.rng import Rng
from fedtide.core.trees import all_finite
from fedtide.core.weights import add, renamed, zeros_like
from fedtide.learn import SGD, LocalTrainer, Server, Steps, Stepwise, Task, Train, Weighting, client_weight
from fedtide.learn.layers import last_layer, pick_layers, put_layers
from fedtide.learn.losses import WSM, Columns, mask_of, mean_of_each, weighs_rows
from fedtide.learn.target import CLASSES
from fedtide.personal import OWN_MODELS, by_own_weights


def fedrod(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    server: Server = SGD(),
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "samples",
) -> Algorithm[OneModel]:
    """FedAvg with a balanced loss, and a second head for each client.

    Sends the weights of one head down and their update up, as a weighted sum; clients keep the other head.
    """
    if task.target != CLASSES:
        raise refused("algorithm", "fedrod", "another one if rows have no classes", "its loss counts classes")
    weighs_rows(task.loss, "FedRoD")
    if local.terms:
        raise refused("local.terms", [term.kind for term in local.terms], "none", "the method trains two heads at once")
    layer = last_layer(task)
    both = replace(task, build=lambda: Heads(task.build(), layer), begin=None, init_layers=None)
    both = replace(both, loss=TwoLosses(task.loss))
    names = {name: f"model.{name}" for name in (*task.scratch.names, *task.scratch.weights.buffers)}
    back = {new: old for old, new in names.items()}
    zero = zeros_like(pick_layers(both.scratch.weights, is_own))

    def join(w: Weights, memory: Any) -> Weights:
        return put_layers(renamed(w, names), zero if memory is None else memory["own"])

    @Stepwise
    def train(w: Weights, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Steps[Answer | None]:
        start = join(w, memory)
        fitted = yield Train(both, local, start, shard, moment, rng)
        if not fitted.steps:
            return None
        delta = renamed(fitted.delta, back)
        next_own = pick_layers(add(start, fitted.delta), is_own)
        total = {"delta": Weighted(delta, client_weight(shard, weighting)), "loss": Weighted(fitted.loss, len(shard))}
        return Answer(total, memory={"own": next_own} if all_finite(next_own) else None, update=delta)

    def predict(w: Weights, memories: Sequence[Any], x: Tensor, owner: Tensor) -> Prediction:
        prediction: Prediction = by_own_weights(both, lambda _, memory: join(w, memory))(
            join(w, None), memories, x, owner
        )
        return prediction

    traits: dict[str, Any] = {"keeps": 1, "refuses": OWN_MODELS}
    plain = build_method("fedrod", task, local, server, cohort, train, **traits)
    return replace(plain, predict=predict, others={"generic head": plain})


def is_own(name: str) -> bool:
    """Tell whether a parameter is one of P."""
    return name.startswith("own.")


class Heads(nn.Module):
    """A model, and beside its last layer G a head P of its own form on the same features."""

    def __init__(self, model: nn.Module, layer: str) -> None:
        super().__init__()
        generic, self.features = model.get_submodule(layer), list[Tensor]()
        self.model, self.own = model, copy.deepcopy(generic)
        generic.register_forward_pre_hook(lambda _, inputs: self.features.append(inputs[0]))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of G and P side by side in training, and else their sum."""
        generic = self.model(x)
        personal = self.own(self.features.pop().detach())  # the loss of P does not reach the trunk
        return torch.cat([generic, personal], -1) if self.training else generic + personal


@dataclass(frozen=True)
class TwoLosses:
    """The balanced softmax of G, and the loss of G + P, whose gradient reaches P alone.

    Args:
        base: loss of G + P.
        balanced: loss of G.
    """

    base: Any
    balanced: WSM = WSM()

    def prepare(self, shard: Shard) -> tuple[Any, Columns]:
        """Prepare both losses; the only column is the mask of sequences."""
        return tuple(loss.prepare(shard)[0] for loss in (self.balanced, self.base)), mask_of(shard)

    def value(self, outputs: Tensor, y: Tensor, shared: Any, columns: Columns) -> Tensor:
        """Return the mean sum of both over the labels that count."""
        return mean_of_each(self, outputs, y, columns, shared, 0.0)

    def each(self, outputs: Tensor, y: Tensor, shared: Any, eps: float = 0.0) -> Tensor:
        """Return the sum of both for every label, given the logits of G and P side by side."""
        generic, personal = outputs.chunk(2, -1)
        both = generic.detach() + personal
        return self.balanced.each(generic, y, shared[0], eps) + self.base.each(both, y, shared[1], eps)

    def stacked(self, shared: Sequence[Any]) -> tuple[Any, ...]:
        """Stack the prepared values of several clients."""
        balanced, base = zip(*shared, strict=True)
        return self.balanced.stacked(balanced), self.base.stacked(base)


ENTRY = Entry(
    "fedrod", fedrod, "weights down, update up", "personal", keeps="a second head", helps=("labels",),
    exempt={"numbers": "its loss counts classes"},
)  # fmt: skip
